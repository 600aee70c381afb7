"""The meters of a run: one a device, opened when it is first asked for, closed together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from fp8bench.model import DeviceFacts
from fp8bench.samplers.meter import Meter
from fp8bench.samplers.opening import meter_for


class Meters:
    """Opening one takes up to 3 s, in which its counter shows how often it changes; without `energy` it takes none."""

    def __init__(self, energy: bool = True, environ: Mapping[str, str] = os.environ) -> None:
        self._energy, self._environ = energy, environ
        self._opened: dict[str, Meter] = {}

    def of(self, facts: DeviceFacts) -> Meter:
        """The meter of a device, the same one every time."""
        if facts.key not in self._opened:
            self._opened[facts.key] = meter_for(facts, self._environ, self._energy)
        return self._opened[facts.key]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for meter in self._opened.values():
            meter.close()
        self._opened.clear()
