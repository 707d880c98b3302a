"""Emulated runs: what kernels compute, step by step, with operands rounded to their dtype (the oracle rule)."""

import math

import torch

from gla_ref import gates, triangular
from gla_ref.rounding import Luck, Products

LOG2E = 1 / math.log(2)
PLAIN = Luck()


def product(c, a, b, dtype, luck=PLAIN):
    """c + a b in float32: a fused multiply-add for each term, or in halves 16 terms at a time, cut off, not rounded."""
    step = 1 if dtype == torch.float32 else 16
    (a, of_a), (b, of_b) = luck.rounded(a, dtype), luck.rounded(b, dtype)
    a, b = (x.double() for x in luck.shuffled(a, b))
    factor = of_a * of_b
    c = factor * c
    for x, y in zip(a.split(step, -1), b.split(step, -2), strict=True):
        exact = c.double() + x @ y
        c = exact.float()
        if dtype != torch.float32:
            c = torch.where(c.double().abs() > exact.abs(), c.nextafter(torch.zeros_like(c)), c)
    return c / factor


def exp2(x):
    """2^x in float32, off by up to 2 ulp as a GPU's may be (exp2f in the CUDA C++ Programming Guide), up or down.

    It counts where decays are all that happens to a state, chunk after chunk: in delta rules with beta = 0.
    """
    x = x.float().double()
    return (x.exp2() * (1 + 2**-22 * (1e6 * x.clamp(min=-200.0)).sin())).float()


def chunks(x, C):
    """[B, T, H, D] as [B, H, chunks, C, D], zeros beyond T."""
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -x.shape[1] % C))
    return x.unflatten(1, (-1, C)).permute(0, 3, 1, 2, 4)


