"""Files shared with asv: replaced in one step, under a lock, looked at twice, and never lost."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asv.benchmarks import Benchmarks
from asv.machine import Machine

from fp8bench.errors import AsvFileBroken, AsvFileError, AsvFileOfOtherVersion, AsvFileTorn, StoreError
from fp8bench.model import Series
from fp8bench.store.asv import files as asv_files
from fp8bench.store.asv.files import (
    load_asv_machine,
    load_benchmarks,
    load_file_if_present,
    make_benchmark_definition,
    merge_asv_machine,
    merge_benchmarks,
    read_settled_file,
    read_versioned_json_object,
    rename_broken_file,
    save_benchmarks,
    save_machine,
    write_object,
)
from tests.counts import for_each

OLD = '{"a": 1, "version": 2}'
NOBODY = 65534


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "x.json"
    path.write_text(OLD)
    return path


def test_a_folder_is_made_and_texts_are_as_asv_has_them(tmp_path: Path) -> None:
    path = tmp_path / "results" / "box" / "x.json"
    content = {"b": [1.5, float("nan"), float("-inf")], "a": "µ\udcff"}
    write_object(path, content)
    assert path.read_bytes() == b'{"b": [1.5, NaN, -Infinity], "a": "\\u00b5\\udcff"}'
    write_object(path, content, indent=4)
    assert path.read_bytes().startswith(b'{\n    "a": "\\u00b5\\udcff",\n    "b": [\n        1.5,\n')


@pytest.fixture
def read_only() -> Iterator[Path]:
    """Makes a file and its folder read-only; root drops its privileges in the body."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "x.json"
        path.write_text(OLD)
        path.chmod(0o444)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        read_versioned_json_object(path, 2)  # modules imported later might be unreadable for another user
        try:
            if root:
                os.seteuid(NOBODY)
            yield path
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_a_read_only_folder_gives_a_message(read_only: Path) -> None:
    assert read_versioned_json_object(read_only, 2) == {"a": 1}
    with pytest.raises(AsvFileError, match=r"x\.json cannot be written \(Permission denied\)"):
        write_object(read_only, {"a": 2})
    with pytest.raises(AsvFileError, match=r"x\.json is broken and cannot be renamed \(Permission denied\)"):
        rename_broken_file(read_only)
    assert read_only.read_text() == OLD and list(read_only.parent.iterdir()) == [read_only]


def test_an_unreadable_file_is_not_broken(old: Path) -> None:
    """A folder, a pipe (reading it would block) and a path below a file must not be renamed."""
    pipe = old.with_name("pipe.json")
    os.mkfifo(pipe)
    for path, why in ((old.parent, "Is a directory"), (pipe, "it is a named pipe.*"), (old / "x", "Not a directory")):
        with pytest.raises(AsvFileError, match=rf"cannot be read \({why}\)\.$") as caught:
            read_versioned_json_object(path, 2)
        assert not isinstance(caught.value, AsvFileBroken) and isinstance(caught.value, StoreError)


