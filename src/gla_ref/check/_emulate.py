"""Right computations as a low-precision kernel makes them, and exact ones in float64 (chapters 3, 7 and 11).

Every function takes the dtype that operands are rounded to; with float64 inputs and dtype it is exact, and the tests
hold it against the recurrence. Products and sums of states have one home each, :class:`Product` and :class:`Carry`,
so that their gradients round as they do. What right kernels choose each for themselves is a :class:`Luck`, which all
products of a run draw from, those of its backward pass too. The bench judges with the same functions.
"""

from functools import partial
from math import log

import torch
from einops import rearrange
from torch import Tensor
from torch.linalg import matmul  # no mode of products replaces it
from torch.nn.functional import pad

from .. import triangular
from ..chunks import scores
from ..gates import decay_from_start, decay_to_end, segment_sum
from ..rounding import Luck, Products

EXACT = (torch.float32, torch.float64)  # dtypes whose products hold operands as they are
SIDE_BY_SIDE = 32  # from so many products on, they lie side by side in memory, which is fastest then
TERMS = 16  # terms of a product that a tensor core adds up before it cuts the sum off to float32
BEYOND = 52 - 23  # bits of a float64's fraction that a float32's has not
NO_LUCK = Luck()  # terms in their own order


def cut_(exact: Tensor) -> Tensor:
    """A new float64 sum as a tensor core hands it back: what float32 holds, low bits cut off instead of rounded."""
    exact.view(torch.int64).bitwise_and_(-1 << BEYOND)
    return exact


def multiply(x: Tensor, y: Tensor, dtype: torch.dtype, onto: Tensor | float = 0.0, luck: Luck = NO_LUCK) -> Tensor:
    """onto + x y with operands rounded to `dtype`, its terms in an order of `luck`.

    For float32 the sum runs term after term, as a kernel's chain of fused multiply-adds does; a
    library's product, which sums in parts, is several times more exact than that. Below, 16 terms
    at a time, each sum cut off: over a long sequence that bias, not rounding, is what adds up.
    """
    if dtype == torch.float64:
        return onto + matmul(x, y)
    (x, of_x), (y, of_y) = luck.rounded(x, dtype), luck.rounded(y, dtype)
    x, y = luck.shuffled(x, y)
    factor = of_x * of_y
    out = factor * onto + torch.zeros(*x.shape[:-1], y.shape[-1], device=x.device)
    if dtype == torch.float32:
        if out.shape[:-2].numel() >= SIDE_BY_SIDE:  # of heads, chunks and copies
            y = y.expand(*x.shape[:-2], *y.shape[-2:])
            out, x, y = (z.permute(-2, -1, *range(x.ndim - 2)).contiguous() for z in (out, x, y))
            for a, b in zip(x.unbind(1), y.unbind(0), strict=True):
                out.addcmul_(a[:, None], b)
            return out.permute(*range(2, out.ndim), 0, 1) / factor
        if out.shape[-1] < out.shape[-2]:  # a sum's elements lie along the longer axis, which is faster
            out = out.mT.contiguous().mT
        for a, b in zip(x.mT.contiguous().mT.split(1, -1), y.split(1, -2), strict=True):
            out.addcmul_(a, b)
        return out / factor
    x, y, out = x.double(), y.double(), out.double()
    for a, b in zip(x.split(TERMS, -1), y.split(TERMS, -2), strict=True):
        out = cut_(matmul(a, b).add_(out))
    return (out / factor).float()


class Product(torch.autograd.Function):
    """`multiply`, forward and backward."""

    @staticmethod
    def forward(ctx, x, y, dtype, luck=NO_LUCK, onto=0.0):
        ctx.save_for_backward(x, y)
        ctx.options = dtype, luck
        return multiply(x, y, dtype, onto, luck)

    @staticmethod
    def backward(ctx, d):
        (x, y), (dtype, luck) = ctx.saved_tensors, ctx.options
        onto = d if any(ctx.needs_input_grad[4:]) else None
        return multiply(d, y.mT, dtype, luck=luck), multiply(x.mT, d, dtype, luck=luck), None, None, onto