class Gla:
    """kernels/gla.py for one sequence, or a batch of them: the one-product form where a chunk is mild, else levels."""

    def __init__(self, dtype, limit, C):
        self.dtype, self.limit, self.C, self.luck = dtype, limit, C, PLAIN

    def size(self, x):
        """A power of two that brings x into the range of float16."""
        most = x.abs().max().clamp(min=1e-30).log2().ceil() - 15
        return most.clamp(min=-40.0).exp2() if self.dtype == torch.float16 else 1.0

    def mm(self, a, b, c=None):
        c = torch.zeros(1, device=a.device) if c is None else c
        of_a, of_b = self.size(a), self.size(b)
        return product(c / (of_a * of_b), a / of_a, b / of_b, self.dtype, self.luck) * (of_a * of_b)

    def low(self, x):
        return (x / self.size(x)).to(self.dtype).float() * self.size(x)

    def sums(self, m, x):
        """m x in float32, of 16-bit kernels in two bf16 parts."""
        m, x = self.luck.shuffled(m.float(), x)
        if self.dtype == torch.float32:
            return m @ x
        high = x.bfloat16().float()
        return m @ high + m @ (x - high).bfloat16().float()

    def decays(self, g):
        """(up, down [..., C, D], edge, through [..., 1, D], mild [..., 1, 1]) of chunks of gates."""
        i = torch.arange(self.C, device=g.device)
        g = g.clamp(min=-104.0)
        if self.dtype != torch.float32:
            g = g.bfloat16().float() + (g - g.bfloat16().float()).bfloat16().float()
        total = g.sum(-2, keepdim=True) * LOG2E
        mild = total >= self.limit * LOG2E
        half, none = total / 2, torch.zeros_like(total)
        if self.dtype == torch.float32:
            half = torch.where(mild, half, none)
            up = self.sums(i[:, None] >= i, g) * LOG2E - half
            down = self.sums(i[:, None] < i, g) * LOG2E - half
        else:
            up = self.sums((i[:, None] >= i).float() - 0.5, g) * LOG2E
            rest = torch.where(mild, none, half)
            up, down = rest + up, rest - up
        edge, through = torch.where(mild, total / 2, none), torch.where(mild, none, total)
        return *(x.exp2() for x in (up, down, edge, through)), mild.all(-1, keepdim=True)

    def levels(self, g):
        """(decay to the level's border [..., C, D], which pairs meet there [C, C]) of each level."""
        i = torch.arange(self.C, device=g.device)
        for level in range(self.C.bit_length() - 1):
            border = ((i >> level | 1) << level)[:, None]
            m = (i <= i[:, None]) & (i >= border) | (i > i[:, None]) & (i < border)
            half = i >> level
            across = (half[:, None] == (half | 1)) & (half[:, None] > half)
            yield (self.sums(m, g.clamp(min=-104.0)) * LOG2E).exp2(), across

    def scores(self, q, k, g, since, until, mild, turned=False):
        """[..., C, C] of q reading k; turned: of a walk backwards."""
        i = torch.arange(self.C, device=q.device)
        keep = i[:, None] <= i if turned else i[:, None] >= i
        one = torch.where(keep, self.mm(q * since, (k * until).mT), 0.0)
        strong = torch.where(i[:, None] == i, self.mm(q, k.mT), 0.0)
        for E, across in self.levels(g):
            strong += torch.where(across.mT if turned else across, self.mm(q * E, (k * E).mT), 0.0)
        return torch.where(mild, one, strong)

    def weighted(self, P, v, g, since, until, mild, turned=False):
        """P v, every value decayed on its way (g None: not at all)."""
        if g is None:
            return self.mm(P, v)
        i = torch.arange(self.C, device=v.device)
        strong = self.mm(torch.where(i[:, None] == i, P, 0.0), v)
        for E, across in self.levels(g):
            across = across.mT if turned else across
            strong += self.mm(torch.where(across, P, 0.0), v * E) * E
        return torch.where(mild, self.mm(P, v * until) * since, strong)

    def walk(self, q, k, v, g, g_v, S, reverse=False):
        """(o / scale, final state, the states before each chunk)."""
        since, until, edge, through, mild = self.decays(g)
        ones = torch.ones_like(v)
        v_since, v_until, v_edge, v_through, v_mild = (
            (ones, ones, ones[..., :1, :], ones[..., :1, :], torch.ones_like(mild)) if g_v is None else self.decays(g_v)
        )
        if reverse:
            since, until, v_since, v_until = until, since, v_until, v_since
        # pairs on one axis in levels, on the other as one product, are in levels on both
        both = mild & v_mild
        q_hat, k_hat, v_hat = self.low(q * since), self.low(k * until), self.low(v * v_until)
        states, reads = torch.empty(*k.shape[:3], k.shape[-1], v.shape[-1], device=k.device), []
        for n in reversed(range(k.shape[2])) if reverse else range(k.shape[2]):
            states[:, :, n] = S
            S = S * edge[:, :, n].mT * v_edge[:, :, n]
            reads.insert(0 if reverse else len(reads), self.mm(q_hat[:, :, n], S))
            S = S * through[:, :, n].mT * v_through[:, :, n]
            S = self.mm(k_hat[:, :, n].mT, v_hat[:, :, n], S)
            S = S * edge[:, :, n].mT * v_edge[:, :, n]
        P = self.scores(q, k, g, since, until, both, reverse)
        pairs = self.weighted(P, v, g_v, v_since, v_until, both, reverse)
        return torch.stack(reads, 2) * v_since + pairs, S, states

    def gradients(self, q, k, v, do, g, g_v, S, R):
        """(dq, dk, dg) / scale from the states at every chunk's ends."""
        i = torch.arange(self.C, device=q.device)
        if self.dtype == torch.bfloat16:  # the others' states are stored in float32
            S, R = self.low(S), self.low(R)
        kept, (S, R) = S * R, (self.low(S), self.low(R))
        if g_v is None:
            x, y, dP = do, v, self.mm(do, v.mT)
        else:
            since, until, edge, through, mild = self.decays(g_v)
            dP = self.scores(do, v, g_v, since, until, mild)
            x, y = self.low(do * since), self.low(v * until)
            S, R = self.low(S * edge), self.low(R * edge)
            kept = kept * edge * edge * through
        kept = kept.sum(-1)
        up, down, edge, through, mild = self.decays(g)
        read, write = self.mm(x, S.mT) * edge, self.mm(y, R.mT) * edge
        # i = j apart: it is not in dg
        A, own = torch.where(i[:, None] > i, dP, 0.0), dP.diagonal(dim1=-2, dim2=-1)[..., None]
        left, right = self.low(q * up), self.low(k * down)
        dq, dk = self.mm(A, right, read), self.mm(A.mT, left)
        pairs = left * dq - right * dk
        one = (dq + own * right) * up, (dk + write + own * left) * down, pairs, right * write
        dq, write, dk = read * up, write * down, torch.zeros_like(k)
        for E, across in self.levels(g):
            low = torch.where(across, A, 0.0)
            dq = dq + self.mm(low, k * E) * E
            dk = dk + self.mm(low.mT, q * E) * E
        strong = dq + own * k, dk + write + own * q, q * dq - k * dk, k * write
        dq, dk, pairs, write = (torch.where(mild, a, b) for a, b in zip(one, strong, strict=True))
        dg = self.sums(i[:, None] <= i, pairs) + self.sums(i[:, None] > i, write)
        return dq, dk, dg + kept[..., None, :] * edge * edge * through

    def run(self, q, k, v, g, g_v, S, do, dS, scale, luck=PLAIN):
        """o, S, dq, dk, dv, dg, dS0 and dg_v, as the kernels make them."""
        self.luck = luck
        T, hard = q.shape[1], torch.isneginf(g)
        hard_v = None if g_v is None else torch.isneginf(g_v)
        q, k, v, g, do = (chunks(x, self.C) for x in (q, k, v, g, do))
        g_v = None if g_v is None else chunks(g_v, self.C)

        def back(x, reset=None):
            x = x.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T]
            return x if reset is None else torch.where(reset, 0.0, x)

        o, S_T, states = self.walk(q, k, v, g, g_v, S)
        o = scale * o
        if scale == 0:
            do, scale = 0 * do, 1.0
        dv, dS0, dstates = self.walk(k, q, do, g, g_v, dS / scale, reverse=True)
        dq, dk, dg = self.gradients(q, k, v, do, g, g_v, states, dstates)
        dg_v = None
        if g_v is not None:
            _, dv, dg_v = self.gradients(do, v, k, q, g_v, g, states.mT, dstates.mT)
            dg_v = back(scale * dg_v, hard_v)
        dq, dk, dv = (back(scale * x) for x in (dq, dk, dv))
        return back(o), S_T, dq, dk, dv, back(scale * dg, hard), dS0 * scale, dg_v


