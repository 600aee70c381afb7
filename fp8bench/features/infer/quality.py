"""Compares an arm's predictions with the reference's predictions, token by token on the same text.

The models do not continue the text: at each position they get the true tokens before it (teacher forcing). All arms
get the same batch and kernels. The reference with a different attention kernel gives the noise floor.
Log-probabilities are computed in fp64 from the model's logits. This module is also the main program of the worker
process.
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

from fp8bench.analysis.compare.interval import student_quantile
from fp8bench.errors import UsageError
from fp8bench.features.infer.values import ArmQuality, QualityTask, RolloutGap, ServedModel, ServingQuality
from fp8bench.model import DeviceFacts, Interval
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.attention import select_attention_kernel
from fp8bench.nn.decoder import Decoder
from fp8bench.nn.served import ServedArm, list_weight_shapes
from fp8bench.nn.sizes import GPTConfig
from fp8bench.nn.storage import DTYPES, PrecastWeight, StoredWeight, draw_weights, store_weight
from fp8bench.nn.user_decoder import UserDecoder, check_user_model, count_token_positions, make_model
from fp8bench.protocols import SilentPhases
from fp8bench.protocols.precision import float32_products
from fp8bench.user_code.named import named
from fp8bench.worker.bench import Bench
from fp8bench.worker.main import main
from fp8bench.worker.step_guards import guard_untimed_pass
from fp8bench.worker.switches import restore_switches

_TAIL_QUANTILE = 0.999
# The range to which PPO usually clips importance ratios.
_PPO_CLIP_RANGE = (0.8, 1.2)
# The length of random texts in tokens, for a model that comes without token ids.
WINDOW_TOKENS = 128
RANDOM_WEIGHTS, RANDOM_TOKENS = "random weights: arithmetic only", "random tokens: arithmetic only"


@dataclass(frozen=True)
class Predictions:
    """An arm's log-probabilities of all ids (texts, positions, ids), and of the true next tokens (`true`). `bits` is
    the stored bits per parameter.
    """

    logs: Tensor
    true: Tensor
    bits: float


def read_weights(path: Path, config: GPTConfig, device: str) -> Callable[[str], Tensor]:
    """Reads a file of bf16 numbers with all weights, in the order of the model's parameters. Returns a function that
    gives the weight of a name.
    """
    numbers = torch.from_numpy(np.fromfile(path, dtype="<i2").astype(np.int16)).view(torch.bfloat16)
    shapes = list_weight_shapes(config)
    counts = [math.prod(shape) for shape, _ in shapes.values()]
    weight_by_name = dict(zip(shapes, torch.split_with_sizes(numbers, counts), strict=True))
    return lambda name: weight_by_name[name].view(shapes[name][0]).float().to(device)


def _make_weight_reader(model: ServedModel, config: GPTConfig, device: str) -> Callable[[str], Tensor]:
    from fp8bench.features.train.lab.checkpoint import read_weights

    shapes, stored = list_weight_shapes(config), read_weights(model.weights, model.arm)
    if len(shapes) != len(stored):
        raise UsageError(f"{model.name} was trained as another model, with {len(stored)} weights. Train it again.")
    # A checkpoint has weights in the order of the model's parameters.
    trained_weights = dict(zip(shapes, stored, strict=True))
    return lambda name: trained_weights[name].to(device, torch.float32)


# Makes the model of an arm for texts of a given size (sequences, positions).
MakeArmModel = Callable[[ServedArm, tuple[int, int]], Decoder | UserDecoder]


def compare_arms(task: QualityTask, maker: Callable[[], Any] | None = None) -> ServingQuality:
    """Compares the predictions of all arms of a model: the model that `maker` makes, or else the one that the task
    configures.
    """
    serve_model, text, caution = _serve_configured_model(task) if maker is None else _serve_user_model(task, maker)
    reference_arm, *candidate_arms = task.arms

    def predict(arm: ServedArm, kernel: str = "auto") -> Predictions:
        with torch.no_grad(), select_attention_kernel(kernel):
            return _predict_tokens(serve_model(arm, (text.shape[0], text.shape[1] - 1)), text)

    reference = predict(reference_arm)
    repeated_quality = _compare_predictions(predict(reference_arm), reference)
    noise_floor = _compare_predictions(predict(reference_arm, "math"), reference)
    arms = tuple(_compare_predictions(predict(arm), reference) for arm in candidate_arms)
    perplexity = math.exp(-float(reference.true.mean()))
    with torch.no_grad():
        rollouts = tuple(
            measure_rollout_gap(serve_model, arm, reference_arm, text, task.seed) for arm in task.arms[: task.rolls_out]
        )
    return ServingQuality(
        task.model.name, reference.true.numel(), perplexity, repeated_quality, noise_floor, arms, caution, rollouts
    )


def measure_rollout_gap(
    serve_model: MakeArmModel, arm: ServedArm, trainer: ServedArm, text: Tensor, seed: int
) -> RolloutGap:
    """Measures how differently an arm and the trainer score the same tokens. The arm continues the first half of each
    text, token by token. Then the trainer scores all these tokens at once. All arms sample with the same random
    numbers.
    """
    start, window_length = text.shape[1] // 2, text.shape[1]
    tokens, sizes, sampled_tokens = text.clone(), (text.shape[0], window_length - 1), []
    model, generator = serve_model(arm, sizes), torch.Generator(str(text.device)).manual_seed(seed)
    for position in range(start, window_length):
        # The first pass processes the prompt, and each later pass one token.
        first_input_position = 0 if position == start else position - 1
        model.calibrates = first_input_position == 0  # static scales are calibrated on the prompt
        logits = model.forward(tokens[:, first_input_position:position], first_input_position, SilentPhases())
        log_probabilities = F.log_softmax(logits[:, -1].double(), -1)
        if bool(log_probabilities.isnan().any()):  # NaN probabilities cannot be sampled
            return summarize_rollout_gaps(log_probabilities.new_full((len(text), window_length - start), math.nan))
        chosen_token_ids = torch.multinomial(log_probabilities.exp(), 1, generator=generator)
        tokens[:, position : position + 1] = chosen_token_ids
        sampled_tokens.append(log_probabilities.gather(-1, chosen_token_ids))
    # The score of the token at position i is at index i - 1.
    trainer_logs = _predict_tokens(serve_model(trainer, sizes), tokens).true[:, start - 1 :]
    return summarize_rollout_gaps(trainer_logs - torch.cat(sampled_tokens, 1))


def summarize_rollout_gaps(gaps: Tensor) -> RolloutGap:
    """Returns the statistics of gaps, an array of shape (texts, tokens). A gap is the trainer's log-probability of a
    token minus that of the arm that sampled the token.
    """
    importance_ratios = gaps.exp()
    is_clipped = importance_ratios.clamp(*_PPO_CLIP_RANGE) != importance_ratios  # NaN counts as clipped

    def effective_share(logs: Tensor) -> float:
        weights = logs.flatten().softmax(0)  # softmax divides by the sum, which cancels a common factor of all weights
        return float(1 / (weights.square().sum() * weights.numel()))

    return RolloutGap(
        gaps.numel(),
        float(gaps.abs().mean()),
        float(gaps.abs().max()),
        float((importance_ratios - 1 - gaps).mean()),
        _average_over_texts(importance_ratios),
        float(importance_ratios.min()),
        float(importance_ratios.max()),
        float(is_clipped.double().mean()),
        (effective_share(gaps), effective_share(gaps.sum(1))),
    )


def _serve_user_model(task: QualityTask, maker: Callable[[], Any]) -> tuple[MakeArmModel, Tensor, str]:
    """Returns a function that serves copies of the user's model, the tokens of a text, and a warning. If the user's
    function gives no token ids, the tokens are random, which the warning mentions.
    """
    name, device = task.model.name, task.facts.key
    model, ids = make_model(maker, name, task.seed, task.facts)

    def serve(arm: ServedArm, sizes: tuple[int, int]) -> UserDecoder:
        return UserDecoder(name, copy.deepcopy(model), arm, sizes, device)

    if ids is not None:
        return serve, ids.to(device), ""
    window_length = min(WINDOW_TOKENS, count_token_positions(model))
    generator = torch.Generator(device).manual_seed(task.seed)
    shape = max(2, task.tokens // window_length), window_length + 1
    vocabulary = serve(task.arms[0], (1, 2)).vocabulary
    return serve, torch.randint(vocabulary, shape, generator=generator, device=device), RANDOM_TOKENS


def _serve_configured_model(task: QualityTask) -> tuple[MakeArmModel, Tensor, str]:
    model, device = task.model, task.facts.key
    assert model.config is not None
    text = torch.tensor(model.text, device=device)
    config = replace(
        model.config, sequence=max(text.shape[1] - 1, 1 if model.config.is_llama_like else model.config.sequence)
    )
    if model.arm:
        weight = _make_weight_reader(model, config, device)
    elif model.weights:
        weight = read_weights(Path(model.weights), model.config, device)
    else:
        weight = draw_weights(list_weight_shapes(config), task.seed, device)

    def serve(arm: ServedArm, sizes: tuple[int, int]) -> Decoder:
        return _make_decoder(config, weight, arm, sizes)

    return serve, text, "" if model.weights else RANDOM_WEIGHTS


def _make_decoder(
    config: GPTConfig, weight: Callable[[str], Tensor], arm: ServedArm, sizes: tuple[int, int]
) -> Decoder:
    def store_layer_weight(name: str, matrix: Tensor) -> StoredWeight:
        # The head stays in the carrier precision.
        format_name = arm.weight_format if name != "head" else arm.carrier
        if format_name in DTYPES:
            return PrecastWeight(matrix, PlainArithmetic(DTYPES[format_name]))
        return store_weight(matrix, format_name, arm.low_inputs)

    return Decoder(config, weight, store_layer_weight, arm.kv_format, DTYPES[arm.carrier], sizes)


def _predict_tokens(model: Decoder | UserDecoder, text: Tensor) -> Predictions:
    model.calibrates = True
    logits = model.forward(text[:, :-1], 0, SilentPhases(), every=True)
    log_probabilities = F.log_softmax(logits.double(), -1)
    true_token_log_probabilities = log_probabilities.gather(-1, text[:, 1:, None]).squeeze(-1)
    return Predictions(log_probabilities, true_token_log_probabilities, 8 * model.weight_bytes() / model.weight_count())


def _compare_predictions(arm: Predictions, reference: Predictions) -> ArmQuality:
    reference_probabilities = reference.logs.exp()
    # If a model masks an id, its probability is 0. Without `where`, such an id would give -inf - -inf, which is NaN.
    divergence_by_id = reference_probabilities * (reference.logs - arm.logs)
    kl = torch.where(reference_probabilities == 0, 0, divergence_by_id).sum(-1).clamp(min=0)
    has_same_token = arm.logs.argmax(-1) == reference.logs.argmax(-1)
    return ArmQuality(
        float(kl.mean()),
        float(kl.flatten().quantile(_TAIL_QUANTILE)),
        float(has_same_token.double().mean()),
        # Equal infinities would give inf - inf, which is NaN.
        _average_over_texts(torch.where(reference.true == arm.true, 0, reference.true - arm.true)),
        arm.bits,
    )


def _average_over_texts(by_token: Tensor) -> Interval:
    """Returns the mean of a figure over all tokens, with an interval. The interval is computed from the means of
    texts, because tokens of one text are not independent. With a single text the interval is unbounded.
    """
    means_by_text = by_token.mean(1)
    mean, count = float(means_by_text.mean()), len(means_by_text)
    half_width = (
        student_quantile(0.95, count - 1) * float(means_by_text.std()) / math.sqrt(count) if count > 1 else math.inf
    )
    return Interval(mean, mean - half_width, mean + half_width, 0.95)


class InferBench(Bench):
    """The worker of `fp8bench infer`."""

    def read_shape(self, maker: str, facts: DeviceFacts, seed: int) -> tuple[Any, ...]:
        """Returns the shape of the user's model, as the fields of a ServedShape. Raises UsageError for a model that
        cannot be served.
        """
        self._select_device(facts)
        with restore_switches(), guard_untimed_pass(), float32_products("highest"):
            model, _ = make_model(named(maker), maker, seed, facts)
            return tuple(vars(check_user_model(maker, model, seed, facts)).values())

    def measure_quality(self, task: QualityTask) -> ServingQuality:
        device = self._select_device(task.facts)
        with restore_switches(), guard_untimed_pass(), float32_products("highest"):
            quality = compare_arms(task, None if task.model.config else named(task.model.name))
        device.empty_cache()
        return quality


if __name__ == "__main__":
    main(InferBench)
