"""Compares an arm's predictions with the reference's, token by token on the same text.

Texts are teacher-forced: each position sees the true tokens before it. All arms get the same batch and kernels; the
reference with a different attention kernel gives the noise floor. Log-probabilities are computed in fp64 from the
unmodified logits. Run as a program, this module is the worker's process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8bench.analysis.compare.interval import quantile
from fp8bench.errors import UsageError
from fp8bench.features.infer.values import ArmQuality, Quality, QualityTask, RolloutGap, ServedModel
from fp8bench.model import DeviceFacts, Interval
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.attention import attention_by
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.kept import DTYPES, KeptWeight, OwnWeight, draw_weights, kept_weight
from fp8bench.nn.own_decoder import OwnDecoder, make_model, served_positions, shape_of_own
from fp8bench.nn.served import ServedArm, served_shapes
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import SilentPhases
from fp8bench.protocols.precision import float32_products
from fp8bench.user_code.named import named
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import main
from fp8bench.worker.step_guards import apart
from fp8bench.worker.switches import restore_switches

_TAIL = 0.999
# PPO clips ratios outside this range.
_CLIP = (0.8, 1.2)
# The length of random texts, for a model without tokens.
WINDOW = 128
RANDOM_WEIGHTS, RANDOM_TOKENS = "random weights: arithmetic only", "random tokens: arithmetic only"


@dataclass(frozen=True)
class Predictions:
    """Log-probabilities (texts, positions, ids), and those of the true next tokens."""

    logs: Tensor
    true: Tensor
    bits: float


def weights_in(path: Path, config: GPTConfig, device: str) -> Callable[[str], Tensor]:
    """Reads a file of bf16 numbers: all weights in the model's parameter order."""
    numbers = torch.from_numpy(np.fromfile(path, dtype="<i2").astype(np.int16)).view(torch.bfloat16)
    shapes = served_shapes(config)
    counts = [math.prod(shape) for shape, _ in shapes.values()]
    parts = dict(zip(shapes, torch.split_with_sizes(numbers, counts), strict=True))
    return lambda name: parts[name].view(shapes[name][0]).float().to(device)


def _checkpoint_weights(model: ServedModel, config: GPTConfig, device: str) -> Callable[[str], Tensor]:
    from fp8bench.features.train.lab.checkpoint import weights

    shapes, stored = served_shapes(config), weights(model.weights, model.arm)
    if len(shapes) != len(stored):
        raise UsageError(f"{model.name} was trained as another model, with {len(stored)} weights. Train it again.")
    # A checkpoint has weights in the order of the model's parameters.
    trained = dict(zip(shapes, stored, strict=True))
    return lambda name: trained[name].to(device, torch.float32)


# Makes an arm's model for texts of (sequences, positions).
Serve = Callable[[ServedArm, tuple[int, int]], Decoder | OwnDecoder]


def quality_of(task: QualityTask, maker: Callable[[], Any] | None = None) -> Quality:
    """Compares all arms of a model with a config, or of the one that `maker` makes."""
    serve, text, caution = _serve_config(task) if maker is None else _serve_maker(task, maker)
    reference_arm, *compared_arms = task.arms

    def predict(arm: ServedArm, kernel: str = "auto") -> Predictions:
        with torch.no_grad(), attention_by(kernel):
            return _predict(serve(arm, (text.shape[0], text.shape[1] - 1)), text)

    reference = predict(reference_arm)
    itself, floor = _compare(predict(reference_arm), reference), _compare(predict(reference_arm, "math"), reference)
    arms = tuple(_compare(predict(arm), reference) for arm in compared_arms)
    perplexity = math.exp(-float(reference.true.mean()))
    with torch.no_grad():
        rollouts = tuple(rollout_gap(serve, arm, reference_arm, text, task.seed) for arm in task.arms[: task.rolls_out])
    return Quality(task.model.name, int(reference.true.numel()), perplexity, itself, floor, arms, caution, rollouts)


def rollout_gap(serve: Serve, arm: ServedArm, trainer: ServedArm, text: Tensor, seed: int) -> RolloutGap:
    """Lets the arm continue the first half of each text token by token, and the trainer score all these tokens at once.

    All arms sample with the same random numbers.
    """
    start, length = text.shape[1] // 2, text.shape[1]
    tokens, sizes, sampled = text.clone(), (text.shape[0], length - 1), []
    model, generator = serve(arm, sizes), torch.Generator(str(text.device)).manual_seed(seed)
    for at in range(start, length):
        first = 0 if at == start else at - 1
        model.calibrates = first == 0  # kept scales come from the prompt
        logs = F.log_softmax(model.forward(tokens[:, first:at], first, SilentPhases())[:, -1].double(), -1)
        if bool(logs.isnan().any()):  # nothing can be sampled from that
            return gap_of(logs.new_full((len(text), length - start), math.nan))
        chosen = torch.multinomial(logs.exp(), 1, generator=generator)
        tokens[:, at : at + 1] = chosen
        sampled.append(logs.gather(-1, chosen))
    scored = _predict(serve(trainer, sizes), tokens).true[:, start - 1 :]
    return gap_of(scored - torch.cat(sampled, 1))


