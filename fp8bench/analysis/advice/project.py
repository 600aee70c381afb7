"""What a precision would give to a step that was not timed in it, from the products that were: Amdahl's law by size.

The step's products and their share are its reference's; how fast a product is in the precision, casts included, comes
from products of the same device as large as these. Where precisions carry other values between products more would
change than products, and nothing is projected.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import numpy as np

from fp8bench import units
from fp8bench.analysis.advice.basis import Basis, Beside
from fp8bench.analysis.advice.rule import amdahl, mapped, met_above, part, times
from fp8bench.analysis.advice.shape_rules import products_of, sized
from fp8bench.analysis.break_even import LEAST_SIZES, SizedRatio
from fp8bench.analysis.verdicts import BAND
from fp8bench.errors import UsageError
from fp8bench.model import Interval, Level, Phase
from fp8bench.model.advice import Advice, AdviceKind, Ground, Met
from fp8bench.registry import precisions

# Of the products' FLOPs so many have to be in sizes that were timed.
_LEAST_TIMED = 0.9
_OWN_MODEL = "model"
# What a layer multiplies in a training step, each as much; a library may do them at very different speeds.
_KINDS = ("forward", "input-gradient", "weight-gradient")


def projections(basis: Basis) -> Iterator[Advice]:
    """Of every training step with a native reference, for modes that products alone were timed in."""
    leads = {one.lead.case.id: one for one in basis.besides if one.lead is not None and one.trains}
    timed = {(one.mode, one.record.case.device) for one in basis.known if one.speed is not None}
    for one in leads.values():
        assert one.lead is not None
        here = {record.case.mode for record, _ in one.group}
        for mode, device in sorted(timed):
            if device == one.lead.case.device and mode not in here and (found := _projected(one, mode, basis)):
                yield found


def _projected(one: Beside, mode: str, basis: Basis) -> Advice | None:
    lead = one.lead
    if lead is None or lead.support.level is not Level.NATIVE or lead.tape is None or not _products_alone(one, mode):
        return None
    paths = set(lead.tape.by_path)
    share = one.share({Phase.GEMM})
    kinds = ("forward",) if dict(lead.case.params).get("pass") == "forward" else _KINDS
    timed = [sized(mode, lead.case.device, basis, paths, kind) for kind in kinds]
    found = [_of_products(one, [known for known, _ in ratios.values()]) for ratios in timed]
    each = [ratio for ratio in found if ratio is not None]
    if share is None or len(each) < len(kinds):
        return None
    means = (statistics.fmean(ends) for ends in zip(*((r.point, r.low, r.high) for r in each), strict=True))
    ratio = Interval(*means, min(one.level for one in each))  # type: ignore[call-arg]
    floor = 1 + max(BAND, (one.lead_finding.floor if one.lead_finding is not None else None) or 0.0)
    wide = (1.0, share.point, ratio.point), (1 / floor, share.low, ratio.high), (floor, share.high, ratio.low)
    ends = [far * amdahl(own, taken) for far, own, taken in wide]
    most = amdahl(share.high, 0.0)
    gain = mapped(Interval(ends[0], min(ends), max(ends), ratio.level), lambda value: min(value, most))
    case, worth = lead.case, met_above(gain, 1 + basis.least)
    known = f"products are {part(share)} of the step, and {times(ratio.inverse)} as fast at its sizes, with casts"
    words = f"adopt {mode}, by projection: a step {times(gain)} as fast as in {case.mode}"
    if worth is not Met.YES:
        words = (
            f"do nothing about {mode}, because by projection its step is {times(gain)} as fast, not surely the "
            f"{units.percent(basis.least, 0)} that are worth it"
        )
    rows = dict.fromkeys(
        Ground(row, f"{units.speed_up(1 / known.ratio.point)} at size {size}")
        for ratios in timed for size, (known, row) in sorted(ratios.items())
    )  # fmt: skip
    return Advice(
        "projection", AdviceKind.ADOPT if worth is Met.YES else AdviceKind.NOTHING, mode, case.mode,
        f"{words}: {known}; the step itself was not timed in it, --check does", (case.setting,),
        f"--dtypes {case.mode},{mode}" if worth is Met.YES else "", gain=gain, case=f"{case.setting}/{mode}",
        grounds=(Ground(case.id, f"products are {part(share)} of the step"), *rows),
    )  # fmt: skip


def _products_alone(one: Beside, mode: str) -> bool:
    """Whether this precision changes products and nothing else of the step: in copies of a person's own model, and
    where it is carried in what the reference is."""
    assert one.lead is not None
    if one.lead.case.workload == _OWN_MODEL:
        return True
    try:
        return precisions.get(mode).carried_by == one.lead.case.precision
    except UsageError:
        return False


def _of_products(one: Beside, ratios: list[SizedRatio]) -> Interval | None:
    """The time of the step's products in the precision over their time now, each by its size; None where too few of
    them lie between sizes that were timed."""
    products = [(math.prod(sides) ** (1 / 3), flops) for *sides, flops in products_of(one)]
    total = sum(flops for _, flops in products)
    if len(ratios) < LEAST_SIZES or not total:
        return None
    ordered = sorted(ratios)
    at = np.log([ratio.size for ratio in ordered])
    inside = [(math.log(size), flops) for size, flops in products if at[0] <= math.log(size) <= at[-1] + 1e-3]
    whole = sum(flops for _, flops in inside)
    if whole < _LEAST_TIMED * total:
        return None
    places, weights = (np.array(each) for each in zip(*inside, strict=True))
    ends = (
        float(np.exp(np.interp(places, at, np.log(values))) @ weights / whole)
        for values in zip(*((one.ratio.point, one.ratio.low, one.ratio.high) for one in ordered), strict=True)
    )
    return Interval(*ends, min(one.ratio.level for one in ordered))  # type: ignore[call-arg]
