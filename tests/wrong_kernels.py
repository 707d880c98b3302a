"""Wrong kernels as their authors write them: gated linear attention in chunks, the gradient by hand, one mistake each.

They know the call contract and nothing of the check kit. A mistake is what its author would have typed: a class that
replaces one step of the right kernel, or two where forward and backward pass share it. `test_check_named.py` has what
a report must say of each.
"""

import torch

KERNELS = {}  # {name: (mechanism, function)}


class Run(torch.autograd.Function):
    """All sequences of a call, one after another, each by the two methods of a kernel."""

    @staticmethod
    def forward(ctx, kernel, ends, scale, q, k, v, g, S):
        o, finals, states = torch.zeros_like(v), torch.empty_like(S), []
        for at, n in kernel.sequences(q, ends):
            one = (x[at].transpose(1, 2) for x in (q, k, v, g))
            made, along = kernel.forward(*one, S[n], scale)
            o[at] = made.transpose(1, 2)
            finals[n] = kernel.final(along)
            states.append(along)
        ctx.save_for_backward(q, k, v, g)
        ctx.rest = kernel, ends, scale, states
        return o, finals

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, dS):
        (q, k, v, g), (kernel, ends, scale, states) = ctx.saved_tensors, ctx.rest
        grads, dS0 = [torch.zeros_like(x) for x in (q, k, v, g)], torch.empty_like(dS)
        for (at, n), along in zip(kernel.sequences(q, ends), states, strict=True):
            one = (x[at].transpose(1, 2) for x in (q, k, v, g, do))
            *found, dS0[n] = kernel.backward(*one, dS[n], along, scale)
            for whole, part in zip(grads, found, strict=True):
                whole[at] = part.transpose(1, 2)
        return None, None, None, *grads, dS0


