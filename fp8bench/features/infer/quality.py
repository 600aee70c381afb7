"""What an arm does to a model's predictions, token by token on the same text as the reference's.

Teacher-forced: every token is given, whatever an arm would have said. All arms have one batch and the same kernels;
what another kernel does to the reference is the floor. Log-probabilities are in fp64, from logits as they came.
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

from fp8bench.features.infer.values import ArmQuality, Quality, QualityTask, ServedModel
from fp8bench.model import Interval
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import DTYPES, Decoder, KeptWeight, OwnWeight, drawn_weights, kept_weight
from fp8bench.nn.own_decoder import OwnDecoder, made, served_positions
from fp8bench.nn.served import Arm, served_shapes
from fp8bench.nn.shared_workloads import attention_by
from fp8bench.nn.sizes import GPTConfig
from fp8bench.protocols import SilentPhases

_BOOTSTRAPS = 2000
_TAIL = 0.999
# Random tokens of a model of one's own come in texts of so many.
WINDOW = 128
RANDOM_WEIGHTS, RANDOM_TOKENS = (f"random {what}: arithmetic only" for what in ("weights", "tokens"))


@dataclass(frozen=True)
class _Predicted:
    """Log-probabilities (texts, positions, ids), those of the true next tokens, and what each layer passed on."""

    logs: Tensor
    true: Tensor
    streams: list[Tensor]
    bits: float


def weights_in(path: Path, config: GPTConfig, device: str) -> Callable[[str], Tensor]:
    """The weights of a file of bf16 numbers, in the model's own order."""
    numbers = torch.from_numpy(np.fromfile(path, dtype="<i2").astype(np.int16)).view(torch.bfloat16)
    shapes = served_shapes(config)
    counts = [math.prod(shape) for shape, _ in shapes.values()]
    parts = dict(zip(shapes, torch.split_with_sizes(numbers, counts), strict=True))
    return lambda name: parts[name].view(shapes[name][0]).float().to(device)


def _trained_weights(model: ServedModel, config: GPTConfig, device: str) -> Callable[[str], Tensor]:
    """Of a checkpoint, whose weights come in the order of the model's parameters."""
    from fp8bench.features.train.lab.checkpoint import weights

    kept = dict(zip(served_shapes(config), weights(model.weights, model.arm), strict=True))
    return lambda name: kept[name].to(device, torch.float32)


# Makes the model of an arm, for texts of (sequences, positions).
Serve = Callable[[Arm, tuple[int, int]], Decoder | OwnDecoder]


def quality_of(task: QualityTask, maker: Callable[[], Any] | None = None) -> Quality:
    """Of a model with a config, or of the one that `maker` makes."""
    serve, text, caution = _served(task) if maker is None else _own(task, maker)
    lead, *others = task.arms

    def predicted(arm: Arm, kernel: str = "auto") -> _Predicted:
        with torch.no_grad(), attention_by(kernel):
            return _predicted(serve(arm, (text.shape[0], text.shape[1] - 1)), text)

    reference = predicted(lead)
    itself, floor = _compared(predicted(lead), reference), _compared(predicted(lead, "math"), reference)
    arms = tuple(_compared(predicted(arm), reference) for arm in others)
    perplexity = math.exp(-float(reference.true.mean()))
    return Quality(task.model.name, int(reference.true.numel()), perplexity, itself, floor, arms, caution)


def _own(task: QualityTask, maker: Callable[[], Any]) -> tuple[Serve, Tensor, str]:
    """A copy of what it makes for each arm; random tokens where it gives none."""
    name, device = task.model.name, task.facts.key
    model, ids = made(maker, name, task.seed, task.facts)
    if ids is not None and ids.shape[1] > 2:
        text, caution = ids.to(device), ""
    else:
        length = min(WINDOW, served_positions(model))
        generator = torch.Generator(device).manual_seed(task.seed)
        shape = max(2, task.tokens // length), length + 1
        vocabulary = OwnDecoder(name, copy.deepcopy(model), task.arms[0], (1, 2), device).vocabulary
        text, caution = torch.randint(vocabulary, shape, generator=generator, device=device), RANDOM_TOKENS

    def serve(arm: Arm, sizes: tuple[int, int]) -> OwnDecoder:
        return OwnDecoder(name, copy.deepcopy(model), arm, sizes, device)

    return serve, text, caution


def _served(task: QualityTask) -> tuple[Serve, Tensor, str]:
    model, device = task.model, task.facts.key
    assert model.config is not None
    text = torch.tensor(model.text, device=device)
    config = replace(model.config, sequence=max(text.shape[1] - 1, 1 if model.config.modern else model.config.sequence))
    if model.arm:
        weight = _trained_weights(model, config, device)
    elif model.weights:
        weight = weights_in(Path(model.weights), model.config, device)
    else:
        weight = drawn_weights(served_shapes(config), task.seed, device)

    def serve(arm: Arm, sizes: tuple[int, int]) -> Decoder:
        return _decoder(config, weight, arm, sizes)

    return serve, text, "" if model.weights else RANDOM_WEIGHTS


def _decoder(config: GPTConfig, weight: Callable[[str], Tensor], arm: Arm, sizes: tuple[int, int]) -> Decoder:
    formats = arm.weights_of(config.layers)

    def keep(name: str, matrix: Tensor) -> KeptWeight:
        kept = formats[int(name.split(".")[1])] if name != "head" else arm.carrier
        if kept in DTYPES:
            return OwnWeight(matrix, PlainArithmetic(DTYPES[kept]))
        return kept_weight(matrix, kept, arm.low_inputs)

    return Decoder(config, weight, keep, arm.kv_of(config.layers), DTYPES[arm.carrier], sizes)


def _predicted(model: Decoder | OwnDecoder, text: Tensor) -> _Predicted:
    model.calibrates = True
    streams: list[Tensor] = []
    model.watch = lambda layer, stream: streams.append(stream.double())
    logits = model.forward(text[:, :-1], 0, SilentPhases(), every=True)
    logs = F.log_softmax(logits.double(), -1)
    true = logs.gather(-1, text[:, 1:, None]).squeeze(-1)
    return _Predicted(logs, true, streams, 8 * model.weight_bytes() / model.parameters())


def _compared(own: _Predicted, reference: _Predicted) -> ArmQuality:
    kl = (reference.logs.exp() * (reference.logs - own.logs)).sum(-1).clamp(min=0)
    alike = own.logs.argmax(-1) == reference.logs.argmax(-1)
    apart = (~alike).nonzero()
    quarter = max(1, kl.shape[1] // 4)
    streams = tuple(
        float((mine - theirs).norm() / theirs.norm())
        for mine, theirs in zip(own.streams, reference.streams, strict=True)
    )
    return ArmQuality(
        float(kl.mean()), float(kl.flatten().quantile(_TAIL)), float(kl[:, :quarter].mean()),
        float(kl[:, -quarter:].mean()), float(alike.double().mean()),
        (int(apart[0, 0]), int(apart[0, 1])) if len(apart) else None, streams, _log_ratio(own.true, reference.true),
        own.bits,
    )  # fmt: skip


def _log_ratio(own: Tensor, reference: Tensor) -> Interval:
    """ln of the perplexity over the reference's: the mean of the differences token by token, texts resampled whole."""
    by_text = (reference - own).mean(1).cpu().numpy()
    count = len(by_text)
    draws = np.random.default_rng(0).integers(count, size=(_BOOTSTRAPS, count))
    low, high = np.quantile(by_text[draws].mean(1), [0.025, 0.975])
    return Interval(float(by_text.mean()), float(low), float(high), 0.95)
