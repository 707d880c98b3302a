"""Inputs that tell right from wrong: ladders of lengths, gates, states and strides (appendix "Check your kernel")."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import product
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..mechanisms import Argument
from ._mechanisms import MECHANISMS, Kind

F64 = torch.float64
LN2 = math.log(2)
C = 64  # the chunk that lengths and gates aim at, and that findings are located in
SUB = 16  # its sub-chunk
SEARCH = 40  # random cases of the full level
MANY_ENTRIES = 70  # batch entries or packed sequences, more than a block of 64 holds that looks them all up
MILD = "logsigmoid/16"
BY_CHUNKS = "mild and strong chunks by turns"  # heads take turns too, so a lost state still shows
WEAK_HEAD = "strong but in one head"
TURNS = HAND_OVER, RELAY = "hand-over", "relay"  # keys hand the state from a channel to another before it is erased
UNIFORM = ("zero", "-1e-4", MILD, "-0.2", "-1", "-20", "-1e3", "-inf")  # alike or mild, from weak to strong
GATES = (*UNIFORM, "one strong channel", "mild and strong chunks", "switch - 1e-3", "switch + 1e-3")
GATES += ("resets at chunk ends", "many resets")
LAST = 16 * C + SUB + 1  # tokens of a long sequence
PACKED = {"B": 1, "T": 130, "ends": (0, 0, 33, 33, 40, 120, 130, 130)}
STRONG_SIZES = {"B": 1, "H": 4, "K": 8, "V": 4, "T": 6 * C}  # cases of equal sizes are worked out side by side
KEYS = ("k", "k_cache")  # tensors of size 1 whatever size the others have
OPTIONAL = {  # inputs that a kernel may refuse: by the role of one of another dtype, by strides or as `optional`
    "gate": "gates in float32",
    "strength": "strengths in float32",
    "state": "a state of float64",
    "transposed": "inputs whose channels lie apart",
    "expanded": "inputs with strides of 0",
    "optional": "gates on values",
}


@dataclass(frozen=True)
class Case:
    """One problem of sizes B, T, H, K, V; its tensors are made from it and a seed.

    By kind, in the order of a report: what it is (`name` and sizes), gates, strengths and keys (`gate` to `groups`),
    arguments (`scale` to `index`), the initial state (`state` to `past`), how tensors are held (`strides` to
    `optional`), how large values are (`size` to `peak`), the loss and its gradients (`pull` to `reads`), and the
    kit's use of it (`telling`, `often`).

    Attributes:
        name: what the report calls it.
        gate: a rung of the gate ladder, such as "-20", "many resets" or "logsigmoid/16". "hand-over" and "relay" also
            choose keys, strengths and where values are written (`turned`), of a delta rule without gates, too.
        floor: what no gate is below, where a kernel claims no more; None for the ladder's own.
        strength: what write strengths stay below, 1 or 2.
        beta: every write strength, 0, 1 or 2, instead of random ones; None for those.
        alike: the correlation of keys, from 0 to 1, where there is a write strength.
        keys: the length of keys there.
        found: values are what their keys find in the initial state, and a hundredth of random ones.
        groups: value heads that read the same key head, where a mechanism has that.
        scale: as the kernel gets it; None for K^-0.5.
        ends: boundaries of packed sequences, from 0 to T (with B = 1); None for none.
        state: whether there is an initial state (for softmax attention a cache).
        zeros: that initial state is 0, as that of a text's first part.
        past: the number of tokens in that cache.
        index: dtype of `cu_seqlens`: "int32" or "int64".
        strides: of inputs, states and what backward passes get: "contiguous", "strided" (rows apart, no two
            tensors alike), "fused" (q, k and v as views of one tensor: only tokens lie apart), "misaligned" (off 16
            bytes), "transposed" (channels apart) or "expanded" (with strides of 0: keys and values that heads share,
            one gate for all channels, one initial state for all sequences, and the gradients of a sum).
        other: the input that has another dtype than usual, a gate such as "g" or a strength (float32), or "S0"
            (float64); "" for none.
        optional: the tensors that a call need not have are given, too: gates on values.
        size: standard deviation of q, v and the initial state (in float16 30 at most); k has 1, or the length `keys`
            where there is a write strength.
        loud: the tokens, from one to another, whose q and v are 30 times as large.
        quiet: the tokens, from one to another, whose keys are a 200th of the others'.
        peak: how far the middle token's key is above all others in every query's scores, which are else alike, or None.
        pull: the size of what the loss puts on o and the final state (in float16 always 1); the gradients are
            divided by it.
        frozen: it runs also with each input in turn requiring no gradient, or alone requiring one, and
            another call must leave its results as they are, and what its backward pass needs.
        loss: of "both" o and the final state, of "o" alone or of the "state" alone.
        reads: the tokens, from one to another, whose o is in the loss; None for all.
        telling: the diagnosis looks at it first.
        often: it is called hundreds of times, as time allows, since some races are rare; if shorter than a
            sub-chunk, forward only.
    """

    name: str = "own"
    B: int = 2
    T: int = 70
    H: int = 3
    K: int = 5
    V: int = 7
    gate: str = MILD
    floor: float | None = None
    strength: float = 1.0
    beta: float | None = None
    alike: float = 0.0
    keys: float = 1.0
    found: bool = False
    groups: int = 1
    scale: float | None = None
    ends: tuple[int, ...] | None = None
    index: str = "int32"
    state: bool = True
    zeros: bool = False
    past: int = 9
    strides: str = "contiguous"
    other: str = ""
    optional: bool = False
    size: float = 1.0
    loud: tuple[int, int] | None = None
    quiet: tuple[int, int] | None = None
    peak: float | None = None
    pull: float = 1.0
    frozen: bool = False
    loss: str = "both"
    reads: tuple[int, int] | None = None
    telling: bool = False
    often: bool = False

    @property
    def volume(self) -> int:
        """The product of its sizes, by which cases are called small or large."""
        return self.B * self.T * self.H * self.K * self.V

    def __str__(self) -> str:
        """The call that makes it: sizes, and what is not by default so."""
        plain = {f.name: f.default for f in fields(self)}
        given = {n: getattr(self, n) for n in plain}
        names = [n for n in plain if n in "BTHKV" or given[n] != plain[n] and n != "telling"]
        return f"Case({', '.join(f'{n}={given[n]!r}' for n in names)})"


def cases(mechanism: str, level: str = "quick", seed: int = 0) -> list[Case]:
    """The cases of a level; those of "full" begin with those of "quick" and end with a random search.

    Args:
        mechanism: a key of `gla_ref.check.MECHANISMS`.
        level: "quick" or "full".
        seed: of the random search.

    Raises:
        ValueError: there is no such mechanism or level.
    """
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism: expected one of {sorted(MECHANISMS)}, got {mechanism!r}")
    if level not in ("quick", "full"):
        raise ValueError(f"level: expected 'quick' or 'full', got {level!r}")
    kind = MECHANISMS[mechanism]
    gates, strengths = kind.named("gate"), kind.named("strength")
    ladder = of_lengths()
    ladder += of_gates() if gates else []
    ladder += of_calls(kind)
    ladder += of_caches() if kind.cache else of_states(kind)
    ladder += of_strong_gates(gates[0]) if gates else []
    ladder += of_strengths(strengths[0]) if strengths else []
    ladder += of_value_heads() if kind.mechanism.multiples else []
    if level == "full":
        ladder += of_large_sizes(kind.widest)
        ladder += [case for case in on_packed_and_long() if gates and case not in ladder]
        turns = product(TURNS if strengths else (), (8192, 32768))
        ladder += [Case(f"{turn}, {T} tokens", **STRONG_SIZES | {"H": 2, "T": T}, gate=turn) for turn, T in turns]
        ladder += [any_case(mechanism, Random(f"{seed} {n}"), f"random {n}") for n in range(SEARCH)]
    return ladder


def of_lengths() -> list[Case]:
    """Lengths about one chunk and two."""
    lengths = (1, 7, C - 1, C, C + 1, 2 * C, 2 * C + SUB + 1)
    return [Case(f"length {T}", T=T, telling=T == lengths[-1], often=T in (7, 2 * C)) for T in lengths]


def of_gates() -> list[Case]:
    """The gate ladder, in one chunk and a piece; many resets, in three chunks and a piece."""
    ladder = [Case(f"gate {g}", T=C + SUB + 3, H=2, gate=g) for g in GATES[:-1]]
    return [*ladder, Case("gate many resets", T=3 * C + 3, H=2, gate=GATES[-1], telling=True)]


def of_calls(kind: Kind) -> list[Case]:
    """Sizes, scales, packed sequences, strides and losses, which every mechanism has; then several of them at once."""
    gates, strengths = kind.named("gate"), kind.named("strength")
    others = (0, 20, 20, 53, 90, 97, 97, 130)
    whole = (0, C, 3 * C, 3 * C, 6 * C + 8, 6 * C + SUB + 8, 7 * C + SUB + 8)
    many = tuple(n + n // 3 for n in range(MANY_ENTRIES + 1))
    joint = {"B": 1, "H": 9, "V": 20, "gate": BY_CHUNKS if gates else MILD}
    several = {"H": 3, "groups": 2} if kind.mechanism.multiples else {"H": 5}
    # a delta rule's triangles of so many heads would take seconds
    long = {"H": 2, "T": 300} if strengths else {"H": 16, "K": 3, "V": 4, "T": 4 * C + 10}
    long = {"H": 1, "T": 8 * C + 1} if kind.cache else long
    tiled = (481,) if kind.cache else (480, 481)  # a cache has no final state that a last whole tile could miss
    ladder = [
        Case("square", H=2, K=6, V=6, T=2 * C, telling=True),
        Case("one head", H=1, K=64, V=48, T=C + SUB + 1),
        Case("wide", H=2, K=40, V=36, T=C + 3),
        Case("wider", B=1, H=2, K=80, V=72, T=C + SUB + 1),
        Case("widest", B=1, H=1, K=160, V=136, T=C + 3),
        Case("scale given", scale=-0.3, T=C + 3, telling=True),
        Case("scale zero", scale=0.0, T=SUB + 3),
        Case("one token with scale", T=1, scale=0.7),
        Case("one token without state", T=1, state=False),
        Case("no initial state", state=False),
        Case("scale without state", scale=0.7, state=False, strides="strided", loss="o"),
        Case("loss without state", state=False, strides="misaligned", loss="state"),
        Case("packed", **PACKED, state=not kind.cache, telling=True),
        Case("packed with other boundaries", **PACKED | {"ends": others}, state=False, index="int64"),
        Case("packed with scale", **PACKED, H=9, state=not kind.cache, scale=0.7),
        Case("packed whole chunks", B=1, T=whole[-1], ends=whole, state=not kind.cache),
        Case("many sequences", B=1, T=many[-1], H=2, K=3, V=5, ends=many, state=not kind.cache),
        Case("packed strided", **PACKED, state=False, strides="strided", loss="o"),
        Case("strided", strides="strided", telling=True),
        Case("fused", strides="fused"),
        Case("misaligned", strides="misaligned"),
        Case("transposed", strides="transposed"),
        Case("expanded", strides="expanded"),
        Case("many batch entries", B=MANY_ENTRIES, H=1, K=3, V=4, T=3),
        Case("many heads", B=3, H=101, K=4, V=6, T=7, state=not kind.cache),
        # several things meet: mistakes that none of them shows alone
        Case("joint", **joint, T=2 * C + 3, K=48),
        Case("joint packed", **joint | several, T=C + 43, K=128, ends=(0, C + 3, C + 43), state=not kind.cache),
        Case("joint square", **joint | {"H": 2, "V": 128}, T=4 * C + 10, K=128),
        Case("one packed sequence", B=1, T=C + SUB + 3, ends=(0, C + SUB + 3), state=not kind.cache),
        Case("frozen inputs", frozen=True),
        Case("loss of o alone", T=2 * C + 3, loss="o"),
        Case("loss of the state alone", loss="state"),
        # in the chunks before and behind, and beside it in its own, the gradient of o is 0
        Case("loss of some tokens", T=2 * C + 3, reads=(C + 5, C + SUB + 5)),
        Case("small loss", pull=2.0**-24),
        Case("large", size=30.0, telling=True),
        Case("huge", size=2.0**18, state=not kind.cache, loss="state" if kind.cache else "both"),
        Case("long", **long),
        # one more than, and a multiple of, tiles of 16, 32, 48, 80, 96, 160 and 240 tokens
        *(Case(f"{T} tokens", B=1, T=T, H=1, K=3, V=4, state=not kind.cache) for T in tiled),
        Case("values wider than keys", B=1, H=1, K=16, V=80, T=C + 3),
    ]
    if gates or strengths:  # more of them than a buffer of 8192 numbers holds
        ladder.append(Case("many tokens and heads", B=1, T=16 * C + SUB, H=8, K=2, V=3, gate="-1" if gates else MILD))
    return [*ladder, Case("gates on values", B=1, H=2, K=3, V=4, T=C + 3, optional=True)] if kind.optional else ladder


def of_caches() -> list[Case]:
    """Steep scores, a row's first few maybe all below exp's range; one high score among many; long caches."""
    return [
        Case("steep", scale=300.0, state=False),
        Case("steep and negative", scale=-300.0, state=False),
        Case("long cache", T=SUB + 3, past=600, scale=3.0),
        Case("long cache and one token", T=1, H=4, past=2100, scale=3.0),
        # a tile of keys that far below the maximum weighs little, and five of them several budgets
        Case("one high score", B=1, T=11 * C, H=1, K=4, V=20, state=False, loss="state", quiet=(0, 11 * C), peak=8.125),
    ]


def of_states(kind: Kind) -> list[Case]:
    """A state of zeros and in another dtype, and sums over long sequences."""
    # what rounds in its loud part is nothing to gradients of gates in the chunks before it
    narrow = {"B": 1, "H": 1, "K": 2, "V": 3, "T": 2113 if kind.named("strength") else 4097, "loud": (1100, 1900)}
    return [
        *(Case("state of float64", other=name) for name in kind.states),
        Case("state of zeros", zeros=True),
        Case("quiet keys", quiet=(SUB, 2 * C), T=2 * C + 3),
        # attention's dv would be a single product here, whose rounding is one of few that a budget has seen
        Case("loss of one token", T=2 * C + 3, loss="o", reads=(C + 5, C + 6)),
        Case("narrow and long", **narrow, gate="-1" if kind.named("gate") else MILD),
    ]


def on_packed_and_long() -> list[Case]:
    """The gate ladder again: in packed sequences, and in sixteen chunks and a piece."""
    packed = [Case(f"gate {g} packed", **PACKED, gate=g) for g in GATES]
    return packed + [Case(f"gate {g} long", B=1, H=2, T=LAST, gate=g) for g in GATES]


def of_strong_gates(name: str) -> list[Case]:
    """Gates with wide keys, in float32, and those at which a sum drifts or a state is dropped."""
    # sums of gradients over all later tokens drift most with slow decay, or stand out least, with fast
    names = "gate -1e-4 long", "gate -1 long", "gate many resets packed"
    return [
        Case("wide keys and gate -20", B=1, H=2, K=64, V=20, T=C + SUB + 3, gate="-20"),
        *(case for case in on_packed_and_long() if case.name in names),
        Case("gates in float32", other=name),
        Case(WEAK_HEAD, **STRONG_SIZES, gate=WEAK_HEAD),  # a state that is dropped where gates are strong on average
    ]


def of_strengths(name: str) -> list[Case]:
    """Strengths, keys that are alike or short, and keys that hand a state over."""
    return [
        Case("strengths up to 2", strength=2.0, T=2 * C + 3, telling=True),
        *(Case(f"strength {x}", beta=float(x), T=C + SUB + 3) for x in (0, 1, 2)),
        Case("strength 0.04", beta=0.04, T=2 * SUB + 3),
        *(Case(f"keys alike {x}", alike=x, T=C + SUB + 3, K=16) for x in (0.9, 0.99)),
        Case("equal keys", alike=1.0, T=C + SUB + 3),
        Case("keys alike, strengths up to 2", alike=0.9, strength=2.0, T=2 * C + 3),
        Case("short keys", keys=0.5, T=C + 3, telling=True),
        Case("values that keys find", found=True, gate="zero", K=16, T=C + SUB + 3),
        # an earlier octave has a unit of its own: what later tokens do to it shows
        Case("later tokens loud", loud=(C, 2 * C + 3), T=2 * C + 3),
        Case("strengths in float32", other=name),
        Case(HAND_OVER, **STRONG_SIZES, gate=HAND_OVER),
        Case(RELAY, **STRONG_SIZES | {"H": 2, "K": 4, "T": 16 * C}, gate=RELAY),
    ]


def of_value_heads() -> list[Case]:
    """Several value heads a key head."""
    return [
        Case("value heads", groups=2, T=C + SUB + 3, telling=True),
        Case("value heads of one key head", H=1, groups=3, T=C + 3),
        Case("value heads packed", **PACKED, H=2, groups=3),
        Case("value heads strided", T=2 * SUB + 3, H=4, groups=4, strides="strided"),
    ]


def of_large_sizes(widest: int) -> list[Case]:
    """Long sequences, and unusual sizes up to the widest state."""
    long = [Case(f"length {T}", B=1, H=2, K=16, V=24, T=T) for T in (LAST, 4096, 8192)]
    sizes = (1, 1, 1, 1), (5, 1, 8, 20), (1, 9, 20, 8), (1, 2, 128, 100), (1, 1, 256, widest)
    return long + [Case(f"sizes B={B} H={H} K={K} V={V}", B=B, H=H, K=K, V=V, T=C + 1) for B, H, K, V in sizes]


def but_for_gates(case: Case) -> Case:
    """A case without the things that choose no other code in a kernel: its name and its gates' values."""
    return replace(case, name="", gate=MILD, floor=None, telling=False, often=False)


