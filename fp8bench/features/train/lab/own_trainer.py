"""Trains one arm with a user's own model: as its maker returned it, converted, with its batches and, where there is
one, its optimizer.

Batches are the same for every arm of a seed, in whatever order arms ask for them, and after a resume. No position is
kept: a function is called with the step, and an iterable is started again and read up to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.features.train.lab.evaluate import Scores
from fp8bench.features.train.lab.fine_tuning import apply_start, scaled
from fp8bench.features.train.lab.optimizer import LoopOptimizer, seed_of
from fp8bench.features.train.lab.own_optimizer import TorchOptimizer
from fp8bench.features.train.lab.together import Alone
from fp8bench.features.train.lab.trainer import Trainer, WrapArithmetic
from fp8bench.features.train.values import Arm, ArmRole, SeedTask, Validation
from fp8bench.model import DeviceFacts, Level
from fp8bench.model.step import Coverage
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.conversion import Conversion
from fp8bench.nn.model_calls import arguments_of, loss_of, on_device, tensors_in
from fp8bench.nn.own_model import Given, call_model, seeded
from fp8bench.protocols import Arithmetic, Layer, Phases, SilentPhases, key_of
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions
from fp8bench.tape.coverage import coverage_of
from fp8bench.user_code import own_words
from fp8bench.workloads.model import copied

_SILENT = SilentPhases()


def trainer_of(
    task: SeedTask, arm: Arm, watch: WatchCasts | None = None, wrap: WrapArithmetic | None = None
) -> Trainer:
    return (OwnTrainer if task.settings.make else Trainer)(task, arm, watch, wrap)


class OwnTrainer(Trainer):
    """Batches are numbered by micro-batch. Rates of the maker's optimizer are its own; the settings' are factors."""

    # How many steps later the next batch is than the step that reads it.
    _past = 0

    def _build(self, task: SeedTask) -> nn.Module:
        settings, facts = self._settings, task.facts
        self.together = Alone()
        self._name = settings.make
        self._given = given = copied(self._name, self._seed, facts)
        model = given.model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(f"{self._name}: no parameter of its model requires a gradient: there is nothing to train.")
        if not model.training:  # as from_pretrained returns it
            model.train()
        apply_start(model, settings, self.arm, self._seed)
        self._batches = OwnBatches(self._name, given, self._seed, facts)
        self._held_out = held_out_of(self._name, given, facts)
        self._evaluation: Any = self
        self._scores = Scores(task, settings, [on_device(batch, facts.key, copy=True) for batch in self._held_out])
        self._count = sum(parameter.numel() for parameter in model.parameters())
        self._size = size_of(given.batch) * settings.micro_batches
        self.loss_words = ""
        self.conversion = self._conversion(model)
        if self.conversion is not None:
            self.conversion.__enter__()  # for as long as this copy lives
        return model

    def _conversion(self, model: nn.Module) -> Conversion | None:
        """None where nothing is converted."""
        keys, facts = dict(self._settings.precision_map), self._task.facts
        if self.precision.name == UNTOUCHED and not keys:
            return None

        def choose(layer: Layer) -> Arithmetic | None:
            key = key_of(layer, keys)
            mode = keys[key] if key is not None else self.precision.mode
            if mode == UNTOUCHED:
                return None
            drawn = self._arithmetic(mode, facts).layer(f"{self._seed}/{layer.name}")
            own = scaled(drawn, self._settings, mode, layer.name)
            self._arithmetics[layer.name] = watched = self._watched(own)
            return watched

        return Conversion(model, choose, skip=self._settings.skip, keys=keys, multiples=self._multiples(), shown=True)

    def _multiples(self) -> tuple[int, int]:
        """What the sides of native products have to be multiples of; 1 where products are emulated, or on a CPU."""
        facts, names = self._task.facts, (self.precision.mode, *dict(self._settings.precision_map).values())
        modes = [precisions.get(name) for name in names if name != UNTOUCHED]
        native = [mode.multiples for mode in modes if mode.support(facts).level is Level.NATIVE and facts.accelerated]
        return (max(pair[0] for pair in native), max(pair[1] for pair in native)) if native else (1, 1)

    def _build_optimizer(self) -> Any:
        given, settings = self._given, self._settings
        if given.optimizer is not None:
            self._optimizer = TorchOptimizer(self._name, self._model, given.optimizer, given.schedule, settings.updates)
            self._refuse_settings()
            self._parameters = self._optimizer.parameters
            return self._optimizer
        for path, parameter in self._parameters.items():
            if parameter.dtype != torch.float32:
                dtype = str(parameter.dtype).removeprefix("torch.")
                raise UsageError(
                    f"{self._name}: its parameter {path} is {dtype}. Make it float32, or give an optimizer."
                )
        if settings.schedule == "plateau" and not self._held_out:
            raise UsageError(
                f"--schedule plateau needs held_out batches of {self._name}. Give some, or choose another schedule."
            )
        return LoopOptimizer(self._parameters, settings)

    def _refuse_settings(self) -> None:
        usual = type(self._settings)()
        names = (
            "rate", "warmup", "floor", "weight_decay", "optimizer_states", "master", "gradients", "schedule",
            "optimizer", "betas",
        )  # fmt: skip
        for name in names:
            if getattr(self._settings, name) != getattr(usual, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is of the built-in optimizer, not {self._name}'s. Leave it out."
                )

    def _rate_now(self) -> float:
        if not isinstance(self._optimizer, TorchOptimizer):
            return super()._rate_now()
        self._optimizer.factor = self._rate / self._settings.rate
        return self._optimizer.rate

    @property
    def tokens(self) -> int:
        """Tokens of the last step, or examples where a batch has no tokens."""
        return self._size

    def repeat(self, last: int) -> None:
        """Repeated steps read the batches that come next."""
        before = self.step
        super().repeat(last)
        self._past += before - self.step

    def _micro_batch(self, number: int, scale: float, phase: Phases) -> Tensor:
        count = self._settings.micro_batches
        place = (self.step + self._past) * count + number
        with phase.data_load:
            batch = self._batches.at(place)
            self._size = size_of(batch) * count
            placed = on_device(batch, self._task.facts.key, copy=True)
        with seeded(seed_of("step", self._seed, self.step, number), self._task.facts):
            loss = self._loss_on(placed, phase)
            (loss * (scale / count)).backward()  # type: ignore[no-untyped-call]
        return loss.detach().to(torch.float32).reshape(())

    def _loss_on(self, batch: Any, phase: Phases) -> Tensor:
        if self.conversion is not None:
            self.conversion.phase = phase
        places, named = arguments_of(self._model, batch)
        output = call_model(self._model, places, named)
        loss, self.loss_words = loss_of(self._model, batch, output, self._given.loss)
        return loss

    def look(self, model: Any, who: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        if not self._held_out:
            return
        facts = self._task.facts
        with seeded(seed_of("held-out", self._seed), facts):
            copies = (on_device(batch, facts.key, copy=True) for batch in self._held_out)
            losses = [float(self._loss_on(batch, _SILENT)) for batch in copies]
        tokens = [size_of(batch) for batch in self._held_out]
        mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
        yield Validation(*who, "held-out", mean, sum(tokens), None)

    def coverage(self) -> Coverage | None:
        """How much is converted, counted in a step of an unconverted copy; None for the model as it came."""
        if self.conversion is None:
            return None
        other = OwnTrainer(self._task, Arm(self.arm.name, UNTOUCHED, ArmRole.REFERENCE))
        converted = Conversion(
            other._model, lambda layer: self._arithmetics.get(layer.name), skip=self._settings.skip,
            keys=dict(self._settings.precision_map), multiples=self._multiples(),
        ).held  # fmt: skip
        multiple = max(self.precision.multiples)

        batch = on_device(other._batches.at(0), self._task.facts.key, copy=True)

        def step() -> None:
            other._loss_on(batch, _SILENT).backward()  # type: ignore[no-untyped-call]

        coverage = coverage_of(other._model, converted, step, multiple=multiple)
        return replace(coverage, loss=other.loss_words)


def examined(task: SeedTask) -> tuple[tuple[str, Coverage], ...]:
    """Take a step of each arm; returns how much each converts. Raises UsageError for what cannot be trained."""
    coverages = []
    for number, arm in enumerate(task.arms):
        trainer = OwnTrainer(task, arm)
        if number == 0:
            check_batches(task.settings.make, trainer._given, trainer._seed, task.facts)
        try:
            for _ in trainer.advance(watched=False):
                pass
            trainer.validate()
        except Fp8benchError:
            raise
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise UsageError(f"{task.settings.make}: a step of {arm.name} failed: {own_words(error)}.") from error
        coverage = trainer.coverage()
        if coverage is not None:
            coverages.append((arm.name, coverage))
    return tuple(coverages)


# At most so many held-out batches are read from an iterable, which may be endless, and so many from a function.
_MOST_HELD_OUT, _HELD_OUT_CALLS = 64, 8
# So many of the first batches are read twice and compared.
_COMPARED = 3


class OwnBatches:
    """Batches by their number from 0: an iterable is read in order, again and again; a function is called."""

    def __init__(self, name: str, given: Given, seed: int, facts: DeviceFacts) -> None:
        self._name, self._given, self._seed, self._facts = name, given, seed, facts
        self._source = given.batches
        self._next, self._reader = 0, self._in_order()
        if self._source is None or callable(self._source):
            return
        once = iter(self._source) is self._source
        if once or getattr(self._source, "persistent_workers", False):
            why = "can be read only once" if once else "keep their workers, which arms cannot share"
            raise UsageError(
                f"{self._name}: its batches {why}, and every arm and seed reads them from the start. Give a list, a "
                "DataLoader without persistent_workers, or a function of step and seed."
            )

    def at(self, place: int) -> Any:
        if self._source is None:
            return self._given.batch
        try:
            if callable(self._source):
                with self._drawn("batch", place):
                    return self._source(place, self._seed)
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
            with self._drawn("epoch", epoch):
                iterator = iter(self._source)
            while True:
                with self._drawn("batch", number):
                    batch = next(iterator, ended)
                if batch is ended:
                    break
                number += 1
                yield batch
            if number == begun:
                raise UsageError(f"{self._name}: its batches end before the first one. Give at least one.")

    def _drawn(self, purpose: str, number: int) -> Any:
        return seeded(seed_of(purpose, self._seed, number), self._facts)


def held_out_of(name: str, given: Given, facts: DeviceFacts) -> list[Any]:
    """The batches to validate on, the same every time; none where the maker gives none."""
    source = given.held_out
    if source is None:
        return []
    try:
        with seeded(seed_of("held-out"), facts):
            if callable(source):
                return [source(step, 0) for step in range(_HELD_OUT_CALLS)]
            alone = isinstance(source, Tensor | dict | tuple)
            return [source] if alone else list(islice(iter(source), _MOST_HELD_OUT))
    except Exception as error:
        raise UsageError(f"{name}: its held_out batches cannot be read: {own_words(error)}.") from error


def check_batches(name: str, given: Given, seed: int, facts: DeviceFacts) -> None:
    """Raises UsageError where batches differ when they are read again: arms would not be trained on the same data."""
    first, again = (OwnBatches(name, given, seed, facts) for _ in range(2))
    read = [first.at(place) for place in range(_COMPARED)]
    for place, batch in enumerate(read):
        if not _same(batch, again.at(place)):
            raise UsageError(
                f"{name}: its batch {place} is different when it is read again, and every arm has to see the same. "
                "Draw it from the global generators of torch, random or numpy, which are seeded here, or from the step "
                "and seed that a function receives."
            )


def _same(batch: Any, other: Any) -> bool:
    pairs = list(tensors_in(batch)), list(tensors_in(other))
    return [path for path, _ in pairs[0]] == [path for path, _ in pairs[1]] and all(
        left.dtype == right.dtype and torch.equal(left.nan_to_num(), right.nan_to_num())
        for (_, left), (_, right) in zip(*pairs, strict=True)
    )


def size_of(batch: Any) -> int:
    """The number of tokens in a batch whose first tensor holds integers in rows; else the number of its examples."""
    first = next((tensor for _, tensor in tensors_in(batch)), None)
    if first is None or not first.ndim:
        return 1
    whole = not first.is_floating_point() and not first.is_complex() and first.ndim > 1
    return first.numel() if whole else first.shape[0]
