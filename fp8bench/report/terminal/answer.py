"""The answer of a run in about twenty lines: a line for each precision, why, how sure, and what to do next.

Everything else known of the run stands behind an option of `fp8bench show`, and on its page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial

from fp8bench import units
from fp8bench.model import Run
from fp8bench.model.consumed import reasons_in
from fp8bench.model.request import PHASE_ENERGY
from fp8bench.model.run import BENCH
from fp8bench.model.words import OF_ANOTHER_KIND
from fp8bench.report.case_status import (
    Standing,
    emulated,
    speed_up,
    standing,
    status_words,
    tone_of,
    what_intervals_hold,
)
from fp8bench.report.columns import Col, other_tables, table
from fp8bench.report.elements import Element, Facts, Field, Items, Part, Table, Text, Tone
from fp8bench.report.page.section import Entry
from fp8bench.report.panels import (
    Figures,
    NamedCase,
    Panel,
    Result,
    ResultGroup,
    floor_of,
    heading,
    merge_notes,
    together,
)
from fp8bench.report.topics import roofline
from fp8bench.report.topics.answers import (
    QUESTION,
    QUESTION_OF_CALLABLES,
    Answer,
    find_answers,
    propose,
    verdict_word,
)
from fp8bench.report.topics.break_even import break_even_table, swept
from fp8bench.report.topics.energy import absences, energy_of_phases
from fp8bench.report.topics.memory import capacity, share_of
from fp8bench.report.topics.phases import phases_table
from fp8bench.report.topics.ranks import FUNCTIONAL, cheapest, wire
from fp8bench.report.topics.results import noise_floor
from fp8bench.report.topics.shares import coverage_sentence, coverages, shape_remarks
from fp8bench.report.topics.speedup import sustained
from fp8bench.report.topics.tensors import about_tensors, best_by_width, tensors
from fp8bench.report.topics.verdict import (
    by_chance,
    cases_of,
    emulations,
    losses,
    sitting,
    skips,
    span,
    verdicts_in,
)
from fp8bench.report.words.legend import LABELS, error_word
from fp8bench.report.words.naming import common_tone, listed, many

_HOW_MATRIX = (
    "speed-up over the reference: median of a suite's cases, or both ends where some lose and some gain; "
    "perhaps: some are in doubt or unsure"
)
_HOW_GRID = "speed-up over {reference}; perhaps: in doubt"
_MIXED = frozenset({Standing.FASTER, Standing.SLOWER})
_NOT_CLEAR = frozenset({Standing.DOUBTED, Standing.UNSURE})
# Further groups are in `show --all` and on the page.
_MOST_GROUPS = 16
# For more tensors, only the best precision of each width is named.
_MOST_TENSORS = 2
# Commands that would settle or change an answer.
_MOST_PROPOSALS = 2
# Values of parameters that say only that something is off or left to torch, and the parameter that names the texts.
_OFF = frozenset({"no", "auto", "none"})
_TEXTS = "data"


def answer(entry: Entry, width: int, report: str = "", options: str = "") -> Iterator[Part]:
    """The page's parts; `report` is where the report lies, `options` those with which other commands find the run."""
    if lost := tuple(losses(entry)):
        yield Part("losses", "", lost)
    if loaded := tuple(sitting(entry)):
        yield Part("load", "", loaded)
    timed = [panel for panel in entry.panels if not about_tensors(panel)]
    if len({panel.case.workload for panel in timed}) > 1:
        yield Part("matrix", "speed-up of suites", (_suites(timed),))
    else:
        for panel in timed:
            yield from _of_panel(panel, entry, width)
    for panel in entry.panels:
        if about_tensors(panel):
            best = [Text(f"{sentence}.") for sentence in best_by_width(panel)]
            title = heading(panel.case.workload, panel.shared, panel.case.device, entry.run.devices)
            in_full = not best or len(panel.groups) <= _MOST_TENSORS
            yield Part("tensors", title, (*best, *(tensors(panel, width) if in_full else ())))
    cases = cases_of(entry.panels)
    ranks = entry.run.request.ranks
    told = [f"{ranks} ranks: the slowest one's time counts, call by call"] if ranks else []
    told += [FUNCTIONAL] if ranks and any(panel.case.device == "cpu" for panel in timed) else []
    several = len(timed) > 1 or any(len(panel.groups) > 1 for panel in timed)
    told += [*(emulations(cases) if several else ()), *skips(cases)]
    told += [f"note: {words}" for words in entry.run.notes]
    told += absences(entry.run) if entry.run.request.energy_of == PHASE_ENERGY else []
    told += [f"trouble: {words}" for words in entry.run.troubles]
    beside = (*(Text(words, Tone.DOUBT) for words in told), *by_chance(entry))
    if beside:
        yield Part("beside", "", beside)
    yield Part("next", "next", (Items(tuple(_next(entry, options))), Text(where_stored(entry.run.path, report))))