def any_case(mechanism: str, rng: Random, name: str) -> Case:
    """One of the random search; half of its lengths lie near a multiple of a chunk."""
    kind = MECHANISMS[mechanism]
    T = rng.randint(1, 200)
    T = rng.choice((T, max(1, rng.choice((SUB, C, 2 * C, 3 * C)) + rng.randint(-2, 2))))
    ends = None
    if rng.random() < 0.3:
        ends = (0, *sorted(rng.choices(range(T + 1), k=rng.randint(0, 5))), T)
    return Case(
        name,
        B=rng.randint(1, 3) if ends is None else 1,
        T=T,
        H=rng.randint(1, 4),
        K=rng.choice((1, 2, 3, 5, 8, 16, 17, 31, 33, 48)),
        V=rng.choice((1, 2, 3, 5, 8, 16, 17, 31, 33, 48)),
        gate=rng.choice(GATES) if kind.named("gate") else MILD,
        scale=rng.choice((None, None, 1.0, -0.3)),
        ends=ends,
        state=rng.random() < 0.7 and not (kind.cache and ends),
        strides=rng.choice(("contiguous", "contiguous", "strided", "misaligned")),
        loss=rng.choice(("both", "both", "both", "o", "state")),
        index=rng.choice(("int32", "int64")),
        frozen=rng.random() < 0.1,
        strength=rng.choice((1.0, 2.0)) if kind.named("strength") else 1.0,
        alike=rng.choice((0.0, 0.0, 0.9)) if kind.named("strength") else 0.0,
        groups=rng.choice((1, 2, 3)) if kind.mechanism.multiples else 1,
    )


