"""A gate's verdict for build servers: as JUnit XML (a test a figure, a suite of tests a suite), and as a trend."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from typing import Any

from fp8bench.analysis.gate.judging import Judged, Outcome, Verdict
from fp8bench.report.words.gate import detail, sentence

_SKIPPED = (Outcome.NONE, Outcome.IGNORED)
# What XML 1.0 has no way to write.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(verdict: Verdict) -> str:
    """The document. Where nothing could be judged, it holds one test that is in error: it is never empty."""
    root = ET.Element("testsuites", name="fp8bench gate")
    by_suite: dict[str, list[Judged]] = {}
    for one in verdict.judged:
        by_suite.setdefault(one.comparison.suite, []).append(one)
    suites = [_suite(root, name, judged) for name, judged in by_suite.items()]
    if verdict.problem:
        suites.append(_problem(root, verdict))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, judged: Iterable[Judged]) -> ET.Element:
    suite = ET.SubElement(root, "testsuite", name=_text(name))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for one in judged:
        counts["tests"] += 1
        case = one.comparison
        test = ET.SubElement(
            suite, "testcase", classname=_text(name), name=_text(f"{case.case} {case.metric}"), time="0"
        )
        if one.outcome is Outcome.REGRESSION:
            counts["failures"] += 1
            _child(test, "failure", sentence(one), one)
        elif one.outcome is Outcome.FAILED:
            counts["errors"] += 1
            _child(test, "error", sentence(one), one)
        elif one.outcome in _SKIPPED:
            counts["skipped"] += 1
            ET.SubElement(test, "skipped", message=_text(one.why or one.outcome.value))
        elif one.outcome is not Outcome.FINE:
            ET.SubElement(test, "system-out").text = _text(f"{sentence(one)}\n{detail(one)}")
    for key, count in counts.items():
        suite.set(key, str(count))
    return suite


def _child(test: ET.Element, tag: str, message: str, one: Judged) -> None:
    child = ET.SubElement(test, tag, message=_text(message), type=one.outcome.value)
    child.text = _text(detail(one))


def _problem(root: ET.Element, verdict: Verdict) -> ET.Element:
    counts = {"name": "gate", "tests": "1", "failures": "0", "errors": "1", "skipped": "0"}
    suite = ET.SubElement(root, "testsuite", counts)
    test = ET.SubElement(suite, "testcase", classname="gate", name="something to judge", time="0")
    error = ET.SubElement(test, "error", message=_text(verdict.headline), type="problem")
    error.text = _text(verdict.problem)
    return suite


def _text(words: str) -> str:
    return _FORBIDDEN.sub("?", words)


def as_trend(judged: Sequence[Judged]) -> str:
    """What the second side came to, for github-action-benchmark: its `customSmallerIsBetter`.

    Figures without a number on the second side are not in it.
    """
    rows = [_trend_row(one) for one in judged if _finite(one.comparison.after)]
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def _finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)


def _trend_row(one: Judged) -> dict[str, Any]:
    found = one.comparison
    row: dict[str, Any] = {"name": f"{found.case} {found.metric}", "unit": found.unit or "ratio", "value": found.after}
    ratio = found.ratio
    if ratio is not None and ratio.low < ratio.high and math.isfinite(ratio.half_width):
        row["range"] = f"\u00b1{100 * ratio.half_width:.2g}%"
    return {**row, "extra": sentence(one)}
