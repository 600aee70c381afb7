"""A store that was compacted, copied and restored: every command says the same of it."""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import tarfile
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fp8bench import pipeline
from fp8bench.errors import RunNotFound, StoreError
from fp8bench.features.duel.kind import start_duel
from fp8bench.features.train.kind import start_training
from fp8bench.features.train.values import Training
from fp8bench.files import write_whole
from fp8bench.jobs.several_runs import cut_into_cells
from fp8bench.jobs.several_runs import measure_cell as measure
from fp8bench.model import Ceilings, Environment, Request
from fp8bench.protocols import SilentObserver
from fp8bench.store.ceilings import new_ceilings
from fp8bench.store.commit_runs import find_runs
from fp8bench.store.compacted import manifest as manifests
from fp8bench.store.compacted.archive import Restored, contents, restore, stated, write_archive
from fp8bench.store.compacted.compact import check_compacted
from fp8bench.store.compacted.manifest import archive_of, load_manifest, points_of, save_manifest
from fp8bench.store.fleet_plans import keep_plan, write_plan
from fp8bench.store.runs.listing import find_run
from tests.commands import Say, unfolded
from tests.counts import for_each
from tests.duels import SESSION, header, result
from tests.facts import CPU
from tests.features.train.test_kind import LINES
from tests.golden.test_golden import FAILING, NEW, OLD, SAMPLE, SERIES, Document, a_place
from tests.histories import keep, run_at, tree
from tests.store.compacted.test_compacted import compacted, opened
from tests.trainings import training

STORE = Path(".fp8bench")
GEMM = Request("gemm", ("fp32",), quick=True, rounds=2, energy=False, isolation=False, axes=(("shape", ("16", "24")),))
# Whatever reads a store. PLAN is the plan's file, OUT a folder for what is written.
COMMANDS = [
    *(f"show {OLD}{how}" for how in ("", " --csv -", " --json", " --explain")),
    f"show {FAILING}", f"show {SAMPLE} --json",
    "show last",
    "show CELL --fleet", "show CELL --fleet --json", "show 0a1b2c3d", "show 0a1b2c3d --json", "show TRAINING",
    "show TRAINING --csv -", "show .fp8bench/runs/PATH", f"report {OLD} --html OUT/old.html --md OUT/old.md",
    "report CELL --html OUT/cell.html", f"report {SAMPLE} --html OUT/sample.html", f"compare {OLD} {NEW}",
    "compare 359f21c3 7eccd2d9 --csv -", f"gate {OLD} {NEW} --no-rerun --junit OUT/gate.xml",
    "gate --duel 0a1b2c3d --no-rerun", "gate --history --no-rerun", f"advise {SAMPLE}", f"advise {FAILING} --json",
    "fleet status PLAN", "fleet status PLAN --json", "fleet report PLAN --html OUT/fleet.html",
    "fleet report .fp8bench", "fleet report .fp8bench --json", "history list", "history list --runs",
    f"history show {SERIES}", "history regressions --all", "history regressions --json", "history verify",
    "store compact", "history rebuild",
]  # fmt: skip


def of_all_kinds(folder: Path) -> dict[str, str]:
    """Runs that are real, a fleet's cells, a duel, a training, ceilings and an acknowledgement; words for commands."""
    plan = cut_into_cells(GEMM, *pipeline.plan_only(GEMM, folder), "")
    write_plan(plan, folder / "plan.json")
    cell = measure(plan, 0, STORE, SilentObserver(), "")[1]
    keep_plan(plan, STORE)
    with_duel = start_duel(header(), STORE)
    with_duel.result(result("fp32", SESSION))
    with_duel.finish("finished")
    with_duel.close()
    own: Training = training()
    writer = start_training(own, STORE)
    writer.keep(0, 0, None, ())
    writer.append(LINES)
    writer.finish("finished")
    new_ceilings(STORE, Environment({"machine": "box", "torch": "2.13.0"}), CPU, lambda: Ceilings(()))
    (STORE / "acks.jsonl").write_text("no acknowledgement\n")
    (STORE / "data").mkdir()
    (STORE / "data" / "text").write_text("prepared")
    path = Path(cell.path).relative_to(STORE / "runs").as_posix()
    own_files = {"PLAN": str(folder / "plan.json"), "OUT": str(folder / "out")}
    return {"CELL": cell.id, "TRAINING": own.id, "PATH": path, **own_files}


def said(fp8bench: Say, names: dict[str, str]) -> dict[str, object]:
    """What commands print, their exit codes, and what they write."""
    found: dict[str, object] = {}
    out = Path(names["OUT"])
    for words in COMMANDS:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        line = words
        for name, meant in names.items():
            line = line.replace(name, meant)
        code, told, err = fp8bench(*shlex.split(line))
        assert code != 2, err
        found[words] = code, told, unfolded(err), tree(out)
    return found


