"""Decides claims: by arithmetic, by a run's figure, or by their parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fp8bench.analysis.roofline import datasheet_of
from fp8bench.errors import StoreError
from fp8bench.features.claim.expressions import evaluate
from fp8bench.features.claim.readings import read_figure
from fp8bench.features.claim.runs import NotHere, StoredRun
from fp8bench.features.claim.values import Answer, Claim, ClaimAnswer, ClaimKind, Reading
from fp8bench.model import DeviceFacts, Environment, Run
from fp8bench.model.specs import Better, spec_of
from fp8bench.units import describe

# Gives the run of a measured claim; raises NotHere.
GetRun = Callable[[Claim], StoredRun]
_PUBLISHED_ANSWERS = {0: Answer.WITHIN, 1: Answer.ABOVE, -1: Answer.BELOW}
_ON_A_DEVICE = "on a device that has the format"
_MORE = "with more time, rounds or seeds, or on an idle machine"
# Power limits that differ by less are the same.
_SAME_POWER = 0.02


def answer_claim(claim: Claim, claims: Mapping[str, Claim], get_run: GetRun) -> ClaimAnswer:
    """Answers one claim; `claims` has its parts by id."""
    if claim.kind is ClaimKind.ALL_OF:
        return _answer_all(claim, [answer_claim(claims[part], claims, get_run) for part in claim.parts])
    if claim.kind is ClaimKind.ARITHMETIC:
        return _answer_arithmetic(claim)
    # 1. A rate above the peak, or a time below the least one, needs no measurement.
    if claim.limit and (refuted := _refute_by_limit(claim)):
        return refuted
    # 2. Everything else needs a run.
    try:
        run = get_run(claim)
    except NotHere as error:
        return ClaimAnswer(claim, Answer.CANNOT_TELL, why=str(error), remedy=error.remedy)
    return answer_from_run(claim, run)


def _answer_arithmetic(claim: Claim) -> ClaimAnswer:
    computed = evaluate(claim.figure)
    value = computed.value
    answer = Answer.REFUTED if claim.side(value) else Answer.CONFIRMED
    return ClaimAnswer(
        claim, answer, value, value, value, why="; ".join((f"computed as {claim.figure}", *computed.sources))
    )


def _answer_all(claim: Claim, parts: list[ClaimAnswer]) -> ClaimAnswer:
    runs = tuple(dict.fromkeys(run for part in parts for run in part.runs))
    for answer in (Answer.REFUTED, Answer.CANNOT_TELL):
        if deciding := [part for part in parts if part.answer is answer]:
            names = ", ".join(part.claim.id for part in deciding)
            remedy = deciding[0].remedy
            return ClaimAnswer(claim, answer, runs=runs, why=f"{names}: {answer.value}", remedy=remedy)
    return ClaimAnswer(claim, Answer.CONFIRMED, runs=runs, why=f"all {len(parts)} parts are confirmed")


def _refute_by_limit(claim: Claim) -> ClaimAnswer | None:
    limit = evaluate(claim.limit)
    low, high = claim.range
    is_rate = spec_of(claim.figure).better is Better.HIGHER
    if low <= limit.value if is_rate else high >= limit.value:
        return None
    words = "the most that the device can do" if is_rate else "the least time that the device can take"
    value = describe(limit.value, claim.unit)
    return ClaimAnswer(claim, Answer.REFUTED, why="; ".join((f"{words} is {value} ({claim.limit})", *limit.sources)))


def answer_from_run(claim: Claim, run: StoredRun) -> ClaimAnswer:
    """Answers a measured claim from its run alone, so that a stored answer can be checked elsewhere."""
    reading = read_figure(claim, run)
    runs = (reading.run,)
    if reading.why or reading.value is None or reading.low is None or reading.high is None:
        remedy = f"`fp8bench {claim.run}` {_ON_A_DEVICE if 'emulated' in reading.why else _MORE}"
        return ClaimAnswer(claim, Answer.CANNOT_TELL, reading.value, runs=runs, why=reading.why, remedy=remedy)
    if claim.published:
        return _compare_published(claim, run, reading)
    sides = {claim.side(reading.low), claim.side(reading.high)}
    answer, why, remedy = Answer.CANNOT_TELL, "", ""
    if len(sides) > 1:
        why = "its interval has values for which the sentence is true, and others"
        remedy = f"`fp8bench {claim.run}` {_MORE}"
    else:
        answer = Answer.REFUTED if sides.pop() else Answer.CONFIRMED
    return ClaimAnswer(claim, answer, reading.value, reading.low, reading.high, runs, why, remedy)


def _compare_published(claim: Claim, run: StoredRun, reading: Reading) -> ClaimAnswer:
    """Compares with a published figure. A figure outside of it contradicts nothing unless card and power are equal."""
    assert reading.value is not None
    answer = _PUBLISHED_ANSWERS[claim.side(reading.value)]
    differences = list(_differences(claim, run))
    if differences and answer is not Answer.WITHIN:
        answer = Answer.OTHER_CONDITIONS
    why = "; ".join((*differences, *_conditions(claim, run)))
    return ClaimAnswer(claim, answer, reading.value, reading.low, reading.high, (reading.run,), why)


def _differences(claim: Claim, run: StoredRun) -> Iterator[str]:
    """Yields what differs, or is unknown, between the published device and this one: the card, and its power limit."""
    device = _device_of(run)
    sheet = datasheet_of(device.name)
    card = sheet.name if sheet else device.name
    if not claim.card:
        yield f"the source names no card; here {card}"
    elif not {*claim.card.lower().split()} <= {*card.lower().split()}:
        yield f"card {card}, published {claim.card}"
    cap = _environment_of(run).get(f"{device.key} power_cap")
    power = cap if isinstance(cap, int | float) else None
    is_same = power is not None and claim.power is not None and abs(power / claim.power - 1) <= _SAME_POWER
    if device.accelerated and not is_same:
        yield f"power limit {_watts(power)}, published {_watts(claim.power)}"


def _watts(power: float | None) -> str:
    return "unknown" if power is None else f"{power:g} W"


def _conditions(claim: Claim, run: StoredRun) -> Iterator[str]:
    """Yields the clock and the library here, next to those of the source."""
    if isinstance(run, Run):
        clocks = [record.timing.clock for record in run.records if record.timing and record.timing.clock]
        if clocks:
            yield f"clock {min(clocks) / 1e9:.2f} GHz at the lowest, published none"
    yield f"torch {_environment_of(run).get('torch')}, published {claim.library or 'none'}"


def _environment_of(run: StoredRun) -> Environment:
    return run.environment if isinstance(run, Run) else run.training.environment


def _device_of(run: StoredRun) -> DeviceFacts:
    if not isinstance(run, Run):
        return run.training.device
    keys = {record.case.device for record in run.records}
    for device in run.devices:
        if device.key in keys:
            return device
    raise StoreError(f"the run {run.id} names no device of its cases.")
