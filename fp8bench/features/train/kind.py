"""A training among what a store keeps: how it is found, listed, shown, reported and exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8bench.features.train.kept import find_training, id_of, load_head, load_training, training_files
from fp8bench.features.train.values import KeptTraining, LayerReading
from fp8bench.jobs.kinds import Exports, KeptTable, Kind, Report, View
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import json_line


class TrainingKind(Kind[KeptTraining]):
    """Its report's table leaves readings of tensors out, which are millions: `show --csv` has them."""

    name = "training"
    holds = KeptTraining

    def find(self, word: str, store: Path) -> Path | None:
        return find_training(word, store)

    def names(self, path: Path) -> tuple[str, ...]:
        return id_of(path), path.parent.name

    def load(self, path: Path) -> KeptTraining:
        return load_training(path)

    def view(self, kept: KeptTraining) -> View:
        from fp8bench.features.train.data import as_csv, as_json
        from fp8bench.features.train.verdicts.verdicts import verdicts_of
        from fp8bench.features.train.view import page_of

        found = verdicts_of(kept.training, kept.lines)
        return View(partial(page_of, kept, found), partial(as_json, kept, found), partial(as_csv, kept, found))

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        return (partial(_line, path) for path in training_files(store))

    def report(self, kept: KeptTraining) -> Report:
        from fp8bench.features.train.data import as_csv
        from fp8bench.features.train.page import page_of
        from fp8bench.features.train.verdicts.verdicts import verdicts_of

        found = verdicts_of(kept.training, kept.lines)
        few = replace(kept, lines=tuple(line for line in kept.lines if not isinstance(line, LayerReading)))
        return Report(page_of(kept, found), as_csv(few, found))

    def exports(self, kept: KeptTraining) -> Exports:
        from fp8bench.features.train.data import send_training, write_training
        from fp8bench.features.train.verdicts.verdicts import verdicts_of

        found = verdicts_of(kept.training, kept.lines)
        return Exports(
            lambda folder: write_training(kept, found, folder),
            lambda project, files: send_training(kept, found, project, files),
        )


def _line(path: Path) -> str:
    """In the list of what is kept: '0a1b2c3d of 2026-01-05 12:00:00: nano in bf16, fp8'."""
    training = load_head(path)
    arms = ", ".join(arm.name for arm in training.arms if not arm.is_band)
    ranks, settings = training.request.ranks, training.request.settings
    together = "" if ranks is None else f", {ranks} ranks by {settings.parallel}"
    return f"{training.id} of {training.started[:19].replace('T', ' ')}: {settings.model} in {arms}{together}"


def histories(kept: KeptTraining, arm: str, store: Path) -> View:
    """What every way of delayed scaling would have done to an arm's amaxes."""
    from fp8bench.features.train.verdicts.histories import histories_of
    from fp8bench.features.train.view import histories_page

    found = histories_of(kept.training, kept.lines, arm)
    return View(partial(histories_page, kept.training, arm, found), lambda: json_line([encode(one) for one in found]))


KINDS = (TrainingKind(),)
TABLES = (
    KeptTable(
        "histories", "of a training: what every history, margin and interval would have done to this arm's amaxes",
        histories, of="training", metavar="ARM", rows=False,
    ),
)  # fmt: skip
