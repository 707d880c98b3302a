"""The strongest gate that each form of gated attention can bear in each number format (chapters 10 and 12)."""

import math
from functools import cache, partial

import torch
from torch import Tensor

from ... import gates, gla, rounding
from ._explorable import Choice, Explorable, Frame, Key, Question, Slider
from ._svg import circle, part, path, raised, rect, text

__all__ = ["exponents", "gate_strength", "measured", "one_product"]

T, C, c, K, V = 256, 64, 16, 16, 8  # one head
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
GATES = (0.001, 0.01, 0.02, 0.04, 0.05, 0.1, 0.2, 0.3, 0.4, 1.0, 2.0, 2.7, 2.8, 5.0, 20.0)


def one_product(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """o and the final state by one product per chunk: the ratio form of each chunk, anchored in the chunk's middle.

    An anchor moved by r moves the whole running sum by -r. So the function adds -r to the chunk's first gate, and gives
    the state that the chunk starts from the factor e^r.
    """
    S, o = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3]), []
    for q_n, k_n, v_n, g_n in zip(*(x.split(C, 1) for x in (q, k, v, g)), strict=True):
        r = g_n.sum(1) / 2  # [B H K]
        first, rest = g_n.split([1, g_n.shape[1] - 1], 1)
        o_n, S = gla.parallel.__wrapped__(  # the contract asks for gates <= 0, but this first gate may be above 0
            *(q_n, k_n, v_n, torch.cat([first - r[:, None], rest], 1)),
            scale=q.shape[-1] ** -0.5,
            initial_state=r.exp()[..., None] * S,
        )
        o.append(o_n)
    return torch.cat(o, 1), S


#: the forms of the figure, from the first to break to the form that does not break
FORMS = {
    "one ratio for the sequence": gla.parallel,
    "one product a chunk": one_product,
    "two levels of chunks": partial(gla.chunkwise_two_level, C=C, c=c),
}


def exponents(form: str, g: Tensor) -> list[tuple[str, int, Tensor]]:
    """Return the exponents of a form's factors on q and k, for the gates `[T]` of one channel.

    Returns:
        (side, first token, exponents) for each stretch of tokens with one anchor; side is "q" or "k", exponents are
        natural logarithms.
    """
    g, pieces = g[:, None], []
    if form == "two levels of chunks":
        for kind, rows, cols in gla.two_level_blocks(len(g), C, c):
            if kind == "inter-chunk":
                cols = rows  # the chunk's own writes, to the state after it
            if kind != "intra-sub-chunk":  # this product does not split its exponents
                pieces.append(("q", rows.start, gates.decay_from_start(g[rows])))
                pieces.append(("k", cols.start, gates.decay_to_end(g[cols])))
    else:
        size, middle = (len(g), 0) if form == "one ratio for the sequence" else (C, 1 / 2)
        for start in range(0, len(g), size):
            b = gates.decay_from_start(g[start : start + size])
            r = middle * b[-1]
            pieces += [("q", start, b - r), ("k", start, r - b)]
    return [(side, start, b[:, 0]) for side, start, b in pieces]


