"""The self-test's checks can fail: each is shown something wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8bench.cli.main import main
from fp8bench.errors import WorkerLost
from fp8bench.features.selftest import checks
from fp8bench.features.selftest.checks import SelfCheck, alive, wait_until
from fp8bench.formats import quantise
from fp8bench.measure.handle import Worker
from fp8bench.model import CELL_PHASES, PHASES, Case, DeviceFacts, Run
from fp8bench.model.raw import RawSlot, RawStep
from fp8bench.plan.corpus import Corpus
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.facts import CPU, H200

CORPUS = Corpus("nowhere", "text", "0" * 64, 1000)
GEMM = CELL_PHASES.index("gemm")


class Scripted(Worker):
    """Answers slots with steps of the nanoseconds that a function gives for a key."""

    def __init__(self, nanoseconds: Callable[[str], float], codes: tuple[int, ...] = (GEMM,)) -> None:
        self._nanoseconds = nanoseconds
        self._codes = codes
        self._random = random.Random(0)

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if name != "slot":
            return () if name == "release" else None
        key, calls, *_ = arguments
        key, steps = key.partition(" #")[0], []
        for _ in range(calls):
            total = self._nanoseconds(key) * (1 + 0.002 * self._random.random())
            steps.append(RawStep(self._codes, (round(total / len(self._codes)),) * len(self._codes)))
        seconds = sum(sum(step.intervals_ns) for step in steps) / 1e9
        return RawSlot(tuple(steps), seconds, seconds, seconds / calls)

    def close(self) -> None:
        pass

    def restart(self) -> None:
        pass


@for_each(
    ("same", "slowed", "held"),
    [
        (1.0, 1.12, [True, True]), (1.1, 1.12, [False, True]), (0.9, 1.12, [False, True]),
        (1.0, 1.0, [True, False]), (1.0, 0.9, [True, False]),
    ],
)  # fmt: skip
def test_false_alarms_and_missed_slow_downs_are_noticed(same: float, slowed: float, held: list[bool]) -> None:
    """What should be identical comes out slower or faster, and what is slowed the same or faster: arms of 0.3 ms."""
    worker = Scripted(lambda key: 300_000 * {"same": same, "slowed": slowed}.get(key, 1.0))
    assert [check.held for check in checks.verdicts(worker, CPU)] == held


class Noting(Scripted):
    """Notes the cases that it was asked to prepare."""

    def __init__(self) -> None:
        super().__init__(lambda key: 300_000 * (1.12 if key == "slowed" else 1.0), tuple(range(len(PHASES))))
        self.cases: list[Case] = []

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if name == "prepare":
            self.cases.append(arguments[1])
        return super().ask(limit, name, *arguments)


@for_each(("facts", "side"), [(CPU, checks.SIDE), (H200, checks.GPU_SIDE)])
def test_what_is_timed_is_timed_on_the_device_asked_for(facts: DeviceFacts, side: int) -> None:
    """With a product that takes long enough there."""
    worker = Noting()
    assert all(check.held for check in checks.verdicts(worker, facts))
    assert {one.param("base.m") for one in worker.cases} == {side}
    assert checks.phases(worker, facts, CORPUS).held
    assert {one.device for one in worker.cases} == {facts.key}


def test_what_is_planted_runs(bench: Bench) -> None:
    """The product with tiny calls behind it, through a real bench: scripted steps would not miss a parameter."""
    bench.prepare("planted", checks._planted(64, 800), CPU)
    assert len(bench.slot("planted", 3, 0).steps) == 3
    bench.release("planted")


def test_rounding_holds() -> None:
    """Here, and with this torch."""
    check = checks.rounding()
    assert check.held and check.seen.startswith("0 of ")


@for_each("wrong", ["truncated", "away from zero"])
def test_wrong_rounding_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Midpoints show what whole codes do not."""
    right = quantise.round_to

    def rounded(x: Tensor, fmt: Any, out: Tensor | None = None) -> Tensor:
        return right(x * (0.999 if wrong == "truncated" else 1.001), fmt)

    monkeypatch.setattr(quantise, "round_to", rounded)
    check = checks.rounding()
    assert not check.held and not check.seen.startswith("0 of ")


