"""Which operators and kernels a step's time goes to, where traces were recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fp8bench import units
from fp8bench.model import OperatorTime
from fp8bench.report.columns import Col
from fp8bench.report.elements import Element, Field, Text
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.section import PRECISION, Section, sections, table_of_cases
from fp8bench.report.panels import Panel
from fp8bench.report.words.naming import NamedCase, listed, named_cases, phase_order, phase_words

# Of each phase so many, and what takes less of a step only where it is its phase's first.
MOST = 5
LEAST_SHARE = 0.01
REST = "all else"
REST_HINT = "operators that are not listed, and the time that lies in none: Python's, and waiting"


class _Row(NamedTuple):
    case: NamedCase
    operator: OperatorTime
    whole: float


@sections.register("operators")
class Operators(Section):
    """A table for each panel: the operators and kernels that take most of each case, phase by phase."""

    name = "operators"
    title = "Operators and kernels"
    lead = (
        "Own time in one step, without that of what it calls; from traces of a few steps, in a pass that is not "
        "timed. Recording makes steps longer, those of many small operators most: shares say more than times."
    )
    rank = 130

    def elements(self, material: Material) -> Iterator[Element]:
        found = [element for title, panel in titled_panels(material) for element in _panel(title, panel)]
        yield from found
        if found:
            yield Text(_where(material))


def _panel(title: str, panel: Panel) -> Iterator[Element]:
    cases = [case for case in named_cases(panel) if _known(case)]
    on_device = any(one.on_device for case in cases for one in case.result.record.operators)
    of = "the host's time of the traced step" if on_device else "the traced step"
    cols: list[Col[_Row]] = [
        PRECISION,
        Col("phase", lambda row: phase_words(row.operator.phase)),
        Col("operator or kernel" if on_device else "operator", _name),
        Col("calls", lambda row: row.operator.calls, number=True, show=_calls,
            hint="in one step; those that begin in the phase"),
        Col("own time", lambda row: row.operator.seconds, number=True, unit="s", hint="in one step of the trace"),
        Col("share", lambda row: row.operator.seconds / row.whole, number=True, show=units.percent, hint=f"of {of}"),
    ]  # fmt: skip
    name, words = f"operators-{panel.case.workload}", "what takes most of each phase"
    rows = ((case.name, [*_rows(case)]) for case in cases)
    yield from table_of_cases(name, title, words, cols, rows, "They have their traces.")


def _known(case: NamedCase) -> bool:
    """Whether its figures are those of some step."""
    return bool(case.result.record.operators) and 0 < _whole(case.result.record.operators) < math.inf


def _whole(operators: Sequence[OperatorTime]) -> float:
    """Seconds of the traced step: all of the host's time is some row's."""
    return sum(one.seconds for one in operators if not one.on_device)


def _rows(case: NamedCase) -> Iterator[_Row]:
    """The first ones of each phase, on each side; what is below them goes into the rest."""
    operators = case.result.record.operators
    whole = _whole(operators)
    for phase in sorted({one.phase for one in operators}, key=phase_order):
        for on_device in (True, False):
            found = [one for one in operators if (one.phase, one.on_device) == (phase, on_device)]
            named = [one for one in found if one.name]
            shown = [one for place, one in enumerate(named[:MOST]) if not place or one.seconds >= LEAST_SHARE * whole]
            for one in shown:
                yield _Row(case, one, whole)
            others = [one for one in found if one not in shown]
            rest = sum(one.seconds for one in others)
            if rest >= LEAST_SHARE * whole:
                calls = sum(one.calls for one in others)
                yield _Row(case, OperatorTime(phase, "", calls, rest, on_device), whole)


def _name(row: _Row) -> Field:
    rest = f"{REST} on the device" if row.operator.on_device else REST
    return Field(row.operator.name) if row.operator.name else Field(rest, hint=REST_HINT)


def _calls(calls: float) -> str:
    return units.whole(int(calls)) if calls.is_integer() else units.significant(calls)


def _where(material: Material) -> str:
    asked = [entry.run.request.trace for entry in material.entries if any(one.trace for one in entry.run.records)]
    folders = list(dict.fromkeys(folder for folder in asked if folder is not None))
    lie = f"The traces lie in {listed(folders)}, a folder a case. " if folders else ""
    return (
        f"{lie}ui.perfetto.dev and chrome://tracing open them; so does TensorBoard with torch-tb-profiler, whose page "
        "needs internet access in the browser."
    )
