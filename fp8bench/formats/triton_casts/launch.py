"""Runs plans: through Triton the first time, then by the compiled kernels themselves. Imports triton.

Triton looks at every argument in every call, which takes longer than a small cast. The result depends on shapes,
strides and dtypes alone, if pointers are aligned: a `Repeat` stores it, and a call passes addresses and a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8bench.formats.compiling import Compiled, Definition
from fp8bench.formats.triton_casts import give_up, kernels
from fp8bench.formats.triton_casts.plans import Argument, Counter, Plan, Pointer, Zeros, plan_launches

ALIGNMENT = 16
"""Bytes of the instructions that read and write whole vectors."""
_WIDE = ("x", "codes", "turned")
"""Arguments that are read and written by such instructions."""
_SOME_PROCESSORS = 4
# A counter for each device and stream.
_COUNTERS: dict[tuple[int | None, int], Tensor] = {}


@dataclass(frozen=True)
class Specialised:
    """The part of a plan that Triton compiles: a function, its arguments' types, and its constants."""

    function: str
    warps: int
    types: tuple[tuple[str, object], ...]
    constants: tuple[tuple[str, float | bool | None], ...]

    @classmethod
    def of(cls, plan: Plan, tensors: Sequence[Tensor]) -> Specialised:
        types = tuple((name, _type_of(argument, tensors)) for name, argument in plan.arguments.items())
        return cls(plan.function, plan.warps, types, tuple(plan.constants.items()))

    def compile(self) -> Any:
        """Compiles it for the current device; Triton keeps the result."""
        function = getattr(kernels, self.function)
        values = {**dict(self.types), **dict(self.constants)}
        # Only arguments by position may be types.
        return function.warmup(*(values[name] for name in function.arg_names), num_warps=self.warps, grid=(1,))


def _type_of(argument: Argument, tensors: Sequence[Tensor]) -> object:
    """A dtype for a pointer; 1 for a size of 1; for other sizes the least number that is divisible by 16, or is not."""
    match argument:
        case Pointer(index=index):
            return tensors[index].dtype
        case Counter() | Zeros():
            return torch.int32
        case int():
            return argument if argument == 1 else 16 if argument % 16 == 0 else 17
    return None


@dataclass(frozen=True)
class ByHand(Definition):
    """A definition, and the Triton kernels for arguments like those of a call."""

    definition: Definition
    launches: tuple[Specialised, ...]

    @property
    def device(self) -> str:  # type: ignore[override]
        return self.definition.device

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        return self.definition(*tensors)

    def build(self) -> Compiled:
        """Raises what Triton raises; from then on torch compiles the casts of this process."""
        try:
            with _use_device(torch.device(self.device)):
                for launch in self.launches:
                    launch.compile()
        except Exception as error:
            give_up(f"Triton failed: {type(error).__name__}: {error}")
            raise
        return Compiled(self._run)

    def _run(self, *tensors: Tensor) -> Repeat:
        plans = plan_by_hand(self.definition, tensors)
        return Repeat(plans, run_plans(plans, tensors), tensors[0].device)


def by_hand(definition: Definition, tensors: Sequence[Tensor]) -> ByHand | None:
    """None where no Triton kernel is written for a cast, or its tensors are not aligned."""
    plans = plan_by_hand(definition, tensors)
    if not plans or any(tensors[index].data_ptr() % ALIGNMENT for index in _wide(plans)):
        return None
    return ByHand(definition, tuple(Specialised.of(plan, tensors) for plan in plans))


def plan_by_hand(definition: Definition, tensors: Sequence[Tensor]) -> list[Plan]:
    device = tensors[0].device
    on_gpu = device.type == "cuda"
    processors = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else _SOME_PROCESSORS
    return plan_launches(definition, tensors, processors)


