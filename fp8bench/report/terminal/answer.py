"""The answer of a run in about twelve lines: a line for each precision with its reason, and what to do next.

Everything else known of the run stands behind an option of `fp8bench show`, and on its page.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from fp8bench import units
from fp8bench.model import Label, Run
from fp8bench.model.consumed import reasons_in
from fp8bench.model.request import PHASE_ENERGY
from fp8bench.model.run import BENCH
from fp8bench.model.words import OF_ANOTHER_KIND
from fp8bench.report.case_status import Standing, is_emulated, speed_up, standing, status_words, tone_of
from fp8bench.report.columns import Col, other_tables, table
from fp8bench.report.elements import Element, Facts, Field, Part, Text, Tone
from fp8bench.report.page.section import Entry
from fp8bench.report.panels import NamedCase, Panel, Result, together
from fp8bench.report.terminal.short_answer import short_answer
from fp8bench.report.topics.answers import QUESTION, QUESTION_OF_CALLABLES, find_answers, propose
from fp8bench.report.topics.break_even import break_even_table, swept
from fp8bench.report.topics.energy import absences, energy_of_phases
from fp8bench.report.topics.memory import capacity
from fp8bench.report.topics.phases import phases_table
from fp8bench.report.topics.ranks import FUNCTIONAL, cheapest, wire
from fp8bench.report.topics.shares import coverage_sentence, coverages
from fp8bench.report.topics.speedup import sustained_table
from fp8bench.report.topics.tensors import about_tensors, best_by_width, tensors
from fp8bench.report.topics.verdict import cases_of, doubt_of_load, losses
from fp8bench.report.words.legend import LABELS
from fp8bench.report.words.naming import (
    common_tone,
    describe_devices,
    describe_params,
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
# For more tensors, only the best precision of each width is named.
_MOST_TENSORS = 2


def answer(entry: Entry, width: int, report: str = "", options: str = "") -> Iterator[Part]:
    """The page's parts; `report` is where the report lies, `options` those with which other commands find the run."""
    *parts, last = _parts(entry, width)
    yield from parts
    more = [("Page", report)] if report else []
    more += [("More", f"fp8bench show {entry.run.id}{options} --all")] if entry.run.path else []
    ending = Facts(tuple(more)) if more else Text("This run was not stored.")
    yield replace(last, elements=(*last.elements, ending))


def _parts(entry: Entry, width: int) -> Iterator[Part]:
    if lost := tuple(losses(entry)):
        yield Part("losses", "", lost)
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    several = len({panel.case.workload for panel in timed}) > 1
    for panels in [timed] if several else [[panel] for panel in timed]:
        yield _of_panels(panels, entry)
        for panel in [] if several else panels:
            yield from _requested_tables(panel)
    for panel in entry.panels:
        if about_tensors(panel):
            best = [Text(f"{sentence}.") for sentence in best_by_width(panel)]
            in_full = not best or len(panel.groups) <= _MOST_TENSORS
            yield Part("tensors", _heading([panel], entry.run), (*best, *(tensors(panel, width) if in_full else ())))
    told = absences(entry.run) if entry.run.request.energy_of == PHASE_ENERGY else []
    told += [f"trouble: {words}" for words in entry.run.troubles]
    if told:
        yield Part("beside", "", tuple(Text(words, Tone.DOUBT) for words in told))


def describe_storage(path: str, report: str) -> str:
    return f"report: {report}" if report else f"stored in {path}" if path else "this run was not stored"


def next_commands(entry: Entry, options: str) -> Iterator[Text]:
    """Yields each command that would settle or change an answer, or say more of it."""
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    yield from map(Text, _proposals(timed, entry))
    of_precisions = entry.run.request.suite != BENCH
    if of_precisions and any(speed_up(case.result) is not None for case in cases_of(timed)):
        yield Text(f"get advice on what to run in which precision: fp8bench advise {entry.run.id}{options}")


def _proposals(panels: Sequence[Panel], entry: Entry) -> Iterator[str]:
    run = entry.run
    return propose(cases_of(panels), run.command, bool(doubt_of_load(entry)), run.request.budget)


def _of_panels(panels: Sequence[Panel], entry: Entry) -> Part:
    """A line for each precision with its reason, what would settle it, and the times."""
    alone = len(panels) == 1 and len(panels[0].groups) == 1
    cases = cases_of(panels)
    is_timed = any(case.result.best for case in cases)
    tables: list[Element] = [Text(f"{coverage_sentence(*known)}.") for panel in panels for known in coverages(panel)]
    tables += [Text(words) for panel in panels for words in cheapest(panel)]
    if alone and is_timed:
        tables += phases_table(panels[0], brief=True)
    else:
        tables += _speeds(panels, is_timed)
    states = [state for panel in panels for state in device_state(panel, entry.run)]
    return short_answer(
        _heading(panels, entry.run),
        _question(panels),
        find_answers(cases) if is_timed else (),
        warnings=[state for state in states if state.tone is not Tone.PLAIN],
        doubts=_doubts(panels, entry),
        action=next(_proposals(panels, entry), ""),
        tables=tables,
    )


