"""Kernels: what one computes, and how it is compiled.

A kernel writes into given memory. Sizes may be free: then it serves tensors of all shapes, without guards that could
fail.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fp8bench.formats import kept_kernels, vector_width

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


# One launch of a GPU for independent kernels, whatever their sizes. They share no memory, so its limit does not matter.
ONE_LAUNCH: Mapping[str, object] = {
    "combo_kernels": True,
    "combo_kernel_allow_mixed_sizes": 2,
    "combo_kernel_peak_memory_pct_threshold": None,
}


class Definition(ABC):
    """A function of tensors by torch's operations; a frozen value whose text identifies it."""

    device: str

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> tuple[()]:
        """Computes by separate operations."""

    def build(self) -> Compiled | None:
        """Compiles it without torch's compiler, where there is a way."""
        return None


class Kernel(Definition):
    """A definition that torch's compiler makes one kernel of."""

    @abstractmethod
    def examples(self) -> list[Tensor]:
        """Tensors to compile for, with numbers, and large enough for a compiler to use threads."""

    @abstractmethod
    def free(self) -> Sequence[Sequence[int]]:
        """The dimensions of each argument whose sizes are free."""

    def options(self) -> Mapping[str, object]:
        return {}


@dataclass(frozen=True)
class PairKernel(Kernel):
    """Two kernels as one, for two views of a tensor, in one launch of a GPU.

    Takes the arguments of the first, then those of the second. Neither may read what the other writes, and their
    examples have no free size in common, so that nothing is assumed about how the views relate.
    """

    first: Kernel
    second: Kernel

    @property
    def device(self) -> str:  # type: ignore[override]
        return self.first.device

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        count = len(self.first.free())
        self.first(*tensors[:count])
        self.second(*tensors[count:])
        return ()

    def examples(self) -> list[Tensor]:
        return [*self.first.examples(), *self.second.examples()]

    def free(self) -> Sequence[Sequence[int]]:
        return [*self.first.free(), *self.second.free()]

    def options(self) -> Mapping[str, object]:
        return {**self.first.options(), **ONE_LAUNCH}


_compiling = threading.Lock()
# Torch's modules for each kernel that was compiled here.
_MODULES: MutableMapping[Callable[..., object], Sequence[ModuleType]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, with the kernel's own arguments.

    `bits` are those of its vectors, 0 where torch had no choice of widths.
    """

    run: Callable[..., object]
    bits: int = 0


def compile_kernel(kernel: Definition) -> Compiled:
    """Compiles a kernel, for a CPU with each width of vectors, of which the fastest is taken.

    A CPU's kernel that this machine has compiled before is loaded without torch's compiler. Raises whatever torch or a
    compiler raises; but a width that does not compile is only left out.
    """
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about itself
        # 1. Some kernels build themselves, as Triton's do.
        if (built := kernel.build()) is not None:
            return built
        # 2. An earlier process may have compiled it, and loading is much quicker.
        assert isinstance(kernel, Kernel)
        if (stored := kept_kernels.read(kernel)) is not None:
            return Compiled(*stored)
        # 3. Compile, and store the result for the next process.
        result = _compile(kernel)
        kept_kernels.keep(kernel, result.run, result.bits, _MODULES.get(result.run, ()))
        return result


def _compile(kernel: Kernel) -> Compiled:
    widths = vector_width.widths(kernel.device) if any(kernel.free()) else ()
    # Measuring is slow, so the choice is stored for all processes.
    if len(widths) < 2:
        return Compiled(_built(kernel, *widths), *widths)
    choice = vector_width.Kept(_made_of(kernel))
    bits = choice.read()
    return Compiled(_built(kernel, bits), bits) if bits else _fastest(kernel, widths, choice)


def _fastest(kernel: Kernel, widths: Sequence[int], choice: vector_width.Kept) -> Compiled:
    built: dict[int, Callable[..., object]] = {}
    for bits in widths:
        with contextlib.suppress(Exception):  # a compiler may fail in any way
            built[bits] = _built(kernel, bits)
    if not built:
        return Compiled(_built(kernel, widths[0]), widths[0])  # which raises the reason
    bits, seconds = vector_width.fastest(built, kernel.examples())
    bits = choice.keep(bits, kernel=str(kernel), seconds=seconds)
    return Compiled(built[bits] if bits in built else _built(kernel, bits), bits)


def _built(kernel: Kernel, bits: int = 0) -> Callable[..., object]:
    """Compiles a kernel with vectors of `bits`; 0 leaves the width to torch.

    Inductor is called directly: torch.compile's result has guards, four times the overhead of a call, and is lost where
    a dispatch mode was on at its first call.
    """
    from torch._inductor import config, standalone_compile

    with config.patch(_options(kernel, bits, config)):
        mode, graph, inputs = _trace(kernel)
        # Without this context torch 2.11, which finds no outputs in the graph, would make fixed sizes free.
        with torch._guards.tracing(torch._guards.TracingContext(mode)), kept_kernels.modules_made() as modules:
            run: Callable[..., object] = standalone_compile(graph, [*inputs], dynamic_shapes="from_tracing_context")
    _MODULES[run] = modules
    return run


def _made_of(kernel: Kernel) -> str:
    _, graph, inputs = _trace(kernel)
    return "\n".join([graph.code, *(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}" for tensor in inputs)])


def _options(kernel: Kernel, bits: int, config: object) -> dict[str, object]:
    """Inductor's options, as far as this version of torch has them.

    Threads as many as torch has at a call, and no process left behind; on a GPU divisions, products and subnormals as
    in torch's separate operations.
    """
    options: dict[str, object] = {
        "cpp.dynamic_threads": True,
        "compile_threads": 1,
        "emulate_precision_casts": True,
        "emulate_divison_rounding": True,  # its name until torch 2.12
        "eager_numerics.division_rounding": True,
        "eager_numerics.disable_ftz": True,
        **(vector_width.options(bits) if bits else {}),
        **kernel.options(),
    }
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        # Inductor would compile a file and load it in a process of 110 MB to learn what torch knows already.
        options["cpp.vec_isa_ok"] = True
    supported = set(config.get_config_copy()) if hasattr(config, "get_config_copy") else set()
    return {name: value for name, value in options.items() if name in supported}


def _trace(kernel: Kernel) -> tuple[FakeTensorMode, torch.fx.GraphModule, list[Tensor]]:
    """The kernel's operations as a graph, and tensors without memory for it, with free sizes as symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(real: Tensor, free: Sequence[int]) -> Tensor:
        # Sizes that are free become symbols, so that one kernel serves all of them.
        sizes = [DimDynamic.DYNAMIC if number in free else DimDynamic.STATIC for number in range(real.dim())]
        return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    inputs = [fake(real, free) for real, free in zip(kernel.examples(), kernel.free(), strict=True)]
    with mode:
        return mode, make_fx(kernel, tracing_mode="fake")(*inputs), inputs
