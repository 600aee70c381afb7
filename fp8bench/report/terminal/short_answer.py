"""Builds the short form of an answer: a question, a line for each precision, the next step, and a table.

Suites, trainings and inference have such answers. `show --all` and the page have all other figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.elements import Element, Field, NameValuePairs, Part, Table, Text, Tone


@dataclass(frozen=True)
class PrecisionAnswer:
    """The answer for one precision.

    `figure` is the number behind the verdict, with its interval. `costs` has one text for each kind of cost, in the
    same order in all answers that are shown together. An unknown cost is ''. `reason` may be ''.
    """

    name: str
    verdict: str
    tone: Tone
    figure: str = ""
    costs: tuple[str, ...] = ()
    reason: str = ""


def as_sentence(answer: PrecisionAnswer) -> Text:
    """Returns the answer as a sentence, as 'fp8: learns worse, loss +3.1%, could be +2.9% to +3.3%; memory +1.4%; its
    loss is 3.14% higher'. The reason, which comes last, is on a new line.
    """
    verdict = ", ".join(filter(None, (answer.verdict, answer.figure)))
    sentence = f"{answer.name}: {'; '.join(filter(None, (verdict, *answer.costs)))}"
    return Text(f"{sentence};\n{answer.reason}" if answer.reason else sentence, answer.tone)


def short_answer(
    title: str,
    question: str,
    answers: Sequence[PrecisionAnswer],
    *,
    warnings: Iterable[Text] = (),
    doubts: Iterable[str] = (),
    is_decided: bool = False,
    action: str = "",
    tables: Iterable[Element] = (),
    closing_facts: Sequence[tuple[str, str]] = (),
) -> Part:
    """Returns the answer to a question as one part of a page.

    `doubts` are reasons for uncertain verdicts. With `is_decided`, they are printed as cautions. `action` is the
    command to run next, with its purpose. `closing_facts` are pairs of a name and a value, which are printed at the
    end.
    """
    elements: list[Element] = [*warnings]
    if answers:
        elements.append(_answer_table(question, answers))
    if reasons := "; ".join(dict.fromkeys(doubts)):
        elements.append(Text(f"{'Caution' if is_decided else 'Why not sure'}: {reasons}", Tone.DOUBT))
    if action:
        elements.append(Text(f"Do this: {action}"))
    elements += tables
    if closing_facts:
        elements.append(NameValuePairs(tuple(closing_facts)))
    return Part("answer", title, tuple(elements), tight=True)


def _answer_table(question: str, answers: Sequence[PrecisionAnswer]) -> Table:
    def cost_column(index: int) -> Col[PrecisionAnswer]:
        return Col("", lambda answer: answer.costs[index] if index < len(answer.costs) else "")

    max_costs_per_answer = max(len(answer.costs) for answer in answers)
    cols: ColumnList[PrecisionAnswer] = [
        Col("", "name"),
        Col("", lambda answer: Field(answer.verdict, tone=answer.tone)),
        Col("", "figure"),
        *map(cost_column, range(max_costs_per_answer)),
        Col("", "reason", below=True),
    ]
    return table("answers", question, cols, answers, required_headings=())
