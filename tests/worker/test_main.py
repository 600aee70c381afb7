"""Real workers: what a fault costs, what they print, and how they end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fp8bench import pipeline
from fp8bench.errors import WorkerFault, WorkerLost
from fp8bench.measure import handle
from fp8bench.measure.handle import LocalWorker, ProcessWorker
from fp8bench.measure.limits import RequestTimeLimits
from fp8bench.model import Case, Record, Request, Run, Status, TensorStatistics, Work
from fp8bench.model.codec import encode
from fp8bench.model.raw import Settings
from fp8bench.protocols import SilentObserver
from fp8bench.store.runs.run_file import load_run
from tests.counts import for_each, sampled
from tests.own_suites import suite_file

HAZARDS = (
    "none",
    "raise",
    "memory",
    "exit",
    "segv",
    "kill",
    "signal",
    "hang",
    "talk",
    "write",
    "thread",
    "prefetch",
    "nan",
    "spoil",
    "fork",
    "stale",
    "garbage",
    "tensor",
    "widow",
    "pool",
    "dtype",
    "grad",
    "words",
    "widower",
    "weaver",
    "shy",
)
# Always measured, in one run; the others in a slow test's run, as most cost a worker.
SAMPLE = ("none", "raise", "exit", "hang", "nan", "shy", "widow")
HARMLESS = ("none", "fork", "pool", "shy")
RAISING = ("raise", "memory", "talk", "write", "thread", "dtype", "grad", "words", "weaver")
# The worker ends, or its answer cannot be read: the exception is unknown.
LOST = ("exit", "segv", "kill", "signal", "hang", "stale", "garbage", "tensor", "widower", "widow")
PACKAGE = str(Path(handle.__file__).resolve().parents[2])
WORKLOAD = """
import inspect
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from fp8bench.suites import Axis, TensorStatistics, Work, Workload, workloads


def sleep():
    time.sleep(60)


def hold():
    # One call in C that never lets go of the interpreter's lock: no Python thread can run beside it.
    sum(range(10**10))


def talk():
    print("words of a step")
    print("and more words")


def stay():
    threading.Thread(target=time.sleep, args=(30,), name="stayer", daemon=True).start()


def connection():
    # The worker's end of the socket, from the frame that waits for our answer.
    return next(one.frame.f_locals["connection"] for one in inspect.stack() if "connection" in one.frame.f_locals)


def tensor():
    connection().send((1, ("ok", torch.ones(1))))


def double(value):
    return 2 * value


def pool():
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert workers.map(double, range(5)) == [0, 2, 4, 6, 8]


def throw(error):
    raise error


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


HAZARDS = {
    "none": lambda: None,
    "raise": lambda: 1 / 0,
    "memory": lambda: (_ for _ in ()).throw(MemoryError("planted")),
    "exit": lambda: os._exit(1),
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "signal": lambda: os.kill(os.getpid(), 40),
    "hang": sleep,
    "sleeper": sleep,
    "hold": hold,
    "talk": talk,
    "write": lambda: os.write(1, b"bytes of a step"),
    "thread": stay,
    "fork": os.fork,
    "stale": lambda: connection().send((1, ("ok", None))),
    "garbage": lambda: connection().send_bytes(b"no pickle"),
    "tensor": tensor,
    "widow": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "pool": pool,
    "grad": lambda: torch.set_grad_enabled(False),
    "leave": lambda: sys.exit(3),
    "generator": lambda: throw(GeneratorExit("a close")),
    "base": lambda: throw(BaseException("a base")),
    "press": lambda: throw(KeyboardInterrupt("a press")),
    "mute": lambda: throw(Mute()),
    "half": lambda: throw(ValueError("half a pair: \\ud800")),
}


