"""One arm of a training: its model in its precision, and its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fp8bench.model import DeviceFacts
from fp8bench.model.training import Arm, ArmState, Line, SeedTask, StepRow, TrainingEvent, Validation
from fp8bench.nn.cached_weights import CachedWeights
from fp8bench.nn.gpt import LanguageModel
from fp8bench.protocols import Arithmetic, SilentPhases, key_of
from fp8bench.registry import precisions
from fp8bench.training import models
from fp8bench.training.batches import Windows
from fp8bench.training.evaluate import Evaluation, undisturbed
from fp8bench.training.gradients import joint
from fp8bench.training.loss_scaling import loss_scale_of
from fp8bench.training.optimizer import AdamW
from fp8bench.training.schedule import share_of_rate
from fp8bench.training.seeds import own_seed, seed_of

_SILENT = SilentPhases()


class Trainer:
    """An arm of one seed: `step` is the next step."""

    def __init__(self, task: SeedTask, arm: Arm) -> None:
        self.arm = arm
        self.precision = precisions.get(arm.precision)
        self.step = 0
        self.stopped = False
        self._task = task
        self._settings = settings = arm.taken(task.settings)
        self._seed = own_seed(task.seed, arm)
        self._config = models.config_of(settings, task.text.vocabulary)
        self._layers = models.layers_of(settings.arch, self._config)
        self._arithmetics: dict[str, Arithmetic] = {}
        self._model = self._made(task.facts)
        self._parameters = dict(self._model.named_parameters())
        self._weights = CachedWeights(self._model)
        self._windows = Windows(task.text.train, self._config.sequence, task.facts.key, self._config.vocabulary)
        self._evaluation = Evaluation(task.text, self._config, self._layers, task.facts)
        self._optimizer = AdamW(self._parameters, settings)
        self._loss_scale = loss_scale_of(settings, self.precision.loss_scale)

    def _made(self, facts: DeviceFacts) -> LanguageModel:
        """The model, its weights drawn from the seed in float32 whatever the precision."""
        keys = dict(self._settings.precision_map)
        layers = {layer.name: layer for layer in self._layers}

        def choose(name: str) -> Arithmetic:
            key = key_of(layers[name], keys)
            high = self.precision.carried_by if layers[name].high else ""
            mode = keys[key] if key is not None else high or self.arm.precision
            found = precisions.get(mode).arithmetic(facts).layer(f"{self._seed}/{name}")
            self._arithmetics[name] = found
            return found

        carrier = self.precision.arithmetic(facts).carrier
        torch.manual_seed(seed_of("weights", self._seed))
        with torch.device(facts.key):
            return models.built(self._settings, self._config, choose, carrier)

    @property
    def tokens(self) -> int:
        """Those of one step."""
        return self._config.batch * self._config.sequence * self._settings.micro_batches

    def state(self) -> ArmState:
        count = sum(one.numel() for one in self._parameters.values())
        sizes = {name: sum(one.nbytes for one in some) for name, some in self._optimizer.kept().items()}
        return ArmState(self.arm.name, count, self.tokens, tuple((name, size / count) for name, size in sizes.items()))

    def advance(self) -> Iterator[Line]:
        """One step; nothing where the arm has stopped or is done."""
        if self.stopped or self.step == self._task.steps:
            return
        started = time.perf_counter()
        settings, scale = self._settings, self._loss_scale.scale
        rate = settings.rate * settings.handicap * share_of_rate(settings, self.step, self._task.steps)
        with self._optimizer.weights.present():
            loss = self._losses(scale)
            norm = self._optimizer.gradients.norm() / scale
            skip = (~(loss + norm).isfinite()).to(torch.float32)
            clipping = (norm / settings.clip).clamp(min=1.0) if settings.clip else torch.ones_like(norm)
            self._optimizer.step(rate, clipping * scale, skip)
            moved, size = joint(self._optimizer.update_norms), joint(self._optimizer.weight_norms)
            numbers = torch.stack([loss, norm, clipping, moved, size]).tolist()  # the one wait of a step
        yield from self._told(numbers, rate, scale, time.perf_counter() - started)
        self.step += 1

    def _losses(self, scale: float) -> Tensor:
        """Forward and backward of all micro-batches: their mean loss."""
        self._optimizer.gradients.begin()
        with self._weights.cast(_SILENT):
            return torch.stack([self._micro_batch(one, scale) for one in range(self._settings.micro_batches)]).mean()

    def _micro_batch(self, number: int, scale: float) -> Tensor:
        """Gradients of one are added to those there are; its loss."""
        torch.manual_seed(seed_of("step", self._seed, self.step, number))
        batch = self._windows.drawn(self._seed, self.step, number, self._config.batch)
        loss: Tensor = self._model(*batch, _SILENT)
        (loss * (scale / self._settings.micro_batches)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _told(self, numbers: list[float], rate: float, scale: float, seconds: float) -> Iterator[Line]:
        loss, norm, clipping, moved, size = numbers
        name, seed, finite = self.arm.name, self._task.seed, math.isfinite(loss + norm)
        clipped = 1 - 1 / clipping if finite else 0.0
        yield StepRow(
            name, seed, self.step, loss, rate, norm, clipped, size, moved / size, scale, self.tokens, seconds,
            skipped=not finite,
        )  # fmt: skip
        self._loss_scale.seen(finite)
        if not finite:
            yield TrainingEvent(name, seed, self.step, "not-finite", f"loss {loss}, norm of the gradients {norm}")
            if not self._loss_scale.may_fall and self._settings.on_nan == "stop":
                self.stopped = True
                yield TrainingEvent(name, seed, self.step, "stopped", "its loss or gradients are not finite")

    def validate(self) -> tuple[Validation, ...]:
        """The losses on text that was not trained on; once all steps are done, in every way that is looked at."""
        who = self.arm.name, self._task.seed, self.step
        aside = undisturbed(self._model, self._arithmetics.values())
        with self._optimizer.weights.present(), aside, self._weights.cast(_SILENT):
            return tuple(self._evaluation.look(self._model, who, last=self.step == self._task.steps))

    def memory(self) -> dict[str, Any]:
        """All that the steps to come depend on."""
        return {
            "step": self.step,
            "stopped": self.stopped,
            "loss_scale": [self._loss_scale.scale, self._loss_scale.good_steps],
            "optimizer": self._optimizer.memory(),
            "arithmetics": {name: one.memory() for name, one in self._arithmetics.items()},
            "statistics": dict(self._model.named_buffers()),
        }

    def recall(self, memory: dict[str, Any]) -> None:
        """Go on from what was in memory."""
        self.step, self.stopped = int(memory["step"]), bool(memory["stopped"])
        self._loss_scale.scale, self._loss_scale.good_steps = memory["loss_scale"]
        for name, tensors in self._optimizer.memory().items():
            for one, kept in zip(tensors, memory["optimizer"][name], strict=True):
                one.copy_(kept)
        place = self._task.facts.key
        for name, arithmetic in self._arithmetics.items():
            arithmetic.recall({key: tensor.to(place, copy=True) for key, tensor in memory["arithmetics"][name].items()})
        for name, buffer in self._model.named_buffers():
            buffer.copy_(memory["statistics"][name])
