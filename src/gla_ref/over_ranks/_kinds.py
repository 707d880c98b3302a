"""The kind of a call over ranks: checked and planned here, then agreed upon with all ranks (chapter 25)."""

import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from .. import FORMS
from .. import _contract as contract
from ..mechanisms import MECHANISMS
from .exchange import Ranks
from .links import LINKS
from .maps import Walk
from .planning import Plan, check_lengths, plan
from .segments import at_least_one_token


class Arguments(NamedTuple):
    """The arguments of a call on this rank, before they are checked."""

    mechanism: str
    tokens: dict[str, Tensor]  # by name, those that are not None
    initial_state: Tensor | None
    cu: Tensor | None
    scale: float | None
    lengths: Sequence[int] | None
    exchange: str | None
    segment: int | None  # tokens
    gradients: bool  # whether a gradient will be asked for

    def signature(self) -> tuple:
        """Equal for calls of one kind.

        Raises:
            TypeError: an argument should be a tensor and is none; the message names the first one.
        """
        tensors = self.tokens | {"cu_seqlens": self.cu, "initial_state": self.initial_state}
        tensors = {name: x for name, x in tensors.items() if x is not None}
        for name, x in tensors.items():
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        return (
            self.mechanism,
            *((name, x.shape, x.dtype, x.device) for name, x in tensors.items()),
            tuple(self.lengths) if isinstance(self.lengths, Sequence) else type(self.lengths),
            self.scale, self.exchange, self.segment, self.gradients,
        )  # fmt: skip


class CallKind(NamedTuple):
    """Facts that a rank keeps for all calls of one signature."""

    plan: Plan
    facts: dict[str, str]  # shared by all ranks, by the names of arguments
    tag: float  # a number that stands for the facts
    lengths: tuple[int, ...]  # tokens of each rank
    walk: Walk


def agree(ranks: Ranks, arguments: Arguments) -> CallKind:
    """The kind of a call that fits and that all ranks make.

    Whether it fits is asked once for each signature that this rank has seen; whether the others do the same, once for
    each set of facts: what all ranks have in common, so that all of them ask at the same call. Boundaries of packed
    sequences, which change from call to call, are asked for at every call where their values may be looked at.
    """
    agreement, debug = ranks.agreement, os.environ.get("GLA_REF_DEBUG") == "1"
    with agreement.checking():
        cu, signature = arguments.cu, arguments.signature()
        kind = ranks.kinds.get(signature) or kind_of(ranks, arguments)
        facts, readable = kind.facts, cu is not None and (debug or not cu.is_cuda)
        if readable:
            facts = facts | {"cu_seqlens": f"{contract.check_cu_seqlens(cu, 1, sum(kind.lengths))}"}
    (agreement.reach if debug or readable else agreement.reach_once)(facts)
    ranks.kinds[signature] = kind
    return kind._replace(facts=facts)


def kind_of(ranks: Ranks, arguments: Arguments) -> CallKind:
    """Check and plan a call of a new signature.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it.
    """
    mechanism, tokens, cu = arguments.mechanism, arguments.tokens, arguments.cu
    entry = MECHANISMS[mechanism]
    filled = {name: at_least_one_token(x) if x.ndim > 1 else x for name, x in tokens.items()}
    sizes = contract.check_tensors(filled, entry.arguments, entry.multiples)
    (T, device), B = (tokens["q"].shape[1], tokens["q"].device), sizes["B"]
    for name, x in tokens.items():
        if x.shape[1] != T:
            raise ValueError(f"{name}: expected {T} tokens as in q, got {x.shape[1]}")
    lengths = check_lengths(arguments.lengths, ranks.size, ranks.rank, T, "q")
    scale = contract.check_scale(arguments.scale, sizes["K"])
    contract.check_cu_seqlens(cu, B, sum(lengths), values=False)
    if cu is not None and cu.device != device:
        raise ValueError(f"cu_seqlens: expected device {device}, got {cu.device}")
    if arguments.initial_state is not None:
        N = B if cu is None else len(cu) - 1
        contract.check_state("initial_state", arguments.initial_state, contract.state_shape(entry, sizes, N), device)
    link = LINKS.get(dist.get_backend(ranks.group), LINKS["gloo"])
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    chosen = plan(
        mechanism, filled, lengths, packed=cu is not None, exchange=arguments.exchange, segment=arguments.segment,
        link=link, multiprocessors=processors,
    )  # fmt: skip
    walk = Walk(FORMS[mechanism][chosen.walk], chosen.walk == "triton", scale, contract.compute_dtype(*tokens.values()))
    facts = facts_of(arguments, lengths, scale)
    tag = float(zlib.crc32(repr(facts).encode()) % 2**24)  # float32 holds it exactly
    return CallKind(chosen, facts, tag, lengths, walk)


def facts_of(arguments: Arguments, lengths: tuple[int, ...], scale: float) -> dict[str, str]:
    """Facts that all ranks must have in common, a sentence for each argument by its name."""
    facts, cu = {"mechanism": arguments.mechanism}, arguments.cu
    for name in (x.name for x in MECHANISMS[arguments.mechanism].arguments):
        x = arguments.tokens.get(name)
        shape = [] if x is None else [x.shape[0], "T", *x.shape[2:]]
        facts[name] = None if x is None else f"[{', '.join(map(str, shape))}] {x.dtype} on {x.device.type}"
    facts["cu_seqlens"] = None if cu is None else f"{list(cu.shape)} {cu.dtype}"
    facts |= {"lengths": list(lengths), "scale": scale, "exchange": arguments.exchange, "segment": arguments.segment}
    facts["requires_grad"] = arguments.gradients  # a rank without a gradient would leave the others waiting for its own
    return {name: str(fact) for name, fact in facts.items()}
