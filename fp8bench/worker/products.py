"""Watches an untimed step, and checks whether its products are computed in its case's precision.

There are three kinds of evidence: the operands of its products, the numbers of a product of its arithmetic, and on a
GPU the names of the kernels that multiply. An emulation may multiply wide values; a native precision that does has
fallen back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8bench.formats.grids import FORMATS, Format
from fp8bench.formats.hardware import multiplied_bits
from fp8bench.formats.recipe_support import on_device
from fp8bench.formats.recipes import Accumulator, Recipe
from fp8bench.model import Case, DeviceFacts, GivenTensors, Products
from fp8bench.nn.arithmetics import RecipeArithmetic
from fp8bench.numerics.conformity import looks_like
from fp8bench.numerics.operands import ProductWatch, has_dtype_of, has_format
from fp8bench.protocols import Precision, Role, Setup, Workload
from fp8bench.protocols.workload import key_of
from fp8bench.registry import devices, precisions
from fp8bench.worker.clock import PhaseClock
from fp8bench.worker.memory_pass import listening
from fp8bench.worker.state_tensors import address_of, modules_of, state_tensors, tensors_of, version_of
from fp8bench.worker.static_scales import step
from fp8bench.worker.tracing import record

# The number of products inspected while none has a format of the case: about a second's work.
_MOST = 256
# A step that takes longer is not taken again.
_LONGEST_SECONDS = 1.0


def products_of_step(workload: Workload, make_setup: Callable[[], Setup], facts: DeviceFacts) -> Products:
    cast_in_step = set[int]()
    setup = listening(make_setup(), lambda addresses, role: cast_in_step.update(addresses))
    formats, precision = formats_of(workload, setup.case, facts), precisions.get(setup.case.precision)
    is_native = precision.support(facts).is_native
    # An emulation has no codes that products could take. TF32 units read float32 tensors and round them.
    native = is_native and isinstance(getattr(precision, "recipe", None), Recipe)
    looking = _Looking(formats, is_native and precision.float32_products != "highest", native)
    state = workload.prepare(setup)
    given_state = GivenState(state)
    clock, begun = PhaseClock(devices.get(facts.kind).stamper(facts.index)), time.thread_time()
    with ProductWatch(looking.looks) as watch:
        step(workload, state, setup.scales, clock)
    inputs = given_state.after_step()
    weights = _WeightsHeld(state, formats)
    if time.thread_time() - begun < _LONGEST_SECONDS:  # the first step may have cast what later ones keep
        cast_in_step.clear()
        with ProductWatch(weights.looks):
            step(workload, state, setup.scales, clock)
    kernels = _kernels(partial(step, workload, state, setup.scales), facts) if native else ()
    del state, given_state
    low = looking.low or looking.wide
    like = product_like(precision, facts) if looking.count or kernels else ""
    unknown = not formats or (not low and looking.count > _MOST)
    return Products(
        looking.count,
        None if unknown else low,
        tuple(looking.seen),
        watch.operators,
        tuple(watch.attention),
        looking.wide and not looking.low,
        like,
        kernels,
        inputs,
        len(weights.unwritten() - cast_in_step),
    )


class _WeightsHeld:
    """Finds the tensors of a state in one of the formats that products read as their right operand, and that no step
    writes; excludes parameters of a model and tensors whose role the state declares."""

    def __init__(self, state: object, formats: Sequence[Format]) -> None:
        named = {address for address, role in state_tensors(state).items() if role is not None}
        for model in modules_of(state):
            named.update(map(address_of, model.parameters()))
        tensors = ((address_of(tensor), tensor) for tensor in tensors_of(state))
        self._held = {address: (tensor, version_of(tensor)) for address, tensor in tensors if address not in named}
        self._formats = formats
        self._read = set[int]()

    def looks(self, operands: Sequence[Any]) -> None:
        """Inspects operands; backward multiplies gradients with forward's inputs, and is left out."""
        for weight in operands[1:2] if torch._C._current_graph_task_id() == -1 else ():
            if any(has_dtype_of(weight, fmt) for fmt in self._formats):
                self._read.add(address_of(weight))

    def unwritten(self) -> set[int]:
        return {address for address in self._read & self._held.keys() if _is_unwritten(*self._held[address])}


