"""The front page: cards of chapters 1 to 24, with a question and a small picture each, and paths through them."""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from ..notebook import CHAPTER
from ._explorable import STYLE
from ._svg import arrow, circle, path, rect, text

__all__ = ["CARDS", "WAYS", "Cards", "cards", "paths", "ways"]

WIDE, HIGH = 120, 52  # a picture's size


class Card(NamedTuple):
    part: str
    page: str  # its page in the book
    title: str
    question: str
    learns: str  # a reader's skill after the chapter
    picture: str


def _squares(rows: list[str], x: float, y: float, size: float) -> str:
    """A matrix of letters; each letter names a kind."""
    kinds = dict(g="pale-grey", G="grey", o="orange", p="pink", b="pale-blue", s="sky", r="pale-red", e="edge faint")
    return "".join(
        rect(x + size * j, y + size * i, size - 1.5, size - 1.5, kinds[letter])
        for i, row in enumerate(rows)
        for j, letter in enumerate(row)
        if letter != " "
    )


def _bars(heights: list[float], kinds: list[str], x: float, width: float, base: float = 48) -> str:
    return "".join(
        rect(x + width * n, base - h, width - 2, h, k) for n, (h, k) in enumerate(zip(heights, kinds, strict=True))
    )


def _pictures() -> dict[str, str]:
    """Draw a few marks for each chapter, a picture of its question."""
    looks = [path([(108, 44), (12 + 24 * n, 12)], "line-blue" if n in (0, 3) else "edge") for n in range(4)]
    looks += [circle(12 + 24 * n, 12, r, "pale-blue edge") for n, r in enumerate((9, 4, 5, 8))]
    stairs = [(8, 40), (34, 40), (34, 26), (60, 26), (60, 12), (112, 12)]
    walk = [(4, 14, 108), (4, 30, 50), (58, 30, 54)]
    back = [arrow((10, 16), (110, 16), "line-blue"), arrow((110, 36), (10, 36), "line-vermilion")]
    boxes = [rect(2 + 24 * n, 18, 17, 16, kind) for n, kind in enumerate(("sky", "sky", "orange", "pink", "pale-grey"))]
    boxes += [arrow((19 + 24 * n, 26), (25 + 24 * n, 26)) for n in range(4)]
    code = [
        (8, 60, "pale-grey"),
        (16, 84, "pale-blue"),
        (16, 50, "pale-blue"),
        (16, 92, "orange"),
        (8, 40, "pale-grey"),
    ]
    steps = [
        arrow((104 - 24 * n, 20 + 6 * (n % 2)), (86 - 24 * n, 26 - 6 * (n % 2)), "line-vermilion") for n in range(4)
    ]
    layer = [(4, 14, "grey"), (20, 14, "grey"), (36, 26, "grey"), (64, 26, "orange"), (92, 26, "grey")]
    return {
        "01_softmax_attention": "".join(looks) + circle(108, 44, 6, "orange"),
        "02_online_softmax": path(stairs, "line-blue")
        + _bars([6, 9, 14, 20, 28, 16], ["grey", "grey", "grey", "grey", "orange", "orange"], 10, 17),
        "03_flash_attention": _squares(["g   ", "gg  ", "gso ", "gggg"], 36, 2, 12.5),
        "04_first_triton_kernels": _squares(["ggggssssgggg"], 6, 6, 9)
        + "".join(rect(6 + 36 * n, 34, 34, 12, "sky" if n == 1 else "edge") for n in range(3))
        + arrow((60, 33), (60, 18)),
        "05_linear_attention": _squares(["o", "e", "o"], 22, 14, 12)
        + _squares(["bbb"], 44, 1, 12)
        + _squares(["sss", "eee", "sss"], 44, 14, 12),
        "06_prefix_sums_and_chunks": _bars([5, 9, 13, 5, 9, 13, 5, 9, 13], ["pale-blue"] * 9, 6, 12)
        + "".join(rect(42 + 12 * n, (30, 26, 22, 17, 13, 9)[n], 10, 13 * (1 + n // 3), "pale-red") for n in range(6)),
        "07_flash_linear_attention": "".join(rect(x, y, w, 12, "pale-blue edge") for x, y, w in walk),
        "08_training_through_chunks": "".join(back) + text(60, 26, "S   R", "strong"),
        "09_gates_and_decay": _squares(["sssss"], 30, 2, 12)
        + "".join(rect(30 + 12 * j, 16, 10.5, 10.5, "sky faint") for j in range(5))
        + _squares(["eeeee", "sssss"], 30, 28, 12),
        "10_parallel_gla": rect(6, 2, 108, 10, "pale-red")
        + path([(8, 26), (112, 50)], "line-blue")
        + path([(8, 26), (76, 2)], "line-vermilion"),
        "11_chunkwise_gla": _squares("p pp oop oopp GGGGp GGGGpp GGGGoop GGGGoopp".split(), 34, 0, 6.5),
        "12_four_kernels": "".join(boxes),
        "13_one_product_a_chunk": rect(36, 3, 46, 46, "pale-blue edge")
        + path([(36, 3), (82, 49)], "line-grey dashed")
        + circle(59, 26, 5, "vermilion"),
        "14_gla_kernel": "".join(rect(x, 5 + 9 * n, w, 6, kind) for n, (x, w, kind) in enumerate(code)),
        "15_gradients": "".join(steps) + "".join(circle(108 - 24 * n, 23, 4, "edge") for n in range(5)),
        "15b_gradient_kernel": _squares(["g", "gg", "ggg", "bbbo", "bbboo", "bbbooo"], 36, 2, 8),
        "16_one_token_at_a_time": path([(8, 48), (112, 4)], "line-vermilion") + path([(8, 32), (112, 32)], "line-blue"),
        "17_gla_layer": "".join(rect(x, 8, w, 36, kind) for x, w, kind in layer),
        "18_one_recurrence": _squares(["bbb", "bbb", "bbb"], 4, 8, 12)
        + _squares(["bbb", "sss", "eee"], 43, 8, 12)
        + _squares(["bse", "seb", "ebs"], 82, 8, 12),
        "19_what_it_learns": path([(8, 44), (30, 42), (48, 34), (62, 14), (112, 8)], "line-blue")
        + path([(8, 44), (62, 43), (84, 36), (112, 28)], "line-vermilion")
        + path([(8, 48), (112, 48)], "line-grey dashed"),
        "19b_what_it_learns_from_text": path([(8, 4), (26, 26), (58, 38), (112, 44)], "line-blue")
        + path([(8, 4), (30, 18), (64, 27), (112, 32)], "line-vermilion dashed"),
        "19c_how_far_back": path([(8, 34), (30, 38), (112, 38)], "line-blue")
        + path([(8, 30), (30, 35), (50, 33), (72, 20), (112, 4)], "line-vermilion")
        + path([(44, 4), (44, 49)], "line-grey dashed"),
        "20_delta_rule": _squares(["bbb", "eee", "bbb"], 12, 8, 12)
        + arrow((54, 25), (70, 25))
        + _squares(["bbb", "ooo", "bbb"], 76, 8, 12),
        "21_inverting_a_triangle": _squares(["b", "bb", "bbb", "oobb"], 8, 2, 12)
        + arrow((60, 26), (74, 26))
        + _squares(["s", "ps", " ps", "  ps"], 78, 8, 9),
        "22_fully_fused_on_hopper": "".join(
            rect(6 + 34 * i + 10 * n, 6 + 15 * n, 32 if n == 0 else 18, 11, kind)
            for n, kind in enumerate(("sky", "orange", "pink"))
            for i in range(3 if n == 0 else 2)
        ),
        "23_delta_rule_fused": "".join(
            rect(6 + 18 * n, 4 + 16 * row, 15, 11, kind)
            for row, (kind, first, last) in enumerate((("sky", 0, 5), ("orange", 1, 6), ("pink", 2, 6)))
            for n in range(first, last)
        ),
        "24_many_gpus": "".join(
            rect(6, 4 + 12 * n, 40, 9, "pale-blue edge") + rect(56, 4 + 12 * n, 58, 9, "orange edge")
            for n in range(4)
        )
        + path([(51, 4), (51, 49)], "line-vermilion"),
    }  # fmt: skip


_TEXTS = (
    ("Attention", "01_softmax_attention", "Softmax attention", "How does a word look back, and why is that expensive?",
     "Write attention in parallel and from a cache, and count what a long text costs."),
    ("Attention", "02_online_softmax", "Online softmax", "Can you read the keys once, and keep only three numbers?",
     "Rescale a running sum, so that no row of scores is ever stored."),
    ("Attention", "03_flash_attention", "FlashAttention", "Why is the same work faster in tiles?",
     "Count a GPU's bytes and products, and derive attention in tiles."),
    ("Attention", "04_first_triton_kernels", "Your first Triton kernels", "How do I write the loop a GPU should run?",
     "Write four kernels, from a sum to the loop of attention, and read the rest."),
    ("Linear attention", "05_linear_attention", "Linear attention", "Can the whole past fit a table of fixed size?",
     "Turn attention into a recurrence, and say what is lost."),
    ("Linear attention", "06_prefix_sums_and_chunks", "Prefix sums and chunks",
     "Can three friends add faster than one?", "Run any such recurrence in parallel, by scans and by chunks."),
    ("Linear attention", "07_flash_linear_attention", "Flash\u200bLinear\u200bAttention",
     "Can a hundred readers share one novel?",
     "Choose between three ways to spread a text over a GPU, and read the kernel."),
    ("Linear attention", "08_training_through_chunks", "Training through chunks",
     "Who owes what to a memory long past?", "Derive the gradients, and compute them with the forward walk alone."),
    ("Gates", "09_gates_and_decay", "Gates and decay", "What should a memory forget, and who decides?",
     "Choose a gate, set its half-life, and write RetNet's and Mamba-2's chunks."),
    ("Gates", "10_parallel_gla", "GLA in parallel", "Right on paper: why does it overflow?",
     "Say at which length a ratio of decays dies in any number format, and repair it."),
    ("Gates", "11_chunkwise_gla", "Chunkwise GLA", "Which pairs of words need the slow way?",
     "Derive the GLA paper's two-level algorithm, and choose its two lengths."),
    ("Gates", "12_four_kernels", "Four kernels and a sum", "How did its authors run it, and what did that cost?",
     "Read an early implementation, and count what each step moves."),
    ("Gates", "13_one_product_a_chunk", "One product a chunk", "Can a gate cost next to nothing?",
     "Anchor a chunk's scales, and know when the data forbid it."),
    ("Gates", "14_gla_kernel", "The GLA kernel", "Can a fast kernel be read in one sitting?",
     "Read every line of a fast kernel, predict its time, and write it yourself."),
    ("Gates", "15_gradients", "Gradients of the gates", "How much passed through this gate?",
     "Derive the gates' gradient without storing states, and see which pairs cancel."),
    ("Gates", "15b_gradient_kernel", "Summing a gate's gradient", "Why does a sum that is right on paper lose digits?",
     "Cut a sum so that nothing has to cancel, and read the backward kernels."),
    ("Gates", "16_one_token_at_a_time", "One token at a time", "What must be kept to write the next word?",
     "Write a decoding step and its kernel, and predict its time from bytes."),
    ("Models", "17_gla_layer", "The layer and its Transformer", "What stands around the recurrence in a model?",
     "Build a language model around the operator, and count its numbers, operations and bytes."),
    ("Models", "18_one_recurrence", "One recurrence, many models", "Are Mamba, RWKV and DeltaNet different memories?",
     "Run sixteen models as their papers write them, each as a call of one recurrence."),
    ("Models", "19_what_it_learns", "What it learns", "What can a state of fixed size still find in a text?",
     "Compare trained models fairly: rates, baselines, intervals, and what their gates do."),
    ("Models", "19b_what_it_learns_from_text", "What it learns from text", "Does the mixer matter on real text?",
     "Compare language models by bits per byte, and look at them before their first step."),
    ("Models", "19c_how_far_back", "How far back it looks", "Does a model use the beginning of a long text?",
     "Measure how much of a text a model uses, and read its gates."),
    ("Beyond", "20_delta_rule", "Delta rule", "How does a memory overwrite what is out of date?",
     "Derive DeltaNet's and Gated DeltaNet's chunks."),
    ("Beyond", "21_inverting_a_triangle", "Inverting a triangle", "How many bits does an inverse need?",
     "Invert a chunk's triangle, and say when TF32 is enough."),
    ("Beyond", "22_fully_fused_on_hopper", "Fully fused on Hopper", "Why wait, if three jobs can be done at once?",
     "Read a kernel whose warps have different jobs, and say what limits it."),
    ("Beyond", "23_delta_rule_fused", "The delta rule, fully fused", "What can be done before the state is known?",
     "Find the path that must stay in order, and move all else off it."),
    ("Beyond", "24_many_gpus", "Many GPUs", "How do several GPUs share one text?",
     "Split a recurrence over GPUs, count what crosses, and say when it pays."),
)  # fmt: skip
CARDS = tuple(Card(*words, _pictures()[words[1]]) for words in _TEXTS)
#: page, a reader's wish, the first step
WAYS = (
    ("01_softmax_attention", "Start reading", "Chapter 1, from zero"),
    ("05_linear_attention", "I know attention", "Chapter 5, linear attention"),
    ("check_your_kernel", "Check my kernel", "Is it right? If not, where?"),
    ("benchmarks", "See benchmarks", "What is fast, measured"),
)


class Path(NamedTuple):
    title: str
    readers: str  # the path's readers, and its end
    pages: tuple[str, ...]


#: ways through the chapters; the site's build fills in the hours
PATHS = (
    Path(
        "GLA in {hours}",
        "From your first kernel to a fast one for GLA. You know attention, and the idea of FlashAttention; if not, "
        "read chapters 1 to 3 first.",
        tuple(card.page for card in CARDS if int(card.page[:2]) in (4, 5, 6, 9, 10, 11, 13, 14)),
    ),
    Path(
        "The whole book, in {hours}",
        "From softmax to many GPUs. All chapters, in their order.",
        tuple(card.page for card in CARDS),
    ),
)
#: page, an optional part on a first reading, and the sentence that says what a reader misses; the page has it too
OPTIONAL = (
    (
        "03_flash_attention.html#sec-flash-backward",
        "The backward pass of chapter 3",
        "If you skip it, you will miss how attention is trained without storing its weights.",
    ),
    (
        "08_training_through_chunks.html",
        "The paper's Figure 2 in chapter 8",
        "If you skip it, you will miss a comparison with softmax attention over many lengths.",
    ),
    (
        "12_four_kernels.html",
        "Chapter 12",
        "If you skip it, you will miss how to read a kernel by its grid, and the measured costs that two later "
        "chapters avoid.",
    ),
)


class Cards:
    """Links in one piece of HTML."""

    def __init__(self, html: str):
        self.html = html

    def _repr_html_(self) -> str:
        return self.html


def ways() -> Cards:
    """The size of the book, its authors, and ways into it."""
    links = "".join(
        f'<a class="card-link" href="{page}.html"><b>{title}</b><span>{how}</span></a>' for page, title, how in WAYS
    )
    said = f"<b>{len(CARDS)} chapters, from PyTorch to kernels.</b> By the gla_ref authors: "
    said += '<a href="#index-cite">how to cite it</a>.'
    return _nav("Ways in", f"<p>{said}</p><div>{links}</div>", "cards-ways")


def cards() -> Cards:
    """The chapters by part; the site's build fills in each chapter's reading time."""
    html, part = "", None
    for card in CARDS:
        if card.part != part:
            html += f"{'</div>' * (part is not None)}<p><b>{card.part}</b></p><div>"
            part = card.part
        html += (
            f'<a class="card-link" href="{card.page}.html"><svg viewBox="0 0 {WIDE} {HIGH}" aria-hidden="true">'
            f"{card.picture}</svg><b>{CHAPTER.match(card.page)[1].lstrip('0')} {escape(card.title)}</b>"
            f"<i>{escape(card.question)}</i><span>{escape(card.learns)} "
            f'<small data-page="{card.page}"></small></span></a>'
        )
    return _nav("Chapters", f"{html}</div>")


def paths() -> Cards:
    """The ways through the chapters, with the time that each takes, and the parts that are optional."""
    html = ""
    for title, readers, pages in PATHS:
        listed = " ".join(pages)
        hours = f'<span data-hours="{listed}">some hours</span>'
        names = {card.page: card.title for card in CARDS}
        shown = pages if len(pages) < len(CARDS) else ()  # the cards list them all
        steps = "".join(f'<li><a href="{page}.html">{int(page[:2])} {escape(names[page])}</a></li>' for page in shown)
        html += (
            f'<section><p><b>{title.format(hours=hours)}</b> <small data-page="{listed}"></small></p>'
            f"<p>{readers}</p>{f'<ul>{steps}</ul>' if steps else ''}</section>"
        )
    html = f'<div>{html}</div><p>Optional on a first reading:</p><ul class="paths-optional">'
    html += "".join(f'<li><a href="{page}">{what}</a>. {missed}</li>' for page, what, missed in OPTIONAL)
    style = f"<style>{STYLE}{_PATHS}</style>"
    return Cards(f'<nav class="explorable paths" aria-label="Paths">{style}{html}</ul></nav>')


def _nav(name: str, html: str, kind: str = "") -> Cards:
    style = f"<style>{STYLE}{_STYLE}</style>"
    return Cards(f'<nav class="explorable cards {kind}" aria-label="{name}">{style}{html}</nav>')


_STYLE = """
.explorable.cards { max-width: none } .explorable.cards-ways { margin-top: 0 }
.cards > div { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .6rem }
.cards-ways > div { grid-template-columns: repeat(4, minmax(0, 1fr)) }
.cards p { margin: 1rem 0 .4rem } .cards-ways p { margin: 0 0 .4rem }
.cards .card-link { display: grid; grid-template-columns: 1fr auto; gap: .15rem .75rem; align-content: start;
  padding: .6rem .75rem; color: inherit; border: 1px solid var(--grey); border-radius: .5rem; text-decoration: none;
  line-height: 1.35 }
.cards-ways .card-link { grid-template-columns: 1fr; padding: .35rem .75rem }
.cards .card-link:hover { border-color: var(--accent); box-shadow: 0 0 0 1px var(--accent) }
.cards .card-link b { color: var(--accent) } .cards .card-link :is(i, span) { font-size: .88em }
.cards .card-link span { grid-column: 1 / -1 }
.cards small { white-space: nowrap; font-weight: 600; font-size: 1em }
.cards svg { grid-area: 1 / 2 / span 2; height: 3rem; width: auto }
@media (max-width: 40rem) {
  .cards > div { grid-template-columns: minmax(0, 1fr) }
  .cards-ways > div { grid-template-columns: repeat(2, minmax(0, 1fr)) }
  .cards-ways .card-link { padding: .35rem .5rem; font-size: .9em }
}
"""

_PATHS = """
.explorable.paths { max-width: none }
.paths > div { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .6rem }
.paths section { padding: .6rem .75rem; border: 1px solid var(--grey); border-radius: .5rem; line-height: 1.35 }
.paths :is(p, ul) { margin: 0 0 .4rem } .paths > div + p { margin-top: .8rem }
.paths section b { color: var(--accent) } .paths section p + p, .paths section ul { font-size: .88em }
.paths section li a { display: inline-block; padding: .3rem 0 } /* high enough for a finger */
.paths small { white-space: nowrap; font-weight: 600 }
@media (max-width: 40rem) { .paths > div { grid-template-columns: minmax(0, 1fr) } }
"""
