"""Rotations leave products unchanged, can be undone, and are the same on every device."""

from __future__ import annotations

import math

import pytest
import torch

from fp8bench.formats import vector_width
from fp8bench.formats.compiling import compile_kernel
from fp8bench.nn.rotations import (
    ROTATED_RUN_LENGTH,
    RotationKernel,
    _make_hadamard_matrix,
    _view_as_rotation_runs,
    rotate,
    rotate_and_find_amaxes,
)
from tests.counts import for_each
from tests.formats.scaling_definitions import gaussian, outliers
from tests.formats.test_operators import Operators


def matrix(seed: int) -> torch.Tensor:
    return rotate(torch.eye(ROTATED_RUN_LENGTH), seed).double()


def test_the_matrix_is_hadamards_with_signs() -> None:
    for seed in range(20):
        assert torch.equal(
            matrix(seed).abs(), torch.full((ROTATED_RUN_LENGTH, ROTATED_RUN_LENGTH), 0.25, dtype=torch.float64)
        )
        assert torch.equal(matrix(seed) @ matrix(seed).t(), torch.eye(ROTATED_RUN_LENGTH, dtype=torch.float64))
    # The same seed gives the same signs, of which there are 2^16.
    assert torch.equal(matrix(3), matrix(3))
    assert len({tuple(matrix(seed)[:, 0].tolist()) for seed in range(200)}) > 195
    share = torch.stack([matrix(seed)[:, 0].lt(0).double() for seed in range(400)]).mean(0)
    assert torch.all((share - 0.5).abs() < 0.11)
    assert matrix((1 << 63) - 1).isfinite().all()


def test_every_element_is_the_exact_sum_rounded_once() -> None:
    x, signs = outliers(16, 32), matrix(2).sign()
    expected = [
        math.fsum(float(value * sign) for value, sign in zip(x[row, start : start + 16], signs[:, column], strict=True))
        / 4
        for row in range(16)
        for start in (0, 16)
        for column in range(16)
    ]
    assert rotate(x, 2).flatten().tolist() == torch.tensor(expected, dtype=torch.float64).to(torch.float32).tolist()


def test_any_tensor() -> None:
    x = gaussian(96, 80)
    expected = rotate(x, 1)
    assert torch.equal(rotate(x.view(4, 24, 80), 1), expected.view(4, 24, 80))
    assert torch.equal(rotate(x[5], 1), expected[5])
    assert torch.equal(rotate(x.t().contiguous().t(), 1), expected)
    assert torch.equal(rotate(x.expand(2, 96, 80), 1)[1], expected)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(rotate(x.to(dtype), 1), rotate(x.to(dtype).float(), 1))
    large = gaussian(1 << 9, 1 << 8)
    assert torch.equal(rotate(large, 1)[-1], rotate(large[-1], 1)), "whatever piece it is in"
    assert rotate(torch.empty(0, 5), 1).shape == (0, 16) and rotate(torch.empty(3, 0), 1).shape == (3, 0)
    assert not rotate(torch.ones(16, requires_grad=True), 1).requires_grad
    with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
        rotate(torch.ones(16, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="without dimensions"):
        rotate(torch.tensor(1.0), 1)


def test_what_is_not_finite_stays_among_its_16() -> None:
    x = gaussian(2, 48)
    x[0, 20], x[1, 2], x[1, 3] = torch.nan, torch.inf, torch.inf
    left = rotate(x, 0)
    assert not left[0, 16:32].isfinite().any() and not left[1, :16].isfinite().any()
    assert left.isfinite().sum() == 64


@pytest.mark.slow
@for_each("turned", [False, True])
def test_a_gpu_s_kernel_looks_at_both(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_width, "vector_widths", lambda device: ())
    kernel = RotationKernel(torch.bfloat16, "cpu", turned)
    compiled_too = compile_kernel(kernel).run
    for rows, columns in ((48, 64), (1, 16), (33, 160)):
        x = outliers(rows, columns).to(torch.bfloat16)
        for bad in (x[0, 0].item(), math.inf, math.nan):
            x[-1, -1] = bad
            expected, memory = rotate(x, 3), x.t().contiguous() if turned else x
            parts = [item.t().reshape(-1, ROTATED_RUN_LENGTH, rows) if turned else item for item in (expected, x)]
            for run in (compiled_too, kernel):
                out = torch.empty(memory.shape)
                peaks = [torch.zeros(columns // ROTATED_RUN_LENGTH if turned else rows) for _ in parts]
                seen = [_view_as_rotation_runs(item, turned) for item in (memory, out)]
                run(seen[0], _make_hadamard_matrix(3, torch.device("cpu")), seen[1], *peaks)
                given = [out.t() if turned else out, *peaks]
                for result, right in zip(
                    given, [expected, *(item.abs().flatten(1).amax(1) for item in parts)], strict=True
                ):
                    assert torch.equal(result.isnan(), right.isnan())
                    assert torch.equal(result.nan_to_num(), right.float().nan_to_num())


@for_each("device", ["cpu", "meta"])
def test_one_pass_looks_at_both(device: str) -> None:
    x = outliers(64, 48).to(device).t()
    rotate_and_find_amaxes(x, 3)  # its matrix is cached
    with Operators() as seen:
        result = rotate_and_find_amaxes(x, 3)
    assert result.values.shape == (48, 64)
    if device == "meta":
        ours = [name for name in seen.names if not any(item in name for item in ("aten.t.", "detach", "empty"))]
        assert ours == ["fp8bench.rotated_and_looked_at.default"]
        assert result.values.t().is_contiguous()
    else:
        assert torch.equal(result.values, rotate(x, 3))
        assert result.amaxes == result.values.abs().max() and result.amaxes_before_rotation == x.abs().max()


def test_a_matrix_is_made_of_numbers_whatever_tensors_are_made_on() -> None:
    """Under a meta default device (memory derivation) the matrix is still real; later steps use the cached one."""
    expected = _make_hadamard_matrix(12, torch.device("cpu"))
    _make_hadamard_matrix.cache_clear()
    with torch.device("meta"):
        assert torch.equal(_make_hadamard_matrix(12, torch.device("cpu")), expected)
