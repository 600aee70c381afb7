"""Where the time of each step goes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.verdicts import BELOW_FLOOR_MARKERS
from fp8bench.model import UNATTRIBUTED, Label
from fp8bench.report.blocks import Panel
from fp8bench.report.elements import Axis, Element, Part, Stacks, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.naming import NamedCase, listed, named_cases, phase_order, phase_words, titled_panels
from fp8bench.report.section import Section, sections
from fp8bench.report.standing import emulated
from fp8bench.report.tables import phases_of

# Where the longest step is so many times the shortest, bars of seconds would hide the phases of the short ones.
_WIDE = 8.0
_DESCRIBED = 4

COMPILED = (
    "With compile=yes the forward and the backward pass are one graph each, in which casts and products are fused: no "
    "split of their time would be true, so that it stands as unattributed."
)


@sections.register("phases")
class Phases(Section):
    """A bar for each measured case, cut into its phases; emulations in charts of their own."""

    name = "phases"
    summary = "the best case of every step, phase by phase"
    rank = 60

    def build(self, material: Material) -> Part | None:
        elements = [element for title, panel in titled_panels(material) for element in _panel(title, panel)]
        if not elements:
            return None
        return Part(
            self.name,
            "Where the time goes",
            tuple(elements),
            "Each bar is the best case of one step, cut into its phases. Unattributed is what lies under none of them.",
        )


def _panel(title: str, panel: Panel) -> Iterator[Element]:
    cases = [case for case in named_cases(panel) if _measured(case)]
    native = [case for case in cases if not emulated(case.result)]
    cost = [case for case in cases if emulated(case.result)]
    if native:
        yield _chart("phases", f"{title}: a step by phase", native)
    if cost:
        yield _chart("emulation", f"{title}: what emulating costs, by phase (no speed)", cost)
    yield from _notes(title, cases)


def _measured(case: NamedCase) -> bool:
    best = case.result.best
    return best is not None and math.isfinite(best) and best > 0 and bool(case.result.finding)


def _chart(kind: str, title: str, cases: Sequence[NamedCase]) -> Stacks:
    best = [case.result.best or 0.0 for case in cases]
    wide = max(best) > _WIDE * min(best)
    found = [dict(phases_of(case.result)) for case in cases]
    present = {name for phases in found for name, seconds in phases.items() if seconds > 0}
    parts = sorted(present | {UNATTRIBUTED}, key=phase_order)
    rows = tuple(
        (_label(case, whole if wide else None), tuple(_part(phases.get(part, 0.0), whole, wide) for part in parts))
        for case, whole, phases in zip(cases, best, found, strict=True)
    )
    axis = Axis("share of the step", "%") if wide else Axis("best case of a step", "s")
    name = f"{kind}-{cases[0].result.record.case.workload}"
    return Stacks(name, title, _description(cases), axis, tuple(map(phase_words, parts)), rows)


def _part(seconds: float, whole: float, as_share: bool) -> float:
    seconds = max(0.0, seconds) if math.isfinite(seconds) else 0.0
    return 100 * seconds / whole if as_share else seconds


def _label(case: NamedCase, whole: float | None) -> str:
    """The case, how long its step takes where the axis does not say it, and why it is in doubt."""
    finding = case.result.finding
    labels = [label for label in (finding.labels if finding else ()) if label is not Label.LAUNCH_BOUND]
    words = case.name if whole is None else f"{case.name}, {units.seconds(whole)}"
    return f"{words} ({', '.join(labels)})" if labels else words


def _description(cases: Sequence[NamedCase]) -> str:
    """What takes most in each of the first cases."""
    said = []
    for case in cases[:_DESCRIBED]:
        phase, seconds = max(phases_of(case.result), key=lambda pair: pair[1], default=(UNATTRIBUTED, 0.0))
        share = units.percent(seconds / (case.result.best or 1.0), 0)
        said.append(f"In {case.name} {phase_words(phase)} takes most, {share} of {units.seconds(case.result.best)}.")
    return " ".join(said)


def _notes(title: str, cases: Sequence[NamedCase]) -> Iterator[Text]:
    """Phases too short to be known, and why compiled steps have so few."""
    below: dict[str, list[str]] = {}
    for case in cases:
        for phase in case.result.finding.below_floor if case.result.finding else ():
            below.setdefault(phase, []).append(case.name)
    if below:
        shown = "; ".join(f"{phase_words(phase)} {_in(names, len(cases))}" for phase, names in below.items())
        yield Text(
            f"{title}: too short to be told from the cost of marking it (below {BELOW_FLOOR_MARKERS} times): {shown}.",
            Tone.DOUBT,
        )
    if any(("compile", "yes") in case.result.record.case.params for case in cases):
        yield Text(COMPILED)


def _in(names: Sequence[str], num_cases: int) -> str:
    if len(names) == num_cases:
        return "in all of them" if num_cases > 1 else f"in {names[0]}"
    return f"in {listed(names)}"
