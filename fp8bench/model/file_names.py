"""Makes file names that are safe on any system, and different for different things."""

from __future__ import annotations

import re

from fp8bench.model.planned import Case

_UNSAFE = re.compile(r"[^A-Za-z0-9=,._+-]")
_MAX_LENGTHS = {"workload": 40, "params": 72, "device": 16, "mode": 40}
_DIGEST_LENGTH = 8


def stamp(moment: str) -> str:
    """Formats a start time for file names, such as '20260105T120000.000Z'."""
    return re.sub(r"[-:]", "", moment).partition("+")[0] + "Z"


def safe(text: str) -> str:
    """Returns a text that is safe as part of a path. Unsafe letters become _. If the text was changed, or
    has capital letters, a digest is added. So different texts give different names even if letter case is ignored.
    """
    short_name = _shorten(text, 80)
    return short_name if short_name == text.lower() else f"{short_name}-{_make_short_digest(text)}"


def name_of(case: Case) -> str:
    """Returns the name of a file or folder for a case, such as 'gemm-m=512,n=512,k=512-cpu-bf16'. Long names are cut
    and get a digest."""
    params = ",".join(f"{name}={value}" for name, value in case.params)
    parts = {"workload": case.workload, "params": params, "device": case.device.replace(":", ""), "mode": case.mode}
    short_name = "-".join(cut for name, part in parts.items() if (cut := _shorten(part, _MAX_LENGTHS[name])))
    full_name = "-".join(part for part in parts.values() if part)
    # Cases that differ only in a part that was cut or replaced must not share a file.
    return short_name if short_name == full_name.lower() else f"{short_name}-{_make_short_digest(case.id)}"


def _shorten(text: str, max_length: int) -> str:
    """Returns a safe text of at most `max_length` letters that does not begin with a dot or dash. Only an empty text
    gives ''."""
    safe_text = _UNSAFE.sub("_", text)[:max_length]
    return f"_{safe_text[1:]}" if safe_text[:1] in (".", "-") else safe_text


def _make_short_digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
