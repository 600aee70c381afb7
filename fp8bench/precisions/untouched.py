"""untouched: a user's own model as it came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8bench.formats.hardware import refused
from fp8bench.model import DeviceFacts, Support
from fp8bench.nn.shared_precisions import PlainPrecision
from fp8bench.registry import precisions


@precisions.register("untouched")
class Untouched(PlainPrecision):
    """Nothing is cast that the model does not cast itself: its dtypes, its autocast, its switches."""

    name = "untouched"
    summary = "A model as it came, in its own dtypes."
    rank = -1
    dtype = "float32"
    listed = False

    def support(self, facts: DeviceFacts) -> Support:
        """Refused: the workload `model` alone says otherwise."""
        return refused("untouched is a model of your own as it came, and only `fp8bench profile` has one")

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Its products are by the switches of the process."""
        yield
