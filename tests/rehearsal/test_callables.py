"""A call of a callable on a GPU: its launches are stamped on the device, and a callable that waits is found."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8bench.features.bench.workload  # noqa: F401 - registers the workload
from fp8bench.model import Case
from tests.facts import H200
from tests.rehearsal.stage import Stage


def case_of(target: str) -> Case:
    params = (("shape", "4096x1024,1024x512"), ("dtype", "bf16"), ("against", "torch:matmul"))
    return Case("bench", params, target, H200.key)


def test_a_call_is_one_launch_between_two_stamps(stage: Stage) -> None:
    done = stage.second_step(case_of("torch:matmul"), H200)
    assert done.operators == {"aten::mm": 1} and done.phases == {"unattributed": 1}


def test_a_callable_that_waits_for_the_device_is_found(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "waiting.py"
    file.write_text("def waits(a, b):\n    result = a @ b\n    result.sum().item()\n    return result\n")
    with pytest.raises((AssertionError, RuntimeError), match=r"host|item"):
        stage.second_step(case_of(f"{file}:waits"), H200)
