"""The suite learning: a small training, always the same, in each precision. Its loss shows whether a new version
changed the numerics.
"""

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
from fp8bench.protocols.axes import Axis, read_integers
from fp8bench.registry import precisions, workloads

if TYPE_CHECKING:
    from fp8bench.nn.training_step import TrainingState

# The width of an attention head. Products of every precision accept multiples of it as sizes.
_ATTENTION_HEAD_WIDTH = 32
_SEQUENCES_PER_BATCH = 4
_SEQUENCE_TOKENS = 64
_LEARNING_RATE = 3e-3
# The losses of all other precisions are divided by the loss of bf16. The loss of bf16 is divided by the loss of fp32.
_USUAL_REFERENCE_PRECISION = "bf16"
_REFERENCE_PRECISION_OF_BF16 = "fp32"


@workloads.register("learning")
class Learning(shared.TrainingWorkload):
    """Trains two GPT blocks on bytes with AdamW. A timed step is one step of this training.

    The figure is the mean loss over all steps, over several initial weights, and over several series of batches. The
    last loss of a single run would depend more on the order of sums than on most faults of a format. Attention uses
    torch's math kernel, whose gradients are reproducible on GPUs too.
    """

    name = "learning"
    summary = "a small fixed training: its mean loss divided by bf16's, which shows changes of the numerics"
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
                "width of the model; a feed-forward block is four times as wide",
                *("32", "64", "128", "256", "512"),
                default="256" if facts.accelerated else "64",
            ),
            Axis.count("steps", "steps whose losses are averaged", "60", high=500),
            Axis.count("draws", "draws of weights and batches, each trained separately", "4", high=64),
        )

    def work(self, params: Scalars) -> Work:
        config = _make_config(params)
        least_memory_bytes = 16.0 * config.weights + 4.0 * _SEQUENCES_PER_BATCH * _SEQUENCE_TOKENS * config.vocabulary
        return Work(
            config.step_flops(_SEQUENCES_PER_BATCH, _SEQUENCE_TOKENS),
            _SEQUENCES_PER_BATCH * _SEQUENCE_TOKENS,
            least_memory=least_memory_bytes,
        )

    def layers(self, params: Scalars) -> tuple[Layer, ...]:
        return sizes.gpt_layers(_make_config(params).layers)

    def around(self, params: Scalars) -> tuple[Layer, ...]:
        return sizes.make_gpt_surrounding_layers(_make_config(params).layers)

    def prepare(self, setup: Setup) -> TrainingState:
        from fp8bench.nn.batches import make_loader
        from fp8bench.nn.training_step import make_training_state
        from fp8bench.nn.whole_layers import CachedWeights

        config = _make_config(setup.params)
        model = shared.make_gpt(self, setup, config)
        loader = make_loader(setup, _SEQUENCES_PER_BATCH, config, setup.draw)
        return make_training_state(
            setup, model, loader, CachedWeights(model).cast, attention="math", rate=_LEARNING_RATE
        )

    def error(self, setup: Setup) -> dict[str, float]:
        """Divides the mean loss by the mean loss of the reference with the same weights and batches. If any loss is
        not finite, the mean loss counts as infinite.
        """
        case = setup.case
        reference = (
            _REFERENCE_PRECISION_OF_BF16 if case.precision == _USUAL_REFERENCE_PRECISION else _USUAL_REFERENCE_PRECISION
        )
        reference_loss = _train_reference_loss(reference, case.params, setup.facts, setup.seed, setup.corpus)
        return {RELATIVE_LOSS: _train_mean_loss(setup) / reference_loss}


def _make_config(params: Scalars) -> sizes.GPTConfig:
    width = int(params["width"])
    heads = width // _ATTENTION_HEAD_WIDTH
    return sizes.GPTConfig(
        256, width, 2, heads, heads, 4 * width, batch=_SEQUENCES_PER_BATCH, sequence=_SEQUENCE_TOKENS
    )


def _train_mean_loss(setup: Setup) -> float:
    steps, draws = read_integers(setup.params, "steps", "draws")
    losses: list[float] = []
    for draw in range(draws):
        losses += Learning().prepare(replace(setup, draw=draw)).losses(steps)
    return fmean(losses) if all(map(math.isfinite, losses)) else math.inf


# The losses of several precisions are divided by the loss of the same reference, so train it only once.
@lru_cache(maxsize=4)
def _train_reference_loss(name: str, params: Params, facts: DeviceFacts, seed: int, corpus: str | None) -> float:
    precision = precisions.get(name)
    arithmetic = precision.arithmetic(facts)
    case = Case(Learning.name, params, name, facts.key)
    with precision.scope():
        return _train_mean_loss(Setup(case, facts, seed, arithmetic, arithmetic, {}, precision.loss_scale, corpus))
