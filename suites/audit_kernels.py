"""A kernel of the audit's catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fp8bench.model.promises import Signature


@dataclass(frozen=True)
class Kernel:
    """`made` gives a fresh one, which remembers nothing of others. `thread` of a lie. `baseline` is what it is compared
    with."""

    name: str
    signature: Signature
    made: Callable[[], Callable[..., Any]]
    thread: str = ""
    baseline: Callable[..., Any] | None = None
