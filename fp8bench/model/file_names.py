"""Names of files that are safe on any system, and differ where what they name differs."""

from __future__ import annotations

import re

from fp8bench.model.planned import Case

_UNSAFE = re.compile(r"[^A-Za-z0-9=,._+-]")
_LONGEST = {"workload": 40, "params": 72, "device": 16, "mode": 40}
_DIGITS = 8


def stamp(moment: str) -> str:
    """Formats a start time for file names: '20260105T120000.000Z'."""
    return re.sub(r"[-:]", "", moment).partition("+")[0] + "Z"


def safe(text: str) -> str:
    """Makes a text part of a path: unsafe letters become _, and a digest distinguishes such names, whatever their
    case."""
    short = _shorten(text, 80)
    return short if short == text.lower() else f"{short}-{_digest(text)}"


def name_of(case: Case) -> str:
    """A case as the name of a file or folder: 'gemm-m=512,n=512,k=512-cpu-bf16'. Long ones are cut, with a digest."""
    params = ",".join(f"{name}={value}" for name, value in case.params)
    parts = {"workload": case.workload, "params": params, "device": case.device.replace(":", ""), "mode": case.mode}
    short = "-".join(cut for name, part in parts.items() if (cut := _shorten(part, _LONGEST[name])))
    full_name = "-".join(part for part in parts.values() if part)
    # Two cases that differ only in what was cut or replaced must not share a file.
    return short if short == full_name.lower() else f"{short}-{_digest(case.id)}"


def _shorten(text: str, longest: int) -> str:
    """Not empty unless the text is; never begins with a dot or a dash."""
    plain = _UNSAFE.sub("_", text)[:longest]
    return f"_{plain[1:]}" if plain[:1] in (".", "-") else plain


def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
