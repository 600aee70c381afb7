"""Records one phase of a step and repeats it alone: its operators, and their input memory.

Memory is identified by its storage, not by tensors, so that views stay views. The initial input memory is kept: it is
copied before something writes to it. Memory made by calls of the phase is made again by a replay.
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

from fp8bench.numerics.operands import OperatorWatch, tensors_within
from fp8bench.tape.recorder import written_by

# Their results are memory with arbitrary contents.
_UNWRITTEN = ("empty", "new_empty")


class CannotReplay(Exception):
    """A phase cannot be repeated alone; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Register:
    """Where a replay keeps a tensor that one of its calls made, until the last call that needs it."""

    number: int


@dataclass(frozen=True, slots=True)
class BitsCheck:
    """The bits that a call returned or wrote in the step, and the state of the generators that it drew from."""

    bits: tuple[int, ...]
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One operator. Its arguments are as in the step, with registers in place of what earlier calls made. `results`
    pairs places in its result with registers; `frees` lists registers that no later call needs; `written` are the
    arguments that it writes. `check` is None if bits are not compared."""

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    filled: bool
    written: tuple[Any, ...] = ()
    results: tuple[tuple[int, int], ...] = ()
    frees: tuple[int, ...] = ()
    check: BitsCheck | None = None

    def into(self, registers: list[Tensor | None]) -> Any:
        args = self.args
        kwargs = self.kwargs
        if self.filled:
            args = _fill(args, registers)
            kwargs = {name: _fill(value, registers) for name, value in kwargs.items()}
        result = self.operator(*args, **kwargs)
        if self.results:
            tensors = (result,) if isinstance(result, Tensor) else tensors_within(result)
            for place, register in self.results:
                registers[register] = tensors[place]
        return result


@dataclass(frozen=True)
class Rewritten:
    """Input memory that the phase writes, and its initial contents."""

    memory: Tensor
    before: Tensor
    floating: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Replay:
    """A phase of a step that can be repeated. `bytes` is the size of everything that it keeps."""

    calls: tuple[ReplayedCall, ...]
    registers: int
    rewritten: tuple[Rewritten, ...]
    generators: tuple[torch.Generator, ...]
    bytes: int

    def run(self, times: int = 1) -> None:
        """Repeats the phase back to back. Written memory carries over, as between steps."""
        with torch.no_grad():
            for _ in range(times):
                registers: list[Tensor | None] = [None] * self.registers
                for call in self.calls:
                    call.into(registers)
                    for register in call.frees:
                        registers[register] = None

    def restore(self) -> None:
        for rewritten in self.rewritten:
            rewritten.memory.copy_(rewritten.before)

    def differs(self) -> str:
        """Runs the phase once from the start; names the first operator whose bits differ from the step's, or returns
        ''."""
        self.restore()
        registers: list[Tensor | None] = [None] * self.registers
        with torch.no_grad(), self.random_kept():
            for number, call in enumerate(self.calls):
                for generator, state in call.check.generators if call.check is not None else ():
                    generator.set_state(state)
                result = call.into(registers)
                written = [_fill(argument, registers) for argument in call.written]
                if call.check is not None and call.check.bits != bits_of(call.operator, result, written):
                    return f"{call.operator}, operator {number + 1} of it, gives other numbers than in the step"
                for register in call.frees:
                    registers[register] = None
        return ""

    def lost(self) -> str:
        """Returns a sentence if something that the phase writes is no longer finite, but was; else ''."""
        for rewritten in self.rewritten:
            for dtype in rewritten.floating:
                if _finite(rewritten.before, dtype) and not _finite(rewritten.memory, dtype):
                    return "what it writes, over and over, is no longer finite"
        return ""

    @contextmanager
    def random_kept(self) -> Iterator[None]:
        """Restores the random generators after the body."""
        states = [(source, source.get_state()) for source in self.generators]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def bits_of(operator: Any, result: object, written: Sequence[object]) -> tuple[int, ...]:
    """Returns a checksum for each tensor that a call has made or written; views of others are neither."""
    schema = operator._schema
    is_view = any(value.alias_info for value in schema.returns)
    makes_tensors = not is_view and not schema.name.split("::")[1].startswith(_UNWRITTEN)
    return tuple(map(_bits, (*(tensors_within(result) if makes_tensors else ()), *tensors_within(list(written)))))


def _bits(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    # A tensor of one element counts as contiguous whatever its strides are, and cannot be viewed as bytes then.
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    values: Any = dense.view(-1).view(torch.uint8).numpy()
    return zlib.crc32(values)


def _finite(memory: Tensor, dtype: torch.dtype) -> bool:
    return bool(memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype).isfinite().all())


def _fill(part: Any, registers: list[Tensor | None]) -> Any:
    kind = type(part)
    if kind is Register:
        return registers[part.number]
    if kind is list or kind is tuple:
        return kind(_fill(inner, registers) for inner in part)
    return part


# These operators give a tensor different memory.
_MOVING = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})


class _Spec(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class _Memory:
    """Memory that a phase has met, as long as nobody outside of it writes there.

    `kept` is what the phase was given: the step's own memory until somebody writes to it, then a copy (`copied`). It is
    None if a call of the phase made it. The weak reference keeps its address from being used again. `registers` hold
    tensors in it that calls have made.
    """

    weak: StorageWeakRef
    device: torch.device
    kept: torch.UntypedStorage | None = None
    copied: bool = False
    rewritten: bool = False
    floating: set[torch.dtype] = field(default_factory=set)
    registers: dict[_Spec, int] = field(default_factory=dict)

    def copy(self) -> int:
        if self.kept is None or self.copied:
            return 0
        self.kept = self.kept.clone()  # type: ignore[no-untyped-call]
        self.copied = True
        return self.kept.nbytes()


@dataclass(frozen=True, slots=True)
class _Given:
    memory: _Memory
    spec: _Spec


class Recording(OperatorWatch):  # type: ignore[no-untyped-call]
    """Records the operators of `phase` in its body; the last item of `stack` is the phase that the step is in. It may
    keep `most_bytes`. With `check` the bits of each call's results are noted."""

    def __init__(self, phase: str, stack: Sequence[str], most_bytes: int, check: bool) -> None:
        super().__init__()
        self._phase = phase
        self._stack = stack
        self._most = most_bytes
        self._check = check
        self._memories: dict[int, _Memory] = {}
        self._given: dict[_Memory, None] = {}
        self._calls: list[ReplayedCall] = []
        self._registers = 0
        self._bytes = 0
        self._generators: dict[torch.Generator, None] = {}
        self._why = ""

    def replay(self) -> Replay:
        if not self._why and not self._calls:
            self._why = "it calls no operator of torch"
        if self._why:
            raise CannotReplay(self._why)
        rewritten = tuple(self._rewritten())
        calls = [_resolve(call) for call in self._calls]
        return Replay(tuple(_freeing(calls)), self._registers, rewritten, tuple(self._generators), self._bytes)

    def see(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self._why:
            return func(*args, **named)
        inputs = tensors_within((args, named))
        if self._stack[-1] != self._phase:
            for tensor in _written_tensors(func, args, named):
                if tensor.layout is torch.strided:  # memory that another phase writes is other memory from then on
                    memory = self._memories.pop(tensor.untyped_storage()._cdata, None)
                    self._count(0 if memory is None else memory.copy())
            return func(*args, **named)
        self._why = _refusal(func, inputs)
        if self._why:
            self._forget()
            return func(*args, **named)
        return self._record(func, args, named)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = _written_tensors(func, args, kwargs)
        noted = tuple(map(self._note_part, args))
        noted_named = {name: self._note_part(value) for name, value in kwargs.items()}
        for tensor in written:
            memory = self._memory_of(tensor)
            self._count(memory.copy())
            memory.rewritten = True
        drawing = self._drawing(func, kwargs)
        states = tuple((generator, generator.get_state()) for generator in drawing) if self._check else ()
        result = func(*args, **kwargs)
        check = BitsCheck(bits_of(func, result, written), states) if self._check else None
        places = tuple(self._assign_registers(tensors_within(result)))
        noted_written = tuple(map(self._note_part, written))
        self._calls.append(ReplayedCall(func, noted, noted_named, False, noted_written, places, (), check))
        return result

    def _drawing(self, func: Any, kwargs: Mapping[str, Any]) -> list[torch.Generator]:
        """Returns the generators an operator draws from, as far as the host has them; replays restore them all."""
        generators = [kwarg for kwarg in kwargs.values() if isinstance(kwarg, torch.Generator)]
        if not generators and torch.Tag.nondeterministic_seeded in func.tags:
            generators = [torch.default_generator]
            if torch.cuda.is_available():
                generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._generators.update(dict.fromkeys(generators))
        return generators

    def _note_part(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return self._tensor(part)
        if isinstance(part, list | tuple) and tensors_within(part):
            return [self._note_part(inner) for inner in part]
        return part

    def _tensor(self, tensor: Tensor) -> _Given | Register:
        memory = self._memory_of(tensor)
        spec = _spec_of(tensor)
        if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
            memory.floating.add(tensor.dtype)
        if memory.kept is not None:
            return _Given(memory, spec)
        if spec not in memory.registers:  # a view that autograd has made without an operator
            source = Register(next(iter(memory.registers.values())))
            memory.registers[spec] = self._registers
            results = ((0, self._registers),)
            self._calls.append(
                ReplayedCall(lambda of: _lying(spec, of.untyped_storage(), of.device), (source,), {}, True, (), results)
            )
            self._registers += 1
        return Register(memory.registers[spec])

    def _assign_registers(self, results: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        """Assigns registers to tensors of a result outside of the memory that the phase was given."""
        for place, tensor in enumerate(results):
            storage = tensor.untyped_storage()
            spec = _spec_of(tensor)
            memory = self._memories.setdefault(storage._cdata, _Memory(_weakly(storage), tensor.device))
            if memory.kept is None and spec not in memory.registers:
                memory.registers[spec] = self._registers
                yield place, self._registers
                self._registers += 1

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = _Memory(_weakly(storage), tensor.device, storage)
            self._memories[storage._cdata] = memory
            self._given[memory] = None
            self._count(storage.nbytes())
        return memory

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._most:
            self._why = f"it needs more than the {self._most} bytes that may be kept for it"
            self._forget()

    def _forget(self) -> None:
        self._calls = []
        self._memories = {}
        self._given = {}

    def _rewritten(self) -> Iterator[Rewritten]:
        for memory in self._given:
            if memory.rewritten and memory.kept is not None:
                all_bytes = torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory.kept)
                self._bytes += memory.kept.nbytes()
                yield Rewritten(all_bytes, all_bytes.clone(), tuple(memory.floating))


def _refusal(func: Any, inputs: Sequence[Tensor]) -> str:
    """Returns why an operator cannot be called again by itself, or ''."""
    if not isinstance(func, torch._ops.OpOverload):
        return f"{func} is more than one operator"
    if func.overloadpacket.__name__ in _MOVING:
        return f"{func} gives a tensor other memory"
    for tensor in inputs:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"{func} is given a {type(tensor).__name__}, a kind of tensor of its own"
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return f"{func} is given a tensor that is no plain part of a memory"
    return ""


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    changed = written_by(func)
    return tensors_within(
        [args[place] if place < len(args) else kwargs.get(argument.name) for place, argument in changed]
    )


def _spec_of(tensor: Tensor) -> _Spec:
    return _Spec(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _weakly(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _lying(spec: _Spec, storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=spec.dtype, device=device).set_(storage, spec.offset, spec.size, spec.stride)


def _resolve(call: ReplayedCall) -> ReplayedCall:
    """Returns the call with the kept memory in place of what the phase was given."""
    args = tuple(map(_with_given, call.args))
    kwargs = {name: _with_given(kwarg) for name, kwarg in call.kwargs.items()}
    filled = bool(_registers_in((args, list(kwargs.values()))))
    return replace(call, args=args, kwargs=kwargs, filled=filled, written=tuple(map(_with_given, call.written)))


def _with_given(part: Any) -> Any:
    if isinstance(part, _Given):
        assert part.memory.kept is not None
        return _lying(part.spec, part.memory.kept, part.memory.device)
    return [_with_given(inner) for inner in part] if type(part) is list else part


def _registers_in(part: Any) -> list[int]:
    if isinstance(part, Register):
        return [part.number]
    if isinstance(part, list | tuple):
        return list(chain.from_iterable(map(_registers_in, part)))
    return []


def _freeing(calls: Sequence[ReplayedCall]) -> Iterator[ReplayedCall]:
    last: dict[int, int] = {}
    for number, call in enumerate(calls):
        used = [*_registers_in((call.args, list(call.kwargs.values()))), *(register for _, register in call.results)]
        last.update(dict.fromkeys(used, number))
    ends = defaultdict(list)
    for register, number in last.items():
        ends[number].append(register)
    for number, call in enumerate(calls):
        yield replace(call, frees=tuple(ends[number]))
