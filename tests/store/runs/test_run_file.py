"""The run file: what is written when, and what is read back from files that were cut, mixed up or foreign."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8bench import pipeline
from fp8bench.errors import RunNotFound, StoreError
from fp8bench.files import format_checksummed_line
from fp8bench.model import (
    Case,
    DeviceFacts,
    Environment,
    Group,
    Level,
    Plan,
    PlannedCase,
    Record,
    Request,
    Resumption,
    Run,
    Segments,
    SlotSample,
    Status,
    Support,
    Timing,
    Work,
)
from fp8bench.model.codec import SCHEMA
from fp8bench.store.kept_lines import parse_file_lines
from fp8bench.store.runs import run_file
from fp8bench.store.runs.listing import find_run, run_files
from fp8bench.store.runs.run_file import check_store, load_run, reopen_run, start_run
from tests.counts import for_each
from tests.older import as_older
from tests.runs import measured, render_whole, transformer

SUPPORT = Support(Level.NATIVE, "a test")
CASES = [Case("gemm", (("m", side),), "fp32", "cpu") for side in (1, 2, 3)]
RECORDS = [Record(case, SUPPORT, Status.OK, reason="unicode: µs") for case in CASES]
PLAN = Plan(tuple(Group((PlannedCase(case, SUPPORT, Work()),), 0) for case in CASES))
FACTS = DeviceFacts("cpu", 0, "a processor", 1 << 30, "2.13.0")


def run_called(name: str, started: str = "2026-01-02T03:04:05+00:00", **facts: str) -> Run:
    environment = Environment({"machine": "box", "commit": "0123456789abcdef", **facts})
    return Run(name, started, "fp8bench suite gemm", Request("gemm"), PLAN, environment, (FACTS,))


def written(store: Path, name: str = "abcd1234", records: list[Record] = RECORDS, end: str = "finished") -> Path:
    writer = start_run(run_called(name), store)
    for record in records:
        writer.append([record])
    writer.finish(end)
    return writer.path


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path)
    again = load_run(path)
    assert again == replace(run_called("abcd1234"), records=tuple(RECORDS), path=str(path), finished=True)
    assert path == tmp_path / "runs" / "box" / "20260102T030405Z-01234567-abcd1234.jsonl"
    header = json.loads(path.read_bytes().splitlines()[0])
    assert header["schema"] == SCHEMA and not {"records", "path", "finished", "troubles"} & set(header["header"])
    writer = start_run(run_called("c"), tmp_path)  # each line appears at once, and earlier ones never change
    for number, record in enumerate(RECORDS, 1):
        before = writer.path.read_bytes()
        writer.append([record])
        assert writer.path.read_bytes().startswith(before) and load_run(writer.path).records == tuple(RECORDS[:number])
    writer.close()
    assert load_run(written(tmp_path, "b", RECORDS[:1], "interrupted")) == replace(
        run_called("b"), records=tuple(RECORDS[:1]), path=str(path).replace("abcd1234", "b")
    )


@for_each(
    ("machine", "folder"),
    [("a/b\\c d", "a-b-c-d"), ("..", "unknown"), ("", "unknown"), ("näme", "n-me"), ("host.local", "host.local")],
)
def test_a_machines_name_is_safe_as_a_folder(tmp_path: Path, machine: str, folder: str) -> None:
    run = replace(run_called("x"), environment=Environment({"machine": machine, "commit": None}))
    writer = start_run(run, tmp_path)
    writer.finish("finished")
    assert writer.path == tmp_path / "runs" / folder / "20260102T030405Z-nocommit-x.jsonl"


def test_the_same_file_is_never_written_twice_and_one_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="cannot be made"):
        start_run(run_called("abcd1234"), tmp_path)
    assert path.read_bytes() == before
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(RunNotFound, match="cannot be read"):
            load_run(path)


def test_a_full_disk_gives_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    writer = start_run(run_called("abcd1234"), tmp_path)
    writer.append([RECORDS[0]])
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(StoreError, match=r"No space left on device.*make room"):
            writer.append([RECORDS[1]])
    writer.finish("interrupted")
    assert load_run(writer.path).records[0] == RECORDS[0]


@for_each("keep", [1, 20, 200])
def test_a_torn_last_line_is_left_out_and_named(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:keep])
    again = load_run(path)
    assert again.records == tuple(RECORDS[:2]) and not again.finished
    assert len(again.troubles) == 1 and again.troubles[0].startswith("line 4 is broken and was left out")


@for_each(
    "broken",
    [b"garbage", b"\xff\xfe\x00", b"[1]", b"17", b'{"record": 3}', b'{"record": {}}', b"null", b"[" * 100_000],
)
def test_a_broken_line_in_the_middle_costs_only_itself(tmp_path: Path, broken: bytes) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().split(b"\n")
    lines[2] = broken
    path.write_bytes(b"\n".join(lines))
    again = load_run(path)
    assert again.records == (RECORDS[0], RECORDS[2]) and again.finished
    assert len(again.troubles) == 1 and "line 3" in again.troubles[0] and len(again.troubles[0]) < 250


def test_samples_that_do_not_fit_their_segments_are_a_broken_line(tmp_path: Path) -> None:
    slots = (SlotSample(0, ((1, 2), (3,)), 0.1, 0.1),)
    ragged = replace(RECORDS[0], timing=Timing(Segments(("cast", "gemm"), (0, 0)), slots))
    again = load_run(written(tmp_path, records=[ragged, RECORDS[1]]))
    assert again.records == (RECORDS[1],) and "does not have a time for each of the 2 cells" in again.troubles[0]


def test_lines_of_no_known_kind_are_left_out_and_named(tmp_path: Path) -> None:
    """A newer minor version may add kinds of lines; a flipped bit makes one too, and loses a record."""
    path = as_older(written(tmp_path))
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3].replace(b'"record"', b'"recorc"')
    path.write_bytes(b"\n".join([*lines[:2], b"", b'{"weather": "fine"}', *lines[2:]]))
    again = load_run(path)
    assert again.records == (RECORDS[0], RECORDS[1])
    assert again.troubles == tuple(f"line {number} is of an unknown kind and was left out" for number in (4, 6))


# A change of a file's lines, and the lines then reported as broken, with a reason where it matters.
CHANGED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[str]]] = {
    "words before it": (lambda lines: [b"junk\n", *lines], ["line 1 "]),
    "bytes before it": (lambda lines: [b"\n\0\0\n[1]\n", *lines], ["line 2 ", "line 3 "]),
    "a broken one before it": (lambda lines: [b'{"schema": 1, "header": 3}\n', *lines], ["line 1 "]),
    "a byte order mark": (lambda lines: [b"\xef\xbb\xbf", *lines], []),
    "after its records": (lambda lines: [*lines[1:], lines[0]], ["line 5 is behind lines that were written after"]),
    "line ends of another system": (lambda lines: [line.replace(b"\n", b"\r\n") for line in lines], []),
    "gone": (
        lambda lines: lines[1:],
        ["the header is missing: the request, plan and environment are lost", "before line 1 1 line is missing"],
    ),
    "a second one": (lambda lines: [*lines, lines[0]], ["line 6 is a duplicate of line 1 and was left out"]),
}


@for_each("what", CHANGED)
def test_a_header_counts_wherever_it_stands(tmp_path: Path, what: str) -> None:
    change, troubles = CHANGED[what]
    path = written(tmp_path)
    whole = load_run(path)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    again = load_run(path)
    if what == "gone":
        assert set(again.records) == set(RECORDS)
    else:
        assert replace(again, troubles=()) == whole and whole.troubles == ()
    for trouble, start in zip(again.troubles, troubles, strict=True):
        assert trouble.startswith(start) and (" is broken" in trouble or len(start) > len("line 1 "))


def test_the_work_of_reading_a_file_grows_as_its_lines_do() -> None:
    """Counted in executed lines of code, which a busy machine does not change."""

    def done(count: int) -> int:
        content = "\n".join(format_checksummed_line({"line": number}) for number in range(1, count + 1)).encode()
        steps = 0

        def step(*_: object) -> object:
            nonlocal steps
            steps += 1
            return step

        before = sys.gettrace()
        sys.settrace(step)
        try:
            sheet = parse_file_lines(content)
        finally:
            sys.settrace(before)
        assert len(sheet.lines) == count
        return steps

    few, many = done(200), done(1600)
    assert 0 < few < many < 9 * few


def test_a_finished_run_that_lost_records_says_so(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert "have no record" not in render_whole(load_run(path), {})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"finished"', b'"finishee"'))
    torn = load_run(path)
    assert not torn.finished and "line 5 is broken" in torn.troubles[0]
    path.write_bytes(whole)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], lines[1][:50] + b"\n", *lines[3:]]))
    shown = " ".join(render_whole(load_run(path), {}).split())
    assert "2 of 3 cases have no record: lines are broken or gone; --resume abcd1234 measures them" in shown


@for_each(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"\n\n", "it is empty"),
        (b"hello\n", "line 1, the header, is broken"),
        (b"\x00\x01\xff" * 100, "line 1, the header, is broken"),
        (b"{}\n", "it has no header"),
        (b'{"schema": "1"}\n', "no schema version"),
        (b'{"schema": 1}\n', "expected an object"),
        (b'{"schema": 1, "header": {"id": 3}}\n', "expected str"),
        (b'{"schema": 999, "header": {}}\n', "newer fp8bench"),
        (b'junk\n{"schema": 999, "header": {}}\n', "newer fp8bench"),
        (b"[" * 100_000, "line 1, the header, is broken"),
    ],
)
def test_a_file_that_is_not_a_run_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=words) as caught:
        load_run(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four runs; the newest has the id cccc3333."""
    for name, started in (
        ("aaaa1111", "2026-01-01T00:00:00+00:00"),
        ("aaaa2222", "2026-01-02T00:00:00+00:00"),
        ("cccc3333", "2026-01-04T00:00:00+00:00"),
        ("bbbb4444", "2026-01-03T00:00:00+00:00"),
    ):
        start_run(run_called(name, started, machine=f"box-{name}"), tmp_path).finish("finished")
    return tmp_path


