"""What a link to a term, an equation or a citation shows on hover and focus (book/_static/previews.js).

Each page leaves its own in ``_static/previews/PAGE.js``, which a page that links to it loads when it is first asked
for: a script, since a page opened from the disk may load nothing else.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

EQUATION = re.compile(r'<div class="math[^"]*" id="(equation-[^"]+)">(.*?)</div>', re.DOTALL)
TERM = re.compile(r'((?:<dt id="term-[^"]+">.*?</dt>\s*)+)<dd>(.*?)</dd>', re.DOTALL)
CITATION = re.compile(
    r'<div class="citation" id="([^"]+)"[^>]*>\s*<span class="label">.*?</span></span>(.*?)</div>', re.DOTALL
)
#: what a preview must not have: links in it, and names that the page has already
LEFT_OUT = re.compile(r'<a class="headerlink".*?</a>|</?a\b[^>]*>| id="[^"]*"', re.DOTALL)


def previews(body: str) -> dict[str, str]:
    """HTML by anchor."""
    found = {anchor: html for anchor, html in EQUATION.findall(body)}
    found |= {anchor: html for anchor, html in CITATION.findall(body)}
    for names, definition in TERM.findall(body):
        found |= dict.fromkeys(re.findall(r'<dt id="([^"]+)"', names), definition)
    return {anchor: LEFT_OUT.sub("", html).strip() for anchor, html in found.items()}


def write(app, pagename, templatename, context, doctree):
    found = previews(context.get("body") or "")
    if doctree is None or not found:
        return
    path = Path(app.outdir) / "_static" / "previews" / f"{Path(pagename).name}.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"addPreviews({json.dumps(Path(pagename).name)}, {json.dumps(found, ensure_ascii=False)});\n")


def setup(app):
    app.connect("html-page-context", write, priority=800)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
