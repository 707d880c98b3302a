"""What the search page knows: the article's text by sections, the glossary's terms with their other names, the API.

Sphinx's own index has words without their sentences. Its results fetch whole pages, which a page opened from the disk
may not do, and show what stands there: labels of buttons, formulas twice. Here each page leaves its sections as plain
text in ``_static/search-data.js``, and ``book/_static/search.js`` searches them.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

from docutils import nodes
from gla_book import CHAPTER
from sphinx import addnodes

#: what nobody can read in a line of results: listings, displayed formulas, drawings
UNREAD = (nodes.literal_block, nodes.math_block, nodes.raw, nodes.image, nodes.comment, nodes.system_message)
#: at the end of a glossary's definition: other names of the term
ALIASES = re.compile(r"(?:Chinese|Also): ([^.]+)\.")

SYMBOLS = {
    "top": "ᵀ", "odot": "⊙", "cdot": "·", "times": "×", "le": "≤", "ge": "≥", "sum": "Σ", "prod": "Π", "infty": "∞",
    "to": "→", "dots": "…", "ldots": "…", "cdots": "…", "in": "∈", "approx": "≈", "ne": "≠", "pm": "±", "R": "ℝ",
}  # fmt: skip
SPELT = "diag ln log exp max min tril".split()


def plain(tex: str) -> str:
    """A formula in a line of text, as well as Unicode can: of a command without a sign only the argument stays."""

    def sign(found: re.Match) -> str:
        name = found[1]
        if name in SYMBOLS or name in SPELT:
            return SYMBOLS.get(name, name)
        kind = "CAPITAL" if name[0].isupper() else "SMALL"
        try:
            return unicodedata.lookup(f"GREEK {kind} LETTER {name}")
        except KeyError:
            return ""

    text = re.sub(r"\\(?:tfrac|frac)\{?(\w+)\}?\{?(\w+)\}?", r"\1/\2", tex)
    text = re.sub(r"\\([A-Za-z]+)\s*", sign, text)
    text = re.sub(r"\^\{([^{}]*[^\w{}][^{}]*)\}", r"^(\1)", text)  # e^{b - r} is not e^b - r
    return re.sub(r"[{}$\\]|\^(?=ᵀ)", "", text).strip()


def text_of(node: nodes.Node) -> str:
    """The words of a node in one line."""
    if isinstance(node, nodes.math):
        return plain(node.astext())
    if isinstance(node, nodes.Text):
        return node.astext()
    if isinstance(node, UNREAD) or "solution" in " ".join(node.get("classes", ())):
        return ""
    between = "" if isinstance(node, nodes.TextElement) else " "
    return between.join(map(text_of, node.children))


def squeeze(text: str) -> str:
    return re.sub(r"\s+([,.;:)])", r"\1", " ".join(text.split()))


def sections(doctree: nodes.document):
    """(anchor, heading, text without its subsections) of each section that is not the API's."""
    for section in doctree.findall(nodes.section):
        if (title := section.next_node(nodes.title)) is None:
            continue
        inner = [x for x in section.children if not isinstance(x, (nodes.section, nodes.title, addnodes.desc))]
        yield section["ids"][0], squeeze(text_of(title)), squeeze(" ".join(map(text_of, inner)))


def objects(doctree: nodes.document):
    """(anchor, full name, first sentence) of each function and class."""
    for signature in doctree.findall(addnodes.desc_signature):
        if not signature["ids"]:
            continue
        content = signature.parent.next_node(addnodes.desc_content)
        first = content.next_node(nodes.paragraph) if content is not None else None
        yield signature["ids"][0], signature["ids"][0], squeeze(text_of(first))[:200] if first is not None else ""


def terms(doctree: nodes.document):
    """(anchor, names, definition) of each entry of the glossary; the first name is the term's own."""
    for glossary in doctree.findall(addnodes.glossary):
        for item in glossary.findall(nodes.definition_list_item):
            named = [x for x in item.children if isinstance(x, nodes.term)]
            names, definition = [x.astext() for x in named], squeeze(text_of(item[-1]))
            for found in ALIASES.finditer(definition):
                names += found[1].split(", ")
            # "gated linear attention (GLA)" is both
            names += [part for name in names if (m := re.match(r"(.+) \((\w+)\)$", name)) for part in m.groups()]
            yield named[0]["ids"][0], names, definition


def collect(app, pagename, templatename, context, doctree):
    """Keep what one page says."""
    if doctree is None:
        return
    number = app.env.titles[pagename].get("secnumber")
    title = squeeze(app.env.titles[pagename].astext())
    app.search_pages[pagename] = {
        "url": app.builder.get_target_uri(pagename),
        "title": f"{number[0]}. {title}" if number else title,
        "kind": "chapter" if CHAPTER.match(pagename) else "api" if pagename.startswith("book/api") else "appendix",
        "sections": list(sections(doctree)),
        "objects": list(objects(doctree)),
        "terms": list(terms(doctree)),
    }


def write(app, exception):
    if exception is None and app.search_pages:
        data = json.dumps([app.search_pages[name] for name in sorted(app.search_pages)], ensure_ascii=False)
        (Path(app.outdir) / "_static" / "search-data.js").write_text(f"const SEARCH_PAGES = {data};\n")


def setup(app):
    app.search_pages = {}
    app.connect("html-page-context", collect)
    app.connect("build-finished", write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": False}
