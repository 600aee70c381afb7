"""Steps of a copy of a user's own model, unchanged or converted, and the results of one step."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.compiling import copy_function
from fp8bench.nn.conversion import AcceleratedModel, Conversion
from fp8bench.nn.model_calls import loss_of, on_device, short_words, shown_type, tensors_in, was_changed, way_of
from fp8bench.nn.training_step import adamw, eager
from fp8bench.numerics.norms import joint_relative_frobenius, relative_error
from fp8bench.protocols import Arithmetic, Layer, Phases, Setup, SilentPhases, key_of

# Small, so that thousands of steps on one batch leave the model about where it began.
_RATE = 1e-5


class Given(NamedTuple):
    """The result of a maker: a model, a batch, and a function of the output for the loss, None if the output has it.

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
    # Tuples by position, dictionaries by name.
    match answer:
        case (nn.Module() as model, batch):
            return _make_given(name, seed, model=model, **_one_or_many(batch))
        case (nn.Module() as model, batch, loss) if callable(loss):
            return _make_given(name, seed, model=model, loss=loss, **_one_or_many(batch))
        case Mapping() if isinstance(answer.get("model"), nn.Module) and {"batch", "batches"} & answer.keys():
            # A name that nobody reads is a typing error.
            for word in answer:
                if word not in Given._fields:
                    raise UnknownName(f"name in what {name} gives", str(word), Given._fields)
            return _make_given(name, seed, **answer)
    words = (
        f"({', '.join(type(part).__name__ for part in answer)})" if isinstance(answer, tuple) else type(answer).__name__
    )
    raise UsageError(
        f"{name} gives {words}; expected (model, batch), (model, batch, loss) with a callable loss, or a dict with "
        f"'model', 'batch' or 'batches', and more of {', '.join(Given._fields[2:])}."
    )


def _one_or_many(batch: Any) -> dict[str, Any]:
    """Names one batch as forward takes it, or several: a function, or an iterable other than a tensor or container."""
    several = callable(batch) or (
        isinstance(batch, Iterable) and not isinstance(batch, Tensor | Mapping | list | tuple)
    )
    return {"batches" if several else "batch": batch}


def _make_given(name: str, seed: int, **parts: Any) -> Given:
    for word in ("loss", "optimizer", "schedule"):
        if parts.get(word) is not None and not callable(parts[word]):
            raise UsageError(f"{name}: its {word} is {shown_type(parts[word])}. Give a function.")
    if parts.get("schedule") is not None and parts.get("optimizer") is None:
        raise UsageError(f"{name} gives a schedule and no optimizer that it could be of. Give both.")
    # A single batch is its own first one; of several the first is drawn.
    if "batch" in parts:
        return Given(**parts)
    batches = parts["batches"]
    try:
        return Given(batch=batches(0, seed) if callable(batches) else next(iter(batches)), **parts)
    except Exception as error:
        reason = "there is none" if isinstance(error, StopIteration) else short_words(error)
        raise UsageError(f"{name}: its batches give no first one: {reason}.") from error


@contextmanager
def seed_generators(seed: int, facts: DeviceFacts) -> Iterator[None]:
    """Seeds all random generators for the body, and restores the process's own states afterwards."""
    numpy = sys.modules.get("numpy")
    # Random states outside of torch are the user's: they are put back at the end.
    states = random.getstate(), numpy and numpy.random.get_state()
    gpus = [facts.index] if facts.accelerated else []
    with torch.random.fork_rng(gpus, device_type=facts.kind):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


Call = Callable[[nn.Module, Any, Any], Any]


def call_model(model: nn.Module, places: Any, named: Any) -> Any:
    return model(*places, **named)


class Outcome(NamedTuple):
    """The results of one step: floating-point outputs in order, the loss, and gradients by parameter's name."""

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    gradients: dict[str, Tensor]


