"""Is the site ready to be published: python tools/publishing.py prints publish=true or publish=false, and why.

It is once _config.yml says where the repository and the site are, and the site that is built says the same.
"""

import sys
from pathlib import Path

import yaml
from browser import ROOT, SITE


def reasons(settings: dict, site: Path) -> list[str]:
    """What is missing; empty when nothing is."""
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


if __name__ == "__main__":
    missing = reasons(yaml.safe_load((ROOT / "_config.yml").read_text()), SITE)
    print(f"publish={'false' if missing else 'true'}")
    print("\n".join(missing), file=sys.stderr)