def _is_unwritten(tensor: Any, version: int) -> bool:
    return version_of(tensor) == version


def formats_of(workload: Workload, case: Case, facts: DeviceFacts) -> tuple[Format, ...]:
    """Returns the formats of a case's products: its precision's, or its map's if the map covers all layers."""
    keys = dict(case.precision_map)
    layers = workload.layers(dict(case.params))
    uses_case_precision = not layers or any(not layer.high and key_of(layer, keys) is None for layer in layers)
    obeyed = [key for layer in layers if (key := key_of(layer, keys)) is not None]  # without elementwise operations
    formats: dict[Format, None] = {}
    for name in (case.precision,) if uses_case_precision else [keys[key] for key in dict.fromkeys(obeyed)]:
        recipe = getattr(precisions.get(name), "recipe", None)
        named = [FORMATS[name]] if name in FORMATS else []
        if isinstance(recipe, Recipe):
            named = [treatment.fmt for treatment in on_device(recipe, facts).treatments]
        formats.update(dict.fromkeys(named))
    return tuple(formats)


def _kernels(run: Callable[[Any], None], facts: DeviceFacts) -> tuple[str, ...]:
    """Returns the names of the kernels that multiply in a few profiled steps; empty on a CPU, or if none was seen."""
    if not facts.accelerated:
        return ()
    with suppress(RuntimeError):  # some drivers forbid profiling, so that nothing is recorded
        names = (
            str(event.get("name")) for event in record(run, facts.kind)["traceEvents"] if event.get("cat") == "kernel"
        )
        return tuple(name for name in dict.fromkeys(names) if multiplied_bits(name) is not None)
    return ()


# M, N, K of the product whose numbers are examined: multiples of every block.
_TRIED = (128, 256, 512)
_LAYER = "fingerprint"


def product_like(precision: Precision, facts: DeviceFacts) -> str:
    """Returns the precision that a product of the arithmetic really has; '' if it is the recipe's."""
    recipe = getattr(precision, "recipe", None)
    if not isinstance(recipe, Recipe):
        return ""
    native = precision.support(facts).is_native
    if not native and recipe.accumulator is not Accumulator.FP32:  # emulated sums in few bits take seconds
        return ""
    arithmetic, random = precision.arithmetic(facts), torch.Generator(facts.key).manual_seed(0)
    m, n, k = _TRIED
    x, weight = (torch.randn(rows, k, generator=random, device=facts.key).to(arithmetic.carrier) for rows in (m, n))
    emulated = RecipeArithmetic(on_device(recipe, facts)).layer(_LAYER)
    promised = emulated.cast(x, Role.INPUT).data, emulated.cast(weight, Role.WEIGHT).data
    wide = str(arithmetic.carrier).removeprefix("torch.")
    guesses: dict[str, tuple[Tensor, Tensor]] = {precision.mode: promised, wide: (x, weight)}
    if native:
        copies = promised[0].to(arithmetic.carrier), promised[1].to(arithmetic.carrier)
        guesses[f"{wide} copies of {precision.mode}'s values"] = copies
    try:
        layer_function = arithmetic.whole(torch.nn.Parameter(weight.to(torch.float32)))
        layer = arithmetic.layer(_LAYER)
        product = (
            layer_function(x)
            if layer_function is not None
            else layer.product(layer.cast(x, Role.INPUT), layer.cast(weight, Role.WEIGHT), arithmetic.carrier)
        )
    except Exception:  # noqa: BLE001 - a product that this device cannot do fails where it is timed, with the reason
        return ""
    return looks_like(product, precision.mode, guesses)


