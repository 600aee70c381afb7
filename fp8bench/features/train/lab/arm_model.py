"""An arm's model with its batches and losses. This module builds models of the built-in architectures. If ranks
divide a model, it builds the part of one rank. A user's model is built in own_model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab import models
from fp8bench.features.train.lab.checkpoint import apply_scales, load_initial_weights
from fp8bench.features.train.lab.evaluate import HeldOutEvaluation, ModelScorer, TokenBatch, TokenWindows
from fp8bench.features.train.lab.parallelism import SingleRank, make_parallelism
from fp8bench.features.train.lab.step_optimizer import StepOptimizer, derive_seed, make_step_optimizer
from fp8bench.features.train.values import Arm, SeedTask, Validation
from fp8bench.nn.around import set_surrounding_arithmetics
from fp8bench.nn.attention import EmulatedAttentionCore, SelfAttention
from fp8bench.nn.compiling import ForwardPass, compile_model
from fp8bench.nn.gpt import LanguageModel
from fp8bench.nn.unit_scaling import scale_to_unit
from fp8bench.nn.whole_layers import CachedWeights
from fp8bench.protocols import Arithmetic, Phases, ScaleBook, SilentPhases, WatchedArithmetic, find_map_key
from fp8bench.protocols.arithmetic import Watch as WatchCasts
from fp8bench.registry import precisions

UNTIMED_PHASE_MARKERS = SilentPhases()
# A function that may replace a precision's arithmetic, from the precision's name and arithmetic.
WrapArithmetic = Callable[[str, Arithmetic], Arithmetic]


class ArmModel:
    """A model in an arm's precision, with its batches, losses and scoring. The subclass BuiltInModel has the
    architectures of models.py, and UserArmModel the model of a user's function. `tokens` is the number of tokens per
    step. `has_user_learning_rates` means that the optimizer is a user's, whose rates the built-in schedules do not
    change.
    """

    parallelism = SingleRank()
    scores: ModelScorer
    tokens: int
    has_user_learning_rates = False

    def __init__(
        self, task: SeedTask, arm: Arm, watch: WatchCasts | None = None, wrap: WrapArithmetic | None = None
    ) -> None:
        """`watch` is called after each cast of an operand. `wrap` receives the name of a precision and its arithmetic,
        and returns the arithmetic that layers use instead.
        """
        self.task = task
        self.arm = arm
        self.watch_casts = watch
        self.settings = arm.merge_settings(task.settings)
        self.precision = precisions.get(arm.precision)
        self.arithmetics: dict[str, Arithmetic] = {}
        self.scale_books: list[ScaleBook] = []
        self._wrap = wrap
        self.model: Any = self.build_model()
        load_initial_weights(self.model, self.settings, arm, task.seed)
        self.parameter_count = sum(parameter.numel() for parameter in self.model.parameters())
        self.prepare()

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepares the model, its batches and its scoring for training."""
        raise NotImplementedError

    def set_scale_renewal(self, are_due: bool) -> None:
        """Sets whether the following casts compute new scales from their data (`are_due`), or use the stored ones."""
        for scale_book in self.scale_books:
            scale_book.watching = are_due

    def collect_parameters(self) -> None:
        """Collects the trained parameters and the weights whose casts are reused. Called once the model exists."""
        names_and_parameters = self.model.named_parameters()
        self.parameters = {name: parameter for name, parameter in names_and_parameters if parameter.requires_grad}
        self.cached_weights = CachedWeights(self.model)

    def make_arithmetic(self, mode: str) -> Arithmetic:
        arithmetic = precisions.get(mode).arithmetic(self.task.facts)
        return arithmetic if self._wrap is None else self._wrap(mode, arithmetic)

    def make_layer_arithmetic(self, name: str, mode: str) -> Arithmetic:
        """Returns the arithmetic of a layer in a precision, with scales from data if the settings ask for them."""
        # Each rank and each layer rounds at random independently, and reproducibly after a resume.
        part_number = self.parallelism.part_number
        seed = f"{self.task.seed}/rank-{part_number}" if part_number else f"{self.task.seed}"
        layer_arithmetic = self.make_arithmetic(mode).layer(f"{seed}/{name}")
        return self.add_arithmetic(name, apply_scales(layer_arithmetic, self.settings, mode, name, self.scale_books))

    def add_arithmetic(self, name: str, arithmetic: Arithmetic) -> Arithmetic:
        """Returns the arithmetic of layer `name`. Its scales are shared by all ranks, and each cast is reported to
        `watch_casts`, if there is one. Also stores the arithmetic in `arithmetics`.
        """
        arithmetic = self.parallelism.share_scales_across_ranks(name, arithmetic)
        if self.watch_casts is not None:
            arithmetic = WatchedArithmetic(arithmetic, self.watch_casts)
        self.arithmetics[name] = arithmetic
        return arithmetic

    def make_optimizer(self) -> StepOptimizer:
        return make_step_optimizer(self.parallelism.divide_parameters(self.parameters), self.settings)

    def read_batch(self, step: int, number: int) -> Any:
        """Returns this rank's part of a micro-batch."""
        raise NotImplementedError

    def seed_batch(self, step: int, number: int) -> AbstractContextManager[None]:
        """Seeds the random numbers of a micro-batch, such as those of dropout."""
        # Ranks that divide a micro-batch read consecutive parts of it.
        part_number = number * self.parallelism.part_count + self.parallelism.part_number
        torch.manual_seed(derive_seed("step", self.task.seed, step, part_number))
        return nullcontext()

    def compute_loss(self, batch: Any, phase: Phases, watched: bool = False) -> Tensor:
        """Returns the loss of a batch. `watched` means that hooks on modules must run. The model then runs without
        its compiled graph, which would skip the hooks.
        """
        raise NotImplementedError

    def repeat_steps(self, count: int) -> None:
        """Prepares the model to repeat the last `count` steps for a measurement. Does nothing here, so these steps read
        the same batches again.
        """

    def validate(self, row_key: tuple[str, int, int], is_last: bool) -> Iterator[Validation]:
        """Yields an arm's held-out losses. `row_key` is the arm, the seed and the step. `is_last` means that the
        training is finished. A model may then also yield losses that are measured only at the end.
        """
        raise NotImplementedError