def names_of(store: Path) -> list[str]:
    return sorted(one.path for some in stated(store).values() for one in some)


@pytest.mark.slow
def test_every_command_says_the_same(tmp_path: Path, fp8bench: Say) -> None:
    with a_place(tmp_path, Document("", "stored")):
        names = of_all_kinds(tmp_path)
        fp8bench("history", "rebuild")
        compacted(STORE)
        here = shutil.copytree(STORE, tmp_path / "here")
        meant = said(fp8bench, names)
        shutil.rmtree(STORE)
        for packed in ("points", "archive"):
            shutil.copytree(here / packed, STORE / packed)
        restore(STORE)
        kept = names_of(here)
        there = {path.relative_to(STORE).as_posix() for path in STORE.rglob("*") if path.is_file()}
        assert there - set(kept) == {
            "points/index.json", "points/.lock", "points/points.figures", "archive/.lock",
            *(path.relative_to(STORE).as_posix() for path in load_manifest(STORE).written(STORE)),
        }  # fmt: skip
        assert {name.partition("/")[0] for name in kept} == {
            "runs", "duels", "trainings", "ceilings", "acks.jsonl", "asv", "plans"
        }  # fmt: skip
        for name in kept:
            assert (STORE / name).read_bytes() == (here / name).read_bytes()
            assert (STORE / name).stat().st_mtime_ns == (here / name).stat().st_mtime_ns
        assert fp8bench("history", "list")[2] == ""
        assert said(fp8bench, names) == meant


@pytest.fixture
def store(tmp_path: Path) -> Path:
    found = tmp_path / "box"
    for number in range(3):
        keep(found, run_at(number, 700 * number))
    (found / "advice.jsonl").write_text("")
    compacted(found)
    return found


def files(store: Path) -> dict[str, bytes]:
    return {name: (store / name).read_bytes() for name in names_of(store)}


def run_of(store: Path, month: str) -> Path:
    (path,) = (store / "runs").rglob(f"{month}*.jsonl")
    return path


def test_runs_that_were_taken_away_are_written_again(store: Path) -> None:
    before = files(store)
    shutil.rmtree(store / "runs" / "box")
    for word in ("last", "202603"):
        with pytest.raises(RunNotFound, match="in compacted files alone: `fp8bench store restore"):
            find_run(word, store)
    with pytest.raises(RunNotFound, match="store restore"):
        find_runs(str(store), store)
    assert restore(store) == Restored(written=3, there=1)
    assert restore(store) == Restored(there=4)
    assert files(store) == before and not compacted(store).read
    changed, gone = run_of(store, "202601"), run_of(store, "202602")
    changed.write_bytes(b"another")
    os.utime(run_of(store, "202603"))
    gone.unlink()
    assert restore(store) == Restored(written=1, there=2, own=[changed.relative_to(store).as_posix()])
    assert changed.read_bytes() == b"another" and is_compacted(run_of(store, "202603"), store)
    with pytest.raises(StoreError, match="nothing was compacted of"):
        restore(store / "runs")


def is_compacted(path: Path, store: Path) -> bool:
    """Whether a run file has the date by which what was compacted knows it."""
    return load_manifest(store).files[path.relative_to(store).as_posix()][1] == path.stat().st_mtime_ns


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        half = len(content) // 2
        path.write_bytes(content[:half] if how == "cut" else content[:half] + b"\0?" + content[half + 2 :])


@for_each("how", ["cut", "changed", "gone"])
def test_a_damaged_archive_is_named_and_never_serves(store: Path, how: str, fp8bench: Say, tmp_path: Path) -> None:
    before = files(store)
    path = store / "archive" / "machine=box" / "month=2026-02.tar.gz"
    damage(path, how)
    (fault,), _ = check_compacted(store)
    assert fault.path == str(path)
    away = shutil.copytree(store, tmp_path / "away")
    shutil.rmtree(away / "runs")
    code, out, err = fp8bench("store", "restore", "--store", str(away))
    said = f"{away / path.relative_to(store)} is not the file that was written, and none of its files is taken"
    assert code == 2 and "2 files written, 1 here already" in " ".join(out.split())
    assert said.replace(" ", "") in "".join(err.split())
    assert files(away) == {name: content for name, content in before.items() if "/202602" not in name}
    assert compacted(store).archived.mended == ["archive/machine=box/month=2026-02"]
    assert not check_compacted(store)[0]