class Read(torch.autograd.Function):
    """onto + x S and S, handed through: the sum x^T d begins at the gradient that comes back for it."""

    @staticmethod
    def forward(ctx, x, S, dtype, luck, onto=0.0):
        ctx.save_for_backward(x, S)
        ctx.options = dtype, luck
        return multiply(x, S, dtype, onto, luck), S.clone()

    @staticmethod
    def backward(ctx, d, R):
        (x, S), (dtype, luck) = ctx.saved_tensors, ctx.options
        onto = d if any(ctx.needs_input_grad[4:]) else None
        return multiply(d, S.mT, dtype, luck=luck), multiply(x.mT, d, dtype, R, luck), None, None, onto


class Kept(torch.autograd.Function):
    """a S. The gradient of a is the sum of S dS, both in bfloat16 for tokens of bfloat16: kernels store states so."""

    @staticmethod
    def forward(ctx, a, S, dtype):
        ctx.save_for_backward(a, S)
        ctx.dtype = dtype if dtype == torch.bfloat16 else S.dtype
        return a * S

    @staticmethod
    def backward(ctx, d):
        a, S = ctx.saved_tensors
        stored, back = (x.to(ctx.dtype).to(x.dtype) for x in (S, d))
        return (stored * back).sum_to_size(a.shape), a * d, None


def products_in(dtype: torch.dtype, luck: Luck = NO_LUCK) -> Products:
    """A mode in which matrix products are `multiply`, and their gradients too."""
    return Products(lambda x, y: Product.apply(x, y, dtype, luck))


