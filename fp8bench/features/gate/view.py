"""A gate's verdict for build servers: as JUnit XML (a test a figure, a suite of tests a suite), and as a trend."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp8bench import units
from fp8bench.errors import EXIT_OK
from fp8bench.features.gate.judging import NIGHTS, NO_SIGHTS, GateOutcome, GateVerdict, JudgedFigure, Key, Sight, Sights
from fp8bench.model import Comparison
from fp8bench.report.columns import Col, table
from fp8bench.report.comparisons import label_legend, setting_of, signed, value
from fp8bench.report.elements import Page, Part, Text, Tone, printable
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import list_of

# What becomes of a test; of others there may be more to say.
_TAGS = {
    GateOutcome.REGRESSION: "failure", GateOutcome.FAILED: "error", GateOutcome.NONE: "skipped",
    GateOutcome.IGNORED: "skipped",
}  # fmt: skip
_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def as_junit(verdict: GateVerdict) -> str:
    """The document. Where nothing could be judged, it holds one test that is in error: it is never empty."""
    root = ET.Element("testsuites", name="fp8bench gate")
    sights = _by_figure(verdict.sights)
    for name, judged in together((one.comparison.suite, one) for one in verdict.judged).items():
        _suite(root, name, judged, sights)
    blind = verdict.sights.blind if verdict.sights.fails else ()
    for one in blind:
        suite = ET.SubElement(root, "testsuite", name="sight")
        test = ET.SubElement(suite, "testcase", classname="sight", name=_text(f"{one.case} {one.metric}"), time="0")
        ET.SubElement(test, "failure", message=_text(sentence(one, verdict.sights.power)), type="blind")
    if verdict.problem:
        suite = ET.SubElement(root, "testsuite", name="gate")
        test = ET.SubElement(suite, "testcase", classname="gate", name="something to judge", time="0")
        tag = "skipped" if verdict.code == EXIT_OK else "error"
        problem = ET.SubElement(test, tag, message=_text(verdict.headline), type="problem")
        problem.text = _text(verdict.problem)
    for place in (*root, root):
        place.set("tests", str(len(place.findall(".//testcase"))))
        for name, tag in _COUNTED.items():
            place.set(name, str(len(place.findall(f".//testcase/{tag}"))))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _by_figure(sights: Sights) -> dict[Key, str]:
    return {(figure.case, figure.metric): sentence(figure, sights.power) for figure in sights.figures}


def _suite(root: ET.Element, name: str, judged: Iterable[JudgedFigure], sights: Mapping[Key, str]) -> None:
    suite = ET.SubElement(root, "testsuite", name=_text(name))
    for one in judged:
        title = _text(f"{one.comparison.case} {one.comparison.metric}")
        test = ET.SubElement(suite, "testcase", classname=_text(name), name=title, time="0")
        if one.key in sights:
            properties = ET.SubElement(test, "properties")
            ET.SubElement(properties, "property", name="sight", value=_text(sights[one.key]))
        tag = _TAGS.get(one.outcome)
        if tag == "skipped":
            ET.SubElement(test, tag, message=_text(one.why or one.outcome.value))
        elif tag is not None:
            child = ET.SubElement(test, tag, message=_text(_sentence(one)), type=one.outcome.value)
            child.text = _text("\n".join(_detail(one)))
        elif one.outcome is not GateOutcome.FINE:
            ET.SubElement(test, "system-out").text = _text("\n".join((_sentence(one), *_detail(one))))


def _sentence(figure: JudgedFigure) -> str:
    """'time: 1.20 ms -> 1.43 ms, +19.2% [+17.0%, +21.5%]: regression'."""
    found = figure.comparison
    if figure.outcome is GateOutcome.FAILED:
        return f"{found.metric}: {figure.why or 'the case failed'}"
    return f"{found.metric}: {_both(found)}: {figure.outcome.value}"


def _detail(figure: JudgedFigure) -> Iterator[str]:
    yield figure.comparison.case
    for name, look in (("first look", figure.comparison), ("second look", figure.again)):
        if look is not None and look.before is not None:
            chance = "" if look.p_value is None else f", p = {look.p_value:.1g}"
            labels = f" ({', '.join(look.labels)})" if look.labels else ""
            yield f"{name}: {_both(look)}, {look.evidence.value}{labels}{chance}"
    if figure.comparison.since or figure.comparison.until:
        yield f"between {figure.comparison.since[:12] or '?'} and {figure.comparison.until[:12] or '?'}"
    yield f"worse is: more than {limit(figure)}"
    if figure.why:
        yield figure.why


def _both(found: Comparison) -> str:
    values = f"{value(found, found.before)} -> {value(found, found.after)}"
    return values if found.ratio is None else f"{values}, {signed(found.ratio)}"


def _text(words: str) -> str:
    return "\n".join(map(printable, words.split("\n")))


def as_trend(judged: Sequence[JudgedFigure], sights: Sights = NO_SIGHTS) -> str:
    """What the second side came to, for github-action-benchmark: its `customSmallerIsBetter`.

    Figures without a number on the second side are not in it.
    """
    known = [one for one in judged if one.comparison.after is not None and math.isfinite(one.comparison.after)]
    seen = _by_figure(sights)
    return json.dumps([_trend_row(one, seen.get(one.key, "")) for one in known], indent=1, allow_nan=False) + "\n"


def _trend_row(figure: JudgedFigure, sight: str) -> dict[str, Any]:
    found = figure.comparison
    row: dict[str, Any] = {"name": f"{found.case} {found.metric}", "unit": found.unit or "ratio", "value": found.after}
    ratio = found.ratio
    if ratio is not None and ratio.low < ratio.high and math.isfinite(ratio.half_width):
        row["range"] = f"\u00b1{100 * ratio.half_width:.2g}%"
    return {**row, "extra": "; ".join(filter(None, (_sentence(figure), sight)))}


# GitHub shows a mebibyte of a step's summary at most.
MOST_ROWS = 200
_TITLES = {
    GateOutcome.FAILED: "Failed", GateOutcome.REGRESSION: "Regressions",
    GateOutcome.TO_CONFIRM: "To confirm: suspected, and neither confirmed nor shown to be absent",
    GateOutcome.CLEARED: "Cleared: suspected, and not so when measured again", GateOutcome.BETTER: "Better",
}  # fmt: skip
_TONES = {
    GateOutcome.FAILED: Tone.BAD, GateOutcome.REGRESSION: Tone.BAD, GateOutcome.TO_CONFIRM: Tone.DOUBT,
    GateOutcome.BETTER: Tone.GOOD,
}  # fmt: skip
_AGAIN = "again: the same change when measured once more, in a fresh process"
_WORSE = "worse is: beyond both, the share and the difference"
_SEEN = (
    "could have seen: the smallest slow-down that is told from chance in both looks; fails: and is beyond its threshold"
)
_MOST_WARNED = 5


def page_of(verdict: GateVerdict, every: bool = False) -> Page:
    """What failed, what is worse, what is in doubt and what is better; the rest is counted.

    What could have been seen is a line, and of `every` figure a table.
    """
    parts = [_part(name, title, found) for name, title in _TITLES.items() if (found := verdict.of(name))]
    if verdict.problem:
        tone = Tone.BAD if verdict.code != EXIT_OK else Tone.DOUBT
        parts.append(Part("problem", "Why", (Text(verdict.problem, tone),)))
    unsure = Counter(one.why for one in verdict.of(GateOutcome.UNSURE) if one.why)
    parts += list_of("unsure", "Unsure, because", (f"{why} ({count})" for why, count in unsure.items()))
    told = warnings(verdict.sights, _MOST_WARNED) if verdict.sights.required else ()
    parts += list_of("notes", "Notes", (f"- {note}" for note in (*told, *verdict.notes[:MOST_ROWS])))
    if not parts:
        parts.append(Part("fine", "Everything else", (Text("Nothing is worse, and nothing better."),)))
    shown = [one for name in _TITLES for one in verdict.of(name)]
    labels = label_legend(look for one in shown for look in (one.comparison, one.again) if look is not None)
    footer = [*([_AGAIN] if any(one.again for one in shown) else []), _WORSE, *labels] if shown else []
    facts = [("judged", verdict.counts)] if verdict.judged else []
    if verdict.sights.figures:
        facts.append(("could have seen", summary(verdict.sights)))
        parts += [_sights(verdict.sights)] if every else []
        footer.append(_SEEN)
    return Page(f"fp8bench gate: {verdict.headline}", verdict.title, tuple(parts), footer, tuple(facts))


def _sights(sights: Sights) -> Part:
    cols: list[Col[Sight]] = [
        Col("setting", lambda sight: setting_of(sight.case)[0], shared=True),
        Col("figure", lambda sight: f"{setting_of(sight.case)[1]} {sight.metric}"),
        Col("seen", seen, tone=lambda sight: Tone.PLAIN if sight.enough else Tone.DOUBT),
        Col("fails", lambda sight: share(sight.fails)),
        Col("threshold", lambda sight: share(sight.threshold)),
    ]
    title = f"What could have been seen in {100 * sights.power:.3g} of 100 builds"
    return Part("sights", title, (table("sights", "", cols, sights.figures[:MOST_ROWS]),))


def _part(outcome: GateOutcome, title: str, judged: Sequence[JudgedFigure]) -> Part:
    cols: list[Col[JudgedFigure]] = [
        Col("setting", lambda figure: setting_of(figure.comparison.case)[0], shared=True),
        Col("figure", lambda figure: f"{setting_of(figure.comparison.case)[1]} {figure.comparison.metric}"),
        Col("A", lambda figure: value(figure.comparison, figure.comparison.before), number=True),
        Col("B", lambda figure: value(figure.comparison, figure.comparison.after), number=True),
        Col("change", lambda figure: signed(figure.comparison.ratio)),
        Col("again", lambda figure: signed(figure.again.ratio if figure.again else None)),
        Col("worse is", limit),
        Col("verdict", lambda figure: figure.outcome.value, tone=lambda figure: _TONES.get(figure.outcome, Tone.PLAIN)),
        Col("why", lambda figure: figure.why, below=True),
    ]
    name = outcome.replace(" ", "-")
    rows, more = table(name, "", cols, judged[:MOST_ROWS]), len(judged) - MOST_ROWS
    return Part(name, title, (rows, Text(f"and {more} more")) if more > 0 else (rows,))


def seen(sight: Sight) -> str:
    """'+3.1%', 'at least +12.0%' where nobody knows the noise, 'nothing' where no slow-down is large enough."""
    return _at_least(sight.seen, bool(sight.unknown))


def summary(sights: Sights) -> str:
    """'+3.1% in 80 of 100 builds (median of 40 figures; worst CASE time: +9.0%); the threshold is +5.0%'."""
    worst = sights.figures[0]
    count = len(sights.figures)
    least = {figure.threshold for figure in sights.figures}
    of = f"median of {count} figures; worst" if count > 1 else "the only figure that varies is"
    limits = f"; its threshold is {share(worst.threshold)}" if len(least) > 1 else ""
    middle = _at_least(sights.median, any(figure.unknown for figure in sights.figures))
    return (
        f"{middle} in {100 * sights.power:.3g} of 100 builds ({of} {worst.case} {worst.metric}: {seen(worst)}{limits})"
        + ("" if limits else f"; the threshold is {share(worst.threshold)}")
    )


def sentence(sight: Sight, power: float) -> str:
    words = f"could have seen {seen(sight)} in {100 * power:.3g} of 100 builds, and failed from {share(sight.fails)} on"
    return f"{words} ({why})" if (why := _why(sight)) else words


def warnings(sights: Sights, most: int) -> Iterator[str]:
    for one in sights.blind[:most]:
        blind = f"{one.case} {one.metric} cannot see its threshold of {share(one.threshold)}"
        yield f"{blind}: {sentence(one, sights.power)}"
    if len(sights.blind) > most:
        yield f"and {len(sights.blind) - most} more that cannot see their thresholds"
    if sights.young:
        count, known = len(sights.young), [one.missing for one in sights.young if one.missing is not None]
        words = f"history too young: {count} of {len(sights.figures)} figures cannot see their thresholds yet"
        words += f"; {max(known)} more night{'s' * (max(known) != 1)} at this noise would do" if known else ""
        lost = count - len(known)
        yield words + (f"; {lost} will not, and fail from {NIGHTS} nights on" if lost else "")


def _why(sight: Sight) -> str:
    if sight.missing is not None:
        reason = sight.unknown or f"{sight.nights} nights"
        return f"{reason}; {sight.missing} more night{'s' * (sight.missing != 1)} would do"
    if sight.nights is not None and not sight.enough:
        return f"{sight.nights} nights, and no number of them would do at this noise"
    return sight.unknown


def _at_least(value: float, is_bound: bool) -> str:
    return f"{'at least ' if is_bound and math.isfinite(value) else ''}{share(value)}"


def share(value: float) -> str:
    """'+3.1%'."""
    return "nothing" if math.isinf(value) or math.isnan(value) else units.change(1 + value)


def limit(figure: JudgedFigure) -> str:
    """What is worse enough: '5.0% and 5.00 us'."""
    threshold = figure.threshold
    smallest = value(figure.comparison, threshold.smallest) if threshold.smallest else ""
    return " and ".join(filter(None, (units.percent(threshold.relative), smallest)))
