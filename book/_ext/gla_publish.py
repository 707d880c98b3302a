"""What others see of the site: descriptions, the picture of a shared link, a sitemap, a page for lost links.

Addresses need ``html.baseurl`` of _config.yml; while it is empty there is no sitemap and no picture.
"""

from __future__ import annotations

import re
from html import escape
from itertools import islice
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from docutils import nodes
from gla_search import squeeze, text_of

CARD = "_static/card.png"


def description(doctree: nodes.document, limit: int = 160) -> str:
    """The first sentences of a page that fit into a search engine's two lines; at least one, cut at a word."""
    paragraphs = (p for p in doctree.findall(nodes.paragraph) if isinstance(p.parent, nodes.section))
    text = squeeze(" ".join(text_of(p) for p in islice(paragraphs, 3)))
    if len(text) > limit:
        end = max((m.end() for m in re.finditer(r"[.?!](?= )", text[:limit])), default=0)
        text = text[:end] if end > limit / 3 else text[: text.rindex(" ", 0, limit - 1)] + " …"
    return text


def add_metadata(app, pagename, templatename, context, doctree):
    if doctree is None:
        return
    title = re.sub("<[^>]+>", "", context["title"])
    base = app.config.html_baseurl
    about = description(doctree) or f"{title} of the book {app.config.project}, from softmax to silicon"
    meta = {"og:type": "article", "og:site_name": app.config.html_title or app.config.project, "og:title": title}
    meta["og:description"] = about
    context["metatags"] += f'<meta name="description" content="{escape(about)}" />\n'
    if base:
        meta |= {"og:url": context["pageurl"], "og:image": urljoin(base.rstrip("/") + "/", CARD)}
        context["metatags"] += '<meta name="twitter:card" content="summary_large_image" />\n'
    for name, content in meta.items():
        context["metatags"] += f'<meta property="{name}" content="{escape(content)}" />\n'


def lost(app):
    """404.html, which a host shows at any depth of addresses: its links begin where the site does.

    A site without an address may be served below one: then the page looks for the folder that has its logo.
    """
    base = urlsplit(app.config.html_baseurl).path.rstrip("/") + "/"
    chapters = [(app.builder.get_target_uri(page), number[0], app.env.titles[page].astext())
                for page, title in sorted(app.env.titles.items()) if (number := title.get("secnumber"))]  # fmt: skip
    logo = f"_static/{Path(app.config.html_logo).name}"
    yield "404", {"base": base, "known": bool(app.config.html_baseurl), "chapters": chapters, "logo": logo}, "404.html"


def write_sitemap(app, exception):
    """The book's pages, for search engines; the API's sources and indices are left out."""
    base = app.config.html_baseurl
    if exception or not base:
        return
    addresses = (
        urljoin(base.rstrip("/") + "/", app.builder.get_target_uri(page)) for page in sorted(app.env.found_docs)
    )
    urls = "".join(f"<url><loc>{escape(address)}</loc></url>\n" for address in addresses)
    head = '<?xml version="1.0" encoding="UTF-8"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n'
    (Path(app.outdir) / "sitemap.xml").write_text(f"{head}{urls}</urlset>\n")


def setup(app):
    app.connect("html-page-context", add_metadata, priority=800)
    app.connect("html-collect-pages", lost)
    app.connect("build-finished", write_sitemap)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
