"""Machine code of casts by hand, for GPUs that are not here, at the shapes of real models."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8bench.formats import triton_casts
from fp8bench.formats.code_kernels import (
    CodesKernel,
    CurrentScaleCodesKernel,
    DelayedCodesKernel,
    RowCodesKernel,
    SquareCodesKernel,
    view_squares,
    view_stretches,
    view_transposed_squares,
)
from fp8bench.formats.compiling import CombinedKernel, Kernel, KernelDefinition
from fp8bench.formats.grids import E4M3, E5M2
from fp8bench.formats.recipes import MX, DelayedScaling, ScaleRounding
from fp8bench.formats.tiled_codes import TiledCodesKernel, TileViews
from fp8bench.formats.triton_casts.plans import plan_launches

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
POWER_OF_TWO = ScaleRounding.POWER_OF_TWO
TOKENS = 15872
MOST_REGISTERS = 64
PROCESSORS = 132
Call = tuple[KernelDefinition, Sequence[Tensor]]


def empty(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def outputs(rows: int, columns: int, both: bool, dtype: torch.dtype = E4) -> list[Tensor]:
    return [empty(rows, columns, dtype=dtype), *([empty(columns, rows, dtype=dtype)] if both else [])]


def call_codes(columns: int) -> Call:
    straight, turned = outputs(TOKENS, columns, True, E5)
    places = [
        view_squares(empty(TOKENS, columns, dtype=BF16), 16),
        view_squares(straight, 16),
        view_transposed_squares(turned, 16),
    ]
    return CodesKernel(E5M2, BF16, "cuda", 16, True, True, True), [*places, empty()]


def call_move(columns: int) -> Call:
    places = (
        view_squares(empty(TOKENS, columns, dtype=U8), 16),
        view_transposed_squares(empty(columns, TOKENS, dtype=U8), 16),
    )
    return CodesKernel(None, U8, "cuda", 16, False, True, False), places


def call_current(columns: int, both: bool = True) -> Call:
    kernel = CurrentScaleCodesKernel(E4M3, ScaleRounding.EXACT, BF16, "cuda", True, both)
    return kernel, [empty(TOKENS, columns, dtype=BF16), empty(), empty(), *outputs(TOKENS, columns, both)]


def call_delayed(columns: int, both: bool = True) -> Call:
    kernel = DelayedCodesKernel(E4M3, DelayedScaling(1024), BF16, "cuda", True, both)
    state = [empty(1024), empty(dtype=I32), empty(), empty(), empty()]
    return kernel, [empty(TOKENS, columns, dtype=BF16), *state, *outputs(TOKENS, columns, both)]


def call_squares(columns: int, both: bool = True) -> Call:
    kernel = SquareCodesKernel(E4M3, POWER_OF_TWO, BF16, "cuda", True, both)
    scales = [empty(TOKENS // 128, columns // 128), empty(columns // 128, TOKENS // 128)]
    return kernel, [empty(TOKENS, columns, dtype=BF16), *scales, *outputs(TOKENS, columns, both)]


def call_rows(columns: int, block: int = 0, ways: Sequence[bool] = (False,)) -> Call:
    kernels, places = list[Kernel](), list[Tensor]()
    for turned in ways:
        rows, length = (columns, TOKENS) if turned else (TOKENS, columns)
        kernels.append(RowCodesKernel(E4M3, POWER_OF_TWO, BF16, "cuda", 16, block, turned))
        inverse = empty(length // block if block else 1, rows)
        places.append(view_stretches(empty(TOKENS, columns, dtype=BF16), 16, block, turned))
        places.append(view_stretches(empty(rows, length, dtype=E4), 16, block))
        places.append(inverse.view(len(inverse), -1, 16, 1, 1))
    return (kernels[0] if len(kernels) == 1 else CombinedKernel(*kernels)), places


def call_mx(columns: int, ways: Sequence[bool] = (False,)) -> Call:
    kernels, result = list[Kernel](), list[Tensor]()
    for turned in ways:
        places = TileViews(MX, True, turned)
        rows, length = (columns, TOKENS) if turned else (TOKENS, columns)
        kernels.append(TiledCodesKernel(E4M3, places, BF16, "cuda"))
        result += [places.matrix(empty(TOKENS, columns, dtype=BF16)), places.codes(empty(rows, length, dtype=U8), 1)]
        result.append(places.scales(empty(rows * length // 32, dtype=U8), rows))
    return (kernels[0] if len(kernels) == 1 else CombinedKernel(*kernels)), result


BOTH = (False, True)
CALLS: dict[str, Callable[[], Call]] = {
    "a given scale, both ways": lambda: call_codes(4096),
    "bytes turned": lambda: call_move(14336),
    "current": lambda: call_current(4096),
    "current, one way": lambda: call_current(14336, both=False),
    "delayed": lambda: call_delayed(4096),
    "delayed, one way": lambda: call_delayed(14336, both=False),
    "rows of 1,024": lambda: call_rows(1024),
    "rows of 14,336": lambda: call_rows(14336),
    "rows of 28,672": lambda: call_rows(28672),
    "columns": lambda: call_rows(4096, ways=(True,)),
    "rows of 4,096, both ways": lambda: call_rows(4096, ways=BOTH),
    "rows of 8,192, both ways": lambda: call_rows(8192, ways=BOTH),
    "1x128": lambda: call_rows(4096, 128),
    "1x128, both ways": lambda: call_rows(14336, 128, BOTH),
    "128x128": lambda: call_squares(4096, both=False),
    "128x128, both ways": lambda: call_squares(14336),
    "MX": lambda: call_mx(4096),
    "MX, both ways": lambda: call_mx(14336, BOTH),
}


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (fp8bench[triton])"
)


@pytest.fixture(autouse=True)
def one_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors without memory have no address, and both directions of a cast read the same matrix."""
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", CALLS)
def test_a_cast_moves_whole_vectors_in_few_registers_and_saturates(name: str, capability: int) -> None:
    from tests.formats.triton_casts.offline import compile_plan

    for plan in plan_launches(*CALLS[name](), PROCESSORS):
        code = compile_plan(plan, CALLS[name]()[1], capability)
        assert code.registers <= MOST_REGISTERS and code.stack == 0, (plan.function, code.registers, code.stack)
        # Elements are all read by 128 bits; 32-bit reads are scales, counts and a history.
        wide, narrow = code.count("LDG.E.128", "LDG.E.EL.128", "LDG.E.EF.128"), code.count("LDG.E.U", "LDG.E.64")
        assert wide and not narrow, code.operations
        assert not code.count("LDL", "STL") and "ftz" not in code.ptx
        if "codes" in plan.arguments or "turned" in plan.arguments:
            assert code.count("STG.E.128") and not code.count("STG.E.64", "STG.E.U16"), code.operations
        if plan.constants.get("LARGEST") is not None and plan.function != "find_scale":
            conversions = code.count("F2FP")
            assert conversions and conversions == code.count("F2FP.SATFINITE"), code.operations


def arguments_of_kernels() -> dict[str, set[str]]:
    """Parses the source, because triton may be missing."""
    tree = ast.parse((Path(triton_casts.__file__).parent / "kernels.py").read_text())
    result = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {function.name: {argument.arg for argument in function.args.args} for function in result}


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_has_every_argument_of_its_kernel(name: str) -> None:
    plans = plan_launches(*CALLS[name](), PROCESSORS)
    assert plans
    for plan in plans:
        assert not plan.arguments.keys() & plan.constants.keys() and plan.grid_program_count > 0
        assert {*plan.arguments, *plan.constants} == arguments_of_kernels()[plan.function]


def test_sizes_that_offsets_of_32_bits_do_not_reach_have_no_plan() -> None:
    rows = 1 << 17
    for columns, launches in ((1 << 13, 2), (1 << 14, 0)):
        kernel = CurrentScaleCodesKernel(E4M3, ScaleRounding.EXACT, BF16, "cuda", True, False)
        tensors = [empty(rows, columns, dtype=BF16), empty(), empty(), *outputs(rows, columns, False)]
        assert len(plan_launches(kernel, tensors, PROCESSORS)) == launches
