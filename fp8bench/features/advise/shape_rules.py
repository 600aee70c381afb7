"""Rules about what is multiplied, and projections to steps that were not timed.

The rules ask from which size on a precision pays here, and how much of a step it reaches. A projection applies Amdahl's
law by size: products and their share come from the reference's step, their speed, casts included, from products of the
same size on the same device. Nothing is projected where the precision would change more than products.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np

from fp8bench import units
from fp8bench.analysis.break_even import LEAST_SIZES, SizedRatio, break_even
from fp8bench.analysis.verdicts import BAND
from fp8bench.features.advise.basis import (
    AdviceRule,
    Basis,
    ComparedCase,
    Reply,
    amdahl,
    doubts,
    gain_text,
    mapped,
    met_above,
    products_alone,
    share_text,
)
from fp8bench.features.advise.values import Advice, AdviceKind, Ground, Met
from fp8bench.model import Interval, Level, OperatorCount, Phase

_SIDES = ("m", "n", "k")
# With less than this share of its products in sizes that pay, or converted, a step gains little.
_HALF = 0.5
_SHAPE = re.compile(r"\[([\d,]+)\]")
_GROUPED = "grouped_mm"


def sized(
    mode: str, device: str, basis: Basis, paths: Collection[str] | None = None, product: str = ""
) -> dict[int, tuple[SizedRatio, str]]:
    """Returns products that were timed in a mode, by size (the cube root of M N K): times over the reference's, and
    the case. The least favourable of a size counts. `paths` are the dtypes that the reference may multiply in,
    `product` is one of a layer's three, '' for any."""
    by_size: dict[int, tuple[SizedRatio, str]] = {}
    for case in basis.all_cases:
        params, speed = dict(case.record.case.params), case.speed
        if (case.mode, case.record.case.device) != (mode, device) or speed is None or case.lead is None:
            continue
        if not all(isinstance(params.get(side), int) for side in _SIDES):
            continue
        other_path = paths is not None and {case.lead.case.precision} != set(paths)
        if other_path or (product and params.get("product", product) != product):
            continue
        size = round(math.prod(int(params[side]) for side in _SIDES) ** (1 / 3))
        if size not in by_size or by_size[size][0].ratio.point < speed.inverse.point:
            by_size[size] = SizedRatio(size, speed.inverse), case.row
    return by_size


def pays_from(mode: str, device: str, basis: Basis) -> tuple[float, float, tuple[Ground, ...]] | str:
    """Returns the size from which on products of a mode surely pay here (infinite if none does), the largest size
    measured, and the grounds; a sentence if too few were measured."""
    known = sized(mode, device, basis)
    if len(known) < LEAST_SIZES:
        return f"{len(known)} sizes of products were timed in it here, and {LEAST_SIZES} are needed"
    curve = break_even([ratio for ratio, _ in known.values()])
    assert curve is not None
    last = curve.stretches[-1]
    begins = last.first if last.pays else math.inf
    words = "pays at no size up to the largest measured"
    if last.pays:
        size = next((crossing.size for crossing in reversed(curve.crossings) if crossing.begins), begins)
        words = f"pays from about {units.whole(round(size))} on"
    rows = tuple(Ground(row, f"size {size}: {units.speed_up(1 / ratio.ratio.point)}")
                 for size, (ratio, row) in sorted(known.items()))  # fmt: skip
    return begins, float(max(known)), (Ground(rows[0].row, words), *rows)


def products_of(pair: ComparedCase) -> list[tuple[int, int, int, int]]:
    """Returns M, N, K and FLOPs of the products that a step's reference makes, by its coverage or its tape."""
    coverage = pair.record.coverage
    if coverage is not None:
        products = (each for holder in coverage.holders for each in holder.products)
        return [(each.m, each.n, each.k, each.flops) for each in products]
    tape = pair.lead.tape if pair.lead is not None else None
    return list(_taped(tape.operators)) if tape is not None else []


def _taped(operators: Iterable[OperatorCount]) -> Iterator[tuple[int, int, int, int]]:
    for operator in operators:
        counted = operator.path and operator.flops and len(operator.outputs) == 1
        shape = _SHAPE.search(operator.outputs[0]) if counted else None
        sides = [int(side) for side in shape[1].split(",")] if shape else []
        if len(sides) == 2 and operator.flops:
            m, n = sides
            yield m, n, operator.flops // (2 * m * n), operator.calls * operator.flops


