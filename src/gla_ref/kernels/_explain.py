"""A call's plan without the call: as data, and in words."""

from __future__ import annotations

from tabulate import tabulate
from torch import Tensor

from ..mechanisms import MECHANISMS
from . import delta, flash_attention, gla, linear_attention
from .launch.hardware import CLASSES, Hardware, hardware_of
from .launch.plan import Launch, Plan, Spec, spec_of, strides_of
from .launch.program import Planned

PLANNERS = {
    "softmax_attention": flash_attention,
    "linear_attention": linear_attention,
    "simple_gla": linear_attention,
    "gla": gla,
    "delta_rule": delta,
    "gated_delta_rule": delta,
}
TILES = ("C", "BM", "BN", "BK", "BV", "BD", "BH")


def plan(
    mechanism: str,
    *tensors: Tensor,
    direction: str = "forward",
    hardware: str | Hardware | None = None,
    scale: float | None = None,
    initial_state: Tensor | tuple[Tensor, Tensor] | None = None,
    cu_seqlens: Tensor | None = None,
    **options,
) -> Plan:
    """See :func:`gla_ref.kernels.plan`."""
    if mechanism not in PLANNERS:
        raise ValueError(f"mechanism: expected one of {', '.join(PLANNERS)}, got {mechanism!r}")
    if direction not in ("forward", "backward"):
        raise ValueError(f"direction: expected 'forward' or 'backward', got {direction!r}")
    if hardware is None:
        hardware = hardware_of(tensors[0].device)
    elif not isinstance(hardware, Hardware):
        if hardware not in CLASSES:
            raise ValueError(f"hardware: expected one of {', '.join(CLASSES)}, got {hardware!r}")
        hardware = CLASSES[hardware]
    kind, planner = MECHANISMS[mechanism], PLANNERS[mechanism]
    names = kind.required
    if len(tensors) != len(names):
        raise TypeError(f"tensors: expected {', '.join(names)}, got {len(tensors)} tensors")
    specs = {"g": None} | {n: spec_of(n, x) for n, x in zip(names, tensors, strict=True)}
    specs |= {x.name: spec_of(x.name, options.pop(x.name, None)) for x in kind.arguments if x.optional}
    specs |= {n: options.pop(n, None) for n in ("path", "kernel") if n in planner.forward.options} | {"scale": scale}
    specs["cu_seqlens"] = spec_of("cu_seqlens", cu_seqlens)
    if options:
        name = next(iter(options))
        raise TypeError(f"{name}: expected an option of {mechanism}, got {name}={options[name]!r}")
    v, cached = specs["v"], mechanism == "softmax_attention" and initial_state is not None
    specs |= {"do": v._replace(name="do"), "dS": None, "cached": cached, "need_dg": specs["g"] is not None}
    if cached:  # then k and v are copied behind the cache
        for name, past in zip(("k", "v"), initial_state, strict=True):
            B, T, H, D = specs[name].shape
            shape = B, past.shape[1] + T, H, D
            specs[name] = Spec(name, shape, strides_of(shape), specs[name].dtype)
    else:
        specs["initial_state"] = spec_of("initial_state", initial_state)

    def planned(function: Planned) -> Plan:
        return function.plan(hardware, *(specs[n] for n in (*function.names, *function.options)))

    forward = planned(planner.forward)
    if direction == "forward":
        return forward
    if mechanism == "softmax_attention":
        specs |= zip(("o", "lse", "low"), forward.outputs, strict=True)
        specs["do"] = forward.outputs[0]._replace(name="do")
    else:
        tensors = [specs[n] for n in planner.forward.names]
        names = planner.backward.names[len(tensors) :]
        specs |= zip(names, planner.kept(tensors, forward.outputs), strict=False)
    return planned(planner.backward)


def describe(found: Plan) -> str:
    """A plan in words and a table."""
    total = sum(step.tensor.bytes for step in found.steps if not isinstance(step, Launch))
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
    lines += [tabulate(rows, head)]
    lines += [
        f"results {results / 1e6:,.3g} MB ({', '.join(sorted(kept))}); other tensors {(total - results) / 1e6:,.3g} MB,"
        " let go as soon as they are read"
    ]
    return "\n".join(lines)
