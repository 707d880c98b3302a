"""The package in the site: a wheel beside the notebooks, which install it where it is missing.

A reader downloads both into one folder, or, where the site has an address (``html.baseurl``), the notebook alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

#: where notebooks and wheel lie in the site
FOLDER = "_sources/book"
PARTS = ("pyproject.toml", "README.md", "LICENSE", "src")


@cache
def wheel_name(root: Path) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return f"{project['name'].replace('-', '_')}-{project['version']}-py3-none-any.whl"


def wheel_address(root: Path, baseurl: str) -> str:
    """Where the published site has the wheel; nothing while the site has no address."""
    return f"{baseurl.rstrip('/')}/{FOLDER}/{wheel_name(root)}" if baseurl else ""


def build_wheel(root: Path, out: Path) -> Path:
    """Build the wheel into a folder, without a network and the same to the byte each time; returns its path."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("gla_ref-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as copy:  # building in the checkout would leave files there
        for part in PARTS:
            if (path := root / part).is_dir():
                shutil.copytree(path, Path(copy, part), ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
            else:
                shutil.copy(path, copy)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-index"]
        command = [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), copy]
        subprocess.run(command, check=True, env=os.environ | {"SOURCE_DATE_EPOCH": "315532800"})
    return out / wheel_name(root)


def add_wheel(app, exception):
    if exception is None and app.builder.name == "html":
        build_wheel(Path(app.srcdir), Path(app.outdir, FOLDER))


def offer_wheel(app, pagename, templatename, context, doctree):
    """A download button under that of the notebook."""
    for group in context.get("header_buttons", []):
        buttons = group.get("buttons", [])
        for place, button in enumerate(buttons):
            if button.get("label") == "download-notebook-button":
                wheel = {
                    "type": "link",
                    "url": f"{context['pathto'](FOLDER, 1)}/{wheel_name(Path(app.srcdir))}",
                    "text": ".whl",
                    "icon": "fas fa-cube",
                    "tooltip": "Download the package that the notebook needs",
                    "label": "download-package-button",
                }
                buttons.insert(place + 1, wheel)
                break


def setup(app):
    app.connect("html-page-context", offer_wheel, priority=503)  # after gla_book has placed the notebook's
    app.connect("build-finished", add_wheel)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
