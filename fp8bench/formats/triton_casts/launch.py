"""Launches planned kernels, the first time through Triton's launcher, and later directly by the compiled kernels.
Imports triton.

Triton inspects every argument of every call, which takes longer than a small cast. If pointers are aligned, the result
of this inspection depends only on shapes, strides and dtypes. A `Repeat` stores the result, so that a later call only
passes addresses and a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8bench.formats.compiling import Compiled, KernelDefinition
from fp8bench.formats.triton_casts import disable_triton, kernels
from fp8bench.formats.triton_casts.plans import Counter, LaunchArgument, Plan, TensorArgument, Zeros, plan_launches

# Vector instructions read and write the arguments below. Their addresses must be multiples of this many bytes.
ALIGNMENT = 16
_VECTORIZED_ARGUMENT_NAMES = ("x", "codes", "turned")
# Without a GPU, launches are planned for this number of multiprocessors.
_PROCESSORS_WITHOUT_GPU = 4
# The counter of programs for each device and stream.
_PROGRAM_COUNTERS: dict[tuple[int | None, int], Tensor] = {}


@dataclass(frozen=True)
class SpecialisedFunction:
    """The part of a plan that Triton compiles: a function, the types of its arguments, and its constants."""

    function: str
    warps: int
    types: tuple[tuple[str, object], ...]
    constants: tuple[tuple[str, float | bool | None], ...]

    @classmethod
    def of(cls, plan: Plan, tensors: Sequence[Tensor]) -> SpecialisedFunction:
        argument_types = tuple(
            (name, _find_argument_type(argument, tensors)) for name, argument in plan.arguments.items()
        )
        return cls(plan.function, plan.warps, argument_types, tuple(plan.constants.items()))

    def compile(self) -> Any:
        """Compiles the function for the current device. Triton stores the result."""
        function = getattr(kernels, self.function)
        values = {**dict(self.types), **dict(self.constants)}
        # warmup takes types in place of values only for positional arguments.
        return function.warmup(*(values[name] for name in function.arg_names), num_warps=self.warps, grid=(1,))


def _find_argument_type(argument: LaunchArgument, tensors: Sequence[Tensor]) -> object:
    """Returns the type for which Triton compiles an argument. For a pointer this is a dtype. For a size it is a number:
    1 for a size of 1, 16 for other multiples of 16, and 17 for all other sizes.
    """
    match argument:
        case TensorArgument(index=index):
            return tensors[index].dtype
        case Counter() | Zeros():
            return torch.int32
        case int():
            return argument if argument == 1 else 16 if argument % 16 == 0 else 17
    return None


@dataclass(frozen=True)
class TritonKernels(KernelDefinition):
    """The Triton kernels of one definition, compiled for arguments with certain shapes, strides and dtypes."""

    definition: KernelDefinition
    launches: tuple[SpecialisedFunction, ...]

    @property
    def device(self) -> str:  # type: ignore[override]
        return self.definition.device

    def __call__(self, *tensors: Tensor) -> tuple[()]:
        return self.definition(*tensors)

    def build(self) -> Compiled:
        """Compiles the Triton kernels. If Triton fails, its error is raised, and torch compiles all casts of this
        process from then on.
        """
        try:
            with _make_device_current(torch.device(self.device)):
                for launch in self.launches:
                    launch.compile()
        except Exception as error:
            disable_triton(f"Triton failed: {type(error).__name__}: {error}")
            raise
        return Compiled(self._run)

    def _run(self, *tensors: Tensor) -> Repeat:
        plans = plan_for_device(self.definition, tensors)
        return Repeat(plans, run_launch_plans(plans, tensors), tensors[0].device)


def make_triton_kernels(definition: KernelDefinition, tensors: Sequence[Tensor]) -> TritonKernels | None:
    """Returns the Triton kernels of a cast. Returns None if none exist, or if tensors are not aligned."""
    plans = plan_for_device(definition, tensors)
    if not plans or any(tensors[index].data_ptr() % ALIGNMENT for index in _list_vector_tensors(plans)):
        return None
    return TritonKernels(definition, tuple(SpecialisedFunction.of(launch_plan, tensors) for launch_plan in plans))


def plan_for_device(definition: KernelDefinition, tensors: Sequence[Tensor]) -> list[Plan]:
    device = tensors[0].device
    is_on_gpu = device.type == "cuda"
    multiprocessor_count = (
        torch.cuda.get_device_properties(device).multi_processor_count if is_on_gpu else _PROCESSORS_WITHOUT_GPU
    )
    return plan_launches(definition, tensors, multiprocessor_count)


def run_launch_plans(plans: Sequence[Plan], tensors: Sequence[Tensor]) -> list[Any]:
    """Launches plans through Triton, and returns the compiled kernels."""
    device = tensors[0].device
    compiled_kernels = []
    with _make_device_current(device):
        counter, zeros = _allocate_scratch(_find_required_scratch(plans), device, _get_current_stream(device))
        # Triton compiles a kernel when it is first launched. `Repeat` launches the compiled kernels again.
        for launch_plan in plans:
            values: dict[str, object] = {**launch_plan.constants}
            # Replace each reference to a tensor by the tensor of this call.
            for name, argument in launch_plan.arguments.items():
                values[name] = _resolve_kernel_argument(argument, tensors, counter, zeros)
            compiled_kernels.append(
                getattr(kernels, launch_plan.function)[(launch_plan.grid_program_count,)](
                    **values, num_warps=launch_plan.warps
                )
            )
    return compiled_kernels


class Repeat:
    """Launches the kernels of a cast again, for other tensors with the same shapes, strides and dtypes."""

    def __init__(self, plans: Sequence[Plan], compiled: Sequence[Any], device: torch.device) -> None:
        self._device, self._vector_indices = device, tuple(_list_vector_tensors(plans))
        self._scratch = _find_required_scratch(plans)
        # `operands` has the addresses of tensors, and ends with the counter (-2) and the zeros (-1).
        self._launches = []
        for launch_plan, kernel in zip(plans, compiled, strict=True):
            # The compiled function takes the constants too, in the order of the kernel's parameters.
            names = getattr(kernels, launch_plan.function).arg_names
            values = [
                launch_plan.arguments[name] if name in launch_plan.arguments else launch_plan.constants[name]
                for name in names
            ]
            pointer_operand_positions = []
            for position, value in enumerate(values):
                if isinstance(value, TensorArgument | Counter | Zeros):
                    operand_position = (
                        value.index if isinstance(value, TensorArgument) else -2 if isinstance(value, Counter) else -1
                    )
                    pointer_operand_positions.append((position, operand_position))
            self._launches.append(
                (
                    kernel.run,
                    launch_plan.grid_program_count,
                    kernel.function,
                    kernel.packed_metadata,
                    values,
                    pointer_operand_positions,
                )
            )

    def __call__(self, addresses: Sequence[int]) -> bool:
        """Launches the cast for tensors at these addresses. Returns False without a launch if one of the addresses is
        not aligned.
        """
        for index in self._vector_indices:
            if addresses[index] % ALIGNMENT:
                return False
        device = self._device
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
            with _make_device_current(device):
                return self(addresses)
        stream = _get_current_stream(device)
        operands = (*addresses, *_allocate_scratch(self._scratch, device, stream))
        # Call the compiled function directly. Triton's launcher would also read its settings here and make two
        # functions for each launch. Without hooks it does nothing else.
        for run, programs, function, metadata, values, pointer_positions in self._launches:
            # Copy the values for each call, because backward passes cast in other threads.
            arguments: list[object] = [*values]
            for position, number in pointer_positions:
                arguments[position] = operands[number]
            run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments)
        return True


def _list_vector_tensors(plans: Sequence[Plan]) -> set[int]:
    """Returns the indices of the tensors that are read or written 16 bytes at once."""
    vectorized_arguments = [
        launch_plan.arguments.get(name) for launch_plan in plans for name in _VECTORIZED_ARGUMENT_NAMES
    ]
    return {argument.index for argument in vectorized_arguments if isinstance(argument, TensorArgument)}


def _resolve_kernel_argument(
    argument: LaunchArgument, tensors: Sequence[Tensor], counter: Tensor | None, zeros: Tensor | None
) -> object:
    match argument:
        case TensorArgument(index=index):
            return tensors[index]
        case Counter():
            return counter
        case Zeros():
            return zeros
    return argument


def _find_required_scratch(plans: Sequence[Plan]) -> tuple[bool, int]:
    """Returns whether the launches of a cast need a `Counter`, and how many int32 zeros (`Zeros`) they need."""
    arguments = [argument for launch_plan in plans for argument in launch_plan.arguments.values()]
    return Counter() in arguments, next((argument.count for argument in arguments if isinstance(argument, Zeros)), 0)


def _allocate_scratch(
    scratch: tuple[bool, int], device: torch.device, stream: int
) -> tuple[Tensor | None, Tensor | None]:
    counts, zeros = scratch
    scratch_memory = torch.zeros(zeros, dtype=torch.int32, device=device) if zeros else None
    return _get_program_counter(device, stream) if counts else None, scratch_memory


def _get_program_counter(device: torch.device, stream: int) -> Tensor:
    """Returns memory in which a launch counts its finished programs. Launches of one stream run one after another and
    share it. A captured graph may run at the same time as others. So each of its launches gets its own counter, which
    the graph sets to zero.
    """
    if device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    program_counter = _PROGRAM_COUNTERS.get((device.index, stream))
    if program_counter is None:
        program_counter = _PROGRAM_COUNTERS[device.index, stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return program_counter


def _get_current_stream(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    stream_handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream_handle


def _make_device_current(device: torch.device) -> Any:
    """Makes a device the current one, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
