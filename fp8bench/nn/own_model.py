"""A copy of a user's own model that steps, as it came or converted, and what one step of it gives.

How a model of anybody's is called with a batch, and what its loss is, is guessed as far as that can be.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.accelerated_model import AcceleratedModel
from fp8bench.nn.conversion import Conversion
from fp8bench.nn.training_step import adamw
from fp8bench.nn.uncompiled import eager
from fp8bench.numerics.norms import joint_relative_frobenius, relative_error
from fp8bench.protocols import Arithmetic, Layer, Phases, Setup, SilentPhases, key_of

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
        parts = ((field.name, getattr(value, field.name)) for field in fields(value))
    else:
        return
    for name, part in parts:
        yield from tensors_in(part, f"{path}.{name}" if path else str(name))


def on_device(value: Any, device: torch.device | str) -> Any:
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
    words = " ".join(str(error).split())
    shown = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def arguments_of(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    signature = inspect.signature(model.forward)
    wrong = ""
    for places, named in _ways(batch, len(signature.parameters) == 1):
        try:
            signature.bind(*places, **named)
        except TypeError as error:
            wrong = wrong or str(error)
        else:
            return places, named
    takes = (
        ", ".join(name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty)
        or "nothing"
    )
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
    home = next((parameter.device for parameter in model.parameters()), None)
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
    value, words = _own_loss(batch, output, loss) if loss is not None else _guessed_loss(model, output)
    if not value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"no gradient flows from {words} to the parameters of {_name(model)}: unfreeze some, or take forward alone"
        )
    return value, words


def _own_loss(batch: Any, output: Any, loss: Loss) -> tuple[Tensor, str]:
    try:
        both = len(inspect.signature(loss).parameters) > 1
    except (TypeError, ValueError):  # a function of C's that does not tell
        both = False
    try:
        value: Any = loss(output, batch) if both else loss(output)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UsageError(f"the loss that make() gives fails on the output: {short(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(f"the loss that make() gives returned {_shown(value)}, and not one number as a tensor")
    return value, "the loss that make() gives"


def _guessed_loss(model: nn.Module, output: Any) -> tuple[Tensor, str]:
    floating = [(name, tensor) for name, tensor in tensors_in(output) if tensor.is_floating_point()]
    for name, value in floating:
        if name.split(".")[-1] == "loss" and value.numel() == 1:
            return value, f"the {name} that forward gives"
    for name, value in floating:
        if value.numel() == 1:
            return value, f"the single number that forward gives{f' as {name}' if name else ''}"
    if not floating:
        raise UsageError(
            f"forward of {_name(model)} gives {_shown(output)}, without a floating tensor to take a loss of: "
            "let make() return (model, batch, loss), where loss(output) gives one"
        )
    name, value = floating[0]
    shown = f"{name + ', ' if name else ''}{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return wide.square().mean(), f"the mean of squares of forward's first floating output ({shown})"


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _shown(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


# Small: thousands of steps on one batch shall leave the model about where it came from.
_RATE = 1e-5


class Given(NamedTuple):
    """A model, what it is called with, and what makes a loss of its output: None where that says it itself.

    What a training alone asks for: `batches`, an iterable or a function of step and seed, whose first is `batch`;
    `held_out`, batches that it never trains on; `optimizer`, a function of the model, and `schedule`, one of that.
    """

    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None = None
    batches: Any = None
    held_out: Any = None
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None


def given_of(name: str, answer: object, seed: int = 0) -> Given:
    """What a maker gave: two or three things by place, or any of them by name."""
    match answer:
        case (nn.Module() as model, batch):
            return _given(name, seed, model=model, **_one_or_many(batch))
        case (nn.Module() as model, batch, loss) if callable(loss):
            return _given(name, seed, model=model, loss=loss, **_one_or_many(batch))
        case Mapping() if isinstance(answer.get("model"), nn.Module) and {"batch", "batches"} & answer.keys():
            for word in answer:
                if word not in Given._fields:
                    raise UnknownName(f"name in what {name} gives", str(word), Given._fields)
            return _given(name, seed, **answer)
    words = (
        f"({', '.join(type(part).__name__ for part in answer)})" if isinstance(answer, tuple) else type(answer).__name__
    )
    raise UsageError(
        f"{name} gives {words}; expected (model, batch), (model, batch, loss) with a callable loss, or a dict with "
        f"'model', 'batch' or 'batches', and more of {', '.join(Given._fields[2:])}."
    )


def _one_or_many(batch: Any) -> dict[str, Any]:
    """A batch as forward takes it, or what gives several: a function, or what can be gone through and is none."""
    several = callable(batch) or (
        isinstance(batch, Iterable) and not isinstance(batch, Tensor | Mapping | list | tuple)
    )
    return {"batches" if several else "batch": batch}


def _given(name: str, seed: int, **known: Any) -> Given:
    for word in ("loss", "optimizer", "schedule"):
        if known.get(word) is not None and not callable(known[word]):
            raise UsageError(f"{name}: its {word} is {_shown(known[word])}. Give a function.")
    if known.get("schedule") is not None and known.get("optimizer") is None:
        raise UsageError(f"{name} gives a schedule and no optimizer that it could be of. Give both.")
    if "batch" in known:
        return Given(**known)
    batches = known["batches"]
    try:
        return Given(batch=batches(0, seed) if callable(batches) else next(iter(batches)), **known)
    except Exception as error:
        why = "there is none" if isinstance(error, StopIteration) else short(error)
        raise UsageError(f"{name}: its batches give no first one: {why}.") from error


@contextmanager
def seeded(seed: int, facts: DeviceFacts) -> Iterator[None]:
    """What is drawn at random in the body is drawn from the seed; the process's own states are put back."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()
    gpus = [facts.index] if facts.accelerated else []
    with torch.random.fork_rng(gpus, device_type=facts.kind):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(before[0])
            if numpy is not None:
                numpy.random.set_state(before[1])


