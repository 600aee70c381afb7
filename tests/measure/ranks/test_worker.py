"""Real ranks: asked together, and each way in which one of them fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fp8bench import pipeline
from fp8bench.errors import WorkerError, WorkerLost
from fp8bench.measure.ranks import process as ranks_process
from fp8bench.measure.ranks.worker import RanksWorker
from fp8bench.model import Case, DeviceFacts, Record, Request, Status
from fp8bench.model.raw import Settings
from fp8bench.protocols import SilentObserver
from tests.counts import sampled
from tests.facts import CPU
from tests.own_suites import forgotten

SUITE = str(Path(__file__).with_name("failing_suite.py"))
# A fault, and the rank, phase and reason that its record names.
REASONS = {
    "exit": "rank 1 of 2, in phase gemm of 'slot', exited with status 7",
    "SIGKILL": "rank 1 of 2, in phase gemm of 'slot', was ended by SIGKILL",
    "raise": "rank 1 of 2, in phase gemm of 'slot', failed: ValueError: boom",
    "memory": "rank 1 of 2, in phase gemm of 'slot', failed: MemoryError: no more",
    "SIGSEGV": "rank 1 of 2, in phase gemm of 'slot', was ended by SIGSEGV: Fatal Python error: Segmentation fault",
    "hang": "rank 1 of 2, in phase gemm of 'slot', hangs: its last heartbeat",
    "clean-exit": "rank 1 of 2, in phase gemm of 'slot', ended without an error, before it had answered",
    # Which of two sizes is wrong is unknown: gloo ends the rank that received too much.
    "size": "in phase communication of 'slot', was ended by SIGABRT: what():",
    # The rank that is behind is named: on a loaded machine it may be rank 0.
    "launcher": "the launcher of the ranks was ended by SIGKILL",
}
# Faults that cannot be attributed to a rank.
_ANY_RANK = ("size", "launcher")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files in a test, separate from `tmp_path`; a short name, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, monkeypatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def left_behind() -> list[str]:
    """Processes of ranks and launchers, or left by ranks, without those that this process started earlier."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        ours = words[:2] == ["sleep", "1000"] or any(
            word.startswith(("fp8bench.worker.ranks", "fp8bench.features.train.lab.rank_lab")) for word in words
        )
        if ours and state not in "ZX" and os.environ["PYTEST_CURRENT_TEST"] in _environment(folder):
            left.append(" ".join(words).strip())
    return left


