"""The memory that a device with low-precision formats would hold during a step, while the step runs emulated.

The hardware's arithmetic is run on torch's meta device, without memory, for a tensor of each emulated operand's shape.
This shows the codes, the scales with the padding of their tiles, and the transposed copy that some products need. They
count while the emulation's operand lives. Memory that a cast or product allocates and frees at once is not counted,
because a device's kernels are fused; nor is the workspace of its products, which no format determines.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8bench.model import Case, DeviceFacts
from fp8bench.model.consumed import DeviceNote, Emulating, EmulationEnd, Laid, Lifted
from fp8bench.protocols import Arithmetic, MemoryMeter, Operand, Role, ScaleBook, Setup, Workload
from fp8bench.protocols.arithmetic import AS_IT_IS
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


class _Holding:
    _keys = itertools.count()

    def __init__(self, note: Callable[[DeviceNote], None], size: int, address: int = 0) -> None:
        self._note, self._key = note, next(self._keys)
        note(Laid(self._key, size, address))

    def __del__(self) -> None:
        self._note(Lifted(self._key))


class _Shadow(NamedTuple):
    operand: Operand
    holdings: tuple[_Holding, ...]


# The owner of a part's memory: an index of new memory, the source, or a part of the input operand.
_SOURCE = -1
_GIVEN = (-2, -3)


class _Recipe(NamedTuple):
    """The operands that a call makes from a source of one shape, the owner of each part's memory, and the bytes of new
    memory."""

    operands: tuple[Operand | None, ...]
    parts: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]


@dataclass
class DeviceLedger:
    """Records a device's memory. `followed`: every operand could be tracked; `seen`: there were some."""

    meter: MemoryMeter
    followed: bool = True
    seen: bool = False

    @property
    def listening(self) -> bool:
        import torch

        return self.meter.listening and not torch.compiler.is_compiling()

    @contextmanager
    def emulating(self) -> Iterator[list[int]]:
        """Marks tensors of the body as an emulation's. The body adds the addresses of those that are replaced."""
        self.seen = True
        replaced: list[int] = []
        self.meter.note(Emulating())
        try:
            yield replaced
        finally:
            self.meter.note(EmulationEnd(tuple(replaced)))

    def why(self) -> str:
        if not self.seen:
            return "no cast was seen: a compiled step shows none"
        return "" if self.followed else "an operand came from somewhere else than a cast"


@dataclass(frozen=True)
class Hardware:
    """The arithmetics of the hardware that a case emulates, by the layer's key, '' for the case's own; empty if nothing
    is emulated. `why` is why the hardware's memory is unknown, or ''."""

    arithmetics: Mapping[str, Arithmetic] = field(default_factory=dict)
    why: str = ""

    def laid_out(self, setup: Setup, ledger: DeviceLedger) -> Setup:
        layers = {key: self.beside(key, arithmetic, ledger) for key, arithmetic in setup.layers.items()}
        return replace(setup, arithmetic=self.beside("", setup.arithmetic, ledger), layers=layers)

    def beside(self, key: str, inner: Arithmetic, ledger: DeviceLedger) -> Arithmetic:
        hardware = self.arithmetics.get(key)
        return inner if hardware is None else LaidOutArithmetic(inner, hardware, ledger)

    @property
    def apart(self) -> bool:
        return any(arithmetic.keeps_source for arithmetic in self.arithmetics.values())


EMULATES_NOTHING = Hardware()
OF_SEVERAL = "of several ranks nobody derives it"


def hardware_of(case: Case, workload: Workload, facts: DeviceFacts) -> Hardware:
    if case.ranks > 1:
        return Hardware(why=OF_SEVERAL)
    hardware = hardware_for((("", case.precision), *case.precision_map), facts)
    if hardware.arithmetics or hardware.why:
        return replace(hardware, why=hardware.why or workload.not_on_device)
    support = workload.support(dict(case.params), precisions.get(case.precision), facts)
    return Hardware(why=f"the suite emulates by itself ({support.reason})" if support.is_emulated else "")