def where_stored(path: str, report: str) -> str:
    return f"report: {report}" if report else f"stored in {path}" if path else "this run was not stored"


def _next(entry: Entry, options: str) -> Iterator[Text]:
    if roofline.how_to_know(entry.panels, entry.run):
        threads = f" --threads {entry.run.request.threads}" if entry.run.request.threads != 1 else ""
        yield Text(f"fp8bench doctor --ceilings{threads}{options}: later runs say what bounds each phase")
    of_speed = (result for panel in entry.panels if not about_tensors(panel) for result in panel.results)
    if entry.run.request.suite != BENCH and any(speed_up(result) is not None for result in of_speed):
        yield Text(f"fp8bench advise {entry.run.id}{options}: what to do about it")
    details = "--memory, --data, --numbers, --energy, --notes"
    yield Text(f"fp8bench show {entry.run.id}{options} --all: the rest; in parts with {details}")


def _of_panel(panel: Panel, entry: Entry, width: int) -> Iterator[Part]:
    if len(panel.groups) == 1 and _timed(panel):
        yield _of_group(panel, entry)
    else:
        yield _of_groups(panel, entry)
    yield from _asked(panel)


def _of_group(panel: Panel, entry: Entry) -> Part:
    """A line for each precision with its reason, how sure that is, what would settle it, and where the time goes."""
    elements: list[Element] = [*_device(panel, entry.run)]
    answers = find_answers(panel)
    if answers:
        question = QUESTION_OF_CALLABLES if panel.case.workload == BENCH else QUESTION
        elements.append(_answers(answers, f"{question} (compared with {panel.reference})"))
    for modes, coverage in coverages(panel):
        elements += map(Text, (f"{coverage_sentence(modes, coverage)}.", *shape_remarks(coverage)))
    proposals = [*propose(panel, entry.run.command, any(sitting(entry)), entry.run.request.budget)][:_MOST_PROPOSALS]
    elements.append(Facts((*_grounds(panel), *(("do this", words) for words in proposals))))
    elements += map(Text, cheapest(panel))
    return Part("answer", _heading(panel, entry.run), (*elements, *phases_table(panel, rates=True)))


def _answers(answers: Sequence[Answer], caption: str) -> Table:
    cols: list[Col[Answer]] = [
        Col("", lambda answer: answer.mode),
        Col("", lambda answer: Field(answer.verdict, tone=answer.tone)),
        Col("", lambda answer: answer.speed),
        Col("", lambda answer: "; ".join(answer.costs), below=True),
        Col("", lambda answer: answer.reason, below=True),
    ]
    return table("answers", caption, cols, answers)


