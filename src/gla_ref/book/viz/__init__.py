"""Explorables: pictures to move, drawn by tested Python from the package's own numbers (chapters 1 to 25).

Each module holds one function that returns an :class:`Explorable`. Python draws every state of the
picture; the page's script only swaps one drawing for another, so no formula exists twice.
"""

from ._explorable import WIDTH, Choice, Explorable, Frame, Key, Question, Slider

__all__ = ["WIDTH", "Choice", "Explorable", "Frame", "Key", "Question", "Slider"]
