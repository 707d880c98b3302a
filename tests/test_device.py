"""The device where kernels run: a GPU with or without bfloat16, or the interpreter."""

import importlib
import os

import pytest
import torch
from harness import interpreted

from gla_ref.kernels import find_device


@pytest.fixture
def machine(monkeypatch):
    """Pretend a GPU of this name and compute capability, or none."""

    def pretend(name=None, capability=None):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr("torch.cuda.is_available", lambda: name is not None)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)

    return pretend


def test_without_a_gpu_triton_is_told_to_interpret(machine):
    machine()
    found = find_device()
    assert found[:2] == ("cpu", torch.float32) and "No GPU" in found.sentence
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize(
    "name, capability, dtype",
    [
        ("NVIDIA H200", (9, 0), torch.bfloat16),
        ("NVIDIA A100-SXM4-40GB", (8, 0), torch.bfloat16),
        ("Tesla T4", (7, 5), torch.float16),
    ],
)
def test_a_gpu_is_named_with_its_half_precision(machine, name, capability, dtype):
    machine(name, capability)
    found = find_device()
    assert found[:2] == ("cuda", dtype) and name in found.sentence
    assert ("no bfloat16" in found.sentence) == (dtype == torch.float16)
    assert "TRITON_INTERPRET" not in os.environ and len(found.sentence) <= 75


def test_the_interpreter_can_be_asked_for_on_a_gpu(machine, monkeypatch):
    machine("NVIDIA H200", (9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = find_device()
    assert found[:2] == ("cpu", torch.float32) and "GPU not used" in found.sentence


SUM = """
import triton
import triton.language as tl

@triton.jit
def total(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N)), 0))
"""


@interpreted
def test_what_was_interpreted_leaves_triton_as_it_was(tmp_path, monkeypatch):
    """Else nothing can be compiled after a kernel that calls another function."""
    core = pytest.importorskip("triton.language.core")
    (tmp_path / "sum_of_a_block.py").write_text(SUM)
    monkeypatch.syspath_prepend(tmp_path)
    before, out = dict(vars(core)), torch.zeros(1)
    importlib.import_module("sum_of_a_block").total[(1,)](torch.ones(8), out, N=8)
    assert out.item() == 8 and dict(vars(core)) == before and core.is_builtin(core.load)


def test_what_the_interpreter_works_out_once_is_each_tensors_own():
    """Fields of types and tensors of one shape: an element's type, a layout and a value are not mixed up."""
    core = pytest.importorskip("triton.language.core")
    gluon = pytest.importorskip("triton.experimental.gluon.language._core")
    find_device()
    single, half = (core.block_type(x, [4, 8]) for x in (core.float32, core.float16))
    layouts = [gluon.BlockedLayout([1, n], [4, 8], [1, 1], [1, 0]) for n in (1, 2)]
    kinds = [single, half, *(gluon.distributed_type(core.float32, [4, 8], x) for x in layouts)]
    for n, kind in enumerate([*kinds, core.float32, core.pointer_type(core.float32)]):
        x = core.tensor(n, kind)
        assert (x.handle, x.type, x.dtype) == (n, kind, kind.scalar)
        block = kind in kinds
        assert [s.value for s in x.shape] == [4, 8] * block and x.numel.value == 32**block
    assert [x.layout for x in kinds[2:]] == layouts and single != half and str(single) != str(half)
    with pytest.raises(ValueError, match="power of 2"):
        core.block_type(core.float32, [3])
