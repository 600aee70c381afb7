"""Builds a user's model for an arm, unchanged or converted, with its batches and, if the user gives one, its optimizer.
Every arm of a seed reads the same batches, whichever arm reads first, and also after a resume. No position in the
batches is stored: a function is called with the number of the batch, and an iterable is restarted and read up to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.arm_model import UNTIMED_PHASE_MARKERS, ArmModel
from fp8bench.features.train.lab.evaluate import ModelScorer
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, derive_seed, wrap_user_optimizer
from fp8bench.features.train.request import parse_schedule
from fp8bench.features.train.values import Arm, ArmRole, Validation
from fp8bench.model import DeviceFacts, Level
from fp8bench.model.step import Coverage
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.conversion import Conversion
from fp8bench.nn.model_calls import find_loss, iterate_named_tensors, make_arguments, move_to_device
from fp8bench.nn.own_model import MakeResult, call_model, seed_generators
from fp8bench.protocols import Arithmetic, Layer, Phases, find_map_key
from fp8bench.registry import precisions
from fp8bench.tape.coverage import measure_coverage
from fp8bench.user_code import own_words
from fp8bench.workloads.model import copy_target_model


class UserArmModel(ArmModel):
    """A copy of the model that a user's function returns. Micro-batches are counted over the whole training. `tokens`
    is the number of tokens in the last step, or the number of examples if batches have no tokens.
    """

    def build_model(self) -> nn.Module:
        self._name = self.settings.make
        self.user_parts = copy_target_model(self._name, self.task.seed, self.task.facts)
        self.has_user_learning_rates = self.user_parts.optimizer is not None
        model = self.user_parts.model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"{self._name}: no parameter of its model requires a gradient, so there is nothing to train."
            )
        if not model.training:  # from_pretrained returns models in eval mode
            model.train()
        return model

    def prepare(self) -> None:
        task = self.task
        facts = task.facts
        self.batches = UserBatches(self._name, self.user_parts, task.seed, facts)
        self._held_out = read_held_out_batches(self._name, self.user_parts, facts)
        self.scores = ModelScorer(
            task, self.settings, [move_to_device(batch, facts.key, copy=True) for batch in self._held_out]
        )
        self.tokens = count_tokens(self.user_parts.batch) * self.settings.micro_batches
        self._steps_ahead = 0  # added to batch numbers, so that repeated steps read new batches
        self.loss_words = ""
        self.conversion = self._make_conversion()
        if self.conversion is not None:
            self.conversion.__enter__()  # layers stay converted as long as this object exists
        self.collect_parameters()

    def _make_conversion(self) -> Conversion | None:
        """Returns the conversion of layers to the arm's precision; None if no layer is converted."""
        keys = dict(self.settings.precision_map)
        if self.precision.name == UNTOUCHED and not keys:
            return None

        def choose(layer: Layer) -> Arithmetic | None:
            key = find_map_key(layer, keys)
            mode = keys[key] if key is not None else self.precision.mode
            return None if mode == UNTOUCHED else self.make_layer_arithmetic(layer.name, mode)

        return Conversion(
            self.model, choose, skip=self.settings.skip, keys=keys, multiples=self._find_multiples(), shown=True
        )

    def _find_multiples(self) -> tuple[int, int]:
        """Returns the numbers of which the contraction dimension and the columns of native matrix products must be
        multiples. Returns (1, 1) if products are emulated, or on a CPU.
        """
        facts = self.task.facts
        names = (self.precision.mode, *dict(self.settings.precision_map).values())
        modes = [precisions.get(name) for name in names if name != UNTOUCHED]
        native_side_multiples = [
            mode.multiples for mode in modes if mode.support(facts).level is Level.NATIVE and facts.accelerated
        ]
        return (
            (max(pair[0] for pair in native_side_multiples), max(pair[1] for pair in native_side_multiples))
            if native_side_multiples
            else (1, 1)
        )

    def make_optimizer(self) -> StepOptimizer:
        user_parts = self.user_parts
        settings = self.settings
        # 1. Use the user's optimizer, if there is one. Options of the built-in optimizer would have no effect on it.
        if user_parts.optimizer is not None:
            default_settings = type(settings)()
            for name in ("rate", "optimizer_states", "master", "gradients", "schedule", "optimizer"):
                if getattr(settings, name) != getattr(default_settings, name):
                    raise UsageError(
                        f"--{name.replace('_', '-')} is an option of the built-in optimizer, but "
                        f"{self._name} has its own. Leave it out."
                    )
            optimizer = wrap_user_optimizer(
                self._name, self.model, user_parts.optimizer, user_parts.schedule, settings.updates
            )
            self.parameters = dict(optimizer.parameters)
            return optimizer
        # 2. Otherwise check what the built-in optimizer needs: float32 weights, and held-out losses for plateau.
        for path, parameter in self.parameters.items():
            if parameter.dtype != torch.float32:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UsageError(
                    f"{self._name}: its parameter {path} is {dtype}. Make it float32, or give an optimizer."
                )
        if parse_schedule(settings.schedule)[0] == "plateau" and not self._held_out:
            raise UsageError(
                f"--schedule plateau needs held_out batches of {self._name}. Give some, or choose another schedule."
            )
        return super().make_optimizer()

    def repeat_steps(self, count: int) -> None:
        """Prepares the model to repeat the last `count` steps on batches that it has not read before."""
        self._steps_ahead += count

    def read_batch(self, step: int, number: int) -> Any:
        micro_batches = self.settings.micro_batches
        batch = self.batches.read((step + self._steps_ahead) * micro_batches + number)
        self.tokens = count_tokens(batch) * micro_batches
        return move_to_device(batch, self.task.facts.key, copy=True)

    def seed_batch(self, step: int, number: int) -> AbstractContextManager[None]:
        return seed_generators(derive_seed("step", self.task.seed, step, number), self.task.facts)

    def compute_loss(self, batch: Any, phase: Phases, watched: bool = False) -> Tensor:
        if self.conversion is not None:
            self.conversion.phase = phase
        positional_arguments, named_arguments = make_arguments(self.model, batch, self.user_parts.loss is not None)
        output = call_model(self.model, positional_arguments, named_arguments)
        loss, self.loss_words = find_loss(self.model, batch, output, self.user_parts.loss)
        return loss

    def validate(self, row_key: tuple[str, int, int], is_last: bool) -> Iterator[Validation]:
        if not self._held_out:
            return
        facts = self.task.facts
        # Dropout and samplers of a user's model draw the same numbers at every validation.
        with seed_generators(derive_seed("held-out", self.task.seed), facts):
            copies = (move_to_device(batch, facts.key, copy=True) for batch in self._held_out)
            losses = [float(self.compute_loss(batch, UNTIMED_PHASE_MARKERS)) for batch in copies]
        tokens = [count_tokens(batch) for batch in self._held_out]
        mean_loss = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
        yield Validation(*row_key, "held-out", mean_loss, sum(tokens))

    def coverage(self) -> Coverage | None:
        """Returns which share of the model the arm converts. The operations of the model are counted in a step of a
        copy without conversion. Returns None if the arm converts nothing.
        """
        if self.conversion is None:
            return None
        unconverted_model = UserArmModel(self.task, Arm(self.arm.name, UNTOUCHED, ArmRole.REFERENCE))
        converted_weights = Conversion(
            unconverted_model.model,
            lambda layer: self.arithmetics.get(layer.name),
            skip=self.settings.skip,
            keys=dict(self.settings.precision_map),
            multiples=self._find_multiples(),
        ).product_weights
        multiple = max(self.precision.multiples)

        # Run the unconverted copy: its operations can all be counted, because no layer is replaced.
        batch = unconverted_model.read_batch(0, 0)

        def run_step() -> None:
            unconverted_model.compute_loss(batch, UNTIMED_PHASE_MARKERS).backward()  # type: ignore[no-untyped-call]

        coverage = measure_coverage(unconverted_model.model, converted_weights, run_step, multiple=multiple)
        return replace(coverage, loss=unconverted_model.loss_words)


