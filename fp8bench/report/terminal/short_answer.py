"""The short form of every answer: a question, a line for each precision, the next step, and a table.

Suites, trainings and inference fill it in; what it leaves out is in `show --all` and on the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.elements import Element, Facts, Field, Part, Table, Text, Tone


@dataclass(frozen=True)
class Answer:
    """The answer for one precision.

    `figure` is the basis of the verdict, with its interval. `costs` have the same order in all answers to a question,
    with '' for unknown ones. `reason` may be ''.
    """

    name: str
    verdict: str
    tone: Tone
    figure: str = ""
    costs: tuple[str, ...] = ()
    reason: str = ""


def as_sentence(answer: Answer) -> Text:
    """'fp8: learns worse, loss +3.1%, could be +2.9% to +3.3%; memory +1.4%; its loss is 3.14% higher'."""
    verdict = ", ".join(filter(None, (answer.verdict, answer.figure)))
    return Text(f"{answer.name}: {'; '.join(filter(None, (verdict, *answer.costs, answer.reason)))}", answer.tone)


def short_answer(
    title: str,
    question: str,
    answers: Sequence[Answer],
    *,
    warnings: Iterable[Text] = (),
    doubts: Iterable[str] = (),
    action: str = "",
    tables: Iterable[Element] = (),
    more: Sequence[tuple[str, str]] = (),
) -> Part:
    """Returns the answer as a part of a page.

    `doubts` are reasons for uncertainty, `action` is a command and its purpose, `more` are names and values at the end.
    """
    elements: list[Element] = [*warnings, *([_answer_table(question, answers)] if answers else [])]
    elements += (
        [Text(f"Why not sure: {'; '.join(words)}", Tone.DOUBT)] if (words := list(dict.fromkeys(doubts))) else []
    )
    elements += [Text(f"Do this: {action}")] if action else []
    elements += [*tables, *([Facts(tuple(more))] if more else [])]
    return Part("answer", title, tuple(elements), tight=True)


def _answer_table(question: str, answers: Sequence[Answer]) -> Table:
    def cost(place: int) -> Col[Answer]:
        return Col("", lambda answer: answer.costs[place] if place < len(answer.costs) else "")

    most = max(len(answer.costs) for answer in answers)
    cols: Cols[Answer] = [
        Col("", lambda answer: answer.name),
        Col("", lambda answer: Field(answer.verdict, tone=answer.tone)),
        Col("", lambda answer: answer.figure),
        *map(cost, range(most)),
        Col("", lambda answer: answer.reason, below=True),
    ]
    return table("answers", question, cols, answers, required=())
