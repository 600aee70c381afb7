"""The run file: what is written when, and what is read back from files that were cut, mixed up or foreign."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8bench import pipeline
from fp8bench.errors import RunNotFound, StoreError
from fp8bench.files import sealed_line
from fp8bench.model import (
    Capacity,
    Case,
    DeviceFacts,
    Environment,
    Group,
    Level,
    MemoryUse,
    OperatorTime,
    PhaseMemory,
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
)  # fmt: skip
from fp8bench.model.codec import SCHEMA
from fp8bench.store.kept_lines import sheet_of
from fp8bench.store.runs import run_file
from fp8bench.store.runs.listing import find_run, load_named, run_files
from fp8bench.store.runs.run_file import check_store, load_run, reopen_run, start_run, unsound
from tests.counts import for_each
from tests.older import as_older
from tests.runs import measured, render_whole, transformer

SUPPORT = Support(Level.NATIVE, "a test")
CASES = [Case("gemm", (("m", side),), "fp32", "cpu") for side in (1, 2, 3)]
RECORDS = [Record(case, SUPPORT, Status.OK, reason="unicode: µs") for case in CASES]
PLAN = Plan(tuple(Group((PlannedCase(case, SUPPORT, Work()),), 0) for case in CASES))
FACTS = DeviceFacts("cpu", 0, "a processor", 1 << 30, "2.13.0")


def run_called(name: str, started: str = "2026-01-02T03:04:05+00:00", **facts: str) -> Run:
    """A run without records."""
    environment = Environment({"machine": "box", "commit": "0123456789abcdef", **facts})
    return Run(name, started, "fp8bench suite gemm", Request("gemm"), PLAN, environment, (FACTS,))


def written(store: Path, name: str = "abcd1234", records: list[Record] = RECORDS, end: str = "finished") -> Path:
    writer = start_run(run_called(name), store)
    for record in records:
        writer.append([record])
    writer.finish(end)
    return writer.path


def test_a_run_is_read_back_as_it_was(tmp_path: Path) -> None:
    """Header, records and the end."""
    path = written(tmp_path)
    again = load_run(path)
    assert again == replace(run_called("abcd1234"), records=tuple(RECORDS), path=str(path), finished=True)


def test_the_file_is_named_for_machine_time_commit_and_id(tmp_path: Path) -> None:
    """`<store>/runs/<machine>/<utc>-<commit8>-<id>.jsonl`."""
    assert written(tmp_path) == tmp_path / "runs" / "box" / "20260102T030405Z-01234567-abcd1234.jsonl"


@for_each(
    ("machine", "folder"),
    [("a/b\\c d", "a-b-c-d"), ("..", "unknown"), ("", "unknown"), ("näme", "n-me"), ("host.local", "host.local")],
)
def test_a_machines_name_is_safe_as_a_folder(tmp_path: Path, machine: str, folder: str) -> None:
    """No name leads out of the store."""
    writer = start_run(run_called("x", machine=machine), tmp_path)
    writer.finish("finished")
    assert writer.path.parent == tmp_path / "runs" / folder


def test_without_a_commit_the_name_says_so(tmp_path: Path) -> None:
    """Most users do not run it inside a repository."""
    run = replace(run_called("x"), environment=Environment({"machine": "box", "commit": None}))
    writer = start_run(run, tmp_path)
    writer.finish("finished")
    assert writer.path.name == "20260102T030405Z-nocommit-x.jsonl"


def test_the_header_is_the_first_line_and_each_record_is_there_at_once(tmp_path: Path) -> None:
    """Another process sees every line as soon as it is written; lines before it never change."""
    writer = start_run(run_called("abcd1234"), tmp_path)
    before = writer.path.read_bytes()
    header = json.loads(before)
    assert header["schema"] == SCHEMA and header["header"]["id"] == "abcd1234"
    assert not {"records", "path", "finished", "troubles"} & set(header["header"])
    for number, record in enumerate(RECORDS, 1):
        writer.append([record])
        now = writer.path.read_bytes()
        assert now.startswith(before) and now.endswith(b"\n") and now.count(b"\n") == number + 1
        assert load_run(writer.path).records == tuple(RECORDS[:number])
        assert not load_run(writer.path).finished
        before = now
    writer.finish("finished")
    assert writer.path.read_bytes().startswith(before)
    assert load_run(writer.path).finished


def test_an_interrupted_run_is_not_finished(tmp_path: Path) -> None:
    """What was measured counts all the same."""
    again = load_run(written(tmp_path, records=RECORDS[:1], end="interrupted"))
    assert not again.finished and len(again.records) == 1 and again.troubles == ()


def test_the_same_file_is_never_written_twice(tmp_path: Path) -> None:
    """Append-only: an id that is taken is an error, not an overwriting."""
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="cannot be made"):
        start_run(run_called("abcd1234"), tmp_path)
    assert path.read_bytes() == before


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before is in the file."""

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
    """The machine lost power in the middle of a record."""
    path = written(tmp_path)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join(lines[:3]) + b"\n" + lines[3][:keep])
    again = load_run(path)
    assert again.records == tuple(RECORDS[:2]) and not again.finished
    assert len(again.troubles) == 1 and again.troubles[0].startswith("line 4 is broken and was left out")


