"""The memory that a model needs for its next token: all keys and values, or one state (chapter 16)."""

import math

from ..costs import cost
from ._explorable import WIDTH, Choice, Explorable, Frame, Key, Question, Slider
from ._svg import circle, part, path, rect, text

__all__ = ["LAYERS", "TOKENS", "decode_memory", "kept"]

#: heads, K and V of a layer, as they are measured in benchmarks/
LAYERS = {"16 heads of 128": (16, 128, 128), "4 heads of 256 / 512": (4, 256, 512)}
TOKENS = [2**n for n in range(4, 21)]


def kept(layer: str, T: int) -> tuple[int, int]:
    """Bytes that a layer keeps of one sequence after T tokens: the KV cache in bf16, the state of GLA in float32."""
    H, K, V = LAYERS[layer]
    one = dict(B=1, T=1, H=H, K=K, V=V)
    cache, state = (cost(name, "recurrent", **one).state_bytes for name in ("softmax_attention", "gla"))
    return T * cache, state  # every token adds as much as the first


LEFT, WIDE, TOP, TALL = 62, 326, 24, 190
LOW, HIGH = 2**15, 2**35  # bytes at the bottom and at the top


def _x(T: int) -> float:
    first, last = math.log2(TOKENS[0]), math.log2(TOKENS[-1])
    return LEFT + WIDE * (math.log2(T) - first) / (last - first)


def _y(size: float) -> float:
    return TOP + TALL * (math.log2(HIGH) - math.log2(size)) / (math.log2(HIGH) - math.log2(LOW))


def _size(size: float) -> str:
    power = min(int(math.log2(size)) // 10, 3)
    return f"{size / 2 ** (10 * power):.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _axes() -> list[str]:
    pieces = [rect(LEFT, TOP, WIDE, TALL, "edge"), text(LEFT, TOP - 12, "kept for one sequence, one layer", "start")]
    for size in (2**20, 2**25, 2**30):
        pieces += [path([(LEFT, _y(size)), (LEFT + WIDE, _y(size))], "edge faint")]
        pieces += [text(LEFT - 5, _y(size), _size(size), "end")]
    for T, name in ((16, "16"), (2**10, "1 Ki"), (2**15, "32 Ki"), (2**20, "1 Mi")):
        pieces.append(text(min(_x(T), WIDTH - 16), TOP + TALL + 12, name))
    return [*pieces, text(LEFT + WIDE * 0.19, TOP + TALL + 12, "tokens")]


def _frame(layer: str, T: int) -> Frame:
    cache, state = zip(*(kept(layer, n) for n in TOKENS), strict=True)
    a, b = kept(layer, T)
    pieces = _axes()
    for sizes, now, color in ((cache, a, "vermilion"), (state, b, "blue")):
        points = [(_x(n), _y(size)) for n, size in zip(TOKENS, sizes, strict=True)]
        words = "The KV cache: a key and a value per token." if color == "vermilion" else "The state: it never grows."
        pieces.append(path(points, f"line-{color}"))
        pieces.append(part(f"{words} After {T:,} tokens {_size(now)}.", circle(_x(T), _y(now), 5, color)))
    times = f"{a / b:.4g} times the state" if a >= b else f"the state is {b / a:.4g} times as much"
    return Frame(pieces, f"After {T:,} tokens: the cache is {_size(a)}, the state {_size(b)}; {times}.")


def decode_memory() -> Explorable:
    """KV cache and state of a layer against the tokens read so far."""
    return Explorable(
        title="What must be remembered to write the next token?",
        notice="The cache has a row for every token, and each new token reads all of it. The state is a matrix that "
        "does not grow. For a short text the state is the larger of the two.",
        alt="Bytes against tokens, both axes logarithmic: the KV cache is a rising line, the state a level one, and "
        "they cross after about a hundred or several hundred tokens.",
        controls=(Choice("Layer", list(LAYERS)), Slider("Tokens so far", [f"{T:,}" for T in TOKENS])),
        frames=[[_frame(layer, T) for T in TOKENS] for layer in LAYERS],
        height=TOP + TALL + 24,
        start=(0, 9),
        legend=(Key("line-vermilion", "KV cache", "line"), Key("line-blue", "state", "line")),
        question=Question(
            "After sixteen tokens, which of the two is larger?",
            "the state",
            {
                "the cache": "Sixteen keys and values are little yet. The state has its full size from the start.",
                "the state": "It has its full size from the first token on. The cache overtakes it later.",
            },
            seen=(0, TOKENS.index(16)),
            before=(0, len(TOKENS) - 1),
        ),
    )
