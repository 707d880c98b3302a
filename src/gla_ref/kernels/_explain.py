"""A call's plan without the call: as data, and in words."""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import Tensor

from ..mechanisms import MECHANISMS
from . import flash_attention, gla, linear_attention
from ._hardware import CLASSES, Hardware, hardware_of
from ._plan import Launch, Plan, Spec, spec_of, strides_of

PLANNERS = {
    "softmax_attention": flash_attention,
    "linear_attention": linear_attention,
    "simple_gla": linear_attention,
    "gla": gla,
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
    given = {n: spec_of(n, x) for n, x in zip(names, tensors, strict=True)}
    for name in [x.name for x in kind.arguments if x.optional]:
        given[name] = spec_of(name, options.pop(name, None))
    given["cu_seqlens"] = cu = spec_of("cu_seqlens", cu_seqlens)
    chosen = {"scale": scale, "path": options.pop("path", None), "kernel": options.pop("kernel", None)}
    if options:
        name = next(iter(options))
        raise TypeError(f"{name}: expected an option of {mechanism}, got {name}={options[name]!r}")
    B, T, H, K = given["q"].shape
    N, V = B if cu is None else cu.shape[0] - 1, given["v"].shape[-1]
    do = Spec("do", given["v"].shape, given["v"].strides, given["v"].dtype)
    if mechanism == "softmax_attention":
        cached = initial_state is not None  # then k and v are copied behind the cache
        for name, past in zip(("k", "v"), initial_state or (), strict=False):
            size, dtype = given[name].shape[-1], given[name].dtype
            given[name] = _spec(name, B, past.shape[1] + T, H, size, dtype=dtype)
        o, lse = _spec("o", *given["q"].shape[:3], V, dtype=do.dtype), _spec("lse", B, H, T)
        low = _spec("low", B, H, T) if do.dtype == torch.float32 else None
        given |= {"o": o, "lse": lse, "low": low, "do": o._replace(name="do"), "cached": cached}
    else:
        state = None if initial_state is None else spec_of("initial_state", initial_state)
        given |= {"g": given.get("g"), "need_dg": "g" in given, "initial_state": state, "do": do, "dS": None}
        unwindable = linear_attention.unwindable(given["q"], given["v"], given["g"])
        given["S_T"] = _spec("S_T", N, H, K, V) if unwindable else None

    def planned(function) -> Plan:
        names = (*function.names, *function.options)
        return function.plan(hardware, *((given | chosen)[n] for n in names))

    found = planned(planner.forward)
    if direction == "forward":
        return found
    kept = found.outputs[2]  # what a forward pass hands to its backward pass
    given |= {"starts": kept, "sums": kept}
    return planned(planner.backward)


def _spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Spec:
    return Spec(name, shape, strides_of(shape), dtype)


def describe(found: Plan) -> str:
    """A plan in words and a table."""
    made = sum(step.tensor.bytes for step in found.steps if not isinstance(step, Launch))
    kept = {x.name for x in found.outputs if x is not None}
    results = sum(x.bytes for x in found.outputs if x is not None)
    rows = []
    for launch in found.launches:
        tiles = ", ".join(f"{n} = {x}" for n in TILES if (x := launch.given(n)) is not None)
        warps, stages = (launch.options.get(n, d) for n, d in (("num_warps", 4), ("num_stages", 3)))
        touched = {x.name: x.bytes for x in launch.tensors}
        programs = " x ".join(map(str, launch.grid))
        rows.append([launch.name, programs, tiles, warps, stages, f"{sum(touched.values()) / 1e6:,.3g}"])
    head = ["kernel", "programs", "tiles", "warps", "stages", "tensors, MB"]
    lines = [f"{found.name}, for {found.hardware}"]
    lines += [f"  {sentence}" for sentence in found.why]
    lines += [tabulate(rows, head)]
    lines += [
        f"results {results / 1e6:,.3g} MB ({', '.join(sorted(kept))}); other tensors {(made - results) / 1e6:,.3g} MB, "
        "let go as soon as they are read"
    ]
    return "\n".join(lines)