def _heading(panel: Panel, run: Run) -> str:
    """'transformer size=nano on cpu (AMD EPYC, torch 2.13.0), 1 thread, 80 rounds', without what is switched off."""
    params = tuple(pair for pair in panel.shared if str(pair[1]) not in _OFF and pair[0] != _TEXTS)
    rounds = [result.record.timing.num_rounds for result in panel.results if result.record.timing is not None]
    title = heading(panel.case.workload, params, panel.case.device, run.devices)
    threads = f", {many(run.request.threads, 'thread')}" if panel.case.device.startswith("cpu") else ""
    return f"{title}{threads}" + (f", {many(max(rounds), 'round')}" if rounds else "")


def _of_groups(panel: Panel, entry: Entry) -> Part:
    title = heading(panel.case.workload, panel.shared, panel.case.device, entry.run.devices)
    elements: list[Element] = [*_device(panel, entry.run)]
    if _timed(panel):
        by_mode = together((member[1].mode, member) for member in panel.members if member[1].mode != panel.reference)
        ordered = sorted(by_mode.items(), key=lambda pair: not any(speed_up(result) for _, result in pair[1]))
        elements.append(Facts(tuple((mode, _line(members, panel)) for mode, members in ordered)))
    for modes, coverage in coverages(panel):
        elements += map(Text, (f"{coverage_sentence(modes, coverage)}.", *shape_remarks(coverage)))
    elements.append(_grid(panel))
    left_out = len(panel.groups) - _MOST_GROUPS
    if left_out > 0:
        elements.append(Text(f"{left_out} more groups: --all, and the page."))
    elements.append(Facts(tuple(_grounds(panel) if _timed(panel) else ())))
    elements += map(Text, cheapest(panel))
    return Part("answer", title, tuple(elements))


def _device(panel: Panel, run: Run) -> Iterator[Text]:
    watches = [result.record.watch for result in panel.results if result.record.watch is not None]
    cap, default, highest = (run.environment.get(f"{panel.case.device} {name}")
                             for name in ("power_cap", "power_cap_default", "sm_clock_max"))  # fmt: skip
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
    told += [f"held back by {listed(list(reasons))}"] if reasons else []
    if told:
        yield Text("; ".join(told), Tone.BAD if lowered else Tone.PLAIN)


def _asked(panel: Panel) -> Iterator[Part]:
    tables = (
        *sustained(panel), *energy_of_phases(panel), *other_tables(panel), *capacity(panel),
        *break_even_table(panel, swept(panel)), *([sent] if (sent := wire(panel)).rows else []),
    )  # fmt: skip
    if tables:
        yield Part("asked", "", tables)


def _grid(panel: Panel) -> Table:
    modes = list(dict.fromkeys(result.mode for result in panel.results if result.mode != panel.reference))
    cols: list[Col[ResultGroup]] = [
        Col("case", lambda group: group.place),
        Col(panel.reference or "reference", partial(_in_grid, mode=panel.reference), number=True),
        *(Col(mode, partial(_in_grid, mode=mode)) for mode in modes),
    ]
    caption = _HOW_GRID.format(reference=panel.reference) if modes and _timed(panel) else ""
    return table("grid", caption, cols, panel.groups[:_MOST_GROUPS])


def _timed(panel: Panel) -> bool:
    return any(result.best for result in panel.results)


def _in_grid(group: ResultGroup, mode: str) -> Field:
    """The reference's time, or a rate if nothing was timed, as for ceilings; else its speed-up."""
    results = [result for result in group.results if result.mode == mode]
    if len(results) == 1 and status_words(results[0]) == units.NONE:
        return Field(Figures(group, results[0]).rate.shown)
    if results and results[0].record.is_reference and results[0].best and not emulated(results[0]):
        return Field(units.seconds(results[0].best))
    return _cell(results)


def _suites(panels: Sequence[Panel]) -> Table:
    several = len({panel.case.device for panel in panels}) > 1
    modes = list(dict.fromkeys(result.mode for panel in panels for result in panel.results))
    by_suite = together(
        (f"{panel.case.workload}{f' on {panel.case.device}' if several else ''}", result)
        for panel in panels
        for result in panel.results
    )
    cols: list[Col[tuple[str, list[Result]]]] = [Col("suite", lambda row: row[0])]
    cols += [Col(mode, partial(lambda mode, row: _cell([result for result in row[1] if result.mode == mode]), mode))
             for mode in modes]  # fmt: skip
    return table("matrix", _HOW_MATRIX, cols, by_suite.items())


