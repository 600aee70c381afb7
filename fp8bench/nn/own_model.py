"""Runs steps of a copy of a user's model, unchanged or converted, and collects the results of a step."""

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
from fp8bench.nn.model_calls import (
    choose_batch_unpacking,
    describe_type,
    find_loss,
    iterate_named_tensors,
    move_to_device,
    shorten_error,
    was_batch_changed,
)
from fp8bench.nn.training_step import make_adamw, skip_compiler_wrappers
from fp8bench.numerics.norms import joint_relative_frobenius, relative_error
from fp8bench.protocols import Arithmetic, Layer, Phases, Setup, SilentPhases, find_map_key

# The learning rate is small, so that thousands of steps on one batch hardly change the model.
_LEARNING_RATE = 1e-5


class MakeResult(NamedTuple):
    """The result of a user's function: a model, a batch, and a loss function of the output. The loss function is None
    if the output contains the loss.

    The fields after `loss` are only for training. `batches` is an iterable, or a function of step and seed. `batch` is
    the first of these batches. `held_out` are batches that are never trained on. `optimizer` is a function of the
    model, and `schedule` a function of the optimizer.
    """

    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None = None
    batches: Any = None
    held_out: Any = None
    optimizer: Callable[..., Any] | None = None
    schedule: Callable[..., Any] | None = None


def parse_make_return_value(name: str, returned_value: object, seed: int = 0) -> MakeResult:
    # A tuple's items are known by position, a dictionary's by name.
    match returned_value:
        case (nn.Module() as model, batch):
            return _build_make_result(name, seed, model=model, **_make_batch_argument(batch))
        case (nn.Module() as model, batch, loss) if callable(loss):
            return _build_make_result(name, seed, model=model, loss=loss, **_make_batch_argument(batch))
        case Mapping() if (
            isinstance(returned_value.get("model"), nn.Module) and {"batch", "batches"} & returned_value.keys()
        ):
            # An unknown name is probably a typing error.
            for part_name in returned_value:
                if part_name not in MakeResult._fields:
                    raise UnknownName(f"name in what {name} gives", str(part_name), MakeResult._fields)
            return _build_make_result(name, seed, **returned_value)
    returned_types = (
        f"({', '.join(type(part).__name__ for part in returned_value)})"
        if isinstance(returned_value, tuple)
        else type(returned_value).__name__
    )
    raise UsageError(
        f"{name} returns {returned_types}; expected (model, batch), (model, batch, loss) with a callable loss, or a "
        f"dict with 'model', 'batch' or 'batches', and optionally {', '.join(MakeResult._fields[2:])}."
    )


def _make_batch_argument(batch: Any) -> dict[str, Any]:
    """Returns {'batches': batch} if the user's value is a source of batches: a function, or an iterable that is neither
    a tensor nor a mapping, list or tuple. Otherwise returns {'batch': batch}.
    """
    has_several_batches = callable(batch) or (
        isinstance(batch, Iterable) and not isinstance(batch, Tensor | Mapping | list | tuple)
    )
    return {"batches" if has_several_batches else "batch": batch}


def _build_make_result(name: str, seed: int, **parts: Any) -> MakeResult:
    for word in ("loss", "optimizer", "schedule"):
        if parts.get(word) is not None and not callable(parts[word]):
            raise UsageError(f"{name}: its {word} is {describe_type(parts[word])}, but must be a function.")
    if parts.get("schedule") is not None and parts.get("optimizer") is None:
        raise UsageError(f"{name} returns a schedule without an optimizer. Return both, or neither.")
    # A single batch is used directly. If there are several batches, read the first.
    if "batch" in parts:
        return MakeResult(**parts)
    batches = parts["batches"]
    try:
        return MakeResult(batch=batches(0, seed) if callable(batches) else next(iter(batches)), **parts)
    except Exception as error:
        reason = "there is none" if isinstance(error, StopIteration) else shorten_error(error)
        raise UsageError(f"{name}: the first of its batches cannot be read: {reason}.") from error


@contextmanager
def seed_generators(seed: int, facts: DeviceFacts) -> Iterator[None]:
    """Seeds all random generators for the `with` block, and restores their previous states afterwards."""
    numpy = sys.modules.get("numpy")
    # Python's and numpy's random states belong to the user, so restore them too.
    states = random.getstate(), numpy and numpy.random.get_state()
    gpu_indices = [facts.index] if facts.accelerated else []
    with torch.random.fork_rng(gpu_indices, device_type=facts.kind):
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed % (1 << 32))  # numpy's seeds have 32 bits
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy is not None:
                numpy.random.set_state(states[1])


