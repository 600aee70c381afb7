"""Watches operators: the operands of products, whether values are on a format's grid, and whether a step needs the host
and so cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8bench.formats.grids import Format

# The arguments of an operator that are multiplied with each other. Attention's operators are found by their prefix.
# Some operators (linear, matmul) are decomposed earlier unless gradients are off.
_TWO = slice(0, 2)
_AFTER_ONE = slice(1, 3)
_ATTENTION = "_scaled_dot_product_"
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
# torch's names of formats, some of which only newer versions have.
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "e2m1": "float4_e2m1fn_x2"}


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operators that run in its body without changing them: each is passed to `see`, which runs it.

    With `unwraps`, an operator on a tensor subclass is replaced by its inner operators.
    """

    unwraps: ClassVar[bool] = True
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook: skipping its compiler here would import it, which takes a second and 60 MB."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, so that compiled functions stay compiled, and show the products that they leave to a library.
        If this returns False, torch 2.13 never compiles a function that is first called under the mode."""
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
    """Counts operators, names the kernels of attention, and calls `looks` with the operands of each product."""

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
    """Returns 'flash', 'efficient', 'cudnn', or 'math' if torch decomposes attention; '' for other operators."""
    if operator == "_safe_softmax":  # only attention calls it
        return "math"
    kernel, named, _ = operator.removeprefix(_ATTENTION).partition("_attention")
    return kernel if named and operator.startswith(_ATTENTION) else ""


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from _tensors(argument)
        elif isinstance(argument, Tensor):
            flatten = getattr(type(argument), "__tensor_flatten__", None)
            yield from (
                (argument,) if flatten is None else _tensors([getattr(argument, name) for name in flatten(argument)[0]])
            )


# The number of lines of an operand that are examined, their length, and lengths of runs that may share a scale.
_LINES = 8
_LONGEST = 1024
_RUNS = (_LONGEST, 128, 32, 16)
# At least this many values per distinct magnitude indicate a coarse grid: bfloat16's own has 1.2 in 128 values.
_CROWD = 1.5
_BYTE = 8
# The float32 error of a scaled value against its grid.
_CLOSE = 1e-5


def has_dtype_of(tensor: Tensor, fmt: Format) -> bool:
    return bool(tensor.dtype == getattr(torch, _DTYPES.get(fmt.name, f"float8_{fmt.name}"), None))


def has_format(tensor: Tensor, fmt: Format) -> bool:
    """Whether a tensor has the format's dtype, or values on its grid in a wider dtype, with any scale.

    Values on a grid have few significant bits if their scale is a power of two, and few distinct magnitudes otherwise;
    or they are on the grid once the largest of those that share a scale is mapped to the format's largest.
    """
    if has_dtype_of(tensor, fmt):
        return True
    if _SIGNIFICANT.get(tensor.dtype, 0) <= fmt.mantissa_bits + 1 or tensor.numel() < 2:
        return False
    return _on_grid(tensor.detach(), fmt)


def _on_grid(tensor: Tensor, fmt: Format) -> bool:
    for dimension in {tensor.dim() - 1, max(tensor.dim() - 2, 0), min(1, tensor.dim() - 1)}:
        moved = tensor.movedim(dimension, -1)
        count = moved.numel() // moved.shape[-1]
        # Some lines along the dimension, evenly spread.
        lines = moved[..., :_LONGEST].reshape(count, -1)[:: max(1, count // _LINES)][:_LINES].to(torch.float32)
        if not bool(lines.isfinite().all()):
            return False
        unused_bits = (1 << (23 - fmt.mantissa_bits)) - 1
        if not bool((lines.contiguous().view(torch.int32) & unused_bits).any()):
            return True
        if fmt.bits > _BYTE:  # 16-bit formats are never scaled
            continue
        if _few_magnitudes(lines.reshape(1, -1), fmt):
            return True
        for length in _RUNS:
            runs = lines[:, : lines.shape[1] // length * length].reshape(-1, length) if length < _LONGEST else lines
            if runs.numel() and (_few_magnitudes(runs, fmt) or _fits(runs, fmt)):
                return True
    return False


def _few_magnitudes(runs: Tensor, fmt: Format) -> bool:
    """Whether every run has no more magnitudes than the format, and many values for each. Zeros do not count, because
    activations have many."""
    ordered = runs.abs().sort(dim=1).values
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    kinds = (new & (ordered > 0)).sum(dim=1)
    crowded = int((ordered > 0).sum()) >= _CROWD * int(kinds.sum())
    return crowded and int(kinds.max()) < 1 << (fmt.bits - 1)


def _fits(runs: Tensor, fmt: Format) -> bool:
    largest = runs.abs().amax(dim=1, keepdim=True)
    scaled = runs / torch.where(largest > 0, largest, 1.0) * fmt.largest
    step = torch.exp2(scaled.abs().clamp(min=fmt.smallest_normal).log2().floor() - fmt.mantissa_bits)
    steps = scaled / step
    return bool(((steps - steps.round()).abs() <= _CLOSE * steps.abs().clamp(min=1)).all())


def needs_host(step: Callable[[], object]) -> str:
    """Runs a step and returns why it cannot be replayed; '' if no reason was found."""
    parts = _HostParts()
    with parts:
        step()
    return parts.why


class _HostParts(OperatorWatch):  # type: ignore[no-untyped-call]
    """Finds values that are moved to the device or from it: a replay repeats those of the recorded step."""

    unwraps = False

    def __init__(self) -> None:
        super().__init__()
        self.why = ""

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = func(*args, **named)
        self.why = self.why or transfer(str(func), tensors_within((args, named)), tensors_within(result))
        return result


def transfer(operator: str, given: Iterable[Any], results: Iterable[Any]) -> str:
    """Returns what an operator moved between host and device, if anything. A kernel's number arguments do not count,
    nor does a number that comes with results on the device: the seed of attention's dropout."""
    places = {tensor.device.type for tensor in given if tensor.dim() or "copy" in operator}
    result_places = {result.device.type for result in results}
    if "cpu" in places and result_places - {"cpu"}:
        return f"its step takes data from the host ({operator}), and a replay would take the same again"
    if places - {"cpu"} and (result_places == {"cpu"} or "_local_scalar_dense" in operator):
        return f"its step waits for a value of the device ({operator})"
    return ""


def tensors_within(parts: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)]
