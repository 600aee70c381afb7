"""The master weights: what is kept of the parameters from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from fp8bench.formats.grids import FP16
from fp8bench.formats.scalings import ScaleRounding
from fp8bench.nn.moments import scaled
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