def scalar_walk(q, k, v, g, S, scale, dtype, C, luck=PLAIN, reverse=False):
    """(o, final state, the states before each chunk) as `walk` of portable/linear.py makes them."""
    T, (q, k, v, g) = q.shape[1], (chunks(x, C) for x in (q, k, v, g[..., None]))
    since, until = gates.decay_from_start(g).exp(), gates.decay_to_end(g).exp()
    E, total = gates.segment_sum(g)[..., 0].exp(), g.sum(-2, keepdim=True).exp()
    if reverse:
        since, until, E = until, since, E.mT
    states = torch.empty(*k.shape[:3], k.shape[-1], v.shape[-1], device=k.device)
    for n in reversed(range(k.shape[2])) if reverse else range(k.shape[2]):
        states[:, :, n] = S
        S = product(total[:, :, n] * S, k[:, :, n].mT, v[:, :, n] * until[:, :, n], dtype, luck)
    zero = torch.zeros(1, device=k.device)
    P = product(zero, q, k.mT, dtype, luck) * E
    o = scale * product(product(zero, q, states, dtype, luck) * since, P, v, dtype, luck)
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], S, states


def scalar_dg(q, k, v, do, g, states, dstates, scale, dtype, C, luck=PLAIN):
    """As `gate_gradient`."""
    hard, T = torch.isneginf(g), q.shape[1]
    q, k, v, do, g = (chunks(x, C) for x in (q, k, v, do, g[..., None]))
    zero, total = torch.zeros(1, device=q.device), g.sum((-2, -1)).exp()
    S, R = (x.to(dtype).float() for x in (states, dstates))
    E = gates.segment_sum(g)[..., 0].exp().tril(-1)
    A = product(zero, q, k.mT, dtype, luck) * product(zero, do, v.mT, dtype, luck) * E
    read = A.sum(-1) + (product(zero, q, S, dtype, luck) * do * gates.decay_from_start(g).exp()).sum(-1)
    write = (product(zero, k, R, dtype, luck) * v * gates.decay_to_end(g).exp()).sum(-1)
    kept = (total * (S * R).sum((-2, -1)))[..., None]
    dg = (read - A.sum(-2)).flip(-1).cumsum(-1).flip(-1) + write.cumsum(-1) - write + kept
    dg = scale * dg.permute(0, 2, 3, 1).flatten(1, 2)[:, :T]
    return torch.where(hard, 0.0, dg)


