"""Shows advice and the answers to its three questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fp8bench import units
from fp8bench.features.advise.values import Advice, AdviceKind, Advised, Met, Question, RuleAnswer
from fp8bench.model import Level
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.legend import RANGE
from fp8bench.report.words.naming import many

_TONES = {Met.YES: Tone.GOOD, Met.NO: Tone.BAD}
_KINDS = {AdviceKind.ADOPT: Tone.GOOD, AdviceKind.NOTHING: Tone.PLAIN}
# At most this many sentences are shown; JSON has all of them.
_MOST = 12
# Up to this many equal pieces of advice are shown one by one.
_FEW = 3
_MOST_GROUNDS = 2
LEGEND = (
    "adopt, route: take a precision, leave layers high",
    RANGE,
    "emulated cases have no speed",
    "yes speaks for the precision; not measured here: no figure of this machine answers it, and the command would",
)
_NOTHING = "There is nothing to advise on: the run has only a reference."
Rows = Sequence[Sequence[RuleAnswer]]


def page_of(advised: Advised, notes: Sequence[str], everything: bool = False) -> Page:
    """Shows the advice on a run, the answer to each question, and the next command for each; with `everything`, every
    answer and its evidence."""
    parts = [Part("advice", "", (sentences(advised) if advised.advice else Text(_NOTHING),))]
    parts += [Part(table.name, "", (table,)) for table in question_tables(advised, everything)]
    if not everything and (next_steps := tuple(_next(advised))):
        parts.append(Part("next", "", next_steps))
    parts += list_of("notes", "notes", notes)
    return Page(f"advice on run {advised.run}", "", tuple(parts), LEGEND)


def sentences(advised: Advised) -> Items:
    named = short_names(advised)
    texts = [_with_those_alike(group, named) for group in _alike(advised.advice)]
    remaining = [Text(f"{len(texts) - _MOST} more pieces of advice are in the JSON.")] * (len(texts) > _MOST)
    return Items((*texts[:_MOST], *remaining))


def _alike(advice: Sequence[Advice]) -> list[list[Advice]]:
    """Groups advice to do nothing for the same reason in many settings; every other piece is a separate group."""
    reasons = [
        (piece.kind, piece.mode, piece.rule, piece.sentence.partition("(" if piece.gain is None else " ")[0])
        for piece in advice
    ]
    groups: dict[object, list[Advice]] = {}
    for number, (piece, reason) in enumerate(zip(advice, reasons, strict=True)):
        # Advice to change something is never grouped: each is a separate decision.
        is_common = piece.kind is AdviceKind.NOTHING and reasons.count(reason) > _FEW
        groups.setdefault(reason if is_common else number, []).append(piece)
    return list(groups.values())


def _with_those_alike(group: Sequence[Advice], named: Callable[[str], str]) -> Text:
    first, *remaining = group
    place = named(first.settings[0]) if len(first.settings) == 1 else many(len(first.settings), "setting")
    if remaining:
        gains = [piece.gain.point for piece in remaining if piece.gain is not None]
        down = f", down to {units.speed_up(min(gains))}" if gains else ""
        place += f"; the like in {sum(len(piece.settings) for piece in remaining)} more settings{down}"
    return Text(f"{first.sentence} ({place}).", Tone.DOUBT if first.doubtful else _KINDS.get(first.kind, Tone.STRONG))


def short_names(advised: Advised) -> Callable[[str], str]:
    """Returns a function that shortens names of settings and cases by the parameters shared within their suite."""
    inside: dict[str, list[set[str]]] = {}
    for answer in advised.answers:
        suite, _, bracket = answer.setting.partition("[")
        inside.setdefault(suite, []).append(set(bracket.rpartition("]")[0].split(",")))
    # Parameters that all settings of a suite share do not distinguish them.
    shared = {suite: set.intersection(*pairs) for suite, pairs in inside.items()}

    def short(row: str) -> str:
        suite, _, bracket = row.partition("[")
        params, _, end = bracket.rpartition("]")
        if suite not in shared or not params:
            return row
        distinct = ",".join(pair for pair in params.split(",") if pair not in shared[suite])
        return (f"{suite}[{distinct}]" if distinct else suite) + end

    return short


def question_tables(advised: Advised, everything: bool) -> Iterator[Table]:
    """Yields a table for each of the three questions: the answer or, with `everything`, every answer and its evidence.
    For several settings it shows the most frequent answer."""
    cols = _columns(advised)
    for number, question in enumerate(Question, 1):
        rows = [row for row in _rows(advised, question) if everything or _is_answered(row)]
        if rows:
            yield table(f"question-{number}", question.value, cols if everything else cols[:-1], rows)


def _rows(advised: Advised, question: Question) -> Rows:
    """Groups answers by suite, device, precision and rule. Everything that an emulation leaves open is one row."""
    by_row: dict[tuple[str, ...], list[RuleAnswer]] = {}
    for answer in advised.answers:
        if answer.topic is question:
            # An emulation leaves questions open for a single reason, so a single row suffices.
            last = answer.figure if _is_emulated(answer) else answer.rule
            by_row.setdefault((_place(answer), answer.mode, last), []).append(answer)
    return [*by_row.values()]


def _place(answer: RuleAnswer) -> str:
    """Converts 'gemm[m=64]@cpu' to 'gemm on cpu'."""
    return f"{answer.setting.partition('[')[0]} on {answer.setting.rpartition('@')[2]}"


def _is_answered(answers: Sequence[RuleAnswer]) -> bool:
    return any(answer.met is not Met.UNKNOWN for answer in answers)


def _is_emulated(answer: RuleAnswer) -> bool:
    return answer.met is Met.UNKNOWN and answer.figure.startswith(Level.EMULATED)


def _next(advised: Advised) -> Iterator[Element]:
    """Yields the number of missing answers, and for each question the first command that would give one."""
    missing: list[RuleAnswer] = []
    for question in Question:
        unanswered = [row[0] for row in _rows(advised, question) if not _is_answered(row)]
        missing += [answer for answer in unanswered if not _is_emulated(answer)]
    # One command per question: the first often answers the rest.
    commands: dict[Question, str] = {}
    for answer in missing:
        if answer.measure:
            commands.setdefault(answer.topic, answer.measure)
    if missing:
        prompt = " What answers more of them:" if commands else ""
        yield Text(f"{many(len(missing), 'question')} not measured here (--all lists them).{prompt}")
        yield Items(tuple(map(Text, commands.values())))


def _columns(advised: Advised) -> list[Col[Sequence[RuleAnswer]]]:
    """Returns the columns for answers to one question: the most frequent answer, if any, and the first case with it."""
    named, places = short_names(advised), {_place(answer) for answer in advised.answers}

    def precision(answers: Sequence[RuleAnswer]) -> str:
        first = answers[0]
        return f"{first.mode} in {_place(first)}" if len(places) > 1 else first.mode

    def first(answers: Sequence[RuleAnswer]) -> tuple[RuleAnswer, int]:
        # Actual answers take precedence over missing ones, regardless of their number.
        answered = [answer.met for answer in answers if answer.met is not Met.UNKNOWN]
        (met, count), *_ = Counter(answered or (answer.met for answer in answers)).most_common()
        return next(answer for answer in answers if answer.met is met), count

    def here(answers: Sequence[RuleAnswer]) -> Field:
        answer, count = first(answers)
        some = f" ({count} of {len(answers)})" if count < len(answers) else ""
        return Field(f"{answer.met.value}{some}", tone=_TONES.get(answer.met, Tone.DOUBT))

    def figure(answers: Sequence[RuleAnswer]) -> str:
        answer, settings = first(answers)[0], {answer.setting for answer in answers}
        alone = len(settings) == 1 or _is_emulated(answer)
        return answer.figure if alone else f"{answer.figure} at {named(answer.setting)}"

    def evidence(answers: Sequence[RuleAnswer]) -> str | None:
        answer = first(answers)[0]
        grounds = [f"{ground.figure} in {named(ground.row)}" for ground in answer.grounds[:_MOST_GROUNDS]]
        measure = f"measure it: {answer.measure}" if answer.measure and not _is_emulated(answer) else None
        return "; ".join(grounds) or measure

    return [
        Col("precision", precision, shared=True),
        Col("question", lambda answers: " ".join(dict.fromkeys(answer.question for answer in answers))),
        Col("here", here),
        Col("figure", figure, below=True),
        Col("evidence", evidence, below=True),
    ]
