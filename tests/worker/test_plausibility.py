"""Suites of a few lines that measure nothing, or spoil what they measure, through a real worker: each is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.model import Label, Record, Run, Status
from tests.counts import for_each
from tests.own_suites import suite_run

pytestmark = pytest.mark.usefixtures("short_slots")

SUITE = """
from types import SimpleNamespace

import torch

from fp8bench.suites import Axis, Work, Workload, workloads


@workloads.register("planted_lies")
class PlantedLies(Workload):
    name = "planted_lies"
    summary = "steps that are not what they seem"

    def axes(self, facts):
        return (Axis("how", "what is wrong", ("honest",), str),)

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        (how,) = dict(setup.case.params).values()
        step = getattr(self, "_" + how.replace(" ", "_"))
        mask = torch.full((8, 8), -torch.inf)
        return SimpleNamespace(x=torch.ones(8, 8), mask=mask, kept=[], steps=0, step=step)

    def step(self, state, phase):
        with phase.gemm:
            state.step(state)

    def _honest(self, state):
        (state.x @ state.x + state.mask).softmax(-1)

    _misnamed = _honest

    def _does_nothing(self, state):
        pass

    def _remembers(self, state):
        if not state.kept:
            state.kept.append(state.x @ state.x)
        state.result = state.kept[0]

    def _leaks(self, state):
        state.kept.append(torch.ones(32, 32))

    def _leaks_now_and_then(self, state):
        state.steps += 1
        if state.steps % 3 == 0:
            state.kept.append(torch.ones(32, 32))

    def _fills_a_cache(self, state):
        state.kept = [*state.kept[-15:], torch.ones(32, 32)]

    def _empties_a_cache(self, state):
        if len(state.kept) == 10:
            state.kept.clear()
        state.kept.append(torch.ones(32, 32))

    def _spoils(self, state):
        state.x[0] *= 1e30

    def error(self, setup):
        name = {"misnamed": "time"}.get(*dict(setup.case.params).values(), "some_error")
        return {name: 0.5}


@workloads.register("diverging")
class Diverging(PlantedLies):
    name = "diverging"
    may_diverge = True

    def axes(self, facts):
        return (Axis("way", "what is wrong", ("honest", "spoils"), str),)


@workloads.register("moving_stamps")
class MovingStamps(PlantedLies):
    # Hides a part of each step from the phase clock, or adds to it.

    name = "moving_stamps"

    def axes(self, facts):
        return (Axis("share", "of the step, that the clock does not see", (0.0, 0.6, -0.6), float),)

    def prepare(self, setup):
        return SimpleNamespace(x=torch.ones(256, 256), share=dict(setup.case.params)["share"])

    def step(self, state, phase):
        with phase.gemm:
            for _ in range(10):
                state.result = state.x @ state.x
        stamps = getattr(phase, "_stamps", None)
        if stamps and state.share:
            stamps[0] += int(state.share * (stamps[-1] - stamps[0]))
"""
PLAUSIBILITY = (Label.NO_WORK, Label.LEAK, Label.NOT_FINITE)
HOWS = (
    "honest",
    "misnamed",
    "spoils",
    "leaks",
    "leaks now and then",
    "fills a cache",
    "empties a cache",
    "does nothing",
    "remembers",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    asked = {"axes": (("how", HOWS),), "rounds": 2}
    with suite_run(tmp_path_factory, SUITE, "planted_lies,diverging,moving_stamps", ("fp32",), **asked) as run:
        yield run


def record_of(run: Run, how: object, suite: str = "planted_lies") -> Record:
    return next(one for one in run.records if (one.case.workload, *dict(one.case.params).values()) == (suite, how))


def told(run: Run, record: Record) -> dict[Label, str]:
    finding = findings(run)[record.case.id]
    reasons = dict(finding.label_reasons)
    return {label: reasons.get(label, "") for label in finding.labels if label in PLAUSIBILITY}


def test_what_is_honest_is_measured_and_has_no_remark(run: Run) -> None:
    record = record_of(run, "honest")
    assert record.status is Status.OK and not record.detail and record.measurement("some_error") is not None
    assert told(run, record) == {}


def test_numbers_that_spoil_a_case_fail_it(run: Run) -> None:
    record = record_of(run, "misnamed")
    assert record.status is Status.FAILED
    assert "no numerical error: ValueError: error() returned a number with a reserved name: 'time' is" in record.reason
    record = record_of(run, "spoils")
    assert record.status is Status.FAILED and record.timing is None
    assert "after its steps: its state is not finite: 8 of 128 numbers, the first in a tensor of 8 x 8" in record.reason


@for_each("share", (0.6, -0.6))
def test_a_step_that_moves_the_stamps_of_the_clock_fails(run: Run, share: float) -> None:
    record = record_of(run, share, "moving_stamps")
    assert record.status is Status.FAILED
    assert "changes the clock's stamps" in record.reason
    assert record_of(run, 0.0, "moving_stamps").status is Status.OK


def test_a_suite_may_say_that_its_state_diverges(run: Run) -> None:
    record = record_of(run, "spoils", "diverging")
    assert record.status is Status.OK and told(run, record) == {Label.NOT_FINITE: "6.2% of the state"}
    assert told(run, record_of(run, "honest", "diverging")) == {}


@for_each(
    ("how", "said"),
    [
        ("leaks", "4.00 KiB a step"),
        ("leaks now and then", "1.33 KiB a step"),
        ("fills a cache", ""),
        ("empties a cache", ""),
    ],
)
def test_memory_that_grows_step_by_step_is_a_leak(run: Run, how: str, said: str) -> None:
    record = record_of(run, how)
    assert record.status is Status.OK and told(run, record) == ({Label.LEAK: said} if said else {})
    assert record.memory is not None and (record.memory.leak == 0) is (not said)


@for_each("how", ["does nothing", "remembers"])
def test_a_step_that_does_no_work_has_no_verdict(run: Run, how: str) -> None:
    record = record_of(run, how)
    assert record.status is Status.OK and record.effect is not None and record.effect.changes is False
    assert told(run, record)[Label.NO_WORK].startswith("it calls no operator of torch")
    honest = record_of(run, "honest").effect
    assert honest is not None and honest.changes is None, "what it gives goes with the step"
