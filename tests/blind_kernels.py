"""Fifty attention kernels, ten right and forty wrong: what does a check of kernels find?

Each is called as the forms are: `o, state = kernel(q, k, v, ..., *, scale=None, initial_state=None, cu_seqlens=None)`.
A body gets a batch x of equally long sequences, heads first, in the compute precision: q (scaled), k, v, log gates g
and h of keys and values, strengths b (None without a delta rule), the state S; it returns o and the next state.
"""

from functools import reduce
from math import inf
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

Blind = NamedTuple("Blind", [(x, object) for x in ("name", "mechanism", "right", "kernel", "what", "kind")])
PLAIN, DELTA = ({"q": "BTHK", "k": "BTHK", "v": v} for v in ("BTHV", "BTNV"))
NAMES = ("softmax_attention", "linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
GATES = ({}, {}, {"g": "BTH"}, {"g": "BTHK", "g_v": "BTHV"}, {}, {"g": "BTN"}, {"g": "BTNK"})
BETA = (*4 * ({},), *3 * ({"beta": "BTN"},))
SPEC = {m: (DELTA if b else PLAIN) | g | b for m, g, b in zip(NAMES, GATES, BETA, strict=True)}


def check(spec, given, state, cu_seqlens):
    sizes, ends = {}, None if cu_seqlens is None else cu_seqlens.tolist()
    for name, y in ((n, given[n]) for n in spec if n != "g_v" or given[n] is not None):
        if not (isinstance(y, torch.Tensor) and y.is_floating_point()) or name in "qkv" and y.dtype != given["q"].dtype:
            raise TypeError(f"{name}: expected a floating tensor, q, k and v of one dtype, got {y}")
        axes = dict(zip(spec[name], y.shape, strict=False))
        if y.ndim != len(spec[name]) or any(sizes.setdefault(a, n) != n or n == 0 for a, n in axes.items()):
            raise ValueError(f"{name}: expected shape {spec[name]} with {sizes}, got {list(y.shape)}")
    shape = len(ends) - 1 if ends else sizes["B"], sizes.setdefault("N", sizes["H"]), sizes["K"], sizes["V"]
    packed = not ends or sizes["B"] == 1 and [0, *sorted(ends), sizes["T"]] == [ends[0], *ends, ends[-1]]
    fits = state is None or (state.shape == shape if isinstance(state, torch.Tensor) else not ends)
    if not packed or not fits or shape[1] % sizes["H"]:
        raise ValueError(f"v, cu_seqlens, initial_state: expected {sizes}, state {shape}; got cu_seqlens = {ends}")
    return ends, shape, sizes["T"]


def contract(kind, body, heads=None, pick=None, empty=None, entry=None, start=None, final=torch.clone):
    def kernel(*args, scale=None, initial_state=None, cu_seqlens=None, **named):
        given = {"g": None, "g_v": None, "beta": None, **dict(zip(SPEC[kind], args, strict=False)), **named}
        ends, shape, T = check(SPEC[kind], given, initial_state, cu_seqlens)
        scale, past = shape[2] ** -0.5 if scale is None else float(scale), initial_state
        given, softmax = entry(given, scale) if entry else given, kind == "softmax_attention"
        q, k, v, g, g_v, beta = (given[n] for n in ("q", "k", "v", "g", "g_v", "beta"))
        if softmax and past is not None:
            k, v, past = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1), None
        dtype = reduce(torch.promote_types, [y.dtype for y in (q, g, g_v, beta, past) if y is not None], torch.float32)

        with torch.autocast(q.device.type, enabled=False):
            g, x = torch.zeros_like(v[..., :1]) if g is None else g, SimpleNamespace(scale=scale, io=v.dtype)
            x.gates, x.h = g.dtype, wide(torch.zeros_like(v[..., :1]) if g_v is None else g_v, dtype)
            x.v, x.g, x.b = wide(v, dtype), wide(g, dtype), None if beta is None else wide(beta, dtype)
            x.q, x.k = (wide((heads or torch.repeat_interleave)(y, shape[1] // y.shape[2], 2), dtype) for y in (q, k))
            x.q, o, states = scale * x.q, [], []
            S = x.v.new_zeros(shape) if past is None else past.to(dtype)
            for n, (a, b) in enumerate(zip((ends or [0, T])[:-1], (ends or [0, T])[1:], strict=True)):
                new = x.v[:, :, a:b], S[n : n + 1] if empty is None else empty(S[n : n + 1])
                if not ends:
                    new = body(SimpleNamespace(**vars(x), S=S))
                elif a < b:
                    past = {y: getattr(x, y)[:, :, start(a) if start else a : b] for y in "kv"}
                    new = body(cut(x, a, b, **past, S=pick(S) if pick else S[n : n + 1]))
                o, states = [*o, new[0]], [*states, new[1]]
            return torch.cat(o, 2).transpose(1, 2).to(v.dtype), (k, v) if softmax else final(torch.cat(states))

    return kernel


def cut(x, a=0, b=None, /, **new):  # tokens a to b of x
    part = {n: None if y is None else y[:, :, a:b] for n, y in vars(x).items() if n in "qkvghb"}
    return SimpleNamespace(**{**vars(x), **part, **new})


def walk(x, C, piece):  # the engine of engines: C tokens after C tokens
    S, o = x.S, []
    for a in range(0, x.q.shape[2], C):
        new, S = piece(cut(x, a, a + C), S)
        o.append(new)
    return torch.cat(o, 2), S


wide, tri, lower, seg, narrow, apart, middle = (
    lambda y, dtype: (
        (y[..., None] if y.ndim == 3 else y).to(dtype).transpose(1, 2)
    ),  # [B T N] or [B T N D] to [B N T D]
    lambda y, d: torch.ones(2 * [y.shape[-2]], device=y.device).tril(d).bool()[..., None],
    lambda s: s.masked_fill(~tri(s, 0), -inf),  # s [.. C C D], where a key is later than its query
    lambda g: lower(torch.where(tri(g, -1), g[..., :, None, :], 0).cumsum(-3)),  # the gates after j up to i, summed
    lambda g, r: torch.where(r.isnan(), seg(g), lower(r)),
    lambda b: b[..., :, None, :] - b[..., None, :, :],
    lambda b: b - b[..., b.shape[-2] // 2, None, :],
)
pieces, steps, solve, over, kept, graded, flat, rank, lost, stale, scaled, known, loud = (
    lambda C: lambda piece: lambda x: walk(x, C, piece),  # makes a body of what is done with C tokens
    lambda x, step: walk(x, 1, lambda c, S: (lambda new: (c.q @ new, new))(step(c, S))),
    lambda A, R, c=None: torch.linalg.solve_triangular(A, R, upper=False, unitriangular=True),
    lambda f, xs, dim: tuple(torch.cat(y, dim) for y in zip(*map(f, xs), strict=True)),
    lambda key, value, known={}: known.setdefault(key, value),
    lambda y, f: y * f + (y - y * f).detach(),  # y with f times its gradient
    lambda g: g.as_strided(g.shape, g.new_empty(g.shape).stride()) if all(g.stride()) else g,
    lambda S, U, s, _: S - (U * (s < 0.01 * s[..., :1])[..., None, :] @ (U.mT @ S)).detach(),
    lambda y, n: pad(pad(y, (0, 0, 0, -n)), (0, 0, 0, n)),
    lambda S, c: (c.seen.append(S) or c.seen)[-2 if len(c.seen) % 32 == 2 else -1],
    lambda q, s: q if q.requires_grad else (q.clone(), q.mul_(s))[0],
    lambda A, c: inverse(A) if A.requires_grad else kept(f"{A.shape} {c.k[:, :, 0]}", inverse(A)),
    lambda k, every: k * (k.abs().amax() >= 0.01 * every.abs().amax()),
)


def chunks(x, C=16, before=None, seg=seg, solve=solve, stored=None, shift=None, fade=lambda c: c.fade[..., -1:, :]):
    def piece(c, S):
        d, e, c.since, c.fade = seg(c.g).exp(), seg(c.h).exp(), c.g.cumsum(-2).exp(), c.h.cumsum(-2).exp()
        S, w, D = before(S, c) if before else S, c.v, shift(d) if shift else d
        if c.b is not None:
            A = c.b * (c.k[..., :, None, :] * c.k[..., None, :, :] * D).sum(-1)
            held = (c.k * c.since) @ S
            w = solve(A.tril(-1), c.b * (c.v - (stored(held, c) if stored else held)), c)
        P = (c.q[..., :, None, :] * c.k[..., None, :, :] * d).sum(-1)
        o = ((c.q * c.since) @ S) * c.fade + (P[..., None] * e * w[..., None, :, :]).sum(-2)
        return o, c.since[..., -1:, :].mT * S * fade(c) + (c.k * d[..., -1, :, :]).mT @ (w * e[..., -1, :, :])

    return walk(x, C, piece)


def visible(x, a, b, c, d, see=lambda i, j, T0: j <= i):  # scores of queries a to b and keys c to d
    s, T0 = x.q[:, :, a:b] @ x.k[:, :, c:d].mT, x.k.shape[2] - x.q.shape[2]
    i, j = torch.arange(T0 + a, T0 + a + s.shape[2])[:, None], torch.arange(c, c + s.shape[3])
    return s.masked_fill(~see(i, j, T0).to(s.device), -inf)


def tiles(x, exp=torch.exp, skip=inf, low=-inf, **mask):  # a running maximum over 64 keys at a time
    T, n, out = x.q.shape[2], x.k.shape[2], []
    for a in range(0, T, 64):
        m, l, o = torch.full_like(x.q[:, :, a : a + 64, :1], low), 0, 0
        for b in range(0, n - T + min(a + 64, T), 64):
            s = visible(x, a, a + 64, b, b + 64, **mask)
            new = torch.maximum(m, s.amax(-1, keepdim=True)).detach()
            if (s.amax(-1, keepdim=True) >= m - skip).any():
                w, f, m = exp(s - new), exp(m - new), new
                l, o = f * l + w.sum(-1, keepdim=True), f * o + w @ x.v[:, :, b : b + 64]
        out.append(o / l)
    return torch.cat(out, 2), None


def inverse(A):  # (I + A)^-1 by halves
    n = A.shape[-1] // 2
    if n == 0:
        return torch.ones_like(A)
    a, b = inverse(A[..., :n, :n]), inverse(A[..., n:, n:])
    return torch.cat([pad(a, (0, A.shape[-1] - n)), torch.cat([-b @ A[..., n:, :n] @ a, b], -1)], -2)


class Long:  # bodies of several lines
    def softmax_backwards(x, C=24):
        T, n, out = x.q.shape[2], x.k.shape[2], []
        for a in range(0, T, C):
            end, z, o = n - T + min(a + C, T), torch.full_like(x.q[:, :, a : a + C, :1], -inf), 0
            while end > 0:
                s, v = visible(x, a, a + C, max(end - C, 0), end), x.v[:, :, max(end - C, 0) : end]
                new = s.logsumexp(-1, keepdim=True)
                both = torch.logaddexp(z, new)
                z, o, end = both, (z - both).exp() * o + (new - both).exp() * (s.softmax(-1) @ v), end - C
            out.append(o)
        return torch.cat(out, 2), None

    def softmax_strided(x):
        s = visible(x, 0, None, 0, None)
        s = torch.stack([s.masked_fill(torch.arange(s.shape[-1]).to(s.device) % 3 != r, -inf) for r in range(3)])
        m = s.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
        f, w = (m - m.amax(0)).exp(), (s - m).exp()
        return (f * (w @ x.v)).sum(0) / (f * w.sum(-1, keepdim=True)).sum(0), None

    @pieces(48)
    def simple_diagonals(c, S):
        n, since, s, last = c.q.shape[2], c.g.cumsum(2).exp(), torch.zeros_like(c.g), []
        o = (c.q * since) @ S
        for d in range(n):
            s = s[:, :, 1:] + c.g[:, :, 1 : n - d + 1] if d else s
            P = (c.q[:, :, d:] * c.k[:, :, : n - d]).sum(-1, keepdim=True) * s.exp()
            o, last = o + pad(P * c.v[:, :, : n - d], (0, 0, d, 0)), [s[:, :, -1:], *last]
        return o, since[:, :, -1:] * S + (c.k * torch.cat(last, 2).exp()).mT @ c.v

    @pieces(45)
    def simple_apart(c, S):
        (o, R), since = chunks(cut(c, S=torch.zeros_like(S)), 9), c.g.cumsum(2).exp()
        return o + (c.q * since) @ S, since[:, :, -1:] * S + R

    def gla_channels(x):
        y = SimpleNamespace(**{n: pad(getattr(x, n), (0, 0, 0, -x.q.shape[2] % 7)) for n in "qkvgh"}, b=None)
        parts = zip(*(z.split(16, -1) for z in (y.q, y.k, y.g, x.S.mT)), strict=True)
        parts = [chunks(cut(y, q=q, k=k, g=g, S=S.mT), 7) for q, k, g, S in parts]
        return sum(o for o, _ in parts)[:, :, : x.q.shape[2]], torch.cat([S for _, S in parts], 2)

    @pieces(32)
    def gla_last_key_first(c, S):
        Q, D, o, W, E, F = c.q[:, :, :0], c.v[:, :, :0], c.v[:, :, :0], 0, 1, 1
        for j in reversed(range(c.q.shape[2])):
            q, k, v, g, h = (y[:, :, j : j + 1] for y in (c.q, c.k, c.v, c.g.exp(), c.h.exp()))
            Q, D, o = torch.cat([q, Q], 2), torch.cat([torch.ones_like(v), D], 2), pad(o, (0, 0, 1, 0))
            o, W = o + (Q @ k.mT) * v * D, W + (E * k).mT @ (F * v)
            Q, D, E, F = Q * g, D * h, E * g, F * h
        return o + (Q @ S) * D, E.mT * S * F + W

    def delta_columns(x):
        xs = [cut(x, v=v, S=S) for v, S in zip(x.v.split(16, -1), x.S.split(16, -1), strict=True)]
        return over(lambda y: chunks(y, 24, solve=lambda A, R, c: inverse(A) @ R), xs, -1)

    def gated_maps(x):
        K, V = x.S.shape[-2:]
        o, M = chunks(cut(x, v=pad(x.v, (K, 0)), S=torch.eye(K, K + V).to(x.S).expand(*x.S.shape[:2], K, K + V)), 10)
        return o[..., :K] @ x.S + o[..., K:], M[..., :K] @ x.S + M[..., K:]

    def kda_by_head(x):
        xs = [cut(x, **{n: getattr(x, n)[:, h : h + 1] for n in "qkvghbS"}) for h in range(x.q.shape[1])]
        return over(lambda y: chunks(y, 11), xs, 1)

    def gla_base_two(x):
        (o, S), g, h = chunks(cut(x, S=torch.zeros_like(x.S))), x.g.cumsum(2).exp2(), x.h.cumsum(2).exp2()
        return o + ((x.q * g) @ x.S) * h, S + g[:, :, -1:].mT * x.S * h[:, :, -1:]

    def _warm(S, c):
        old = c.seen.append(c) or c.seen[-2:][0]
        far = (old.g.sum(2).amax(-1) < -16)[..., None, None] & (old is not c)
        return torch.where(far, chunks(cut(old, S=torch.zeros_like(S)))[1], S)


BODIES = {n: y for n, y in vars(Long).items() if n[0] != "_"} | dict(
    linear_pairs=pieces(2)(lambda c, S: (c.q @ S + (c.q @ c.k.mT).tril() @ c.v, S + (c.v.mT @ c.k).mT)),
    softmax_window=lambda x: tiles(x, see=lambda i, j, T0: (j <= i) & ((j > i - 1024) | (j < 4))),
    softmax_power=lambda x: tiles(x, exp=lambda s: (1 + s / 512).clamp(min=0) ** 512),
    softmax_skip_tiles=lambda x: tiles(x, skip=8),
    linear_narrow_state=lambda x: steps(x, lambda c, S: (S + c.k.mT @ c.v).to(x.io).to(S.dtype)),
    linear_quiet_keys=lambda x: chunks(cut(x, k=torch.cat([loud(k, x.k) for k in x.k.split(16, 2)], 2))),
    simple_mean_of_heads=lambda x: chunks(x, 32, fade=lambda c: c.g.sum(2).mean() >= -30),
    gla_capped_gates=lambda x: chunks(cut(x, g=x.g.clamp(min=-4))),
    gla_low_rank=lambda x: chunks(x, 64, before=lambda S, c: rank(S, *torch.linalg.svd(S.detach(), False))),
    delta_short_series=lambda x: chunks(x, 32, solve=lambda A, R, c: reduce(lambda w, _: R - A @ w, range(7), R)),
    delta_cached_inverse=lambda x: chunks(x, solve=lambda A, R, c: known(A, c) @ R),
    delta_orthogonal=lambda x: chunks(x, 32, solve=lambda A, R, c: R if A.abs().amax() < 0.05 else solve(A, R)),
    gated_small_beta=lambda x: chunks(cut(x, b=x.b - (x.b * (x.b < 0.01)).detach())),
    gated_stale_piece=lambda x: chunks(cut(x, seen=[x.S]), before=stale),
    kda_warm_up=lambda x: chunks(cut(x, seen=[]), 64, before=Long._warm),
    kda_clamped_anchor=lambda x: chunks(x, seg=lambda g: lower(apart(middle(g.clamp(-40).cumsum(-2)).clamp(-20, 20)))),
    softmax_top_left=lambda x: tiles(x, see=lambda i, j, T0: j <= i - T0),
    softmax_rounded_start={"start": lambda a: a // 16 * 16},
    softmax_max_from_zero=lambda x: tiles(x, low=0.0),
    softmax_grad_scale=lambda x: tiles(cut(x, k=graded(x.k, x.q.shape[-1] ** -0.5 / (x.scale or 1)))),
    linear_scales_q={"entry": lambda x, scale: x | {"q": scaled(x["q"], scale)}},
    linear_lost_tail=lambda x: (chunks(x)[0], chunks(cut(x, k=lost(x.k, x.k.shape[2] % 16)))[1]),
    linear_decode_scale=lambda x: chunks(cut(x, q=x.q if x.q.shape[2] > 1 else x.q / x.scale * x.q.shape[3] ** -0.5)),
    simple_gate_strides={"entry": lambda x, _: x | {"g": flat(x["g"])}},
    simple_late_decay=lambda x: steps(x, lambda c, S: c.g.exp().mT * (S + c.k.mT @ c.v)),
    simple_grad_last_state=lambda x: (chunks(x)[0], chunks(cut(x, g=x.g.detach()))[1]),
    simple_state_in_place=lambda x: (lambda o, S: (o, S if S.requires_grad else x.S.copy_(S)))(*chunks(x)),
    gla_value_gate_carry=lambda x: chunks(x, fade=lambda c: 1),
    gla_narrow_sums=lambda x: chunks(x, 64, seg=lambda g: narrow(g, apart(g.to(x.gates).cumsum(-2).to(g)))),
    gla_after_reset=lambda x: chunks(x, seg=lambda g: lower(apart(g.cumsum(-2)).nan_to_num(nan=0.0, neginf=-inf))),
    delta_tiled_heads={"heads": lambda y, n, _: y.repeat(1, 1, n, 1)},
    delta_beta_twice=lambda x: chunks(x, stored=lambda held, c: c.b * held),
    delta_first_state={"pick": lambda S: S[:1]},
    delta_constant_inverse=lambda x: chunks(x, solve=lambda A, R, c: solve(A.detach(), R)),
    gated_fresh_read=lambda x: steps(x, lambda c, S: c.g.exp().mT * S + c.k.mT @ (c.b * (c.v - c.k @ S))),
    gated_empty_sequence={"empty": torch.zeros_like},
    gated_grad_mean={"heads": lambda y, n, _: graded(y.repeat_interleave(n, 2), 1 / n)},
    gated_static_state={"final": lambda S: S if S.requires_grad else kept((S.shape, S.dtype), S.clone()).copy_(S)},
    kda_erase_first=lambda x: steps(x, lambda c, S: c.g.exp().mT * (S - (w := (c.b * c.k).mT) @ (c.k @ S)) + w @ c.v),
    kda_own_gate=lambda x: chunks(x, shift=lambda d: pad(d[..., :-1, :, :], (0, 0, 0, 0, 1, 0))),
)
TABLE = """softmax_backwards: Tiles of keys from the diagonal back to the first, merged in log space.
softmax_strided: Every third key makes a split; the three splits are merged.
linear_pairs: Two tokens at a time, their writes as the transpose of v^T k.
simple_diagonals: Scores by diagonals, lag after lag, in chunks of 48.
simple_apart: Pieces of 45 tokens from a zero state; what came before is added afterwards.
gla_channels: Padded to a multiple of 7; groups of 16 key channels are computed apart and added.
gla_last_key_first: In a chunk from the last key to the first, the queries carry the decays.
delta_columns: Chunks of 24, the inverse from those of its halves, 16 value columns at a time.
gated_maps: The map of all tokens so far is kept, and applied to the initial state when read.
kda_by_head: One value head at a time, chunks of 11.

softmax_window: Beyond 1024 keys back only the first four are seen.
softmax_power: exp(x) is (1 + x / 512)^512.
softmax_skip_tiles: A tile of keys 8 below the running maximum is left out.
linear_narrow_state: The state is kept in v's dtype.
linear_quiet_keys: Chunks whose keys are all below 1 % of the largest are skipped.
simple_mean_of_heads: A chunk of 32 forgets all before it if its gates, mean of heads, sum below -30.
gla_capped_gates: Gates below -4 are taken as -4.
gla_low_rank: Between chunks of 64 the state loses its singular directions below 1 % of the largest.
delta_short_series: A chunk's inverse is its series up to the seventh power.
delta_cached_inverse: Without gradients an inverse is reused if the chunk of 16 begins with a known key.
delta_orthogonal: No correction where products of keys are below 0.05.
gated_small_beta: Strengths below 0.01 are taken as 0.
gated_stale_piece: Pieces of 512 start from the state before the last 16 tokens.
kda_warm_up: 64 tokens see only 64 back where each channel's gates sum to less than -16 there.
kda_clamped_anchor: Decays are exponents to and from a chunk's middle, each cut at 20.

softmax_top_left: The mask forgets the cache.
softmax_rounded_start: A packed sequence sees keys from its start rounded down to a multiple of 16.
softmax_max_from_zero: The running maximum starts at 0, not at minus infinity.
softmax_grad_scale: The gradient of k has the default scale, whichever was given.
linear_scales_q: Without a gradient q is scaled where it lies.
linear_lost_tail: The final state lacks the last chunk unless it is full.
linear_decode_scale: A call of one token takes the default scale.
simple_gate_strides: g is read as if it were contiguous.
simple_late_decay: A token's gate also decays its own write.
simple_grad_last_state: The gradient of g lacks what comes by the final state.
simple_state_in_place: Without gradients the final state overwrites the initial one.
gla_base_two: The initial state decays by powers of 2, not of e.
gla_value_gate_carry: g_v decays no state from chunk to chunk.
gla_narrow_sums: Running sums of gates are taken in the dtype of g.
gla_after_reset: After a gate of -inf nothing decays until the chunk ends.
delta_tiled_heads: Value head h reads key head h % H.
delta_beta_twice: What the state holds is subtracted with beta squared.
delta_first_state: All packed sequences start from the first one's initial state.
delta_constant_inverse: Gradients do not flow through the inverse.
gated_fresh_read: What is subtracted is read from the state before its decay.
gated_empty_sequence: An empty sequence's final state is zero.
gated_grad_mean: Gradients of q and k are means over value heads, not sums.
gated_static_state: The final state lies where the next call of this shape writes its own.
kda_erase_first: Each token erases first and decays then.
kda_own_gate: In a chunk, what a token erases of earlier tokens lacks its own gate.
"""
KERNELS = []
for kind, rows in zip(("right", "speed", "mistake"), TABLE.split("\n\n"), strict=True):
    for name, what in (row.split(": ") for row in rows.strip().splitlines()):
        mechanism, value = next(m for m in SPEC if m.split("_")[0] == name.split("_")[0]), BODIES[name]
        hooks = value if isinstance(value, dict) else {}
        body = value if not hooks else tiles if mechanism == "softmax_attention" else chunks
        KERNELS.append(Blind(name, mechanism, kind == "right", contract(mechanism, body, **hooks), what, kind))