@for_each(
    "broken",
    [b"garbage", b"\xff\xfe\x00", b"[1]", b"17", b'{"record": 3}', b'{"record": {}}', b"null", b"[" * 100_000],
    ids=["words", "bytes", "list", "number", "record of a number", "empty record", "null", "too deep"],
)
def test_a_broken_line_in_the_middle_costs_only_itself(tmp_path: Path, broken: bytes) -> None:
    """Those after it are read."""
    path = written(tmp_path)
    lines = path.read_bytes().split(b"\n")
    lines[2] = broken
    path.write_bytes(b"\n".join(lines))
    again = load_run(path)
    assert again.records == (RECORDS[0], RECORDS[2]) and again.finished
    assert len(again.troubles) == 1 and "line 3" in again.troubles[0] and len(again.troubles[0]) < 250


def test_samples_that_do_not_fit_their_segments_are_a_broken_line(tmp_path: Path) -> None:
    """Their types are right, and no statistics could be made of them."""
    slots = (SlotSample(0, ((1, 2), (3,)), 0.1, 0.1),)
    ragged = replace(RECORDS[0], timing=Timing(Segments(("cast", "gemm"), (0, 0)), slots))
    again = load_run(written(tmp_path, records=[ragged, RECORDS[1]]))
    assert again.records == (RECORDS[1],) and "has not the 2 cells of its segments" in again.troubles[0]


def test_lines_of_no_known_kind_are_left_out_and_named(tmp_path: Path) -> None:
    """A newer minor version may add kinds of lines; a bit that flipped makes one, and a record is lost."""
    path = as_older(written(tmp_path))
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3].replace(b'"record"', b'"recorc"')
    path.write_bytes(b"\n".join([*lines[:2], b"", b'{"weather": "fine"}', *lines[2:]]))
    again = load_run(path)
    assert again.records == (RECORDS[0], RECORDS[1])
    assert again.troubles == tuple(
        f"line {number} is of a kind that this version does not know, and was left out" for number in (4, 6)
    )


# What is done to the lines of a file, and the lines that are then named as broken, with the reason where it matters.
CHANGED: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[str]]] = {
    "words before it": (lambda lines: [b"junk\n", *lines], ["line 1 "]),
    "bytes before it": (lambda lines: [b"\n\0\0\n[1]\n", *lines], ["line 2 ", "line 3 "]),
    "a broken one before it": (lambda lines: [b'{"schema": 1, "header": 3}\n', *lines], ["line 1 "]),
    "a byte order mark": (lambda lines: [b"\xef\xbb\xbf", *lines], []),
    "after its records": (lambda lines: [*lines[1:], lines[0]], ["line 5 stands behind lines that were written after"]),
    "line ends of another system": (lambda lines: [line.replace(b"\n", b"\r\n") for line in lines], []),
    "a second one": (
        lambda lines: [*lines, lines[0]],
        ["line 6 was written as line 1 was, and was left out"],
    ),
}


