"""A gate's verdict for build servers: as JUnit XML (a test a figure, a suite of tests a suite), and as a trend."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fp8bench.analysis.gate.judging import Judged, Key, Outcome, Verdict
from fp8bench.analysis.gate.sight import NO_SIGHTS, Sights
from fp8bench.errors import EXIT_OK
from fp8bench.model import Comparison
from fp8bench.report.elements import printable
from fp8bench.report.panels import together
from fp8bench.report.words.comparisons import limit, signed, value
from fp8bench.report.words.sights import sentence

# What becomes of a test; of others there may be more to say.
_TAGS = {
    Outcome.REGRESSION: "failure", Outcome.FAILED: "error", Outcome.NONE: "skipped", Outcome.IGNORED: "skipped",
}  # fmt: skip
_COUNTED = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def as_junit(verdict: Verdict) -> str:
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
    """What could have been seen of each figure."""
    return {(one.case, one.metric): sentence(one, sights.power) for one in sights.figures}


def _suite(root: ET.Element, name: str, judged: Iterable[Judged], sights: Mapping[Key, str]) -> None:
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
        elif one.outcome is not Outcome.FINE:
            ET.SubElement(test, "system-out").text = _text("\n".join((_sentence(one), *_detail(one))))


def _sentence(one: Judged) -> str:
    """'time: 1.20 ms -> 1.43 ms, +19.2% [+17.0%, +21.5%]: regression'."""
    found = one.comparison
    if one.outcome is Outcome.FAILED:
        return f"{found.metric}: {one.why or 'the case failed'}"
    return f"{found.metric}: {_both(found)}: {one.outcome.value}"


def _detail(one: Judged) -> Iterator[str]:
    """Both looks, the threshold, and why it ended so."""
    yield one.comparison.case
    for name, look in (("first look", one.comparison), ("second look", one.again)):
        if look is not None and look.before is not None:
            chance = "" if look.p_value is None else f", p = {look.p_value:.1g}"
            labels = f" ({', '.join(look.labels)})" if look.labels else ""
            yield f"{name}: {_both(look)}, {look.evidence.value}{labels}{chance}"
    if one.comparison.since or one.comparison.until:
        yield f"between {one.comparison.since[:12] or '?'} and {one.comparison.until[:12] or '?'}"
    yield f"worse is: more than {limit(one)}"
    if one.why:
        yield one.why


def _both(found: Comparison) -> str:
    values = f"{value(found, found.before)} -> {value(found, found.after)}"
    return values if found.ratio is None else f"{values}, {signed(found.ratio)}"


def _text(words: str) -> str:
    return "\n".join(map(printable, words.split("\n")))


def as_trend(judged: Sequence[Judged], sights: Sights = NO_SIGHTS) -> str:
    """What the second side came to, for github-action-benchmark: its `customSmallerIsBetter`.

    Figures without a number on the second side are not in it.
    """
    known = [one for one in judged if one.comparison.after is not None and math.isfinite(one.comparison.after)]
    seen = _by_figure(sights)
    return json.dumps([_trend_row(one, seen.get(one.key, "")) for one in known], indent=1, allow_nan=False) + "\n"


def _trend_row(one: Judged, sight: str) -> dict[str, Any]:
    found = one.comparison
    row: dict[str, Any] = {"name": f"{found.case} {found.metric}", "unit": found.unit or "ratio", "value": found.after}
    ratio = found.ratio
    if ratio is not None and ratio.low < ratio.high and math.isfinite(ratio.half_width):
        row["range"] = f"\u00b1{100 * ratio.half_width:.2g}%"
    return {**row, "extra": "; ".join(filter(None, (_sentence(one), sight)))}
