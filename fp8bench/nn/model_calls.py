"""Finds out how a batch is passed to a user's model and what the model's loss is. If that is not clear, an error
explains what the user's function must return.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy as shallow
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.around import widen_dtype

# A function that returns the loss of an output. If it has two arguments, the second is the batch.
LossFunction = Callable[..., Tensor]
_MAX_ERROR_TEXT_LENGTH = 300
_MAKE_RETURN_TEXT = (
    "make() must return (model, batch) with a batch that forward accepts, or (model, batch, loss) with a batch whose "
    "first items or keywords forward accepts"
)


def iterate_named_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    named_parts: Iterable[tuple[Any, Any]]
    # Messages show a tensor's path, for example `inputs.0`.
    if isinstance(value, Mapping):
        named_parts = value.items()
    elif isinstance(value, list | tuple):
        named_parts = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value) and not isinstance(value, type):
        named_parts = ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        return
    for name, part in named_parts:
        yield from iterate_named_tensors(part, f"{path}.{name}" if path else str(name))


def move_to_device(value: Any, device: torch.device | str, copy: bool = False) -> Any:
    """Moves all tensors in a value to the device. A tensor that occurs twice is moved once. With `copy`, tensors that
    are already there are copied, for models that change their inputs.
    """
    moved_tensors: dict[int, Tensor] = {}

    def move_part(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in moved_tensors:
                moved_tensors[id(part)] = part.to(device, non_blocking=True, copy=copy)
            return moved_tensors[id(part)]
        # Rebuild containers with the moved parts, and keep their class.
        if isinstance(part, Mapping):
            # Make a shallow copy, because a custom class of mapping may have attributes.
            moved_mapping = shallow(part) if isinstance(part, MutableMapping) else {}
            for name, value in part.items():
                moved_mapping[name] = move_part(value)
            return moved_mapping
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(move_part, part))
        if is_dataclass(part) and not isinstance(part, type):
            device_copy = shallow(part)
            for field in fields(part):
                # a plain assignment fails for a frozen dataclass
                object.__setattr__(device_copy, field.name, move_part(getattr(part, field.name)))
            return device_copy
        return type(part)(map(move_part, part)) if isinstance(part, list | tuple) else part

    return move_part(value)


def make_call(model: nn.Module, batch: Any, has_loss: bool = False) -> Callable[[], Any]:
    """Returns a function that runs the model's forward pass on a batch.

    A mapping is passed as keywords, and a tuple or list as positional arguments. A tensor is passed alone, and a pair
    (list, mapping) as positional arguments and keywords. Raises UsageError if forward does not accept the batch, or
    if a tensor is not on the model's device. The returned function raises UsageError if the model fails.
    """
    positional_arguments, named_arguments = make_arguments(model, batch, has_loss)
    model_device = next((parameter.device for parameter in model.parameters()), None)
    # Check devices before the call, because torch's message would not name the argument.
    for name, tensor in iterate_named_tensors(batch):
        if model_device is not None and tensor.device != model_device:
            raise UsageError(
                f"{name or 'the batch'} is on {tensor.device}, but the model is on {model_device}: move one of them"
            )

    def call() -> Any:
        try:
            return model(*positional_arguments, **named_arguments)
        except torch.OutOfMemoryError:  # not a mistake in the user's code
            raise
        except Exception as error:
            raise UsageError(
                f"forward of {_get_class_name(model)} fails on this batch: {shorten_error(error)}"
            ) from error

    return call


def shorten_error(error: BaseException) -> str:
    message = " ".join(str(error).split())
    short_error_message = (
        message if len(message) <= _MAX_ERROR_TEXT_LENGTH else f"{message[:_MAX_ERROR_TEXT_LENGTH]}..."
    )
    return f"{type(error).__name__}: {short_error_message}" if short_error_message else type(error).__name__


# The positional and the keyword arguments of forward.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def make_arguments(model: nn.Module, batch: Any, has_loss: bool = False) -> Arguments:
    return choose_batch_unpacking(model, batch, has_loss)(batch)


def choose_batch_unpacking(model: nn.Module, batch: Any, has_loss: bool = False) -> Callable[[Any], Arguments]:
    """Returns a function that turns batches into arguments of the model's forward pass. All batches must have the
    form of this one. If there is a loss function, which gets the whole batch, forward may get a part of the batch: the
    first items of a sequence, or those entries of a mapping that forward accepts as keywords.

    Raises UsageError if forward does not accept the batch.
    """
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        raise UsageError(
            f"forward of {_get_class_name(model)} has no signature that Python can read, and its layers cannot be "
            "reached (as with torch.jit): return the module that it was made from"
        ) from None
    # Use the first way of passing the batch that forward's signature accepts.
    first_signature_error = ""
    for call in _list_call_styles(batch, tuple(signature.parameters), has_loss):
        positional_arguments, named_arguments = call(batch)
        try:
            signature.bind(*positional_arguments, **named_arguments)
        except TypeError as error:
            first_signature_error = first_signature_error or str(error)
        else:
            return call
    parameter_names = (
        ", ".join(name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty)
        or "nothing"
    )
    problem = first_signature_error or f"a batch of type {type(batch).__name__} was given"
    raise UsageError(f"forward of {_get_class_name(model)} takes ({parameter_names}): {problem}; {_MAKE_RETURN_TEXT}")


def _list_call_styles(batch: Any, parameters: Sequence[str], has_loss: bool) -> Iterator[Callable[[Any], Arguments]]:
    if isinstance(batch, Tensor):
        yield lambda batch: ((batch,), {})
    elif isinstance(batch, Mapping):
        if all(isinstance(name, str) for name in batch):
            yield lambda named: ((), dict(named))
        accepted_keyword_names = [name for name in parameters if name in batch]
        if has_loss and accepted_keyword_names:
            yield lambda named: ((), {name: named[name] for name in accepted_keyword_names})
        if len(parameters) == 1 and not accepted_keyword_names:
            yield lambda batch: ((batch,), {})
    elif isinstance(batch, list | tuple):
        # A pair of a sequence and a mapping means positional arguments and keywords.
        if len(batch) == 2 and isinstance(batch[0], list | tuple) and isinstance(batch[1], Mapping):
            yield lambda pair: (tuple(pair[0]), dict(pair[1]))
            return
        for count in range(len(batch), -1 if has_loss else len(batch) - 1, -1):
            yield partial(_take_first_items, count)


def _take_first_items(count: int, batch: Sequence[Any]) -> Arguments:
    return tuple(batch[:count]), {}


def find_loss(model: nn.Module, batch: Any, output: Any, loss: LossFunction | None = None) -> tuple[Tensor, str]:
    """Returns the loss that backward starts from, and a description of where it comes from. It takes the first of
    these that exists: the result of the user's `loss` function, the loss in the output, a single number in the
    output, or the mean square of the output's first floating-point tensor.

    Raises UsageError if none exists, or if no gradient flows from it.
    """
    value, source_text = _compute_user_loss(batch, output, loss) if loss is not None else _guess_loss(model, output)
    if not value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"no gradient flows from {source_text} to the parameters of {_get_class_name(model)}: unfreeze some, or "
            "run forward only"
        )
    return value, source_text


def _compute_user_loss(batch: Any, output: Any, loss: LossFunction) -> tuple[Tensor, str]:
    try:
        value: Any = loss(output, batch) if _loss_takes_batch(loss) else loss(output)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"the loss function from make() fails on the output: {shorten_error(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(f"the loss function from make() returned {describe_type(value)}, not a tensor with one number")
    return value, "the loss that make() gives"


def _loss_takes_batch(loss: LossFunction) -> bool:
    """Returns whether the user's loss function requires a second positional argument, the batch. Arguments with a
    default do not count, as in `lambda output, target=target: ...`.
    """
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # C functions may have no signature
        return False
    positional_parameter_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required_parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in positional_parameter_kinds and parameter.default is parameter.empty
    ]
    return len(required_parameters) > 1


def _guess_loss(model: nn.Module, output: Any) -> tuple[Tensor, str]:
    # 1. Use a value that the model's output names as its loss.
    floating_tensors = [(name, tensor) for name, tensor in iterate_named_tensors(output) if tensor.is_floating_point()]
    for name, value in floating_tensors:
        if name.split(".")[-1] == "loss" and value.numel() == 1:
            return value, f"the {name} that forward gives"
    # 2. Otherwise use a value that is a single number.
    for name, value in floating_tensors:
        if value.numel() == 1:
            return value, f"the single number that forward gives{f' as {name}' if name else ''}"
    if not floating_tensors:
        raise UsageError(
            f"forward of {_get_class_name(model)} returns {describe_type(output)}, without a floating-point tensor for "
            "a loss: make() must return (model, batch, loss), where loss(output) is one number"
        )
    # 3. Otherwise use the mean of squares of the first value, which gives each of its elements a gradient.
    name, value = floating_tensors[0]
    model_output_text = (
        f"{name + ', ' if name else ''}{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    )
    widened_value = value.to(widen_dtype(value.dtype))
    return (
        widened_value.square().mean(),
        f"the mean of squares of forward's first floating output ({model_output_text})",
    )


def _get_class_name(model: nn.Module) -> str:
    return type(model).__name__


def describe_type(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def was_batch_changed(batch_copy: Any) -> bool:
    """Returns whether any tensor of a batch was changed in place since the batch was copied."""
    # torch counts in-place changes in `_version`, except for tensors made in inference mode.
    return any(tensor._version for _, tensor in iterate_named_tensors(batch_copy) if not tensor.is_inference())
