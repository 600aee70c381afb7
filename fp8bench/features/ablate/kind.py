"""An ablation as a stored result: `ablations/<utc>-<id>/ablation.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.features.ablate.values import KEPT, Ablation
from fp8bench.files import read_file, unseal
from fp8bench.jobs.kinds import Kind, View
from fp8bench.model.codec import Malformed, decode


class AblationKind(Kind[Ablation]):
    """Ablations have no history, because their arms are measured only for comparison with each other."""

    name = "ablation"
    holds = Ablation
    pattern = f"ablations/*/{KEPT}"
    refused = ("log",)

    def load(self, path: Path) -> Ablation:
        try:
            ablation: Ablation = decode(Ablation, unseal(json.loads(read_file(path))))
        except (OSError, ValueError, TypeError, RecursionError, Malformed) as error:
            raise StoreError(f"{path} is not an ablation ({str(error)[:120]}).") from None
        return replace(ablation, path=str(path))

    def view(self, ablation: Ablation) -> View:
        from fp8bench.features.ablate.view import page_of, rows_of, value_of

        return View(partial(page_of, ablation), partial(value_of, ablation), partial(rows_of, ablation))

    def report(self, ablation: Ablation) -> View:
        return self.view(ablation)

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        return (partial(self._line, path) for path in self.files(store))

    def _line(self, path: Path) -> str:
        ablation = self.load(path)
        return f"{self.names(path)[0]}  ablation of {ablation.suite}: {', '.join(ablation.names)}"


KINDS = (AblationKind(),)
