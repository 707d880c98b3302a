"""The parts of :mod:`gla_ref.context_parallel`: tokens of one sequence split over ranks (chapter 25).

A call meets its files in this order::

    calls.py        the call: forward and backward, in the three steps that context_parallel names
    _kinds.py       its arguments, checked; agreement.py asks whether all ranks make the same call
    planning.py     which exchange, how many segments and why, by the times of links.py
    segments.py     which packed sequences begin, end or go on at a border
    maps.py         step 1: the map of a piece, S -> M S + X
    exchange.py     step 2: the state that comes in, by an all-gather or a pipeline

A model split over ranks is in language_model.py, and what its other layers ask of neighbours in pieces.py.
"""
