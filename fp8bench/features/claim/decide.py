"""Decides whether a claim is true: by arithmetic, by a figure of a run, or by its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from fp8bench.analysis.roofline import find_datasheet
from fp8bench.errors import StoreError
from fp8bench.features.claim.expressions import evaluate_expression
from fp8bench.features.claim.readings import read_claim_figure, suggest_more_rounds
from fp8bench.features.claim.runs import StoredRun, get_run_id
from fp8bench.features.claim.values import CannotDecide, Claim, ClaimAnswer, ClaimKind, ClaimOutcome
from fp8bench.model import DeviceFacts, Environment, Run
from fp8bench.model.specs import Better, find_metric_spec
from fp8bench.units import describe

# A function that returns the run of a measured claim, or raises CannotDecide.
GetClaimRun = Callable[[Claim], StoredRun]
_PUBLISHED_ANSWER_BY_SIDE = {0: ClaimOutcome.WITHIN_RANGE, 1: ClaimOutcome.ABOVE_RANGE, -1: ClaimOutcome.BELOW_RANGE}

# Power limits whose ratio differs from 1 by less than this count as equal.
_POWER_RATIO_TOLERANCE = 0.02


def decide_claim_answer(claim: Claim, claims: Mapping[str, Claim], get_run: GetClaimRun) -> ClaimAnswer:
    """Answers one claim. `claims` holds all claims of the file by id, because a claim may consist of others."""
    if claim.kind is ClaimKind.ALL_OF:
        return _answer_composed_claim(
            claim, [decide_claim_answer(claims[part], claims, get_run) for part in claim.parts]
        )
    if claim.kind is ClaimKind.ARITHMETIC:
        return _answer_arithmetic_claim(claim)
    # 1. A claimed rate above the device's peak, or a claimed time below the shortest possible one, is refuted without
    # a measurement.
    if claim.limit and (refuted := _refute_claim_by_limit(claim)):
        return refuted
    # 2. Any other claim needs a run.
    try:
        run = get_run(claim)
    except CannotDecide as error:
        return ClaimAnswer(claim, ClaimOutcome.CANNOT_TELL, why=str(error), remedy=error.remedy)
    return answer_claim_from_run(claim, run)


def _answer_arithmetic_claim(claim: Claim) -> ClaimAnswer:
    computed_figure = evaluate_expression(claim.figure)
    value = computed_figure.value
    answer = ClaimOutcome.REFUTED if claim.find_side(value) else ClaimOutcome.CONFIRMED
    return ClaimAnswer(
        claim, answer, value, value, value, why="; ".join((f"computed as {claim.figure}", *computed_figure.citations))
    )


def _answer_composed_claim(claim: Claim, parts: list[ClaimAnswer]) -> ClaimAnswer:
    runs = tuple(dict.fromkeys(run for part in parts for run in part.runs))
    # One refuted part refutes the claim. Otherwise, one undecided part leaves it open.
    for answer in (ClaimOutcome.REFUTED, ClaimOutcome.CANNOT_TELL):
        if deciding := [part for part in parts if part.answer is answer]:
            names = ", ".join(part.claim.id for part in deciding)
            remedy = deciding[0].remedy
            return ClaimAnswer(claim, answer, runs=runs, why=f"{names}: {answer.value}", remedy=remedy)
    return ClaimAnswer(claim, ClaimOutcome.CONFIRMED, runs=runs, why=f"all {len(parts)} parts are confirmed")


def _refute_claim_by_limit(claim: Claim) -> ClaimAnswer | None:
    computed_limit = evaluate_expression(claim.limit)
    low, high = claim.range
    is_higher_better = find_metric_spec(claim.figure).better is Better.HIGHER
    # The sentence stays possible if the limit allows at least one of the claimed values.
    if low <= computed_limit.value if is_higher_better else high >= computed_limit.value:
        return None
    limit_text = "the peak rate of the device" if is_higher_better else "the shortest possible time on the device"
    value = describe(computed_limit.value, claim.unit)
    return ClaimAnswer(
        claim,
        ClaimOutcome.REFUTED,
        why="; ".join((f"{limit_text} is {value} ({claim.limit})", *computed_limit.citations)),
    )


def answer_claim_from_run(claim: Claim, run: StoredRun) -> ClaimAnswer:
    """Answers a measured claim from a single run. It needs nothing else, so that a stored answer can be checked on
    another machine.
    """
    runs = (get_run_id(run),)
    try:
        figure_reading = read_claim_figure(claim, run)
    except CannotDecide as error:
        return ClaimAnswer(claim, ClaimOutcome.CANNOT_TELL, error.value, runs=runs, why=str(error), remedy=error.remedy)
    confirmed_answer = ClaimAnswer(
        claim, ClaimOutcome.CONFIRMED, figure_reading.value, figure_reading.low, figure_reading.high, runs
    )
    if claim.published:
        return _compare_published_figure(confirmed_answer, run)
    end_comparisons = {claim.find_side(interval_end) for interval_end in (figure_reading.low, figure_reading.high)}
    if len(end_comparisons) > 1:
        why = "the sentence is true for some values of the interval and false for others"
        return replace(confirmed_answer, answer=ClaimOutcome.CANNOT_TELL, why=why, remedy=suggest_more_rounds(claim))
    return replace(confirmed_answer, answer=ClaimOutcome.REFUTED) if end_comparisons.pop() else confirmed_answer


def _compare_published_figure(measured_answer: ClaimAnswer, run: StoredRun) -> ClaimAnswer:
    """Compares a published figure with a measured one. A measured figure outside the published range contradicts it
    only if the card and its power limit are the same."""
    claim = measured_answer.claim
    assert measured_answer.value is not None
    answer = _PUBLISHED_ANSWER_BY_SIDE[claim.find_side(measured_answer.value)]
    differences = list(_describe_differences(claim, run))
    if differences and answer is not ClaimOutcome.WITHIN_RANGE:
        answer = ClaimOutcome.OTHER_CONDITIONS
    return replace(measured_answer, answer=answer, why="; ".join((*differences, *_describe_conditions(claim, run))))


def _describe_differences(claim: Claim, run: StoredRun) -> Iterator[str]:
    """Yields the differences in card and power limit between the run and the published figure. Unknown counts as
    different.
    """
    device = _find_device(run)
    datasheet = find_datasheet(device.name)
    card_name = datasheet.name if datasheet else device.name
    if not claim.card:
        yield f"the source names no card; this card is {card_name}"
    elif not {*claim.card.lower().split()} <= {*card_name.lower().split()}:
        yield f"card {card_name}, published {claim.card}"
    power_cap = _get_environment(run).get(f"{device.key} power_cap")
    power_cap_watts = power_cap if isinstance(power_cap, int | float) else None
    is_same_power = (
        power_cap_watts is not None
        and claim.power is not None
        and abs(power_cap_watts / claim.power - 1) <= _POWER_RATIO_TOLERANCE
    )
    if device.accelerated and not is_same_power:
        yield f"power limit {_format_watts(power_cap_watts)}, published {_format_watts(claim.power)}"


def _format_watts(power: float | None) -> str:
    return "unknown" if power is None else f"{power:g} W"


def _describe_conditions(claim: Claim, run: StoredRun) -> Iterator[str]:
    """Yields the clock and the library of the run, each together with that of the published figure."""
    if isinstance(run, Run):
        clocks = [record.timing.clock for record in run.records if record.timing and record.timing.clock]
        if clocks:
            yield f"clock {min(clocks) / 1e9:.2f} GHz at the lowest, published none"
    yield f"torch {_get_environment(run).get('torch')}, published {claim.library or 'none'}"


def _get_environment(run: StoredRun) -> Environment:
    return run.environment if isinstance(run, Run) else run.training.environment


def _find_device(run: StoredRun) -> DeviceFacts:
    if not isinstance(run, Run):
        return run.training.device
    device_keys = {record.case.device for record in run.records}
    for device in run.devices:
        if device.key in device_keys:
            return device
    raise StoreError(f"the run {run.id} does not describe the device of its cases.")
