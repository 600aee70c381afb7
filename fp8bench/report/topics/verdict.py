"""The verdict on each precision in plain sentences.

Only a certain verdict is stated as a fact. An uncertain verdict has 'perhaps' or 'cannot tell', with labels and
reasons. A speed is how many times as fast a case is: above 1x is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fp8bench.analysis.labels import describe_load
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.model import Label, Status
from fp8bench.report.case_status import (
    CERTAIN_STANDINGS,
    Standing,
    describe_intervals,
    find_standing,
    speed_up,
)
from fp8bench.report.elements import Element, Elements, Items, Text, Texts, Tone, bullet_list
from fp8bench.report.page.section import Entry, Material, section
from fp8bench.report.panels import NamedCase, Panel, Result, join_parts, list_cases, together
from fp8bench.report.terminal.short_answer import as_sentence
from fp8bench.report.topics.answers import MAX_REASON_LENGTH, find_answer
from fp8bench.report.topics.tensors import is_about_tensors, name_best_precisions, timed_panels
from fp8bench.report.words import legend
from fp8bench.report.words.naming import (
    count_statuses,
    describe_missing_records,
    join_words,
    many,
    name_setting,
    shorten_line,
)

# A list has at most this many sentences of one kind. The table has every case.
_MAX_SENTENCES = 12


def describe_cases_without_result(cases: Sequence[NamedCase], status: Standing, status_word: str) -> list[str]:
    """Returns sentences on the cases that have this status, with the reason of each case.

    An example: 'FAILED: fp8 in 1 of 3 cases of gemm (m=512): out of memory, even alone'.
    """
    cases_without_result = [case for case in cases if find_standing(case) is status]
    reasons = (
        (shorten_line(case.record.reason, MAX_REASON_LENGTH) or "no reason was given", case)
        for case in cases_without_result
    )
    lines = []
    for reason, members in together(reasons).items():
        modes = dict.fromkeys(case.mode for case in members)
        suites = dict.fromkeys(case.suite for case in members)
        num_cases = sum(case.mode in modes and case.suite in suites for case in cases)
        count_text = f"in {len(members)} of {num_cases} cases of" if num_cases > 1 else "on"
        settings = join_words(name_setting(case.group) for case in members)
        settings_text = f" ({settings})" if len(members) < num_cases else ""
        lines.append(f"{status_word}: {join_words(modes)} {count_text} {join_words(suites)}{settings_text}: {reason}")
    num_hidden = len(lines) - _MAX_SENTENCES + 1
    if num_hidden > 1:
        lines[_MAX_SENTENCES - 1 :] = [f"and {num_hidden} more like these: the table has every case"]
    return lines


def describe_emulations(cases: Sequence[NamedCase]) -> list[str]:
    emulated_cases = [case for case in cases if case.is_emulated]
    # If errors of an emulation are infinite or NaN, even its numbers are not right.
    broken_modes = {
        case.mode for case in emulated_cases if case.error_value is not None and not math.isfinite(case.error_value)
    }
    lines = []
    for is_broken, members in together((case.mode in broken_modes, case) for case in emulated_cases).items():
        reasons = together((case.record.support.reason, case.mode) for case in members)
        modes = []
        for reason, names in reasons.items():
            modes.append(", ".join(dict.fromkeys(names)) + f" ({reason})" * bool(reason))
        validity = "errors are not all finite" if is_broken else "its errors are real"
        lines.append(f"emulated: {'; '.join(modes)}: {validity}; ignore time and memory (the cost of emulation)")
    return lines


def warn_of_load(entry: Entry) -> Texts:
    if load_warning := describe_load_warning(entry):
        yield Text(f"{load_warning}; free the machine, and measure again: {entry.run.command}", Tone.DOUBT)


def describe_load_warning(entry: Entry) -> str:
    """Returns a warning if other programs were running and some interval does not include the spread between runs.
    Otherwise returns ''.
    """
    load = describe_load(entry.run)
    if load and any(_lacks_other_runs(case) for case in list_cases(entry.panels)):
        return f"other programs were running ({load}): another run may differ by more than these intervals"
    return ""


def _lacks_other_runs(result: Result) -> bool:
    """Returns whether the speed of a case on a CPU comes from this run alone, without earlier runs or further
    sessions.
    """
    record = result.record
    has_no_other_run = record.reruns is None and not record.sessions
    return has_no_other_run and record.case.device.startswith("cpu") and speed_up(result) is not None


def warn_of_false_verdicts(entry: Entry) -> Texts:
    """If a run has several cases, yields how many false verdicts to expect, because each case is judged separately."""
    num_judged = sum(speed_up(case) is not None for case in list_cases(entry.panels))
    if num_judged > 1:
        # At most 1% of the verdicts on cases that are really as fast as their reference are wrong.
        expected_mistakes = num_judged * (1 - FINAL_LEVEL)
        mistakes_text = (
            f"up to {expected_mistakes:.2g} cases would be"
            if expected_mistakes >= 1
            else f"the chance is {expected_mistakes:.0%} that one is"
        )
        explanation = (
            f"each of the {num_judged} cases is judged separately: if none really differed, {mistakes_text} called"
        )
        yield Text(f"{explanation} faster or slower by mistake", Tone.DOUBT)


def _verdict_lead(material: Material) -> str:
    cases = list_cases(panel for _, panel in timed_panels(material))
    speeds = [speed for case in cases if (speed := speed_up(case))]
    if not speeds:
        return ""
    intervals = describe_intervals(cases)
    return join_parts(
        "Speed against the reference: above 1x is faster.",
        f"[low, high] is {intervals}." if intervals else "",
        f"{legend.RANGE_OF_ROUNDS}." if any(speed.level == 0 for speed in speeds) else "",
        separator=" ",
    )


@section("verdict", "Verdict", 10, lead=_verdict_lead)
def verdict_section(material: Material) -> Elements:
    elements: list[Element] = []
    for entry in material.entries:
        elements += _describe_entry(entry, material.is_single_run)
    yield from elements or [Text("This report has no runs.")]


def _describe_entry(entry: Entry, is_single_run: bool) -> Elements:
    # 1. Report failures, and doubts about all verdicts.
    if not is_single_run:
        yield Text(entry.label, Tone.STRONG)
    yield from report_failures(entry)
    yield from warn_of_load(entry)
    # 2. Write a sentence for each precision, timed suites first. The device is named only if there are several.
    has_devices = len({panel.device for panel in entry.panels}) > 1
    sentences: list[Text] = []
    for panel in entry.panels:
        if not is_about_tensors(panel):
            sentences += compare_precisions(panel, panel.device if has_devices else "")
    for panel in filter(is_about_tensors, entry.panels):
        sentences += map(Text, name_best_precisions(panel))
    # 3. Name the cases without a verdict.
    cases = list_cases(entry.panels)
    skips = describe_cases_without_result(cases, Standing.SKIPPED, "skipped")
    sentences += [Text(text, Tone.DOUBT) for text in (*describe_emulations(cases), *skips)]
    sentences += warn_of_false_verdicts(entry)
    if sentences:
        yield Items(tuple(sentences))


def report_failures(entry: Entry) -> Elements:
    records = entry.run.records
    num_failed = sum(record.status is Status.FAILED for record in records)
    failures = describe_cases_without_result(list_cases(entry.panels), Standing.FAILED, "FAILED")
    if failures:
        yield Text(f"{num_failed} of {len(records)} cases failed.", Tone.BAD)
        yield from bullet_list(failures, Tone.BAD)
    missing_records = describe_missing_records(entry.run)
    if missing_records:
        yield Text(f"{missing_records[0].upper()}{missing_records[1:]}.", Tone.BAD)
    if not any(record.is_ok for record in records):
        yield Text(f"Nothing was measured (cases: {count_statuses(entry.run)}).", Tone.STRONG)


_COMPARED_STANDINGS = (*CERTAIN_STANDINGS.values(), Standing.DOUBTED, Standing.UNSURE, Standing.UNTIMED)
_MAX_REASONS = 3


def compare_precisions(panel: Panel, device: str = "") -> list[Text]:
    """Returns a sentence for each precision of a panel. The sentence names `device` unless that is ''."""
    device_suffix = f" on {device}" if device else ""
    compared_cases = [case for case in panel.members if find_standing(case) in _COMPARED_STANDINGS]
    by_mode = together((case.mode, case) for case in compared_cases)
    return [_compare_precision(panel, cases, device_suffix) for cases in by_mode.values()] or _describe_lone_reference(
        panel, device_suffix
    )


def _compare_precision(panel: Panel, cases: Sequence[NamedCase], device_suffix: str) -> Text:
    """Returns 'bf16 against fp32 on gemm m=512: faster, 1.62x, could be 1.60x to 1.64x; memory +1.1%'."""
    workload = f"{len(cases)} cases of {panel.suite}"
    if len(cases) == 1:
        workload = f"{panel.suite} {name_setting(cases[0].group)}".rstrip()
    answer = find_answer(cases)
    comparison = f"{answer.name} against {panel.reference or 'its reference'} on {workload}{device_suffix}"
    sentence = as_sentence(replace(answer, name=comparison)).text
    reasons = join_words(filter(None, map(_explain_missing_verdict, cases)), _MAX_REASONS)
    return Text(join_parts(sentence + _describe_labels(cases), reasons, separator="; "), answer.tone)


def _describe_labels(results: Sequence[Result]) -> str:
    """Returns the labels that cast doubt, as ' (noisy, drift in 2 of them)'. The power cap is included, because it
    explains a speed.
    """
    cases_by_label = Counter(chain.from_iterable(map(_doubtful_labels, results)))
    phrases = [
        f"{label} in {cases_by_label[label]} of them" if cases_by_label[label] < len(results) else label
        for label in Label
        if cases_by_label[label]
    ]
    if phrases:
        return f" ({', '.join(phrases)})"
    return ""


def _doubtful_labels(result: Result) -> list[Label]:
    """Returns the labels that cast doubt on a case. If its verdict was removed, labels that the reason already names
    are left out.
    """
    finding = result.finding
    doubts: list[Label] = []
    # Labels are only shown if the verdict is not certain.
    if finding is None or finding.doubtful or not finding.is_judged:
        withdrawing_labels = finding.hard if finding else ()
        doubts = [label for label in result.labels if label.casts_doubt and label not in withdrawing_labels]
    return [*doubts, *({Label.POWER_CAPPED} & {*result.labels})]


def _explain_missing_verdict(result: Result) -> str:
    if find_standing(result) is Standing.UNSURE and result.finding:
        return result.finding.why
    if find_standing(result) is Standing.UNTIMED:
        return result.record.detail
    return ""


def _describe_lone_reference(panel: Panel, device_suffix: str) -> list[Text]:
    num_timed = sum(
        find_standing(case) is Standing.REFERENCE and case.best_seconds is not None for case in panel.members
    )
    if not num_timed:
        return []
    cases = f"{many(num_timed, 'case')} of {panel.suite}{device_suffix}"
    return [Text(f"only {panel.reference} was timed, in {cases}: there is nothing to compare it with")]
