"""Describes what a kernel computes, and how torch's compiler compiles it.

A kernel writes into tensors that its caller allocated. A dimension of an argument is free if one compiled kernel serves
all sizes of this dimension, without guards that could fail.
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

from fp8bench.formats import stored_kernels, vector_width

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


# Inductor's options for one GPU launch of several independent kernels, whatever their sizes. The kernels share no
# memory, so Inductor's limit on peak memory does not matter.
ONE_LAUNCH_OPTIONS: Mapping[str, object] = {
    "combo_kernels": True,
    "combo_kernel_allow_mixed_sizes": 2,
    "combo_kernel_peak_memory_pct_threshold": None,
}


class KernelDefinition(ABC):
    """An immutable function of tensors that consists of torch's operations. Its text, `str`, identifies the kernel."""

    device: str

    @abstractmethod
    def __call__(self, *tensors: Tensor) -> tuple[()]:
        """Computes the result with separate torch operations and writes it into the output tensors."""

    def build(self) -> Compiled | None:
        """Compiles the kernel without torch's compiler, for example by Triton. Returns None if that is impossible."""
        return None


class Kernel(KernelDefinition):
    """A definition that torch's compiler compiles into one kernel."""

    @abstractmethod
    def examples(self) -> list[Tensor]:
        """Returns example arguments, for which the kernel is compiled. They are large enough that the compiler makes
        the kernel multi-threaded.
        """

    @abstractmethod
    def free(self) -> Sequence[Sequence[int]]:
        """Returns, for each argument, its free dimensions: those whose size may differ from call to call."""

    def options(self) -> Mapping[str, object]:
        return {}


@dataclass(frozen=True)
class CombinedKernel(Kernel):
    """Two kernels in one GPU launch, for two views of a tensor.

    The arguments are those of the first kernel, then those of the second. Neither kernel may read what the other
    writes. In the example arguments, no free dimension of one kernel has the size of a free dimension of the other.
    Otherwise the compiler would assume that the sizes of the two views are related.
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
        return {**self.first.options(), **ONE_LAUNCH_OPTIONS}


def draw_example(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Returns random numbers for an example argument. They are the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.device(device), dtype)


_COMPILE_LOCK = threading.Lock()
# For each kernel that this process has compiled: the modules that torch generated for it.
_GENERATED_MODULES: MutableMapping[Callable[..., object], Sequence[ModuleType]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel, called with the arguments of its definition. `bits` is its vector width."""

    run: Callable[..., object]
    bits: int = 0


def compile_kernel(kernel: KernelDefinition) -> Compiled:
    """Compiles a kernel. A CPU kernel is compiled with each vector width, and the fastest result is taken.

    A CPU kernel that this machine has compiled before is loaded without torch's compiler. Raises whatever torch or a
    compiler raises. If only one of several widths fails to compile, it is left out.
    """
    with _COMPILE_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about torch's own code
        # 1. Some kernels, such as Triton kernels, are compiled without torch's compiler.
        if (built_kernel := kernel.build()) is not None:
            return built_kernel
        # 2. An earlier process may have compiled the kernel. Loading it is much faster.
        assert isinstance(kernel, Kernel)
        if (stored_kernel := stored_kernels.load_kernel(kernel)) is not None:
            return Compiled(*stored_kernel)
        # 3. Compile the kernel, and store the result for later processes.
        result = _compile(kernel)
        stored_kernels.store_kernel(kernel, result.run, result.bits, _GENERATED_MODULES.get(result.run, ()))
        return result


def _compile(kernel: Kernel) -> Compiled:
    vector_widths = vector_width.vector_widths(kernel.device) if any(kernel.free()) else ()
    # Timing the vector widths is slow, so the fastest width is stored for all processes.
    if len(vector_widths) < 2:
        return Compiled(_compile_with_vector_width(kernel, *vector_widths), *vector_widths)
    stored_width_choice = vector_width.StoredWidthChoice(_describe_kernel_graph(kernel))
    bits = stored_width_choice.read()
    return (
        Compiled(_compile_with_vector_width(kernel, bits), bits)
        if bits
        else _compile_fastest(kernel, vector_widths, stored_width_choice)
    )


