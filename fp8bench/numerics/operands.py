"""Watches the operators of torch. It finds operands of products, and checks whether values are on a format's grid.

It also explains why a step depends on the host, so that a recording of the step cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8bench.formats.grids import Format

# For each operator, the positions of the arguments that it multiplies with each other. Attention operators are not
# listed, but recognised by _ATTENTION_PREFIX. While gradients are on, torch decomposes some operators (linear, matmul)
# before `__torch_dispatch__`.
_ATTENTION_PREFIX = "_scaled_dot_product_"
_OPERANDS_BY_OPERATOR: Mapping[str, slice] = {
    **dict.fromkeys(
        ("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear", "einsum", "_int_mm", "_scaled_mm", "_scaled_mm_v2",
         "_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "convolution", "_convolution", "conv1d",
         "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "mkldnn_convolution",
         "cudnn_convolution", "mkldnn_linear", "short_product"), slice(0, 2)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addr", "_addmm_activation"), slice(1, 3)),
    "convolution_backward": slice(0, 3),
    "scaled_dot_product_attention": slice(0, 3),
}  # fmt: skip

_SIGNIFICANT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# torch's names of formats. Some exist only in newer versions.
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "e2m1": "float4_e2m1fn_x2"}


class OperatorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches the operators that run in its context. Each operator is passed to `watch_operator`, which runs it
    unchanged.

    With `unwraps_subclasses`, the watch does not see an operator on a tensor subclass, but the operators that the
    subclass runs.
    """

    unwraps_subclasses: ClassVar[bool] = True
    # Read by torch. With False, torch raises an error if a step calls a higher-order operator, such as flex_attention.
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Called by torch. Returns False. With True, torch would import its compiler in order to exclude
        `__torch_dispatch__` from compilation. The import takes a second and 60 MB.
        """
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Called by torch. Returns True, so that compiled functions stay compiled and show the products that they
        leave to a library.

        With False, torch 2.13 never compiles a function that is first called while a watch is active.
        """
        return True

    # torch's constructor has no types. With this one, a caller that makes a watch needs no `type: ignore`.
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in types if self.unwraps_subclasses else ():
            # Let the subclass run the operator, so that the watch sees the operators inside it.
            if kind is not Tensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented
        return self.watch_operator(func, args, kwargs or {})

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        return func(*args, **named)


class ProductWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Counts operators, collects the names of attention kernels, and passes the operands of each product to the
    function `examine_operands`.
    """

    unwraps_subclasses = False

    def __init__(self, examine_operands: Callable[[Sequence[Tensor]], None]) -> None:
        super().__init__()
        self._examine_operands = examine_operands
        self.operators = 0
        self.attention: dict[str, None] = {}

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        name = getattr(func, "overloadpacket", func).__name__
        # The backward operators of attention multiply their first four arguments: gradient, query, key and value. In
        # forward, the first three are query, key and value, and the fourth is a number, a mask or a bias.
        operand_argument_slice = slice(0, 4) if name.startswith(_ATTENTION_PREFIX) else _OPERANDS_BY_OPERATOR.get(name)
        self.operators += 1
        if kernel := _find_attention_kernel(name):
            self.attention[kernel] = None
        if operand_argument_slice is not None:
            self._examine_operands(tuple(_flatten_tensors(args[operand_argument_slice])))
        return func(*args, **named)


def _find_attention_kernel(operator: str) -> str:
    """Returns the attention kernel of an operator: 'flash', 'efficient', 'cudnn', or 'math' if torch decomposes
    attention.

    Returns '' for other operators.
    """
    if operator == "_safe_softmax":  # only torch's attention operator calls this softmax
        return "math"
    kernel, separator, _ = operator.removeprefix(_ATTENTION_PREFIX).partition("_attention")
    return kernel if separator and operator.startswith(_ATTENTION_PREFIX) else ""


def _flatten_tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from _flatten_tensors(argument)
        elif isinstance(argument, Tensor):
            flatten_subclass = getattr(type(argument), "__tensor_flatten__", None)
            yield from (
                (argument,)
                if flatten_subclass is None
                else _flatten_tensors([getattr(argument, name) for name in flatten_subclass(argument)[0]])
            )


# Along each dimension at most this many vectors of a tensor are examined, each up to the maximum length.
_MAX_EXAMINED_LINES = 8
_MAX_LINE_LENGTH = 1024
# The numbers of consecutive elements that may share a scale.
_EXAMINED_RUN_LENGTHS = (_MAX_LINE_LENGTH, 128, 32, 16)
# If each distinct magnitude occurs at least this often on average, the grid is coarser than bfloat16's. In 128 bfloat16
# values, a distinct magnitude occurs 1.2 times on average.
_MIN_VALUES_PER_MAGNITUDE = 1.5
_MAX_SCALED_FORMAT_BITS = 8
# The tolerance for float32 errors of a scaled value, relative to the value or to the grid spacing, whichever is larger.
_GRID_TOLERANCE = 1e-5


def has_format_dtype(tensor: Tensor, fmt: Format) -> bool:
    return bool(tensor.dtype == getattr(torch, _TORCH_NAMES.get(fmt.name, f"float8_{fmt.name}"), None))


def has_format(tensor: Tensor, fmt: Format) -> bool:
    """Returns whether a tensor has the format's dtype, or has a wider dtype but only values that the format can
    represent with some scale.

    If the scale is a power of two, these values have few significant bits. With other scales, they have few distinct
    magnitudes. Runs of values are also tested with the scale that maps the largest value of a run to the format's
    largest number.
    """
    if has_format_dtype(tensor, fmt):
        return True
    if _SIGNIFICANT_BITS.get(tensor.dtype, 0) <= fmt.mantissa_bits + 1 or tensor.numel() < 2:
        return False
    return _is_on_format_grid(tensor.detach(), fmt)


def _is_on_format_grid(tensor: Tensor, fmt: Format) -> bool:
    # Values that share a scale are usually consecutive along a dimension over which a product sums. This is one of the
    # last two dimensions or, in a convolution, dimension 1 (the channels).
    for dimension in {tensor.dim() - 1, max(tensor.dim() - 2, 0), min(1, tensor.dim() - 1)}:
        dimension_last_tensor = tensor.movedim(dimension, -1)
        vector_count = dimension_last_tensor.numel() // dimension_last_tensor.shape[-1]
        vectors = dimension_last_tensor[..., :_MAX_LINE_LENGTH].reshape(vector_count, -1)
        # Examine only a few evenly spaced vectors along this dimension, because there may be millions.
        spacing = max(1, vector_count // _MAX_EXAMINED_LINES)
        examined_vectors = vectors[::spacing][:_MAX_EXAMINED_LINES].to(torch.float32)
        if not bool(examined_vectors.isfinite().all()):
            return False
        # Scaling by a power of two leaves the mantissa bits that the format lacks at zero.
        unused_mantissa_mask = (1 << (23 - fmt.mantissa_bits)) - 1
        if not bool((examined_vectors.contiguous().view(torch.int32) & unused_mantissa_mask).any()):
            return True
        if fmt.bits > _MAX_SCALED_FORMAT_BITS:  # 16-bit formats are never scaled
            continue
        if _has_few_magnitudes(examined_vectors.reshape(1, -1), fmt):
            return True
        for length in _EXAMINED_RUN_LENGTHS:
            # The longest run is a whole examined vector, which may have fewer than _MAX_LINE_LENGTH values.
            runs = (
                examined_vectors[:, : examined_vectors.shape[1] // length * length].reshape(-1, length)
                if length < _MAX_LINE_LENGTH
                else examined_vectors
            )
            if runs.numel() and (_has_few_magnitudes(runs, fmt) or _fits_scaled_grid(runs, fmt)):
                return True
    return False


def _has_few_magnitudes(runs: Tensor, fmt: Format) -> bool:
    """Returns whether the values of each run (a row of `runs`) seem rounded to a scaled format. Then a run has at most
    as many distinct magnitudes as the format, and on average each magnitude occurs at least _MIN_VALUES_PER_MAGNITUDE
    times. Zeros are not counted, because activations have many zeros.
    """
    sorted_magnitudes = runs.abs().sort(dim=1).values
    new_magnitude_mask = torch.ones_like(sorted_magnitudes, dtype=torch.bool)
    new_magnitude_mask[:, 1:] = sorted_magnitudes[:, 1:] != sorted_magnitudes[:, :-1]
    distinct_magnitude_counts = (new_magnitude_mask & (sorted_magnitudes > 0)).sum(dim=1)
    has_many_values_each = int((sorted_magnitudes > 0).sum()) >= _MIN_VALUES_PER_MAGNITUDE * int(
        distinct_magnitude_counts.sum()
    )
    return has_many_values_each and int(distinct_magnitude_counts.max()) < 1 << (fmt.bits - 1)


def _fits_scaled_grid(runs: Tensor, fmt: Format) -> bool:
    largest_magnitudes = runs.abs().amax(dim=1, keepdim=True)
    scaled_runs = runs / torch.where(largest_magnitudes > 0, largest_magnitudes, 1.0) * fmt.largest
    grid_spacing = torch.exp2(scaled_runs.abs().clamp(min=fmt.smallest_normal).log2().floor() - fmt.mantissa_bits)
    spacing_multiples = scaled_runs / grid_spacing
    return bool(
        (
            (spacing_multiples - spacing_multiples.round()).abs()
            <= _GRID_TOLERANCE * spacing_multiples.abs().clamp(min=1)
        ).all()
    )


def explain_host_dependence(step: Callable[[], object]) -> str:
    """Runs a step and returns why it cannot be replayed without the host, or '' if no reason was found."""
    watch = _HostTransferWatch()
    with watch:
        step()
    return watch.reason


class _HostTransferWatch(OperatorWatch):  # type: ignore[no-untyped-call]
    """Finds values that move between host and device in a step. A replay of the step would repeat the values of the
    recorded step.
    """

    unwraps_subclasses = False

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        result = func(*args, **named)
        self.reason = self.reason or describe_host_transfer(
            str(func), list_tensors((args, named)), list_tensors(result)
        )
        return result


def describe_host_transfer(operator: str, arguments: Iterable[Any], results: Iterable[Any]) -> str:
    """Describes an operator that moves values between host and device. Returns '' for other operators.

    Scalars of the host do not count as arguments of a kernel, but those of a copy do, because the copy moves their
    value. A scalar result next to results on the device does not count either, such as the seed of attention's dropout.
    """
    device_types = {
        tensor.device.type for tensor in arguments if tensor.dim() or not tensor.is_cpu or "copy" in operator
    }
    device_types_of_results = {result.device.type for result in results}
    if "cpu" in device_types and device_types_of_results - {"cpu"}:
        return f"its step takes data from the host ({operator}), and a replay would repeat the same data"
    if device_types - {"cpu"} and (device_types_of_results == {"cpu"} or "_local_scalar_dense" in operator):
        return f"its step waits for a value from the device ({operator})"
    return ""


def list_tensors(parts: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)]
