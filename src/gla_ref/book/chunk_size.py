"""A chart: chunk length from recurrent to parallel: the way of every pair, and the costs (chapter 6)."""

import torch

from .. import linear_attention
from .costs import cost

__all__ = ["chunk_size"]

T, D = 64, 16
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
MAPS = (1, 4, 16, 64)  # lengths whose pairs are shown


def _through_state(C: int) -> list[int]:
    """For every output, the number of tokens that reach the output only through the state.

    The values are unit vectors, so row t of an output shows each token's contribution. Packed as sequences of their
    own, the chunks have no state to read.
    """
    torch.manual_seed(0)
    q, k = torch.rand(2, 1, T, 1, D, dtype=torch.float64)  # positive, so no product is 0 by accident
    v = torch.eye(T, dtype=torch.float64)[None, :, None]
    whole, _ = linear_attention.chunkwise(q, k, v, C=C)
    alone, _ = linear_attention.chunkwise(q, k, v, C=C, cu_seqlens=torch.arange(0, T + 1, C))
    return ((whole != 0) & (alone == 0))[0, :, 0].sum(-1).tolist()


def chunk_size() -> None:
    """Draw one head of linear attention, T = 64 and K = V = 16: the ways of its pairs, and counts from `costs.cost`."""
    from matplotlib import pyplot as plt

    costs = {"FLOPs, relative to C = 1": "matmul_flops", "steps in a chain": "steps"}
    below = [title for title in costs for _ in MAPS[::2]]
    figure, axes = plt.subplot_mosaic([[*MAPS], below], figsize=(4.7, 4), height_ratios=(1, 1.6))
    for C in MAPS:
        ax, through = axes[C], _through_state(C)
        ax.barh(range(T), range(1, T + 1), 1, color="C5", label="a score inside a chunk")
        ax.barh(range(T), through, 1, color="C1", label="through the state")
        ax.set(title=f"C = {C}", aspect="equal", xticks=[], yticks=[], ylim=(T, 0))
    counts = [cost("linear_attention", "chunkwise", B=1, T=T, H=1, K=D, V=D, C=C) for C in LENGTHS]
    for title, name in costs.items():
        first = counts[0].matmul_flops if name == "matmul_flops" else 1
        axes[title].loglog(LENGTHS, [getattr(n, name) / first for n in counts], "o-", base=2)
        axes[title].set(title=title, xlabel="chunk length C", xticks=LENGTHS[::2], xticklabels=LENGTHS[::2])
        ticks = (1, 2, 4) if first > 1 else LENGTHS[::2]
        axes[title].set(yticks=ticks, yticklabels=ticks)
    figure.legend(*axes[MAPS[0]].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    plt.show()
