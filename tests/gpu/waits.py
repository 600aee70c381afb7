"""Where the host may not wait for a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def none_may_wait() -> Iterator[None]:
    """torch raises where the body waits for the device. That this mode is a prototype it tells as a warning, once."""
    _set("error")
    try:
        yield
    finally:
        _set("default")


def _set(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
