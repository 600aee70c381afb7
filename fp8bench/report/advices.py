"""Advice and its checklist as tables, wherever they are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fp8bench import units
from fp8bench.model import Interval, Level
from fp8bench.model.advice import Advice, AdviceKind, Advised, Answer, Cost, Met
from fp8bench.report.elements import Column, Element, Field, Items, Table, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.run_facts import many

_TONES = {Met.YES: Tone.GOOD, Met.NO: Tone.BAD, Met.UNCLEAR: Tone.DOUBT, Met.UNKNOWN: Tone.DOUBT}
_KINDS = {AdviceKind.ADOPT: Tone.GOOD, AdviceKind.NOTHING: Tone.PLAIN}
# More sentences are not read; JSON has all of them.
_MOST = 12
_MOST_GROUNDS = 2
LEGEND = (
    "adopt, route, schedule: take a precision, leave layers high, leave steps or kinds of steps high",
    "predicted: the speed-up that the same step will show once more, never above what Amdahl's law leaves",
    "emulated cases have no speed, and nothing is predicted of them",
    "yes speaks for the precision; not measured here: no figure of this machine answers it, and the command would",
)


def advice_elements(advised: Advised) -> Iterator[Element]:
    """The sentences, then what is predicted and by which rows."""
    named = short_names(advised)
    shown = advised.advice[:_MOST]
    yield Items(tuple(Text(_sentence(one, named), _tone(one)) for one in shown))
    if len(advised.advice) > len(shown):
        yield Text(f"{len(advised.advice) - len(shown)} more pieces of advice are in the JSON.")
    gains = [one for one in advised.advice if one.gain is not None][:_MOST]
    if gains:
        columns = (
            Column("advice"), Column("predicted", number=True, unit="x"), Column("rule"),
            Column("of", hint="the case that it predicts, where its evidence is"),
        )  # fmt: skip
        rows = tuple(
            (Field(f"{one.kind} {one.mode}"), speed(one.gain), Field(one.rule), Field(named(one.case))) for one in gains
        )
        yield Table("predicted", "what is predicted", columns, rows)


def _tone(one: Advice) -> Tone:
    return Tone.DOUBT if one.doubtful else _KINDS.get(one.kind, Tone.STRONG)


def short_names(advised: Advised) -> Callable[[str], str]:
    """Settings and cases without the parameters that all of their suite have in common."""
    inside: dict[str, list[set[str]]] = {}
    for one in advised.answers:
        suite, _, rest = one.setting.partition("[")
        inside.setdefault(suite, []).append(set(rest.rpartition("]")[0].split(",")))
    shared = {suite: set.intersection(*found) for suite, found in inside.items()}

    def short(row: str) -> str:
        suite, _, rest = row.partition("[")
        params, _, end = rest.rpartition("]")
        if suite not in shared or not params:
            return row
        own = ",".join(pair for pair in params.split(",") if pair not in shared[suite])
        return (f"{suite}[{own}]" if own else suite) + end

    return short


def _sentence(one: Advice, named: Callable[[str], str]) -> str:
    """The advice, with where it holds."""
    where = named(one.settings[0]) if len(one.settings) == 1 else many(len(one.settings), "setting")
    return f"{one.sentence} ({where})."


def speed(found: Interval | None) -> Field:
    """'1.62x [1.60, 1.64]'."""
    if found is None:
        return Field(units.NONE)
    ends = f"[{units.significant(found.low)}, {units.significant(found.high)}]"
    return Field(f"{units.speed_up(found.point)} {ends}", found.point)


def cost_tables(advised: Advised, costs: Sequence[Cost], price: float | None) -> Iterator[Element]:
    """A table a model: what each precision takes beside its reference, a step and to the same loss."""
    named = short_names(advised)
    by_setting = together((one.setting, one) for one in costs)
    for number, (setting, found) in enumerate(by_setting.items(), 1):
        first = found[0]
        columns = (
            Column("precision"), Column("speed-up", number=True, unit="x"), Column("loss", number=True),
            Column("joules a step", number=True, unit="x"), Column("time", number=True, unit="x"),
            Column("energy", number=True, unit="x"), Column("money", number=True), Column("why", below=True),
        )  # fmt: skip
        rows = tuple(_cost(one, price) for one in found)
        yield Table(f"cost-{number}", f"{named(setting)}, over {first.reference}", columns, rows)
        if first.hours is not None:
            used = f", {units.joules(first.energy_used)}" if first.energy_used is not None else ""
            money = f", {units.significant(first.hours * price)} at {price:g} an hour" if price is not None else ""
            took = units.seconds(3600 * first.hours)
            yield Text(f"{first.reference} itself: {units.whole(first.steps)} such steps take {took}{used}{money}.")
    if any(one.model for one in costs):
        models = ", ".join(dict.fromkeys(one.model for one in costs if one.model))
        yield Text(f"Losses are those of {models}: what another model loses is not known.", Tone.DOUBT)


def _cost(one: Cost, price: float | None) -> tuple[Field, ...]:
    money = one.money(price) if price is not None else None
    return (
        Field(one.mode), speed(one.speed), Field(_gap(one)), *map(_ratio, (one.joules, one.time, one.energy)),
        Field(units.NONE) if money is None else Field(
            f"{units.significant(money.point)} [{units.significant(money.low)}, {units.significant(money.high)}]",
            money.point,
        ),
        Field(one.why),
    )  # fmt: skip


def _gap(one: Cost) -> str:
    """'+0.8% [+0.2%, +1.4%] worse'."""
    if one.gap is None:
        return one.learned or units.NONE
    low, point, high = (units.change(1 + value) for value in (one.gap.low, one.gap.point, one.gap.high))
    return f"{point} [{low}, {high}] {one.learned}"


def _ratio(found: Interval | None) -> Field:
    if found is None:
        return Field(units.NONE)
    ends = f"[{units.significant(found.low)}, {units.significant(found.high)}]"
    return Field(f"{units.ratio(found.point)} {ends}", found.point)


def checklist(advised: Advised, shared: bool) -> Iterator[Table]:
    """For each suite and device a table: a row a precision and question. Of several settings those that most agree.

    What an emulation leaves open is one row.
    """
    named = short_names(advised)
    by_place = together((_place(one.setting), one) for one in advised.answers)
    for number, (place, answers) in enumerate(by_place.items(), 1):
        columns = (
            Column("precision", shared=shared), Column("question"), Column("here"),
            Column("figure", below=shared), Column("evidence", below=shared),
        )  # fmt: skip
        by_row = together(((one.mode, one.figure if _open(one) else one.rule), one) for one in answers)
        rows = tuple(_row(found, named) for found in by_row.values())
        yield Table(f"checklist-{number}", f"{place}: when to use a lower precision", columns, rows)


def _open(one: Answer) -> bool:
    return one.met is Met.UNKNOWN and one.figure.startswith(Level.EMULATED)


def _place(setting: str) -> str:
    """'gemm on cpu' of 'gemm[m=64]@cpu'."""
    return f"{setting.partition('[')[0]} on {setting.rpartition('@')[2]}"


def _row(answers: Sequence[Answer], named: Callable[[str], str]) -> tuple[Field, ...]:
    (met, count), *_ = Counter(one.met for one in answers).most_common()
    first = next(one for one in answers if one.met is met)
    words = met.value + (f" ({count} of {len(answers)})" if count < len(answers) else "")
    grounds = [f"{one.figure} in {named(one.row)}" for one in first.grounds[:_MOST_GROUNDS]]
    questions = dict.fromkeys(one.question for one in answers)
    settings = dict.fromkeys(one.setting for one in answers)
    told = first.figure if len(settings) == 1 or _open(first) else f"{first.figure} at {named(first.setting)}"
    measure = f"measure it: {first.measure}" if first.measure and not _open(first) else units.NONE
    return (
        Field(first.mode), Field(" ".join(questions)), Field(words, tone=_TONES[met]), Field(told),
        Field("; ".join(grounds) or measure),
    )  # fmt: skip
