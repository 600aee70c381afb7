"""The markers a workload sees, and markers that mark nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from fp8bench.model import PHASES


class Phases(Protocol):
    """The markers a workload sees: `with phase.gemm: ...`. Nested markers are exclusive."""

    @property
    def data_load(self) -> AbstractContextManager[None]: ...
    @property
    def cast(self) -> AbstractContextManager[None]: ...
    @property
    def gemm(self) -> AbstractContextManager[None]: ...
    @property
    def attention(self) -> AbstractContextManager[None]: ...
    @property
    def accumulate(self) -> AbstractContextManager[None]: ...
    @property
    def optimizer_step(self) -> AbstractContextManager[None]: ...
    @property
    def elementwise(self) -> AbstractContextManager[None]: ...


class SilentMarker:
    """A marker that marks nothing, for untimed passes."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None:
        return None


_SILENT = SilentMarker()


class SilentPhases:
    """Phases that mark nothing."""

    __slots__ = ("accumulate", "attention", "cast", "data_load", "elementwise", "gemm", "optimizer_step")

    data_load: SilentMarker
    cast: SilentMarker
    gemm: SilentMarker
    attention: SilentMarker
    accumulate: SilentMarker
    optimizer_step: SilentMarker
    elementwise: SilentMarker

    def __init__(self) -> None:
        for name in PHASES:
            setattr(self, name, _SILENT)
