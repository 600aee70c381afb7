"""A copy of a user's own model that steps, as it came or converted, and what one step of it gives."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts
from fp8bench.nn.linear import linear
from fp8bench.nn.training_step import adamw
from fp8bench.numerics.norms import joint_relative_frobenius, relative_error
from fp8bench.protocols import Arithmetic, Layer, Phases, Setup, SilentPhases

UNTOUCHED = "untouched"
# Small: thousands of steps on one batch shall leave the model about where it came from.
_RATE = 1e-5


class Given(NamedTuple):
    """A model, what it is called with, and what makes a loss of its output: None where that says it itself."""

    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None = None


def given_of(name: str, answer: object) -> Given:
    """What a maker gave; UsageError for anything else."""
    match answer:
        case (nn.Module() as model, batch):
            return Given(model, batch)
        case (nn.Module() as model, batch, loss) if callable(loss):
            return Given(model, batch, loss)
    words = (
        f"({', '.join(type(one).__name__ for one in answer)})" if isinstance(answer, tuple) else type(answer).__name__
    )
    raise UsageError(f"{name} gives {words}; expected (model, batch), or (model, batch, loss) with a callable loss.")


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


class Outcome(NamedTuple):
    """What one step gives: floating-point outputs in their order, the loss, and gradients by parameter."""

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    gradients: dict[str, Tensor]


class OwnModel:
    """A copy of a user's model, converted as its case says, with the optimizer of a training pass.

    `doing` says what a step is at, for whoever has to say where it failed.
    """

    def __init__(self, given: Given, setup: Setup, compiles: bool = True, converts: bool = True) -> None:
        params = dict(setup.case.params)
        self.model, self.batch, self._loss = given
        self._facts, self._seed, self._loss_scale = setup.facts, setup.seed, setup.loss_scale
        self.training = params["pass"] == "training"
        self.doing = "conversion"
        self.conversion = _converted(self.model, setup) if converts else None
        self.parameters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        if self.training and not self.parameters:
            raise UsageError(f"{params['make']}: no parameter of its model needs a gradient. Profile its --forward.")
        self.optimizer = _optimizer(str(params["optimizer"]), list(self.parameters.values()), setup.facts)
        self._call: Callable[[nn.Module, Any], Any] = called
        if compiles and params["compile"] == "yes":
            self._call = self._compiled()

    def step(self, phase: Phases) -> object:
        """One step; returns its loss, or what forward gives."""
        self._mark(phase)
        self.doing = "loading its batch"
        with phase.data_load:
            batch = moved(self.batch, self._facts.key)
        self.doing = "forward"
        if not self.training:
            with torch.no_grad():
                return self._call(self.model, batch)
        loss = loss_of(self._call(self.model, batch), self._loss)
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

    def try_step(self) -> None:
        """One step, whose parts are told apart where one fails."""
        self.step(SilentPhases())

    def outcome(self) -> Outcome:
        """What a step gives before any optimizer: every time from the same draws."""
        self._mark(SilentPhases())
        batch = moved(self.batch, self._facts.key)
        with seeded(self._seed, self._facts), torch.set_grad_enabled(self.training):
            output = self._call(self.model, batch)
            outputs = tuple(one.detach() for one in floating(output))
            if not self.training:
                return Outcome(outputs, None, {})
            loss = loss_of(output, self._loss)
            (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        gradients = {name: one.grad / self._loss_scale for name, one in self.parameters.items() if one.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        return Outcome(outputs, loss.detach(), gradients)

    def _mark(self, phase: Phases) -> None:
        """A compiled graph knows no phases."""
        if self.conversion is not None:
            self.conversion.phase = phase if self._call is called else SilentPhases()

    def _unscale(self, phase: Phases) -> None:
        if self._loss_scale != 1.0:
            with phase.accumulate:
                gradients = [one.grad for one in self.parameters.values() if one.grad is not None]
                torch._foreach_mul_(gradients, 1.0 / self._loss_scale)

    def _compiled(self) -> Callable[[nn.Module, Any], Any]:
        """The call as a compiled function, by a first step. Its code object is its own: see `nn.gpt.compiled`."""
        from torch._dynamo.utils import counters  # it imports the compiler, which most steps do without

        own = FunctionType(called.__code__.replace(), called.__globals__, called.__name__, called.__defaults__)
        graph: Callable[[nn.Module, Any], Any] = torch.compile(own)
        before = counters["stats"]["unique_graphs"]
        self._call = graph
        optimizer, self.optimizer = self.optimizer, None
        self.step(SilentPhases())
        self.optimizer = optimizer
        if counters["stats"]["unique_graphs"] == before:
            raise RuntimeError(
                "torch.compile compiled nothing of the model (0 frames), which would be timed as it is: is it switched "
                "off (TORCH_COMPILE_DISABLE, torch.compiler.disable)? Leave --compile out"
            )
        return graph


def errors_between(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """How far a step's results are from others, relative."""
    errors = {}
    if len(found.outputs) == len(wanted.outputs) and wanted.outputs:
        errors["output_error"] = joint_relative_frobenius(found.outputs, wanted.outputs)
    if found.loss is not None and wanted.loss is not None:
        errors["loss_error"] = relative_error(float(found.loss), float(wanted.loss))
        names = [name for name in wanted.gradients if name in found.gradients]
        errors["gradient_error"] = joint_relative_frobenius(
            [found.gradients[name] for name in names], [wanted.gradients[name] for name in names]
        )
    return errors