def test_a_run_is_found_by_path_id_or_prefix(store: Path) -> None:
    (store / "runs" / "box-aaaa1111" / "99990101T000000Z-nocommit-eeee5555.jsonl").mkdir()  # a folder is not a run
    assert [path.stem[-8:] for path in run_files(store)] == ["cccc3333", "bbbb4444", "aaaa2222", "aaaa1111"]
    for words, name in (
        ("aaaa1111", "aaaa1111"),
        ("b 20260103 20260103T000000Z-01234567-bbbb4444", "bbbb4444"),
        ("aaaa2", "aaaa2222"),
        ("last", "cccc3333"),
    ):
        assert all(find_run(word, store).stem.endswith(name) for word in words.split()), words
    newest = next(run_files(store))
    assert find_run(str(newest), store / "no store") == newest
    for word, why in (
        ("a", r"fits 2 runs .*aaaa1111.*Give more of the name"),
        ("2026", r"fits 4 runs .*aaaa1111"),
        *((word, r"no run .*The newest is 20260104T000000Z-01234567-cccc3333\.") for word in ("zzzz", "", ".", "..")),
        ("a" * 400, "looking for 'a+ in .* failed"),
    ):
        with pytest.raises(RunNotFound, match=why):
            find_run(word, store)
    for word in ("last", "abc"):
        with pytest.raises(RunNotFound, match="has no runs yet"):
            find_run(word, store / "empty")


