"""Quantisers compiled for a GPU, in the worker. Skipped with the reason without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fp8bench.devices.cuda import Cuda
from fp8bench.formats import operators
from fp8bench.formats.grids import E2M1, E4M3
from fp8bench.formats.native_codes import (
    cast_codes_with_transpose,
    compute_current_scale,
    delayed_scale,
    row_codes,
    square_codes,
)
from fp8bench.formats.recipes import MX, NVFP4, DelayedScaling, ScaleRounding
from fp8bench.formats.scaled import largest_magnitude
from fp8bench.formats.tiled_codes import tiled_codes
from fp8bench.formats.triton_casts import choose_cast_compiler, explain_no_triton
from fp8bench.model import Case, DeviceFacts
from fp8bench.model.raw import Settings
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from fp8bench.worker.bench import Bench
from tests.facts import B200
from tests.formats import test_tiled_codes
from tests.formats.test_native_codes import CASTS, DELAYED, Cast, cast, course, pieces, same
from tests.formats.test_operators import ASKED, AWKWARD, Asked, called, differences, eagerly

pytestmark = pytest.mark.gpu


@pytest.fixture
def facts() -> DeviceFacts:
    return Cuda().available()[0]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    result = Bench(Settings())
    yield result
    result.close()


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4", "custom:format=e3m2:scaling=row"])
def test_casts_run_compiled_once_they_have_been(mode: str, bench: Bench, facts: DeviceFacts) -> None:
    params = (("m", 256), ("n", 512), ("k", 1024), ("product", "forward"), ("operands", "cast"))
    bench.prepare("key", Case("gemm", params, mode, facts.key), facts)
    waiting, why = bench.quantisers()
    before = bench.slot("key", 1, 0)
    bench.compile_quantisers("key")
    after = bench.slot("key", 1, 0)

    assert waiting > 0 and not why and bench.quantisers() == (0, "")
    assert (before.eager_quantisers, before.fused_quantisers) == (2, 0)
    assert (after.eager_quantisers, after.fused_quantisers) == (0, 2)


def test_the_doctor_can_say_whether_it_compiles(bench: Bench, facts: DeviceFacts) -> None:
    assert bench.compiler(facts).startswith("a quantiser compiles in ")


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_compiled_is_eager_bit_by_bit(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    there = AWKWARD.to(asked.source).cuda()
    x = there.t() if asked.turned else there
    eager = eagerly(x, asked)
    assert differences(called(x, asked), eager) == 0 and operators.KERNELS.wanted
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    assert differences(called(x, asked), eager) == 0 and operators.KERNELS.fused.total() == 1
    assert differences(eager.cpu(), eagerly(x.cpu(), asked)) == 0


@pytest.mark.parametrize("how", CASTS, ids=str)
def test_native_casts_compiled_are_eager_bit_by_bit(how: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    there = [x.cuda() for x in pieces(how.source)]
    eager = [cast(x, how) for x in there]
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    before = operators.KERNELS.eager
    for x, wanted in zip(there, eager, strict=True):
        on_processor = cast(x.cpu(), how)
        for ours, theirs, here in zip(cast(x, how), wanted, on_processor, strict=True):
            assert same(ours, theirs) and same(ours.cpu(), here), (x.shape, x.stride())
    assert operators.KERNELS.fused.total() and operators.KERNELS.eager > before  # those of the CPU are eager


@pytest.mark.parametrize("how", test_tiled_codes.CASTS, ids=str)
def test_tiled_codes_compiled_are_eager_bit_by_bit(how: test_tiled_codes.Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    there = [x.cuda() for x in test_tiled_codes.pieces(how.source)]
    eager = [test_tiled_codes.cast(x, how) for x in there]
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    for x, wanted in zip(there, eager, strict=True):
        result = test_tiled_codes.cast(x, how)
        assert test_tiled_codes.same(result, wanted), (x.shape, x.stride())
        assert test_tiled_codes.same([tensor.cpu() for tensor in result], test_tiled_codes.cast(x.cpu(), how))


@pytest.mark.parametrize("role", Role)
def test_both_orientations_in_nvfp4_are_those_of_a_processor(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    there, here = (precisions.get("nvfp4").arithmetic(B200).layer("one") for _ in range(2))
    for compiles in (True, False):
        x = torch.cat([AWKWARD, AWKWARD])[:256].bfloat16().nan_to_num(1.0, 1.0, -1.0)
        both = zip(there.cast_both(x.cuda(), role), here.cast_both(x, role), strict=True)
        for result, wanted in both:
            assert result is not None and wanted is not None
            for ours, theirs in zip(result.tensors, wanted.tensors, strict=True):
                assert torch.equal(ours.view(torch.uint8).cpu(), theirs.view(torch.uint8)), role
        if compiles:
            operators.KERNELS.compile(*operators.KERNELS.wanted)


@pytest.mark.parametrize("delayed", DELAYED, ids=str)
def test_delayed_scales_compiled_are_eager_bit_by_bit(delayed: DelayedScaling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    eager = course(delayed, E4M3, "cuda")
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    compiled = course(delayed, E4M3, "cuda")
    assert operators.KERNELS.fused.total() == len(compiled)
    for ours, theirs, here in zip(eager, compiled, course(delayed, E4M3), strict=True):
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, theirs, here, strict=True))


def kernels_of(call: Callable[[], object]) -> list[str]:
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    names = [item.name for item in profile.events() if item.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if not name.startswith(("Memset", "Memcpy"))]


@pytest.mark.parametrize("by_hand", [False, True], ids=["compiled", "by hand"])
@pytest.mark.parametrize("turned", [False, True], ids=["by rows", "turned"])
def test_casts_start_as_many_kernels_as_they_say(turned: bool, by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_hand and explain_no_triton(torch.device("cuda", 0)):
        pytest.skip(explain_no_triton(torch.device("cuda", 0)))
    with choose_cast_compiler(by_hand):
        count_kernels(turned, by_hand, monkeypatch)


def count_kernels(turned: bool, by_hand: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # In Triton, rows of a transpose need a launch that zeroes magnitudes and a launch that fills them.
    rows, squares = (3 if turned else 1, 1) if by_hand else (1, 2)
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    x = x.t() if turned else x
    amax, scale = torch.ones((), device="cuda"), torch.ones((), device="cuda")
    history, casts = torch.zeros(1024, device="cuda"), torch.zeros((), dtype=torch.int32, device="cuda")
    nvfp4 = precisions.get("nvfp4").arithmetic(B200).layer("one")
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "amax": (1, lambda: largest_magnitude(x)),
        "scale": (1, lambda: compute_current_scale(amax, E4M3, ScaleRounding.EXACT)),
        "both": (1, lambda: cast_codes_with_transpose(x, E4M3, scale)),
        "row": (rows, lambda: row_codes(x, E4M3, ScaleRounding.EXACT)),
        "blocks": (1, lambda: row_codes(x, E4M3, ScaleRounding.EXACT, 128)),
        "squares": (squares, lambda: square_codes(x, E4M3, ScaleRounding.EXACT, both=True)),
        "mx": (1, lambda: tiled_codes(x, E4M3, MX)),
        "nvfp4": (2, lambda: tiled_codes(x, E2M1, NVFP4, amaxes=scale)),
        "nvfp4 of a gradient, rotated": (3, lambda: nvfp4.cast_both(x, Role.GRADIENT)),
        "nvfp4 of a weight": (2, lambda: nvfp4.cast_both(x, Role.WEIGHT, scale)),
        "delayed": (1, lambda: delayed_scale(amax, history, casts, scale, E4M3, DelayedScaling(1024))),
    }
    for _, call in calls.values():
        call()
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    for _, call in calls.values():
        call()  # the first call of a kernel may choose among several
    result = {name: kernels_of(call) for name, (_, call) in calls.items()}
    assert {name: len(tensor) for name, tensor in result.items()} == {
        name: count for name, (count, _) in calls.items()
    }, result
