"""Watching whether the host waits for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def none_may_wait() -> Iterator[None]:
    """torch raises if the body waits for the device; its warning that this mode is a prototype is silenced."""
    _set("error")
    try:
        yield
    finally:
        _set("default")


@contextmanager
def waits() -> Iterator[list[str]]:
    result: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield result
        finally:
            torch.cuda.set_sync_debug_mode("default")
            result += [str(item.message) for item in said if "synchronizing CUDA operation" in str(item.message)]


def _set(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
