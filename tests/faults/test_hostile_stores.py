"""Stores from elsewhere: files that no memory holds. Nothing is lost, nobody comes in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8bench.files import MAX_FILE_BYTES
from fp8bench.store.runs.listing import find_run, run_files
from tests.commands import Say
from tests.histories import keep, run_at


@pytest.fixture
def store(tmp_path: Path) -> Path:
    found = tmp_path / "box"
    for number in range(3):
        keep(found, run_at(number, 700 * number))
    return found


def test_a_file_larger_than_memory_is_not_read_as_a_run(store: Path, fp8bench: Say) -> None:
    files = list(run_files(store))
    large = files[0].with_name("20270101T000000.000Z-nocommit-aaaaaaaa.jsonl")
    with large.open("wb") as file:
        file.truncate(64 * MAX_FILE_BYTES)
    large.with_name("20270102T000000.000Z-nocommit-bbbbbbbb.jsonl").symlink_to("/dev/zero")
    (store / "runs" / "loop").symlink_to("loop")
    assert list(run_files(store)) == files and find_run("last", store) == files[0]
    for words in (("history", "list", "--runs"), ("history", "verify"), ("fleet", "report", str(store))):
        code, out, err = fp8bench(*words, *(() if "report" in words else ("--store", str(store))))
        assert code == 0 and "Traceback" not in err
        assert ("aaaaaaaa.jsonl: it is not a run file" in " ".join(out.split())) == ("verify" in words)
    code, _, err = fp8bench("fleet", "collect", "-", str(store), "--store", str(store.parent / "all"))
    assert code == 3 and "aaaaaaaa.jsonl is not a run file" in err and len(list(run_files(store.parent / "all"))) == 3


@pytest.mark.parametrize(
    ("kind", "why"), [("endless", "it has 64.0 GiB"), ("pipe", "it is a named pipe"), ("loop", "Too many levels of")]
)
def test_files_of_a_store_neither_block_nor_fill_the_memory(store: Path, fp8bench: Say, kind: str, why: str) -> None:
    beside = ("acks.jsonl", "ceilings/history.jsonl", "inference.jsonl", "plans/a.json", "sensitivity/a.json")
    for name in (
        *beside,
        "trainings/20990101T000000.000Z-nocommit-aaaaaaaa/steps.jsonl",
        "asv/results/benchmarks.json",
    ):
        path = store / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "endless":
            path.touch()
            os.truncate(path, 64 * MAX_FILE_BYTES)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(path.name)
    for words in ("history verify", "history regressions", "history rebuild", "advise last"):
        code, out, err = fp8bench(*words.split(), "--store", str(store))
        assert why in " ".join((out + err).split()) and "Traceback" not in err, words
        assert (code == 0) == (words == "history regressions"), words