def gate(kind: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """A rung of the gate ladder, float64 `[B, T, H, ...]`."""
    t = torch.arange(shape[1]).view(1, -1, *[1] * (len(shape) - 2))
    mild = logsigmoid(torch.randn(shape, generator=rng, dtype=F64)) / 16
    if kind == MILD:
        return mild
    if kind == "one strong channel":
        channel = torch.arange(shape[-1]) == shape[-1] // 2
        return torch.where(channel, -1e3, 0.0).to(F64).expand(shape).clone()
    if kind == "mild and strong chunks":
        return torch.where(t // SUB % 2 == 1, -30.0, mild)
    if kind == BY_CHUNKS:
        head = torch.arange(shape[2]).view(-1, *[1] * (len(shape) - 3))
        return torch.where((t // C + head) % 2 == 1, -30.0, mild)
    if kind.startswith("switch"):  # a chunk's total decay where kernels change their way of computing
        return torch.full(shape, (-80.0 + float(kind[7] + "1e-3")) / C, dtype=F64)
    if kind == "resets at chunk ends":
        return torch.where((t % C == 0) | (t % C == C - 1), -torch.inf, mild)
    if kind in (WEAK_HEAD, *TURNS) and (kind == WEAK_HEAD or len(shape) < 4):
        head = torch.arange(shape[2]).view(-1, *[1] * (len(shape) - 3))
        return torch.where(head == shape[2] - 1, -1e-3, -2.5).to(F64).expand(shape).clone()
    if kind in TURNS:
        (a, b), i = channels(shape, kind == RELAY), t % SUB
        lost = a & (i >= 12) | b & (i < 4) if kind == RELAY else a & (i >= 8) | b & (i < 8)
        return torch.where(a | b, torch.where(lost, -4.95, -1e-3), -2.5).to(F64).expand(shape).clone()
    if kind == "many resets":
        return torch.where(torch.rand(shape, generator=rng) < 0.1, -torch.inf, 4 * mild)
    return torch.full(shape, 0.0 if kind == "zero" else float(kind), dtype=F64)


def channels(shape: tuple[int, ...], relay: bool) -> tuple[Tensor, Tensor]:
    """The channel of each head `[1, T or 1, H, K]` that a state is handed over from, and the one that takes it.

    In a relay the second hands it back in the next sub-chunk.
    """
    _, T, H, K = shape
    h, d = 2 * torch.arange(H).view(-1, 1), torch.arange(K)
    back = (torch.arange(T).view(1, -1, 1, 1) // SUB % 2 == 1) & relay
    a, b = d == h % K, d == (h + 1) % K
    return torch.where(back, b, a), torch.where(back, a, b)


def turned(x: dict[str, Tensor], relay: bool) -> None:
    """Make the keys and strengths of tensors turn the state from one channel into another in every sub-chunk, in place.

    In a hand-over a key between the two channels moves half of it at once. A relay turns it by eight keys, loses less,
    and writes between its turns only. Where no gate erases the first channel, a key along it does.
    """
    q, k, v, beta = (x[n] for n in ("q", "k", "v", "beta"))
    (a, b), i = channels(k.shape, relay), (torch.arange(k.shape[1]) % SUB).view(1, -1, 1, 1)
    one, other = a.to(F64), b.to(F64)
    q[:] *= torch.where(a | b, 8 if relay else 3, 1)
    if relay:
        turn = math.pi / 16 * (i - 3)
        k[:] = torch.where(i < 4, one, torch.where(i < 12, turn.cos() * other - turn.sin() * one, other))
        turns = (i >= 4) & (i < 12)
        beta[:] = torch.where(turns, 0.99, 0.03)[..., 0]
        v[:] *= torch.where(turns, 0, 4)
        return
    k.masked_fill_(a | b, 0)
    k /= k.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    k[:] = torch.where(i % 8 == 7, (one + other) / 2**0.5, k)
    beta[:] = torch.where(i % 8 == 7, 0.99, beta[..., None])[..., 0]
    if x.get("g", beta).ndim < 4:
        k[:] = torch.where(i % 8 == 0, torch.where(i == 8, one, other), k)
        beta[:] = torch.where(i % 8 == 0, 1.0, beta[..., None])[..., 0]


def convert(g: Tensor, gate: str) -> Tensor:
    """Natural log gates as a kernel wants them."""
    return {"log": lambda g: g, "log2": lambda g: g / LN2, "alpha": torch.exp}[gate](g)


def representable(g: Tensor, gate: str, dtype: torch.dtype) -> Tensor:
    """The log gates that a kernel is given when it holds them in its own convention and dtype."""
    held = convert(g, gate).to(dtype).to(F64)
    return {"log": lambda x: x, "log2": lambda x: x * LN2, "alpha": torch.log}[gate](held)


def lowest_held(floor: float, gate: str, dtype: torch.dtype) -> float:
    """The lowest gate not below the floor that stays so when a kernel holds it."""
    while representable(torch.tensor(floor, dtype=F64), gate, dtype) < floor:
        floor *= 1 - torch.finfo(dtype).eps
    return floor


def sizes_of(kind: Kind, case: Case) -> dict[str, int]:
    """The size of every axis of what a case gives."""
    sizes = {"B": case.B, "T": case.T, "H": case.H, "K": case.K, "V": case.V}
    sizes |= {many: case.groups * sizes[few] for many, few in kind.mechanism.multiples}
    N = case.B if case.ends is None else len(case.ends) - 1
    return sizes | {"N": N, "T0": case.past if case.state else 0}


def optional(kind: Kind, case: Case) -> str:
    """The feature that a kernel may refuse by raising; empty if it may refuse none."""
    if case.optional:
        return OPTIONAL["optional"]
    return OPTIONAL.get(kind.tensors[case.other].role if case.other else case.strides, "")


def held(kind: Kind, name: str, case: Case, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor in a case, by its name in `kind.tensors`; a gradient has that of its input."""
    x = kind.tensors[name]
    state = x.role == "state" and not kind.cache
    if x.name == case.other:
        return F64 if state else torch.float32
    return torch.float32 if state else dtype


def as_expanded(kind: Kind, name: str, y: Tensor) -> Tensor:
    """An input's values that need no more memory than that of a single head, channel or sequence."""
    x = kind.tensors[name]
    if x.role in ("gate", "strength"):
        return y[..., :1].expand_as(y)
    if x.role == "state" and not kind.cache:
        return y[:1].expand_as(y)
    return y if name == "q" else y[:, :, :1].expand_as(y)


def inputs(mechanism: str, case: Case, dtype: torch.dtype, seed: int, form: str = "log") -> dict[str, Tensor]:
    """Random-sign tensors of a case in float64, holding values that the kernel's dtype holds exactly.

    Named as the mechanism's tensors, with initial states S0 or k0 and v0; what the loss puts on o and on each state is
    named "d " + its name. `form` is the kernel's convention for gates: log, log2 or alpha.
    """
    kind, rng = MECHANISMS[mechanism], torch.Generator().manual_seed(1000 + seed)
    size = min(case.size, 30.0) if dtype == torch.float16 else case.size
    before = sizes_of(kind, case)
    after = before | {"T0": before["T0"] + case.T}  # what a cache has grown to

    def shape(x: Argument, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(sizes[axis] for axis in x.axes.split())

    def normal(x: Argument, sizes: dict[str, int] = before) -> Tensor:
        return torch.randn(shape(x, sizes), generator=rng, dtype=F64)

    def drawn(x: Argument) -> Tensor:
        if x.role == "gate":
            floor = case.floor and lowest_held(case.floor, form, held(kind, x.name, case, dtype))
            return gate(case.gate, shape(x, before), rng).clamp_min(-math.inf if floor is None else floor)
        if x.role == "strength":
            some = case.strength * torch.rand(shape(x, before), generator=rng, dtype=F64)
            return some if case.beta is None else torch.full_like(some, case.beta)
        y = normal(x)
        if x.name not in KEYS:
            if x.role == "token":
                y[:, slice(*case.loud or (0, 0))] *= 30
            return size * y
        if kind.named("strength"):
            y = case.alike**0.5 * y[:, :1] + (1 - case.alike) ** 0.5 * y if case.alike else y
            y = case.keys * y / y.norm(dim=-1, keepdim=True)
        y[:, slice(*case.quiet or (0, 0))] /= 200
        return y

    states = dict(zip(kind.states, kind.mechanism.states, strict=True))
    x = {n: drawn(kind.tensors[n]) for n in (*kind.arguments, *(kind.optional if case.optional else ()))}
    x["d o"] = normal(kind.tensors["o"])
    if case.reads:
        a, b = case.reads
        x["d o"][:, :a] = x["d o"][:, b:] = 0
    x |= {n: drawn(state) * (not case.zeros) for n, state in states.items()}
    x |= {f"d {state.name}": normal(state, after) for state in states.values()}
    pulls = {"d o": "o"} | {f"d {state.name}": "state" for state in states.values()}
    # left out only now: what is drawn does not depend on it
    left = {n for n, of in pulls.items() if case.loss not in ("both", of)}
    left |= set() if case.state else {*states}
    x = {n: y for n, y in x.items() if n not in left}
    if case.found and "S0" in x:
        k = x["k"].repeat_interleave(case.groups, 2)
        x["v"] = torch.einsum("bthk,bhkv->bthv", k, x["S0"]) + x["v"] / 100
    if case.gate in TURNS:
        turned(x, case.gate == RELAY)
    if case.peak is not None:
        x["q"][..., 0], x["k"][..., 0] = 1, -case.peak * case.K**0.5
        x["k"][:, case.T // 2, :, 0] = 0
    if case.strides == "expanded":
        x = {n: torch.ones_like(y) if n in pulls else as_expanded(kind, n, y) for n, y in x.items()}
    gates = kind.mechanism.named("gate")
    for n, y in x.items():
        low = held(kind, n, case, dtype)
        x[n] = representable(y, form, low) if n in gates else y.to(low).to(F64)
    return x
