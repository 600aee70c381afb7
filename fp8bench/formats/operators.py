"""Quantisers as torch operators. An operator runs as one kernel as soon as that kernel has been compiled.

The operator `values` returns the same bits as scaled.py and quantise.py. A call never compiles. It registers its kernel
in KERNELS, and runs as separate operations until the kernel is compiled. For torch's compiler and for dispatch modes, a
call is always one operator.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.formats import quantise, scaled
from fp8bench.formats.compiling import Compiled, KernelDefinition, compile_kernel
from fp8bench.formats.grids import E8M0, FORMATS, Format, Overflow
from fp8bench.formats.memory_layout import MemoryLayout, Quantisation, choose_layout, compute_kernel_factor
from fp8bench.formats.quantise import check_input, compute_seed_key
from fp8bench.formats.recipes import ScaleRounding, Scaling

_QUANTISER_SCHEMA = (
    "(Tensor x, Tensor(a!) out, str fmt, str overflow, int rows, int columns, str scale_format, str rounding, "
    "Tensor? scale, Tensor? seed) -> ()"
)
# The names of the operators. They differ in what has a scale: nothing, a tensor, a row, a block with a float32 scale, a
# block with an e8m0 scale, or a block with an e4m3 scale.
OPERATOR_FAMILIES = ("round", "tensor", "row", "block", "mx", "nvfp4")


class Relaunch(NamedTuple):
    """A cast by hand-written kernels, recorded at its first run so that it can be launched again. `layouts` has the
    layout of each output, or None for an output that is not needed. `take` selects the addresses that `launch` needs
    from the addresses of all inputs and outputs.
    """

    layouts: tuple[tuple[Sequence[int], Sequence[int], torch.dtype] | None, ...]
    launch: Callable[[Sequence[int]], bool]
    take: Callable[[Sequence[int]], Sequence[int]]

    def run(self, device: torch.device, addresses: list[int]) -> tuple[Any, ...] | None:
        """Casts the inputs at these addresses into new memory. Returns None if the launch must be planned again."""
        outputs: list[Tensor | None] = []
        for layout in self.layouts:
            if layout is None:
                outputs.append(None)
                continue
            shape, strides, dtype = layout
            # torch.empty would take twice as long.
            out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            outputs.append(out)
            addresses.append(out.data_ptr())
        return tuple(outputs) if self.launch(self.take(addresses)) else None


def are_operators_observed(x: Tensor) -> bool:
    """Returns whether some mechanism must see each operator that is called for `x`: a dispatch mode, a functorch
    transform, or a tensor subclass.
    """
    return (
        type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class Kernels:
    """The compiled kernels of this process. It can be used by several threads.

    `wanted` are kernels that calls would have used if they had been compiled. `refused` has the error messages of
    kernels that did not compile. `eager` counts calls that ran as separate operations although a kernel exists for
    them. `fused` counts calls that ran as one kernel, by the bits of the kernel's vectors.
    """

    def __init__(self) -> None:
        self.wanted: dict[KernelDefinition, None] = {}
        self.refused: dict[KernelDefinition, str] = {}
        self.eager = 0
        self.fused = Counter[int]()
        # Launches of hand-written casts, by the layouts of their inputs (native_codes.py).
        self.relaunches: dict[Hashable, Relaunch] = {}
        self._ready: dict[KernelDefinition, Compiled] = {}
        self._lock = threading.Lock()

    def get(self, kernel: KernelDefinition) -> Compiled | None:
        compiled_kernel = self._ready.get(kernel)
        # The worker reads these counts to report whether timed steps ran compiled kernels.
        with self._lock:
            if compiled_kernel is not None:
                self.fused[compiled_kernel.bits] += 1
                return compiled_kernel
            self.eager += 1
            if kernel not in self.refused:  # a refused kernel would fail again
                self.wanted[kernel] = None
        return None

    def count_launch(self) -> None:
        with self._lock:
            # Triton kernels count as kernels with vectors of 0 bits.
            self.fused[0] += 1

    def compile(self, *kernels: KernelDefinition) -> None:
        """Compiles kernels. The first time on a machine, a kernel takes seconds. Loaded from torch's cache on disk, it
        takes tenths of a second.

        Raises what torch or a compiler raises. A kernel that fails stays uncompiled and is not requested again.
        """
        for kernel in kernels:
            # A kernel that several cases use is compiled once.
            if kernel in self._ready:
                continue
            try:
                self._ready[kernel] = compile_kernel(kernel)
            except Exception as error:
                self.refused[kernel] = f"{type(error).__name__}: {error}"
                raise
            # Take the kernel out of `wanted` even after a failure, because it would fail again.
            finally:
                with self._lock:
                    self.wanted.pop(kernel, None)


KERNELS = Kernels()


def values(
    x: Tensor,
    fmt: Format,
    scaling: Scaling | None = None,
    *,
    overflow: Overflow = Overflow.SATURATE,
    seed: Tensor | None = None,
    scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the values of `x` after rounding to a format. With a scaling, the result is that of `scaled.values`, and
    otherwise that of `quantise.round_to`.

    With a scaling, `overflow` has no effect. Without `out`, the result has the memory layout of `x`.
    """
    check_input(x)
    if out is None:
        out = torch.empty_like(x, dtype=torch.float32, requires_grad=False)
    # An operator takes only plain values, so pass the scaling as numbers and strings.
    family, *scaling_arguments = _operator_arguments(scaling)
    getattr(torch.ops.fp8bench, family)(x.detach(), out, fmt.name, overflow.value, *scaling_arguments, scale, seed)
    return out