@workloads.register("hazard")
class Hazard(Workload):
    name = "hazard"
    summary = "steps of a sum; in bf16 the third one goes wrong"

    def axes(self, facts):
        return (Axis("how", "what happens", ("none",), str),)

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        how = str(setup.case.param("how"))
        print("words of preparing, which may be")
        if how == "prefetch" and setup.case.precision == "bf16":
            stay()
        if how == "widow" and setup.case.precision == "bf16" and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        if how == "dtype" and setup.case.precision == "bf16":
            torch.set_default_dtype(torch.bfloat16)
        if how == "shy" and setup.case.precision == "bf16" and torch.autograd._profiler_enabled():
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "sleeper":
            Path(os.environ["SLEEPER"]).write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        return {"how": how if setup.case.precision == "bf16" else "none", "steps": 0, "busy": os.environ.get("BUSY")}

    def step(self, state, phase):
        state["steps"] += 1
        with phase.gemm:
            sum(range(1000))
        if state["steps"] == 3:
            if state["busy"]:
                Path(state["busy"]).write_text("busy")
            HAZARDS.get(state["how"], lambda: None)()

    def error(self, setup):
        how = setup.case.param("how") if setup.case.precision == "bf16" else "none"
        if how == "widower":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "weaver":
            stay()
        if how == "words":
            return ["a number"]
        return {"some_error": torch.tensor(float("nan") if how == "nan" else 0.5)}

    def statistics(self, setup):
        if setup.case.param("how") == "weaver":
            return 5
        return (TensorStatistics("k", "input", torch.tensor(4), torch.tensor(2.0), [("fp8", torch.tensor(0.5), 0)]),)

    def check(self, state):
        return "the parameters are not finite" if state["how"] == "spoil" else ""
"""


@pytest.fixture(scope="module")
def hazard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with suite_file(tmp_path_factory.mktemp("user"), WORKLOAD) as path:
        yield path


def request_for(hazard: str, *how: str, isolation: bool = True, dtypes: tuple[str, ...] = ("fp32", "bf16")) -> Request:
    axes = (("how", how),)
    return Request("hazard", dtypes, ("cpu",), axes=axes, rounds=2, imports=(hazard,), isolation=isolation)


def short_for_the_hang(worker: ProcessWorker, limit: float, name: str, *arguments: Any) -> Any:
    """A hang gets three seconds; other requests the default time, as a busy machine may stop a process for so long."""
    hangs = name == "slot" and "how=hang" in arguments[0] and "bf16" in arguments[0]
    return ask(worker, 3.0 if hangs else limit, name, *arguments)


ask = ProcessWorker.ask


@pytest.fixture(scope="module")
def run_with(hazard: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run of a hazard."""

    @cache
    def measured(*how: str) -> Run:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ProcessWorker, "ask", short_for_the_hang)
            store = tmp_path_factory.mktemp("store")
            return pipeline.execute(request_for(hazard, *how), store, SilentObserver(), "a test")

    return lambda how: measured(*SAMPLE if how in SAMPLE else sorted(set(HAZARDS) - set(SAMPLE)))


