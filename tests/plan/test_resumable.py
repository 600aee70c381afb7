"""Going on with a run: only what is missing, only where it began, and never two at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8bench import pipeline
from fp8bench.errors import NotKept, StoreError, UsageError
from fp8bench.model import Case, DeviceFacts, Environment, Group, Plan, Record, Request, Run
from fp8bench.plan.resumable import find_condition_difference, refuse_changed_conditions, refuse_missing_user_files
from fp8bench.protocols import SilentObserver
from fp8bench.registry import workloads
from fp8bench.store.runs.listing import list_running_file_stems
from fp8bench.store.runs.run_file import RunWriter, find_incomplete_groups, load_run
from fp8bench.user_code import import_user_modules
from tests.counts import for_each
from tests.own_suites import adding_up, forgotten

pytestmark = pytest.mark.usefixtures("short_slots")

SUITE = adding_up("sums", 0, 1, 2, 3)


class Watching(SilentObserver):
    """Records the visited places; optionally interrupts before one of them."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.worked: list[int] = []
        self._stop_at = stop_at

    def working(self, case: Case, doing: str, share: float) -> None:
        place = int(case.param("n"))
        if place == self._stop_at:
            raise KeyboardInterrupt
        if place not in self.worked:
            self.worked.append(place)

    def finished(self, record: Record) -> None:
        return None


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The suite's file. Commits to this repository during a test would change the commit that resumption checks."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sums_suite.py"
    path.write_text(SUITE)
    with forgotten(tmp_path):
        import_user_modules([str(path)])
        yield str(path)


def request_for(suite: str) -> Request:
    return Request("sums", ("fp32", "bf16"), ("cpu",), rounds=2, imports=(suite,), isolation=False)


def cut_off(suite: str, store: Path, stop_at: int | None = 2) -> Run:
    return pipeline.execute(request_for(suite), store, Watching(stop_at), "the first half")


def test_only_what_is_missing_is_measured(suite: str, tmp_path: Path) -> None:
    first = cut_off(suite, tmp_path)
    path = Path(first.path)
    before = path.read_bytes()
    watching = Watching()
    resumed, run = pipeline.resume(path, tmp_path, watching, "the second half")
    assert resumed and run.finished and find_incomplete_groups(run) == ()
    assert watching.worked == [2, 3]
    assert path.read_bytes().startswith(before)
    assert run.records[:4] == first.records and len(run.records) == 8
    assert [one.command for one in run.resumptions] == ["the second half"]
    assert load_run(path) == run


def test_a_run_that_lacks_its_end_alone_gets_it(suite: str, tmp_path: Path) -> None:
    path = Path(cut_off(suite, tmp_path, stop_at=None).path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    watching = Watching()
    resumed, run = pipeline.resume(path, tmp_path, watching, "the end")
    assert resumed and run.finished and watching.worked == []


@pytest.mark.parametrize("cut", [1, 30, 300])
def test_a_group_cut_in_its_middle_is_measured_anew_as_a_whole(suite: str, tmp_path: Path, cut: int) -> None:
    first = cut_off(suite, tmp_path)
    path = Path(first.path)
    lines = path.read_bytes().splitlines(keepends=True)
    # Header, two groups of two records, the end: keep the third record and a part of the fourth.
    path.write_bytes(b"".join(lines[:4]) + lines[4][:cut])
    watching = Watching()
    _, run = pipeline.resume(path, tmp_path, watching, "again")
    assert watching.worked == [1, 2, 3] and run.finished and len(run.records) == 8
    assert run.records[:2] == first.records[:2]
    assert run.records[2] != first.records[2], "a record of the sitting that was cut off"
    assert len(run.troubles) == 1 and "line 5 is broken" in run.troubles[0]


def test_two_processes_never_write_one_run(suite: str, tmp_path: Path) -> None:
    path = Path(cut_off(suite, tmp_path).path)
    before = path.read_bytes()
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="another process is writing the run"):
            pipeline.resume(path, tmp_path, Watching(), "again")
    assert path.read_bytes() == before


