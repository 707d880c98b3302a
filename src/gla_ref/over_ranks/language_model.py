"""A language model whose sequences are split over the ranks of a process group (chapter 25).

Each rank has a piece of every sequence. Three things look across the border between two pieces:

    the mixer             one state per head, by :mod:`gla_ref.context_parallel`
    a short convolution   the W - 1 inputs before the piece, from the rank before
    the loss              the label of the piece's last token, which is the first token of the next rank

All other parts of the model work on one token at a time. Only softmax attention uses positions; it has no state and is
refused. Wrap the module :class:`LossOverRanks` in DDP or FSDP2 like any other module::

    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "cp"))
    loss = LossOverRanks(LanguageModel(config).cuda(), mesh["cp"])
    loss = DistributedDataParallel(loss)                # or: fully_shard(loss, mesh=mesh[("dp", "cp")]._flatten())
    ...
    loss(tokens.chunk(2, 1)[mesh["cp"].get_local_rank()].cuda()).backward()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from .. import _contract as contract
from ..models.language_model import IGNORED, LanguageModel, check_tokens
from .exchange import Ranks
from .pieces import Pieces
from .planning import check_lengths

__all__ = ["LossOverRanks"]


def next_tokens(pieces: Pieces, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the token after each token, `[B, T]`, the last one from the next rank; -100 after a sequence's end."""
    targets = torch.cat([tokens[:, 1:], pieces.moved(tokens[:, :1], -1)], 1)
    if cu_seqlens is None:
        if pieces.ranks.rank == pieces.ranks.size - 1:
            targets[:, -1] = IGNORED
        return targets
    last = cu_seqlens[1:] - 1 - pieces.start
    last = torch.where((last >= 0) & (last < pieces.here), last, pieces.here)  # place `here`: on another rank
    ends = torch.zeros(pieces.here + 1, dtype=torch.bool, device=tokens.device).index_fill(0, last.long(), True)
    return targets.masked_fill(ends[:-1], IGNORED)


class Mean(torch.autograd.Function):
    """(this rank's sum, its number of terms, pieces) -> the mean of all ranks' terms.

    DDP and FSDP average the ranks' gradients, but the gradient is their sum: so each rank's gradient is multiplied by
    the number of ranks.
    """

    @staticmethod
    def forward(ctx, total: Tensor, count: Tensor, pieces: Pieces) -> Tensor:
        both, ranks = torch.stack([total.double(), count.double()]), pieces.ranks
        with ranks.agreement.waiting(pieces.facts, ranks.others):
            dist.all_reduce(both, group=ranks.group)
        ranks.agreement.took_part(of_all=True)
        ctx.save_for_backward((ranks.size / both[1]).to(total.dtype))
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, d: Tensor):
        (factor,) = ctx.saved_tensors
        return d * factor, None, None


class LossOverRanks(nn.Module):
    """The mean cross-entropy of a language model over sequences whose tokens are split over ranks.

    Args:
        model: the same on every rank, of any mixer with a state.
        group: the ranks that share a sequence, or a mesh of one dimension (`mesh["cp"]`); None for all.

    Raises:
        TypeError: `group` is no process group.
    """

    def __init__(self, model: LanguageModel, group: dist.ProcessGroup | dist.DeviceMesh | None = None):
        super().__init__()
        self.model, self.ranks = model, Ranks.of(group)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """The loss of all ranks' tokens, the same on every rank.

        Every rank must call the module and its backward pass. The mean of the ranks' gradients is the gradient: DDP and
        FSDP2 take that mean over the ranks of all dimensions of a mesh.

        Args:
            tokens: int64 or int32 `[B, T]`, this rank's piece of each sequence: at least one token, and at least
                W - 1 where a short convolution sees W.
            targets: `[B, T]`, the label of each token; -100 does not count. None: the next token of the same sequence,
                on whichever rank, and no label for the last token.
            cu_seqlens: int32/int64 `[N_seq + 1]`, boundaries of packed documents (B = 1) among the tokens of all
                ranks, the same on every rank.
            lengths: how many tokens each rank has; None if all have as many as this one.

        Returns:
            the mean in nats, in at least float32.

        Raises:
            TypeError, ValueError: an argument does not fit, here or on another rank, or ranks differ in one, or
                the mixer has no state; the message names the argument and the ranks. Asked once for each kind of call.
            RuntimeError: a rank died or hangs, found within the time limit of the group; the message names the rank.
        """
        pieces = self._agreed(tokens, targets, cu_seqlens, lengths)
        targets = next_tokens(pieces, tokens, cu_seqlens) if targets is None else targets
        x, _ = self.model.model(tokens, None, cu_seqlens, pieces)
        return Mean.apply(self.model.summed_loss(x, targets), (targets != IGNORED).sum(), pieces)

    def _agreed(self, tokens, targets, cu_seqlens, lengths) -> Pieces:
        """Check the arguments and return the places of all tokens, after all ranks have agreed on them."""
        ranks, config = self.ranks, self.model.config
        with ranks.agreement.checking():
            check_tokens("tokens", tokens)
            B, T = shape = tokens.shape
            if targets is not None and targets.shape != shape:
                raise ValueError(f"targets: expected shape {list(shape)} as of tokens, got {list(targets.shape)}")
            least = max(1, config.conv_size - 1) if config.use_short_conv else 1
            why = f" (a convolution sees {config.conv_size})" if least > 1 else ""
            lengths = check_lengths(lengths, ranks.size, ranks.rank, T, "tokens", least, why)
            contract.check_cu_seqlens(cu_seqlens, B, sum(lengths), values=False)
        facts = {
            "tokens": f"[{B}, T] {tokens.dtype} on {tokens.device.type}",
            "targets": "None" if targets is None else "given",
            "cu_seqlens": "None" if cu_seqlens is None else f"{list(cu_seqlens.shape)} {cu_seqlens.dtype}",
            "lengths": f"{list(lengths)}",
            "config": f"{config}",
        }
        ranks.agreement.reach_once(facts)
        return Pieces(ranks, lengths, facts)
