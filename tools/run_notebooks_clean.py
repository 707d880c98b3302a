"""Run the notebooks as a reader without a checkout does: from the site, in a Python that lacks the book's package.

    python tools/run_notebooks_clean.py [NN_slug ...] [--jobs N]

Makes a temporary virtual environment with Jupyter and all that the package needs, but not the package, and serves the
built site (make book) on this machine. PyTorch, Triton and CUDA, 6 GB of files, are links to this Python's own. Each
notebook is downloaded into an empty folder and runs top to bottom in an environment of its own: its first cell installs
the site's wheel by its address. Triton comes with PyTorch, as on Colab; the kernels run on the GPU, or are interpreted
where there is none. A notebook that takes more GPU memory than a T4 has fails.

A GPU host without a network brings its own PyTorch and Triton; what it lacks comes in a folder and is installed whole
(all but the package), and the folder's wheel and the committed notebooks stand in for the site:

    pip wheel --no-deps --wheel-dir build/wheels .
    pip download --only-binary=:all: --python-version 3.12 --dest build/wheels nbclient ipykernel
    python tools/run_notebooks_clean.py --offline build/wheels     # there
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions, files
from pathlib import Path
from threading import Thread
from urllib.request import urlretrieve

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_build" / "html"
FOLDER = "_sources/book"  # where the site has its notebooks and the wheel
#: the wheel's dependencies are loose; take the versions that the book was tested with
PACKAGES = ["nbclient", "ipykernel"]
#: execute a notebook; prints the bytes of GPU memory that it took
RUN = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
peak = "import torch; torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0"
notebook.cells.append(nbformat.v4.new_code_cell(peak))
nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
print(notebook.cells[-1].outputs[0]["data"]["text/plain"])
"""
ROOM = 15e9  # bytes of a T4


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing on the terminal."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """The address under which this machine serves the site."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def run(*command: str | Path, **options) -> None:
    subprocess.run([str(part) for part in command], check=True, **options)


def packages_of(python: str | Path) -> Path:
    """The folder of that Python's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    printed = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout
    return Path(printed.strip())


def lay_out(site: Path, wheel: Path) -> Path:
    """Put the committed notebooks and the wheel where a built site has them; return the wheel there."""
    folder = site / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "notebooks", folder)
    return Path(shutil.copy(wheel, folder))


def link_heavy(folder: Path) -> Path:
    """A folder with links to this Python's PyTorch, Triton and CUDA; pip replaces nothing that lies there."""
    names = [d.name for d in distributions() if re.fullmatch("torch|triton|(nvidia|cuda)[-_].*", d.name)]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for top in {file.parts[0] for name in names for file in files(name) or ()} - {".."}:
        (folder / top).symlink_to(packages_of(sys.executable) / top)
    return folder


def install(python: Path, wheel: Path, offline: Path | None) -> None:
    """Install what the package and notebooks need, but not the package."""
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    if offline:
        others = [path for path in offline.glob("*.whl") if path.name != wheel.name]
        run(*pip, "install", "--no-index", "--no-deps", *others)
    else:
        run(*pip, "install", f"{wheel}[notebook]", *PACKAGES, "--constraint", ROOT / "requirements.txt")
        run(*pip, "uninstall", "--yes", "gla-ref")


def new_environment(python: Path, folder: Path, shared: list[Path]) -> Path:
    """An environment that finds the shared packages (pip too), but nothing else; its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", "--without-pip", folder)
    python_there = folder / "bin" / "python"
    (packages_of(python_there) / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    return python_there


def download(address: str, name: str, folder: Path) -> Path:
    """A notebook in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path = folder / f"{name}.ipynb"
    urlretrieve(f"{address}/{FOLDER}/{name}.ipynb", path)
    return path


def set_address(path: Path, address: str) -> None:
    """Let the notebook's first cell expect the wheel there, as `html.baseurl` would; until then it is empty."""
    notebook = json.loads(path.read_text())
    first = "".join(notebook["cells"][0]["source"])
    notebook["cells"][0]["source"], times = re.subn(r'(?<=else ")[^"]*(?="$)', address, first, flags=re.MULTILINE)
    assert times == 1, f"{path.name}: its first cell has no place for an address"
    path.write_text(json.dumps(notebook))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks without .ipynb (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="notebooks side by side")
    parser.add_argument("--offline", type=Path, help="a folder of wheels; torch is the host's own")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="gla-clean-"))
    site = work / "site" if args.offline else SITE
    if args.offline:
        lay_out(site, *args.offline.glob("gla_ref-*.whl"))
    wheel = next((site / FOLDER).glob("gla_ref-*.whl"), None)
    if wheel is None:
        sys.exit("needs a built site (make book)")
    python = work / "venv" / "bin" / "python"
    run(sys.executable, "-m", "venv", work / "venv")
    # the host's packages follow its own, also where the host's Python is an environment itself
    shared = [packages_of(python), packages_of(sys.executable) if args.offline else link_heavy(work / "heavy")]
    (shared[0] / "host.pth").write_text("".join(f"{path}\n" for path in shared[1:]))
    install(python, wheel, args.offline)

    names = args.names or [path.stem for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    left_out = ("PYTHONPATH", "TRITON_INTERPRET")  # notebooks find out by themselves
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"no_proxy": "127.0.0.1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env |= {"TRITON_CACHE_DIR": str(work / "triton")}  # nothing was compiled before
    failed = []

    def chapter(name: str) -> tuple[subprocess.CompletedProcess, float]:
        """Run a notebook in an environment of its own; the seconds that it takes."""
        path, own = download(address, name, work / "readers" / name), new_environment(python, work / name, shared)
        set_address(path, f"{address}/{FOLDER}/{wheel.name}")
        start = time.perf_counter()
        result = subprocess.run([own, "-c", RUN, path], cwd=path.parent, env=env, capture_output=True, text=True)
        if not result.returncode and not (packages_of(own) / "gla_ref").is_dir():
            sys.exit(f"{path.name} did not install the package: it found another one")
        return result, time.perf_counter() - start

    with served(site) as address, ThreadPoolExecutor(args.jobs) as pool:
        for name, (result, seconds) in zip(names, pool.map(chapter, names), strict=True):
            print(f"{name:32} {'failed' if result.returncode else 'ok':8} {seconds:5.1f} s", flush=True)
            if result.returncode:
                failed.append(name)
                print(result.stderr[-3000:])
                continue
            if (peak := int(result.stdout.splitlines()[-1])) > ROOM:
                failed.append(name)
                print(f"it took {peak / 1e9:.1f} GB of the GPU, and a T4 has {ROOM / 1e9:.0f}")
    print(f"{len(names) - len(failed)} of {len(names)} notebooks run with only {wheel.name}, from the site")
    shutil.rmtree(work)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
