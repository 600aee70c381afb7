"""Speed against error: what a precision gives and what it takes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model import Interval
from fp8bench.report.blocks import Result
from fp8bench.report.elements import Axis, Part, Point, Scatter, Tone
from fp8bench.report.material import Material
from fp8bench.report.naming import listed
from fp8bench.report.run_facts import many
from fp8bench.report.section import Section, sections
from fp8bench.report.standing import Standing, doubts, speed_up, standing, tone_of
from fp8bench.report.tables import main_error, value_of
from fp8bench.report.tensor_panels import timed_panels

_LEAD = (
    "To the right is faster, further down is more exact. A case is outdone where another of its group is more exact "
    "and surely faster too: then there is nothing to trade."
)
_REFERENCE = Interval(1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True)
class _Spot:
    """A case with an error: its group, and its speed where it has one."""

    title: str
    setting: str
    result: Result
    speed: Interval | None
    error: float

    @property
    def group(self) -> tuple[str, str]:
        return self.title, self.setting

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.title, self.setting, self.result.mode) if part)


@sections.register("tradeoff")
class TradeOff(Section):
    """A chart for each error metric: errors of different kinds do not share an axis."""

    name = "tradeoff"
    summary = "speed-up against the main error"
    rank = 50

    def build(self, material: Material) -> Part | None:
        by_metric: dict[str, list[_Spot]] = {}
        for metric, spot in _spots(material):
            by_metric.setdefault(metric, []).append(spot)
        charts = [
            _chart(f"trade-off-{number}", metric, spots)
            for number, (metric, spots) in enumerate(by_metric.items(), 1)
            if any(standing(spot.result) is not Standing.REFERENCE for spot in spots)
        ]
        return Part(self.name, "Speed against error", tuple(charts), _LEAD) if charts else None


def _spots(material: Material) -> Iterator[tuple[str, _Spot]]:
    """What can be drawn: an error above zero, and a speed, or a reason to have none."""
    for title, panel in timed_panels(material):
        metric = main_error(panel)
        for group in panel.groups:
            for result in group.results:
                error = value_of(result.record.measurement(metric)) if metric else None
                kind, speed = standing(result), speed_up(result)
                placed = speed is not None or kind in (Standing.REFERENCE, Standing.EMULATED)
                if error is not None and math.isfinite(error) and error > 0 and placed:
                    own = _REFERENCE if kind is Standing.REFERENCE else speed
                    yield metric, _Spot(title, panel.place(group), result, own, error)


def _chart(name: str, metric: str, spots: Sequence[_Spot]) -> Scatter:
    outdone = _outdone(spots)
    titles = list(dict.fromkeys(spot.title for spot in spots))
    emulated = any(spot.speed is None for spot in spots)
    return Scatter(
        name,
        f"Speed-up against {metric}: {listed(titles)}",
        _description(spots, outdone, metric),
        Axis("speed-up", "x"),
        Axis(metric, "", log=True),
        tuple(_point(spot, outdone.get(spot), len(titles) > 1) for spot in spots),
        "emulated: no speed" if emulated else "",
    )


def _point(spot: _Spot, better: _Spot | None, titled: bool) -> Point:
    """Its series is the precision; the label says of which group it is, and of which suite where that is not given."""
    label = " ".join(part for part in (spot.title if titled else "", spot.setting) if part)
    x = spot.speed.point if spot.speed is not None else None
    speed = f"{units.speed_up(x)}, " if x is not None else ""
    words = [f"{speed}error {units.relative_error(spot.error)}"]
    words += [f"outdone by {better.result.mode}, which is faster and more exact"] if better is not None else []
    words += ["emulated: no speed"] if x is None else doubts(spot.result)
    return Point(spot.result.mode, label or spot.result.mode, x, spot.error, tone_of(spot.result), "; ".join(words))


def _outdone(spots: Sequence[_Spot]) -> dict[_Spot, _Spot]:
    """Cases that another one of their group beats in both, with that one; what is in doubt is not weighed."""
    groups: dict[tuple[str, str], list[_Spot]] = {}
    for spot in spots:
        if spot.speed is not None and tone_of(spot.result) is not Tone.DOUBT:
            groups.setdefault(spot.group, []).append(spot)
    better = {
        spot: next((other for other in members if _beats(other, spot)), None)
        for members in groups.values()
        for spot in members
    }
    return {spot: other for spot, other in better.items() if other is not None}


def _beats(other: _Spot, spot: _Spot) -> bool:
    """More exact, and faster by intervals that do not touch."""
    return (
        other.speed is not None
        and spot.speed is not None
        and other.error < spot.error
        and other.speed.low > spot.speed.high
    )


def _description(spots: Sequence[_Spot], outdone: Mapping[_Spot, _Spot], metric: str) -> str:
    """The range of errors by precision, and which cases are outdone."""
    by_mode: dict[str, list[float]] = {}
    for spot in spots:
        by_mode.setdefault(spot.result.mode, []).append(spot.error)
    ranges = [f"{mode} {_span(errors)}" for mode, errors in by_mode.items()]
    sentences = [f"{many(len(spots), 'case')}. {metric}: {listed(ranges, 12)}."]
    if outdone:
        named = [f"{spot.name} by {other.result.mode}" for spot, other in outdone.items()]
        sentences.append(f"Outdone in both: {listed(named, 8)}.")
    return " ".join(sentences)


def _span(errors: Sequence[float]) -> str:
    low, high = units.relative_error(min(errors)), units.relative_error(max(errors))
    return low if low == high else f"{low} to {high}"
