"""Calls callables on equal inputs, in the worker, and compares their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fp8bench.errors import UsageError
from fp8bench.features.bench.values import DTYPE, DTYPES, INPUTS, SHAPE, TENSOR_FILES, parse_shapes, show_shapes
from fp8bench.nn.own_model import seed_generators
from fp8bench.numerics.norms import relative_frobenius
from fp8bench.protocols import Setup
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named
from fp8bench.worker.bits import digest
from fp8bench.worker.step_guards import LeftRunning, StepPrinted, silent_step
from fp8bench.worker.switches import SwitchesChanged, restore_switches
from fp8bench.workloads.model import is_exhausted

# Relative changes of inputs that float64 shows and float32 does not.
_BELOW_FLOAT32 = 2.0**-30


class CallInputs(NamedTuple):
    """The arguments of a callable: by position, and by name."""

    places: Sequence[Any]
    names: Mapping[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_in((self.places, self.names))

    def changed(self, change: Callable[[Tensor], Tensor]) -> CallInputs:
        """Returns the inputs with each tensor replaced."""
        return CallInputs(*tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, tuple(self)))


def tensors_in(value: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def describe(tensors: Sequence[Tensor]) -> str:
    """Formats tensors like '1024x4096 float32, 8 int64'."""
    return ", ".join(f"{show_shapes([tensor.shape]) or 'a number'} {str(tensor.dtype)[6:]}" for tensor in tensors)


def make_inputs(setup: Setup) -> CallInputs:
    """Returns fresh inputs of a case, the same each time. Raises UsageError without inputs."""
    params, device = setup.params, setup.facts.key
    if SHAPE in params:
        return draw_inputs(parse_shapes(str(params[SHAPE])), str(params[DTYPE]), device, setup.seed)
    source = str(params[INPUTS])
    given = _load(source) if source.endswith(TENSOR_FILES) else _inputs_of_function(source, setup)
    given = (given,) if isinstance(given, Tensor) else given
    names = given if isinstance(given, Mapping) else {}
    inputs = CallInputs(given if isinstance(given, tuple | list) else (), names)
    if not inputs.tensors:
        raise UsageError(
            f"{source} gives {type(given).__name__} without tensors; expected a tensor, a tuple or list of arguments, "
            "or a dict of arguments by name."
        )
    return inputs.changed(lambda tensor: tensor.to(device))


def draw_inputs(shapes: Sequence[Sequence[int]], dtype: str, device: str, seed: int) -> CallInputs:
    """Draws normal numbers in float32, so that all dtypes round the same ones."""
    random = torch.Generator(device).manual_seed(seed)
    tensors = (torch.randn(tuple(shape), generator=random, device=device) for shape in shapes)
    return CallInputs([tensor.to(getattr(torch, DTYPES[dtype])) for tensor in tensors], {})


def _load(file: str) -> Any:
    """Reads tensors and plain containers; rejects files that would run code."""
    try:
        if file.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(
            f"{file} cannot be read as tensors: {own_words(error)}. Write a tensor, tuple or dict of tensors with "
            "torch.save, or a .safetensors file; other objects could run code, and are not loaded."
        ) from error


def _inputs_of_function(source: str, setup: Setup) -> Any:
    function = named(source)
    try:
        with seed_generators(setup.seed, setup.facts):
            return function(setup.facts.key, setup.seed)
    except Exception as error:
        if is_exhausted(error):
            raise
        raise UsageError(f"{source}(device, seed), which makes the inputs, fails: {own_words(error)}.") from error


def call(target: str, inputs: CallInputs) -> list[Tensor]:
    """Calls a callable and returns copies of the tensors in its result.

    Raises UsageError if it raises, prints, changes its inputs or a switch of the process, leaves something running, or
    returns no tensor.
    """
    function, tensors = named(target), inputs.tensors
    if isinstance(function, type):
        raise UsageError(
            f"{target} is a class: calling it makes an object, and computes nothing. Give a function, or an object of "
            "it that a variable of the module holds."
        )
    before = list(map(digest, tensors))
    try:
        with silent_step(), restore_switches():
            answer = function(*inputs.places, **inputs.names)
        after = list(map(digest, tensors))  # errors of asynchronous device work surface here
    except (StepPrinted, LeftRunning, SwitchesChanged) as error:
        raise UsageError(f"{target} cannot be measured: {error}") from error
    except Exception as error:
        if is_exhausted(error):
            raise
        raise UsageError(f"{target} cannot be measured with {describe(tensors)}: {own_words(error)}.") from error
    if before != after:
        raise UsageError(
            f"{target} changes its inputs: the next call would get different ones. Let it change copies (.clone())."
        )
    results = tensors_in(answer)
    if not results:
        what = "nothing" if answer is None else f"{type(answer).__name__} without a tensor"
        raise UsageError(f"{target} returns {what}, so that results cannot be compared. Return the result.")
    return [result.detach().clone() for result in results]


def exact_results(target: str, inputs: CallInputs, seed: int) -> list[Tensor] | None:
    """Returns the callable's results in float64 for the same inputs; None if it refuses them or loses precision.

    It loses precision if its results ignore changes that only float64 can represent.
    """
    wide = inputs.changed(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    random = torch.Generator(wide.tensors[0].device).manual_seed(seed)

    def shake(tensor: Tensor) -> Tensor:
        if tensor.dtype is not torch.float64:
            return tensor
        share = torch.rand(tensor.shape, generator=random, dtype=tensor.dtype, device=tensor.device)
        return tensor * (1 + _BELOW_FLOAT32 * share)

    try:
        if not any(map(_needs_float64, call(target, wide.changed(shake)))):
            return None
        return call(target, wide)
    except UsageError:
        return None


def _needs_float64(result: Tensor) -> bool:
    if result.dtype is not torch.float64:
        return False
    finite = result[result.isfinite()]
    return bool((finite.float().double() != finite).any())


def difference(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Returns the largest relative difference between a result and the wanted one, in Frobenius norms.

    For integers it is the share that differs. It is infinite if only one of both is finite, or infinities differ.
    """
    return max(_difference_of_one(*pair) for pair in zip(results, wanted, strict=True))


def _difference_of_one(result: Tensor, wanted: Tensor) -> float:
    if result.is_complex() or wanted.is_complex():
        result, wanted = (torch.view_as_real(one.to(torch.complex128)) for one in (result, wanted))
    if not result.is_floating_point() and not wanted.is_floating_point():
        return float((result != wanted).double().mean()) if result.numel() else 0.0
    result, wanted = _readable(result), _readable(wanted)
    strange = ~(result.isfinite() & wanted.isfinite())
    if bool(strange.any()):
        same = (result.double() == wanted.double()) | (result.isnan() & wanted.isnan())
        if not bool(same[strange].all()):
            return math.inf
        result, wanted = result.masked_fill(strange, 0), wanted.masked_fill(strange, 0)
    return relative_frobenius(result, wanted)


def _readable(tensor: Tensor) -> Tensor:
    """Converts one-byte dtypes, on which torch has no arithmetic, to float32."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