def test_a_file_is_held_against_its_digest(store: Path) -> None:
    manifest = load_manifest(store)
    path, one = archive_of(store, "archive/beside"), manifest.archives["archive/beside"]
    changed = [one._replace(files=(one.files[0]._replace(**{name: value}),))
               for name, value in (("digest", "0" * 64), ("size", 1), ("path", "acks.jsonl"))]  # fmt: skip
    for archive in changed:
        with pytest.raises(StoreError, match="as it was written"):
            list(contents(path, archive))
    manifest.archives["archive/beside"] = one._replace(files=(one.files[0]._replace(path="../x"),))
    save_manifest(store, manifest)
    (store / "advice.jsonl").unlink()
    assert "which is none of a store" in restore(store).damaged[0]
    assert not (store.parent / "x").exists()


def test_an_archive_is_a_tar_of_the_same_bytes_each_time(store: Path, tmp_path: Path) -> None:
    """Whoever wrote it, and whenever: nobody's name and no date is in it, and any tar reads it."""
    name = "archive/machine=box/month=2026-01"
    path = archive_of(store, name)
    with tarfile.open(path) as tar:
        assert {(one.mtime, one.uid, one.gid, one.uname, one.gname, one.mode) for one in tar} == {
            (0, 0, 0, "", "", 0o644)
        }
        run = run_of(store, "202601")
        packed = tar.extractfile(run.relative_to(store).as_posix())
        assert packed is not None and packed.read() == run.read_bytes()
    assert path.read_bytes()[4:8] == bytes(4)  # gzip's own date
    os.utime(run, ns=(1, 1))
    made, _ = write_archive(tmp_path / "again.tar.gz", store, stated(store)[name])
    assert (tmp_path / "again.tar.gz").read_bytes() == path.read_bytes()
    assert made.digest == load_manifest(store).archives[name].digest
    assert len(gzip.decompress(path.read_bytes())) % 512 == 0


def test_one_of_an_earlier_fp8bench_is_not_written_over(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the runs it is all that there is of them: whoever wrote it has to write them back."""
    known = load_manifest(store)
    with monkeypatch.context() as patches:
        patches.setattr(manifests, "VERSION", 2)
        save_manifest(store, known)
    before = (points_of(store) / "index.json").read_bytes()
    shutil.rmtree(store / "runs")
    for does in (compacted, opened, restore):
        with pytest.raises(StoreError, match=r"is of version 2, and .* reads 5.*the fp8bench that compacted"):
            does(store)
    (fault,), _ = check_compacted(store)
    assert fault.broken and "restores its runs" in fault.remedy
    assert (points_of(store) / "index.json").read_bytes() == before


def test_a_file_that_changes_while_it_is_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep(store, run_at(5, 10))
    read = Path.read_bytes

    def growing(self: Path) -> bytes:
        content = read(self)
        if self == path:
            with path.open("ab") as file:
                file.write(b"\n")
        return content

    with monkeypatch.context() as patches:
        patches.setattr(Path, "read_bytes", growing)
        assert compacted(store).archived.left == [path.relative_to(store).as_posix()]
    done = compacted(store)
    assert done.archived.files == 5 and not done.archived.left
    assert not compacted(store).archived.written


@for_each("ends_at", range(4))
def test_restoring_that_was_cut_off(store: Path, ends_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before, writes = files(store), count()
    shutil.rmtree(store / "runs")
    (store / "advice.jsonl").unlink()

    def cut_off(*arguments: Any, **options: Any) -> None:
        if next(writes) == ends_at:
            raise OSError(28, "No space left on device")
        write_whole(*arguments, **options)

    with monkeypatch.context() as patches:
        patches.setattr("fp8bench.store.compacted.archive.write_whole", cut_off)
        with pytest.raises(StoreError, match="No space left on device"):
            restore(store)
    lacking = 3 - sum(name.startswith("runs/") for name in names_of(store))
    if 0 < lacking < 3:
        are = "a run file that was compacted is" if lacking == 1 else "2 run files that were compacted are"
        assert opened(store).troubles[0].startswith(f"{are} not in {store}")
    restore(store)
    assert files(store) == before and not opened(store).troubles


def test_a_large_and_an_empty_file(tmp_path: Path) -> None:
    large = tmp_path / "runs" / "box" / "20260101T000000.000Z-nocommit-1.jsonl"
    write_whole(large, os.urandom(2 << 20))
    write_whole(tmp_path / "acks.jsonl", b"")
    assert compacted(tmp_path).archived.files == 2
    content = large.read_bytes()
    large.unlink()
    (tmp_path / "acks.jsonl").unlink()
    assert restore(tmp_path) == Restored(written=2) and large.read_bytes() == content
    assert not (tmp_path / "acks.jsonl").read_bytes()
