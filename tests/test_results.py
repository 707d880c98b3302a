"""Reading measurements: the right file, the right records, nothing where there is none."""

import json

import pytest

from gla_ref import results


@pytest.fixture
def folder(tmp_path):
    record = {"suite": "flash", "K": 64, "ms": 1.0, "correct": True}
    records = [record, record | {"K": 128}, record | {"ms": None}, record | {"correct": False}]
    for gpu in ("NVIDIA A100", "NVIDIA H200"):
        environment = {"gpu": gpu, "torch": "2.11.0+cu130", "triton": "3.6.0"}
        content = {"environment": environment, "records": records}
        (tmp_path / f"{gpu[7:].lower()}.json").write_text(json.dumps(content))
    (tmp_path / "a-steps.json").write_text('{"environment": {"gpu": "NVIDIA A100"}, "steps": [1]}')
    (tmp_path / "0-test-gpu.json").write_text('{"passed": 3}')
    return tmp_path


def test_load_by_gpu(folder):
    assert results.load("h200", folder)["environment"]["gpu"] == "NVIDIA H200"
    assert results.load(None, folder)["environment"]["gpu"] == "NVIDIA A100"
    assert results.load(None, folder, kind="steps")["steps"] == [1]
    assert results.load("B200", folder) is None and results.load(None, folder / "none") is None


def test_select_takes_what_was_timed_and_correct(folder):
    data = results.load("H200", folder)
    assert [r["K"] for r in results.select(data)] == [64, 128]
    assert [r["K"] for r in results.select(data, suite="flash", K=128)] == [128]
    assert results.select(data, suite="linear") == []


def test_environment_names_gpu_versions_and_commit(monkeypatch):
    monkeypatch.setenv("GLA_REF_COMMIT", "abc")
    found = results.environment("X", peers=("no-such-package", "numpy"))
    assert (found["gpu"], found["commit"]) == ("X", "abc") and found["torch"]
    assert found["peers"]["no-such-package"] is None and found["peers"]["numpy"]
    assert {"driver", "peers"} & results.environment(None).keys() == set()


def test_file_is_named_by_the_gpu():
    assert results.file("NVIDIA H200 check").name == "nvidia-h200-check.json"


def test_label_names_gpu_and_versions(folder):
    assert results.label(results.load("h200", folder)) == "NVIDIA H200, PyTorch 2.11.0, Triton 3.6.0"
