"""What products run on: a dispatch mode that looks at their operands, and whether values lie on a format's grid.

Another sees what a step does that a device alone cannot do again: a replay has no host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8bench.formats.grids import Format

# Which arguments of an operator are multiplied with each other. Those of attention are found by the beginning of their
# name. Without gradients some arrive that are taken apart elsewhere (linear, matmul).
_TWO, _AFTER_ONE, _ATTENTION = slice(0, 2), slice(1, 3), "_scaled_dot_product_"
_OPERANDS: Mapping[str, slice] = {
    **dict.fromkeys(
        ("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "einsum", "_int_mm", "_scaled_mm", "_scaled_mm_v2",
         "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "convolution", "_convolution", "conv1d",
         "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "mkldnn_convolution",
         "cudnn_convolution", "mkldnn_linear", "short_product"), _TWO),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr", "_addmm_activation"), _AFTER_ONE),
    "convolution_backward": slice(0, 3),
    "scaled_dot_product_attention": slice(0, 3),
}  # fmt: skip

_SIGNIFICANT = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# What torch calls formats that it has, some versions more of them than others.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "e2m1": "float4_e2m1fn_x2"}


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators that run in its body, and leaves them as they are: each is handed to `see`, which runs it.

    With `unwraps` one on a tensor that wraps others is not: its own operators, on the tensors inside, come next.
    """

    unwraps: ClassVar[bool] = True
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's own word for it: to skip its compiler here it would import it, a second's work and 60 MB."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled, and show the products that they leave to a library.

        Under a mode that says no, torch 2.13 leaves a function that is called for the first time uncompiled for good.
        """
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types if self.unwraps else ():
            if kind is not Tensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        return self.see(func, args, kwargs or {})

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return func(*args, **named)


class ProductWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Counts the operators that run in its body, and names the kernels of attention; `looks` is given the operands of
    each product."""

    unwraps = False

    def __init__(self, looks: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._looks = looks
        self.operators = 0
        self.attention: dict[str, None] = {}

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        name = getattr(func, "overloadpacket", func).__name__
        place = slice(0, 4) if name.startswith(_ATTENTION) else _OPERANDS.get(name)
        self.operators += 1
        if kernel := _attention(name):
            self.attention[kernel] = None
        if place is not None:
            self._looks(tuple(_tensors(args[place])))
        return func(*args, **named)


def _attention(operator: str) -> str:
    """'flash', 'efficient', 'cudnn', or 'math' where torch takes attention apart; '' of any other operator."""
    if operator == "_safe_softmax":  # which nothing else of torch's calls
        return "math"
    kernel, named, _ = operator.removeprefix(_ATTENTION).partition("_attention")
    return kernel if named and operator.startswith(_ATTENTION) else ""


def _tensors(given: Sequence[Any]) -> Iterator[Tensor]:
    """Those of some arguments; of a tensor that wraps others theirs."""
    for argument in given:
        if isinstance(argument, list | tuple):
            yield from _tensors(argument)
        elif isinstance(argument, Tensor):
            flatten = getattr(type(argument), "__tensor_flatten__", None)
            yield from (
                (argument,) if flatten is None else _tensors([getattr(argument, name) for name in flatten(argument)[0]])
            )


# Lines of an operand, and values of each, that are looked at; and how many values may share a scale.
_LINES, _LONGEST = 8, 1024
_RUNS = (_LONGEST, 128, 32, 16)
# So many values for each of their magnitudes are a coarse grid's: of bfloat16's own there are 1.2 among 128 values.
_CROWD = 1.5
_BYTE = 8
# How far float32 arithmetic leaves a scaled value from its grid.
_CLOSE = 1e-5


def has_dtype_of(tensor: Tensor, fmt: Format) -> bool:
    return bool(tensor.dtype == getattr(torch, _DTYPES.get(fmt.name, f"float8_{fmt.name}"), None))


def is_of(tensor: Tensor, fmt: Format) -> bool:
    """Whether a tensor has a format's dtype, or values on its grid in a wider one, whatever their scales.

    Values on a grid have few significant bits where their scale is a power of two, and few magnitudes among many where
    it is not; or they are so once the largest of those that share a scale is the largest of the format.
    """
    if has_dtype_of(tensor, fmt):
        return True
    if _SIGNIFICANT.get(tensor.dtype, 0) <= fmt.mantissa_bits + 1 or tensor.numel() < 2:
        return False
    return _on_grid(tensor.detach(), fmt)


def _on_grid(tensor: Tensor, fmt: Format) -> bool:
    for dimension in {tensor.dim() - 1, max(tensor.dim() - 2, 0), min(1, tensor.dim() - 1)}:
        lines = _sample(tensor.movedim(dimension, -1))
        if not bool(lines.isfinite().all()):
            return False
        if _few_bits(lines, fmt):
            return True
        if fmt.bits > _BYTE:  # formats of torch's own, which nobody scales
            continue
        if _few_magnitudes(lines.reshape(1, -1), fmt):
            return True
        for length in _RUNS:
            runs = lines[:, : lines.shape[1] // length * length].reshape(-1, length) if length < _LONGEST else lines
            if runs.numel() and (_few_magnitudes(runs, fmt) or _fits(runs, fmt)):
                return True
    return False


def _sample(tensor: Tensor) -> Tensor:
    """Some lines along the last dimension, evenly spread, in float32."""
    count = tensor.numel() // tensor.shape[-1]
    lines = tensor[..., :_LONGEST].reshape(count, -1)
    return lines[:: max(1, count // _LINES)][:_LINES].to(torch.float32)


def _few_bits(values: Tensor, fmt: Format) -> bool:
    """No more significant bits than the format has: of a float32 all others are zero."""
    rest = (1 << (23 - fmt.mantissa_bits)) - 1
    return not bool((values.contiguous().view(torch.int32) & rest).any())


def _few_magnitudes(runs: Tensor, fmt: Format) -> bool:
    """In every run no more than the format has, and many values for each in all; zeros are those of an activation."""
    ordered = runs.abs().sort(dim=1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    kinds = (new & (ordered > 0)).sum(dim=1)
    crowded = int((ordered > 0).sum()) >= _CROWD * int(kinds.sum())
    return crowded and int(kinds.max()) < 1 << (fmt.bits - 1)


def _fits(runs: Tensor, fmt: Format) -> bool:
    """On the grid, each run scaled so that its largest magnitude is the format's."""
    largest = runs.abs().amax(dim=1, keepdim=True)
    scaled = runs / torch.where(largest > 0, largest, 1.0) * fmt.largest
    step = torch.exp2(scaled.abs().clamp(min=fmt.smallest_normal).log2().floor() - fmt.mantissa_bits)
    steps = scaled / step
    return bool(((steps - steps.round()).abs() <= _CLOSE * steps.abs().clamp(min=1)).all())


def needs_host(step: Callable[[], object]) -> str:
    """Why a step cannot be replayed, after one that is looked at operator by operator; '' if nothing was seen."""
    seen = _HostParts()
    with seen:
        step()
    return seen.why


class _HostParts(OperatorWatch):  # type: ignore[no-untyped-call]
    """Watches for numbers that go to the device or come from it: a replay has those of the step it was made of."""

    unwraps = False

    def __init__(self) -> None:
        super().__init__()
        self.why = ""

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = func(*args, **named)
        self.why = self.why or moved(str(func), tensors_within((args, named)), tensors_within(result))
        return result


def moved(operator: str, given: Iterable[Any], results: Iterable[Any]) -> str:
    """What an operator moved between host and device, if anything. A number that a kernel is called with is none, nor
    is one that it gives beside results on the device: the seed of attention's dropout."""
    places = {tensor.device.type for tensor in given if tensor.dim() or "copy" in operator}
    after = {result.device.type for result in results}
    if "cpu" in places and after - {"cpu"}:
        return f"its step takes data from the host ({operator}), and a replay would take the same again"
    if places - {"cpu"} and (after == {"cpu"} or "_local_scalar_dense" in operator):
        return f"its step waits for a value of the device ({operator})"
    return ""


def tensors_within(parts: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)]
