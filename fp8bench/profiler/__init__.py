"""torch's profiler without a word on stderr."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quiet() -> Iterator[None]:
    """Kineto tells stderr when it starts and stops, unless this says otherwise when a process uses it first."""
    before = os.environ.get(_LEVEL)
    os.environ[_LEVEL] = before or "6"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LEVEL]
