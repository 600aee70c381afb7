"""asv's view and whatever a disk, a clock, a person or another version can do to it: whole files, and one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asv.results import Results
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8bench.files import lock_folder
from fp8bench.model import Request, Run
from fp8bench.store.asv.files import load_results
from fp8bench.store.asv.view import asv_results_folder, update_view
from fp8bench.store.commit_runs import read_runs_of_commit
from fp8bench.store.series import METHOD_VERSION
from tests.counts import paired
from tests.house.sources import ROOT
from tests.kept import COMMIT, ROUNDS, TITLE, facts, grid_run, keep, results_files

NOBODY = 65534
DONE = "history: 2 cases of commit 0a1b2c3d in the history"
AGAIN = " The run is stored; `fp8bench history rebuild` rebuilds the view."
OTHER = "f00dface" * 5
# The run is written where there is room; afterwards no file may exceed a kilobyte.
FULL_DISK = """
import resource, sys
from pathlib import Path
from fp8bench.store.asv.view import update_view
from tests.kept import grid_run, keep
store = Path(sys.argv[1])
run = keep(grid_run(seconds=1), store)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
print(update_view(run, store))
"""


@pytest.fixture(autouse=True)
def _nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    found = tmp_path / "store"
    assert update_view(keep(grid_run(), found), found) == DONE
    return found


def again(store: Path, **changes: Any) -> str:
    return update_view(keep(grid_run(seconds=1, **changes), store), store)


def the_file(store: Path) -> Path:
    (path,) = results_files(store)
    return path


def num_samples(store: Path, path: Path | None = None) -> set[int]:
    """The number of samples that asv finds per step of each precision."""
    stats = Results.load(str(path or the_file(store)), "box")._stats[f"{TITLE}time"]
    return {one["repeat"] for one in stats if "repeat" in one}


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder except the lock."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file and sets an older time, because readers wait for files that changed just now."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    long_ago(path)


def file_of(store: Path, kind: str) -> Path:
    """The results file, or one of the lists next to it."""
    results = asv_results_folder(store)
    return {"results": the_file(store), "benchmarks.json": results / kind, "machine.json": results / "box" / kind}[kind]


def long_ago(path: Path) -> None:
    os.utime(path, (time.time() - 1000, time.time() - 1000))


# Faults of a disk.


def test_a_full_disk_leaves_the_view_as_it_was_and_keeps_the_run(store: Path) -> None:
    before = contents(store / "asv")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(store)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.startswith(
        f"history: {the_file(store)} cannot be written (File too large). The previous file is unchanged; "
    )
    assert done.stdout.endswith(AGAIN + "\n") and done.stdout.count("\n") == 1
    assert contents(store / "asv") == before
    assert again(store) == DONE and num_samples(store) == {3 * ROUNDS}


@pytest.fixture
def open_store() -> Iterator[Path]:
    """A world-accessible store; root, who can write anywhere, temporarily becomes another user."""
    with tempfile.TemporaryDirectory() as name:
        store = Path(name)
        store.chmod(0o755)
        assert update_view(keep(grid_run(), store), store) == DONE
        root = os.geteuid() == 0
        try:
            yield store
        finally:
            if root:
                os.seteuid(0)
            for path in (store, *store.rglob("*")):
                path.chmod(0o755)


@pytest.mark.parametrize(
    ("closed", "words"),
    [
        ("asv", "history: the lock {store}/asv/.lock cannot be made (Permission denied). Choose another --store DIR."),
        (
            "asv/results/box",
            "history: {file} cannot be written (Permission denied). The previous file is unchanged",
        ),
    ],
)
def test_a_view_without_write_permission_gives_a_message(open_store: Path, closed: str, words: str) -> None:
    run = keep(grid_run(seconds=1), open_store)
    before = contents(open_store / "asv" / "results")
    lock, file = open_store / "asv" / ".lock", the_file(open_store)
    lock.chmod(0o444 if closed == "asv" else 0o666)
    for folder in (open_store / "asv", open_store / "asv" / "results", open_store / closed):
        folder.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
    said = update_view(run, open_store)
    assert said.startswith(words.format(store=open_store, file=file)) and said.endswith(AGAIN)
    assert contents(open_store / "asv" / "results") == before


def test_a_file_in_place_of_the_views_folder_gives_a_message(tmp_path: Path) -> None:
    (tmp_path / "asv").write_text("notes")
    asv = tmp_path / "asv"
    said = again(tmp_path)
    assert said == f"history: the lock {asv}/.lock cannot be made ({asv} is a file). Choose another --store DIR.{AGAIN}"
    assert (tmp_path / "asv").read_text() == "notes"


def test_a_dangling_link_is_followed_or_gives_a_message(tmp_path: Path) -> None:
    (tmp_path / "asv").mkdir()
    link = tmp_path / "asv" / "results"
    link.symlink_to(tmp_path / "elsewhere")
    assert again(tmp_path) == DONE and link.is_symlink() and (tmp_path / "elsewhere" / "benchmarks.json").exists()
    (tmp_path / "unplugged").write_text("")
    link.unlink()
    link.symlink_to(tmp_path / "unplugged" / "results")
    said = again(tmp_path)
    assert "cannot be " in said and "(Not a directory)" in said and said.endswith(AGAIN)


def test_a_held_lock_is_waited_for_and_then_gives_a_message(store: Path) -> None:
    run = keep(grid_run(seconds=1), store)
    before = contents(store / "asv")
    with lock_folder(store / "asv", 0):
        said = update_view(run, store, timeout=0.05)
    assert said.startswith("history: another process has held the lock ") and said.endswith(AGAIN)
    assert "for 0.05 s." in said and contents(store / "asv") == before
    assert update_view(run, store) == DONE and num_samples(store) == {2 * ROUNDS}


# Changes by a person, an editor or another version.

BROKEN = {
    "empty": "",
    "half": '{"version": 2, "results": {"a": [[1.0',
    "list": "[]",
    "number": "7",
    "no version": "{}",
    "strange": '{"version": 2, "results": 3}',
    "twice": '{"version": 2, "a": 1, "a": 2}',
    "bytes": "\udcff\udcfe\x00",
}


@pytest.mark.parametrize(("name", "kind"), paired([*BROKEN], ["results", "benchmarks.json", "machine.json"]))
def test_a_broken_file_is_renamed_and_written_again(store: Path, kind: str, name: str) -> None:
    path = file_of(store, kind)
    sound = json.loads(path.read_text())
    text = BROKEN[name].replace('"version": 2', f'"version": {sound["version"]}')
    path.write_text(text, errors="surrogateescape")
    long_ago(path)
    said = again(store)
    assert said == f"{DONE}; {path.name} was broken and written again; the old file is {path.name}.broken-1"
    assert path.with_name(f"{path.name}.broken-1").read_text(errors="surrogateescape") == text
    assert json.loads(path.read_text()).keys() == sound.keys() and num_samples(store) == {2 * ROUNDS}
    assert again(store) == DONE


@pytest.mark.parametrize("kind", ["results", "benchmarks.json", "machine.json"])
@pytest.mark.parametrize(("version", "advice"), [(99, "Upgrade fp8bench."), (0, "Run 'asv update' first.")])
def test_a_file_of_another_version_is_left_alone(store: Path, kind: str, version: int, advice: str) -> None:
    """It may be valid, and its writer knows more."""
    path = file_of(store, kind)
    edit(path, lambda content: content.update(version=version))
    before = contents(store / "asv")
    said = again(store)
    assert said.startswith(f"history: {path} was written by ") and said.endswith(advice + AGAIN)
    assert contents(store / "asv") == before


def test_foreign_rows_and_keys_stay_in_a_file(store: Path) -> None:
    path = the_file(store)
    foreign = [[1.5], [], "7", 1, 2.0]

    def change(content: dict[str, Any]) -> None:
        content["results"] |= {"harness.track_start": foreign, "harness.track_end": "by hand"}
        content |= {"later": [1], "durations": {"<build>": 3.0}}

    edit(path, change)
    edit(
        asv_results_folder(store) / "benchmarks.json",
        lambda known: known.update(x={"name": "x", "params": [], "unit": "s"}),
    )
    edit(asv_results_folder(store) / "box" / "machine.json", lambda known: known.update(gpu="H200", note=[1]))
    assert again(store) == DONE
    content = json.loads(path.read_text())
    assert content["results"]["harness.track_start"] == foreign
    assert content["results"]["harness.track_end"] == "by hand"
    assert (content["later"], content["durations"]) == ([1], {"<build>": 3.0})
    benchmarks = json.loads((asv_results_folder(store) / "benchmarks.json").read_text())
    assert benchmarks["x"] == {"name": "x", "params": [], "unit": "s"} and f"{TITLE}time" in benchmarks
    assert json.loads((asv_results_folder(store) / "box" / "machine.json").read_text())["note"] == [1]


def test_a_changed_figure_is_restored(store: Path) -> None:
    path = the_file(store)
    before = load_results(path)

    def change(content: dict[str, Any]) -> None:
        content["results"][f"{TITLE}time"][0][0] = 1e9
        content["results"][f"{TITLE}time_gemm"] = content["results"][f"{TITLE}time_gemm"][:2]

    edit(path, change)
    again(store)
    after = load_results(path)
    assert after.rows[f"{TITLE}time"].values[0] == before.rows[f"{TITLE}time"].values[0]
    assert after.rows[f"{TITLE}time_gemm"].values[0] == before.rows[f"{TITLE}time_gemm"].values[0]


def test_the_machine_json_of_another_machine_gives_a_message(store: Path) -> None:
    """asv would show nothing from such a folder."""
    path = asv_results_folder(store) / "box" / "machine.json"
    edit(path, lambda content: content.update(machine="other"))
    before = contents(store / "asv")
    said = again(store)
    assert said == (
        f"history: {path} names the machine 'other', but its folder is 'box': asv ignores that folder. Make both "
        f"names equal.{AGAIN}"
    )
    assert contents(store / "asv") == before


def test_results_of_commits_with_the_same_prefix_are_not_mixed(store: Path) -> None:
    edit(the_file(store), lambda content: content.update(commit_hash=COMMIT[:8] + "f" * 32))
    before = contents(store / "asv")
    assert "has the results of a different commit, 0a1b2c3dffffffff" in again(store)
    assert contents(store / "asv") == before
    edit(the_file(store), lambda content: content.update(commit_hash=COMMIT[:10]))  # as set with asv run
    assert again(store) == DONE


def test_a_run_outside_of_the_store_is_reported_as_not_in_its_view(store: Path, tmp_path: Path) -> None:
    run = keep(grid_run(seconds=1), tmp_path / "elsewhere")
    said = update_view(run, store)
    assert said == f"history: the run {run.id} was not found in {store}, so it is not in asv's view.{AGAIN}"
    assert num_samples(store) == {ROUNDS}


# Faults of a clock and a repository.


def test_a_clock_that_went_backwards_loses_nothing(store: Path) -> None:
    run = keep(grid_run(started="2025-12-31T23:00:00+00:00"), store)
    assert update_view(run, store) == DONE and num_samples(store) == {2 * ROUNDS}
    assert load_results(the_file(store)).rows[f"{TITLE}time"].started_at // 1000 == 1767225600
    first, second = read_runs_of_commit(store, COMMIT)
    assert first.run.id == run.id != second.run.id


def test_a_run_from_the_future_does_not_decide_the_version(store: Path) -> None:
    """asv shows the version of the code; an old one must not hide it because of a wrong clock."""
    future = keep(grid_run(started="2040-01-01T00:00:00+00:00", version="0"), store)
    update_view(future, store)
    row = load_results(the_file(store)).rows[f"{TITLE}time"]
    assert row.version == f"{METHOD_VERSION}.1" and num_samples(store) == {ROUNDS}
    assert row.started_at == 2208988800000
    assert again(store) == DONE and num_samples(store) == {2 * ROUNDS}


def test_runs_of_an_old_version_alone_are_filed_under_it(tmp_path: Path) -> None:
    """asv hides them under the current version, and shows them with the old one."""
    update_view(keep(grid_run(version="0"), tmp_path), tmp_path)
    assert load_results(the_file(tmp_path)).rows[f"{TITLE}time"].version == f"{METHOD_VERSION}.0"
    assert (
        json.loads((asv_results_folder(tmp_path) / "benchmarks.json").read_text())[f"{TITLE}time"]["version"]
        == f"{METHOD_VERSION}.1"
    )


def test_a_start_without_a_zone_is_in_utc(store: Path) -> None:
    update_view(keep(grid_run(started="2026-02-01T00:00:00"), store), store)
    assert load_results(the_file(store)).rows[f"{TITLE}time"].started_at == 1769904000000


def test_a_date_that_was_not_known_is_brought_up(tmp_path: Path) -> None:
    update_view(keep(grid_run(facts(commit_date=None)), tmp_path), tmp_path)
    assert load_results(the_file(tmp_path)).date == 0
    assert again(tmp_path) == DONE and load_results(the_file(tmp_path)).date == 1767268800000
    edit(the_file(tmp_path), lambda content: content.update(date=5))
    assert again(tmp_path) == DONE and load_results(the_file(tmp_path)).date == 5


def test_a_machine_that_was_renamed_goes_on_in_a_folder_of_its_own(store: Path) -> None:
    before = contents(asv_results_folder(store) / "box")
    assert update_view(keep(grid_run(facts(machine="new")), store), store) == DONE
    assert contents(asv_results_folder(store) / "box") == before
    old, new = results_files(store)
    assert Results.load(str(old), "box").params["machine"] == "box"
    assert Results.load(str(new), "new").params["machine"] == "new"


def test_a_machine_name_too_long_for_a_folder_gives_a_message(tmp_path: Path) -> None:
    said = update_view(keep(grid_run(facts(machine="m" * 300) | {"machine": "box"}), tmp_path), tmp_path)
    assert "(File name too long)" in said and said.endswith(AGAIN)


# Messages when nothing is written.

STAYS = "; the run is stored, but adds nothing to the history"


def elsewhere(workload: str) -> Run:
    """A run of a suite whose cases are in no grid."""
    run = grid_run(seconds=1)
    cases = [replace(one.case, workload=workload, params=(("m", 3),)) for one in run.records]
    return replace(run, records=tuple(replace(one, case=case) for one, case in zip(run.records, cases, strict=True)))


DIFFER = "from commit 0a1b2c3d, so these are not its numbers"
NAMELESS = "it names no machine, or one whose name cannot be a folder"
NOT_FILED: list[tuple[Run, str]] = [
    (grid_run(facts(commit=None, dirty=None)), "this was not measured in a git repository"),
    (grid_run(facts(None, commit_unknown="no, she said")), "git names no commit here (no, she said)"),
    (grid_run(facts("HEAD")), "this was not measured in a git repository"),
    (grid_run(facts(7)), "this was not measured in a git repository"),
    (grid_run(facts(dirty=True)), f"the files differ {DIFFER}"),
    (grid_run(facts(dirty=None)), f"the files may differ (git does not report it) {DIFFER}"),
    (grid_run(request=Request("gemm", seed=3)), "it was measured with --seed 3, but the history tracks seed 0"),
    (elsewhere("no_such"), "the suite no_such is unknown; --import its module"),
    (elsewhere("gemm"), "the history does not track its cases (--grid measures those that it tracks)"),
    *(
        (grid_run(started=text), f"its start, {text!r}, is not a time")
        for text in ("", "yesterday", "2026-13-01", "9" * 30)
    ),
    # Facts come from foreign files and may not lead outside the store.
    *((grid_run(facts(asv_machine=name)), NAMELESS) for name in ("../../etc", "a/b", "", ".", "..", "a\0b", 7, None)),
]


@pytest.mark.parametrize("number", range(len(NOT_FILED)), ids=lambda number: NOT_FILED[number][1])
def test_runs_that_do_not_belong_to_a_commit_give_a_message(store: Path, number: int) -> None:
    run, reason = NOT_FILED[number]
    before = contents(store / "asv")
    assert update_view(keep(run, store), store) == f"history: {reason}{STAYS}"
    assert contents(store / "asv") == before


def test_outside_a_repository_only_those_with_a_history_get_a_message(tmp_path: Path) -> None:
    run, reason = NOT_FILED[0]
    run = keep(replace(run, request=replace(run.request, grid=False)), tmp_path)
    assert update_view(run, tmp_path) == ""
    (tmp_path / "asv" / "results").mkdir(parents=True)
    assert update_view(run, tmp_path) == f"history: {reason}{STAYS}"


# Results that do not depend on the order.


@pytest.mark.slow
@settings(max_examples=12)
@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_the_view_does_not_depend_on_the_order_of_writers(order: list[int], writers: list[int]) -> None:
    seen = set()
    with tempfile.TemporaryDirectory() as name:
        for places, who in (((0, 1, 2, 3), [3]), (order, writers)):
            store = Path(name) / f"store{len(seen)}"
            made = [grid_run(seconds=place, rounds=3 + place, id=f"0000000{place}") for place in range(4)]
            kept = {place: keep(made[place], store) for place in places}
            for writer in who:
                assert update_view(kept[writer], store) == DONE
            view = contents(store / "asv")
            assert update_view(kept[0], store) == DONE and contents(store / "asv") == view
            seen.add(tuple(sorted(view.items())))
    assert len(seen) == 1
