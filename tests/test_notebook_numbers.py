"""Numbers as the chapters' sentences have them."""

from gla_ref.notebook import sci


def test_numbers_of_a_sentence():
    assert sci(0.00041) == r"$4 \cdot 10^{-4}$"
    assert sci(2.4e17) == r"$2 \cdot 10^{17}$"
