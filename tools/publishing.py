"""Is the site ready to be published: python tools/publishing.py prints publish=true or publish=false, and why.

It is once _config.yml says where the repository and the site are, and the site that is built says the same, and so do
the package's metadata and README.md, which a package index shows without the repository.
"""

import re
import sys
import tomllib
from pathlib import Path

import yaml
from browser import ROOT, SITE


def reasons(settings: dict, site: Path) -> list[str]:
    """The missing items; empty if there are none."""
    address = settings.get("html", {}).get("baseurl") or ""
    missing = []
    if not settings.get("repository", {}).get("url"):
        missing.append("repository.url is empty in _config.yml")
    if not address:
        return [*missing, "html.baseurl is empty in _config.yml"]
    if not address.startswith("https://"):
        missing.append(f"html.baseurl: expected an address with https://, got {address}")
    front = site / "book" / "index.html"
    if not front.exists():
        missing.append("the site is not built: make book")
    elif f'<link rel="canonical" href="{address.rstrip("/")}/book/index.html"' not in front.read_text():
        missing.append("the site was built for another address: make book")
    missing += [f"the site has no {name}" for name in ("sitemap.xml", "404.html") if not (site / name).exists()]
    return missing


def addresses(settings: dict, project: dict, readme: str) -> list[str]:
    """The addresses that a package index lacks: the project's, and whole ones of README's pictures and links."""
    repository, site = settings.get("repository", {}), settings.get("html", {})
    given, missing = project.get("urls", {}), []
    for name, address in (("Repository", repository.get("url")), ("Documentation", site.get("baseurl"))):
        if not address or given.get(name) != address:
            expected = address or "an address"
            missing.append(f"project.urls.{name}: expected {expected} in pyproject.toml, got {given.get(name)}")
    for picture, link in re.findall(r'<img src="([^"]*)"|\]\(([^)\s]*)\)', readme):
        path, kind = (picture, "raw") if picture else (link, "blob")
        if not path.startswith(("https://", "#")):
            address = repository.get("url") and f"{repository['url']}/{kind}/{repository['branch']}/{path}"
            missing.append(f"README.md: expected {address or 'an address'}, since a package index cannot show {path}")
    return missing


if __name__ == "__main__":
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    missing = reasons(settings, SITE) + addresses(settings, project, (ROOT / "README.md").read_text())
    print(f"publish={'false' if missing else 'true'}")
    print("\n".join(missing), file=sys.stderr)