def _cell(results: Sequence[Result]) -> Field:
    """'1.90x', 'perhaps 1.90x', 'unsure 1.01x', '0.433x to 1.91x', 'reference', 'emulated', 'FAILED'."""
    if not results:
        return Field(units.NONE)
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


def _line(members: Sequence[NamedCase], panel: Panel) -> str:
    """'slower than fp32 in 4 of 5 cases, same in 1; 0.311x to 0.506x; error small (2.9e-03); memory 0.77x'."""
    speeds = [speed.point for _, result in members if (speed := speed_up(result)) is not None]
    shares = [share for group, result in members
              if not emulated(result) and (share := share_of(group, result)) is not None]  # fmt: skip
    memory = f"memory {units.span(shares, units.ratio)}" if shares else ""
    errors = [(case.group.error, case.error) for case in members if case.error is not None]
    worst = max((value for _, value in errors), key=lambda value: (math.isnan(value), abs(value)), default=None)
    error = f"error {error_word(errors)} ({units.relative_error(worst)})" if errors else ""
    verdicts = verdicts_in([result for _, result in members], panel.reference)
    return "; ".join(filter(None, (verdicts, span(speeds) if speeds else "", error, memory)))


def _grounds(panel: Panel) -> Iterator[tuple[str, str]]:
    measured = any(result.record.is_reference for result in panel.results)
    if not measured:
        yield "reference", f"none ({panel.reference or 'none planned'} was not measured)"
    yield "how sure", "; ".join(_sureness(panel))
    alike = together(((words, place), mode) for mode, words, place in _reservations(panel))
    reservations = ((listed(modes), words, place) for (words, place), modes in alike.items())
    for words in merge_notes(reservations, len(panel.groups)):
        yield "but", words.removeprefix("- ")
    doubts = together((label.value, result.mode) for result in panel.results if not emulated(result)
                      for label in result.labels if label.casts_doubt)  # fmt: skip
    if doubts:
        told = (f"{label} ({listed(list(dict.fromkeys(modes)))})" for label, modes in doubts.items())
        yield "labels", ", ".join(told)


def _reservations(panel: Panel) -> Iterator[tuple[str, str, str]]:
    for group, result in panel.members:
        if result.finding and result.finding.why and not emulated(result):
            yield f"{result.mode} {verdict_word(result)}", result.finding.why, group.place
        if result.record.detail and result.record.is_ok and result.best:
            yield result.mode, result.record.detail, group.place
        for label in result.labels if standing(result) is Standing.DOUBTED else ():
            if label in OF_ANOTHER_KIND and (reason := result.reason(label)):
                words = f"{label}: {reason}. What to do: {LABELS[label].remedy}"
                yield f"{result.mode} {status_words(result)}", words, group.place


def _sureness(panel: Panel) -> Iterator[str]:
    alone = len(panel.groups) == 1
    floor = noise_floor(panel.groups[0]) if alone else floor_of(panel.results) or "not measured"
    yield f"noise floor (A/A): {floor}"
    for result in panel.results if alone else ():
        speed = speed_up(result)
        if result.finding is not None and result.finding.floor and speed is not None:
            # In logarithms: half as fast and twice as fast are equally far.
            times = abs(math.log(speed.point)) / math.log1p(result.finding.floor)
            words = f"{units.significant(times, 2)} times" if times >= 1 else "within"
            yield f"{result.mode}'s difference is {words} it"
    if intervals := what_intervals_hold(panel.results):
        # A grid has no room for them.
        level = any((speed := speed_up(result)) and speed.level for result in panel.results)
        name = ("could be" if level else "seen") if alone else "intervals"
        yield f"{name}: {intervals}"
