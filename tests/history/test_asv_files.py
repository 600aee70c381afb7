"""Files shared with asv: replaced in one step, under a lock, looked at twice, and never lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8bench.errors import AsvFileBroken, AsvFileError, AsvFileTorn, StoreError
from fp8bench.history import asv_files
from fp8bench.history.asv_files import locked, read_object, set_aside, settled_read, write_object

OLD = '{"a": 1, "version": 2}'
NOBODY = 65534
# A file that grows to some 80 kB, where none may grow beyond 40 kB.
FULL_DISK = """
import resource, sys
from pathlib import Path
from fp8bench.errors import AsvFileBroken, AsvFileError, AsvFileTorn, StoreError
from fp8bench.history.asv_files import write_object
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
try:
    write_object(Path(sys.argv[1]), {"a": "x" * 80_000})
except StoreError as error:
    print(error)
"""
MERGING = """
import sys
from pathlib import Path
from fp8bench.history.asv_files import AsvFileAbsent, locked
from fp8bench.history.asv_results import ResultsFile, load_results, save_results
from fp8bench.history.asv_rows import Row
from dataclasses import replace
path, mine = Path(sys.argv[1]), sys.argv[2]
for number in range(50):
    with locked(path.parent.parent, 240):
        try:
            file = load_results(path)
        except AsvFileAbsent:
            file = ResultsFile("0" * 40, "env", 0, {"machine": "box"}, "3.11", {}, {}, {})
        row = Row((), "1", (float(number),), (None,), (None,))
        save_results(path, replace(file, rows={**file.rows, f"{mine}.{number}": row}))
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A file that is there already."""
    path = tmp_path / "x.json"
    path.write_text(OLD)
    return path


def test_a_file_is_replaced_in_one_step(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one stands until the new one is whole and on the disk; what is beside it does not end in .json."""
    seen: list[list[str]] = []

    def fsync(descriptor: int) -> None:
        assert old.read_text() == OLD
        assert Path(f"/proc/self/fd/{descriptor}").read_text() == '{"a": 2}' if Path("/proc/self/fd").exists() else True
        seen.append([path.name for path in old.parent.iterdir()])

    monkeypatch.setattr(asv_files.os, "fsync", fsync)
    write_object(old, {"a": 2})
    ((*names,),) = seen
    assert len(names) == 2 and [name for name in names if name.endswith(".json")] == ["x.json"]
    assert old.read_text() == '{"a": 2}' and list(old.parent.iterdir()) == [old]


def test_a_folder_is_made_and_texts_are_as_asv_has_them(tmp_path: Path) -> None:
    """Compact without an indent; sorted with one; no byte beyond ASCII; asv's words for what JSON has none for."""
    path = tmp_path / "results" / "box" / "x.json"
    content = {"b": [1.5, float("nan"), float("-inf")], "a": "µ\udcff"}
    write_object(path, content)
    assert path.read_bytes() == b'{"b": [1.5, NaN, -Infinity], "a": "\\u00b5\\udcff"}'
    write_object(path, content, indent=4)
    assert path.read_bytes().startswith(b'{\n    "a": "\\u00b5\\udcff",\n    "b": [\n        1.5,\n')


def test_who_could_write_the_old_file_can_write_the_new_one(old: Path) -> None:
    """Its mode stays, and a link stays a link: asv writes through it."""
    old.chmod(0o664)
    link = old.with_name("link.json")
    link.symlink_to(old)
    write_object(link, {"a": 2})
    assert link.is_symlink() and old.read_text() == '{"a": 2}' and old.stat().st_mode & 0o777 == 0o664


@pytest.mark.parametrize("content", [{"a": {1, 2}}, {"a": 1, 2: {}}, {"a": object()}])
def test_what_is_no_json_is_a_sentence(old: Path, content: dict[Any, Any]) -> None:
    """Sets, keys that do not sort, objects."""
    with pytest.raises(AsvFileError, match=r"x\.json cannot be written: its content is no JSON \("):
        write_object(old, content, indent=4)
    assert old.read_text() == OLD and list(old.parent.iterdir()) == [old]


def test_a_full_disk_in_the_middle_leaves_the_old_file(old: Path) -> None:
    """A real limit, met while the new one is written; the half of it is removed."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(old)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "x.json cannot be written (File too large). What was there before is untouched; make room" in done.stdout
    assert old.read_text() == OLD and list(old.parent.iterdir()) == [old]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_whatever_step_fails_the_old_file_stands(
    old: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Room may be missed as late as when the file is put through to the disk."""

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asv_files.os if call == "fsync" else Path, call, fail)
    with pytest.raises(AsvFileError, match=os.strerror(number)):
        write_object(old, {"a": 2})
    assert old.read_text() == OLD and list(old.parent.iterdir()) == [old]