def record_of(run: Run, how: str, precision: str) -> Record:
    return next(one for one in run.records if one.case.param("how") == how and one.case.precision == precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    sampled(
        SAMPLE,
        [
            ("raise", "ZeroDivisionError: division by zero"),
            ("memory", "out of memory, even alone"),
            ("exit", "the worker crashed during 'slot': it exited with status 1"),
            (
                "segv",
                "the worker crashed during 'slot': it was ended by SIGSEGV: Fatal Python error: Segmentation fault",
            ),
            ("kill", "it was ended by SIGKILL (the system does this when memory runs out)"),
            ("signal", "the worker crashed during 'slot': it was ended by signal 40"),
            ("hang", "no answer to 'slot' within 3 s; the worker was ended (--case-timeout sets the limit)"),
            (
                "talk",
                "StepPrinted: a step printed 'words of a step' and 1 more lines: printing is timed with the step.",
            ),
            ("write", "StepPrinted: a step printed 15 bytes that bypass sys.stdout"),
            ("thread", "LeftRunning: a step left 1 running (stayer)"),
            ("prefetch", "that its preparation started still run after its state was freed (stayer"),
            ("nan", "its numbers are not finite: some_error is nan"),
            ("spoil", "after its steps: the parameters are not finite"),
            ("stale", "an answer to 'slot' belongs to another request (number 1, not "),
            ("garbage", "the worker's answer to 'slot' could not be read (UnpicklingError: "),
            ("tensor", "the worker's answer to 'slot' could not be read (UnpicklingError: torch.multiprocessing."),
            (
                "dtype",
                "SwitchesChanged: it left the default dtype at torch.bfloat16 (it was torch.float32): other cases",
            ),
            ("grad", "SwitchesChanged: it left gradients at False (it was True)"),
            (
                "words",
                "no numerical error: TypeError: error() returned list ['a number']; expected a mapping of names to",
            ),
            ("widower", "no numerical error: the worker crashed during 'error': it was ended by SIGKILL"),
            (
                "weaver",
                "no numerical error: LeftRunning: it left 1 running (stayer): they would be timed with later work",
            ),
            ("widow", "the worker crashed during 'slot': it was ended by SIGKILL"),
            *((how, "") for how in HARMLESS),
        ],
    ),
)
def test_a_fault_fails_its_record_and_the_other_cases_go_on(
    run_with: Callable[[str], Run], how: str, words: str
) -> None:
    run = run_with(how)
    culprit = record_of(run, how, "bf16")
    witness = record_of(run, how, "fp32")
    if how not in HARMLESS:
        assert culprit.status is Status.FAILED and words in culprit.reason
        assert culprit.timing is None and (how == "nan") == bool(culprit.measurements)
        assert ("Traceback" in culprit.detail) == (how in RAISING) and bool(culprit.detail) == (how not in LOST)
    for record in (witness, culprit) if how in HARMLESS else (witness,):
        assert record.status is Status.OK and not record.reason
        assert record.timing is not None and record.timing.num_rounds == 2
        assert record.measurement("some_error") is not None
    plain = TensorStatistics("k", "input", 4, 2.0, (("fp8", 0.5, 0.0),))
    if how == "weaver":
        assert witness.statistics == () and "statistics() returned int 5" in witness.detail
    else:
        assert witness.statistics == (plain,) and not witness.detail


def test_what_a_workload_prints_does_not_reach_our_stdout(hazard: str, capfd: pytest.CaptureFixture[str]) -> None:
    worker = ProcessWorker(Settings(imports=(hazard,)))
    assert worker.pid is None
    with worker:
        facts = next(device for device in worker.probe() if device.kind == "cpu")
        assert facts.memory_bytes > 0 and facts.torch
        case = Case("hazard", (("how", "talk"),), "bf16", "cpu")
        worker.with_time_limit(60.0).prepare("talk", case, facts)
        slot = worker.with_time_limit(60.0).slot("talk", 1, 0)
        assert len(slot.steps) == 1 and slot.wall_seconds > 0
        with pytest.raises(WorkerFault, match="StepPrinted"):
            worker.with_time_limit(60.0).slot("talk", 2, 0)
        with pytest.raises(WorkerFault, match="KeyError") as caught:
            worker.with_time_limit(60.0).slot("nobody", 1, 0)
        assert "Traceback" in caught.value.trace and not caught.value.out_of_memory
        worker.release("talk")
        worker.release("nobody")
        assert worker.software()["switch the number of threads"] == 1
        pid = worker.pid
        assert pid is not None
    worker.close()
    assert worker.pid is None
    assert gone(pid)
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == ""


RAISED = {
    "leave": "SystemExit: 3",
    "generator": "GeneratorExit: a close",
    "base": "BaseException: a base",
    "mute": "Mute: an exception that has no text",
    "half": r"ValueError: half a pair: \ud800",
}


