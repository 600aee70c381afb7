"""The verdict on each precision in plain sentences.

Only a certain verdict is stated as a fact. An uncertain verdict has 'perhaps' or 'cannot tell', with the reasons for
the doubt. A speed is how many times as fast as its reference a case is: above 1x is faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fp8bench import units
from fp8bench.analysis.labels import describe_run_load
from fp8bench.analysis.verdicts import FINAL_LEVEL
from fp8bench.model import Label, Status
from fp8bench.model.run import BENCH
from fp8bench.model.words import LABELS_OF_OTHER_WORK
from fp8bench.report.case_status import CaseStatus, describe_intervals, find_case_status, list_speeds, speed_up
from fp8bench.report.elements import Element, Elements, Sentences, Text, TextList, Texts, Tone, bullet_list
from fp8bench.report.page.section import LabelledRun, Material, section, timed_panels
from fp8bench.report.panels import Cases, NamedCase, Panel, Result, join_parts, list_cases, together
from fp8bench.report.terminal.short_answer import as_sentence
from fp8bench.report.topics.answers import MAX_REASON_LENGTH, make_precision_answer, propose_commands
from fp8bench.report.topics.ranks import CPU_REMARK
from fp8bench.report.topics.tensors import name_best_precisions
from fp8bench.report.words import legend
from fp8bench.report.words.legend import WORDS_BY_LABEL
from fp8bench.report.words.naming import (
    describe_missing_records,
    describe_status_counts,
    format_run_start,
    join_words,
    list_run_notes,
    many,
    name_setting,
    shorten_line,
)

# A list has at most this many sentences of one kind. The table has every case.
_MAX_SENTENCES = 12


def describe_cases_without_result(cases: Sequence[NamedCase], status: CaseStatus, status_word: str) -> list[str]:
    """Returns sentences on the cases that have this status, with the reason of each case.

    An example: 'FAILED: fp8 in 1 of 3 cases of gemm (m=512): out of memory, even alone'.
    """
    cases_by_reason = together(
        (shorten_line(case.record.reason, MAX_REASON_LENGTH) or "no reason was given", case)
        for case in cases
        if find_case_status(case) is status
    )
    lines = []
    for reason, failed_cases in cases_by_reason.items():
        modes = {case.mode: "" for case in failed_cases}
        suites = {case.suite: "" for case in failed_cases}
        num_cases = sum(case.mode in modes and case.suite in suites for case in cases)
        count_text = f"in {len(failed_cases)} of {num_cases} cases of" if num_cases > 1 else "on"
        settings = join_words(name_setting(case.group) for case in failed_cases)
        settings_text = f" ({settings})" if len(failed_cases) < num_cases else ""
        lines.append(f"{status_word}: {join_words(modes)} {count_text} {join_words(suites)}{settings_text}: {reason}")
    num_hidden_lines = len(lines) - _MAX_SENTENCES + 1
    # A sentence about hidden lines takes the place of a line, so it is useful only for at least two.
    if num_hidden_lines > 1:
        lines[_MAX_SENTENCES - 1 :] = [f"and {num_hidden_lines} more like these: the table has every case"]
    return lines


def describe_emulations(cases: Sequence[NamedCase]) -> list[str]:
    emulated_cases = [case for case in cases if case.is_emulated]
    # Errors of an emulation count as real only if all of them are finite.
    non_finite_modes = {case.mode for case in emulated_cases if not math.isfinite(case.error_value or 0.0)}
    lines = []
    for has_non_finite_errors, cases_of_kind in together(
        (case.mode in non_finite_modes, case) for case in emulated_cases
    ).items():
        modes = []
        for reason, names in together((case.record.support.reason, case.mode) for case in cases_of_kind).items():
            modes.append(", ".join(dict.fromkeys(names)) + f" ({reason})" * bool(reason))
        error_validity_text = "errors are not all finite" if has_non_finite_errors else "errors are real"
        costs_text = "the speed is unknown, and (est.) means estimated for hardware with this precision"
        lines.append(f"emulated: {'; '.join(modes)}: {error_validity_text}, {costs_text}")
    return lines


def warn_of_load(entry: LabelledRun) -> Texts:
    if load_warning := describe_load_warning(entry):
        yield Text(f"{load_warning}; free the machine, and measure again: {entry.run.command}", Tone.DOUBT)


def describe_load_warning(entry: LabelledRun) -> str:
    """Returns a warning if other programs were running and the interval of some case comes from this run alone.
    Otherwise returns ''.
    """
    load_text = describe_run_load(entry.run)
    if load_text and any(_has_single_run_interval(case) for case in list_cases(entry.panels)):
        return f"other programs were running ({load_text}): another run may differ by more than these intervals"
    return ""


def _has_single_run_interval(result: Result) -> bool:
    """Returns whether the interval of a case on a CPU is computed from this run alone, without earlier runs or further
    sessions.
    """
    record = result.record
    has_no_other_run = record.reruns is None and not record.sessions
    return has_no_other_run and record.case.device.startswith("cpu") and speed_up(result) is not None


def describe_comparison(panels: Sequence[Panel]) -> str:
    """Returns what precisions are compared with, as 'compared with fp32; identical code differed by up to 1.5%'."""
    reference_names_text = join_words(panel.reference for panel in panels if panel.reference)
    noise_floors = [case.finding.floor for case in list_cases(panels) if case.finding.floor]
    return join_parts(
        f"compared with {reference_names_text}" if reference_names_text else "",
        f"identical code differed by up to {units.percent(max(noise_floors))}" if noise_floors else "",
        separator="; ",
    )


def propose_next_commands(panels: Sequence[Panel], entry: LabelledRun) -> Sentences:
    cases = list_cases(panels)
    # A decided verdict needs no second run, even if other programs were running.
    is_undecided_under_load = bool(describe_load_warning(entry)) and not are_cases_decided(cases)
    return propose_commands(cases, entry.run.command, is_undecided_under_load, entry.run.request.budget)


def are_cases_decided(cases: Cases) -> bool:
    """Returns whether the verdicts on these cases are all certain. A missing verdict counts as uncertain."""
    return not {find_case_status(case) for case in cases} & {CaseStatus.DOUBTED, CaseStatus.UNSURE, CaseStatus.UNTIMED}


def explain_verdict_doubts(panels: Sequence[Panel], entry: LabelledRun, max_reasons: int = 2) -> Sentences:
    """Yields each reason why a verdict is missing or uncertain, with the precisions to which it applies. Reasons that
    concern single cases are limited to the `max_reasons` most frequent: `show --all` has all of them.
    """
    # 1. Name references that were not measured.
    for panel in panels:
        if not any(case.is_reference for case in panel.named_cases):
            yield f"no reference ({panel.reference or 'none planned'} was not measured)"
            for case in panel.named_cases:
                # Failures are left out, because the answer has already listed them with their reasons.
                if case.record.reason and find_case_status(case) is not CaseStatus.FAILED:
                    yield f"{case.mode}: {case.record.reason}"
    # 2. Name doubts about the whole run: the load of the machine, other runs that disturbed this run, and newer runs.
    runs_on_cpu = any(panel.device.startswith("cpu") for panel in panels)
    load_warning = describe_load_warning(entry) if runs_on_cpu else ""
    if load_warning:
        yield load_warning
    if panels[0].suite == BENCH:
        yield from list_run_notes(entry.run)
    else:
        yield from (note for note in entry.run.notes if note.startswith("run "))
    if entry.run.request.ranks and runs_on_cpu:
        yield CPU_REMARK.removesuffix(".")
    # 3. Name reasons of single cases, the most frequent first.
    cases = list_cases(panels)
    modes_by_reason: dict[str, list[str]] = {}
    for case in cases:
        for reason in _list_case_doubts(case, bool(load_warning)):
            modes_by_reason.setdefault(reason, []).append(case.mode)
    num_cases = Counter(case.mode for case in cases)
    reasons = sorted(modes_by_reason, key=lambda reason: -len(modes_by_reason[reason]))
    for reason in reasons[:max_reasons]:
        mode_counts = Counter(modes_by_reason[reason]).items()
        yield f"{join_words(_count_cases(mode, count, num_cases[mode]) for mode, count in mode_counts)}: {reason}"
    if len(reasons) > max_reasons:
        yield f"{many(len(reasons) - max_reasons, 'more reason')} in --all"


def _count_cases(mode: str, count: int, num_cases: int) -> str:
    return mode if count == num_cases else f"{mode} in {count} of {num_cases} cases"


def _list_case_doubts(result: Result, under_load: bool) -> Sentences:
    """Yields the doubts about a case. With `under_load`, leaves out doubts that the load of the machine explains."""
    finding = result.finding
    if result.is_emulated or not result.is_ok:
        return
    # The load of the machine is mentioned once for the whole run, so do not repeat it for each case.
    is_explained_by_load = under_load and not {*finding.hard} - {Label.CONTENDED}
    is_doubted = find_case_status(result) is CaseStatus.DOUBTED
    labels = [label for label in result.labels if is_doubted and label.casts_doubt]
    other_work_label = next((label for label in labels if label in LABELS_OF_OTHER_WORK), None)
    if other_work_label:
        meaning, _, remedy = WORDS_BY_LABEL[other_work_label]
        yield f"{result.reason(other_work_label) or meaning}. Remedy: {remedy}"
    elif not is_explained_by_load and finding.why:
        yield finding.why
    elif not is_explained_by_load and labels:
        yield WORDS_BY_LABEL[labels[0]].meaning
    elif not under_load and Label.CONTENDED in result.labels:
        yield WORDS_BY_LABEL[Label.CONTENDED].meaning
    if result.record.detail and result.best_seconds:
        yield result.record.detail


def warn_of_false_verdicts(entry: LabelledRun) -> Texts:
    """If a run has several cases, yields how many false verdicts to expect, because each case is judged separately."""
    num_judged_cases = len(list_speeds(list_cases(entry.panels)))
    if num_judged_cases > 1:
        # If a case is really as fast as its reference, the probability of a wrong verdict is at most 1%.
        expected_false_verdicts = num_judged_cases * (1 - FINAL_LEVEL)
        mistakes_text = f"the chance is {expected_false_verdicts:.0%} that one is"
        if expected_false_verdicts >= 1:
            mistakes_text = f"up to {expected_false_verdicts:.2g} cases would be"
        yield Text(
            f"each of the {num_judged_cases} cases is judged separately: if none really differed, {mistakes_text} "
            "called faster or slower by mistake",
            Tone.DOUBT,
        )


def _verdict_lead_paragraph(material: Material) -> str:
    panels = [panel for _, panel in timed_panels(material)]
    cases = list_cases(panels)
    speeds = list_speeds(cases)
    if not speeds:
        return ""
    intervals = describe_intervals(cases)
    if not material.is_single_run:
        intervals = intervals.replace("of this run", "of its run")
    return join_parts(
        f"Speed {describe_comparison(panels)}. Above 1x is faster.",
        f"The range after the speed is {intervals}." if intervals else "",
        f"{legend.ROUNDS_RANGE_LEGEND}." if any(speed.level == 0 for speed in speeds) else "",
        separator=" ",
    )


@section("verdict", "Verdict", 10, lead=_verdict_lead_paragraph)
def verdict_section(material: Material) -> Elements:
    elements: list[Element] = []
    for entry in material.entries:
        elements += _describe_labelled_run(entry, material.is_single_run)
    yield from elements or [Text("This report has no runs.")]


def _describe_labelled_run(entry: LabelledRun, is_single_run: bool) -> Elements:
    if not is_single_run:
        yield Text(f"{entry.label}, {format_run_start(entry.run)}", Tone.STRONG)
    yield from report_failures(entry)
    # 1. Write a sentence for each precision, timed suites first. The suite and the device are named only if there are
    # several.
    panels = entry.timed_panels
    has_suites = len({panel.suite for panel in panels}) > 1
    has_devices = len({panel.device for panel in panels}) > 1
    answer_texts: list[Text] = []
    for panel in panels:
        panel_place_text = join_parts(
            panel.suite if has_suites else "", panel.device if has_devices else "", separator=" on "
        )
        answer_texts += compare_precisions(panel, panel_place_text)
    for panel in entry.panels:
        if not panel.is_timed:
            answer_texts += map(Text, name_best_precisions(panel))
    if answer_texts:
        yield TextList(tuple(answer_texts))
    # 2. Propose the next command. Then list doubts about the results, and cases without a verdict.
    if action := next(propose_next_commands(panels, entry), ""):
        yield Text(f"Do this: {action}")
    cases = list_cases(entry.panels)
    doubt_sentences = [*explain_verdict_doubts(panels, entry, _MAX_SENTENCES)] if panels else []
    doubt_sentences += describe_emulations(cases)
    doubt_sentences += describe_cases_without_result(cases, CaseStatus.SKIPPED, "skipped")
    doubt_sentences += [warning.text for warning in warn_of_false_verdicts(entry)]
    yield from bullet_list(doubt_sentences, Tone.DOUBT)


def report_failures(entry: LabelledRun) -> Elements:
    records = entry.run.records
    num_failed_cases = sum(record.status is Status.FAILED for record in records)
    if num_failed_cases:
        yield Text(f"{num_failed_cases} of {len(records)} cases failed.", Tone.BAD)
        failure_lines = describe_cases_without_result(list_cases(entry.panels), CaseStatus.FAILED, "FAILED")
        yield from bullet_list(failure_lines, Tone.BAD)
    if missing_records := describe_missing_records(entry.run):
        yield Text(f"{missing_records[0].upper()}{missing_records[1:]}.", Tone.BAD)
    if not any(record.is_ok for record in records):
        yield Text(f"Nothing was measured (cases: {describe_status_counts(entry.run)}).", Tone.STRONG)


def compare_precisions(panel: Panel, place: str = "") -> list[Text]:
    """Returns a sentence for each measured precision of a panel, as 'bf16: faster, 1.62x, could be 1.60x to 1.64x;
    memory +1.1%'. If `place` is given, the precision is called 'bf16 on PLACE'.
    """
    cases_by_mode = together(
        (case.mode, case) for case in panel.named_cases if case.mode != panel.reference and case.is_ok
    )
    return [_compare_precision(cases, place) for cases in cases_by_mode.values()] or _describe_lone_reference(
        panel, place
    )


def _compare_precision(cases: Sequence[NamedCase], place: str) -> Text:
    answer = make_precision_answer(cases)
    verdict = f"{answer.verdict}{_describe_labels(cases)}"
    return as_sentence(replace(answer, name=join_parts(answer.name, place, separator=" on "), verdict=verdict))


def _describe_labels(results: Sequence[Result]) -> str:
    """Returns the labels that cast doubt on some results, as ' (noisy, drift in 2 of them)'. The power cap is included,
    because it explains a speed.
    """
    label_counts = Counter(chain.from_iterable(map(_list_doubtful_labels, results)))

    def count_label(label: Label) -> str:
        return label if label_counts[label] == len(results) else f"{label} in {label_counts[label]} of them"

    label_count_phrases = [count_label(label) for label in Label if label_counts[label]]
    return f" ({', '.join(label_count_phrases)})" if label_count_phrases else ""


def _list_doubtful_labels(result: Result) -> list[Label]:
    """Returns the labels that cast doubt on a case with an uncertain verdict, and the label of a power cap. Labels that
    prevented the verdict are left out, because the reason for the missing verdict names them.
    """
    finding = result.finding
    # Labels are only shown if there is a speed, and the verdict on it is not certain.
    is_verdict_certain = result.is_emulated or (finding.is_judged and not finding.doubtful)
    doubtful_labels = [
        label for label in result.labels if label.casts_doubt and label not in finding.hard and not is_verdict_certain
    ]
    return [*doubtful_labels, *({Label.POWER_CAPPED} & {*result.labels})]


def _describe_lone_reference(panel: Panel, place: str) -> list[Text]:
    timed_cases = [case for case in panel.named_cases if case.best_seconds is not None]
    num_reference_cases = sum(find_case_status(case) is CaseStatus.REFERENCE for case in timed_cases)
    if not num_reference_cases:
        return []
    cases = f"{many(num_reference_cases, 'case')} of {place or panel.suite}"
    return [Text(f"only {panel.reference} was timed, in {cases}: there is nothing to compare it with")]
