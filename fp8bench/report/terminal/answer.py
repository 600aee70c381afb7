"""Prints the answer of a run in about twelve lines. Each precision has a line with its verdict and the reason. The
next command follows.

`fp8bench show --all` and the page have all other figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter

from fp8bench import units
from fp8bench.model import Run
from fp8bench.model.consumed import list_throttle_reasons
from fp8bench.model.request import PHASE_ENERGY
from fp8bench.model.run import BENCH
from fp8bench.report.case_status import (
    CaseStatus,
    describe_case_status,
    find_case_status,
    list_speeds,
    speed_up,
    status_tone,
)
from fp8bench.report.columns import Col, ColumnList, make_metric_tables, table
from fp8bench.report.elements import Element, Elements, Field, NameValuePairs, Part, Sentences, Text, Texts, Tone
from fp8bench.report.page.section import LabelledRun
from fp8bench.report.panels import Cases, NamedCase, Panel, describe_params, join_parts, list_cases
from fp8bench.report.terminal.short_answer import short_answer
from fp8bench.report.topics.answers import LOW_PRECISION_QUESTION_TEXT, QUESTION_OF_CALLABLES, find_case_answers
from fp8bench.report.topics.break_even import break_even_table
from fp8bench.report.topics.energy import explain_missing_energy, phase_energy_table
from fp8bench.report.topics.memory import capacity_tables
from fp8bench.report.topics.phases import phases_table
from fp8bench.report.topics.ranks import best_trade_offs, filter_nonempty_tables, make_transfer_table
from fp8bench.report.topics.shares import describe_coverage, list_distinct_coverages
from fp8bench.report.topics.speedup import describe_sustained_speed, sustained_table
from fp8bench.report.topics.tensors import name_best_precisions, tensor_tables
from fp8bench.report.topics.verdict import (
    are_cases_decided,
    describe_comparison,
    explain_verdict_doubts,
    propose_next_commands,
    report_failures,
)
from fp8bench.report.words.naming import (
    describe_devices,
    find_majority_tone,
    find_usual_params,
    join_words,
    many,
)

_FASTER_AND_SLOWER = frozenset({CaseStatus.FASTER, CaseStatus.SLOWER})
_UNCERTAIN_STATUSES = frozenset({CaseStatus.DOUBTED, CaseStatus.UNSURE})
# The table of speeds has a row for each group, at most this many. `show --all` and the page have all groups.
_MAX_ANSWERED_GROUPS = 16
# If a panel has more tensors than this, the answer names only the best precision of each width.
_MAX_SHOWN_TENSORS = 2


def make_answer_parts(entry: LabelledRun, width: int, page_path: str = "", store_options: str = "") -> Iterator[Part]:
    """Yields the page parts of a run's answer. The last part has links to more details.

    `page_path` is the path of the HTML page. `store_options` are the options with which other commands find the run.
    """
    *parts, last_part = _make_unlinked_answer_parts(entry, width)
    yield from parts
    run_links = [("Page", page_path)] if page_path else []
    if entry.run.path:
        run_links.append(("More", f"fp8bench show {entry.run.id}{store_options} --all"))
    last_answer_element = NameValuePairs(tuple(run_links)) if run_links else Text("This run was not stored.")
    yield replace(last_part, elements=(*last_part.elements, last_answer_element))


def _make_unlinked_answer_parts(entry: LabelledRun, width: int) -> Iterator[Part]:
    # 1. Report failures and missing cases.
    if failure_texts := tuple(report_failures(entry)):
        yield Part("losses", "", failure_texts)
    # 2. Answer for suites that measure times. A run of one suite has an answer for each panel, a run of several
    # suites has one answer for all panels.
    if len({panel.suite for panel in entry.timed_panels}) > 1:
        yield _make_panels_answer(entry.timed_panels, entry)
    else:
        for panel in entry.timed_panels:
            yield _make_panels_answer([panel], entry)
            yield from _list_requested_table_parts(panel)
    # 3. Print the answers of suites that measure errors of tensors instead of times.
    for panel in entry.panels:
        if not panel.is_timed:
            best_precision_texts = [Text(f"{sentence}.") for sentence in name_best_precisions(panel)]
            # A table of more tensors than _MAX_SHOWN_TENSORS would be wider than the terminal.
            has_table = not best_precision_texts or len(panel.groups) <= _MAX_SHOWN_TENSORS
            yield Part(
                "tensors",
                _make_answer_heading([panel], entry.run),
                (*best_precision_texts, *(tensor_tables(panel, width) if has_table else ())),
            )
    # 4. Explain missing energies, and report troubles of the run.
    remarks = explain_missing_energy(entry.run) if entry.run.request.energy_of == PHASE_ENERGY else []
    remarks += [f"trouble: {remark}" for remark in entry.run.troubles]
    if remarks:
        yield Part("beside", "", tuple(Text(remark, Tone.DOUBT) for remark in remarks))


def describe_storage(run_path: str, page_path: str) -> str:
    if page_path:
        return f"report: {page_path}"
    if run_path:
        return f"stored in {run_path}"
    return "this run was not stored"


def next_commands(entry: LabelledRun, store_options: str) -> Sentences:
    """Yields sentences with commands to run next, such as one that would settle an uncertain verdict."""
    yield from propose_next_commands(entry.timed_panels, entry)
    if list_speeds(list_cases(entry.timed_panels)) and entry.run.request.suite != BENCH:
        yield f"get advice on what to run in which precision: fp8bench advise {entry.run.id}{store_options}"


def _make_panels_answer(panels: Sequence[Panel], entry: LabelledRun) -> Part:
    """Returns one answer for all these panels: a verdict with its reason for each precision, what to do next, and
    tables of times.
    """
    # 1. Collect tables. A single group has room for the phases of its steps; several groups only show their speeds.
    cases = list_cases(panels)
    is_timed = any(case.best_seconds for case in cases)
    coverage_pairs = chain.from_iterable(map(list_distinct_coverages, panels))
    table_elements: list[Element] = [Text(f"{describe_coverage(*pair)}.") for pair in coverage_pairs]
    table_elements += map(Text, chain.from_iterable(map(best_trade_offs, panels)))
    if is_timed and len(panels) == len(panels[0].groups) == 1:
        table_elements += phases_table(panels[0], native_only=True)
    else:
        table_elements += _speed_table(panels, is_timed)
    # 2. Collect warnings. A plain device state is normal, so leave it out.
    answer_warnings: list[Text] = []
    for panel in panels:
        answer_warnings += describe_sustained_speed(panel)
        answer_warnings += [state for state in describe_device_state(panel, entry.run) if state.tone is not Tone.PLAIN]
    # 3. Answer the question for each precision.
    question = QUESTION_OF_CALLABLES if panels[0].suite == BENCH else LOW_PRECISION_QUESTION_TEXT
    comparison = describe_comparison(panels)
    return short_answer(
        _make_answer_heading(panels, entry.run),
        f"{question} ({comparison})" if comparison else question,
        find_case_answers(cases) if is_timed else (),
        warnings=answer_warnings,
        doubts=explain_verdict_doubts(panels, entry),
        is_decided=are_cases_decided(cases),
        action=next(propose_next_commands(panels, entry), ""),
        tables=table_elements,
    )


def _make_answer_heading(panels: Sequence[Panel], run: Run) -> str:
    """Returns the heading of an answer, as 'transformer (nano, 2 x 96 tokens) on AMD EPYC, 1 thread, torch 2.13.0: 80
    rounds in 18 s'.
    """
    # 1. Name the suites and their parameters.
    device_keys = {panel.device for panel in panels}
    devices = [facts for facts in run.devices if facts.key in device_keys]
    num_settings = sum(len(panel.groups) for panel in panels)
    params_text = many(num_settings, "setting") if num_settings > 1 else ""
    if len(panels) == 1:
        params = describe_params(panels[0].common_params, find_usual_params(panels[0].case, devices).items())
        params_text = join_parts(params, params_text, separator="; ")
    suites = ", ".join(dict.fromkeys(panel.suite for panel in panels))
    # 2. Name the machine.
    runs_on_cpu = any(key.startswith("cpu") for key in device_keys)
    machine = join_parts(
        describe_devices(devices) or join_words(sorted(device_keys)),
        many(run.request.threads, "thread") if runs_on_cpu else "",
        f"{run.request.ranks} ranks (the slowest counts)" if run.request.ranks else "",
        f"torch {devices[0].torch.partition('+')[0]}" if devices else "",
    )
    # 3. Add the number of timing rounds, and the duration of all timing slots.
    timings = [timing for case in list_cases(panels) if (timing := case.record.timing) is not None]
    slots = chain.from_iterable(timing.slots for timing in timings)
    seconds = sum(slot.wall_seconds for slot in slots)
    duration = f" in {units.clock(seconds)}" if seconds >= 1 else ""
    rounds = max((timing.num_rounds for timing in timings), default=0)
    rounds_text = f": {many(rounds, 'round')}{duration}" if rounds else ""
    return f"{suites}{f' ({params_text})' if params_text else ''} on {machine}{rounds_text}"


def describe_device_state(panel: Panel, run: Run) -> Texts:
    """Yields a line with the power cap of a GPU, its clocks, and why it lowered its clocks. A line with a lowered cap
    is red.
    """
    # 1. Collect the clocks that were measured, and why the device lowered them.
    measured_clock_rates: list[float] = []
    throttle_reasons: list[str] = []
    for case in panel.named_cases:
        if (watch := case.record.watch) is not None:
            measured_clock_rates += [clock for clock in (watch.sm_clock_lowest, watch.sm_clock) if clock is not None]
            throttle_reasons += list_throttle_reasons(watch.throttle or 0)

    # 2. Compare with the settings of the device.
    def setting(name: str) -> float | None:
        value = run.environment.get(f"{panel.device} {name}")
        return value if isinstance(value, int | float) else None

    power_cap, default_power_cap, max_clock = map(setting, ("power_cap", "power_cap_default", "sm_clock_max"))
    is_power_cap_lowered = power_cap is not None and default_power_cap is not None and power_cap < default_power_cap
    # 3. Describe only what is known.
    facts = []
    if power_cap is not None:
        default_share_text = (
            f", {units.percent(power_cap / default_power_cap, 0)} of its default" if default_power_cap else ""
        )
        facts.append(
            f"{'POWER CAP' if is_power_cap_lowered else 'power cap'} {units.count(power_cap, 'W')}{default_share_text}"
        )
    if measured_clock_rates:
        max_clock_text = f" of {units.count(max_clock, 'Hz')}" if max_clock is not None else ""
        facts.append(f"SM clock {units.span(measured_clock_rates, partial(units.count, unit='Hz'))}{max_clock_text}")
    if throttle_reasons:
        facts.append(f"held back by {join_words(throttle_reasons)}")
    if facts:
        tone_without_power_cap = Tone.DOUBT if throttle_reasons else Tone.PLAIN
        yield Text("; ".join(facts), Tone.BAD if is_power_cap_lowered else tone_without_power_cap)


def _list_requested_table_parts(panel: Panel) -> Iterator[Part]:
    table_elements = [
        *sustained_table(panel),
        *phase_energy_table(panel),
        *make_metric_tables(panel),
        *capacity_tables(panel),
        *break_even_table(panel),
        *filter_nonempty_tables(make_transfer_table(panel)),
    ]
    if table_elements:
        yield Part("asked", "", tuple(table_elements))


def _speed_table(panels: Sequence[Panel], is_timed: bool) -> Elements:
    """Yields a table of speeds with a column for each precision. A single panel has a row for each setting. Several
    panels have a row for each suite and device.
    """
    cases_by_row_name: dict[str, list[NamedCase]] = {}
    if len(panels) == 1:
        for group in panels[0].groups[:_MAX_ANSWERED_GROUPS]:
            cases_by_row_name[group.setting_name] = list(group.named_cases)
    else:
        has_devices = len({panel.device for panel in panels}) > 1
        for panel in panels:
            name = f"{panel.suite} on {panel.device}" if has_devices else panel.suite
            cases_by_row_name.setdefault(name, []).extend(panel.named_cases)
    # Precisions with a speed get a column for this speed. References get a column for their time.
    cases = list(chain.from_iterable(cases_by_row_name.values()))
    modes = [case.mode for case in cases if case.is_reference or not is_timed or speed_up(case) is not None]

    def speed_of_mode(row: tuple[str, list[NamedCase]], mode: str) -> Field:
        return _make_speed_field([case for case in row[1] if case.mode == mode])

    cols: ColumnList[tuple[str, list[NamedCase]]] = [
        Col("Speed-up" if list_speeds(cases) else "Setting", itemgetter(0))
    ]
    cols += [Col(mode, partial(speed_of_mode, mode=mode), number=True) for mode in dict.fromkeys(modes)]
    yield table("speeds", "", cols, cases_by_row_name.items())
    if len(panels) == 1 and len(panels[0].groups) > _MAX_ANSWERED_GROUPS:
        yield Text(f"{len(panels[0].groups) - _MAX_ANSWERED_GROUPS} more settings are in --all and on the page.")


def _make_speed_field(cases: Cases) -> Field:
    """Returns the speed of these cases as '1.90x', 'perhaps 1.90x', 'cannot tell, 1.01x' or '0.433x to 1.91x'.

    Cases without a speed show their status, as 'emulated' or 'FAILED', and a reference shows its time.
    """
    if not cases:
        return Field(units.NONE)
    first_case = cases[0]
    if len(cases) == 1 and describe_case_status(first_case) == units.NONE:
        return Field(first_case.figures.rate.shown)
    if len(cases) == 1 and first_case.is_reference and first_case.best_seconds and not first_case.is_emulated:
        return Field(units.seconds(first_case.best_seconds))
    # One text describes all cases, so it must be true for each of them.
    case_statuses = list(map(find_case_status, cases))
    speeds = [speed.point for speed in list_speeds(cases)]
    if CaseStatus.FAILED in case_statuses or not speeds:
        named_case = min(cases, key=lambda case: find_case_status(case) is not CaseStatus.FAILED)
        return Field(describe_case_status(named_case), tone=status_tone(named_case))
    doubt_prefix = ""
    if not _UNCERTAIN_STATUSES.isdisjoint(case_statuses):
        doubt_prefix = "cannot tell, " if {*case_statuses} == {CaseStatus.UNSURE} else "perhaps "
    # If some cases are faster and others slower, show the range, because a median would describe none of them.
    shown_speeds = speeds if _FASTER_AND_SLOWER.issubset(case_statuses) else [statistics.median(speeds)]
    return Field(
        f"{doubt_prefix}{units.span(shown_speeds, units.speed_up)}", tone=find_majority_tone(map(status_tone, cases))
    )
