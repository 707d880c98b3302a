"""Right kernels, written afresh and each in another way, for what the check kit must never call wrong.

Others are the forms of the package, by autograd, by scans and token after token (all cases: test_check_named.py).

Those with a gradient by hand hold what a GPU's do: a chunk's own pairs, the states between chunks, and of the gates
the reverse running sum of q dq - k dk inside a chunk, to which rowsum(S dS) comes at its end. Operands of products
are rounded to the dtype of the inputs.
"""

import inspect
import itertools
import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gla_ref import FORMS
from gla_ref._contract import form
from gla_ref.rounding import PRODUCTS
from gla_ref.softmax_attention import _form

DELTA = "delta_rule", "gated_delta_rule", "kda"
SUB = 16  # of a chunk: pairs in it by channel, others by a product


def to_end(g: Tensor) -> Tensor:
    """The decay of each token up to the end, its own not counted: no difference of sums, which resets would spoil."""
    after = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return after.flip(-2).cumsum(-2).flip(-2).exp()


def from_start(g: Tensor) -> Tensor:
    return g.cumsum(-2).exp()


def between(g: Tensor) -> Tensor:
    """The decay from token j to i, `[..., i, j, K]`; 0 where j comes after i."""
    i = torch.arange(g.shape[-2], device=g.device)
    since = (i[:, None] > i)[..., None]
    sums = torch.where(since, g[..., :, None, :], 0.0).cumsum(-3)
    return torch.where((i[:, None] >= i)[..., None], sums.exp(), 0.0)


class Pairs:
    """P_ij = sum over K of q_i k_j and the decay between them, for j <= i, and the gradients of q and k."""

    def __init__(self, q, k, g, product):
        self.product, self.q, self.k, self.g = product, q, k, g
        self.blocks = [slice(a, a + SUB) for a in range(0, q.shape[-2], SUB)]
        self.P = product(q, k.mT) * between(g)[..., 0] if g.shape[-1] == 1 else self.forward()

    def factors(self, i):
        """q since its sub-chunk's start, and keys up to that."""
        before = self.g[..., : i.start, :]
        return from_start(self.g[..., i, :]), to_end(before)

    def forward(self):
        rows = []
        for i in self.blocks:
            q, k = self.q[..., i, :], self.k[..., i, :]
            own = (q[..., :, None, :] * k[..., None, :, :] * between(self.g[..., i, :])).sum(-1)
            since, until = self.factors(i)
            earlier = self.product(q * since, (self.k[..., : i.start, :] * until).mT)
            rest = own.new_zeros(*own.shape[:-1], self.q.shape[-2] - i.start - own.shape[-1])
            rows.append(torch.cat([earlier, own, rest], -1))
        return torch.cat(rows, -2)

    def backward(self, dP):
        if self.g.shape[-1] == 1:
            dP = dP * between(self.g)[..., 0]
            return self.product(dP, self.k), self.product(dP.mT, self.q)
        dq, dk = torch.zeros_like(self.q), torch.zeros_like(self.k)
        for i in self.blocks:
            q, k = self.q[..., i, :], self.k[..., i, :]
            own = dP[..., i, i, None] * between(self.g[..., i, :])
            since, until = self.factors(i)
            before = slice(0, i.start)
            earlier, keys = dP[..., i, before], self.k[..., before, :] * until
            dq[..., i, :] = (own * k[..., None, :, :]).sum(-2) + self.product(earlier, keys) * since
            dk[..., i, :] += (own * q[..., :, None, :]).sum(-3)
            dk[..., before, :] += self.product(earlier.mT, q * since) * until
        return dq, dk


def eliminated(A, product):
    """(I + A)^-1, column by column."""
    Y = torch.eye(A.shape[-1], device=A.device).expand(A.shape)
    for j in range(A.shape[-1] - 1):
        Y = Y - A[..., :, j, None] * Y[..., j, None, :]
    return Y


