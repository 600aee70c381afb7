"""Quantisers as operators: fused like eager, bit by bit; what they do before and while being compiled; who may call.

A kernel costs some seconds to compile: a sample of them each time, all of them every night.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8bench.formats import compiling, fused, operators, quantise, scaled, vector_width
from fp8bench.formats.grids import E2M1, E3M2, E4M3, E4M3FNUZ, E5M2, FP16, TF32, Format, Overflow
from fp8bench.formats.memory_layout import Quantisation, choose_layout
from fp8bench.formats.operators import values
from fp8bench.formats.recipes import BLOCK, MX, NVFP4, NVFP4_SQUARE, ROW, SQUARE, TENSOR, Scaling
from tests.counts import for_each, sampled

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


class Asked(NamedTuple):
    """A cast to test, and whether operands are transposed as in backward products."""

    fmt: Format
    scaling: Scaling | None
    source: torch.dtype = F32
    target: torch.dtype = F32
    turned: bool = False
    overflow: Overflow = Overflow.SATURATE
    stochastic: bool = False

    def __str__(self) -> str:
        words = (self.fmt.name, self.scaling and self.scaling.name, self.source, self.target, self.overflow.value)
        flags = ("turned" * self.turned, "stochastic" * self.stochastic)
        return " ".join(str(word).removeprefix("torch.") for word in (*words, *flags) if word)


ASKED = [
    Asked(E4M3, None),
    Asked(E5M2, None, BF16, BF16),
    Asked(E4M3, None, BF16),
    Asked(TF32, None, overflow=Overflow.INFINITY),
    Asked(FP16, None, BF16, BF16, overflow=Overflow.INFINITY),
    Asked(E4M3FNUZ, None, overflow=Overflow.NAN),
    Asked(E2M1, None, stochastic=True),
    Asked(E4M3, TENSOR),
    Asked(E5M2, TENSOR, BF16, BF16),
    Asked(E4M3, ROW),
    Asked(E4M3, ROW, BF16, turned=True),
    Asked(E4M3, BLOCK, BF16),
    Asked(E4M3, BLOCK, turned=True),
    Asked(E4M3, SQUARE, BF16),
    Asked(E4M3, MX),
    Asked(E4M3, MX, BF16, BF16),
    Asked(E2M1, MX, turned=True),
    Asked(E2M1, NVFP4),
    Asked(E2M1, NVFP4, BF16),
    Asked(E2M1, NVFP4, turned=True, stochastic=True),
    Asked(E2M1, NVFP4_SQUARE),
]
# One by rows and transposed, one in blocks.
SAMPLE = [ASKED[10], ASKED[17]]
SEED = torch.tensor(11)


def awkward() -> Tensor:
    """float32 numbers of every kind: subnormals, midpoints, signed zeros, infinities, NaN, and blocks of each."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.randn(160, 256, generator=generator).mul_(torch.randn(160, 256, generator=generator).mul_(8).exp2_())
    bits = torch.randint(-(1 << 31), 1 << 31, (32, 256), generator=generator).to(torch.int32).view(F32)
    halves = torch.arange(-4096, 4096).view(32, 256) / 64
    x = torch.cat([spread, bits, halves])
    x[0, :140], x[1, :40], x[2, 5] = 0.0, -0.0, float("nan")
    x[3, 7], x[4, :32] = float("inf"), float("-inf")
    x[5] *= 1e-38
    x[6] *= 1e36
    x[7, :32] = torch.tensor(1e-45)
    return x


AWKWARD = awkward()


def pieces(asked: Asked) -> Iterator[Tensor]:
    """Tensors for one kernel: several shapes, strides and alignments, complete blocks and not, one element, one row."""
    x = AWKWARD.to(asked.source)
    if asked.turned:
        yield from (x.t(), x[:96].t(), x[:, :1].contiguous().t())
        if asked.source is F32:
            yield x[:45].t()
        return
    yield from (x, x[:96].view(4, 24, 256), x[:, 3:200], x[:1], x.view(-1)[2:514], x.expand(2, *x.shape))
    if asked.source is F32:
        yield from (x.t(), x[0, 0], x[:7, :33], x.view(-1)[1:50], x.half(), x[:, :-1].contiguous().bfloat16())


def eagerly(x: Tensor, asked: Asked) -> Tensor:
    """The eager operations that the operators fuse."""
    out = torch.empty(x.shape, dtype=asked.target, device=x.device)
    seed = SEED.to(x.device) if asked.stochastic else None
    if asked.scaling is None:
        return quantise.round_to(x, asked.fmt, out, overflow=asked.overflow, seed=seed)
    return scaled.values(x, asked.fmt, asked.scaling, seed=seed, out=out)


