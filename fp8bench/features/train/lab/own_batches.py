"""Batches of a user's own: the same for every arm of a seed, in whatever order arms ask for them, and after a resume.

Nothing of a place is kept: a function is asked for it, and an iterable is begun anew and gone through up to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fp8bench.errors import UsageError
from fp8bench.features.train.lab.optimizer import seed_of
from fp8bench.model import DeviceFacts
from fp8bench.nn.own_model import Given, seeded, tensors_in
from fp8bench.user_code import own_words

# Of held-out batches that do not end so many are looked at; a function is asked for so few.
_MOST_HELD_OUT, _ASKED_HELD_OUT = 64, 8
# So many first ones are compared with themselves.
_COMPARED = 3


class OwnBatches:
    """Batch `at` a place, counted from 0: of an iterable in its order, again and again; of a function what it gives."""

    def __init__(self, name: str, given: Given, seed: int, facts: DeviceFacts) -> None:
        self._name, self._given, self._seed, self._facts = name, given, seed, facts
        self._source = given.batches
        self._next, self._epoch = 0, 0
        self._iterator: Iterator[Any] | None = None
        if self._source is not None and not callable(self._source):
            self._refuse_once()

    def _refuse_once(self) -> None:
        once = iter(self._source) is self._source
        if once or getattr(self._source, "persistent_workers", False):
            why = "can be gone through once" if once else "keep their workers, which arms cannot share"
            raise UsageError(
                f"{self._name}: its batches {why}, and every arm and seed begins anew. Give a list, a DataLoader "
                "without persistent_workers, or a function of step and seed."
            )

    def at(self, place: int) -> Any:
        if self._source is None:
            return self._given.batch
        try:
            if callable(self._source):
                with self._drawn("batch", place):
                    return self._source(place, self._seed)
            return self._read(place)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self._name}: its batch {place} cannot be had: {own_words(error)}.") from error

    def _read(self, place: int) -> Any:
        if place < self._next:
            self._next, self._epoch, self._iterator = 0, 0, None
        while True:
            batch = self._following()
            self._next += 1
            if self._next > place:
                return batch

    def _following(self) -> Any:
        """The next batch; of the next epoch where this one ends."""
        for _ in range(2):
            if self._iterator is None:
                with self._drawn("epoch", self._epoch):
                    self._iterator = iter(self._source)
            with self._drawn("batch", self._next):
                for batch in self._iterator:
                    return batch
            self._epoch, self._iterator = self._epoch + 1, None
        raise UsageError(f"{self._name}: its batches end before the first one. Give at least one.")

    def _drawn(self, purpose: str, number: int) -> Any:
        return seeded(seed_of(purpose, self._seed, number), self._facts)


def held_out_of(name: str, given: Given, facts: DeviceFacts) -> list[Any]:
    """Batches that are looked at and never trained on, always the same ones; none where the maker gives none."""
    source = given.held_out
    if source is None:
        return []
    one = isinstance(source, Tensor | dict | tuple)
    try:
        with seeded(seed_of("held-out"), facts):
            if callable(source):
                return [source(step, 0) for step in range(_ASKED_HELD_OUT)]
            return [source] if one else list(islice(iter(source), _MOST_HELD_OUT))
    except Exception as error:
        raise UsageError(f"{name}: its held_out batches cannot be had: {own_words(error)}.") from error


def check_batches(name: str, given: Given, seed: int, facts: DeviceFacts) -> None:
    """Raise UsageError where batches are others when they are read again: arms would not be trained on the same."""
    first, again = (OwnBatches(name, given, seed, facts) for _ in range(2))
    read = [first.at(place) for place in range(_COMPARED)]
    for place, batch in enumerate(read):
        if not _same(batch, again.at(place)):
            raise UsageError(
                f"{name}: its batch {place} is another one when it is read again, and every arm has to see the same. "
                "Draw it from torch, random or numpy's own generators, which are seeded here, or from the step and "
                "seed that a function is given."
            )


def _same(one: Any, other: Any) -> bool:
    pairs = list(tensors_in(one)), list(tensors_in(other))
    return [path for path, _ in pairs[0]] == [path for path, _ in pairs[1]] and all(
        left.dtype == right.dtype and torch.equal(left.nan_to_num(), right.nan_to_num())
        for (_, left), (_, right) in zip(*pairs, strict=True)
    )


def size_of(batch: Any) -> int:
    """Tokens of a batch whose first tensor has numbers of them; else its examples."""
    first = next((tensor for _, tensor in tensors_in(batch)), None)
    if first is None or not first.ndim:
        return 1
    whole = not first.is_floating_point() and not first.is_complex() and first.ndim > 1
    return first.numel() if whole else first.shape[0]