class Carry(torch.autograd.Function):
    """The states S_0 .. S_N `[..., N + 1, K, V]` of S_[n+1] = exp(total_n) S_n + write_n, and dS as it comes back.

    The total decays are those of keys, `[..., N, K, 1]`. What comes back for them is S_[n+1] dS_[n+1], to be summed up
    from the end.
    """

    @staticmethod
    def add(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        return x + y if dtype in EXACT else cut_(x.double() + y.double()).float()

    @staticmethod
    def forward(ctx, write, total, S, dtype):
        states, kept = [S], total.exp()
        for w, a in zip(write.unbind(-3), kept.unbind(-3), strict=True):
            states.append(Carry.add(a * states[-1], w, dtype))
        states = torch.stack(states, -3)
        ctx.save_for_backward(states, kept)
        ctx.dtype = dtype
        return states

    @staticmethod
    def backward(ctx, d):
        states, kept = ctx.saved_tensors
        *d, R = d.unbind(-3)
        later = [R]
        for x, a in zip(reversed(d), reversed(kept.unbind(-3)), strict=True):
            later.append(Carry.add(a * later[-1], x, ctx.dtype))
        *later, dS = later
        dwrite = torch.stack(later[::-1], -3)
        return dwrite, (states[..., 1:, :, :] * dwrite).sum_to_size(kept.shape), dS, None


class Decayed(torch.autograd.Function):
    """x, unchanged, of tokens that decay by e^w on the way to it, whose gradient goes to w as kernels make it: x dx.

    dx is rounded as it is stored. With w the running sum of g, from q and w and from k and -w the gradient of g is the
    sum of q dq - k dk from a token to its chunk's end. The terms cancel, so that it is the least exact of the right
    ways, the more so the longer the chunk.
    """

    @staticmethod
    def forward(ctx, x, w, dtype):
        ctx.save_for_backward(x)
        ctx.dtype = dtype
        return x.clone()

    @staticmethod
    def backward(ctx, d):
        (x,) = ctx.saved_tensors
        return d, x * d.to(ctx.dtype).to(d.dtype) if ctx.needs_input_grad[1] else None, None


def in_chunks(x: Tensor, C: int) -> Tensor:
    """`[B, T, H, D]` as `[B, H, chunks, C, D]`, the last chunk filled up with zeros."""
    return rearrange(pad(x, (0, 0, 0, 0, 0, -x.shape[1] % C)), "b (n t) h d -> b h n t d", t=C)


def by_channel(g: Tensor | None, k: Tensor) -> Tensor:
    """Log gates as wide as k: each channel's own, each head's for all its channels, or zeros where there are none."""
    if g is None:
        return torch.zeros_like(k)
    return g if g.ndim == k.ndim else g[..., None].expand_as(k)


def by_pair(q, k, g, luck):
    """`scores` of different tokens, by products: of q decayed to each later token, and of k."""
    E = luck.exp(segment_sum(g)) * (1 - torch.eye(g.shape[-2], device=g.device)).to(g)[..., None]
    return ((q[..., :, None, :] * E).transpose(-3, -2) @ k[..., None])[..., 0].mT


def decayed_scores(q, k, g, c, alike, luck):
    """q_i k_j and the decay between them, for j <= i, of chunks `[..., C, K]`: in sub-chunks of c, or at once.

    Sharp kernels leave a token's pair with itself out of a gate's gradient, which is, where channels decay each in its
    own way, the running sum of q dq - k dk over the other pairs.
    """
    C, rows, own = q.shape[-2], [], 0.0
    if alike:  # what decays all channels of a pair alike is a factor of its score
        return (q @ k.mT) * luck.exp(segment_sum(g[..., :1])[..., 0])
    if luck.sharp:
        own = torch.diag_embed((q[..., None, :] @ k[..., None])[..., 0, 0])
        b = g.cumsum(-2)
        q, k, g = Decayed.apply(q, b, q.dtype), Decayed.apply(k, -b, q.dtype), g.detach()
    for i in range(0, C, c):
        q_i, k_i, g_i = (x[..., i : i + c, :] for x in (q, k, g))
        P = by_pair(q_i, k_i, g_i, luck) if luck.sharp else scores(q_i, k_i, g_i)
        if i:
            k_j = k[..., :i, :] * luck.exp(decay_to_end(g[..., :i, :]))
            P = torch.cat([(q_i * luck.exp(decay_from_start(g_i))) @ k_j.mT, P], -1)
        rows.append(pad(P, (0, C - i - c)))
    return torch.cat(rows, -2) + own


def two_level(q, k, v, g=None, g_v=None, *, state, scale, dtype, C, c=16, halves=False, mode=None, luck=NO_LUCK):
    """`gla.chunkwise_two_level`, all chunks at once but for their states. Returns o `[B, T, H, V]` and S.

    What a chunk writes is decayed to its end, where the last key meets no rounding. With `halves` to its middle, as a
    kernel may that has one product a chunk (chapter 12), and by e^-3 at most from there on, to be within float16; if
    `luck` is sharp, only where a chunk decays by no more than the kernels' limit. Products are those of `mode`, if
    there is one. Gates on values are for sharp kernels, which add the terms of a chunk's writes to the state
    one after the other, as an accumulator does, and those of its pairs to what is read of the state.
    """
    if g_v is not None:
        luck = Luck(luck.copies, thrice=luck.thrice, sizes=luck.sizes, seed=luck.rng.initial_seed(), sharp=True)
    T, alike = q.shape[1], g is None or g.ndim < k.ndim
    C = min(C, -(-T // c) * c, C if g_v is None else 64)
    q, k, v, g, decay = (in_chunks(x, C) for x in (q, k, v, by_channel(g, k), by_channel(g_v, v)))
    half, total, exp = g.detach().sum(-2, keepdim=True) / 2, g.sum(-2), luck.exp
    if luck.sharp:
        least = -40.0 if dtype == torch.bfloat16 else -3.0
        half = torch.where(half < (least if halves else 0.0), 0.0, half)
    else:
        b = g.cumsum(-2)
        q, k, g = Decayed.apply(q, b, dtype), Decayed.apply(k, -b, dtype), g.detach()
        half = half.clamp(min=-3.0 if halves else 0.0)
    total, stored = total[..., None], v
    if g_v is not None:
        total, stored = total + decay.sum(-2, keepdim=True), v * exp(decay_to_end(decay))
    with mode or products_in(dtype, luck):
        reads, writes, edge = q * exp(decay_from_start(g) - half), k * exp(decay_to_end(g) - half), exp(half).mT
        P = decayed_scores(q, k, g, c, alike, luck)
        if luck.sharp:
            S, inter, every = state, [], (reads, writes.mT, stored, edge, exp(total - 2 * half.mT))
            for x, y, z, a, through in zip(*(x.unbind(2) for x in every), strict=True):
                read, S = Read.apply(x, a * S, dtype, luck)
                inter.append(read)
                S = a * Product.apply(y, z, dtype, luck, through * S)
            inter = torch.stack(inter, 2)
        else:
            states = Carry.apply(edge * (writes.mT @ stored), total, state, dtype)
            S, inter = states[:, :, -1], reads @ (edge * states[:, :, :-1])
        if g_v is None:  # one sum over all of a chunk's tokens
            o = Product.apply(P, v, dtype, luck, inter) if luck.sharp else inter + P @ v
        else:
            # a token's pair with itself has no decay: it is in no gradient of one
            own = P.diagonal(dim1=-2, dim2=-1)[..., None] * v
            # the running sum, by a product: so the gradient of a gate is summed up in an order of its own
            w = Product.apply(torch.ones_like(P).tril(), decay, decay.dtype, luck)
            P = P.tril(-1)[..., None, :, :] * exp(segment_sum(decay.detach())).movedim(-1, -3)
            o = Decayed.apply((P @ Decayed.apply(v, -w, v.dtype).mT[..., None])[..., 0].mT, w, v.dtype)
            o = inter * exp(decay_from_start(decay)) + own + o
    o = rearrange(scale * o, "b h n t d -> b (n t) h d")
    return o[:, :T], S


class Inverse(torch.autograd.Function):
    """(I + A)^-1 by elimination in float32, and its gradient -Y^T dY Y^T by two products.

    Sharp kernels eliminate blocks and merge them by products of float32; those of bfloat16 store Y in that.
    """

    @staticmethod
    def forward(ctx, A, dtype, luck):
        if luck.sharp:
            with Products(lambda x, y: multiply(x, y, A.dtype, luck=luck)):
                Y = triangular.blocked(A)
        else:
            Y = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device).repeat(*A.shape[:-2], 1, 1)
            for j in range(A.shape[-1] - 1):
                Y[..., j + 1 :, : j + 1] -= A[..., j + 1 :, j, None] * Y[..., j, None, : j + 1]
        Y = Y.bfloat16().to(Y.dtype) if luck.sharp and dtype == torch.bfloat16 else Y
        ctx.save_for_backward(Y)
        ctx.options = dtype, luck
        return Y

    @staticmethod
    def backward(ctx, d):
        (Y,), (dtype, luck) = ctx.saved_tensors, ctx.options
        return -multiply(Y.mT, multiply(d, Y.mT, dtype, luck=luck), dtype, luck=luck).tril(-1), None, None


def corrected(q, k, v, beta, g=None, *, state, scale, dtype, C, c=16, ahead=False, segments=1, mode=None, luck=NO_LUCK):
    """A delta rule in chunks (chapter 20), gated or not. Returns o `[B, T, HV, V]` and S.

    A chunk writes Y (beta (v - k S)) or, with `ahead`, Y beta v - (Y beta k) S, whose two factors need no state.
    Sharp kernels may cut a sequence into `segments`. A segment ends in X + M S, which rounds the state once per row of
    S, far more often than its tokens do: X is its state from zeros, M its state from the unit matrix without values.
    """
    T, alike, n = q.shape[1], g is None or g.ndim < k.ndim, v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(n, 2) for x in (q, k))
    C = min(C, -(-T // c) * c)
    q, k, v, g, beta = (in_chunks(x, C) for x in (q, k, v, by_channel(g, k), beta[..., None]))
    # a key reads the state to correct it, and writes
    total, asks = g.sum(-2), k
    if not luck.sharp:
        b = g.cumsum(-2)
        q, k, asks, g = *(Decayed.apply(x, y, dtype) for x, y in ((q, b), (k, -b), (k, b))), g.detach()
    since, until = luck.exp(decay_from_start(g)), luck.exp(decay_to_end(g))
    with mode or products_in(dtype, luck):
        Y = Inverse.apply((beta * decayed_scores(asks, k, g, c, alike, luck)).tril(-1), dtype, luck)
        S, states, reads, writes, total = state, [], [], [], total[..., None]
        asked, stored = beta * since * asks, beta * v
        if ahead:
            asked, stored = Y @ asked, Y @ stored
        every = Y, q * since, asked, stored, (k * until).mT, total, luck.exp(total)
        every = list(zip(*(z.unbind(2) for z in every), strict=True))

        def walk(S, chunks, reads, writes):
            for y, x, ask, store, add, _, kept in chunks:
                found, S = Read.apply(ask, S, dtype, luck)
                if reads is not None:
                    read, S = Read.apply(x, S, dtype, luck)
                    reads.append(read)
                store = pad(store, (0, S.shape[-1] - store.shape[-1]))
                writes.append(store - found if ahead else y @ (store - found))
                S = Product.apply(add, writes[-1], dtype, luck, Kept.apply(kept, S, dtype))
            return S

        if luck.sharp:
            length = -(-len(every) // segments)
            for part in (every[i : i + length] for i in range(0, len(every), length)):
                if segments > 1:
                    V, one = S.shape[-1], torch.eye(S.shape[-2]).to(S).expand(*S.shape[:-1], -1)
                    X, M = walk(pad(one, (V, 0)), part, None, []).tensor_split([V], -1)
                    end, S = Read.apply(M, S, S.dtype, luck, X)
                last = walk(S, part, reads, writes)
                S = end if segments > 1 else last
        else:
            for y, _, ask, store, add, sum_g, _ in every:
                found = ask @ S
                states.append(S)
                writes.append(store - found if ahead else y @ (store - found))
                S = Carry.apply((add @ writes[-1])[:, :, None], sum_g[:, :, None], S, dtype)[:, :, 1]
        inter = torch.stack(reads, 2) if luck.sharp else (q * since) @ torch.stack(states, 2)
        intra = decayed_scores(q, k, g, c, alike, luck) @ torch.stack(writes, 2)
    o = rearrange(scale * (inter + intra), "b h n t d -> b (n t) h d")
    return o[:, :T], S


class Whole(torch.autograd.Function):
    """Linear attention as a T x T kernel has it: every number one sum over all tokens.

    Such sums are not carried out, which would take seconds. Their float32 error is drawn: a sum rounds at each of its
    partial sums, and these are what a token reads of the states so far, or, begun at the other end, of the rest.
    """

    STEP = 64  # tokens from one partial sum that is looked at to the next
    DRAWS = 16  # the error of a number is the largest of so many, as that of other emulated runs

    @staticmethod
    def noise(like: Tensor, rng: torch.Generator) -> Tensor:
        """For each number of a tensor the largest of several normal draws, in absolute value."""
        drawn = torch.randn((Whole.DRAWS, *like.shape), generator=rng, dtype=like.dtype, device=like.device)
        high, low = drawn.amax(0), drawn.amin(0)
        return torch.where(high > -low, high, low)

    @staticmethod
    def sums(a, b, c, S, dtype):
        """sum_(j <= i) (a_i b_j) c_j + a_i S, and S behind the last token."""
        T, low = a.shape[1], a.dtype
        a, b, c = (in_chunks(x.double(), Whole.STEP) for x in (a, b, c))
        states = torch.cat([S.double()[:, :, None], b.mT @ c], 2).cumsum(2)
        o, S = a @ states[:, :, :-1] + (a @ b.mT).tril() @ c, states[:, :, -1]
        if dtype != torch.float64:
            rng = torch.Generator(o.device).manual_seed(0)
            rounds = torch.finfo(torch.float32).eps / 2 * (Whole.STEP / 3) ** 0.5
            up, down = o.square(), o.square()  # in the token's own chunk
            for n in range(1, o.shape[2]):
                before = a[:, :, n:] @ states[:, :, n : n + 1]
                up[:, :, n:] += before.square()
                down[:, :, n:] += (o[:, :, n:] - before).square()
            o = o + rounds * torch.maximum(up, down).sqrt() * Whole.noise(o, rng)
            S = S + rounds * states.square().sum(2).sqrt() * Whole.noise(S, rng)
        return rearrange(o, "b h n t d -> b (n t) h d")[:, :T].to(low), S.to(low)

    @staticmethod
    def forward(ctx, q, k, v, S, dtype):
        ctx.save_for_backward(q, k, v, S)
        ctx.dtype = dtype
        return Whole.sums(q, k, v, S, dtype)

    @staticmethod
    def backward(ctx, do, dS):
        q, k, v, S = ctx.saved_tensors
        dq, _ = Whole.sums(do, v, k, S.mT, ctx.dtype)
        q, k, v, do = (x.flip(1) for x in (q, k, v, do))
        dk, _ = Whole.sums(v, do, q, dS.mT, ctx.dtype)
        dv, dS = Whole.sums(k, q, do, dS, ctx.dtype)
        return dq, dk.flip(1), dv.flip(1), dS, None


def one_product(q, k, v, *, state, scale, dtype):
    """Linear attention with the errors of products over all tokens. Returns o `[B, T, H, V]` and S."""
    return Whole.apply(scale * q, k, v, state, dtype)


def by_token(q, k, v, g=None, g_v=None, *, state, scale, dtype, units=-1):
    """The recurrence in the precision of q, every decay but 1 off by `units` in its last place.

    Hardware that computes exponentials errs by one unit, up or down, and for equal gates always the same way: over a
    long sequence that is the largest error of a right kernel. Decays are exact in float64.
    """
    S, gates = state, by_channel(g, k)[..., None]
    gates = gates if g_v is None else gates + g_v[..., None, :]
    decays, off = gates.exp(), units * torch.finfo(torch.float32).eps / 2 if dtype != torch.float64 else 0.0
    decays = torch.where(gates == 0, decays, decays * (1 + off))
    write, states = k[..., None] * v[..., None, :], []
    for a_t, w_t in zip(decays.unbind(1), write.unbind(1), strict=True):
        S = a_t * S + w_t
        states.append(S)
    return ((scale * q)[..., None] * torch.stack(states, 1)).sum(-2), S


def corrected_by_token(q, k, v, beta, g=None, *, state, scale, dtype, units=-1):
    """The recurrence of a delta rule in the precision of q, decays off as in :func:`by_token`."""
    S, n, outs = state, v.shape[2] // q.shape[2], []
    q, k = (x.repeat_interleave(n, 2) for x in (scale * q, k))
    off = units * torch.finfo(torch.float32).eps / 2 if dtype != torch.float64 else 0.0
    decays = None if g is None else torch.where(g == 0, g.exp(), g.exp() * (1 + off)).view(*g.shape[:3], -1, 1)
    for t in range(q.shape[1]):
        S = S if g is None else decays[:, t] * S
        k_t, v_t = k[:, t, :, :, None], v[:, t, :, None]
        S = S + k_t * (beta[:, t, :, None, None] * (v_t - (k_t * S).sum(-2, keepdim=True)))
        outs.append((q[:, t, :, :, None] * S).sum(-2))
    return torch.stack(outs, 1), S


class Attend(torch.autograd.Function):
    """Attention and its closed-form backward as kernels do them, `ROWS` queries at a time to bound the memory.

    As in FlashAttention-2 exponentials are to base 2, the backward makes p from the rows' log-sum-exp, and ds =
    p (do v^T - D), D = o . do, o as it was stored. Or, `by_key`, to base e, from maximum and sum, and D is summed
    key by key; with `merged` the forward merges tiles of keys by their log-sum-exp, as splits of a cache are.
    The first makes its scores once more, in other orders than its log-sum-exp was made of; the others, as autograd
    does, have kept them. k and v are handed through: what comes back for them is where dk and dv start.
    """

    ROWS, KEYS = 1024, 16

    @staticmethod
    def tiles(q, k, scale, product):
        """Each tile of queries: where its rows and its keys are, and scale q k^T, -inf in the future."""
        T, S = q.shape[-2], k.shape[-2]
        for a in range(0, T, Attend.ROWS):
            i = (..., slice(a, min(a + Attend.ROWS, T)), slice(None))
            j = (..., slice(S - T + i[1].stop), slice(None))
            x = scale * product(q[i], k[j].mT)
            seen = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
            yield i, j, x.masked_fill(~seen.tril(x.shape[-1] - x.shape[-2]), -torch.inf)

    @staticmethod
    def merge(x, v, product):
        """o and the log-sum-exp of scores x, tiles of keys merged one after another."""
        o, lse = torch.zeros_like(x[..., :1] * v[..., :1, :]), torch.full_like(x[..., :1], -torch.inf)
        for x_t, v_t in zip(x.split(Attend.KEYS, -1), v.split(Attend.KEYS, -2), strict=True):
            own = x_t.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)  # no key may be visible
            both = torch.logaddexp(lse, own)
            o = (lse - both).exp() * o + (own - both).exp() * product((x_t - own).exp(), v_t)
            lse = both
        return o, lse

    @staticmethod
    def forward(ctx, q, k, v, scale, dtype, by_key, merged, luck):
        product, exactly = partial(multiply, dtype=dtype, luck=luck), partial(multiply, dtype=q.dtype, luck=luck)
        exp, unit = (torch.exp, scale) if by_key else (torch.exp2, scale / log(2))
        o = torch.empty_like(v[..., -q.shape[-2] :, :])
        m, total = torch.empty_like(q[..., :1]), torch.empty_like(q[..., :1])
        for i, j, x in Attend.tiles(q, k, unit, partial(multiply, dtype=dtype, luck=luck.another(1))):
            if merged:
                o[i], m[i] = Attend.merge(x, v[j], product)
                total[i] = 1.0
                continue
            m[i] = x.amax(-1, keepdim=True)
            p = exp(x - m[i])
            total[i] = exactly(p, torch.ones_like(p[..., :1, :]).mT)  # p is rounded as an operand, its sum is not
            o[i] = product(p, v[j]) / total[i]
        ctx.save_for_backward(q, k, v, m, total, o.to(dtype).to(o.dtype))
        scored = partial(multiply, dtype=dtype, luck=luck.another(1 if by_key else 2))
        ctx.options = scale, unit, by_key, product, exactly, scored
        return o, k.clone(), v.clone()

    @staticmethod
    def backward(ctx, do, dk, dv):
        (q, k, v, m, total, o), (scale, unit, by_key, product, exactly, scored) = ctx.saved_tensors, ctx.options
        dq, dk, dv = torch.empty_like(q), dk.clone(), dv.clone()
        for i, j, x in Attend.tiles(q, k, unit, scored):
            dp, D = product(do[i], v[j].mT), (o[i] * do[i]).sum(-1, keepdim=True)
            if by_key:
                p, one = (x - m[i]).exp() / total[i], torch.ones_like(x[..., :1, :]).mT
                read, kept = exactly(p * dp, one), exactly(p * D, one)
                # on paper nothing flows through m; really, what the two sums of T terms leave of D
                left = (read - D).abs() + (kept - D).abs()
                ds = (p * (dp - read)).scatter_add(-1, p.argmax(-1, keepdim=True), left)
            else:
                lse = m[i] * log(2) + total[i].log()  # to base e, and one number of float32
                p = (x - lse / log(2)).exp2()
                ds = p * (dp - D)
            ds = scale * ds
            dq[i] = product(ds, k[j])
            dk[j] = product(ds.mT, q[i], onto=dk[j])
            dv[j] = product(p.mT, do[i], onto=dv[j])
        return dq, dk, dv, None, None, None, None, None


def attend(q, k, v, *, state, scale, dtype, by_key=False, merged=False, luck=NO_LUCK):
    """Softmax attention on top of a cache of keys and values."""
    keys = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(state, (k, v), strict=True))
    made = Attend.apply(q.transpose(1, 2), *keys, scale, dtype, by_key, merged, luck)
    o, k, v = (x.transpose(1, 2) for x in made)
    return o, (k, v)
