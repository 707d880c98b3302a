"""The notebooks on Colab's cards: all kernels are compiled for them, so failures there are found here."""

import json
from pathlib import Path

import pytest
from cases import ROOT, in_process
from packaging.requirements import Requirement

pytest.importorskip("triton", reason="Triton exists for Linux only")
compile_notebooks = pytest.importorskip("compile_notebooks", reason="needs nbformat")

from gla_ref import results
from gla_ref.kernels.launch.hardware import CLASSES
from gla_ref.kernels.launch.versions import MEASURED


def run(notebook: Path, card: str) -> dict:
    """The findings of `run_notebook`, in a process of its own."""
    code = f"import json, compile_notebooks as tool; print(json.dumps(tool.run_notebook({str(notebook)!r}, {card!r})))"
    return json.loads(in_process("-c", code).splitlines()[-1])


def write(path: Path, *cells: str) -> Path:
    """A notebook of code cells."""
    from nbformat import v4, write

    write(v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells]), path)
    return path


def test_colab_needs_nothing_but_the_wheel():
    """The versions that Colab has satisfy the package's and the notebooks' dependencies, so that it keeps them."""
    import tomllib

    has, project = compile_notebooks.colab(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [Requirement(x) for x in (*project["dependencies"], *extras["triton"], *extras["notebook"])]
    assert all(x.name == "gla-ref" or x.specifier.contains(has[x.name]) for x in needed)
    assert has["triton"] in MEASURED


def test_the_record_has_every_notebook_on_every_card():
    rows = results.read(compile_notebooks.RECORD, "colab")
    assert {r["card"] for r in rows} == {*compile_notebooks.CARDS}
    assert {r["chapter"] for r in rows} <= {*compile_notebooks.asking()}
    for r in rows:
        room = CLASSES[f"sm_{compile_notebooks.CARDS[r['card']]}"].shared_memory
        assert r["shared"] <= room and not r["failed"], r
        assert r["card"] != "T4" or r["dtype"] != "bfloat16"


@pytest.mark.deep
def test_cells_run_as_on_a_card_and_what_fails_is_found(tmp_path):
    kernel = """
import torch, triton, triton.language as tl
@triton.jit
def ones(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 1.0)
"""
    call = "ones[(1,)](torch.zeros({0}, dtype=torch.float16, device='cuda'), {0})"
    cells = [
        "from gla_ref.kernels import find_device; print(find_device()); assert False",
        *(kernel, call.format(4), call.format(3)),
        "from gla_ref.kernels.gla import gla",
        "x = [torch.zeros(1, 32, 1, 16, device='cuda').requires_grad_() for _ in range(4)]",
        "torch.autograd.grad(gla(*x)[0].sum(), x)",
        "torch.zeros(2).to(torch.bfloat16).no_such_name",
    ]
    found = run(write(tmp_path / "own.ipynb", *cells), "T4")
    (raised,) = found["raised"]
    assert raised.startswith("cell 7: AttributeError") and "no_such_name" in raised
    own = [row for row in found["rows"] if row["kernel"].endswith(".ones")]
    assert own[0]["failed"] == "" and "power of 2" in own[1]["failed"], own
    names = {row["kernel"].rpartition(".")[2] for row in found["rows"]}
    assert {"walk", "mend", "gradients"} <= names, "the gradient's kernels are launched in a backward pass"
