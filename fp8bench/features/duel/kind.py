"""A duel among what a store keeps: how it is found and shown."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fp8bench.features.duel.kept import find_duel, load_duel
from fp8bench.features.duel.values import Duel
from fp8bench.jobs.kinds import Kind, View


class DuelKind(Kind[Duel]):
    """It has no rows, and belongs to no history."""

    name = "duel"
    holds = Duel
    refused = ("csv", "tensorboard", "wandb")

    def find(self, word: str, store: Path) -> Path | None:
        return find_duel(word, store)

    def names(self, path: Path) -> tuple[str, ...]:
        return path.stem.rpartition("-")[2], path.stem

    def load(self, path: Path) -> Duel:
        return load_duel(path)

    def view(self, kept: Duel) -> View:
        from fp8bench.features.duel.view import as_json, page_of

        return View(partial(page_of, kept), partial(as_json, kept))


KINDS = (DuelKind(),)
