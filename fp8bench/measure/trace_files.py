"""Where the traces of a run lie."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fp8bench.model import Case, Run
from fp8bench.paths import name_of

# In the plugin's words the worker; traces of several runs in one folder are its spans.
_WORKER = "fp8bench"
_SUFFIX = ".pt.trace.json.gz"


@dataclass(frozen=True)
class TraceFolder:
    """A folder for each case, as TensorBoard wants it; `stamp` tells the runs in it apart."""

    path: Path
    stamp: int

    def file_of(self, case: Case) -> str:
        """The file of a case, within the folder."""
        return f"{name_of(case)}/{_WORKER}.{self.stamp}{_SUFFIX}"


def trace_folder(run: Run) -> TraceFolder | None:
    """The folder that a run was asked for; a run that is resumed writes the same names."""
    if run.request.trace is None:
        return None
    return TraceFolder(
        Path(run.request.trace).absolute(), round(datetime.fromisoformat(run.started).timestamp() * 1000)
    )
