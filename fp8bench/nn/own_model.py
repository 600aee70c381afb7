"""A copy of a user's own model that steps, as it came or converted, and what one step of it gives."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.conversion.conversion import Choose, Conversion
from fp8bench.nn.model_calls import arguments_of, loss_of, on_device, tensors_in
from fp8bench.nn.training_step import adamw
from fp8bench.numerics.norms import joint_relative_frobenius, relative_error
from fp8bench.protocols import Arithmetic, Layer, Phases, Setup, SilentPhases, key_of

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
        self.model, batch, self._loss = given
        self._batch = batch
        self._arguments = arguments_of(self.model, batch)
        _refuse_elsewhere(batch, setup.facts)
        self.loss_words = ""
        self._facts, self._seed, self._loss_scale = setup.facts, setup.seed, setup.loss_scale
        self.training = params["pass"] == "training"
        self.doing = "conversion"
        self.conversion = conversion_of(self.model, setup, multiples) if converts else None
        if self.conversion is not None:
            self.conversion.__enter__()  # for as long as this copy lives
        self.parameters = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        if self.training and not self.parameters:
            raise UsageError(f"{params['make']}: no parameter of its model needs a gradient. Profile its --forward.")
        self.optimizer = _optimizer(str(params["optimizer"]), list(self.parameters.values()), setup.facts)
        self._call: Call = called
        if compiles and params["compile"] == "yes":
            self._call = self._compiled(draws_alike)

    def memory_roles(self) -> dict[MemoryRole, object]:
        """What is frozen is a weight, too."""
        return {MemoryRole.WEIGHTS: list(self.model.parameters()), MemoryRole.DATA: self._arguments}

    def step(self, phase: Phases) -> object:
        """One step; returns its loss, or what forward gives."""
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
        """Those of so many training steps on its one batch."""
        return [float(cast(Tensor, self.step(SilentPhases()))) for _ in range(steps)]

    def outcome(self) -> Outcome:
        """What a step gives before any optimizer: every time from the same draws."""
        self._mark(SilentPhases())
        places, named = on_device(self._arguments, self._facts.key)
        with seeded(self._seed, self._facts), torch.set_grad_enabled(self.training):
            output = self._call(self.model, places, named)
            outputs = tuple(one.detach() for _, one in tensors_in(output) if one.is_floating_point())
            if not self.training:
                return Outcome(outputs, None, {})
            loss = self._loss_of(output)
            (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        gradients = {name: one.grad / self._loss_scale for name, one in self.parameters.items() if one.grad is not None}
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
                gradients = [one.grad for one in self.parameters.values() if one.grad is not None]
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


def _refuse_elsewhere(batch: Any, facts: DeviceFacts) -> None:
    """A step brings its batch to the device, and not from another one."""
    for name, tensor in tensors_in(batch):
        if tensor.device.type not in ("cpu", facts.kind):
            raise UsageError(
                f"{name or 'the batch'} is on {tensor.device}, and the model is measured on {facts.key}: put it there, "
                "or on the CPU."
            )


def _optimizer(name: str, parameters: list[nn.Parameter], facts: DeviceFacts) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    return adamw(parameters, _RATE, facts) if name == "adamw" else torch.optim.SGD(parameters, lr=_RATE)


def conversion_of(model: nn.Module, setup: Setup, multiples: tuple[int, int]) -> Conversion:
    """What a case says of a model's layers; UsageError for layers that it does not have."""
    words = dict(setup.case.precision_map)
    skip = [word for word in str(dict(setup.case.params).get("skip", "")).split(";") if word]
    return Conversion(model, _choice(setup, words), skip=skip, keys=words, multiples=multiples)


def _choice(setup: Setup, words: dict[str, str]) -> Choose:
    """The arithmetic of a layer; None where the map leaves it untouched."""

    def choose(layer: Layer) -> Arithmetic | None:
        key = key_of(layer, words)
        return None if key is not None and words[key] == UNTOUCHED else setup.layer(layer)

    return choose