def test_a_run_beside_another_one_says_so(suite: str, tmp_path: Path) -> None:
    other = Path(cut_off(suite, tmp_path).path)
    with other.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run = cut_off(suite, tmp_path, stop_at=None)
        assert list_running_file_stems(Path(run.path)) == [other.stem]
    assert list_running_file_stems(Path(run.path)) == []
    assert len(run.notes) == 1 and f"run {other.stem} was measured at the same time (load" in run.notes[0]
    assert load_run(other).notes == ()


def test_what_cannot_be_written_is_not_lost(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = RunWriter.append
    appended = []

    def full(self: RunWriter, records: list[Record]) -> None:
        appended.append(1)
        if len(appended) == 2:
            with monkeypatch.context() as patch:
                patch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space")))
                append(self, records)
        append(self, records)

    monkeypatch.setattr(RunWriter, "append", full)
    with pytest.raises(NotKept, match=r"cannot be written \(No space\)") as caught:
        cut_off(suite, tmp_path, stop_at=None)
    run = caught.value.run
    assert isinstance(run, Run) and len(run.records) == 4 and not run.finished
    assert len(load_run(Path(run.path)).records) >= 2
    monkeypatch.setattr(RunWriter, "append", append)
    _, whole = pipeline.resume(Path(run.path), tmp_path, Watching(), "after making room")
    assert whole.finished and len(whole.records) == 8


def test_the_header_comes_with_the_file(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: RunWriter, values: object) -> None:
        raise SystemExit

    monkeypatch.setattr(RunWriter, "_append_numbered_lines", killed)
    with pytest.raises(SystemExit):
        cut_off(suite, tmp_path)
    assert [one for one in tmp_path.glob("runs/*/*") if one.is_file()] == []


FACTS = DeviceFacts("cpu", 0, "a processor", 1 << 30, "2.13.0")
SAME = {
    "machine": "box",
    "fp8bench": "0.1.0",
    "python": "3.11",
    "torch": "2.13.0",
    "torch_git": None,
    "threads": 1,
    "commit": None,
    "dirty": None,
    "imports_sha256": None,
}


def planned(precision: str = "fp32", version: str = "1") -> Plan:
    from tests.fakes import planned as one

    case = replace(one(precision), case=replace(one(precision).case, version=version))
    return Plan((Group((case,), 0),))


def a_run(**changes: object) -> Run:
    environment = Environment({**SAME, **changes})  # type: ignore[dict-item]
    return Run("abcd", "then", "a test", Request("gemm"), planned(), environment, (FACTS,))


def test_changed_load_and_memory_do_not_forbid_resuming() -> None:
    """Load and free memory may have changed."""
    facts = replace(FACTS, memory_bytes=1 << 31)
    assert not find_condition_difference(
        a_run(load_1min=0.1), planned(), (facts,), Environment({**SAME, "load_1min": 9.9})
    )


@for_each(
    ("name", "called", "now"),
    [
        ("machine", "machine", "other"),
        ("fp8bench", "fp8bench", "9.9"),
        ("python", "python", "3.12"),
        ("torch", "torch", "2.11"),
        ("torch_git", "torch_git", "x"),
        ("threads", "threads", 2),
        ("commit", "the commit", "0123abcd"),
        ("dirty", "whether files differ from the commit", True),
        ("imports_sha256", "the code of --import", "0123abcd"),
        ("switches_set", "the setting of switches", "oneDNN at False"),
    ],
)
def test_another_machine_or_software_is_refused(name: str, called: str, now: str | int) -> None:
    with pytest.raises(UsageError, match=rf"cannot be resumed here: {called} was .* and is {now}.*start a new run"):
        refuse_changed_conditions(a_run(), planned(), (FACTS,), Environment({**SAME, name: now}))


@for_each(
    ("facts", "plan", "words"),
    [
        ((replace(FACTS, name="another"),), planned(), "cpu was a processor and is another"),
        ((replace(FACTS, kind="cuda"),), planned(), "there is no device cpu"),
        ((FACTS,), planned("bf16"), "it would be planned differently now"),
        ((FACTS,), Plan((*planned().groups, *planned("bf16").groups)), "planned differently now .*bf16"),
        ((FACTS,), planned(version="2"), "the workload gemm was version 1 and is 2"),
    ],
    ids=["device", "no device", "case gone", "case more", "version"],
)
def test_another_device_or_plan_is_refused(facts: tuple[DeviceFacts, ...], plan: Plan, words: str) -> None:
    """Halves of two different things are not a run."""
    with pytest.raises(UsageError, match=words):
        refuse_changed_conditions(a_run(), plan, facts, Environment(dict(SAME)))


def test_a_run_without_its_header_is_not_resumed(suite: str, tmp_path: Path) -> None:
    path = Path(cut_off(suite, tmp_path).path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"{broken\n" + b"".join(lines[1:]))
    run = load_run(path)
    assert len(run.records) == 4 and run.troubles[0].startswith("line 1, the header, is broken")
    with pytest.raises(UsageError, match=r"cannot be resumed here: its header is lost.*Start a new run"):
        pipeline.resume(path, tmp_path, Watching(), "again")


def test_a_finished_run_without_its_header_is_not_called_complete(suite: str, tmp_path: Path) -> None:
    """Its plan comes from the remaining records, so that nothing would seem to be missing."""
    path = Path(cut_off(suite, tmp_path, stop_at=None).path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[1:3], *lines[-1:]]))
    before = path.read_bytes()
    assert load_run(path).finished
    with pytest.raises(UsageError, match="its header is lost"):
        pipeline.resume(path, tmp_path, Watching(), "again")
    assert path.read_bytes() == before


