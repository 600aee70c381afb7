"""Up to how many rows of a product arms of weights pay, what takes the gain away, and what ceilings say beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8bench.analysis.break_even import SizedRatio, break_even
from fp8bench.analysis.findings import findings
from fp8bench.features.infer.values import BatchGain, BatchSweep, is_of
from fp8bench.model import Record, Run
from fp8bench.nn.served import CARRIERS, Arm, ServedShape, step_bytes

Phases = Mapping[str, float]


def swept(run: Run, arms: Sequence[Arm], layer: tuple[int, int], rows: tuple[int, ...]) -> BatchSweep:
    return BatchSweep(layer, rows, tuple(gains_of(run, arms)), computed_batch(run, arms[0]))


def gains_of(run: Run, arms: Sequence[Arm]) -> Iterator[BatchGain]:
    """By the ratios of the suite's own verdicts; beside what is measured what ceilings say."""
    verdicts = findings(run)
    leads = {int(record.case.param("m")): record for record in run.records if record.is_reference}
    for arm in arms[1:]:
        own = {int(record.case.param("m")): record for record in run.records if is_of(record, arm)}
        known = ((rows, verdicts[record.case.id].ratio) for rows, record in own.items())
        ratios = [SizedRatio(rows, ratio) for rows, ratio in known if ratio is not None]
        even = break_even(ratios)
        if even is None:
            continue
        crossings = tuple((one.size, one.low, one.high, one.begins) for one in even.crossings)
        pays = even.stretches[0].pays if len(even.stretches) == 1 else None
        worst = max(ratios, key=lambda one: one.ratio.point)
        cases = own[min(own)], own[worst.size], leads[worst.size]
        first, last, lead = (dict(verdicts[record.case.id].phases) for record in cases)
        cause = cause_of(first, last, lead, arm) if worst.ratio.low > 1 else ""
        yield BatchGain(arm, crossings, pays, worst.size, cause, computed_rows(own[min(own)], arm))


# A product that takes less than so many times what it takes of one row has a time that is fixed.
_FIXED = 1.5


def cause_of(first: Phases, last: Phases, reference: Phases, arm: Arm) -> str:
    """What an arm loses by: its seconds by phase at the fewest rows and where it loses most, and the reference's there.

    A time that hardly depends on the rows is what a launch and reading the weight take; one that grows is what is
    computed, of which dequantising is the part that the reference has not.
    """
    lost = {phase: seconds - reference.get(phase, 0.0) for phase, seconds in last.items()}
    if max(lost, key=lambda phase: lost[phase]) == "cast":
        return "casts of inputs" if arm.low_inputs else "dequantising ahead of its product"
    if sum(last.values()) < _FIXED * sum(first.values()):
        return "launches: its time is fixed"
    return "dequantising inside its product" if arm.weights else f"its product: that of {arm.carrier} is slower here"


def computed_rows(record: Record, arm: Arm) -> float | None:
    """Below how many rows a product of the arm is bound by the bytes of its weight, by the ceilings of its device."""
    ceiling = record.ceiling
    if ceiling is None or not ceiling.flops or not ceiling.bytes:
        return None
    outputs, inputs = int(record.case.param("n")), int(record.case.param("k"))
    shape = ServedShape(0, 0, 1, 1, 1, 1, (("blocks.0.weight", (outputs, inputs)),))
    each = step_bytes(shape, replace(arm, kv=""), 1, 0).weights / (outputs * inputs)
    return each * ceiling.flops / (2 * ceiling.bytes)


def computed_batch(run: Run, reference: Arm) -> float | None:
    """The batch from which the reference's own products are bound by arithmetic, so that fewer bytes gain nothing."""
    ceiling = next((one.ceiling for one in run.records if one.is_reference and one.ceiling is not None), None)
    if ceiling is None or not ceiling.flops or not ceiling.bytes:
        return None
    return CARRIERS[reference.carrier] * ceiling.flops / (2 * ceiling.bytes)
