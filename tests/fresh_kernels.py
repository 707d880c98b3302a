"""Forty wrong kernels, written by someone who has not seen the checker that they are for.

All linear mechanisms are one recurrence, in chunks (`chunks`), token by token (`tokens`) or with a backward by hand
(`by_hand`); `run` does what a kernel does around it. Those and `attention` are right: a wrong kernel replaces a step.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

MEMORY: dict = {}


class Case(NamedTuple):
    mechanism: str
    fn: Callable
    what: str


def dtype_of(*tensors: Tensor) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def segments(g: Tensor) -> Tensor:
    """Sums of g `[..., C, K]` over j < s <= i, `[..., C, C, K]`; -inf for j > i."""
    seen = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool)
    x = torch.where(seen.tril(-1)[..., None], g[..., :, None, :], 0).cumsum(-3)
    return x.masked_fill(~seen.tril()[..., None], -torch.inf)


def weighted(q, k, D):
    return (q @ k.mT) * D[..., 0] if D.shape[-1] == 1 else (q[..., :, None, :] * k[..., None, :, :] * D).sum(-1)


def mix(P, v, E):
    return (P * E[..., 0]) @ v if E.shape[-1] == 1 else (P[..., None] * E * v[..., None, :, :]).sum(-2)


def carry(s, k, u, g, h, S):
    to_end, to_end_v = segments(g).exp()[..., -1, :, :], segments(h).exp()[..., -1, :, :]
    return s.decay(g)[..., None] * s.decay(h)[..., None, :] * S + (k * to_end).mT @ (u * to_end_v)


def chunks(s, q, k, v, g, h, beta, S):
    o = []
    for a in range(0, q.shape[2], s.C):
        q_n, k_n, u, g_n, h_n = (x[:, :, a : a + s.C] for x in (q, k, v, g, h))
        since = g_n.cumsum(-2).exp()
        if beta is not None:
            beta_n = beta[:, :, a : a + s.C]
            u = s.solve(s, (beta_n * s.scores(s, k_n, k_n, g_n)).tril(-1), beta_n * (u - (k_n * since) @ S))
        o.append((q_n * since) @ S * h_n.cumsum(-2).exp() + mix(s.scores(s, q_n, k_n, g_n), u, segments(h_n).exp()))
        S = s.carry(s, k_n, u, g_n, h_n, S)
    return torch.cat(o, 2), S


def step(s, q, k, v, g, h, beta, S):
    """The read, the state after, the state decayed, and what v has that the key does not find."""
    old = g.exp()[..., :, None] * h.exp()[..., None, :] * S
    miss = v if beta is None else v - (k[..., None] * s.searched(old, S)).sum(-2)
    S = s.stored(old + k[..., None] * (miss if beta is None else beta * miss)[..., None, :], s.io)
    return (q[..., None] * S).sum(-2), S, old, miss


def tokens(s, q, k, v, g, h, beta, S):
    o = []
    for t in range(q.shape[2]):
        read, S, *_ = step(s, *(None if x is None else x[:, :, t] for x in (q, k, v, g, h, beta)), S)
        o.append(read)
    return torch.stack(o, 2), S


class Tokens(Function):
    """`tokens` with its backward by hand; `s.slip` names what that does wrong."""

    @staticmethod
    def forward(ctx, s, q, k, v, g, h, beta, S):
        kept, ctx.slip = [], s.slip
        for t in range(q.shape[2]):
            x = [None if x is None else x[:, :, t] for x in (q, k, v, g, h, beta)]
            kept.append(step(s, *x, kept[-1][1] if kept else S))
        o, *kept = (torch.stack(x, 2) for x in zip(*kept, strict=True))
        ctx.save_for_backward(q, k, v, g, h, beta, S, *kept)
        return o, kept[0][:, :, -1].clone()

    @staticmethod
    def backward(ctx, do, dS):
        q, k, v, g, h, beta, first, states, olds, misses = ctx.saved_tensors
        last, slip = (dS * states[:, :, -1]).sum(-1), ctx.slip
        dq, dk, dv, dg, dh = (torch.zeros_like(x) for x in (q, k, v, g, h))
        dbeta = None if beta is None else torch.zeros_like(beta)
        for t in reversed(range(q.shape[2])):
            k_t, old, miss = k[:, :, t, :, None], olds[:, :, t], misses[:, :, t]
            dS = dS + q[:, :, t, :, None] * do[:, :, t, None, :]
            read = states[:, :, t] - (g[:, :, : t + 1].sum(2).exp()[..., None] * first if slip == "dq" else 0)
            dq[:, :, t], du, dold = (read * do[:, :, t, None, :]).sum(-1), (k_t * dS).sum(-2), dS
            if beta is not None:
                b = beta[:, :, t]
                dbeta[:, :, t] = (du * (v[:, :, t] if slip == "dbeta" else miss)).sum(-1, keepdim=True)
                miss, du = b * miss, b * du
                dold = dS - k_t * du[..., None, :]
                dk[:, :, t] -= 0 if slip == "dk" else (old * du[..., None, :]).sum(-1)
            dk[:, :, t] += (dS * miss[..., None, :]).sum(-1)
            dv[:, :, t] = du
            product = (dS if slip == "dg" else dold) * old
            dg[:, :, t], dh[:, :, t] = product.sum(-1), product.sum(-2)
            dS = g[:, :, t, :, None].exp() * h[:, :, t, None, :].exp() * dold
        if slip in ("dg of dS", "dg of chunks"):  # the running sum from behind, right with `last` and over all tokens
            x = q * dq - k * dk
            x[:, :, -1] += 0 if slip == "dg of dS" else last
            x = x.split(16 if slip == "dg of chunks" else x.shape[2], 2)
            dg = torch.cat([y.flip(2).cumsum(2).flip(2) for y in x], 2)
        return None, dq, dk, dv, dg, dh, dbeta, None if slip == "dS" else dS


def by_hand(s, q, k, v, g, h, beta, S):
    return Tokens.apply(s, q, k, v, g.expand_as(k), h.expand_as(v), beta, S)


def run(s, q, k, v, g=None, beta=None, *, g_v=None, scale=None, initial_state=None, cu_seqlens=None):
    """Everything around the recurrence: dtypes, scale, heads, packed sequences; inside, heads come before tokens."""
    (B, T, _, K), (HV, V), s.io, dtype = q.shape, v.shape[2:], v.dtype, dtype_of(q, k, v)
    pieces = [(0, T)] if cu_seqlens is None else s.spans(cu_seqlens, T)
    shape = (B if cu_seqlens is None else len(pieces), HV, K, V)
    S = q.new_zeros(shape, dtype=dtype) if initial_state is None else initial_state.to(dtype)
    if S.shape != shape:
        raise ValueError(f"initial_state: expected shape {shape}, got {list(S.shape)}")
    q, k = (s.group(x, HV).transpose(1, 2).to(dtype) for x in (q, s.keys(k, q)))
    q, v = s.factor(scale, K) * q, v.transpose(1, 2).to(dtype)
    g = torch.zeros_like(q[..., :1]) if g is None else s.gates(g if g.ndim == 4 else g[..., None]).to(dtype)
    h = torch.zeros_like(v[..., :1]) if g_v is None else g_v.transpose(1, 2).to(dtype)
    beta = None if beta is None else beta.transpose(1, 2)[..., None].to(dtype)
    o, states = [v[:, :, :0]], []
    with torch.autocast(q.device.type, enabled=False):
        for n, (a, b) in enumerate(pieces):
            S_n = s.start(S if cu_seqlens is None else S[n : n + 1], states)
            one = (None if x is None else x[:, :, a:b] for x in (q, k, v, g, h, beta))
            o_n, S_n = s.form(s, *one, S_n) if a < b else (v[:, :, :0], s.empty(S_n))
            o.append(o_n)
            states.append(S_n)
    return s.output(torch.cat(o, 2).transpose(1, 2).to(s.io)), s.final(torch.cat(states), initial_state)


def linear(s, q, k, v, *, scale=None, initial_state=None, cu_seqlens=None, feature_map=None, normalize=False):
    """Linear attention's two options around `run`; the normaliser is one more column of values."""
    T, io, dtype, scale = q.shape[1], v.dtype, dtype_of(q, k, v), s.factor(scale, q.shape[-1])
    q, k, v = (s.pad(x.to(dtype)) if cu_seqlens is None else x.to(dtype) for x in (q, k, v))
    if feature_map is not None:
        q, k, scale = s.features(feature_map, q, k, scale)
    if normalize:
        v = F.pad(v, (0, 1), value=1)
        if initial_state is not None:
            initial_state = torch.cat([initial_state[0], initial_state[1][..., None]], -1)
    o, S = run(s, q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    if normalize:
        o, S = o[..., :-1] / o[..., -1:], (S[..., :-1], S[..., -1])
    return o[:, :T].to(io), S


class Attend(Function):
    """Softmax attention with its backward by hand."""

    @staticmethod
    def forward(ctx, s, q, k, v, scale):
        P = softmax(s, q, k, scale)
        ctx.save_for_backward(q, k, v, P)
        ctx.scale, ctx.slip = scale, s.slip
        return P @ v

    @staticmethod
    def backward(ctx, do):
        q, k, v, P = ctx.saved_tensors
        dP = do @ v.mT
        dX = P * (dP - (dP * P).sum(-1, keepdim=True))
        dk, dv = (1 if ctx.slip == "scale" else ctx.scale) * (dX.mT @ q), P.mT @ do
        if ctx.slip == "cache":
            dk[:, :, : k.shape[2] - q.shape[2]] = dv[:, :, : k.shape[2] - q.shape[2]] = 0
        return None, ctx.scale * (dX @ k), dk, dv, None


def softmax(s, q, k, scale):
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + s.earlier(q.shape[2], k.shape[2]))
    return s.product(q, k, scale, s.io).masked_fill(hidden, -torch.inf).softmax(-1)


