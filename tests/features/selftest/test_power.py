"""The power experiment: its sums on outcomes made by hand, and one trial on a scripted worker."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.main import main
from fp8bench.features.selftest import power
from fp8bench.features.selftest.power import (
    EFFECTS,
    SHARES,
    Arms,
    Operation,
    Plant,
    Power,
    PowerOutcome,
    PowerRow,
    measure_power,
    operations,
    power_table,
    summarise,
    uneven,
)
from fp8bench.measure.arm import STATES
from fp8bench.measure.handle import Worker
from fp8bench.model import CELL_PHASES, Case, DeviceFacts, Verdict
from fp8bench.model.raw import RawSlot, RawStep
from fp8bench.plan.checked_workload import cases_of, sound_axes
from fp8bench.registry import workloads
from fp8bench.workloads import planted
from fp8bench.workloads.planted import ORDERS
from tests.commands import unfolded
from tests.counts import for_each
from tests.facts import CPU, H200

SMALL = ("selftest", "--power", "--trials", "1", "--operation", "small")
GEMM = CELL_PHASES.index("gemm")


def outcome(verdict: Verdict, ratio: float = 1.0, seconds: float = 1.0) -> PowerOutcome:
    return PowerOutcome(verdict.value, seconds, 24, ratio, ratio - 0.01, ratio + 0.01)


def by_hand() -> Arms:
    result = Arms("product", 3e-4)
    result.outcomes[Plant(0.0)] = [outcome(Verdict.SAME), outcome(Verdict.UNSURE), outcome(Verdict.FASTER, 0.98)]
    result.outcomes[Plant(0.05)] = [
        outcome(Verdict.SLOWER, 1.04, 0.5), outcome(Verdict.SLOWER, 1.06, 2.5), outcome(Verdict.FASTER, 0.9, 1.5),
    ]  # fmt: skip
    result.loads = [2.0, 0.5, 1.0]
    return result


def test_a_row_counts_verdicts_and_takes_medians() -> None:
    """Effects without trials have no row."""
    assert summarise(by_hand()) == [
        PowerRow("product", 0.0, 0.0, 3, slower=0, faster=1, same=1, unsure=1, seconds_median=1.0, seconds_longest=1.0),
        PowerRow(
            "product", 0.05, pytest.approx(0.04), 3, slower=2, faster=1, same=0, unsure=0, seconds_median=1.5,
            seconds_longest=2.5,
        ),
    ]  # fmt: skip


def test_slow_downs_of_some_calls_have_rows_of_their_own() -> None:
    """By their order; 'same' is wrong, and what saw fewer than three periods is counted apart."""
    result = by_hand()
    result.outcomes[Plant(0.3, 1, 10, "periodic")] = [
        replace(outcome(Verdict.SAME), calls=30), replace(outcome(Verdict.UNSURE), calls=30),
        replace(outcome(Verdict.FASTER), calls=29),
    ]  # fmt: skip
    result.outcomes[Plant(0.3, 1, 10, "random")] = [replace(outcome(Verdict.SLOWER), calls=99)]
    periodic, at_random = summarise(result)[2:]
    assert (periodic.order, periodic.trials, periodic.same, periodic.too_few) == ("periodic", 2, 1, 1)
    assert (periodic.wrong_signs, at_random.wrong_signs, at_random.slower) == (1, 0, 1)
    table = power_table(Power((periodic, at_random), (0.5,)))
    assert "1 more had too few calls for three periods" in table and "wrong signs: 1 of 3 comparisons" in table


@for_each("seconds", [3e-4, 2e-3, 3e-2])
def test_every_kind_of_slow_down_comes_up(seconds: float) -> None:
    """In both orders, and none whose slow calls would take longer than a trial should."""
    drawn = [plant for number in range(15) for plant in uneven(number, seconds)]
    kinds = {(plant.mean, plant.part, plant.whole) for plant in drawn}
    assert {plant.order for plant in drawn} == set(ORDERS) and len(drawn) == 60
    assert {(mean, *share) for mean in (0.05,) for share in SHARES} <= kinds
    assert (len(kinds) == 30) is (seconds < 1e-2)
    assert max(seconds * (1 + plant.mean * plant.whole / plant.part) for plant in drawn) <= 0.25


@for_each("order", ORDERS)
def test_the_planted_step_is_slower_on_so_many_calls(order: str) -> None:
    """Three of four, the same ones again and again or others each time."""
    params = (("extra", 7), ("part", 3), ("whole", 4), ("order", order), ("draw", 5))
    steps = list(itertools.islice(planted._in_turn(Case("_planted", params, "fp32", "cpu")), 4000))
    assert steps.count(7) / len(steps) == pytest.approx(0.75, abs=0.03) and set(steps) == {0, 7}
    assert (steps[:4] * 1000 == steps) is (order == "periodic")


def test_the_table_says_what_a_sceptic_asks() -> None:
    """Shares, false alarms, wrong signs, the load; and fits a terminal."""
    table = power_table(Power(tuple(summarise(by_hand())), (0.5, 1.0, 2.0)))
    assert "load 0.5 to 2.0, median 1.0" in table
    assert "false alarms: 1 of 3 identical pairs; wrong signs: 1 of 6 comparisons" in table
    assert any(line.split()[:5] == ["product", "5.0%", "4.0%", "3", "67%"] for line in table.splitlines())
    assert max(len(line) for line in table.splitlines()) <= 110


def test_a_faster_verdict_on_the_identical_pair_is_an_alarm_but_no_wrong_sign() -> None:
    """Nothing was planted, so there is no sign."""
    alarm, wrong = summarise(by_hand())
    assert alarm.wrong_signs == 0 and wrong.wrong_signs == 1


class Slowing(Worker):
    """Steps of 0.3 ms and so many nanoseconds a tiny call, with noise that only adds."""

    def __init__(self, per_call: float) -> None:
        self._per_call = per_call
        self._extra: dict[str, int] = {}
        self._random = random.Random(1)
        self.prepared: list[str] = []

    def ask(self, limit: float, name: str, *arguments: Any) -> Any:
        if name == "prepare":
            key, case, _ = arguments
            assert isinstance(case, Case) and case.workload == "_planted"
            self._extra[key] = int(case.param("extra"))
            self.prepared.append(key)
        elif name == "release":
            del self._extra[arguments[0]]
            return ()
        elif name == "slot":
            key, calls, *_ = arguments
            bare = 300_000 + self._per_call * self._extra[key]
            steps = [RawStep((GEMM,), (round(bare * (1 + 0.02 * self._random.random() ** 2)),)) for _ in range(calls)]
            seconds = sum(step.intervals_ns[0] for step in steps) / 1e9
            return RawSlot(tuple(steps), seconds, seconds, seconds / calls)
        return None

    def close(self) -> None:
        pass

    def restart(self) -> None:
        pass


@for_each("per_call", [50.0, 2000.0])
def test_effects_are_sized_by_what_a_tiny_call_really_costs(per_call: float) -> None:
    """On this machine, measured before the first trial."""
    operation = operations("text:0", CPU)[0]
    result = measure_power(Slowing(per_call), CPU, operation, 0, 0)
    assert result.step_seconds == pytest.approx(3e-4, rel=0.01)
    for effect in EFFECTS:
        assert result.extra(Plant(effect)) == pytest.approx(effect * 300_000 / per_call, rel=0.05, abs=1)
    assert result.extra(Plant(0.05, 1, 4, "random")) == pytest.approx(0.2 * 300_000 / per_call, rel=0.05, abs=1)
    assert not result.loads and summarise(result) == []


def test_a_trial_judges_every_effect_once() -> None:
    """A clear slow-down is found, the identical pair is left in peace, states are given back."""
    worker = Slowing(50.0)
    operation = operations("text:0", CPU)[0]
    seen: list[int] = []
    result = measure_power(worker, CPU, operation, 2, 7, lambda so_far: seen.append(len(so_far.loads)))
    assert sum(map(len, result.outcomes.values())) == 2 * (len(EFFECTS) + 4)
    rows = {row.planted: row for row in summarise(result) if not row.uneven}
    assert list(rows) == list(EFFECTS) and all(row.trials == 2 for row in rows.values())
    assert rows[0.0].slower == rows[0.0].faster == 0
    assert rows[0.05].slower == rows[0.10].slower == 2
    assert rows[0.10].found == pytest.approx(0.10, rel=0.1)
    assert seen == [1, 2] and not worker._extra
    # Two sizings, and once for both trials: reference, control and a candidate an effect, each of so short a step
    # several times.
    assert len(worker.prepared) == 2 + STATES * (2 + len(EFFECTS) + 4)


def test_a_comparison_ends_when_its_own_time_is_up() -> None:
    """What its three arms took, over the rounds it was in."""
    operation = Operation("small", "short", "fp32", operations("t", CPU)[0].params, 0.2)
    for row in summarise(measure_power(Slowing(50.0), CPU, operation, 1, 0)):
        assert row.seconds_longest < 0.2 + 3 * 64 * 9e-3  # looks come at intervals


@for_each("facts", [CPU, H200], ids=lambda one: one.kind)
@for_each("number", range(3), ids=power.OPERATIONS.__getitem__)
def test_operations_are_what_the_planted_workload_takes(number: int, facts: DeviceFacts) -> None:
    """Every parameter of the base workload is given; a GPU has sizes of its own."""
    operation = operations("text:0", facts)[number]
    assert (operation in operations("text:0", CPU)) is not facts.accelerated
    params = dict(operation.params)
    base = workloads.get(str(params["base"]))
    axes = {axis.name: axis.values(axis.default)[0] for axis in base.axes(facts)}
    (case,) = cases_of(base, sound_axes(base, facts), axes)
    wanted = {name for name, _ in case} | ({"data"} if base.uses_corpus else set())
    assert {name.removeprefix("base.") for name in params} - {"base"} == wanted
    assert operation.key in power.OPERATIONS


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`selftest --power` on a worker that measures nothing."""

    class Known(Slowing):
        def __init__(self, settings: object) -> None:
            super().__init__(50.0)

        def probe(self) -> tuple[DeviceFacts, ...]:
            return (CPU,)

        def software(self) -> dict[str, Any]:
            return {"torch": "2.13.0"}

    monkeypatch.setattr(power, "ProcessWorker", Known)


