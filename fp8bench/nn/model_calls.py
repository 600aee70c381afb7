"""How a model takes its batch, and what its loss is: guessed as far as possible, else asked for in a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy as shallow
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.nn.around import wide_dtype

# Returns the loss of an output, or of an output and its batch if it needs two arguments.
Loss = Callable[..., Tensor]
_SHOWN = 300
_ASK = "let make() return (model, batch), with the batch as forward takes it, or (model, batch, loss)"


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
        return
    parts: Iterable[tuple[Any, Any]]
    # Names become a path, by which a message can point at the tensor.
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        return
    for name, part in parts:
        yield from tensors_in(part, f"{path}.{name}" if path else str(name))


def on_device(value: Any, device: torch.device | str, copy: bool = False) -> Any:
    """Moves tensors to the device. With `copy` those already there are copied as well, for models that change their
    inputs. A tensor that occurs twice is moved once."""
    placed: dict[int, Tensor] = {}

    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in placed:
                placed[id(part)] = part.to(device, non_blocking=True, copy=copy)
            return placed[id(part)]
        # Containers are rebuilt with moved parts, and keep their class.
        if isinstance(part, Mapping):
            # A custom class may have attributes.
            mapping = shallow(part) if isinstance(part, MutableMapping) else {}
            for name, value in part.items():
                mapping[name] = move(value)
            return mapping
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(move, part))
        if is_dataclass(part) and not isinstance(part, type):
            filled = shallow(part)
            for field in fields(part):
                object.__setattr__(filled, field.name, move(getattr(part, field.name)))  # it may be frozen
            return filled
        return type(part)(map(move, part)) if isinstance(part, list | tuple) else part

    return move(value)


def call_of(model: nn.Module, batch: Any) -> Callable[[], Any]:
    """A function that runs the model's forward pass on a batch.

    A mapping is passed by names, a tuple or list by places, a tensor alone, and a pair (places, names) by both. Raises
    UsageError if forward does not take that, or a tensor is on another device than the model; the returned function
    raises it if the model fails.
    """
    places, named = arguments_of(model, batch)
    home = next((parameter.device for parameter in model.parameters()), None)
    # A wrong device is reported before the call, because torch's own message names no argument.
    for name, tensor in tensors_in(batch):
        if home is not None and tensor.device != home:
            raise UsageError(
                f"{name or 'the batch'} is on {tensor.device}, and the model on {home}: put both on one device"
            )

    def call() -> Any:
        try:
            return model(*places, **named)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UsageError(f"forward of {_name(model)} fails on this batch: {short_words(error)}") from error

    return call


def short_words(error: BaseException) -> str:
    words = " ".join(str(error).split())
    shown = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


# The arguments of forward, by place and by name.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments_of(model: nn.Module, batch: Any) -> Arguments:
    return way_of(model, batch)(batch)


def way_of(model: nn.Module, batch: Any) -> Callable[[Any], Arguments]:
    """A function that makes arguments of a batch like this one. Raises UsageError if forward does not take it."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:
        raise UsageError(
            f"forward of {_name(model)} has no signature that Python could read, and its layers are out of reach, as "
            "those of torch.jit are: give the module that it was made from"
        ) from None
    # The first way of passing the batch that forward's signature accepts is the one.
    wrong = ""
    for call in _ways(batch, len(signature.parameters) == 1):
        places, named = call(batch)
        try:
            signature.bind(*places, **named)
        except TypeError as error:
            wrong = wrong or str(error)
        else:
            return call
    takes = (
        ", ".join(name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty)
        or "nothing"
    )
    words = wrong or f"a batch of type {type(batch).__name__} was given"
    raise UsageError(f"forward of {_name(model)} takes ({takes}): {words}; {_ASK}")


def _ways(batch: Any, takes_one: bool) -> Iterator[Callable[[Any], Arguments]]:
    if isinstance(batch, Tensor):
        yield lambda batch: ((batch,), {})
    elif isinstance(batch, Mapping):
        if all(isinstance(name, str) for name in batch):
            yield lambda named: ((), dict(named))
        if takes_one:
            yield lambda batch: ((batch,), {})
    elif isinstance(batch, list | tuple):
        # A pair of a sequence and a mapping is meant as positions and names.
        both = len(batch) == 2 and isinstance(batch[0], list | tuple) and isinstance(batch[1], Mapping)
        yield (lambda pair: (tuple(pair[0]), dict(pair[1]))) if both else (lambda places: (tuple(places), {}))


def loss_of(model: nn.Module, batch: Any, output: Any, loss: Loss | None = None) -> tuple[Tensor, str]:
    """Returns the loss that backward begins from, and describes where it came from.

    It is the user's own `loss`, else the loss in the output, a single number, or the mean of squares of the first
    floating tensor. Raises UsageError without any of these, or if no gradient flows from it.
    """
    value, words = _own_loss(batch, output, loss) if loss is not None else _guessed_loss(model, output)
    if not value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"no gradient flows from {words} to the parameters of {_name(model)}: unfreeze some, or take forward alone"
        )
    return value, words


def _own_loss(batch: Any, output: Any, loss: Loss) -> tuple[Tensor, str]:
    try:
        value: Any = loss(output, batch) if _takes_batch(loss) else loss(output)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"the loss that make() gives fails on the output: {short_words(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(f"the loss that make() gives returned {shown_type(value)}, and not one number as a tensor")
    return value, "the loss that make() gives"


def _takes_batch(loss: Loss) -> bool:
    """Whether it needs two arguments by place; one with a default (`lambda output, target=target: ...`) is optional."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # a C function without a signature
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in by_place and parameter.default is parameter.empty
    ]
    return len(needed) > 1


def _guessed_loss(model: nn.Module, output: Any) -> tuple[Tensor, str]:
    # 1. A value that the model itself calls a loss.
    floating = [(name, tensor) for name, tensor in tensors_in(output) if tensor.is_floating_point()]
    for name, value in floating:
        if name.split(".")[-1] == "loss" and value.numel() == 1:
            return value, f"the {name} that forward gives"
    # 2. A single number, which can be differentiated.
    for name, value in floating:
        if value.numel() == 1:
            return value, f"the single number that forward gives{f' as {name}' if name else ''}"
    if not floating:
        raise UsageError(
            f"forward of {_name(model)} gives {shown_type(output)}, without a floating tensor to take a loss of: "
            "let make() return (model, batch, loss), where loss(output) gives one"
        )
    # 3. Else a mean of squares, which gives every output a gradient.
    name, value = floating[0]
    shown = f"{name + ', ' if name else ''}{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    wide = value.to(wide_dtype(value.dtype))
    return wide.square().mean(), f"the mean of squares of forward's first floating output ({shown})"


def _name(model: nn.Module) -> str:
    return type(model).__name__


def shown_type(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def was_changed(copied: Any) -> bool:
    """Whether something has been written into a fresh copy of a batch."""
    return any(tensor._version for _, tensor in tensors_in(copied) if not tensor.is_inference())
