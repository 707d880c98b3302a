"""Mistakes of a right form that show only in some sizes, strides or ways of being called; all are caught."""

import functools
import random
import re

import pytest
import torch
from cases import thin

from gla_ref import FORMS, check
from gla_ref.check import Case
from gla_ref.check._examine import INSIDE, Examiner, reproduction
from gla_ref.check._kernel import SECONDS, Convention, Kernel
from gla_ref.check._run import AROUND, placed, same
from gla_ref.check._where import common
from gla_ref.check.museum import corrected, inverse

LINEAR, GATED = FORMS["linear_attention"]["chunkwise"], FORMS["gla"]["chunkwise"]


def wrong_if(where):
    """A right form whose output is off by one percent on calls of that kind."""

    def fn(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
        o, S = LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
        return 1.01 * o if where(q, scale, initial_state, cu_seqlens) else o, S

    return fn


CALLS = {  # when it is wrong, and the case that tells
    "one head": (lambda q, scale, S, cu: q.shape[2] == 1, "one head"),
    "two whole chunks": (lambda q, scale, S, cu: q.shape[1] == 128, "length 128"),
    "less than a sub-chunk": (lambda q, scale, S, cu: 1 < q.shape[1] < 16, "length 7"),
    "packed without a state": (lambda q, scale, S, cu: cu is not None and S is None, "packed with other boundaries"),
    "packed with a scale": (lambda q, scale, S, cu: cu is not None and scale is not None, "packed with scale"),
    "one token with a scale": (lambda q, scale, S, cu: q.shape[1] == 1 and scale is not None, "one token with scale"),
    "one token without a state": (lambda q, scale, S, cu: q.shape[1] == 1 and S is None, "one token without state"),
    "a scale without a state": (lambda q, scale, S, cu: scale is not None and S is None, "scale without state"),
    "whole chunks in a pack": (lambda q, scale, S, cu: cu is not None and 64 in cu.diff(), "packed whole chunks"),
    "more sequences than a warp has lanes": (lambda q, scale, S, cu: cu is not None and len(cu) > 33, "many sequences"),
    "heads by fours, the rest left out": (lambda q, scale, S, cu: q.shape[2] > 4, "many heads"),
    "more programs than multiprocessors": (lambda q, scale, S, cu: len(q) * q.shape[2] > 148, "many heads"),
    "a tile of 128 keys, its tail dropped": (lambda q, scale, S, cu: q.shape[3] > 128, "widest"),
    "a split of 128 keys past the fourth chunk": (
        lambda q, scale, S, cu: q.shape[3] == 128 and q.shape[1] > 256,
        "joint square",
    ),
    "a split of 128 keys in a pack": (lambda q, scale, S, cu: q.shape[3] == 128 and cu is not None, "joint packed"),
    "many programs of many chunks": (lambda q, scale, S, cu: q.shape[2] >= 16 and q.shape[1] >= 200, "long"),
    "more packed states than a block has": (
        lambda q, scale, S, cu: cu is not None and q.shape[2] > 1 and len(S) * q.shape[2] > 64,
        "many sequences",
    ),
    "K = V and whole chunks": (lambda q, scale, S, cu: q.shape[3] == 6 and q.shape[1] % 64 == 0, "square"),
    "views of one tensor": (lambda q, scale, S, cu: q.stride(1) == 3 * q.stride(2) * q.shape[2], "fused"),
    "a state of float64": (lambda q, scale, S, cu: S is not None and S.dtype == torch.float64, "state of float64"),
    "boundaries of int64": (
        lambda q, scale, S, cu: cu is not None and cu.dtype == torch.int64,
        "packed with other boundaries",
    ),
}


SHORT = ["one head", "less than a sub-chunk", "one token with a scale", "boundaries of int64"]


@pytest.mark.parametrize("name", thin(CALLS, *SHORT))
def test_no_kind_of_call_is_left_out(name):
    where, only = CALLS[name]
    report = check.kernel("linear_attention", wrong_if(where), only=only)
    assert {(row.quantity, row.kind) for row in report.failures} >= {("o", "error")}, str(report)


class Unlike(torch.autograd.Function):
    """x as `read` sees it, and of its gradient what `pull` makes, which gets a count of the passes too."""

    @staticmethod
    def forward(ctx, x, read, pull):
        ctx.pull, ctx.passes = pull, 0
        return read(x).clone()

    @staticmethod
    def backward(ctx, d):
        ctx.passes += 1
        return ctx.pull(d, ctx.passes), None, None


def in_order(x):
    """What a kernel reads that takes x to be contiguous; of the poison between the rows, zeros."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset()).nan_to_num()


def neighbours(x):
    """What a kernel reads that knows all strides but the last, and takes that for 1."""
    last = torch.arange(x.shape[-1]) + sum(
        torch.arange(n).view(-1, *[1] * (x.ndim - 1 - i)) * s
        for i, (n, s) in enumerate(zip(x.shape[:-1], x.stride()[:-1], strict=True))
    )
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole[(x.storage_offset() + last) % len(whole)].nan_to_num()


class Ring(torch.autograd.Function):
    """x, whose backward pass needs one of so many buffers, which as many calls of this size later another one takes."""

    kept, calls = {}, {}

    @staticmethod
    def forward(ctx, x, slots):
        n = Ring.calls[x.shape, slots] = Ring.calls.get((x.shape, slots), 0) + 1
        ctx.slot = (x.shape, slots, n % slots)
        Ring.kept[ctx.slot] = x.detach()
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        return d if torch.equal(Ring.kept[ctx.slot], x) else 2 * d, None


class Pool(torch.autograd.Function):
    """x, whose backward pass needs a buffer, which the first such pass hands to the next call of this size."""

    free = {}

    @staticmethod
    def forward(ctx, x):
        free = Pool.free.setdefault(x.shape, [])
        ctx.buffer = free.pop() if free else torch.empty_like(x)
        ctx.buffer.copy_(x)
        ctx.save_for_backward(x)
        ctx.given = False
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        d = d if torch.equal(ctx.buffer, x) else 2 * d
        if not ctx.given:
            Pool.free[x.shape].append(ctx.buffer)
            ctx.given = True
        return d


class Skipping(torch.autograd.Function):
    """v, which gets no gradient in a chunk for whose o there is none; and o, which tells of that."""

    @staticmethod
    def forward(ctx, x, chunks, tells):
        ctx.chunks, ctx.tells = chunks, tells
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        for i, part in enumerate(d.split(64, 1)):
            if ctx.tells:
                ctx.chunks[i] = bool(part.any())
            elif not ctx.chunks.get(i, True):
                part.zero_()
        return d, None, None


class Early(torch.autograd.Function):
    """o and S, whose backward pass is over where nothing comes for o (0) or for S (1)."""

    @staticmethod
    def forward(ctx, o, S, which):
        ctx.set_materialize_grads(False)
        ctx.which = which
        ctx.save_for_backward(o, S)
        return o.clone(), S.clone()

    @staticmethod
    def backward(ctx, *d):
        zeros = [torch.zeros_like(x) for x in ctx.saved_tensors]
        d = zeros if d[ctx.which] is None else [z if x is None else x for x, z in zip(d, zeros, strict=True)]
        return *d, None


def linear(mistake):
    """Linear attention whose mistake shows in some shapes, strides or ways of being called only."""
    kept = {}  # from call to call

    def fn(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None, output_final_state=False):
        K, V, S = q.shape[-1], v.shape[-1], initial_state
        if mistake == "boundaries looked up by address" and cu_seqlens is not None:
            key = cu_seqlens.data_ptr(), cu_seqlens.dtype, len(cu_seqlens)
            cu_seqlens = kept.setdefault(key, (cu_seqlens, cu_seqlens.clone()))[1]
        if mistake == "channels read as neighbours":
            k = Unlike.apply(k, neighbours, lambda d, passes: d)
        if mistake == "another call's q in the backward pass":
            q = Ring.apply(q, 1)
        if mistake == "a ring of five buffers":
            q = Ring.apply(q, 5)
        if mistake == "a buffer that the first backward pass hands on":
            q = Pool.apply(q)
        chunks = {}
        if mistake == "chunks without a gradient of o skipped":
            v = Skipping.apply(v, chunks, False)
        if mistake == "scores beyond half precision":
            q = torch.where(q.abs() > 65504, torch.inf, q)
        if mistake == "k read with q's strides":
            k = k.as_strided(k.shape, q.stride(), k.storage_offset())
        if mistake == "a scale of 0 taken for none":
            scale = scale or None
        if mistake == "the plan of another pack" and cu_seqlens is not None:
            cu_seqlens = kept.setdefault((len(cu_seqlens), q.shape[1]), cu_seqlens)
        if mistake == "a tile of 64 keys, its tail dropped" and K > 64:
            q = torch.cat([q[..., :64], 0 * q[..., 64:]], -1)
        if mistake == "a tile of 32 keys, its tail dropped" and 32 < K < 64:
            q = torch.cat([q[..., :32], 0 * q[..., 32:]], -1)
        if mistake == "S0 read as if contiguous" and S is not None:
            S = Unlike.apply(S, in_order, lambda d, passes: d)
        if mistake == "no gradient of a state of zeros" and S is not None and not S.any():
            S = S.detach()
        if mistake == "rows beyond T times 0":
            beyond = k.as_strided(k[:, :1].shape, k.stride(), k.storage_offset() + k.shape[1] * k.stride(1))
            k = k + 0 * beyond.detach()
        if mistake == "no gradient of q where v needs none" and not v.requires_grad:
            q = q.detach()
        if mistake == "no gradients unless k or v need one" and not (k.requires_grad or v.requires_grad):
            q, S = q.detach(), S if S is None else S.detach()
        if mistake == "no gradients unless all need one" and not (q.requires_grad and v.requires_grad):
            q, k, v, S = (x if x is None else x.detach() for x in (q, k, v, S))
        o, S = LINEAR(q, k, v, scale=scale, initial_state=S, cu_seqlens=cu_seqlens)
        if mistake == "a buffer in the dtype of the first call":
            o = o.to(kept.setdefault(q.shape, q.dtype)).to(q.dtype)
        if mistake == "chunks without a gradient of o skipped":
            o = Skipping.apply(o, chunks, True)
        if mistake == "a carry lost at 2048" and q.shape[1] > 2048:
            late, S = LINEAR(q[:, 2048:], k[:, 2048:], v[:, 2048:], scale=scale)
            o = torch.cat([o[:, :2048], late], 1)
        if mistake == "the state updated in place" and initial_state is not None:
            if not any(x.requires_grad for x in (q, k, v, initial_state)):
                S = initial_state.copy_(S)
        if mistake == "the loss's gradient in half precision":
            o = Unlike.apply(o, torch.clone, lambda d, passes: torch.where(d.abs() < 2**-24, 0, d))
        if mistake == "the loss's gradient scaled in place":
            o = Unlike.apply(o, torch.clone, lambda d, passes: d.mul_(2) / 2)
        if mistake == "no chain of gradients without a final state" and not output_final_state:
            o = Unlike.apply(o, torch.clone, lambda d, passes: 0.5 * d)
        if mistake == "the state in a workspace" and not torch.is_grad_enabled():
            S = kept.setdefault(S.shape, torch.empty_like(S)).copy_(S)
        if mistake == "no gradients but with one of o":
            o, S = Early.apply(o, S, 0)
        if mistake == "no gradients but with one of S":
            o, S = Early.apply(o, S, 1)
        if mistake == "a tile of 64 values, its tail dropped" and V > 64:
            o = torch.cat([o[..., :64], 0 * o[..., 64:]], -1)
        if mistake == "the second batch reads the first, from chunk 4 on" and len(o) > 1:
            o = torch.cat([o[:, :256], o[:1, 256:].expand_as(o[:, 256:])], 1)
        if mistake == "do read as if contiguous":
            o = Unlike.apply(o, torch.clone, lambda d, passes: in_order(d))
        if mistake == "dS read as if contiguous":
            S = Unlike.apply(S, torch.clone, lambda d, passes: in_order(d))
        if mistake == "gradients added up from pass to pass":
            o = Unlike.apply(o, torch.clone, lambda d, passes: passes * d)
        if mistake == "other code without gradients" and not torch.is_grad_enabled():
            o = 1.01 * o
        return o, S

    return fn


WAYS = {  # mistake: a failure that names it
    "a tile of 64 keys, its tail dropped": ("wider", "o", "error"),
    "a tile of 64 values, its tail dropped": ("wider", "o", "error"),
    "a tile of 32 keys, its tail dropped": ("wide", "o", "error"),
    "the second batch reads the first, from chunk 4 on": ("long", "o", "error"),
    "S0 read as if contiguous": ("strided", "S", "error"),
    "do read as if contiguous": ("strided", "dv", "error"),
    "dS read as if contiguous": ("strided", "dv", "error"),
    "other code without gradients": ("length 7", "o", "no_grad"),
    "gradients added up from pass to pass": ("length 7", "dq", "twice"),
    "no gradient of q where v needs none": ("frozen inputs", "dq", "frozen"),
    "no gradients unless all need one": ("frozen inputs", "dk", "frozen"),
    "no gradients unless k or v need one": ("frozen inputs", "dq", "frozen"),
    "the state in a workspace": ("frozen inputs", "S", "overwritten"),
    "k read with q's strides": ("strided", "o", "not finite"),
    "a scale of 0 taken for none": ("scale zero", "o", "error"),
    "the plan of another pack": ("packed*", "o", "error"),
    "boundaries looked up by address": ("packed", "o", "moved"),
    "channels read as neighbours": ("transposed", "o", "error"),
    "another call's q in the backward pass": ("frozen inputs", "dq", "interleaved"),
    "a ring of five buffers": ("frozen inputs", "dq", "interleaved"),
    "a buffer that the first backward pass hands on": ("frozen inputs", "dq", "nested"),
    "a buffer in the dtype of the first call": ("frozen inputs", "o", "dtype before"),
    "chunks without a gradient of o skipped": ("loss of some tokens", "dv", "error"),
    "scores beyond half precision": ("huge", "o", "not finite"),
    "the state updated in place": ("length 7", "S0", "modified"),
    "the loss's gradient in half precision": ("small loss", "dq", "error"),
    "the loss's gradient scaled in place": ("length 7", "do", "modified"),
    "no chain of gradients without a final state": ("loss of o alone", "dk", "stateless"),
    "no gradients but with one of o": ("loss of the state alone", "dk", "error"),
    "no gradients but with one of S": ("loss of o alone", "dq", "error"),
    "no gradient of a state of zeros": ("state of*", "dS0", "missing"),
    "rows beyond T times 0": ("length 7", "o", "not finite"),
    "a carry lost at 2048": ("narrow and long", "o", "error"),
}


QUICK = [x for x in WAYS if WAYS[x][0] in ("length 7", "strided", "scale zero", "state of*")]


@pytest.mark.parametrize("mistake", thin(WAYS, *QUICK))
def test_no_way_of_calling_is_left_out(mistake):
    only, *what = WAYS[mistake]
    report = check.kernel("linear_attention", linear(mistake), only=only)
    assert what in [[row.quantity, row.kind] for row in report.failures], str(report)


def caught(mechanism, fn, name):
    """The quantities that are wrong in one case of the quick level; no mistake is looked for."""
    it = Examiner(Kernel(fn, mechanism, Convention(), torch.device("cpu"), SECONDS), torch.float32, 0)
    (case,) = (case for case in check.cases(mechanism) if case.name == name)
    return {row.quantity for row in it.run(it.pose([case])[0]).rows if row.status == "failed"}


def on(mechanism, change):
    """A right form on tensors that are changed, by their names; S0 is the initial state, if there is one."""
    form, names = FORMS[mechanism]["chunkwise"], check.MECHANISMS[mechanism].arguments

    def fn(*tokens, scale=None, initial_state=None, cu_seqlens=None):
        x = dict(zip(names, tokens, strict=True)) | ({} if initial_state is None else {"S0": initial_state})
        x |= change(x)
        return form(*(x[n] for n in names), scale=scale, initial_state=x.get("S0"), cu_seqlens=cu_seqlens)

    return fn


def turned(x, axis=-1):
    """x with the channels beyond the first 16 replaced by those of the first 16, over and over."""
    return x.index_select(axis, torch.arange(x.shape[axis]) % 16)


def overwritten(beta):
    """Strengths in a buffer of 4096 numbers, which those of later tokens overwrite."""
    numbers = beta.flatten(1)
    i, last = torch.arange(numbers.shape[1]) % 4096, numbers.shape[1] - 1
    return numbers[:, i + (last - i) // 4096 * 4096].view_as(beta)


def divided(x, of=torch.clone):
    """x, whose gradient was multiplied by `of(x)` and divided by that."""
    return Unlike.apply(x, torch.clone, lambda d, passes: d * (of(x) / of(x)))


def as_wide_as_keys(x):
    return {"v": x["v"] * (torch.arange(x["v"].shape[-1]) < x["k"].shape[-1])}


def first_two(x, HV):
    """Key heads for their value heads, of which the first two alone give a gradient."""
    some = (torch.arange(HV) % (HV // x.shape[2]) < 2)[:, None]
    repeated = x.repeat_interleave(HV // x.shape[2], 2)
    return torch.where(some, repeated, repeated.detach())


def after_resets(x):
    """Queries and keys of which those behind a reset are lost until their chunk of 64 ends."""
    lost = torch.cat([g.cumsum(1).isneginf() for g in x["g"].split(64, 1)], 1)
    return {n: x[n].masked_fill(lost, 0.0) for n in "qk"}


def segments(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    """No gradient comes back over the border of 256 tokens."""
    if cu_seqlens is not None or q.shape[1] <= 256:
        return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    first, S = LINEAR(*(x[:, :256] for x in (q, k, v)), scale=scale, initial_state=initial_state)
    rest, S = LINEAR(*(x[:, 256:] for x in (q, k, v)), scale=scale, initial_state=S.detach())
    return torch.cat([first, rest], 1), S


def attention(seen):
    """Attention to the keys j that a query i has by `seen(i, j, keys)`, and of these to those not behind it."""

    def fn(q, k, v, *, scale=None, initial_state=None):
        k, v = (k, v) if initial_state is None else (torch.cat(x, 1) for x in zip(initial_state, (k, v), strict=True))
        keys, scale = k.shape[1], q.shape[-1] ** -0.5 if scale is None else scale
        i, j = torch.arange(q.shape[1])[:, None] + keys - q.shape[1], torch.arange(keys)
        x = scale * torch.einsum("bihd,bjhd->bhij", q, k)
        p = x.masked_fill(~((j <= i) & seen(i, j, keys)), -torch.inf).softmax(-1).nan_to_num()
        return torch.einsum("bhij,bjhd->bihd", p, v), (k, v)

    return fn


def rescaled(q, k, v, *, scale=None):
    """Attention whose sums over tiles of 32 keys are not rescaled to a new maximum."""
    scale, T = q.shape[-1] ** -0.5 if scale is None else scale, q.shape[1]
    x = scale * torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
    m, d, o = torch.full_like(x[..., :1], -torch.inf), 0, 0
    for a in range(0, T, 32):
        m = torch.maximum(m, x[..., a : a + 32].amax(-1, keepdim=True))
        p = (x[..., a : a + 32] - m).exp()
        d, o = d + p.sum(-1, keepdim=True), o + p @ v[:, a : a + 32].transpose(1, 2)
    return (o / d).transpose(1, 2)


def whole_tile(q, k, v, g, **named):
    """The final state of sequences that end with a tile of 48 is that before it."""
    o, S = FORMS["simple_gla"]["chunkwise"](q, k, v, g, **named)
    T = q.shape[1]
    early = T % 48 == 0 and named.get("cu_seqlens") is None
    return o, FORMS["simple_gla"]["chunkwise"](*(x[:, : T - 48] for x in (q, k, v, g)), **named)[1] if early else S


CHANGES = {  # mechanism, what becomes of the tensors of a right form, the case and a quantity that is wrong there
    "channels of q modulo 16": ("linear_attention", lambda x: {"q": turned(x["q"])}, "wide", "o"),
    "channels of v modulo 16": ("linear_attention", lambda x: {"v": turned(x["v"])}, "wide", "S"),
    "channels of g modulo 16": ("gla", lambda x: {"g": turned(x["g"])}, "wide", "dg"),
    "rows of S0 modulo 16": ("linear_attention", lambda x: {"S0": turned(x["S0"], -2)}, "wide", "S"),
    "v masked like k": ("linear_attention", as_wide_as_keys, "values wider than keys", "o"),
    "a buffer of strengths": ("delta_rule", lambda x: {"beta": overwritten(x["beta"])}, "many tokens and heads", "o"),
    "dbeta divided by beta": ("delta_rule", lambda x: {"beta": divided(x["beta"])}, "strength 0", "dbeta"),
    "dg divided by g": ("gla", lambda x: {"g": divided(x["g"])}, "gate zero", "dg"),
    "dg divided by the decay": ("gla", lambda x: {"g": divided(x["g"], torch.exp)}, "gate -inf", "dg"),
    "dk of two value heads": (
        "delta_rule",
        lambda x: {n: first_two(x[n], x["v"].shape[2]) for n in "qk"},
        "value heads strided",
        "dk",
    ),
    "g read as if contiguous": (
        "simple_gla",
        lambda x: {"g": Unlike.apply(x["g"], in_order, lambda d, passes: d)},
        "strided",
        "o",
    ),
    "lost after a reset": ("gla", after_resets, "gate many resets", "o"),
    "strengths clamped to 1": ("delta_rule", lambda x: {"beta": x["beta"].clamp_max(1)}, "strengths up to 2", "o"),
    "keys normalised again": ("kda", lambda x: {"k": x["k"] / x["k"].norm(dim=-1, keepdim=True)}, "short keys", "o"),
    "beta left out of what is erased": (
        "delta_rule",
        lambda x: {"v": x["beta"][..., None] * x["v"], "beta": torch.ones_like(x["beta"])},
        "length 7",
        "o",
    ),
}
CORRECTED = {  # what a delta rule takes for the inverse of I + A
    "inverse transposed": lambda A: inverse(A).mT,
    "values not corrected within a chunk": lambda A: inverse(0 * A),
    "inverse to first order": lambda A: inverse(0 * A) - A,
    "no gradient through the inverse": lambda A: inverse(A).detach(),
}
last_alone = attention(lambda i, j, keys: (j < keys - 1) | (keys % 96 != 1) | (keys == 1))
CAUGHT = {name: (mechanism, on(mechanism, change), *at) for name, (mechanism, change, *at) in CHANGES.items()} | {
    "segments of 256 tokens": ("linear_attention", segments, "long", "dk"),
    **{name: ("kda", corrected(inverse=invert), "length 7", "dbeta") for name, invert in CORRECTED.items()},
    "sums not rescaled to a new maximum": ("softmax_attention", rescaled, "length 65", "o"),
    "a strict mask": ("softmax_attention", attention(lambda i, j, keys: j < i), "length 7", "o"),
    "a last tile of 64 keys lost": (
        "softmax_attention",
        attention(lambda i, j, keys: j < keys // 64 * 64),
        "length 65",
        "o",
    ),
    "a window of 64 keys": ("softmax_attention", attention(lambda i, j, keys: i - j < 64), "length 65", "o"),
    "a last key alone in its tile of 96": ("softmax_attention", last_alone, "481 tokens", "o"),
    "a last tile of 48 that is whole": ("simple_gla", whole_tile, "480 tokens", "S"),
}


@pytest.mark.parametrize("name", CAUGHT)
def test_a_kind_of_mistake_is_caught(name):
    """The only ones of their kind."""
    mechanism, fn, case, quantity = CAUGHT[name]
    assert quantity in caught(mechanism, fn, case)


def in_dtypes(seen, refused=(), most=9):
    """A right form that notes the dtypes of its calls, refuses some, and is wrong with larger batches."""

    def fn(q, k, v, **named):
        seen.add(q.dtype)
        if q.dtype in refused:
            raise TypeError("q: expected another dtype")
        o, S = LINEAR(q, k, v, **named)
        return o if len(q) <= most else 1.01 * o, S

    return fn


def test_a_call_in_another_dtype_comes_before_where_one_is_claimed():
    seen = set()
    check.kernel("linear_attention", in_dtypes(seen), only="frozen inputs").raise_if_failed()
    assert seen == {torch.float32, torch.bfloat16}
    refused = in_dtypes(set(), {torch.bfloat16})
    check.kernel("linear_attention", refused, only="frozen inputs").raise_if_failed()
    seen.clear()
    claim = {"dtypes": ("fp32",)}
    check.kernel("linear_attention", in_dtypes(seen), only="frozen inputs", supports=claim).raise_if_failed()
    assert seen == {torch.float32}
    check.kernel("linear_attention", in_dtypes(set(), most=2), only="frozen inputs").raise_if_failed()


@pytest.mark.parametrize("name", thin(["expanded", "transposed", "packed strided"], "transposed"))
def test_every_stride_is_tried(name):
    """A kernel that reads channels as neighbours is right where they are, and wrong for gates that they share."""

    def fn(q, k, v, g, **named):
        return GATED(q, k, v, Unlike.apply(g, neighbours, lambda d, passes: d), **named)

    assert check.kernel("gla", fn, only=name).ok == (name == "packed strided")


def test_gates_may_be_finer_than_the_rest_or_refused():
    def misread(q, k, v, g):
        read = g.view(q.dtype)[..., : q.shape[-1]]
        return GATED(q, k, v, -read.abs().nan_to_num())

    def refuses(q, k, v, g):
        if g.dtype != q.dtype:
            raise TypeError("g: expected the dtype of q")
        return GATED(q, k, v, g)

    options = {"dtype": torch.bfloat16, "only": "gates in float32"}
    assert check.kernel("gla", misread, **options).failures
    report = check.kernel("gla", refuses, **options)  # says so: nobody is misled
    assert not report.failures and report.not_covered["gates in float32"] == 1
    check.kernel("gla", refuses, only="gates in float32").raise_if_failed()


@pytest.mark.deep
def test_a_mask_that_is_not_infinite_is_caught():
    def fn(q, k, v):
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        x = q.shape[-1] ** -0.5 * torch.einsum("bihd,bjhd->bhij", q, k)
        return torch.einsum("bhij,bjhd->bihd", x.masked_fill(later, -1e4).softmax(-1), v)

    assert check.kernel("softmax_attention", fn, only="huge").failing == ["huge"]
    assert check.kernel("softmax_attention", fn, only="length 6?").ok


@pytest.mark.deep
def test_a_page_of_a_cache_is_not_left_out():
    def fn(q, k, v, *, scale=None, initial_state=None):
        pages = initial_state and tuple(x[:, :128] for x in initial_state)
        o, _ = FORMS["softmax_attention"]["parallel"](q, k, v, scale=scale, initial_state=pages)
        return o

    report = check.kernel("softmax_attention", fn, only="*n[gi]*c*")
    assert report.failing == ["long cache", "long cache and one token"]


@pytest.mark.deep
def test_what_failing_cases_share_and_how_far_all_go():
    report = check.kernel("linear_attention", wrong_if(lambda q, scale, S, cu: cu is not None))
    assert report.common == ["Only these have packed sequences"]
    assert "\nOnly these have packed sequences\n" in str(report)
    report = check.kernel("linear_attention", wrong_if(lambda q, scale, S, cu: q.shape[1] > 64), only="length*")
    assert report.common == ["Only these have more than 64 tokens in a sequence"]

    def few(q, k, v, *, C=64):
        return LINEAR(q, k, v)[0]

    report = check.kernel("linear_attention", few, only="length ?")
    assert report.common == [] and report.tried == "Tried up to B = 2, T = 7, H = 3, K = 5, V = 7; C not given."


@pytest.mark.deep
def test_a_sum_over_later_tokens_in_sixteen_bits_is_caught():
    def pull(d, passes):
        terms, d, rest = d - torch.cat([d[:, 1:], 0 * d[:, :1]], 1), d.clone(), 0
        for t in reversed(range(d.shape[1])):
            d[:, t] = rest = (rest + terms[:, t]).bfloat16()
        return d

    def fn(q, k, v, g, **named):
        g = Unlike.apply(g.float(), torch.clone, pull)
        o, S = GATED(q.float(), k.float(), v.float(), g, **named)
        return o.to(v.dtype), S

    report = check.kernel("gla", fn, dtype=torch.bfloat16, only="gate -1e-4 long")
    assert [row.quantity for row in report.failures] == ["dg"]


@pytest.mark.deep
def test_a_maximum_taken_before_a_negative_scale_is_caught():
    def fn(q, k, v, *, scale=None):
        later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        x = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(later, -torch.inf)
        p = (scale * (x - x.amax(-1, keepdim=True))).masked_fill(later, -torch.inf).exp()
        return torch.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdim=True), v)

    report = check.kernel("softmax_attention", fn, only="steep*")
    assert report.failing == ["steep and negative"]


def test_strides_are_those_of_the_own_order_of_axes():
    """What is contiguous, and what is not, whatever the layout, is what the kernel sees."""
    seen = {}

    class Contiguous(torch.autograd.Function):
        @staticmethod
        def forward(ctx, o, S):
            return o.clone(), S.clone()

        @staticmethod
        def backward(ctx, do, dS):
            seen["backward"] = {do.is_contiguous(), dS.is_contiguous()}
            return do, dS

    def fn(q, k, v, g, *, initial_state=None):
        S = initial_state
        seen["forward"] = {x.is_contiguous() for x in (q, k, v, g, S)}
        o, S = GATED(*(x.transpose(1, 2) for x in (q, k, v, g)), initial_state=S.mT)
        return Contiguous.apply(o.transpose(1, 2).contiguous(), S.mT.contiguous())

    for case, contiguous in (("square", True), ("strided", False)):
        check.kernel("gla", fn, layout="bhtd", state="vk", only=case).raise_if_failed()
        assert seen == {"forward": {contiguous}, "backward": {contiguous}}


@pytest.mark.deep
def test_resets_of_late_tokens_are_not_left_out():
    def fn(q, k, v, g, **named):
        early = torch.arange(g.shape[1])[:, None, None] < 128
        return GATED(q, k, v, torch.where(early, g, g.clamp_min(-5)), **named)

    report = check.kernel("gla", fn, only="gate [mr]*")
    assert report.failing == ["gate many resets", "gate many resets packed"], str(report)


def test_a_kernel_that_refuses_a_second_backward_pass_is_not_covered_there():
    def once(d, passes):
        if passes > 1:
            raise RuntimeError("called twice")
        return d

    def fn(*tokens, **named):
        o, S = LINEAR(*tokens, **named)
        return Unlike.apply(o, torch.clone, once), S

    report = check.kernel("linear_attention", fn, only="length 6?")
    assert report.ok and report.not_covered == {"second backward pass": 3}


@pytest.mark.parametrize("way", ["no_grad", "frozen"])
def test_what_goes_wrong_in_one_way_only_says_in_which(way):
    def fn(q, *tokens, **named):
        if way == "no_grad" and not torch.is_grad_enabled():
            return None
        if way == "frozen" and not q.requires_grad and torch.is_grad_enabled():
            raise RuntimeError("q has no gradient")
        return LINEAR(q, *tokens, **named)

    report = check.kernel("linear_attention", fn, only="frozen inputs")
    said = {
        "no_grad": "under torch.no_grad(): the function returned None",
        "frozen": "where q requires no gradient: RuntimeError: q has no gradient",
    }
    row = report.failures[0]
    assert row.message.startswith(said[way]) and not report.undiagnosed


NO_STATE = [(m, only) for m in ("linear_attention", "softmax_attention") for only in ("length*", "l[!e]*")]


@pytest.mark.parametrize("mechanism, only", thin(NO_STATE, ("linear_attention", "length*")))
def test_without_a_final_state_gradients_are_those_of_o(mechanism, only):
    def fn(q, k, v, *, scale=None):
        return FORMS[mechanism]["parallel"](q, k, v, scale=scale)[0]

    report = check.kernel(mechanism, fn, only=only)
    report.raise_if_failed()
    assert {"dq", "dk", "dv"} <= {row.quantity for row in report.rows if row.status == "passed"}


def test_a_result_that_varies_is_not_blamed_on_a_way_of_calling():
    calls = []

    def fn(q, k, v, **named):
        o, S = LINEAR(q, k, v, **named)
        calls.append(0)
        return (2 * o if len(calls) % 5 == 0 else o), S

    report = check.kernel("linear_attention", fn, only="[ln]*[!g]")
    assert report.failures and {row.kind for row in report.failures} == {"differs"}, str(report)
    assert not report.first_wrong and not report.diagnosis


def racing(share, seed):
    """A right form that is off by a thousandth in a share of its calls."""
    rng = random.Random(seed)

    def fn(q, k, v, **named):
        o, S = LINEAR(q, k, v, **named)
        return (1.001 * o if rng.random() < share else o), S

    return fn


def test_a_race_is_called_by_its_rate():
    report = check.kernel("linear_attention", racing(0.02, 0), only="length 1*", races=600)
    assert report.failures and {row.kind for row in report.failures} == {"differs"}, str(report)
    assert re.search(r"equal calls give different results \(in \d+ of \d+ calls\)", " ".join(str(report).split()))


def test_what_a_way_of_calling_does_at_times_only_is_a_race():
    rng = random.Random(1)

    def fn(q, k, v, **named):
        o, S = LINEAR(q, k, v, **named)
        return (2 * o if not torch.is_grad_enabled() and rng.random() < 0.5 else o), S

    report = check.kernel("linear_attention", fn, only="length 6*")
    assert {row.kind for row in report.failures} == {"differs"}, str(report)
    assert re.search(r"wrong in \d of 5 calls under torch.no_grad", " ".join(str(report).split()))


@pytest.mark.deep
def test_a_race_of_half_a_percent_is_found():
    options = {"only": "[lmn]*", "races": 600}
    found = [bool(check.kernel("linear_attention", racing(0.005, seed), **options).failures) for seed in range(20)]
    assert sum(found) >= 19, found


BOUNDARIES = {}  # of all packs, wrongly: by number of sequences and tokens


def remembering(q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
    if cu_seqlens is not None:
        cu_seqlens = BOUNDARIES.setdefault((len(cu_seqlens) - 1, q.shape[1]), cu_seqlens.clone())
    return LINEAR(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("known", thin([True, False], True))
def test_a_failure_in_company_is_told(known):
    BOUNDARIES.clear()
    fn = remembering if known else lambda q, k, v, cu_seqlens=None: remembering(q, k, v, cu_seqlens=cu_seqlens)
    report = check.kernel("linear_attention", fn, only="packed*")
    assert report.failing == ["packed with other boundaries"] and report.alone == report.failing * known
    said = "packed with other boundaries passes alone, in a new process: the kernel kept state from an earlier case"
    assert (said in " ".join(str(report).split())) == (said in report._repr_html_()) == known


def test_a_process_that_runs_one_case_starts_no_others(monkeypatch):
    monkeypatch.setenv(INSIDE, "1")
    monkeypatch.setattr("gla_ref.check._examine.right_alone", lambda lines, seconds: pytest.fail("a process"))
    BOUNDARIES.clear()
    report = check.kernel("linear_attention", remembering, only="packed*")
    assert len(report.failing) == 1 and not report.alone


def test_it_is_said_which_chunks_and_heads_are_wrong_and_in_a_case_where_some_are_right():
    def fn(q, k, v, *, initial_state=None):
        o, S = LINEAR(q, k, v, initial_state=initial_state)
        wrong = (torch.arange(o.shape[1]) < 64)[:, None, None] & (torch.arange(o.shape[2]) != 1)[:, None]
        return torch.where(wrong & (initial_state is not None), 1.01 * o, o), S

    report = check.kernel("linear_attention", fn, only="[ln]*[!g]")
    first = report.first_wrong[0]
    assert (first.quantity, first.case, first.only) == ("o", "length 65", "chunk 0 of 2; heads 0, 2 of 3")
    assert "\n    only in chunk 0 of 2; heads 0, 2 of 3\n" in str(report)
    assert report.common == ["Only these have an initial state"]


def test_what_failing_cases_hardly_share_by_chance_is_said():
    failing = [Case(T=n) for n in range(1, 21)]
    passing = [Case(T=n, state=n > 10) for n in range(1, 21)]
    assert common(failing, passing) == ["All failing cases have an initial state"]
    assert common(failing[:5], passing) == []
    assert common(passing[:4], failing) == ["Only these have no initial state"]
    packed = [Case(ends=(0, 70))]
    assert common(failing[:1], packed)[0] == "Only these have fewer than 70 tokens in a sequence; no packed sequences"


@pytest.mark.parametrize("strides", ["contiguous", "strided", "fused", "misaligned", "transposed", "expanded"])
def test_nan_lies_before_and_behind_every_tensor(strides):
    x = torch.randn(2, 1, 3, 5).expand(2, 4, 3, 5)
    y = placed(x, strides, 1)
    assert torch.equal(y, x)
    n = y.untyped_storage().nbytes() // y.element_size()
    nan = y.as_strided((n,), (1,), 0).isnan()
    assert nan[:AROUND].all() and nan[1 - AROUND :].all() and n - nan.sum() <= y.numel()


def test_a_shared_gradient_written_to_is_no_refusal():
    def fn(q, k, v, **named):
        o, S = LINEAR(q, k, v, **named)
        return Unlike.apply(o, torch.clone, lambda d, passes: d.mul_(2) / 2), S

    report = check.kernel("linear_attention", fn, only="expanded")
    assert [row.kind for row in report.failures] == ["modified"] and not report.not_covered


def test_an_error_names_the_authors_line():
    def fn(q, k, v):
        return torch.einsum("bthk,bshk->bths", q, k[..., :-1])  # raises inside of PyTorch

    (row,) = check.kernel("linear_attention", fn, only="length 7").failures
    line = fn.__code__.co_firstlineno + 1
    assert row.message.endswith(f"(fn, line {line} of test_check_calls.py)"), row.message


def test_lines_to_run_import_what_was_checked_or_say_that_nothing_does():
    @functools.wraps(remembering)
    def fn(*tokens, **named):
        return remembering(*tokens, **named)

    assert "from test_check_calls import remembering\n" in reproduction("linear_attention", remembering, Case(), None)
    assert "# fn: the function that was checked\n" in reproduction("linear_attention", fn, Case(), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_only_equal_results_are_the_same(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 0.0], dtype=dtype)
    assert same(x, x.clone()) and same(None, None)
    for i, other in enumerate([torch.nan, 1e30, largest, -largest, 1.0]):
        y = x.clone()
        y[i] = other
        assert not same(x, y) and not same(y, x)
    assert not same(x, None) and not same(x, x[:1])
