"""Reads ablations from the store: `ablations/<utc>-<id>/ablation.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.features.ablate.values import FILE_NAME, Ablation
from fp8bench.files import parse_json, read_file, remove_checksum
from fp8bench.jobs.kinds import ResultKind, ResultView
from fp8bench.model.codec import MalformedValueError, decode


class AblationKind(ResultKind[Ablation]):
    """Reads and shows stored ablations. They have no history, because the arms of an ablation are only compared with
    each other.
    """

    name = "ablation"
    holds = Ablation
    pattern = f"ablations/*/{FILE_NAME}"
    refused = ("log",)

    def load(self, path: Path) -> Ablation:
        try:
            ablation: Ablation = decode(Ablation, remove_checksum(parse_json(read_file(path))))
        except (OSError, ValueError, TypeError, MalformedValueError) as error:
            raise StoreError(f"{path} is not an ablation ({str(error)[:120]}).") from None
        return replace(ablation, path=str(path))

    def view(self, ablation: Ablation) -> ResultView:
        from fp8bench.features.ablate.view import encode_ablation_result, list_rows, render_page

        return ResultView(
            partial(render_page, ablation), partial(encode_ablation_result, ablation), partial(list_rows, ablation)
        )

    def report(self, ablation: Ablation) -> ResultView:
        return self.view(ablation)

    def lines(self, store: Path) -> Iterator[Callable[[], str]]:
        return (partial(self._make_listing_line, path) for path in self.files(store))

    def _make_listing_line(self, path: Path) -> str:
        ablation = self.load(path)
        return f"{self.names(path)[0]}  ablation of {ablation.suite}: {', '.join(ablation.names)}"


KINDS = (AblationKind(),)
