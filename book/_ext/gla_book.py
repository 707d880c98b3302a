"""The book's own Sphinx extension: what Jupyter Book cannot be told in _config.yml.

* A chapter's number is the one in its file name (``book/11_chunkwise_gla.md`` is chapter 11): the list may have gaps.
* The Colab and download buttons lead to the generated notebook; with no public repository
  address (``repository.url`` in _config.yml) there is no button that needs one.
* Equations are rendered by a local KaTeX, strictly; nothing is loaded from another host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import time
import warnings
from pathlib import Path, PurePosixPath

from docutils import nodes
from sphinx.util import logging
from sphinx_external_toc.collectors import TocTreeCollectorWithStyles

from gla_ref.book import notebook as pages

CHAPTER = re.compile(f"book/{pages.CHAPTER.pattern}")
COLAB = "https://colab.research.google.com"
MACROS = {r"\R": r"\mathbb{R}", r"\diag": r"\operatorname{diag}"}

#: what Sphinx and docutils mark up as lists of which screen readers find no items, and what they are
NO_LIST = (
    ('<dl>\n<dd><em class="sig-param">', '<dl role="presentation">\n<dd><em class="sig-param">'),
    ('<div role="list" class="citation-list">', '<div class="citation-list">'),
)

#: the space before an exercise's name, which stands in the link to it, where it is underlined
SPACE = re.compile(r'(?<=Solution to)(<a class="reference internal" href="[^"]*">) ')

#: IPython's settings for pages: drawings as vectors (images inside them stay images), the same in every build
FIGURES = """c.InlineBackend.figure_formats = {"svg"}
c.InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": {"Date": None}}
"""

#: sphinx_external_toc asks every object in memory for its class, and one of torch's says that it is old
warnings.filterwarnings("ignore", ".*reduce_op.*", FutureWarning)

log = logging.getLogger(__name__)


def number_by_file_name(collector, env):
    """Give chapter ``book/NN_slug`` the number NN, such as 9, whatever its place in the table of contents."""
    old, env.toc_secnumbers = env.toc_secnumbers, {}
    for page, toc in env.tocs.items():
        if match := CHAPTER.match(page):
            number = (match[1].lstrip("0"),)
            first, *rest = toc.findall(nodes.reference)
            first["secnumber"] = env.titles[page]["secnumber"] = number
            env.toc_secnumbers[page] = {"": number} | {r["anchorname"]: () for r in rest}
    return [page for page, number in env.toc_secnumbers.items() if number != old.get(page)]


def use_repository(app, config):
    """Show the repository's buttons only when there is a public address."""
    options = config.html_theme_options
    for button in ("use_repository_button", "use_edit_page_button", "use_issues_button"):
        options[button] = bool(options.get("repository_url"))
    if options.get("repository_url"):
        options["launch_buttons"] = {"colab_url": COLAB}


def name_in_the_bar(app, config):
    """On a phone, where the side bar with the logo is folded, the bar above the article leads home."""
    config.html_theme_options["article_header_start"] = ["toggle-primary-sidebar.html", "home-link.html"]


def colab_url(repository_url: str, branch: str, notebook: str) -> str:
    slug = repository_url.removeprefix("https://github.com/").strip("/")
    return f"{COLAB}/github/{slug}/blob/{branch}/notebooks/{notebook}"


def offer_notebook(app, pagename, templatename, context, doctree):
    """Ask the theme for a download button, which it shows by itself only beside a Colab button."""
    if CHAPTER.match(pagename):
        context["ipynb_source"] = f"{pagename}.ipynb"


