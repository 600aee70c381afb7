"""The optimiser: phases, buckets, and errors of updates against AdamW by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fp8bench.model import Scalar
from fp8bench.protocols import Setup, SilentPhases
from fp8bench.workloads import optimizer
from fp8bench.workloads.optimizer import Optimizer
from tests.counts import for_each
from tests.workloads.steps import phases, small

Array = np.ndarray[Any, Any]


def setup_for(precision: str = "fp32", seed: int = 0, **changes: Scalar) -> Setup:
    return small("optimizer", precision, seed, **changes)


@cache
def errors_of(precision: str) -> dict[str, float]:
    """The errors after all thousand steps with default axes, cached as they take a second."""
    return Optimizer().error(setup_for(precision))


def test_all_but_fp32_moments_are_cast_around_the_step() -> None:
    assert phases(Optimizer(), setup_for("fp32")) == ["optimizer_step"]
    for precision in ("bf16", "fp16", "fp8", "nvfp4"):
        assert phases(Optimizer(), setup_for(precision, tensors=7)) == ["cast", "optimizer_step", "cast"]


@for_each("precision", ["fp32", "fp8"])
def test_buckets_change_no_number(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Optimizer().prepare(setup_for(precision, tensors=5))
    monkeypatch.setattr(optimizer, "BUCKET_ELEMENTS", 2 * 64 * 64)
    split = Optimizer().prepare(setup_for(precision, tensors=5))
    assert [len(bucket.parameters) for bucket in split.buckets] == [2, 2, 1]
    for _ in range(3):
        Optimizer().step(whole, SilentPhases())
        Optimizer().step(split, SilentPhases())
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), split.parameters(), strict=True))


def stacked(tensors: Sequence[torch.Tensor]) -> Array:
    return np.stack([tensor.double().numpy() for tensor in tensors])


def adamw(w: Array, g: Array, m: Array, v: Array, t: int) -> tuple[Array, Array, Array]:
    """Returns the weights and both moments after step `t`, as AdamW's paper defines them."""
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return w - 3e-4 * (0.1 * w + m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)), m, v


@for_each("fused", ["yes", "no"])
def test_a_step_is_adamw_by_hand(fused: str) -> None:
    state = Optimizer().prepare(setup_for(fused=fused))
    (bucket,) = state.buckets
    before = stacked(bucket.parameters)
    wanted, _, _ = adamw(before, stacked(bucket.gradients), *map(stacked, bucket.restore()), t=1001)
    Optimizer().step(state, SilentPhases())
    assert np.linalg.norm(stacked(bucket.parameters) - wanted) < 1e-4 * np.linalg.norm(wanted - before)


def test_fp32_is_the_reference_exactly_and_unfused_nearly() -> None:
    assert Optimizer().error(setup_for(fused="yes")) == {
        "update_error": 0.0,
        "first_moment_error": 0.0,
        "second_moment_error": 0.0,
        "first_moment_vanished": 0.0,
        "second_moment_vanished": 0.0,
    }
    unfused = Optimizer().error(setup_for(fused="no"))
    assert 0 < unfused["update_error"] < 1e-5 and max(unfused.values()) < 1e-5


@pytest.mark.slow
def test_errors_are_those_of_a_format() -> None:
    found = {name: errors_of(name) for name in ("fp16", "bf16", "fp8", "nvfp4")}
    values = [errors["first_moment_error"] for errors in found.values()]
    assert values == sorted(values)
    assert all(value < most for value, most in zip(values, (1e-3, 1e-2, 0.15, 0.5), strict=True))
    assert found["fp16"]["update_error"] < 5e-3 < found["fp8"]["update_error"] < 0.1 < found["nvfp4"]["update_error"]
    assert found["fp8"]["second_moment_error"] == found["fp16"]["second_moment_error"] < 1e-2


@pytest.mark.slow
def test_a_bf16_second_moment_only_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding loses its decay of a thousandth: after a thousand steps it is as bad as a scaled fp16 second moment."""
    bf16 = errors_of("bf16")
    fp8 = errors_of("fp8")
    assert 0.15 < bf16["second_moment_error"] < 0.4 and bf16["second_moment_error"] > 20 * fp8["second_moment_error"]
    assert bf16["update_error"] > 0.9 * fp8["update_error"]
    monkeypatch.setattr(optimizer, "ERROR_STEPS", 10)
    few = Optimizer().error(setup_for("bf16"))
    assert few["second_moment_error"] < 0.01 and few["update_error"] < 0.1 * bf16["update_error"]


def test_errors_are_those_of_one_small_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "ERROR_STEPS", 3)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        small, large = (Optimizer().error(setup_for("fp8", tensors=t, width=w)) for t, w in ((1, 64), (3, 100)))
        assert small == large != Optimizer().error(setup_for("fp8", width=48))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_the_update_error_is_that_of_weights_by_hand() -> None:
    setup = setup_for("bf16", tensors=1)
    state, source = optimizer._draw_initial_state(setup, optimizer._choose_storages(setup), fused=False)
    exact, same_source = optimizer._draw_initial_state(setup, optimizer._make_exact_storages(), fused=False)
    start = w = stacked(exact.parameters())
    m, v = map(stacked, exact.moments())
    for t in range(1001, 2001):
        state.copy_gradients(source.draw())
        Optimizer().step(state, SilentPhases())
        w, m, v = adamw(w, stacked(same_source.draw()), m, v, t)
    wanted = np.linalg.norm(stacked(state.parameters()) - w) / np.linalg.norm(w - start)
    assert Optimizer().error(setup)["update_error"] == pytest.approx(wanted, rel=1e-2)


@pytest.mark.slow
def test_a_second_moment_in_fp8_explodes() -> None:
    """Where it becomes zero, the update is divided by epsilon: the reason for scaled fp16 as the default."""
    fine = errors_of("fp8")
    bad = Optimizer().error(setup_for("fp8", second_moment="same"))
    assert setup_for("fp8").case == setup_for("fp8", second_moment="scaled-fp16").case
    assert fine["update_error"] < 0.1 and bad["update_error"] > 10
    assert bad["first_moment_error"] == fine["first_moment_error"]
    assert bad["second_moment_vanished"] > 0.05 and fine["second_moment_vanished"] == 0
