"""The residual block: where it is native, what it marks, what its errors and statistics say."""

from __future__ import annotations

import pytest

from fp8bench.errors import UsageError
from fp8bench.model import Level, Request, Scalar
from fp8bench.plan.make import make_plan
from fp8bench.protocols import Setup
from fp8bench.registry import precisions
from fp8bench.workloads.conv import Conv
from tests.counts import for_each
from tests.facts import B200
from tests.workloads.steps import CPU, H200, MI300, SMALL, small

SIZES = SMALL["conv"]


def setup_for(precision: str = "bf16", **changes: Scalar) -> Setup:
    return small("conv", precision, **changes)


def test_work_by_hand() -> None:
    forward = 2 * 2.0 * (4 * 6 * 6) * (9 * 16 * 16)
    assert Conv().work({**SIZES, "pass": "forward"}).flops == forward
    assert Conv().work(SIZES).flops == 3 * forward


LEVELS = [
    ("fp32", Level.NATIVE), ("tf32", Level.NATIVE), ("fp16", Level.NATIVE), ("bf16", Level.NATIVE),
    ("fp8", Level.EMULATED), ("mxfp8", Level.EMULATED), ("nvfp4", Level.EMULATED),
]  # fmt: skip


@for_each(("precision", "level"), LEVELS)
def test_only_what_torch_convolves_is_native(precision: str, level: Level) -> None:
    """FP8's products are native on that GPU, its convolutions are not."""
    support = Conv().support(SIZES, precisions.get(precision), H200)
    assert support.level is level
    if precision == "fp8":
        assert precisions.get(precision).support(H200).level is Level.NATIVE
        assert "torch has no convolution in fp8" in support.reason


def test_windows_that_are_written_out_are_multiplied_natively() -> None:
    nvfp4 = precisions.get("nvfp4")
    sizes = {**SIZES, "channels": 64, "batch": 2, "image": 28}
    assert Conv().support(sizes, nvfp4, B200).level is Level.NATIVE
    assert Conv().support(sizes, precisions.get("nvfp4:hadamard=off"), B200).level is Level.EMULATED
    uneven = Conv().support({**sizes, "image": 5}, nvfp4, B200)
    assert uneven.level is Level.REFUSED and "batch=2, channels=64, image=5" in uneven.reason


def test_what_a_device_refuses_stays_refused() -> None:
    assert Conv().support(SIZES, precisions.get("tf32"), MI300).level is Level.REFUSED
    assert Conv().support(SIZES, precisions.get("tf32"), CPU).level is Level.EMULATED


def test_gradients_are_those_of_all_that_is_trained() -> None:
    state = Conv().prepare(setup_for())
    assert state.inputs[0].shape == (4, 6, 6, 16)
    assert len(state.outcome()[1]) == 1 + 2 + 4  # the images, two convolutions, weight and bias of two norms


def test_statistics_count_every_operand_once() -> None:
    pixels, weights = 2 * 4 * 6 * 6 * 16, 2 * 9 * 16 * 16
    for precision in ("fp32", "nvfp4"):
        found = {(one.kind, one.role): one.count for one in Conv().statistics(setup_for(precision))}
        assert found == {("conv", "input"): pixels, ("conv", "weight"): weights, ("conv", "gradient"): pixels}
    forward = Conv().statistics(setup_for("fp32", **{"pass": "forward"}))
    assert {one.role for one in forward} == {"input", "weight"}


def test_defaults_are_small_on_a_processor_and_real_on_a_gpu() -> None:
    for facts, least, most in ((CPU, 1e7, 1e9), (H200, 1e10, 1e13)):
        axes = {axis.name: axis.values(axis.default) for axis in Conv().axes(facts)}
        assert axes["pass"] == ["training"]
        assert least < Conv().work({name: values[-1] for name, values in axes.items()}).flops < most


def test_a_single_value_has_no_batch_norm() -> None:
    with pytest.raises(UsageError, match=r"batch=1 with image=1.*choose a larger"):
        make_plan(Request("conv", axes=(("batch", ("1", "2")), ("image", ("1",)))), (CPU,))
    for changes in ({"batch": 2, "image": 1}, {"batch": 1, "image": 2}):
        assert Conv().expand({**SIZES, **changes}) == (tuple({**SIZES, **changes}.items()),)
        assert set(Conv().error(setup_for(**changes))) == {"output_error", "gradient_error"}
