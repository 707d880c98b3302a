"""Icons without their 1.5 MB script, 150 KB font and 90 KB of names: only those that the book's pages show.

The theme brings all of Font Awesome. Here its style sheet is copied without the icons that no page has; their fonts are
cut down to what is left and put into the sheet itself. ``templates/static/webpack-macros.html`` leaves the script out.
"""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pydata_sphinx_theme
from fontTools import subset
from fontTools.ttLib import TTFont

#: the icons by name; a test looks for others in the built site
ICONS = (
    "angle-left angle-right arrow-up bars chevron-down circle-half-stroke code cube download expand file file-pdf "
    "github lightbulb list magnifying-glass moon pencil-alt rocket sun xmark"
).split()

THEME = Path(pydata_sphinx_theme.__file__).parent / "theme" / "pydata_sphinx_theme" / "static"
SHEET = "styles/pydata-sphinx-theme.css"
#: one or several names, and the character in the icon font
NAMED = re.compile(r'((?:\.fa-[\w-]+:before,?)+)\{content:"(\\[^"]+)"\}')
FACE = re.compile(r"@font-face\{[^}]*?font-family:([^;]+);[^}]*?url\(\.\./([^)]+)\.woff2\)[^}]*\}")


def keep_named(found: re.Match) -> str:
    """The rule of an icon that is used, with nothing for a screen reader to say; else nothing."""
    names = re.findall(r"\.fa-([\w-]+):before", found[1])
    character = f'"{found[2]}"'
    return f"{found[1]}{{content:{character};content:{character}/''}}" if set(names) & set(ICONS) else ""


def small_font(path: Path, characters: set[int]) -> str:
    """The part of a font that has these characters, as a data address; empty when it has none of them."""
    font = TTFont(path)
    if not characters & font.getBestCmap().keys():
        return ""
    cut = subset.Subsetter(subset.Options(layout_features=[], hinting=False))
    cut.populate(unicodes=characters)
    cut.subset(font)
    font.flavor, packed = "woff", io.BytesIO()
    font.save(packed)
    return "data:font/woff;base64," + base64.b64encode(packed.getvalue()).decode()


def small_sheet(sheet: str) -> str:
    """The theme's style sheet with the icons that are used, their fonts inside."""
    sheet = NAMED.sub(keep_named, sheet)
    # also those that stand in variables and in rules of the theme's own
    characters = {int(code, 16) for code in re.findall(r"\\(f[0-9a-f]{3})\b", sheet)}

    def face(found: re.Match) -> str:
        address = small_font(THEME / f"{found[2]}.ttf", characters)
        return re.sub(r"src:[^;}]+", f"src:url({address})", found[0]) if address else ""

    return FACE.sub(face, sheet).replace("/*# sourceMappingURL=pydata-sphinx-theme.css.map*/", "")


def write_sheet(app):
    """Put the smaller sheet where static files are looked for last, so that it takes the place of the theme's."""
    folder = Path(app.srcdir) / "_build" / "theme"
    (folder / SHEET).parent.mkdir(parents=True, exist_ok=True)
    (folder / SHEET).write_text(small_sheet((THEME / SHEET).read_text()))
    app.config.html_static_path.append(str(folder))


def setup(app):
    app.connect("builder-inited", write_sheet)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