class OwnModel:
    """A copy of a user's model, converted for its case, with an optimizer for training.

    `doing` names the current part of a step, for messages about failures; `loss_words` describe the source of its loss.
    `multiples` are what native products of the device require. With `draws_alike` a compiled step draws the same random
    numbers as an uncompiled one, which is slower.
    """

    def __init__(
        self,
        parts: Given,
        setup: Setup,
        multiples: tuple[int, int] = (1, 1),
        *,
        compiles: bool = True,
        converts: bool = True,
        draws_alike: bool = False,
    ) -> None:
        params = setup.params
        self.model, batch, self._loss = parts[:3]
        self._batch = batch
        self._arguments_of = way_of(self.model, batch)
        # Until a step has shown that it does not change its batch. A device copies a batch of the host anyway.
        self._copies = True
        for name, tensor in tensors_in(batch):
            if tensor.device.type not in ("cpu", setup.facts.kind):
                raise UsageError(
                    f"{name or 'the batch'} is on {tensor.device}, and the model is measured on {setup.facts.key}: put "
                    "it there, or on the CPU."
                )
        # A conversion comes first: an optimizer must get the parameters that are in use afterwards.
        self.loss_words = ""
        self._facts = setup.facts
        self._seed = setup.seed
        self._loss_scale = setup.loss_scale
        self.training = params["pass"] == "training"
        self.doing = "conversion"
        prepares = setup.arithmetic if isinstance(setup.arithmetic, AcceleratedModel) and converts else None
        self.conversion = conversion_of(self.model, setup, multiples) if converts and prepares is None else None
        if self.conversion is not None:
            self.conversion.__enter__()  # for as long as this copy lives
        self.parameters = _trained_in(self.model)
        if self.training and not self.parameters:
            raise UsageError(f"{params['make']}: no parameter of its model needs a gradient. Profile its --forward.")
        # Accelerate makes new parameters, so it also makes the optimizer.
        optimizer_of = partial(_optimizer, str(params["optimizer"]), facts=setup.facts)
        if prepares is None:
            self.optimizer = optimizer_of(list(self.parameters.values()))
        else:
            self.model, self.optimizer = prepares.prepare_model(self.model, optimizer_of)
            self.parameters = _trained_in(self.model)
        self._call: Call = call_model
        if compiles and params["compile"] == "yes":
            self._call = self._compile(draws_alike)

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.WEIGHTS: list(self.model.parameters()), MemoryRole.DATA: self._batch}

    def step(self, phase: Phases) -> object:
        self._mark(phase)
        self.doing = "loading its batch"
        # 1. Load the batch, a copy until a step has shown that it does not change it.
        with phase.data_load:
            batch = on_device(self._batch, self._facts.key, copy=self._copies)
            places, named = self._arguments_of(batch)
        # 2. Forward; inference ends here.
        self.doing = "forward"
        if not self.training:
            with torch.no_grad():
                output = self._call(self.model, places, named)
            self._copies = self._copies and was_changed(batch)
            return output
        loss = self._loss_of(self._call(self.model, places, named), batch)
        self._copies = self._copies and was_changed(batch)
        # 3. Backward, and take the loss scale out of the gradients.
        self.doing = "backward"
        (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        if self._loss_scale != 1.0:
            with phase.accumulate:
                gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
                torch._foreach_mul_(gradients, 1.0 / self._loss_scale)
        # 4. Step the optimizer, and drop the gradients.
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
        """Returns the results of a step before the optimizer, with the same random numbers every time."""
        self._mark(SilentPhases())
        batch = on_device(self._batch, self._facts.key, copy=True)
        places, named = self._arguments_of(batch)
        with seed_generators(self._seed, self._facts), torch.set_grad_enabled(self.training):
            output = self._call(self.model, places, named)
            outputs = tuple(tensor.detach() for _, tensor in tensors_in(output) if tensor.is_floating_point())
            if not self.training:
                return Outcome(outputs, None, {})
            loss = self._loss_of(output, batch)
            (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        gradients = {  # zeros of what a step did not reach, as an expert without tokens: a copy's step may reach it
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / self._loss_scale
            for name, parameter in self.parameters.items()
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

    def _compile(self, draws_alike: bool) -> Call:
        """Compiles the call by a first step. Its code object is a copy: see `nn.compiling.compile_model`."""
        # Imported here, because they bring the compiler.
        from torch._dynamo.utils import counters
        from torch._inductor import config

        graph: Call = torch.compile(copy_function(call_model))
        graphs = counters["stats"]["unique_graphs"]
        # The first call compiles; without its optimizer, so that the weights do not change.
        self._call = graph
        optimizer = self.optimizer
        self.optimizer = None
        with config.patch(fallback_random=True) if draws_alike else nullcontext():
            self.step(SilentPhases())
        self.optimizer = optimizer
        if counters["stats"]["unique_graphs"] == graphs:
            raise RuntimeError(
                "torch.compile compiled nothing of the model (0 frames), which would be timed uncompiled: is it "
                "switched off (TORCH_COMPILE_DISABLE, torch.compiler.disable)? Leave --compile out"
            )
        return graph


def errors_between(outcome: Outcome, reference: Outcome) -> dict[str, float]:
    errors = {}
    shapes = [tensor.shape for tensor in outcome.outputs]
    expected_shapes = [tensor.shape for tensor in reference.outputs]
    if shapes == expected_shapes and shapes:  # other shapes, as of the rows above a threshold, cannot be compared
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
    skip = [word for word in str(setup.params.get("skip", "")).split(";") if word]

    def choose(layer: Layer) -> Arithmetic | None:
        key = key_of(layer, words)
        return None if key is not None and words[key] == UNTOUCHED else setup.layer(layer)

    return Conversion(model, choose, skip=skip, keys=words, multiples=multiples)
