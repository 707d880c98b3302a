"""Execute the pages and build the site, unless that was done from the same sources (python tools/build_book.py).

Contents decide, not times: of the sources, of the versions of what builds, and of the files that were made.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

sys.modules["rfc3987_syntax"] = None  # 38 grammars that nbformat's import would build, for formats that no schema has
from filelock import FileLock
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from jupyter_cache.executors.utils import single_nb_execution
from myst_nb.core.read import read_myst_markdown_notebook

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "book" / "_ext"))
import gla_book
import gla_package
import gla_reads

SITE = "_build/html"
SOURCES = "_config.yml", "_toc.yml", "requirements.txt", "book", "notebooks", "benchmarks", "tools/make_notebooks.py"
SOURCES += gla_package.PARTS


def state(root: Path, *made: str) -> str:
    """A digest of all that decides what is built, and of what was made."""
    digest = hashlib.sha256()
    for name in SOURCES + made:
        path = root / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            generated = "__pycache__" in file.parts or file.parent == root / "book" / "api"
            if file.is_file() and not generated:
                digest.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
                digest.update(file.read_bytes())
    # the front page names the tests
    others = sorted(path.name for path in (root / "tests").glob("test_*.py"))
    others += sorted({f"{x.name} {x.version}" for x in distributions()})
    digest.update("\n".join([*others, sys.version, str(shutil.which("node"))]).encode())
    return digest.hexdigest()


def record(root: Path, made: str) -> Path:
    return root / "_build" / f"{Path(made).name}.state"


def fresh(root: Path, made: str) -> bool:
    """Whether `made` (the site or "notebooks") was made from these sources, and left as it was."""
    path = record(root, made)
    return path.exists() and path.read_text() == state(root, made)


def remember(root: Path, made: str) -> None:
    record(root, made).parent.mkdir(exist_ok=True)
    record(root, made).write_text(state(root, made))


def execute(page: Path) -> str:
    """Run a page unless the cache has it and it reads what it read; what went wrong, or nothing."""
    root = page.parents[1]
    notebook, path = read_myst_markdown_notebook(page.read_text()), gla_book.execution_cache(root)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    if not code:
        return ""
    reads = gla_reads.key(root, code)
    with FileLock(path / "lock"), suppress(KeyError):
        if get_cache(path).match_cache_notebook(notebook).data.get("reads") == reads:
            return ""
    result = single_nb_execution(notebook, cwd=str(page.parent), timeout=600, allow_errors=False)
    if result.err is not None:
        return f"{page.name}\n{result.err}"
    with FileLock(path / "lock"):
        bundle = CacheBundleIn(notebook, str(page), data={"execution_seconds": result.time, "reads": reads})
        get_cache(path).cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
    return ""


def execute_pages(root: Path) -> dict[str, str]:
    """Run every page that the cache lacks, several at a time; which failed, and how.

    Jupyter Book, which would run one after the other, then finds them all.
    """
    gla_book.prepare_kernels(root)
    # kernels that another run compiled could hide that a page no longer compiles
    os.environ["TRITON_CACHE_DIR"] = str(root / "_build" / "triton")
    os.environ["OMP_NUM_THREADS"] = "1"  # of pages that run side by side, more threads would wait for one another
    cache, pages = gla_book.execution_cache(root), sorted((root / "book").glob("*.md"), reverse=True)  # long ones first
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / "pages.lock"), ThreadPoolExecutor(min(4, os.cpu_count())) as pool:
        problems = zip(pages, pool.map(execute, pages), strict=True)
        return {page.stem: problem for page, problem in problems if problem}


def build(root: Path, **options) -> subprocess.CompletedProcess:
    """Run Jupyter Book; a warning or a broken cell fails it."""
    main = "import sys; sys.modules['rfc3987_syntax'] = None; from jupyter_book.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "build", str(root), "-W", "-n", "--keep-going", "--all"]
    before = state(root)
    # viewcode keeps its page of a source that did not change, though other names of it may be documented now
    shutil.rmtree(root / SITE / "_modules", ignore_errors=True)
    done = subprocess.run(command, cwd=root, **options)
    if done.returncode == 0 and state(root) == before:  # nobody edited meanwhile
        remember(root, SITE)
    return done


if __name__ == "__main__":
    if fresh(ROOT, SITE):
        print("The book is built from these sources already.")
    else:
        if problems := execute_pages(ROOT):
            sys.exit("\n".join(problems.values()))
        sys.exit(build(ROOT).returncode)
