"""Fused quantisers: which there are, what each computes, and how one is compiled.

A kernel reads words (vector_access.py) in one canonical layout and writes words of the same shape into memory that it
is given. Sizes are free where a layout says so: a kernel serves tensors of all shapes and has no guards to fail.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

import torch
from torch import Tensor

from fp8bench.formats import vector_width
from fp8bench.formats.blocks import block_values, magnitudes_left
from fp8bench.formats.grids import E4M3, E8M0, Format, Overflow
from fp8bench.formats.quantise import quantised, rounded_magnitudes
from fp8bench.formats.random_bits import drawn_bits
from fp8bench.formats.scalings import Scaling
from fp8bench.formats.vector_access import (
    float_lanes,
    joined,
    joined_magnitudes,
    lanes,
    magnitudes,
    result_words,
    words,
)


class Layout(StrEnum):
    """How a kernel sees a matrix that lies in memory row by row; the second half are those of transposed operands.

    FLAT as a row of elements, ROWS and COLUMNS with one factor each, BLOCKS (blocks, size) as parts of rows,
    UPRIGHT (down, size, columns) as parts of columns, RECTANGLES (down, rows, across, columns).
    """

    FLAT = "flat"
    ROWS = "rows"
    BLOCKS = "blocks"
    RECTANGLES = "rectangles"
    COLUMNS = "columns"
    UPRIGHT = "upright"


_FREE = {
    Layout.FLAT: (0,),
    Layout.ROWS: (0, 1),
    Layout.BLOCKS: (0,),
    Layout.RECTANGLES: (0, 2),
    Layout.COLUMNS: (0, 1),
    Layout.UPRIGHT: (0, 2),
}
"""The dimensions of words whose sizes a kernel leaves open."""


_SHORTEST = 16
"""Columns of a block whose values are taken by twos: half as many words fill a vector of 256 bits."""


@dataclass(frozen=True)
class Kernel:
    """One fused quantiser.

    `scaling` is that of blocks; what has a factor a tensor, row or column is given it (`factor`), and so are NVFP4's
    UPRIGHT blocks the tensor's scale: others make it faster of their own amaxes. `block` is a block's rows and columns
    in memory, 0 x 0 where there are none.
    """

    fmt: Format
    scaling: Scaling | None
    layout: Layout
    source: torch.dtype
    target: torch.dtype
    device: str
    block: tuple[int, int] = (0, 0)
    overflow: Overflow = Overflow.SATURATE
    factor: bool = False
    stochastic: bool = False

    def __str__(self) -> str:
        """'e4m3fn 1x32 e8m0 rceil, float32 to float32, upright, cpu'."""
        scaled = f" {self.scaling.name}" if self.scaling else " scaled" if self.factor else ""
        drawn = " stochastic" if self.stochastic else ""
        dtypes = " to ".join(str(one).removeprefix("torch.") for one in (self.source, self.target))
        return f"{self.fmt.name}{scaled}{drawn}, {dtypes}, {self.layout!s}, {self.device}"

    @property
    def twos(self) -> bool:
        """Whether words hold two values: bfloat16 ones, unless blocks are shorter than a vector of such words."""
        short = self.layout in (Layout.BLOCKS, Layout.RECTANGLES) and self.block[1] < _SHORTEST
        return self.source is torch.bfloat16 and not short

    @property
    def apart(self) -> bool:
        """Whether a CPU makes all scales first: reading words twice costs less than making scales one at a time."""
        return self.device == "cpu" and (self.twos or (self.scaling is not None and self.scaling.scale is E4M3))

    @property
    def exact(self) -> bool:
        """Whether the target has every value that comes out, if it is bfloat16.

        It has those of formats of 8 bits and less. Under a power of two, too: a value of bfloat16's that lies so low
        that elements go below its subnormals is a whole number of their steps, before and after rounding.
        """
        plain = self.scaling is None and not self.factor
        return self.fmt.bits <= 8 and (plain or (self.scaling is not None and self.scaling.scale is E8M0))

    def __call__(self, given: Tensor, out: Tensor, *others: Tensor) -> tuple[()]:
        """Quantise words into words, by torch's operations. Others: the factor, the seed's key, of kernels with one.

        Factors are () or (rows, 1), or (1, words) for COLUMNS; for UPRIGHT blocks of NVFP4's it is the tensor's scale.
        """
        factor = others[0] if self.factor else None
        random = self._random(given, others[-1]) if self.stochastic else None
        if self.fmt.signed_zero:
            left = self._left(magnitudes(given), factor, random)
            out.copy_(joined_magnitudes(left, given, self.target, self.exact))
        else:
            values = self._left(lanes(given), factor, random)
            out.copy_(joined(values, self.target, self.exact))
        return ()

    def _left(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        """What is left of values, or of their magnitudes, where the format has a sign for every one."""
        if self.scaling is None:
            return self._elements(values, factor, random)
        if self.layout is Layout.UPRIGHT:
            return self._upright(values, factor, random)
        if self.fmt.signed_zero:
            return magnitudes_left(values, self.fmt, self.scaling, factor, random, self.apart)
        return block_values(values, self.fmt, self.scaling, factor, random)

    def _elements(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        drawn: Sequence[Tensor | None] = random or [None] * len(values)
        if factor is None:
            return [self._rounded(one, by) for one, by in zip(values, drawn, strict=True)]
        # Columns have factors of their own: those of two neighbours stand in a word, too.
        factors = float_lanes(factor) if self.layout is Layout.COLUMNS else [factor] * len(values)
        rounded = [self._rounded(one * by, draw) for one, by, draw in zip(values, factors, drawn, strict=True)]
        return [one * by.reciprocal() for one, by in zip(rounded, factors, strict=True)]

    def _rounded(self, values: Tensor, random: Tensor | None) -> Tensor:
        how = rounded_magnitudes if self.fmt.signed_zero else quantised
        return how(values, self.fmt, random, self.overflow)

    def _upright(self, values: list[Tensor], factor: Tensor | None, random: list[Tensor] | None) -> list[Tensor]:
        """Each column of words holds columns of elements, whose blocks have scales of their own."""
        assert self.scaling is not None
        left = []
        blocks = magnitudes_left if self.fmt.signed_zero else block_values
        for lane, one in enumerate(values):
            drawn = [random[lane].unsqueeze(-1)] if random else None
            left += blocks([one.unsqueeze(-1)], self.fmt, self.scaling, factor, drawn)
        return [one.squeeze(-1) for one in left]

    def _random(self, given: Tensor, key: Tensor) -> list[Tensor]:
        """Numbers for each lane, counted along the rows of the operand, which are columns in memory if it is turned."""
        every = 2 if self.twos else 1
        columns = torch.arange(given.shape[-1], dtype=torch.int32, device=key.device) * every
        rows = torch.arange(prod(given.shape[:-1]), dtype=torch.int32, device=key.device).view(*given.shape[:-1], 1)
        if self.layout is Layout.UPRIGHT:
            columns = columns * (given.shape[0] * given.shape[1])
            return [drawn_bits(columns + (rows + lane * given.shape[0] * given.shape[1]), key) for lane in range(every)]
        rows = rows * (given.shape[-1] * every)
        return [drawn_bits(rows + (columns + lane), key) for lane in range(every)]


_compiling = threading.Lock()


@dataclass(frozen=True)
class Compiled:
    """A kernel to be called as it is, with what it takes alone, in the same order.

    `bits` are those of its vectors, 0 where torch had none to choose from.
    """

    run: Callable[..., object]
    bits: int = 0


def compiled(kernel: Kernel) -> Compiled:
    """The kernel compiled; with the width of vectors that is fastest here, for which it is compiled with each once.

    Raises whatever torch or a compiler raises; a width alone that does not compile is not taken.
    """
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's about itself
        widths = vector_width.widths(kernel.device)
        if len(widths) < 2:
            return Compiled(_built(kernel, *widths), *widths)
        kept = vector_width.Kept(_made_of(kernel))
        bits = kept.read()
        return Compiled(_built(kernel, bits), bits) if bits else _fastest(kernel, widths, kept)


def _fastest(kernel: Kernel, widths: Sequence[int], kept: vector_width.Kept) -> Compiled:
    """The kernel with each width, timed; the choice is kept."""
    built: dict[int, Callable[..., object]] = {}
    for bits in widths:
        with contextlib.suppress(Exception):  # a compiler may fail in any way
            built[bits] = _built(kernel, bits)
    if not built:
        return Compiled(_built(kernel, widths[0]), widths[0])  # which raises the reason
    bits, seconds = vector_width.fastest(built, _examples(kernel))
    bits = kept.keep(bits, kernel=str(kernel), seconds=seconds)
    return Compiled(built[bits] if bits in built else _built(kernel, bits), bits)


def _built(kernel: Kernel, bits: int = 0) -> Callable[..., object]:
    """The kernel compiled with vectors of so many bits, of torch's choice for 0.

    Inductor is called directly: what torch.compile gives has guards, four times the overhead of a call, and is lost
    where a dispatch mode was on at its first call.
    """
    from torch._inductor import config, standalone_compile

    with config.patch(_options(kernel, bits, config)):
        graph, inputs = _traced(kernel)
        return standalone_compile(graph, [*inputs], dynamic_shapes="from_graph")


def _made_of(kernel: Kernel) -> str:
    """All that a compiler is given, as text."""
    graph, inputs = _traced(kernel)
    return "\n".join([graph.code, *(f"{one.dtype} {tuple(one.shape)} {one.stride()}" for one in inputs)])


def _options(kernel: Kernel, bits: int, config: object) -> dict[str, object]:
    """Inductor's options, as far as this version of torch has them.

    Threads as many as torch has at a call, no process left behind; on a GPU divisions, products and subnormals as
    torch has them one operation at a time.
    """
    wanted: dict[str, object] = {
        "cpp.dynamic_threads": True,
        "compile_threads": 1,
        "emulate_precision_casts": True,
        "emulate_divison_rounding": True,  # its name until torch 2.12
        "eager_numerics.division_rounding": True,
        "eager_numerics.disable_ftz": True,
        **(vector_width.options(bits) if bits else {}),
    }
    if torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        # Inductor would compile a file and load it in a process of 110 MB to see what torch knows already.
        wanted["cpp.vec_isa_ok"] = True
    if kernel.stochastic and kernel.layout is Layout.UPRIGHT:
        # The places of elements stay integers in vectors: as an index down the columns each would be found alone.
        wanted["constant_and_index_propagation"] = False
    known = set(config.get_config_copy()) if hasattr(config, "get_config_copy") else set()
    return {name: value for name, value in wanted.items() if name in known}


def _traced(kernel: Kernel) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The kernel's operations as a graph, and tensors without memory for it, free sizes as symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    free = _FREE[kernel.layout]

    def fake(real: Tensor, free: Sequence[int]) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if one in free else DimDynamic.STATIC for one in range(real.dim())]
        return mode.from_tensor(real, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    given, out, *others = _examples(kernel)
    every = range(given.dim())
    inputs = [fake(given, free), fake(out, free), *(fake(one, every[: one.dim()]) for one in others)]
    with mode:
        return make_fx(kernel, tracing_mode="fake")(*inputs), inputs


# No size of a block: torch 2.11 takes a free size that equals a fixed one for the same size, and kernels crash.
_MANY, _ROWS, _COLUMNS = 1 << 20, 20, 24


def _examples(kernel: Kernel) -> list[Tensor]:
    """Tensors of a kernel's layout with random numbers, large enough that a compiler thinks of threads."""
    shapes = {
        Layout.FLAT: (_MANY,),
        Layout.ROWS: (_ROWS * 32, _COLUMNS * 32),
        Layout.COLUMNS: (_ROWS * 32, _COLUMNS * 32),
        Layout.BLOCKS: (_MANY >> 4, kernel.block[1]),
        Layout.UPRIGHT: (_ROWS, kernel.block[0], _COLUMNS * 32),
        Layout.RECTANGLES: (_ROWS, kernel.block[0], _COLUMNS, kernel.block[1]),
    }
    device = torch.device(kernel.device)
    x = torch.randn(shapes[kernel.layout], generator=torch.Generator().manual_seed(0)).to(device, kernel.source)
    given, out = words(x, kernel.twos), result_words(torch.empty_like(x, dtype=kernel.target), kernel.twos)
    factors = {Layout.ROWS: (given.shape[0], 1), Layout.COLUMNS: (1, x.shape[-1])}
    factor = torch.full(factors.get(kernel.layout, ()), 0.75, dtype=torch.float32, device=device)
    if kernel.layout is Layout.COLUMNS:
        factor = result_words(factor, kernel.twos)
    key = torch.zeros((), dtype=torch.int32, device=device)
    return [given, out, *([factor] if kernel.factor else []), *([key] if kernel.stochastic else [])]
