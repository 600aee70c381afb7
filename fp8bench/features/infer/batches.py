"""Up to how many rows of a product arms of weights pay, what takes the gain away, and what ceilings say beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fp8bench.analysis.break_even import SizedRatio, break_even
from fp8bench.analysis.findings import findings
from fp8bench.features.infer.values import is_of, word_of
from fp8bench.model import Record, Run
from fp8bench.nn.served import CARRIERS, Arm, ServedShape, step_bytes

Phases = Mapping[str, float]


def crossing_of_batches(run: Run, arms: Sequence[Arm]) -> Iterator[str]:
    """Each arm in a sentence, by the ratios of the suite's own verdicts; beside what is measured what ceilings say."""
    verdicts = findings(run)
    leads = {int(record.case.param("m")): record for record in run.records if record.is_reference}
    for arm in arms[1:]:
        own = {int(record.case.param("m")): record for record in run.records if is_of(record, arm)}
        known = ((rows, verdicts[record.case.id].ratio) for rows, record in own.items())
        ratios = [SizedRatio(rows, ratio) for rows, ratio in known if ratio is not None]
        even = break_even(ratios)
        if even is None:
            continue
        crossings = ", ".join(
            f"{'pays from' if one.begins else 'stops paying at'} {one.size:.0f} ({one.low:.0f} to {one.high:.0f}) rows"
            for one in even.crossings
        )
        stretches = {True: "pays at all", False: "pays at none", None: "cannot be told"}
        alike = stretches[even.stretches[0].pays] if len(even.stretches) == 1 else "has no crossing that is sure"
        worst = max(ratios, key=lambda one: one.ratio.point)
        cases = own[min(own)], own[worst.size], leads[worst.size]
        first, last, lead = (dict(verdicts[record.case.id].phases) for record in cases)
        cause = cause_of(first, last, lead, arm)
        why = f", loses most at {worst.size} by {cause}" if worst.ratio.low > 1 else ""
        yield f"{word_of(arm, 'bf16')} {crossings or alike}{why}{computed_rows(own[min(own)], arm)}"


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


def computed_rows(record: Record, arm: Arm) -> str:
    """Below how many rows a product of the arm is bound by the bytes of its weight, by the ceilings of its device."""
    ceiling = record.ceiling
    if ceiling is None or not ceiling.flops or not ceiling.bytes:
        return ""
    outputs, inputs = int(record.case.param("n")), int(record.case.param("k"))
    shape = ServedShape(0, 0, 1, 1, 1, 1, (("blocks.0.weight", (outputs, inputs)),))
    each = step_bytes(shape, replace(arm, kv=""), 1, 0).weights / (outputs * inputs)
    return f"; computed: bound by traffic below {each * ceiling.flops / (2 * ceiling.bytes):.0f}"


def computed_batch(run: Run, reference: Arm) -> str:
    """The batch from which the reference's own products are bound by arithmetic, so that fewer bytes gain nothing."""
    ceiling = next((one.ceiling for one in run.records if one.is_reference and one.ceiling is not None), None)
    if ceiling is None or not ceiling.flops or not ceiling.bytes:
        return "computed: nothing, as ceilings are not known (`fp8bench doctor --ceilings` measures them)"
    batch = CARRIERS[reference.carrier] * ceiling.flops / (2 * ceiling.bytes)
    return f"computed from ceilings: fewer bytes a weight gain nothing past {batch:.0f}"