def test_an_interrupt_leaves_nothing_behind(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no error of the store."""

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(asv_files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_object(old, {"a": 2})
    assert old.read_text() == OLD and list(old.parent.iterdir()) == [old]


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A file in a folder where one may look and not write; root, who may everywhere, is somebody else for a while."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "x.json"
        path.write_text(OLD)
        path.chmod(0o444)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        read_object(path, 2)  # whatever it imports, somebody else may not be able to read
        try:
            if root:
                os.seteuid(NOBODY)
            yield path
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


def test_in_a_read_only_folder_each_step_is_a_sentence(read_only: Path) -> None:
    """The file can be read there; nothing else."""
    assert read_object(read_only, 2) == {"a": 1}
    with pytest.raises(AsvFileError, match=r"x\.json cannot be written \(Permission denied\)"):
        write_object(read_only, {"a": 2})
    with pytest.raises(AsvFileError, match=r"x\.json is broken and cannot be renamed \(Permission denied\)"):
        set_aside(read_only)
    with (
        pytest.raises(AsvFileError, match=r"the lock .* cannot be made \(Permission denied\)"),
        locked(read_only.parent, 0),
    ):
        raise AssertionError("the lock is held")
    assert read_only.read_text() == OLD and list(read_only.parent.iterdir()) == [read_only]


def test_what_cannot_be_read_is_a_sentence_and_not_broken(old: Path) -> None:
    """It must not be set aside: a folder, a pipe (which would be waited for), a folder that is a file."""
    pipe = old.with_name("pipe.json")
    os.mkfifo(pipe)
    for path, why in ((old.parent, "it is not a file"), (pipe, "it is not a file"), (old / "x", "Not a directory")):
        with pytest.raises(AsvFileError, match=rf"cannot be read \({why}\)\.$") as caught:
            read_object(path, 2)
        assert not isinstance(caught.value, AsvFileBroken) and isinstance(caught.value, StoreError)


def test_a_file_that_is_being_written_is_looked_at_again(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """asv puts its files down piece by piece."""
    pieces = ["", OLD[:9], OLD[:-1], OLD]

    def sleep(seconds: float) -> None:
        old.write_text(pieces.pop(0))

    old.write_text("")
    monkeypatch.setattr(asv_files.time, "sleep", sleep)
    assert settled_read(lambda path: read_object(path, 2), old, 60) == {"a": 1} and pieces == []


@pytest.mark.parametrize(("age", "seconds", "looks"), [(1000.0, 600.0, 1), (0.0, 0.0, 1), (0.0, 600.0, 3)])
def test_a_file_that_stays_torn_is_broken(
    old: Path, monkeypatch: pytest.MonkeyPatch, age: float, seconds: float, looks: int
) -> None:
    """At once if nobody has touched it for long or there is no time to wait, else when it has been left alone."""
    seen = []

    def load(path: Path) -> dict[str, Any]:
        seen.append(path)
        return read_object(path, 2)

    def sleep(seconds: float) -> None:
        if len(seen) == 2:
            os.utime(old, (now - 1000, now - 1000))

    monkeypatch.setattr(asv_files.time, "sleep", sleep)
    old.write_text(OLD[:9])
    now = old.stat().st_mtime
    os.utime(old, (now - age, now - age))
    with pytest.raises(AsvFileTorn, match="breaks off at byte 9 of 9"):
        settled_read(load, old, seconds)
    assert len(seen) == looks


def test_what_is_broken_otherwise_is_not_waited_for(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole, and wrong."""
    monkeypatch.setattr(asv_files.time, "sleep", lambda seconds: pytest.fail("it waits"))
    old.write_text("[]")
    with pytest.raises(AsvFileBroken, match="expected an object"):
        settled_read(lambda path: read_object(path, 2), old, 60)


def test_what_is_set_aside_is_kept_under_a_new_name(old: Path) -> None:
    """The second does not overwrite the first, and no name ends in .json, at which asv would warn."""
    first = set_aside(old)
    old.write_text("second")
    second = set_aside(old)
    assert (first.name, second.name) == ("x.json.broken-1", "x.json.broken-2") and not old.exists()
    assert (first.read_text(), second.read_text()) == (OLD, "second")


def test_setting_aside_what_is_gone_is_a_sentence(tmp_path: Path) -> None:
    """Another process was faster; it leaves nothing behind."""
    with pytest.raises(AsvFileError, match=r"x\.json is broken and cannot be renamed \(No such file"):
        set_aside(tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_stays_taken_is_a_sentence(tmp_path: Path) -> None:
    """And is free again when its holder ends, also by an exception."""
    with contextlib.suppress(ZeroDivisionError), locked(tmp_path, 0):
        with (
            pytest.raises(AsvFileError, match=r"another process has held the lock .*\.lock for 0 s\. Wait"),
            locked(tmp_path, 0),
        ):
            raise AssertionError("it is held twice")
        raise ZeroDivisionError
    with locked(tmp_path, 0):
        assert [path.suffix for path in tmp_path.iterdir()] == [""]


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    """Its next holder goes on when the first one ends, not before."""
    order = []

    def second() -> None:
        with locked(tmp_path, 240):
            order.append("second")

    waiting = threading.Thread(target=second)
    with locked(tmp_path, 0):
        waiting.start()
        waiting.join(0.1)
        order.append("first")
    waiting.join(240)
    assert order == ["first", "second"]


def test_where_a_file_system_has_no_locks_it_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some network file systems have none."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(asv_files.fcntl, "flock", flock)
    with locked(tmp_path, 0), locked(tmp_path, 0):
        pass


def test_four_processes_merge_into_one_file_and_lose_nothing(tmp_path: Path) -> None:
    """Two hundred rows, one by one."""
    path = tmp_path / "box" / "00000000-env.json"
    command = [sys.executable, "-c", MERGING, str(path)]
    merging = [subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True) for number in range(4)]
    ends = [process.communicate(timeout=240) for process in merging]
    assert [process.returncode for process in merging] == [0] * 4, ends
    rows = json.loads(path.read_text())["results"]
    assert sorted(rows) == sorted(f"{who}.{number}" for who in range(4) for number in range(50))
    assert {one.name for one in tmp_path.rglob("*") if one.is_file()} == {".lock", path.name}
