"""torch's profiler, silenced on stderr: events of some work as in a trace, and whether torch is called at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Kineto, torch's profiler, from reporting to stderr; takes effect when a process first uses it."""
    level = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = level or "6"
    try:
        yield
    finally:
        if level is None:
            del os.environ[_LEVEL]


def record_events(work: Callable[[], None], kind: str) -> list[dict[str, Any]]:
    """Returns the events of some work on a device of that kind, or on the host if torch cannot profile the device."""
    from torch.profiler import profile

    with quiet(), profile(activities=activities_of(kind), acc_events=True) as profiler:
        work()
    return list(export_trace(profiler)["traceEvents"])


def activities_of(kind: str) -> list[Any]:
    from torch.profiler import ProfilerActivity

    activities = ProfilerActivity.__members__
    return [activities[name] for name in dict.fromkeys(("CPU", kind.upper())) if name in activities]


def export_trace(profile: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        # Names of operators are foreign text: a wrong byte must not cost the trace.
        read = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    if not isinstance(read, dict) or not isinstance(read.get("traceEvents"), list):
        raise RuntimeError("torch's profiler wrote a file that is not a trace")
    return read


def calls_operators(work: Callable[[], None]) -> bool | None:
    """Tells whether some work calls operators of torch; None if its profiler records nothing. It records on the host:
    nothing is attached to a GPU."""
    from torch.autograd.profiler import profile

    profiler = profile(use_kineto=True)
    with quiet():
        profiler.__enter__()  # type: ignore[no-untyped-call]
    try:
        work()
    finally:
        profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return None if profiler.kineto_results is None else bool(profiler.kineto_results.experimental_event_tree())
