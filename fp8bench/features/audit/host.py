"""Calls the audited kernel in a separate process, and answers with numbers, strings and bytes. The judge's process
(audit/times.py) sends these calls. It never imports the kernel, and it alone has the expected results and the verdicts.
"""

from __future__ import annotations

import ctypes
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8bench.errors import Fp8benchError, UsageError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.features.audit.values import AuditFinding, AuditOutcome, AuditReport, make_failure
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import AuditedCallableKind, CallablePromise
from fp8bench.tape.formulas import PRODUCT_SHAPES
from fp8bench.tape.recorder import OperatorTape, get_operator_name, iterate_tensors
from fp8bench.user_code import own_words
from fp8bench.user_code.named import find_declared_signature, named
from fp8bench.worker.bench import Bench
from fp8bench.worker.fusing import disable_compiling
from fp8bench.worker.main import main
from fp8bench.worker.prepared import make_cache_flush
from fp8bench.worker.step_guards import stdout_to_stderr
from fp8bench.worker.switches import restore_switches

# dtype, shape, strides, offset, and all bytes of the storage, so that a write between the elements is noticed.
PackedTensor = tuple[str, tuple[int, ...], tuple[int, ...], int, bytes]
# Name, dtype, shape and bytes of a result.
PackedResult = tuple[str, str, tuple[int, ...], bytes]
PackedResults = tuple[PackedResult, ...]

# Saved before the kernel is imported, because the kernel may replace these functions.
_CLOCK, _PROCESS_CLOCK, _SYNCHRONIZE = time.perf_counter, time.process_time, torch.cuda.synchronize
_CLOCK_NAMES = ("perf_counter", "monotonic", "time", "process_time", "thread_time")
# Functions that benchmarks use to time, wait, copy and compare. A kernel has no reason to replace them.
_WATCHED_FUNCTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "time": (time, (*_CLOCK_NAMES, *(f"{name}_ns" for name in _CLOCK_NAMES))),
    "torch": (torch, ("equal", "allclose", "isclose", "isfinite", "isnan", "empty", "empty_like")),
    "torch.testing": (torch.testing, ("assert_close",)),
    "torch.cuda": (torch.cuda, ("synchronize", "Event", "Stream", "stream", "current_stream")),
    "torch.cuda.Event": (torch.cuda.Event, ("record", "elapsed_time", "synchronize", "query", "wait")),
    "torch.Tensor": (Tensor, ("copy_", "clone", "detach", "cpu", "numpy", "equal", "allclose", "isclose")),
}


def _find_watched_functions() -> dict[str, Any]:
    """Returns the function that each name in `_WATCHED_FUNCTIONS` refers to now. It is None if this version of torch
    lacks the name.
    """
    functions_by_path = {}
    for owner_path, (owner_object, names) in _WATCHED_FUNCTIONS.items():
        for name in names:
            functions_by_path[f"{owner_path}.{name}"] = getattr(owner_object, name, None)
    return functions_by_path


_ORIGINAL_FUNCTIONS = _find_watched_functions()


class KernelFailure(Fp8benchError):
    """Raised if the kernel raises an exception, or returns an object that is not a tensor."""


class LazyTensorReturned(KernelFailure):
    """Raised if the kernel returns a tensor subclass whose values may be computed only when they are read."""


def describe_error(error: BaseException) -> str:
    """Describes the exception that the kernel raised, without the names of wrapping exceptions."""
    return own_words(error).removeprefix(f"{KernelFailure.__name__}: ")


def describe_stop(error: BaseException) -> AuditFinding:
    """Returns a finding for the exception that ended a check early."""
    lazy_class_name = LazyTensorReturned.__name__
    if isinstance(error, LazyTensorReturned) or (isinstance(error, WorkerFault) and error.kind == lazy_class_name):
        name = str(error).removeprefix(f"{lazy_class_name}: ")
        reason = f"it returns {name}, whose values may be computed when they are read. Return a torch.Tensor."
        return make_failure("lazy-result", reason)
    failure_code = (
        "hangs" if isinstance(error, WorkerHung) else "crashes" if isinstance(error, WorkerLost) else "raises"
    )
    return AuditFinding("", AuditOutcome.CANNOT_TELL, failure_code, describe_error(error))


