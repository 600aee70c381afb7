"""Ceilings are measured once for a device and its software, and kept."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fp8bench.model import Ceilings, DeviceFacts, Environment, Limit, Rate
from fp8bench.store.ceilings import (
    MAX_CEILINGS_AGE_DAYS,
    find_or_measure_ceilings,
    load_ceilings_history,
    remeasure_ceilings,
)
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.older import as_older

FACTS = {"machine": "box", "torch": "2.13.0", "threads": 2}
FOUND = Ceilings((Rate(Limit.PRODUCT, "fp32", (1e11, 1.02e11), 6, (256, 256, 256)), Rate(Limit.CACHED, runs=(1e11,))))
WHOLE = Ceilings((Rate(Limit.PRODUCT, "fp32", (1e11, 1.01e11), 6, (256, 256, 256)),))


def kept(
    tmp_path: Path, environment: Environment, measure: Measuring | None = None, device: DeviceFacts = CPU
) -> object:
    ceilings = find_or_measure_ceilings(tmp_path, environment, device, measure)
    return None if ceilings is None else replace(ceilings, when="", under=())


class Measuring:
    """Counts its calls."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Ceilings:
        self.times += 1
        return FOUND


def test_ceilings_are_measured_once(tmp_path: Path) -> None:
    measure, environment = Measuring(), Environment(FACTS)
    assert kept(tmp_path, environment) is None
    for _ in range(3):
        assert kept(tmp_path, environment, measure) == FOUND
    assert kept(tmp_path, environment.also({"load_1min": 3.0})) == FOUND
    assert measure.times == 1


@for_each("content", ["", "{", "[]", '{"version": 99}', '{"version": 2, "ceilings": {"rates": 3}}'])
def test_a_broken_file_is_measured_again(content: str, tmp_path: Path) -> None:
    measure, environment = Measuring(), Environment(FACTS)
    find_or_measure_ceilings(tmp_path, environment, CPU, measure)
    (path,) = (tmp_path / "ceilings").glob("*.json")
    path.write_text(content)
    assert kept(tmp_path, environment) is None
    assert kept(tmp_path, environment, measure) == FOUND and measure.times == 2
    as_older(path)
    assert kept(tmp_path, environment) == FOUND


def test_ceilings_are_of_their_settings(tmp_path: Path) -> None:
    environment = Environment({**FACTS, "cuda:0 power_cap": 700.0, "cuda:0 driver": "590"})
    remeasure_ceilings(tmp_path, environment, H200, lambda: WHOLE)
    known = find_or_measure_ceilings(tmp_path, environment.also({"load_1min": 3.0}), H200, None)
    assert known.rates == WHOLE.rates and known.when[:2] == "20"
    assert dict(known.under) == {
        **FACTS,
        "cuda:0 power_cap": 700.0,
        "cuda:0 driver": "590",
        "device": "cuda:0",
        "name": H200.name,
    }
    for name, value in (("machine", "other"), ("threads", 1), ("cuda:0 power_cap", 500.0), ("torch", "2.14")):
        assert kept(tmp_path, environment.also({name: value}), None, H200) is None
    assert kept(tmp_path, environment, None, replace(H200, index=1)) is None
    later = Ceilings((Rate(Limit.COPY, runs=(1.0, 2.0)),))
    remeasure_ceilings(tmp_path, environment, H200, lambda: later)
    assert kept(tmp_path, environment, None, H200) == later


@for_each(("days", "times"), [(MAX_CEILINGS_AGE_DAYS - 1, 0), (MAX_CEILINGS_AGE_DAYS + 1, 1)])
def test_ceilings_are_measured_again_after_a_week(
    days: int, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, environment = Measuring(), Environment({**FACTS, "machine": f"box {days}"})
    remeasure_ceilings(tmp_path, environment, CPU, lambda: WHOLE)

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Later:
            return super().now(tz) + timedelta(days=days)

    monkeypatch.setattr("fp8bench.store.ceilings.datetime", Later)
    assert (kept(tmp_path, environment) is None) == bool(times)
    assert kept(tmp_path, environment, measure) is not None and measure.times == times


def test_every_whole_measurement_is_in_the_history_also_behind_a_broken_line(tmp_path: Path) -> None:
    environment = Environment(FACTS)
    history = tmp_path / "ceilings" / "history.jsonl"
    for _ in range(2):
        remeasure_ceilings(tmp_path, environment, CPU, lambda: WHOLE)
    assert [ceilings.rates for ceilings in load_ceilings_history(tmp_path)] == [WHOLE.rates] * 2
    history.write_bytes(history.read_bytes() + b'{"version": 2, "ceil')
    remeasure_ceilings(tmp_path, environment, H200, lambda: WHOLE)
    names = [dict(ceilings.under)["name"] for ceilings in load_ceilings_history(tmp_path)]
    assert names == [CPU.name, CPU.name, H200.name]