def _question(panels: Sequence[Panel]) -> str:
    references = join_words(list(dict.fromkeys(panel.reference for panel in panels if panel.reference)))
    floors = [finding.floor for case in cases_of(panels) if (finding := case.result.finding) and finding.floor]
    compared = [f"compared with {references}"] if references else []
    compared += [f"identical code differed by up to {units.percent(max(floors))}"] if floors else []
    question = QUESTION_OF_CALLABLES if panels[0].case.workload == BENCH else QUESTION
    return f"{question} ({'; '.join(compared)})" if compared else question


def _heading(panels: Sequence[Panel], run: Run) -> str:
    """'transformer (nano, 2 x 96 tokens) on AMD EPYC, 1 thread, torch 2.13.0: 80 rounds in 18 s'."""
    keys = {panel.case.device for panel in panels}
    devices = [facts for facts in run.devices if facts.key in keys]
    settings = sum(len(panel.groups) for panel in panels)
    params = describe_params(panels[0].shared, usual_params(panels[0].case, devices)) if len(panels) == 1 else ""
    about = "; ".join(filter(None, (params, many(settings, "setting") if settings > 1 else "")))
    names = ", ".join(dict.fromkeys(panel.case.workload for panel in panels))
    where = [describe_devices(devices) or join_words(sorted(keys))]
    where += [many(run.request.threads, "thread")] if any(key.startswith("cpu") for key in keys) else []
    where += [f"{run.request.ranks} ranks (the slowest counts)"] if run.request.ranks else []
    where += [f"torch {facts.torch.partition('+')[0]}" for facts in devices[:1]]
    timings = [timing for case in cases_of(panels) if (timing := case.result.record.timing) is not None]
    rounds = max((timing.num_rounds for timing in timings), default=0)
    seconds = sum(slot.wall_seconds for timing in timings for slot in timing.slots)
    spent = f": {many(rounds, 'round')}{f' in {units.clock(seconds)}' if seconds >= 1 else ''}" if rounds else ""
    return f"{names}{f' ({about})' if about else ''} on {', '.join(where)}{spent}"


def device_state(panel: Panel, run: Run) -> Iterator[Text]:
    """Yields power cap, clocks, and why they were held back: loud where the cap was lowered."""
    watches = [result.record.watch for result in panel.results if result.record.watch is not None]
    cap, default, highest = (
        run.environment.get(f"{panel.case.device} {name}")
        for name in ("power_cap", "power_cap_default", "sm_clock_max")
    )
    clocks = [clock for watch in watches for clock in (watch.sm_clock_lowest, watch.sm_clock) if clock is not None]
    reasons = {reason: None for watch in watches for reason in reasons_in(watch.throttle or 0)}
    lowered = isinstance(cap, int | float) and isinstance(default, int | float) and cap < default
    told = []
    if isinstance(cap, int | float):
        share = f", {units.percent(cap / default, 0)} of its default" if isinstance(default, int | float) else ""
        told.append(f"{'POWER CAP' if lowered else 'power cap'} {units.count(cap, 'W')}{share}")
    if clocks:
        most = f" of {units.count(highest, 'Hz')}" if isinstance(highest, int | float) else ""
        told.append(f"SM clock {units.span(clocks, lambda clock: units.count(clock, 'Hz'))}{most}")
    told += [f"held back by {join_words(list(reasons))}"] if reasons else []
    if told:
        yield Text("; ".join(told), Tone.BAD if lowered else Tone.DOUBT if reasons else Tone.PLAIN)


def _requested_tables(panel: Panel) -> Iterator[Part]:
    tables = (
        *sustained_table(panel),
        *energy_of_phases(panel),
        *other_tables(panel),
        *capacity(panel),
        *break_even_table(panel, swept(panel)),
        *([sent] if (sent := wire(panel)).rows else []),
    )
    if tables:
        yield Part("asked", "", tables)