def _environment(folder: Path) -> str:
    try:
        return (folder / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def left_in(folder: Path) -> list[Path]:
    """Files that ranks and their launcher no longer need."""
    return list(folder.glob("fp8bench-*"))


def gone() -> bool:
    """Waits until all ended processes are gone, which needs a free core; returns whether they are."""
    end = time.monotonic() + 120
    while left_behind() and time.monotonic() < end:
        time.sleep(0.02)
    return not left_behind()


def cpu_of(worker: RanksWorker) -> DeviceFacts:
    return next(facts for facts in worker.probe() if facts.kind == "cpu")


@pytest.mark.slow
def test_ranks_are_asked_together_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ("long" * 30)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    with RanksWorker(Settings(threads=1, imports=(SUITE,)), 2, 120.0) as worker:
        facts = cpu_of(worker)
        assert facts.ranks == 2
        software = worker.software()
        assert software["rank 0 OMP_NUM_THREADS"] == software["rank 1 OMP_NUM_THREADS"] == "1"
        case = Case("failing_ranks", (("fault", "raise"),), "fp32", "cpu", ranks=2)
        worker.with_time_limit(240).prepare("a", case, facts)
        slot = worker.with_time_limit(240).slot("a", 2, 0)
        assert [len(rank.step_ns) for rank in slot.ranks] == [2, 2]
        for call, step in enumerate(slot.steps):
            assert sum(step.intervals_ns) == max(rank.step_ns[call] for rank in slot.ranks)
        assert len(left_behind()) >= 2
        with pytest.raises(WorkerError, match="rank 1 of 2, in phase gemm of 'slot', failed: ValueError: boom"):
            worker.with_time_limit(240).slot("a", 1, 0)
        assert gone(), left_behind()


def measured(faults: Sequence[str], store: Path, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """A run with a case per fault. The ranks' timeout is also the longest delay of a healthy rank."""
    monkeypatch.setattr("fp8bench.measure.ranks.worker.WAIT_SECONDS", 20.0)
    monkeypatch.setattr(ranks_process, "_OTHER_RANKS_SECONDS", 0.5)
    axes = (("fault", tuple(faults)),)
    request = Request("failing_ranks", axes=axes, rounds=1, quick=True, imports=(SUITE,), ranks=2)
    with forgotten(Path(SUITE).parent):
        return list(pipeline.execute(request, store, SilentObserver(), "").records)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", REASONS)
def test_a_fault_leaves_no_process(
    fault: str, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = measured([fault], tmp_path, monkeypatch)
    assert record.status is Status.FAILED and REASONS[fault] in record.reason, record.reason
    assert (where := record.failed_rank) is not None and (where.ranks, where.request) == (2, "slot")
    if fault not in _ANY_RANK:
        assert (where.rank, where.phase) == (1, "gemm"), where
    if fault == "launcher":
        assert f"with rank {where.rank} in phase {where.phase} of 'slot'" in record.reason, record.reason
    assert gone() and not left_in(temporary), (left_behind(), left_in(temporary))


# A separate run that is killed while rank 1 hangs.
RUN = """
import sys
from pathlib import Path
from fp8bench import pipeline
from fp8bench.model import Request
from fp8bench.protocols import SilentObserver
axes = (("fault", ("hang",)),)
request = Request("failing_ranks", axes=axes, rounds=1, quick=True, imports=(sys.argv[1],), ranks=2)
pipeline.execute(request, Path(sys.argv[2]), SilentObserver(), "")
"""


@pytest.mark.slow
def test_a_parent_that_is_killed_leaves_neither_process_nor_folder(temporary: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", RUN, SUITE, str(tmp_path / "store")]) as run:
        try:
            while "sleep 1000" not in (left := left_behind()):
                assert run.poll() is None
                time.sleep(0.05)
        finally:
            run.kill()
    assert len(left) >= 4 and gone(), left_behind()
    end = time.monotonic() + 120
    while left_in(temporary) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left_in(temporary)


# Imported at Python's start: makes rank 1 fail once, when it imports a certain module.
STRUCK = """
import os, signal, sys
from pathlib import Path

class Strikes:
    def find_spec(self, name, path=None, target=None):
        struck = Path(__file__).with_name(f"struck {{name}}")
        if name in {modules} and not struck.exists():
            struck.touch()
            os.kill(os.getpid(), signal.{end})

if os.environ.get("RANK") == "1":
    sys.meta_path.insert(0, Strikes())
"""
# Modules imported before ranks report and while they open, with the request that is named.
BEGINNINGS = {"fp8bench.worker.ranks.main": "start", "torch": "open"}


def strike(folder: Path, modules: Sequence[str], end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "sitecustomize.py").write_text(STRUCK.format(modules=[*modules], end=end))
    monkeypatch.syspath_prepend(folder)


@pytest.mark.slow
def test_a_run_goes_on_after_each_fault(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strike(tmp_path, list(BEGINNINGS), "SIGKILL", monkeypatch)
    started, opened, ended, sums, whole = measured(
        ["hang", "raise", "SIGSEGV", "sums", "none"], tmp_path / "store", monkeypatch
    )
    for record, request, reason in (
        (started, "start", "the ranks could not be started: rank 1 of 2, in 'start', was ended by SIGKILL"),
        (opened, "open", "the worker crashed during 'open': rank 1 of 2, in 'open', was ended by SIGKILL"),
        (ended, "slot", REASONS["SIGSEGV"]),
    ):
        assert record.status is Status.FAILED and reason in record.reason, record.reason
        assert (where := record.failed_rank) is not None and (where.rank, where.ranks, where.request) == (1, 2, request)
        assert 0 <= where.silent_seconds < 600  # since its start, if it never reported
    assert sums.status is Status.FAILED and sums.failed_rank is None
    assert "the ranks disagree: sum is 0.0 on rank 0 and 1.0 on rank 1" in sums.reason
    assert whole.status is Status.OK
    assert gone() and not left_in(temporary), (left_behind(), left_in(temporary))


NO_TORCH = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Without())
"""


@pytest.mark.slow
def test_a_python_without_torch_is_named_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    lacks = f"ModuleNotFoundError: No module named 'torch' for {sys.executable}. Install torch there, or run"
    with RanksWorker(Settings(), 2, 120.0) as worker:
        with pytest.raises(WorkerError, match=f"^{re.escape(lacks)}"):
            worker.probe()
        with pytest.raises(WorkerError, match=re.escape("(on all 2 ranks)")) as raised:
            worker.with_time_limit(240).prepare("a", Case("gemm", (), "fp32", "cpu", ranks=2), CPU)
        assert str(raised.value).startswith(lacks)


@pytest.mark.slow
@pytest.mark.parametrize("fault", sampled(["clean-exit"], ["SIGKILL", "clean-exit"]))
def test_the_end_of_a_rank_is_described_even_if_reported_late(fault: str) -> None:
    with RanksWorker(Settings(threads=1, imports=(SUITE,)), 2, 120.0) as worker:
        facts = cpu_of(worker)
        worker.with_time_limit(240).prepare(
            "a", Case("failing_ranks", (("fault", fault),), "fp32", "cpu", ranks=2), facts
        )
        launcher = worker._process._popen.pid
        os.kill(launcher, signal.SIGSTOP)
        going_on = threading.Timer(3.5, os.kill, (launcher, signal.SIGCONT))
        going_on.start()
        with pytest.raises(WorkerLost, match=re.escape(REASONS[fault])):
            worker.with_time_limit(240).slot("a", 5, 0)
        going_on.join()
        assert gone()


@pytest.mark.slow
@pytest.mark.parametrize("size", sampled([4], [2, 4]))
def test_real_and_simulated_ranks_give_the_same_bits(size: int) -> None:
    suite = str(Path(__file__).with_name("bitwise_suite.py"))
    with RanksWorker(Settings(imports=(suite,)), size) as worker:
        facts = cpu_of(worker)
        errors = worker.with_time_limit(240).error(Case("bitwise_ranks", (), "fp32", "cpu", ranks=size), facts)
    assert errors["different_values"] == 0 and errors["compared_values"] > 100_000
