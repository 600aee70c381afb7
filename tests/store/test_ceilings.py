"""Ceilings are measured once for a device and its software, and kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.model import Ceilings, DeviceFacts, Environment, Limit, Rate
from fp8bench.store.ceilings import ceilings_of, history_of_ceilings, merge_ceilings, new_ceilings
from tests.counts import for_each
from tests.facts import CPU, H200
from tests.older import as_older

FACTS = {"machine": "box", "torch": "2.13.0", "threads": 2}
FOUND = Ceilings((Rate(Limit.PRODUCT, "fp32", (1e11,), 6, (256, 256, 256)), Rate(Limit.CACHED, runs=(1.75e11,))))
WHOLE = Ceilings((Rate(Limit.PRODUCT, "fp32", (1e11, 1.01e11), 6, (256, 256, 256)),))


def kept(
    tmp_path: Path, environment: Environment, measure: Measuring | None = None, device: DeviceFacts = CPU
) -> object:
    ceilings = ceilings_of(tmp_path, environment, device, measure)
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
    assert kept(tmp_path, environment.also({"threads": 8, "load_1min": 3.0})) == FOUND
    assert measure.times == 1


def test_another_machine_torch_or_device_has_ceilings_of_its_own(tmp_path: Path) -> None:
    measure, environment = Measuring(), Environment(FACTS)
    others = [
        (environment.also({"machine": "other"}), CPU),
        (environment.also({"torch": "2.14.0"}), CPU),
        (environment.also({"env_ONEDNN_MAX_CPU_ISA": "AVX2"}), CPU),
        (environment, replace(CPU, name="another processor")),
        (environment, H200),
        (environment, replace(H200, index=1)),
    ]
    for number, (where, device) in enumerate([(environment, CPU), *others], 1):
        assert kept(tmp_path, where, measure, device) == FOUND
        assert measure.times == number


@for_each("content", ["", "{", "[]", '{"version": 99}', '{"version": 2, "ceilings": {"rates": 3}}'])
def test_a_broken_file_is_measured_again(content: str, tmp_path: Path) -> None:
    measure, environment = Measuring(), Environment(FACTS)
    ceilings_of(tmp_path, environment, CPU, measure)
    (path,) = (tmp_path / "ceilings").glob("*.json")
    path.write_text(content)
    assert kept(tmp_path, environment) is None
    assert kept(tmp_path, environment, measure) == FOUND and measure.times == 2
    as_older(path)
    assert kept(tmp_path, environment) == FOUND


def test_whole_ceilings_come_first_while_settings_are_the_same(tmp_path: Path) -> None:
    environment = Environment({**FACTS, "cuda:0 power_cap": 700.0, "cuda:0 driver": "590"})
    assert kept(tmp_path, environment, Measuring(), H200) == FOUND
    new_ceilings(tmp_path, environment, H200, lambda begun, keep: WHOLE)
    known = ceilings_of(tmp_path, environment.also({"load_1min": 3.0}), H200, None)
    assert known is not None and known.whole and known.rates == WHOLE.rates and known.when[:2] == "20"
    assert dict(known.under) == {
        **FACTS, "cuda:0 power_cap": 700.0, "cuda:0 driver": "590", "device": "cuda:0", "name": H200.name,
    }  # fmt: skip
    for name, value in (("threads", 1), ("cuda:0 power_cap", 500.0), ("cuda:0 driver", "600")):
        assert kept(tmp_path, environment.also({name: value}), None, H200) == FOUND
    assert kept(tmp_path, environment.also({"torch": "2.14"}), None, H200) is None
    later = Ceilings((Rate(Limit.COPY, runs=(1.0, 2.0)),))
    new_ceilings(tmp_path, environment, H200, lambda begun, keep: later)
    assert kept(tmp_path, environment, None, H200) == later


def test_an_interrupted_measurement_goes_on_under_the_same_settings(tmp_path: Path) -> None:
    """A kill leaves the same files. Pieces are no ceilings before they are whole, and are deleted then."""
    environment, given = Environment(FACTS), list[object]()

    def interrupted(begun: Ceilings | None, keep: Callable[[Ceilings], None]) -> Ceilings:
        given.append(begun)
        keep(WHOLE)
        raise KeyboardInterrupt

    for where in (environment, environment, environment.also({"threads": 1})):
        with pytest.raises(KeyboardInterrupt):
            new_ceilings(tmp_path, where, CPU, interrupted)
    assert given == [None, WHOLE, None] and kept(tmp_path, environment) is None and not history_of_ceilings(tmp_path)

    def finished(begun: Ceilings | None, keep: Callable[[Ceilings], None]) -> Ceilings:
        given.append(begun)
        return WHOLE

    for _ in range(2):
        new_ceilings(tmp_path, environment, CPU, finished)
    assert given[3:] == [WHOLE, None] and kept(tmp_path, environment) == WHOLE


def test_every_whole_measurement_is_in_the_history_also_behind_a_broken_line(tmp_path: Path) -> None:
    environment = Environment(FACTS)
    history = tmp_path / "ceilings" / "history.jsonl"
    ceilings_of(tmp_path, environment, H200, Measuring())
    for _ in range(2):
        new_ceilings(tmp_path, environment, CPU, lambda begun, keep: WHOLE)
    assert [ceilings.rates for ceilings in history_of_ceilings(tmp_path)] == [WHOLE.rates] * 2
    history.write_bytes(history.read_bytes() + b'{"version": 2, "ceil')
    new_ceilings(tmp_path, environment, H200, lambda begun, keep: WHOLE)
    names = [dict(ceilings.under)["name"] for ceilings in history_of_ceilings(tmp_path)]
    assert names == [CPU.name, CPU.name, H200.name]


def test_ceilings_of_another_store_are_merged_once(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "a", tmp_path / "b"
    here, there = Environment(FACTS), Environment(FACTS | {"machine": "other"})
    new_ceilings(theirs, here, CPU, lambda begun, keep: replace(WHOLE, device="first"))
    new_ceilings(theirs, there, CPU, lambda begun, keep: WHOLE)
    ceilings_of(theirs, Environment(FACTS | {"machine": "third"}), CPU, Measuring())
    new_ceilings(ours, here, CPU, lambda begun, keep: replace(WHOLE, device="second"))
    history = theirs / "ceilings" / "history.jsonl"
    history.write_text(re.sub(r'"when": ?"20..', '"when":"1999', as_older(history).read_text()))
    before = {path: path.read_bytes() for path in (theirs / "ceilings").iterdir()}
    assert merge_ceilings(ours, theirs) == 4 and merge_ceilings(ours, theirs) == 0
    assert [ceilings.when[:4] == "1999" for ceilings in history_of_ceilings(ours)] == [True, True, False]
    assert ceilings_of(ours, here, CPU, None).device == "second"  # type: ignore[union-attr]
    assert ceilings_of(ours, there, CPU, None) is not None
    assert {path: path.read_bytes() for path in (theirs / "ceilings").iterdir()} == before
    assert merge_ceilings(ours, tmp_path / "none") == 0