@for_each("what", CHANGED)
def test_a_header_counts_wherever_it_stands(tmp_path: Path, what: str) -> None:
    """What an editor, a sort or a broken copy does costs only itself; two files joined are not one without a word."""
    change, troubles = CHANGED[what]
    path = written(tmp_path)
    whole = load_run(path)
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    again = load_run(path)
    assert replace(again, troubles=()) == whole and whole.troubles == ()
    for trouble, start in zip(again.troubles, troubles, strict=True):
        assert trouble.startswith(start) and (" is broken" in trouble or len(start) > len("line 1 "))


def test_the_time_to_read_a_file_grows_as_its_lines_do() -> None:
    """In processor time. Were every line held against all before it, 8 times the lines would take 30 times as long."""

    def seconds(count: int) -> float:
        content = "\n".join(sealed_line({"line": number}) for number in range(1, count + 1)).encode()
        start = time.process_time()
        assert len(sheet_of(content).lines) == count
        return time.process_time() - start

    few, many = (min(seconds(count) for _ in range(2)) for count in (2000, 16000))
    assert many < 16 * few


def test_junk_before_a_newer_header_does_not_hide_it(tmp_path: Path) -> None:
    """It is refused all the same."""
    path = tmp_path / "newer.jsonl"
    path.write_bytes(b'junk\n{"schema": 999, "header": {}}\n')
    with pytest.raises(StoreError, match="newer fp8bench"):
        load_run(path)


def test_records_without_any_header_stand_alone(tmp_path: Path) -> None:
    """None is lost to the search for it."""
    path = written(tmp_path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    again = load_run(path)
    assert set(again.records) == set(RECORDS)
    gone = "the header is gone: what was asked, planned and run on is lost"
    assert again.troubles == (gone, "before line 1 1 line is gone")


def test_an_end_of_no_known_kind_is_no_end(tmp_path: Path) -> None:
    """A bit flipped in it."""
    path = written(tmp_path)
    path.write_bytes(path.read_bytes().replace(b'"finished"', b'"finishee"'))
    again = load_run(path)
    assert not again.finished and "line 5 is broken" in again.troubles[0]


def test_a_finished_run_that_lost_records_says_so(tmp_path: Path) -> None:
    """Under the table, with what to do about it; a whole one says nothing of the kind."""
    path = written(tmp_path)
    assert "have no record" not in render_whole(load_run(path), {})
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
        (b"[" * 100_000, "line 1, the header, is broken"),
    ],
    ids=["empty", "blank", "text", "binary", "no schema", "odd schema", "no header", "wrong header", "newer", "deep"],
)
def test_what_is_no_run_file_is_refused_with_a_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    """It names the file and what is wrong with it."""
    path = tmp_path / "some.jsonl"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=words) as caught:
        load_run(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 500


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Or a folder in its place."""
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(RunNotFound, match="cannot be read"):
            load_run(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_happened_to_the_bytes_it_loads_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    """Never another exception."""
    path = tmp_path / "mutated.jsonl"
    whole = b"\n".join(json.dumps(line).encode() for line in LINES)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(start + 30, len(whole))))
    path.write_bytes(whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:])
    with contextlib.suppress(StoreError):
        load_run(path)


LINES = [
    {"schema": 1, "header": {"id": "a", "started": "s", "command": "c", "request": {"suite": "gemm"},
                             "plan": {"groups": []}, "environment": {"facts": {"x": 1}}, "devices": []}},
    {"record": {"case": {"workload": "gemm", "params": [["m", 1]], "precision": "fp8", "device": "cpu"},
                "support": {"level": "native", "reason": "r"}, "status": "ok",
                "work": {"flops": 1.0, "tokens": 2}}},
    {"end": "finished"},
]  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four runs; the newest has the id cccc3333."""
    for name, started in (
        ("aaaa1111", "2026-01-01T00:00:00+00:00"), ("aaaa2222", "2026-01-02T00:00:00+00:00"),
        ("cccc3333", "2026-01-04T00:00:00+00:00"), ("bbbb4444", "2026-01-03T00:00:00+00:00"),
    ):  # fmt: skip
        start_run(run_called(name, started, machine=f"box-{name}"), tmp_path).finish("finished")
    return tmp_path


def test_files_come_newest_first_over_all_machines(store: Path) -> None:
    """By the time in their names, whatever their machine is called."""
    assert [path.stem[-8:] for path in run_files(store)] == ["cccc3333", "bbbb4444", "aaaa2222", "aaaa1111"]


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("aaaa1111", "aaaa1111"), ("b", "bbbb4444"), ("aaaa2", "aaaa2222"), ("last", "cccc3333"),
        ("20260103T000000Z-01234567-bbbb4444", "bbbb4444"), ("20260103", "bbbb4444"),
    ],
    ids=["id", "first letter of an id", "beginning of an id", "last", "stem", "beginning of a stem"],
)  # fmt: skip
def test_a_run_is_found_by(store: Path, word: str, found: str) -> None:
    """What a person has at hand."""
    assert find_run(word, store).stem.endswith(found)


