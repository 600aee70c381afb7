"""The answer: plain sentences on the verdicts of each precision.

Only a verdict without doubt reads as a fact; others say 'perhaps' or 'unsure', with labels and reasons. Speed is how
many times as fast: above 1x is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from fp8bench.analysis.labels import load_of
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.model import Label, Status
from fp8bench.report.case_status import (
    FACTS,
    Standing,
    is_emulated,
    speed_up,
    standing,
    what_intervals_hold,
)
from fp8bench.report.elements import Element, Items, Text, Tone
from fp8bench.report.page.section import Entry, Material, section
from fp8bench.report.panels import NamedCase, Panel, Result, together
from fp8bench.report.terminal.short_answer import as_sentence
from fp8bench.report.topics.answers import LONGEST_REASON, find_answer
from fp8bench.report.topics.tensors import about_tensors, best_by_width, timed_panels
from fp8bench.report.words import legend
from fp8bench.report.words.naming import (
    counts,
    join_words,
    many,
    missing_of,
    setting_of,
    shorten_line,
)

# The most sentences of one kind; the table has every case.
_MOST = 12


def cases_of(panels: Iterable[Panel]) -> list[NamedCase]:
    return list(chain.from_iterable(panel.members for panel in panels))


def describe_missing(cases: Sequence[NamedCase], status: Standing, word: str) -> list[str]:
    """'FAILED: fp8 in 1 of 3 cases of gemm (m=512): out of memory, even alone'; the same of those that were skipped."""
    gone = [case for case in cases if standing(case.result) is status]
    reasons = (
        (shorten_line(case.result.record.reason, LONGEST_REASON) or "no reason was given", case) for case in gone
    )
    told = []
    for reason, alike in together(reasons).items():
        modes, suites = ({case.result.mode: None for case in alike}, {case.suite: None for case in alike})
        total = sum(case.result.mode in modes and case.suite in suites for case in cases)
        places = join_words(list(dict.fromkeys(setting_of(case.group) for case in alike)))
        some = f" ({places})" if len(alike) < total else ""
        where = f"in {len(alike)} of {total} cases of" if total > 1 else "on"
        told.append(f"{word}: {join_words(list(modes))} {where} {join_words(list(suites))}{some}: {reason}")
    return told


def skips(cases: Sequence[NamedCase]) -> list[str]:
    return at_most(describe_missing(cases, Standing.SKIPPED, "skipped"))


def emulations(cases: Sequence[NamedCase]) -> list[str]:
    shown = [case for case in cases if is_emulated(case.result)]
    broken = {case.result.mode for case in shown if case.error is not None and not math.isfinite(case.error)}
    told = []
    for is_broken, alike in together((case.result.mode in broken, case.result) for case in shown).items():
        reasons = together((result.record.support.reason, result.mode) for result in alike)
        modes = "; ".join(", ".join(dict.fromkeys(some)) + f" ({why})" * bool(why) for why, some in reasons.items())
        numbers = "errors are not all finite" if is_broken else "right in numbers"
        told.append(f"emulated: {modes}: {numbers}; time and memory are what emulating costs")
    return told


def sitting(entry: Entry) -> Iterator[Text]:
    if words := doubt_of_load(entry):
        yield Text(f"{words}; free the machine, and measure again: {entry.run.command}", Tone.DOUBT)


def doubt_of_load(entry: Entry) -> str:
    """Says of a run under load that its intervals are of this sitting, if no earlier runs say how far runs differ."""
    load = load_of(entry.run)
    if load and any(_is_of_one_sitting(case.result) for case in cases_of(entry.panels)):
        return f"measured beside other programs ({load}): intervals cover this sitting only, others may differ by more"
    return ""


def _is_of_one_sitting(result: Result) -> bool:
    record = result.record
    is_alone = record.reruns is None and not record.sessions
    return is_alone and record.case.device.startswith("cpu") and speed_up(result) is not None


def by_chance(entry: Entry) -> Iterator[Text]:
    """Says of several cases how many false verdicts to expect, since each is judged by itself."""
    judged = sum(speed_up(case.result) is not None for case in cases_of(entry.panels))
    if judged > 1:
        expected = f"up to {judged * (1 - FINAL_LEVEL):.2g} of them would be called faster or slower by chance"
        yield Text(f"{judged} cases, each judged by itself: if none differed, {expected}", Tone.DOUBT)


def _lead(material: Material) -> str:
    results = list(chain.from_iterable(panel.results for _, panel in timed_panels(material)))
    speeds = [speed for result in results if (speed := speed_up(result))]
    said = f"[low, high]: {words}." if (words := what_intervals_hold(results)) else ""
    ranges = f"{legend.RANGE}." if any(speed.level == 0 for speed in speeds) else ""
    return " ".join(filter(None, ["Speed against the reference: above 1x is faster.", said, ranges])) if speeds else ""


@section("verdict", "Verdict", 10, lead=_lead)
def verdict_section(material: Material) -> Iterator[Element]:
    sentences = list(chain.from_iterable(_entry(entry, material.alone) for entry in material.entries))
    yield from sentences
    if not sentences:
        yield Text("There is no run.")


def _entry(entry: Entry, alone: bool) -> Iterator[Element]:
    if not alone:
        yield Text(entry.label, Tone.STRONG)
    yield from losses(entry)
    yield from sitting(entry)
    several = len({panel.case.device for panel in entry.panels}) > 1
    sentences: list[Text] = []
    for panel in entry.panels:
        if not about_tensors(panel):
            sentences += comparisons(panel, panel.case.device if several else "")
    for panel in filter(about_tensors, entry.panels):
        sentences += map(Text, best_by_width(panel))
    cases = cases_of(entry.panels)
    sentences += [Text(text, Tone.DOUBT) for text in (*emulations(cases), *skips(cases))]
    sentences += by_chance(entry)
    if sentences:
        yield Items(tuple(sentences))


def losses(entry: Entry) -> Iterator[Element]:
    failed = describe_missing(cases_of(entry.panels), Standing.FAILED, "FAILED")
    if failed:
        number = sum(record.status is Status.FAILED for record in entry.run.records)
        yield Text(f"{number} of {len(entry.run.records)} cases failed.", Tone.BAD)
        yield Items(tuple(Text(text, Tone.BAD) for text in at_most(failed)))
    missing = missing_of(entry.run)
    if missing:
        yield Text(f"{missing[0].upper()}{missing[1:]}.", Tone.BAD)
    if not any(record.is_ok for record in entry.run.records):
        yield Text(f"Nothing was measured (cases: {counts(entry.run)}).", Tone.STRONG)


def at_most(sentences: list[str]) -> list[str]:
    if len(sentences) <= _MOST:
        return sentences
    return [*sentences[: _MOST - 1], f"and {len(sentences) - _MOST + 1} more like these: the table has every case"]


_COMPARED = (*FACTS.values(), Standing.DOUBTED, Standing.UNSURE, Standing.UNTIMED)
_MOST_REASONS = 3


def comparisons(panel: Panel, device: str = "") -> list[Text]:
    """A sentence for each precision of a panel; names `device` if given."""
    where = f" on {device}" if device else ""
    compared = [case for case in panel.members if standing(case.result) in _COMPARED]
    by_mode = together((case.result.mode, case) for case in compared)
    return [_comparison(panel, cases, where) for cases in by_mode.values()] or list(map(Text, _alone(panel, where)))


def _comparison(panel: Panel, cases: Sequence[NamedCase], where: str) -> Text:
    """'bf16 against fp32 on gemm m=512: faster, 1.62x, could be 1.60x to 1.64x; memory +1.1%; matmul saves 3 ms'."""
    results, suite = [case.result for case in cases], panel.case.workload
    place = f"{suite} {setting_of(cases[0].group)}".rstrip() if len(cases) == 1 else f"{len(cases)} cases of {suite}"
    answer = find_answer(cases)
    about = f"{answer.name} against {panel.reference or 'its reference'} on {place}{where}"
    sentence = as_sentence(replace(answer, name=about)).text
    return Text(sentence + _labels(results) + _because(results), answer.tone)


def _because(results: Sequence[Result]) -> str:
    reasons = dict.fromkeys(chain.from_iterable(map(_reasons, results)))
    return f"; {join_words(list(reasons), _MOST_REASONS)}" if reasons else ""


def _labels(results: Sequence[Result]) -> str:
    """' (noisy, drift in 2 of them)': what makes them doubtful, and a power cap, which explains a speed."""
    numbers = Counter(label for result in results for label in _doubts(result))
    told = [
        f"{label}{f' in {numbers[label]} of them' if numbers[label] < len(results) else ''}"
        for label in Label
        if numbers[label]
    ]
    return f" ({', '.join(told)})" if told else ""


def _doubts(result: Result) -> list[Label]:
    """Those that took the verdict away stand in its why."""
    finding = result.finding
    sure = finding is not None and finding.judged and not finding.doubtful
    hard = finding.hard if finding else ()
    doubts = [label for label in result.labels if label.casts_doubt and label not in hard and not sure]
    return [*doubts, *({Label.POWER_CAPPED} & {*result.labels})]


def _reasons(result: Result) -> Iterator[str]:
    if standing(result) is Standing.UNSURE and result.finding and result.finding.why:
        yield result.finding.why
    if standing(result) is Standing.UNTIMED and result.record.detail:
        yield result.record.detail


def _alone(panel: Panel, where: str) -> Iterator[str]:
    timed = [
        result
        for result in panel.results
        if result.record.is_ok and result.best is not None and standing(result) is Standing.REFERENCE
    ]
    if timed:
        cases = f"{many(len(timed), 'case')} of {panel.case.workload}{where}"
        yield f"{panel.reference} alone was timed, in {cases}: there is nothing to compare it with"
