"""Compile all kernels that the notebooks launch for the cards that Colab lends, without one.

    python tools/compile_notebooks.py [NN_slug ...] [--card T4 L4 A100] [--triton 3.6.0] [--record]

Every notebook that asks for a GPU runs, cell by cell, in a process of its own that describes such a card: torch.cuda
says that there is one, tensors of the device "cuda" lie in the CPU's memory, and Triton compiles each launch for the
card but runs none. So the notebook takes the sizes, dtypes, tiles and kernels that it takes on the card. Results are
not computed: `assert` is left out, and so are the numbers that cells print.

A cell must not raise, and a launch must compile and fit the card's shared memory. --record writes
benchmarks/results/colab.json for the status page. The version of Triton is Colab's, by tools/colab.txt, unless
another is named.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import nbformat
import other_tritons
import torch
from tabulate import tabulate
from torch.overrides import TorchFunctionMode

from gla_ref import results
from gla_ref.kernels.launch.hardware import CLASSES

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "colab.json"
CARDS = {"T4": 75, "L4": 89, "A100": 80}  # the cards' classes of GPU
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def colab() -> dict[str, str]:
    """Versions of the packages that a Colab with a GPU has, by name."""
    lines = (ROOT / "tools" / "colab.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def asking() -> list[str]:
    """Notebooks that ask for a GPU; the others launch no kernel."""
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return [path.stem for path in paths if "find_device()" in path.read_text()]


class NoAsserts(ast.NodeTransformer):
    """Leave out `assert`, since results are not computed."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return ast.copy_location(ast.Pass(), node)


class OnCard(TorchFunctionMode):
    """Let tensors say that they are on the card, and make all of them on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function == torch.Tensor.device.__get__:
            return CUDA if args[0].device.type == "cpu" else args[0].device
        if function == torch.Tensor.is_cuda.__get__:
            return args[0].device.type == "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        args, kwargs = [on_cpu(x) for x in args], {name: on_cpu(x) for name, x in (kwargs or {}).items()}
        return function(*args, **kwargs)


class Generator(torch.Generator):
    """A generator of random numbers for the card, on the CPU."""

    def __new__(cls, device="cpu"):
        return super().__new__(cls, on_cpu(device))


def on_cpu(x):
    """The CPU in place of a CUDA device; anything else as it is."""
    if isinstance(x, torch.device):
        return CPU if x.type == "cuda" else x
    return "cpu" if isinstance(x, str) and re.fullmatch(r"cuda(:\d+)?", x) else x


def describe(card: str, patch: Callable) -> None:
    """Let torch.cuda describe a card."""
    hardware = CLASSES[f"sm_{CARDS[card]}"]
    properties = SimpleNamespace(name=card, multi_processor_count=hardware.multiprocessors)
    answers = {
        "is_available": True,
        "get_device_name": card,
        "get_device_capability": divmod(CARDS[card], 10),
        "get_device_properties": properties,
        "current_device": 0,
        "device_count": 0,  # no generator of random numbers is there to be kept
        "synchronize": None,
        "is_current_stream_capturing": False,
    }
    for name, answer in answers.items():
        patch(torch.cuda, name, lambda *_, answer=answer: answer)
    patch(torch.cuda, "device", lambda _: nullcontext())
    patch(torch, "Generator", Generator)
    patch(torch._C, "_cuda_getDevice", lambda: 0)
    patch(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)


class Compiler:
    """Compile launches instead of running them, and keep a row for each that is new.

    Attributes:
        rows: kernel, tiles, registers, bytes spilled and shared memory of the launches of a notebook.
    """

    def __init__(self, card: str):
        self.card, self.rows, self.cell = card, [], ""

    def put_in(self, patch: Callable) -> None:
        """Take the place of Triton's and the package's launches."""
        import compile_kernels
        import triton

        from gla_ref.book import notebook
        from gla_ref.kernels.launch import program

        self.tools, self.run = compile_kernels, triton.JITFunction.run
        compile_kernels.Target.arch = CARDS[self.card]
        triton.runtime.driver.set_active(compile_kernels.Target())
        triton.knobs.compilation.always_compile = triton.knobs.nvidia.dump_ptxas_log = True
        patch(notebook, "sci", str)  # a result that is not computed may be NaN
        patch(triton.testing, "do_bench", lambda f, **_: (f(), 1.0)[1])
        patch(triton.JITFunction, "run", lambda kernel, *args, **options: self.launch(kernel, args, options))
        patch(program, "compiled", lambda launches, _, twins: [self.planned(x) for x in [*launches, *twins()]])
        patch(program, "launcher", lambda *_: lambda values: None)
        for kind, name in ((program.Planned, "find"), (program.Program, "__call__")):
            patch(kind, name, self.on_card(getattr(kind, name)))

    def on_card(self, method: Callable) -> Callable:
        """A method that runs on the card in a backward pass too, where autograd leaves modes."""

        def entered(*args):
            with nullcontext() if torch.empty(0).is_cuda else OnCard():
                return method(*args)

        return entered

    def launch(self, kernel, args: tuple, options: dict):
        """A launch as cells and pages write it, and by the package's own `warmup`."""
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        options["warmup"] = True
        return self.keep(kernel.fn, given, lambda: self.run(kernel, *args, **options))

    def planned(self, launch):
        """A launch of a plan, which comes to `launch` by Triton's warmup."""
        from gla_ref.kernels.launch.program import compile_launch

        return compile_launch(launch)

    def keep(self, function: Callable, given: dict, make: Callable):
        """Compile by `make`; a row for what the launch needs of the card."""
        dtypes = [x.dtype for x in (getattr(x, "base", x) for x in given.values()) if hasattr(x, "dtype")]
        row = {"kernel": f"{function.__module__}.{function.__name__}"}
        row["dtype"] = str(dtypes[0]).removeprefix("torch.") if dtypes else ""
        row["tiles"] = " ".join(f"{n}={given[n]}" for n in self.tools.TILES if given.get(n) is not None)
        row |= {"warps": given.get("num_warps", 4), "failed": ""}
        kernel = None
        try:
            kernel, registers, spilled = self.tools.assembled(make)
            room = CLASSES[f"sm_{CARDS[self.card]}"].shared_memory
            row |= {"registers": registers, "spilled": spilled, "shared": kernel.metadata.shared}
            if row["shared"] > room:
                row["failed"] = f"{row['shared']} bytes of shared memory of {room}"
        except Exception as error:  # whatever the compiler says
            row["failed"] = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        self.rows += [] if row in self.rows else [row]
        return kernel