def called(x: Tensor, asked: Asked, out: Tensor | None = None) -> Tensor:
    """The operator's result in memory with the strides of `x`."""
    out = torch.full_like(x, 7.0, dtype=asked.target) if out is None else out
    seed = SEED.to(x.device) if asked.stochastic else None
    return values(x, asked.fmt, asked.scaling, overflow=asked.overflow, seed=seed, out=out)


def counted() -> tuple[int, int, tuple[compiling.Kernel, ...]]:
    """Calls as many operations, calls as one kernel, and expected kernels."""
    return operators.KERNELS.eager, operators.KERNELS.fused.total(), tuple(operators.KERNELS.wanted)


def differences(one: Tensor, other: Tensor) -> int:
    """Elements that differ in any bit, except NaN payloads."""
    assert one.shape == other.shape and one.dtype == other.dtype
    wide, second = one.float().contiguous().view(torch.int32), other.float().contiguous().view(torch.int32)
    return int(((wide != second) & ~(one.isnan() & other.isnan())).sum())


def compile_for(*every: Asked) -> None:
    """Compiles their kernels unless an earlier test did."""
    for asked in every:
        called(AWKWARD.to(asked.source).t() if asked.turned else AWKWARD.to(asked.source), asked)
    with pytest.MonkeyPatch.context() as patched:  # one width takes half the time: test_vector_width.py has both
        patched.setattr(vector_width, "vector_widths", lambda device: ())
        operators.KERNELS.compile(*operators.KERNELS.wanted)


