"""The self-test's checks can fail: each is shown something wrong."""

from __future__ import annotations

import pytest

from fp8bench.cli.main import main
from fp8bench.features.selftest import checks
from fp8bench.features.selftest.checks import SelfCheck
from fp8bench.formats import quantise
from fp8bench.model import CELL_PHASES, PHASES, DeviceFacts
from fp8bench.plan.corpus import Corpus
from fp8bench.worker.bench import Bench
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.features.selftest.scripted import Scripted

CORPUS = Corpus("nowhere", "text", "0" * 64, 1000)


@for_each(
    ("same", "slowed", "held"),
    [
        (1.0, 1.12, [True, True]),
        (1.1, 1.12, [False, True]),
        (0.9, 1.12, [False, True]),
        (1.0, 1.0, [True, False]),
        (1.0, 0.9, [True, False]),
    ],
)
def test_false_alarms_and_missed_slow_downs_are_noticed(same: float, slowed: float, held: list[bool]) -> None:
    worker = Scripted(lambda key, case: 300_000 * {"same": same, "slowed": slowed}.get(key, 1.0))
    assert [check.holds for check in checks.check_verdicts(worker, CPU)] == held


@for_each(("facts", "side"), [(CPU, checks.CPU_SIDE), (H200, checks.GPU_SIDE)])
def test_what_is_timed_is_timed_on_the_device_asked_for(facts: DeviceFacts, side: int) -> None:
    worker = Scripted(lambda key, case: 300_000 * (1.12 if key == "slowed" else 1.0), tuple(range(len(PHASES))))
    assert all(check.holds for check in checks.check_verdicts(worker, facts))
    assert {case.param("base.m") for case in worker.prepared} == {side}
    assert checks.check_phases(worker, facts, CORPUS).holds
    assert {case.device for case in worker.prepared} == {facts.key}


def test_the_planted_slow_down_runs_on_a_real_bench(bench: Bench) -> None:
    """The product followed by tiny calls, on a real bench: scripted steps would not notice a missing parameter."""
    bench.prepare("planted", checks._make_slowed_case(64, 800), CPU)
    assert len(bench.slot("planted", 3, 0).steps) == 3
    bench.release("planted")


@for_each("factor", [1.0, 0.999, 1.001])
def test_wrong_rounding_is_noticed(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantise.round_to
    if factor != 1:
        monkeypatch.setattr(quantise, "round_to", lambda x, fmt, out=None: right(x * factor, fmt))
    check = checks.check_rounding()
    assert check.holds == check.observation.startswith("0 of ") == (factor == 1)


@for_each(
    ("phases", "seen"),
    [
        (PHASES, ""),
        ({*PHASES} - {"cast"}, "missing phases: cast"),
        ({*PHASES} - {"optimizer_step"}, "missing phases: optimizer_step"),
        (({*PHASES} - {"communication", "decode"}) | {"unattributed"}, "12.5% unattributed"),
    ],
)
def test_phases_that_lack_or_leave_much_are_noticed(phases: set[str], seen: str) -> None:
    codes = tuple(CELL_PHASES.index(phase) for phase in phases)
    check = checks.check_phases(Scripted(lambda key, case: 20e6, codes), CPU, CORPUS)
    assert check.holds is not bool(seen) and seen in check.observation


@for_each(("held", "code", "last"), [(True, 0, "all checks held"), (False, 3, "1 checks failed")])
def test_the_report_prints_each_check_and_ends_with_a_code(
    held: bool, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = SelfCheck("one", True, "a"), SelfCheck("two", held, "b")
    monkeypatch.setattr(checks, "run_selfchecks", lambda device: iter(results))
    assert main(["selftest"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    one" and lines[2] == ("ok    two" if held else "FAIL  two")
    assert lines[1].strip() == "seen: a" and lines[-1] == last
