"""Casts by hand: what they compute in Triton's interpreter, and when they run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fp8bench.formats import native_codes, operators, triton_casts
from fp8bench.formats.compiling import Compiled, KernelDefinition
from fp8bench.formats.grids import E4M3
from fp8bench.formats.native_codes import cast_codes_with_transpose, row_codes_both, square_codes
from fp8bench.formats.recipes import ScaleRounding
from fp8bench.formats.triton_casts import choose_cast_compiler, uses_triton
from fp8bench.model.run import TIME_CONDITION_FACTS
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from tests.counts import for_each
from tests.facts import H200
from tests.formats.test_native_codes import same
from tests.formats.test_operators import AWKWARD, Operators

EXACT = ScaleRounding.EXACT
GPU = torch.device("cuda", 0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (fp8bench[triton])")
@pytest.mark.parametrize("family", ["tensor", "plain", "delayed", "rows", "blocks", "squares", "mx"])
def test_by_hand_a_cast_is_its_definition_bit_by_bit(family: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.formats.triton_casts.interpreted", family]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == 0 and done.stdout.startswith("0 casts differ"), done.stdout + done.stderr[-2000:]


@dataclass(frozen=True)
class Launched(KernelDefinition):
    """Stands for a cast by Triton kernels: it runs the definition, and its repeats note the addresses."""

    definition: KernelDefinition
    device: str = "cpu"

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        return self.definition(*tensors)

    def build(self) -> Compiled:
        return Compiled(self._run)

    def _run(self, *tensors: Tensor) -> Callable[[Sequence[int]], bool]:
        self.definition(*tensors)

        def repeat(addresses: Sequence[int]) -> bool:
            REPEATED.append(list(addresses))
            return addresses[0] % 16 == 0

        return repeat


def list_casts(seen: Operators) -> list[str]:
    return [name.split(".")[1] for name in seen.names if name.startswith("fp8bench")]


REPEATED: list[list[int]] = []


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> operators.Kernels:
    """Runs casts on a CPU through the GPU path with Triton."""
    monkeypatch.setattr(native_codes, "uses_triton", lambda device: True)
    monkeypatch.setattr(native_codes, "find_triton_kernels", lambda definition, tensors: Launched(definition))
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    REPEATED.clear()
    return operators.KERNELS


def test_a_cast_is_defined_until_it_is_compiled_then_launched_then_repeated(by_hand: operators.Kernels) -> None:
    x, scale = torch.randn(32, 48).bfloat16(), torch.tensor(2.0)
    expected = cast_codes_with_transpose(x, E4M3, scale)
    assert len(by_hand.wanted) == 1 and by_hand.eager == 1
    by_hand.compile(*by_hand.wanted)
    launched = cast_codes_with_transpose(x, E4M3, scale)
    assert all(
        torch.equal(*(tensor.view(torch.uint8) for tensor in pair)) for pair in zip(launched, expected, strict=True)
    )
    assert by_hand.fused[0] == 1 and not REPEATED

    straight, turned = cast_codes_with_transpose(x, E4M3, scale)
    addresses = [tensor.data_ptr() for tensor in (x, straight, turned, scale)]
    assert len(REPEATED) == 1 and REPEATED[0] == addresses and by_hand.fused[0] == 2
    layouts = [
        [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in pair] for pair in (launched, (straight, turned))
    ]
    assert layouts[0] == layouts[1]
    cast_codes_with_transpose(x, E4M3, torch.ones(()))
    assert len(REPEATED) == 2
    cast_codes_with_transpose(x.t(), E4M3, scale)
    cast_codes_with_transpose(x[:16], E4M3, scale)
    cast_codes_with_transpose(x.half(), E4M3, scale)
    assert len(REPEATED) == 2 and by_hand.fused[0] == 5 and by_hand.eager == 2


def test_a_repeated_cast_is_an_operator_to_a_dispatch_mode(by_hand: operators.Kernels) -> None:
    """Modes count operators, and see no launch of Triton's."""
    x, scale = torch.randn(32, 48).bfloat16(), torch.tensor(2.0)
    cast_codes_with_transpose(x, E4M3, scale)
    by_hand.compile(*by_hand.wanted)
    for _ in range(2):
        cast_codes_with_transpose(x, E4M3, scale)
    with Operators() as operators_called:
        cast_codes_with_transpose(x, E4M3, scale)
    assert list_casts(operators_called) == ["codes"] and len(REPEATED) == 1