def test_a_run_is_found_by_path_whatever_the_store(store: Path, tmp_path: Path) -> None:
    """A file from another machine need not be in a store."""
    path = next(run_files(store))
    assert find_run(str(path), tmp_path / "no store") == path


NEWEST = r"no run .*The newest is 20260104T000000Z-01234567-cccc3333\. Give an id"


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("a", r"fits 2 runs .*aaaa1111.*Give more of the name"),
        ("2026", r"fits 4 runs .*aaaa1111.*Give more of the name"),
        *((word, NEWEST) for word in ("zzzz", "", ".", "*", "..")),
        ("a" * 400, "looking for run 'a+ in .* failed"),
    ],
)
def test_a_word_that_means_no_run_is_refused(store: Path, word: str, words: str) -> None:
    """Those that it fits are named; else the newest, and the ways to name one."""
    with pytest.raises(RunNotFound, match=words):
        find_run(word, store)


@for_each("word", ["last", "abc"])
def test_an_empty_store_says_so(tmp_path: Path, word: str) -> None:
    """The first thing a new user may type."""
    with pytest.raises(RunNotFound, match="has no runs yet"):
        find_run(word, tmp_path)


def test_a_store_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    """The probe is gone again."""
    check_store(tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").rglob("*")} == {"runs", ".gitignore"}


def test_a_full_disk_keeps_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room for a name, and none for what is in the file."""

    def full(self: Path, text: str) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StoreError, match="No space left"):
        check_store(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_a_store_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Below a file nothing can be written, not even by root."""
    (tmp_path / "file").write_text("")
    for store in (tmp_path / "file", tmp_path / "file" / "store", tmp_path / ("x" * 300)):
        with pytest.raises(StoreError, match="Choose another --store DIR"):
            check_store(store)
        with pytest.raises(StoreError, match="Choose another --store DIR"):
            start_run(run_called("x"), store)


def test_a_folder_called_like_a_run_is_none(store: Path) -> None:
    """The newest is the newest file."""
    (store / "runs" / "box-aaaa1111" / "99990101T000000Z-nocommit-eeee5555.jsonl").mkdir()
    assert find_run("last", store).stem.endswith("cccc3333")
    assert len(list(run_files(store))) == 4


def test_a_newest_run_that_cannot_be_read_names_the_one_before_it(store: Path) -> None:
    """Whoever asks for the last one learns which can be had."""
    assert load_named("last", store).id == "cccc3333"
    find_run("last", store).write_bytes(b"broken")
    with pytest.raises(StoreError, match=r"is no run file: .*The run before it is 20260103T000000Z-01234567-bbbb4444"):
        load_named("last", store)
    with pytest.raises(StoreError) as caught:
        load_named("cccc3333", store)
    assert "before it" not in str(caught.value)


def test_runs_of_one_second_are_in_order(tmp_path: Path) -> None:
    """By their milliseconds, not by their random ids."""
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


def test_a_disk_that_is_nearly_full_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run needs some megabytes; one byte less than the least is refused, the least is not."""
    for free, refused in ((run_file.LEAST_FREE_BYTES - 1, True), (run_file.LEAST_FREE_BYTES, False)):
        usage = SimpleNamespace(total=1 << 40, used=0, free=free)
        monkeypatch.setattr(run_file.shutil, "disk_usage", lambda folder, usage=usage: usage)
        with pytest.raises(StoreError, match=f"has only {free} bytes left") if refused else contextlib.nullcontext():
            check_store(tmp_path)


@for_each("place", [-1, 99, 10**30])
def test_a_reference_that_is_no_case_breaks_the_header(place: int, tmp_path: Path) -> None:
    """The records stand alone then, as under any other broken header."""
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
    assert "the reference of a group is none of its cases" in read.troubles[0]


@for_each("spoil", [b"", b'{"record":', b"x"])
def test_what_is_measured_again_after_damage_is_read(spoil: bytes, tmp_path: Path) -> None:
    """Whatever became of a line's checksum, what is written behind it has a number of its own."""
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


COUNT, SHARES, SUMS = (
    "its largest batch is no count", "its operators have no times",
    "its memory is no count, or what it is for does not sum to it",
)  # fmt: skip


@for_each(
    "changes",
    [
        {"operators": (OperatorTime("gemm", "aten::mm", 54.0, 0.04), OperatorTime("unattributed", "", 0.0, 0.0))},
        {"capacity": Capacity("batch", 1 << 30, 376, 1, 72192, 1 << 29, 377, "why", 5)},
        {"capacity": Capacity("batch", why="it crashed")}, {"memory": MemoryUse(0)},
        {"memory": MemoryUse(3, (("of another time", 3),))},  # a role that only a later version knows
        {"memory": MemoryUse(9, (("weights", 4), ("data", 5)), (PhaseMemory("gemm", 9, 512),), 512, 1 << 40, 1 << 30)},
    ],
)  # fmt: skip
def test_what_may_be_is_sound(changes: dict[str, Any]) -> None:
    assert unsound(replace(RECORD, **changes)) == ""


@for_each(
    ("field", "why", "wrong"),
    [
        *(("operators", SHARES, (wrong,)) for wrong in (
            OperatorTime("gemm", "mm", 1.0, math.nan), OperatorTime("gemm", "mm", 1.0, math.inf),
            OperatorTime("gemm", "mm", -1.0, 0.1), OperatorTime("gemms", "mm", 1.0, 0.1),
        )),
        *(("capacity", COUNT, wrong) for wrong in (
            Capacity("batch", batch=-1), Capacity("batch", batch=10**400), Capacity("batch", tokens=-3),
            Capacity("batch", peak=-1), Capacity("batch", limit=1 << 63), Capacity("batch", grain=0),
            Capacity("batch", beyond=-7), Capacity("batch", attempts=-1),
        )),
        *(("memory", SUMS, wrong) for wrong in (
            MemoryUse(-1), MemoryUse(10**400), MemoryUse(9, (("weights", 4),)),
            MemoryUse(4, (("data", 2), ("data", 2))), MemoryUse(4, (("weights", 5), ("data", -1))),
            MemoryUse(4, phases=(PhaseMemory("gemm", -4),)), MemoryUse(4, phases=(PhaseMemory("gemm", 4, -1),)),
            MemoryUse(4, reserved=-1), MemoryUse(4, process=1 << 63), MemoryUse(4, resident=-5),
        )),
    ],
)  # fmt: skip
def test_what_no_clock_and_no_count_gives_is_not(field: str, why: str, wrong: object) -> None:
    """A report would show it as shares, and as parts of a whole."""
    assert unsound(replace(RECORD, **{field: wrong})) == why  # type: ignore[arg-type]
