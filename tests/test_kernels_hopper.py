"""What all Hopper kernels keep, against the recurrence: their source played on a CPU, themselves run on a Hopper GPU.

Their plans, and what they refuse: test_hopper_plans.py.
"""

import itertools
import math
from functools import partial
from typing import NamedTuple

import played_gluon
import pytest
import torch
from cases import F64, LADDER, error, inputs, thin
from harness import BF16, CUDA, F16, F32, HERE, budgets, compare, hold_in_parts, interpreted, results, tokens
from played_gluon import everywhere, on_hopper, played_here
from problems import EVERY, KEYS, MILD, RULES, problem

pytest.importorskip("triton", reason="Triton exists for Linux only")
import kernel_cases

from gla_ref import gates
from gla_ref.kernels import delta, gla, kda
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.plan import spec_of
from gla_ref.pages import gated_delta_rule_hopper, gla_hopper

MODULES = {"gla": gla, **dict.fromkeys(RULES, delta), "kda": kda}
HALVES = (BF16, F16)
WIDTHS = tuple(itertools.product((64, 128), repeat=2))
OF_GLA = ((64, 40), (72, 104), (16, 128), (128, 16), (64, 128), (128, 64), (128, 128))
PATHS = ("fused", "segmented")
LENGTHS = (1, 63, 64, 65, 130, 330) + (257, 1000, 2049) * CUDA
PACK = (0, 0, 64, 64, 97, 167, 172, 172)  # empty sequences, a whole chunk, parts of one, a chunk and a part
CUT = (0, 0, 64, 230, 240)  # no tokens; a whole chunk or segment, several and a part of one, a part
LONG = (0, 0, 33, 33, 40, 300, 941, 1100, 1100)
LEAST = 2.0**-40  # gradients of the delta family count smaller strengths as this one
RUNS = 100  # a gradient was once wrong in 1 call of 100


class Kernel(NamedTuple):
    """A call of Hopper kernels: forward, for o and the final state, or `back`, for all gradients."""

    mechanism: str
    kernel: str = "hopper"
    path: str | None = None
    back: bool = False
    plain: bool = False  # no initial state
    dtypes: tuple = HALVES
    gates: torch.dtype | None = F32  # None: as tokens
    widths: tuple = WIDTHS  # K and V: the first, of small inputs, the last, of a GPU's
    multiprocessors: int = 132  # if few, programs have several chunks


def of_gla(path="fused", **options):
    return Kernel("gla", path=path, gates=None, multiprocessors=8, **{"widths": OF_GLA} | options)


KERNELS = {
    "gla fused": of_gla(widths=(*OF_GLA[:-1], (64, 512), OF_GLA[-1])),
    "gla segmented": of_gla("segmented"),
    "gla page": of_gla(plain=True, widths=WIDTHS, dtypes=(BF16,)),
    "gla gradient": of_gla(back=True, dtypes=(BF16,)),
    "gla gradient segmented": of_gla("segmented", back=True, dtypes=(BF16,)),
    **{f"{m} {kernel}": Kernel(m, f"hopper_{kernel}") for m in RULES for kernel in PATHS[:1] + ("ahead",)},
    **{f"{m} segmented": Kernel(m, "hopper_ahead", "segmented") for m in RULES},
    **{f"{m} gradient": Kernel(m, back=True, path="fused", multiprocessors=3) for m in RULES},
    **{f"{m} gradient segmented": Kernel(m, back=True, path="segmented", multiprocessors=3) for m in RULES},
    "delta page": Kernel(RULES[1], "page", plain=True, dtypes=(BF16,), widths=((128, 128),)),
    **{f"kda {path}": Kernel("kda", path=path, dtypes=(BF16,)) for path in PATHS},
    "kda gradient": Kernel("kda", back=True, dtypes=(BF16,)),
}
OF_DELTA = [way for way, how in KERNELS.items() if how.mechanism in EVERY]
WITH_GATES = [way for way, how in KERNELS.items() if how.mechanism != "delta_rule"]
WITH_STATE = [way for way, how in KERNELS.items() if not how.plain]
WITH_GATES_AND_STATE = [way for way in WITH_STATE if way in WITH_GATES]
GATED_DELTA_FORWARD = [way for way in OF_DELTA if way in WITH_GATES_AND_STATE and not KERNELS[way].back]
NAMES = ("q", "k", "v", "g", "beta", "do")


def ways(names, *values):
    """Each of some kernels with each of its dtypes, and with every choice of some values."""
    return [(way, dtype, *x) for way in names for dtype in KERNELS[way].dtypes for x in itertools.product(*values)]


def in_segments(way):
    return KERNELS[way].path == "segmented"


def sizes(way):
    """Sizes of a call: on a GPU there is more of all."""
    how = KERNELS[way]
    T = 200 if in_segments(way) else 100 if how.back else 130
    return (2, 300, 2, *how.widths[-1]) if CUDA else (1, T, 1, *how.widths[0])


