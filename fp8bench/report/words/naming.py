"""What a report calls its suites and cases, so that every section calls them the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Case
from fp8bench.report.elements import Tone
from fp8bench.report.material import Entry, Material
from fp8bench.report.panels import Panel, Result, ResultGroup, show_params


@dataclass(frozen=True)
class NamedCase:
    """A result with its name within its panel; `place` is what tells its group from the others."""

    name: str
    place: str
    group: ResultGroup
    result: Result


def titled_panels(material: Material) -> Iterator[tuple[str, Panel]]:
    """Every panel under a short title: the suite, and device, run and reference where those tell it from others."""
    panels = list(material.panels())
    suites = [_title(material, entry, panel) for entry, panel in panels]
    counts = Counter(suites)
    for (_, panel), title in zip(panels, suites, strict=True):
        against = f" against {panel.reference}" if counts[title] > 1 and panel.reference else ""
        yield title + against, panel


def _title(material: Material, entry: Entry, panel: Panel) -> str:
    words = panel.case.workload
    if len({one.case.device for one in entry.panels}) > 1:
        words += f" on {panel.case.device}"
    return words if material.alone or not entry.label else f"{words}, {entry.label}"


def named_cases(panel: Panel) -> Iterator[NamedCase]:
    """All cases of a panel: 'm=256 n=256 bf16'; the precision alone where there is one group."""
    for group in panel.groups:
        place = panel.place(group)
        for result in group.results:
            yield NamedCase(f"{place} {result.mode}".strip(), place, group, result)


def setting_of(panel: Panel, group: ResultGroup) -> str:
    """'m=256 n=256 k=256', what tells a group from its neighbours; of a group that is alone its sizes."""
    return panel.place(group) or sizes(group.case)


def sizes(case: Case) -> str:
    """The parameters that are numbers: 'batch=2 sequence=96'. The others are choices, most of them defaults."""
    return show_params(
        pair for pair in case.params if isinstance(pair[1], int | float) and not isinstance(pair[1], bool)
    )


def listed(words: Sequence[str], most: int = 5) -> str:
    """'a, b and c'; 'a, b and 7 more' where there are too many to read."""
    shown = list(words) if len(words) <= most else [*words[: most - 1], f"{len(words) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def phase_words(phase: str) -> str:
    """A phase as words: 'optimizer_step' -> 'optimizer step'."""
    return phase.replace("_", " ")


def phase_order(phase: str) -> tuple[float, str]:
    """Phases of the house in their order, unattributed time last, and what is neither before it."""
    last = CELL_PHASES.index(UNATTRIBUTED)
    return float(CELL_PHASES.index(phase)) if phase in CELL_PHASES else last - 0.5, phase


def common_tone(tones: Iterable[Tone]) -> Tone:
    """That of all, or none."""
    found = set(tones)
    return found.pop() if len(found) == 1 else Tone.PLAIN