def gap_of(gaps: Tensor) -> RolloutGap:
    """Summarizes differences of log-probabilities (texts, tokens): the trainer's minus the sampler's."""
    ratios = gaps.exp()
    clipped = ~((ratios >= _CLIP[0]) & (ratios <= _CLIP[1]))  # NaN is, too

    def effective(logs: Tensor) -> float:
        weights = logs.flatten().softmax(0)  # a common factor makes no difference
        return float(1 / (weights.square().sum() * weights.numel()))

    return RolloutGap(
        gaps.numel(),
        float(gaps.abs().mean()),
        float(gaps.abs().max()),
        float((ratios - 1 - gaps).mean()),
        _over_texts(ratios),
        float(ratios.min()),
        float(ratios.max()),
        float(clipped.double().mean()),
        (effective(gaps), effective(gaps.sum(1))),
    )


def _serve_maker(task: QualityTask, maker: Callable[[], Any]) -> tuple[Serve, Tensor, str]:
    """Serves a copy of the maker's model for each arm, on its own tokens or on random ones."""
    name, device = task.model.name, task.facts.key
    model, ids = make_model(maker, name, task.seed, task.facts)
    if ids is not None:
        text, caution = ids.to(device), ""
    else:
        length = min(WINDOW, served_positions(model))
        generator = torch.Generator(device).manual_seed(task.seed)
        shape = max(2, task.tokens // length), length + 1
        vocabulary = OwnDecoder(name, copy.deepcopy(model), task.arms[0], (1, 2), device).vocabulary
        text, caution = torch.randint(vocabulary, shape, generator=generator, device=device), RANDOM_TOKENS

    def serve(arm: ServedArm, sizes: tuple[int, int]) -> OwnDecoder:
        return OwnDecoder(name, copy.deepcopy(model), arm, sizes, device)

    return serve, text, caution


def _serve_config(task: QualityTask) -> tuple[Serve, Tensor, str]:
    model, device = task.model, task.facts.key
    assert model.config is not None
    text = torch.tensor(model.text, device=device)
    config = replace(model.config, sequence=max(text.shape[1] - 1, 1 if model.config.modern else model.config.sequence))
    if model.arm:
        weight = _checkpoint_weights(model, config, device)
    elif model.weights:
        weight = weights_in(Path(model.weights), model.config, device)
    else:
        weight = draw_weights(served_shapes(config), task.seed, device)

    def serve(arm: ServedArm, sizes: tuple[int, int]) -> Decoder:
        return _decoder(config, weight, arm, sizes)

    return serve, text, "" if model.weights else RANDOM_WEIGHTS


def _decoder(config: GPTConfig, weight: Callable[[str], Tensor], arm: ServedArm, sizes: tuple[int, int]) -> Decoder:
    def keep(name: str, matrix: Tensor) -> KeptWeight:
        word = arm.weight_format if name != "head" else arm.carrier
        if word in DTYPES:
            return OwnWeight(matrix, PlainArithmetic(DTYPES[word]))
        return kept_weight(matrix, word, arm.low_inputs)

    return Decoder(config, weight, keep, arm.kv_format, DTYPES[arm.carrier], sizes)


def _predict(model: Decoder | OwnDecoder, text: Tensor) -> Predictions:
    model.calibrates = True
    logits = model.forward(text[:, :-1], 0, SilentPhases(), every=True)
    logs = F.log_softmax(logits.double(), -1)
    true = logs.gather(-1, text[:, 1:, None]).squeeze(-1)
    return Predictions(logs, true, 8 * model.weight_bytes() / model.weight_count())


def _compare(arm: Predictions, reference: Predictions) -> ArmQuality:
    likely = reference.logs.exp()
    # Ids that a model masks have no weight, though -inf - -inf is NaN.
    kl = torch.where(likely == 0, 0, likely * (reference.logs - arm.logs)).sum(-1).clamp(min=0)
    same_choice = arm.logs.argmax(-1) == reference.logs.argmax(-1)
    return ArmQuality(
        float(kl.mean()),
        float(kl.flatten().quantile(_TAIL)),
        float(same_choice.double().mean()),
        _over_texts(torch.where(reference.true == arm.true, 0, reference.true - arm.true)),
        arm.bits,
    )


def _over_texts(by_token: Tensor) -> Interval:
    """Returns the mean over tokens; its interval is over whole texts, as tokens of one text are not independent. For a
    single text it is unbounded."""
    by_text = by_token.mean(1)
    mean, count = float(by_text.mean()), len(by_text)
    reach = quantile(0.95, count - 1) * float(by_text.std()) / math.sqrt(count) if count > 1 else math.inf
    return Interval(mean, mean - reach, mean + reach, 0.95)


class InferBench(Bench):
    """The worker of `infer`."""

    def shape(self, maker: str, facts: DeviceFacts, seed: int) -> tuple[Any, ...]:
        """Returns the fields of the maker's ServedShape. Raises UsageError for a model that cannot be served."""
        self._select_device(facts)
        with restore_switches(), apart(), float32_products("highest"):
            model, _ = make_model(named(maker), maker, seed, facts)
            return tuple(vars(shape_of_own(maker, model, seed, facts)).values())

    def quality(self, task: QualityTask) -> Quality:
        device = self._select_device(task.facts)
        with restore_switches(), apart(), float32_products("highest"):
            quality = quality_of(task, None if task.model.config else named(task.model.name))
        device.empty_cache()
        return quality


if __name__ == "__main__":
    main(InferBench)
