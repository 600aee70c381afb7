"""The answer: plain sentences on the verdicts of each precision.

Only a verdict without doubt reads as a fact; others have 'perhaps' or 'cannot tell', with labels and reasons.
Speed is how many times as fast: above 1x is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from fp8bench.analysis.labels import load_of
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.model import Label, Status
from fp8bench.report.case_status import (
    FACTS,
    Standing,
    describe_intervals,
    speed_up,
    standing,
)
from fp8bench.report.elements import Element, Elements, Items, Text, Texts, Tone, items_of
from fp8bench.report.page.section import Entry, Material, section
from fp8bench.report.panels import Cases, NamedCase, Panel, Result, join_parts, together
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
    """Returns 'FAILED: fp8 in 1 of 3 cases of gemm (m=512): out of memory, even alone' for the cases of this status."""
    missing = [case for case in cases if standing(case) is status]
    reasons = ((shorten_line(case.record.reason, LONGEST_REASON) or "no reason was given", case) for case in missing)
    lines = []
    for reason, members in together(reasons).items():
        modes = dict.fromkeys(case.mode for case in members)
        suites = dict.fromkeys(case.suite for case in members)
        total = sum(case.mode in modes and case.suite in suites for case in cases)
        position = f"in {len(members)} of {total} cases of" if total > 1 else "on"
        places = join_words(setting_of(case.group) for case in members)
        some = f" ({places})" if len(members) < total else ""
        lines.append(f"{word}: {join_words(modes)} {position} {join_words(suites)}{some}: {reason}")
    return lines


def skips(cases: Cases) -> list[str]:
    return at_most(describe_missing(cases, Standing.SKIPPED, "skipped"))


def emulations(cases: Sequence[NamedCase]) -> list[str]:
    shown = [case for case in cases if case.is_emulated]
    # An emulation whose errors are not finite does not even have right numbers.
    broken = {case.mode for case in shown if case.error is not None and not math.isfinite(case.error)}
    lines = []
    for is_broken, members in together((case.mode in broken, case) for case in shown).items():
        reasons = together((case.record.support.reason, case.mode) for case in members)
        modes = []
        for reason, names in reasons.items():
            modes.append(", ".join(dict.fromkeys(names)) + f" ({reason})" * bool(reason))
        numbers = "errors are not all finite" if is_broken else "its errors are real"
        lines.append(f"emulated: {'; '.join(modes)}: {numbers}; ignore time and memory (the cost of emulation)")
    return lines


def sitting(entry: Entry) -> Texts:
    if words := doubt_of_load(entry):
        yield Text(f"{words}; free the machine, and measure again: {entry.run.command}", Tone.DOUBT)


def doubt_of_load(entry: Entry) -> str:
    """Returns a warning for a run under load whose intervals do not include how much runs differ; else ''."""
    load = load_of(entry.run)
    if load and any(_is_of_one_sitting(case) for case in cases_of(entry.panels)):
        return f"other programs were running ({load}): another run may differ by more than these intervals"
    return ""


def _is_of_one_sitting(result: Result) -> bool:
    record = result.record
    is_alone = record.reruns is None and not record.sessions
    return is_alone and record.case.device.startswith("cpu") and speed_up(result) is not None


def by_chance(entry: Entry) -> Texts:
    """Yields how many false verdicts to expect of several cases, since each is judged separately."""
    judged = sum(speed_up(case) is not None for case in cases_of(entry.panels))
    if judged > 1:
        # Each verdict is wrong in 1% of cases at most.
        chance = judged * (1 - FINAL_LEVEL)
        mistakes = f"up to {chance:.2g} cases would be" if chance >= 1 else f"the chance is {chance:.0%} that one is"
        words = f"each of the {judged} cases is judged separately: if none really differed, {mistakes} called"
        yield Text(f"{words} faster or slower by mistake", Tone.DOUBT)


def _lead(material: Material) -> str:
    cases: list[NamedCase] = []
    for _, panel in timed_panels(material):
        cases += panel.members
    speeds = [speed for case in cases if (speed := speed_up(case))]
    if not speeds:
        return ""
    words = describe_intervals(cases)
    return join_parts(
        "Speed against the reference: above 1x is faster.",
        f"[low, high] is {words}." if words else "",
        f"{legend.RANGE}." if any(speed.level == 0 for speed in speeds) else "",
        by=" ",
    )


@section("verdict", "Verdict", 10, lead=_lead)
def verdict_section(material: Material) -> Elements:
    elements: list[Element] = []
    for entry in material.entries:
        elements += _entry(entry, material.alone)
    yield from elements or [Text("This report has no runs.")]


def _entry(entry: Entry, alone: bool) -> Elements:
    # 1. Failures, and doubts about all verdicts.
    if not alone:
        yield Text(entry.label, Tone.STRONG)
    yield from losses(entry)
    yield from sitting(entry)
    # 2. A sentence for each precision, timed ones first.
    # A device is only named where there are several.
    several = len({panel.device for panel in entry.panels}) > 1
    sentences: list[Text] = []
    for panel in entry.panels:
        if not about_tensors(panel):
            sentences += comparisons(panel, panel.device if several else "")
    for panel in filter(about_tensors, entry.panels):
        sentences += map(Text, best_by_width(panel))
    # 3. Cases without a verdict.
    cases = cases_of(entry.panels)
    sentences += [Text(text, Tone.DOUBT) for text in (*emulations(cases), *skips(cases))]
    sentences += by_chance(entry)
    if sentences:
        yield Items(tuple(sentences))


def losses(entry: Entry) -> Elements:
    records = entry.run.records
    num_failed = sum(record.status is Status.FAILED for record in records)
    failures = at_most(describe_missing(cases_of(entry.panels), Standing.FAILED, "FAILED"))
    if failures:
        yield Text(f"{num_failed} of {len(records)} cases failed.", Tone.BAD)
        yield from items_of(failures, Tone.BAD)
    missing = missing_of(entry.run)
    if missing:
        yield Text(f"{missing[0].upper()}{missing[1:]}.", Tone.BAD)
    if not any(record.is_ok for record in records):
        yield Text(f"Nothing was measured (cases: {counts(entry.run)}).", Tone.STRONG)


def at_most(sentences: list[str]) -> list[str]:
    if len(sentences) <= _MOST:
        return sentences
    return [*sentences[: _MOST - 1], f"and {len(sentences) - _MOST + 1} more like these: the table has every case"]


_COMPARED = (*FACTS.values(), Standing.DOUBTED, Standing.UNSURE, Standing.UNTIMED)
_MOST_REASONS = 3


def comparisons(panel: Panel, device: str = "") -> list[Text]:
    """Returns a sentence for each precision of a panel; it names `device` unless that is ''."""
    machine = f" on {device}" if device else ""
    compared = [case for case in panel.members if standing(case) in _COMPARED]
    by_mode = together((case.mode, case) for case in compared)
    return [_comparison(panel, cases, machine) for cases in by_mode.values()] or _alone(panel, machine)


def _comparison(panel: Panel, cases: Sequence[NamedCase], machine: str) -> Text:
    """Returns 'bf16 against fp32 on gemm m=512: faster, 1.62x, could be 1.60x to 1.64x; memory +1.1%'."""
    place = f"{len(cases)} cases of {panel.suite}"
    if len(cases) == 1:
        place = f"{panel.suite} {setting_of(cases[0].group)}".rstrip()
    answer = find_answer(cases)
    about = f"{answer.name} against {panel.reference or 'its reference'} on {place}{machine}"
    sentence = as_sentence(replace(answer, name=about)).text
    reasons = join_words(filter(None, map(_reason, cases)), _MOST_REASONS)
    return Text(join_parts(sentence + _labels(cases), reasons, by="; "), answer.tone)


def _labels(results: Sequence[Result]) -> str:
    """Returns ' (noisy, drift in 2 of them)': the labels that cast doubt, and a power cap, which explains a speed."""
    numbers = Counter(chain.from_iterable(map(_doubts, results)))
    words = [
        f"{label} in {numbers[label]} of them" if numbers[label] < len(results) else label
        for label in Label
        if numbers[label]
    ]
    if words:
        return f" ({', '.join(words)})"
    return ""


def _doubts(result: Result) -> list[Label]:
    """Returns the doubtful labels; those that withdrew the verdict are in its reason already."""
    finding = result.finding
    doubts: list[Label] = []
    # A certain verdict needs no labels.
    if finding is None or finding.doubtful or not finding.is_judged:
        hard = finding.hard if finding else ()
        doubts = [label for label in result.labels if label.casts_doubt and label not in hard]
    return [*doubts, *({Label.POWER_CAPPED} & {*result.labels})]


def _reason(result: Result) -> str:
    if standing(result) is Standing.UNSURE and result.finding:
        return result.finding.why
    if standing(result) is Standing.UNTIMED:
        return result.record.detail
    return ""


def _alone(panel: Panel, machine: str) -> list[Text]:
    number = sum(standing(case) is Standing.REFERENCE and case.best is not None for case in panel.members)
    if not number:
        return []
    cases = f"{many(number, 'case')} of {panel.suite}{machine}"
    return [Text(f"only {panel.reference} was timed, in {cases}: there is nothing to compare it with")]
