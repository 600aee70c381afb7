"""What an untimed step runs: how many operators, and whether its products have operands of its case's precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.recipe_support import on_device
from fp8bench.formats.recipes import Recipe
from fp8bench.model import Case, DeviceFacts, Level, Products
from fp8bench.protocols import Setup, SilentPhases, Workload
from fp8bench.protocols.workload import key_of
from fp8bench.registry import precisions
from fp8bench.worker.static_scales import step

# Of products that all are of other formats no more are looked at, about a second's work.
_MOST = 256


def products_of_step(workload: Workload, make_setup: Callable[[], Setup], facts: DeviceFacts) -> Products:
    """Of the first step of a state."""
    from fp8bench.numerics.operands import ProductWatch

    setup = make_setup()
    formats = formats_of(workload, setup.case, facts)
    looking = _Looking(formats, _reads_float32(setup, facts))
    state = workload.prepare(setup)
    with ProductWatch(looking.looks) as watch:
        step(workload, state, setup.scales, SilentPhases())
    unknown = not formats or (not looking.low and looking.count > _MOST)
    return Products(
        looking.count, None if unknown else looking.low, tuple(looking.seen), watch.operators, tuple(watch.attention)
    )


def formats_of(workload: Workload, case: Case, facts: DeviceFacts) -> tuple[Format, ...]:
    """Those that operands of the case's products have: its own, or its map's where no layer is left to its own."""
    keys = dict(case.precision_map)
    layers = workload.layers(dict(case.params))
    own = not layers or any(not layer.high and key_of(layer, keys) is None for layer in layers)
    found: dict[Format, None] = {}
    for name in (case.precision,) if own else tuple(keys.values()):
        recipe = getattr(precisions.get(name), "recipe", None)
        named = [FORMATS[name]] if name in FORMATS else []
        if isinstance(recipe, Recipe):
            named = [one.fmt for one in on_device(recipe, facts).treatments]
        found.update(dict.fromkeys(named))
    return tuple(found)


def _reads_float32(setup: Setup, facts: DeviceFacts) -> bool:
    """TF32 units round what they read: their operands are float32 tensors."""
    precision = precisions.get(setup.case.precision)
    return precision.float32_products != "highest" and precision.support(facts).level is Level.NATIVE


@dataclass
class _Looking:
    """What was seen of products so far, up to the first that has an operand of one of these formats."""

    formats: Sequence[Format]
    reads_float32: bool
    count: int = 0
    low: bool = False
    seen: dict[str, None] = field(default_factory=dict)

    def looks(self, operands: Sequence[Any]) -> None:
        """Backward calls it from a thread of its own, one product after the other."""
        import torch

        from fp8bench.numerics.operands import is_of

        if self.low or self.count > _MOST:
            return
        self.count += 1
        self.seen.update(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in operands))
        self.low = any(
            (self.reads_float32 and one.dtype == torch.float32) or any(is_of(one, fmt) for fmt in self.formats)
            for one in operands
        )