class BuiltInModel(ArmModel):
    """A model of one of the architectures in models.py. Ranks divide its batch or its weights (see `parallelism`)."""

    def build_model(self) -> LanguageModel:
        """Builds the model of one rank, with float32 weights drawn from the seed regardless of the precision."""
        settings = self.settings
        facts = self.task.facts
        self._config = models.make_config(settings, self.task.text.vocabulary)
        self._layers = models.list_layers(settings.arch, self._config)
        self.parallelism = make_parallelism(settings, self._config, facts)
        keys = dict(settings.precision_map)
        layers = {layer.name: layer for layer in self._layers}

        def choose_arithmetic(name: str) -> Arithmetic:
            key = find_map_key(layers[name], keys)
            high_layer_precision = self.precision.carried_by if layers[name].high else ""
            mode = keys[key] if key is not None else high_layer_precision or self.arm.precision
            return self.make_layer_arithmetic(name, mode)

        carrier = self.precision.arithmetic(facts).carrier
        # All arms of a seed begin with the same float32 weights.
        torch.manual_seed(derive_seed("weights", self.task.seed))
        with torch.device(facts.key):
            model = models.build_model(settings, self._config, choose_arithmetic, carrier)
        # Unit scaling changes weights and layers, so it comes before everything that reads them.
        if self.precision.unit_scaled:
            scale_to_unit(model, self._config.sequence)
        key_by_elementwise_layer = {
            layer.name: find_map_key(layer, keys)
            for layer in models.list_elementwise_layers(settings.arch, self._config)
        }
        set_surrounding_arithmetics(
            model, {name: self.make_arithmetic(keys[key]) for name, key in key_by_elementwise_layer.items() if key}
        )
        if settings.attention != "auto":
            self._round_attention(model)
        return model

    def prepare(self) -> None:
        task = self.task
        config = self._config
        self.parallelism.cut_model_for_rank(self.model)
        self.windows = TokenWindows(task.text.train, config.sequence, task.facts.key)
        self._evaluation = HeldOutEvaluation(
            task.text, config, self._layers, task.facts, self.parallelism.share_scales_across_ranks
        )
        self.scores = ModelScorer(task, self.settings, self._evaluation.held_out, config)
        self.tokens = config.batch * config.sequence * self.settings.micro_batches
        self.collect_parameters()
        self._forward: ForwardPass = self.model
        if self.settings.compile == "yes":
            # Compile the model now, so that no timed step includes compilation.
            with self.cached_weights.cast(UNTIMED_PHASE_MARKERS):
                self._forward = compile_model(self.model, *self.read_batch(0, 0))

    def _round_attention(self, model: LanguageModel) -> None:
        """Makes attention compute in the arm's precision. Each layer has separate scales."""
        for path, module in model.named_modules():
            if isinstance(module, SelfAttention):
                scales_queries_first = self.settings.attention == "prescaled"
                module.core = emulated_attention_core = EmulatedAttentionCore(
                    self.precision.arithmetic(self.task.facts), scales_queries=scales_queries_first
                )
                for product_name, arithmetic in emulated_attention_core.parts.items():
                    emulated_attention_core.parts[product_name] = self.add_arithmetic(
                        f"{path}.core.{product_name}", arithmetic
                    )

    def read_batch(self, step: int, number: int) -> TokenBatch:
        part_number = number * self.parallelism.part_count + self.parallelism.part_number
        sequences = self._config.batch // self.parallelism.part_count
        return self.windows.draw(self.task.seed, step, part_number, sequences)

    def compute_loss(self, batch: Any, phase: Phases, watched: bool = False) -> Tensor:
        forward: ForwardPass = self.model if watched else self._forward
        tokens, targets = batch
        return forward(tokens, targets, phase)

    def validate(self, row_key: tuple[str, int, int], is_last: bool) -> Iterator[Validation]:
        """Yields the held-out loss. With `is_last`, also yields the losses by position in a window, and the losses
        after quantising layers of the trained model.
        """
        yield from self._evaluation.measure_losses(self.model, row_key, is_last)
