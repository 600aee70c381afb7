"""A run as pandas frames: what its samples say, the samples, energy windows, its data, and from where on it pays."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fp8bench.analysis.findings import findings
from fp8bench.analysis.shares import parts_of
from fp8bench.model import Record, Run, Timing
from fp8bench.model.specs import STEP
from fp8bench.report.data.break_even import BreakEvenRow, break_even_rows
from fp8bench.report.data.run import as_csv
from fp8bench.report.data.shares import ShareRow, share_rows
from fp8bench.report.panels import show_params

if TYPE_CHECKING:
    import pandas as pd

SAMPLE_COLUMNS = ("case", "mode", "arm", "round", "call", "block", "phase", "nanoseconds")
# The case, the reference's second entry, and the reference itself where the case sat with it apart.
_ARMS = ("case", "control", "reference")
# Words that stand in every row: categories take a byte or two a row, and text fifty.
_REPEATED = ("case", "mode", "arm", "phase")
STATISTICS_COLUMNS = ("case", "kind", "role", "values", "amax", "format", "share_above", "share_vanishing")
ENERGY_COLUMNS = (
    "case", "mode", "source", "window", "steps", "seconds", "joules", "intervals", "uncertainty", "sm_clock",
    "temperature", "idle_before", "idle_after", "phase",
)  # fmt: skip


@dataclass(frozen=True)
class RunFrames:
    """A run and its tables, each made when it is first asked for; docs/outputs.md says what their columns hold."""

    run: Run

    @cached_property
    def results(self) -> pd.DataFrame:
        """The tidy rows: just what reading the run's CSV gives."""
        import pandas as pd

        return pd.read_csv(io.StringIO(as_csv(self.run, findings(self.run))), low_memory=False)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """Every raw sample: a row for each cell of each call."""
        import pandas as pd

        parts = [
            _samples(record, arm, timing)
            for record in self.run.records
            for arm, timing in zip(_ARMS, (record.timing, record.control, record.paired_with), strict=True)
            if timing is not None and timing.slots
        ]
        frame = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(SAMPLE_COLUMNS))
        return frame.astype(dict.fromkeys(_REPEATED, "category"))

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """What the data of each group are made of before any scaling: a row for each kind, role and format."""
        import pandas as pd

        rows = [
            (record.case.id, one.kind, one.role, one.count, one.amax, *outside)
            for record in self.run.records
            for one in record.statistics
            for outside in one.outside or ((None, None, None),)
        ]
        return pd.DataFrame(rows, columns=list(STATISTICS_COLUMNS))

    @cached_property
    def break_even(self) -> pd.DataFrame:
        """From which size on each precision pays: a row for each crossing of a sweep."""
        import pandas as pd

        rows = [(*row[:3], show_params(row.held), *row[4:]) for row in break_even_rows(self.run, findings(self.run))]
        return pd.DataFrame(rows, columns=list(BreakEvenRow._fields))

    @cached_property
    def energy(self) -> pd.DataFrame:
        """Every energy window, of steps and of phases, with the idle power before and after the windows of its case."""
        import pandas as pd

        rows = [
            (
                record.case.id, record.case.mode, use.source, number, one.steps, one.seconds, one.joules, one.intervals,
                one.uncertainty, one.sm_clock, one.temperature, use.idle_before, use.idle_after, phase,
            )
            for record in self.run.records
            if (use := record.energy) is not None
            for phase, windows in ((STEP, use.windows), *((part.phase, part.windows) for part in use.phases))
            for number, one in enumerate(windows)
        ]  # fmt: skip
        return pd.DataFrame(rows, columns=list(ENERGY_COLUMNS))

    @cached_property
    def shares(self) -> pd.DataFrame:
        """What each kind of work and each module takes of a step: a row a part, where that was asked for."""
        import pandas as pd

        rows = share_rows(parts_of(self.run, findings(self.run)))
        return pd.DataFrame(rows, columns=list(ShareRow._fields))


def _samples(record: Record, arm: str, timing: Timing) -> pd.DataFrame:
    import numpy as np
    import pandas as pd

    calls = np.array([call for slot in timing.slots for call in slot.calls_ns], dtype=np.int64)
    num_calls, num_cells = calls.shape
    rounds = [slot.round for slot in timing.slots for _ in slot.calls_ns]
    places = [place for slot in timing.slots for place in range(len(slot.calls_ns))]
    columns = (
        record.case.id, record.case.mode, arm, np.repeat(rounds, num_cells), np.repeat(places, num_cells),
        np.tile(timing.segments.blocks, num_calls),
        np.tile(np.array(timing.segments.phases, dtype=object), num_calls), calls.reshape(-1),
    )  # fmt: skip
    return pd.DataFrame(dict(zip(SAMPLE_COLUMNS, columns, strict=True)))
