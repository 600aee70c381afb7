"""The kernel's side of an audit: it calls the kernel when the judge asks, and answers with numbers, strings and bytes.

It runs in a separate process. Expected results, and whether they were met, exist only in the judge's process, which
never imports the kernel. This module runs as the program of the kernel's process.
"""

from __future__ import annotations

import ctypes
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8bench.errors import Fp8benchError, UsageError, WorkerFault, WorkerHung, WorkerLost
from fp8bench.features.audit.values import Audit, AuditFinding, AuditOutcome, CallWork, fail
from fp8bench.model import DeviceFacts
from fp8bench.model.promises import AuditKind, Signature
from fp8bench.tape.coverage import SHAPES
from fp8bench.tape.recorder import OperatorTape, name_of, tensors_in
from fp8bench.user_code import own_words
from fp8bench.user_code.named import declared_of, named
from fp8bench.worker.bench import Bench
from fp8bench.worker.fusing import without_compiling
from fp8bench.worker.main import main
from fp8bench.worker.prepared import flush_of
from fp8bench.worker.step_guards import aside
from fp8bench.worker.switches import restore_switches

# dtype, shape, strides, offset, and all bytes of the storage, so that writes between the elements are noticed.
PackedTensor = tuple[str, tuple[int, ...], tuple[int, ...], int, bytes]
# Name, dtype, shape and bytes of a result.
PackedResult = tuple[str, str, tuple[int, ...], bytes]
PackedResults = tuple[PackedResult, ...]

# Saved before importing anything of the kernel, which may replace them.
_CLOCK, _PROCESS_CLOCK, _SYNCHRONIZE = time.perf_counter, time.process_time, torch.cuda.synchronize
_CLOCKS = ("perf_counter", "monotonic", "time", "process_time", "thread_time")
# Functions with which harnesses time, wait, copy and compare. A kernel has no reason to replace any of them.
_WATCHED: dict[str, tuple[Any, tuple[str, ...]]] = {
    "time": (time, (*_CLOCKS, *(f"{name}_ns" for name in _CLOCKS))),
    "torch": (torch, ("equal", "allclose", "isclose", "isfinite", "isnan", "empty", "empty_like")),
    "torch.testing": (torch.testing, ("assert_close",)),
    "torch.cuda": (torch.cuda, ("synchronize", "Event", "Stream", "stream", "current_stream")),
    "torch.cuda.Event": (torch.cuda.Event, ("record", "elapsed_time", "synchronize", "query", "wait")),
    "torch.Tensor": (Tensor, ("copy_", "clone", "detach", "cpu", "numpy", "equal", "allclose", "isclose")),
}


def _watched_functions() -> dict[str, Any]:
    """Returns the current objects of the watched names; None for names that this torch does not have."""
    functions = {}
    for place, (owner, names) in _WATCHED.items():
        for name in names:
            functions[f"{place}.{name}"] = getattr(owner, name, None)
    return functions


_ORIGINALS = _watched_functions()


class KernelRaised(Fp8benchError):
    """The kernel raised, or returned something that is not a result."""


class LazyResult(KernelRaised):
    """A result has a class whose values may be computed when they are read."""


def words_of(error: BaseException) -> str:
    """Describes what the kernel raised, without the wrapping errors."""
    return own_words(error).removeprefix(f"{KernelRaised.__name__}: ")


def describe_stop(error: BaseException) -> AuditFinding:
    """Returns the finding from an exception that ended a check."""
    lazy = LazyResult.__name__
    if isinstance(error, LazyResult) or (isinstance(error, WorkerFault) and error.kind == lazy):
        name = str(error).removeprefix(f"{lazy}: ")
        reason = f"it returns {name}, whose values may be computed when they are read: return a plain torch.Tensor"
        return fail("lazy-result", reason)
    code = "hangs" if isinstance(error, WorkerHung) else "crashes" if isinstance(error, WorkerLost) else "raises"
    return AuditFinding("", AuditOutcome.CANNOT_TELL, code, words_of(error))


def raise_lie(error: BaseException) -> None:
    """Re-raises an error that is not a refusal but a deception, such as a lazy result."""
    if describe_stop(error).failed:
        raise error


