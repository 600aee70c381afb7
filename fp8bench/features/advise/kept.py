"""Advice that was measured: `<store>/advice.jsonl`, a line each, append-only, in any order.

A line is {"version": 1, "checked": {...}}.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.features.advise.values import Checked
from fp8bench.files import append_lines, sealed_line
from fp8bench.model.codec import Malformed, decode, encode
from fp8bench.store.kept_lines import Content, UnknownKind, sheet_of, take_lines

_VERSION = 1


def checks_of(store: Path) -> Path:
    """Where a store keeps them."""
    return store / "advice.jsonl"


def load_checks(store: Path) -> tuple[tuple[Checked, ...], list[str]]:
    """Oldest first, each once, and what is wrong with lines that were left out: none without the file."""
    path = checks_of(store)
    found: dict[Checked, None] = {}

    def take(content: Content) -> None:
        if content.get("version") != _VERSION:
            raise UnknownKind
        if "checked" not in content:
            raise Malformed("it has no check")
        found[decode(Checked, content["checked"])] = None

    try:
        sheet = sheet_of(path.read_bytes() if path.exists() else b"")
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror}).") from None
    troubles = take_lines(sheet, take)
    return tuple(sorted(found, key=lambda one: one.when)), troubles


def keep_checks(store: Path, checked: Sequence[Checked]) -> None:
    """Write them through to the disk."""
    path = checks_of(store)
    try:
        append_lines(path, [sealed_line({"version": _VERSION, "checked": encode(one)}) for one in checked])
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error.strerror}). Choose another --store.") from None
