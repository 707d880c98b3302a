"""The workflow that publishes the site relies on settings, addresses, versions that agree."""

import email
import re
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("jupyter_book", reason="the book's tools are not installed")

import build_book
import gla_package
import gla_publish
import gla_search
import yaml
from docutils.core import publish_doctree

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "https://example.org/gla/"


def test_the_wheel_is_typed_and_describes_itself(tmp_path):
    wheel = zipfile.ZipFile(gla_package.build_wheel(ROOT, tmp_path))
    assert wheel.read("gla_ref/py.typed") == b""
    (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("/METADATA"))
    fields = email.message_from_string(metadata)
    assert "Typing :: Typed" in fields.get_all("Classifier") and fields["License-Expression"] == "MIT"
    assert fields["Description-Content-Type"] == "text/markdown"
    assert fields.get_payload().strip() == (ROOT / "README.md").read_text().strip()


def test_the_workflow_asks_before_it_publishes():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "site.yml").read_text())
    build, deploy = workflow["jobs"]["build"], workflow["jobs"]["deploy"]
    runs = [step.get("run", "") for step in build["steps"]]
    assert ".ci/run" in runs, "the gate comes before the site is published"
    (asks,) = (step["run"] for step in build["steps"] if step.get("id") == "settings")
    pattern = re.search("'(.*)'", asks)[1]
    assert re.search(pattern, f'  baseurl: "{ADDRESS}"  # of the site') and not re.search(pattern, '  baseurl: ""')
    upload = next(step for step in build["steps"] if "upload-pages-artifact" in step.get("uses", ""))
    assert upload["with"]["path"] == "_build/html" and "publish == 'true'" in upload["if"]
    assert "publish == 'true'" in deploy["if"] and deploy["permissions"]["pages"] == "write"


def test_versions_agree():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version
    assert re.search(rf'^__version__ = "{re.escape(version)}"', (ROOT / "src/gla_ref/__init__.py").read_text(), re.M)


def test_addresses_are_made_when_the_site_has_one(tmp_path):
    page = SimpleNamespace(
        outdir=tmp_path,
        config=SimpleNamespace(html_baseurl=ADDRESS, html_title="Book", project="Book"),
        builder=SimpleNamespace(get_target_uri=lambda name: f"{name}.html"),
        env=SimpleNamespace(found_docs={"book/index", "book/a&b"}),
    )
    context = {"title": "A <em>page</em>", "metatags": "", "pageurl": f"{ADDRESS}book/index.html"}
    gla_publish.add_metadata(page, "book/index", "", context, publish_doctree("T\n=\n\nWhat is it? It is a page."))
    assert f'property="og:image" content="{ADDRESS}_static/card.png"' in context["metatags"]
    assert 'property="og:title" content="A page"' in context["metatags"]
    gla_publish.write_sitemap(page, None)
    assert f"<loc>{ADDRESS}book/a&amp;b.html</loc>" in (tmp_path / "sitemap.xml").read_text()


@pytest.mark.parametrize(
    "tex, said",
    [
        (r"S_t = \diag(\alpha_t) S_{t-1} + k_t^\top v_t", "S_t = diag(α_t) S_t-1 + k_tᵀv_t"),
        (r"\hat q \odot e^{b}", "q ⊙e^b"),
        (r"k e^{b - r}", "k e^(b - r)"),
        (r"\tfrac12", "1/2"),
    ],
)
def test_formulas_can_be_read_in_a_line(tex, said):
    assert gla_search.plain(tex) == said


@pytest.mark.deep
def test_a_site_built_for_an_address_is_ready(tmp_path):
    for name in ("requirements.txt", "book/_ext", "book/_static", *gla_package.PARTS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())
    settings["repository"]["url"], settings["html"]["baseurl"] = "https://github.com/o/r", ADDRESS
    (tmp_path / "_config.yml").write_text(yaml.safe_dump(settings))
    (tmp_path / "_toc.yml").write_text("{format: jb-book, root: book/index}")
    (tmp_path / "book" / "references.bib").write_text("")
    (tmp_path / "book" / "index.md").write_text("# A page\n\nWhat is it? A page of the book, and all of it.\n")
    built = build_book.build(tmp_path, capture_output=True, text=True, timeout=500)
    assert built.returncode == 0, built.stdout + built.stderr
    made = tmp_path / "_build" / "html"
    front = (made / "book" / "index.html").read_text()
    assert f'<link rel="canonical" href="{ADDRESS}book/index.html"' in front
    assert f"<loc>{ADDRESS}book/index.html</loc>" in (made / "sitemap.xml").read_text()
    lost = (made / "404.html").read_text()
    assert '<base href="/gla/">' in lost and "<script>" not in lost
    assert 'content="What is it? A page of the book, and all of it."' in (made / "book" / "index.html").read_text()
    assert (made / "_static" / "card.png").exists()
