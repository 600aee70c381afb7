"""Steps of a copy of a user's own model, as it came or converted, and the results of one step.

How a model takes its batch, and what its loss is, is guessed as far as possible.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from copy import copy as shallow
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.conversion import AcceleratedModel, Conversion
from fp8bench.nn.training_step import adamw, eager
from fp8bench.numerics.norms import joint_relative_frobenius, relative_error
from fp8bench.protocols import Arithmetic, Layer, Phases, Setup, SilentPhases, key_of

# Returns the loss of an output, or of an output and its batch if it needs two arguments.
Loss = Callable[..., Tensor]
_SHOWN = 300
_ASK = "let make() return (model, batch), with the batch as forward takes it, or (model, batch, loss)"


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
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


def on_device(value: Any, device: torch.device | str, copy: bool = False) -> Any:
    """With `copy` also what lies there already is copied, for models that change what they are given. A tensor that
    stands there twice stays one."""
    placed: dict[int, Tensor] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, Tensor):
            if id(part) not in placed:
                placed[id(part)] = part.to(device, non_blocking=True, copy=copy)
            return placed[id(part)]
        if isinstance(part, Mapping):
            own = shallow(part) if isinstance(part, MutableMapping) else {}  # a class of its own may have attributes
            for name, each in part.items():
                own[name] = moved(each)
            return own
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*map(moved, part))
        if is_dataclass(part) and not isinstance(part, type):
            filled = shallow(part)
            for field in fields(part):
                object.__setattr__(filled, field.name, moved(getattr(part, field.name)))  # it may be frozen
            return filled
        return type(part)(map(moved, part)) if isinstance(part, list | tuple) else part

    return moved(value)


def call_of(model: nn.Module, batch: Any) -> Callable[[], Any]:
    """A function that runs the model's forward pass on a batch.

    A mapping is passed by names, a tuple or list by places, a tensor alone, and a pair (places, names) by both. Raises
    UsageError if forward does not take that, or a tensor is on another device than the model; the returned function
    raises it if the model fails.
    """
    places, named = arguments_of(model, batch)
    home = next((parameter.device for parameter in model.parameters()), None)
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


# What forward takes by place, and by name.
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
    wrong = ""
    for way in _ways(batch, len(signature.parameters) == 1):
        places, named = way(batch)
        try:
            signature.bind(*places, **named)
        except TypeError as error:
            wrong = wrong or str(error)
        else:
            return way
    takes = (
        ", ".join(name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty)
        or "nothing"
    )
    if not wrong:
        raise UsageError(f"a batch of type {type(batch).__name__} was given and {_name(model)} takes ({takes}): {_ASK}")
    given = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"{len(batch)} things by place"
    raise UsageError(f"forward of {_name(model)} takes ({takes}), and the batch has ({given}): {wrong}; {_ASK}")


def _ways(batch: Any, takes_one: bool) -> Iterator[Callable[[Any], Arguments]]:
    if isinstance(batch, Tensor):
        yield lambda whole: ((whole,), {})
    elif isinstance(batch, Mapping):
        if all(isinstance(name, str) for name in batch):
            yield lambda named: ((), dict(named))
        if takes_one:
            yield lambda whole: ((whole,), {})
    elif isinstance(batch, list | tuple):
        both = len(batch) == 2 and isinstance(batch[0], list | tuple) and isinstance(batch[1], Mapping)
        yield (lambda pair: (tuple(pair[0]), dict(pair[1]))) if both else (lambda places: (tuple(places), {}))


def loss_of(model: nn.Module, batch: Any, output: Any, loss: Loss | None = None) -> tuple[Tensor, str]:
    """The loss that backward begins from, and in words where it came from.

    It is the user's own `loss`, else the loss in the output, a single number, or the mean of squares of the first
    floating tensor. Raises UsageError where there is none of these, or no gradient flows from it.
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
        raise UsageError(f"the loss that make() gives returned {_shown(value)}, and not one number as a tensor")
    return value, "the loss that make() gives"


def _takes_batch(loss: Loss) -> bool:
    """Whether it takes two arguments by place; one with a default (`lambda output, target=target: ...`) is its own."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except (TypeError, ValueError):  # a C function without a signature
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in signature.parameters.values() if each.kind in by_place and each.default is each.empty]
    return len(needed) > 1


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


# Small, so that thousands of steps on one batch leave the model about where it began.
_RATE = 1e-5


class Given(NamedTuple):
    """What a maker gives: a model, a batch, and a function of the output for the loss, None if the output has it.

    For a training alone: `batches`, an iterable or a function of step and seed, whose first is `batch`; `held_out`,
    batches that are never trained on; `optimizer`, a function of the model; `schedule`, a function of the optimizer.
    """

    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None = None
    batches: Any = None
    held_out: Any = None
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None


def parse_given(name: str, answer: object, seed: int = 0) -> Given:
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
    """One batch as forward takes it, or several: a function, or an iterable that is no tensor or container."""
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
        why = "there is none" if isinstance(error, StopIteration) else short_words(error)
        raise UsageError(f"{name}: its batches give no first one: {why}.") from error


@contextmanager
def seeded(seed: int, facts: DeviceFacts) -> Iterator[None]:
    """Seeds all random generators for the body, and restores the process's own states afterwards."""
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


def call_model(model: nn.Module, places: Any, named: Any) -> Any:
    return model(*places, **named)


class Outcome(NamedTuple):
    """What one step gives: floating-point outputs in order, the loss, and gradients by parameter's name."""

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    gradients: dict[str, Tensor]


