"""Makes a user's model: unchanged or converted, with its batches and, if it has one, its optimizer.

Batches are the same for every arm of a seed, in any order of arms, and after a resume. No position is stored: a
function is called with the step, and an iterable is restarted and read up to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.checkpoint import apply_scales, apply_start
from fp8bench.features.train.lab.evaluate import Scores
from fp8bench.features.train.lab.made import SILENT, MadeModel, WrapArithmetic
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, seed_of, wrap_own_optimizer
from fp8bench.features.train.lab.together import Alone
from fp8bench.features.train.request import parse_schedule
from fp8bench.features.train.values import Arm, ArmRole, SeedTask, Validation
from fp8bench.model import DeviceFacts, Level
from fp8bench.model.step import Coverage
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.conversion import Conversion
from fp8bench.nn.model_calls import arguments_of, loss_of, on_device, tensors_in
from fp8bench.nn.own_model import Given, call_model, seed_generators
from fp8bench.protocols import Arithmetic, Layer, Phases, key_of
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions
from fp8bench.tape.coverage import coverage_of
from fp8bench.user_code import own_words
from fp8bench.workloads.model import copy_made


class OwnModel(MadeModel):
    """A copy of what a user's maker returns. Batches are numbered by micro-batch; `tokens` are those of the last step,
    or examples if a batch has no tokens."""

    def __init__(
        self, task: SeedTask, arm: Arm, watch: WatchCasts | None = None, wrap: WrapArithmetic | None = None
    ) -> None:
        super().__init__(task, arm, watch, wrap)
        settings, facts, self._name = self.settings, task.facts, self.settings.make
        self.together = Alone()
        self.given = given = copy_made(self._name, task.seed, facts)
        self.model = model = given.model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(f"{self._name}: no parameter of its model requires a gradient: there is nothing to train.")
        if not model.training:  # as from_pretrained returns it
            model.train()
        apply_start(model, settings, arm, task.seed)
        self.batches = OwnBatches(self._name, given, task.seed, facts)
        self._held_out = held_out_of(self._name, given, facts)
        self.scores = Scores(task, settings, [on_device(batch, facts.key, copy=True) for batch in self._held_out])
        self.parameter_count = sum(parameter.numel() for parameter in model.parameters())
        self.tokens = size_of(given.batch) * settings.micro_batches
        self._steps_ahead = 0  # by how many the next batch is later than the step that reads it
        self.loss_words = ""
        self.conversion = self._conversion(model)
        if self.conversion is not None:
            self.conversion.__enter__()  # for as long as this copy lives
        self.finish()

    def _conversion(self, model: nn.Module) -> Conversion | None:
        """Returns the conversion; None if nothing is converted."""
        keys, seed = dict(self.settings.precision_map), self.task.seed
        if self.precision.name == UNTOUCHED and not keys:
            return None

        def choose(layer: Layer) -> Arithmetic | None:
            key = key_of(layer, keys)
            mode = keys[key] if key is not None else self.precision.mode
            if mode == UNTOUCHED:
                return None
            # Each layer rounds at random independently, and reproducibly after a resume.
            drawn = self.arithmetic(mode).layer(f"{seed}/{layer.name}")
            self.arithmetics[layer.name] = watched = self.watch_arithmetic(
                apply_scales(drawn, self.settings, mode, layer.name, self.scale_books)
            )
            return watched

        return Conversion(model, choose, skip=self.settings.skip, keys=keys, multiples=self._multiples(), shown=True)

    def _multiples(self) -> tuple[int, int]:
        """Returns the multiples that sides of native products must have; 1 if products are emulated, or on a CPU."""
        facts, names = self.task.facts, (self.precision.mode, *dict(self.settings.precision_map).values())
        modes = [precisions.get(name) for name in names if name != UNTOUCHED]
        native = [mode.multiples for mode in modes if mode.support(facts).level is Level.NATIVE and facts.accelerated]
        return (max(pair[0] for pair in native), max(pair[1] for pair in native)) if native else (1, 1)

    @property
    def has_own_rates(self) -> bool:
        return self.given.optimizer is not None

    def make_optimizer(self) -> StepOptimizer:
        maker, settings = self.given, self.settings
        if maker.optimizer is not None:
            self._refuse_settings()
            optimizer = wrap_own_optimizer(self._name, self.model, maker.optimizer, maker.schedule, settings.updates)
            self.parameters = optimizer.parameters
            return optimizer
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

    def _refuse_settings(self) -> None:
        defaults = type(self.settings)()
        for name in ("rate", "optimizer_states", "master", "gradients", "schedule", "optimizer"):
            if getattr(self.settings, name) != getattr(defaults, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is of the built-in optimizer, not {self._name}'s. Leave it out."
                )

    def repeat_steps(self, count: int) -> None:
        """Prepares to repeat steps, which read the batches that come next."""
        self._steps_ahead += count

    def read_batch(self, step: int, number: int) -> Any:
        count = self.settings.micro_batches
        batch = self.batches.at((step + self._steps_ahead) * count + number)
        self.tokens = size_of(batch) * count
        return on_device(batch, self.task.facts.key, copy=True)

    def seed_batch(self, step: int, number: int) -> AbstractContextManager[None]:
        return seed_generators(seed_of("step", self.task.seed, step, number), self.task.facts)

    def compute_loss(self, batch: Any, phase: Phases, watched: bool = False) -> Tensor:
        if self.conversion is not None:
            self.conversion.phase = phase
        places, named = arguments_of(self.model, batch)
        output = call_model(self.model, places, named)
        loss, self.loss_words = loss_of(self.model, batch, output, self.given.loss)
        return loss

    def validate(self, place: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        if not self._held_out:
            return
        facts = self.task.facts
        # Dropout and samplers of a user's model draw the same at every validation.
        with seed_generators(seed_of("held-out", self.task.seed), facts):
            copies = (on_device(batch, facts.key, copy=True) for batch in self._held_out)
            losses = [float(self.compute_loss(batch, SILENT)) for batch in copies]
        tokens = [size_of(batch) for batch in self._held_out]
        mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
        yield Validation(*place, "held-out", mean, sum(tokens))

    def coverage(self) -> Coverage | None:
        """Returns how much is converted, counted in a step of an unconverted copy; None for an unconverted model."""
        if self.conversion is None:
            return None
        unconverted = OwnModel(self.task, Arm(self.arm.name, UNTOUCHED, ArmRole.REFERENCE))
        converted = Conversion(
            unconverted.model,
            lambda layer: self.arithmetics.get(layer.name),
            skip=self.settings.skip,
            keys=dict(self.settings.precision_map),
            multiples=self._multiples(),
        ).held
        multiple = max(self.precision.multiples)

        # The unconverted copy takes one step, so that work is counted before anything is replaced.
        batch = unconverted.read_batch(0, 0)

        def step() -> None:
            unconverted.compute_loss(batch, SILENT).backward()  # type: ignore[no-untyped-call]

        coverage = coverage_of(unconverted.model, converted, step, multiple=multiple)
        return replace(coverage, loss=unconverted.loss_words)


# The maximum number of held-out batches read from an iterable, which may be endless, and from a function.
_MOST_HELD_OUT, _HELD_OUT_CALLS = 64, 8
# This many of the first batches are read twice and compared.
_COMPARED = 3


class OwnBatches:
    """Batches by their number from 0: an iterable is read repeatedly in order; a function is called."""

    def __init__(self, name: str, maker: Given, seed: int, facts: DeviceFacts) -> None:
        self._name, self._given, self._seed, self._facts = name, maker, seed, facts
        self._source = maker.batches
        self._next, self._reader = 0, self._in_order()
        if self._source is None or callable(self._source):
            return
        # An iterator ends after its first reader, but several arms read it.
        once = iter(self._source) is self._source
        if once or getattr(self._source, "persistent_workers", False):
            reason = "can be read only once" if once else "keep their workers, which arms cannot share"
            raise UsageError(
                f"{self._name}: its batches {reason}, and every arm and seed reads them from the start. Give a list, a "
                "DataLoader without persistent_workers, or a function of step and seed."
            )

    def at(self, place: int) -> Any:
        if self._source is None:
            return self._given.batch
        try:
            if callable(self._source):
                with self._seed_source("batch", place):
                    return self._source(place, self._seed)
            # Another arm is behind: restart, and read up to its place.
            if place < self._next:
                self._next, self._reader = 0, self._in_order()
            self._next, skipped = place + 1, place - self._next
            return next(islice(self._reader, skipped, None))
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self._name}: its batch {place} cannot be read: {own_words(error)}.") from error

    def _in_order(self) -> Iterator[Any]:
        number, ended = 0, object()
        for epoch in count():
            begun = number
            with self._seed_source("epoch", epoch):
                iterator = iter(self._source)
            while True:
                with self._seed_source("batch", number):
                    batch = next(iterator, ended)
                if batch is ended:
                    break
                number += 1
                yield batch
            if number == begun:
                raise UsageError(f"{self._name}: its batches end before the first one. Give at least one.")

    def _seed_source(self, purpose: str, number: int) -> Any:
        return seed_generators(seed_of(purpose, self._seed, number), self._facts)


def held_out_of(name: str, maker: Given, facts: DeviceFacts) -> list[Any]:
    """Returns the batches to validate on, the same every time; none if the maker gives none."""
    source = maker.held_out
    if source is None:
        return []
    try:
        with seed_generators(seed_of("held-out"), facts):
            if callable(source):
                return [source(step, 0) for step in range(_HELD_OUT_CALLS)]
            alone = isinstance(source, Tensor | dict | tuple)
            return [source] if alone else list(islice(iter(source), _MOST_HELD_OUT))
    except Exception as error:
        raise UsageError(f"{name}: its held_out batches cannot be read: {own_words(error)}.") from error


def check_batches(name: str, maker: Given, seed: int, facts: DeviceFacts) -> None:
    """Raises UsageError if batches differ when they are read again: arms would train on different data."""
    first, second = (OwnBatches(name, maker, seed, facts) for _ in range(2))
    read = [first.at(place) for place in range(_COMPARED)]
    for place, batch in enumerate(read):
        if not _same(batch, second.at(place)):
            raise UsageError(
                f"{name}: its batch {place} is different when it is read again, and every arm has to see the same. "
                "Draw it from the global generators of torch, random or numpy, which are seeded here, or from the step "
                "and seed that a function receives."
            )


def _same(batch: Any, second: Any) -> bool:
    pairs = list(tensors_in(batch)), list(tensors_in(second))
    return [path for path, _ in pairs[0]] == [path for path, _ in pairs[1]] and all(
        old.dtype == new.dtype and torch.equal(old.nan_to_num(), new.nan_to_num())
        for (_, old), (_, new) in zip(*pairs, strict=True)
    )


def size_of(batch: Any) -> int:
    """Returns the number of tokens in a batch whose first tensor has integers in rows, or else its number of
    examples."""
    first = next((tensor for _, tensor in tensors_in(batch)), None)
    if first is None or not first.ndim:
        return 1
    has_tokens = not first.is_floating_point() and not first.is_complex() and first.ndim > 1
    return first.numel() if has_tokens else first.shape[0]
