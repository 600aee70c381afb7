"""Records the operators of one phase of a step, together with the memory that they read. The phase can then be
repeated alone.

Memory is identified by storage rather than by tensor, so that views stay views. The memory that the phase gets as
input is copied before an operator overwrites it. A replay allocates again what the phase's calls allocated.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fp8bench.numerics.operands import OperatorWatch, list_tensors
from fp8bench.tape.recorder import list_written_arguments

# Prefixes of the names of operators that allocate memory. The results of these operators have arbitrary contents.
_ALLOCATION_PREFIXES = ("empty", "new_empty")


class CannotReplay(Exception):
    """Raised if a phase cannot be repeated alone. The error's text is the reason."""


@dataclass(frozen=True, slots=True)
class ReplayRegister:
    """Stands for a tensor in a replayed call. The tensor is the result of an earlier call, stored under `number` until
    its last use.
    """

    number: int


@dataclass(frozen=True, slots=True)
class ResultBitsCheck:
    """Results that a repeated call must reproduce. `bits` has checksums of the tensors that the call returned or wrote
    in the step. `generators` has the states of its random generators before the call.
    """

    bits: tuple[int, ...]
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One operator call of a replay. Its arguments are those of the step, but a tensor that an earlier call made is
    replaced by its register (its number in the replay).

    `results` maps positions in the call's result to registers. `freed_registers` are those that no later call uses.
    `written_arguments` are the arguments that the call writes. `check` is None if results are not compared.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_register_arguments: bool
    written_arguments: tuple[Any, ...] = ()
    results: tuple[tuple[int, int], ...] = ()
    freed_registers: tuple[int, ...] = ()
    check: ResultBitsCheck | None = None

    def execute(self, registers: list[Tensor | None]) -> Any:
        args = self.args
        kwargs = self.kwargs
        if self.has_register_arguments:
            args = _insert_register_tensors(args, registers)
            kwargs = {name: _insert_register_tensors(value, registers) for name, value in kwargs.items()}
        result = self.operator(*args, **kwargs)
        if self.results:
            tensors = (result,) if isinstance(result, Tensor) else list_tensors(result)
            for position, register in self.results:
                registers[register] = tensors[position]
        return result


@dataclass(frozen=True)
class OverwrittenInput:
    """Memory that the phase reads as an input and writes to, with a copy of its contents before the phase."""

    memory: Tensor
    initial_contents: Tensor
    floating_dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class PhaseReplay:
    """A recorded phase of a step that can be repeated. `bytes` is the size of all memory that it keeps for this."""

    calls: tuple[ReplayedCall, ...]
    register_count: int
    overwritten_inputs: tuple[OverwrittenInput, ...]
    torch_generators: tuple[torch.Generator, ...]
    bytes: int

    def run(self, times: int = 1) -> None:
        """Repeats the phase `times` times without a pause. Each repetition begins with the values that the previous one
        has left in memory, as a step does.
        """
        with torch.no_grad():
            for _ in range(times):
                register_tensors: list[Tensor | None] = [None] * self.register_count
                for call in self.calls:
                    call.execute(register_tensors)
                    # Free results after their last use, so that a replay does not hold them all at once.
                    for register in call.freed_registers:
                        register_tensors[register] = None

    def restore(self) -> None:
        for overwritten_input in self.overwritten_inputs:
            overwritten_input.memory.copy_(overwritten_input.initial_contents)

    def find_replay_difference(self) -> str:
        """Runs the phase once from its initial state and compares all results with those of the step, bit for bit.
        Returns a sentence about the first operator that differs, or ''.
        """
        self.restore()
        register_tensors: list[Tensor | None] = [None] * self.register_count
        with torch.no_grad(), self.keep_random_states():
            for number, call in enumerate(self.calls):
                check = call.check
                if check is not None:
                    for generator, state in check.generators:
                        generator.set_state(state)
                result = call.execute(register_tensors)
                written_tensors = [
                    _insert_register_tensors(argument, register_tensors) for argument in call.written_arguments
                ]
                if check is not None and check.bits != compute_checksums(call.operator, result, written_tensors):
                    return f"{call.operator} (operator {number + 1} of the phase) gives other numbers than in the step"
                for register in call.freed_registers:
                    register_tensors[register] = None
        return ""

    def find_lost_values(self) -> str:
        """Returns a sentence if memory that the phase writes was finite before the repetitions, but has infinities or
        NaN now. Otherwise returns ''.
        """
        for overwritten_input in self.overwritten_inputs:
            for dtype in overwritten_input.floating_dtypes:
                if _is_memory_finite(overwritten_input.initial_contents, dtype) and not _is_memory_finite(
                    overwritten_input.memory, dtype
                ):
                    return "after many repetitions its written memory is no longer finite"
        return ""

    @contextmanager
    def keep_random_states(self) -> Iterator[None]:
        """Restores the states of all random generators after the `with` block."""
        generator_states = [(source, source.get_state()) for source in self.torch_generators]
        try:
            yield
        finally:
            for generator, state in generator_states:
                generator.set_state(state)


