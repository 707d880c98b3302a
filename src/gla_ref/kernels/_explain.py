"""A call's plan without the call: as data, and in words."""

from __future__ import annotations

from tabulate import tabulate
from torch import Tensor

from .. import FORMS
from ..mechanisms import MECHANISMS
from . import delta, flash_attention, gla, kda, linear_attention
from .launch.hardware import CLASSES, Hardware, hardware_of
from .launch.plan import Launch, Plan, Spec, strides_of

# the modules that plan the forms "triton": each has `forward`, `backward` and KEPT, what the second takes of the first
PLANNERS = {
    "softmax_attention": flash_attention,
    "linear_attention": linear_attention,
    "simple_gla": linear_attention,
    "gla": gla,
    "delta_rule": delta,
    "gated_delta_rule": delta,
    "kda": kda,
}
TILES = ("C", "BM", "BN", "BK", "BV", "BD", "BH")


def plan(mechanism: str, *tensors: Tensor, direction: str, hardware: str | Hardware | None, **options) -> Plan:
    """See :func:`gla_ref.kernels.plan`."""
    if mechanism not in FORMS:
        raise ValueError(f"mechanism: expected one of {', '.join(FORMS)}, got {mechanism!r}")
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction: expected 'forward' or 'backward', got {direction!r}")
    if hardware is None:
        hardware = hardware_of(tensors[0].device)
    elif not isinstance(hardware, Hardware):
        if hardware not in CLASSES:
            raise ValueError(f"hardware: expected one of {', '.join(CLASSES)}, got {hardware!r}")
        hardware = CLASSES[hardware]
    kind, planner = MECHANISMS[mechanism], PLANNERS[mechanism]
    forward, backward, fields = planner.forward, planner.backward, planner.forward.record._fields
    if len(tensors) != len(kind.required):
        raise TypeError(f"tensors: expected {', '.join(kind.required)}, got {len(tensors)} tensors")
    known = {*fields, "initial_state"} - {*kind.required, "g", "cached"}
    if wrong := [name for name in options if name not in known]:
        raise TypeError(f"{wrong[0]}: expected an option of {mechanism}, got {wrong[0]}={options[wrong[0]]!r}")
    given = dict.fromkeys((*fields, "initial_state")) | dict(zip(kind.required, tensors, strict=True)) | options
    cache = given["initial_state"] if "cached" in fields else None
    call = forward.record(*({**given, "cached": False}[name] for name in fields))
    forward.check(call, *([cache] if "cached" in fields else []), launched=False)
    call = forward.specs(call)
    if cache is not None:  # then k and v are copied behind the cache
        k, v = (_behind(x, past) for x, past in zip((call.k, call.v), cache, strict=True))
        call = call._replace(k=k, v=v, cached=True)
    ahead = forward.plan(hardware, call)
    if direction == "forward":
        return ahead
    given = call._asdict() | {name: keep(call, ahead.outputs) for name, keep in planner.KEPT.items()}
    given |= {"do": ahead.outputs[0]._replace(name="do"), "dS": None, "need_dg": given.get("g") is not None}
    return backward.plan(hardware, backward.record(*(given[name] for name in backward.record._fields)))


def _behind(x: Spec, past: Tensor) -> Spec:
    """The tokens x [B, T, H, D] behind those of a cache."""
    B, T, H, D = x.shape
    shape = B, past.shape[1] + T, H, D
    return Spec(x.name, shape, strides_of(shape), x.dtype)


def describe(found: Plan) -> str:
    """A plan in words and a table."""
    made = sum(step.tensor.bytes for step in found.steps if not isinstance(step, Launch))
    kept = {x.name for x in found.outputs if x is not None}
    results = sum(x.bytes for x in found.outputs if x is not None)
    rows = []
    for launch in found.launches:
        tiles = ", ".join(f"{n} = {x}" for n in TILES if (x := launch.given(n)) is not None)
        warps, stages = (launch.options.get(n, d) for n, d in (("num_warps", 4), ("num_stages", 3)))
        stages = launch.given("STAGES") or stages
        touched = {x.name: x.bytes for x in launch.tensors}
        programs = " x ".join(map(str, launch.grid))
        rows.append([launch.name, programs, tiles, warps, stages, f"{sum(touched.values()) / 1e6:,.3g}"])
    head = ["kernel", "programs", "tiles", "warps", "stages", "tensors, MB"]
    lines = [f"{found.name}, for {found.hardware}"]
    lines += [f"  {sentence}" for sentence in found.why]
    lines += [f"  ptxas gets {x}; Triton 3.9 asks for level 2" for x in found.hardware.options.values()]
    lines += [tabulate(rows, head)]
    lines += [
        f"results {results / 1e6:,.3g} MB ({', '.join(sorted(kept))}); other tensors {(made - results) / 1e6:,.3g} MB, "
        "let go as soon as they are read"
    ]
    return "\n".join(lines)
