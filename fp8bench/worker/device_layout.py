"""Estimates the memory that hardware with low-precision formats would hold, while a step runs emulated.

For each emulated operand, the arithmetic of the hardware (its casts and products) runs on torch's meta device, which
has shapes but no memory. This shows which tensors the hardware would hold: codes, padded scales, and the transposed
copy that some products need. These tensors count as memory as long as the emulated operand exists. Memory that a single
cast or product allocates and frees is not counted, because kernels of a device are fused. The workspace of products is
not counted either, because no format determines it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8bench.model import Case, DeviceFacts
from fp8bench.model.consumed import DeviceNote, EmulationEnd, EmulationStart, Laid, Lifted
from fp8bench.protocols import Arithmetic, MemoryMeter, Operand, Role, ScaleBook, Setup, Workload
from fp8bench.protocols.arithmetic import DELEGATED_ATTRIBUTES
from fp8bench.registry import precisions

if TYPE_CHECKING:
    from torch import Tensor


class _HardwareMemory:
    _memory_key_counter = itertools.count()

    def __init__(self, note: Callable[[DeviceNote], None], size: int, address: int = 0) -> None:
        self._note = note
        self._key = next(self._memory_key_counter)
        note(Laid(self._key, size, address))

    def __del__(self) -> None:
        self._note(Lifted(self._key))


class _HardwareTensor(NamedTuple):
    """The codes and scales that hardware would hold for an emulated tensor, and the memory that they would take."""

    operand: Operand
    memories: tuple[_HardwareMemory, ...]


# The owner of a tensor's memory, as a number: an index into the newly allocated memory (0 or more), the source tensor
# (-1), or a tensor of the operand that the call received (-2, -3).
_SOURCE_MEMORY_OWNER = -1
_OPERAND_MEMORY_OWNERS = (-2, -3)


class _CallMemoryLayout(NamedTuple):
    """The tensors that hardware would have after a call such as `cast`: the returned operands (on the meta device), who
    owns the memory of each of their tensors, and the sizes in bytes of memory that the call allocates.
    """

    operands: tuple[Operand | None, ...]
    parts: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]


@dataclass
class DeviceLedger:
    """Records the memory that hardware would hold instead of an emulation.

    `has_known_operands` is true as long as every operand was made by a recorded cast. `has_seen_cast` is true once
    there was an emulated cast.
    """

    meter: MemoryMeter
    has_known_operands: bool = True
    has_seen_cast: bool = False

    @property
    def listening(self) -> bool:
        import torch

        return self.meter.listening and not torch.compiler.is_compiling()

    @contextmanager
    def mark_emulation(self) -> Iterator[list[int]]:
        """Notes that tensors which the `with` block allocates belong to an emulation, so that hardware would not have
        them.

        Yields a list, to which the `with` block appends the addresses of tensors that hardware would store in its own
        formats.
        """
        self.has_seen_cast = True
        replaced_addresses: list[int] = []
        self.meter.note(EmulationStart())
        try:
            yield replaced_addresses
        finally:
            self.meter.note(EmulationEnd(tuple(replaced_addresses)))

    def why(self) -> str:
        if not self.has_seen_cast:
            return "no cast was seen: a compiled step shows none"
        return "" if self.has_known_operands else "an operand was not made by a cast"


@dataclass(frozen=True)
class EmulatedHardware:
    """The hardware that a case emulates. `arithmetics` maps a layer's key in the precision map to the casts and
    products of that hardware; the key '' is for all other layers.

    `arithmetics` is empty if nothing is emulated. `why` is the reason if the hardware's memory is unknown, else ''.
    """

    arithmetics: Mapping[str, Arithmetic] = field(default_factory=dict)
    why: str = ""

    def wrap_setup(self, setup: Setup, ledger: DeviceLedger) -> Setup:
        layers = {key: self.wrap_arithmetic(key, arithmetic, ledger) for key, arithmetic in setup.layers.items()}
        return replace(setup, arithmetic=self.wrap_arithmetic("", setup.arithmetic, ledger), layers=layers)

    def wrap_arithmetic(self, key: str, inner: Arithmetic, ledger: DeviceLedger) -> Arithmetic:
        hardware_arithmetic = self.arithmetics.get(key)
        return inner if hardware_arithmetic is None else LayoutRecordingArithmetic(inner, hardware_arithmetic, ledger)

    @property
    def needs_separate_step(self) -> bool:
        return any(arithmetic.keeps_source for arithmetic in self.arithmetics.values())


NO_EMULATION = EmulatedHardware()
SEVERAL_RANKS_REASON = "the memory on a device is not derived for several ranks"


def find_hardware(case: Case, workload: Workload, facts: DeviceFacts) -> EmulatedHardware:
    if case.ranks > 1:
        return EmulatedHardware(why=SEVERAL_RANKS_REASON)
    emulated_hardware = find_hardware_for_modes((("", case.precision), *case.precision_map), facts)
    if emulated_hardware.arithmetics or emulated_hardware.why:
        return replace(emulated_hardware, why=emulated_hardware.why or workload.not_on_device)
    support = workload.support(dict(case.params), precisions.get(case.precision), facts)
    return EmulatedHardware(why=f"the suite itself emulates ({support.reason})" if support.is_emulated else "")


def find_hardware_for_modes(modes: Iterable[tuple[str, str]], facts: DeviceFacts) -> EmulatedHardware:
    arithmetics: dict[str, Arithmetic] = {}
    for key, name in modes:
        precision = precisions.get(name)
        if precision.support(facts).is_emulated:
            hardware_arithmetic = precision.laid_out(facts)
            if isinstance(hardware_arithmetic, str):
                return EmulatedHardware(why=hardware_arithmetic)
            arithmetics[key] = hardware_arithmetic
    return EmulatedHardware(arithmetics)


class LayoutRecordingArithmetic(Arithmetic):
    """An emulated arithmetic (casts and products) that records, for each cast, the memory that the result would take on
    the hardware.
    """

    def __init__(self, inner: Arithmetic, hardware: Arithmetic, ledger: DeviceLedger) -> None:
        vars(self).update({name: getattr(inner, name) for name in DELEGATED_ATTRIBUTES if name != "restore"})
        self._inner = inner
        self._hardware = hardware
        self._ledger = ledger
        self._call_layouts: dict[tuple[Any, ...], _CallMemoryLayout] = {}
        self._hardware_tensors: dict[int, tuple[_HardwareTensor, weakref.ref[Tensor]]] = {}

    def layer(self, name: str) -> Arithmetic:
        wrapped_arithmetic = self._inner.layer(name)
        return (
            self
            if wrapped_arithmetic is self._inner
            else LayoutRecordingArithmetic(wrapped_arithmetic, self._hardware.layer(name), self._ledger)
        )

    def scaled_by(self, book: ScaleBook, name: str) -> Arithmetic:
        wrapped_arithmetic = self._inner.scaled_by(book, name)  # emulation and hardware use the same stored scale
        return (
            self
            if wrapped_arithmetic is self._inner
            else LayoutRecordingArithmetic(wrapped_arithmetic, self._hardware, self._ledger)
        )

    def cast(self, tensor: Tensor, role: Role) -> Operand:
        return self._record_cast("cast", tensor, role)

    def cast_without_scale(self, tensor: Tensor, role: Role) -> Operand:
        return self._record_cast("cast_without_scale", tensor, role)

    def cast_transpose(self, source: Tensor, role: Role) -> Operand:
        return self._record_cast("cast_transpose", source, role)

    def turn(self, operand: Operand, source: Tensor, role: Role) -> Operand:
        if not self._ledger.listening:
            return self._inner.turn(operand, source, role)
        hardware_tensor, _ = self._hardware_tensors.get(id(operand.data), (None, None))
        with self._ledger.mark_emulation() as replaced_addresses:
            transposed_operand = self._inner.turn(operand, source, role)
            if hardware_tensor is None:
                self._ledger.has_known_operands = False
                return transposed_operand
            (recorded_result,) = self._record_results(
                "turn", source, role, [transposed_operand], replaced_addresses, hardware_tensor
            )
        return recorded_result  # type: ignore[no-any-return]

    def cast_both(self, tensor: Tensor, role: Role, amax: Tensor | None = None) -> tuple[Operand, Operand | None]:
        """Casts a tensor in both orientations.

        Hardware that makes both orientations in one cast does not hold the source tensor afterwards, so the emulation
        must not hold the source tensor either.
        """
        if not self._ledger.listening:
            return self._inner.cast_both(tensor, role, amax)
        with self._ledger.mark_emulation() as replaced_addresses:
            operand, transposed_operand = self._inner.cast_both(tensor, role, amax)
            if (
                transposed_operand is None
                and self._find_call_layout("cast_both", tensor, role, None).operands[1] is not None
            ):
                transposed_operand = self._inner.turn(operand, tensor, role)
            operand, transposed_operand = self._record_results(
                "cast_both", tensor, role, [operand, transposed_operand], replaced_addresses
            )
        return operand, transposed_operand

    def product(self, a: Operand, b: Operand, dtype: Any) -> Tensor:
        if not self._ledger.listening:
            return self._inner.product(a, b, dtype)
        with self._ledger.mark_emulation():
            return self._inner.product(a, b, dtype)

    def restore(self, operand: Operand, dtype: Any) -> Tensor:
        """Restores the values of an operand from its codes, and records them as new memory that hardware would
        allocate.

        Returns a view, so that its lifetime is separate from that of the operand.
        """
        if not self._ledger.listening:
            return self._inner.restore(operand, dtype)
        with self._ledger.mark_emulation() as replaced_addresses:
            values = self._inner.restore(operand, dtype).detach()
            replaced_addresses.append(values.untyped_storage().data_ptr())
            restored_memory = _HardwareMemory(self._ledger.meter.note, values.numel() * values.element_size())
        self._store_hardware_tensor(_HardwareTensor(Operand(values.to("meta")), (restored_memory,)), values)
        return values

    def _record_cast(self, name: str, tensor: Tensor, role: Role) -> Operand:
        call = getattr(self._inner, name)
        if not self._ledger.listening:
            return call(tensor, role)  # type: ignore[no-any-return]
        with self._ledger.mark_emulation() as replaced_addresses:
            (operand,) = self._record_results(name, tensor, role, [call(tensor, role)], replaced_addresses)
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
        """Records the memory that hardware would hold for the results of the method `name`. Returns the results as
        separate tensors, whose addresses it appends to `replaced`. `hardware_tensor` is the hardware's form of the
        operand that the method received.

        The emulation may return a view of a tensor where hardware makes a copy. The returned tensor must not keep the
        viewed tensor alive.
        """
        result_layout = self._find_call_layout(name, source, role, hardware_tensor)
        hardware_memories = [_HardwareMemory(self._ledger.meter.note, size) for size in result_layout.sizes]
        # If the cast uses a stored scale, hardware would use the same scale tensor as the emulation.
        scale = getattr(self._inner, "scales", {}).get(role)
        if scale is not None and scale.last_pair is not None and hardware_memories and result_layout.parts[0][-1] >= 0:
            address = scale.last_pair.inverse_scale.untyped_storage().data_ptr()
            hardware_memories[result_layout.parts[0][-1]] = _HardwareMemory(self._ledger.meter.note, 0, address)
        recorded_results = []
        for real, operand, parts in zip(results, result_layout.operands, result_layout.parts, strict=True):
            # hardware that transposes after this call keeps the source tensor, which is not recorded here
            if real is None or operand is None:
                self._ledger.has_known_operands &= real is operand
                recorded_results.append(real)
                continue
            detached_result = replace(real, data=real.data.detach())
            replaced.append(detached_result.data.untyped_storage().data_ptr())
            memories = tuple(
                self._find_memory_owner(part, hardware_memories, source, hardware_tensor) for part in parts
            )
            self._store_hardware_tensor(_HardwareTensor(operand, memories), detached_result.data)
            recorded_results.append(detached_result)
        return recorded_results

    def _find_memory_owner(
        self, part: int, new: Sequence[_HardwareMemory], source: Any, hardware_tensor: _HardwareTensor | None
    ) -> _HardwareMemory:
        if part >= 0:
            return new[part]
        if part == _SOURCE_MEMORY_OWNER:
            # The size is 0, because the source tensor already counts for this memory.
            return _HardwareMemory(self._ledger.meter.note, 0, source.untyped_storage().data_ptr())
        assert hardware_tensor is not None
        return hardware_tensor.memories[_OPERAND_MEMORY_OWNERS.index(part)]

    def _store_hardware_tensor(self, hardware_tensor: _HardwareTensor, real: Tensor) -> None:
        """Stores what hardware would hold in place of `real`, a tensor of the emulation, until that tensor is freed."""
        key = id(real)
        self._hardware_tensors[key] = (
            hardware_tensor,
            weakref.ref(real, lambda _: self._hardware_tensors.pop(key, None)),
        )

    def _find_call_layout(
        self, name: str, source: Any, role: Role, hardware_tensor: _HardwareTensor | None
    ) -> _CallMemoryLayout:
        tensors = [source] if hardware_tensor is None else [source, *hardware_tensor.operand.tensors]
        tensor_layouts = [
            None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors
        ]
        key = name, role, *tensor_layouts
        # Equal calls have equal layouts, so run the hardware's cast only once for each.
        if key not in self._call_layouts:
            self._call_layouts[key] = self._make_call_layout(name, source, role, hardware_tensor)
        return self._call_layouts[key]

    def _make_call_layout(
        self, name: str, source: Any, role: Role, hardware_tensor: _HardwareTensor | None
    ) -> _CallMemoryLayout:
        import torch

        # 1. Run the call on meta tensors in the hardware's arithmetic. Meta tensors have sizes but no memory.
        with torch.device("meta"), torch.no_grad():
            meta_source_tensor = None
            if source is not None:
                meta_source_tensor = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype)
            arguments = () if hardware_tensor is None else (hardware_tensor.operand,)
            result = getattr(self._hardware, name)(*arguments, meta_source_tensor, role)
        # 2. Find the memory of the call's inputs. All other memory of the result is new.
        operands = result if isinstance(result, tuple) else (result,)
        inputs = (
            [meta_source_tensor] if hardware_tensor is None else [meta_source_tensor, *hardware_tensor.operand.tensors]
        )
        owner_number_by_storage = {
            tensor.untyped_storage()._cdata: owner_number
            for tensor, owner_number in zip(inputs, (_SOURCE_MEMORY_OWNER, *_OPERAND_MEMORY_OWNERS), strict=False)
            if tensor is not None
        }
        sizes: list[int] = []
        memory_owners_by_operand = []
        # 3. Find the owner of each result's memory. Count new memory only once, even if several tensors are views of
        # it.
        for operand in operands:
            memory_owner_numbers = []
            for tensor in () if operand is None else operand.tensors:
                storage = tensor.untyped_storage()
                if storage._cdata not in owner_number_by_storage:
                    owner_number_by_storage[storage._cdata] = len(sizes)
                    sizes.append(storage.nbytes())
                memory_owner_numbers.append(owner_number_by_storage[storage._cdata])
            memory_owners_by_operand.append(tuple(memory_owner_numbers))
        return _CallMemoryLayout(operands, tuple(memory_owners_by_operand), tuple(sizes))