class GLA:
    """The right one. Inside, tensors are `[B, H, T, D]`, states `[B, H, K, V]`, those of a chunk have C tokens."""

    C = 32

    def __call__(self, q, k, v, g, *, scale=None, initial_state=None, cu_seqlens=None):
        B, _, H, K = q.shape
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        N = B if ends is None else len(ends) - 1
        S = q.new_zeros(N, H, K, v.shape[-1]) if initial_state is None else initial_state
        return Run.apply(self, ends, K**-0.5 if scale is None else scale, q, k, v, g, S)

    def sequences(self, q, ends):
        """Where the tokens of each sequence lie, and its state."""
        if ends is None:
            return [((slice(None), slice(0, q.shape[1])), slice(None))]
        pairs = enumerate(zip(ends[:-1], ends[1:], strict=True))
        return [((slice(None), slice(a, b)), slice(n, n + 1)) for n, (a, b) in pairs]

    def chunks(self, T):
        return [slice(a, min(a + self.C, T)) for a in range(0, T, self.C)]

    def decays(self, g):
        """Log decays of a chunk: from its start to token i, from token j to its end, from token j to i."""
        i = torch.arange(g.shape[2])
        between = torch.where((i[:, None] > i)[..., None], g[:, :, :, None], 0.0).cumsum(2)
        return g.cumsum(2), between[:, :, -1], between

    def product(self, x, y):
        return x @ y

    def scores(self, q, k, g):
        _, _, between = self.decays(g)
        return torch.einsum("bhik,bhjk,bhijk->bhij", q, k, between.exp()).tril()

    def scores_backward(self, dP, q, k, g):
        E, dP = self.decays(g)[2].exp(), dP.tril()
        return torch.einsum("bhij,bhjk,bhijk->bhik", dP, k, E), torch.einsum("bhij,bhik,bhijk->bhjk", dP, q, E)

    def read(self, q, g):
        """Queries as they read the state before the chunk."""
        return q * self.decays(g)[0].exp()

    def write(self, k, g):
        """Keys as they write to the state behind the chunk."""
        return k * self.decays(g)[1].exp()

    def carry(self, S, g):
        return g.sum(2).exp()[..., None] * S

    def outputs(self, q, k, v, g, S, scale):
        return scale * (self.product(self.scores(q, k, g), v) + self.product(self.read(q, g), S))

    def forward(self, q, k, v, g, S, scale):
        """o, and the states before every chunk and behind the last."""
        outs, states = [v[:, :, :0]], [S]
        for i in self.chunks(q.shape[2]):
            q_n, k_n, v_n, g_n = (x[:, :, i] for x in (q, k, v, g))
            outs.append(self.outputs(q_n, k_n, v_n, g_n, states[-1], scale))
            states.append(self.carry(states[-1], g_n) + self.product(self.write(k_n, g_n).mT, v_n))
        return torch.cat(outs, 2), states

    def final(self, states):
        return states[-1]

    def saved(self, states):
        """States as the backward pass finds them."""
        return states

    def dq(self, do, P, q, k, v, g, S, dS, scale):
        dP = self.product(scale * do, v.mT)
        return self.scores_backward(dP, q, k, g)[0] + self.product(scale * do, S.mT) * self.decays(g)[0].exp()

    def dk(self, do, P, q, k, v, g, S, dS, scale):
        dP = self.product(scale * do, v.mT)
        return self.scores_backward(dP, q, k, g)[1] + self.product(v, dS.mT) * self.decays(g)[1].exp()

    def dv(self, do, P, q, k, v, g, S, dS, scale):
        return self.product(P.mT, scale * do) + self.product(self.write(k, g), dS)

    def dg(self, q, k, g, dq, dk, S_end, dS):
        """To the chunk's end the sum of q dq - k dk, and there what its state still does."""
        return (q * dq - k * dk).flip(2).cumsum(2).flip(2) + (S_end * dS).sum(-1)[:, :, None]

    def dcarry(self, dS, q, g, do, scale):
        return self.carry(dS, g) + self.product(self.read(q, g).mT, scale * do)

    def last(self, dS):
        return dS

    def backward(self, q, k, v, g, do, dS, states, scale):
        """dq, dk, dv, dg and the gradient of the initial state, from the last chunk to the first."""
        states, dS, grads = self.saved(states), self.last(dS), []
        for n, i in reversed([*enumerate(self.chunks(q.shape[2]))]):
            q_n, k_n, v_n, g_n, do_n = (x[:, :, i] for x in (q, k, v, g, do))
            S, S_end = states[n], states[n + 1]
            given = do_n, self.scores(q_n, k_n, g_n), q_n, k_n, v_n, g_n, S, dS, scale
            dq, dk, dv = self.dq(*given), self.dk(*given), self.dv(*given)
            grads.append((dq, dk, dv, self.dg(q_n, k_n, g_n, dq, dk, S_end, dS)))
            dS = self.dcarry(dS, q_n, g_n, do_n, scale)
        empty = tuple(x[:, :, :0] for x in (q, k, v, g))
        return *(torch.cat(x, 2) for x in zip(empty, *reversed(grads), strict=True)), dS


class ScalarGate(GLA):
    """One gate a head, `[B, T, H]`; without gates (linear attention) too."""

    def __call__(self, q, k, v, g=None, **options):
        g = torch.zeros_like(k[..., 0]) if g is None else g
        return super().__call__(q, k, v, self.wide(g, k), **options)

    def wide(self, g, k):
        return g[..., None].expand_as(k)


class Linear(ScalarGate):
    """No gates."""

    def __call__(self, q, k, v, *, scale=None, initial_state=None, cu_seqlens=None):
        return super().__call__(q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)


def kernel(mechanism, name):
    def add(cls):
        KERNELS[name] = mechanism, cls()
        return cls

    return add


# -- exponents ---------------------------------------------------------------------------------
class Factored(GLA):
    """Pairs as one product, of q e^(b - r) and k e^(r - b)."""

    def exponents(self, g):
        b = g.cumsum(2)
        return b - self.anchor(b), self.anchor(b) - b

    def scores(self, q, k, g):
        up, down = self.exponents(g)
        return ((q * up.exp()) @ (k * down.exp()).mT).tril()

    def scores_backward(self, dP, q, k, g):
        (up, down), dP = self.exponents(g), dP.tril()
        return (dP @ (k * down.exp())) * up.exp(), (dP.mT @ (q * up.exp())) * down.exp()


