"""How many times as fast as the reference each case is, with its interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8bench import units
from fp8bench.model import Interval
from fp8bench.report.blocks import Result
from fp8bench.report.drawing.limits import BARS
from fp8bench.report.elements import Axis, Bars, Mark, Part, Tone
from fp8bench.report.material import Material
from fp8bench.report.naming import listed
from fp8bench.report.run_facts import many
from fp8bench.report.section import Section, sections
from fp8bench.report.standing import doubts, speed_up, tone_of
from fp8bench.report.tensor_panels import timed_panels

_LEAD = (
    "Bars to the right of 1x are faster than the reference; whiskers are 99% intervals. Grey ones are in doubt, and "
    "emulated cases have no speed."
)


@dataclass(frozen=True)
class _Bar:
    """A case with a speed: the title of its panel, its setting, and how many times as fast it is."""

    title: str
    reference: str
    setting: str
    result: Result
    speed: Interval


@sections.register("speedup")
class SpeedUp(Section):
    """Bars from 1x; cases that a label casts doubt on are grey, emulated ones are not there."""

    name = "speedup"
    summary = "speed-up over the reference, with intervals"
    rank = 40

    def build(self, material: Material) -> Part | None:
        bars = [
            _Bar(title, panel.reference, panel.place(group), result, speed)
            for title, panel in timed_panels(material)
            for group in panel.groups
            for result in group.results
            if (speed := speed_up(result)) is not None
        ]
        if not bars:
            return None
        return Part(self.name, "Speed-up", tuple(_charts(bars)), _LEAD)


def _charts(bars: Sequence[_Bar]) -> Iterator[Bars]:
    """As few charts as hold them all, without parting a suite."""
    pages: list[dict[str, list[_Bar]]] = [{}]
    for title in dict.fromkeys(bar.title for bar in bars):
        members = [bar for bar in bars if bar.title == title]
        if pages[-1] and sum(map(len, pages[-1].values())) + len(members) > BARS:
            pages.append({})
        pages[-1][title] = members
    for number, by_title in enumerate(pages, 1):
        yield _chart(f"speed-up-{number}" if len(pages) > 1 else "speed-up", by_title)


def _chart(name: str, by_title: Mapping[str, Sequence[_Bar]]) -> Bars:
    groups = [group for suite, bars in by_title.items() for group in _groups(suite, bars, len(by_title) > 1)]
    bars = [bar for members in by_title.values() for bar in members]
    title = f"Speed-up over the reference: {listed(list(by_title), len(by_title))}"
    return Bars(name, title, _description(bars), Axis("speed-up", "x"), tuple(groups), 1.0)


def _groups(suite: str, bars: Sequence[_Bar], named: bool) -> Iterator[tuple[str, tuple[Mark, ...]]]:
    """A heading a setting, the fastest first; where each setting has one bar, a heading a suite is enough."""
    by_setting: dict[str, list[_Bar]] = {}
    for bar in bars:
        by_setting.setdefault(bar.setting, []).append(bar)
    modes = list(dict.fromkeys(bar.result.mode for bar in bars))
    reference = bars[0].reference or "the reference"
    if len(modes) == 1 and len(by_setting) > 1:
        heading = " ".join(part for part in (suite if named else "", f"{modes[0]} over {reference}") if part)
        yield heading, tuple(_mark(bar, bar.setting) for bar in bars)
        return
    for setting, members in by_setting.items():
        ordered = sorted(members, key=lambda bar: -bar.speed.point)
        heading = " ".join(part for part in (suite if named else "", setting) if part)
        yield heading, tuple(_mark(bar, bar.result.mode) for bar in ordered)


def _mark(bar: _Bar, label: str) -> Mark:
    low, high = (bound if math.isfinite(bound) else None for bound in (bar.speed.low, bar.speed.high))
    tone = tone_of(bar.result)
    shown = f"{bar.result.mode} {units.speed_up(bar.speed.point)} as fast as {bar.reference or 'the reference'}"
    why = "; ".join(doubts(bar.result))
    return Mark(label or bar.result.mode, bar.speed.point, low, high, tone, f"{shown}; {why}" if why else shown)


def _description(bars: Sequence[_Bar]) -> str:
    """How many are faster and slower as a fact, which is the most, and how many are in doubt."""
    good, bad, doubtful = (_of(bars, tone) for tone in (Tone.GOOD, Tone.BAD, Tone.DOUBT))
    sentences = [f"{many(len(bars), 'case')}: {len(good)} faster, {len(bad)} slower, {len(doubtful)} in doubt (grey)."]
    if good:
        top = max(good, key=lambda bar: bar.speed.point)
        sentences.append(f"The most is {units.speed_up(top.speed.point)}: {_name(top)}.")
    if bad:
        last = min(bad, key=lambda bar: bar.speed.point)
        sentences.append(f"The least is {units.speed_up(last.speed.point)}: {_name(last)}.")
    return " ".join(sentences)


def _of(bars: Iterable[_Bar], tone: Tone) -> list[_Bar]:
    return [bar for bar in bars if tone_of(bar.result) is tone]


def _name(bar: _Bar) -> str:
    return " ".join(part for part in (bar.title, bar.setting, bar.result.mode) if part)