def by_blocks(A, product):
    """Blocks of 16 so, then a row of blocks after the other by products in float32."""
    n = A.shape[-1]
    Y = torch.zeros_like(A)
    for a in range(0, n, SUB):
        i = slice(a, a + SUB)
        own = eliminated(A[..., i, i], product)
        Y[..., i, i] = own
        Y[..., i, :a] = -(own @ (A[..., i, :a] @ Y[..., :a, :a].clone()))
    return Y


def in_chunks(q, k, v, g, beta, S, scale, C, product, inverse=eliminated, ahead=False):
    """o `[B, H, T, V]`, the final state, and of each chunk the state before it, Y and what it writes.

    With a beta a chunk writes Y times what v has and the keys do not find; without one it writes v.
    """
    outs, kept, betas = [], [], itertools.repeat(None) if beta is None else beta.split(C, -2)
    for q_n, k_n, v_n, g_n, beta_n in zip(*(x.split(C, -2) for x in (q, k, v, g)), betas, strict=False):
        since, until = from_start(g_n), to_end(g_n)
        Y, write = None, v_n
        if beta is not None:
            Y = inverse((beta_n * Pairs(k_n, k_n, g_n, product).P).tril(-1), product)
        if beta is not None and ahead:
            write = product(Y, beta_n * v_n) - product(product(Y, beta_n * since * k_n), S)
        elif beta is not None:
            write = product(Y, beta_n * (v_n - product(since * k_n, S)))
        kept.append((S, Y, write))
        outs.append(scale * (product(q_n * since, S) + product(Pairs(q_n, k_n, g_n, product).P, write)))
        S = g_n.sum(-2).exp()[..., None] * S + product((k_n * until).mT, write)
    return torch.cat(outs, -2), S, kept


class ByHand(torch.autograd.Function):
    """The same with its gradient by hand, from the last chunk to the first.

    Of a key that searches the state, what it gets as one that reads is made apart from what it gets as one that writes.
    """

    @staticmethod
    def forward(ctx, q, k, v, g, beta, S, scale, C, product):
        o, S, kept = in_chunks(q, k, v, g, beta, S, scale, C, product)
        ctx.save_for_backward(q, k, v, g, beta, S)
        ctx.options, ctx.kept = (scale, C, product), kept
        return o, S

    @staticmethod
    def backward(ctx, do, dS):
        (q, k, v, g, beta, S_end), (scale, C, product) = ctx.saved_tensors, ctx.options
        betas = [None] * len(ctx.kept) if beta is None else beta.split(C, -2)
        chunks, grads = zip(*(x.split(C, -2) for x in (q, k, v, g, scale * do)), betas, ctx.kept, strict=True), []
        for q_n, k_n, v_n, g_n, do_n, beta_n, (S, Y, write) in reversed([*chunks]):
            until, since, P = to_end(g_n), from_start(g_n), Pairs(q_n, k_n, g_n, product)
            dq, dk = P.backward(product(do_n, write.mT).tril())
            dq, dk = dq + product(do_n, S.mT) * since, dk + product(write, dS.mT) * until
            dv, end = product(P.P.mT, do_n) + product(k_n * until, dS), (S_end * dS).sum(-1)
            dS = g_n.sum(-2).exp()[..., None] * dS + product((q_n * since).mT, do_n)
            dread, dbeta = torch.zeros_like(k_n), beta_n
            if beta is not None:
                r, A, found = product(Y.mT, dv), Pairs(k_n, k_n, g_n, product), product(since * k_n, S)
                dA, dv = -product(r, write.mT).tril(-1), beta_n * r
                dread, dwrite = A.backward(beta_n * dA)
                dread, dk = dread - product(dv, S.mT) * since, dk + dwrite
                dbeta = (r * (v_n - found)).sum(-1, keepdim=True) + (dA * A.P).sum(-1, keepdim=True)
                dS = dS - product((k_n * since).mT, dv)
            db = q_n * dq + k_n * dread - k_n * dk
            if g.shape[-1] == 1:
                db, end = db.sum(-1, keepdim=True), end.sum(-1, keepdim=True)
            dg, S_end = db.flip(-2).cumsum(-2).flip(-2) + end[..., None, :], S
            grads.append((dq, dk + dread, dv, dg, dbeta))
        grads = [torch.cat(x[::-1], -2) for x in list(zip(*grads, strict=True))[: 4 + (beta is not None)]]
        return *grads, *[None] * (beta is None), dS, None, None, None


