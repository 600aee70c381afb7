"""The answer for each precision: its verdict in plain words, its costs, its reason, and what would settle it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fp8bench.analysis.phase_gains import find_explaining_phases
from fp8bench.model import Case, Interval, PhaseGain, Verdict
from fp8bench.report.panels import group_into_panels
from fp8bench.report.topics.answers import VERDICT_COLUMNS, describe_speed_reason, propose_commands, verdict_rows
from fp8bench.report.words.naming import name_work_outside_phases
from tests.counts import for_each
from tests.materials import Made, recased
from tests.runs import judged, transformer
from tests.told_before import Told, as_before

COMMAND = "fp8bench suite transformer --dtypes bf16"


def gain(phase: str, milliseconds: float, reference: float) -> PhaseGain:
    saved = 1e-3 * (reference - milliseconds)
    low, high = sorted((0.9 * saved, 1.1 * saved))
    return PhaseGain(phase, 1e-3 * milliseconds, 1e-3 * reference, low, high)


@as_before
def test_reasons() -> Told:
    """Milliseconds of phases in the case and in the reference."""
    for claim, times in (
        ("gains and losses cancel", {"gemm": (8, 16), "attention": (10.8, 3)}),
        ("one phase has all of the gain", {"gemm": (8, 16)}),
        ("one phase has nearly all of it", {"gemm": (10, 20), "attention": (9.5, 10), "accumulate": (10.5, 10)}),
        ("casts take some of it", {"cast": (3, 0), "gemm": (12, 16)}),
        ("casts take all of it", {"cast": (5, 0), "gemm": (12, 16)}),
        ("casts take most of it", {"cast": (6, 0), "gemm": (10, 20), "attention": (25.9, 20)}),
        ("what gains is small", {"attention": (1, 2), "gemm": (16, 16)}),
        ("what gains is small beside what loses", {"attention": (123, 120), "gemm": (5.5, 6)}),
        (
            "a small gain is named beside three losses",
            {"gemm": (9.1, 10), "attention": (31, 30), "accumulate": (31, 30), "optimizer_step": (31, 30)},
        ),
        ("several phases, a plural among them", {"gemm": (20, 16), "cast": (1, 2), "attention": (2, 5)}),
    ):
        reason = find_explaining_phases(
            [gain(phase, *both) for phase, both in {**times, "elementwise": (9, 9)}.items()]
        )
        assert reason is not None
        yield claim, describe_speed_reason(reason)


def test_a_reference_without_phases_has_forward_and_backward_as_one() -> None:
    def to_own_model(case: Case) -> Case:
        return replace(case, precision="untouched") if case.precision == "fp32" else case

    suite = judged((Verdict.FASTER, 0.5))
    named = [group_into_panels(*made)[0].named_cases[1] for made in (suite, recased(suite, to_own_model))]
    assert [name_work_outside_phases(case) for case in named] == ["", "forward and backward"]
    reason = find_explaining_phases([gain("unattributed", 20, 40), gain("cast", 1, 0), gain("optimizer_step", 9, 9)])
    assert reason is not None and "the rest of the step saves 20.0 ms" in describe_speed_reason(reason)
    assert "forward and backward save 20.0 ms (2.00x)" in describe_speed_reason(
        reason, name_work_outside_phases(named[1])
    )


def unsettled(low: float, point: float, high: float, level: float = 0.99, **changes: object) -> Made:
    """A run of one case whose verdict is open."""
    run, findings = judged((Verdict.UNSURE, point))
    own = list(findings)[1]
    findings[own] = replace(findings[own], ratio=Interval(point, low, high, level), **changes)  # type: ignore[arg-type]
    return run, findings


def proposals(made: Made, command: str, **options: Any) -> list[str]:
    return list(propose_commands(group_into_panels(*made)[0].named_cases, command, **options))


@for_each(
    ("ratio", "seconds"),
    [
        ((0.97, 0.99, 1.01), 50),  # half the width would show 1% or "same": four times the rounds
        ((0.93, 0.96, 0.99), 20),  # 4% with 3% either way: at least twice the time
        ((0.95, 1.0, 1.05), 70),
    ],
)
def test_time_that_settles_a_verdict(ratio: tuple[float, float, float], seconds: int) -> None:
    (proposal,) = proposals(unsettled(*ratio), COMMAND)
    assert proposal.endswith(f"{COMMAND} --budget {seconds}")


def test_a_verdict_that_no_time_settles_has_no_proposal() -> None:
    assert not proposals(unsettled(0.4, 0.995, 2.5), COMMAND)


def test_an_earlier_budget_is_replaced_and_a_quick_look_is_measured_in_full() -> None:
    (proposal,) = proposals(unsettled(0.93, 0.96, 0.99), f"{COMMAND} --budget 100 --rounds 80", budget=100)
    assert proposal.endswith(f"{COMMAND} --budget 200")
    (proposal,) = proposals(unsettled(0.93, 0.96, 0.99, level=0.0), f"{COMMAND} --quick --rounds 8")
    assert proposal.endswith(f"quiet machine: {COMMAND}")
    assert not proposals(unsettled(0.97, 0.99, 1.01), f"{COMMAND} --budget 300", budget=300)


def test_a_reference_alone_gets_precisions_to_compare() -> None:
    run, findings = unsettled(0.93, 0.96, 0.99)
    (proposal,) = proposals((replace(run, records=run.records[:1]), findings), COMMAND, under_load=True)
    assert proposal == f"name precisions to compare: {COMMAND.replace('bf16', 'fp32,bf16,fp8')}"
    assert not [*propose_commands([], COMMAND)]


@for_each("command", ["fp8bench profile ./model.py:make", "fp8bench suite --plan plan.json --cell 0"])
def test_only_a_suite_is_measured_again(command: str) -> None:
    assert not proposals(unsettled(0.93, 0.96, 0.99), command)


def test_what_loses_time_is_changed_by_an_option_that_was_not_used() -> None:
    losses = (gain("cast", 5, 0), gain("attention", 9, 3), gain("gemm", 5, 16))
    params = (("attention", "auto"), ("compile", "no"))
    made = recased(unsettled(0.93, 0.96, 0.99, gains=losses), lambda case: replace(case, params=params))
    said = " ".join(proposals(made, COMMAND))
    assert "--set attention=auto,math" in said and "--set compile=yes" in said
    assert "attention=auto,math" not in " ".join(proposals(made, f"{COMMAND} --set attention=flash"))


def test_rows_of_verdicts_are_those_of_the_terminal() -> None:
    rows = [dict(zip(VERDICT_COLUMNS, row, strict=True)) for row in verdict_rows(group_into_panels(*transformer()))]
    assert [(row["dtype"], row["verdict"]) for row in rows] == [("fp16", "cannot tell"), ("fp8", "speed unknown")]
    assert rows[0]["low"] < rows[0]["speed_up"] < rows[0]["high"] and rows[1]["speed_up"] is None
