"""Watches a training: the lines of a step from what is seen of its model, in watched steps alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from fp8bench.model.training import LayerReading, Line, StepFigure
from fp8bench.training import gradient_noise
from fp8bench.training.readings import read, reading_of
from fp8bench.training.watched_step import Parts, WatchedStep


class Watch:
    """Of one model in one arm and seed. All that it keeps from a watched step to the next are scales."""

    def __init__(self, model: nn.Module, arm: str = "", seed: int = 0, examples: int = 1, inside: bool = True) -> None:
        """`examples` are those of a micro-batch: in them the noise scale is told. Not `inside`: weights alone."""
        self._arm, self._seed, self._examples = arm, seed, examples
        self._parts = Parts(model, inside)
        self._scales: dict[str, float] = {}

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Those that are trained, by name."""
        return self._parts.parameters

    @contextmanager
    def step(self, micro_batches: int = 1) -> Iterator[WatchedStep]:
        """Watch for the body, and leave nothing attached."""
        with ExitStack() as stack:
            yield WatchedStep(self._parts, stack, micro_batches)

    def lines(self, step: int, found: WatchedStep) -> Iterator[Line]:
        """What was seen in a step. Waits for the device, once."""
        noise = found.noise.figures()
        numbers = iter(read([*found.tensors.values(), *noise.values(), *({"": one} for one in found.named.values())]))
        for layer, role in found.tensors:
            yield self._reading(step, layer, role, next(numbers))
        told = [*gradient_noise.told({name: next(numbers) for name in noise}, self._examples)]
        told += [(*key, next(numbers)[""]) for key in found.named]
        for name, layer, value in told:
            yield StepFigure(self._arm, self._seed, step, name, value, layer)

    def memory(self) -> dict[str, float]:
        """What has to be kept for the lines of later steps to be the same."""
        return dict(self._scales)

    def recall(self, memory: Mapping[str, float]) -> None:
        """Go on from that."""
        self._scales = dict(memory)

    def _reading(self, step: int, layer: str, role: str, numbers: Mapping[str, float]) -> LayerReading:
        key = f"{layer} {role}"
        found = reading_of(self._arm, self._seed, step, layer, role, numbers, self._scales.get(key))
        if "scale" in numbers or "octaves" in numbers:
            self._scales[key] = found.scale
        return found