class OwnModel:
    """A copy of a user's model, converted as its case says, with an optimizer for training.

    `doing` names the current part of a step, for messages about failures; `loss_words` says where its loss came from.
    `multiples` are what native products of the device require. With `draws_alike` a compiled step draws the same random
    numbers as an uncompiled one, which is slower.
    """

    def __init__(
        self, given: Given, setup: Setup, multiples: tuple[int, int] = (1, 1), *, compiles: bool = True,
        converts: bool = True, draws_alike: bool = False,
    ) -> None:  # fmt: skip
        params = dict(setup.case.params)
        self.model, batch, self._loss = given[:3]
        self._batch = batch
        self._arguments_of = way_of(self.model, batch)
        # Until a step has shown that it leaves what it is given as it was. A device copies a batch of the host anyway.
        self._copies = True
        for name, tensor in tensors_in(batch):
            if tensor.device.type not in ("cpu", setup.facts.kind):
                raise UsageError(
                    f"{name or 'the batch'} is on {tensor.device}, and the model is measured on {setup.facts.key}: put "
                    "it there, or on the CPU."
                )
        self.loss_words = ""
        self._facts, self._seed, self._loss_scale = setup.facts, setup.seed, setup.loss_scale
        self.training = params["pass"] == "training"
        self.doing = "conversion"
        prepares = setup.arithmetic if isinstance(setup.arithmetic, AcceleratedModel) and converts else None
        self.conversion = conversion_of(self.model, setup, multiples) if converts and prepares is None else None
        if self.conversion is not None:
            self.conversion.__enter__()  # for as long as this copy lives
        self.parameters = _trained_in(self.model)
        if self.training and not self.parameters:
            raise UsageError(f"{params['make']}: no parameter of its model needs a gradient. Profile its --forward.")
        optimizer_of = partial(_optimizer, str(params["optimizer"]), facts=setup.facts)
        if prepares is None:
            self.optimizer = optimizer_of(list(self.parameters.values()))
        else:
            self.model, self.optimizer = prepares.prepared(self.model, optimizer_of)
            self.parameters = _trained_in(self.model)
        self._call: Call = call_model
        if compiles and params["compile"] == "yes":
            self._call = self._compiled(draws_alike)

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.WEIGHTS: list(self.model.parameters()), MemoryRole.DATA: self._batch}

    def step(self, phase: Phases) -> object:
        self._mark(phase)
        self.doing = "loading its batch"
        with phase.data_load:
            batch = on_device(self._batch, self._facts.key, copy=self._copies)
            places, named = self._arguments_of(batch)
        self.doing = "forward"
        if not self.training:
            with torch.no_grad():
                output = self._call(self.model, places, named)
            self._copies = self._copies and _changed(batch)
            return output
        loss = self._loss_of(self._call(self.model, places, named), batch)
        self._copies = self._copies and _changed(batch)
        self.doing = "backward"
        (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        if self._loss_scale != 1.0:
            with phase.accumulate:
                gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
                torch._foreach_mul_(gradients, 1.0 / self._loss_scale)
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
        """What a step gives before the optimizer, with the same random numbers every time."""
        self._mark(SilentPhases())
        batch = on_device(self._batch, self._facts.key, copy=True)
        places, named = self._arguments_of(batch)
        with seeded(self._seed, self._facts), torch.set_grad_enabled(self.training):
            output = self._call(self.model, places, named)
            outputs = tuple(tensor.detach() for _, tensor in tensors_in(output) if tensor.is_floating_point())
            if not self.training:
                return Outcome(outputs, None, {})
            loss = self._loss_of(output, batch)
            (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        gradients = {  # zeros of what a step did not reach, as an expert without tokens: a copy's step may reach it
            name: torch.zeros_like(own) if own.grad is None else own.grad / self._loss_scale
            for name, own in self.parameters.items()
        }
        for parameter in self.parameters.values():
            parameter.grad = None
        return Outcome(outputs, loss.detach(), gradients)

    def _loss_of(self, output: Any, batch: Any) -> Tensor:
        loss, self.loss_words = loss_of(self.model, batch, output, self._loss)
        return loss

    def _mark(self, phase: Phases) -> None:
        if self.conversion is not None:
            self.conversion.phase = phase if self._call is call_model else SilentPhases()

    def _compiled(self, draws_alike: bool) -> Call:
        """The call as a compiled function, by a first step. Its code object is a copy: see `nn.gpt.compiled`."""
        # Imported here, because they bring the compiler.
        from torch._dynamo.utils import counters
        from torch._inductor import config

        own = FunctionType(
            call_model.__code__.replace(), call_model.__globals__, call_model.__name__, call_model.__defaults__
        )
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


def _changed(copied: Any) -> bool:
    """Whether something has been written into a fresh copy of a batch."""
    return any(tensor._version for _, tensor in tensors_in(copied) if not tensor.is_inference())


def errors_between(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    errors = {}
    given, wanted = ([tensor.shape for tensor in each.outputs] for each in (outcome, reference))
    if given == wanted and wanted:  # other shapes, as of the rows above a threshold, cannot be compared
        errors["output_error"] = joint_relative_frobenius(outcome.outputs, reference.outputs)
    if outcome.loss is not None and reference.loss is not None:
        errors["loss_error"] = relative_error(float(outcome.loss), float(reference.loss))
        names = [name for name in reference.gradients if name in outcome.gradients]
        errors["gradient_error"] = joint_relative_frobenius(
            [outcome.gradients[name] for name in names], [reference.gradients[name] for name in names]
        )
    return errors


def _trained_in(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


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
