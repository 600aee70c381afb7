"""Processes that a workload left behind are ended, and reported with their case."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp8bench.errors import WorkerFault
from fp8bench.measure.handle import LocalWorker, ProcessWorker
from fp8bench.model import Case
from fp8bench.model.raw import Settings
from fp8bench.worker import step_guards
from fp8bench.worker.step_guards import list_running_tasks, wait_for_running_tasks
from tests.own_suites import forgotten

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="children are told by /proc")
SUITE = """
import os, subprocess, time
from pathlib import Path
from fp8bench.suites import Axis, Work, Workload, workloads
from fp8bench.worker import step_guards

step_guards._EXIT_WAIT_SECONDS = float(os.environ["ENDING"])  # also where this is imported in a process of its own


def note(pid):
    Path(os.environ["PIDS"], str(pid)).touch()


def child():
    started = subprocess.Popen(["sleep", "600"])
    note(started.pid)
    started.returncode = 0  # it is not asked how that ended: nothing is to be said when this is forgotten
    return started


def fork():
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    note(pid)  # the child may be ended before it has a core


def orphan():
    if os.fork() == 0:
        os.setsid()
        fork()
        os._exit(0)
    os.wait()


HOW = {
    "child": child, "fork": fork, "orphan": orphan, "waited": lambda: subprocess.run(["true"]), "returns": os.fork,
    "short": lambda: setattr(subprocess.Popen(["sleep", "0.2"]), "returncode", 0),
}


class Kept:
    def __init__(self):
        self.child = child()

    def __del__(self):
        os.kill(self.child.pid, 9)
        os.waitpid(self.child.pid, 0)


@workloads.register("parent")
class Parent(Workload):
    name = "parent"
    summary = "starts processes"

    def axes(self, facts):
        return (Axis("where", "the method", ("step",), str), Axis("how", "what it starts", tuple(HOW), str))

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        where, how = setup.case.param("where"), setup.case.param("how")
        if where == "prepare":
            HOW[how]()
        if where == "raising":
            HOW[how]()
            raise ValueError("no luck")
        return {"do": HOW[how] if where == "step" else None, "steps": 0, "kept": Kept() if where == "kept" else None}

    def step(self, state, phase):
        state["steps"] += 1
        with phase.gemm:
            if state["do"] and state["steps"] == 3:
                state["do"]()

    def error(self, setup):
        if setup.case.param("where") == "error":
            HOW[setup.case.param("how")]()
        return {"some_error": 0.0}
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The suite's file; the processes it starts write their ids into a folder next to it."""
    path = tmp_path / "starts_processes.py"
    path.write_text(SUITE)
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    monkeypatch.setenv("ENDING", "0.3")
    monkeypatch.setattr(step_guards, "_EXIT_WAIT_SECONDS", 0.3)  # restored after the suite has set it in this process
    with forgotten(tmp_path):
        yield str(path)


def noted(suite: str) -> list[int]:
    files = list((Path(suite).parent / "pids").iterdir())
    for file in files:
        file.unlink()
    return [int(file.name) for file in files]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


Kind = type[ProcessWorker] | type[LocalWorker]


def case(where: str, how: str) -> Case:
    return Case("parent", (("where", where), ("how", how)), "bf16", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "words"),
    [
        (ProcessWorker, "orphan", "worker"),  # a grandchild in a separate session
        (LocalWorker, "child", "sleep 600"),
        pytest.param(ProcessWorker, "child", "sleep 600", marks=pytest.mark.nightly),
        pytest.param(ProcessWorker, "fork", "worker", marks=pytest.mark.slow),
        pytest.param(LocalWorker, "fork", "", marks=pytest.mark.nightly),
    ],
)
def test_what_a_step_leaves_running_is_ended_and_named(suite: str, kind: Kind, how: str, words: str) -> None:
    with kind(Settings(imports=(suite,))) as worker:
        worker.with_time_limit(60.0).prepare("one", case("step", how), worker.probe()[0])
        with pytest.raises(WorkerFault, match=rf"LeftRunning: a step left 1 running \(process \d+: .*{words}.*\)"):
            worker.with_time_limit(60.0).slot("one", 5, 0)
        (pid,) = noted(suite)
        assert not runs(pid)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(ProcessWorker, marks=pytest.mark.nightly), LocalWorker])
def test_what_preparing_or_a_pass_leaves_running_is_ended_and_named(suite: str, kind: Kind) -> None:
    with kind(Settings(imports=(suite,))) as worker:
        cpu = worker.probe()[0]
        asked = worker.with_time_limit(60.0)
        asked.prepare("left", case("prepare", "child"), cpu)
        asked.slot("left", 2, 0)
        (pid,) = noted(suite)
        assert runs(pid) and worker.release("left") == (f"process {pid}: sleep 600",) and not runs(pid)
        with pytest.raises(WorkerFault, match=r"LeftRunning: it left 1 running \(process "):
            asked.error(case("error", "child"), cpu)
        with pytest.raises(WorkerFault, match="no luck"):
            asked.prepare("raising", case("raising", "child"), cpu)
        assert not any(map(runs, noted(suite)))


@pytest.mark.slow
def test_the_compilers_threads_are_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's pool threads do not carry its name; another pool of the same class is not torch's."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr("torch._inductor.async_compile.get_compile_threads", lambda: 2)
    AsyncCompile.pool.cache_clear()
    before = list_running_tasks()
    own = AsyncCompile.pool()
    others = ThreadPoolExecutor(1)
    try:
        for pool in (own, others):
            pool.submit(int).result()
        (left,) = wait_for_running_tasks(list_running_tasks() - before, 0.0)
        assert left in {thread.name for thread in others._threads}
    finally:
        own.shutdown()
        others.shutdown()
        AsyncCompile.pool.cache_clear()
    assert wait_for_running_tasks(list_running_tasks() - before, 0.0) == []
