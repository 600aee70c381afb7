"""Names of files made of words that somebody else has chosen, and folders that can be written."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.model import Case

_UNSAFE = re.compile(r"[^A-Za-z0-9=,._+-]")
_LONGEST = {"workload": 40, "params": 72, "device": 16, "mode": 40}
_DIGITS = 8


def safe(text: str, longest: int = 80) -> str:
    """The text as a part of a path: other letters become _, and what is lost is made up for by a digest.

    Different texts stay different also where a file system does not tell A from a.
    """
    short = _cut(text, longest)
    return short if short == text.lower() else f"{short}-{_digest(text)}"


def name_of(case: Case) -> str:
    """A case as the name of a file or folder: 'gemm-m=512,n=512,k=512-cpu-bf16'. Long ones are cut, with a digest."""
    params = ",".join(f"{name}={value}" for name, value in case.params)
    parts = {"workload": case.workload, "params": params, "device": case.device.replace(":", ""), "mode": case.mode}
    short = "-".join(cut for name, part in parts.items() if (cut := _cut(part, _LONGEST[name])))
    whole = "-".join(part for part in parts.values() if part)
    return short if short == whole.lower() else f"{short}-{_digest(case.id)}"


def check_folder(option: str, folder: Path) -> None:
    """Make the folder if it is not there; raises UsageError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".fp8bench-{os.getpid()}-{time.monotonic_ns()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{option} {str(folder)!r:.200} cannot be written ({why}). Give a folder; it is made if it is not there."
        ) from None


def _cut(text: str, longest: int) -> str:
    """Never empty for a text that is not, and never a name that starts with a dot or a dash."""
    plain = _UNSAFE.sub("_", text)[:longest]
    return f"_{plain[1:]}" if plain[:1] in (".", "-") else plain


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