@kernel("gla", "ratio of running products")
class _(Factored):
    def anchor(self, b):
        return torch.zeros_like(b)


@kernel("gla", "one anchor in the middle of a chunk of 64")
class _(Factored):
    C = 64

    def anchor(self, b):
        return b[:, :, b.shape[2] // 2, None]


@kernel("gla", "the growing exponential clipped")
class _(Factored):
    def exponents(self, g):
        b = g.cumsum(2)
        return b, (-b).clamp_max(60.0)


@kernel("gla", "running sums of gates clamped at -20")
class _(GLA):
    def decays(self, g):
        b = g.cumsum(2).clamp_min(-20.0)
        return b, b[:, :, -1:] - b, b[:, :, :, None] - b[:, :, None]


@kernel("gla", "running sums from the chunk's total, future gates included")
class _(GLA):
    def decays(self, g):
        g = g.clamp_min(-1e4)
        b = g.sum(2, keepdim=True) - (g.flip(2).cumsum(2).flip(2) - g)
        between = (b[:, :, :, None] - b[:, :, None]).clamp_max(0)
        return b, b[:, :, -1:] - b, between


@kernel("gla", "1.44 for log2(e)")
class _(GLA):
    def decays(self, g):
        return tuple(x * (1.44 * 0.6931471805599453) for x in super().decays(g))

    def carry(self, S, g):
        return (g.sum(2) * 1.44).exp2()[..., None] * S


# -- operands and states of too few bits -------------------------------------------------------
def ten_bits(x):
    """What a tensor core takes of float32 by default."""
    low = x.contiguous().view(torch.int32)
    return ((low + 0x1000) & ~0x1FFF).view(torch.float32)


@kernel("gla", "tf32 in every product")
class _(GLA):
    def product(self, x, y):
        return ten_bits(x) @ ten_bits(y)


@kernel("simple_gla", "operands cast to bfloat16")
class _(ScalarGate):
    def product(self, x, y):
        return x.bfloat16().float() @ y.bfloat16().float()


@kernel("gla", "states between chunks written as bfloat16, and their gradients")
class _(GLA):
    def carry(self, S, g):
        return super().carry(S.bfloat16().float(), g)

    def outputs(self, q, k, v, g, S, scale):
        return super().outputs(q, k, v, g, S.bfloat16().float(), scale)

    def saved(self, states):
        return [S.bfloat16().float() for S in states]


@kernel("gla", "states kept for the backward pass in float16")
class _(GLA):
    def saved(self, states):
        return [S.half().float() for S in states]


# -- scale -------------------------------------------------------------------------------------
@kernel("gla", "scale left out of dq")
class _(GLA):
    def dq(self, do, P, q, k, v, g, S, dS, scale):
        return super().dq(do, P, q, k, v, g, S, dS, 1.0)


@kernel("gla", "the backward pass takes the default scale")
class _(GLA):
    def backward(self, q, k, v, g, do, dS, states, scale):
        return super().backward(q, k, v, g, do, dS, states, q.shape[-1] ** -0.5)


@kernel("linear_attention", "scale left out of the gradient of the state")
class _(Linear):
    def dcarry(self, dS, q, g, do, scale):
        return super().dcarry(dS, q, g, do, 1.0)


# -- states and their gradients ----------------------------------------------------------------
@kernel("gla", "states recomputed from zero in the backward pass")
class _(GLA):
    def backward(self, q, k, v, g, do, dS, states, scale):
        _, again = self.forward(q, k, v, g, torch.zeros_like(states[0]), scale)
        return super().backward(q, k, v, g, do, dS, again, scale)


@kernel("gla", "initial state left out of dq, not of the gates")
class _(GLA):
    def dq(self, do, P, q, k, v, g, S, dS, scale):
        self.right = super().dq(do, P, q, k, v, g, S, dS, scale)
        first = S is self.first
        return super().dq(do, P, q, k, v, g, torch.zeros_like(S) if first else S, dS, scale)

    def dg(self, q, k, g, dq, dk, S_end, dS):
        return super().dg(q, k, g, self.right, dk, S_end, dS)

    def saved(self, states):
        self.first = states[0]
        return states


@kernel("gla", "the gradient of the final state ignored")
class _(GLA):
    def last(self, dS):
        return torch.zeros_like(dS)


@kernel("gla", "the gradient of the state not decayed between chunks")
class _(GLA):
    def dcarry(self, dS, q, g, do, scale):
        return dS + self.product(self.read(q, g).mT, scale * do)


@kernel("gla", "the final state is that before the last chunk")
class _(GLA):
    def final(self, states):
        return states[max(0, len(states) - 2)]


# -- gradients of gates ------------------------------------------------------------------------
@kernel("gla", "the gate's gradient summed over the whole sequence")
class _(GLA):
    def backward(self, q, k, v, g, do, dS, states, scale):
        dq, dk, dv, _, dS0 = super().backward(q, k, v, g, do, dS, states, scale)
        dg = (q * dq - k * dk).flip(2).cumsum(2).flip(2) + (states[-1] * dS).sum(-1)[:, :, None]
        return dq, dk, dv, dg, dS0


@kernel("gla", "the gate's gradient without what the state at the chunk's end does")
class _(GLA):
    def dg(self, q, k, g, dq, dk, S_end, dS):
        return (q * dq - k * dk).flip(2).cumsum(2).flip(2)


@kernel("simple_gla", "the gate's gradient summed from the wrong end")
class _(ScalarGate):
    def dg(self, q, k, g, dq, dk, S_end, dS):
        return (q * dq - k * dk).cumsum(2) + (S_end * dS).sum(-1)[:, :, None]


# -- which token, which head, which channel -----------------------------------------------------
@kernel("gla", "gate applied after the write")
class _(GLA):
    def decays(self, g):
        since, until, between = super().decays(g)
        return since, until + g, between + g[:, :, None]


@kernel("gla", "a strict mask in the pairs")
class _(GLA):
    def scores(self, q, k, g):
        return super().scores(q, k, g).tril(-1)

    def scores_backward(self, dP, q, k, g):
        return super().scores_backward(dP.tril(-1), q, k, g)


@kernel("gla", "the last partial chunk never runs")
class _(GLA):
    def forward(self, q, k, v, g, S, scale):
        o, states = super().forward(*(x[:, :, : self.whole(q)] for x in (q, k, v, g)), S, scale)
        return torch.cat([o, torch.zeros_like(v[:, :, self.whole(q) :])], 2), states

    def backward(self, q, k, v, g, do, dS, states, scale):
        n, some = self.whole(q), (x[:, :, : self.whole(q)] for x in (q, k, v, g, do))
        *grads, dS0 = super().backward(*some, dS, states, scale)
        grads = (torch.cat([d, torch.zeros_like(x[:, :, n:])], 2) for d, x in zip(grads, (q, k, v, g), strict=True))
        return *grads, dS0

    def whole(self, q):
        return q.shape[2] // self.C * self.C


@kernel("gla", "boundaries of packed sequences one token late")
class _(GLA):
    def sequences(self, q, ends):
        if ends is not None:
            ends = [0, *(min(end + 1, ends[-1]) for end in ends[1:-1]), ends[-1]]
        return super().sequences(q, ends)


@kernel("gla", "at most 64 channels of K")
class _(GLA):
    def __call__(self, q, k, v, g, **options):
        few = torch.arange(q.shape[-1]) < 64
        if options.get("initial_state") is not None:
            options["initial_state"] = options["initial_state"] * few[:, None]
        options["scale"] = q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"]
        return super().__call__(q * few, k * few, v, g, **options)


@kernel("simple_gla", "the gate of the head before")
class _(ScalarGate):
    def wide(self, g, k):
        return super().wide(g.roll(1, 2), k)


@kernel("linear_attention", "divided by the sum of the weights")
class _(Linear):
    def outputs(self, q, k, v, g, S, scale):
        P = self.scores(q, k, g)
        return super().outputs(q, k, v, g, S, scale) / P.abs().sum(-1, keepdim=True).clamp_min(1.0)


RIGHT = {"gla": GLA(), "simple_gla": ScalarGate(), "linear_attention": Linear()}