def run_plans(plans: Sequence[Plan], tensors: Sequence[Tensor]) -> list[Any]:
    """Launches through Triton, and returns its compiled kernels."""
    device = tensors[0].device
    compiled = []
    with _use_device(device):
        counter, zeros = _allocate(_scratch_of(plans), device, _stream(device))
        # The first run goes through Triton's own launcher, which compiles; later ones repeat its result.
        for plan in plans:
            values: dict[str, object] = {**plan.constants}
            # Numbers of tensors become the tensors of this call.
            for name, argument in plan.arguments.items():
                values[name] = _resolve(argument, tensors, counter, zeros)
            compiled.append(getattr(kernels, plan.function)[(plan.programs,)](**values, num_warps=plan.warps))
    return compiled


class Repeat:
    """Launches a cast again for other tensors of the same shapes, strides and dtypes."""

    def __init__(self, plans: Sequence[Plan], compiled: Sequence[Any], device: torch.device) -> None:
        self._device, self._wide = device, tuple(_wide(plans))
        self._scratch = _scratch_of(plans)
        # Operands are the tensors' addresses, then the counter, then the zeros.
        self._launches = []
        for plan, kernel in zip(plans, compiled, strict=True):
            # Constants take their places among the arguments, because the compiled function has both.
            names = getattr(kernels, plan.function).arg_names
            values = [plan.arguments[name] if name in plan.arguments else plan.constants[name] for name in names]
            operands = []
            for place, value in enumerate(values):
                if isinstance(value, Pointer | Counter | Zeros):
                    number = value.index if isinstance(value, Pointer) else -2 if isinstance(value, Counter) else -1
                    operands.append((place, number))
            self._launches.append(
                (kernel.run, plan.programs, kernel.function, kernel.packed_metadata, values, operands)
            )

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Launches for tensors at these addresses; False, and nothing, where one is not aligned."""
        for index in self._wide:
            if addresses[index] % ALIGNMENT:
                return False
        device = self._device
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
            with _use_device(device):
                return self(addresses)
        stream = _stream(device)
        operands = (*addresses, *_allocate(self._scratch, device, stream))
        # Triton's own way to here reads its settings and makes two functions a launch. Without hooks it does no more.
        for run, programs, function, metadata, values, places in self._launches:
            # A copy, because backward passes cast in other threads.
            arguments: list[object] = [*values]
            for place, number in places:
                arguments[place] = operands[number]
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)
        return True


def _wide(plans: Sequence[Plan]) -> set[int]:
    """Numbers the tensors that are read and written by whole vectors."""
    pointers = [plan.arguments.get(name) for plan in plans for name in _WIDE]
    return {argument.index for argument in pointers if isinstance(argument, Pointer)}


def _resolve(argument: Argument, tensors: Sequence[Tensor], counter: Tensor | None, zeros: Tensor | None) -> object:
    match argument:
        case Pointer(index=index):
            return tensors[index]
        case Counter():
            return counter
        case Zeros():
            return zeros
    return argument


def _scratch_of(plans: Sequence[Plan]) -> tuple[bool, int]:
    """Whether launches count their programs, and how many zeros they share."""
    arguments = [argument for plan in plans for argument in plan.arguments.values()]
    return Counter() in arguments, next((argument.count for argument in arguments if isinstance(argument, Zeros)), 0)


def _allocate(scratch: tuple[bool, int], device: torch.device, stream: int) -> tuple[Tensor | None, Tensor | None]:
    counts, zeros = scratch
    memory = torch.zeros(zeros, dtype=torch.int32, device=device) if zeros else None
    return _counter(device, stream) if counts else None, memory


def _counter(device: torch.device, stream: int) -> Tensor:
    """Launches of a stream follow each other, and share a counter. A captured graph may run at the same time: it gets a
    counter for each launch, which it sets to zero itself."""
    if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    counter = _COUNTERS.get((device.index, stream))
    if counter is None:
        counter = _COUNTERS[device.index, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return counter


def _stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def _use_device(device: torch.device) -> Any:
    """Makes a device the current one: Triton launches there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
