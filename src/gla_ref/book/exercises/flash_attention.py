"""Judges of the exercises on FlashAttention (chapter 3)."""

import torch

from gla_ref import softmax_attention

from . import exercise
from ._compare import draw, hold, one_head, variants
from ._predict import predict

predict(
    "ex-flash-rows",
    "queries a tile",
    256,  # 2 b / e = b FLOPs a byte in bf16 must reach the ridge of 206: 256 as a power of two
    [
        (128, "A tile of 128 does 128 FLOPs a byte in bf16, and the chip does 206 in that time."),
        (512, "Fewer will do: with e = 2 bytes a number, 2 b / e is b."),
        (103, "That forgets that a number has e = 2 bytes: 2 b / e is b, not 2 b."),
        (206.0, "That is the ridge itself. The next power of two?"),
        (207, "That is enough. As a power of two?"),
    ],
    "Compare 2 b / e FLOPs a byte with the chip's FLOPs in the time of one byte, printed in the section "
    "on two memories; then take the next power of two.",
)

predict(
    "ex-flash-order",
    ["shortest first", "longest first"],
    [6, 5],  # two processors, programs of 1, 2, 3, 4 steps: 6 shortest first, 5 longest first
    [
        ([5, 6], "The other way round: the program that begins last should be a short one."),
        (
            [5, 5],
            "10 steps on two processors take 5 only if both are busy to the end. Shortest first: which "
            "program begins last, and when?",
        ),
        ([10, 10], "Two processors work at the same time."),
        ([4, 4], "One program takes 4 steps, but there are 10 steps for two processors."),
        ([6, 6], "Longest first: 4 and 3 begin; the third program begins at 3, the last at 4."),
    ],
    "Draw two rows, one a processor. The next program goes to the row that ends first.",
)


@exercise("ex-flash-split", "derive")
def split(answer):
    """A softmax over the parts' log-sum-exps."""
    mistakes = {
        "Parts do not count alike: larger scores hold more of the weight.": (lambda L: torch.full_like(L, 1 / len(L))),
        "L is a logarithm: a part counts by its sum of exponentials, e^L.": lambda L: L / L.sum(),
        "The shares must sum to 1: divide by the sum over the parts.": lambda L: L.exp(),
        "Shares must sum to 1: subtract the largest, then divide by their sum.": (lambda L: (L - L.max()).exp()),
        "Right on paper, but e^1000 overflows: subtract the largest L first.": lambda L: L.exp() / L.exp().sum(),
    }
    (L,) = draw(0, (4,))
    hold(answer, [(2 * L,), (L[:1],), (1000 + L,)], lambda L: L.softmax(0), mistakes, {"shares": "P"})


def _gradients(q, k, v, o, L, do, scale, mask=True, delta=1.0, factor=True, on_q=True, on_k=True, dv_from_p=True):
    """p = e^(x - L), dx = p (dp - delta), and three products; the options leave something out."""
    p = (scale * q @ k.T - L[:, None]).exp()
    p = p.tril() if mask else p
    dx = do @ v.T - delta * (do * o).sum(-1, keepdim=True)
    dx = dx * p if factor else dx.tril()
    dq, dk = dx @ k * (scale if on_q else 1), dx.T @ q * (scale if on_k else 1)
    return dq, dk, (p if dv_from_p else dx).T @ do


@exercise("ex-flash-gradients", "implement")
def gradients(answer):
    def right(q, k, v, o, L, do, scale):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(one_head(softmax_attention.recurrent, *leaves, scale=scale)[0], leaves, do)

    mistakes = {
        "The future is not masked: e^(x - L) is not zero above the diagonal.": dict(mask=False),
        "The row sum is missing: a weight that grows takes from the others: dx = p (dp - delta).": dict(delta=0.0),
        "delta is added; it is subtracted.": dict(delta=-1.0),
        "The scale is missing in dq: x = scale q k^T.": dict(on_q=False),
        "The scale is missing in dk: x = scale q k^T.": dict(on_k=False),
        "The scale is missing in dq and dk: x = scale q k^T.": dict(on_q=False, on_k=False),
        "dv is summed with dx; the values are averaged with the weights p.": dict(dv_from_p=False),
        "The factor p is missing in dx = p (dp - delta).": dict(factor=False),
    }
    cases = []
    for T, scale in ((5, 0.6), (7, -1.3)):
        q, k, v, do = draw(T, (T, 3), (T, 3), (T, 2), (T, 2))
        x = (scale * q @ k.T).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        cases.append((q, k, v, torch.softmax(x, -1) @ v, x.logsumexp(-1), do, scale))
    axes = {"dq": "T K", "dk": "T K", "dv": "T V"}
    hold(answer, cases, right, variants(_gradients, mistakes), axes)