DELTA_BACKWARD = [way for way in OF_DELTA if KERNELS[way].back and not in_segments(way)]


def given(way, *sizes, dtype=BF16, gates=None, **options):
    """`problem` for a kernel: gates in float32, or as its tokens."""
    how = KERNELS[way]
    options |= {"S": 0.0} if how.plain else {}
    return problem(how.mechanism, *sizes, dtype=dtype, gates=gates or how.gates, **options)


def computed(way, x, ends=None, scale=None, **options):
    """Results by name of inputs of `problem`: played here, run on a GPU."""
    how, make = KERNELS[way], run if CUDA else played
    return make(how, x, ends, scale, **options)[0]


def run(how, x, ends=None, scale=None, need_dg=True):
    """As `played`, by the compiled kernels of a GPU."""
    if how.kernel == "page":
        return dict(zip("oS", gated_delta_rule_hopper.gated_delta_rule(*tokens(x)), strict=True)), None
    function = getattr(MODULES[how.mechanism], how.mechanism)
    form = partial(function, kernel=how.kernel, path=how.path, scale=scale)
    if how.back:
        every = results(form, x, ends, frozen=() if need_dg else ("g",))
        return {n: y for n, y in every.items() if n not in ("o", "S")}, None
    cu = None if ends is None else torch.tensor(ends, device=HERE, dtype=torch.int32)
    state = None if how.plain else x["S"]
    return dict(zip("oS", form(*tokens(x), initial_state=state, cu_seqlens=cu), strict=True)), None


def played(how, x, ends=None, scale=None, seed=0, ignored=None, need_dg=True):
    """(results by name, the plan's flags of strong heads or chunks); other kernels than Gluon's are interpreted."""
    module, cu = MODULES[how.mechanism], None if ends is None else torch.tensor(ends, dtype=torch.int32)
    call = x | {"initial_state": None if how.plain else x["S"], "cu_seqlens": cu, "starts": None}
    call |= {"scale": scale, "path": how.path, "kernel": how.kernel, "need_dg": need_dg and x["g"] is not None}
    planned, make = (module.backward, module.plan_backward) if how.back else (module.forward, module.plan_forward)
    hardware = CLASSES["sm_90"]._replace(multiprocessors=how.multiprocessors)
    call = planned.record(**{n: call[n] for n in planned.record._fields})
    if how.kernel == "page":
        plan = kernel_cases.plan_delta_page(hardware, *(spec_of(n, x[n]) for n in NAMES[:5]))
    else:
        plan = make(hardware, planned.specs(call))
    named = {n: y for n, y in call._asdict().items() if isinstance(y, torch.Tensor)}
    *outputs, strong = played_gluon.play(plan, named, seed, ignored)
    if how.mechanism == "gla":
        add_pairs(outputs[:4] if how.back else outputs[:1], x, ends, strong, forward=not how.back)
    fifth = "dg_v" if how.mechanism == "gla" else "dbeta"
    names = ("dq", "dk", "dv", "dg", fifth, "dS0") if how.back else ("o", "S")
    return {n: y for n, y in zip(names, outputs, strict=False) if y is not None}, strong


def check(way, *sizes, ends=None, scale=None, **options):
    """Within the budgets of the portable kernels, all that there should be."""
    how, options = KERNELS[way], options | {"ends": ends, "scale": scale}
    x, judged = given(way, *sizes, **options)
    if how.back and options.get("strength") == 0.0 and x["q"].dtype == BF16:
        # dk and dv are 2^-40 of those of strength 1, and right to the budget of a strength that is so small, not zeros
        _, judged = given(way, *sizes, **options | {"strength": LEAST})
    found = computed(way, x, ends, scale)
    assert set(found) == ({f"d{n}" for n in NAMES[:5] if x.get(n) is not None} | {"dS0"} if how.back else {"o", "S"})
    if CUDA and how.mechanism == "gla" and not how.plain:  # by the portable kernel what Hopper's do not make
        found |= run(how._replace(back=True), x, ends, scale)[0]
    if how.mechanism == "gla" and "dg" in found and options.get("kind") == "-20":
        # `unwind` stores dg in 16 bits, `mend_gradient` adds to it and stores it again: each is half a unit off
        exact = judged["dg"][0]
        off = found["dg"].double() - exact
        found["dg"] = exact + off.sign() * (off.abs() - torch.finfo(BF16).eps / 2 * exact.abs()).clamp(min=0)
    compare(found, {n: judged[n] for n in found})


def same(found, wanted):
    return set(found) == set(wanted) and all(torch.equal(y, wanted[n]) for n, y in found.items())


