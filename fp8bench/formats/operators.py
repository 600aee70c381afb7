"""Quantisers as torch operators: each family is one, which runs as one kernel once that has been compiled.

`values` returns what scaled.py and quantise.py do, bit for bit. A call never compiles: until the kernel that it
registers in KERNELS has been compiled, it runs as separate operations. For a compiler around it and for dispatch modes
a call is one operator either way.
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
from fp8bench.formats.compiling import Compiled, Definition, compile_kernel
from fp8bench.formats.grids import E8M0, FORMATS, Format, Overflow
from fp8bench.formats.memory_layout import MemoryLayout, Quantisation, factor_of, layout_of
from fp8bench.formats.quantise import check_input, check_output, check_seed, checked_overflow, key_of
from fp8bench.formats.recipes import ScaleRounding, Scaling
from fp8bench.formats.scaled import check_scaling

_SCHEMA = (
    "(Tensor x, Tensor(a!) out, str fmt, str overflow, int rows, int columns, str scale_format, str rounding, "
    "Tensor? scale, Tensor? seed) -> ()"
)
FAMILIES = ("round", "tensor", "row", "block", "mx", "nvfp4")
"""The operators: without scaling, with float32 scales of a tensor, row or block, with e8m0 and e4m3 scales."""


class Relaunch(NamedTuple):
    """A cast by hand as it ran once: the layouts of what it wrote, None where it wrote nothing, and its launches.

    `take` picks the launches' addresses of those of inputs and outputs.
    """

    layouts: tuple[tuple[Sequence[int], Sequence[int], torch.dtype] | None, ...]
    launch: Callable[[Sequence[int]], bool]
    take: Callable[[Sequence[int]], Sequence[int]]

    def run(self, device: torch.device, addresses: list[int]) -> tuple[Any, ...] | None:
        """Casts inputs at these addresses into new memory; None where a launch has to be planned again."""
        outputs: list[Tensor | None] = []
        for layout in self.layouts:
            if layout is None:
                outputs.append(None)
                continue
            shape, stride, dtype = layout
            out = torch.empty_strided(shape, stride, dtype=dtype, device=device)  # torch.empty takes twice as long
            outputs.append(out)
            addresses.append(out.data_ptr())
        return tuple(outputs) if self.launch(self.take(addresses)) else None


def is_observed(x: Tensor) -> bool:
    """Whether a dispatch mode, a transform or a subclass has to see the operators that are called."""
    return (
        type(x) is not Tensor
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class Kernels:
    """The kernels of this process. Thread-safe.

    `wanted` are those that calls would have used, had they been compiled; `refused` has the reasons of those that did
    not compile. `eager` counts the calls that ran as separate operations although there is a kernel for them, `fused`
    those that ran as one kernel, by the bits of its vectors.
    """

    def __init__(self) -> None:
        self.wanted: dict[Definition, None] = {}
        self.refused: dict[Definition, str] = {}
        self.eager = 0
        self.fused = Counter[int]()
        # Launches of casts by hand, by the layouts of their inputs (native_codes.py).
        self.relaunches: dict[Hashable, Relaunch] = {}
        self._ready: dict[Definition, Compiled] = {}
        self._lock = threading.Lock()

    def get(self, kernel: Definition) -> Compiled | None:
        ready = self._ready.get(kernel)
        # The worker reads the counts to report whether timed steps ran compiled kernels.
        with self._lock:
            if ready is not None:
                self.fused[ready.bits] += 1
                return ready
            self.eager += 1
            if kernel not in self.refused:
                self.wanted[kernel] = None
        return None

    def count_launch(self) -> None:
        with self._lock:
            self.fused[0] += 1

    def compile(self, *kernels: Definition) -> None:
        """Compiles kernels: seconds for each the first time on a machine, tenths from torch's cache on disk.

        Raises what torch or a compiler raises; such a kernel stays eager and is not wanted again.
        """
        for kernel in kernels:
            # A kernel that several cases ask for is compiled once.
            if kernel in self._ready:
                continue
            try:
                self._ready[kernel] = compile_kernel(kernel)
            except Exception as error:
                self.refused[kernel] = f"{type(error).__name__}: {error}"
                raise
            # Whatever happened, it is not asked for again.
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
    """Returns what scaled.values does, or without scaling what quantise.round_to does, for which alone `overflow` is.

    Without `out` the result has the memory layout of x.
    """
    # 1. Refuse what no kernel could do, with the caller's own names.
    check_input(x)
    check_scaling(fmt, scaling, scale)
    if overflow is not Overflow.SATURATE:
        overflow = checked_overflow(fmt, overflow)
    if seed is not None:
        check_seed(seed)
    # 2. Provide memory, in which the result has the layout of x.
    if out is None:
        out = torch.empty_like(x, dtype=torch.float32, requires_grad=False)
    else:
        check_output(out, x)
    # 3. Operators take plain values, so what describes the call is written out.
    family, *written = _operator_arguments(scaling)
    getattr(torch.ops.fp8bench, family)(x.detach(), out, fmt.name, overflow.value, *written, scale, seed)
    return out


def _operator_arguments(scaling: Scaling | None) -> tuple[str, int, int, str, str]:
    if scaling is None:
        return "round", 0, 0, "", ""
    scale_format = scaling.scale.name if scaling.scale else ""
    if scaling.scale is not None:
        family = "mx" if scaling.scale is E8M0 else "nvfp4"
    else:
        family = "tensor" if not scaling.rows else "row" if not scaling.columns else "block"
    return family, scaling.rows, scaling.columns, scale_format, scaling.rounding.value


@lru_cache
def _read(rows: int, columns: int, scale_format: str, rounding: str) -> Scaling | None:
    return (
        Scaling(rows, columns, FORMATS[scale_format] if scale_format else None, ScaleRounding(rounding))
        if rounding
        else None
    )


def _run(
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
    scaling = _read(rows, columns, scale_format, rounding)
    quantisation = Quantisation(FORMATS[fmt], scaling, Overflow(overflow), seed is not None)
    layout = layout_of(x, out, quantisation)
    # Without a compiled kernel torch's separate operations give the same bits.
    kernel = KERNELS.get(layout.kernel) if layout else None
    if layout is not None and kernel is not None:
        _run_kernel(kernel, layout, x, out, factor_of(x, quantisation, layout, scale), seed)
    elif scaling is None:
        quantise.round_to(x, quantisation.fmt, out, overflow=quantisation.overflow, seed=seed)
    else:
        scaled.values(x, quantisation.fmt, scaling, seed=seed, scale=scale, out=out)


def _run_kernel(
    kernel: Compiled, layout: MemoryLayout, x: Tensor, out: Tensor, factor: Tensor | None, seed: Tensor | None
) -> None:
    direct = layout.takes(out)
    written = layout.empty(out.device) if not direct else out.t() if layout.turned else out
    optional = [tensor for tensor in (factor, None if seed is None else key_of(seed)) if tensor is not None]
    kernel.run(layout.words(layout.matrix(x)), layout.result_words(written), *optional)
    if not direct:
        layout.keep(written, out)


_LIBRARY = torch.library.Library("fp8bench", "FRAGMENT")  # type: ignore[no-untyped-call]
OPERATORS: dict[str, Callable[..., object]] = {}
"""Implementations by operator."""


def define(name: str, schema: str, run: Callable[..., object]) -> None:
    """Registers an operator that writes into given memory, the same on every device."""
    OPERATORS[f"fp8bench::{name}"] = run
    # Not by torch.library.custom_op, whose calls have an overhead of 40 us.
    _LIBRARY.define(name + schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # For tensors without memory a call does nothing.
    _LIBRARY.impl(name, lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]


for _family in FAMILIES:
    define(_family, _SCHEMA, _run)