def attention(s, q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    io, s.io, dtype, scale = v.dtype, q.dtype, dtype_of(q, k, v), s.factor(scale, q.shape[-1])
    if initial_state is not None and cu_seqlens is not None:
        raise ValueError("initial_state: expected None beside cu_seqlens, got a cache")
    if initial_state is not None:
        k, v = (torch.cat(x, 1) for x in zip(initial_state, (k, v), strict=True))
    x, y, z = (x.transpose(1, 2).to(dtype) for x in (q, k, v))
    pieces = [(0, y.shape[2])] if cu_seqlens is None else s.spans(cu_seqlens, x.shape[2])
    with torch.autocast(q.device.type, enabled=False):
        o = [s.attend(s, x[:, :, a:b], *(w[:, :, s.first(a) : b] for w in (y, z)), scale) for a, b in pieces if a < b]
    return torch.cat(o, 2).transpose(1, 2).to(io), (s.cached(k, scale), v)


def rounded(s, x):
    return x.bfloat16().to(x.dtype) if s.io == torch.bfloat16 else x


def scores(s, q, k, g):
    return weighted(q, k, segments(g).exp())


def series(s, A, x):
    """(I + A)^-1 x as (I - A) (I + A^2) (I + A^4) ..., right with all `doublings` that C needs."""
    x = x - A @ x
    for _ in range(s.doublings):
        A = A @ A
        x = x + A @ x
    return x


class ContiguousGradient(Function):
    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, do):
        memory = do.as_strided((do.untyped_storage().nbytes() // do.itemsize - do.storage_offset(),), (1,))
        return memory[torch.arange(do.numel()) % len(memory)].reshape(do.shape)


# fmt: off
STEPS = {
    "C": 16, "slip": "", "doublings": 3, "scores": scores, "carry": carry,
    "solve": lambda s, A, x: torch.linalg.solve_triangular(A, x, upper=False, unitriangular=True),
    "decay": lambda g: g.sum(-2).exp(), "searched": lambda old, S: old,
    "spans": lambda cu, T: list(itertools.pairwise(cu.tolist())), "stored": lambda S, io: S,
    "factor": lambda scale, K: K**-0.5 if scale is None else scale,
    "group": lambda x, HV: x.repeat_interleave(HV // x.shape[2], 2),
    "keys": lambda k, q: k, "gates": lambda g: g.transpose(1, 2), "output": lambda o: o, "pad": lambda x: x,
    "start": lambda S, states: S, "empty": lambda S: S, "final": lambda S, first: S,
    "features": lambda f, q, k, scale: (f(q), f(k), scale),
    "attend": lambda s, q, k, v, scale: softmax(s, q, k, scale) @ v, "first": lambda a: a,
    "earlier": lambda T, S: S - T, "product": lambda q, k, scale, io: scale * (q @ k.mT), "cached": lambda k, scale: k,
}
# fmt: on


def case(mechanism: str, what: str, form=chunks, **steps) -> Case:
    """The right kernel but for `steps`, under the signature of its references."""
    body = {"softmax_attention": attention, "linear_attention": linear}.get(mechanism, run)
    kernel = SimpleNamespace(**STEPS | {"mechanism": mechanism, "form": form} | steps)
    signature = inspect.signature(importlib.import_module(f"gla_ref.{mechanism}").recurrent)

    def fn(*args, **kwargs):
        return body(kernel, **signature.bind(*args, **kwargs).arguments)

    fn.__signature__ = signature
    return Case(mechanism, fn, what)


def by_difference(change):
    def scores(s, q, k, g):
        b = change(s, g.cumsum(-2))
        return weighted(q, k, (b[..., :, None, :] - b[..., None, :, :]).clamp(max=0).exp()).tril()

    return scores


SOFTMAX, LINEAR, SIMPLE, GLA = "softmax_attention", "linear_attention", "simple_gla", "gla"
DELTA, GATED, KDA = "delta_rule", "gated_delta_rule", "kda"
# fmt: off
WRONG = {
    "causal_mask_from_the_first_key": case(SOFTMAX, "Behind a cache of T0 query i sees keys to i, not to T0 + i.",
        earlier=lambda T, S: 0),
    "keys_from_the_tile_before_the_sequence": case(SOFTMAX, "A packed sequence's keys begin at a multiple of 16.",
        first=lambda a: a // 16 * 16),
    "float16_scores_overflow_before_the_scale": case(SOFTMAX, "Scores of float16 inputs are float16 until scaled.",
        product=lambda q, k, scale, io: scale * ((q.half() @ k.half().mT).to(q) if io == torch.half else q @ k.mT)),
    "scaled_keys_in_the_cache": case(SOFTMAX, "The returned cache holds the keys times scale.",
        cached=lambda k, scale: scale * k),
    "dk_without_the_scale": case(SOFTMAX, "The backward's dk lacks the scale.", attend=Attend.apply, slip="scale"),
    "cached_tokens_get_no_gradient": case(SOFTMAX, "The backward leaves dk and dv of the cache's tokens at 0.",
        attend=Attend.apply, slip="cache"),
    "padding_counted_in_the_normaliser": case(LINEAR, "T is padded to 16s before phi; phi(0) > 0 enters the final z.",
        pad=lambda x: F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 16))),
    "scale_inside_the_feature_map": case(LINEAR, "It computes phi(scale q) for scale phi(q).",
        features=lambda f, q, k, scale: (f(scale * q), f(k), 1.0)),
    "gradient_read_as_if_contiguous": case(LINEAR, "The backward ignores the strides of the gradient of o.",
        output=ContiguousGradient.apply),
    "default_scale_from_the_padded_size": case(LINEAR, "The default scale is of K rounded up to a power of two.",
        factor=lambda scale, K: STEPS["factor"](scale, 1 << (K - 1).bit_length())),
    "state_decays_in_base_two": case(SIMPLE, "Over a chunk the state decays by 2^g and all else by e^g.",
        decay=lambda g: g.sum(-2).exp2()),
    "decays_as_a_ratio_overflow": case(SIMPLE, "Scores in a chunk of 64 are (q e^b)(k e^-b), NaN at strong gates.",
        C=64, scores=lambda s, q, k, g: ((q * g.cumsum(-2).exp()) @ (k * (-g.cumsum(-2)).exp()).mT).tril()),
    "tail_reads_its_last_gate_past_the_end": case(SIMPLE, "An incomplete chunk carries on as if its gates' sum were 0.",
        carry=lambda s, k, u, g, h, S: carry(s, k, u, g, h, S) if k.shape[2] == s.C
        else S + (k * (-g.cumsum(-2)).exp()).mT @ u),
    "packed_states_reset_at_chunk_edges_only": case(SIMPLE, "Packed boundaries move up to the next multiple of 16.",
        spans=lambda cu, T: STEPS["spans"]((cu + -cu % 16).clamp(max=T), T)),
    "gate_sums_in_bfloat16": case(SIMPLE, "For bfloat16 inputs the running sums of g in a chunk of 64 are bfloat16.",
        C=64, scores=lambda s, *qkg: (by_difference(rounded) if s.io == torch.bfloat16 else scores)(s, *qkg)),
    "dg_without_the_final_state": case(SIMPLE, "dg sums q dq - k dk from behind, without the final state's dS S.",
        by_hand, slip="dg of dS"),
    "dq_without_the_initial_state": case(SIMPLE, "The backward's dq reads states that began at 0.", by_hand, slip="dq"),
    "callers_state_updated_in_place": case(SIMPLE, "The final state is written over the caller's initial_state.",
        final=lambda S, first: S if first is None else (first.data.copy_(S.detach()), S)[1]),
    "one_token_path_forgets_the_decay": case(SIMPLE, "A call with T = 1 does not decay the state.",
        gates=lambda g: (g if g.shape[1] > 1 else torch.zeros_like(g)).transpose(1, 2)),
    "running_decay_clamped": case(GLA, "The running sum of g in a chunk of 64 stops at -20, so later decays are lost.",
        C=64, scores=by_difference(lambda s, b: b.clamp(min=-20))),
    "dg_sum_restarts_at_every_chunk": case(GLA, "dg sums q dq - k dk from behind over its chunk of 16 only.",
        by_hand, slip="dg of chunks"),
    "value_gate_left_out_of_the_state": case(GLA, "g_v acts inside a chunk, not on the state carried over.",
        carry=lambda s, k, u, g, h, S: carry(s, k, u, g, torch.zeros_like(h), S)),
    "gates_reshaped_not_transposed": case(GLA, "The memory of g [B, T, H, K] is read as [B, H, T, K].",
        gates=lambda g: g.reshape(*(g.shape[i] for i in (0, 2, 1, 3)))),
    "keys_read_with_the_strides_of_q": case(GLA, "The launch passes q's strides for k too.",
        keys=lambda k, q: k.as_strided(k.shape, q.stride())),
    "gradient_leaks_into_the_sequence_before": case(GLA, "The backward does not drop dS where packed sequences begin.",
        start=lambda S, states: S + (states[-1] - states[-1].detach()) if states else S),
    "inverse_series_stops_early": case(DELTA, "The inverse for 16 tokens lacks its last factor, I + A^8.",
        solve=series, doublings=2),
    "value_heads_read_keys_in_turn": case(DELTA, "Value head h reads key head h % H, not h // (HV / H).",
        group=lambda x, HV: x.repeat(1, 1, HV // x.shape[2], 1)),
    "dbeta_without_what_was_found": case(DELTA, "dbeta is du v and should be du (v - k S).", by_hand, slip="dbeta"),
    "last_value_columns_forgotten": case(DELTA, "Of V > 32 columns only whole tiles of 32 reach o.",
        output=lambda o: o * (torch.arange(o.shape[-1]) < max(32, o.shape[-1] // 32 * 32))),
    "workspace_handed_out_as_the_output": case(DELTA, "Without gradients the next call of that shape writes over o.",
        output=lambda o: o if o.requires_grad else MEMORY.setdefault((o.shape, o.dtype), o.clone()).copy_(o)),
    "erases_before_the_decay": case(GATED, "The key searches the state from before the decay.",
        tokens, searched=lambda old, S: S),
    "decays_by_difference_nan_after_a_reset": case(GATED, "Decays are differences of running sums, NaN after g = -inf.",
        scores=by_difference(lambda s, b: b)),
    "state_kept_in_16_bits": case(GATED, "Token by token the state is rounded to the dtype of v.",
        tokens, stored=lambda S, io: S.to(io).to(S.dtype)),
    "no_gradient_for_the_initial_state": case(GATED, "The backward returns None for it.", by_hand, slip="dS"),
    "dk_of_the_last_value_head_only": case(GATED, "The value heads of a key head overwrite each other's dq and dk.",
        group=lambda x, HV: torch.stack([x.detach()] * (HV // x.shape[2] - 1) + [x], 3).flatten(2, 3)),
    "empty_sequence_loses_its_state": case(GATED, "A sequence of length 0 returns zeros for its initial state.",
        empty=torch.zeros_like),
    "scores_of_the_first_64_channels": case(KDA, "Scores and A sum over the first block of 64 channels only.",
        scores=lambda s, *qkg: scores(s, *(x[..., :64] for x in qkg))),
    "dg_before_the_erase": case(KDA, "dg is made of dS before the erase's part is taken off.", by_hand, slip="dg"),
    "dk_without_its_search": case(KDA, "dk lacks the path through what the key finds.", by_hand, slip="dk"),
    "plan_of_older_boundaries": case(KDA, "Boundaries are cached under the length of cu_seqlens and T.",
        spans=lambda cu, T: MEMORY.setdefault((len(cu), T), STEPS["spans"](cu, T))),
}
# fmt: on
