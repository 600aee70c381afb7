"""Scales from data: which layers have them, and when they are renewed. Nothing here knows torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fp8bench.model import LayerScale, StaticScales


class Standing(NamedTuple):
    """What a kept scale is at the moment: it comes from that largest magnitude, and was renewed so often."""

    amax: float
    scale: float
    renewals: int


class KeptScale(Protocol):
    """One scale of one layer, kept on its device. Reading it waits for the device."""

    def standing(self) -> Standing | None:
        """None for one that nothing was ever cast with."""


class ScaleBook:
    """The scales of all layers of one state.

    While `watching` a tensor is cast with its current scale and its largest magnitude is entered; else with the scale
    that stands. A book without known magnitudes watches always: it calibrates.
    """

    def __init__(self, rule: StaticScales, known: Mapping[tuple[str, str], float] | None = None) -> None:
        self.rule = rule
        self.known = known
        self.watching = known is None
        self._steps = 0
        self._kept: dict[tuple[str, str], KeptScale] = {}

    def begin_step(self) -> None:
        """A step begins: every `refresh`-th one watches."""
        self._steps += 1
        if self.known is not None and self.rule.refresh:
            self.watching = self._steps % self.rule.refresh == 0

    def keep(self, layer: str, role: str, scale: KeptScale) -> None:
        """Enter a scale; a model that is built again under the same book replaces what it had."""
        self._kept[layer, role] = scale

    def standings(self) -> tuple[LayerScale, ...]:
        """All scales that something was cast with, in the order their layers were made."""
        found = ((*key, kept.standing()) for key, kept in self._kept.items())
        return tuple(LayerScale(layer, role, *standing) for layer, role, standing in found if standing is not None)