CallModel = Callable[[nn.Module, Any, Any], Any]


def call_model(model: nn.Module, positional: Any, named: Any) -> Any:
    return model(*positional, **named)


class StepResults(NamedTuple):
    """The results of one step: floating-point outputs in order, without the loss; the loss; and gradients by parameter
    name.
    """

    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    gradients: dict[str, Tensor]


class ConvertedUserModel:
    """A copy of a user's model, converted for its case. It has an optimizer if it trains.

    `running_part` is the current part of a step, for error messages. `loss_words` describes where the loss comes from.
    K and N of native products on this device must be multiples of the two numbers in `multiples`. With `draws_alike` a
    compiled step draws the same random numbers as an uncompiled step, which makes it slower.
    """

    def __init__(
        self,
        parts: MakeResult,
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
        self._make_arguments = choose_batch_unpacking(self.model, batch, self._loss is not None)
        # Each step gets a copy of the batch, until a step has shown that it does not change the batch. Moving a batch
        # to a different device copies it anyway.
        self._copies = True
        for name, tensor in iterate_named_tensors(batch):
            if tensor.device.type not in ("cpu", setup.facts.kind):
                raise UsageError(
                    f"{name or 'the batch'} is on {tensor.device}, but the model is measured on {setup.facts.key}: "
                    "move it there, or to the CPU."
                )
        # Convert before the optimizer is made, because it must get the parameters of the converted model.
        self.loss_words = ""
        self._facts = setup.facts
        self._seed = setup.seed
        self._loss_scale = setup.loss_scale
        self.training = params["pass"] == "training"
        self.running_part = "conversion"
        accelerated_model = setup.arithmetic if isinstance(setup.arithmetic, AcceleratedModel) and converts else None
        self.conversion = (
            make_conversion(self.model, setup, multiples) if converts and accelerated_model is None else None
        )
        if self.conversion is not None:
            self.conversion.__enter__()  # never exit, so that this copy of the model stays converted
        self.parameters = _find_trained_parameters(self.model)
        if self.training and not self.parameters:
            raise UsageError(f"{params['make']}: no parameter of its model needs a gradient. Use --forward.")
        # Accelerate may replace parameters, so `prepare_model` also makes the optimizer.
        make_optimizer = partial(_make_optimizer, str(params["optimizer"]), facts=setup.facts)
        if accelerated_model is None:
            self.optimizer = make_optimizer(list(self.parameters.values()))
        else:
            self.model, self.optimizer = accelerated_model.prepare_model(self.model, make_optimizer)
            self.parameters = _find_trained_parameters(self.model)
        self._call: CallModel = call_model
        if compiles and params["compile"] == "yes":
            self._call = self._compile(draws_alike)

    def memory_roles(self) -> dict[MemoryRole, object]:
        return {MemoryRole.WEIGHTS: list(self.model.parameters()), MemoryRole.DATA: self._batch}

    def step(self, phase: Phases) -> object:
        self._set_conversion_phases(phase)
        self.running_part = "loading its batch"
        # 1. Load the batch. Copy it until a step has shown that steps do not change it.
        with phase.data_load:
            batch = move_to_device(self._batch, self._facts.key, copy=self._copies)
            positional_arguments, named_arguments = self._make_arguments(batch)
        # 2. Run the forward pass. An inference step ends after it.
        self.running_part = "forward"
        if not self.training:
            with torch.no_grad():
                output = self._call(self.model, positional_arguments, named_arguments)
            self._copies = self._copies and was_batch_changed(batch)
            return output
        loss = self._compute_loss(self._call(self.model, positional_arguments, named_arguments), batch)
        self._copies = self._copies and was_batch_changed(batch)
        # 3. Run backward, and divide the gradients by the loss scale.
        self.running_part = "backward"
        (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        if self._loss_scale != 1.0:
            with phase.accumulate:
                gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
                torch._foreach_mul_(gradients, 1.0 / self._loss_scale)
        # 4. Run the optimizer's step, and drop the gradients.
        self.running_part = "the optimizer"
        if self.optimizer is not None:
            with phase.optimizer_step:
                self.optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        return loss.detach()

    def losses(self, steps: int) -> list[float]:
        return [float(cast(Tensor, self.step(SilentPhases()))) for _ in range(steps)]

    def outcome(self) -> StepResults:
        """Returns the results of a step without running its optimizer. Every call draws the same random numbers."""
        self._set_conversion_phases(SilentPhases())
        batch = move_to_device(self._batch, self._facts.key, copy=True)
        positional_arguments, named_arguments = self._make_arguments(batch)
        with seed_generators(self._seed, self._facts), torch.set_grad_enabled(self.training):
            output = self._call(self.model, positional_arguments, named_arguments)
            loss = self._compute_loss(output, batch) if self.training else None
            # A loss that forward returns does not count as an output, because it has its own error.
            tensors = [tensor for _, tensor in iterate_named_tensors(output) if tensor is not loss]
            outputs = tuple(tensor.detach() for tensor in tensors if tensor.is_floating_point())
            if loss is None:
                return StepResults(outputs, None, {})
            (loss * self._loss_scale).backward()  # type: ignore[no-untyped-call]
        # A missing gradient counts as zero. For example, this step may give an expert no tokens, while the same step of
        # a different copy gives it some.
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / self._loss_scale
            for name, parameter in self.parameters.items()
        }
        for parameter in self.parameters.values():
            parameter.grad = None
        return StepResults(outputs, loss.detach(), gradients)

    def _compute_loss(self, output: Any, batch: Any) -> Tensor:
        loss, self.loss_words = find_loss(self.model, batch, output, self._loss)
        return loss

    def _set_conversion_phases(self, phase: Phases) -> None:
        if self.conversion is not None:
            # A compiled step cannot mark phases.
            self.conversion.phase = phase if self._call is call_model else SilentPhases()

    def _compile(self, draws_alike: bool) -> CallModel:
        """Compiles the call of the model by running a first step. It compiles a copy of `call_model`, because torch
        stores graphs by code object (`nn.compiling.copy_function`).
        """
        # These imports load the compiler, which is slow.
        from torch._dynamo.utils import counters
        from torch._inductor import config

        compiled_call: CallModel = torch.compile(copy_function(call_model))
        graph_count_before = counters["stats"]["unique_graphs"]
        # The first call compiles. It runs without the optimizer, so that the weights do not change.
        self._call = compiled_call
        optimizer = self.optimizer
        self.optimizer = None
        with config.patch(fallback_random=True) if draws_alike else nullcontext():
            self.step(SilentPhases())
        self.optimizer = optimizer
        if counters["stats"]["unique_graphs"] == graph_count_before:
            raise RuntimeError(
                "torch.compile compiled no part of the model (0 frames), so it would be timed uncompiled: is it "
                "switched off (TORCH_COMPILE_DISABLE, torch.compiler.disable)? Remove --compile"
            )
        return compiled_call


def compute_errors(outcome: StepResults, reference: StepResults) -> dict[str, float]:
    errors = {}
    shapes = [tensor.shape for tensor in outcome.outputs]
    expected_shapes = [tensor.shape for tensor in reference.outputs]
    # Outputs can only be compared if their shapes are equal. The number of rows above a threshold may differ.
    if shapes == expected_shapes and shapes:
        errors["output_error"] = joint_relative_frobenius(outcome.outputs, reference.outputs)
    if outcome.loss is not None and reference.loss is not None:
        errors["loss_error"] = relative_error(float(outcome.loss), float(reference.loss))
        names = [name for name in reference.gradients if name in outcome.gradients]
        errors["gradient_error"] = joint_relative_frobenius(
            [outcome.gradients[name] for name in names], [reference.gradients[name] for name in names]
        )
    return errors


def _find_trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _make_optimizer(name: str, parameters: list[nn.Parameter], facts: DeviceFacts) -> torch.optim.Optimizer | None:
    if name == "none":
        return None
    return (
        make_adamw(parameters, _LEARNING_RATE, facts)
        if name == "adamw"
        else skip_compiler_wrappers(torch.optim.SGD)(parameters, lr=_LEARNING_RATE)
    )


def make_conversion(model: nn.Module, setup: Setup, multiples: tuple[int, int]) -> Conversion:
    precision_map = dict(setup.case.precision_map)
    skip = [pattern for pattern in str(setup.params.get("skip", "")).split(";") if pattern]

    def choose_for_layer(layer: Layer) -> Arithmetic | None:
        key = find_map_key(layer, precision_map)
        return None if key is not None and precision_map[key] == UNTOUCHED else setup.layer(layer)

    return Conversion(model, choose_for_layer, skip=skip, keys=precision_map, multiples=multiples)