def test_a_store_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def full(self: Path, text: str) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    (tmp_path / "full").mkdir()
    check_store(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").rglob("*")} == {"runs", ".gitignore"}
    with monkeypatch.context() as patch:  # room for the file's name, but not for its content
        patch.setattr(Path, "write_text", full)
        with pytest.raises(StoreError, match="No space left"):
            check_store(tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").rglob("*")] == ["runs"]
    for free, refused in ((run_file.MIN_FREE_BYTES - 1, True), (run_file.MIN_FREE_BYTES, False)):
        usage = SimpleNamespace(free=free)  # a run needs some megabytes
        monkeypatch.setattr(run_file.shutil, "disk_usage", lambda folder, usage=usage: usage)
        with pytest.raises(StoreError, match=f"has only {free} bytes left") if refused else contextlib.nullcontext():
            check_store(tmp_path)
    (tmp_path / "file").write_text("")
    for store in (tmp_path / "file", tmp_path / "file" / "store", tmp_path / ("x" * 300)):
        with pytest.raises(StoreError, match="Choose another --store DIR"):
            check_store(store)
        with pytest.raises(StoreError, match="Choose another --store DIR"):
            start_run(run_called("x"), store)


def test_milliseconds_decide_which_run_is_newest(tmp_path: Path) -> None:
    for name, started in (("ffff", "2026-01-01T00:00:00.001+00:00"), ("aaaa", "2026-01-01T00:00:00.002+00:00")):
        start_run(run_called(name, started), tmp_path).finish("finished")
    assert find_run("last", tmp_path).name == "20260101T000000.002Z-01234567-aaaa.jsonl"
    assert load_run(find_run("ffff", tmp_path)).started.startswith("2026-01-01T00:00:00.001")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", pipeline.now())


def test_two_processes_of_one_number_do_not_meet_in_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers that share a store have the same process ids."""
    probes = []
    write_text = Path.write_text

    def noted(self: Path, *arguments: str) -> int:
        probes.append(self.name)
        return write_text(self, *arguments)

    monkeypatch.setattr(Path, "write_text", noted)
    check_store(tmp_path)
    check_store(tmp_path)
    assert len(set(probes)) == 2


@for_each("place", [-1, 99, 10**18])
def test_a_reference_outside_of_its_group_breaks_the_header(place: int, tmp_path: Path) -> None:
    run, _ = measured()
    writer = start_run(run, tmp_path)
    writer.append(run.records)
    writer.finish("finished")
    lines = as_older(writer.path).read_text().splitlines()
    header = json.loads(lines[0])
    header["header"]["plan"]["groups"][0]["reference"] = place
    writer.path.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    read = load_run(writer.path)
    assert len(read.records) == len(run.records)
    assert "a group's reference is not among its cases" in read.troubles[0]


@for_each("spoil", [b"", b'{"record":', b"x"])
def test_a_resumed_run_replaces_damaged_records(spoil: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, end="interrupted")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], spoil + b"\n", *lines[3:]]))
    assert RECORDS[1] not in load_run(path).records
    writer = reopen_run(path, Resumption("2026-01-06T00:00:00+00:00", "", Environment({})))
    writer.append(RECORDS)
    writer.finish("finished")
    again = load_run(path)
    assert again.finished and set(again.records) == set(RECORDS) and len(again.resumptions) == 1


RECORD = transformer()[0].records[0]
