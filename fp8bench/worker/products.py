"""What an untimed step runs, and whether its products are computed in its case's precision.

Three witnesses: the operands of its products, the numbers of a product of its arithmetic, and on a GPU the names of
the kernels that multiply. An emulation multiplies wide values, and may; native products of them are a fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.hardware import multiplied_bits
from fp8bench.formats.recipe_support import on_device
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.model import Case, DeviceFacts, Level, Products
from fp8bench.protocols import Precision, Role, Setup, Workload
from fp8bench.protocols.workload import key_of
from fp8bench.registry import devices, precisions
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.given import Given
from fp8bench.worker.static_scales import step
from fp8bench.worker.tracing import record

if TYPE_CHECKING:
    from torch import Tensor

# Of products that all are of other formats no more are looked at, about a second's work.
_MOST = 256


def products_of_step(workload: Workload, make_setup: Callable[[], Setup], facts: DeviceFacts) -> Products:
    from fp8bench.numerics.operands import ProductWatch

    setup = make_setup()
    formats, native = formats_of(workload, setup.case, facts), _is_native_recipe(setup, facts)
    looking = _Looking(formats, _reads_float32(setup, facts), native)
    state = workload.prepare(setup)
    given = Given(state)
    with ProductWatch(looking.looks) as watch:
        step(workload, state, setup.scales, PhaseClock(devices.get(facts.kind).stamper(facts.index)))
    found = given.after_step()
    kernels = _kernels(partial(step, workload, state, setup.scales), facts) if native else ()
    del state, given
    low = looking.low or looking.wide
    like = product_like(precisions.get(setup.case.precision), facts) if looking.count or kernels else ""
    unknown = not formats or (not low and looking.count > _MOST)
    return Products(
        looking.count, None if unknown else low, tuple(looking.seen), watch.operators, tuple(watch.attention),
        looking.wide and not looking.low, like, kernels, found,
    )  # fmt: skip


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


def _is_native_recipe(setup: Setup, facts: DeviceFacts) -> bool:
    """Whether products take codes: an emulation has none."""
    precision = precisions.get(setup.case.precision)
    is_recipe = isinstance(getattr(precision, "recipe", None), Recipe)
    return is_recipe and precision.support(facts).level is Level.NATIVE


def _kernels(run: Callable[[Any], None], facts: DeviceFacts) -> tuple[str, ...]:
    """The names of the kernels that multiply in a few profiled steps on a GPU; none if no kernel was seen."""
    if not facts.accelerated:
        return ()
    with suppress(RuntimeError):  # a profiler that records nothing, as where a driver forbids it
        names = (str(one.get("name")) for one in record(run, facts.kind)["traceEvents"] if one.get("cat") == "kernel")
        return tuple(name for name in dict.fromkeys(names) if multiplied_bits(name) is not None)
    return ()


# M, N, K of the product whose numbers are looked at: multiples of every block.
_TRIED = (128, 256, 512)
_LAYER = "fingerprint"


def product_like(precision: Precision, facts: DeviceFacts) -> str:
    """In what precision a product of a precision's arithmetic really is, if not in its recipe's; '' if in that."""
    import torch

    from fp8bench.nn.arithmetics import RecipeArithmetic
    from fp8bench.numerics.conformity import looks_like

    recipe = getattr(precision, "recipe", None)
    if not isinstance(recipe, Recipe):
        return ""
    native = precision.support(facts).level is Level.NATIVE
    if not native and recipe.accumulator is not Accumulator.FP32:  # emulated sums in few bits take seconds
        return ""
    arithmetic, random = precision.arithmetic(facts), torch.Generator(facts.key).manual_seed(0)
    m, n, k = _TRIED
    x, weight = (
        torch.randn(rows, k, generator=random, device=facts.key).to(arithmetic.carrier) for rows in (m, n)
    )  # fmt: skip
    emulated = RecipeArithmetic(on_device(recipe, facts)).layer(_LAYER)
    promised = emulated.cast(x, Role.INPUT).data, emulated.cast(weight, Role.WEIGHT).data
    wide = str(arithmetic.carrier).removeprefix("torch.")
    guesses: dict[str, tuple[Tensor, Tensor]] = {precision.mode: promised, wide: (x, weight)}
    if native:
        copies = promised[0].to(arithmetic.carrier), promised[1].to(arithmetic.carrier)
        guesses[f"{wide} copies of {precision.mode}'s values"] = copies
    try:
        whole = arithmetic.whole(torch.nn.Parameter(weight.to(torch.float32)))
        layer = arithmetic.layer(_LAYER)
        product = (
            whole(x)
            if whole is not None
            else layer.product(layer.cast(x, Role.INPUT), layer.cast(weight, Role.WEIGHT), arithmetic.carrier)
        )
    except Exception:  # noqa: BLE001 - a product that this device does not do is told where it is timed
        return ""
    return looks_like(product, precision.mode, guesses)


@dataclass
class _Looking:
    """What was seen of products so far, up to the first that has an operand of one of these formats.

    Where products take codes, one in the format's own dtype; `wide` is one that has values of a format in a wider one.
    """

    formats: Sequence[Format]
    reads_float32: bool
    takes_codes: bool = False
    count: int = 0
    low: bool = False
    wide: bool = False
    seen: dict[str, None] = field(default_factory=dict)

    def looks(self, operands: Sequence[Any]) -> None:
        """Backward calls it from a thread of its own, one product after the other."""
        import torch

        from fp8bench.numerics.operands import has_dtype_of, is_of

        if self.low or self.count > _MOST:
            return
        self.count += 1
        self.seen.update(dict.fromkeys(str(one.dtype).removeprefix("torch.") for one in operands))
        pairs = [(one, fmt) for one in operands for fmt in self.formats]
        if self.takes_codes:
            self.low = any(has_dtype_of(one, fmt) for one, fmt in pairs)
            self.wide = self.wide or (not self.low and any(is_of(one, fmt) for one, fmt in pairs))
        else:
            reads = self.reads_float32 and any(one.dtype == torch.float32 for one in operands)
            self.low = reads or any(is_of(one, fmt) for one, fmt in pairs)
