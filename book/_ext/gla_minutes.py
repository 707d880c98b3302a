"""How long a chapter takes, or several together: under a title, on a card and in a path of the front page.

Counted from the page that is built, so that no text has to say it and none goes out of date. What is folded does not
count, nor do the exercises: those are numbered beside the minutes.
"""

from __future__ import annotations

import re

from docutils import nodes
from gla_book import CHAPTER
from sphinx_exercise.nodes import exercise_enumerable_node, exercise_node

WORDS, LINES, FORMULAS = 120, 10, 1  # a minute, with a pencil: words of text, lines of code, displayed formulas
#: places for the minutes of one page, or of several added up, made by `gla_ref.book.viz.cards`
MINUTES = re.compile(r'<small data-page="([\w ]+)"></small>')
#: a place for the same in hours; what it contains is shown where no build fills it
HOURS = re.compile(r'<span data-hours="([\w ]+)">[^<]*</span>')
EXERCISES = (exercise_node, exercise_enumerable_node)


def passed_over(node: nodes.Element) -> bool:
    """What nobody reads on: exercises with their solutions, folded code, the plain twins of tables and pictures."""
    if isinstance(node, (*EXERCISES, nodes.raw, nodes.image, nodes.comment)):
        return True
    kinds, around = set(node.get("classes", ())), node.parent
    if node.get("nb_element") == "cell_code_source":
        return bool({"tag_hide-input", "tag_hide-cell"} & set(around["classes"]))
    if node.get("nb_element") == "cell_code_output":
        return bool({"tag_hide-output", "tag_hide-cell"} & set(around["classes"]))
    twin = node.get("mime_type") == "text/plain" and len(around.children) > 1
    return twin or bool({"solution", "dropdown"} & kinds)


def reading(node: nodes.Node) -> float:
    """Minutes."""
    if isinstance(node, nodes.Text):
        return len(node.split()) / WORDS
    if passed_over(node):
        return 0
    if isinstance(node, nodes.literal_block):
        return sum(bool(line.strip()) for line in node.astext().splitlines()) / LINES
    if isinstance(node, nodes.math_block):
        return 1 / FORMULAS
    return sum(map(reading, node.children))


def count(app, doctree):
    """Keep minutes, to five, and the number of exercises."""
    page = app.env.docname
    if CHAPTER.match(page):
        minutes = max(5, 5 * round(reading(doctree) / 5))
        exercises = sum(1 for kind in EXERCISES for _ in doctree.findall(kind))
        app.env.metadata[page] |= {"minutes": minutes, "exercises": exercises}


def hours(minutes: int) -> str:
    """In words, to half an hour, and not less than that."""
    halves = max(1, round(minutes / 30))
    whole, half = divmod(halves, 2)
    if not whole:
        return "half an hour"
    return f"{whole}{'½' * half} hour{'s' * (halves > 2)}"


def fill(body: str, minutes: dict[str, int]) -> str:
    """Put the minutes of the pages that each place names into it, added up."""

    def total(place: re.Match) -> int:
        return sum(minutes[page] for page in place[1].split())

    body = MINUTES.sub(lambda place: f"<small>{total(place)} min</small>", body)
    return HOURS.sub(lambda place: f"<span>{hours(total(place))}</span>", body)


def show(app, pagename, templatename, context, doctree):
    known = app.env.metadata
    if said := known.get(pagename, {}).get("minutes"):
        many = known[pagename]["exercises"]
        line = f'<p class="minutes">{said} minutes to read, and {many} exercise{"s" * (many != 1)}</p>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{line}", 1)
    elif 'data-page="' in context.get("body", ""):
        minutes = {page.removeprefix("book/"): x["minutes"] for page, x in known.items() if "minutes" in x}
        context["body"] = fill(context["body"], minutes)


def setup(app):
    app.connect("doctree-read", count)
    app.connect("html-page-context", show)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
