"""The book's scoreboard: what it counts, what it shows."""

import pytest
import torch

from gla_ref import FORMS
from gla_ref.book import scoreboard as board


@pytest.mark.parametrize("mechanism, form", sorted({(row.mechanism, row.form) for row in board.ROWS}))
def test_exponentials_of_long_texts_follow_from_short_ones(mechanism, form):
    with torch.no_grad(), board._Exponentials() as count:
        FORMS[mechanism][form](*board._drawn(mechanism, 512, 4))
    counted = pytest.approx(count.n / 512 / 4, rel=1e-3)  # a few belong to the call
    assert board.exponentials(mechanism, form, T=512, K=4) == counted


def test_exponentials_of_the_four_kernels(monkeypatch):
    """16 in the scores of a chunk, two for the scaled q and k; their row says so."""
    if torch.cuda.is_available():
        pytest.skip("compiled kernels cannot be counted")
    from triton.runtime.interpreter import interpreter_builder

    from gla_ref.kernels.exhibits.gla_chunk_fuse import gla_chunk_fuse

    n, plain = 0, interpreter_builder.create_exp2

    def counted(x):
        nonlocal n
        n += x.data.size
        return plain(x)

    monkeypatch.setattr(interpreter_builder, "create_exp2", counted)
    q = torch.randn(1, 64, 1, 16)
    gla_chunk_fuse(q, q, q, -q.abs() / 16)
    (row,) = (row for row in board.ROWS if row.contender == "gla_chunk_fuse")
    assert round(n / q.numel()) == row.count


def test_rows_and_pages(monkeypatch):
    shown = []
    monkeypatch.setattr(board, "say", shown.append)
    board.scoreboard("06_prefix_sums_and_chunks")
    assert "**in chunks**" in shown[0] and "GLA" not in shown[0]
    with pytest.raises(ValueError, match="page: expected one of 01_softmax_attention, .*, got '99'"):
        board.scoreboard("99")


def test_a_row_names_the_kernel_whose_time_it_shows():
    """Hopper's kernels took the times of rows 13 and 20, whose chapters explain others."""
    data = board.results.load("h200")
    rows = [row for row in board.ROWS if row.contender]
    timed = {row.page[:2]: board._cells(row, data, "")[0].partition("(timed: ")[2] for row in rows}
    named = {"13": "22_fully_fused", "20": "23_delta_rule_fused", "24": "library's", "23": "", "07": ""}
    for page, kernel in named.items():
        assert kernel in timed[page] and bool(kernel) == bool(timed[page]), page
