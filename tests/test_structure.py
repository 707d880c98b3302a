"""The work of a form, not only its results: operators are counted as they are dispatched."""

import ast
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import LINEAR, Dispatched, inputs, options, pairs

import gla_ref

FORMS = gla_ref.FORMS


def operators(mechanism, form, T, **extra) -> int:
    args, _ = inputs(mechanism, B=1, T=T, H=1, K=2, V=3)
    with torch.no_grad(), Dispatched() as run:
        FORMS[mechanism][form](*args, **(extra or options(form, C=64, c=32)))
    return len(run.calls)


def test_every_form_has_its_structure():
    """A new form must be given one here."""
    seen, per_token = set(), {}
    for mechanism, form in pairs(*LINEAR):
        n = {T: operators(mechanism, form, T) for T in (128, 256, 512, 1024)}
        steps = [n[2 * T] - n[T] for T in (128, 256, 512)]
        if form in ("parallel", "parallel_log"):
            assert steps == [0, 0, 0], "constant in T"
        elif form == "scan":
            assert steps[0] == steps[1] == steps[2] > 0, "grows with log2 T"
        else:
            assert steps[1] == 2 * steps[0] and steps[2] == 4 * steps[0] > 0, "grows with T"
            per_token[form] = steps[2] / 512
            assert form == "recurrent" or per_token[form] < per_token["recurrent"] / 3, "T / C, not T"
        seen.add(form)
    assert seen == {"recurrent", "parallel", "parallel_log", "scan", "chunkwise", "chunkwise_two_level"}


@pytest.mark.parametrize("mechanism", LINEAR)
def test_chunkwise_grows_with_the_number_of_chunks(mechanism):
    n = {C: operators(mechanism, "chunkwise", 128, C=C) for C in (128, 64, 32, 16)}
    assert n[32] - n[64] == 2 * (n[64] - n[128]) and n[16] - n[32] == 2 * (n[32] - n[64]) > 0


def test_softmax_forms():
    softmax = partial(operators, "softmax_attention")
    assert softmax("parallel", 16) == softmax("parallel", 64)
    n = [softmax("recurrent", T) for T in (16, 32, 64)]
    assert n[2] - n[1] == 2 * (n[1] - n[0]) > 0
    n = [softmax("flash", T, block_q=16, block_k=16) for T in (16, 32, 64)]
    assert n[1] - n[0] < n[2] - n[1] <= 8 * n[0], "grows with the number of tiles"


SOURCE = Path(gla_ref.__file__).parent
FLAT = [path.stem for path in SOURCE.glob("*.py") if path.stem not in ("__init__", "__main__", "context_parallel")]


def imports(path: Path) -> set[str]:
    """The modules of gla_ref that a file imports, but for what it imports as a program."""
    package, found = ["gla_ref", *path.relative_to(SOURCE).parts[:-1]], set()
    body = [node for node in ast.parse(path.read_text()).body if "__name__ ==" not in ast.unparse(node)]
    for node in (x for statement in body for x in ast.walk(statement)):
        if isinstance(node, ast.ImportFrom):
            home = package[: len(package) + 1 - node.level] if node.level else []
            found |= {".".join([*home, *filter(None, [node.module]), alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("gla_ref")}


@pytest.mark.parametrize(
    "files, may",
    [
        ([SOURCE / f"{name}.py" for name in FLAT], FLAT),
        ((SOURCE / "kernels" / "launch").glob("*.py"), ["kernels.launch", *FLAT]),
        ((SOURCE / "pages").glob("[a-z]*.py"), []),
    ],
    ids=["mathematics", "launch", "pages"],
)
def test_the_ground_floor_imports_nothing_above(files, may):
    assert (files := [*files]), "the folder has moved"
    ours = {(path.name, name) for path in files for name in imports(path)}
    assert {x for x in ours if not x[1].startswith(tuple(f"gla_ref.{name}" for name in may))} == set()