def _compile_fastest(kernel: Kernel, widths: Sequence[int], stored_choice: vector_width.StoredWidthChoice) -> Compiled:
    compiled_kernel_by_width: dict[int, Callable[..., object]] = {}
    for bits in widths:
        with contextlib.suppress(Exception):  # a compiler may raise any error
            compiled_kernel_by_width[bits] = _compile_with_vector_width(kernel, bits)
    if not compiled_kernel_by_width:
        return Compiled(_compile_with_vector_width(kernel, widths[0]), widths[0])  # raise the compiler's error
    bits, seconds = vector_width.measure_fastest(compiled_kernel_by_width, kernel.examples())
    bits = stored_choice.store(bits, kernel=str(kernel), seconds=seconds)
    return Compiled(
        # Another process may have stored a width that failed to compile above.
        compiled_kernel_by_width[bits]
        if bits in compiled_kernel_by_width
        else _compile_with_vector_width(kernel, bits),
        bits,
    )


def _compile_with_vector_width(kernel: Kernel, bits: int = 0) -> Callable[..., object]:
    """Compiles a kernel with vectors of `bits`. With 0 torch chooses the width.

    It calls Inductor directly and not torch.compile, for two reasons. A function of torch.compile checks guards, so
    that a call has four times the overhead. It also stays uncompiled if a dispatch mode was active at its first call.
    """
    from torch._inductor import config, standalone_compile

    with config.patch(_list_inductor_options(kernel, bits, config)):
        mode, graph, inputs = _trace_graph(kernel)
        # Without this context, torch 2.11 finds no outputs in the graph and treats static sizes as dynamic.
        with (
            torch._guards.tracing(torch._guards.TracingContext(mode)),
            stored_kernels.collect_modules() as generated_modules,
        ):
            run: Callable[..., object] = standalone_compile(graph, [*inputs], dynamic_shapes="from_tracing_context")
    _GENERATED_MODULES[run] = generated_modules
    return run


def _describe_kernel_graph(kernel: Kernel) -> str:
    """Returns the text of a kernel's graph and inputs, which identifies the compiled code."""
    _, graph, inputs = _trace_graph(kernel)
    return "\n".join([graph.code, *(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}" for tensor in inputs)])


def _list_inductor_options(kernel: Kernel, bits: int, config: object) -> dict[str, object]:
    """Returns our options for Inductor, but only those that this version of torch has.

    With these options a kernel uses as many threads as torch has at the call, and compiling leaves no process behind.
    On a GPU, divisions, products and subnormals round as in torch's separate operations.
    """
    options: dict[str, object] = {
        "cpp.dynamic_threads": True,
        "compile_threads": 1,
        "emulate_precision_casts": True,
        "emulate_divison_rounding": True,  # the option's name until torch 2.12
        "eager_numerics.division_rounding": True,
        "eager_numerics.disable_ftz": True,
        **(vector_width.inductor_options(bits) if bits else {}),
        **kernel.options(),
    }
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        # Without this option Inductor compiles a test file and loads it in a process of 110 MB, only to learn what
        # torch knows already.
        options["cpp.vec_isa_ok"] = True
    inductor_option_names = set(config.get_config_copy()) if hasattr(config, "get_config_copy") else set()
    return {name: value for name, value in options.items() if name in inductor_option_names}


def _trace_graph(kernel: Kernel) -> tuple[FakeTensorMode, torch.fx.GraphModule, list[Tensor]]:
    """Returns the kernel's operations as a graph, whose inputs are fake tensors. Free sizes of these tensors are
    symbols.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())

    def fake(real: Tensor, free: Sequence[int]) -> Tensor:
        # Free sizes become symbols, so that one kernel serves all of them.
        sizes = [DimDynamic.DYNAMIC if number in free else DimDynamic.STATIC for number in range(real.dim())]
        return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    inputs = [fake(real, free) for real, free in zip(kernel.examples(), kernel.free(), strict=True)]
    with mode:
        return mode, make_fx(kernel, tracing_mode="fake")(*inputs), inputs
