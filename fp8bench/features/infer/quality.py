"""What an arm does to a model's predictions, token by token on the same text as the reference's.

Teacher-forced: every token is given, whatever an arm would have said. All arms have one batch and the same kernels;
what another kernel does to the reference is the floor. Log-probabilities are in fp64, from logits as they came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8bench.features.infer.values import ArmQuality, Quality, QualityTask
from fp8bench.model import Interval
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.decoder import DTYPES, Decoder, KeptWeight, OwnWeight, drawn_weights, kept_weight
from fp8bench.nn.served import Arm, served_shapes
from fp8bench.nn.shared_workloads import attention_by
from fp8bench.nn.sizes import SERVED_SIZES, GPTConfig
from fp8bench.protocols import SilentPhases

_BOOTSTRAPS = 2000
_TAIL = 0.999


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


def quality_of(task: QualityTask) -> Quality:
    config, device = SERVED_SIZES[task.size], task.facts.key
    text = torch.tensor(task.text, device=device)
    config = replace(config, sequence=max(text.shape[1] - 1, 1 if config.modern else config.sequence))
    if task.weights:
        weight = weights_in(Path(task.weights), SERVED_SIZES[task.size], device)
    else:
        weight = drawn_weights(served_shapes(config), task.seed, device)
    lead, *others = task.arms

    def predicted(arm: Arm, kernel: str = "auto") -> _Predicted:
        with torch.no_grad(), attention_by(kernel):
            return _predicted(config, weight, arm, text)

    reference = predicted(lead)
    itself, floor = _compared(predicted(lead), reference), _compared(predicted(lead, "math"), reference)
    arms = tuple(_compared(predicted(arm), reference) for arm in others)
    perplexity = math.exp(-float(reference.true.mean()))
    return Quality(task.size, int(reference.true.numel()), perplexity, itself, floor, arms, bool(task.weights))


def _predicted(config: GPTConfig, weight: Callable[[str], Tensor], arm: Arm, text: Tensor) -> _Predicted:
    carrier, formats = DTYPES[arm.carrier], arm.weights_of(config.layers)

    def keep(name: str, matrix: Tensor) -> KeptWeight:
        kept = formats[int(name.split(".")[1])] if name != "head" else arm.carrier
        if kept in DTYPES:
            return OwnWeight(matrix, PlainArithmetic(DTYPES[kept]))
        return kept_weight(matrix, kept, arm.low_inputs)

    sizes = text.shape[0], text.shape[1] - 1
    model = Decoder(config, weight, keep, arm.kv_of(config.layers), carrier, sizes)
    model.calibrates = True
    streams: list[Tensor] = []
    model.watch = lambda layer, stream: streams.append(stream.double())
    logits = model.forward(text[:, :-1], 0, SilentPhases(), every=True)
    logs = F.log_softmax(logits.double(), -1)
    true = logs.gather(-1, text[:, 1:, None]).squeeze(-1)
    parameters = sum(math.prod(shape) for shape, _ in served_shapes(config).values())
    return _Predicted(logs, true, streams, 8 * model.weight_bytes() / parameters)


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
