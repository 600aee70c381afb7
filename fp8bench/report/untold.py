"""Figures of a handful of rounds: with their interval, or a word in their place whose reason stands below the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from fp8bench import units
from fp8bench.analysis.middles import Middle, Untold
from fp8bench.report.elements import Field, Tone
from fp8bench.report.panels import together


def within(
    found: Middle | Untold, show: Callable[[float | None], str], times: float = 1.0, tone: Tone = Tone.PLAIN
) -> Field:
    """'50.0% (45.0% to 55.0%)', or 'wide'."""
    if isinstance(found, Untold):
        return Field(found.word, None, Tone.DOUBT if found.word != units.NONE else Tone.PLAIN, hint=found.why)
    return Field(f"{show(found.value)} ({units.span(found[1:], show)})", found.value * times, tone)


def reasons(what: str, figures: Iterable[tuple[str, Middle | Untold]]) -> Iterator[str]:
    """Why there is no `what` of these cases, and what the words mean that stand in its place: each once."""
    untold = [(why, mode) for mode, why in figures if isinstance(why, Untold)]
    for why, modes in together(untold).items():
        if why.word == units.NONE:
            yield f"No {what} of {', '.join(dict.fromkeys(modes))}: {why.why}."
    words = [f"{why.word}: {why.why}" for why in dict.fromkeys(why for why, _ in untold) if why.word != units.NONE]
    if words:
        yield f"No {what} is told where it says {'; '.join(words)}."
