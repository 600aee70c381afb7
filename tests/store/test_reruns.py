"""What runs came to, kept beside them: by case, code and machine, apart where others took the processor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.analysis.findings import find
from fp8bench.analysis.reruns import reach_of
from fp8bench.model import Environment, Record, Run
from fp8bench.store.reruns import add_reruns, with_reruns
from fp8bench.store.verify_files import check_surroundings
from tests.counts import for_each
from tests.fakes import CPU, MS, record, steady
from tests.runs import run_of

RUN = replace(
    run_of([]), devices=(CPU,), environment=Environment({"commit": "a" * 40, "fp8bench": "0.1", "threads": 1})
)


def group(time: int = 5 * MS, late: bool = False, rounds: int = 24, control: int = 10 * MS) -> tuple[Record, ...]:
    ten, own = steady(10 * MS, rounds), steady(time, rounds)
    if late:
        own = replace(own, slots=tuple(replace(slot, wall_seconds=3 * slot.cpu_seconds) for slot in own.slots))
    return record(ten, "fp32", is_reference=True, control=steady(control, rounds)), record(own)


def known(store: Path, records: tuple[Record, ...] | None = None, run: Run = RUN) -> list[int]:
    return [one.reruns.runs if one.reruns is not None else 0 for one in with_reruns(records or group(), run, store)]


def test_the_fifth_run_knows_the_four_before_it(tmp_path: Path) -> None:
    """And one more by one more; a reference by its control."""
    for number in range(6):
        assert known(tmp_path) == [number if number > 4 else 0] * 2
        add_reruns(group(5 * MS + number), RUN, tmp_path)
    (_, one) = with_reruns(group(), RUN, tmp_path)
    assert one.reruns is not None and 0 < one.reruns.spread < 1e-6


def test_how_far_identical_code_lies_apart_is_learned_too(tmp_path: Path) -> None:
    """From the control of a reference over the reference, and apart from what modes differ by."""
    for number in range(6):
        add_reruns(group(control=10 * MS + (-1) ** number * MS // 10), RUN, tmp_path)
    lead, case = with_reruns(group(), RUN, tmp_path)
    assert lead.reruns is not None and lead.reruns.spread == pytest.approx(0.011, rel=0.05)
    assert case.reruns is not None and case.reruns.spread < 0.006  # half of a control's difference is the reference's
    told = find([lead, case], {})
    assert all(one.floor == pytest.approx(math.expm1(reach_of(lead.reruns))) for one in told)


def test_other_code_another_machine_and_a_busy_one_are_known_apart(tmp_path: Path) -> None:
    for _ in range(6):
        add_reruns(group(), RUN, tmp_path)
    assert known(tmp_path)[1] == 6 and known(tmp_path, group(late=True)) == [6, 6]  # quiet ones, while none was busy
    for _ in range(5):
        add_reruns(group(late=True), RUN, tmp_path)
    assert known(tmp_path) == [11, 6] and known(tmp_path, group(late=True)) == [11, 5]  # its reference was not late
    for facts in ({"threads": 2}, {"torch": "9.9"}):
        assert known(tmp_path, run=replace(RUN, environment=RUN.environment.also(facts))) == [0, 0]
    other = with_reruns(group(), replace(RUN, environment=RUN.environment.also({"commit": "b" * 40})), tmp_path)
    assert [one.reruns.freedom for one in other if one.reruns] == [2, 2]  # a case that nobody has run, like the others


def test_few_rounds_are_no_run(tmp_path: Path) -> None:
    for _ in range(6):
        add_reruns(group(rounds=6), RUN, tmp_path)
    assert not (tmp_path / "reruns").exists()


@for_each("content", [b"", b"[]", b'{"version": 7}', b'{"version": 1, "cases": {"a": 1}}', b"\xff"])
def test_a_broken_file_is_none_and_is_written_anew(tmp_path: Path, content: bytes) -> None:
    add_reruns(group(), RUN, tmp_path)
    (path,) = (tmp_path / "reruns").glob("*.json")
    path.write_bytes(content)
    assert known(tmp_path) == [0, 0]
    for _ in range(6):
        add_reruns(group(), RUN, tmp_path)
    assert known(tmp_path)[1] == 6


def test_where_nobody_can_write_a_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "reruns").write_text("a file")
    add_reruns(group(), RUN, tmp_path)
    assert known(tmp_path) == [0, 0]


def test_a_digit_that_changed_is_named_when_a_store_is_verified(tmp_path: Path) -> None:
    add_reruns(group(), RUN, tmp_path)
    (path,) = (tmp_path / "reruns").glob("*.json")
    assert not [fault for fault in check_surroundings(tmp_path) if fault.broken]
    path.write_text(path.read_text().replace("[1,", "[7,", 1))
    (fault,) = check_surroundings(tmp_path)
    assert fault.path == str(path) and "its checksum is not that of what it says" in fault.what
