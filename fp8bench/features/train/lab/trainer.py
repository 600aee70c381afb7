"""Trains one arm of a seed: builds its model in its precision, and takes its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8bench.features.train.lab import models
from fp8bench.features.train.lab.evaluate import DIGESTS, Evaluation, Scores, windows_by_step
from fp8bench.features.train.lab.fine_tuning import apply_start, frozen_in, scaled
from fp8bench.features.train.lab.optimizer import LoopOptimizer, clippings_of, joint, seed_of
from fp8bench.features.train.lab.together import digest_of
from fp8bench.features.train.lab.update_rules import PlateauShare, group_of, loss_scale_of, share_of_rate
from fp8bench.features.train.lab.watched_step import FaultyTensor, Finder, ModelWatch, not_finite_words
from fp8bench.features.train.lab.ways import together_of
from fp8bench.features.train.request import clip_of
from fp8bench.features.train.values import (
    FALLBACK,
    NOT_FINITE,
    WATCHED_SECONDS,
    WIRE_BYTES,
    Arm,
    ArmState,
    SeedTask,
    StepFigure,
    StepRow,
    StreamLine,
    TrainingEvent,
)
from fp8bench.model import DeviceFacts, MemoryRole
from fp8bench.nn.around import set_around
from fp8bench.nn.attention import EmulatedCore, SelfAttention
from fp8bench.nn.compiling import Forward, compiled
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.parallel.wire import StepWire
from fp8bench.nn.unit_scaling import scale_to_unit
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.protocols import Arithmetic, Operand, Phases, Role, SilentPhases, WatchedArithmetic, key_of
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions
from fp8bench.worker.products import product_like

_SILENT = SilentPhases()
# Replaces the arithmetic of a mode, given both.
WrapArithmetic = Callable[[str, Arithmetic], Arithmetic]
# An arm stops after this many steps in a row that were not finite.
_MOST_SKIPPED = 20


class _Remembered(NamedTuple):
    """What a step passes to the next, apart from weights and moments."""

    arithmetics: dict[str, dict[str, Tensor]]
    statistics: dict[str, Tensor]


class Trainer:
    """Trains an arm of one seed; `step` is the next step, counted from 0."""

    def __init__(
        self, task: SeedTask, arm: Arm, watch: WatchCasts | None = None, wrap: WrapArithmetic | None = None
    ) -> None:  # fmt: skip
        """`watch` is called with every cast."""
        self.arm = arm
        self._watch_casts, self._wrap = watch, wrap
        self.precision = precisions.get(arm.precision)
        self.step, self.stopped = 0, False
        self._skipped = 0
        self._task = task
        self._settings = settings = arm.taken(task.settings)
        self._rate = settings.rate
        self._seed = task.seed
        self._arithmetics: dict[str, Arithmetic] = {}
        self._model = self._build(task)
        self._parameters = {name: own for name, own in self._model.named_parameters() if own.requires_grad}
        self._weights = CachedWeights(self._model)
        self._forward = self._compiled() if settings.compile == "yes" else self._model
        self._optimizer = self._build_optimizer()
        self._most_norm, clip_group = clip_of(settings.clip)
        self._clip_groups = [group_of(name, own.ndim, clip_group) for name, own in self._parameters.items()]
        self._plateau = PlateauShare(settings)
        self._loss_scale = loss_scale_of(settings, self.precision.loss_scale)
        self._watch = ModelWatch(
            self._model, arm.name, task.seed, self.tokens // settings.micro_batches, inside=settings.compile == "no"
        )

    def _build(self, task: SeedTask) -> Any:
        settings = self._settings
        self._config = models.config_of(settings, task.text.vocabulary)
        self._layers = models.layers_of(settings.arch, self._config)
        self.together = together_of(settings, self._config, task.facts)
        model = self._build_model(task.facts)
        shape = self._config.sequence, task.facts.key, self._config.vocabulary
        text, self._windows = windows_by_step(task.text, settings.shift, task.steps, *shape)
        self._evaluation = Evaluation(text, self._config, self._layers, task.facts, self.together.scaled)
        self._scores = Scores(task, settings, self._evaluation.held_out, self._config)
        return model

    def _build_optimizer(self) -> Any:
        return LoopOptimizer(self.together.own(self._parameters), self._settings)

    def _build_model(self, facts: DeviceFacts) -> LanguageModel:
        """Weights are drawn from the seed in float32 whatever the precision."""
        keys = dict(self._settings.precision_map)
        share = self.together.share
        source = f"{self._seed}/rank-{share}" if share else f"{self._seed}"  # each rank rounds at random by itself
        layers = {layer.name: layer for layer in self._layers}

        def choose(name: str) -> Arithmetic:
            key = key_of(layers[name], keys)
            high = self.precision.carried_by if layers[name].high else ""
            mode = keys[key] if key is not None else high or self.arm.precision
            arithmetic = scaled(self._arithmetic(mode, facts).layer(f"{source}/{name}"), self._settings, mode, name)
            self._arithmetics[name] = watched = self._watched(self.together.scaled(name, arithmetic))
            return watched

        carrier = self.precision.arithmetic(facts).carrier
        torch.manual_seed(seed_of("weights", self._seed))
        with torch.device(facts.key):
            model = models.built(self._settings, self._config, choose, carrier)
        if self.precision.unit_scaled:
            scale_to_unit(model, self._config.sequence)
        around = {layer.name: key_of(layer, keys) for layer in models.around_of(self._settings.arch, self._config)}
        set_around(model, {name: self._arithmetic(keys[key], facts) for name, key in around.items() if key})
        if self._settings.attention != "auto":
            self._round_attention(model, facts)
        apply_start(model, self._settings, self.arm, self._seed)
        self._count = sum(parameter.numel() for parameter in model.parameters())
        self.together.take(model)
        return model

    def _round_attention(self, model: LanguageModel, facts: DeviceFacts) -> None:
        """Give the attention cores the arm's precision; each layer keeps its own scales."""
        for path, module in model.named_modules():
            if isinstance(module, SelfAttention):
                prescaled = self._settings.attention == "prescaled"
                module.core = core = EmulatedCore(self.precision.arithmetic(facts), prescaled=prescaled)
                for part, arithmetic in core.parts.items():
                    name = f"{path}.core.{part}"
                    core.parts[part] = self._arithmetics[name] = self._watched(self.together.scaled(name, arithmetic))

    def _arithmetic(self, mode: str, facts: DeviceFacts) -> Arithmetic:
        arithmetic = precisions.get(mode).arithmetic(facts)
        return arithmetic if self._wrap is None else self._wrap(mode, arithmetic)

    def _watched(self, arithmetic: Arithmetic) -> Arithmetic:
        return arithmetic if self._watch_casts is None else WatchedArithmetic(arithmetic, self._watch_casts)

    def _compiled(self) -> Forward:
        """Compiles the model now, so that no timed step has to."""
        batch = self._windows(0).drawn(self._seed, 0, 0, self._share)
        with self._weights.cast(_SILENT):
            return compiled(self._model, *batch)

    @property
    def _share(self) -> int:
        return self._config.batch // self.together.shares

    @property
    def tokens(self) -> int:
        return self._config.batch * self._config.sequence * self._settings.micro_batches

    def state(self) -> ArmState:
        sizes = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in self._kept().items()}
        each = tuple((name, size / self._count) for name, size in sizes.items())
        return ArmState(self.arm.name, self._count, self.tokens, each)

    def _kept(self) -> dict[str, list[Tensor]]:
        """All tensors that lie in memory between two steps, by kind; those of casts appear with the first cast."""
        casts = [tensor for arithmetic in self._arithmetics.values() for tensor in arithmetic.memory().values()]
        others = {"casts": casts, "statistics": [*self._model.buffers()], "frozen": frozen_in(self._model)}
        kept: dict[str, list[Tensor]] = self._optimizer.kept()
        return kept | {name: tensors for name, tensors in others.items() if tensors}

    def memory_roles(self) -> dict[MemoryRole, object]:
        kept = self._optimizer.kept()
        moments = [tensors for name, tensors in kept.items() if name not in ("weights", "gradients")]
        weights = [*kept["weights"], *frozen_in(self._model)]
        return {MemoryRole.WEIGHTS: weights, MemoryRole.GRADIENTS: kept["gradients"], MemoryRole.OPTIMIZER: moments}

    def advance(self, phase: Phases = _SILENT, watched: bool = True) -> Iterator[StreamLine]:
        """Take one step and yield its lines; none where the arm has stopped or is done. Some steps are `watched`; in
        one that never is, nothing is kept to measure with."""
        if self.stopped or self.step == self._task.steps:
            return
        if self.step == 0 and (other := product_like(self.precision, self._task.facts)):
            words = f"the numbers of a product are those of {other}, not of {self.precision.mode}"
            yield self._event(FALLBACK, words)
        started = time.perf_counter()
        scale, before = self._loss_scale.scale, self._remembered()
        rate, measured = self._rate_now(), watched
        watched = watched and self.step % self._task.stride == 0
        counted = watched and self._task.facts.ranks > 1
        with (
            StepWire(self.together.rank, again=False) if counted else nullcontext() as wire, self._present(phase),
            self._watch.step(self._settings.micro_batches) if watched else nullcontext() as seen,
        ):  # fmt: skip
            loss = self._losses(scale, phase)
            self.together.average(self._optimizer.gradients, phase)
            norms = self.together.norms(self._optimizer.gradients.norms())
            norm = joint(norms) / scale
            skip = (~(loss + norm).isfinite()).to(torch.float32)
            clippings, clipping = clippings_of(norms, norm, scale, self._most_norm, self._clip_groups)
            self._optimizer.weights.draws(seed_of("round", self._seed, self.step))
            with phase.optimizer_step:
                self._optimizer.step(rate, [each * scale for each in self.together.mine(clippings)], skip, measured)
            norms = self.together.norms([*self._optimizer.update_norms, *self._optimizer.weight_norms])
            moved, size = norms[: len(norms) // 2], norms[len(norms) // 2 :]
            numbers = torch.stack([loss, norm, clipping, joint(moved), joint(size)]).tolist()  # the only wait of a step
            sent = () if wire is None else wire.sent(self.together.rank)  # before readings send messages of their own
            if seen is not None:
                self.together.updated(phase)
                seen.updated(*(dict(zip(self._parameters, norms, strict=True)) for norms in (moved, size)))
        # A watched step takes longer than others: its row has no time.
        row = self._row(numbers, rate, scale, time.perf_counter() - started if seen is None else 0.0)
        yield row
        if seen is not None:
            yield from self._watch.lines(self.step, seen)
            yield StepFigure(row.arm, row.seed, row.step, WATCHED_SECONDS, time.perf_counter() - started)
            for message in sent:
                what = f"{message.operation} {message.dtype}"
                yield StepFigure(row.arm, row.seed, row.step, WIRE_BYTES, message.bytes, what)
        self._loss_scale.seen(not row.skipped)
        if row.skipped or not math.isfinite(row.parameter_norm):
            yield from self._handle_not_finite(row, before)
        self._skipped = self._skipped + 1 if row.skipped else 0
        self.step += 1

    def _rate_now(self) -> float:
        return self._rate * share_of_rate(self._settings, self.step, self._task.steps) * self._plateau.share

    def read(self, step: int) -> tuple[int, int]:
        """Digests of the tokens that this rank reads in a step, and of those that all ranks read in it."""
        settings, digest, together = self._settings, self._windows(step).digest, self.together
        numbers = range(settings.micro_batches)
        parts = [number * together.shares + together.share for number in numbers]
        own = sum(digest(self._seed, step, part, self._share) for part in parts)
        whole = sum(digest(self._seed, step, number, self._config.batch) for number in numbers)
        return own % DIGESTS, whole % DIGESTS

    def weights_digest(self) -> tuple[int, tuple[str, ...]]:
        """A digest of the weights that all ranks share, and what is wrong with what this rank received."""
        with self._present(_SILENT):
            return digest_of(self.together.common(self._parameters)), self.together.faults()

    def scales_digest(self) -> int:
        """A digest of the scales that come from earlier casts."""
        memories = (arithmetic.memory().values() for arithmetic in self._arithmetics.values())
        scales = [tensor for memory in memories for tensor in memory if tensor.dtype == torch.float32]
        return digest_of(scales)

    def repeat(self, last: int) -> None:
        """Let an arm that is done take its last steps again, from its present weights."""
        if self.step == self._task.steps:
            self.step = max(0, self.step - last)

    @contextmanager
    def _present(self, phase: Phases) -> Iterator[None]:
        with self._optimizer.weights.present(), self.together.present(phase):
            if self._watch_casts is not None:  # whole weights that exist for one step are otherwise of unknown role
                for parameter in self._parameters.values():
                    self._watch_casts(Operand(parameter), parameter, Role.WEIGHT, None)
            yield

    def _losses(self, scale: float, phase: Phases = _SILENT) -> Tensor:
        self._optimizer.gradients.begin()
        with self._weights.cast(phase):
            numbers = range(self._settings.micro_batches)
            loss = torch.stack([self._micro_batch(number, scale, phase) for number in numbers]).mean()
        with phase.communication:
            return self.together.mean(loss)

    def _micro_batch(self, number: int, scale: float, phase: Phases) -> Tensor:
        part = number * self.together.shares + self.together.share
        torch.manual_seed(seed_of("step", self._seed, self.step, part))
        with phase.data_load:
            batch = self._windows(self.step).drawn(self._seed, self.step, part, self._share)
        loss = self._forward(*batch, phase)
        (loss * (scale / self._settings.micro_batches)).backward()
        return loss.detach()

    def _row(self, numbers: list[float], rate: float, scale: float, seconds: float) -> StepRow:
        loss, norm, clipping, moved, size = numbers
        finite = math.isfinite(loss + norm)
        return StepRow(
            self.arm.name, self._task.seed, self.step, loss, rate, norm, 1 - 1 / clipping if finite else 0.0, size,
            moved / size if size else 0.0, scale, self.tokens, seconds, skipped=not finite,
        )  # fmt: skip

    def _handle_not_finite(self, row: StepRow, before: _Remembered) -> Iterator[TrainingEvent]:
        """Halve the loss scale, or find the first faulty tensor and do what --on-nan says."""
        if row.skipped and math.isfinite(row.loss) and self._loss_scale.scale < row.loss_scale:
            self._recall(_Remembered({}, before.statistics))
            yield self._event("scale-halved", f"gradients overflowed under a loss scale of {row.loss_scale:g}")
            return
        place = self._place(row.loss_scale, before)
        layer, tensor, values = (place.layer, place.tensor, place.values) if place is not None else ("", "", ())
        words = not_finite_words(place, row.loss, row.gradient_norm)
        values = (*values, ("loss_scale", row.loss_scale))
        yield TrainingEvent(row.arm, row.seed, row.step, NOT_FINITE, words, layer, tensor, values)
        why = self._why_stopped(row)
        if why:
            self.stopped = True
            yield self._event("stopped", f"the arm is stopped: {why}")
        elif self._settings.on_nan == "lower-rate":
            self._rate /= 2
            share = self._rate / self._settings.rate
            yield self._event("rate-lowered", f"the learning rate is halved from here on, to {share:g} of its setting")

    def _why_stopped(self, row: StepRow) -> str:
        """'' where the arm goes on after a step that was not finite."""
        if not math.isfinite(row.parameter_norm):
            return "its weights are not finite; resume from the last checkpoint"
        if self._skipped + 1 == _MOST_SKIPPED:
            return f"{_MOST_SKIPPED} steps in a row were not finite"
        return "as --on-nan stop says" if self._settings.on_nan == "stop" else ""

    def _event(self, kind: str, words: str) -> TrainingEvent:
        return TrainingEvent(self.arm.name, self._task.seed, self.step, kind, words)

    def _place(self, scale: float, before: _Remembered) -> FaultyTensor | None:
        """The first tensor of the step that was not finite, found by taking the step again without an update."""
        self._recall(before)
        finder = Finder()
        with self._present(_SILENT), finder.attached(self._model):
            forward, self._forward = self._forward, self._model  # a compiled graph has no hooks
            self._losses(scale)
            self._forward = forward
        self._recall(_Remembered({}, before.statistics))
        return finder.place

    def _remembered(self) -> _Remembered:
        memories = {name: arithmetic.memory() for name, arithmetic in self._arithmetics.items()}
        copies = {name: {key: kept.clone() for key, kept in memory.items()} for name, memory in memories.items()}
        return _Remembered(copies, {name: kept.clone() for name, kept in self._model.named_buffers()})

    def _recall(self, remembered: _Remembered) -> None:
        """Take over these tensors: the caller must not use them any more."""
        for name, memory in remembered.arithmetics.items():
            self._arithmetics[name].recall({key: tensor.to(self._task.facts.key) for key, tensor in memory.items()})
        for name, buffer in self._model.named_buffers():
            buffer.copy_(remembered.statistics[name])

    def validate(self, last: bool = False) -> tuple[StreamLine, ...]:
        """`last` adds what only a finished training gets. What casts remember is restored: no later step changes."""
        who, before = (self.arm.name, self._task.seed, self.step), self._remembered()
        modes = [(module, module.training) for module in self._model.modules()]
        self._model.eval()
        try:
            last = last or self.step == self._task.steps
            with self._present(_SILENT), torch.no_grad(), self._weights.cast(_SILENT):
                looks = tuple(self._evaluation.look(self._model, who, last=last))
                scores = tuple(self._scores.of(self._model)) if last else ()
            for look in looks:
                if look.of == "held-out":
                    self._plateau.seen(self.step, look.loss)
            return *looks, *(StepFigure(*who, name, value) for name, value in scores)
        finally:
            for module, mode in modes:
                module.training = mode
            self._recall(before)

    def memory(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "stopped": self.stopped,
            "loss_scale": [self._loss_scale.scale, self._loss_scale.good_steps],
            "optimizer": self._optimizer.memory(),
            "rate": self._rate,
            "plateau": self._plateau.memory(),
            "skipped": self._skipped,
            "remembered": self._remembered()._asdict(),
            "watched": dict(self._watch.scales),
        }

    def recall(self, memory: dict[str, Any]) -> None:
        self.step, self.stopped = int(memory["step"]), bool(memory["stopped"])
        self._loss_scale.scale, self._loss_scale.good_steps = memory["loss_scale"]
        self._rate, self._skipped = memory["rate"], memory["skipped"]
        self._plateau.recall(memory["plateau"])
        self._optimizer.recall(memory["optimizer"])
        self._recall(_Remembered(**memory["remembered"]))
        self._watch.scales = dict(memory["watched"])