def test_only_what_is_aligned_and_no_copy_is_repeated(by_hand: operators.Kernels) -> None:
    memory, scale = torch.randn(32 * 48 + 1).bfloat16(), torch.ones(())
    cast_codes_with_transpose(memory[:-1].view(32, 48), E4M3, scale)
    by_hand.compile(*by_hand.wanted)
    for _ in range(2):
        cast_codes_with_transpose(memory[:-1].view(32, 48), E4M3, scale)
        cast_codes_with_transpose(memory[1:].view(32, 48), E4M3, scale)
        cast_codes_with_transpose(memory[:-1].view(32, 48)[:, ::3], E4M3, scale)
    assert len({addresses[0] for addresses in REPEATED}) == 2  # the second is misaligned, so it is copied
    assert by_hand.fused[0] + by_hand.eager == 7


MODES = ["fp8", "fp8:scale=pow2", "fp8-delayed:history=3", "fp8-rowwise", "fp8-block"]


def operands(mode: str, calls: Sequence[Tensor]) -> list[Tensor]:
    """All casts of a precision, in one orientation and in both."""
    arithmetic = precisions.get(mode).arithmetic(H200).layer("one")
    result = []
    for x in calls:
        for role in Role:
            made = [arithmetic.cast(x, role), *arithmetic.cast_both(x, role), *arithmetic.cast_both(x.t(), role)]
            result += [tensor for operand in made if operand is not None for tensor in operand.tensors]
    return result


@for_each("mode", MODES)
def test_recipes_have_the_same_operands_by_hand(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    square = AWKWARD.repeat(2, 1)[:256].contiguous()
    calls = [(x * size).bfloat16() for x in (AWKWARD.nan_to_num(0.0, 1.0, -1.0), square) for size in (1.0, 3.0, 0.0)]
    expected = operands(mode, calls)
    monkeypatch.setattr(native_codes, "uses_triton", lambda device: True)
    monkeypatch.setattr(native_codes, "find_triton_kernels", lambda definition, tensors: None)
    result = operands(mode, calls)
    assert len(result) == len(expected)
    for ours, theirs in zip(result, expected, strict=True):
        assert ours.shape == theirs.shape and ours.stride() == theirs.stride()
        assert same(ours.contiguous(), theirs)


def test_a_cast_with_a_tensors_scale_is_one_operator(by_hand: operators.Kernels) -> None:
    x = torch.randn(256, 384).bfloat16()
    with Operators() as called:
        for mode in ("fp8", "fp8-delayed"):
            precisions.get(mode).arithmetic(H200).layer("one").cast_both(x, Role.INPUT)
        square_codes(x, E4M3, EXACT, both=True)
        row_codes_both(x, E4M3, EXACT, 128)
    assert list_casts(called) == ["current_codes", "delayed_codes", "square_codes", "row_codes_both"]


def test_who_makes_casts_is_chosen_by_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_casts, "explain_no_triton", lambda device: "")
    assert uses_triton(GPU) and not uses_triton(torch.device("cpu"))
    with precisions.get("fp8:casts=compiled").scope():
        assert not uses_triton(GPU)
        with precisions.get("fp8").scope():
            assert uses_triton(GPU)
        assert not uses_triton(GPU)
    with pytest.raises(KeyError), choose_cast_compiler(allows_triton=False):
        raise KeyError
    assert uses_triton(GPU) and triton_casts.describe(GPU) == "casts run as Triton kernels"


def test_after_a_failure_of_triton_torch_compiles_the_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_casts, "explain_no_triton", lambda device: "")
    monkeypatch.setattr(triton_casts._TRITON_STATE, "failure", "")
    triton_casts.disable_triton("Triton failed: OutOfResources: shared memory")
    assert not uses_triton(GPU)
    reason = "casts are compiled by torch, because Triton failed: OutOfResources: shared memory"
    assert triton_casts.describe(GPU) == reason


def test_a_run_records_who_makes_its_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs on a GPU do not compare if one of them lacks triton."""
    from fp8bench.worker.torch_state import describe_torch_build

    assert "casts" not in describe_torch_build(), "this machine has no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_casts, "explain_no_triton", triton_casts.explain_no_triton.__wrapped__)
    assert describe_torch_build()["casts"] == "casts run as Triton kernels"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert describe_torch_build()["casts"] == "casts are compiled by torch, because triton is not installed"
    assert "casts" in TIME_CONDITION_FACTS
