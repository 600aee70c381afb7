"""SGD, Lion and Adafactor, over a bucket of float32 weights; nothing changes where a step is skipped.

SGD and Adafactor are torch's, in its order of operations; Lion is that of Chen et al. (2023), algorithm 2. The host
waits for nothing: what torch reads there (the count of steps, norms) stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8bench.nn.moments import Bucket, Update

Moments = list[Tensor]
# With Adafactor's clipping threshold and the power of the step by which its average forgets, as torch has them.
_THRESHOLD, _FORGETS = 1.0, -0.8
_LEAST = torch.finfo(torch.float32).eps


def states_for(optimizer: str, parameters: Sequence[Tensor]) -> tuple[Moments, Moments]:
    """First and second moments at the start; empty ones where an optimizer has none. Of a matrix Adafactor keeps the
    means of its rows in the first, and those of its columns in the second; of a vector all of it in the second."""
    zeros, none = torch.zeros_like, [parameter.new_zeros(0) for parameter in parameters]
    if optimizer == "adafactor":
        rows = [zeros(parameter[..., :1]) if parameter.ndim > 1 else parameter.new_zeros(0) for parameter in parameters]
        columns = [zeros(parameter[..., :1, :]) if parameter.ndim > 1 else zeros(parameter) for parameter in parameters]
        return rows, columns
    return [zeros(parameter) for parameter in parameters], none if optimizer in RULES else [
        zeros(parameter) for parameter in parameters
    ]


def _sgd(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, how: Update) -> None:
    if how.decay:
        gradient = gradient.add(weight, alpha=how.decay)
    first.mul_(how.betas[0]).add_(gradient)
    weight.sub_(first, alpha=how.rate)


def _lion(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, how: Update) -> None:
    update = (how.betas[0] * first + (1 - how.betas[0]) * gradient).sign()
    weight.sub_(how.rate * (update + how.decay * weight))
    first.copy_(how.betas[1] * first + (1 - how.betas[1]) * gradient)


def _adafactor(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, how: Update) -> None:
    forgets = step**_FORGETS
    mean = weight.norm(2) / weight.numel() ** 0.5
    rate = mean.clamp(min=how.epsilon) * step.rsqrt().clamp(max=how.rate)
    if how.decay:
        weight.mul_(1 - how.rate * how.decay)
    if gradient.ndim > 1:
        first.lerp_(gradient.norm(dim=-1, keepdim=True).square_().div_(gradient.shape[-1]), forgets)
        second.lerp_(gradient.norm(dim=-2, keepdim=True).square_().div_(gradient.shape[-2]), forgets)
        estimate = (first @ second) / first.mean(dim=-2, keepdim=True).clamp(min=_LEAST)
    else:
        second.lerp_(gradient * gradient, forgets)
        estimate = second.clone()
    update = estimate.clamp_(min=_LEAST * _LEAST).rsqrt_().mul_(gradient)
    shrunk = (update.norm(2) / (update.numel() ** 0.5 * _THRESHOLD)).clamp(min=1.0)
    weight.sub_(update * (rate / shrunk))


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Update], None]


def _over(rule: Rule) -> Callable[[Bucket, Moments, Moments, Update], None]:
    @torch.no_grad()
    def update(bucket: Bucket, first: Moments, second: Moments, how: Update) -> None:
        assert how.divisor is not None and how.skip is not None
        skipped = how.skip > 0
        each = zip(bucket.parameters, bucket.gradients, first, second, bucket.kept()[2], strict=True)
        for weight, gradient, one, other, step in each:
            before = [tensor.clone() for tensor in (weight, one, other)]
            step.add_(1 - how.skip)
            rule(weight, gradient / how.divisor, one, other, step, how)
            for tensor, old in zip((weight, one, other), before, strict=True):
                tensor.copy_(torch.where(skipped, old, tensor))

    return update


RULES = {"sgd": _over(_sgd), "lion": _over(_lion), "adafactor": _over(_adafactor)}
