"""Many GPUs: one sequence, its tokens split over the ranks of a process group (chapter 25).

Each rank walks its own piece. Between them crosses a state of K V numbers a head, however long the pieces are. A call
takes three steps, and its gradient the same three from right to left:

    1. each rank finds the map of its own piece, S -> M S + X, with a state of zeros    over_ranks/maps.py
    2. one exchange tells each rank the state that comes into its piece                 over_ranks/exchange.py
    3. each rank walks its own piece from there, as if there were no other              over_ranks/calls.py

(In the gradient, the gradient R of the state that goes out comes in from the right.) `over_ranks/segments.py` knows
which packed sequences cross a border, `planning.py` chooses the exchange, and `agreement.py` asks whether all ranks
make the same call. With NCCL, start with a device, so that one communicator serves every message::

    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from .over_ranks.calls import split_over_ranks
from .over_ranks.links import LINKS
from .over_ranks.planning import Plan, plan

__all__ = ["LINKS", "Plan", "delta_rule", "gated_delta_rule", "gla", "kda", "linear_attention", "plan", "simple_gla"]


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    g_v: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    lengths: Sequence[int] | None = None,
    exchange: str | None = None,
    segment: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated Linear Attention of a sequence whose tokens are split over ranks, in their order; differentiable.

    Every rank of the group makes the same call, and every rank runs the gradient through its o, also where its own
    loss does not ask for it. On a CPU the chunkwise reference walks the pieces, on a GPU the kernels do.

    Args:
        q: queries of this rank's tokens, `[B, T, H, K]`; T may be 0.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: natural log gates on the key axis, `[B, T, H, K]` in [-inf, 0].
        g_v: natural log gates on the value axis, `[B, T, H, V]`, or None.
        scale: factor on q, K^-0.5 when None.
        initial_state: `[N_seq, H, K, V]`, zeros when None; read on the first rank. Of packed sequences each rank reads
            the rows of those whose first token it has.
        cu_seqlens: int32/int64 `[N_seq + 1]`, boundaries of packed sequences (B = 1) among the tokens of all ranks,
            the same on every rank. On a GPU their values are looked at under GLA_REF_DEBUG=1 only.
        group: the ranks, or a mesh of one dimension (`mesh["cp"]`); None for all.
        lengths: how many tokens each rank has; None if all have as many as this one.
        exchange: "all-gather" or "pipeline"; None chooses by :func:`plan`, which says why.
        segment: split every piece into segments of so many tokens. Results then are the same to the last bit for
            every number of ranks whose borders are borders of segments; None for one segment a rank.

    Returns:
        o `[B, T, H, V]` of this rank's tokens, and the final state `[N_seq, H, K, V]`, at least float32, on the last
        rank. Of packed sequences each rank has the rows of those whose last token it has. All else is zeros, so that
        the sum over ranks is the state of every sequence.

    Raises:
        TypeError, ValueError: an argument does not fit, here or on another rank, or ranks differ in one; the message
            names the argument and the ranks. Asked once for each kind of call, under GLA_REF_DEBUG=1 every time.
        RuntimeError: a rank died or hangs, found within the time limit of the group; the message names the rank.
    """
    tokens = {"q": q, "k": k, "v": v, "g": g, "g_v": g_v}
    return split_over_ranks("gla", tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def simple_gla(
    q, k, v, g, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`gla`, with one gate a head and token: g `[B, T, H]`."""
    tokens = {"q": q, "k": k, "v": v, "g": g}
    return split_over_ranks("simple_gla", tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def linear_attention(
    q, k, v, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`gla`, without gates. A feature map is the caller's; a normaliser is one more column of v, of ones."""
    tokens, name = {"q": q, "k": k, "v": v}, "linear_attention"
    return split_over_ranks(name, tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def delta_rule(
    q, k, v, beta, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`gla`, with write strengths beta `[B, T, HV]` for gates; v and states have HV heads, a multiple of H."""
    tokens = {"q": q, "k": k, "v": v, "beta": beta}
    return split_over_ranks("delta_rule", tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def gated_delta_rule(
    q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`delta_rule`, with one gate a value head and token: g `[B, T, HV]`."""
    tokens, name = {"q": q, "k": k, "v": v, "g": g, "beta": beta}, "gated_delta_rule"
    return split_over_ranks(name, tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)


def kda(
    q, k, v, g, beta, *, scale=None, initial_state=None, cu_seqlens=None,
    group=None, lengths=None, exchange=None, segment=None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As :func:`delta_rule`, with a gate for each channel of the keys: g `[B, T, HV, K]`."""
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    return split_over_ranks("kda", tokens, initial_state, cu_seqlens, group, scale, lengths, exchange, segment)
