"""What a call does besides its products, as far as torch sees it: memory that it takes, casts, and copies."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8bench.features.audit.data import DATA, decoded, drawn, rounded, scale_matrix, spread
from fp8bench.features.audit.mistakes import Source
from fp8bench.features.audit.promises import CastPromise, ProductPromise, Promise
from fp8bench.features.audit.values import CallWork
from fp8bench.formats.codes import DTYPES
from fp8bench.formats.grids import FORMATS
from fp8bench.formats.recipe_support import on_device
from fp8bench.formats.recipes import Recipe, Treatment
from fp8bench.model import Ceilings, DeviceFacts, Limit
from fp8bench.model.promises import AuditKind, Signature, Takes
from fp8bench.nn.recipe_arithmetic import RecipeArithmetic
from fp8bench.protocols import Role
from fp8bench.registry import precisions
from fp8bench.worker.tape_pass import uncompiled

_COPIES = ("clone", "copy_", "_to_copy", "contiguous")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm")


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations = self.bytes = self.casts = self.copies = self.products = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {_storage(one) for one in _tensors((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for one in _tensors(found):
            if one.numel() and _storage(one) not in before:
                before.add(_storage(one))
                self.allocations, self.bytes = self.allocations + 1, self.bytes + one.untyped_storage().nbytes()
        name = func.overloadpacket.__name__
        self.products += name in _PRODUCTS
        if name in _COPIES:
            source = args[1] if name == "copy_" else args[0]
            target = next(iter(_tensors(found)), None)
            cast = target is not None and isinstance(source, Tensor) and source.dtype != target.dtype
            self.casts, self.copies = self.casts + cast, self.copies + (not cast)
        return found


def work_of(call: Callable[[], object]) -> CallWork:
    """Of one call; what torch compiles does the operators that it was made of."""
    with uncompiled(), _Counting() as counting:
        call()
    return CallWork(counting.allocations, counting.bytes, counting.casts, counting.copies, counting.products)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if type(tensor) in (Tensor, torch.nn.Parameter) else id(tensor)


_TIMES, _SECONDS = 7, 1.0
# What a call may be above a measured ceiling, as `above-ceiling` has it; above what torch does here and now, where no
# ceiling is known: what a narrower dtype, and a clock that rises, may make of it.
_ABOVE, _MARGIN = 2.5, 8.0
# Tens of milliseconds: whoever does not wait for a stream that is busy so long has read too early.
_BUSY_CYCLES = 100_000_000
# Of several runs on a device of its own: the search may have missed its best shape by so much.
_CLOSE = 1.25


class Bound(NamedTuple):
    """So many a second nothing does; `words` say whose figure it rests on."""

    rate: float
    words: str


def fastest(
    calls: Mapping[str, Callable[[], object]], device: str, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The fastest of a few calls of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + _SECONDS * len(calls)
    for _ in range(_TIMES):
        for name, call in calls.items():
            _wait(device)
            start = clock()
            call()
            _wait(device)
            found[name].append(clock() - start)
        if time.perf_counter() > end:
            break
    return {name: max(min(times), 1e-9) for name, times in found.items()}


def flops_bound(ceilings: Ceilings | None, precision: str, shape: Shape, device: str) -> Bound:
    """FLOPs a second: of the best product measured in this precision or a wider one, and of torch's own now."""
    here = max(_product(shape, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    rank = precisions.get(precision).rank
    known = [one.precision for one in (ceilings.rates if ceilings else ()) if one.limit is Limit.PRODUCT]
    wide = [ceilings.bound(Limit.PRODUCT, one) for one in known if ceilings and precisions.get(one).rank <= rank]
    return _bound(max((one for one in wide if one is not None), default=None), here, ceilings, device, "product")


def bytes_bound(ceilings: Ceilings | None, size: int, device: str) -> Bound:
    """Bytes a second: of the best copy measured in any cache, and of a copy of so many bytes now."""
    source = torch.empty(max(size // 2, 1), dtype=torch.uint8, device=device)
    seconds = fastest({"": partial(torch.clone, source)}, device)[""]
    known = ceilings.bound(Limit.CACHED) if ceilings else None
    return _bound(known, 2 * source.numel() / seconds, ceilings, device, "copy")


def _bound(known: float | None, here: float, ceilings: Ceilings | None, device: str, what: str) -> Bound:
    if known is None or ceilings is None:
        return Bound(_MARGIN * here, f"{_MARGIN:g} times what torch's own {what} does here")
    margin = _CLOSE if ceilings.whole and not device.startswith("cpu") else _ABOVE
    return Bound(margin * max(known, here), f"{margin:g} times the fastest {what} that was measured here")


def _product(shape: Shape, device: str, dtype: torch.dtype) -> float:
    a, b = (torch.randn(rows, shape.k).to(device, dtype) for rows in (shape.m, shape.n))
    seconds = fastest({"": partial(torch.mm, a, b.t())}, device)[""]
    return 2 * shape.m * shape.n * shape.k / seconds


@contextmanager
def beside(device: str) -> Iterator[bool]:
    """The body's work goes to a stream of its own, which is busy at first; False where a device has none."""
    if not device.startswith("cuda"):
        yield False
        return
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        yield True
        side.synchronize()


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


_LAYER = "audit"


class Shape(NamedTuple):
    """Of a product (M, K) x (N, K); a cast has (M, K) alone; attention has M places of N heads of K each."""

    m: int
    n: int
    k: int


# No two sides alike, a square in which a transposition keeps the shape, and a long sum.
SHAPES = (Shape(64, 96, 256), Shape(128, 128, 128), Shape(32, 48, 1024))
ODD = (
    Shape(1, 96, 256), Shape(33, 47, 256), Shape(64, 96, 200), Shape(17, 40, 48), Shape(130, 258, 144), Shape(1, 1, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Promised:
    """The treatments of inputs, weights and gradients (None: left as they are), and the recipe, if it is one."""

    treatments: tuple[Treatment | None, Treatment | None, Treatment | None]
    recipe: Recipe | None
    carrier: torch.dtype


def promised_by(name: str, facts: DeviceFacts) -> Promised:
    """What a precision promises on a device."""
    precision = precisions.get(name)
    carrier = precision.arithmetic(facts).carrier
    recipe = getattr(precision, "recipe", None)
    if isinstance(recipe, Recipe):
        recipe = on_device(recipe, facts)
        return Promised(recipe.treatments, recipe, carrier)
    plain = Treatment(FORMATS[precision.name]) if precision.name in FORMATS else None
    return Promised((plain, plain, plain), None, carrier)


class Subject(ABC):
    """One callable. Matrices are drawn and judged on the processor, whatever device it runs on.

    `sides` says which of a shape's sides it has, and what they are called; `shapes` are those it has promised to take,
    `odd` ones that do not divide, and `data` the kinds that say something about it; `timed` is the first one that is
    timed.
    """

    kind: ClassVar[AuditKind]
    sides: ClassVar[tuple[tuple[str, str], ...]] = (("m", "M"), ("n", "N"), ("k", "K"))
    shapes: ClassVar[tuple[Shape, ...]] = SHAPES
    odd: ClassVar[tuple[Shape, ...]] = ODD
    timed: ClassVar[Shape] = Shape(256, 256, 256)
    data: ClassVar[tuple[str, ...]] = tuple(DATA)

    def __init__(self, function: Callable[..., Any], signature: Signature, facts: DeviceFacts) -> None:
        self.function, self.signature, self.device = function, signature, facts.key
        self.promised = promised_by(signature.precision, facts)

    def drawn(self, data: str, shape: Shape, seed: int) -> tuple[Tensor, ...]:
        """Its matrices, contraction last."""
        sizes = ((shape.m, shape.k), (shape.n, shape.k))[: len(self.sides) - 1]
        return tuple(drawn(data, place, *size, seed, self.promised.carrier) for place, size in enumerate(sizes))

    def zeroed(self, matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Other matrices, of which all results are zero."""
        return torch.zeros_like(matrices[0]), *matrices[1:]

    def flops(self, shape: Shape) -> int:
        """Those of a call."""
        return 2 * shape.m * shape.n * shape.k

    @abstractmethod
    def arguments(self, matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What the callable is given for them, on its device."""

    def results(self, arguments: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """What it makes of them, by name; on the processor, and nobody else's memory."""
        found = self.raw(arguments)
        return {name: one.detach().to("cpu", copy=True) for name, one in found.items()}

    @abstractmethod
    def raw(self, arguments: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The same, as it gives them."""

    @abstractmethod
    def promises(self, matrices: tuple[Tensor, ...]) -> dict[str, Promise]:
        """What each result should be."""

    def _one(self, found: object) -> Tensor:
        if not isinstance(found, Tensor):
            raise TypeError(f"it gave {type(found).__name__}, and a tensor was expected")
        return found


def _laid(b: Tensor, second: str) -> Tensor:
    return b.t().contiguous() if second == "kn" else b


class Product(Subject):
    """Called with two matrices, or with the codes and scales of both."""

    kind = AuditKind.PRODUCT

    def arguments(self, matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        second = self.signature.second
        if self.signature.takes is Takes.VALUES:
            a, b = matrices
            return a.to(self.device, copy=True), _laid(b, second).to(self.device, copy=True)
        kept = [source.kept for source in self._sources(matrices)]
        codes = [one.codes.to(self.device) for one in kept]
        scales = [self._scale(one.scales).to(self.device) for one in kept]
        whole = [torch.tensor(one.tensor_scale, device=self.device) for one in kept if one.tensor_scale != 1.0]
        return codes[0], codes[1].t() if second == "kn" else codes[1], *scales, *whole

    def _scale(self, scales: Tensor) -> Tensor:
        treatment = self.promised.treatments[0]
        kept = None if treatment is None or treatment.scaling is None else treatment.scaling.scale
        if kept is None:
            return scales.reshape(()) if scales.numel() == 1 else scales
        return scales.to(torch.float8_e8m0fnu if kept.name == "e8m0" else DTYPES[kept.name])

    def raw(self, arguments: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"product": self._one(self.function(*arguments))}

    def promises(self, matrices: tuple[Tensor, ...]) -> dict[str, Promise]:
        return {"product": ProductPromise(*self._sources(matrices))}

    def _sources(self, matrices: tuple[Tensor, ...]) -> tuple[Source, Source]:
        a, b = (
            Source(one if self.signature.takes is Takes.VALUES else None, rounded(one, treatment))
            for one, treatment in zip(matrices, self.promised.treatments[:2], strict=True)
        )
        return a, b


class Cast(Subject):
    """Called with one matrix."""

    kind = AuditKind.CAST
    sides = (("m", "M"), ("k", "K"))

    def arguments(self, matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (matrices[0].to(self.device, copy=True),)

    def raw(self, arguments: tuple[Tensor, ...]) -> dict[str, Tensor]:
        found = self.function(*arguments)
        if isinstance(found, Tensor):
            return {"cast": found.to(torch.float32)}
        if not isinstance(found, tuple | list) or not 2 <= len(found) <= 3:
            words = f"it gave {type(found).__name__}, and values, or codes with their scales, were expected"
            raise TypeError(words)
        codes, scale, *whole = (self._one(one).detach().cpu() for one in found)
        elements = decoded(codes, arguments[0].shape[-1])
        values = elements * spread(scale_matrix(scale), elements)
        return {"cast": values * float(whole[0]) if whole else values}

    def promises(self, matrices: tuple[Tensor, ...]) -> dict[str, Promise]:
        return {"cast": CastPromise(Source(matrices[0], rounded(matrices[0], self.promised.treatments[0])))}


class Linear(Subject):
    """Called with inputs and a weight that need gradients; one for its result is drawn."""

    kind = AuditKind.LINEAR

    def drawn(self, data: str, shape: Shape, seed: int) -> tuple[Tensor, ...]:
        gradient = drawn("normal", 2, shape.m, shape.n, seed, self.promised.carrier)
        return (*super().drawn(data, shape, seed), gradient)

    def arguments(self, matrices: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, weight, gradient = (one.to(self.device, copy=True) for one in matrices)
        return x.requires_grad_(), weight.requires_grad_(), gradient

    def raw(self, arguments: tuple[Tensor, ...]) -> dict[str, Tensor]:
        x, weight, gradient = arguments
        found = self._one(self.function(x, weight))
        into_x, into_weight = torch.autograd.grad(found, (x, weight), gradient.to(found.dtype))
        return {"forward": found, "input gradient": into_x, "weight gradient": into_weight}

    def promises(self, matrices: tuple[Tensor, ...]) -> dict[str, Promise]:
        x, weight, gradient = matrices
        role = dict(zip(Role, self.promised.treatments, strict=True))
        high = self.promised.recipe is not None and self.promised.recipe.high_weight_gradient
        products = {
            "forward": ((x, Role.INPUT), (weight, Role.WEIGHT), False),
            "input gradient": ((gradient, Role.GRADIENT), (weight.t(), Role.WEIGHT), False),
            "weight gradient": ((gradient.t(), Role.GRADIENT), (x.t(), Role.INPUT), True),
        }
        found: dict[str, Promise] = {}
        for name, (a, b, last) in products.items():
            first, second = (
                Source(one.contiguous(), rounded(one.contiguous(), None if high and last else role[which]))
                for one, which in (a, b)
            )
            found[name] = ProductPromise(first, second, self._emulated(a, b, last))
        return found

    def _emulated(self, a: tuple[Tensor, Role], b: tuple[Tensor, Role], last: bool) -> Tensor | None:
        """The emulation's result where casts rotate operands or draw random numbers; else None."""
        recipe = self.promised.recipe
        drawn = recipe is not None and any(one is Role.GRADIENT and recipe.gradient.stochastic for _, one in (a, b))
        if recipe is None or not (drawn or (last and recipe.hadamard)):
            return None
        arithmetic = RecipeArithmetic(recipe, self.promised.carrier).layer(_LAYER)
        cast = arithmetic.turned if last else arithmetic.cast
        first, second = (cast(one.contiguous(), role) for one, role in (a, b))
        return arithmetic.product(first, second, self.promised.carrier)
