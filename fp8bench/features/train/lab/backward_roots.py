"""What backward begins with, for who watches a module whose loss is made outside of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class BackwardListener(ABC):
    """Hears of every backward while it listens; of those inside another one, as of checkpoints, it hears nothing."""

    @abstractmethod
    def backward_begins(self, root: Tensor | None) -> None:
        """The number that it begins with, with its graph; None where it is no single number."""

    @abstractmethod
    def backward_ended(self, root: Tensor | None) -> None:
        """The number it began with, None where it was no single number."""


_listeners: list[BackwardListener] = []
_running: list[bool] = []
_plain = torch.autograd.backward


@contextmanager
def listening(listener: BackwardListener) -> Iterator[None]:
    """Every way into backward passes by `torch.autograd.backward`, which is wrapped while anybody listens."""
    _listeners.append(listener)
    torch.autograd.backward = _heard  # type: ignore[assignment]
    try:
        yield
    finally:
        _listeners.remove(listener)
        if not _listeners and torch.autograd.backward is _heard:
            torch.autograd.backward = _plain


def _heard(tensors: Tensor | Sequence[Tensor], *args: Any, **named: Any) -> None:
    if _running:
        return _plain(tensors, *args, **named)
    listeners, root = tuple(_listeners), _number(tensors)
    for listener in listeners:
        listener.backward_begins(root)
    _running.append(True)
    try:
        _plain(tensors, *args, **named)
    finally:
        _running.pop()
    for listener in listeners:
        listener.backward_ended(None if root is None else root.detach().reshape(()))
    return None


def _number(tensors: Tensor | Sequence[Tensor]) -> Tensor | None:
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    alone = found[0] if len(found) == 1 else None
    return alone if alone is not None and alone.numel() == 1 else None


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Those in what a module gives back, in tuples, dictionaries and named outputs."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from tensors_in(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from tensors_in(value)