def _operator_arguments(scaling: Scaling | None) -> tuple[str, int, int, str, str]:
    if scaling is None:
        return "round", 0, 0, "", ""
    scale_format = scaling.scale.name if scaling.scale else ""
    if scaling.scale is not None:
        operator_family = "mx" if scaling.scale is E8M0 else "nvfp4"
    else:
        operator_family = "tensor" if not scaling.rows else "row" if not scaling.columns else "block"
    return operator_family, scaling.rows, scaling.columns, scale_format, scaling.rounding.value


@lru_cache
def _make_scaling(rows: int, columns: int, scale_format: str, rounding: str) -> Scaling | None:
    return (
        Scaling(rows, columns, FORMATS[scale_format] if scale_format else None, ScaleRounding(rounding))
        if rounding
        else None
    )


def _run_quantiser(
    x: Tensor,
    out: Tensor,
    fmt: str,
    overflow: str,
    rows: int,
    columns: int,
    scale_format: str,
    rounding: str,
    scale: Tensor | None,
    seed: Tensor | None,
) -> None:
    scaling = _make_scaling(rows, columns, scale_format, rounding)
    quantisation = Quantisation(FORMATS[fmt], scaling, Overflow(overflow), seed is not None)
    layout = choose_layout(x, out, quantisation)
    # Without a compiled kernel, torch's separate operations compute the same bits.
    kernel = KERNELS.get(layout.kernel) if layout else None
    if layout is not None and kernel is not None:
        _run_kernel(kernel, layout, x, out, compute_kernel_factor(x, quantisation, layout, scale), seed)
    elif scaling is None:
        quantise.round_to(x, quantisation.fmt, out, overflow=quantisation.overflow, seed=seed)
    else:
        scaled.values(x, quantisation.fmt, scaling, seed=seed, scale=scale, out=out)


def _run_kernel(
    kernel: Compiled, layout: MemoryLayout, x: Tensor, out: Tensor, factor: Tensor | None, seed: Tensor | None
) -> None:
    writes_output_directly = layout.can_write_into(out)
    result_memory = layout.empty(out.device) if not writes_output_directly else out.t() if layout.turned else out
    optional_tensors = [
        tensor for tensor in (factor, None if seed is None else compute_seed_key(seed)) if tensor is not None
    ]
    kernel.run(layout.view_as_words(layout.matrix(x)), layout.view_result_as_words(result_memory), *optional_tensors)
    if not writes_output_directly:
        layout.copy_result(result_memory, out)


_LIBRARY = torch.library.Library("fp8bench", "FRAGMENT")  # type: ignore[no-untyped-call]
# The implementation of each operator, by the operator's full name.
OPERATORS: dict[str, Callable[..., object]] = {}


def define_operator(name: str, schema: str, run: Callable[..., object]) -> None:
    """Registers an operator that writes into given tensors, with one implementation for all devices."""
    OPERATORS[f"fp8bench::{name}"] = run
    # Not torch.library.custom_op, which adds 40 us to each call.
    _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # Meta tensors have no memory, so a call with them does nothing.
    _LIBRARY.impl(name, lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]


for _family in OPERATOR_FAMILIES:
    define_operator(_family, _QUANTISER_SCHEMA, _run_quantiser)
