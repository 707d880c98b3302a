"""Judges of the exercises on the delta rule (chapter 20)."""

import torch

from ... import delta_rule, gated_delta_rule
from . import Wrong, exercise
from ._compare import draw, hold, one_head, variants
from ._predict import predict

predict(
    "ex-delta-thrice",
    ["after the first write", "after the second", "after the third"],
    [4, 6, 7],
    [
        ([4, 8, 12], "That adds half of 8 each time. The second write first takes away half of the 4 that it finds."),
        ([8, 8, 8], "That is beta = 1, which replaces the old value. With beta = 1/2 half of it stays."),
        ([4, 2, 1], "Those are the corrections. The key finds their sum."),
        ([4, 4, 4], "After the first write the key finds 4, which is still 4 short of 8: half of that comes on top."),
    ],
    "Each write moves the found value halfway to 8.",
)


def _product(rho, v1, v2, own=lambda rho: 1 - rho * rho, other=lambda rho: rho):
    return own(rho) * v1 + other(rho) * v2


@exercise("ex-delta-angle", "derive")
def angle(answer):
    mistakes = {
        "That is linear attention: subtract the value that k_2 finds from the second write.": dict(own=lambda rho: 1),
        "rho is counted once: k_2 finds rho v_1, and k_1 meets that correction with another factor rho.": dict(
            own=lambda rho: 1 - rho
        ),
        "The sign is wrong: the value that k_2 finds is subtracted.": dict(own=lambda rho: 1 + rho * rho),
        "The second write changes k_1's answer, too, unless rho = 0.": dict(own=lambda rho: 1, other=lambda rho: 0),
        "That is the answer of k_2. The question asks for k_1.": dict(own=lambda rho: 0, other=lambda rho: 1),
        "k_1 meets the new value with the factor rho, the product of the keys.": dict(other=lambda rho: 1),
    }
    cases = [(0.5, 2.0, 3.0), (-0.8, -1.0, 4.0)]
    hold(answer, cases, _product, variants(_product, mistakes), {"found": ""})


def _writes(S, k, v, beta, *, mask=lambda A: A.tril(-1), on_A=1, on_v=1, sign=1, before=True):
    """The writes of a chunk's tokens; the options leave something out."""
    A = sign * mask(beta[:, None] ** on_A * (k @ k.T))
    missing = v - k @ S if before else v
    return torch.linalg.solve(torch.eye(len(k), dtype=k.dtype) + A, beta[:, None] ** on_v * missing)


@exercise("ex-delta-writes", "implement")
def writes(answer):
    mistakes = {
        "A token must correct earlier tokens' writes, too, not the state alone.": dict(mask=lambda A: 0 * A),
        "The state before the chunk is missing: each token finds k S in it.": dict(before=False),
        "The mask is missing: a token finds the writes of later ones as well.": dict(mask=lambda A: A),
        "A token finds its own write: the diagonal of A is 0.": dict(mask=torch.tril),
        "The triangle is the upper one: a token finds the writes of later ones.": dict(mask=lambda A: A.triu(1)),
        "The sign of A is wrong: found values are subtracted, so the matrix on the left is I + A.": dict(sign=-1),
        "beta is missing in A: values found in the chunk are corrected with the same strength.": dict(on_A=0),
        "beta is missing on the right: v - k S is written with strength beta.": dict(on_v=0),
        "beta is counted twice in A.": dict(on_A=2),
    }
    S, k, v, noise = draw(20, (3, 4), (6, 3), (6, 4), (6,))
    k = k / k.norm(dim=-1, keepdim=True)
    hold(answer, [(S, k, v, 2 * noise.sigmoid())], _writes, variants(_writes, mistakes), {"writes": "T V"})


def _transition(k, g, beta, order=lambda M, N: M @ N, gated=True, strength=1.0):
    M = torch.eye(k.shape[1], dtype=k.dtype)
    for k_t, g_t, beta_t in zip(k, g, beta, strict=True):
        now = torch.eye(k.shape[1], dtype=k.dtype) - strength * beta_t * torch.outer(k_t, k_t)
        M = order((g_t.exp() if gated else 1.0) * now, M)
    return M


@exercise("ex-delta-transition", "implement")
def transition(answer):
    def right(k, g, beta):
        """From the identity as a state, with values of 0."""
        nothing = k.new_zeros(len(k), k.shape[1])
        start = torch.eye(k.shape[1], dtype=k.dtype)[None, None]
        return one_head(gated_delta_rule.recurrent, k, k, nothing, g, beta, initial_state=start)[1][0, 0]

    mistakes = {
        "The order is wrong: the last token's matrix is on the left.": dict(order=lambda M, N: N @ M),
        "The gates are missing: the state decays by all of them.": dict(gated=False),
        "The sign is wrong: the value that the key finds is subtracted.": dict(strength=-1.0),
        "Nothing is erased: that is the decay alone.": dict(strength=0.0),
        "That is right for orthogonal keys only: each erasure changes what later keys find.": (
            lambda k, g, beta: g.sum().exp() * (torch.eye(k.shape[1], dtype=k.dtype) - k.T @ (beta[:, None] * k))
        ),
    }
    k, gates, noise = draw(21, (5, 3), (5,), (5,))
    k = k / k.norm(dim=-1, keepdim=True)
    axes = {"M": "K K"}
    hold(answer, [(k, -gates.abs(), 2 * noise.sigmoid())], right, variants(_transition, mistakes), axes)


def _flips(bits, flip=lambda S, bit: S * (-1) ** bit):
    S, found = torch.ones((), dtype=torch.float64), []
    for bit in bits:
        S = flip(S, bit)
        found.append(S)
    return torch.stack(found)


@exercise("ex-delta-parity", "implement")
def parity(answer):
    def states(bits):
        """The states that the reader's k, v, beta make from 1, token by token."""
        if (given := answer(bits)) is None:
            return None
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise Wrong("Expected three results: k, v and beta.")
        k, v, beta = (torch.as_tensor(x, dtype=torch.float64) for x in given)
        if any(x.shape != bits.shape for x in (k, v, beta)):
            raise Wrong(f"Expected a number for each of the {len(bits)} tokens in k, in v and in beta.")
        one, start = torch.ones_like(k)[:, None], torch.ones(1, 1, 1, 1, dtype=torch.float64)
        tokens = one, k[:, None], v[:, None], beta
        return one_head(delta_rule.recurrent, *tokens, scale=1.0, initial_state=start)[0][:, 0]

    mistakes = {
        "beta = 1 erases: after the first 1 the state is 0 and stays 0.": dict(flip=lambda S, bit: S * (1 - bit)),
        "The state does not change: with k = 0 or beta = 0 nothing is erased.": dict(flip=lambda S, bit: S),
        "The state flips at every token; it should flip at the ones only.": dict(flip=lambda S, bit: -S),
        "The state flips at the zeros; it should flip at the ones.": dict(flip=lambda S, bit: S * (-1) ** (1 - bit)),
        "That writes the value -1 instead of flipping the state's sign: two ones should give 1 again.": dict(
            flip=lambda S, bit: S * (1 - bit) - bit
        ),
    }
    bits = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0], dtype=torch.float64)
    hold(states, [(bits,)], _flips, variants(_flips, mistakes), {"state": "T"})
