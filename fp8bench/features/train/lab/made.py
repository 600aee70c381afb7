"""The trained object: an arm's model with its batches and losses.

A built-in architecture, whole or a rank's part of it, is made here; a user's model in own_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab import models
from fp8bench.features.train.lab.checkpoint import apply_scales, apply_start
from fp8bench.features.train.lab.evaluate import DIGESTS, Batch, Evaluation, Scores, TokenWindows
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, make_step_optimizer, seed_of
from fp8bench.features.train.lab.together import Alone
from fp8bench.features.train.lab.ways import together_of
from fp8bench.features.train.values import Arm, SeedTask, Validation
from fp8bench.nn.around import set_around
from fp8bench.nn.attention import EmulatedCore, SelfAttention
from fp8bench.nn.compiling import Forward, compile_model
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.unit_scaling import scale_to_unit
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.protocols import Arithmetic, Phases, ScaleBook, SilentPhases, WatchedArithmetic, key_of
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions

SILENT = SilentPhases()
# Replaces the arithmetic of a mode, given both.
WrapArithmetic = Callable[[str, Arithmetic], Arithmetic]


class MadeModel:
    """A model in an arm's precision, with its batches, losses and scoring. Subclasses fill in the rest: models.py's
    architectures (BuiltInModel) or a user's function (OwnModel). `tokens` is the number per step."""

    model: nn.Module
    together: Alone
    scores: Scores
    parameter_count: int
    tokens: int

    def __init__(self, task: SeedTask, arm: Arm, watch: WatchCasts | None, wrap: WrapArithmetic | None) -> None:
        """`watch` is called with every cast."""
        self.task, self.arm, self.watch_casts = task, arm, watch
        self.settings = arm.merge_settings(task.settings)
        self.precision = precisions.get(arm.precision)
        self.arithmetics: dict[str, Arithmetic] = {}
        self.scale_books: list[ScaleBook] = []
        self._wrap = wrap

    def renew_scales(self, due: bool) -> None:
        """Says whether casts from now on renew scales from data."""
        for book in self.scale_books:
            book.watching = due

    def finish(self) -> None:
        """Collects what is trained and cast; called once the model exists."""
        named = self.model.named_parameters()
        self.parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.cached_weights = CachedWeights(self.model)

    def arithmetic(self, mode: str) -> Arithmetic:
        arithmetic = precisions.get(mode).arithmetic(self.task.facts)
        return arithmetic if self._wrap is None else self._wrap(mode, arithmetic)

    def watch_arithmetic(self, arithmetic: Arithmetic) -> Arithmetic:
        return arithmetic if self.watch_casts is None else WatchedArithmetic(arithmetic, self.watch_casts)

    def make_optimizer(self) -> StepOptimizer:
        return make_step_optimizer(self.together.own(self.parameters), self.settings)

    @property
    def has_own_rates(self) -> bool:
        """Whether the optimizer is a user's, whose rates our schedules do not change."""
        return False

    def read_batch(self, step: int, number: int) -> Any:
        """Returns this rank's part of a step's micro-batch."""
        raise NotImplementedError

    def seed_batch(self, step: int, number: int) -> AbstractContextManager[None]:
        """Seeds the random numbers of a micro-batch."""
        # Ranks that divide a micro-batch read consecutive parts of it.
        part = number * self.together.shares + self.together.share
        torch.manual_seed(seed_of("step", self.task.seed, step, part))
        return nullcontext()

    def compute_loss(self, batch: Any, phase: Phases, watched: bool = False) -> Tensor:
        """Returns the loss of a batch. `watched`: hooks on modules must run, which a compiled graph would skip."""
        raise NotImplementedError

    def digest_batches(self, step: int) -> tuple[int, int]:
        """Returns digests of the tokens that this rank reads in a step, and of those that all ranks read in it."""
        raise NotImplementedError

    def repeat_steps(self, count: int) -> None:
        """Prepares to repeat the last steps."""

    def validate(self, place: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        """Yields the held-out losses of an arm, a seed and a step; `last` adds those of a finished training."""
        raise NotImplementedError


class BuiltInModel(MadeModel):
    """One of the architectures of models.py. Ranks divide its batch or its weights (`together`)."""

    model: LanguageModel

    def __init__(self, task: SeedTask, arm: Arm, watch: WatchCasts | None, wrap: WrapArithmetic | None) -> None:
        super().__init__(task, arm, watch, wrap)
        settings, facts = self.settings, task.facts
        self._config = config = models.config_of(settings, task.text.vocabulary)
        self._layers = models.layers_of(settings.arch, config)
        self.together = together_of(settings, config, facts)
        self.model = self._build()
        self.together.take(self.model)
        self.windows = TokenWindows(task.text.train, config.sequence, facts.key, config.vocabulary)
        self._evaluation = Evaluation(task.text, config, self._layers, facts, self.together.share_scales)
        self.scores = Scores(task, settings, self._evaluation.held_out, config)
        self.tokens = config.batch * config.sequence * settings.micro_batches
        self.finish()
        self._forward: Forward = self._compile() if settings.compile == "yes" else self.model

    def _build(self) -> LanguageModel:
        """Builds the model, with weights drawn from the seed in float32 regardless of the precision."""
        settings, facts, seed = self.settings, self.task.facts, self.task.seed
        keys = dict(settings.precision_map)
        share = self.together.share
        source = f"{seed}/rank-{share}" if share else f"{seed}"  # each rank rounds at random independently
        layers = {layer.name: layer for layer in self._layers}

        def choose(name: str) -> Arithmetic:
            key = key_of(layers[name], keys)
            high = self.precision.carried_by if layers[name].high else ""
            mode = keys[key] if key is not None else high or self.arm.precision
            drawn = self.arithmetic(mode).layer(f"{source}/{name}")
            arithmetic = apply_scales(drawn, settings, mode, name, self.scale_books)
            self.arithmetics[name] = watched = self.watch_arithmetic(self.together.share_scales(name, arithmetic))
            return watched

        carrier = self.precision.arithmetic(facts).carrier
        # All arms of a seed begin with the same float32 weights.
        torch.manual_seed(seed_of("weights", seed))
        with torch.device(facts.key):
            model = models.built(settings, self._config, choose, carrier)
        # Unit scaling changes weights and layers, so it must precede everything that inspects them.
        if self.precision.unit_scaled:
            scale_to_unit(model, self._config.sequence)
        around = {layer.name: key_of(layer, keys) for layer in models.around_of(settings.arch, self._config)}
        set_around(model, {name: self.arithmetic(keys[key]) for name, key in around.items() if key})
        if settings.attention != "auto":
            self._round_attention(model)
        apply_start(model, settings, self.arm, seed)
        self.parameter_count = sum(parameter.numel() for parameter in model.parameters())
        return model

    def _round_attention(self, model: LanguageModel) -> None:
        """Gives the attention cores the arm's precision; each layer has separate scales."""
        for path, module in model.named_modules():
            if isinstance(module, SelfAttention):
                prescaled = self.settings.attention == "prescaled"
                module.core = core = EmulatedCore(self.precision.arithmetic(self.task.facts), prescaled=prescaled)
                for part, arithmetic in core.parts.items():
                    name = f"{path}.core.{part}"
                    core.parts[part] = self.arithmetics[name] = self.watch_arithmetic(
                        self.together.share_scales(name, arithmetic)
                    )

    def _compile(self) -> Forward:
        """Compiles the model now, so that no timed step has to."""
        with self.cached_weights.cast(SILENT):
            return compile_model(self.model, *self.read_batch(0, 0))

    @property
    def _rows(self) -> int:
        """The number of sequences of a micro-batch that this rank reads."""
        return self._config.batch // self.together.shares

    def read_batch(self, step: int, number: int) -> Batch:
        part = number * self.together.shares + self.together.share
        return self.windows.draw(self.task.seed, step, part, self._rows)

    def compute_loss(self, batch: Any, phase: Phases, watched: bool = False) -> Tensor:
        forward: Forward = self.model if watched else self._forward
        tokens, targets = batch
        return forward(tokens, targets, phase)

    def digest_batches(self, step: int) -> tuple[int, int]:
        digest, shares, numbers = self.windows.digest, self.together.shares, range(self.settings.micro_batches)
        parts = [number * shares + self.together.share for number in numbers]
        # The parent adds up the parts of all ranks, and compares the sum with the whole.
        rank_sum = sum(digest(self.task.seed, step, part, self._rows) for part in parts)
        step_sum = sum(digest(self.task.seed, step, number, self._config.batch) for number in numbers)
        return rank_sum % DIGESTS, step_sum % DIGESTS

    def validate(self, place: tuple[str, int, int], last: bool) -> Iterator[Validation]:
        """Like the base class; `last` adds losses by position, on other text, and with weights quantised after
        training."""
        yield from self._evaluation.look(self.model, place, last)