def add_pairs(made, x, ends, strong, C=64, forward=False):
    """The work of GLA's `mend_gradient` or, forward, `mend`, in float64: all pairs of strong chunks, one by one."""
    scale, (B, T, H, _) = x["q"].shape[-1] ** -0.5, x["q"].shape
    ends = ends or (0, T)
    for i_b, i_h, n in itertools.product(range(B), range(H), range(len(ends) - 1)):
        first = ends[n] // C + n if B == 1 else i_b * -(-T // C)
        for c, o_t in enumerate(range(ends[n], ends[n + 1], C)):
            if strong[first + c, i_h]:
                at = i_b, slice(o_t, min(o_t + C, ends[n + 1])), i_h
                more = pairs(*(x[m][at].double() for m in ("q", "k", "v", "g", "do")), forward)
                for y, z in zip(made, more, strict=True):
                    y[at] = (y[at].double() + scale * z).to(y.dtype)
                if not forward:
                    made[3][at][torch.isneginf(x["g"][at])] = 0


def pairs(q, k, v, g, do, forward=False):
    """(dq, dk, dv, dg over scale), or (o over scale), of the pairs of one chunk."""
    E = gates.segment_sum(g[None, None]).exp()[0, 0]  # [C C K], 0 above the diagonal
    dP = (do @ v.mT).tril()
    P = (q[:, None] * k[None] * E).sum(-1)
    if forward:
        return (P @ v,)
    dq, dk = (dP.tril(-1)[..., None] * k[None] * E).sum(1), (dP.tril(-1)[..., None] * q[:, None] * E).sum(0)
    own, net = dP.diagonal()[:, None], q * dq - k * dk
    return dq + own * k, dk + own * q, P.mT @ do, net.flip(0).cumsum(0).flip(0)


# right for every length, size, gate and key


@everywhere
@pytest.mark.parametrize(
    "way, dtype, T",
    thin(
        ways(KERNELS, LENGTHS),
        *((f"gla {way}", BF16, 330) for way in ("segmented", "gradient segmented")),
        *((way, F16, 1) for way in WITH_GATES if F16 in KERNELS[way].dtypes),
        *((f"delta_rule {way}", F16, 130) for way in ("fused", "gradient")),
    ),
)
def test_every_length(way, dtype, T):
    widths, groups = KERNELS[way].widths, 2 if CUDA or way == "delta page" else 1
    for K, V in widths if CUDA else [widths[T % len(widths)]]:
        check(way, 1 if T > 130 else 2, T, 1, K, V, dtype=dtype, groups=groups)