# At most this many held-out batches are read from an iterable, which may be endless.
_MAX_HELD_OUT_BATCHES = 64
# If held-out batches come from a function, it is called this many times.
_HELD_OUT_BATCH_CALLS = 8
# This many of the first batches are read twice and compared.
_COMPARED_BATCH_COUNT = 3


@dataclass(eq=False)
class UserBatches:
    """Gives a user's batches by number, counted from 0. An iterable is read in order, and restarted at its end. A
    function is called with the number. `name` names the user's function that makes the model, and `user_parts` is what
    that function returned.
    """

    name: str
    user_parts: MakeResult
    seed: int
    facts: DeviceFacts

    def __post_init__(self) -> None:
        self._source = self.user_parts.batches
        self._next, self._reader = 0, self._iterate_batches()
        if self._source is None or callable(self._source):
            return
        # An iterator can only be read once, but several arms have to read the batches.
        is_iterator = iter(self._source) is self._source
        if is_iterator or getattr(self._source, "persistent_workers", False):
            reason = "can be read only once" if is_iterator else "keep their workers, which arms cannot share"
            raise UsageError(
                f"{self.name}: its batches {reason}, and every arm and seed reads them from the start. Give a list, a "
                "DataLoader without persistent_workers, or a function of step and seed."
            )

    def read(self, number: int) -> Any:
        if self._source is None:
            return self.user_parts.batch
        try:
            if callable(self._source):
                with self._seed_batch_source("batch", number):
                    return self._source(number, self.seed)
            # An iterable cannot go back, so restart it, and skip to the batch.
            if number < self._next:
                self._next, self._reader = 0, self._iterate_batches()
            self._next, skipped = number + 1, number - self._next
            return next(islice(self._reader, skipped, None))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self.name}: its batch {number} cannot be read: {own_words(error)}.") from error

    def _iterate_batches(self) -> Iterator[Any]:
        batch_number = 0
        iterator_end_marker = object()
        # Shuffling and augmentation may draw random numbers. Seed them, so that every arm reads the same batches.
        for epoch in count():
            epoch_start_batch_number = batch_number
            with self._seed_batch_source("epoch", epoch):
                batch_iterator = iter(self._source)
            while True:
                with self._seed_batch_source("batch", batch_number):
                    batch = next(batch_iterator, iterator_end_marker)
                if batch is iterator_end_marker:
                    break
                batch_number += 1
                yield batch
            if batch_number == epoch_start_batch_number:
                raise UsageError(f"{self.name}: its batches end before the first one. Give at least one.")

    def _seed_batch_source(self, purpose: str, number: int) -> Any:
        return seed_generators(derive_seed(purpose, self.seed, number), self.facts)


