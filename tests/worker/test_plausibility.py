"""Suites of a few lines that measure nothing, or spoil what they measure, through a real worker: each is noticed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8bench import pipeline
from fp8bench.analysis.findings import findings
from fp8bench.model import Label, Record, Request, Run, Status
from fp8bench.protocols import SilentObserver
from fp8bench.user_code import import_user_modules
from tests.counts import for_each
from tests.own_suites import forgotten

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
    """All of them, two rounds each."""
    folder = tmp_path_factory.mktemp("planted")
    file = folder / "planted_lies.py"
    file.write_text(SUITE)
    with forgotten(folder):
        import_user_modules([str(file)])
        suites, axes = "planted_lies,diverging", (("how", HOWS),)
        request = Request(suites, ("fp32",), ("cpu",), axes=axes, rounds=2, imports=(str(file),))
        yield pipeline.execute(request, folder / "store", SilentObserver(), "a test")


def record_of(run: Run, how: str, suite: str = "planted_lies") -> Record:
    return next(one for one in run.records if (one.case.workload, *dict(one.case.params).values()) == (suite, how))


def told(run: Run, record: Record) -> dict[Label, str]:
    """Its labels, but for those of so few rounds, with what is said of each."""
    finding = findings(run)[record.case.id]
    reasons = dict(finding.label_reasons)
    return {label: reasons.get(label, "") for label in finding.labels if label in PLAUSIBILITY}


def test_what_is_honest_is_measured_and_has_no_remark(run: Run) -> None:
    record = record_of(run, "honest")
    assert record.status is Status.OK and not record.detail and record.measurement("some_error") is not None
    assert told(run, record) == {}


def test_a_number_with_the_name_of_a_figure_fails_its_case(run: Run) -> None:
    """It would overwrite that figure in every table that is sorted by names."""
    record = record_of(run, "misnamed")
    assert record.status is Status.FAILED
    assert "no numerical error: ValueError: error() gives a number whose name is not free: 'time' is" in record.reason


def test_a_state_that_is_not_finite_fails_its_case(run: Run) -> None:
    """Nothing was said of it as long as the suite had no check of its own."""
    record = record_of(run, "spoils")
    assert record.status is Status.FAILED and record.timing is None
    assert "after its steps: its state is not finite: 8 of 128 numbers, the first in a tensor of 8 x 8" in record.reason


def test_a_suite_may_say_that_its_state_diverges(run: Run) -> None:
    """Then the case stands, with the share; where nothing diverged, there is nothing to say."""
    record = record_of(run, "spoils", "diverging")
    assert record.status is Status.OK and told(run, record) == {Label.NOT_FINITE: "6.2% of the state"}
    assert told(run, record_of(run, "honest", "diverging")) == {}


@for_each(("how", "said"), [("leaks", "4.00 KiB a step"), ("leaks now and then", "1.33 KiB a step")])
def test_memory_that_grows_step_by_step_is_a_leak(run: Run, how: str, said: str) -> None:
    """Whatever the period: what is kept in every third step is kept for good."""
    record = record_of(run, how)
    assert record.status is Status.OK and told(run, record) == {Label.LEAK: said}


@for_each("how", ["fills a cache", "empties a cache"])
def test_a_cache_that_is_filled_or_emptied_is_none(run: Run, how: str) -> None:
    """Both grow for a while."""
    record = record_of(run, how)
    assert told(run, record) == {} and record.memory is not None and record.memory.leak == 0


@for_each(
    ("how", "why"),
    [("does nothing", "it calls no operator of torch"), ("remembers", "it calls no operator of torch")],
)
def test_a_step_that_does_no_work_has_no_verdict(run: Run, how: str, why: str) -> None:
    """Hard: there is nothing to judge, nor anything that could be judged against it."""
    record = record_of(run, how)
    assert record.status is Status.OK and record.effect is not None and record.effect.changes is False
    assert told(run, record)[Label.NO_WORK].startswith(why)
    honest = record_of(run, "honest").effect
    assert honest is not None and honest.changes is None, "what it gives goes with the step"
