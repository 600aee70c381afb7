"""Uses torch's profiler without its output on stderr. It records the events of a function, and finds out whether the
function calls operators of torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_KINETO_LOG_LEVEL_VARIABLE = "KINETO_LOG_LEVEL"


@contextmanager
def silence_kineto() -> Iterator[None]:
    """Keeps Kineto, the library inside torch's profiler, from writing to stderr. It works only before the first
    profile of a process.
    """
    level = os.environ.get(_KINETO_LOG_LEVEL_VARIABLE)
    # Keep the log level that a user has set.
    os.environ[_KINETO_LOG_LEVEL_VARIABLE] = level or "6"
    try:
        yield
    finally:
        if level is None:
            del os.environ[_KINETO_LOG_LEVEL_VARIABLE]


def record_events(work: Callable[[], None], kind: str) -> list[dict[str, Any]]:
    """Returns the trace events of a function on a device of this kind. If torch cannot profile the device, returns
    those on the host.
    """
    from torch.profiler import profile

    with silence_kineto(), profile(activities=list_activities(kind), acc_events=True) as profiler:
        work()
    return list(export_trace(profiler)["traceEvents"])


def list_activities(kind: str) -> list[Any]:
    """Returns the activities of torch's profiler for the host and for a kind of device."""
    from torch.profiler import ProfilerActivity

    activities = ProfilerActivity.__members__
    return [activities[name] for name in dict.fromkeys(("CPU", kind.upper())) if name in activities]


def export_trace(profile: Any) -> dict[str, Any]:
    """Returns a profile as the dictionary of a Chrome trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        # Names of operators may have invalid bytes. They must not make the whole trace unreadable.
        trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise RuntimeError("torch's profiler wrote a file that is not a trace")
    return trace


def calls_operators(work: Callable[[], None]) -> bool | None:
    """Returns whether a function calls operators of torch. Returns None if torch's profiler records nothing. The
    profiler records on the host only, and is not attached to a GPU.
    """
    from torch.autograd.profiler import profile

    profiler = profile(use_kineto=True)
    with silence_kineto():
        profiler.__enter__()  # type: ignore[no-untyped-call]
    try:
        work()
    finally:
        profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    return None if profiler.kineto_results is None else bool(profiler.kineto_results.experimental_event_tree())