def test_a_switch_that_stays_set_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 left on would change every later fp32 case."""
    assert checks.switches().held
    before = torch.get_float32_matmul_precision()

    @contextmanager
    def forgetful(setting: str) -> Iterator[None]:
        torch.set_float32_matmul_precision(setting)
        yield

    monkeypatch.setattr(checks, "float32_products", forgetful)
    try:
        check = checks.switches()
    finally:
        torch.set_float32_matmul_precision(before)
    assert not check.held and check.seen == "high"


@for_each("missing", [None, "cast", "optimizer_step"])
def test_a_phase_that_is_never_seen_is_noticed(missing: str | None) -> None:
    """By its name."""
    codes = tuple(CELL_PHASES.index(phase) for phase in PHASES if phase != missing)
    check = checks.phases(Scripted(lambda key: 20e6, codes), CPU, CORPUS)
    assert check.held is (missing is None)
    assert missing is None or f"never seen: {missing}" in check.seen


def test_much_unattributed_time_is_noticed() -> None:
    """A step that lies mostly outside its phases."""
    codes = *map(CELL_PHASES.index, {*PHASES} - {"communication", "decode"}), CELL_PHASES.index("unattributed")
    check = checks.phases(Scripted(lambda key: 20e6, codes), CPU, CORPUS)
    assert not check.held and "12.5% unattributed" in check.seen


class Mortal(Scripted):
    """A worker whose process can be killed, and which notices or not."""

    def __init__(self, pid: int, notices: bool, recovers: bool = True) -> None:
        super().__init__(lambda key: 1e6)
        self._pid = pid
        self._notices, self._recovers = notices, recovers

    @property
    def pid(self) -> int:
        return self._pid

    def probe(self) -> tuple[DeviceFacts, ...]:
        return (CPU,) if self._recovers else ()

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if self._notices:
            raise WorkerLost("the worker crashed")


@for_each(("notices", "recovers", "held"), [(True, True, True), (False, True, False), (True, False, False)])
def test_a_loss_that_goes_unnoticed_is_noticed(notices: bool, recovers: bool, held: bool) -> None:
    """And a worker that does not come back."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        check = checks.crash(Mortal(victim.pid, notices, recovers), CPU)  # type: ignore[arg-type]
        assert victim.wait(timeout=30) == -9
    assert check.held is held


def test_an_orphan_that_lives_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 'parent' that names a process which does not end with it."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"]) as survivor:
        monkeypatch.setattr(checks, "_PARENT", f"import time\nprint({survivor.pid}, flush=True)\ntime.sleep(60)\n")
        monkeypatch.setattr(checks, "wait_until", lambda condition, limit: wait_until(condition, 0.3))
        check = checks.orphan()
        survivor.kill()
    assert not check.held and check.seen == "None s"


def test_alive_tells_the_living_from_the_dead() -> None:
    """A process that only waits to be reaped is dead."""
    assert alive(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert wait_until(lambda: not alive(process.pid), 60) is not None
        process.wait()
        assert not alive(process.pid)


def test_waiting_ends_at_its_limit() -> None:
    """With None."""
    assert wait_until(lambda: True, 5) is not None
    assert wait_until(lambda: False, 0.05) is None


def test_storage_holds() -> None:
    """A real file, cut for real."""
    assert checks.storage().held


@for_each("wrong", ["loses the header", "hides the trouble"])
def test_wrong_storage_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read must be what was written, and a torn line must be told of."""
    right = checks.load_run

    def load(path: Path) -> Run:
        run = right(path)
        return replace(run, command="") if wrong == "loses the header" else replace(run, troubles=())

    monkeypatch.setattr(checks, "load_run", load)
    assert not checks.storage().held


@for_each(("held", "code", "last"), [(True, 0, "all checks held"), (False, 3, "1 checks failed")])
def test_the_report_prints_each_check_and_ends_with_a_code(
    held: bool, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line of what, a line of what was seen."""
    monkeypatch.setattr(
        checks, "checks", lambda device: iter([SelfCheck("one", True, "a"), SelfCheck("two", held, "b")])
    )
    assert main(["selftest"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    one" and lines[2] == ("ok    two" if held else "FAIL  two")
    assert lines[1].strip() == "seen: a" and lines[-1] == last
