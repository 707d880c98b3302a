"""Exercises on the site: those that only predict are answered and judged in the page, the others say where to run them.

A form takes the place of the cell in which a notebook's reader answers. The rules it judges by are those of
``gla_ref.book.exercises``, written into the page as data; ``book/_static/answers.js`` follows them.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path, PurePosixPath

import gla_book
import gla_package
from docutils import nodes
from sphinx_exercise.nodes import exercise_enumerable_node, exercise_node

#: the last line of the cell to answer in
STARTS = re.compile(r'^check\("(ex-[\w-]+)", ', re.MULTILINE)
#: of a build that only reads the book: notebooks keep their cells
NOTEBOOKS = "notebooks"


def input_for(part, name: str) -> str:
    """The controls of one part of an answer."""
    if not part.options:
        entry = '<input type="text" inputmode="decimal" autocomplete="off" autocapitalize="off" spellcheck="false">'
        return f"<label>{escape(part.name)} {entry}</label>"
    kind = "checkbox" if part.many else "radio"
    choices = [
        f'<label><input type="{kind}" name="{name}" value="{in_json(value)}"> {escape(option)}</label>'
        for option, value in part.options.items()
    ]
    return f"<fieldset><legend>{escape(part.name)}</legend>{' '.join(choices)}</fieldset>"


def in_json(numbers) -> str:
    """As JSON, which knows no infinity: a script reads this number as one."""
    return json.dumps(numbers).replace("Infinity", "1e999")


def data(question) -> str:
    """The rules for a script: each an interval for every number (null is anything) and the number of its sentence."""
    sentences = list(dict.fromkeys(sentence for _, sentence in question.rules))
    rules = [[place, sentences.index(sentence)] for place, sentence in question.rules]
    text = f'{{"rules": {in_json(rules)}, "sentences": {json.dumps(sentences, ensure_ascii=False)}}}'
    return text.replace("</", r"<\/")


def form(label: str, title: str, question) -> str:
    parts = "".join(input_for(part, f"{label}-{n}") for n, part in enumerate(question.parts))
    return (
        f'<form class="answer" id="answer-{label}" novalidate>'
        f'<div class="answer-parts" role="group" aria-label="{escape(f"Your answer: {title}")}">{parts}</div>'
        '<button type="submit">Check</button>'
        '<p class="verdict" role="status" aria-live="polite"></p>'
        f'<script type="application/json">{data(question)}</script></form>'
        "<noscript>Answers are judged by a script, or in the notebook.</noscript>"
    )


def where(app, page: str) -> str:
    """One line: where the cell above can be run."""
    root, options = Path(app.srcdir), app.config.html_theme_options
    up, name = "../" * page.count("/"), PurePosixPath(page).name
    notebook = f'<a href="{up}{gla_package.FOLDER}/{name}.ipynb" download>the notebook</a>'
    colab = "on Colab"
    if url := options.get("repository_url"):
        colab = f'<a href="{gla_book.colab_url(url, options["repository_branch"], f"{name}.ipynb")}">on Colab</a>'
    wheel = f'with <a href="{up}{gla_package.FOLDER}/{gla_package.wheel_name(root)}" download>the package</a> beside it'
    package = "which installs the package" if app.config.html_baseurl else wheel
    return (
        f'<p class="answer-where">Write and check your answer in {notebook}, on your machine or {colab}, {package}.</p>'
    )


def place_answers(app, doctree, page):
    if app.builder.name != "html" or app.tags.has(NOTEBOOKS) or not gla_book.CHAPTER.match(page):
        return
    from gla_ref.book import exercises

    exercises.load()
    boxes = {box["label"]: box for kind in (exercise_node, exercise_enumerable_node) for box in doctree.findall(kind)}
    for cell in list(doctree.findall(nodes.container)):
        if cell.get("nb_element") != "cell_code" or not (found := STARTS.search(cell.astext())):
            continue
        if (box := boxes.pop(found[1], None)) is None:  # a later cell that checks the same exercise
            continue
        if make := exercises.QUESTIONS.get(found[1]):
            title = box.children[0].astext().strip(" ()")
            box += nodes.raw("", form(found[1], title, make()), format="html")
            cell.parent.remove(cell)
        else:
            source, *_ = cell.children
            cell.children = [source, nodes.raw("", where(app, page), format="html")]


def add_script(app, pagename, templatename, context, doctree):
    if 'class="answer"' in context.get("body", ""):
        app.add_js_file("answers.js", loading_method="defer")


def setup(app):
    app.add_css_file("answers.css")
    app.connect("doctree-resolved", place_answers)
    app.connect("html-page-context", add_script)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
