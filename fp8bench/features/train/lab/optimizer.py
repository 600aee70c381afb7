"""AdamW over the weights of one arm, in few kernels, with nothing that the host has to wait for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp8bench.features.train.lab.gradients import Gradients, LowGradients
from fp8bench.features.train.lab.schedule import decays, kind_of
from fp8bench.features.train.request import TrainerSettings
from fp8bench.formats.grids import E4M3, FP16
from fp8bench.formats.scalings import ScaleRounding
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.nn.moments import Bucket, Storage, Update, bucketed, in_arithmetic, scaled
from fp8bench.protocols import Operand


class Weights:
    """float32: the parameters themselves."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @contextmanager
    def present(self) -> Iterator[None]:
        """The parameters have their values in the body."""
        yield

    def round(self, parameters: Sequence[Tensor]) -> None:
        """Parameters that a step has changed become what is kept of them."""

    def kept(self) -> list[Tensor]:
        return [one.detach() for one in self._parameters]


class HalfWeights(Weights):
    """fp16 under one scale a tensor, as in FP8-LM. The parameters are float32 while a step needs them, and nothing
    lies in them between two steps."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        # By powers of two: what is rounded already is then the same once more, as in a step that changes nothing.
        self._storage = scaled(FP16, ScaleRounding.POWER_OF_TWO)
        self._masters: dict[Tensor, Operand] = {}
        self._sizes = {one: one.untyped_storage().nbytes() for one in parameters}
        self.round(parameters)
        self._release()

    @contextmanager
    def present(self) -> Iterator[None]:
        for one in self._parameters:
            one.untyped_storage().resize_(self._sizes[one])
            one.detach().copy_(self._storage.restore(self._masters[one]))
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        for one in self._parameters:
            one.untyped_storage().resize_(0)

    def round(self, parameters: Sequence[Tensor]) -> None:
        for one in parameters:
            self._masters[one] = self._storage.keep(one.detach())
            one.detach().copy_(self._storage.restore(self._masters[one]))

    def kept(self) -> list[Tensor]:
        return [part for one in self._parameters for part in self._masters[one].tensors]


# Of so many weights at a time the values before a step are kept, to say how far they moved.
_MOST_ELEMENTS = 1 << 24


class _Group(NamedTuple):
    """A bucket of parameters whose rate is multiplied by `rate` and which decay by `decay`."""

    bucket: Bucket
    rate: float
    decay: float


class AdamW:
    """`update_norms` and `weight_norms` are those of the last step by parameter, in the order of the model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> None:
        self._parameters = list(parameters.values())
        low = settings.gradients != "fp32"
        self.gradients = (
            LowGradients(self._parameters, settings.micro_batches, settings.gradients == "fp8")
            if low
            else Gradients(self._parameters)
        )
        self._groups = list(_groups(parameters, settings))
        self.weights = (HalfWeights if settings.master == "fp16-scaled" else Weights)(self._parameters)
        self._norms: dict[Tensor, tuple[Tensor, Tensor]] = {}

    def step(self, rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Take the gradients divided by `divisor`; nothing changes where `skip` is 1. Both lie on the device."""
        for bucket, own, decay in self._groups:
            before = [one.detach().clone() for one in bucket.parameters]
            bucket.gradients = self.gradients.of(bucket.parameters)
            first, second = bucket.restored()
            bucket.update(first, second, Update(rate * own, decay, divisor, skip))
            if bucket.plain is None:
                bucket.keep(first, second)
            bucket.gradients = []
            self.weights.round(bucket.parameters)
            with torch.no_grad():
                torch._foreach_sub_(before, bucket.parameters)
                moved, sizes = torch._foreach_norm(before), torch._foreach_norm(bucket.parameters)
            self._norms.update(zip(bucket.parameters, zip(moved, sizes, strict=True), strict=True))
        self.gradients.end()

    @property
    def update_norms(self) -> list[Tensor]:
        return [self._norms[one][0] for one in self._parameters]

    @property
    def weight_norms(self) -> list[Tensor]:
        return [self._norms[one][1] for one in self._parameters]

    def kept(self) -> dict[str, list[Tensor]]:
        """All that lies in memory between two steps, by what it is."""
        kept = [group.bucket.kept() for group in self._groups]
        moments = {
            name: [one for some in kept for one in some[order]]
            for order, name in enumerate(("first moment", "second moment", "steps"))
        }
        return {"weights": self.weights.kept(), "gradients": self.gradients.kept(), **moments}

    def memory(self) -> dict[str, list[Tensor]]:
        """What the next step depends on: gradients are found anew, how they are scaled is not."""
        return self.kept() | {"gradients": self.gradients.memory()}


def _groups(parameters: Mapping[str, nn.Parameter], settings: TrainerSettings) -> Iterator[_Group]:
    kinds: dict[tuple[float, float], list[Tensor]] = {}
    rates = dict(settings.rates)
    for name, one in parameters.items():
        own = rates.get(kind_of(name, one.ndim), 1.0)
        kinds.setdefault((own, settings.weight_decay if decays(one.ndim) else 0.0), []).append(one)
    for (own, decay), alike in kinds.items():
        for part in bucketed([one.numel() for one in alike], _MOST_ELEMENTS):
            some = alike[part]
            first, second = ([torch.zeros_like(one) for one in some] for _ in range(2))
            yield _Group(Bucket(some, [], first, second, _storages(settings.optimizer_states), 0, True), own, decay)


def _storages(states: str) -> tuple[Storage, Storage]:
    """Of the first and of the second moment."""
    if states == "fp8lm":
        return scaled(E4M3), scaled(FP16)
    plain = in_arithmetic(PlainArithmetic(torch.float32 if states == "fp32" else torch.bfloat16))
    return plain, plain