def test_a_file_that_is_being_written_is_looked_at_again(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = ["", OLD[:9], OLD[:-1], OLD]

    def sleep(seconds: float) -> None:
        old.write_text(pieces.pop(0))

    old.write_text("")
    monkeypatch.setattr(asv_files.time, "sleep", sleep)
    assert read_settled_file(lambda path: read_versioned_json_object(path, 2), old, 60) == {"a": 1} and pieces == []
    monkeypatch.setattr(asv_files.time, "sleep", lambda seconds: pytest.fail("it waits"))
    old.write_text("[]")  # complete but wrong
    with pytest.raises(AsvFileBroken, match="expected an object"):
        read_settled_file(lambda path: read_versioned_json_object(path, 2), old, 60)


def test_a_writer_that_was_stopped_half_way_keeps_its_file(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It continues in the file that it has open, even after a rename; so others wait longer before renaming it."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 5.0:
            old.write_text(OLD)
            os.utime(old, (1000.0, 1000.0))

    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1000.0 + now[0], sleep=sleep)
    monkeypatch.setattr(asv_files, "time", clock)
    aside: list[Path] = []
    for set_aside_too in (aside, None):
        now[0] = 0.0
        old.write_text(OLD[:9])
        os.utime(old, (1000.0, 1000.0))
        with contextlib.nullcontext() if set_aside_too is aside else pytest.raises(AsvFileTorn):
            assert load_file_if_present(lambda path: read_versioned_json_object(path, 2), old, set_aside_too) == {
                "a": 1
            }
    assert not aside and list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize(("age", "seconds", "looks"), [(1000.0, 600.0, 1), (0.0, 0.0, 1), (0.0, 600.0, 3)])
def test_a_file_that_stays_torn_is_broken(
    old: Path, monkeypatch: pytest.MonkeyPatch, age: float, seconds: float, looks: int
) -> None:
    """At once if the file is old or no waiting is allowed, otherwise after a period without changes."""
    seen = []

    def load(path: Path) -> dict[str, Any]:
        seen.append(path)
        return read_versioned_json_object(path, 2)

    def sleep(seconds: float) -> None:
        if len(seen) == 2:
            os.utime(old, (now - 1000, now - 1000))

    monkeypatch.setattr(asv_files.time, "sleep", sleep)
    old.write_text(OLD[:9])
    now = old.stat().st_mtime
    os.utime(old, (now - age, now - age))
    with pytest.raises(AsvFileTorn, match="is broken: "):
        read_settled_file(load, old, seconds)
    assert len(seen) == looks


def test_a_broken_file_is_kept_under_a_new_name(old: Path) -> None:
    first = rename_broken_file(old)
    old.write_text("second")
    second = rename_broken_file(old)
    assert (first.name, second.name) == ("x.json.broken-1", "x.json.broken-2") and not old.exists()
    assert (first.read_text(), second.read_text()) == (OLD, "second")
    with pytest.raises(AsvFileError, match=r"x\.json is broken and cannot be renamed \(No such file"):
        rename_broken_file(old)  # another process was faster; this one leaves nothing behind
    assert sorted(old.parent.iterdir()) == [first, second]


TIME = Series("gemm.Gemm.track_time", "gemm", "time", "s", ("dtype", "n"), (("fp8", "bf16"), (256,)), "1")
ERROR = Series("gemm.Gemm.track_error", "gemm", "error", "", (), (), "2")
FOREIGN = {"name": "time_x", "type": "time", "unit": "seconds", "params": [], "param_names": [], "version": "a", "k": 1}
MACHINE = {"machine": "box", "os": "Linux", "arch": "x86_64", "cpu": "a cpu", "num_cpu": "2", "ram": "1"}


def test_asv_writes_the_same_benchmarks(tmp_path: Path) -> None:
    definitions = [FOREIGN, make_benchmark_definition(TIME), make_benchmark_definition(ERROR)]
    conf = SimpleNamespace(results_dir=str(tmp_path), benchmark_dir="suites")
    Benchmarks(conf, definitions).save()
    theirs = tmp_path / "benchmarks.json"
    before = theirs.read_bytes()
    assert merge_benchmarks({}, [TIME, ERROR]) | {"time_x": FOREIGN} == load_benchmarks(theirs)
    save_benchmarks(theirs, load_benchmarks(theirs))
    assert theirs.read_bytes() == before
    assert Benchmarks.load(conf)[TIME.name] == make_benchmark_definition(TIME)


@for_each(
    "change", [{"params": (("fp8",), (256,))}, {"version": "2"}, {"unit": "s/TFLOP"}, {"param_names": ("a", "b")}]
)
def test_merging_drops_no_name_and_replaces_a_definition_that_says_something_else(change: dict[str, Any]) -> None:
    new = replace(TIME, **change)
    known = {
        **make_benchmark_definition(TIME),
        "code": "def track_time(self): ...",
        "rounds": 2,
    }  # asv's discovery added to it
    before = {"time_x": FOREIGN, TIME.name: known}
    assert merge_benchmarks(before, [TIME, ERROR]) == {**before, ERROR.name: make_benchmark_definition(ERROR)}
    assert merge_benchmarks(before, [new]) == {"time_x": FOREIGN, TIME.name: make_benchmark_definition(new)}
    assert before == {"time_x": FOREIGN, TIME.name: known}


def test_lists_of_other_versions_give_a_message(tmp_path: Path) -> None:
    path = tmp_path / "benchmarks.json"
    for wrong in ("track", {**FOREIGN, "name": "b"}, {"name": "a.B"}, {"name": "a.B", "params": [[1]]}):
        path.write_text(json.dumps({"a.B": wrong, "version": 2}))  # asv fails on it
        with pytest.raises(AsvFileBroken, match=r"the benchmark 'a\.B' has no name and params"):
            load_benchmarks(path)
    path.write_text('{"version": 3}')
    with pytest.raises(AsvFileOfOtherVersion, match="newer asv: its version is 3, fp8bench reads version 2"):
        load_benchmarks(path)
    with pytest.raises(AsvFileOfOtherVersion, match="newer asv: its version is 3, fp8bench reads version 1"):
        load_asv_machine(path)
    path.write_text('{\n    "gemm.Gemm.track_ti')
    with pytest.raises(AsvFileTorn, match="is broken: "):
        load_benchmarks(path)
    path.write_text('{"version": 1, "machine": null}')
    with pytest.raises(AsvFileBroken, match="it has no field 'machine'"):
        load_asv_machine(path)


def test_asv_writes_the_same_machine(tmp_path: Path) -> None:
    machine = Machine()
    machine.__dict__.update(MACHINE, gpu="H200")
    machine.save(str(tmp_path))
    path = tmp_path / "box" / "machine.json"
    before = path.read_bytes()
    assert load_asv_machine(path) == {**MACHINE, "gpu": "H200"}
    save_machine(path, load_asv_machine(path))
    assert path.read_bytes() == before


def test_a_machine_keeps_what_was_known_of_it() -> None:
    old = {**MACHINE, "gpu": "H200", "note": {"a": 1}}
    assert merge_asv_machine(old, {"machine": "box", "os": "Linux 7", "cpu": None, "disk": "ssd"}) == {
        **old,
        "os": "Linux 7",
        "disk": "ssd",
    }
    assert merge_asv_machine({}, MACHINE) == MACHINE
