"""The program that trains in many processes on one GPU: what it calls wrong, and that it runs."""

import pytest
import stress_gpu
from stress_gpu import Process, Training, is_right, judged, read, rounds_of

GLA, OTHER, PRODUCTS = Training("gla", "recall"), Training("softmax", "recall"), Training("none", "products")
ONE, NAN = 0x3F800000, 0x7FC00000  # bits of float32


def told(training, *losses, status=0, error=""):
    return Process(training, losses, ("hopper.gla_forward.walk",), status, error)


def test_equal_trainings_are_right():
    """Only the steps that all processes made are compared."""
    (record,) = judged([told(GLA, ONE, 2), told(GLA, ONE, 2, 3)])
    assert is_right(record) and record["compared"] == 2 and record["steps"] == 5
    assert record["kernels"] == ["hopper.gla_forward.walk"]


@pytest.mark.parametrize(
    "processes",
    [
        [told(GLA, ONE, 2), told(GLA, ONE, 3)],
        [told(GLA, ONE, 2), told(GLA, ONE, status=1, error="illegal memory access")],
        [told(GLA, ONE, NAN), told(GLA, ONE, NAN)],
        [told(GLA), told(GLA)],
        [told(GLA, ONE), told(GLA)],
        [told(PRODUCTS, ONE, 2)],
    ],
    ids=["another loss", "a death", "no number", "no step", "nothing to compare with", "another product"],
)
def test_what_is_wrong(processes):
    right, wrong = judged([told(OTHER, ONE), told(OTHER, ONE), *processes])
    assert is_right(right) and not is_right(wrong)


def test_every_training_runs_at_least_twice():
    trainings = [Training(mixer, size) for size in ("recall", "language") for mixer in "abcdefg"]
    for processes in (2, 3, 14):
        rounds = rounds_of(trainings, processes)
        assert all(len(group) == processes for group in rounds)
        assert all(sum(group.count(t) for group in rounds) >= 2 for t in trainings)
    assert rounds_of([GLA], 14) == [[GLA] * 14]


def test_what_a_process_printed():
    """Losses, then the kernels; of all other lines the one that names an error."""
    process = read(GLA, "[1, 2]\nTraceback\n[3]\nAcceleratorError: CUDA error: no memory\nCompile with ...\n", 1)
    assert process == Process(GLA, (1, 2, 3), (), 1, "AcceleratorError: CUDA error: no memory")
    assert read(GLA, '{"kernels": ["a"]}', 0).kernels == ("a",)


@pytest.mark.deep
def test_it_runs(capsys):
    """Two processes of GLA and the one that multiplies, on the CPU."""
    assert stress_gpu.main("--device cpu --mixers gla --sizes recall --processes 2 --seconds 1".split()) == 0
    assert "2 of 2 are right" in capsys.readouterr().out
