"""Shows advice and its checklist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fp8bench import units
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Checked, Cost, Met, RuleAnswer
from fp8bench.model import Interval, Level
from fp8bench.model.codec import SCHEMA, encode
from fp8bench.report.case_status import bounds
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.legend import RANGE
from fp8bench.report.words.naming import many

_TONES = {Met.YES: Tone.GOOD, Met.NO: Tone.BAD, Met.UNCLEAR: Tone.DOUBT, Met.UNKNOWN: Tone.DOUBT}
_KINDS = {AdviceKind.ADOPT: Tone.GOOD, AdviceKind.NOTHING: Tone.PLAIN}
# At most so many sentences are shown; JSON has all of them.
_MOST = 12
# Up to so many alike are shown each by itself.
_FEW = 3
_MOST_GROUNDS = 2
# Of the commands that would answer more so many are shown; the whole checklist has all.
_MOST_MEASURES = 3
LEGEND = (
    "adopt, route, schedule: take a precision, leave layers high, leave steps or kinds of steps high",
    "predicted: the speed-up that the same step will show once more, never above what Amdahl's law leaves",
    RANGE,
    "emulated cases have no speed, and nothing is predicted of them",
    "yes speaks for the precision; not measured here: no figure of this machine answers it, and the command would",
)


def advice_elements(advised: Advised, whole: bool = True) -> Iterator[Element]:
    """Yields the sentences and a table of predictions, those for doing nothing only if it is the `whole`."""
    named = short_names(advised)
    sentences = [_with_those_alike(alike, named) for alike in _alike(advised.advice)]
    yield Items(tuple(sentences[:_MOST]))
    if len(sentences) > _MOST:
        yield Text(f"{len(sentences) - _MOST} more pieces of advice are in the JSON.")
    kinds = [kind for kind in AdviceKind if whole or kind is not AdviceKind.NOTHING]
    gains = [advice for advice in advised.advice if advice.gain is not None and advice.kind in kinds]
    if gains:
        cols: list[Col[Advice]] = [
            Col("advice", lambda advice: f"{advice.kind} {advice.mode}"),
            Col("predicted", lambda advice: speed(advice.gain), number=True, unit="x"),
            Col("rule", lambda advice: advice.rule),
            Col("of", lambda advice: named(advice.case), hint="the case that it predicts, where its evidence is"),
        ]
        yield table("predicted", "what is predicted", cols, gains[:_MOST])


def _alike(advice: Sequence[Advice]) -> list[list[Advice]]:
    """Groups advice to do nothing for the same reason in many settings; each other piece is its own group."""
    reasons = [
        (each.kind, each.mode, each.rule, each.sentence.partition("(" if each.gain is None else " ")[0])
        for each in advice
    ]
    groups: dict[object, list[Advice]] = {}
    for number, (each, reason) in enumerate(zip(advice, reasons, strict=True)):
        is_common = each.kind is AdviceKind.NOTHING and reasons.count(reason) > _FEW
        groups.setdefault(reason if is_common else number, []).append(each)
    return list(groups.values())


def _with_those_alike(alike: Sequence[Advice], named: Callable[[str], str]) -> Text:
    first, *others = alike
    place = named(first.settings[0]) if len(first.settings) == 1 else many(len(first.settings), "setting")
    if others:
        gains = [other.gain.point for other in others if other.gain is not None]
        down = f", down to {units.speed_up(min(gains))}" if gains else ""
        place += f"; the like in {sum(len(other.settings) for other in others)} more settings{down}"
    return Text(f"{first.sentence} ({place}).", Tone.DOUBT if first.doubtful else _KINDS.get(first.kind, Tone.STRONG))


def short_names(advised: Advised) -> Callable[[str], str]:
    """Returns a function that shortens names of settings and cases by the parameters that their suite has in common."""
    inside: dict[str, list[set[str]]] = {}
    for answer in advised.answers:
        suite, _, rest = answer.setting.partition("[")
        inside.setdefault(suite, []).append(set(rest.rpartition("]")[0].split(",")))
    shared = {suite: set.intersection(*pairs) for suite, pairs in inside.items()}

    def short(row: str) -> str:
        suite, _, rest = row.partition("[")
        params, _, end = rest.rpartition("]")
        if suite not in shared or not params:
            return row
        own = ",".join(pair for pair in params.split(",") if pair not in shared[suite])
        return (f"{suite}[{own}]" if own else suite) + end

    return short


def speed(gain: Interval | None, show: Callable[[float], str] = units.speed_up) -> Field:
    if gain is None:
        return Field(units.NONE)
    return Field(f"{show(gain.point)} {bounds(gain)}", gain.point)


def cost_tables(advised: Advised, costs: Sequence[Cost], price: float | None) -> Iterator[Element]:
    named = short_names(advised)
    by_setting = together((cost.setting, cost) for cost in costs)
    cols: list[Col[Cost]] = [
        Col("precision", lambda cost: cost.mode),
        Col("speed-up", lambda cost: speed(cost.speed), number=True, unit="x"),
        Col("loss", _gap, number=True),
        Col("joules a step", lambda cost: speed(cost.joules, units.ratio), number=True, unit="x"),
        Col("time", lambda cost: speed(cost.time, units.ratio), number=True, unit="x"),
        Col("energy", lambda cost: speed(cost.energy, units.ratio), number=True, unit="x"),
        Col("money", lambda cost: speed(None if price is None else cost.money(price), units.significant), number=True),
        Col("why", lambda cost: cost.why, below=True),
    ]
    for number, (setting, rows) in enumerate(by_setting.items(), 1):
        first = rows[0]
        yield table(f"cost-{number}", f"{named(setting)}, over {first.reference}", cols, rows)
        if first.hours is not None:
            used = f", {units.joules(first.energy_used)}" if first.energy_used is not None else ""
            money = f", {units.significant(first.hours * price)} at {price:g} an hour" if price is not None else ""
            took = units.seconds(3600 * first.hours)
            yield Text(f"{first.reference} itself: {units.whole(first.steps)} such steps take {took}{used}{money}.")
    if any(cost.model for cost in costs):
        models = ", ".join(dict.fromkeys(cost.model for cost in costs if cost.model))
        yield Text(f"Losses are those of {models}: what another model loses is not known.", Tone.DOUBT)


def _gap(cost: Cost) -> str:
    if cost.gap is None:
        return cost.learned or units.NONE
    low, point, high = (units.change(1 + value) for value in (cost.gap.low, cost.gap.point, cost.gap.high))
    return f"{point} [{low}, {high}] {cost.learned}"


def checklist(advised: Advised, shared: bool) -> Iterator[Table]:
    """Yields a table for each suite and device, with a row for each precision and question. Of several settings it
    shows the answer of most that have an answer. What an emulation leaves open is one row."""
    named = short_names(advised)
    # 'gemm[m=64]@cpu' becomes 'gemm on cpu'.
    by_place = together(
        (f"{answer.setting.partition('[')[0]} on {answer.setting.rpartition('@')[2]}", answer)
        for answer in advised.answers
    )
    for number, (place, answers) in enumerate(by_place.items(), 1):
        by_row = together(((each.mode, each.figure if _open(each) else each.rule), each) for each in answers)
        caption = f"{place}: when to use a lower precision"
        yield table(f"checklist-{number}", caption, _checklist_cols(named, shared, below=shared), by_row.values())


def _answered(advised: Advised) -> Iterator[Element]:
    named = short_names(advised)
    by_row = together(((answer.mode, answer.rule), answer) for answer in advised.answers)
    known = [several for several in by_row.values() if any(answer.met is not Met.UNKNOWN for answer in several)]
    if known:
        yield table("answered", "what decides it", _checklist_cols(named, shared=False, below=True)[:4], known)
    missing = [several[0] for several in by_row.values() if several not in known and not _open(several[0])]
    measures = dict.fromkeys(answer.measure for answer in missing if answer.measure)
    if missing:
        more = " What answers more of them:" if measures else ""
        yield Text(f"{many(len(missing), 'question')} not measured here (--all lists them).{more}")
        yield Items(tuple(Text(measure) for measure in [*measures][:_MOST_MEASURES]))


def _open(answer: RuleAnswer) -> bool:
    return answer.met is Met.UNKNOWN and answer.figure.startswith(Level.EMULATED)


def _checklist_cols(named: Callable[[str], str], shared: bool, below: bool) -> list[Col[Sequence[RuleAnswer]]]:
    """The columns for answers to one question: the most frequent answer, if there is any, and who gave it first."""

    def first(answers: Sequence[RuleAnswer]) -> tuple[RuleAnswer, int]:
        known = [answer.met for answer in answers if answer.met is not Met.UNKNOWN]
        (met, count), *_ = Counter(known or (answer.met for answer in answers)).most_common()
        return next(answer for answer in answers if answer.met is met), count

    def here(answers: Sequence[RuleAnswer]) -> Field:
        answer, count = first(answers)
        some = f" ({count} of {len(answers)})" if count < len(answers) else ""
        return Field(f"{answer.met.value}{some}", tone=_TONES[answer.met])

    def figure(answers: Sequence[RuleAnswer]) -> str:
        answer, settings = first(answers)[0], {answer.setting for answer in answers}
        alone = len(settings) == 1 or _open(answer)
        return answer.figure if alone else f"{answer.figure} at {named(answer.setting)}"

    def evidence(answers: Sequence[RuleAnswer]) -> str | None:
        answer = first(answers)[0]
        grounds = [f"{ground.figure} in {named(ground.row)}" for ground in answer.grounds[:_MOST_GROUNDS]]
        measure = f"measure it: {answer.measure}" if answer.measure and not _open(answer) else None
        return "; ".join(grounds) or measure

    return [
        Col("precision", lambda answers: answers[0].mode, shared=shared),
        Col("question", lambda answers: " ".join(dict.fromkeys(answer.question for answer in answers))),
        Col("here", here), Col("figure", figure, below=below), Col("evidence", evidence, below=below),
    ]  # fmt: skip


_NOTHING = "There is nothing to advise on: the run has no case beside a reference."
_COST = "the cost of a decision: each precision over its reference; time, energy and money are those to the same loss"


def page_of(
    advised: Advised, checked: Sequence[Checked], costs: Sequence[Cost], price: float | None, notes: Sequence[str],
    whole: bool = False,
) -> Page:  # fmt: skip
    """Shows the advice on one run, with checks and costs by the `price` of an hour. Of the checklist it shows what
    was answered, and what would answer more; if it is the `whole`, everything with its evidence."""
    elements: tuple[Element, ...] = tuple(advice_elements(advised, whole)) if advised.advice else (Text(_NOTHING),)
    parts = [Part("advice", "", elements)]
    if checked:
        parts.append(Part("checks", "predicted and measured", (checks(checked, short_names(advised)),)))
    parts += [Part("cost", _COST, tuple(cost_tables(advised, costs, price)))] if costs else []
    if advised.answers:
        elements = tuple(checklist(advised, shared=True) if whole else _answered(advised))
        parts.append(Part("checklist", "the checklist" if whole else "", elements))
    parts += list_of("notes", "notes", notes)
    return Page(f"advice on run {advised.run}", "", tuple(parts), LEGEND)


def checks(checked: Sequence[Checked], named: Callable[[str], str] = str) -> Table:
    hits = {True: Field("yes", tone=Tone.GOOD), False: Field("no", tone=Tone.BAD), None: Field("-", tone=Tone.DOUBT)}
    cols: list[Col[Checked]] = [
        Col("advice", lambda check: f"{check.advice.kind} {check.advice.mode}"),
        Col("predicted", lambda check: speed(check.advice.gain), number=True, unit="x"),
        Col("measured", lambda check: speed(check.measured), number=True, unit="x"),
        Col("hit", lambda check: hits[check.hit]),
        Col("of", lambda check: named(check.advice.case or check.advice.settings[0])),
        Col("by run", lambda check: check.run or None),
        Col("why", lambda check: check.why, below=True),
    ]
    return table("checks", "", cols, checked)


def score_page(checked: Sequence[Checked], troubles: Sequence[str] = ()) -> Page:
    scored = [check for check in checked if check.hit is not None]
    hits = sum(check.hit is True for check in scored)
    rate = f"{units.percent(hits / len(scored), 0)}: {hits} of {len(scored)}" if scored else "unknown: 0 of 0"
    rows = together(((check.advice.kind, check.advice.rule), check) for check in scored).values()
    cols: list[Col[list[Checked]]] = [
        Col("advice", lambda group: group[0].advice.kind), Col("rule", lambda group: group[0].advice.rule),
        Col("hits", lambda group: str(sum(check.hit is True for check in group)), number=True),
        Col("checks", lambda group: str(len(group)), number=True),
    ]  # fmt: skip
    elements: list[Element] = [Text(f"hit rate {rate} checks lay within what was predicted.", Tone.STRONG)]
    if len(scored) < len(checked):
        elements.append(Text(f"{many(len(checked) - len(scored), 'check')} came to no figure and count as none."))
    elements += [table("score", "", cols, rows), checks(checked)] if rows else []
    return Page("the advisor's score", "", (Part("score", "", (*elements, *map(Text, troubles))),))


def value_of(
    advised: Advised, checked: Sequence[Checked], costs: Sequence[Cost], price: float | None
) -> dict[str, Any]:
    priced = [{**encode(cost), "money": encode(cost.money(price)) if price is not None else None} for cost in costs]
    return {"schema": SCHEMA, **encode(advised), "checked": _hits(checked), "costs": priced}


def score_value(checked: Sequence[Checked]) -> dict[str, Any]:
    hits = [check.hit for check in checked if check.hit is not None]
    return {"schema": SCHEMA, "hits": sum(hits), "checks": len(hits), "checked": _hits(checked)}


def _hits(checked: Sequence[Checked]) -> list[dict[str, Any]]:
    return [{**encode(check), "hit": check.hit} for check in checked]