def _large(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    case = pair.record.case
    if pair.emulated:
        return "emulated here: its time is the cost of emulation"
    if all(side in dict(case.params) for side in _SIDES):
        return None  # one product: its own speed says it all
    products = products_of(pair)
    if not products:
        return "the products of its step were not counted (no tape)"
    known = pays_from(pair.mode, case.device, basis)
    if isinstance(known, str):
        return known
    begins, largest, grounds = known
    total = sum(flops for *_, flops in products)
    sizes = [(math.prod(sides) ** (1 / 3), flops) for *sides, flops in products]
    paying = sum(flops for size, flops in sizes if begins <= size <= largest) / total
    beyond = sum(flops for size, flops in sizes if size > largest) / total
    figure = f"{grounds[0].figure}: {units.percent(paying, 0)} of its products' FLOPs"
    figure += f", {units.percent(beyond, 0)} beyond what was measured" if beyond else ""
    if paying < _HALF <= paying + beyond:
        return f"{figure}; products of its size were not timed"
    return Reply(Met.YES if paying >= _HALF else Met.NO, figure, grounds)


def _reached(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    coverage = pair.record.coverage
    if coverage is None or not coverage.flops:
        return None
    kinds = [f"{kind} {units.percent(converted / coverage.flops, 0)}"
             for kind, (_, converted) in coverage.by_kind().items() if converted]  # fmt: skip
    left = max((each for each in coverage.holders if not each.converted), key=lambda each: each.flops, default=None)
    figure = f"{units.percent(coverage.share, 0)} of product FLOPs" + (f" ({', '.join(kinds)})" if kinds else "")
    if left is not None and left.flops:
        figure += f"; {left.name} is not: {left.reason}"
    return Reply(Met.YES if coverage.share >= _HALF else Met.NO, figure, (Ground(pair.row, figure),))


def _experts(pair: ComparedCase, basis: Basis) -> Reply | str | None:
    coverage = pair.record.coverage
    if coverage is not None:
        whole, converted = coverage.by_kind().get("experts", (0, 0))
        if not whole:
            return None
        words = f"experts are {units.percent(whole / coverage.flops, 0)} of product FLOPs"
        figure = f"{words}, {units.percent(converted / whole, 0)} of them converted"
        return Reply(Met.YES if converted > _HALF * whole else Met.NO, figure, (Ground(pair.row, words),))
    tape = pair.lead.tape if pair.lead is not None else None
    grouped = [each for each in tape.operators if _GROUPED in each.operator] if tape is not None else []
    if tape is None or not grouped or not tape.flops:
        return None
    words = f"grouped products are {units.percent(sum(e.calls * (e.flops or 0) for e in grouped) / tape.flops, 0)}"
    own = pair.record.tape
    low = {e.path for e in own.operators if _GROUPED in e.operator} if own is not None else set()
    if not low:
        return f"{words} of its FLOPs, and in which dtype they run in it was not counted"
    met = Met.NO if low == {e.path for e in grouped} else Met.YES
    return Reply(met, f"{words} of its FLOPs, in {', '.join(sorted(low))}", (Ground(pair.row, words),))


RULES = (
    # Break-even differs by device, recipe and torch by more than twice: no constant holds.
    AdviceRule("shapes", "Are its products large enough?", _large,
               "fp8bench suite gemm --dtypes {high},{alone}, then fp8bench advise RUN --beside last"),
    # A converter of nn.Linear alone does nothing for GPT-2 or a ResNet, and 18% for Mixtral.
    AdviceRule("coverage", "Can most of its products be converted?", _reached,
               "fp8bench profile {make} --dtypes {mode}"),
    # Of a published mixture of experts: linear layers alone 1.05x, experts alone 1.40x.
    AdviceRule("experts", "Are the experts converted?", _experts, "fp8bench profile {make} --dtypes {mode}"),
)  # fmt: skip


# At least this share of the products' FLOPs has to be in sizes that were timed.
_LEAST_TIMED = 0.9
# A layer's three products in a training step have the same FLOPs; a library may do them at very different speeds.
_KINDS = ("forward", "input-gradient", "weight-gradient")


def projections(basis: Basis) -> Iterator[Advice]:
    """Yields advice for each training step with a native reference, in modes that only products were timed in."""
    leads = {pair.lead.case.id: pair for pair in basis.cases if pair.lead is not None and pair.trains}
    timed = {(case.mode, case.record.case.device) for case in basis.all_cases if case.speed is not None}
    for lead in leads.values():
        assert lead.lead is not None
        here = {record.case.mode for record, _ in lead.group}
        for mode, device in sorted(timed):
            if device == lead.lead.case.device and mode not in here and (advice := _projected(lead, mode, basis)):
                yield advice


def _projected(pair: ComparedCase, mode: str, basis: Basis) -> Advice | None:
    lead = pair.lead
    if lead is None or lead.support.level is not Level.NATIVE or lead.tape is None or not products_alone(pair, mode):
        return None
    paths = set(lead.tape.by_path)
    share = pair.share({Phase.GEMM})
    kinds = ("forward",) if dict(lead.case.params).get("pass") == "forward" else _KINDS
    timed = [sized(mode, lead.case.device, basis, paths, kind) for kind in kinds]
    projected = (_of_products(pair, [known for known, _ in ratios.values()]) for ratios in timed)
    each = [ratio for ratio in projected if ratio is not None]
    if share is None or len(each) < len(kinds):
        return None
    means = (statistics.fmean(ends) for ends in zip(*((r.point, r.low, r.high) for r in each), strict=True))
    ratio = Interval(*means, min(ratio.level for ratio in each))  # type: ignore[call-arg]
    floor = 1 + max(BAND, (pair.lead_finding.floor if pair.lead_finding is not None else None) or 0.0)
    wide = (1.0, share.point, ratio.point), (1 / floor, share.low, ratio.high), (floor, share.high, ratio.low)
    ends = [far * amdahl(own, taken) for far, own, taken in wide]
    most = amdahl(share.high, 0.0)
    gain = mapped(Interval(ends[0], min(ends), max(ends), ratio.level), lambda value: min(value, most))
    case, worth = lead.case, met_above(gain, 1 + basis.least)
    known = (
        f"products are {share_text(share)} of the step, and {gain_text(ratio.inverse)} as fast at its sizes, with casts"
    )
    words = f"adopt {mode}, by projection: a step {gain_text(gain)} as fast as in {case.mode}"
    if worth is not Met.YES:
        words = (
            f"do nothing about {mode}, because by projection its step is {gain_text(gain)} as fast, not surely the "
            f"{units.percent(basis.least, 0)} that are worth it"
        )
    rows = dict.fromkeys(
        Ground(row, f"{units.speed_up(1 / known.ratio.point)} at size {size}")
        for ratios in timed for size, (known, row) in sorted(ratios.items())
    )  # fmt: skip
    from_rows = {row for ratios in timed for _, row in ratios.values()}
    doubt = doubts(replace(pair, finding=None), [known.finding for known in basis.all_cases if known.row in from_rows])
    return Advice(
        "projection", AdviceKind.ADOPT if worth is Met.YES else AdviceKind.NOTHING, mode, case.mode,
        f"{words}: {known}; the step itself was not timed in it, --check does{doubt}", (case.setting,),
        f"--dtypes {case.mode},{mode}" if worth is Met.YES else "", gain=gain, case=f"{case.setting}/{mode}",
        grounds=(Ground(case.id, f"products are {share_text(share)} of the step"), *rows), doubtful=bool(doubt),
    )  # fmt: skip


def _of_products(pair: ComparedCase, ratios: list[SizedRatio]) -> Interval | None:
    """Returns the time of the step's products in the precision over their time now, each by its size; None where too
    few lie between sizes that were timed."""
    products = [(math.prod(sides) ** (1 / 3), flops) for *sides, flops in products_of(pair)]
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
        for values in zip(*((sized.ratio.point, sized.ratio.low, sized.ratio.high) for sized in ordered), strict=True)
    )
    return Interval(*ends, min(sized.ratio.level for sized in ordered))  # type: ignore[call-arg]
