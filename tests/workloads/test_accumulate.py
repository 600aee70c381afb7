"""Accumulation: buffers of each precision, their phases, their errors."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8bench.model import Scalar
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.workloads.accumulate import Accumulate, ScaledBuffer
from tests.workloads.steps import Operations, phases, small


def setup_for(precision: str = "fp32", seed: int = 0, **changes: Scalar) -> Setup:
    return small("accumulate", precision, seed, **changes)


def test_buffers_with_a_scale_are_restored_and_cast_for_every_micro_batch() -> None:
    for precision in ("fp8", "mxfp8", "nvfp4"):
        assert phases(Accumulate(), setup_for(precision), steps=2) == ["cast"] + ["cast", "accumulate", "cast"] * 2


def test_plain_buffers_take_the_first_micro_batch_as_it_comes() -> None:
    """A copy writes the buffer once; zeroing and adding would read and write it again."""
    setup = setup_for()
    state = Accumulate().prepare(setup)
    with Operations() as ran:
        Accumulate().step(state, SilentPhases())
    assert ran.names == ["_foreach_copy_", "_foreach_add_", "_foreach_add_"]


def test_bf16_sums_are_those_of_ml_dtypes() -> None:
    """Each micro-batch is added exactly and rounded once, bit by bit."""
    state = Accumulate().prepare(setup_for("bf16"))
    Accumulate().step(state, SilentPhases())
    for index, found in enumerate(state.buffer.values()):
        total = np.zeros((48, 48), dtype=ml_dtypes.bfloat16)
        for gradients in state.micro_batches:
            total = (total.astype(np.float32) + gradients[index].numpy()).astype(ml_dtypes.bfloat16)
        assert np.array_equal(found.view(torch.uint16).numpy(), total.view(np.uint16))


def test_fp8_sums_are_those_of_ml_dtypes() -> None:
    """Each sum is rounded to E5M2 with a scale that maps its largest magnitude to the format's."""
    state = Accumulate().prepare(setup_for("fp8"))
    assert isinstance(state.buffer, ScaledBuffer)
    Accumulate().step(state, SilentPhases())
    for index, found in enumerate(state.buffer.values()):
        total = np.zeros((48, 48), dtype=np.float32)
        for gradients in state.micro_batches:
            total = total + gradients[index].numpy()
            scale = np.float32(57344) / np.abs(total).max()
            codes = np.clip(total * scale, -57344, 57344).astype(ml_dtypes.float8_e5m2)
            total = codes.astype(np.float32) * (np.float32(1) / scale)
        assert np.array_equal(found.numpy(), total)


def test_the_error_is_that_of_numpy_in_fp64() -> None:
    for precision in ("bf16", "fp16"):
        setup = setup_for(precision, seed=5)
        drawn = Accumulate().prepare(setup_for("fp32", seed=5)).micro_batches
        state = Accumulate().prepare(setup)
        Accumulate().step(state, SilentPhases())
        exact = np.stack([sum(one[i].double().numpy() for one in drawn) for i in range(2)])
        found = np.stack([one.double().numpy() for one in state.buffer.values()]) / setup.loss_scale
        wanted = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert Accumulate().error(setup)["accumulate_error"] == pytest.approx(wanted, rel=1e-9)


def test_vanished_values_are_counted() -> None:
    shares = {name: Accumulate().error(setup_for(name))["accumulate_vanished"] for name in ("fp32", "fp8", "mxfp4")}
    state = Accumulate().prepare(setup_for("mxfp4"))
    Accumulate().step(state, SilentPhases())
    zeros = sum(int((one == 0).sum()) for one in state.buffer.values())
    assert shares["mxfp4"] == zeros / (2 * 48 * 48)
    assert shares["fp32"] == 0 <= shares["fp8"] < 0.02 < shares["mxfp4"]


def test_fp16_gradients_arrive_multiplied_by_the_loss_scale() -> None:
    scaled = setup_for("fp16")
    assert scaled.loss_scale == 1024
    without = Accumulate().error(replace(scaled, loss_scale=1.0))["accumulate_error"]
    assert Accumulate().error(scaled)["accumulate_error"] < without