def compute_checksums(operator: Any, result: object, written: Sequence[object]) -> tuple[int, ...]:
    """Returns a checksum of each tensor that a call created or wrote. A view of existing memory gets no checksum."""
    schema = operator._schema
    # Views return existing memory. In-place and out= operators do too, but their results are among `written`.
    returns_existing_memory = any(value.alias_info for value in schema.returns)
    only_allocates = schema.name.split("::")[1].startswith(_ALLOCATION_PREFIXES)
    has_new_results = not returns_existing_memory and not only_allocates
    new_tensors = list_tensors(result) if has_new_results else []
    return tuple(map(_compute_checksum, [*new_tensors, *list_tensors(list(written))]))


def _compute_checksum(tensor: Tensor) -> int:
    """Returns the CRC-32 of the values of a tensor on the CPU."""
    if not tensor.numel():
        return 0
    # A tensor of one element counts as contiguous with any stride. Cloning gives it a normal stride, so that it can
    # be viewed as bytes.
    contiguous_tensor_copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    values: Any = contiguous_tensor_copy.view(-1).view(torch.uint8).numpy()
    return zlib.crc32(values)


def _is_memory_finite(memory: Tensor, dtype: torch.dtype) -> bool:
    # Leave out bytes at the end that do not make a whole element.
    return bool(memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype).isfinite().all())


def _insert_register_tensors(part: Any, registers: list[Tensor | None]) -> Any:
    kind = type(part)
    if kind is ReplayRegister:
        return registers[part.number]
    if kind is list or kind is tuple:
        return kind(_insert_register_tensors(inner, registers) for inner in part)
    return part


# Operators that replace a tensor's memory.
_REALLOCATING_OPERATORS = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})