def _optimizer(name: str, parameters: list[nn.Parameter], facts: DeviceFacts) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    return adamw(parameters, _RATE, facts) if name == "adamw" else torch.optim.SGD(parameters, lr=_RATE)


def moved(value: Any, device: str) -> Any:
    """The same, its tensors on a device."""
    match value:
        case Tensor():
            return value.to(device, non_blocking=True)
        case Mapping():
            return {name: moved(one, device) for name, one in value.items()}
        case tuple() | list():
            parts = [moved(one, device) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def called(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch: a mapping by keywords, a tuple or list by position, anything else by itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def floating(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of an output, in their order."""
    match output:
        case Tensor():
            if output.is_floating_point():
                yield output
        case Mapping():
            for one in output.values():
                yield from floating(one)
        case Sequence() if not isinstance(output, str | bytes):
            for one in output:
                yield from floating(one)


def loss_of(output: Any, loss: Callable[..., Any] | None) -> Tensor:
    """What backward begins from."""
    if loss is not None:
        return loss(output)  # type: ignore[no-any-return]
    known = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(known, Tensor):
        return known
    first = next(floating(output))
    return first if first.numel() == 1 else first.float().square().mean()


class LinearConversion:
    """`forward` of every nn.Linear of a model, by products in the arithmetic that its layer is given."""

    def __init__(self, model: nn.Module, choose: Callable[[Layer], Arithmetic], skip: Sequence[str] = ()) -> None:
        self.phase: Phases = SilentPhases()
        self.converted: list[nn.Linear] = []
        for name, module in model.named_modules():
            if type(module) is nn.Linear and not any(fnmatchcase(name, one) for one in skip):
                arithmetic = choose(Layer(name or "model", "linear"))
                module.forward = partial(self._forward, module, arithmetic)  # type: ignore[method-assign]
                self.converted.append(module)

    def _forward(self, module: nn.Linear, arithmetic: Arithmetic, x: Tensor) -> Tensor:
        y = linear(x, module.weight, arithmetic, self.phase).to(x.dtype)
        bias: Tensor | None = module.bias
        return y if bias is None else y + bias

    def undo(self) -> None:
        for module in self.converted:
            del module.forward


def _converted(model: nn.Module, setup: Setup) -> LinearConversion | None:
    if setup.case.precision == UNTOUCHED:
        return None
    skip = [word for word in str(dict(setup.case.params).get("skip", "")).split(";") if word]
    return LinearConversion(model, setup.layer, skip)