def test_code_that_changed_is_not_resumed(suite: str, tmp_path: Path) -> None:
    """Even an added comment changes the code's hash, as its effect is unknown."""
    path = Path(cut_off(suite, tmp_path).path)
    Path(suite).write_text(SUITE + "# changed\n")
    with pytest.raises(UsageError, match=r"the code of --import was [0-9a-f]{64} and is [0-9a-f]{64}"):
        pipeline.resume(path, tmp_path, Watching(), "again")
    Path(suite).write_text(SUITE)
    assert pipeline.resume(path, tmp_path, Watching(), "again")[1].finished


def test_the_same_code_somewhere_else_is_the_same(suite: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = pipeline.execute(request_for("sums_suite.py"), tmp_path, Watching(2), "the first half")
    for folder in ("empty", "copy"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UsageError, match=r"reads sums_suite\.py, which does not exist here.*Resume it in"):
        pipeline.resume(Path(run.path), tmp_path, Watching(), "again")
    monkeypatch.chdir(tmp_path / "copy")
    Path("sums_suite.py").write_text(SUITE)
    workloads._leaves.pop("sums")
    assert pipeline.resume(Path(run.path), tmp_path, Watching(), "again")[1].finished


def test_code_that_somebody_else_may_have_put_there_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live model's folder moves with its run, and in a shared folder any user can create one of that name."""
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    (own := shared / "fp8bench-model-1").mkdir()
    code = own / "sent.py"
    ran = tmp_path / "ran"
    run = replace(a_run(), request=Request("gemm", imports=(str(code),)))
    with pytest.raises(UsageError, match=r"it reads .*sent\.py, which does not exist here"):
        refuse_missing_user_files(run)
    code.write_text(f"open({str(ran)!r}, 'w')")
    refuse_missing_user_files(run)
    (link := shared / "fp8bench-model-2").symlink_to(own)
    linked = replace(run, request=Request("gemm", imports=(str(link / "sent.py"),)))
    refuse_missing_user_files(linked)
    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda self: _of_another(real(self)))
    for one in (run, linked):
        with pytest.raises(UsageError, match=r"sent\.py belongs to another user, in a folder where"):
            refuse_missing_user_files(one)
    assert not ran.exists()


def _of_another(status: os.stat_result) -> SimpleNamespace:
    return SimpleNamespace(st_mode=status.st_mode, st_uid=54321)
