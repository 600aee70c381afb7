"""Estimates the memory that hardware with low-precision formats would hold, while a step runs emulated.

For each emulated operand, the hardware's arithmetic runs on torch's meta device, which has shapes but no memory. This
shows the hardware's codes, its padded scales, and the transposed copy that some products need. They count as memory
as long as the emulated operand exists. Memory that a single cast or product allocates and frees is not counted,
because kernels of a device are fused. The workspace of products is not counted either, because no format determines
it.
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
from fp8bench.protocols.arithmetic import DELEGATED_ATTRIBUTES
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


class _Holding:
    _keys = itertools.count()

    def __init__(self, note: Callable[[DeviceNote], None], size: int, address: int = 0) -> None:
        self._note = note
        self._key = next(self._keys)
        note(Laid(self._key, size, address))

    def __del__(self) -> None:
        self._note(Lifted(self._key))


class _HardwareTensor(NamedTuple):
    """The codes and scales that hardware would hold for an emulated tensor, with their entries in the ledger."""

    operand: Operand
    holdings: tuple[_Holding, ...]


# Who owns the memory of a tensor: an index into the new memory (0 or more), the source tensor (-1), or a tensor of
# the operand that was given (-2, -3).
_SOURCE_OWNER = -1
_OPERAND_OWNERS = (-2, -3)


class _Recipe(NamedTuple):
    """The memory that a call needs for sources of one shape: its operands, the owner of each tensor's memory, and the
    bytes of new memory.
    """

    operands: tuple[Operand | None, ...]
    parts: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]


@dataclass
class DeviceLedger:
    """Records the memory that a device would hold.

    `followed` is true as long as every operand can be traced to its cast. `seen` is true once there was an emulated
    cast.
    """

    meter: MemoryMeter
    followed: bool = True
    seen: bool = False

    @property
    def listening(self) -> bool:
        import torch

        return self.meter.listening and not torch.compiler.is_compiling()

    @contextmanager
    def mark_emulation(self) -> Iterator[list[int]]:
        """Notes that tensors which the body allocates belong to an emulation. Hardware would not have them.

        Yields a list. The body appends the addresses of those tensors that the hardware's own memory replaces.
        """
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
        return "" if self.followed else "an operand was not made by a cast"


@dataclass(frozen=True)
class Hardware:
    """The arithmetics of the hardware that a case emulates, by the layer's key ('' for the case's own precision).

    The mapping is empty if nothing is emulated. `why` is the reason if the hardware's memory is unknown, else ''.
    """

    arithmetics: Mapping[str, Arithmetic] = field(default_factory=dict)
    why: str = ""

    def wrap_setup(self, setup: Setup, ledger: DeviceLedger) -> Setup:
        layers = {key: self.wrap_arithmetic(key, arithmetic, ledger) for key, arithmetic in setup.layers.items()}
        return replace(setup, arithmetic=self.wrap_arithmetic("", setup.arithmetic, ledger), layers=layers)

    def wrap_arithmetic(self, key: str, inner: Arithmetic, ledger: DeviceLedger) -> Arithmetic:
        hardware = self.arithmetics.get(key)
        return inner if hardware is None else LaidOutArithmetic(inner, hardware, ledger)

    @property
    def needs_separate_step(self) -> bool:
        return any(arithmetic.keeps_source for arithmetic in self.arithmetics.values())


NO_EMULATION = Hardware()
SEVERAL_RANKS_REASON = "it is not derived for several ranks"


def find_hardware(case: Case, workload: Workload, facts: DeviceFacts) -> Hardware:
    if case.ranks > 1:
        return Hardware(why=SEVERAL_RANKS_REASON)
    hardware = find_hardware_for_modes((("", case.precision), *case.precision_map), facts)
    if hardware.arithmetics or hardware.why:
        return replace(hardware, why=hardware.why or workload.not_on_device)
    support = workload.support(dict(case.params), precisions.get(case.precision), facts)
    return Hardware(why=f"the suite itself emulates ({support.reason})" if support.is_emulated else "")


def find_hardware_for_modes(modes: Iterable[tuple[str, str]], facts: DeviceFacts) -> Hardware:
    arithmetics: dict[str, Arithmetic] = {}
    for key, name in modes:
        precision = precisions.get(name)
        if precision.support(facts).is_emulated:
            hardware_arithmetic = precision.laid_out(facts)
            if isinstance(hardware_arithmetic, str):
                return Hardware(why=hardware_arithmetic)
            arithmetics[key] = hardware_arithmetic
    return Hardware(arithmetics)


class LaidOutArithmetic(Arithmetic):
    """An emulated arithmetic that records each cast in a ledger. The ledger has the memory that the cast's result
    would take on the hardware.
    """

    def __init__(self, inner: Arithmetic, hardware: Arithmetic, ledger: DeviceLedger) -> None:
        vars(self).update({name: getattr(inner, name) for name in DELEGATED_ATTRIBUTES if name != "restore"})
        self._inner = inner
        self._hardware = hardware
        self._ledger = ledger
        self._recipes: dict[tuple[Any, ...], _Recipe] = {}
        self._hardware_tensors: dict[int, tuple[_HardwareTensor, weakref.ref[Tensor]]] = {}

    def layer(self, name: str) -> Arithmetic:
        inner = self._inner.layer(name)
        return self if inner is self._inner else LaidOutArithmetic(inner, self._hardware.layer(name), self._ledger)

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        inner = self._inner.scaled_by(book, name)  # emulation and hardware use the same stored scale
        return self if inner is self._inner else LaidOutArithmetic(inner, self._hardware, self._ledger)

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._cast_once("cast", tensor, role)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return self._cast_once("cast_without_scale", tensor, role)

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        return self._cast_once("cast_transpose", source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if not self._ledger.listening:
            return self._inner.turn(operand, source, role)
        hardware_tensor, _ = self._hardware_tensors.get(id(operand.data), (None, None))
        with self._ledger.mark_emulation() as replaced:
            turned_operand = self._inner.turn(operand, source, role)
            if hardware_tensor is None:
                self._ledger.followed = False
                return turned_operand
            (recorded,) = self._record_results("turn", source, role, [turned_operand], replaced, hardware_tensor)
        return recorded  # type: ignore[no-any-return]

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        """Casts a tensor in both orientations.

        Hardware that makes both orientations in one cast does not hold the source tensor afterwards, so the emulation
        must not hold it either.
        """
        if not self._ledger.listening:
            return self._inner.cast_both(tensor, role, amax)
        with self._ledger.mark_emulation() as replaced:
            operand, turned_operand = self._inner.cast_both(tensor, role, amax)
            if turned_operand is None and self._find_recipe("cast_both", tensor, role, None).operands[1] is not None:
                turned_operand = self._inner.turn(operand, tensor, role)
            operand, turned_operand = self._record_results(
                "cast_both", tensor, role, [operand, turned_operand], replaced
            )
        return operand, turned_operand

    def product(self, a: Operand, b: Operand, dtype: Any) -> Tensor:
        if not self._ledger.listening:
            return self._inner.product(a, b, dtype)
        with self._ledger.mark_emulation():
            return self._inner.product(a, b, dtype)

    def restore(self, operand: Operand, dtype: Any) -> Tensor:
        """Restores the values of an operand, and records them as new memory: hardware has to restore values that an
        emulation still holds.

        The result is a view with a separate lifetime.
        """
        if not self._ledger.listening:
            return self._inner.restore(operand, dtype)
        with self._ledger.mark_emulation() as replaced:
            values = self._inner.restore(operand, dtype).detach()
            replaced.append(values.untyped_storage().data_ptr())
            holding = _Holding(self._ledger.meter.note, values.numel() * values.element_size())
        self._store_hardware_tensor(_HardwareTensor(Operand(values.to("meta")), (holding,)), values)
        return values

    def _cast_once(self, name: str, tensor: Tensor, role: Role) -> Operand:
        call = getattr(self._inner, name)
        if not self._ledger.listening:
            return call(tensor, role)  # type: ignore[no-any-return]
        with self._ledger.mark_emulation() as replaced:
            (operand,) = self._record_results(name, tensor, role, [call(tensor, role)], replaced)
        return operand  # type: ignore[no-any-return]

    def _record_results(
        self,
        name: str,
        source: Any,
        role: Role,
        results: Sequence[Any],
        replaced: list[int],
        hardware_tensor: _HardwareTensor | None = None,
    ) -> list[Any]:
        """Records the results of the call `name`, and returns them in separate tensors. `hardware_tensor` belongs to
        the operand that the call received.

        The emulation may return a view of a tensor where hardware has a copy. The returned tensor must not keep that
        other tensor alive.
        """
        recipe = self._find_recipe(name, source, role, hardware_tensor)
        new_holdings = [_Holding(self._ledger.meter.note, size) for size in recipe.sizes]
        # If the cast uses a stored scale, emulation and hardware have the same tensor for it.
        scale = getattr(self._inner, "scales", {}).get(role)
        if scale is not None and scale.last_pair is not None and new_holdings and recipe.parts[0][-1] >= 0:
            address = scale.last_pair.inverse.untyped_storage().data_ptr()
            new_holdings[recipe.parts[0][-1]] = _Holding(self._ledger.meter.note, 0, address)
        recorded = []
        for real, operand, parts in zip(results, recipe.operands, recipe.parts, strict=True):
            # hardware that transposes later needs the source tensor, which is not stored here
            if real is None or operand is None:
                self._ledger.followed &= real is operand
                recorded.append(real)
                continue
            detached = replace(real, data=real.data.detach())
            replaced.append(detached.data.untyped_storage().data_ptr())
            holdings = tuple(self._find_memory_owner(part, new_holdings, source, hardware_tensor) for part in parts)
            self._store_hardware_tensor(_HardwareTensor(operand, holdings), detached.data)
            recorded.append(detached)
        return recorded

    def _find_memory_owner(
        self, part: int, new: Sequence[_Holding], source: Any, hardware_tensor: _HardwareTensor | None
    ) -> _Holding:
        if part >= 0:
            return new[part]
        if part == _SOURCE_OWNER:
            return _Holding(self._ledger.meter.note, 0, source.untyped_storage().data_ptr())
        assert hardware_tensor is not None
        return hardware_tensor.holdings[_OPERAND_OWNERS.index(part)]

    def _store_hardware_tensor(self, hardware_tensor: _HardwareTensor, real: Tensor) -> None:
        """Stores what hardware would hold for the real tensor, until the real tensor is freed, for example by the end
        of a backward.
        """
        key = id(real)
        self._hardware_tensors[key] = (
            hardware_tensor,
            weakref.ref(real, lambda _: self._hardware_tensors.pop(key, None)),
        )

    def _find_recipe(self, name: str, source: Any, role: Role, hardware_tensor: _HardwareTensor | None) -> _Recipe:
        tensors = [source] if hardware_tensor is None else [source, *hardware_tensor.operand.tensors]
        layouts = [None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        key = name, role, *layouts
        if key not in self._recipes:
            self._recipes[key] = self._make_recipe(name, source, role, hardware_tensor)
        return self._recipes[key]

    def _make_recipe(self, name: str, source: Any, role: Role, hardware_tensor: _HardwareTensor | None) -> _Recipe:
        import torch

        # 1. Run the hardware's arithmetic on meta tensors, which have sizes but no memory.
        with torch.device("meta"), torch.no_grad():
            meta_source = None
            if source is not None:
                meta_source = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
            arguments = () if hardware_tensor is None else (hardware_tensor.operand,)
            result = getattr(self._hardware, name)(*arguments, meta_source, role)
        # 2. Find the memory of the inputs. All other memory is new.
        operands = result if isinstance(result, tuple) else (result,)
        inputs = [meta_source] if hardware_tensor is None else [meta_source, *hardware_tensor.operand.tensors]
        owner_by_storage = {
            tensor.untyped_storage()._cdata: owner
            for tensor, owner in zip(inputs, (_SOURCE_OWNER, *_OPERAND_OWNERS), strict=False)
            if tensor is not None
        }
        sizes: list[int] = []
        part_owners = []
        # 3. Count memory only once, even if several tensors are views of it.
        for operand in operands:
            owners = []
            for tensor in () if operand is None else operand.tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in owner_by_storage:
                    owner_by_storage[storage._cdata] = len(sizes)
                    sizes.append(storage.nbytes())
                owners.append(owner_by_storage[storage._cdata])
            part_owners.append(tuple(owners))
        return _Recipe(operands, tuple(part_owners), tuple(sizes))
