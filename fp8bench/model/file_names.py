"""Makes file names that are safe on any system. Different cases or texts get different names."""

from __future__ import annotations

import re

from fp8bench.model.planned import Case

_UNSAFE_CHARACTER_PATTERN = re.compile(r"[^A-Za-z0-9=,._+-]")
_MAX_LENGTH_BY_PART = {"workload": 40, "params": 72, "device": 16, "mode": 40}
_DIGEST_LENGTH = 8


def format_start_time(start_time: str) -> str:
    """Formats a start time for file names, such as '20260105T120000.000Z'."""
    return re.sub(r"[-:]", "", start_time).partition("+")[0] + "Z"


def make_safe_file_name(text: str) -> str:
    """Returns a text that is safe as part of a path. Unsafe letters become _. A digest is added if the text was changed
    or has capital letters, so that different texts give different names even where letter case is ignored.
    """
    short_name = _shorten_to_safe_text(text, 80)
    return short_name if short_name == text.lower() else f"{short_name}-{_make_short_digest(text)}"


def name_case_file(case: Case) -> str:
    """Returns the name of a file or folder for a case, such as 'gemm-m=512,n=512,k=512-cpu-bf16'. A long name is cut
    and gets a digest.
    """
    params = ",".join(f"{name}={value}" for name, value in case.params)
    parts = {"workload": case.workload, "params": params, "device": case.device.replace(":", ""), "mode": case.mode}
    short_name = "-".join(
        short_part
        for name, part in parts.items()
        if (short_part := _shorten_to_safe_text(part, _MAX_LENGTH_BY_PART[name]))
    )
    full_name = "-".join(part for part in parts.values() if part)
    # Append a digest of the id if letters were cut or replaced: another id may differ only in these letters.
    return short_name if short_name == full_name.lower() else f"{short_name}-{_make_short_digest(case.id)}"


def _shorten_to_safe_text(text: str, max_length: int) -> str:
    """Returns at most `max_length` letters of a text, with _ for unsafe letters and for a dot or dash at the beginning.
    Returns '' only for an empty text.
    """
    safe_text = _UNSAFE_CHARACTER_PATTERN.sub("_", text)[:max_length]
    return f"_{safe_text[1:]}" if safe_text[:1] in (".", "-") else safe_text


def _make_short_digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_LENGTH]
