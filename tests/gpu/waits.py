"""Where the host may not wait for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def none_may_wait() -> Iterator[None]:
    """torch raises where the body waits for the device; its warning that this mode is a prototype is silenced."""
    _set("error")
    try:
        yield
    finally:
        _set("default")


@contextmanager
def waits() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [str(one.message) for one in said if "synchronizing CUDA operation" in str(one.message)]


def _set(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
