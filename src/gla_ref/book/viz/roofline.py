"""Every measured kernel, and every form of its mechanisms, under the roof of one GPU (chapter 7)."""

import math
from dataclasses import dataclass

from ... import results
from .. import costs
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import circle, part, path, rect, text

__all__ = ["ORDINARY", "Point", "points", "roofline", "shapes"]

#: FLOP/s in float32 without tensor cores, by the data sheet of the H200 (the other two ceilings are measured)
ORDINARY = 67e12
SUITES = ("flash", "linear", "figure2", "gla")
COLORS = {"softmax_attention": "vermilion", "linear_attention": "blue", "simple_gla": "green", "gla": "orange"}


@dataclass(frozen=True)
class Point:
    """A form or a kernel at one shape.

    Attributes:
        name: mechanism and form, or mechanism and kernel.
        intensity: FLOPs per byte to and from memory: of products, or of element-wise work in a form without products.
        rate: these FLOPs per second, measured, or the highest rate under the ceilings.
        ms: the measured time, or the least time under the ceilings.
        limit: the ceiling of the least time: memory, products or element-wise work.
        record: the measurement, or None for a prediction.
        steps: longest chain of steps in which each needs the step before; None for a measurement.
    """

    name: str
    mechanism: str
    intensity: float
    rate: float
    ms: float
    limit: str
    record: dict | None = None
    steps: int | None = None


def _ceilings(data: dict) -> tuple[float, float]:
    """Measured (bytes per second of a copy, FLOP/s of a large product)."""
    environment = data["environment"]
    return environment["copy_gb_s"] * 1e9, environment["matmul_tflop_s"] * 1e12


def shapes(data: dict) -> list[dict[str, int]]:
    """The shapes with a measured kernel, in the order of the file."""
    found = [r for suite in SUITES for r in results.select(data, suite=suite, lengths=None)]
    return [dict(x) for x in dict.fromkeys(tuple((n, r[n]) for n in "BTHKV") for r in found)]


def points(data: dict, direction: str, **shape: int) -> list[Point]:
    """The measurements at a shape and, for the forward direction, the predictions of `costs.py` for every form.

    The place of a measurement depends on the fewest FLOPs and bytes that its mechanism needs (the floors of the
    record), not on the kernel's own work. So its distance from the roof is a ratio of times.
    """
    bandwidth, products = _ceilings(data)
    found = {}
    for suite in SUITES:
        for r in results.select(data, suite=suite, direction=direction, lengths=None, **shape):
            found.setdefault((r["mechanism"], r["contender"], r["gates"]), r)
    measured = []
    for (mechanism, contender, gates), r in found.items():
        flops = r["flop_floor_ms"] / 1e3 * products
        measured.append(
            Point(
                f"{mechanism}: {contender}" + (f", gates {gates}" if gates else ""),
                mechanism,
                flops / (r["floor_ms"] / 1e3 * bandwidth),
                flops / (r["ms"] / 1e3),
                r["ms"],
                "memory" if r["floor_ms"] > r["flop_floor_ms"] else "products",
                r,
            )
        )
    measured.sort(key=lambda p: p.ms)
    if direction != "forward":
        return measured
    predicted = []
    for mechanism in COLORS:
        for form in costs.FORMS[mechanism]:
            n = costs.cost(mechanism, form, **shape)
            least = {
                "memory": n.bytes / bandwidth,
                "products": n.matmul_flops / products,
                "element-wise work": n.elementwise_flops / ORDINARY,
            }
            limit = max(least, key=least.get)
            flops, name = n.matmul_flops or n.elementwise_flops, f"{mechanism}: {form}"
            rate, ms = flops / least[limit], 1e3 * least[limit]
            predicted.append(Point(name, mechanism, flops / n.bytes, rate, ms, limit, steps=n.steps))
    return measured + sorted(predicted, key=lambda p: p.ms)


X, Y, WIDE, HIGH = 40, 26, 350, 250  # the plot's left edge, top, width, height
LOW, TOP = (-0.8, -0.8), (4.8, 3.2)  # its corners: log10 of FLOP a byte and of TFLOP/s


def _at(intensity: float, rate: float) -> tuple[float, float]:
    x = (math.log10(intensity) - LOW[0]) / (TOP[0] - LOW[0])
    y = (math.log10(rate / 1e12) - LOW[1]) / (TOP[1] - LOW[1])
    return X + WIDE * x, Y + HIGH * (1 - y)


def _plot(data: dict) -> str:
    """Axes, the two measured ceilings, and the ceiling of ordinary cores, dashed."""
    bandwidth, products = _ceilings(data)
    pieces = [rect(X, Y, WIDE, HIGH, "edge")]
    for power, name in enumerate(("1", "10", "100", "1000", "10000")):
        x, y = _at(10.0**power, 10.0 ** (12 + power))
        pieces += [path([(x, Y), (x, Y + HIGH)], "edge faint"), text(x, Y + HIGH + 12, name)]
        if power < 4:
            pieces += [path([(X, y), (X + WIDE, y)], "edge faint"), text(X - 5, y, name, "end")]
    left, right = 10 ** LOW[0], 10 ** TOP[0]
    for height, kind in ((products, "line-grey"), (ORDINARY, "line-grey dashed")):
        ridge = height / bandwidth
        start = left if height == products else ridge
        pieces.append(path([_at(x, min(height, x * bandwidth)) for x in (start, ridge, right)], kind))
    pieces += [text(4, 10, "TFLOP/s", "start"), text(X + WIDE - 6, Y + HIGH - 10, "FLOP a byte", "end")]
    return "".join(pieces)