def reraise_deception(error: BaseException) -> None:
    """Raises the error again if it shows that the kernel cheats, for example by a lazy result. Does nothing if the
    kernel only refuses an input.
    """
    if describe_stop(error).has_failed:
        raise error


def find_replaced_functions() -> tuple[str, ...]:
    """Returns the names of the functions of time and torch that were replaced after this module was imported."""
    return tuple(
        name for name, function in _find_watched_functions().items() if function is not _ORIGINAL_FUNCTIONS[name]
    )


def pack_tensor(tensor: Tensor) -> PackedTensor:
    # Send the whole storage. The [6:] removes the prefix "torch." of the dtype.
    data = _view_as_bytes(tensor).cpu().numpy().tobytes()
    return str(tensor.dtype)[6:], tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), data


def unpack_tensor(packed_tensor: PackedTensor, device: str = "cpu") -> Tensor:
    """Returns the packed tensor in newly allocated memory."""
    dtype, shape, strides, offset, data = packed_tensor
    storage_bytes = torch.empty(len(data), dtype=torch.uint8, device=device)
    # torch.frombuffer refuses an empty buffer, and warns about a read-only one such as bytes.
    if data:
        storage_bytes.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    empty_tensor = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    return empty_tensor.set_(storage_bytes.untyped_storage(), offset, shape, strides)


def compute_digest(packed_tensor: PackedTensor) -> int:
    return zlib.crc32(packed_tensor[-1])


def _view_as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view of all bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def pack_result_tensors(results: dict[str, Tensor]) -> PackedResults:
    packed_results = []
    for name, tensor in results.items():
        # A one-element tensor counts as contiguous whatever its strides, and then cannot be viewed as bytes.
        cpu_copy = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        data = cpu_copy.view(-1).view(torch.uint8).numpy().tobytes()
        packed_results.append((name, str(cpu_copy.dtype)[6:], tuple(cpu_copy.shape), data))
    return tuple(packed_results)


def unpack_results(packed_results: PackedResults) -> dict[str, Tensor]:
    results = {}
    for name, dtype, shape, data in packed_results:
        empty_tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        results[name] = (
            torch.frombuffer(bytearray(data), dtype=empty_tensor.dtype).view(shape) if data else empty_tensor
        )
    return results


_COPY_OPERATORS = ("clone", "copy_", "_to_copy")
_COUNTED_WORK_KINDS = ("casts", "products", "copies", "allocations")


def count_operators(call: Callable[[], object]) -> dict[str, int]:
    """Counts the casts, products, copies without a cast, and allocations of a call. Only work by torch operators is
    counted.
    """
    # Compiled functions run uncompiled here, so that each of their operators is recorded.
    with disable_compiling(), OperatorTape() as tape:
        call()
    counts = dict.fromkeys(_COUNTED_WORK_KINDS, 0)
    for recorded_call in tape.calls:
        inputs = list(iterate_tensors((recorded_call.positional, tuple(recorded_call.named.values()))))
        outputs = list(iterate_tensors(recorded_call.result))
        input_storages = {operand.storage for operand in inputs}
        for tensor in outputs:
            if math.prod(tensor.shape) and tensor.storage not in input_storages:
                counts["allocations"] += 1
        operator_name = get_operator_name(recorded_call)
        counts["products"] += operator_name in PRODUCT_SHAPES
        if operator_name in _COPY_OPERATORS and inputs and outputs:
            counts["copies" if inputs[-1].dtype == outputs[0].dtype else "casts"] += 1
    return counts