class Product(torch.autograd.Function):
    """x y of operands rounded to a dtype; so are its gradients' two, whose sums stay in float32 as a GPU's do."""

    @staticmethod
    def forward(ctx, x, y, dtype):
        ctx.save_for_backward(x, y)
        ctx.dtype = dtype
        return x.to(dtype).float() @ y.to(dtype).float()

    @staticmethod
    def backward(ctx, d):
        x, y = ctx.saved_tensors
        dx, dy = (Product.apply(a, b, ctx.dtype) for a, b in ((d, y.mT), (x.mT, d)))
        return dx.sum_to_size(x.shape), dy.sum_to_size(y.shape), None


def turned(product):
    """The same product, its terms added up from the last to the first."""
    return lambda x, y: product(x.flip(-1), y.flip(-2))


class OtherOrder(ByHand):
    """The backward pass sums up in another order than the forward pass."""

    @staticmethod
    def backward(ctx, do, dS):
        scale, C, product = ctx.options
        ctx.options = scale, C, turned(product)
        return ByHand.backward(ctx, do, dS)


def three_passes(x, y):
    """A product of float32 matrices in three passes of TF32."""
    return PRODUCTS["tf32x3"](x.float().contiguous(), y.float().contiguous())


def in_dtype(dtype):
    return torch.matmul if dtype == torch.float32 else lambda x, y: Product.apply(x, y, dtype)