@everywhere
@pytest.mark.parametrize("way", thin(WITH_GATES, *(way for way in WITH_GATES if not in_segments(way))))
def test_every_size(way):
    how = KERNELS[way]
    for K, V in how.widths if CUDA else [how.widths[len(how.widths) // 2]]:
        check(way, 1, 193 if CUDA else 70, 1 + CUDA, K, V, gates=how.gates and BF16)
        if not how.plain:
            check(way, 1, 193 if CUDA else 70, 1 + CUDA, K, V, groups=1, dtype=how.dtypes[-1], gates=how.gates and F16)


@everywhere
@pytest.mark.parametrize(
    "way, kind",
    thin(
        [(way, kind) for way in WITH_GATES for kind in LADDER],
        *((way, "many resets") for way in WITH_GATES if way not in WITH_STATE),  # the others: packed sequences only
        *((way, "mild and strong chunks") for way in ("gla fused", "gla gradient", "gated_delta_rule segmented")),
        *(("kda fused", kind) for kind in ("-20", "one strong channel")),
        ("kda gradient", "-20"),
        ("gated_delta_rule gradient", "-1"),
    ),
)
def test_the_gate_ladder(way, kind):
    for dtype in KERNELS[way].dtypes:
        check(way, *sizes(way), kind=kind, dtype=dtype, groups=2 if CUDA or way == "delta page" else 1)


@everywhere
@pytest.mark.parametrize(
    "way, correlation, strength",
    thin(
        [(way, *key) for way in OF_DELTA for key in KEYS],
        *((f"delta_rule {way}", 1.0, 2.0) for way in ("fused", "segmented")),
        *((way, 1.0, 2.0) for way in ("gated_delta_rule ahead", "kda fused", "kda gradient")),
        *((f"{rule} gradient{path}", 0.99, 1.0) for rule, path in zip(RULES, ("", " segmented"), strict=True)),
        ("delta page", 0.99, 2.0),
        ("kda gradient", 0.9, 0.0),
    ),
)
def test_the_key_ladder(way, correlation, strength):
    for dtype, kind in itertools.product(KERNELS[way].dtypes, (MILD, "zero") if way == "delta page" else (MILD,)):
        keys = {"correlation": correlation, "strength": strength, "kind": kind}
        check(way, *sizes(way), dtype=dtype, **keys, groups=2 if way == "delta page" else 1)


@played_here
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("correlation, length", [(0.0, 1.4), (0.0, 3.0), (1.0, 1.4), (0.9, 3.0)])
def test_keys_of_other_lengths(correlation, length, dtype):
    """Equal keys with beta |k|^2 = 2.1 let the state grow by 1.1 a token."""
    keys = {"correlation": correlation, "strength": 2.1 / length**2, "length": length}
    for way in ("delta_rule fused", "delta_rule ahead"):
        check(way, 1, 45, 1, 64, 64, dtype=dtype, **keys)


@everywhere
@pytest.mark.parametrize("way, dtype", thin(ways(WITH_STATE), *((way, BF16) for way in WITH_GATES_AND_STATE)))
def test_packed_sequences(way, dtype):
    ends, (first, *_, last) = LONG if CUDA else CUT, KERNELS[way].widths
    for kind, (K, V) in itertools.product((MILD, "many resets"), (first, last)) if CUDA else [("many resets", first)]:
        check(way, 1, ends[-1], 1, K, V, ends=ends, kind=kind, dtype=dtype, groups=1 + CUDA)


@everywhere
@pytest.mark.parametrize("groups", thin((1, 2, 4), 4))
@pytest.mark.parametrize("way, dtype", thin(ways(DELTA_BACKWARD), ("gated_delta_rule gradient", BF16)))
def test_value_heads_of_a_key_head(groups, way, dtype):
    for K, V in WIDTHS if CUDA else WIDTHS[:1]:
        check(way, 2, 1, 1, K, V, groups=groups, dtype=dtype, gates=dtype)
        check(way, 1, 300 if CUDA else 70, 2, K, V, groups=groups, dtype=dtype)
        check(way, 1, 105, 1, K, V, groups=groups, dtype=dtype, ends=(0, 40, 40, 105), kind="many resets")


SCALES = [*itertools.product(WITH_GATES_AND_STATE, (0.0, -2.0)), ("gated_delta_rule gradient", 1e-9)]
FEW = *SCALES[:2], *(x for x in SCALES if "gated" in x[0] and not in_segments(x[0]))


@everywhere
@pytest.mark.parametrize("way, scale", thin(SCALES, *FEW))
def test_any_scale(way, scale):
    check(way, 1, 70, 1, *KERNELS[way].widths[0], scale=scale, groups=1)


@played_here
@pytest.mark.parametrize("way", thin(WITH_GATES_AND_STATE, *GATED_DELTA_FORWARD, "gated_delta_rule gradient"))
def test_without_states(way):
    """No initial state, and no gradient of the final one."""
    x, judged = given(way, *sizes(way), S=0.0, groups=1)
    found = computed(way, x | {"S": None})
    assert "dS0" not in found
    compare(found, {n: judged[n] for n in found})
    if KERNELS[way].back:
        one, other = (computed(way, x | {"S": None, "dS": dS}) for dS in (None, torch.zeros_like(x["dS"])))
        assert same(one, other)


@everywhere
@pytest.mark.parametrize(
    "way", thin(("gla gradient", "gated_delta_rule gradient", "kda gradient"), "gated_delta_rule gradient")
)
def test_without_dg_the_other_gradients_are_the_same(way):
    x, _ = given(way, 1, 70, 1, 64, 64, groups=1)
    every, fewer = computed(way, x), computed(way, x, need_dg=False)
    assert every.pop("dg") is not None and same(fewer, every)


# what is not a number


@everywhere
@pytest.mark.parametrize("way, dtype", thin(ways(WITH_STATE), *((way, BF16) for way in WITH_GATES_AND_STATE)))
def test_no_sequence_sees_a_neighbour_of_nan(way, dtype):
    ends, rows = (0, 70, 130, 200), slice(70, 130)
    x, _ = given(way, 1, 200, 1, *KERNELS[way].widths[0], dtype=dtype, ends=ends, groups=1)
    right = computed(way, x, ends)
    for n in NAMES:
        if x.get(n) is not None:
            x[n][:, rows] = torch.nan
    beside = computed(way, x, ends)
    for n, y in beside.items():
        hit = [z[1] if n in ("S", "dS0") else z[:, rows] for z in (y, right[n])]
        assert hit[0].isnan().any()
        for z in hit:
            z.zero_()
    assert same(beside, right)


MISSING = [(way, n) for way in GATED_DELTA_FORWARD for n in NAMES[:5]]
QUICK = ("gated_delta_rule fused", "v"), ("gated_delta_rule segmented", "k"), ("kda fused", "g")


@played_here
@pytest.mark.parametrize("way, name", thin(MISSING, *(x for x in MISSING if "ahead" in x[0]), *QUICK))
def test_nan_stays_nan(way, name):
    """From its token on and in the state, except a query's; earlier chunks and other heads do not see it."""
    T, t = (320, 200) if in_segments(way) else (130, 70)
    x, _ = given(way, 1, T, 1, 64, 64)
    x[name][:, t, 0] = torch.nan
    found = computed(way, x)
    assert found["o"][:, t, 0].isnan().any() and found["o"][:, : t // 64 * 64].isfinite().all()
    if name != "q":
        assert found["o"][:, t:, 0].isnan().any(-1).all() and found["S"][:, 0].isnan().any()
    if name in ("v", "g", "beta"):
        assert found["o"][:, :, 1].isfinite().all() and found["S"][:, 1].isfinite().all()


# the order of steps


@played_here
@pytest.mark.parametrize("way", thin(WITH_GATES, *({*WITH_GATES} - {"gla fused", "gla gradient segmented"})))
def test_any_order_of_steps_gives_the_same_bits(way):
    how, ends = KERNELS[way], None if KERNELS[way].plain else CUT
    T, groups = (130 if how.plain else CUT[-1]), 4 if way == "gated_delta_rule gradient" else 2 if how.plain else 1
    x, _ = given(way, 1, T, 1, *how.widths[0], ends=ends, groups=groups, kind="mild and strong chunks")
    first = computed(way, x, ends)
    for seed in (100, 200):
        assert same(computed(way, x, ends, seed=seed), first)


def numbered(way, kernel, names, suffix=""):
    """{name of a barrier: (kernel of this file, launch, which allocation, which barrier)}; names: how many of each."""
    places = [(n, name, s) for n, (name, count) in enumerate(names.items()) for s in range(count)]
    return {f"{name} {s}{suffix}": (way, kernel, n, s) for n, name, s in places}


FUSED = dict.fromkeys(("keys", "ready", "gated", "solved", "done"), 2)
OF_GRADIENTS = {
    "rows_ready": 2, "states_ready": 2, "keys_ready": 1, "factors_ready": 2, "both_ready": 1, "states_done": 2,
    "rows_done": 2, "sums_done": 2, "keys_done": 1, "results_ready": 2,
}  # fmt: skip
THREE = {"ready": 3, "done": 3}
# where dg is made, `hat` of odd rounds can go: a wait at free_R is a wait for all of `transform`
OF_UNWIND = {"has_x 0": (0, 0), "has_x 1": (0, 1), "hat 0": (1, 0), "free_x 0": (2, 0), "free_x 1": (2, 1)}
OF_UNWIND |= {name: (3, n) for n, name in enumerate("has_v has_do has_S has_net free_v free_do free_S".split())}
OF_UNWIND |= {"has_later": (4, 0), "free_R": (5, 0)}
# by their order in the kernel
BARRIERS = {
    **numbered("gated_delta_rule fused", "fused", FUSED),
    **numbered("gated_delta_rule ahead", "walk", THREE, " ahead"),
    **numbered("gated_delta_rule ahead", "solve", {"ready": 1}, " of solve"),
    **numbered("gated_delta_rule gradient", "solve", {"ready": 1}, " of solve, backwards"),
    **numbered("gated_delta_rule gradient", "walks", {"ready": 3, "loaded": 3, "done": 3}, " of walks"),
    **numbered("gated_delta_rule gradient", "gradients", OF_GRADIENTS, " of gradients"),
    **{f"{x} {s} of the page": ("delta page", "walk", 0, 5 * s + n) for s in (0, 1) for n, x in enumerate(FUSED)},
    **{x: y for m in ("prepare", "mend") for x, y in numbered("kda fused", m, {"ready": 3}, f" of KDA's {m}").items()},
    **numbered("kda fused", "walk", THREE, " of KDA"),
    **numbered("kda gradient", "walks", THREE, " of KDA, both ways"),
    **numbered("kda gradient", "gradients", {"ready": 4}, " of KDA's gradients"),
    **numbered("gla page", "walk", {"empty": 3, "ready": 3, "hat": 3}, " of GLA's page"),
    **{f"{name} of GLA": ("gla gradient", "unwind", *at) for name, at in OF_UNWIND.items()},
}
del BARRIERS["gated 1"]  # played, the loader is too early there to be missed


@played_here
@pytest.mark.parametrize(
    "bar",
    thin(
        BARRIERS,
        *("solved 0", "done 0", "ready 2 ahead", "loaded 0 of walks", "done 1 of walks"),
        *("factors_ready 1 of gradients", "done 1 of the page", "ready 2 of KDA's prepare"),
        *("ready 0 of KDA's mend", "ready 1 of KDA", "done 2 of KDA", "done 1 of KDA, both ways"),
        *("empty 0 of GLA's page", "hat 1 of GLA's page", "has_net of GLA", "free_R of GLA"),
    ),
)
def test_every_barrier_is_needed(bar):
    way, *ignored = BARRIERS[bar]
    how, options = KERNELS[way], {"groups": 2 if way in ("delta page", "gated_delta_rule gradient") else 1}
    T, (K, V) = {"gla page": 400, "gla gradient": 300}.get(way, 600), how.widths[0]
    if how.mechanism == "gla":
        V, options = 64, {"kind": "mild and strong chunks" if how.plain else MILD}
    elif "'s" in bar:  # of a strong chunk `mend` makes most of what `prepare` has made
        K, V, T, options["kind"] = 128, 128, 64, "-20" if "mend" in bar else MILD
    # packed, since only then an order of steps shows `factors_ready`: else states are asked for after factors
    ends = (0, 100, 520, 600) if way == "gated_delta_rule gradient" else None
    how = how._replace(multiprocessors=1) if ends else how
    x, _ = given(way, 1, T, 1, K, V, ends=ends, **options)

    def play(seed=None):
        return played(how, x, ends, seed=seed or 0, ignored=None if seed is None else ignored)[0]

    assert played_gluon.anybody_waits(play)


@played_here
@pytest.mark.parametrize("way", [way for way in OF_DELTA if way in WITH_GATES_AND_STATE and not in_segments(way)])
def test_a_missing_fence_is_seen(way, monkeypatch):
    x, _ = given(way, 1, 64, 1, 64, 64, groups=1)
    monkeypatch.setitem(played_gluon.STANDS_IN, "fence_async_shared", lambda: None)
    with pytest.raises(AssertionError, match="without a fence"):
        computed(way, x)


@played_here
@pytest.mark.parametrize("way, T", [("gated_delta_rule gradient", 300), ("gla gradient", 200)])
def test_a_missing_fence_after_reads_is_seen(way, T, monkeypatch):
    """dg of one call in a hundred was wrong without it, on a GPU that others used as well."""
    x, _ = given(way, 1, T, 1, 64, 64, groups=1)
    monkeypatch.setitem(played_gluon.STANDS_IN, "fence_async_shared", played_gluon.fence_of_stores)
    with pytest.raises(AssertionError, match="filled without a fence of .*, which read it"):
        computed(way, x)


@on_hopper
@pytest.mark.parametrize("way", KERNELS)
def test_equal_from_run_to_run(way, poisoned):
    kind, runs = "mild and strong chunks", RUNS if way == "gla gradient" else 20
    for K, V in WIDTHS if way == "gla gradient" else KERNELS[way].widths[-1:]:
        x, _ = given(way, 2, 300 if way == "gla gradient" else 1000, 4, K, V, kind=kind)
        first = computed(way, x)
        assert all(same(computed(way, x), first) for _ in range(runs))


@on_hopper
@pytest.mark.parametrize("way, dtype", ways(x for x in WITH_STATE if not in_segments(x) and not KERNELS[x].back))
def test_a_batch_changes_no_bit(way, dtype):
    """Few heads by narrow programs, many by wide ones."""
    how = KERNELS[way]._replace(path="fused")
    how = how if "ahead" not in way else how._replace(kernel="hopper")
    x, _ = given(way, 24, 200, 4, 128, 128, dtype=dtype)
    many, _ = run(how, x)
    for B in (1, 8):
        few = {n: None if y is None else y[:B] for n, y in x.items()}
        assert same(run(how, few)[0], {n: y[:B] for n, y in many.items()})


@on_hopper
@pytest.mark.parametrize("way, dtype", ways(WITH_STATE))
def test_many_heads(way, dtype):
    """More programs than multiprocessors; where other tests have narrow ones, wide."""
    check(way, 10, 200, 4, 128, 128, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("way, dtype", ways(way for way in WITH_STATE if "gla" in way))
def test_gates_in_other_precisions(way, dtype):
    for kind in (MILD, "many resets", "-20"):
        for gate in {F16, BF16, F32} - {dtype} if not KERNELS[way].back else {F16}:
            check(way, 2, 200, 3, 128, 128, kind=kind, dtype=dtype, gates=gate)
            check(way, 1, 300, 2, 64, 128, kind=kind, dtype=dtype, gates=gate, ends=(0, 33, 33, 200, 300))


# the delta rules' two forward kernels


@played_here
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_only_heads_with_a_strong_chunk_are_made_again(dtype):
    way, sizes = "gated_delta_rule fused", (2, 130, 1, 64, 64)
    (mild, _), (strong, _) = (given(way, *sizes, correlation=0.9, strength=b, dtype=dtype) for b in (0.5, 2.0))
    mixed = mild | {"beta": mild["beta"].clone()}
    mixed["beta"][0, 64:, 1] = 2.0
    strong["beta"][0, :64, 1] = 0.5
    found, flags = zip(*(played(KERNELS[way], x) for x in (mild, strong, mixed)), strict=True)
    assert [y.tolist() for y in flags] == [[0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]
    for n in ("o", "S"):
        for b, h in itertools.product((0, 1), repeat=2):
            head = (b, h) if n == "S" else (b, slice(None), h)
            assert torch.equal(found[2][n][head], found[1 if (b, h) == (0, 1) else 0][n][head])


@played_here
@pytest.mark.parametrize(
    "way, dtype", thin(ways(("gated_delta_rule ahead", "gated_delta_rule segmented")), ("gated_delta_rule ahead", BF16))
)
def test_narrow_and_wide_programs_give_the_same_bits(way, dtype, monkeypatch):
    from gla_ref.kernels.hopper import delta_ahead

    x, _ = given(way, 1, PACK[-1], 1, 64, 128, dtype=dtype, ends=PACK, groups=1)
    narrow = computed(way, x, PACK)
    monkeypatch.setattr(delta_ahead, "NARROW", delta_ahead.WIDE)
    assert same(computed(way, x, PACK), narrow)


# GLA: a plain call runs the page; strong chunks are mended


@everywhere
@pytest.mark.parametrize("K, V", thin(WIDTHS, (64, 64)))
@pytest.mark.parametrize("kind", thin(LADDER, MILD, "mild and strong chunks", "many resets"))
def test_the_page_and_the_kernel_with_options_make_the_same_bits(kind, K, V):
    """From a state of zeros, given or not, right and equal."""
    for sizes in ((2, 1, 3), (3, 150, 2), (2, 257, 3), (1, 256, 2)) if CUDA else ((1, 150, 2),):
        x, judged = given("gla page", *sizes, K, V, kind=kind)
        plain = computed("gla page", x)
        compare(plain, {n: judged[n] for n in plain})
        assert same(plain, computed("gla fused", x))
        if CUDA:
            alone, S = gla_hopper.gla(*tokens(x))
            left = alone.isnan()  # pairs of strong chunks
            assert torch.equal(alone[~left], plain["o"][~left]) and torch.equal(S, plain["S"])
            assert kind not in (MILD, "zero", "-1") or not left.any()


@played_here
def test_the_page_marks_the_pairs_that_it_leaves_out():
    """Without flags, the rows of a head's strong chunk are NaN. The states, and so all other rows, are right."""
    x, _ = given("gla page", 1, 200, 2, 64, 64)
    x["g"][:, 70, 1, 3] = -torch.inf
    right = computed("gla page", x)
    plan = kernel_cases.plan_gla_page(CLASSES["sm_90"], *(spec_of(n, x[n]) for n in "qkvg"))
    o, S, _ = played_gluon.play(plan, x)
    assert o[:, 64:128, 1].isnan().all() and torch.equal(S, right["S"])
    o[:, 64:128, 1] = right["o"][:, 64:128, 1]
    assert torch.equal(o, right["o"])


@everywhere
@pytest.mark.parametrize("T", [1, 2, 4, 65])
def test_the_gradient_of_short_sequences_with_strong_gates(T):
    """Four tokens of g = -20 are a mild chunk; dg is 1e-9 of what a pair i = j would leave there."""
    check("gla gradient", 1, T, 2, 64, 64, kind="-20")


@interpreted
@pytest.mark.parametrize("kind", thin(LADDER, "many resets"))
def test_the_pairs_of_strong_chunks(kind):
    """`mend_gradient` in float32 against all pairs one by one; dg that crosses -inf becomes 0."""
    pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
    from gla_ref.kernels.hopper.gla_backward import mend_gradient
    from gla_ref.kernels.portable.tiles import patterns

    T, K, V, C = 40, 20, 24, 32
    args, _ = inputs("gla", 1, T, 1, K, V, kind=kind)
    args.append(torch.randn(1, T, 1, V, generator=torch.Generator().manual_seed(0), dtype=F64))
    q, k, v, g, do = (y.float() for y in args)
    added = dq, dk, dv, dg = [torch.ones_like(y) for y in (q, k, v, g)]
    strong = torch.tensor([[1], [0]], dtype=torch.int8)
    mend_gradient[(1,)](
        q, k, v, do, g, dq, dk, dv, dg, strong, None, *patterns(*(spec_of("", y) for y in (q, k, v, do, g, dq, dv))),
        1, T, 1, K, V, 0.5, 2, C=C, LEVELS=5, BK=16, BV=16, BN=16, PACKED=False, FAST_SUMS=False,
    )  # fmt: skip
    right = pairs(*(y[0, :C, 0] for y in args))
    for y, more, name in zip(added, right, ("dq", "dk", "dv", "dg"), strict=True):
        expected = 1 + 0.5 * more
        if name == "dg":
            expected = torch.where(torch.isneginf(args[3][0, :C, 0]), 0.0, expected)
        assert (y[0, :C, 0] - expected).abs().max() <= 2e-4 * expected.abs().max(), name
        assert (y[:, C:] == 1).all(), "a mild chunk"


@on_hopper
@pytest.mark.parametrize("path", PATHS)
def test_split_and_carry(path):
    x, judged = given("gla fused", 2, 300, 2, 128, 64, kind="mild and strong chunks")
    hold_in_parts(partial(gla.gla, kernel="hopper"), x, judged, (1, 64, 150), path=path)


@on_hopper
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_strides_and_poison(dtype, poisoned):
    x, judged = given("gla fused", 2, 300, 3, 64, 64, kind="mild and strong chunks", dtype=dtype)
    first = computed("gla fused", x)
    compare(first, {n: judged[n] for n in first})
    turned = {n: x[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qvg"}
    turned["k"] = torch.cat([x["k"], x["q"]], -1)[..., : x["k"].shape[-1]]  # rows apart
    assert same(computed("gla fused", x | turned), first)


@on_hopper
@pytest.mark.parametrize("D", (64, 128))
def test_gradients_of_segments(D):
    """One head: cut into segments, whose states the backward pass makes again where it cuts otherwise."""
    check("gla gradient segmented", 1, 3000, 1, D, D)


@on_hopper
def test_float16_of_large_scores_and_states():
    check("gla fused", 1, 200, 2, 64, 64, kind="mild and strong chunks", dtype=F16, S=1e6, scale=1e-3)


@on_hopper
def test_more_than_2_to_the_31_elements():
    B, T, H, D = 1, 1 << 17, 130, 128
    q = torch.zeros(B, T, H, D, device="cuda", dtype=BF16)
    tail = torch.randn(64, D, device="cuda").bfloat16()
    q[0, -64:, -1] = tail
    o, S = gla.gla(q, q, q, torch.zeros_like(q), scale=1.0, path="fused", kernel="hopper")
    x = tail.double()
    # an absolute band in units of the result: bf16 rounds the scores and o, float32 sums 64 products
    assert error(o[0, -64:, -1], (x @ x.mT).tril() @ x) < 0.05
    assert error(S[0, -1], x.mT @ x) < 1e-4
    assert not o[0, :-64].any()


# KDA


@played_here
def test_no_gate_lies_between_a_token_and_itself():
    x, _ = given("kda fused", 4, 1, 1, 64, 64)
    found = [computed("kda fused", x | {"S": None, "g": torch.full_like(x["g"], g)}) for g in (-3.3, 0.0)]
    assert torch.equal(found[0]["o"], found[1]["o"])


@on_hopper
@pytest.mark.parametrize("V", (64, 128))
@pytest.mark.parametrize("kind", ("last token", "first token", "dead channel", "one key", "open beside closed"))
def test_inputs_made_against_the_kernels_of_kda(kind, V):
    """A state handed on at every border, a channel at -inf among zeros, one key at strength 2, e^-90 at every 16th."""
    x = against(kind, V=V)
    x, judged = budgets("kda", x, {n: F32 if n in ("S", "dS", "g", "beta") else BF16 for n in x})
    for way in ("kda fused", "kda segmented", "kda gradient"):
        found = computed(way, x)
        compare(found, {n: judged[n] for n in found})


def against(kind, B=1, T=1000, H=2, K=128, V=64):
    """Inputs of `budgets`: what they do is named in the test above."""
    rng = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=rng, dtype=F64)
    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1) for _ in "qk")
    x = {"q": q, "k": k, "v": normal(B, T, H, V), "g": torch.zeros(B, T, H, K, dtype=F64)}
    x |= {"beta": torch.full((B, T, H), 0.05, dtype=F64), "S": normal(B, H, K, V)}
    x |= {"do": normal(B, T, H, V), "dS": normal(B, H, K, V)}
    if kind == "dead channel":
        x["g"][..., 7] = -math.inf
    elif kind == "open beside closed":  # pairs on each side are whole, and in a strong block
        x["g"][:, 8::16] = -90.0
    elif kind == "one key":
        x["k"] = (normal(B, 1, H, K).sign() / 8 * (torch.arange(K) < 64)).expand(k.shape)  # length 1, exactly
        x["beta"] = torch.full((B, T, H), 2.0, dtype=F64)
    else:  # one channel lives; at every 16th token a reflection hands its state to the next, and it begins to die
        x["g"] = -3 - 2 * torch.rand(B, T, H, K, generator=rng, dtype=F64)
        for channel, border in enumerate(range(0, T, 16)):
            x["g"][:, border : border + 16, :, channel] = 0.0
            at = border + 16 if kind == "first token" else border + 15
            if at < T:
                x["k"][:, at] = 0.0
                x["k"][:, at, :, channel], x["k"][:, at, :, channel + 1] = 1.0, -1.0
                x["beta"][:, at] = 1.0
                x["g"][:, at, :, channel : channel + 2] = 0.0
    return x