# The mallopt option of glibc that fills allocated memory with the complement of a byte: 0x7f here, which reads as NaN
# in float16 and float8, and as 3e38 in bfloat16 and float32.
_FILL_OPTION, _FILL = -6, 0x80
# How many blocks of NaN of each size are freed before a call, so that the device's allocator reuses them.
_NAN_BLOCKS_PER_SIZE = 2
# The number of GPU cycles for which a stream is kept busy: tens of milliseconds. A kernel that ignores its caller's
# stream then reads its inputs before they are written.
_STREAM_BUSY_CYCLES = 100_000_000
# How many distinct results at most are returned for calls with the same arguments.
_MAX_DISTINCT_CALL_RESULTS = 256


@contextmanager
def fill_allocated_memory() -> Iterator[None]:
    """Makes glibc fill newly allocated memory with NaN and large numbers inside the `with` block. Other C libraries
    are unaffected."""
    set_malloc_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_malloc_option is None:
        yield
        return
    set_malloc_option(_FILL_OPTION, _FILL)
    try:
        yield
    finally:
        set_malloc_option(_FILL_OPTION, 0)


@contextmanager
def busy_stream(device: str) -> Iterator[bool]:
    """Runs the `with` block on a separate CUDA stream that still has other work to do. Yields False if the device has
    no streams.
    """
    if not device.startswith("cuda"):
        yield False
        return
    _SYNCHRONIZE(device)
    side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side_stream):
        torch.cuda._sleep(_STREAM_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        yield True
        side_stream.synchronize()


class KernelHost:
    """Calls one kernel for the judge. Arguments are stored in numbered slots, and every method returns plain values.
    Raises KernelFailure if the kernel raises."""

    def __init__(self, function: Callable[..., Any], signature: CallablePromise, facts: DeviceFacts) -> None:
        self._function = function
        self._kind = signature.kind
        self._device = facts.key
        self._flush = make_cache_flush(facts) if facts.accelerated else lambda: None
        self._slots: dict[int, list[Tensor]] = {}
        self._latest: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._timed: list[dict[str, Tensor]] = []

    def place_arguments(self, slot: int, tensors: Sequence[PackedTensor], at_new_address: bool = True) -> None:
        """Stores arguments in a slot. Depending on `at_new_address`, they get new memory, or the memory that the slot
        already has.
        """
        unpacked_tensors = [unpack_tensor(tensor, self._device) for tensor in tensors]
        if at_new_address:
            self._slots[slot] = unpacked_tensors
        else:
            self._overwrite_slot_memory(slot, unpacked_tensors)

    def call_kernel(self, slot: int) -> tuple[PackedResults, tuple[int, ...]]:
        """Calls the kernel on the arguments in a slot. Returns the results, and checksums of the arguments' memory
        after the call.
        """
        with fill_allocated_memory():
            self._free_nan_blocks(slot)
            self._latest = self._compute_results(slot)
        return pack_result_tensors(self._latest), self.digest_arguments([slot])

    def keep_results(self) -> PackedResults:
        """Returns the latest results, and keeps the memory that the kernel returned, so that `reread_kept_results`
        can read it again.
        """
        self._kept = self._latest
        return self.reread_kept_results()

    def reread_kept_results(self) -> PackedResults:
        return pack_result_tensors(self._kept)

    def overwrite_results(self) -> None:
        """Overwrites the latest results with NaN, as a caller is allowed to do."""
        with torch.no_grad():
            for tensor in self._latest.values():
                tensor.detach().fill_(math.nan)

    def call_on_busy_stream(self, slot: int, source: int) -> PackedResults | None:
        """Calls the kernel on a busy CUDA stream, on which a write of new argument values (`source`) into the slot was
        just queued. Returns None if the device has no streams.
        """
        with busy_stream(self._device) as has_stream:
            if not has_stream:
                return None
            self._overwrite_slot_memory(slot, self._slots[source])
            return self.call_kernel(slot)[0]

    def call_pair(self, slots: tuple[int, int], order: tuple[int, int]) -> tuple[PackedResults, ...]:
        """Runs a linear layer forward on the arguments in two slots, then backward in the given order. Returns the
        results in the order of the slots."""
        outputs = [self._call_forward(slot) for slot in slots]
        results_by_slot = {which: self._call_backward(slots[which], outputs[which]) for which in order}
        return tuple(pack_result_tensors(results_by_slot[which]) for which in sorted(results_by_slot))

    def repeat_calls(
        self, slots: Sequence[int], calls: int, seconds: float
    ) -> tuple[int, list[tuple[int, int, PackedResults]]]:
        """Calls the kernel on the arguments in the slots in turn, up to `calls` times or for `seconds`. Returns the
        number of calls, and each distinct result with the slot and the number of the first call that gave it.
        """
        numbered_call_results = []
        distinct_results = set[tuple[int, PackedResults]]()
        end = _CLOCK() + seconds
        call_number = 0
        while call_number < calls and _CLOCK() < end:
            slot = slots[call_number % len(slots)]
            call_number += 1
            results = pack_result_tensors(self._compute_results(slot))
            if (slot, results) not in distinct_results and len(distinct_results) < _MAX_DISTINCT_CALL_RESULTS:
                distinct_results.add((slot, results))
                numbered_call_results.append((call_number, slot, results))
        return call_number, numbered_call_results

    def measure_calls(self, slots: Sequence[int]) -> list[tuple[float, float]]:
        """Times one call on the arguments in each slot. Returns the seconds of each call by wall clock and by process
        time, including a copy of the results and a synchronization of the device. If a kernel returns before its work
        is done, these copies miss that work, which `read_timed_results` reveals.
        """
        seconds = []
        for slot in slots:
            # On a GPU, flush the cache, so that every call starts with a cold cache.
            self._flush()
            self._synchronize()
            wall_time_at_start = _CLOCK()
            process_time_at_start = _PROCESS_CLOCK()
            self._timed.append({name: _copy_tensor(tensor) for name, tensor in self._compute_results(slot).items()})
            self._synchronize()
            seconds.append((_CLOCK() - wall_time_at_start, _PROCESS_CLOCK() - process_time_at_start))
        return seconds

    def digest_arguments(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Returns checksums of the memory of all arguments in these slots."""
        return tuple(compute_digest(pack_tensor(tensor.detach())) for slot in slots for tensor in self._slots[slot])

    def read_timed_results(self, index: int) -> PackedResults:
        return pack_result_tensors(self._timed[index])

    def free_memory(self) -> None:
        """Frees the arguments in all slots, and all stored results."""
        self._slots = {}
        self._latest = {}
        self._kept = {}
        self._timed = []

    def count_slot_operators(self, slot: int) -> dict[str, int]:
        return count_operators(partial(self._compute_results, slot))

    def list_replaced_functions(self) -> tuple[str, ...]:
        return find_replaced_functions()

    def _compute_results(self, slot: int) -> dict[str, Tensor]:
        """Calls the kernel and returns its results by name, as tensors on the device."""
        output = self._call_forward(slot)
        return (
            self._call_backward(slot, output)
            if self._kind is AuditedCallableKind.LINEAR
            else {self._kind.value: output}
        )

    def _call_forward(self, slot: int) -> Tensor:
        arguments = self._slots[slot]
        if self._kind is AuditedCallableKind.LINEAR:
            x, weight, _ = arguments
            arguments = [x.requires_grad_(), weight.requires_grad_()]
        try:
            output = self._function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything
            reason = own_words(error)
            # If the traceback ends at this call, the function did not start: it does not accept these arguments.
            if isinstance(error, TypeError) and error.__traceback__ is not None and not error.__traceback__.tb_next:
                reason += f". The audit calls it as f({', '.join('abcdef'[: len(arguments)])})"
            raise KernelFailure(reason) from None
        if not isinstance(output, Tensor):
            raise KernelFailure(f"TypeError: the kernel returned {type(output).__name__}; expected a tensor")
        if is_lazy_tensor_class(type(output)):
            raise LazyTensorReturned(f"{type(output).__name__}")
        return output

    def _call_backward(self, slot: int, output: Tensor) -> dict[str, Tensor]:
        x, weight, gradient = self._slots[slot]
        try:
            input_gradient, weight_gradient = torch.autograd.grad(output, (x, weight), gradient.to(output.dtype))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything
            raise KernelFailure(own_words(error)) from None
        return {"forward": output, "input gradient": input_gradient, "weight gradient": weight_gradient}

    def _overwrite_slot_memory(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Writes new values into a slot's memory, but leaves torch's version counters unchanged. This finds kernels
        that cache results by address and version, which they must not do.
        """
        for tensor, source in zip(self._slots[slot], tensors, strict=True):
            _view_as_bytes(tensor).copy_(_view_as_bytes(source))

    def _free_nan_blocks(self, slot: int) -> None:
        """Allocates and frees blocks of NaN with the sizes of arguments and results. If a kernel does not write all
        of its output, the rest of the output is then NaN.
        """
        sizes_and_dtypes = {(tensor.numel(), tensor.dtype) for tensor in (*self._latest.values(), *self._slots[slot])}
        nan_memory_blocks = []
        for size, dtype in sizes_and_dtypes:
            if dtype.is_floating_point:
                nan_memory_blocks += [
                    torch.full((size,), math.nan, device=self._device).to(dtype) for _ in range(_NAN_BLOCKS_PER_SIZE)
                ]

    def _synchronize(self) -> None:
        if self._device.startswith("cuda"):
            _SYNCHRONIZE(self._device)


def is_lazy_tensor_class(tensor_class: type[Tensor]) -> bool:
    """Returns whether a Tensor subclass overrides tensor operations. If it does, its values may be computed only when
    they are read.
    """
    if tensor_class in (Tensor, torch.nn.Parameter):
        return False
    overridden_method_names = set[str]().union(
        *(vars(cls) for cls in tensor_class.__mro__[: tensor_class.__mro__.index(Tensor)])
    )
    return bool(overridden_method_names & set(dir(Tensor)) - {*dir(object), "__module__", "__dict__", "__weakref__"})


def _copy_tensor(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _refuse_kernel_class(target: str, function: Callable[..., Any]) -> None:
    if isinstance(function, type):
        name = function.__name__
        raise UsageError(
            f"{target} is a class, but a kernel is a function. Create an instance in its file, as in "
            f"`kernel = {name}()`, and give that name."
        )


class KernelBench(Bench):
    """Receives requests in the kernel's process, the only process that imports the audited code."""

    def read_signature(self, target: str) -> CallablePromise | None:
        with stdout_to_stderr():
            function = named(target)
            if not (isinstance(function, type) and issubclass(function, torch.nn.Module)):
                _refuse_kernel_class(target, function)
            return find_declared_signature(function)

    def audit_model(self, target: str, signature: CallablePromise, facts: DeviceFacts) -> AuditReport:
        # Imported here because a kernel's process must not load the judge's modules, except to audit a model.
        from fp8bench.features.audit.model import audit_loaded_model, parse_model

        self._select_device(facts)
        with restore_switches(), stdout_to_stderr():
            model, batch = parse_model(target, named(target)())
            return audit_loaded_model(target, model, batch, signature, facts)

    def load_kernel(self, target: str, signature: CallablePromise, facts: DeviceFacts) -> None:
        self._select_device(facts)
        with stdout_to_stderr():
            function = named(target)
            _refuse_kernel_class(target, function)
            self._host = KernelHost(function, signature, facts)

    def call_host(self, request: str, *arguments: Any) -> Any:
        """Calls the named method of the KernelHost and returns its answer."""
        with stdout_to_stderr():
            return getattr(self._host, request)(*arguments)


if __name__ == "__main__":
    main(KernelBench)
