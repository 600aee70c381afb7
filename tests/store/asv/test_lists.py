"""benchmarks.json and machine.json: merged, never clobbered; asv's own files are read and written byte for byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asv.benchmarks import Benchmarks
from asv.machine import Machine

from fp8bench.errors import AsvFileBroken, AsvFileError, AsvFileOfOtherVersion, AsvFileTorn
from fp8bench.model import Series
from fp8bench.store.asv.files import (
    definition_of,
    load_benchmarks,
    load_machine,
    merge_benchmarks,
    merge_machine,
    save_benchmarks,
    save_machine,
)

TIME = Series("gemm.Gemm.track_time", "gemm", "time", "s", ("dtype", "n"), (("fp8", "bf16"), (256,)), "1")
ERROR = Series("gemm.Gemm.track_error", "gemm", "error", "", (), (), "2")
FOREIGN = {"name": "time_x", "type": "time", "unit": "seconds", "params": [], "param_names": [], "version": "a", "k": 1}
MACHINE = {"machine": "box", "os": "Linux", "arch": "x86_64", "cpu": "a cpu", "num_cpu": "2", "ram": "1"}


def test_asv_writes_the_same_benchmarks(tmp_path: Path) -> None:
    """Sorted and indented, so that its next run changes nothing that is the same."""
    definitions = [FOREIGN, definition_of(TIME), definition_of(ERROR)]
    conf = SimpleNamespace(results_dir=str(tmp_path), benchmark_dir="suites")
    Benchmarks(conf, definitions).save()
    theirs = tmp_path / "benchmarks.json"
    before = theirs.read_bytes()
    assert merge_benchmarks({}, [TIME, ERROR]) | {"time_x": FOREIGN} == load_benchmarks(theirs)
    save_benchmarks(theirs, load_benchmarks(theirs))
    assert theirs.read_bytes() == before
    assert Benchmarks.load(conf)[TIME.name] == definition_of(TIME)


def test_a_definition_says_what_was_given() -> None:
    """asv's readers need name, unit, params and version; the rest is for its runner."""
    assert definition_of(TIME) == {
        "name": "gemm.Gemm.track_time", "type": "track", "unit": "s", "params": [["'fp8'", "'bf16'"], ["256"]],
        "param_names": ["dtype", "n"], "version": "1", "code": "", "timeout": 60.0,
    }  # fmt: skip


def test_merging_never_drops_a_name() -> None:
    """Those of asv's own suites, and those of an earlier run."""
    old = {"time_x": FOREIGN}
    merged = merge_benchmarks(old, [TIME])
    assert merged == {"time_x": FOREIGN, TIME.name: definition_of(TIME)} and old == {"time_x": FOREIGN}
    assert merge_benchmarks(merged, [ERROR]) == {**merged, ERROR.name: definition_of(ERROR)}


def test_a_definition_that_says_the_same_stays_as_it_is() -> None:
    """What asv's discovery added to it included."""
    known = {**definition_of(TIME), "code": "def track_time(self): ...", "rounds": 2}
    assert merge_benchmarks({TIME.name: known}, [TIME])[TIME.name] == known


@pytest.mark.parametrize(
    "change", [{"params": (("fp8",), (256,))}, {"version": "2"}, {"unit": "s/TFLOP"}, {"param_names": ("a", "b")}]
)
def test_a_definition_that_says_something_else_is_replaced(change: dict[str, Any]) -> None:
    """asv hides rows whose version is not that of the definition."""
    new = replace(TIME, **change)
    known = {**definition_of(TIME), "code": "old"}
    assert merge_benchmarks({TIME.name: known}, [new]) == {TIME.name: definition_of(new)}


BROKEN = {
    "a text": ({"a.B": "track"}, "the benchmark 'a.B' has no name and params"),
    "another name": ({"a.B": {**FOREIGN, "name": "b"}}, "the benchmark 'a.B' has no name and params"),
    "no params": ({"a.B": {"name": "a.B"}}, "the benchmark 'a.B' has no name and params"),
    "params of numbers": ({"a.B": {"name": "a.B", "params": [[1]]}}, "the benchmark 'a.B' has no name and params"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_definition_that_asv_fails_on_breaks_the_file(tmp_path: Path, what: str) -> None:
    """It is named; such a file may be set aside, as asv itself can do nothing with it."""
    path = tmp_path / "benchmarks.json"
    content, sentence = BROKEN[what]
    path.write_text(json.dumps({**content, "version": 2}))
    with pytest.raises(AsvFileBroken, match=sentence):
        load_benchmarks(path)


def test_lists_of_other_versions_and_torn_ones_are_sentences(tmp_path: Path) -> None:
    """As for results."""
    path = tmp_path / "benchmarks.json"
    path.write_text('{"version": 3}')
    with pytest.raises(AsvFileOfOtherVersion, match="newer asv: it is of version 3, fp8bench reads version 2"):
        load_benchmarks(path)
    with pytest.raises(AsvFileOfOtherVersion, match="newer asv: it is of version 3, fp8bench reads version 1"):
        load_machine(path)
    path.write_text('{\n    "gemm.Gemm.track_ti')
    with pytest.raises(AsvFileTorn, match="breaks off at byte 6 of 25"):
        load_benchmarks(path)
    path.write_text('{"version": 1, "machine": null}')
    with pytest.raises(AsvFileBroken, match="it names no 'machine'"):
        load_machine(path)


def test_asv_writes_the_same_machine(tmp_path: Path) -> None:
    """Extra keys included."""
    machine = Machine()
    machine.__dict__.update(MACHINE, gpu="H200")
    machine.save(str(tmp_path))
    path = tmp_path / "box" / "machine.json"
    before = path.read_bytes()
    assert load_machine(path) == {**MACHINE, "gpu": "H200"}
    save_machine(path, load_machine(path))
    assert path.read_bytes() == before


def test_a_machine_keeps_what_was_known_of_it() -> None:
    """New values win where they are given; None is not given."""
    old = {**MACHINE, "gpu": "H200", "note": {"a": 1}}
    assert merge_machine(old, {"machine": "box", "os": "Linux 7", "cpu": None, "disk": "ssd"}) == {
        **old, "os": "Linux 7", "disk": "ssd",
    }  # fmt: skip
    assert merge_machine({}, MACHINE) == MACHINE


def test_a_folder_belongs_to_one_machine() -> None:
    """Under another name asv leaves out every file that is in it."""
    with pytest.raises(AsvFileError, match="results of machine 'box' cannot become those of 'other'"):
        merge_machine(MACHINE, {**MACHINE, "machine": "other"})
