"""What may be asked of a training, and the settings that each arm takes."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from fp8bench.errors import UsageError
from fp8bench.features.train.request import SETTINGS_RULES, TRAINING_RULES, TrainerSettings, TrainingRequest
from fp8bench.features.train.values import Arm, ArmRole
from tests.counts import for_each

REFUSED: dict[str, list[Any]] = {
    "model": ["", 3], "arch": ["rnn"], "batch": [-1, 1.5, True], "sequence": [-1], "micro_batches": [0],
    "rate": [0, -1, float("nan"), 11], "rates": [(("norm", -1.0),), (("", 1.0),), "norm=1"], "warmup": [-0.1, 1.1],
    "floor": [2], "weight_decay": [-1], "clip": [-1, float("inf")], "dropout": [1.0, -0.1],
    "loss_scale": ["0.5", "8589934592", "big", 1024.0, "nan"], "optimizer_states": ["fp8"], "master": ["bf16"],
    "gradients": ["fp16"], "checkpointing": ["yes"], "compile": ["maybe"], "attention": ["low"],
    "on_nan": ["ignore"], "rewinds": [0, 1.5], "shift": [-0.1, 1.1], "start": [3],
    "weights_from": [3], "lora": [-1, 1.5, 2000], "tasks": ["copy"], "metric": ["pkg:f", ("",)], "nudge": ["bit"],
    "scale_growth": [0], "handicap": [0, float("inf")], "precision_map": [(("mlp",),), "mlp=fp8"],
    "parallel": ["pp"], "wire": ["int8"], "amax_group": ["dp"], "make": [3], "skip": ["head"], "norm": ["group"],
    "decay": [2],
    "optimizer": ["rmsprop"], "beta1": [1, -0.5], "beta2": [1.5], "eps": [-1, 2], "updates": ["fp4"],
    "schedule": ["cyclic"], "patience": [-1], "drop": [0, 1], "clip_by": ["layer"], "scale_first": [0, 2.0**33],
    "scale_factor": [1, 2000], "scales": ["last", (("fp8", "up", "input"),)],
}  # fmt: skip
ASKED: dict[str, list[Any]] = {
    "dtypes": [(), "fp8", (8,)], "reference": [8], "steps": [0, 1.5, True], "seeds": [0], "seed": [-1],
    "margin": [0, 1, -0.01, float("nan")], "sweep": [(("history", ()),)], "device": [""], "threads": [0], "data": [""],
    "other_data": [""], "tokens": ["words"], "stride": [0], "evaluate": [0], "keep": [0],
    "imports": ["x"], "isolation": [None], "try_fix": ["yes"], "max_batch": ["yes"],
    "memory_limit": [0], "energy": ["yes"],
    "experiment": [3],
    "until": [0, -1.0, float("nan"), float("inf"), "2"], "bands": ["one-ulp", ("chaos",)], "ranks": [0, 1, 2, True],
    "scales_from": [""],
}  # fmt: skip


@for_each(("name", "value"), [(name, value) for name, values in REFUSED.items() for value in values])
def test_settings_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"^{name} must be .*, got "):
        TrainerSettings(**{name: value})


@for_each(("name", "value"), [(name, value) for name, values in ASKED.items() for value in values])
def test_requests_that_cannot_be_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UsageError):
        TrainingRequest(**{name: value})


def test_every_field_has_a_rule() -> None:
    """One that is added without could be anything; `settings` has rules of its own."""
    assert set(SETTINGS_RULES) == {field.name for field in fields(TrainerSettings)} == set(REFUSED)
    assert (
        set(TRAINING_RULES) | {"settings"} == {field.name for field in fields(TrainingRequest)} == {*ASKED, "settings"}
    )
    for scale in ("auto", "dynamic", "1", "65536", "4294967296"):  # from 2^0 to 2^32
        assert SETTINGS_RULES["loss_scale"].holds(scale)


def test_an_arm_takes_its_own_settings_and_only_candidates_the_map() -> None:
    """The reference stays pure, and its repeat and its other seed are as it is."""
    settings = TrainerSettings(precision_map=(("mlp", "fp8"),), rate=0.01)
    arm = Arm("fp8 rate=0.02", "fp8", settings=(("rate", 0.02),))
    assert arm.taken(settings) == replace(settings, rate=0.02)
    for role in (ArmRole.REFERENCE, ArmRole.REPEAT, ArmRole.OTHER_SEED):
        assert replace(arm, role=role).taken(settings) == replace(settings, rate=0.02, precision_map=())
    with pytest.raises(UsageError, match="rate must be"):
        replace(arm, settings=(("rate", -1.0),)).taken(settings)