def replaced_functions() -> tuple[str, ...]:
    """Returns the names of functions of time and torch that were replaced after the kernel was imported."""
    return tuple(name for name, function in _watched_functions().items() if function is not _ORIGINALS[name])


def pack(tensor: Tensor) -> PackedTensor:
    data = _bytes_of(tensor).cpu().numpy().tobytes()
    return str(tensor.dtype)[6:], tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), data


def unpack(packed: PackedTensor, device: str = "cpu") -> Tensor:
    """Returns the tensor in fresh memory."""
    dtype, shape, strides, offset, data = packed
    memory = torch.empty(len(data), dtype=torch.uint8, device=device)
    if data:
        memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    empty = torch.empty(0, dtype=getattr(torch, dtype), device=device)
    return empty.set_(memory.untyped_storage(), offset, shape, strides)


def digest_of(packed: PackedTensor) -> int:
    return zlib.crc32(packed[-1])


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns all bytes of a tensor's storage, as a view."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def pack_results(results: dict[str, Tensor]) -> PackedResults:
    packed = []
    for name, tensor in results.items():
        # A tensor of one element counts as contiguous whatever its strides are, and cannot be viewed as bytes then.
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        data = plain.view(-1).view(torch.uint8).numpy().tobytes()
        packed.append((name, str(plain.dtype)[6:], tuple(plain.shape), data))
    return tuple(packed)


def unpack_results(packed: PackedResults) -> dict[str, Tensor]:
    results = {}
    for name, dtype, shape, data in packed:
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        results[name] = torch.frombuffer(bytearray(data), dtype=empty.dtype).view(shape) if data else empty
    return results


_COPIES = ("clone", "copy_", "_to_copy")


def work_of(call: Callable[[], object]) -> CallWork:
    """Counts allocations, casts, copies and products, if they are operators of torch."""
    with without_compiling(), OperatorTape() as tape:
        call()
    counts: Counter[str] = Counter()
    for done in tape.calls:
        inputs, outputs = list(tensors_in((done.given, tuple(done.named.values())))), list(tensors_in(done.result))
        for tensor in outputs:
            if math.prod(tensor.shape) and tensor.storage not in {operand.storage for operand in inputs}:
                counts["allocations"] += 1
        name = name_of(done)
        counts["products"] += name in SHAPES
        if name in _COPIES and inputs and outputs:
            counts["copies" if inputs[-1].dtype == outputs[0].dtype else "casts"] += 1
    return CallWork(**counts)


# glibc's option that fills allocated memory with the complement of a byte: 0x7f, which gives NaN in float16 and float8,
# and 3e38 in bfloat16 and float32.
_FILL_OPTION, _FILL = -6, 0x80
# Blocks of NaN of each size that are freed before a call, so that the device's allocator reuses them.
_PRIMED = 2
# Tens of milliseconds: a kernel that does not wait for such a busy stream reads its inputs too early.
_BUSY_CYCLES = 100_000_000
# At most this many different results are returned for calls with the same arguments.
_MOST_RESULTS = 256


