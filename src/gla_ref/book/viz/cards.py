"""The front page: cards of chapters 1 to 25, with a question and a small picture each, and paths through them."""

from html import escape
from typing import NamedTuple

from ..notebook import CHAPTER
from ._explorable import HERE, STYLE

__all__ = ["CARDS", "WAYS", "Cards", "cards", "paths", "ways"]


class Card(NamedTuple):
    part: str
    page: str  # its page in the book
    title: str
    question: str
    learns: str  # a reader's skill after the chapter

    def picture(self) -> str:
        """A few marks, a picture of its question; their classes are those of `_svg`."""
        return (HERE / "pictures" / f"{self.page}.svg").read_text()


CARDS = tuple(Card(*texts) for texts in (
    ("Attention", "01_softmax_attention", "Softmax attention", "How does a word look back, and why is that expensive?",
     "Write attention in parallel and from a cache, and count what a long text costs."),
    ("Attention", "02_online_softmax", "Online softmax", "Can you read the keys once, and keep no list of scores?",
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
    ("Gates", "12_one_product_a_chunk", "One product a chunk", "Can a gate cost next to nothing?",
     "Anchor a chunk's scales, and know when the data forbid it."),
    ("Gates", "13_gla_kernel", "The GLA kernel", "Can a fast kernel be read in one sitting?",
     "Read every line of a fast kernel, say what bounds its time, and write it yourself."),
    ("Gates", "14_four_kernels", "The original four kernels",
     "How did its author run it, and why did no test see the bugs?",
     "Follow every byte of a kernel from launch to launch, and see what a test will never see."),
    ("Gates", "15_gradients", "Gradients of the gates", "How much passed through this gate?",
     "Derive the gates' gradient without storing states, and add it up without losing its digits."),
    ("Gates", "16_one_token_at_a_time", "One token at a time", "What must be kept to write the next word?",
     "Write a decoding step and its kernel, and serve many users from states."),
    ("Models", "17_gla_layer", "The layer and its Transformer", "What stands around the recurrence in a model?",
     "Build a language model around the operator, and say where a training step's time goes."),
    ("Models", "18_one_recurrence", "One recurrence, many models", "Are Mamba, RWKV and DeltaNet different memories?",
     "Run sixteen models as their papers write them, and place the next one yourself."),
    ("Models", "19_comparing_mixers", "Comparing mixers", "Which mixer would you take, and can you be sure?",
     "Compare trained models fairly: baselines, the start, rates, seeds, and what of a text is used."),
    ("Beyond", "20_delta_rule", "Delta rule", "How does a memory overwrite what is out of date?",
     "Derive DeltaNet's and Gated DeltaNet's chunks."),
    ("Beyond", "21_inverting_a_triangle", "Inverting a triangle", "How many bits does an inverse need?",
     "Invert a chunk's triangle, and say when TF32 is enough."),
    ("Beyond", "22_fully_fused_on_hopper", "Fully fused on Hopper", "Why wait, if three jobs can be done at once?",
     "Read a kernel whose warps have different jobs, and say what limits it."),
    ("Beyond", "23_delta_rule_fused", "The delta rule, fully fused", "What can be done before the state is known?",
     "Find the path that must stay in order, and move all else off it."),
    ("Beyond", "24_kimi_delta_attention", "Kimi Delta Attention", "Can a memory fade by channel and still overwrite?",
     "Put GLA's gates into the delta rule's chunk, and say what a kernel may not forget."),
    ("Beyond", "25_many_gpus", "Many GPUs", "How do several GPUs share one text?",
     "Split a recurrence over GPUs, count what crosses, and say when it pays."),
))  # fmt: skip
#: page, a reader's wish, the first step
WAYS = (
    ("01_softmax_attention", "Start reading", "Chapter 1, from zero"),
    ("04_first_triton_kernels", "I know attention", "Chapter 4, Triton"),
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
        (
            "04_first_triton_kernels",
            "05_linear_attention",
            "06_prefix_sums_and_chunks",
            "07_flash_linear_attention",
            "09_gates_and_decay",
            "10_parallel_gla",
            "11_chunkwise_gla",
            "12_one_product_a_chunk",
            "13_gla_kernel",
        ),
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
        "training_attention.html",
        "The backward pass of FlashAttention",
        "If you skip it, you will miss how attention is trained without storing its weights.",
    ),
    (
        "14_four_kernels.html",
        "Chapter 14",
        "If you skip it, you will miss how GLA's first kernels worked, what each of their steps costs, and two bugs "
        "that shipped.",
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
    said = f"<b>{len(CARDS)} chapters, from PyTorch to kernels.</b> "
    said += '<a href="#index-cite">How to cite it.</a>'
    return _nav("Ways in", f"<p>{said}</p><div>{links}</div>", "cards-ways")


def cards() -> Cards:
    """The chapters by part; the site's build fills in each chapter's reading time."""
    html, part = "", None
    for card in CARDS:
        if card.part != part:
            html += f"{'</div>' * (part is not None)}<p><b>{card.part}</b></p><div>"
            part = card.part
        html += (
            f'<a class="card-link" href="{card.page}.html">{card.picture()}'
            f"<b>{CHAPTER.match(card.page)[1].lstrip('0')} {escape(card.title)}</b>"
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
