"""The mechanisms as the kit knows them: declared tensors, and the callables that judge (chapters 1 to 20)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from gla_ref import delta_rule, gated_delta_rule, gla, kda, linear_attention, simple_gla, softmax_attention

from .. import mechanisms
from .._contract import state_shape
from ..mechanisms import Argument, Mechanism
from ..rounding import Luck
from ._emulate import attend, by_token, corrected, corrected_by_token, one_product, two_level

AT_ONCE = 16  # tokens of the recurrence at a time
SHORT = 520  # tokens up to which the recurrence itself is the oracle; then a form held against it
LONGEST_CHUNK = 256  # the longest chunk of an emulated run: a product over more tokens has a run of its own
# one chunk after another, of lengths that kernels have (the longest is the whole of most cases)
LINEAR_RUNS = (partial(two_level, C=16), partial(two_level, C=64, halves=True), partial(two_level, C=LONGEST_CHUNK))
DELTA_RUNS = (partial(corrected, C=32), partial(corrected, C=64, ahead=True), partial(corrected, C=128))


def by_length(body: Callable, ends: list[int] | None, tokens: dict, states: dict) -> tuple[tuple, tuple]:
    """:func:`~gla_ref._contract.per_sequence`, sequences of one length side by side: many short ones take no longer."""
    if ends is None:
        return body(**tokens, **states)
    lengths = [b - a for a, b in pairwise(ends)]
    pieces = {name: x.split(lengths, 1) for name, x in tokens.items()}
    outs, finals = {}, {i: tuple(x[i] for x in states.values()) for i in range(len(lengths))}
    for length in {*lengths} - {0}:
        those = [i for i, n in enumerate(lengths) if n == length]
        here = {name: torch.cat([parts[i] for i in those]) for name, parts in pieces.items()}
        out, final = body(**here, **{name: x[those] for name, x in states.items()})
        outs |= dict(zip(those, zip(*out, strict=True), strict=True))
        finals |= dict(zip(those, zip(*final, strict=True), strict=True)) if final else {}
    joined = tuple(torch.cat(parts)[None] for parts in zip(*(outs[i] for i in sorted(outs)), strict=True))
    return joined, tuple(torch.stack(parts) for parts in zip(*(finals[i] for i in sorted(finals)), strict=True))


@dataclass(frozen=True)
class Kind:
    """All that the kit must know of a mechanism.

    Attributes:
        mechanism: its tensors; the kit gives those that every call is given.
        exact: the float64 oracle, a form.
        emulated: right runs `(**tensors, state, scale, dtype, luck) -> o, state`, tensors by their names, whose
            errors budgets are made of; their products draw from `luck`. The first one, in float64, stands for the
            oracle in long sequences; the tests hold it against that.
        plain: right runs without products, which luck has no part in (and no keyword).
        also: forms whose own float32 run counts among them, up to SHORT tokens.
        beyond: as `plain`, of float32, which count beyond LONGEST_CHUNK tokens.
        widest: the largest V of its cases.
    """

    mechanism: Mechanism
    exact: Callable
    emulated: tuple[Callable, ...] = LINEAR_RUNS
    plain: tuple[Callable, ...] = ()
    also: tuple[Callable, ...] = ()
    beyond: tuple[Callable, ...] = ()
    widest: int = 512

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the tensors that every call is given, in order."""
        return self.mechanism.required

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of the tensors that a call may be given besides, by name."""
        return tuple(x.name for x in self.mechanism.arguments if x.optional)

    @property
    def states(self) -> dict[str, str]:
        """Name of each state as it is given (S0, k0), to the name of what comes out (S, k_cache)."""
        return {x.name.removesuffix("_cache") + "0": x.name for x in self.mechanism.states}

    @property
    def cache(self) -> bool:
        """Whether the state is all tokens so far, and has a time axis, instead of one S for each sequence."""
        return any("T0" in x.axes.split() for x in self.mechanism.states)

    @cached_property
    def tensors(self) -> dict[str, Argument]:
        """The declaration of each tensor of a problem, by its name.

        They are those given (q, S0), those returned (o, S), the gradients of the former (dq, dS0), and what the loss
        puts on the latter (d o, d S).
        """
        given = [*self.mechanism.arguments]
        (v,) = (x for x in given if x.name == "v")
        states = zip(self.states, self.mechanism.states, strict=True)
        given += [x._replace(name=before) for before, x in states]
        made = [v._replace(name="o"), *self.mechanism.states]
        declared = {x.name: x for x in (*given, *made)}
        return declared | {f"d{x.name}": x for x in given} | {f"d {x.name}": x for x in made}

    def parts(self, state) -> tuple:
        """The tensors of a state as a form takes and returns it: S, (k, v) of a cache, or None."""
        return () if state is None else tuple(state) if self.cache else (state,)

    def whole(self, parts):
        """That state of its tensors."""
        return None if not parts else tuple(parts) if self.cache else parts[0]

    def named(self, role: str) -> tuple[str, ...]:
        """Names of the tensors of a role that every call is given."""
        return self.mechanism.named(role, optional=False)

    def by_name(self, tokens: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The tensors of a call by their names; optional ones may be missing."""
        return dict(zip((x.name for x in self.mechanism.arguments), tokens, strict=False))

    def sizes(self, x: dict[str, Tensor]) -> dict[str, int]:
        """The size of every axis of tensors given."""
        axes = ((a, n) for name in x for a, n in zip(self.axes(name), x[name].shape, strict=True))
        return dict(axes)

    def axes(self, name: str) -> list[str]:
        """The axes of a tensor of a problem: ["B", "T", "H", "K"] for q and dq."""
        return self.tensors[name].axes.split()

    def head_axis(self, name: str) -> int:
        """The axis of a tensor of a problem that runs over heads."""
        heads = {"H", *(many for many, _ in self.mechanism.multiples)}
        (axis,) = (i for i, a in enumerate(self.axes(name)) if a in heads)
        return axis

    def oracle(self, *tokens, scale, initial_state, cu_seqlens):
        """The exact result: of the recurrence, whose graph is cut into pieces, or of what stands for it."""
        if tokens[0].shape[1] > SHORT:
            return self.emulate(*tokens, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, sharp=True)
        if self.cache:
            return self.exact(*tokens, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)

        def steps(state, **x):
            # the gradient of one token's slice is as large as what it was cut from
            outs = []
            for piece in zip(*(y.split(AT_ONCE, 1) for y in x.values()), strict=True):
                tokens = dict(zip(x, piece, strict=True))
                o, state = self.exact(**tokens, scale=scale, initial_state=state, cu_seqlens=None)
                outs.append(o)
            return torch.cat(outs, 1), state

        return self.by_sequence(steps, tokens, initial_state, cu_seqlens)

    def emulate(
        self,
        *tokens,
        scale,
        initial_state,
        cu_seqlens,
        dtype=torch.float64,
        run=0,
        copies=1,
        thrice=False,
        sharp=False,
        seed=0,
        **options,
    ):
        """One of the emulated runs, those for long sequences last, under the contract; exact in float64.

        Of the `copies` of inputs side by side as heads each one has its own :class:`~gla_ref.rounding.Luck`, drawn from
        the `seed`. `options` are the run's own, as `segments` of :func:`~gla_ref.check._emulate.corrected`.
        """
        body = (*self.emulated, *self.plain, *self.beyond)[run]
        if run < len(self.emulated):
            # a row's largest probability is 1 when attention rounds it, and stays 1
            body = partial(body, luck=Luck(copies, thrice=thrice, sizes=not self.cache, seed=seed, sharp=sharp))
        x = self.by_name(tokens)
        options |= {"scale": x["q"].shape[-1] ** -0.5 if scale is None else scale, "dtype": dtype}
        if not self.cache:
            return self.by_sequence(partial(body, **options), tokens, initial_state, cu_seqlens)

        def attended(**x):
            cache = initial_state or (x["k"][:, :0], x["v"][:, :0])
            o, cached = body(**x, state=cache, **options)
            return (o, *cached), ()

        (o, *cached), _ = by_length(attended, None if cu_seqlens is None else cu_seqlens.tolist(), x, {})
        return o, tuple(cached)

    def by_sequence(self, body: Callable, tokens: tuple, S: Tensor | None, cu_seqlens: Tensor | None) -> tuple:
        """(o, states) of body(**tokens, state) -> o, state for every sequence; zeros where no state is given."""
        x = self.by_name(tokens)
        ends = None if cu_seqlens is None else cu_seqlens.tolist()
        sizes = self.sizes(x)
        N = sizes["B"] if ends is None else len(ends) - 1
        S = x["q"].new_zeros(state_shape(self.mechanism, sizes, N)) if S is None else S

        def one(**x):
            o, S = body(**x)
            return (o,), (S,)

        (o,), (S,) = by_length(one, ends, x, {"state": S})
        return o, S


