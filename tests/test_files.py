"""One way to replace a file, to append to one and to lock one; what disks, kills and other writers do to it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench import files
from fp8bench.errors import AsvFileError, StoreError, UsageError
from fp8bench.files import (
    LineWriter,
    append_file_lines,
    check_folder,
    complete_last_line,
    is_locked,
    lock,
    lock_folder,
    make_store,
    read_file,
    try_writing,
    write_whole,
)
from fp8bench.model import Case
from fp8bench.model.file_names import make_safe_file_name, name_case_file
from fp8bench.store.asv.files import write_object
from fp8bench.store.asv.view import remove_abandoned_files
from tests.counts import for_each
from tests.older import without_sums
from tests.store.asv.test_files import read_only as read_only

OLD = '{"a": 1, "version": 2}'
# A file that grows to some 80 kB, where none may grow beyond 40 kB.
FULL_DISK = """
import resource, sys
from pathlib import Path
from unittest.mock import Mock
from fp8bench.errors import StoreError
from fp8bench.store.asv.files import write_object
from fp8bench.store.asv.view import remove_abandoned_files
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
try:
    write_object(Path(sys.argv[1]), {"a": "x" * 80_000})
except StoreError as error:
    print(error)
"""
# Ends when the file is synced.
KILLED = """
import os, signal, sys
from pathlib import Path
from unittest.mock import Mock
from fp8bench import files
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
files.write_whole(Path(sys.argv[1]), "new")
"""
MERGING = """
import sys
from pathlib import Path
from unittest.mock import Mock
from fp8bench.errors import AsvFileAbsent
from fp8bench.files import lock_folder
from fp8bench.store.asv.files import ResultsFile, load_results, save_results
from fp8bench.store.asv.rows import AsvRow
from dataclasses import replace
path, mine = Path(sys.argv[1]), sys.argv[2]
for number in range(25):
    with lock_folder(path.parent.parent, 240):
        try:
            file = load_results(path)
        except AsvFileAbsent:
            file = ResultsFile("0" * 40, "env", 0, {"machine": "box"}, "3.11", {}, {}, {})
        row = AsvRow((), "1", (float(number),), (None,), (None,))
        save_results(path, replace(file, rows={**file.rows, f"{mine}.{number}": row}))
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "x.json"
    path.write_text(OLD)
    return path


