"""Describes an exception in a form that can be sent to the parent, including whether memory ran out."""

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

# The advice that torch adds to a driver's error: where to look it up, and that another line may have caused it.
_ADVICE = re.compile(r"(?s)(?<=error: )([^\n]*)\n(?=.*(CUDA_LAUNCH_BLOCKING|AMD_SERIALIZE_KERNEL|docs\.nvidia\.com)).*")
# Longer texts are cut; the traceback has them in full.
_LONGEST = 1000


class DescribedFault(NamedTuple):
    """An exception in words; `out_of_memory` is whether a device's memory ran out."""

    kind: str
    text: str
    trace: str
    out_of_memory: bool


def describe_fault(error: BaseException, asks_devices: bool = True) -> DescribedFault:
    """Describes an exception. With `asks_devices`, asks the devices whether it means exhausted memory. The advice that
    torch adds to a driver's error is only kept in the traceback."""
    if isinstance(error, WorkerFault):  # from a worker that this one has started
        text = str(error).removeprefix(f"{error.kind}: ")
        return DescribedFault(error.kind, text, error.trace, error.out_of_memory)
    kinds = devices.names() if asks_devices else ()
    try:
        text, exhausted = str(error), any(devices.get(kind).is_out_of_memory(error) for kind in kinds)
    except Exception:  # noqa: BLE001 - it is foreign code that makes the text
        text, exhausted = "an exception that has no text", False
    # Characters that no encoding can write (half a surrogate pair) are escaped.
    text, trace = (
        part.encode("utf-8", "backslashreplace").decode() for part in (text, "".join(traceback.format_exception(error)))
    )
    text = _ADVICE.sub(r"\1", text)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM):
        text = f"{text or 'no memory'}. Free some, or raise this process's limit (ulimit -v)"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        text += f" for {sys.executable}. Install torch there, or run fp8bench with a Python that has it."
    if isinstance(error, AttributeError) and isinstance(error.obj, Markers):
        text = str(UnknownName("phase", str(error.name), map(str, PHASES)))
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... ({len(text) - _LONGEST} more characters)"
    return DescribedFault(type(error).__name__, text, trace, exhausted)
