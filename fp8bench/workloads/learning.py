"""A small training, always the same, in each precision: its loss shows whether numerics have changed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING

from fp8bench.model import Case, DeviceFacts, Params, Scalars, Work
from fp8bench.model.specs import RELATIVE_LOSS
from fp8bench.nn import shared_workloads as shared
from fp8bench.nn import sizes
from fp8bench.protocols import Grid, Layer, Setup
from fp8bench.protocols.axes import Axis
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from fp8bench.nn.training_step import TrainingState

# Width of a head: products of every precision take multiples of it.
_HEAD = 32
_BATCH = 4
_SEQUENCE = 64
_RATE = 3e-3
# Losses are divided by bf16's, and bf16's own by fp32's.
_REFERENCE = "bf16"
_REFERENCE_OF_BF16 = "fp32"


@workloads.register("learning")
class Learning(shared.TrainingWorkload):
    """Two blocks of a GPT on bytes, with AdamW. A timed step is one of this training's.

    The figure is a mean over all steps with several random initial weights and batches, because the last loss of one
    run changes more with the order of sums than with most faults of a format. Attention is torch's plain one, whose
    gradients are also reproducible on a GPU.
    """

    name = "learning"
    summary = "a small fixed training: its mean loss over bf16's, by which a change of numerics shows"
    dtypes = ("bf16", "fp8", "fp8-delayed", "mxfp8", "nvfp4")
    fused = False
    history = Grid(
        cpu={"width": ("64",)},
        gpu={"width": ("256",)},
        dtypes=dtypes,
        phases=("data_load", "cast", "gemm", "attention", "accumulate", "optimizer_step", "elementwise"),
        errors=(RELATIVE_LOSS,),
        energy=False,
    )

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (
            Axis.choice(
                "width",
                "of the model; a feed-forward block is four times as wide",
                *("32", "64", "128", "256", "512"),
                default="256" if facts.accelerated else "64",
            ),
            Axis.count("steps", "of which the losses are averaged", "60", high=500),
            Axis.count("draws", "of weights and batches, each trained so", "4", high=64),
        )

    def work(self, params: Scalars) -> Work:
        config = _config(params)
        least = 16.0 * config.weights + 4.0 * _BATCH * _SEQUENCE * config.vocabulary
        return Work(config.step_flops(_BATCH, _SEQUENCE), _BATCH * _SEQUENCE, least_memory=least)

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return sizes.gpt_layers(_config(params).layers)

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return sizes.gpt_around(_config(params).layers)

    def prepare(self, setup: Setup) -> TrainingState:
        from fp8bench.nn.batches import loader_for
        from fp8bench.nn.training_step import new_state
        from fp8bench.nn.whole_layers import CachedWeights

        config = _config(setup.params)
        model = shared.make_gpt(self, setup, config)
        loader = loader_for(setup, _BATCH, config, setup.draw)
        return new_state(setup, model, loader, CachedWeights(model).cast, attention="math", rate=_RATE)

    def error(self, setup: Setup) -> dict[str, float]:
        """Divides the mean loss by the reference's, with the same weights and batches; infinite once a loss is."""
        case = setup.case
        facts = setup.facts
        reference = _REFERENCE_OF_BF16 if case.precision == _REFERENCE else _REFERENCE
        return {RELATIVE_LOSS: _mean_loss(setup) / _reference(reference, case.params, facts, setup.seed, setup.corpus)}


def _config(params: Scalars) -> sizes.GPTConfig:
    width = int(params["width"])
    heads = width // _HEAD
    return sizes.GPTConfig(256, width, 2, heads, heads, 4 * width, batch=_BATCH, sequence=_SEQUENCE)


def _mean_loss(setup: Setup) -> float:
    steps, draws = (int(setup.case.param(name)) for name in ("steps", "draws"))
    losses: list[float] = []
    for draw in range(draws):
        losses += Learning().prepare(replace(setup, draw=draw)).losses(steps)
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


@lru_cache(maxsize=4)
def _reference(name: str, params: Params, facts: DeviceFacts, seed: int, corpus: str | None) -> float:
    precision = precisions.get(name)
    arithmetic = precision.arithmetic(facts)
    case = Case(Learning.name, params, name, facts.key)
    with precision.scope():
        return _mean_loss(Setup(case, facts, seed, arithmetic, arithmetic, {}, precision.loss_scale, corpus))
