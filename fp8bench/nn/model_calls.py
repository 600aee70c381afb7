"""How a model of anybody's is called with a batch, and what its loss is, as far as that can be guessed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError

# Gives the loss of an output; that of its batch too, if it takes two arguments.
Loss = Callable[..., Tensor]
_SHOWN = 300
_ASK = "let make() return (model, batch), with the batch as forward takes it, or (model, batch, loss)"


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a batch or an output, with the words by which they are reached ('logits', 'past.0')."""
    if isinstance(value, Tensor):
        yield path, value
        return
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = zip(getattr(value, "_fields", range(len(value))), value, strict=True)
    elif is_dataclass(value) and not isinstance(value, type):
        parts = ((one.name, getattr(value, one.name)) for one in fields(value))
    else:
        return
    for name, part in parts:
        yield from tensors_in(part, f"{path}.{name}" if path else str(name))


def on_device(value: Any, device: torch.device | str) -> Any:
    """A batch with its tensors on a device, the rest as it is."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {name: on_device(part, device) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(part, device) for part in value))
    return type(value)(on_device(part, device) for part in value) if isinstance(value, list | tuple) else value


def call_of(model: nn.Module, batch: Any) -> Callable[[], Any]:
    """What runs the model's forward pass on a batch.

    A mapping (HF's too) is given by names, a tuple or list by places, a tensor alone; (places, names) too. Raises
    UsageError in one sentence where forward does not take that, where a tensor is on another device than the model,
    and, when it is called, where the model fails.
    """
    places, named = arguments_of(model, batch)
    _check_devices(model, batch)

    def call() -> Any:
        try:
            return model(*places, **named)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UsageError(f"forward of {_name(model)} fails on this batch: {short(error)}") from error

    return call


def short(error: BaseException) -> str:
    """An exception in one line."""
    words = " ".join(str(error).split())
    shown = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What forward is given of a batch, by places and by names."""
    signature = inspect.signature(model.forward)
    wrong = ""
    for places, named in _ways(batch, len(signature.parameters) == 1):
        try:
            signature.bind(*places, **named)
        except TypeError as error:
            wrong = wrong or str(error)
        else:
            return places, named
    takes = ", ".join(name for name, one in signature.parameters.items() if one.default is one.empty) or "nothing"
    if not wrong:
        raise UsageError(f"a batch of type {type(batch).__name__} was given and {_name(model)} takes ({takes}): {_ASK}")
    given = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"{len(batch)} things by place"
    raise UsageError(f"forward of {_name(model)} takes ({takes}), and the batch has ({given}): {wrong}; {_ASK}")


def _ways(batch: Any, takes_one: bool) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    if isinstance(batch, Tensor):
        yield (batch,), {}
    elif isinstance(batch, Mapping):
        if all(isinstance(name, str) for name in batch):
            yield (), dict(batch)
        if takes_one:
            yield (batch,), {}
    elif isinstance(batch, list | tuple):
        both = len(batch) == 2 and isinstance(batch[0], list | tuple) and isinstance(batch[1], Mapping)
        yield (tuple(batch[0]), dict(batch[1])) if both else (tuple(batch), {})


def _check_devices(model: nn.Module, batch: Any) -> None:
    home = next((one.device for one in model.parameters()), None)
    for name, tensor in tensors_in(batch):
        if home is not None and tensor.device != home:
            raise UsageError(
                f"{name or 'the batch'} is on {tensor.device}, and the model on {home}: put both on one device"
            )


def loss_of(model: nn.Module, batch: Any, output: Any, loss: Loss | None = None) -> tuple[Tensor, str]:
    """What backward begins from, and how it was found in a sentence.

    `loss` is the user's own; else the output's own loss, a single number, or the mean of squares of the first floating
    tensor. Raises UsageError in one sentence where there is nothing of that kind, or nothing that gradients flow from.
    """
    found, words = _own_loss(batch, output, loss) if loss is not None else _guessed_loss(model, output)
    if not found.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"no gradient flows from {words} to the parameters of {_name(model)}: unfreeze some, or take forward alone"
        )
    return found, words


def _own_loss(batch: Any, output: Any, loss: Loss) -> tuple[Tensor, str]:
    try:
        both = len(inspect.signature(loss).parameters) > 1
    except (TypeError, ValueError):  # a function of C's that does not tell
        both = False
    try:
        found: Any = loss(output, batch) if both else loss(output)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"the loss that make() gives fails on the output: {short(error)}") from error
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise UsageError(f"the loss that make() gives returned {_shown(found)}, and not one number as a tensor")
    return found, "the loss that make() gives"


def _guessed_loss(model: nn.Module, output: Any) -> tuple[Tensor, str]:
    floating = [(name, one) for name, one in tensors_in(output) if one.is_floating_point()]
    for name, one in floating:
        if name.split(".")[-1] == "loss" and one.numel() == 1:
            return one, f"the {name} that forward gives"
    for name, one in floating:
        if one.numel() == 1:
            return one, f"the single number that forward gives{f' as {name}' if name else ''}"
    if not floating:
        raise UsageError(
            f"forward of {_name(model)} gives {_shown(output)}, without a floating tensor to take a loss of: "
            "let make() return (model, batch, loss), where loss(output) gives one"
        )
    name, one = floating[0]
    shown = f"{name + ', ' if name else ''}{str(one.dtype).removeprefix('torch.')}[{','.join(map(str, one.shape))}]"
    wide = one.to(torch.promote_types(one.dtype, torch.float32))
    return wide.square().mean(), f"the mean of squares of forward's first floating output ({shown})"


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
