"""The operators of one phase, called again by themselves on what they were given in the step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8bench.numerics.operands import tensors_within

# What these give is whatever lay there.
_UNWRITTEN = ("empty", "new_empty")


class CannotReplay(Exception):
    """A phase that cannot be done again by itself; the text says why."""


@dataclass(frozen=True, slots=True)
class Register:
    """Where a replay keeps a tensor that one of its calls has made, until the last one that is given it."""

    number: int


@dataclass(frozen=True, slots=True)
class BitsCheck:
    """What a call gave in the step, bit for bit, and the state of the random numbers that it drew from."""

    bits: tuple[int, ...]
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedCall:
    """One operator. Its arguments are as in the step, registers in place of what calls before it have made.

    `results` are the registers that tensors of its result go to, by their place; `frees` those that no later call is
    given. `written` are the tensors of its arguments that it writes. `check` is None where nobody compares.
    """

    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    filled: bool
    written: tuple[Any, ...] = ()
    results: tuple[tuple[int, int], ...] = ()
    frees: tuple[int, ...] = ()
    check: BitsCheck | None = None

    def into(self, registers: list[Tensor | None]) -> Any:
        if self.filled:
            args, kwargs = _filled(self.args, registers), {k: _filled(v, registers) for k, v in self.kwargs.items()}
            result = self.operator(*args, **kwargs)
        else:
            result = self.operator(*self.args, **self.kwargs)
        if self.results:
            made = (result,) if isinstance(result, Tensor) else tensors_within(result)
            for place, register in self.results:
                registers[register] = made[place]
        return result

    def free(self, registers: list[Tensor | None]) -> None:
        for register in self.frees:
            registers[register] = None


@dataclass(frozen=True)
class Rewritten:
    """Memory that the phase was given and writes, and what it held at first."""

    memory: Tensor
    before: Tensor
    floating: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class Replay:
    """A phase of a step. `bytes` are those of all that it keeps."""

    calls: tuple[ReplayedCall, ...]
    registers: int
    rewritten: tuple[Rewritten, ...]
    generators: tuple[torch.Generator, ...]
    bytes: int

    def run(self, times: int = 1) -> None:
        """Do it so often, back to back. What it writes goes on from time to time, as in steps."""
        with torch.no_grad():
            for _ in range(times):
                registers: list[Tensor | None] = [None] * self.registers
                for call in self.calls:
                    call.into(registers)
                    if call.frees:
                        call.free(registers)

    def restore(self) -> None:
        for rewritten in self.rewritten:
            rewritten.memory.copy_(rewritten.before)

    def differs(self) -> str:
        """Do it once from the start: the first operator that gives other bits than in the step; '' if none does."""
        self.restore()
        registers: list[Tensor | None] = [None] * self.registers
        with torch.no_grad(), self.random_kept():
            for number, call in enumerate(self.calls):
                for generator, state in call.check.generators if call.check is not None else ():
                    generator.set_state(state)
                result = call.into(registers)
                written = [_filled(one, registers) for one in call.written]
                if call.check is not None and call.check.bits != bits_of(call.operator, result, written):
                    return f"{call.operator}, operator {number + 1} of it, gives other numbers than in the step"
                call.free(registers)
        return ""

    def lost(self) -> str:
        """What it has written that is no longer finite, and was; '' if nothing."""
        for rewritten in self.rewritten:
            for dtype in rewritten.floating:
                if _finite(rewritten.before, dtype) and not _finite(rewritten.memory, dtype):
                    return "what it writes, over and over, is no longer finite"
        return ""

    @contextmanager
    def random_kept(self) -> Iterator[None]:
        """Random numbers go on after the body as if it had drawn none."""
        states = [(one, one.get_state()) for one in self.generators]
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def bits_of(operator: Any, result: object, written: Sequence[object]) -> tuple[int, ...]:
    """A number for the bits of each tensor that a call has made or written; views of others are neither."""
    schema = operator._schema
    made = not any(one.alias_info for one in schema.returns) and not schema.name.split("::")[1].startswith(_UNWRITTEN)
    return tuple(_bits(one) for one in (*(tensors_within(result) if made else ()), *tensors_within(list(written))))


def _bits(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    values: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(values)


def _finite(memory: Tensor, dtype: torch.dtype) -> bool:
    return bool(memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype).isfinite().all())


def _filled(part: Any, registers: list[Tensor | None]) -> Any:
    kind = type(part)
    if kind is Register:
        return registers[part.number]
    if kind is list or kind is tuple:
        return kind(_filled(one, registers) for one in part)
    return part
