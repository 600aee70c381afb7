"""A profile: a run of the workload `model`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import Request, Run
from fp8bench.pipeline import execute
from fp8bench.protocols import Observer
from fp8bench.workloads.model import MADE, OPTIMIZERS, UNTOUCHED, Model

ORIGIN = "profile"


def profile_dtypes(dtypes: Sequence[str], reference: str | None) -> dict[str, object]:
    """The model as it came is always there, and what the others are compared with unless another is asked for."""
    return {
        "suite": Model.name,
        "dtypes": tuple(dict.fromkeys((UNTOUCHED, *(dtypes or Model.dtypes[1:])))),
        "reference": reference or UNTOUCHED,
    }


def profile_axes(
    target: str, forward: bool, optimizer: str, compiled: bool, skip: Sequence[str]
) -> list[tuple[str, tuple[str, ...]]]:
    """The values of the workload's axes."""
    if forward and optimizer != OPTIMIZERS[0]:
        raise UsageError("--forward has no optimizer step, so that --optimizer would change nothing. Leave one out.")
    chosen = {
        "make": target, "pass": "forward" if forward else "training", "optimizer": optimizer,
        "compile": "yes" if compiled else "no", "skip": ";".join(skip),
    }  # fmt: skip
    return [(name, (value,)) for name, value in chosen.items() if value]


def profile(request: Request, store: Path, observer: Observer, command: str) -> Run:
    """As a suite is run; what makers gave in this process, where there is no other, is forgotten afterwards."""
    try:
        return execute(request, store, observer, command, origin=ORIGIN)
    finally:
        MADE.clear()