def simple_gla(q, k, v, g, g_v, S, do, dS, scale, dtype, luck=PLAIN):
    """As `Gla.run`, of portable/linear.py; there is no g_v."""
    C = 16 if dtype == torch.float32 else 64
    o, S_T, states = scalar_walk(q, k, v, g, S, scale, dtype, C, luck)
    if scale == 0:
        do, scale = 0 * do, 1.0
    R = dS / scale
    dq, *_ = scalar_walk(do, v, k, g, S.mT, scale, dtype, C, luck)
    dk, *_ = scalar_walk(v, do, q, g, R.mT, scale, dtype, C, luck, reverse=True)
    dv, dS0, dstates = scalar_walk(k, q, do, g, R, scale, dtype, C, luck, reverse=True)
    dg = scalar_dg(q, k, v, do, g, states, dstates, scale, dtype, C, luck)
    return o, S_T, dq, dk, dv, dg, dS0 * scale


def inverse(A, luck=PLAIN):
    """(I + A)^-1 in blocks, whose merging is the only part made of products."""
    with Products(lambda x, y: product(torch.zeros(1, device=x.device), x, y, torch.float32, luck)):
        return triangular.blocked(A)


class Delta(Gla):
    """kernels/delta.py for one sequence, or a batch of them: value heads [B, T, HV, ...], g None without gates.

    Where `length` is given, in segments of so many chunks.
    """

    def __init__(self, dtype, C, length=None):
        super().__init__(dtype, None, C)
        self.length = length

    def keep(self, x):
        """What passes through memory between kernels: bfloat16 does, float16 would be too small."""
        return x.bfloat16().float() if self.dtype == torch.bfloat16 else x

    def run(self, q, k, v, g, beta, S, do, dS, *, scale, luck=PLAIN):
        """o, final state, and the gradients of q, k, v, g, the initial state, (g_v) and beta."""
        self.luck = luck
        B, T, HV, _ = v.shape
        heads, G, mm = q.shape[2], HV // q.shape[2], self.mm
        gated, g = g is not None, torch.zeros_like(beta) if g is None else g
        many = (*(x.repeat_interleave(G, 2) for x in (q, k)), v, beta[..., None], do)
        q, k, v, beta, do = (chunks(x, self.C) for x in many)
        g = (LOG2E * chunks(g[..., None], self.C)).double()  # to base 2 in float32, then summed exactly
        since, until = (exp2(f(g)) for f in (gates.decay_from_start, gates.decay_to_end))
        E, through = exp2(gates.segment_sum(g)[..., 0]), since[..., -1:, :]

        A = mm(k, k.mT) * E
        P, Y = self.keep(mm(q, k.mT) * E), self.keep(inverse((beta * A).tril(-1), luck))
        n = range(q.shape[2])
        o, writes, states, rs, dstates = ([None for _ in n] for _ in range(5))

        def walk(S, v, n):
            for i in n:
                states[i] = self.keep(S)
                w = mm(Y[:, :, i], beta[:, :, i] * (v[:, :, i] - since[:, :, i] * mm(k[:, :, i], S)))
                o[i] = since[:, :, i] * mm(q[:, :, i], S) + mm(P[:, :, i], w)
                writes[i] = self.keep(w)
                S = mm(k[:, :, i].mT, until[:, :, i] * w, through[:, :, i] * S)
            return S

        def walk_back(R, do, n):
            for i in reversed(n):
                r = mm(Y[:, :, i].mT, until[:, :, i] * mm(k[:, :, i], R) + mm(P[:, :, i].mT, do[:, :, i]))
                dstates[i], rs[i] = self.keep(R), self.keep(r)
                R = mm((since[:, :, i] * q[:, :, i]).mT, do[:, :, i], through[:, :, i] * R)
                R = mm(k[:, :, i].mT, -since[:, :, i] * beta[:, :, i] * r, R)
            return R

        S = self.in_segments(walk, S, v, n)
        if scale == 0:  # then the kernels put zeros for do
            do, of = torch.zeros_like(do), 1.0
        else:
            of = scale
        R = self.in_segments(walk_back, dS / of, do, n, backwards=True)
        w, r, S_n, R_n = (torch.stack(x, 2) for x in (writes, rs, states, dstates))

        F, W = (mm(do, w.mT) * E).tril(), -(mm(r, w.mT) * E).tril(-1)
        read, found, end = since * mm(do, S_n.mT), since * mm(r, S_n.mT), until * mm(w, R_n.mT)
        lost = (k * found).sum(-1, keepdim=True)
        dbeta = (r * v).sum(-1, keepdim=True) - lost + (W * mm(k, k.mT)).sum(-1, keepdim=True)
        W = beta * W
        dq = read + mm(F, k)
        dk = end + mm(F.mT, q) + mm(W + W.mT, k) - beta * found
        pairs = (F * mm(q, k.mT)).tril(-1) + W * mm(k, k.mT)
        rows = pairs.sum(-1, keepdim=True) + (q * read).sum(-1, keepdim=True) - beta * lost
        dg = (rows - pairs.sum(-2)[..., None]).flip(-2).cumsum(-2).flip(-2)
        before = (k * end).sum(-1, keepdim=True).cumsum(-2)
        dg = dg + torch.nn.functional.pad(before[..., :-1, :], (0, 0, 1, 0))
        dg = (dg + through * (S_n * R_n).sum((-2, -1), keepdim=True)).masked_fill(g == -torch.inf, 0.0)

        def whole(x):
            return x.flatten(2, 3).transpose(1, 2)[:, :T]

        def of_key_heads(x):
            return whole(x).unflatten(2, (heads, G)).sum(3)

        o, dq, dk, dv, dg, dbeta = torch.stack(o, 2) * scale, of * dq, of * dk, of * beta * r, of * dg, of * dbeta
        dg = whole(dg)[..., 0] if gated else None
        return whole(o), S, of_key_heads(dq), of_key_heads(dk), whole(dv), dg, R * of, None, whole(dbeta)[..., 0]

    def in_segments(self, walk, S, x, n, backwards=False):
        """The state after chunks n of values x: of each segment what it adds, and its map of the state, come first."""
        if self.length is None:
            return walk(S, x, n)
        parts, starts = [n[i : i + self.length] for i in n[:: self.length]], []
        one = torch.eye(S.shape[-2], device=S.device).expand(*S.shape[:-1], -1)
        for part in reversed(parts) if backwards else parts:
            starts.append((S, part))
            added = walk(torch.zeros_like(S), x, part)
            map_of_S = walk(one, x[..., :1] * torch.zeros_like(one[0, 0, 0]), part)
            # the kernel's products here are of float32 tiles, whatever the tokens are
            S = product(added, map_of_S, S, torch.float32, self.luck)
        for start, part in starts:
            walk(start, x, part)
        return S


def delta_steps(q, k, v, g, beta, S, *_, scale, luck=PLAIN):
    """portable/delta_step.py: o and the final state, in float32, every product summed term by term."""
    G, none, o = v.shape[2] // q.shape[2], torch.zeros(1, device=v.device), []
    q, k = (x.repeat_interleave(G, 2) for x in (q, k))
    for t in range(q.shape[1]):
        S = S if g is None else exp2(g[:, t, :, None, None] * LOG2E) * S
        found = product(none, k[:, t, :, None], S, torch.float32, luck)
        S = S + k[:, t, :, :, None] * (beta[:, t, :, None, None] * (v[:, t, :, None] - found))
        o.append(product(none, q[:, t, :, None], S, torch.float32, luck)[:, :, 0] * scale)
    return torch.stack(o, 1), S
