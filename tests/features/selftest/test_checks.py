"""The self-test's checks can fail: each is shown something wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.cli.main import main
from fp8bench.errors import WorkerLost
from fp8bench.features.selftest import checks
from fp8bench.features.selftest.checks import SelfCheck, alive, wait_until
from fp8bench.formats import quantise
from fp8bench.model import CELL_PHASES, PHASES, DeviceFacts, Run
from fp8bench.plan.corpus import Corpus
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.features.selftest.scripted import Scripted

CORPUS = Corpus("nowhere", "text", "0" * 64, 1000)


@for_each(
    ("same", "slowed", "held"),
    [
        (1.0, 1.12, [True, True]), (1.1, 1.12, [False, True]), (0.9, 1.12, [False, True]),
        (1.0, 1.0, [True, False]), (1.0, 0.9, [True, False]),
    ],
)  # fmt: skip
def test_false_alarms_and_missed_slow_downs_are_noticed(same: float, slowed: float, held: list[bool]) -> None:
    """What should be identical comes out slower or faster, and what is slowed the same or faster: arms of 0.3 ms."""
    worker = Scripted(lambda key, case: 300_000 * {"same": same, "slowed": slowed}.get(key, 1.0))
    assert [check.held for check in checks.verdicts(worker, CPU)] == held


@for_each(("facts", "side"), [(CPU, checks.SIDE), (H200, checks.GPU_SIDE)])
def test_what_is_timed_is_timed_on_the_device_asked_for(facts: DeviceFacts, side: int) -> None:
    worker = Scripted(lambda key, case: 300_000 * (1.12 if key == "slowed" else 1.0), tuple(range(len(PHASES))))
    assert all(check.held for check in checks.verdicts(worker, facts))
    assert {case.param("base.m") for case in worker.prepared} == {side}
    assert checks.phases(worker, facts, CORPUS).held
    assert {case.device for case in worker.prepared} == {facts.key}


def test_what_is_planted_runs(bench: Bench) -> None:
    """The product with tiny calls behind it, through a real bench: scripted steps would not miss a parameter."""
    bench.prepare("planted", checks._planted(64, 800), CPU)
    assert len(bench.slot("planted", 3, 0).steps) == 3
    bench.release("planted")


@for_each("factor", [1.0, 0.999, 1.001])
def test_wrong_rounding_is_noticed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantise.round_to
    if factor != 1:
        monkeypatch.setattr(quantise, "round_to", lambda x, fmt, out=None: right(x * factor, fmt))
    check = checks.rounding()
    assert check.held == check.seen.startswith("0 of ") == (factor == 1)


def test_a_switch_that_stays_set_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
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


@for_each(
    ("phases", "seen"),
    [
        (PHASES, ""), ({*PHASES} - {"cast"}, "never seen: cast"),
        ({*PHASES} - {"optimizer_step"}, "never seen: optimizer_step"),
        (({*PHASES} - {"communication", "decode"}) | {"unattributed"}, "12.5% unattributed"),
    ],
)  # fmt: skip
def test_phases_that_lack_or_leave_much_are_noticed(phases: set[str], seen: str) -> None:
    codes = tuple(CELL_PHASES.index(phase) for phase in phases)
    check = checks.phases(Scripted(lambda key, case: 20e6, codes), CPU, CORPUS)
    assert check.held is not bool(seen) and seen in check.seen


class Mortal(Scripted):
    """A worker whose process can be killed, and which notices or not, and recovers or not."""

    def __init__(self, pid: int, notices: bool, recovers: bool) -> None:
        super().__init__(lambda key, case: 1e6)
        self._pid, self._notices, self._recovers = pid, notices, recovers

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
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        check = checks.crash(Mortal(victim.pid, notices, recovers), CPU)  # type: ignore[arg-type]
        assert victim.wait(timeout=240) == -9
    assert check.held is held


def test_an_orphan_that_lives_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as survivor:
        monkeypatch.setattr(checks, "_PARENT", f"import time\nprint({survivor.pid}, flush=True)\ntime.sleep(60)\n")
        monkeypatch.setattr(checks, "wait_until", lambda condition, limit: wait_until(condition, 0.3))
        check = checks.orphan()
        survivor.kill()
    assert not check.held and check.seen == "None s"


def test_alive_tells_the_living_from_the_dead() -> None:
    """A zombie is dead; waiting ends at its limit."""
    assert alive(os.getpid()) and wait_until(lambda: False, 0.05) is None
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert wait_until(lambda: not alive(process.pid), 60) is not None
        process.wait()
        assert not alive(process.pid)


@for_each("wrong", [{}, {"command": ""}, {"troubles": ()}])
def test_wrong_storage_is_noticed(wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read must be what was written, and a torn line must be told of: of a real file, cut for real."""
    right = checks.load_run

    def load(path: Path) -> Run:
        return replace(right(path), **wrong)

    monkeypatch.setattr(checks, "load_run", load)
    assert checks.storage().held is not bool(wrong)


@for_each(("held", "code", "last"), [(True, 0, "all checks held"), (False, 3, "1 checks failed")])
def test_the_report_prints_each_check_and_ends_with_a_code(
    held: bool, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = SelfCheck("one", True, "a"), SelfCheck("two", held, "b")
    monkeypatch.setattr(checks, "checks", lambda device: iter(made))
    assert main(["selftest"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    one" and lines[2] == ("ok    two" if held else "FAIL  two")
    assert lines[1].strip() == "seen: a" and lines[-1] == last