def test_a_file_is_replaced_in_one_step(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            synced.append(old.read_text())
            return
        assert old.read_text() == OLD
        assert Path(f"/proc/self/fd/{descriptor}").read_text() == '{"a": 2}' if Path("/proc/self/fd").exists() else True
        names.extend(path.name for path in old.parent.iterdir())

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_object(old, {"a": 2})
    assert synced == ['{"a": 2}']
    assert len(names) == 2 and [name for name in names if name.endswith(".json")] == ["x.json"]
    assert old.read_text() == '{"a": 2}' and list(old.parent.iterdir()) == [old]


def test_who_could_write_the_old_file_can_write_the_new_one(old: Path) -> None:
    old.chmod(0o664)
    link = old.with_name("link.json")
    link.symlink_to(old)
    write_object(link, {"a": 2})
    assert link.is_symlink() and old.read_text() == '{"a": 2}' and old.stat().st_mode & 0o777 == 0o664


def test_a_full_disk_in_the_middle_leaves_the_old_file(old: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(old)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "x.json cannot be written (File too large). The previous file is unchanged; make room" in done.stdout
    assert old.read_text() == OLD and list(old.parent.iterdir()) == [old]


@for_each("call", ["fsync", "replace"])
def test_whatever_step_fails_the_old_file_stands(old: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    errors = [OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.EROFS, errno.EIO)]
    for error in (*errors, KeyboardInterrupt("now")):
        monkeypatch.setattr(files.os if call == "fsync" else Path, call, Mock(side_effect=error))
        kind = AsvFileError if isinstance(error, OSError) else KeyboardInterrupt
        with pytest.raises(kind, match=str(error.args[-1])):
            write_object(old, {"a": 2})
        assert old.read_text() == OLD and list(old.parent.iterdir()) == [old]


def test_a_lock_that_stays_taken_is_a_sentence(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), lock_folder(tmp_path, 0):
        with (
            pytest.raises(StoreError, match=r"another process has held the lock .*\.lock for 0 s\. Wait"),
            lock_folder(tmp_path, 0),
        ):
            raise AssertionError("it is held twice")
        raise ZeroDivisionError
    with lock_folder(tmp_path, 0):
        assert [path.suffix for path in tmp_path.iterdir()] == [""]


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    order = []

    def second() -> None:
        with lock_folder(tmp_path, 240):
            order.append("second")

    waiting = threading.Thread(target=second)
    with lock_folder(tmp_path, 0):
        waiting.start()
        waiting.join(0.1)
        order.append("first")
    waiting.join(240)
    assert order == ["first", "second"]


def test_where_a_file_system_has_no_locks_it_goes_on_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with lock_folder(tmp_path, 0), lock_folder(tmp_path, 0):
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_four_processes_merge_into_one_file_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "box" / "00000000-env.json"
    command = [sys.executable, "-c", MERGING, str(path)]
    merging = [subprocess.Popen([*command, str(number)], stderr=subprocess.PIPE, text=True) for number in range(4)]
    ends = [process.communicate(timeout=240) for process in merging]
    assert [process.returncode for process in merging] == [0] * 4, ends
    rows = json.loads(path.read_text())["results"]
    assert sorted(rows) == sorted(f"{who}.{number}" for who, number in itertools.product(range(4), range(25)))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {".lock", path.name}


def test_a_kill_in_the_middle_leaves_the_old_file(old: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(old)], timeout=120, check=False)
    (half,) = (path for path in old.parent.iterdir() if path != old)
    assert done.returncode == -signal.SIGKILL and old.read_text() == OLD and half.name.endswith(".partial")
    remove_abandoned_files(old.parent)
    assert half.exists()
    os.utime(half, (1, 1))
    os.utime(old, (1, 1))
    remove_abandoned_files(old.parent)
    assert not half.exists() and old.exists()


@pytest.mark.parametrize("write", [write_whole, lambda path, content: write_whole(path, content.encode(), sync=False)])
def test_two_writers_leave_the_file_of_one(old: Path, write: Callable[[Path, str], None]) -> None:
    contents = ["a" * 100_000, "b" * 100_000]
    seen = set()

    def write_often(content: str) -> None:
        for _ in range(40):
            write(old, content)

    writers = [threading.Thread(target=write_often, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        seen.add(old.read_text())
    assert seen <= {OLD, *contents} and old.read_text() in contents and list(old.parent.iterdir()) == [old]


def test_in_a_read_only_folder_nothing_is_left(read_only: Path) -> None:
    for step in (lambda: write_whole(read_only, "new"), lambda: try_writing(read_only.parent)):
        with pytest.raises(PermissionError):
            step()
    with (
        pytest.raises(StoreError, match=r"the lock .* cannot be made \(Permission denied\)"),
        lock_folder(read_only.parent, 0),
    ):
        raise AssertionError("the lock is held")
    assert read_only.read_text() == OLD and list(read_only.parent.iterdir()) == [read_only]


def test_lines_are_through_to_the_disk_and_stand_alone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with old.open("a+b") as file:
        complete_last_line(file)
        complete_last_line(file)
        writer = LineWriter(old, file, "the list")
        writer.note("one")
        assert without_sums(old.read_bytes()).decode() == f'{OLD}\n{{"note":"one"}}\n'

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", full)
            with pytest.raises(StoreError, match=r"the list .*x\.json cannot be written \(No space left on device\)"):
                writer.note("two")
        for _ in range(2):
            writer.finish("finished")
    assert without_sums(old.read_bytes()).endswith(b'{"end":"finished"}\n') and old.read_text().count("end") == 1


def test_a_file_is_locked_until_it_is_closed(old: Path) -> None:
    with old.open("ab") as first, old.open("ab") as second:
        assert not is_locked(old) and not is_locked(old)
        assert lock(first, 0) and is_locked(old) and not lock(second, 0.05)
    assert not is_locked(old)
    with pytest.raises(FileNotFoundError):
        is_locked(old.with_name("none"))


def test_who_only_looks_is_waited_for_and_who_writes_is_not(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped reader may hold the lock; with no time to wait it would look like a writer."""
    with old.open("ab") as first, old.open("rb") as looking, old.open("ab") as second:
        assert lock(first, 0)
        monkeypatch.setattr(files.time, "sleep", lambda seconds: pytest.fail("it waits for a writer"))
        assert not lock(second, 0)
        first.close()
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not is_locked(old)
        monkeypatch.setattr(files.time, "sleep", lambda seconds: looking.close())
        assert lock(second, 0) and looking.closed and is_locked(old)


def test_git_leaves_a_new_store_alone(tmp_path: Path) -> None:
    make_store(tmp_path / "new" / ".fp8bench")
    assert (tmp_path / "new" / ".fp8bench" / ".gitignore").read_text() == "*\n"
    make_store(tmp_path / "new")
    (tmp_path / "old").mkdir()
    make_store(tmp_path / "old")
    assert not list((tmp_path / "old").iterdir()) and not (tmp_path / "new" / ".gitignore").exists()


WORDS = st.text(max_size=60)


def test_what_is_lost_is_made_up_for() -> None:
    plain = Case("gemm", (("m", 64), ("product", "forward")), "bf16", "cpu")
    assert name_case_file(plain) == "gemm-m=64,product=forward-cpu-bf16"
    assert name_case_file(Case("data", (), "fp8", "cuda:1")).startswith("data-cuda1-fp8")
    long = Case("gemm", tuple((f"parameter{number}", number) for number in range(20)), "bf16", "cpu")
    assert (
        len(name_case_file(long)) < 200
        and name_case_file(long).startswith("gemm-parameter0=0,")
        and "-cpu-bf16-" in name_case_file(long)
    )
    mapped = Case("gemm", (), "fp8", "cpu", (("mlp", "bf16"),))
    assert name_case_file(mapped).startswith("gemm-cpu-fp8_mlp=bf16_-")
    names = {
        make_safe_file_name(text)
        for text in ("a/b", "a_b", "A_b", "a\nb", "a b", "é", "ü", "..", ".", "-", "", "x" * 300, "x" * 301)
    }
    assert len(names) == 13


@given(WORDS, WORDS, WORDS, WORDS)
def test_any_words_are_one_part_of_a_path(workload: str, name: str, value: str, precision: str) -> None:
    for part in (name_case_file(Case(workload, ((name, value),), precision, "cpu")), make_safe_file_name(value) or "_"):
        assert Path(part).name == part and part not in (".", "..") and part[0] not in ".-" and len(part) < 200
        assert part.isascii() and part.isprintable() and not set(part) & set('/\\:*?"<>| ')


@given(WORDS, WORDS)
def test_different_words_have_different_names(first: str, other: str) -> None:
    assert (make_safe_file_name(first).lower() == make_safe_file_name(other).lower()) == (first == other)


@for_each("name", ["file", "file/below", "zero\0byte", "x" * 300])
def test_a_folder_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    check_folder("--trace", tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"^--trace '.* cannot be written \(.+\)\. Give a folder"):
        check_folder("--trace", tmp_path / name)


@pytest.mark.parametrize(("umask", "warned"), [(0o000, 1), (0o022, 0)])
def test_a_new_store_that_everybody_may_write_is_warned_of_once(umask: int, warned: int, tmp_path: Path) -> None:
    store = tmp_path / "store"
    before = os.umask(umask)
    try:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            make_store(store)
            make_store(store)
    finally:
        os.umask(before)
    assert [f"chmod -R o-w {store}" in str(warning.message) for warning in given] == [True] * warned


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("pipe", "it is a named pipe: put"),
        ("device", "it is a device"),
        ("socket", "it is a socket"),
        ("folder", "Is a directory"),
        ("loop", "Too many levels"),
        ("endless", "it has 64.0 GiB"),
    ],
)
def test_what_is_no_regular_file_of_a_plausible_size_is_a_sentence(
    kind: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # socket names must be short
    path = Path("x")
    with socket.socket(socket.AF_UNIX) as listening:
        makers: dict[str, Callable[[], object]] = {
            "pipe": lambda: os.mkfifo(path),
            "device": lambda: path.symlink_to("/dev/zero"),
            "socket": lambda: listening.bind("x"),
            "folder": path.mkdir,
            "loop": lambda: path.symlink_to("x"),
            "endless": lambda: path.touch() or os.truncate(path, 64 << 30),
        }
        makers[kind]()
    for use in (read_file, lambda path: append_file_lines(path, ["{}"])):
        with pytest.raises(OSError, match=why) as caught:
            use(path)
        assert str(caught.value.strerror).startswith(why)


def test_a_pipe_in_the_place_of_a_lock_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / files.LOCK_FILE_NAME)
    with pytest.raises(OSError, match="named pipe"):
        is_locked(tmp_path / files.LOCK_FILE_NAME)
    with pytest.raises(StoreError, match="named pipe"), lock_folder(tmp_path):
        pass


def test_a_file_that_becomes_a_pipe_after_it_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    looked_at = os.stat

    def stat_then_change(name: str) -> os.stat_result:
        status = looked_at(name)
        path.unlink()
        os.mkfifo(path)
        return status

    path.touch()
    monkeypatch.setattr(files.os, "stat", stat_then_change)
    with pytest.raises(OSError, match="named pipe"):
        files.open_file(path)


def test_a_stream_of_the_callers_is_read_up_to_the_limit() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb") as into:
        into.write(b"0123456789")
        into.flush()
        with pytest.raises(OSError, match="and at most 8 B are read"):
            read_file(Path(f"/dev/fd/{reading}"), 8)


def test_content_that_is_nested_too_deeply_is_a_value_error_both_ways() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for act in (lambda: files.parse_json("[" * 100_000), lambda: files.format_compact_json(deep)):
        with pytest.raises(ValueError, match="nested too deeply"):
            act()
