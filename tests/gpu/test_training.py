"""Arms of a training on a GPU. Skipped with the reason without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.devices.cuda import Cuda
from fp8bench.features.train.values import Arm, SeedTask
from fp8bench.plan.corpus import Corpus
from tests.features.train.lab.labs import lab_of, rows, task_of
from tests.gpu.waits import waits

pytestmark = pytest.mark.gpu

LOW = (("optimizer_states", "fp8lm"), ("master", "fp16-scaled"), ("gradients", "fp8"), ("micro_batches", 2))
ARMS = (Arm("bf16", "bf16"), Arm("fp8", "fp8"), Arm("delayed", "fp8-delayed"), Arm("low", "fp8", settings=LOW))


def task(corpus: Corpus, *arms: Arm, **settings: Any) -> SeedTask:
    asked = {"model": "nano", "batch": 2, "sequence": 64, **settings}
    return replace(task_of(corpus, *arms, **asked), facts=Cuda().available()[0])


def test_arms_learn_and_go_on_from_a_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    """A GPU need not add in the same order twice."""
    asked = task(corpus, *ARMS)
    lab = lab_of(asked)
    first = {arm.name: rows(lab.advance(arm.name, 4)) for arm in ARMS}
    for result in first.values():
        assert result[0].loss == pytest.approx(first["bf16"][0].loss, rel=0.02)
        assert result[-1].loss < result[0].loss and not any(row.skipped for row in result)
    lab.save(str(tmp_path / "kept"))
    wanted = {arm.name: rows(lab.advance(arm.name, 2)) for arm in ARMS}
    other = lab_of(asked)
    other.restore(str(tmp_path / "kept"))
    for name, before in wanted.items():
        losses = [row.loss for row in rows(other.advance(name, 2))]
        assert losses == pytest.approx([row.loss for row in before], rel=1e-3)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_a_step_waits_once(corpus: Corpus, arm: Arm) -> None:
    lab = lab_of(task(corpus, arm))
    lab.advance(arm.name, 2)
    with waits() as result:
        lab.advance(arm.name, 1)
    assert len(result) == 1, result


def test_an_overflow_is_located(corpus: Corpus) -> None:
    lab = lab_of(task(corpus, Arm("fp16", "fp16"), loss_scale="4294967296", on_nan="skip"))
    row, event = lab.advance("fp16", 1)[0], lab.advance("fp16", 1)[-1]
    assert getattr(row, "skipped", False) and getattr(event, "layer", "")
    assert all(bool(parameter.isfinite().all()) for parameter in lab._trainers["fp16"].parameters.values())
