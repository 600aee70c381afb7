"""The power experiment: its sums on outcomes made by hand, and trials on a scripted worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8bench.features.selftest import power
from fp8bench.features.selftest.power import (
    SLOWDOWNS,
    Operation,
    OperationResult,
    PowerOutcome,
    PowerResult,
    PowerRow,
    format_power_table,
    list_operations,
    measure_power,
    summarize_rows,
)
from fp8bench.measure.arm import STATES_PER_SHORT_STEP
from fp8bench.model import DeviceFacts, Verdict
from fp8bench.plan.checked_workload import expand_cases, list_checked_axes
from fp8bench.registry import workloads
from tests.commands import Say, unfolding
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.features.selftest.scripted import Scripted


def outcome(verdict: Verdict, ratio: float = 1.0, seconds: float = 1.0) -> PowerOutcome:
    return PowerOutcome(verdict.value, seconds, 24, ratio, ratio - 0.01, ratio + 0.01)


def by_hand() -> OperationResult:
    result = OperationResult("product", 3e-4)
    result.outcomes[0.0] = [outcome(Verdict.SAME), outcome(Verdict.UNSURE), outcome(Verdict.FASTER, 0.98)]
    result.outcomes[0.05] = [
        outcome(Verdict.SLOWER, 1.04, 0.5),
        outcome(Verdict.SLOWER, 1.06, 2.5),
        outcome(Verdict.FASTER, 0.9, 1.5),
    ]
    result.loads = [2.0, 0.5, 1.0]
    return result


def test_a_row_counts_verdicts_and_takes_medians() -> None:
    """Effects without trials have no row. A false alarm is no wrong sign: nothing was planted, so there is none."""
    alarm, wrong = summarize_rows([by_hand()])
    assert (alarm, wrong) == (
        PowerRow("product", 0.0, 0.0, 3, slower=0, faster=1, same=1, unsure=1, seconds_median=1.0, seconds_longest=1.0),
        PowerRow(
            "product",
            0.05,
            pytest.approx(0.04),
            3,
            slower=2,
            faster=1,
            same=0,
            unsure=0,
            seconds_median=1.5,
            seconds_longest=2.5,
        ),
    )
    assert alarm.wrong_signs == 0 and wrong.wrong_signs == 1
    table = format_power_table(PowerResult((alarm, wrong), (0.5, 1.0, 2.0)))
    assert "load 0.5 to 2.0, median 1.0" in table and max(map(len, table.splitlines())) <= 110
    assert "false alarms: 1 of 3 identical pairs; wrong signs: 1 of 6 comparisons" in table
    assert any(line.split()[:5] == ["product", "5.0%", "4.0%", "3", "67%"] for line in table.splitlines())


def slowing(per_call: float) -> Scripted:
    """Steps of 0.3 ms plus `per_call` nanoseconds per tiny call."""
    return Scripted(lambda key, case: 300_000 + per_call * int(case.param("extra")), noise=0.02)


@for_each("per_call", [50.0, 2000.0])
def test_effects_are_sized_by_what_a_tiny_call_really_costs(per_call: float) -> None:
    result = measure_power(slowing(per_call), CPU, list_operations("text:0", CPU)[0], 0, 0)
    assert result.step_seconds == pytest.approx(3e-4, rel=0.01)
    for effect in SLOWDOWNS:
        assert result.count_tiny_calls(effect) == pytest.approx(effect * 300_000 / per_call, rel=0.05, abs=1)
    assert not result.loads and summarize_rows([result]) == []


def test_a_trial_judges_every_effect_once() -> None:
    worker, load_counts = slowing(50.0), list[int]()
    operation = list_operations("text:0", CPU)[0]
    result = measure_power(worker, CPU, operation, 2, 7, lambda so_far: load_counts.append(len(so_far.loads)))
    assert sum(map(len, result.outcomes.values())) == 2 * len(SLOWDOWNS)
    rows = {row.planted: row for row in summarize_rows([result])}
    assert list(rows) == list(SLOWDOWNS) and all(row.trials == 2 for row in rows.values())
    assert rows[0.0].slower == rows[0.0].faster == 0 and rows[0.05].slower == rows[0.10].slower == 2
    assert rows[0.10].found == pytest.approx(0.10, rel=0.1)
    assert load_counts == [1, 2] and not worker.held
    # Two sizings, once for both trials: reference, control and one candidate per effect, each several times.
    assert len(worker.prepared) == 2 + STATES_PER_SHORT_STEP * (2 + len(SLOWDOWNS))


def test_a_comparison_ends_when_its_own_time_is_up() -> None:
    operation = Operation("small", "short", "fp32", list_operations("t", CPU)[0].params, 0.2)
    for row in summarize_rows([measure_power(slowing(50.0), CPU, operation, 1, 0)]):
        assert row.seconds_longest < 0.2 + 3 * 64 * 9e-3  # looks come at intervals


@for_each("facts", [CPU, H200], ids=lambda one: one.kind)
@for_each("number", range(3), ids=power.OPERATION_NAMES.__getitem__)
def test_operations_are_what_the_planted_workload_takes(number: int, facts: DeviceFacts) -> None:
    operation = list_operations("text:0", facts)[number]
    assert (operation in list_operations("text:0", CPU)) is not facts.accelerated
    params = dict(operation.params)
    base = workloads.get(str(params["base"]))
    axes = {axis.name: axis.values(axis.default)[0] for axis in base.axes(facts)}
    (case,) = expand_cases(base, list_checked_axes(base, facts), axes)
    expected = {name for name, _ in case} | ({"data"} if base.uses_corpus else set())
    assert {name.removeprefix("base.") for name in params} - {"base"} == expected
    assert operation.key in power.OPERATION_NAMES


def test_the_command_prints_table_and_json_of_the_same_trials(
    fp8bench: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(Scripted):
        def __init__(self, settings: object) -> None:
            vars(self).update(vars(slowing(50.0)))

        def software(self) -> dict[str, Any]:
            return {"torch": "2.13.0"}

    monkeypatch.setattr(power, "ProcessWorker", Known)
    say = unfolding(fp8bench, "selftest", "--power", "--trials", "1", "--operation", "small")
    path = tmp_path / "reports" / "power.json"
    code, out, err = say("--json", str(path))
    assert code == 0 and "product of 0.3 ms" in out and "product of 2 ms" not in out and not err
    figures = json.loads(path.read_text())
    assert figures["environment"]["torch"] == "2.13.0"
    assert [row["planted"] for row in figures["rows"]] == list(SLOWDOWNS)
    (operation,) = figures["operations"]
    assert {str(effect) for effect in SLOWDOWNS} == set(operation["comparisons"])
    assert operation["comparisons"]["0.1"][0][0] == "slower"
    (tmp_path / "file").write_text("")  # below a file nothing can be written, not even by root
    code, _, err = say("--json", str(tmp_path / "file" / "power.json"))
    assert code == 2 and "--json " in err and "cannot be written (" in err
    monkeypatch.setattr(power, "measure_power", lambda *given: by_hand())
    code, out, _ = say()
    assert code == 3 and "wrong signs: 1" in out
