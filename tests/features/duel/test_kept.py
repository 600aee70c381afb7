"""A duel's file: what is written is read again, and damage costs the lines that it struck."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8bench.errors import StoreError
from fp8bench.features.duel.kind import DuelKind, start_duel
from fp8bench.model import Status
from tests.counts import for_each
from tests.duels import SESSION, header, result
from tests.fakes import CPU
from tests.older import as_older


def written(store: Path) -> Path:
    """A whole duel: two sessions of one case, of another one that failed after its first, and a note."""
    writer = start_duel(header(), store)
    writer.note("both sides are the same")
    writer.result(result("fp32", SESSION))
    writer.result(result("bf16", SESSION))
    writer.session(header().cases[0], SESSION)
    writer.result(result("bf16", SESSION, status=Status.FAILED))
    writer.finish("finished")
    writer.close()
    return writer.path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path)


def test_what_was_written_is_read(path: Path) -> None:
    """Sessions follow their case, and what a case came to last counts. Which torch each side had is in its devices."""
    duel = DuelKind().load(path)
    wanted = header(
        results=(result("fp32", SESSION, SESSION), result("bf16", SESSION, status=Status.FAILED)),
        notes=("both sides are the same",), finished=True, path=str(path),
    )  # fmt: skip
    assert duel == wanted and duel.after.devices == (CPU,)
    assert path.name == "20260102T030405.678Z-0a1b2c3d.jsonl" and path.parent.name == "duels"
    assert not duel.ok and [case.measured for case in duel.results] == [True, False]


def test_a_duel_in_older_words_is_read(path: Path) -> None:
    """Files of before say `bout`, `sitting` and `sittings`."""
    whole = DuelKind().load(path)
    text = as_older(path).read_text()
    for new, old in (("result", "bout"), ("session", "sitting"), ("sessions", "sittings")):
        text = text.replace(f'"{new}":', f'"{old}":')
    assert '"result":' not in text and '"sittings":' in text and text.count('"sitting":') == 1
    path.write_text(text)
    assert DuelKind().load(path) == whole


def test_it_is_found_by_its_names(path: Path) -> None:
    """Id, stem, path, the beginning of an id; a run's word means no duel."""
    store = path.parent.parent
    for words, wanted in (
        (("0a1b2c3d", "0a1b", path.stem, str(path)), path),
        (("last", "", "ffff", "20260102", "\0", str(store)), None),
    ):
        assert {DuelKind().find(word, store) for word in words} == {wanted}
    assert DuelKind().find("0a1b", store / "elsewhere") is None


@for_each("cut", range(2, 2000, 97))
def test_a_torn_file_loses_its_end_alone(tmp_path: Path, cut: int) -> None:
    """A kill at any moment: what stands before is read, and it is not finished."""
    path = written(tmp_path)
    raw = path.read_bytes()
    first = raw.index(b"\n") + 1
    path.write_bytes(raw[: max(first, len(raw) - 1 - cut)])
    duel = DuelKind().load(path)
    assert not duel.finished and len(duel.troubles) <= 1
    assert all(result.sessions for result in duel.results)


@for_each(
    ("line", "trouble"),
    [
        *((line, "is broken") for line in ("{", "[]", "3", '{"result": {"before": 3}}', '{"note": 3}')),
        ('{"greeting": 1}', "of a kind"),
        ('{"case": "nowhere", "session": {}}', "is broken"),
    ],
)
def test_a_broken_line_is_left_out_and_named(tmp_path: Path, line: str, trouble: str) -> None:
    path = written(tmp_path)
    lines = as_older(path).read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    duel = DuelKind().load(path)
    assert duel.finished and len(duel.results) == 2
    assert len(duel.troubles) == 1 and duel.troubles[0].startswith("line 3") and trouble in duel.troubles[0]


def test_samples_that_no_clock_gave_are_left_out(path: Path) -> None:
    """So are results whose sides are of different cases."""
    lines = as_older(path).read_text().splitlines()
    negative = json.loads(lines[4])
    negative["session"]["after"][0]["slots"][0]["calls_ns"] = [[-1]]
    mixed = json.loads(lines[2])
    mixed["result"]["after"]["case"]["precision"] = "fp16"
    path.write_text("\n".join([*lines, json.dumps(negative), json.dumps(mixed)]) + "\n")
    duel = DuelKind().load(path)
    assert [trouble[:6] for trouble in duel.troubles] == ["line 8", "line 9"]
    assert len(duel.results) == 2 and len(duel.results[0].sessions) == 2


@for_each(
    ("text", "why"),
    [
        *((text, "is no duel") for text in ("", "{}\n", '{"schema": 1}\n', "[]\n", "\0\n")),
        ('{"schema": 1, "duel": {"id": 3}}\n', "is no duel"),
        ('{"schema": 2, "duel": {}}\n', "newer fp8bench"),
    ],
)
def test_what_is_no_duel_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(text)
    with pytest.raises(StoreError, match=f"file.jsonl .*{why}"):
        DuelKind().load(path)
    (tmp_path / "duels").write_text("a file")
    with pytest.raises(StoreError, match="--store"):
        start_duel(header(), tmp_path)
