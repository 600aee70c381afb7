"""Sweeps: cases of a suite that differ in one number alone, and from where on each precision pays there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench.analysis.break_even import LEAST_SIZES, BreakEven, SizedRatio, break_even
from fp8bench.analysis.verdicts import best_ratio, common_rounds
from fp8bench.model import Finding, Interval, Level, Params, Record

# What low precision is held against wherever it was measured: it is what it would replace.
USUAL = "bf16"
_NOT_BELOW = frozenset({"fp32", "tf32", "bf16", "fp16"})

# A case with what its samples say.
Told = tuple[Record, Finding | None]


@dataclass(frozen=True)
class Sweep:
    """Cases that differ in one number: its name, the parameters that they share, and their places, smallest first."""

    axis: str
    held: Params
    places: tuple[tuple[int, int], ...]  # the number, and the place of its setting


@dataclass(frozen=True)
class SweptMode:
    """One precision over a sweep. `found` is None where too few sizes have a ratio.

    `refused` says why sizes have none; `doubted` are those whose ratio stands beside a label that casts doubt on it.
    """

    mode: str
    against: str
    points: tuple[SizedRatio, ...]
    refused: tuple[tuple[int, str], ...]
    doubted: tuple[int, ...]
    found: BreakEven | None


def sweeps_of(settings: Sequence[Params]) -> list[Sweep]:
    """Every number that varies alone over at least three settings."""
    found: dict[tuple[str, Params], dict[int, int]] = {}
    for place, params in enumerate(settings):
        for name, value in params:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                held = tuple(pair for pair in params if pair[0] != name)
                found.setdefault((name, held), {})[value] = place
    return [
        Sweep(axis, held, tuple(sorted(sizes.items())))
        for (axis, held), sizes in found.items()
        if len(sizes) >= LEAST_SIZES
    ]


def swept_modes(sweep: Sweep, groups: Sequence[Sequence[Told]]) -> Iterator[SweptMode]:
    """Every precision of a sweep but what it is held against; `groups` by the places of their settings."""
    for mode in dict.fromkeys(record.case.mode for _, place in sweep.places for record, _ in groups[place]):
        points, refused, doubted, against = [], [], [], ""
        for size, place in sweep.places:
            own = next((one for one in groups[place] if one[0].case.mode == mode), None)
            base = _base(own, groups[place]) if own is not None else None
            if own is None or base is None or own is base:
                continue
            against = base[0].case.mode
            ratio = _ratio(own, base)
            if isinstance(ratio, Interval):
                points.append(SizedRatio(size, ratio))
                doubted += [size] if any(one[1] is not None and one[1].doubts(ratio) for one in (own, base)) else []
            else:
                refused.append((size, ratio))
        if points or refused:
            yield SweptMode(mode, against, tuple(points), tuple(refused), tuple(doubted), break_even(points))


def _base(own: Told, group: Sequence[Told]) -> Told | None:
    """What a case is held against: bf16 for what lies below it, if it has a speed here, else the reference."""
    if own[0].case.precision not in _NOT_BELOW:
        usual = next((one for one in group if one[0].case.mode == USUAL and one[0].support.level is Level.NATIVE), None)
        if usual is not None and usual[0].timing is not None:
            return usual
    return next((one for one in group if one[0].is_reference), None)


def _ratio(own: Told, base: Told) -> Interval | str:
    """The ratio of two cases' times, or why there is none."""
    record, finding = own
    if record.support.level is Level.EMULATED:
        return "emulated here: no speed"
    if finding is None or finding.best_seconds is None:
        return record.reason or "not timed"
    hard = finding.hard or (base[1].hard if base[1] is not None else ())
    if hard:
        return f"labelled {', '.join(hard)}"
    if base[0].is_reference:
        ratio = finding.ratio
    elif record.timing is not None and base[0].timing is not None and not (record.paired_with or base[0].paired_with):
        rounds = common_rounds([record.timing, base[0].timing])
        ratio = best_ratio([record.timing, base[0].timing], rounds) if rounds else None
    else:
        ratio = None
    sound = ratio is not None and 0 < ratio.low <= ratio.point <= ratio.high < float("inf")
    return ratio if ratio is not None and sound else f"no rounds in common with {base[0].case.mode}"