@contextmanager
def filled_memory() -> Iterator[None]:
    """Within the body, glibc's allocations are filled with large numbers and NaN; other C libraries are unaffected."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None:
        yield
        return
    option(_FILL_OPTION, _FILL)
    try:
        yield
    finally:
        option(_FILL_OPTION, 0)


@contextmanager
def busy_stream(device: str) -> Iterator[bool]:
    """Runs the body on a separate stream that is initially busy; yields False if the device has no streams."""
    if not device.startswith("cuda"):
        yield False
        return
    _SYNCHRONIZE(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(_BUSY_CYCLES)  # type: ignore[no-untyped-call]
        yield True
        side.synchronize()


class KernelHost:
    """Calls one kernel. Arguments are in numbered slots; each method serves a request of the judge, and answers with
    plain values. Raises KernelRaised for what the kernel raises."""

    def __init__(self, function: Callable[..., Any], signature: Signature, facts: DeviceFacts) -> None:
        self._function, self._kind, self._device = function, signature.kind, facts.key
        self._flush = flush_of(facts) if facts.accelerated else lambda: None
        self._slots: dict[int, list[Tensor]] = {}
        self._latest: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._timed: list[dict[str, Tensor]] = []

    def place(self, slot: int, tensors: Sequence[PackedTensor], moved: bool = True) -> None:
        """Puts arguments into a slot: at new addresses or, with `moved` False, at the same ones."""
        placed = [unpack(tensor, self._device) for tensor in tensors]
        if moved:
            self._slots[slot] = placed
        else:
            self._write(slot, placed)

    def call(self, slot: int) -> tuple[PackedResults, tuple[int, ...]]:
        """Returns the results, and digests of the arguments' memory after the call."""
        with filled_memory():
            self._prime(slot)
            self._latest = self._raw(slot)
        return self.reread(), self.digests([slot])

    def reread(self) -> PackedResults:
        """Reads the latest results again from the kernel's memory."""
        return pack_results(self._latest)

    def keep(self) -> None:
        """Keeps a reference to the latest results in the kernel's memory, for `reread_kept`."""
        self._kept = self._latest

    def reread_kept(self) -> PackedResults:
        return pack_results(self._kept)

    def spoil(self) -> None:
        """Overwrites the latest results, as the caller who owns them may."""
        with torch.no_grad():
            for tensor in self._latest.values():
                tensor.detach().fill_(math.nan)

    def call_late(self, slot: int, source: int) -> PackedResults | None:
        """Calls it on a busy stream, after queueing writes of the source's values into the slot; None without
        streams."""
        with busy_stream(self._device) as has_stream:
            if not has_stream:
                return None
            self._write(slot, self._slots[source])
            return self.call(slot)[0]

    def pair(self, slots: tuple[int, int], order: tuple[int, int]) -> tuple[PackedResults, ...]:
        """Calls a linear layer forward on both slots, then both backward in the given order; returns results in slot
        order."""
        answers = [self._forward(slot) for slot in slots]
        backwards = {which: self._backward(slots[which], answers[which]) for which in order}
        return tuple(pack_results(backwards[which]) for which in sorted(backwards))

    def repeat(
        self, slots: Sequence[int], calls: int, seconds: float
    ) -> tuple[int, list[tuple[int, int, PackedResults]]]:
        """Calls it on each slot in turn. Returns the number of calls, and each slot's different results with the number
        of the call that first gave them."""
        different: list[tuple[int, int, PackedResults]] = []
        distinct, end, number = set[tuple[int, PackedResults]](), _CLOCK() + seconds, 0
        while number < calls and _CLOCK() < end:
            slot = slots[number % len(slots)]
            number += 1
            results = pack_results(self._raw(slot))
            if (slot, results) not in distinct and len(distinct) < _MOST_RESULTS:
                distinct.add((slot, results))
                different.append((number, slot, results))
        return number, different

    def measure_calls(self, slots: Sequence[int]) -> list[tuple[float, float]]:
        """Calls it once on each slot; returns seconds by the clock, and of this process. Within them results are copied
        and every stream is synchronized: unfinished work is missing from the copies, which `timed_results` shows."""
        seconds = []
        for slot in slots:
            self._flush()
            self._wait()
            start, start_of_process = _CLOCK(), _PROCESS_CLOCK()
            self._timed.append({name: _copy(tensor) for name, tensor in self._raw(slot).items()})
            self._wait()
            seconds.append((_CLOCK() - start, _PROCESS_CLOCK() - start_of_process))
        return seconds

    def digests(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Returns digests of all argument memory in some slots."""
        return tuple(digest_of(pack(tensor.detach())) for slot in slots for tensor in self._slots[slot])

    def timed_results(self, place: int) -> PackedResults:
        return pack_results(self._timed[place])

    def forget(self) -> None:
        """Frees slots and results."""
        self._slots, self._latest, self._kept, self._timed = {}, {}, {}, []

    def work(self, slot: int) -> CallWork:
        return work_of(partial(self._raw, slot))

    def find_replaced(self) -> tuple[str, ...]:
        return replaced_functions()

    def _raw(self, slot: int) -> dict[str, Tensor]:
        """Returns results as the kernel made them, by name."""
        answer = self._forward(slot)
        return self._backward(slot, answer) if self._kind is AuditKind.LINEAR else {self._kind.value: answer}

    def _forward(self, slot: int) -> Tensor:
        arguments = self._slots[slot]
        if self._kind is AuditKind.LINEAR:
            x, weight, _ = arguments
            arguments = [x.requires_grad_(), weight.requires_grad_()]
        try:
            answer = self._function(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything
            raise KernelRaised(own_words(error)) from None
        if not isinstance(answer, Tensor):
            raise KernelRaised(f"TypeError: it returned {type(answer).__name__}; expected a tensor")
        if is_lazy(type(answer)):
            raise LazyResult(f"{type(answer).__name__}")
        return answer

    def _backward(self, slot: int, answer: Tensor) -> dict[str, Tensor]:
        x, weight, gradient = self._slots[slot]
        try:
            into_x, into_weight = torch.autograd.grad(answer, (x, weight), gradient.to(answer.dtype))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything
            raise KernelRaised(own_words(error)) from None
        return {"forward": answer, "input gradient": into_x, "weight gradient": into_weight}

    def _write(self, slot: int, tensors: Sequence[Tensor]) -> None:
        """Overwrites memory without changing torch's version counters, because kernels must not cache by address and
        version."""
        for tensor, source in zip(self._slots[slot], tensors, strict=True):
            _bytes_of(tensor).copy_(_bytes_of(source))

    def _prime(self, slot: int) -> None:
        """Allocates and frees blocks of NaN as large as arguments and results, so that the allocator reuses them."""
        sizes = {(tensor.numel(), tensor.dtype) for tensor in (*self._latest.values(), *self._slots[slot])}
        blocks = []
        for size, dtype in sizes:
            if dtype.is_floating_point:
                blocks += [torch.full((size,), math.nan, device=self._device).to(dtype) for _ in range(_PRIMED)]

    def _wait(self) -> None:
        if self._device.startswith("cuda"):
            _SYNCHRONIZE(self._device)


def is_lazy(kind: type[Tensor]) -> bool:
    """Whether a subclass of Tensor overrides operations: then values may be computed when they are read."""
    if kind in (Tensor, torch.nn.Parameter):
        return False
    overridden = set[str]().union(*(vars(cls) for cls in kind.__mro__[: kind.__mro__.index(Tensor)]))
    return bool(overridden & set(dir(Tensor)) - {*dir(object), "__module__", "__dict__", "__weakref__"})


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _check_kernel(target: str, function: Callable[..., Any]) -> None:
    if isinstance(function, type):
        name = function.__name__
        raise UsageError(
            f"{target} is a class, and a kernel is a function. Create an object of it in its file, as in "
            f"`kernel = {name}()`, and give that name."
        )


class KernelBench(Bench):
    """The kernel's process, the only one that imports the audited code."""

    def read_signature(self, target: str) -> Signature | None:
        with aside():
            function = named(target)
            if not (isinstance(function, type) and issubclass(function, torch.nn.Module)):
                _check_kernel(target, function)
            return declared_of(function)

    def audit_model(self, target: str, signature: Signature, facts: DeviceFacts) -> Audit:
        # Not at the top: the kernel's process must not load the judge's modules.
        from fp8bench.features.audit.model import audit_loaded_model, parse_model

        self._select_device(facts)
        with restore_switches(), aside():
            model, batch = parse_model(target, named(target)())
            return audit_loaded_model(target, model, batch, signature, facts)

    def load(self, target: str, signature: Signature, facts: DeviceFacts) -> None:
        self._select_device(facts)
        with aside():
            function = named(target)
            _check_kernel(target, function)
            self._host = KernelHost(function, signature, facts)

    def kernel(self, request: str, *arguments: Any) -> Any:
        """Passes a request on to the kernel's host."""
        with aside():
            return getattr(self._host, request)(*arguments)


if __name__ == "__main__":
    main(KernelBench)