def use_generated_notebook(app, pagename, templatename, context, doctree):
    """Launch and download notebooks/NN_slug.ipynb, where the theme knows only the page itself."""
    if not CHAPTER.match(pagename):  # an executed page without a notebook, such as the errata
        buttons = context.get("header_buttons", [])
        context["header_buttons"] = [b for b in buttons if b.get("label") != "launch-buttons"]
        return
    name = PurePosixPath(pagename).name + ".ipynb"
    notebook = Path(app.srcdir) / "notebooks" / name
    if not notebook.exists():
        log.warning("no notebooks/%s: run `make notebooks`", name, location=pagename)
        return
    download = Path(app.outdir) / "_sources" / context["ipynb_source"]
    download.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(notebook, download)
    options = app.config.html_theme_options
    for button in (b for group in context["header_buttons"] for b in group.get("buttons", [])):
        if button.get("text") == "Colab":
            url, branch = options["repository_url"], options["repository_branch"]
            button["url"] = colab_url(url, branch, name)


def clean_page(app, pagename, templatename, context, doctree):
    """Drop thebe, which Jupyter Book always loads and which throws; mend lists; report failed formulas."""

    def wanted(asset) -> bool:
        inline = getattr(asset, "attributes", {}).get("body") or ""
        return "thebe" not in str(getattr(asset, "filename", asset)) and "THEBE" not in inline

    for key in ("script_files", "css_files"):
        context[key] = [asset for asset in context[key] if wanted(asset)]
    body = context.get("body") or ""
    for claimed, meant in NO_LIST:
        body = body.replace(claimed, meant)
    context["body"] = SPACE.sub(r" \1", body)
    if "katex-error" in body or "color:#cc0000" in body:
        log.warning("KaTeX could not render an equation", location=pagename)


def execution_cache(root: Path) -> Path:
    """Where executed pages are kept, found by their cells; tools/build_book.py runs those that read something else."""
    return root / "_build" / ".jupyter_cache" / "pages"


def use_execution_cache(app, config):
    prepare_kernels(Path(app.srcdir))
    config.nb_execution_cache_path = str(execution_cache(Path(app.srcdir)))


def use_local_katex(app, config):
    """Render at build time where node is, else in the browser; a bad equation is an error."""
    from sphinxcontrib import katex

    config.katex_prerender = shutil.which("node") is not None
    katex.KATEX_DEFAULT_OPTIONS.update(throwOnError=True, strict="error", macros=dict(MACROS))
    katex.STARTUP_TIMEOUT = katex.RENDER_TIMEOUT = 60
    katex.KaTeXServer.start_server_process = start_katex
    config.katex_options = f"macros: {json.dumps(MACROS)}, throwOnError: false"


def start_katex(rundir: Path, timeout: float):
    """Start node and connect; the package tries once, often before a busy node listens."""
    from sphinxcontrib.katex import KaTeXServer

    path = rundir / "katex.sock"
    command = KaTeXServer.build_command(socket=path)
    process = subprocess.Popen(command, cwd=rundir, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    connection = socket.socket(socket.AF_UNIX)
    end = time.monotonic() + timeout
    while True:
        try:
            connection.connect(str(path))
            return process, connection
        except (FileNotFoundError, ConnectionRefusedError):
            if process.poll() is not None or time.monotonic() > end:
                process.kill()
                raise
            time.sleep(0.01)


def prepare_kernels(root: Path):
    """What the processes that execute pages inherit: Triton interprets without a GPU, figures are SVG."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ["IPYTHONDIR"] = str(root / "_build" / ".ipython")
    settings = root / "_build" / ".ipython" / "profile_default" / "ipython_kernel_config.py"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(FIGURES)


def use_templates(app, config):
    """The book's own templates, before the theme's."""
    config.templates_path.append(str(Path(__file__).parent / "templates"))


def setup(app):
    TocTreeCollectorWithStyles.assign_section_numbers = number_by_file_name
    for configure in (use_repository, name_in_the_bar, use_execution_cache, use_local_katex, use_templates):
        app.connect("config-inited", configure)
    # sphinx_book_theme fills in its buttons at priority 501
    app.connect("html-page-context", offer_notebook, priority=499)
    app.connect("html-page-context", use_generated_notebook, priority=502)
    app.connect("html-page-context", clean_page, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
