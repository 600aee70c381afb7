"""One arm of a training of a user's own model: the model as its maker gave it, converted, with its batches and, where
it gives one, its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.features.train.lab.checkpoint import moved_by_an_ulp
from fp8bench.features.train.lab.fine_tuning import begin_as_asked
from fp8bench.features.train.lab.optimizer import Optimizer, seed_of
from fp8bench.features.train.lab.own_batches import OwnBatches, check_batches, held_out_of, size_of
from fp8bench.features.train.lab.own_optimizer import TorchOptimizer
from fp8bench.features.train.lab.scores import Scores
from fp8bench.features.train.lab.together import Alone
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.values import Arm, ArmRole, SeedTask, Validation
from fp8bench.model import Level
from fp8bench.model.step import Coverage
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.conversion import Conversion
from fp8bench.nn.own_model import arguments_of, called, loss_of, on_device, seeded
from fp8bench.protocols import Arithmetic, Layer, Phases, SilentPhases, key_of
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions
from fp8bench.tape.coverage import coverage_of
from fp8bench.user_code import own_words
from fp8bench.workloads.model import copied

_SILENT = SilentPhases()
_HELD_OUT = "held-out"


def trainer_of(task: SeedTask, arm: Arm, watch: WatchCasts | None = None) -> Trainer:
    return (OwnTrainer if task.settings.make else Trainer)(task, arm, watch)


class OwnTrainer(Trainer):
    """Batches are counted micro-batch by micro-batch. Rates are the optimizer's own where the maker gives one: those of
    the settings are then factors of it."""

    def _begun(self, task: SeedTask) -> nn.Module:
        settings, facts = self._settings, task.facts
        self.together = Alone()
        self._name = settings.make
        self._given = given = copied(self._name, self._seed, facts)
        model = given.model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(f"{self._name}: no parameter of its model needs a gradient, so that nothing is trained.")
        if not model.training:  # as from_pretrained gives it
            model.train()
        begin_as_asked(model, settings)
        if settings.nudge == "ulp":
            moved_by_an_ulp(model, seed_of("nudge", self._seed))
        self._batches = OwnBatches(self._name, given, self._seed, facts)
        self._held_out = held_out_of(self._name, given, facts)
        self._evaluation: Any = self
        self._scores = Scores(task, settings, [on_device(batch, facts.key) for batch in self._held_out])
        self._count = sum(parameter.numel() for parameter in model.parameters())
        self._size = size_of(given.batch) * settings.micro_batches
        self.loss_words = ""
        self.conversion = self._conversion(model)
        if self.conversion is not None:
            self.conversion.__enter__()  # for as long as this copy lives
        return model

    def _conversion(self, model: nn.Module) -> Conversion | None:
        """Of what the arm's precision and map convert; None for the model as it came."""
        keys, facts = dict(self._settings.precision_map), self._task.facts
        if self.precision.name == UNTOUCHED and not keys:
            return None

        def choose(layer: Layer) -> Arithmetic | None:
            key = key_of(layer, keys)
            mode = keys[key] if key is not None else self.precision.mode
            if mode == UNTOUCHED:
                return None
            own = precisions.get(mode).arithmetic(facts).layer(f"{self._seed}/{layer.name}")
            self._arithmetics[layer.name] = told = self._told(own)
            return told

        return Conversion(model, choose, skip=self._settings.skip, keys=keys, multiples=self._multiples(), shown=True)

    def _multiples(self) -> tuple[int, int]:
        """What native products of the device want; nothing where they are emulated, or a processor's."""
        facts, words = self._task.facts, (self.precision.mode, *dict(self._settings.precision_map).values())
        modes = [precisions.get(word) for word in words if word != UNTOUCHED]
        native = [one.multiples for one in modes if one.support(facts).level is Level.NATIVE and facts.accelerated]
        return (max(one[0] for one in native), max(one[1] for one in native)) if native else (1, 1)

    def _updating(self) -> Any:
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
                    f"{self._name}: its parameter {path} is {dtype}, and the usual optimizer keeps float32, from which "
                    "casts begin. Make it float32, or give an optimizer."
                )
        if settings.schedule == "plateau" and not self._held_out:
            raise UsageError(
                f"--schedule plateau looks at held-out losses, and {self._name} gives no held_out batches. Give "
                "some, or choose another schedule."
            )
        return Optimizer(self._parameters, settings)

    def _refuse_settings(self) -> None:
        """What is asked of an optimizer that is the user's own."""
        usual = type(self._settings)()
        names = (
            "rate", "warmup", "floor", "weight_decay", "optimizer_states", "master", "gradients", "schedule", "decay",
            "optimizer", "beta1", "beta2", "eps",
        )  # fmt: skip
        for name in names:
            if getattr(self._settings, name) != getattr(usual, name):
                hint = "; --sweep handicap=0.5,2 multiplies its rate" if name == "rate" else ""
                raise UsageError(
                    f"--{name.replace('_', '-')} is of the usual optimizer, and {self._name} gives its own. Leave it "
                    f"out{hint}."
                )

    def _rate_now(self) -> float:
        if not isinstance(self._optimizer, TorchOptimizer):
            return super()._rate_now()
        self._optimizer.factor = self._rate / self._settings.rate * self._settings.handicap
        return self._optimizer.rate

    @property
    def tokens(self) -> int:
        """Of the step that was last, or of the first one: examples where a batch has no tokens."""
        return self._size

    def read(self, step: int) -> tuple[int, int]:
        raise AssertionError("one process reads its batches")

    def repeat(self, last: int) -> None:
        """Further steps read the batches that come next."""
        before = self.step
        super().repeat(last)
        self._past += before - self.step

    def _micro_batch(self, number: int, scale: float, phase: Phases) -> Tensor:
        count = self._settings.micro_batches
        place = (self.step + self._past) * count + number
        with phase.data_load:
            batch = self._batches.at(place)
            self._size = size_of(batch) * count
            placed = on_device(batch, self._task.facts.key)
        with seeded(seed_of("step", self._seed, self.step, number), self._task.facts):
            loss = self._loss_on(placed, phase)
            (loss * (scale / count)).backward()  # type: ignore[no-untyped-call]
        return loss.detach().to(torch.float32).reshape(())

    def _loss_on(self, batch: Any, phase: Phases) -> Tensor:
        if self.conversion is not None:
            self.conversion.phase = phase
        places, named = arguments_of(self._model, batch)
        output = called(self._model, places, named)
        loss, self.loss_words = loss_of(self._model, batch, output, self._given.loss)
        return loss

    def look(self, model: Any, who: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        """As the evaluation of a text does: the loss on what is never trained on, if there is anything."""
        if not self._held_out:
            return
        facts = self._task.facts
        with seeded(seed_of("held-out", self._seed), facts):
            losses = [float(self._loss_on(on_device(batch, facts.key), _SILENT)) for batch in self._held_out]
        tokens = [size_of(batch) for batch in self._held_out]
        mean = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
        yield Validation(*who, _HELD_OUT, mean, sum(tokens), None)

    def coverage(self) -> Coverage | None:
        """Counted in a step of a copy that nobody converts; None for the model as it came."""
        if self.conversion is None:
            return None
        other = OwnTrainer(self._task, Arm(self.arm.name, UNTOUCHED, ArmRole.REFERENCE))
        held = Conversion(
            other._model, lambda layer: self._arithmetics.get(layer.name), skip=self._settings.skip,
            keys=dict(self._settings.precision_map), multiples=self._multiples(),
        ).held  # fmt: skip
        multiple = max(self.precision.multiples)

        batch = on_device(other._batches.at(0), self._task.facts.key)

        def step() -> None:
            other._loss_on(batch, _SILENT).backward()  # type: ignore[no-untyped-call]

        found = coverage_of(other._model, held, step, multiple=multiple)
        return Coverage(found.holders, found.others, found.flops, other.loss_words, found.remarks)


def examined(task: SeedTask) -> tuple[tuple[str, Coverage], ...]:
    """Build every arm of a task, and take a step of it; how much of the model each of them converts.

    Raises UsageError for what cannot be trained: no model or batch, batches that change, nothing that is converted,
    a step that fails.
    """
    found = []
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
            raise UsageError(f"{task.settings.make}: a step of {arm.name} fails: {own_words(error)}.") from error
        coverage = trainer.coverage()
        if coverage is not None:
            found.append((arm.name, coverage))
    return tuple(found)
