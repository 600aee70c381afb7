"""What a machine can do at most is measured once for its device and software, and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fp8bench.model import Ceilings, Environment
from fp8bench.store.ceilings import ceilings_of
from tests.facts import CPU, H200

FACTS = {"machine": "box", "torch": "2.13.0", "threads": 2}
FOUND = Ceilings((("fp32", 1e11), ("bf16", 4.5e11)), 1.75e11)


class Measuring:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Ceilings:
        self.times += 1
        return FOUND


def test_it_is_measured_once(tmp_path: Path) -> None:
    measure, environment = Measuring(), Environment(FACTS)
    assert ceilings_of(tmp_path, environment, CPU, None) is None
    for _ in range(3):
        assert ceilings_of(tmp_path, environment, CPU, measure) == FOUND
    assert ceilings_of(tmp_path, environment.also({"threads": 8, "load_1min": 3.0}), CPU, None) == FOUND
    assert measure.times == 1


def test_another_machine_torch_or_device_has_its_own(tmp_path: Path) -> None:
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
        assert ceilings_of(tmp_path, where, device, measure) == FOUND
        assert measure.times == number


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 99}', '{"version": 1, "ceilings": {"flops": 3}}'])
def test_a_broken_file_is_measured_again(content: str, tmp_path: Path) -> None:
    measure, environment = Measuring(), Environment(FACTS)
    ceilings_of(tmp_path, environment, CPU, measure)
    (path,) = (tmp_path / "ceilings").glob("*.json")
    path.write_text(content)
    assert ceilings_of(tmp_path, environment, CPU, None) is None
    assert ceilings_of(tmp_path, environment, CPU, measure) == FOUND and measure.times == 2
    assert ceilings_of(tmp_path, environment, CPU, None) == FOUND
