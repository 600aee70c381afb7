"""The answer of a run in about twelve lines: a line for each precision with its reason, and what to do next.

All other figures are in `fp8bench show --all` and on the page.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter

from fp8bench import units
from fp8bench.model import Label, Run
from fp8bench.model.consumed import reasons_in
from fp8bench.model.request import PHASE_ENERGY
from fp8bench.model.run import BENCH
from fp8bench.model.words import OF_ANOTHER_KIND
from fp8bench.report.case_status import Standing, speed_up, standing, status_words, tone_of
from fp8bench.report.columns import Col, Cols, other_tables, table
from fp8bench.report.elements import Element, Elements, Facts, Field, Part, Sentences, Text, Texts, Tone
from fp8bench.report.page.section import Entry
from fp8bench.report.panels import Cases, NamedCase, Panel, Result, describe_params, join_parts
from fp8bench.report.terminal.short_answer import short_answer
from fp8bench.report.topics.answers import QUESTION, QUESTION_OF_CALLABLES, find_answers, propose
from fp8bench.report.topics.break_even import break_even_table, swept
from fp8bench.report.topics.energy import absences, energy_of_phases
from fp8bench.report.topics.memory import capacity
from fp8bench.report.topics.phases import phases_table
from fp8bench.report.topics.ranks import FUNCTIONAL, cheapest, if_rows, wire
from fp8bench.report.topics.shares import coverage_sentence, coverages
from fp8bench.report.topics.speedup import sustained_sentence, sustained_table
from fp8bench.report.topics.tensors import about_tensors, best_by_width, tensors
from fp8bench.report.topics.verdict import cases_of, doubt_of_load, losses
from fp8bench.report.words.legend import LABELS
from fp8bench.report.words.naming import (
    common_tone,
    describe_devices,
    join_words,
    many,
    notes_of,
    usual_params,
)

_MIXED = frozenset({Standing.FASTER, Standing.SLOWER})
_NOT_CLEAR = frozenset({Standing.DOUBTED, Standing.UNSURE})
# Further groups are in `show --all` and on the page.
_MOST_GROUPS = 16
# Further reasons for doubt are in `show --all`.
_MOST_DOUBTS = 2
# With more tensors, only the best precision of each width is named.
_MOST_TENSORS = 2


def answer(entry: Entry, width: int, report: str = "", options: str = "") -> Iterator[Part]:
    """Yields the answer's parts; `report` is the path of the page, `options` are those with which commands find the
    run."""
    *parts, last = _parts(entry, width)
    yield from parts
    links = [("Page", report)] if report else []
    if entry.run.path:
        links.append(("More", f"fp8bench show {entry.run.id}{options} --all"))
    ending = Facts(tuple(links)) if links else Text("This run was not stored.")
    yield replace(last, elements=(*last.elements, ending))


def _parts(entry: Entry, width: int) -> Iterator[Part]:
    # 1. Failures and missing cases.
    if lost := tuple(losses(entry)):
        yield Part("losses", "", lost)
    # 2. Suites that are about times: an answer for each panel, or one for all if several suites were asked for at once.
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    if len({panel.suite for panel in timed}) > 1:
        yield _of_panels(timed, entry)
    else:
        for panel in timed:
            yield _of_panels([panel], entry)
            yield from _requested_tables(panel)
    # 3. Suites that are about tensors.
    for panel in entry.panels:
        if about_tensors(panel):
            best = [Text(f"{sentence}.") for sentence in best_by_width(panel)]
            # More tensors would need a table wider than the terminal.
            in_full = not best or len(panel.groups) <= _MOST_TENSORS
            yield Part("tensors", _heading([panel], entry.run), (*best, *(tensors(panel, width) if in_full else ())))
    # 4. Missing energies, and problems.
    remarks = absences(entry.run) if entry.run.request.energy_of == PHASE_ENERGY else []
    remarks += [f"trouble: {words}" for words in entry.run.troubles]
    if remarks:
        yield Part("beside", "", tuple(Text(words, Tone.DOUBT) for words in remarks))


def describe_storage(path: str, report: str) -> str:
    if report:
        return f"report: {report}"
    if path:
        return f"stored in {path}"
    return "this run was not stored"


def next_commands(entry: Entry, options: str) -> Sentences:
    """Yields the commands that could settle or change an answer, or explain it."""
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    yield from _proposals(timed, entry)
    has_speed = any(speed_up(case) is not None for case in cases_of(timed))
    if has_speed and entry.run.request.suite != BENCH:
        yield f"get advice on what to run in which precision: fp8bench advise {entry.run.id}{options}"


def _proposals(panels: Sequence[Panel], entry: Entry) -> Sentences:
    run = entry.run
    return propose(cases_of(panels), run.command, bool(doubt_of_load(entry)), run.request.budget)


def _of_panels(panels: Sequence[Panel], entry: Entry) -> Part:
    """Returns a line for each precision with its reason, what would settle it, and the times."""
    cases = cases_of(panels)
    is_timed = any(case.best for case in cases)
    tables: list[Element] = []
    for panel in panels:
        tables += [Text(f"{coverage_sentence(*pair)}.") for pair in coverages(panel)]
    for panel in panels:
        tables += map(Text, cheapest(panel))
    if is_timed and len(panels) == len(panels[0].groups) == 1:
        tables += phases_table(panels[0], brief=True)
    else:
        tables += _speeds(panels, is_timed)
    warnings: list[Text] = []
    for panel in panels:
        warnings += sustained_sentence(panel)
        warnings += [state for state in device_state(panel, entry.run) if state.tone is not Tone.PLAIN]
    return short_answer(
        _heading(panels, entry.run),
        _question(panels),
        find_answers(cases) if is_timed else (),
        warnings=warnings,
        doubts=_doubts(panels, entry),
        action=next(_proposals(panels, entry), ""),
        tables=tables,
    )


def _question(panels: Sequence[Panel]) -> str:
    question = QUESTION_OF_CALLABLES if panels[0].suite == BENCH else QUESTION
    references = join_words(panel.reference for panel in panels if panel.reference)
    floors = [case.finding.floor for case in cases_of(panels) if case.finding and case.finding.floor]
    remarks = join_parts(
        f"compared with {references}" if references else "",
        f"identical code differed by up to {units.percent(max(floors))}" if floors else "",
        by="; ",
    )
    if remarks:
        return f"{question} ({remarks})"
    return question


def _heading(panels: Sequence[Panel], run: Run) -> str:
    """Returns 'transformer (nano, 2 x 96 tokens) on AMD EPYC, 1 thread, torch 2.13.0: 80 rounds in 18 s'."""
    # 1. The suites and their parameters.
    params = ""
    keys = {panel.device for panel in panels}
    devices = [facts for facts in run.devices if facts.key in keys]
    if len(panels) == 1:
        params = describe_params(panels[0].shared, usual_params(panels[0].case, devices).items())
    settings = sum(len(panel.groups) for panel in panels)
    about = join_parts(params, many(settings, "setting") if settings > 1 else "", by="; ")
    names = ", ".join(dict.fromkeys(panel.suite for panel in panels))
    # 2. The machine.
    on_cpu = any(key.startswith("cpu") for key in keys)
    machine = join_parts(
        describe_devices(devices) or join_words(sorted(keys)),
        many(run.request.threads, "thread") if on_cpu else "",
        f"{run.request.ranks} ranks (the slowest counts)" if run.request.ranks else "",
        f"torch {devices[0].torch.partition('+')[0]}" if devices else "",
    )
    # 3. The duration.
    rounds = 0
    seconds = 0.0
    for case in cases_of(panels):
        if (timing := case.record.timing) is not None:
            rounds = max(rounds, timing.num_rounds)
            seconds += sum(slot.wall_seconds for slot in timing.slots)
    duration = f" in {units.clock(seconds)}" if seconds >= 1 else ""
    spent = f": {many(rounds, 'round')}{duration}" if rounds else ""
    return f"{names}{f' ({about})' if about else ''} on {machine}{spent}"


def device_state(panel: Panel, run: Run) -> Texts:
    """Yields the power cap, the clocks, and why the device lowered them; in red if the cap was lowered."""
    clocks: list[float] = []
    reasons: list[str] = []
    for case in panel.members:
        if (watch := case.record.watch) is not None:
            clocks += [clock for clock in (watch.sm_clock_lowest, watch.sm_clock) if clock is not None]
            reasons += reasons_in(watch.throttle or 0)
    cap = run.environment.get(f"{panel.device} power_cap")
    default = run.environment.get(f"{panel.device} power_cap_default")
    highest = run.environment.get(f"{panel.device} sm_clock_max")
    is_lowered = False
    words = []
    if isinstance(cap, int | float):
        share = ""
        if isinstance(default, int | float):
            is_lowered = cap < default
            share = f", {units.percent(cap / default, 0)} of its default"
        words.append(f"{'POWER CAP' if is_lowered else 'power cap'} {units.count(cap, 'W')}{share}")
    if clocks:
        most = f" of {units.count(highest, 'Hz')}" if isinstance(highest, int | float) else ""
        words.append(f"SM clock {units.span(clocks, lambda clock: units.count(clock, 'Hz'))}{most}")
    if reasons:
        words.append(f"held back by {join_words(reasons)}")
    if words:
        usual_tone = Tone.DOUBT if reasons else Tone.PLAIN
        yield Text("; ".join(words), Tone.BAD if is_lowered else usual_tone)


def _requested_tables(panel: Panel) -> Iterator[Part]:
    tables = [
        *sustained_table(panel),
        *energy_of_phases(panel),
        *other_tables(panel),
        *capacity(panel),
        *break_even_table(panel, swept(panel)),
        *if_rows(wire(panel)),
    ]
    if tables:
        yield Part("asked", "", tuple(tables))


def _doubts(panels: Sequence[Panel], entry: Entry) -> Sentences:
    """Yields why verdicts are missing or in doubt, each reason once with the precisions it holds for."""
    # 1. References that were not measured.
    for panel in panels:
        if not any(case.is_reference for case in panel.members):
            yield f"no reference ({panel.reference or 'none planned'} was not measured)"
            for case in panel.members:
                # The reasons of failures are above.
                if case.record.reason and standing(case) is not Standing.FAILED:
                    yield f"{case.mode}: {case.record.reason}"
    # 2. Doubts about the whole run: load, and notes on other runs, which disturbed this one or are newer.
    on_cpu = any(panel.device.startswith("cpu") for panel in panels)
    load = doubt_of_load(entry) if on_cpu else ""
    if load:
        yield load
    if panels[0].suite == BENCH:
        yield from notes_of(entry.run)
    else:
        yield from (note for note in entry.run.notes if note.startswith("run "))
    if entry.run.request.ranks and on_cpu:
        yield FUNCTIONAL.removesuffix(".")
    # 3. Reasons of single cases, the most common ones first.
    modes_by_reason: dict[str, list[str]] = {}
    for case in cases_of(panels):
        for reason in _doubts_of(case, bool(load)):
            modes_by_reason.setdefault(reason, []).append(case.mode)
    reasons = sorted(modes_by_reason, key=lambda reason: -len(modes_by_reason[reason]))
    for reason in reasons[:_MOST_DOUBTS]:
        yield f"{join_words(modes_by_reason[reason])}: {reason}"
    if len(reasons) > _MOST_DOUBTS:
        yield f"{many(len(reasons) - _MOST_DOUBTS, 'more reason')} in --all"


def _doubts_of(result: Result, under_load: bool) -> Sentences:
    """Yields the doubts of a case; under load, only those that the load does not explain."""
    finding = result.finding
    if finding is None or result.is_emulated or not result.is_ok:
        return
    # The load is named once for the run, not for each case.
    is_explained = under_load and not {*finding.hard} - {Label.CONTENDED}
    labels = [label for label in result.labels if label.casts_doubt] if standing(result) is Standing.DOUBTED else []
    other_kinds = [label for label in labels if label in OF_ANOTHER_KIND]
    if other_kinds:
        meaning, _, remedy = LABELS[other_kinds[0]]
        yield f"{result.reason(other_kinds[0]) or meaning}. Remedy: {remedy}"
    elif not is_explained and finding.why:
        yield finding.why
    elif not is_explained and labels:
        yield LABELS[labels[0]].meaning
    if result.record.detail and result.best:
        yield result.record.detail


def _speeds(panels: Sequence[Panel], is_timed: bool) -> Elements:
    """A row for each setting, or for each of several suites, with the speed of each precision that has one."""
    rows: dict[str, list[NamedCase]] = {}
    if len(panels) == 1:
        for group in panels[0].groups[:_MOST_GROUPS]:
            rows[group.place] = list(group.members)
    else:
        has_devices = len({panel.device for panel in panels}) > 1
        for panel in panels:
            name = f"{panel.suite} on {panel.device}" if has_devices else panel.suite
            rows.setdefault(name, []).extend(panel.members)
    # Columns: precisions with a speed, and references for their times.
    modes: dict[str, None] = {}
    has_speed = False
    for case in chain.from_iterable(rows.values()):
        if speed_up(case) is not None:
            has_speed = True
            modes[case.mode] = None
        elif case.is_reference or not is_timed:
            modes[case.mode] = None

    def cell(row: tuple[str, list[NamedCase]], mode: str) -> Field:
        return _cell([case for case in row[1] if case.mode == mode])

    cols: Cols[tuple[str, list[NamedCase]]] = [Col("Speed-up" if has_speed else "Setting", itemgetter(0))]
    cols += [Col(mode, partial(cell, mode=mode), number=True) for mode in modes]
    yield table("speeds", "", cols, rows.items())
    if len(panels) == 1 and len(panels[0].groups) > _MOST_GROUPS:
        yield Text(f"{len(panels[0].groups) - _MOST_GROUPS} more settings: --all, and the page.")


def _cell(cases: Cases) -> Field:
    """Returns '1.90x', 'perhaps 1.90x', 'cannot tell, 1.01x', '0.433x to 1.91x', 'emulated', 'FAILED'; or the time of a
    reference."""
    if not cases:
        return Field(units.NONE)
    first = cases[0]
    if len(cases) == 1 and status_words(first) == units.NONE:
        return Field(first.figures.rate.shown)
    if len(cases) == 1 and first.is_reference and first.best and not first.is_emulated:
        return Field(units.seconds(first.best))
    # One word for several cases: it must hold for each of them.
    stands = list(map(standing, cases))
    speeds = [speed.point for case in cases if (speed := speed_up(case)) is not None]
    if Standing.FAILED in stands or not speeds:
        worst = cases[stands.index(Standing.FAILED)] if Standing.FAILED in stands else first
        return Field(status_words(worst), tone=tone_of(worst))
    word = ""
    if not _NOT_CLEAR.isdisjoint(stands):
        word = "cannot tell, " if {*stands} == {Standing.UNSURE} else "perhaps "
    # If some are faster and some slower, a median would describe none of them.
    points = speeds if _MIXED.issubset(stands) else [statistics.median(speeds)]
    return Field(f"{word}{units.span(points, units.speed_up)}", tone=common_tone(map(tone_of, cases)))
