"""Stores from elsewhere: bombs, links that lead out, runs that are dated later. Nothing is lost, nobody comes in."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.store.compacted.archive import restore
from fp8bench.store.compacted.manifest import load_manifest, save_manifest
from fp8bench.store.runs.listing import LARGEST_RUN, dated_later, find_run, run_files
from fp8bench.store.runs.run_file import start_run
from tests.commands import Say
from tests.histories import keep, run_at
from tests.store.compacted.test_compacted import compacted


@pytest.fixture
def store(tmp_path: Path) -> Path:
    found = tmp_path / "box"
    for number in range(3):
        keep(found, run_at(number, 700 * number))
    return found


def test_a_file_that_no_memory_holds_is_no_run(store: Path, fp8bench: Say) -> None:
    """A terabyte of nothing takes no disk. Every command goes on with the runs, and `verify` names it."""
    files = list(run_files(store))
    large = files[0].with_name("20270101T000000.000Z-nocommit-aaaaaaaa.jsonl")
    with large.open("wb") as file:
        file.truncate(512 * LARGEST_RUN)
    large.with_name("20270102T000000.000Z-nocommit-bbbbbbbb.jsonl").symlink_to("/dev/zero")
    (store / "runs" / "loop").symlink_to("loop")
    assert list(run_files(store)) == files and find_run("last", store) == files[0]
    for words in (("history", "list", "--runs"), ("history", "verify"), ("fleet", "report", str(store))):
        code, out, err = fp8bench(*words, *(() if "report" in words else ("--store", str(store))))
        assert code == 0 and "Traceback" not in err
        assert ("aaaaaaaa.jsonl: it is no run file" in " ".join(out.split())) == ("verify" in words)
    code, _, err = fp8bench("fleet", "collect", "-", str(store), "--store", str(store.parent / "all"))
    assert code == 3 and "aaaaaaaa.jsonl is no run file" in err and len(list(run_files(store.parent / "all"))) == 3


@pytest.mark.parametrize("link", ["file", "folder"])
def test_nothing_is_restored_through_a_link(store: Path, link: str) -> None:
    """Else a store of somebody's could write its words wherever a link of it leads."""
    compacted(store)
    outside = store.parent / "outside"
    outside.mkdir()
    machine = next((store / "runs").iterdir())
    run = next(machine.iterdir())
    if link == "file":
        run.unlink()
        run.symlink_to(outside / "authorized_keys")
    else:
        shutil.rmtree(machine)
        machine.symlink_to(outside)
    found = restore(store)
    assert not list(outside.iterdir()) and "leads out of the store by a link" in found.damaged[0]
    assert found.written == 0


def test_what_would_unpack_to_far_more_is_not_unpacked(store: Path) -> None:
    """By what its index says, before anything is read; a member that is larger than that is never read."""
    compacted(store)
    manifest = load_manifest(store)
    name, one = next((name, one) for name, one in manifest.archives.items() if "machine" in name)
    shutil.rmtree(store / "runs")
    manifest.archives[name] = one._replace(files=(one.files[0]._replace(size=1 << 40),))
    save_manifest(store, manifest)
    found = restore(store)
    assert len(found.damaged) == 1 and "would unpack to 1099511627776 bytes" in found.damaged[0]


def test_a_clock_that_was_set_back_is_noticed(store: Path) -> None:
    """`last` is the run of the later date then, which is said of the one that was measured after it."""
    newest = next(iter(run_files(store)))
    begun = replace(run_at(0, 0), id="cccccccc", started="2020-01-01T00:00:00.000+00:00")
    writer = start_run(begun, store)
    assert dated_later(writer.path) == newest.stem
    writer.close()
    assert dated_later(newest) == ""
