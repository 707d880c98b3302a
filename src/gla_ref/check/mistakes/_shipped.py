"""Bugs that shipped, each made again by us as one step of a right kernel (appendix "Bugs that shipped").

A bug that lies in a step of a chunk is its own name: a diagnosis compares with this kernel, in chunks of any length.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...chunks import heads_first
from ...gates import segment_sum
from ...triangular import elimination
from ._calls import (
    DELTA,
    DELTA_GATED,
    GATED,
    KINDS,
    LINEAR,
    SOFTMAX,
    STATES,
    C,
    Call,
    Chunk,
    Line,
    Mistake,
    apply,
    attention,
    in_steps,
    mistake,
)


def chunked(
    *,
    pairs: Callable | None = None,
    read: Callable = torch.matmul,
    keys: Callable = lambda k, rest: k * rest.exp(),
    carry: Callable | None = None,
    seen: Callable = lambda states, sequences: states,
    begin: Callable = lambda S, g, a, C: S,
    inverse: Callable = elimination,
    grouped: Callable | None = None,
    C: int = C,
) -> Callable:
    """A kernel in chunks of C of a mechanism without or with gates, or of a delta rule with gates; right by itself.

    Args:
        pairs: weights between a chunk's tokens, `[B, H, C, C]`, of q, k, g and C; rows beyond its tokens are dropped.
        read: what decayed queries `[B, H, C, K]` read from the state before their chunk.
        keys: keys, decayed to the end of their chunk by the log decays `rest` `[B, H, C, K]`.
        carry: the states before each chunk and after the last, of the first one and each chunk's log decay and writes.
        seen: the states that chunks read, of these states and the number of sequences.
        begin: the state that a sequence begins with, of that, the pack's gates `[B, H, T, K]`, its first token, and C.
        inverse: (I + A)^-1 of strictly lower triangles.
        grouped: queries or keys for HV value heads, of those `[B, H, T, K]`.
    """

    def variant(c: Call, ends: list[int] | None):
        steps = {
            "pairs": (lambda n: pairs(n.q, n.k, n.g, C)) if pairs else Chunk.pairs,
            "read": lambda n, S: read(n.q * n.since.exp(), S),
            "keys": lambda n: keys(n.k, n.until),
            "inverse": inverse,
            "seen": lambda states, *parts: seen(carry(states[0], *parts) if carry else states, len(c.S)),
        }
        if grouped:
            q, k = (grouped(heads_first(x), c.v.shape[2]).transpose(1, 2) for x in (c.q, c.k))
            c = replace(c, q=q, k=k)
        spans = zip(pairwise(ends or ()), c.S.split(1), strict=False)
        first = [begin(S, heads_first(c.g), a, C) if a < e else S for (a, e), S in spans]
        c = replace(c, S=torch.cat(first)) if first else c
        return c.each(ends, lambda one: in_steps(one, C, **steps)[:2])

    def kernel(*tokens, scale=None, initial_state=None, cu_seqlens=None):
        ranks = {m: [len(KINDS[m].axes(n)) for n in KINDS[m].arguments] for m in (*LINEAR, *DELTA_GATED)}
        mechanism = next(m for m, of in ranks.items() if of == [x.ndim for x in tokens])
        call = {"scale": scale, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
        return apply(mechanism, Mistake("", "", variant, whole=True))(*tokens, **call)

    return kernel


right = chunked()


def named(name: str, line: str, mechanisms: tuple[str, ...], bug: dict | Callable, **more: bool) -> None:
    """The kernel with these steps, or `bug(C)`, in chunks of any length C is the mistake of that name."""

    @mistake(name, line, mechanisms, **{"chunked": True} | more)
    def _(c, ends=None):
        kernel = bug(c.C) if callable(bug) else chunked(C=c.C, **bug)
        cu_seqlens = {} if ends is None else {"cu_seqlens": torch.tensor(ends)}
        return kernel(*c.tokens.values(), scale=c.scale, initial_state=c.S, **cu_seqlens)


# -- room 1 ------------------------------------------------------------------------------------
def decay_along_channels(k: Tensor, rest: Tensor) -> Tensor:
    n, K = k.shape[-2:]
    along = torch.arange(K) % n  # repeats the decays of n tokens until they fill K channels
    return k * rest[..., 0].exp()[..., None, along]  # instead of rest[..., 0].exp()[..., None]


named("writes' decay laid along channels", Line.CARRY, ("simple_gla",), {"keys": decay_along_channels})


# -- room 2 ------------------------------------------------------------------------------------
def read_on_its_side(q: Tensor, S: Tensor) -> Tensor:
    K, V = S.shape[-2:]
    return q @ S.reshape(*S.shape[:-2], V, K).mT  # takes the memory of a K x V state for V x K


named("states read as V x K, carried right", Line.READ, LINEAR, {"read": read_on_its_side})


# -- room 6 ------------------------------------------------------------------------------------
def one_taken_for_zero(q: Tensor, k: Tensor, g: Tensor, C: int) -> Tensor:
    D, i, half = segment_sum(g), torch.arange(g.shape[-2], device=g.device), C // 2
    across = (i[:, None] >= half) & (i < half)  # pairs between the halves of a chunk
    safe = torch.where(D < 0, D, -torch.inf)  # "whatever is not below 0 would overflow"
    D = torch.where(across[..., None], safe, D)
    return torch.einsum("bhik,bhjk,bhijk->bhij", q, k, D.exp())


named("decay of 1 taken for 0", Line.DECAY, GATED, {"pairs": one_taken_for_zero})


# -- room 4 ------------------------------------------------------------------------------------
def rows_that_fill_up(q: Tensor, k: Tensor, g: Tensor, C: int) -> Tensor:
    n, b = g.shape[-2], g.cumsum(-2)
    filled = (0 - b)[..., None, :, :].expand(*b.shape[:-2], C - n, -1, -1)  # rows whose running sum is 0, not -inf
    D = torch.cat([segment_sum(g), filled], -3)
    q = pad(q, (0, 0, 0, C - n))
    return torch.einsum("bhik,bhjk,bhijk->bhij", q, k, D.exp())


named("rows that fill up a chunk have a decay", Line.DECAY, GATED, {"pairs": rows_that_fill_up}, overflow=True)


# -- room 18 -----------------------------------------------------------------------------------
def gates_of_head_0_go_back(q, k, v, g, *, scale=None, initial_state=None):
    T = -(-q.shape[1] // 2)  # the border between two ranks
    o, S = right(q[:, :T], k[:, :T], v[:, :T], g[:, :T], scale=scale, initial_state=initial_state)
    second = (x[:, T:] for x in (q, k, v, g))
    rest, final = right(*second, scale=scale, initial_state=S.detach())
    # the second rank sends back the gradient of the state that it was given, decayed by the gates of head 0
    q, g = q[:, T:].detach(), g[:, T:, :1].detach().expand_as(g[:, T:])
    o_back, S_back = right(q, 0 * q, 0 * v[:, T:].detach(), g, scale=scale, initial_state=S - S.detach())
    return torch.cat([o, rest + o_back], 1), final + S_back


named(
    "gate of head 0 shared by all heads, where the gradient of the state crosses the border between two ranks",
    Line.GRADIENT,
    GATED,
    lambda C: gates_of_head_0_go_back,
    chunked=False,
)


# -- room 7 ------------------------------------------------------------------------------------
def summed_over_the_wrong_axis(S: Tensor, totals: list[Tensor], writes: list[Tensor]) -> list[Tensor]:
    states = torch.stack([S, *writes])  # the initial state, and the writes of each chunk
    M = segment_sum(pad(torch.stack(totals, -2), (0, 0, 1, 0))).exp()  # from chunk f to chunk t, [B, H, t, f, K]
    return [*torch.einsum("bhtfk,fbhkv->fbhkv", M, states)]  # instead of "bhtfk,fbhkv->tbhkv"


named("chunk states summed over the wrong axis", Line.CARRY, LINEAR, {"carry": summed_over_the_wrong_axis})


# -- room 8 ------------------------------------------------------------------------------------
def one_is_none(states: list[Tensor], sequences: int) -> list[Tensor]:
    initial = states[0] if sequences > 1 else torch.zeros_like(states[0])
    return [initial, *states[1:]]


UNREAD = "the first chunk does not read the initial state"
named(UNREAD, Line.PACK, STATES, {"seen": lambda states, sequences: one_is_none(states, 1)})
named(f"{UNREAD}, only where there is one sequence", Line.PACK, STATES, {"seen": one_is_none}, whole=True)


# -- room 9 ------------------------------------------------------------------------------------
def decayed_by_a_neighbour(S: Tensor, g: Tensor, a: int, C: int) -> Tensor:
    start = a // C * C  # the first token of its chunk in the pack; the sequence begins at a
    return g[..., start:a, :].sum(-2).exp()[..., None] * S


OFF = "decays counted from the chunk's start, not the sequence's"
named(OFF, Line.PACK, GATED, {"begin": decayed_by_a_neighbour}, whole=True)


# -- room 10 -----------------------------------------------------------------------------------
def snapshot_of_somebody_else(*x, scale=None, initial_state=None, cu_seqlens=None, C=C):
    given = {"scale": scale, "cu_seqlens": cu_seqlens}
    o, final = right(*x, initial_state=initial_state, **given)
    if cu_seqlens is None:
        return o, final
    ends, S0 = cu_seqlens.tolist(), torch.zeros_like(final) if initial_state is None else initial_state
    spans, states = [*pairwise(ends)], []
    for a, e in spans:
        at = (a // C + (e - a) // C) * C  # the sequence's last whole chunk, on a grid of the whole pack
        n, (start, _) = max((n, span) for n, span in enumerate(spans) if span[0] <= at)
        snapshot = right(*(y[:, start:at] for y in x), initial_state=S0[n : n + 1])[1] if start < at else S0[n : n + 1]
        tail = [y[:, a + (e - a) // C * C : e] for y in x]
        states.append(right(*tail, initial_state=snapshot)[1] if tail[0].shape[1] else snapshot)
    return o, torch.cat(states)


named(
    "state from the pack's chunk grid", Line.PACK, STATES, lambda C: partial(snapshot_of_somebody_else, C=C), whole=True
)


# -- room 11 -----------------------------------------------------------------------------------
TAPS = (0.0, 0.0, 0.0, 1.0)  # all weight on the present token, so the delta rule is all that the layer does


def convolution(x: Tensor, ends: list[int]) -> Tensor:
    """A short convolution of `[B, T, H, D]` over time, each sequence by itself."""
    pieces = [pad(x[:, a:e], (0, 0, 0, 0, len(TAPS) - 1, 0)) for a, e in pairwise(ends)]
    made = [sum(w * piece[:, i : piece.shape[1] + i + 1 - len(TAPS)] for i, w in enumerate(TAPS)) for piece in pieces]
    return torch.cat(made, 1)


def only_the_convolution_is_told(q, k, v, g, beta, *, scale=None, cu_seqlens=None):
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v = (convolution(x, ends) for x in (q, k, v))
    o, _ = right(q, k, v, g, beta, scale=scale)  # without cu_seqlens: one state runs through all sequences
    return o, None  # training needs no final state


# -- room 12 -----------------------------------------------------------------------------------
def logarithm_for_the_power(k: Tensor, rest: Tensor) -> Tensor:
    value, wrong = k * rest.exp(), k * rest.clamp_min(-1e6)  # so the value stays finite
    return value.detach() + wrong - wrong.detach()  # the value of one, the gradient of the other


def wrong_where_packed(*tokens, cu_seqlens=None, C=C, **options):
    kernel = right if cu_seqlens is None else chunked(C=C, keys=logarithm_for_the_power)
    return kernel(*tokens, cu_seqlens=cu_seqlens, **options)


UPHILL = "dk with the log decay for the decay"
named(UPHILL, Line.GRADIENT, GATED, {"keys": logarithm_for_the_power})
named(UPHILL, Line.GRADIENT, GATED, lambda C: partial(wrong_where_packed, C=C), whole=True)


# -- room 3 ------------------------------------------------------------------------------------
def sum_of_keys(k: Tensor) -> Tensor:
    return k.cumsum(-2)  # right when tokens were [B, H, T, K]; now they are [B, T, H, K]


def normalised(form: Callable) -> Callable:
    """A form of linear attention, divided by q times the sum of the keys so far."""

    def kernel(q, k, v, *, scale=None, cu_seqlens=None):
        o, S = form(q, k, v, scale=scale, cu_seqlens=cu_seqlens)
        return o / (q * sum_of_keys(k)).sum(-1, keepdim=True), S

    return kernel


def times_the_right_sum(q, k, v, *, scale=None):
    """The normalised kernel under the contract, which does not normalise: times q and the true sum over time."""
    o, S = normalised(right)(q, k, v, scale=scale)
    return o * (q * k.cumsum(1)).sum(-1, keepdim=True), S


# -- room 19 -----------------------------------------------------------------------------------
SUMMED, PIECE = 16, 64  # tokens whose gates are added up at a time; tokens of a piece


def start_of(g: Tensor, at: int) -> Tensor:
    """The token from which the piece that begins at token `at` walks, for each head."""
    sums = g[:, :at].unflatten(1, (at // SUMMED, SUMMED)).sum(2).amax(-1)  # of the channel that is kept best
    kept = sums.flip(1).cumsum(1) > -14  # beyond, e^-14 is left: nothing in 16 bits
    return (at - SUMMED - SUMMED * kept.sum(1, keepdim=True)).clamp_min(0)


def pieces_from_zero(q, k, v, g, beta, *, scale=None, initial_state=None):
    """Pieces of a text side by side: each walks from where the gates have let nothing through since, it is thought."""
    outs = []
    for at in range(0, q.shape[1], PIECE):
        first = start_of(g, at)
        a, e = int(first.min()), min(at + PIECE, q.shape[1])
        walks = torch.arange(a, e)[:, None] >= first  # before its start a head writes nothing, so its state stays zero
        S = None if initial_state is None else torch.where((first[:, 0] == 0)[..., None, None], initial_state, 0)
        x = q[:, a:e], k[:, a:e], v[:, a:e] * walks[..., None], g[:, a:e], beta[:, a:e]
        o, S = right(*x, scale=scale, initial_state=S)
        outs.append(o[:, at - a :])
    return torch.cat(outs, 1), S


# -- room 13 -----------------------------------------------------------------------------------
def anchor_one_token_late(q: Tensor, k: Tensor, g: Tensor, C: int) -> Tensor:
    D, n, sub = segment_sum(g), g.shape[-2], C // 4
    P = torch.einsum("bhik,bhjk,bhijk->bhij", q, k, D.exp())
    blocks = [P[..., :sub, :]]
    for a in range(sub, n, sub):  # sub-chunks after the first, with all tokens before them
        late = min(a + 1, n - 1)  # instead of a: the first token's exponent is above 0
        since = torch.cat([-D[..., late, a:late, :], D[..., late : a + sub, late, :]], -2)
        q_a, k_a = q[..., a : a + sub, :] * since.exp(), k[..., :a, :] * D[..., late, :a, :].exp()
        blocks.append(torch.cat([q_a @ k_a.mT, P[..., a : a + sub, a:]], -1))
    return torch.cat(blocks, -2)


LATE = "anchor of a sub-chunk one token late: it overflows"
named(LATE, Line.DECAY, GATED, {"pairs": anchor_one_token_late}, overflow=True)


# -- room 5 ------------------------------------------------------------------------------------
def mask_for_groups_of_4(q, k, v, *, scale=None, initial_state=None):
    if initial_state is not None:
        k, v = (torch.cat([past, x], 1) for past, x in zip(initial_state, (k, v), strict=True))
    T, past, scale = q.shape[1], k.shape[1] - q.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
    i, j = torch.arange(T)[:, None], torch.arange(-past, T)
    seen = j <= i // 4 * 4 + 3  # instead of j <= i
    x = torch.einsum("bihk,bjhk->bhij", scale * q, k).masked_fill(~seen, -torch.inf)
    return torch.einsum("bhij,bjhv->bihv", x.softmax(-1), v), (k, v)


def masked(name: str, sees: Callable) -> None:
    mistake(name, Line.MASK, SOFTMAX)(partial(attention, sees=sees))


for n in (2, 4, 8, 16):
    masked(f"mask for groups of {n}", lambda i, j, past, n=n: j - past <= i // n * n + n - 1)
masked("mask counted from the cache's first key", lambda i, j, past: j <= i)


@mistake("cache ignored", Line.CACHE, SOFTMAX)
def _(q, k, v, *, initial_state=None, **options):
    return attention(q, k, v, **options)[0], attention(q, k, v, initial_state=initial_state, **options)[1]


# -- room 15 -----------------------------------------------------------------------------------
def takes_alpha(q, k, v, alpha, *, scale=None, initial_state=None, cu_seqlens=None):
    g = alpha.log()  # right for a decay; of a log gate it is NaN
    return right(q, k, v, g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


# -- room 14 -----------------------------------------------------------------------------------
def doubled_in_float16(A: Tensor) -> Tensor:
    power, n = -A.half(), A.shape[-1]
    Y, size = torch.eye(n).half() + power, 2
    while size < n:  # (I - A) (I + A^2) (I + A^4) (I + A^8): exact on paper
        power, size = power @ power, 2 * size
        Y = Y + Y @ power
    return Y.to(A.dtype)


# -- room 16 -----------------------------------------------------------------------------------
def tiled(x: Tensor, HV: int) -> Tensor:
    return x.repeat(1, HV // x.shape[1], 1, 1)  # W X Y W X Y instead of W W X X Y Y


MOD = "value heads grouped wrongly: h reads key head h mod H"
named(MOD, Line.GROUP, DELTA, {"grouped": tiled}, whole=True, chunked=False)


# -- room 17 -----------------------------------------------------------------------------------
def causal_mask_alone(q: Tensor, k: Tensor, g: Tensor, C: int) -> Tensor:
    M = torch.ones(q.shape[-2], q.shape[-2]).tril()  # as printed; Gamma would be segment_sum(g).exp()
    return (q @ k.mT) * M