def hardware_for(modes: Iterable[tuple[str, str]], facts: DeviceFacts) -> Hardware:
    arithmetics: dict[str, Arithmetic] = {}
    for key, name in modes:
        precision = precisions.get(name)
        if precision.support(facts).is_emulated:
            laid_out = precision.laid_out(facts)
            if isinstance(laid_out, str):
                return Hardware(why=laid_out)
            arithmetics[key] = laid_out
    return Hardware(arithmetics)


class LaidOutArithmetic(Arithmetic):
    """Wraps an emulated arithmetic; its casts are recorded in a ledger as `hardware` would lay them out."""

    def __init__(self, inner: Arithmetic, hardware: Arithmetic, ledger: DeviceLedger) -> None:
        vars(self).update({name: getattr(inner, name) for name in AS_IT_IS if name != "restore"})
        self._inner, self._hardware, self._ledger = inner, hardware, ledger
        self._known: dict[tuple[Any, ...], _Recipe] = {}
        self._shadows: dict[int, tuple[_Shadow, weakref.ref[Tensor]]] = {}

    def layer(self, name: str) -> Arithmetic:
        inner = self._inner.layer(name)
        return self if inner is self._inner else LaidOutArithmetic(inner, self._hardware.layer(name), self._ledger)

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        inner = self._inner.scaled_by(book, name)  # a kept scale belongs to either tensor
        return self if inner is self._inner else LaidOutArithmetic(inner, self._hardware, self._ledger)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._single("cast", tensor, role)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return self._single("cast_without_scale", tensor, role)

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        return self._single("cast_transpose", source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if not self._ledger.listening:
            return self._inner.turn(operand, source, role)
        with self._ledger.emulating() as replaced:
            turned = self._inner.turn(operand, source, role)
            (noted,) = self._laid("turn", source, role, [turned], replaced, operand_given=operand)
        return noted  # type: ignore[no-any-return]

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        """Casts both orientations. Hardware that makes both at once keeps no source, so the emulation must not keep it
        either."""
        if not self._ledger.listening:
            return self._inner.cast_both(tensor, role, amax)
        with self._ledger.emulating() as replaced:
            operand, turned = self._inner.cast_both(tensor, role, amax)
            if turned is None and self._recipe("cast_both", tensor, role, None).operands[1] is not None:
                turned = self._inner.turn(operand, tensor, role)
            operand, turned = self._laid("cast_both", tensor, role, [operand, turned], replaced)
        return operand, turned

    def product(self, a: Operand, b: Operand, dtype: Any) -> Tensor:
        if not self._ledger.listening:
            return self._inner.product(a, b, dtype)
        with self._ledger.emulating():
            return self._inner.product(a, b, dtype)

    def restore(self, operand: Operand, dtype: Any) -> Tensor:
        """Records new memory: hardware restores again what an emulation may still have. The result is a view with a
        separate lifetime."""
        if not self._ledger.listening:
            return self._inner.restore(operand, dtype)
        with self._ledger.emulating() as replaced:
            values = self._inner.restore(operand, dtype).detach()
            replaced.append(values.untyped_storage().data_ptr())
            holding = _Holding(self._ledger.meter.note, values.numel() * values.element_size())
        self._attach(_Shadow(Operand(values.to("meta")), (holding,)), values)
        return values

    def _single(self, name: str, tensor: Tensor, role: Role) -> Operand:
        call = getattr(self._inner, name)
        if not self._ledger.listening:
            return call(tensor, role)  # type: ignore[no-any-return]
        with self._ledger.emulating() as replaced:
            (operand,) = self._laid(name, tensor, role, [call(tensor, role)], replaced)
        return operand  # type: ignore[no-any-return]

    def _laid(
        self,
        name: str,
        source: Any,
        role: Role,
        results: Sequence[Any],
        replaced: list[int],
        operand_given: Operand | None = None,
    ) -> list[Any]:
        """Records what the call `name` has made, and returns it in separate tensors. If an emulation's result is a
        view, hardware has a copy, so a view must not keep the other tensor alive."""
        shadow = self._shadows.get(id(operand_given.data), (None,))[0] if operand_given is not None else None
        if operand_given is not None and shadow is None:
            self._ledger.followed = False
            return list(results)
        recipe = self._recipe(name, source, role, shadow)
        new = [_Holding(self._ledger.meter.note, size) for size in recipe.sizes]
        if scale_address := self._kept_scale(role):
            new = [
                _Holding(self._ledger.meter.note, 0, scale_address) if n == recipe.parts[0][-1] else holding
                for n, holding in enumerate(new)
            ]
        noted = []
        for real, operand, parts in zip(results, recipe.operands, recipe.parts, strict=True):
            if real is None or operand is None:  # hardware that transposes later would need a source that is not kept
                self._ledger.followed &= real is operand
                noted.append(real)
                continue
            detached = replace(real, data=real.data.detach())
            replaced.append(detached.data.untyped_storage().data_ptr())
            self._attach(
                _Shadow(operand, tuple(self._holding(part, new, source, shadow) for part in parts)), detached.data
            )
            noted.append(detached)
        return noted

    def _kept_scale(self, role: Role) -> int:
        """Returns the address of the scale that a cast of that role was given, 0 if it comes from the tensor alone. A
        given scale is the same tensor for the emulation and for hardware."""
        scale = getattr(self._inner, "scales", {}).get(role)
        return 0 if scale is None or scale.last is None else int(scale.last.inverse.untyped_storage().data_ptr())

    def _holding(self, part: int, new: Sequence[_Holding], source: Any, shadow: _Shadow | None) -> _Holding:
        if part >= 0:
            return new[part]
        if part == _SOURCE:
            return _Holding(self._ledger.meter.note, 0, source.untyped_storage().data_ptr())
        assert shadow is not None
        return shadow.holdings[_GIVEN.index(part)]

    def _attach(self, shadow: _Shadow, real: Tensor) -> None:
        """Keeps the shadow while the tensor lives, whoever holds it, including a graph that has saved it."""
        key = id(real)
        self._shadows[key] = shadow, weakref.ref(real, lambda _: self._shadows.pop(key, None))

    def _recipe(self, name: str, source: Any, role: Role, shadow: _Shadow | None) -> _Recipe:
        tensors = () if shadow is None else shadow.operand.tensors
        key = (
            name,
            role,
            *(
                None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)
                for tensor in (source, *tensors)
            ),
        )
        if key not in self._known:
            self._known[key] = self._make_recipe(name, source, role, shadow)
        return self._known[key]

    def _make_recipe(self, name: str, source: Any, role: Role, shadow: _Shadow | None) -> _Recipe:
        import torch

        # 1. Run the hardware's code on tensors without memory, to get sizes without computing.
        with torch.device("meta"), torch.no_grad():
            like = None if source is None else torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
            arguments = () if shadow is None else (shadow.operand,)
            result = getattr(self._hardware, name)(*arguments, like, role)
        # 2. Identify input storages; all others are new.
        operands = result if isinstance(result, tuple) else (result,)
        places = {} if like is None else {like.untyped_storage()._cdata: _SOURCE}
        if shadow is not None:
            places |= {tensor.untyped_storage()._cdata: _GIVEN[n] for n, tensor in enumerate(shadow.operand.tensors)}
        sizes: list[int] = []
        parts = []
        # 3. Count several views of one storage once.
        for operand in operands:
            numbers = []
            for tensor in () if operand is None else operand.tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in places:
                    places[storage._cdata] = len(sizes)
                    sizes.append(storage.nbytes())
                numbers.append(places[storage._cdata])
            parts.append(tuple(numbers))
        return _Recipe(operands, tuple(parts), tuple(sizes))
