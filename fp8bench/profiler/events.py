"""What torch's profiler saw of some work, as events of a trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp8bench.profiler import quiet


def recorded(work: Callable[[], None], kind: str) -> list[dict[str, Any]]:
    """The events of some work on a device of that kind, of which torch has a profiler, or else of the host."""
    from torch.profiler import profile

    with quiet(), profile(activities=activities_of(kind), acc_events=True) as one:
        work()
    return list(exported(one)["traceEvents"])


def activities_of(kind: str) -> list[Any]:
    """What is recorded for a device of that kind; one that torch's profiler does not know is seen from the host."""
    from torch.profiler import ProfilerActivity

    known = ProfilerActivity.__members__
    return [known[name] for name in dict.fromkeys(("CPU", kind.upper())) if name in known]


def exported(profile: Any) -> dict[str, Any]:
    """The trace that a profiler has recorded, read back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        # Names of operators are foreign text: a letter that is none shall not cost the trace.
        read = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    if not isinstance(read, dict) or not isinstance(read.get("traceEvents"), list):
        raise RuntimeError("torch's profiler wrote something that is no trace")
    return read
