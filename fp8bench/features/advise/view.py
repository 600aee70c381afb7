"""Shows the advice on precisions, with the answers to the three questions of `AdviceQuestion`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fp8bench import units
from fp8bench.features.advise.values import (
    Advice,
    AdviceKind,
    AdviceQuestion,
    AdviceResult,
    AdviceRuleOutcome,
    RuleAnswer,
)
from fp8bench.model import Level
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Element, Field, Page, Part, Table, Text, TextList, Tone
from fp8bench.report.panels import together
from fp8bench.report.terminal.layout import make_list_part
from fp8bench.report.words.legend import ROUNDS_RANGE_LEGEND
from fp8bench.report.words.naming import many

_RULE_ANSWER_TONES = {AdviceRuleOutcome.YES: Tone.GOOD, AdviceRuleOutcome.NO: Tone.BAD}
_ADVICE_TONES = {AdviceKind.ADOPT_PRECISION: Tone.GOOD, AdviceKind.CHANGE_NOTHING: Tone.PLAIN}
# At most this many pieces of advice are shown. The JSON has all of them.
_MAX_SENTENCES = 12
# Up to this many equal pieces of advice are shown one by one, more are grouped.
_MAX_UNGROUPED = 3
_MAX_SHOWN_GROUNDS = 2
LEGEND = (
    "adopt: use the precision; route: use it, but keep some layers in high precision",
    ROUNDS_RANGE_LEGEND,
    "emulated cases have no speed",
    "yes favours the precision; not measured here: this machine has no figure, but the command would measure one",
)
_NO_ADVICE_TEXT = (
    "There is nothing to advise on: the run has only a reference. Measure the same suite in more precisions: "
    "--dtypes fp32,bf16,fp8."
)
AnswerRows = Sequence[Sequence[RuleAnswer]]


def render_page(advised: AdviceResult, notes: Sequence[str], everything: bool = False) -> Page:
    """Shows the advice on a run, the answer to each question, and the next commands. With `everything`, shows every
    answer and its evidence.
    """
    parts = [Part("advice", "", (advice_items(advised) if advised.advice else Text(_NO_ADVICE_TEXT),))]
    parts += [Part(table.name, "", (table,)) for table in make_question_tables(advised, everything)]
    if not everything and (next_steps := tuple(_suggest_commands(advised))):
        parts.append(Part("next", "", next_steps))
    parts += make_list_part("notes", "notes", notes)
    return Page(f"advice on run {advised.run}", "", tuple(parts), LEGEND)


def advice_items(advised: AdviceResult) -> TextList:
    shorten_name = make_name_shortener(advised)
    texts = [_describe_group(group, shorten_name) for group in _group_equal_advice(advised.advice)]
    hidden_sentence_count = len(texts) - _MAX_SENTENCES
    if hidden_sentence_count > 0:
        texts[_MAX_SENTENCES:] = [Text(f"{hidden_sentence_count} more pieces of advice are in the JSON.")]
    return TextList(tuple(texts))


def _group_equal_advice(advice: Sequence[Advice]) -> list[list[Advice]]:
    """Groups advice to do nothing for the same reason in many settings. Each other piece of advice is a separate
    group.
    """
    reasons = [
        (piece.kind, piece.mode, piece.rule, piece.sentence.partition("(" if piece.gain is None else " ")[0])
        for piece in advice
    ]
    advice_with_group_keys: list[tuple[object, Advice]] = []
    for number, (piece, reason) in enumerate(zip(advice, reasons, strict=True)):
        # Advice to change something is never grouped, because each change is a separate decision.
        is_common_reason = piece.kind is AdviceKind.CHANGE_NOTHING and reasons.count(reason) > _MAX_UNGROUPED
        advice_with_group_keys.append((reason if is_common_reason else number, piece))
    return list(together(advice_with_group_keys).values())


def _describe_group(group: Sequence[Advice], shorten_name: Callable[[str], str]) -> Text:
    first_advice, *similar = group
    settings_text = shorten_name(first_advice.settings[0])
    if len(first_advice.settings) > 1:
        settings_text = many(len(first_advice.settings), "setting")
    if similar:
        settings_text += f"; similar in {sum(len(piece.settings) for piece in similar)} more settings"
        gains = [piece.gain.point for piece in similar if piece.gain is not None]
        if gains:
            settings_text += f", down to {units.speed_up(min(gains))}"
    tone = Tone.DOUBT if first_advice.doubtful else _ADVICE_TONES.get(first_advice.kind, Tone.STRONG)
    return Text(f"{first_advice.sentence} ({settings_text}).", tone)


def make_name_shortener(advised: AdviceResult) -> Callable[[str], str]:
    """Returns a function that shortens names of settings and cases: it omits parameters that all settings of a suite
    share.
    """
    shared_params_by_suite: dict[str, set[str]] = {}
    for answer in advised.answers:
        suite, _, bracket = answer.setting.partition("[")
        params = {*bracket.rpartition("]")[0].split(",")}
        shared_params_by_suite[suite] = shared_params_by_suite.get(suite, params) & params

    def shorten_name(row: str) -> str:
        suite, _, bracket = row.partition("[")
        params, _, end = bracket.rpartition("]")
        if suite not in shared_params_by_suite or not params:
            return row
        unshared_params_text = ",".join(pair for pair in params.split(",") if pair not in shared_params_by_suite[suite])
        return (f"{suite}[{unshared_params_text}]" if unshared_params_text else suite) + end

    return shorten_name


def make_question_tables(advised: AdviceResult, everything: bool) -> Iterator[Table]:
    """Yields a table for each of the three questions, with the most frequent answer over all settings. With
    `everything`, the tables also show unanswered questions and the evidence.
    """
    answer_columns = _make_answer_columns(advised)
    for number, question in enumerate(AdviceQuestion, 1):
        rows = [row for row in _group_answers_by_rule(advised, question) if everything or _has_measured_answer(row)]
        if rows:
            # The last column is the evidence, which only the long page shows.
            yield table(
                f"question-{number}", question.value, answer_columns if everything else answer_columns[:-1], rows
            )


def _group_answers_by_rule(advised: AdviceResult, question: AdviceQuestion) -> AnswerRows:
    """Groups answers by suite, device, precision and rule. Answers that an emulation cannot give form one group for
    each suite, device and precision.
    """

    def name_row(answer: RuleAnswer) -> tuple[str, ...]:
        # Several rules lack an answer for an emulated case, for the same reason. So one row replaces their rows.
        row = answer.figure if _is_emulated(answer) else answer.rule
        return _format_suite_and_device(answer), answer.mode, row

    return list(together((name_row(answer), answer) for answer in advised.answers if answer.topic is question).values())


def _format_suite_and_device(answer: RuleAnswer) -> str:
    """Converts 'gemm[m=64]@cpu' to 'gemm on cpu'."""
    return f"{answer.setting.partition('[')[0]} on {answer.setting.rpartition('@')[2]}"


def _has_measured_answer(answers: Sequence[RuleAnswer]) -> bool:
    return any(answer.met is not AdviceRuleOutcome.NOT_MEASURED for answer in answers)


def _is_emulated(answer: RuleAnswer) -> bool:
    return answer.met is AdviceRuleOutcome.NOT_MEASURED and answer.figure.startswith(Level.EMULATED)


def _suggest_commands(advised: AdviceResult) -> Iterator[Element]:
    """Yields the number of unanswered questions. Then yields at most one command for each `AdviceQuestion`: the one
    that would answer its first unanswered question.
    """
    missing_answers = []
    for question in AdviceQuestion:
        unknown_answers = [row[0] for row in _group_answers_by_rule(advised, question) if not _has_measured_answer(row)]
        missing_answers += [answer for answer in unknown_answers if not _is_emulated(answer)]
    # One command per topic is enough, because it often answers the topic's other questions as well.
    commands: dict[AdviceQuestion, str] = {}
    for answer in missing_answers:
        if answer.measure:
            commands.setdefault(answer.topic, answer.measure)
    if missing_answers:
        commands_introduction = " These commands answer more of them:" if commands else ""
        yield Text(
            f"{many(len(missing_answers), 'question')} not measured here (--all lists them).{commands_introduction}"
        )
        yield TextList(tuple(map(Text, commands.values())))


def _make_answer_columns(advised: AdviceResult) -> list[Col[Sequence[RuleAnswer]]]:
    """Returns the columns of a table of answers to one question. A row shows the most frequent answer of several cases,
    and the first case with this answer.
    """
    shorten_name = make_name_shortener(advised)
    suites_and_devices = {_format_suite_and_device(answer) for answer in advised.answers}

    def precision(answers: Sequence[RuleAnswer]) -> str:
        answer = answers[0]
        return f"{answer.mode} in {_format_suite_and_device(answer)}" if len(suites_and_devices) > 1 else answer.mode

    def find_most_frequent(answers: Sequence[RuleAnswer]) -> tuple[RuleAnswer, int]:
        # Show the most frequent measured answer, however few there are. Show a missing one only if all are missing.
        measured_outcomes = [answer.met for answer in answers if answer.met is not AdviceRuleOutcome.NOT_MEASURED]
        (outcome, count), *_ = Counter(measured_outcomes or (answer.met for answer in answers)).most_common()
        return next(answer for answer in answers if answer.met is outcome), count

    def show_answer(answers: Sequence[RuleAnswer]) -> Field:
        answer, count = find_most_frequent(answers)
        count_text = f" ({count} of {len(answers)})" if count < len(answers) else ""
        return Field(f"{answer.met.value}{count_text}", tone=_RULE_ANSWER_TONES.get(answer.met, Tone.DOUBT))

    def figure(answers: Sequence[RuleAnswer]) -> str:
        answer, settings = find_most_frequent(answers)[0], {answer.setting for answer in answers}
        omits_setting = len(settings) == 1 or _is_emulated(answer)
        return answer.figure if omits_setting else f"{answer.figure} at {shorten_name(answer.setting)}"

    def evidence(answers: Sequence[RuleAnswer]) -> str | None:
        answer = find_most_frequent(answers)[0]
        ground_texts = [
            f"{advice_ground.figure} in {shorten_name(advice_ground.row)}"
            for advice_ground in answer.grounds[:_MAX_SHOWN_GROUNDS]
        ]
        measure = f"measure it: {answer.measure}" if answer.measure and not _is_emulated(answer) else None
        return "; ".join(ground_texts) or measure

    return [
        Col("precision", precision, shared=True),
        Col("question", lambda answers: " ".join(dict.fromkeys(answer.question for answer in answers))),
        Col("here", show_answer),
        Col("figure", figure, below=True),
        Col("evidence", evidence, below=True),
    ]