def read_held_out_batches(name: str, user_parts: MakeResult, facts: DeviceFacts) -> list[Any]:
    """Returns the held-out batches, which are the same in every call. Returns [] if the user's function gives none."""
    source = user_parts.held_out
    if source is None:
        return []
    try:
        with seed_generators(derive_seed("held-out"), facts):
            if callable(source):
                return [source(step, 0) for step in range(_HELD_OUT_BATCH_CALLS)]
            is_single_batch = isinstance(source, Tensor | dict | tuple)
            return [source] if is_single_batch else list(islice(iter(source), _MAX_HELD_OUT_BATCHES))
    except Exception as error:
        raise UsageError(f"{name}: its held_out batches cannot be read: {own_words(error)}.") from error


def check_user_batches(name: str, user_parts: MakeResult, seed: int, facts: DeviceFacts) -> None:
    """Raises UsageError if a batch is different when it is read again. Otherwise arms would train on different data."""
    first_reader, second_reader = (UserBatches(name, user_parts, seed, facts) for _ in range(2))
    batches = [first_reader.read(number) for number in range(_COMPARED_BATCH_COUNT)]
    for number, batch in enumerate(batches):
        if not is_same_batch(batch, second_reader.read(number)):
            raise UsageError(
                f"{name}: its batch {number} is different when it is read again, and every arm has to see the same. "
                "Draw it from the global generators of torch, random or numpy, which are seeded here, or from the step "
                "and seed that a function receives."
            )


def is_same_batch(batch: Any, second_batch: Any) -> bool:
    old = dict(iterate_named_tensors(batch))
    new = dict(iterate_named_tensors(second_batch))
    # NaN is not equal to itself, so it is replaced before comparing.
    return old.keys() == new.keys() and all(
        old[path].dtype == new[path].dtype and torch.equal(old[path].nan_to_num(), new[path].nan_to_num())
        for path in old
    )


def count_tokens(batch: Any) -> int:
    """Returns the number of tokens in a batch if its first tensor has rows of integers. Otherwise returns its number
    of examples.
    """
    first_batch_tensor = next((tensor for _, tensor in iterate_named_tensors(batch)), None)
    if first_batch_tensor is None or not first_batch_tensor.ndim:
        return 1
    is_token_batch = (
        not first_batch_tensor.is_floating_point()
        and not first_batch_tensor.is_complex()
        and first_batch_tensor.ndim > 1
    )
    return first_batch_tensor.numel() if is_token_batch else first_batch_tensor.shape[0]
