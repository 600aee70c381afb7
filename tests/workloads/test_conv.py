"""The residual block: native support, phases, errors and statistics."""

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
from tests.workloads.steps import CPU, H200, SMALL, small

SIZES = SMALL["conv"]


def setup_for(precision: str = "bf16", **changes: Scalar) -> Setup:
    return small("conv", precision, **changes)


LEVELS = [
    ("fp32", Level.NATIVE),
    ("tf32", Level.NATIVE),
    ("fp16", Level.NATIVE),
    ("bf16", Level.NATIVE),
    ("fp8", Level.EMULATED),
    ("mxfp8", Level.EMULATED),
    ("nvfp4", Level.EMULATED),
]


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


def test_a_single_value_has_no_batch_norm() -> None:
    with pytest.raises(UsageError, match=r"batch=1 with image=1.*choose a larger"):
        make_plan(Request("conv", axes=(("batch", ("1", "2")), ("image", ("1",)))), (CPU,))
    for changes in ({"batch": 2, "image": 1}, {"batch": 1, "image": 2}):
        assert Conv().expand({**SIZES, **changes}) == (tuple({**SIZES, **changes}.items()),)
        assert set(Conv().error(setup_for(**changes))) == {"output_error", "gradient_error"}