def _mark(n: int, point: Point) -> str:
    """A point, with room around it for a finger."""
    room = [] if point.record is None else [circle(*_at(point.intensity, point.rate), 8, "room")]
    return part(f"{point.name}, {point.ms:.3g} ms", *room, _shape(point), choose={2: n})


def _shape(point: Point) -> str:
    (x, y), color = _at(point.intensity, point.rate), COLORS[point.mechanism]
    if point.record is None:
        return circle(x, y, 4, f"line-{color}")
    if point.record["peer"]:
        return rect(x - 4, y - 4, 8, 8, color)
    return circle(x, y, 4.5, color)


def _words(point: Point, gpu: str) -> str:
    r, intensity = point.record, f"{point.intensity:.3g} FLOP a byte"
    if r is None:
        return (
            f"{point.name}, predicted, not measured: at least {point.ms:.3g} ms, for {point.limit}; "
            f"{intensity}; {point.steps:,} step{'s' * (point.steps > 1)} in a row."
        )
    least = max(r["floor_ms"], r["flop_floor_ms"])
    return (
        f"{point.name}, measured on {gpu} (commit {r['commit'][:7]}): {point.ms:.3g} ms; at least "
        f"{least:.3g}, for {point.limit}: {least / point.ms:.0%} of the attainable; {intensity}."
    )


def _row(data: dict, plot: str, direction: str, shape: dict[str, int]) -> list[Frame]:
    """A frame for every point of a shape; a frame without points if there are none."""
    found = points(data, direction, **shape)
    marks = "".join(_mark(n, p) for n, p in reversed([*enumerate(found)]))  # measurements on top
    if not found:
        return [Frame([plot], "Nothing was measured here, and costs.py counts forward passes only.")]
    frames = []
    for n, p in enumerate(found, 1):
        ring = circle(*_at(p.intensity, p.rate), 9, "line")
        time = text(X + WIDE, 10, f"{n} of {len(found)}: {'at least ' * (p.record is None)}{p.ms:.3g} ms", "end strong")
        frames.append(Frame([plot, marks, ring, time], _words(p, data["environment"]["gpu"])))
    return frames


def roofline(data: dict) -> Explorable:
    """The forms and kernels at each measured shape, under the ceilings of the GPU that ran the kernels.

    Args:
        data: records from :func:`gla_ref.results.load`.
    """
    plot, directions = _plot(data), ("forward", "backward")
    frames = [[_row(data, plot, d, shape) for d in directions] for shape in shapes(data)]
    names = [f"B {s['B']}, T {s['T']}, H {s['H']}, K/V {s['K']}/{s['V']}" for s in shapes(data)]
    most = max(len(row) for shape in frames for row in shape)
    most_points = max(range(len(names)), key=lambda i: len(frames[i][0]))
    there = [point.mechanism for point in points(data, "forward", **shapes(data)[most_points])]
    return Explorable(
        title=f"Forms and kernels under the roof of one GPU, {data['environment']['gpu']}",
        notice="Left of the ridge memory is the limit, right of it products. A measured point counts the least work of "
        "its mechanism, so its distance from the roof is lost time. Predictions (from costs.py, chunks of 64) lie on "
        "the roof, unless element-wise work, for which the roof is the dashed one, holds them down. They let the "
        "whole chip work all the time, which thousands of steps in a row do not.",
        alt="A plot of speed over arithmetic intensity, both logarithmic, with a roof that rises, then is flat. Hollow "
        "circles, forms, lie on it or below; filled marks, measured kernels, lie below.",
        controls=(Choice("Shape", names), Choice("Direction", directions), Slider("Point", range(1, most + 1))),
        frames=frames,
        height=Y + HIGH + 24,
        legend=(
            *(Key(color, mechanism.replace("_", " "), "dot") for mechanism, color in COLORS.items()),
            Key("line-grey", "predicted (hollow)", "dot"),
            Key("grey", "measured (filled)", "dot"),
            Key("grey", "another library's, measured"),
            Key("line-grey", "the roof: memory, then products", "line"),
            Key("line-grey dashed", "the roof of element-wise work", "line"),
            Key("line", "the chosen point", "dot"),
        ),
        question=Question(
            "Linear attention has few FLOPs for its bytes. What limits its kernels?",
            "memory",
            {
                "memory": "It lies left of the ridge: a faster multiplier would wait.",
                "products": "That limits softmax attention, which lies right of the ridge.",
            },
            seen=(most_points, 0, there.index("linear_attention")),
            before=(most_points, 0, next(n for n, name in enumerate(there) if name != "linear_attention")),
        ),
        start=(most_points, 0, 0),
    )
