"""An exception of a request as an answer that crosses to the parent: in words, and whether memory did not suffice."""

from __future__ import annotations

import re
import sys
import traceback
from errno import ENOMEM
from typing import NamedTuple

from fp8bench.registry import devices

# What torch adds to the driver's words: where to look them up, and that the line may be another.
_ADVICE = re.compile(r"(?s)(?<=error: )([^\n]*)\n(?=.*(CUDA_LAUNCH_BLOCKING|AMD_SERIALIZE_KERNEL|docs\.nvidia\.com)).*")
# Longer texts are whole in the traceback alone.
_LONGEST = 1000


class PlantedFault(NamedTuple):
    """An exception as an answer: its kind, its text, its traceback, and whether a device's memory did not suffice."""

    kind: str
    text: str
    trace: str
    out_of_memory: bool


def described(error: BaseException, known: bool = True) -> PlantedFault:
    """An exception in words. Each device is asked whether it is an exhausted memory, where the devices are `known`.

    The advice that torch gives with a driver's error is kept in the traceback alone.
    """
    kinds = devices.names() if known else ()
    try:
        text, exhausted = str(error), any(devices.get(kind).is_out_of_memory(error) for kind in kinds)
    except Exception:  # noqa: BLE001 - it is foreign code that makes the text
        text, exhausted = "an exception that has no text", False
    # What no encoding can write (half a surrogate pair) is spelled out.
    text, trace = (
        said.encode("utf-8", "backslashreplace").decode() for said in (text, "".join(traceback.format_exception(error)))
    )
    text = _ADVICE.sub(r"\1", text)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == ENOMEM):
        text = f"{text or 'no memory'}. Free some, or raise this process's limit (ulimit -v)"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        text += f" for {sys.executable}. Install torch there, or run fp8bench with a Python that has it."
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... ({len(text) - _LONGEST} more characters)"
    return PlantedFault(type(error).__name__, text, trace, exhausted)
