"""Reading measurements: the right file, the right records, nothing where there is none."""

import json
import statistics

import pytest
import ranks

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


def test_milliseconds_are_the_median_of_their_samples():
    """So a record that a hand has edited is found."""
    contents = [json.loads(file.read_text()) for file in results.file("X").parent.glob("*.json")]
    lists = [x for content in contents if isinstance(content, dict) for x in content.values() if isinstance(x, list)]
    timed = [r for records in lists for r in records if isinstance(r, dict) and r.get("samples_ms")]
    assert len(timed) > 400
    for r in timed:
        assert r["ms"] == pytest.approx(statistics.median(r["samples_ms"]), rel=2e-4, abs=2e-5), r


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


def test_records_keep_the_version_that_measured_them(tmp_path):
    file, e = tmp_path / "h200.json", {"gpu": "NVIDIA H200", "torch": "2.11.0+cu130"}
    old, new = ({"suite": suite, "triton": version} for suite, version in (("flash", "3.6.0"), ("gla", "3.9.0")))
    results.merge(file, e | {"triton": "3.6.0"}, "records", [old], ["suite"])
    results.merge(file, e | {"triton": "3.9.0"}, "records", [new], ["suite"])
    data = results.load("h200", tmp_path)
    assert [results.label(data, suite=s)[-5:] for s in ("flash", "gla")] == ["3.6.0", "3.9.0"]
    assert results.label(data).endswith("Triton 3.6.0 and 3.9.0") and results.tritons(data) == {"3.6.0", "3.9.0"}


# -- files that several processes write ----------------------------------------------------------


def write(file, who, n):
    for i in range(n):
        results.merge(file, {"gpu": None}, "runs", [{"name": f"{who}/{i}", "x": "y" * 999}], ["name"])


def test_two_processes_lose_no_record(tmp_path):
    file, n = tmp_path / "new" / "r.json", 12
    writers = [ranks.CONTEXT.Process(target=write, args=(file, who, n)) for who in ("a", "b")]
    ranks.start(writers)
    while any(writer.is_alive() for writer in writers):
        if file.exists():
            results.read(file, "runs")  # a whole file at every moment
    assert [writer.exitcode for writer in writers] == [0, 0]
    found = {r["name"] for r in results.read(file, "runs")}
    assert found == {f"{who}/{i}" for who in "ab" for i in range(n)}
    assert {p.name for p in file.parent.iterdir()} <= {"r.json", ".r.json.lock"}


@pytest.mark.parametrize(
    "content", ["", '{"environment": {}, "runs": [', "[1, 2]", '{"environment": {}, "checks": []}', "\x00\xff"]
)
def test_a_corrupt_or_foreign_file_is_named_and_stays(content, tmp_path):
    file = tmp_path / "r.json"
    file.write_text(content, encoding="latin-1")
    for act in (
        lambda: results.read(file, "runs"),
        lambda: results.merge(file, {"gpu": None}, "runs", [{"name": "a"}], ("name",)),
    ):
        with pytest.raises(ValueError, match=r"^results: expected .*r.json.* remove it"):
            act()
    assert file.read_text(encoding="latin-1") == content


def test_load_names_a_corrupt_file(folder):
    (folder / "0.json").write_text("{")
    with pytest.raises(ValueError, match=r"0.json"):
        results.load("h200", folder)


def test_a_missing_file_has_no_records(tmp_path):
    assert results.read(tmp_path / "r.json", "runs") == ()


def test_a_merge_that_fails_leaves_the_old_file(tmp_path):
    file = tmp_path / "r.json"
    results.merge(file, {"gpu": None}, "runs", [{"name": "a"}], ("name",))
    before = file.read_text()
    with pytest.raises(TypeError):
        results.merge(file, {"gpu": None}, "runs", [{"name": "b", "x": object()}], ("name",))
    assert file.read_text() == before and not list(tmp_path.glob("*.part"))


def test_a_wheel_writes_below_the_working_directory(tmp_path, monkeypatch):
    assert results.file("X").parent == results.CHECKOUT / "benchmarks" / "results"
    monkeypatch.setattr(results, "CHECKOUT", tmp_path / "lib" / "python3.11")
    monkeypatch.chdir(tmp_path)
    assert results.file("X") == tmp_path / "benchmarks" / "results" / "x.json"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    results.check_writable(tmp_path / "a" / "r.json")
    assert not list((tmp_path / "a").iterdir())
    (tmp_path / "b").write_text("a file")
    with pytest.raises(OSError, match=r"^results: expected a place to write \S+r.json"):
        results.check_writable(tmp_path / "b" / "r.json")