@cache
def _oracle(gate: float, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g in float32 with values that `dtype` can hold, and o of their float64 recurrence."""
    generator = torch.Generator().manual_seed(0)
    tokens = (torch.randn(1, T, 1, D, generator=generator, dtype=torch.float32) for D in (K, K, V))
    x = [y.to(dtype).float() for y in tokens] + [torch.full((1, T, 1, K), -gate, dtype=torch.float32)]
    return x, gla.recurrent(*(y.double() for y in x))[0]


@cache
def measured(form: str, gate: float, dtype: torch.dtype) -> float:
    """Largest error of o, relative to the rms of the true o, if every log gate is -gate; inf if o is not finite."""
    x, exact = _oracle(gate, dtype)
    with torch.no_grad(), rounding.operands_in(dtype):
        o, _ = FORMS[form](*x)
    return rounding.error(o, exact)


LEFT, WIDE, PANEL = 46, 340, 84  # a panel's left edge, width and height
TOPS = dict(zip(FORMS, (26, 142, 258), strict=True))
COLORS = {"q": "line-blue", "k": "line-vermilion"}


def _scale(dtype: torch.dtype) -> tuple[float, float, float, float]:
    """Powers of two: a panel's bottom, the smallest normal number, the largest number, the panel's top."""
    low, high = (math.log2(x) for x in (torch.finfo(dtype).tiny, torch.finfo(dtype).max))
    return 2 * low, low, high, 1.4 * high


def _panel(form: str, dtype: torch.dtype) -> str:
    """The range of a format, grey; numbers above are infinite (red), numbers below lose their digits, then are 0."""
    bottom, low, high, top = _scale(dtype)
    y, unit = TOPS[form], PANEL / (top - bottom)
    pieces = [
        rect(LEFT, y, WIDE, unit * (top - high), "pale-red faint"),
        rect(LEFT, y + unit * (top - high), WIDE, unit * (high - low), "pale-grey faint"),
        rect(LEFT, y, WIDE, PANEL, "edge"),
    ]
    for power in (high, 0, low):
        pieces.append(text(LEFT - 5, y + unit * (top - power), _power(power) if power else "1", "end"))
    if form != "one ratio for the sequence":
        for x in (LEFT + WIDE * t / T for t in range(C, T, C)):
            pieces.append(path([(x, y), (x, y + PANEL)], "edge faint"))
    limits = f"{_power(low)} to {_power(high)}"
    words = f"{form}: on grey, from {limits}, the format has all of its digits; pale red is infinity."
    return part(words, *pieces) + text(LEFT, y - 11, form, "start strong")


def _curves(form: str, gate: float, dtype: torch.dtype) -> str:
    """The exponents of the factors over the tokens, and a dot where a factor becomes too large."""
    bottom, _, high, top = _scale(dtype)
    y, unit = TOPS[form], PANEL / (top - bottom)
    lines, dots = [], []
    for side, start, b in exponents(form, torch.full((T,), -gate, dtype=torch.float64)):
        ends = b[0].item() / math.log(2), b[-1].item() / math.log(2)
        slope = (ends[1] - ends[0]) / (len(b) - 1)  # all gates are equal, so this is a line

        def point(power, first=ends[0], slope=slope, start=start):
            t = start + 0.5 + (power - first) / slope
            return LEFT + WIDE * t / T, y + unit * (top - power)

        inside = [min(max(power, bottom), top) for power in ends]
        if inside[0] != inside[1]:
            lines.append(path([point(power) for power in inside], COLORS[side]))
        if max(ends) > high:
            dots.append(circle(*point(high), 4, "vermilion"))
    return "".join(lines + dots)


def _power(x: float) -> str:
    """2 to the x, with one digit after the point where x is small."""
    return "2" + raised(f"{x:.1f}".removesuffix(".0") if abs(x) < 10 else round(x))


def _tokens(y: float) -> str:
    pieces = [text(LEFT + WIDE * (t - 0.5) / T, y + 11, t) for t in (1, *range(C, T + 1, C))]
    return "".join(pieces)


def _frame(name: str, gate: float, forms: list[str]) -> Frame:
    dtype, pieces, errors = DTYPES[name], [_tokens(TOPS[forms[-1]] + PANEL)], []
    for form in forms:
        error = measured(form, gate, dtype)
        said = f"error {error:.0e}".replace("-", "−")  # a hyphen would allow a line break
        errors.append(said if error < math.inf else "not a number")
        pieces += [_panel(form, dtype), _curves(form, gate, dtype)]
        pieces.append(text(LEFT + WIDE, TOPS[form] - 11, errors[-1], "end"))
    largest = f"the largest number is {_power(math.log2(torch.finfo(dtype).max))}"
    if len(forms) == 1:
        return Frame(
            pieces,
            f"{name}: {largest}. At the last token the factor on q is {_power(-T * gate / math.log(2))}, "
            f"the factor on k {_power(T * gate / math.log(2))}. Outputs: {errors[0]}.",
        )
    ratio, product, levels = errors
    return Frame(
        pieces,
        f"{name}: {C * gate:.4g} nats of decay a chunk, {T * gate:.4g} in all; {largest}. "
        f"One ratio: {ratio}. One product: {product}. Sub-chunks: {levels}.",
    )


NOTICE = (
    "Upwards, the size of a factor in powers of two; the error is the largest of an output, over their rms. A "
    "format's range of exponents (grey) decides, not its digits: bfloat16 and float32 give up at the same gates, "
    "float16 far earlier."
)


_RANGE = Question(
    "float32 has three times the digits of bfloat16. Does it bear stronger gates?",
    "no",
    {"yes": "Digits do not help: what runs out is the range.", "no": "Both have the same range of exponents."},
    seen=(2, 8),  # in bfloat16 the same gate is the first to break
    before=(1, 0),
)
_LEVELS = Question(
    "Which of the three forms bears a gate of any strength?",
    "sub-chunks",
    {
        "one ratio": "Its factor on k grows with everything that was forgotten since the first token.",
        "one product": "It bears more than the ratio, but its factors still grow with a chunk's decay.",
        "sub-chunks": "None of its factors is above 1.",
    },
    seen=(1, len(GATES) - 1),
)


def gate_strength(*, ratio_only: bool = False) -> Explorable:
    """Exponents and measured errors of three forms of GLA, by gate and number format.

    Args:
        ratio_only: only the first form, one ratio for the whole sequence.
    """
    forms = list(FORMS)[: 1 if ratio_only else None]
    if ratio_only:
        title, more = "Two factors of one decay", "At every token the two factors multiply to 1."
    else:
        title = "How strong may a gate be?"
        more = (
            "One product per chunk bears gates eight times as strong as one ratio, because a chunk is a quarter of the "
            "sequence and its anchor is in the middle. In float16 it loses digits at −0.3 already. With sub-chunks no "
            "factor is above 1, and only decays next to nothing leave the range."
        )
    return Explorable(
        title=title,
        notice=f"{NOTICE} {more}",
        alt=f"{'A panel' if ratio_only else 'Three panels, one for each form'}: powers of two of the factors on q and "
        f"k over {T} tokens, on top of the range of the number format, with the error of the form.",
        controls=(Choice("Format", list(DTYPES)), Slider("Log gate of every token", [f"−{gate:g}" for gate in GATES])),
        frames=[[_frame(name, gate, forms) for gate in GATES] for name in DTYPES],
        height=TOPS[forms[-1]] + PANEL + 24,
        start=(1, 7 if ratio_only else 8),  # at 7 the ratio is still right: the next step breaks it
        legend=(
            Key("line-blue", "factor on q", "line"),
            Key("line-vermilion", "factor on k", "line"),
            Key("vermilion", "too large from here on", "dot"),
            Key("pale-grey faint", "the range of the format"),
            Key("pale-red faint", "infinity"),
        ),
        question=_RANGE if ratio_only else _LEVELS,
    )
