"""Right forms made wrong in some sizes, strides or ways of being called: what test_check_calls.py wants caught."""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from gla_ref import FORMS, check
from gla_ref.check import mistakes
from gla_ref.check.museum import chunked
from gla_ref.triangular import elimination as inverse

LINEAR, GATED = FORMS["linear_attention"]["chunkwise"], FORMS["gla"]["chunkwise"]
ATTENTION = "softmax_attention"


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


def pulled(x, pull):
    return Unlike.apply(x, torch.clone, pull)


def in_order(x):
    """What a kernel reads that takes x to be contiguous; of the poison between the rows, zeros."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset()).nan_to_num()


def read_in_order(x):
    return Unlike.apply(x, in_order, lambda d, passes: d)


def neighbours(x):
    """What a kernel reads that knows all strides but the last, and takes that for 1."""
    last = torch.arange(x.shape[-1])
    for i, (n, s) in enumerate(zip(x.shape[:-1], x.stride()[:-1], strict=True)):
        last = last + torch.arange(n).view(-1, *[1] * (x.ndim - 1 - i)) * s
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole[(x.storage_offset() + last) % len(whole)].nan_to_num()


class Ring(torch.autograd.Function):
    """x, whose backward pass needs one of five buffers, which the fifth call of this size after it takes."""

    kept, calls = {}, {}

    @staticmethod
    def forward(ctx, x):
        n = Ring.calls[x.shape] = Ring.calls.get(x.shape, 0) + 1
        ctx.slot = x.shape, n % 5
        Ring.kept[ctx.slot] = x.detach()
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        return d if torch.equal(Ring.kept[ctx.slot], x) else 2 * d


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


def skipping(q, k, v, **named):
    """v gets no gradient in a chunk of 64 for whose o there is none."""
    seen = {}

    def note(do, passes):
        seen["do"] = do
        return do

    def skip(dv, passes):
        return torch.cat([x * y.any() for x, y in zip(dv.split(64, 1), seen["do"].split(64, 1), strict=True)], 1)

    o, S = LINEAR(q, k, pulled(v, skip), **named)
    return pulled(o, note), S


def changed(change=lambda x: {}, mechanism="linear_attention", result=lambda x, o, S: (o, S)):
    """A right form on arguments that are changed, by their names, and of results that are.

    S0 is the initial state, if there is one; `final` tells whether the last one is asked for.
    """
    form, names = FORMS[mechanism]["chunkwise"], check.MECHANISMS[mechanism].arguments

    def fn(*tokens, scale=None, initial_state=None, cu_seqlens=None, output_final_state=False):
        x = dict(zip(names, tokens, strict=True)) | ({} if initial_state is None else {"S0": initial_state})
        x |= {"scale": scale, "cu": cu_seqlens, "final": output_final_state}
        x |= change(x)
        o, S = form(*(x[n] for n in names), scale=x["scale"], initial_state=x.get("S0"), cu_seqlens=x["cu"])
        return result(x, o, S)

    return mechanism, fn


def one(name, change, mechanism="linear_attention"):
    """A right form with one argument changed."""
    return changed(lambda x: {name: change(x[name])}, mechanism)


def of_o(change):
    return changed(result=lambda x, o, S: (change(o), S))


def of_do(pull):
    return of_o(lambda o: pulled(o, pull))


def frozen(needed, *names):
    """Some tensors get no gradient, unless those that are needed ask for one."""
    return changed(
        lambda x: {n: x[n].detach() for n in names if n in x and not needed(*(x[m].requires_grad for m in "qkv"))}
    )


def inverted(invert):
    return "kda", chunked(inverse=invert)


KEPT = {}  # what a wrong kernel keeps from call to call


def looked_up(x):
    """Boundaries are those of the first call with the same address."""
    cu = x["cu"]
    return {} if cu is None else {"cu": KEPT.setdefault((cu.data_ptr(), cu.dtype, len(cu)), (cu, cu.clone()))[1]}


def in_first_dtype(o):
    return o.to(KEPT.setdefault(("dtype", o.shape), o.dtype)).to(o.dtype)


def without_final(x, o, S):
    return o if x["final"] else pulled(o, lambda d, passes: 0.5 * d), S


def turned(x):
    """x with the channels beyond the first 16 replaced by those of the first 16, over and over."""
    return x[..., torch.arange(x.shape[-1]) % 16]


def overwritten(x):
    """Strengths in a buffer of 4096 numbers, which those of later tokens overwrite."""
    numbers = x["beta"].flatten(1)
    i, last = torch.arange(numbers.shape[1]) % 4096, numbers.shape[1] - 1
    return {"beta": numbers[:, i + (last - i) // 4096 * 4096].view_as(x["beta"])}


def divided(x, of=torch.clone):
    """x, whose gradient was multiplied by `of(x)` and divided by that."""
    return pulled(x, lambda d, passes: d * (of(x) / of(x)))


def first_two(x):
    """Key heads for their value heads, of which the first two alone give a gradient."""
    n = x["v"].shape[2] // x["k"].shape[2]
    some = (torch.arange(x["v"].shape[2]) % n < 2)[:, None]
    repeated = {name: x[name].repeat_interleave(n, 2) for name in "qk"}
    return {name: torch.where(some, y, y.detach()) for name, y in repeated.items()}


def after_resets(x):
    """Queries and keys of which those behind a reset are lost until their chunk of 64 ends."""
    lost = torch.cat([g.cumsum(1).isneginf() for g in x["g"].split(64, 1)], 1)
    return {n: x[n].masked_fill(lost, 0.0) for n in "qk"}


def rows_beyond(x):
    """To the keys those beyond the last one are added, times 0."""
    k = x["k"]
    beyond = k.as_strided(k[:, :1].shape, k.stride(), k.storage_offset() + k.shape[1] * k.stride(1))
    return {"k": k + 0 * beyond.detach()}


def attention(weights):
    """Attention whose weights are made of its scores and of the mask of keys that are not later than their query."""

    def fn(q, k, v, *, scale=None, initial_state=None):
        k, v = (k, v) if initial_state is None else (torch.cat(x, 1) for x in zip(initial_state, (k, v), strict=True))
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        x = torch.einsum("bihd,bjhd->bhij", q, k)
        p = weights(x, seen, q.shape[-1] ** -0.5 if scale is None else scale)
        return torch.einsum("bhij,bjhd->bihd", p, v), (k, v)

    return ATTENTION, fn


def masked(also):
    """Attention to the keys j, of those not behind it, that a query i has by `also(i, j)`."""
    return ATTENTION, functools.partial(mistakes.attention, sees=lambda i, j, past: (j <= i + past) & also(i + past, j))


def maximum_before_the_scale(x, seen, scale):
    x = x.masked_fill(~seen, -torch.inf)
    p = (scale * (x - x.amax(-1, keepdim=True))).masked_fill(~seen, -torch.inf).exp()
    return p / p.sum(-1, keepdim=True)


def last_alone(i, j):
    return (j < len(j) - 1) | (len(j) % 96 != 1) | (len(j) == 1)


def not_rescaled(x, seen, scale):
    """The sums over tiles of 32 keys are not rescaled to a new maximum."""
    x, m, total, tiles = (scale * x).masked_fill(~seen, -torch.inf), torch.full_like(x[..., :1], -torch.inf), 0, []
    for tile in x.split(32, -1):
        m = torch.maximum(m, tile.amax(-1, keepdim=True))
        tiles.append((tile - m).exp())
        total = total + tiles[-1].sum(-1, keepdim=True)
    return torch.cat(tiles, -1) / total


def low_tiles_skipped(x, seen, scale):
    """Tiles of 64 keys 8 below the maximum so far are left out."""
    x = (scale * x).masked_fill(~seen, -torch.inf)
    high = torch.stack([tile.amax(-1) for tile in x.split(64, -1)], -1)
    low = (high < high.cummax(-1).values - 8).repeat_interleave(64, -1)[..., : x.shape[-1]]
    return x.masked_fill(low, -torch.inf).softmax(-1)


def whole_tile(q, k, v, g, **named):
    """The final state of sequences that end with a tile of 48 is that before it."""
    o, S = FORMS["simple_gla"]["chunkwise"](q, k, v, g, **named)
    T = q.shape[1]
    early = T % 48 == 0 and named.get("cu_seqlens") is None
    return o, FORMS["simple_gla"]["chunkwise"](*(x[:, : T - 48] for x in (q, k, v, g)), **named)[1] if early else S


class Wrong(NamedTuple):
    """A mechanism and a wrong kernel, a case in which it fails, what is wrong there, and whether its number is."""

    kernel: tuple
    case: str
    quantity: str
    kind: str = "number"


MISTAKES = {
    # strides and memory
    "S0 read as if contiguous": Wrong(one("S0", read_in_order), "strided", "S"),
    "g read as if contiguous": Wrong(one("g", read_in_order, "gla"), "strided", "o"),
    "dS read as if contiguous": Wrong(
        changed(result=lambda x, o, S: (o, pulled(S, lambda d, passes: in_order(d)))), "strided", "dv"
    ),
    "rows beyond T times 0": Wrong(changed(rows_beyond), "length 7", "o"),
    "the loss's gradient scaled in place": Wrong(of_do(lambda d, passes: d.mul_(2) / 2), "length 7", "do", "modified"),
    # what is kept from call to call
    "boundaries looked up by address": Wrong(changed(looked_up), "packed", "o", "moved"),
    "a ring of five": Wrong(one("q", Ring.apply), "frozen inputs", "dq", "interleaved"),
    "a buffer handed on": Wrong(one("q", Pool.apply), "frozen inputs", "dq", "nested"),
    "a buffer in the dtype of the first call": Wrong(of_o(in_first_dtype), "frozen inputs", "o", "dtype before"),
    # ways of calling
    "other code without gradients": Wrong(
        of_o(lambda o: o if torch.is_grad_enabled() else 1.01 * o), "length 7", "o", "no_grad"
    ),
    "gradients added up": Wrong(of_do(lambda d, passes: passes * d), "length 7", "dq", "twice"),
    "no dq where v needs none": Wrong(frozen(lambda q, k, v: v, "q"), "frozen inputs", "dq", "frozen"),
    "none unless k or v need one": Wrong(frozen(lambda q, k, v: k or v, "q", "S0"), "frozen inputs", "dq", "frozen"),
    "none unless all need one": Wrong(frozen(lambda q, k, v: q and v, *"qkv"), "frozen inputs", "dk", "frozen"),
    "no chain without a final state": Wrong(changed(result=without_final), "loss of o alone", "dk", "stateless"),
    "no gradient through the states that chunks read": Wrong(
        ("linear_attention", chunked(seen=lambda states, sequences: [S.detach() for S in states])), "length 65", "dk"
    ),
    "chunks without a gradient of o skipped": Wrong(("linear_attention", skipping), "loss of some tokens", "dv"),
    # numbers
    "a scale of 0 taken for none": Wrong(one("scale", lambda scale: scale or None), "scale zero", "o"),
    "scores beyond half precision": Wrong(one("q", lambda q: torch.where(q.abs() > 65504, torch.inf, q)), "huge", "o"),
    "the loss's gradient in half precision": Wrong(
        of_do(lambda d, passes: torch.where(d.abs() < 2**-24, 0, d)), "small loss", "dq"
    ),
    "dbeta divided by beta": Wrong(one("beta", divided, "delta_rule"), "strength 0", "dbeta"),
    "dg divided by g": Wrong(one("g", divided, "gla"), "gate zero", "dg"),
    "dg divided by the decay": Wrong(one("g", lambda g: divided(g, torch.exp), "gla"), "gate -inf", "dg"),
    "lost after a reset": Wrong(changed(after_resets, "gla"), "gate many resets", "o"),
    "no reset from token 128 on": Wrong(
        one("g", lambda g: torch.cat([g[:, :128], g[:, 128:].clamp_min(-5)], 1), "gla"), "gate many resets", "o"
    ),
    "strengths up to 1": Wrong(one("beta", lambda beta: beta.clamp_max(1), "delta_rule"), "strengths up to 2", "o"),
    "keys normalised again": Wrong(one("k", lambda k: F.normalize(k, dim=-1), "kda"), "short keys", "o"),
    "beta left out of what is erased": Wrong(
        changed(lambda x: {"v": x["beta"][..., None] * x["v"], "beta": torch.ones_like(x["beta"])}, "delta_rule"),
        "length 7",
        "o",
    ),
    # which channel, which token, which head
    "channels of q modulo 16": Wrong(one("q", turned), "wide", "o"),
    "channels of v modulo 16": Wrong(one("v", turned), "wide", "S"),
    "channels of g modulo 16": Wrong(one("g", turned, "gla"), "wide", "dg"),
    "rows of S0 modulo 16": Wrong(one("S0", lambda S: turned(S.mT).mT), "wide", "S"),
    "v masked like k": Wrong(
        changed(lambda x: {"v": x["v"] * (torch.arange(x["v"].shape[-1]) < x["k"].shape[-1])}),
        "values wider than keys",
        "o",
    ),
    "a buffer of strengths": Wrong(changed(overwritten, "delta_rule"), "many tokens and heads", "o"),
    "dk of two value heads": Wrong(changed(first_two, "delta_rule"), "value heads strided", "dk"),
    "a last tile of 48 that is whole": Wrong(("simple_gla", whole_tile), "480 tokens", "S"),
    # the inverse of I + A
    "inverse transposed": Wrong(inverted(lambda A: inverse(A).mT), "length 7", "dbeta"),
    "values not corrected within a chunk": Wrong(inverted(lambda A: inverse(0 * A)), "length 7", "dbeta"),
    "no gradient through the inverse": Wrong(inverted(lambda A: inverse(A).detach()), "length 7", "dbeta"),
    # attention
    "sums not rescaled to a new maximum": Wrong(attention(not_rescaled), "length 65", "o"),
    "tiles of low scores skipped": Wrong(attention(low_tiles_skipped), "one high score", "o"),
    "a maximum before a negative scale": Wrong(attention(maximum_before_the_scale), "steep and negative", "o"),
    "a mask that is not infinite": Wrong(
        attention(lambda x, seen, scale: (scale * x).masked_fill(~seen, -1e4).softmax(-1)), "huge", "o"
    ),
    "a strict mask": Wrong(masked(lambda i, j: j < i), "length 7", "o"),
    "a last tile of 64 keys lost": Wrong(masked(lambda i, j: j < len(j) // 64 * 64), "length 65", "o"),
    "a window of 64 keys": Wrong(masked(lambda i, j: i - j < 64), "length 65", "o"),
    "a page of the cache lost": Wrong(masked(lambda i, j: j // 128 != 1), "long cache", "o"),
    "a last key alone in its tile of 96": Wrong(masked(last_alone), "481 tokens", "o"),
}
LARGE = "a buffer of strengths", "a last key alone in its tile of 96"  # mistakes that only large cases show
