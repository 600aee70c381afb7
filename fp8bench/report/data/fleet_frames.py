"""A fleet's machines beside each other as pandas frames."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from fp8bench.analysis.fleet.found import Alarm, FleetReport, Machine
from fp8bench.report.data.fleet_report import CASE_COLUMNS, case_rows, named_for

if TYPE_CHECKING:
    import pandas as pd

KIND_COLUMNS = ("kind", "machines", "of", "field", "value")


@dataclass(frozen=True)
class FleetFrames:
    """A report of a fleet and its tables, each made when it is first asked for; docs/outputs.md says what their columns
    hold."""

    report: FleetReport

    @cached_property
    def cases(self) -> pd.DataFrame:
        """A row for each case on each machine, as the CSV has them."""
        import pandas as pd

        return pd.DataFrame(case_rows(self.report), columns=list(CASE_COLUMNS))

    @cached_property
    def machines(self) -> pd.DataFrame:
        """A row a machine, with what it is named for."""
        import pandas as pd

        names, named = [field.name for field in fields(Machine)], named_for(self.report)
        rows = [{name: getattr(one, name) for name in names} for one in self.report.machines]
        frame = pd.DataFrame(rows, columns=names)
        return frame.assign(
            kinds=[", ".join(one.kinds) for one in self.report.machines],
            named_for=[named.get(one.name, "") for one in self.report.machines],
        )

    @cached_property
    def kinds(self) -> pd.DataFrame:
        """A row for each field by which a kind of machines is told from others."""
        import pandas as pd

        rows = [
            (kind.name, ", ".join(kind.machines), of, name, value)
            for kind in self.report.kinds
            for of, pairs in (("hardware", kind.hardware), ("software", kind.software))
            for name, value in pairs
        ]
        return pd.DataFrame(rows, columns=list(KIND_COLUMNS))

    @cached_property
    def alarms(self) -> pd.DataFrame:
        """A row for each thing that a machine is named for."""
        import pandas as pd

        names = [field.name for field in fields(Alarm)]
        return pd.DataFrame([(one.machine, one.what.value, one.words) for one in self.report.alarms], columns=names)
