"""A chart: measured kernels, and every form of their mechanisms, under one GPU's roof (appendix "Benchmarks")."""

from __future__ import annotations

from typing import NamedTuple

from .. import results
from . import costs

__all__ = ["ORDINARY", "Point", "points", "roofline"]

#: FLOP/s in float32 without tensor cores, by the data sheet of the H200 (the other two ceilings are measured)
ORDINARY = 67e12
SUITES = ("flash", "linear", "figure2", "gla")
COLORS = {"softmax_attention": "C1", "linear_attention": "C0", "simple_gla": "C2", "gla": "C4"}


class Point(NamedTuple):
    """A form or a kernel at one shape.

    Attributes:
        name: mechanism and form, or mechanism and kernel.
        intensity: FLOPs per byte to and from memory: of products, or of element-wise work in a form without products.
        rate: these FLOPs per second, measured, or the highest rate under the ceilings.
        record: the measurement, or None for a prediction.
    """

    name: str
    mechanism: str
    intensity: float
    rate: float
    record: dict | None = None


def ceilings(data: dict) -> tuple[float, float]:
    """Measured (bytes per second of a copy, FLOP/s of a large product)."""
    environment = data["environment"]
    return environment["copy_gb_s"] * 1e9, environment["matmul_tflop_s"] * 1e12


def points(data: dict, direction: str, **shape: int) -> list[Point]:
    """The measurements at a shape and, for the forward direction, the predictions of `costs.py` for every form.

    The place of a measurement depends on the fewest FLOPs and bytes that its mechanism needs (the floors of the
    record), not on the kernel's own work. So its distance from the roof is a ratio of times.
    """
    (bandwidth, products), by_name = ceilings(data), {}
    for suite in SUITES:
        for r in results.select(data, suite=suite, direction=direction, lengths=None, **shape):
            by_name.setdefault((r["mechanism"], r["contender"], r["gates"]), r)
    made = []
    for (mechanism, contender, _), r in by_name.items():
        flops, moved = r["flop_floor_ms"] / 1e3 * products, r["floor_ms"] / 1e3 * bandwidth
        made.append(Point(f"{mechanism}: {contender}", mechanism, flops / moved, flops / (r["ms"] / 1e3), r))
    forms = [(m, form) for m in COLORS for form in costs.FORMS[m]] if direction == "forward" else []
    for mechanism, form in forms:
        n = costs.cost(mechanism, form, **shape)
        least = max(n.bytes / bandwidth, n.matmul_flops / products, n.elementwise_flops / ORDINARY)
        flops = n.matmul_flops or n.elementwise_flops
        made.append(Point(f"{mechanism}: {form}", mechanism, flops / n.bytes, flops / least))
    return made


def roofline(data: dict, **shape: int) -> None:
    """Draw the forms and kernels at a shape, under the ceilings of the GPU that ran the kernels.

    Args:
        data: records from :func:`gla_ref.results.load`.
        shape: B, T, H, K and V.
    """
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    bandwidth, products = ceilings(data)
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(4.7, 6.8), height_ratios=(3, 2))
    for ax, direction in zip(axes, ("forward", "backward"), strict=True):
        for height, line in ((products, "-"), (ORDINARY, "--")):
            ends = (0.2, height / bandwidth, 5e4)
            ax.plot(ends, [min(height, x * bandwidth) / 1e12 for x in ends], line, color="0.6", zorder=1)
        for p in points(data, direction, **shape):
            face = COLORS[p.mechanism] if p.record else "none"
            mark = "s" if p.record and p.record["peer"] else "o"
            ax.scatter(p.intensity, p.rate / 1e12, 36, face, mark, edgecolors=COLORS[p.mechanism], zorder=2)
        ax.set(xscale="log", yscale="log", ylabel="TFLOP/s", title=direction)
    axes[1].set_xlabel("FLOP per byte")
    keys = [(color, "o", color, name.replace("_", " ")) for name, color in COLORS.items()]
    keys += [("0.4", "o", "0.4", "measured"), ("0.4", "s", "0.4", "measured, another library's")]
    keys += [("0.4", "o", "none", "predicted")]
    handles = [Line2D([], [], color=c, marker=m, markerfacecolor=f, ls="", label=w) for c, m, f, w in keys]
    handles += [Line2D([], [], color="0.6", ls=s, label=w) for s, w in (("-", "the roof"), ("--", "element-wise work"))]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    plt.show()