@dataclass
class _Looking:
    """Inspects products up to the first that has an operand in one of the formats. If products take codes, `low` needs
    an operand in the format's dtype; `wide` records one with values of the format in a wider dtype."""

    formats: Sequence[Format]
    reads_float32: bool
    takes_codes: bool = False
    count: int = 0
    low: bool = False
    wide: bool = False
    seen: dict[str, None] = field(default_factory=dict)

    def looks(self, operands: Sequence[Any]) -> None:
        """Inspects operands. Backward calls it from another thread, one product after the other."""
        if self.low or self.count > _MOST:
            return
        self.count += 1
        self.seen.update(dict.fromkeys(str(operand.dtype).removeprefix("torch.") for operand in operands))
        pairs = [(tensor, fmt) for tensor in operands for fmt in self.formats]
        if self.takes_codes:
            self.low = any(has_dtype_of(tensor, fmt) for tensor, fmt in pairs)
            self.wide = self.wide or (not self.low and any(has_format(tensor, fmt) for tensor, fmt in pairs))
        else:
            reads = self.reads_float32 and any(operand.dtype == torch.float32 for operand in operands)
            self.low = reads or any(has_format(tensor, fmt) for tensor, fmt in pairs)


# CPU time for reading a state; one that takes longer is not reported.
SECONDS = 0.5
_PIECE = 1 << 20
# Only the largest shapes are reported; they decide how long a step takes.
_MOST_SHAPES = 32


class GivenState:
    """Sums of the input tensors of a prepared state, by shape: the same in every precision, up to rounding. Only
    tensors that the next step does not write, or that it trains, count: others may be uninitialized."""

    def __init__(self, state: object) -> None:
        self._end = time.thread_time() + SECONDS
        tensors = [tensor for tensor in tensors_of(state, until=self._end) if _has_numbers(tensor)]
        self._before = [(tensor, version_of(tensor), sums) for tensor in tensors if (sums := self._sums(tensor))]
        self._left = self._end - time.thread_time()

    def after_step(self) -> tuple[GivenTensors, ...]:
        shapes: dict[tuple[int, ...], GivenTensors] = {}
        self._end = time.thread_time() + self._left
        for tensor, version, sums in self._before:
            trained = tensor.is_leaf and tensor.requires_grad
            if trained or (version_of(tensor) == version and self._sums(tensor) == sums):
                shape = tuple(tensor.shape)
                old = shapes.get(shape, GivenTensors(shape))
                total, squares, subnormals = (a + b for a, b in zip(old.sums, sums, strict=True))
                scattered = old.scattered + (tensor.layout is torch.strided and 1 not in tensor.stride())
                shapes[shape] = GivenTensors(shape, old.tensors + 1, total, squares, int(subnormals), scattered)
        late = time.thread_time() > self._end
        return () if late else tuple(sorted(shapes.values(), key=lambda tensors: -tensors.elements)[:_MOST_SHAPES])

    def _sums(self, tensor: Any) -> tuple[float, float, int] | None:
        """Returns the sum, the sum of squares, and the number of subnormals; None if not all are finite, or time is
        out."""
        total, squares, subnormals = 0.0, 0.0, 0
        for piece in tensor.detach().reshape(-1).split(_PIECE):
            if time.thread_time() > self._end:
                return None
            total += float(piece.sum(dtype=torch.float64))
            squares += float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2
            if tensor.dtype is not torch.float16:  # no processor multiplies in float16
                subnormals += int(((piece.abs() < torch.finfo(piece.dtype).tiny) & (piece != 0)).sum())
        return (total, squares, subnormals) if squares < float("inf") else None


def _has_numbers(tensor: Any) -> bool:
    """Whether it holds numbers of two bytes or more, and is not a view that repeats some of them."""
    wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 and tensor.numel() > 1
    return bool(wide and tensor.numel() * tensor.dtype.itemsize <= tensor.untyped_storage().nbytes())
