"""Describes an exception for the parent process, including whether exhausted memory caused it."""

from __future__ import annotations

import re
import sys
import traceback
from errno import ENOMEM
from typing import NamedTuple

from fp8bench.errors import UnknownName, WorkerFault
from fp8bench.model import PHASES
from fp8bench.protocols import Markers
from fp8bench.registry import devices

# The advice that torch appends to a driver's error: a link to documentation, and a hint that an earlier call may have
# caused the error.
_TORCH_ADVICE = re.compile(
    r"(?s)(?<=error: )([^\n]*)\n(?=.*(CUDA_LAUNCH_BLOCKING|AMD_SERIALIZE_KERNEL|docs\.nvidia\.com)).*"
)
# Longer texts are shortened. The traceback has the full text.
_MAX_TEXT_LENGTH = 1000


class FaultDescription(NamedTuple):
    """The description of an exception. `out_of_memory` is true if the exception means that the memory of a device was
    exhausted.
    """

    kind: str
    text: str
    trace: str
    out_of_memory: bool


def describe_fault(error: BaseException, asks_devices: bool = True) -> FaultDescription:
    """Describes an exception. With `asks_devices`, asks the devices whether exhausted memory caused it.

    The advice that torch appends to a driver's error is only in the traceback.
    """
    if isinstance(error, WorkerFault):  # the exception comes from a worker process of this process
        message = str(error).removeprefix(f"{error.kind}: ")
        return FaultDescription(error.kind, message, error.trace, error.out_of_memory)
    device_kinds = devices.names() if asks_devices else ()
    try:
        message = str(error)
        is_memory_exhausted = any(devices.get(kind).is_out_of_memory(error) for kind in device_kinds)
    except Exception:  # noqa: BLE001 - it is foreign code that makes the text
        message = "an exception that has no text"
        is_memory_exhausted = False
    # Characters that cannot be encoded (half a surrogate pair) are escaped.
    message, trace = (
        part.encode("utf-8", "backslashreplace").decode()
        for part in (message, "".join(traceback.format_exception(error)))
    )
    message = _TORCH_ADVICE.sub(r"\1", message)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM):
        message = f"{message or 'no memory'}. Free some, or raise this process's limit (ulimit -v)"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        message += f" for {sys.executable}. Install torch there, or run fp8bench with a Python that has it."
    # The step has entered a phase that does not exist, such as `with phase.matmul:`.
    if isinstance(error, AttributeError) and isinstance(error.obj, Markers):
        message = str(UnknownName("phase", str(error.name), map(str, PHASES)))
    if len(message) > _MAX_TEXT_LENGTH:
        message = f"{message[:_MAX_TEXT_LENGTH]}... ({len(message) - _MAX_TEXT_LENGTH} more characters)"
    return FaultDescription(type(error).__name__, message, trace, is_memory_exhausted)