DECLARED = mechanisms.MECHANISMS
TOKENS = (by_token, partial(by_token, units=1))  # an exponential may be too small or too large
CORRECTED = (corrected_by_token, partial(corrected_by_token, units=1))
MECHANISMS = {
    "softmax_attention": Kind(
        DECLARED["softmax_attention"],
        softmax_attention.recurrent,
        (attend, partial(attend, by_key=True), partial(attend, by_key=True, merged=True)),
        also=(softmax_attention.two_pass,),
        widest=256,
    ),
    "linear_attention": Kind(
        DECLARED["linear_attention"], linear_attention.recurrent, plain=(by_token,), beyond=(one_product,)
    ),
    "simple_gla": Kind(DECLARED["simple_gla"], simple_gla.recurrent, plain=TOKENS),
    "gla": Kind(DECLARED["gla"], gla.recurrent, plain=TOKENS),
    "delta_rule": Kind(DECLARED["delta_rule"], delta_rule.recurrent, DELTA_RUNS, CORRECTED[:1]),
    "gated_delta_rule": Kind(DECLARED["gated_delta_rule"], gated_delta_rule.recurrent, DELTA_RUNS, CORRECTED),
    "kda": Kind(DECLARED["kda"], kda.recurrent, DELTA_RUNS, CORRECTED),
}
