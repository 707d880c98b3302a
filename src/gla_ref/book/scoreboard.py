"""The book's scoreboard: the forms and kernels of chapters 1 to 25 in one table, which grows as you read.

Exponentials are counted while a form runs. Bytes and products are those of :func:`gla_ref.book.costs.cost`.
Milliseconds are records of `benchmarks/run.py scoreboard`: all kernels at one shape,
of one commit, each checked before it is timed.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

from .. import results
from ..mechanisms import MECHANISMS
from .costs import FORMS as COUNTED
from .costs import cost
from .notebook import say

__all__ = ["ROWS", "Row", "exponentials", "scoreboard"]

SHAPE = {"B": 8, "T": 8192, "H": 16, "K": 128, "V": 128}


class Row(NamedTuple):
    page: str  # of the chapter that brings it
    name: str
    mechanism: str
    form: str  # of gla_ref.FORMS: what is computed, and counted
    breaks: str  # where it ends, or what it lacks
    contender: str | None = None  # of benchmarks/contenders.py: the kernel whose time stands in the record
    count: float | None = None  # exponentials, where no reference has the form, or its takes each twice


ROWS = (
    Row("01_softmax_attention", "softmax attention", "softmax_attention", "parallel", "writes T² weights", count=64),
    Row("03_flash_attention", "FlashAttention", "softmax_attention", "flash", "takes T² time", "triton"),
    Row("05_linear_attention", "linear attention", "linear_attention", "recurrent", "one token at a time"),
    Row("06_prefix_sums_and_chunks", "in chunks", "linear_attention", "chunkwise", "forgets nothing"),
    Row("07_flash_linear_attention", "its kernel", "linear_attention", "chunkwise", "forgets nothing", "triton"),
    Row("09_gates_and_decay", "one gate a head", "simple_gla", "chunkwise", "all channels fade alike", "triton"),
    Row("10_parallel_gla", "GLA, ratios of decays", "gla", "parallel", "overflows at strong or long gates"),
    Row("10_parallel_gla", "GLA, differences of logarithms", "gla", "parallel_log", "one exponential a pair"),
    Row("11_chunkwise_gla", "GLA in chunks", "gla", "chunkwise", "one exponential a pair of a chunk"),
    Row("11_chunkwise_gla", "GLA in two levels", "gla", "chunkwise_two_level", "many small products"),
    Row("12_one_product_a_chunk", "one product a chunk", "gla", "chunkwise", "strong chunks need levels", count=2),
    Row("13_gla_kernel", "its kernel", "gla", "chunkwise", "strong chunks need levels", "triton", 2),
    Row("14_four_kernels", "the original four kernels", "gla", "chunkwise", "a reset goes wrong", "gla_chunk_fuse", 18),
    Row("20_delta_rule", "delta rule", "delta_rule", "chunkwise", "overwrites, does not fade", "triton"),
    Row("23_delta_rule_fused", "gated delta rule", "gated_delta_rule", "chunkwise", "one gate a head", "triton"),
    Row("24_kimi_delta_attention", "KDA", "kda", "chunkwise", "gates below −5 need levels", "triton", 5.5),
)

#: what a record's time is of, where that is not the kernel which the row's own chapter explains
TIMED = {
    ("gla", "hopper"): "that of {doc}`22 <22_fully_fused_on_hopper>`",
    ("delta_rule", "hopper_fused"): "that of {doc}`23 <23_delta_rule_fused>`",
    ("kda", "hopper"): "the library's for Hopper",
}


class _Exponentials(TorchDispatchMode):
    """The number of results of exp."""

    n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.exp, torch.ops.aten.exp2, torch.ops.aten.exp_):
            self.n += out.numel()
        return out


def _drawn(mechanism: str, T: int, K: int) -> list[Tensor]:
    """What a reference is given: one text, one head."""
    k = normalize(torch.randn(1, T, 1, K), dim=-1)
    gates = -torch.rand(1, T, 1, K) / 64
    draw = {"token": k, "gate": gates, "strength": torch.rand(1, T, 1)}
    given = (x for x in MECHANISMS[mechanism].arguments if not x.optional)
    return [gates[..., 0] if x.role == "gate" and "K" not in x.axes else draw[x.role] for x in given]


@functools.cache
def exponentials(mechanism: str, form: str, T: int = SHAPE["T"], K: int = SHAPE["K"]) -> float:
    """Return how many exponentials a reference takes for each number of k, at K = V and C = 64.

    A form takes a + b T of them a token: two short texts give a and b.
    """
    from .. import FORMS

    lengths, taken = (64, 128), []
    for length in lengths:
        with torch.no_grad(), _Exponentials() as count:
            FORMS[mechanism][form](*_drawn(mechanism, length, K))
        taken.append(count.n / length)
    slope = (taken[1] - taken[0]) / (lengths[1] - lengths[0])
    return (taken[0] + slope * (T - lengths[0])) / K


def _cells(row: Row, data: dict | None, bold: str) -> list[str]:
    counted = cost(row.mechanism, row.form if row.form in COUNTED[row.mechanism] else "chunkwise", **SHAPE)
    count = row.count or exponentials(row.mechanism, row.form)
    name, ms, times = f"{bold}{row.name}{bold}", "", ""
    of = {"suite": "scoreboard", "mechanism": row.mechanism, "contender": row.contender}
    for record in results.select(data, **of) if data and row.contender else []:
        speeds = data["environment"]
        floor = max(counted.bytes / speeds["copy_gb_s"] / 1e6, counted.matmul_flops / speeds["matmul_tflop_s"] / 1e9)
        ms, times = f"{record['ms']:.2f}", f"{record['ms'] / floor:.1f}"
        if timed := row.contender == "triton" and TIMED.get((row.mechanism, record["ran"])):
            name += f" (timed: {timed})"
    # the original four kernels write more than the form: scores, and a part of o for each block of channels
    moved = "" if row.contender == "gla_chunk_fuse" else f"{counted.bytes / 1e9:.1f}"
    few = f"{count:.2g}" if count else "0"
    return [name, few if count < 10 else f"{count:,.0f}", row.breaks, moved, ms, times]


def scoreboard(page: str) -> None:
    """Show the table up to a chapter, whose rows are bold: `scoreboard("11_chunkwise_gla")`.

    Args:
        page: the name of the chapter's page.

    Raises:
        ValueError: no row belongs to the page; the message lists those that have rows.
    """
    known = sorted({row.page for row in ROWS})
    if page not in known:
        raise ValueError(f"page: expected one of {', '.join(known)}, got {page!r}")
    data = results.load("h200")
    lines = []
    for row in (row for row in ROWS if row.page <= page):
        bold = "**" if row.page == page else ""
        cells = [f"{{doc}}`{row.page[:2].lstrip('0')} <{row.page}>`", *_cells(row, data, bold)]
        lines.append(f"| {' | '.join(cells)} |")
    B, T, H, K, V = SHAPE.values()
    measured = f" Milliseconds: a run of their own ({results.label(data, suite='scoreboard')})." if data else ""
    say(
        "| chapter | form | exponentials | where it ends | GB | ms | times the floor |\n|---|---|--:|---|--:|--:|--:|\n"
        + "\n".join(lines)
        + f"\n\nForward, bfloat16, {B} texts of {T:,} tokens, {H} heads, K = {K}, V = {V}, C = 64. Exponentials are "
        "those for each number of k, masked pairs included. The floor is the time of the form's bytes or products, "
        f"whichever takes longer.{measured}"
    )