Call = Callable[[nn.Module, Any, Any], Any]


def called(model: nn.Module, places: Any, named: Any) -> Any:
    return model(*places, **named)


class Outcome(NamedTuple):
    """What one step gives: floating-point outputs in their order, the loss, and gradients by parameter."""

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    gradients: dict[str, Tensor]


class OwnModel:
    """A copy of a user's model, converted as its case says, with the optimizer of a training pass.

    `doing` says what a step is at, for whoever has to say where it failed; `loss_words` how its loss was found.
    `multiples` are what native products of the case's device want. With `draws_alike` a compiled step draws what it
    would draw uncompiled, which is slower.
    """

    def __init__(
        self, given: Given, setup: Setup, multiples: tuple[int, int] = (1, 1), *, compiles: bool = True,
        converts: bool = True, draws_alike: bool = False,
    ) -> None:  # fmt: skip
        params = dict(setup.case.params)
        self.model, batch, self._loss = given[:3]
        self._batch = batch
        self._arguments = arguments_of(self.model, batch)
        _refuse_elsewhere(batch, setup.facts)
        self.loss_words = ""
        self._facts, self._seed, self._loss_scale = setup.facts, setup.seed, setup.loss_scale
        self.training = params["pass"] == "training"
        self.doing = "conversion"
        prepares = setup.arithmetic if isinstance(setup.arithmetic, AcceleratedModel) and converts else None
        self.conversion = conversion_of(self.model, setup, multiples) if converts and prepares is None else None
        if self.conversion is not None:
            self.conversion.__enter__()  # for as long as this copy lives
        self.parameters = {
            name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
        }
        if self.training and not self.parameters:
            raise UsageError(f"{params['make']}: no parameter of its model needs a gradient. Profile its --forward.")
        optimizer_of = partial(_optimizer, str(params["optimizer"]), facts=setup.facts)
        if prepares is None:
            self.optimizer = optimizer_of(list(self.parameters.values()))
        else:
            self.model, self.optimizer = prepares.prepared(self.model, optimizer_of)
            self.parameters = {
                name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad
            }
        self._call: Call = called
        if compiles and params["compile"] == "yes":
            self._call = self._compiled(draws_alike)

    def memory_roles(self) -> dict[MemoryRole, object]:
        """What is frozen is a weight, too."""
        return {MemoryRole.WEIGHTS: list(self.model.parameters()), MemoryRole.DATA: self._arguments}

    def step(self, phase: Phases) -> object:
        self._mark(phase)
        self.doing = "loading its batch"
        with phase.data_load:
            places, named = on_device(self._arguments, self._facts.key)
        self.doing = "forward"
        if not self.training:
            with torch.no_grad():
                return self._call(self.model, places, named)
        loss = self._loss_of(self._call(self.model, places, named))
        self.doing = "backward"
        (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        self._unscale(phase)
        self.doing = "the optimizer"
        if self.optimizer is not None:
            with phase.optimizer_step:
                self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        return loss.detach()

    def losses(self, steps: int) -> list[float]:
        return [float(cast(Tensor, self.step(SilentPhases()))) for _ in range(steps)]

    def outcome(self) -> Outcome:
        """What a step gives before any optimizer: every time from the same draws."""
        self._mark(SilentPhases())
        places, named = on_device(self._arguments, self._facts.key)
        with seeded(self._seed, self._facts), torch.set_grad_enabled(self.training):
            output = self._call(self.model, places, named)
            outputs = tuple(tensor.detach() for _, tensor in tensors_in(output) if tensor.is_floating_point())
            if not self.training:
                return Outcome(outputs, None, {})
            loss = self._loss_of(output)
            (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        weights = self.parameters.items()
        gradients = {name: own.grad / self._loss_scale for name, own in weights if own.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return Outcome(outputs, loss.detach(), gradients)

    def _loss_of(self, output: Any) -> Tensor:
        loss, self.loss_words = loss_of(self.model, self._batch, output, self._loss)
        return loss

    def _mark(self, phase: Phases) -> None:
        """A compiled graph knows no phases."""
        if self.conversion is not None:
            self.conversion.phase = phase if self._call is called else SilentPhases()

    def _unscale(self, phase: Phases) -> None:
        if self._loss_scale != 1.0:
            with phase.accumulate:
                gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
                torch._foreach_mul_(gradients, 1.0 / self._loss_scale)

    def _compiled(self, draws_alike: bool) -> Call:
        """The call as a compiled function, by a first step. Its code object is its own: see `nn.gpt.compiled`."""
        # They import the compiler, which most steps do without.
        from torch._dynamo.utils import counters
        from torch._inductor import config

        own = FunctionType(called.__code__.replace(), called.__globals__, called.__name__, called.__defaults__)
        graph: Call = torch.compile(own)
        before = counters["stats"]["unique_graphs"]
        self._call = graph
        optimizer, self.optimizer = self.optimizer, None
        with config.patch(fallback_random=True) if draws_alike else nullcontext():
            self.step(SilentPhases())
        self.optimizer = optimizer
        if counters["stats"]["unique_graphs"] == before:
            raise RuntimeError(
                "torch.compile compiled nothing of the model (0 frames), which would be timed as it is: is it switched "
                "off (TORCH_COMPILE_DISABLE, torch.compiler.disable)? Leave --compile out"
            )
        return graph


def errors_between(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    errors = {}
    if len(outcome.outputs) == len(reference.outputs) and reference.outputs:
        errors["output_error"] = joint_relative_frobenius(outcome.outputs, reference.outputs)
    if outcome.loss is not None and reference.loss is not None:
        errors["loss_error"] = relative_error(float(outcome.loss), float(reference.loss))
        names = [name for name in reference.gradients if name in outcome.gradients]
        errors["gradient_error"] = joint_relative_frobenius(
            [outcome.gradients[name] for name in names], [reference.gradients[name] for name in names]
        )
    return errors


def _refuse_elsewhere(batch: Any, facts: DeviceFacts) -> None:
    for name, tensor in tensors_in(batch):
        if tensor.device.type not in ("cpu", facts.kind):
            raise UsageError(
                f"{name or 'the batch'} is on {tensor.device}, and the model is measured on {facts.key}: put it there, "
                "or on the CPU."
            )


def _optimizer(name: str, parameters: list[nn.Parameter], facts: DeviceFacts) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    return adamw(parameters, _RATE, facts) if name == "adamw" else eager(torch.optim.SGD)(parameters, lr=_RATE)


def conversion_of(model: nn.Module, setup: Setup, multiples: tuple[int, int]) -> Conversion:
    words = dict(setup.case.precision_map)
    skip = [word for word in str(dict(setup.case.params).get("skip", "")).split(";") if word]

    def choose(layer: Layer) -> Arithmetic | None:
        key = key_of(layer, words)
        return None if key is not None and words[key] == UNTOUCHED else setup.layer(layer)

    return Conversion(model, choose, skip=skip, keys=words, multiples=multiples)
