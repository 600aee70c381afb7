"""From which size on each precision pays, for other programs: a row for each crossing of a sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fp8bench.model import Finding, Params, Run
from fp8bench.report.break_evens import pays, remarks, swept
from fp8bench.report.panels import panels_of


class BreakEvenRow(NamedTuple):
    """A size between `low` and `high` at which a precision begins to pay (`begins`) or ends to.

    Where there is none, `pays` says all there is ('at every size', 'nowhere'), '' where too few sizes have a ratio. The
    sizes are values of `axis`, from `smallest` to `largest`; `held` is what all cases of the sweep have in common.
    """

    suite: str
    device: str
    axis: str
    held: Params
    mode: str
    against: str
    pays: str
    size: float | None
    low: float | None
    high: float | None
    begins: bool | None
    confidence: float | None
    smallest: int
    largest: int
    remarks: str


def break_even_rows(run: Run, findings: Mapping[str, Finding]) -> Iterator[BreakEvenRow]:
    """Of every sweep of a run, in the order of its panels."""
    for panel in panels_of(run, findings):
        for sweep, modes in swept(panel):
            sizes = [size for size, _ in sweep.places]
            for one in modes:
                about = (panel.case.workload, panel.case.device, sweep.axis, sweep.held, one.mode, one.against)
                found = one.found
                words = pays(sweep.axis, found) if found else ""
                level = found.level or None if found else None
                for crossing in (found.crossings if found else ()) or (None,):
                    size, low, high, begins = crossing or (None, None, None, None)
                    yield BreakEvenRow(
                        *about, words, size, low, high, begins, level, sizes[0], sizes[-1], "; ".join(remarks(one))
                    )
