"""AdamW over the weights of one arm, in few kernels, with nothing that the host has to wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fp8bench.model.training import TrainerSettings
from fp8bench.nn.moments import BETAS, EPSILON, bucketed
from fp8bench.training.schedule import decays, kind_of

# Of so many weights at a time the values before a step are kept, to say how far they moved.
_MOST_ELEMENTS = 1 << 24


@dataclass
class _Bucket:
    """Some parameters that have their rate and their decay in common."""

    parameters: list[Tensor]
    rate: float
    decay: float
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


class AdamW:
    """`update_norms` and `weight_norms` are those of the last step by parameter, in the order of the model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> None:
        self._buckets = list(_buckets(parameters, settings))
        self._parameters = list(parameters.values())
        self._norms: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def step(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Take the gradients divided by `divisor`; nothing changes where `skip` is 1. Both lie on the device."""
        for bucket in self._buckets:
            before = [one.detach().clone() for one in bucket.parameters]
            adamw(
                bucket.parameters,
                [one.grad for one in bucket.parameters if one.grad is not None],
                bucket.first, bucket.second, [], bucket.steps,
                fused=True, amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=rate * bucket.rate,
                weight_decay=bucket.decay, eps=EPSILON, maximize=False, grad_scale=divisor, found_inf=skip,
            )  # fmt: skip
            with torch.no_grad():
                torch._foreach_sub_(before, bucket.parameters)
                moved, sizes = torch._foreach_norm(before), torch._foreach_norm(bucket.parameters)
            self._norms.update(zip(bucket.parameters, zip(moved, sizes, strict=True), strict=True))

    @property
    def update_norms(self) -> list[Tensor]:
        return [self._norms[one][0] for one in self._parameters]

    @property
    def weight_norms(self) -> list[Tensor]:
        return [self._norms[one][1] for one in self._parameters]

    def kept(self) -> dict[str, list[Tensor]]:
        """What it keeps between two steps, by what it is."""
        return {
            "first moment": [one for bucket in self._buckets for one in bucket.first],
            "second moment": [one for bucket in self._buckets for one in bucket.second],
            "steps": [one for bucket in self._buckets for one in bucket.steps],
        }


def _buckets(parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> Iterator[_Bucket]:
    groups: dict[tuple[float, float], list[Tensor]] = {}
    rates = dict(settings.rates)
    for name, one in parameters.items():
        rate = rates.get(kind_of(name, one.ndim), 1.0)
        groups.setdefault((rate, settings.weight_decay if decays(one.ndim) else 0.0), []).append(one)
    for (rate, decay), group in groups.items():
        for part in bucketed([one.numel() for one in group], _MOST_ELEMENTS):
            some = group[part]
            first, second = ([torch.zeros_like(one) for one in some] for _ in range(2))
            steps = [torch.zeros((), device=one.device) for one in some]
            yield _Bucket(some, rate, decay, first, second, steps)