def kernel(mechanism, way, dtype, C=64, product=None, **options):
    """One of those ways under the contract; the gate of a whole head, 0 where there is none, has one channel."""
    product = product or in_dtype(dtype)

    def body(*, scale, initial_state, g_v=None, **x):
        assert g_v is None, "not claimed"
        v, beta = x["v"], x["beta"][..., None].transpose(1, 2) if "beta" in x else None
        q, k = (x[n].repeat_interleave(v.shape[2] // x[n].shape[2], 2) for n in "qk")
        g = x.get("g", torch.zeros_like(v[..., 0])).reshape(*v.shape[:3], -1)
        tokens = (y.transpose(1, 2) for y in (q, k, v, g))
        o, S, *_ = way(*tokens, beta, initial_state, scale, C, product, **options)
        return o.transpose(1, 2), S

    body.__signature__ = inspect.signature(FORMS[mechanism]["recurrent"].__wrapped__)
    return form(mechanism)(body)


class Flash(torch.autograd.Function):
    """Softmax attention tile by tile `[B, H, T, ...]`, a cache of `past` keys before the queries' own."""

    @staticmethod
    def tiles(q, k, scale, C, product):
        """Rows, columns, and the scores of one tile, -inf where a key comes after its query."""
        T, S = q.shape[-2], k.shape[-2]
        n = torch.arange(S, device=q.device)
        for a in range(0, T, C):
            for b in range(0, min(a + C, T) + S - T, C):
                i, j = (..., slice(a, min(a + C, T)), slice(None)), (..., slice(b, min(b + C, S)), slice(None))
                later = n[j[1]] > n[S - T :][i[1]][:, None]
                yield i, j, (scale * product(q[i], k[j].mT)).masked_fill(later, -torch.inf)

    @staticmethod
    def forward(ctx, q, k, v, scale, C, product):
        m, total = torch.full_like(q[..., :1], -torch.inf), torch.zeros_like(q[..., :1])
        o = torch.zeros_like(v[..., : q.shape[-2], :])
        for i, j, x in Flash.tiles(q, k, scale, C, product):
            new = torch.maximum(m[i], x.amax(-1, keepdim=True))
            p, kept = (x - new).exp(), (m[i] - new).exp()
            total[i] = kept * total[i] + p.sum(-1, keepdim=True)
            o[i] = kept * o[i] + product(p, v[j])
            m[i] = new
        o = o / total
        ctx.save_for_backward(q, k, v, o, m + total.log())
        ctx.options = scale, C, product
        return o

    @staticmethod
    def backward(ctx, do, exp=torch.exp, unit=1.0, order=lambda product: product):
        (q, k, v, o, lse), (scale, C, product) = ctx.saved_tensors, ctx.options
        dq, dk, dv, D = *(torch.zeros_like(x) for x in (q, k, v)), (o * do).sum(-1, keepdim=True)
        for i, j, x in Flash.tiles(q, k, unit * scale, C, order(product)):
            p = exp(x - unit * lse[i])
            ds = p * (product(do[i], v[j].mT) - D[i])
            dq[i] += scale * product(ds, k[j])
            dk[j] += scale * product(ds.mT, q[i])
            dv[j] += product(p.mT, do[i])
        return dq, dk, dv, None, None, None


class OneNumber(Flash):
    """As FlashAttention-2: a row's log-sum-exp to base e is all that is kept, and probabilities are powers of 2.

    The backward pass sums the channels of its scores up in another order.
    """

    @staticmethod
    def backward(ctx, do):
        return Flash.backward(ctx, do, torch.exp2, 1 / math.log(2), turned)


def unseen(q, k):
    """The keys that come after their query."""
    T, S = q.shape[-2], k.shape[-2]
    return torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)


def by_log_sum_exp(q, k, v, scale, C, product):
    """Tiles of C keys merged from the last to the first, by autograd."""
    x, lse, o = (scale * product(q, k.mT)).masked_fill(unseen(q, k), -torch.inf), -torch.inf, 0.0
    for x_t, v_t in zip(reversed(x.split(C, -1)), reversed(v.split(C, -2)), strict=True):
        own = x_t.logsumexp(-1, keepdim=True).clamp(min=-1e30)
        both = torch.logaddexp(torch.as_tensor(lse, dtype=x.dtype), own)
        o, lse = (lse - both).exp() * o + (own - both).exp() * product((x_t - own).exp(), v_t), both
    return o


def library(dtype, q, k, v, scale, C, product):
    """PyTorch's own attention, with whatever kernel it chooses here."""
    mask = {"is_causal": True} if q.shape[-2] == k.shape[-2] else {"attn_mask": ~unseen(q, k)}
    return scaled_dot_product_attention(*(x.to(dtype) for x in (q, k, v)), scale=scale, **mask)


def attention(way, dtype, C=0, product=None):
    product = product or in_dtype(dtype)

    @_form
    def fn(q, k, v, *, scale):
        return way(*(x.transpose(1, 2) for x in (q, k, v)), scale, C, product).transpose(1, 2)

    return fn


def kernels(mechanism, dtype):
    """{name: function}: every right kernel of a mechanism."""
    others = {"by products in three passes of TF32": three_passes} if dtype == torch.float32 else {}
    if mechanism == "softmax_attention":
        found = {f"tiles of {C}, by hand": attention(Flash.apply, dtype, C) for C in (32, 64, 128)}
        found |= {name: attention(Flash.apply, dtype, 64, product) for name, product in others.items()}
        found["one log-sum-exp, channels in another order"] = attention(OneNumber.apply, dtype, 64)
        return found | {
            **{f"log-sum-exp, tiles of {C}": attention(by_log_sum_exp, dtype, C) for C in (24, 2048)},
            "PyTorch's own": attention(partial(library, dtype), dtype),
        }
    by_hand, delta = partial(kernel, mechanism, ByHand.apply, dtype), mechanism in DELTA
    found = {f"chunks of {C}, by hand": by_hand(C) for C in ((16, 32, 64, 128) if delta else (32, 64, 128, 256))}
    found |= {name: by_hand(64, product) for name, product in others.items()}
    if not delta:
        return found | {"chunks of 64, backwards in another order": kernel(mechanism, OtherOrder.apply, dtype)}
    by_autograd = partial(kernel, mechanism, in_chunks, dtype, inverse=by_blocks)
    return found | {
        "chunks of 64, writes made ahead, by autograd": by_autograd(ahead=True),
        "chunks of 32, triangles by blocks, by autograd": by_autograd(32),
    }
