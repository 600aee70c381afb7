"""Whether a step's products run on operands of its case's precision: an untimed step, looked at until one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.recipes import Recipe
from fp8bench.model import Case, DeviceFacts, Level, Products
from fp8bench.protocols import Setup, SilentPhases, Workload
from fp8bench.protocols.workload import key_of
from fp8bench.registry import precisions
from fp8bench.worker.static_scales import step

# Of a step whose products all are of other formats no more are looked at, about a second's work.
_MOST = 256


def products_of_step(workload: Workload, make_setup: Callable[[], Setup], facts: DeviceFacts) -> Products | None:
    """Of the first step of a state. None where nobody knows which formats the products should have."""
    setup = make_setup()
    formats = formats_of(workload, setup.case)
    if not formats:
        return None
    state = workload.prepare(setup)
    return _watched(lambda: step(workload, state, setup.scales, SilentPhases()), formats, _reads_float32(setup, facts))


def formats_of(workload: Workload, case: Case) -> tuple[Format, ...]:
    """Those that operands of the case's products have: its own, or its map's where no layer is left to its own."""
    keys = dict(case.precision_map)
    layers = workload.layers(dict(case.params))
    own = not layers or any(not layer.high and key_of(layer, keys) is None for layer in layers)
    found: dict[Format, None] = {}
    for name in (case.precision,) if own else tuple(keys.values()):
        recipe = getattr(precisions.get(name), "recipe", None)
        named = [FORMATS[name]] if name in FORMATS else []
        found.update(dict.fromkeys((one.fmt for one in recipe.treatments) if isinstance(recipe, Recipe) else named))
    return tuple(found)


def _reads_float32(setup: Setup, facts: DeviceFacts) -> bool:
    """TF32 units round what they read: their operands are float32 tensors."""
    precision = precisions.get(setup.case.precision)
    return precision.float32_products != "highest" and precision.support(facts).level is Level.NATIVE


def _watched(run: Callable[[], None], formats: Sequence[Format], reads_float32: bool) -> Products | None:
    """What products ran on; None where there are too many to be looked at."""
    import torch

    from fp8bench.numerics.operands import Enough, ProductWatch, is_of

    count, low, seen = 0, False, dict[str, None]()

    def looks(operands: Sequence[Any]) -> bool:
        nonlocal count, low
        count += 1
        seen.update(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in operands))
        low = low or any(
            (reads_float32 and one.dtype == torch.float32) or any(is_of(one, fmt) for fmt in formats)
            for one in operands
        )
        return low or count > _MOST

    watch = ProductWatch(looks)
    try:
        with watch:
            run()
    except Enough:
        pass
    return None if watch.enough and not low else Products(count, low, tuple(seen))