def assert_fused(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Tensor], list[Tensor]],
    many: list[Tensor],
    same: Callable[[list[Tensor], list[Tensor]], bool],
) -> None:
    """Asserts that all use the same few kernels with dynamic sizes and equal many operations."""
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    monkeypatch.setattr(vector_width, "vector_widths", lambda device: ())
    eager = [call(x) for x in many]
    before, *_ = counted()
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    for x, expected in zip(many, eager, strict=True):
        assert same(call(x), expected), (x.shape, x.stride())
    assert counted()[0] == before and counted()[1] > 0 and not counted()[2]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has requested no kernel yet."""
    monkeypatch.setattr(operators, "KERNELS", operators.Kernels())
    monkeypatch.setattr(vector_width, "vector_widths", lambda device: ())


@pytest.mark.slow
@pytest.mark.parametrize("asked", sampled(SAMPLE, ASKED), ids=str)
def test_fused_is_eager_bit_by_bit(asked: Asked) -> None:
    compile_for(asked)
    before = counted()
    for number, x in enumerate(pieces(asked)):
        assert differences(called(x, asked), eagerly(x, asked)) == 0, (x.shape, x.stride(), x.dtype)
        if number == 0:
            assert counted()[:2] == (before[0], before[1] + 1)


@pytest.mark.slow
@pytest.mark.parametrize("asked", sampled([ASKED[0]], [ASKED[0], ASKED[7], ASKED[9], ASKED[14], ASKED[17]]), ids=str)
def test_any_output_takes_the_values(asked: Asked) -> None:
    compile_for(asked)
    shape = AWKWARD.shape
    outputs = [
        torch.empty(shape, dtype=BF16),
        torch.empty(shape, dtype=F16),
        torch.empty(shape[::-1]).t(),
        torch.empty(shape[0], 300)[:, 7:263],
        torch.empty(AWKWARD.numel() + 1)[1:].view(shape),
    ]
    for out in outputs:
        expected = eagerly(AWKWARD, asked).to(out.dtype)
        assert called(AWKWARD, asked, out) is out
        assert differences(out, expected) == 0, (out.dtype, out.stride())
    inside = AWKWARD.clone()
    assert differences(called(inside, asked, inside), eagerly(AWKWARD, asked)) == 0
    for x in (AWKWARD, AWKWARD.t(), AWKWARD.bfloat16()):
        result = values(x, asked.fmt, asked.scaling)
        assert (result.dtype, result.stride()) == (F32, x.stride())


@pytest.mark.slow
def test_no_call_compiles_or_has_guards_to_fail() -> None:
    from torch._dynamo.utils import counters

    compile_for(ASKED[0], ASKED[14])
    counted = {name: dict(one) for name, one in counters.items()}
    kernels = tuple(operators.KERNELS.wanted)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (1, 2, 3, 31, 64, 129):
            for columns in (32, 64, 96, 128, 1024):
                x = torch.randn(rows, columns)
                for asked in (ASKED[0], ASKED[14]):
                    assert differences(called(x, asked), eagerly(x, asked)) == 0
    assert {name: dict(one) for name, one in counters.items()} == counted
    assert tuple(operators.KERNELS.wanted) == kernels
    # A kernel's library must not link the code that flushes subnormals for the whole process.
    assert float(torch.tensor(1e-40) * 0.5) > 0


@for_each("asked", ASKED)
def test_no_free_size_of_an_example_equals_another_size(asked: Asked) -> None:
    """torch 2.11 treats equal sizes as the same symbol."""
    x = AWKWARD.to(asked.source).t() if asked.turned else AWKWARD.to(asked.source)
    placed = choose_layout(x, torch.empty_like(x, dtype=asked.target), Quantisation(asked.fmt, asked.scaling))
    assert placed is not None
    sizes = placed.kernel.examples()[0].shape
    assert all(sizes.count(sizes[free]) == 1 for free in fused._DYNAMIC_DIMENSIONS_BY_LAYOUT[placed.kernel.layout])


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_what_is_not_compiled_runs_eagerly_and_is_wanted() -> None:
    asked = Asked(E4M3, MX)
    assert not operators.KERNELS.wanted
    for _ in range(2):
        assert differences(called(AWKWARD, asked), eagerly(AWKWARD, asked)) == 0
    assert counted()[:2] == (2, 0)
    assert list(map(str, operators.KERNELS.wanted)) == ["e4m3fn 1x32 e8m0 rceil, float32 to float32, blocks, cpu"]
    operators.KERNELS.compile(*operators.KERNELS.wanted)
    called(AWKWARD, asked)
    assert counted() == (2, 1, ())


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_calls_stay_eager_and_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    asked = Asked(E3M2, None)
    called(AWKWARD, asked)
    (kernel,) = operators.KERNELS.wanted
    # Not by monkeypatch: torch's options do not survive its restore.
    with config.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(Exception, match="compiler"):
        operators.KERNELS.compile(kernel)
    assert "compiler" in operators.KERNELS.refused[kernel]
    assert differences(called(AWKWARD, asked), eagerly(AWKWARD, asked)) == 0
    assert counted() == (2, 0, ())


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("fresh")
def test_a_call_is_one_operator_under_a_dispatch_mode() -> None:
    x, out, scale = AWKWARD, torch.empty_like(AWKWARD), torch.tensor(0.25)
    with Operators() as seen:
        values(x, E4M3, out=out)
        values(x, E4M3, MX, out=out)
        values(x, E4M3, TENSOR, out=out)
        values(x, E4M3, TENSOR, out=out, scale=scale)
        values(x.bfloat16(), E2M1, NVFP4, out=out)
    ours = [name for name in seen.names if name.startswith("fp8bench")]
    assert ours == [f"fp8bench.{family}.default" for family in ("round", "mx", "tensor", "tensor", "nvfp4")]
    assert set(seen.names) <= {*ours, "aten.detach.default", "aten._to_copy.default"}
    assert differences(out, eagerly(x.bfloat16(), Asked(E2M1, NVFP4))) == 0


def test_a_compiler_around_it_sees_one_operator() -> None:
    def model(x: Tensor) -> Tensor:
        return values(x * 2, E4M3, MX) + values(x, E5M2)

    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    expected = model(AWKWARD)
    whole = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)(AWKWARD)
    functional = torch.compile(model, backend="aot_eager", fullgraph=True)(AWKWARD)
    assert differences(whole, expected) == 0 and differences(functional, expected) == 0
    (graph,) = graphs
    assert sum("fp8bench" in str(node.target) for node in graph.graph.nodes) == 2
    torch.compiler.reset()


@pytest.mark.slow
def test_calls_from_many_threads_in_autograd_and_without() -> None:
    compile_for(Asked(E4M3, MX))

    class Through(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return values(x, E4M3, MX)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return values(gradients[0], E4M3, MX)

    x = torch.randn(64, 256)
    expected = eagerly(x, Asked(E4M3, MX))
    failed: list[Tensor] = []

    def work() -> None:
        for _ in range(20):
            one = x.clone().requires_grad_()
            (Through.apply(one) * x).sum().backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                quiet = values(one, E4M3, MX)
            with torch.inference_mode():
                inference = values(x.clone(), E4M3, MX)
            actual = (quiet, inference, x if one.grad is None else one.grad)
            failed.extend(result for result in actual if not torch.equal(result, expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not values(x.clone().requires_grad_(), E4M3, MX).requires_grad