@pytest.mark.usefixtures("scripted")
def test_the_figures_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the JSON come from the same trials."""
    path = tmp_path / "reports" / "power.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    shown = capsys.readouterr()
    assert "product of 0.3 ms" in shown.out and "product of 2 ms" not in shown.out and not shown.err
    figures = json.loads(path.read_text())
    assert figures["environment"]["torch"] == "2.13.0"
    assert [row["planted"] for row in figures["rows"]][: len(EFFECTS)] == list(EFFECTS)
    (operation,) = figures["operations"]
    assert {str(effect) for effect in EFFECTS} < set(operation["comparisons"])
    assert operation["comparisons"]["0.1"][0][0] == "slower"


@pytest.mark.usefixtures("scripted")
def test_a_wrong_sign_is_code_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The one error that is never excused."""
    result = by_hand()
    monkeypatch.setattr(power, "measure_power", lambda *given: result)
    assert main([*SMALL]) == 3
    assert "wrong signs: 1" in capsys.readouterr().out


@pytest.mark.usefixtures("scripted")
def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below a file nothing can be written, not even by root."""
    (tmp_path / "file").write_text("")
    assert main([*SMALL, "--json", str(tmp_path / "file" / "power.json")]) == 2
    err = unfolded(capsys.readouterr().err)
    assert "--json " in err and "cannot be written (" in err