class _TensorView(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class _RecordedMemoryBlock:
    """A storage that a phase has used. It is dropped when an operator outside of the phase writes to the storage.

    `contents_before_phase` is None if a call of the phase allocated the storage. Otherwise it has the contents that the
    phase got as input: at first it is the storage itself. Before an operator overwrites the storage, `copy_input`
    replaces it by a copy and sets `has_copied_input`. `weak_reference` keeps the storage's address from being used
    again. `registers_by_view` maps each tensor that views the storage to its number in the replay (register). It is
    used only for storages that the phase allocated.
    """

    weak_reference: StorageWeakRef
    device: torch.device
    contents_before_phase: torch.UntypedStorage | None = None
    has_copied_input: bool = False
    is_overwritten: bool = False
    floating_dtypes: set[torch.dtype] = field(default_factory=set)
    registers_by_view: dict[_TensorView, int] = field(default_factory=dict)

    def copy_input(self) -> int:
        """Copies the contents if they are an input of the phase and not copied yet. Returns the bytes of the copy."""
        if self.contents_before_phase is None or self.has_copied_input:
            return 0
        self.contents_before_phase = self.contents_before_phase.clone()  # type: ignore[no-untyped-call]
        self.has_copied_input = True
        return self.contents_before_phase.nbytes()


@dataclass(frozen=True, slots=True)
class _InputTensor:
    memory: _RecordedMemoryBlock
    spec: _TensorView


class Recording(OperatorWatch):  # type: ignore[no-untyped-call]
    """Records the operators of the phase `phase` in its `with` block. The last item of `stack` is the phase in which
    the step is at the moment.

    It keeps at most `max_bytes` of memory. With `check` it also records checksums of each call's results, which must be
    on the CPU.
    """

    def __init__(self, phase: str, stack: Sequence[str], max_bytes: int, check: bool) -> None:
        super().__init__()
        self._phase = phase
        self._stack = stack
        self._max_bytes = max_bytes
        self._check = check
        self._memories: dict[int, _RecordedMemoryBlock] = {}
        self._input_memories: dict[_RecordedMemoryBlock, None] = {}
        self._calls: list[ReplayedCall] = []
        self._register_count = 0
        self._bytes = 0
        self._generators: dict[torch.Generator, None] = {}
        self._refusal_reason = ""

    def replay(self) -> PhaseReplay:
        if not self._refusal_reason and not self._calls:
            self._refusal_reason = "it calls no operator of torch"
        if self._refusal_reason:
            raise CannotReplay(self._refusal_reason)
        overwritten_inputs = tuple(self._copy_overwritten_inputs())
        resolved_calls = [_resolve_call_inputs(call) for call in self._calls]
        calls = tuple(_mark_freed_registers(resolved_calls))
        return PhaseReplay(calls, self._register_count, overwritten_inputs, tuple(self._generators), self._bytes)

    def watch_operator(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._refusal_reason:
            return func(*args, **named)
        inputs = list_tensors((args, named))
        if self._stack[-1] != self._phase:
            # Another phase writes this memory. Drop its record, because a later read is a new input. If the phase has
            # read it before, copy its contents, because a replay needs them.
            for tensor in _list_written_tensors(func, args, named):
                if tensor.layout is torch.strided:
                    memory = self._memories.pop(tensor.untyped_storage()._cdata, None)
                    if memory is not None:
                        self._count_bytes(memory.copy_input())
            return func(*args, **named)
        self._refusal_reason = _explain_refusal(func, inputs)
        if self._refusal_reason:
            self._discard_records()
            return func(*args, **named)
        return self._record_call(func, args, named)

    def _record_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # 1. Record where each argument comes from: the phase's inputs, or the result of an earlier call.
        written_tensors = _list_written_tensors(func, args, kwargs)
        recorded_args = tuple(map(self._record_argument_part, args))
        recorded_kwargs = {name: self._record_argument_part(value) for name, value in kwargs.items()}
        # 2. Copy inputs before the call overwrites them, because a replay needs their initial contents.
        for tensor in written_tensors:
            recorded_memory = self._find_recorded_memory(tensor)
            self._count_bytes(recorded_memory.copy_input())
            recorded_memory.is_overwritten = True
        # 3. Run the call. Store the states of its random generators before, so that a check can draw the same numbers.
        call_random_generators = self._find_random_generators(func, kwargs)
        generator_states = (
            tuple((generator, generator.get_state()) for generator in call_random_generators) if self._check else ()
        )
        result = func(*args, **kwargs)
        result_bits_check = (
            ResultBitsCheck(compute_checksums(func, result, written_tensors), generator_states) if self._check else None
        )
        # 4. Number the new tensors of the result, so that later calls can refer to them.
        result_registers = tuple(self._number_result_tensors(list_tensors(result)))
        written_tensor_records = tuple(map(self._record_argument_part, written_tensors))
        self._calls.append(
            ReplayedCall(
                func,
                recorded_args,
                recorded_kwargs,
                has_register_arguments=False,  # `_resolve_call_inputs` sets this later
                written_arguments=written_tensor_records,
                results=result_registers,
                check=result_bits_check,
            )
        )
        return result

    def _find_random_generators(self, func: Any, kwargs: Mapping[str, Any]) -> list[torch.Generator]:
        """Returns the random generators that an operator draws from. Also adds them to the generators whose states a
        replay restores.
        """
        random_generators = [kwarg for kwarg in kwargs.values() if isinstance(kwarg, torch.Generator)]
        # Without an explicit generator, these operators draw from torch's default generators.
        if not random_generators and torch.Tag.nondeterministic_seeded in func.tags:
            random_generators = [torch.default_generator]
            if torch.cuda.is_available():
                random_generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._generators.update(dict.fromkeys(random_generators))
        return random_generators

    def _record_argument_part(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return self._record_tensor(part)
        if isinstance(part, list | tuple) and list_tensors(part):
            return [self._record_argument_part(inner) for inner in part]
        return part

    def _record_tensor(self, tensor: Tensor) -> _InputTensor | ReplayRegister:
        recorded_memory = self._find_recorded_memory(tensor)
        view_spec = _make_tensor_view_spec(tensor)
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            recorded_memory.floating_dtypes.add(tensor.dtype)
        if recorded_memory.contents_before_phase is not None:
            return _InputTensor(recorded_memory, view_spec)
        if view_spec not in recorded_memory.registers_by_view:
            # Autograd makes some views without calling an operator. Add a call that makes the view from the first
            # tensor of the same storage, which is the result of an earlier call.
            source = ReplayRegister(next(iter(recorded_memory.registers_by_view.values())))
            recorded_memory.registers_by_view[view_spec] = self._register_count
            self._calls.append(
                ReplayedCall(
                    lambda base: _view_storage(view_spec, base.untyped_storage(), base.device),
                    args=(source,),
                    kwargs={},
                    has_register_arguments=True,
                    results=((0, self._register_count),),
                )
            )
            self._register_count += 1
        return ReplayRegister(recorded_memory.registers_by_view[view_spec])

    def _number_result_tensors(self, results: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        """Numbers the tensors of a call's result that the phase did not get as input. Yields each tensor's position in
        the result, and its number in the replay (register).
        """
        for position, tensor in enumerate(results):
            storage = tensor.untyped_storage()
            spec = _make_tensor_view_spec(tensor)
            recorded_memory = self._memories.setdefault(
                storage._cdata, _RecordedMemoryBlock(_make_weak_reference(storage), tensor.device)
            )
            if recorded_memory.contents_before_phase is None and spec not in recorded_memory.registers_by_view:
                recorded_memory.registers_by_view[spec] = self._register_count
                yield position, self._register_count
                self._register_count += 1

    def _find_recorded_memory(self, tensor: Tensor) -> _RecordedMemoryBlock:
        storage = tensor.untyped_storage()
        recorded_memory = self._memories.get(storage._cdata)
        if recorded_memory is None:
            recorded_memory = _RecordedMemoryBlock(_make_weak_reference(storage), tensor.device, storage)
            self._memories[storage._cdata] = recorded_memory
            self._input_memories[recorded_memory] = None
            self._count_bytes(storage.nbytes())
        return recorded_memory

    def _count_bytes(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._max_bytes:
            self._refusal_reason = f"its inputs take more than the {self._max_bytes} bytes that may be kept"
            # The call that is being recorded may add records again. `replay` raises CannotReplay before it uses them.
            self._discard_records()

    def _discard_records(self) -> None:
        self._calls = []
        self._memories = {}
        self._input_memories = {}

    def _copy_overwritten_inputs(self) -> Iterator[OverwrittenInput]:
        for memory in self._input_memories:
            if memory.is_overwritten:
                assert memory.contents_before_phase is not None
                memory_byte_tensor = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(
                    memory.contents_before_phase
                )
                # The replay overwrites the copy that `copy_input` made, so a second copy keeps the initial contents.
                self._bytes += memory.contents_before_phase.nbytes()
                yield OverwrittenInput(memory_byte_tensor, memory_byte_tensor.clone(), tuple(memory.floating_dtypes))


def _explain_refusal(func: Any, inputs: Sequence[Tensor]) -> str:
    """Returns why an operator cannot be called again alone, or ''."""
    if not isinstance(func, torch._ops.OpOverload):
        return f"{func} is not a single operator"
    if func.overloadpacket.__name__ in _REALLOCATING_OPERATORS:
        return f"{func} gives a tensor different memory"
    for tensor in inputs:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"{func} takes a {type(tensor).__name__}, which is a tensor subclass"
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return f"{func} takes a sparse, quantized or lazily conjugated tensor, which has no plain memory"
    return ""


def _list_written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    written_values = [
        args[position] if position < len(args) else kwargs.get(argument.name)
        for position, argument in list_written_arguments(func)
    ]
    return list_tensors(written_values)


def _make_tensor_view_spec(tensor: Tensor) -> _TensorView:
    return _TensorView(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _make_weak_reference(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _view_storage(spec: _TensorView, storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=spec.dtype, device=device).set_(storage, spec.offset, spec.size, spec.stride)


def _resolve_call_inputs(call: ReplayedCall) -> ReplayedCall:
    """Returns the call with tensors in place of the references to input memory in its arguments."""
    args = tuple(map(_resolve_argument_part, call.args))
    kwargs = {name: _resolve_argument_part(kwarg) for name, kwarg in call.kwargs.items()}
    has_register_arguments = bool(_list_register_numbers((args, list(kwargs.values()))))
    return replace(
        call,
        args=args,
        kwargs=kwargs,
        has_register_arguments=has_register_arguments,
        written_arguments=tuple(map(_resolve_argument_part, call.written_arguments)),
    )


def _resolve_argument_part(part: Any) -> Any:
    if isinstance(part, _InputTensor):
        assert part.memory.contents_before_phase is not None
        return _view_storage(part.spec, part.memory.contents_before_phase, part.memory.device)
    return [_resolve_argument_part(inner) for inner in part] if type(part) is list else part


def _list_register_numbers(part: Any) -> list[int]:
    if isinstance(part, ReplayRegister):
        return [part.number]
    if isinstance(part, list | tuple):
        return list(chain.from_iterable(map(_list_register_numbers, part)))
    return []


def _mark_freed_registers(calls: Sequence[ReplayedCall]) -> Iterator[ReplayedCall]:
    last_call_index_by_register: dict[int, int] = {}
    for call_number, call in enumerate(calls):
        used_registers = [
            *_list_register_numbers((call.args, list(call.kwargs.values()))),
            *(register for _, register in call.results),
        ]
        last_call_index_by_register.update(dict.fromkeys(used_registers, call_number))
    registers_by_last_call = defaultdict(list)
    for register, call_number in last_call_index_by_register.items():
        registers_by_last_call[call_number].append(register)
    for call_number, call in enumerate(calls):
        yield replace(call, freed_registers=tuple(registers_by_last_call[call_number]))