@for_each("kind", [ProcessWorker, LocalWorker])
def test_whatever_a_step_raises_is_a_fault(hazard: str, kind: type[ProcessWorker] | type[LocalWorker]) -> None:
    with kind(Settings(imports=(hazard,))) as worker:
        facts = worker.probe()[0]
        for how in (*RAISED, "press"):
            worker.with_time_limit(60.0).prepare(how, Case("hazard", (("how", how),), "bf16", "cpu"), facts)
        pid = worker.pid if isinstance(worker, ProcessWorker) else None
        for how, words in RAISED.items():
            with pytest.raises(WorkerFault) as caught:
                worker.with_time_limit(60.0).slot(how, 9, 0)
            assert str(caught.value) == words and "Traceback" in caught.value.trace
        with pytest.raises(KeyboardInterrupt if kind is LocalWorker else WorkerFault, match="a press"):
            worker.with_time_limit(60.0).slot("press", 9, 0)
        assert len(worker.with_time_limit(60.0).slot("mute", 1, 0).steps) == 1
        assert pid == (worker.pid if isinstance(worker, ProcessWorker) else None)


@for_each(
    ("script", "starts", "words"),
    [
        # A broken interpreter: its last output, and no hang.
        ("#!/bin/sh\necho no such luck >&2\nexit 7\n", True, "during 'open': it exited with status 7: no such luck"),
        ("", True, "the worker process could not be started .*No such file"),  # not a Python
        ("#!/bin/sh\n", False, "the worker process could not be started .*unavailable"),  # no process available
    ],
)
def test_a_worker_that_cannot_start(
    script: str, starts: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releasing a worker's states starts none."""

    def full(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    python = tmp_path / "python"
    if script:
        python.write_text(script)
        python.chmod(0o755)
    if not starts:
        monkeypatch.setattr(subprocess, "Popen", full)
    before = len(list(Path("/dev/fd").iterdir()))
    with ProcessWorker(Settings(), str(python)) as worker:
        worker.release("anything")
        assert worker.pid is None
        with pytest.raises(WorkerLost, match=words):
            worker.probe()
    assert worker.pid is None and len(list(Path("/dev/fd").iterdir())) <= before


PARENT = """
import sys, time
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model.raw import Settings
from fp8bench.model import Case
from fp8bench.user_code import import_user_modules

how, path = sys.argv[1:]
worker = ProcessWorker(Settings(imports=(path,)))
facts = worker.probe()[0]
worker.with_time_limit(60.0).prepare("one", Case("hazard", (("how", how),), "bf16", "cpu"), facts)
print(worker.pid, flush=True)
if how == "none":
    time.sleep(60)
worker.with_time_limit(60.0).slot("one", 5, 0)
"""


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def wait_for(condition: Callable[[], bool], limit: float) -> None:
    """Fails the test if the condition does not hold within `limit` seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit, f"waited {limit} s in vain"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="tells ended processes by /proc")
@for_each("how", ["none", "hold", "sleeper"])  # idle, holding the lock, asleep in a step with a child process
def test_a_worker_ends_with_its_parent(hazard: str, tmp_path: Path, how: str) -> None:
    busy = tmp_path / "busy"
    sleeper = tmp_path / "sleeper"
    environment = {**os.environ, "PYTHONPATH": PACKAGE, "BUSY": str(busy), "SLEEPER": str(sleeper)}
    command = [sys.executable, "-c", PARENT, how, hazard]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if how != "none":
            wait_for(busy.exists, 240)
        pids = [pid, int(sleeper.read_text())] if how == "sleeper" else [pid]
        assert not any(map(gone, pids))
        parent.kill()
        parent.wait()
        try:
            wait_for(lambda: all(map(gone, pids)), 40.0)  # by themselves they would continue for 60 s
        finally:
            for number in pids:
                if not gone(number):
                    os.kill(number, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="tells ended processes by /proc")
@for_each("end", [ProcessWorker.restart, ProcessWorker.close])
def test_what_a_workload_has_started_ends_with_its_worker(
    hazard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[ProcessWorker], None]
) -> None:
    sleeper = tmp_path / "sleeper"
    monkeypatch.setenv("SLEEPER", str(sleeper))
    with ProcessWorker(Settings(imports=(hazard,))) as worker:
        worker.begin()
        begun = worker.pid
        case = Case("hazard", (("how", "sleeper"),), "bf16", "cpu")
        worker.with_time_limit(60.0).prepare("sleeper", case, worker.probe()[0])
        assert worker.pid == begun is not None
        pid = int(sleeper.read_text())
        assert not gone(pid)
        end(worker)
        wait_for(lambda: gone(pid), 40)  # by itself it would continue for 60 s


class Interrupting(SilentObserver):
    """Presses Ctrl-C when the second group is worked on."""

    def working(self, case: Case, doing: str, share: float) -> None:
        if case.param("how") == "raise" and doing == "measuring":
            raise KeyboardInterrupt


@pytest.mark.slow
def test_without_isolation_failures_are_records_and_interrupts_keep_what_was_done(hazard: str, tmp_path: Path) -> None:
    request = request_for(hazard, "none", "raise", "memory", isolation=False)
    run = pipeline.execute(request, tmp_path / "interrupted", Interrupting(), "a test")
    assert not run.finished
    assert [record.case.param("how") for record in run.records] == ["none", "none"]
    assert encode(load_run(Path(run.path))) == encode(run)  # by their texts, as one number is deliberately NaN
    run = pipeline.execute(request, tmp_path / "whole", SilentObserver(), "")
    assert run.finished and not run.ok
    assert record_of(run, "raise", "bf16").reason == "ZeroDivisionError: division by zero"
    assert record_of(run, "memory", "bf16").reason == "out of memory, even alone"
    assert [record_of(run, how, "fp32").status for how in ("raise", "memory", "none")] == [Status.OK] * 3
    assert record_of(run, "none", "bf16").status is Status.OK


def test_an_interrupt_ends_a_long_step_at_once(hazard: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither waits for the step's answer nor starts a new worker."""
    busy = tmp_path / "busy"
    monkeypatch.setenv("BUSY", str(busy))
    pressed: list[float] = []

    def press() -> None:
        wait_for(busy.exists, 240)
        pressed.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    run = pipeline.execute(request_for(hazard, "hang", dtypes=("bf16",)), tmp_path, SilentObserver(), "a test")
    took = time.monotonic() - pressed[0]
    thread.join()
    assert not run.finished and run.records == ()
    assert took < 55, "the step would have slept for 60 s"


THOUSAND = Work(flops=1e12)


@for_each(
    ("limit", "seconds"),
    [
        (RequestTimeLimits().for_slot(0.001, 1), 60.0),
        (RequestTimeLimits().for_slot(2.9, 1), 60.0),
        (RequestTimeLimits().for_slot(3.1, 1), 62.0),  # twenty steps
        (RequestTimeLimits().for_slot(0.5, 10), 100.0),
        # An untimed step gets time for its FLOPs at five GFLOP/s, which any device reaches.
        (RequestTimeLimits().for_first_step(Work()), 60.0),
        (RequestTimeLimits().for_first_step(Work(flops=1e9)), 60.0),
        (RequestTimeLimits().for_first_step(THOUSAND), 200.0),
        (RequestTimeLimits().for_first_step(Work(setup_seconds=100)), 160.0),
        (RequestTimeLimits().for_untimed_pass(THOUSAND), 800.0),
        # The user's limit applies to every request.
        (RequestTimeLimits(2.5).for_first_step(THOUSAND), 2.5),
        (RequestTimeLimits(2.5).for_slot(100.0, 9), 2.5),
        (RequestTimeLimits(2.5).for_untimed_pass(Work()), 2.5),
    ],
)
def test_when_an_answer_is_a_hang(limit: float, seconds: float) -> None:
    assert limit == pytest.approx(seconds)
