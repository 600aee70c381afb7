"""Casts: what a step changes, what it marks, its error."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8bench.model import Level, Scalar
from fp8bench.protocols import Setup
from fp8bench.registry import precisions
from fp8bench.workloads.cast import Cast, parse_shape
from tests.counts import for_each
from tests.facts import B200
from tests.workloads.steps import CPU, marks, small

ALL = ("fp32", "bf16", "fp16", "fp8", "mxfp8", "mxfp4", "nvfp4")


def setup_for(precision: str = "fp8", seed: int = 0, **changes: Scalar) -> Setup:
    return small("cast", precision, seed, **changes)


def result(setup: Setup) -> torch.Tensor:
    made = Cast().prepare(setup).operation()
    assert isinstance(made, torch.Tensor)
    return made


@for_each(("text", "shape"), [("512", "512x512"), ("8x1024", "8x1024"), ("007", "7x7"), ("1x1", "1x1")])
def test_shapes_that_can_be_meant(text: str, shape: str) -> None:
    assert parse_shape(text) == shape


@for_each("text", ["", "x", "1x", "1x2x3", "0", "0x4", "-1", "1.5", "²", str((1 << 18) + 1), "big"])
def test_shapes_that_cannot(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_shape(text)


def expand(**changes: Scalar) -> dict[str, Scalar]:
    params = {"shape": "8x16", "source": "fp32", "direction": "to", "scaling": "on", "role": "input"}
    (found,) = Cast().expand(params | changes)
    return dict(found)


def test_formats_without_scales_have_both_scalings_alike() -> None:
    (axis,) = (one for one in Cast().axes(CPU) if one.name == "scaling")
    alike = [name for name in ALL if torch.equal(result(setup_for(name)), result(setup_for(name, scaling="off")))]
    assert alike == ["fp32", "bf16", "fp16"] and "fp32, bf16 and fp16, which have no scales" in axis.description


@for_each("direction", ["to", "from"])
@for_each("source", ["fp32", "bf16"])
@for_each("precision", ALL)
def test_a_step_never_hands_back_what_it_was_given(precision: str, source: str, direction: str) -> None:
    setup = setup_for(precision, source=source, direction=direction)
    state = Cast().prepare(setup)
    one = state.operation()
    other = state.operation()
    assert isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    assert one.shape == (40, 72) and torch.equal(one, other) and one.data_ptr() != other.data_ptr()
    assert marks(Cast(), state) == ["unattributed", "cast", "unattributed"]


def test_what_is_cast_and_restored_agrees_with_ml_dtypes() -> None:
    """E4M3 for inputs, E5M2 for gradients, without a scale and with one."""
    for role, dtype, largest in (("input", ml_dtypes.float8_e4m3fn, 448), ("gradient", ml_dtypes.float8_e5m2, 57344)):
        source = Cast().prepare(setup_for(role=role)).source.numpy()
        plain = np.clip(source, -largest, largest).astype(dtype).astype(np.float32)
        assert np.array_equal(result(setup_for(role=role, scaling="off")).numpy(), plain)
        highest = np.abs(source).max()
        limit = np.float32(largest)
        scale = np.float32(1) / highest * limit  # how torch divides a number by a tensor
        codes = np.clip(source * scale, -largest, largest).astype(dtype).astype(np.float32)
        # The last bit of torch's quotient by a number depends on the CPU's vectors.
        scaled = [codes * (1 / scale), codes * (highest / limit)]
        assert any(np.array_equal(result(setup_for(role=role)).numpy(), one) for one in scaled)
        assert not any(np.array_equal(plain, one) for one in scaled)
        restored = result(setup_for(role=role, source="bf16", direction="from"))
        assert restored.dtype == torch.bfloat16


def test_what_vanishes_is_what_the_error_hides() -> None:
    """A quarter of these gradients becomes zero in E5M2 without a scale, and the error is nearly that with one."""
    found = {scaling: Cast().error(setup_for(role="gradient", scaling=scaling)) for scaling in ("on", "off")}
    source = Cast().prepare(setup_for(role="gradient")).source
    for scaling, errors in found.items():
        there = result(setup_for(role="gradient", scaling=scaling))
        assert errors["cast_vanished"] == float(((there == 0) & (source != 0)).double().mean())
    assert found["off"]["cast_vanished"] > 0.2 and found["on"]["cast_vanished"] == 0
    assert found["off"]["cast_error"] < 1.1 * found["on"]["cast_error"]
    assert Cast().error(setup_for("bf16", role="gradient"))["cast_vanished"] == 0


@for_each("source", ["fp32", "bf16"])
def test_fp16_gradients_arrive_multiplied_by_the_loss_scale(source: str) -> None:
    """Inputs are not, and statistics exclude it."""
    setup = setup_for("fp16", role="gradient", source=source)
    plain = replace(setup, loss_scale=1.0)
    assert setup.loss_scale == 1024
    assert torch.equal(Cast().prepare(setup).source, Cast().prepare(plain).source * 1024)
    assert Cast().error(setup)["cast_error"] < Cast().error(plain)["cast_error"]
    assert Cast().statistics(setup) == Cast().statistics(plain)
    inputs = setup_for("fp16", source=source)
    assert torch.equal(Cast().prepare(inputs).source, Cast().prepare(replace(inputs, loss_scale=1.0)).source)


@pytest.mark.parametrize("role", ["input", "gradient"])
@pytest.mark.parametrize("precision", ALL)
def test_what_is_cast_from_another_layout_has_the_same_bits(precision: str, role: str) -> None:
    usual = result(setup_for(precision, role=role))
    for layout, strides in (("transposed", (1, 40)), ("padded", (136, 1)), ("strided", (144, 2))):
        source = Cast().prepare(setup_for(precision, role=role, layout=layout)).source
        found = result(setup_for(precision, role=role, layout=layout))
        assert source.stride() == strides and torch.equal(found, usual)


def test_layouts_of_a_cast_count_what_is_cast_and_hold_what_lies_between() -> None:
    usual = Cast().work(expand())
    strided = Cast().work(expand(layout="strided"))
    assert (usual.bytes, strided.least_memory - usual.least_memory) == (strided.bytes, 4 * 128)
    for changes, words in (({"direction": "from"}, "direction=to"), ({"shape": "1x16"}, "contiguous or strided")):
        support = Cast().support(expand(layout="padded", **changes), precisions.get("bf16"), CPU)
        assert support.level is Level.REFUSED and words in support.reason


@for_each("scaling", ["on", "off"])
@for_each("precision", ["mxfp8", "nvfp4"])
def test_codes_of_a_device_have_the_emulations_error_in_odd_rows_too(precision: str, scaling: str) -> None:
    emulated = setup_for(precision, scaling=scaling, columns=71)
    native = replace(emulated, arithmetic=precisions.get(precision).arithmetic(B200))
    assert Cast().error(native) == Cast().error(emulated)