def told(error: BaseException) -> str:
    """An error in a line, and the line of code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0][:300]} ({Path(last.filename).name}, line {last.lineno}: {last.line})"


def run_notebook(path: Path | str, card: str) -> dict:
    """Run a notebook's cells as on a card, in this process, which is good for nothing else afterwards.

    Returns:
        {"rows": what its launches need, "raised": the error of each cell that raised}.
    """
    from IPython.core.interactiveshell import InteractiveShell

    os.environ["MPLBACKEND"] = "agg"
    describe(card, setattr)
    compiler, raised = Compiler(card), []
    compiler.put_in(setattr)
    shell = InteractiveShell.instance()
    shell.ast_transformers.append(NoAsserts())
    shell.showtraceback = lambda *_, **__: None
    with OnCard(), redirect_stdout(StringIO()):
        for n, cell in enumerate(nbformat.read(path, 4).cells):
            if cell.cell_type == "code" and "install" not in cell.metadata.get("tags", []):
                done = shell.run_cell(cell.source)
                if error := done.error_before_exec or done.error_in_exec:
                    raised.append(f"cell {n}: {told(error)}")
    return {"rows": compiler.rows, "raised": raised}


def in_own_process(name: str, card: str, triton: str) -> dict:
    """`run_notebook` with a version of Triton."""
    place = other_tritons.folder(triton)
    path = [*[str(place)] * (place is not None), str(ROOT / "src"), str(ROOT / "tools")]
    env = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"} | {"PYTHONPATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory() as there:
        kept = Path(there, "found.json")
        command = [sys.executable, __file__, name, "--card", card, "--own", str(kept)]
        done = subprocess.run(command, cwd=there, env=env | {"TRITON_CACHE_DIR": there}, capture_output=True, text=True)
        if not kept.exists():
            sys.exit(f"{name} on {card}: no result\n{done.stderr[-3000:]}")
        return json.loads(kept.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="notebooks without .ipynb (default: all that ask for a GPU)")
    parser.add_argument("--card", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--triton", type=other_tritons.version, metavar="VERSION", default=colab()["triton"])
    parser.add_argument("--record", action="store_true", help="write the record that the status page reads")
    parser.add_argument("--own", type=Path, help=argparse.SUPPRESS)  # one notebook on one card, in this process
    args = parser.parse_args()
    if args.own:
        args.own.write_text(json.dumps(run_notebook(ROOT / "notebooks" / f"{args.names[0]}.ipynb", args.card[0])))
        return 0
    rows, wrong = [], []
    for card in args.card:
        for name in args.names or asking():
            found, where = in_own_process(name, card, args.triton), f"{name} on {card}"
            print(f"{where}: {len(found['rows'])} kernels", flush=True)
            print(tabulate(found["rows"], headers="keys", tablefmt="plain"), flush=True)
            wrong += [f"{where}: {text}" for text in found["raised"]]
            wrong += [f"{where}: {row['kernel']}: {row['failed']}" for row in found["rows"] if row["failed"]]
            rows += [{"card": card, "chapter": name} | row for row in found["rows"]]
    print("\n".join(wrong) or f"{len(rows)} kernels compiled")
    if args.record and not wrong:
        results.write(RECORD, results.environment(None) | {"triton": args.triton}, "colab", rows)
        print(f"The record: {RECORD}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
