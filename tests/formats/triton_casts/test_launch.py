"""The launcher under a driver of straw: Triton compiles for a GPU that is not here, and launches are noted."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fp8bench.formats import native_codes, operators
from fp8bench.formats.grids import E4M3
from fp8bench.formats.native_codes import current_codes, row_codes, row_codes_both
from fp8bench.formats.recipes import ScaleRounding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (fp8bench[triton])"),
]
EXACT = ScaleRounding.EXACT
LAUNCHES: list[tuple[str, int, int, tuple[Any, ...]]] = []


class Launcher:
    """Stands for what Triton builds with a C compiler to call the driver."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, grid: int, high: int, deep: int, stream: int, function: int, *others: Any) -> None:
        LAUNCHES.append((self.name, grid, stream, others[4:]))  # behind two of metadata and two hooks


class Utilities:
    """Loads nothing."""

    def load_binary(self, *binary: object) -> tuple[int, int, int, int, int]:
        return 1, 2, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}


class Driver:
    """A current GPU of capability 9.0."""

    launcher_cls: ClassVar[type] = Launcher
    utils = Utilities()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    from triton.runtime import driver as active

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native_codes, "uses_triton", lambda device: True)
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    monkeypatch.setattr(active, "_active", Driver())
    LAUNCHES.clear()
    forget_kernels()
    yield
    forget_kernels()


def functions() -> list[Any]:
    from fp8bench.formats.triton_casts import kernels

    return [function for function in vars(kernels).values() if hasattr(function, "device_caches")]


def forget_kernels() -> None:
    for function in functions():
        function.device_caches.clear()


def compiled_functions() -> int:
    return sum(len(caches[0]) for function in functions() for caches in function.device_caches.values())


def addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_cast_is_compiled_once_launched_by_triton_and_repeated_with_other_addresses() -> None:
    x, other = (torch.randn(64, 256).bfloat16() for _ in range(2))
    current_codes(x, E4M3, EXACT, both=True)
    assert not LAUNCHES
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    compiled = compiled_functions()
    assert compiled == 2 and not LAUNCHES

    current_codes(x, E4M3, EXACT, both=True)
    assert compiled_functions() == compiled, "what was compiled ahead is not what the call needs"
    current_codes(other, E4M3, EXACT, both=True)
    result = current_codes(other, E4M3, EXACT, both=True)
    assert [name for name, *_ in LAUNCHES] == ["find_scale", "cast"] * 3
    (_, grid, _, by_triton), (_, again, _, repeated) = LAUNCHES[0], LAUNCHES[4]
    assert grid == again == 2 and len(by_triton) == len(repeated)
    assert by_triton[0] is x or by_triton[0].data_ptr() == x.data_ptr()
    assert repeated[0] == other.data_ptr() and repeated[2] == result[0].data_ptr()
    cast = LAUNCHES[5][3]
    assert list(cast[:3]) == addresses(other, *result[1:]) and cast[3] == repeated[1]
    # Counters and constants equal those of Triton's launch.
    assert repeated[4:] == by_triton[4:] and cast[9:] == LAUNCHES[1][3][9:]


def test_rows_of_other_tokens_need_no_other_kernel() -> None:
    row_codes(torch.randn(64, 256).bfloat16(), E4M3, EXACT)
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    for rows in (64, 64, 48, 4096):
        row_codes(torch.randn(rows, 256).bfloat16(), E4M3, EXACT)
    assert not operators.KERNELS.wanted and [grid for _, grid, *_ in LAUNCHES] == [4, 4, 3, 256]
    row_codes(torch.randn(49, 256).bfloat16(), E4M3, EXACT)
    assert len(operators.KERNELS.wanted) == 1  # its size is not a multiple of 16


def test_both_ways_of_rows_share_zeros() -> None:
    x = torch.randn(64, 256).bfloat16()
    row_codes_both(x, E4M3, EXACT)
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    for _ in range(2):
        row_codes_both(x, E4M3, EXACT)
    assert [name for name, *_ in LAUNCHES] == ["cast_rows", "cast_columns"] * 2
    for first, second in (LAUNCHES[:2], LAUNCHES[2:]):
        peaks = [argument for argument in (*first[3], *second[3]) if isinstance(argument, Tensor)]
        zeros = [tensor for tensor in peaks if tensor.dtype == torch.int32]
        assert len(zeros) == 2 and zeros[0] is zeros[1] and zeros[0].numel() == 256 and not zeros[0].any()