def _doubts(panels: Sequence[Panel], entry: Entry) -> Iterator[str]:
    """Yields why verdicts are missing or in doubt, each reason once with the precisions it holds for."""
    for panel in panels:
        if not any(result.record.is_reference for result in panel.results):
            yield f"there is no reference ({panel.reference or 'none planned'} was not measured)"
            yield from (f"{result.mode}: {result.record.reason}" for result in panel.results if result.record.reason)
    on_cpu = any(panel.case.device.startswith("cpu") for panel in panels)
    if load := doubt_of_load(entry) if on_cpu else "":
        yield load
    if panels[0].case.workload == BENCH:
        yield from notes_of(entry.run)
    else:  # notes on other runs, which disturbed this one or are dated later
        yield from (note for note in entry.run.notes if note.startswith("run "))
    if entry.run.request.ranks and on_cpu:
        yield FUNCTIONAL.removesuffix(".")
    told = ((case.result, words) for case in cases_of(panels) for words in _doubts_of(case.result, bool(load)))
    by_reason = together((words, result.mode) for result, words in told)
    by_number = sorted(by_reason.items(), key=lambda pair: -len(pair[1]))
    for words, modes in by_number[:_MOST_DOUBTS]:
        yield f"{join_words(list(dict.fromkeys(modes)))}: {words}"
    if len(by_number) > _MOST_DOUBTS:
        yield f"{many(len(by_number) - _MOST_DOUBTS, 'more reason')} in --all"


def _doubts_of(result: Result, under_load: bool) -> Iterator[str]:
    """Under load only what the load does not explain."""
    if is_emulated(result) or not result.record.is_ok or result.finding is None:
        return
    explained = under_load and not {*result.finding.hard} - {Label.CONTENDED}
    labels = [label for label in result.labels if standing(result) is Standing.DOUBTED and label.casts_doubt]
    if others := [label for label in labels if label in OF_ANOTHER_KIND]:
        meaning, _, remedy = LABELS[others[0]]
        yield f"{result.reason(others[0]) or meaning}. What to do: {remedy}"
    elif not explained and result.finding.why:
        yield result.finding.why
    elif not explained and labels:
        yield LABELS[labels[0]].meaning
    if result.record.detail and result.best:
        yield result.record.detail


def _speeds(panels: Sequence[Panel], is_timed: bool) -> Iterator[Element]:
    """A row for each setting, or for each of several suites, with the speed of each precision that has one."""
    several = len({panel.case.device for panel in panels}) > 1
    rows: dict[str, list[NamedCase]] = {}
    if len(panels) == 1:
        (panel,) = panels
        for group in panel.groups[:_MOST_GROUPS]:
            own = describe_params((pair for pair in group.case.params if pair not in panel.shared), {})
            name = own if own and own not in rows else group.place
            rows[name] = [NamedCase(group, result) for result in group.results]
    else:
        for panel in panels:
            name = f"{panel.case.workload}{f' on {panel.case.device}' if several else ''}"
            rows.setdefault(name, []).extend(panel.members)
    cases = [case for members in rows.values() for case in members]
    modes = dict.fromkeys(
        case.result.mode
        for case in cases
        if not is_timed or case.result.record.is_reference or speed_up(case.result) is not None
    )

    def cell(row: tuple[str, list[NamedCase]], mode: str) -> Field:
        return _cell([case for case in row[1] if case.result.mode == mode])

    cols: list[Col[tuple[str, list[NamedCase]]]] = [
        Col("Speed-up" if any(speed_up(case.result) for case in cases) else "Setting", lambda row: row[0])
    ]
    cols += [Col(mode, partial(cell, mode=mode), number=True) for mode in modes]
    yield table("speeds", "", cols, rows.items())
    if len(panels) == 1 and len(panels[0].groups) > _MOST_GROUPS:
        yield Text(f"{len(panels[0].groups) - _MOST_GROUPS} more settings: --all, and the page.")


def _cell(cases: Sequence[NamedCase]) -> Field:
    """'1.90x', 'perhaps 1.90x', 'unsure 1.01x', '0.433x to 1.91x', 'emulated', 'FAILED'; the reference's time."""
    results = [case.result for case in cases]
    if not results:
        return Field(units.NONE)
    if len(cases) == 1 and status_words(results[0]) == units.NONE:
        return Field(cases[0].figures.rate.shown)
    if len(cases) == 1 and results[0].record.is_reference and results[0].best and not is_emulated(results[0]):
        return Field(units.seconds(results[0].best))
    speeds = [speed.point for result in results if (speed := speed_up(result)) is not None]
    if not speeds or any(standing(result) is Standing.FAILED for result in results):
        worst = min(results, key=lambda result: standing(result) is not Standing.FAILED)
        return Field(status_words(worst), tone=tone_of(worst))
    stands = {standing(result) for result in results}
    word = "unsure " if stands == {Standing.UNSURE} else "perhaps " if stands & _NOT_CLEAR else ""
    # A median would tell of no case where some are faster and some slower.
    points = speeds if stands >= _MIXED else [statistics.median(speeds)]
    shown = units.span(points, units.speed_up)
    return Field(f"{word}{shown}", tone=common_tone(map(tone_of, results)))
