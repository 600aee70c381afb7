"""Tables of what was compacted: whose commits still count, and their rows as far as somebody wants them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8bench.errors import StoreError
from fp8bench.store.asv.identity import Home
from fp8bench.store.compacted.manifest import (
    LineKey,
    Manifest,
    UnreadableIndex,
    load_manifest,
    parquet_of,
    points_of,
    same_stamps,
    without_runs,
)
from fp8bench.store.compacted.parquet import connected, counts_as, duckdb_here, read_columns, rows_of
from fp8bench.store.index.figure_files import CommitFigures, Fingerprints, are_known
from fp8bench.store.index.tables import FigureTable, Rows
from fp8bench.store.runs.listing import all_files, index_of

# So many rows are read at once.
_AT_ONCE = 500_000
_RESTORES = "`fp8bench store restore` writes"
Wanted = Callable[[str], bool]
Numbers = NDArray[np.int64]


class _Shape(NamedTuple):
    """A layout as far as it is wanted: its text, and the lines of its rows, in their order."""

    layout: bytes
    lines: Numbers


@dataclass(frozen=True)
class Compacted:
    """What was compacted of a store. `files` are its run files, with size and date; `bad` are partitions that do not
    count. It `is_alone` where the run files were all taken away: then it is all that is known."""

    store: Path
    manifest: Manifest
    files: dict[str, tuple[int, int]]
    bad: frozenset[str]
    is_alone: bool

    @cached_property
    def is_complete(self) -> bool:
        """Whether the run files are those that were there when all of them were compacted."""
        return bool(self.files) and self.files == self.manifest.files

    def unit(self, commit: str, names: Sequence[str], known: Fingerprints) -> CommitFigures[int] | None:
        """What was compacted of a commit, if it still counts for these run files."""
        unit = self.manifest.units.get(commit)
        if self.is_alone:
            return unit
        if unit is None or not are_known(unit.suites, known):
            return None
        if not self.is_complete and not same_stamps(unit.sources, names, self.files):
            return None
        return None if any(self.manifest.places[place].partition in self.bad for place in unit.places) else unit

    def home(self, place: int) -> Home:
        said = self.manifest.places[place].said
        machine = self.manifest.machines.values[said["machine"]]
        return Home(str(machine["machine"]), said["python"], said["interpreter"])

    def names(self, places: Sequence[int]) -> set[str]:
        """The names of the lines that tell something in some places."""
        alike = {(place.layout, place.silent) for place in map(self.manifest.places.__getitem__, places)}
        found: set[int] = set()
        for layout, silent in alike:
            found |= set(self._lines(layout)) - set(self.manifest.silents.values[silent])
        return {self.manifest.line_names[line] for line in found}

    def rows(self, places: Sequence[int]) -> int:
        return sum(len(self._lines(self.manifest.places[place].layout)) for place in places)

    def tables(self, places: Sequence[int], wanted: Wanted) -> dict[int, FigureTable]:
        """The tables of some places, with the wanted rows alone. Raises StoreError."""
        shapes = self._shapes(places, wanted)
        by_partition: dict[str, list[int]] = {}
        for place in sorted(places):
            known = self.manifest.places[place]
            if len(shapes[known.layout].lines):
                by_partition.setdefault(known.partition, []).append(place)
        rows: dict[int, Rows] = {}
        chosen = sorted({line for shape in shapes.values() for line in shape.lines.tolist()})
        share = len(chosen) / max(1, len(self.manifest.lines.values))
        group: list[str] = []
        expected = 0.0
        for name in by_partition:
            group.append(name)
            expected += share * self.manifest.partitions[name].rows
            if expected >= _AT_ONCE:
                rows |= self._read(group, by_partition, shapes, chosen)
                group, expected = [], 0.0
        rows |= self._read(group, by_partition, shapes, chosen) if group else {}
        return {
            place: FigureTable(self._said(place), shapes[self.manifest.places[place].layout].layout, rows[place])
            for place in places
            if place in rows
        }

    @cached_property
    def _connection(self) -> Any:
        return connected()

    @cached_property
    def _said(self) -> Callable[[int], dict[str, Any]]:
        return cache(self.manifest.said)

    def _lines(self, layout: int) -> list[int]:
        return self._layout(layout)[1]

    @cached_property
    def _layout(self) -> Callable[[int], tuple[list[Any], list[int]]]:
        """Layouts of the index, each read when it is asked for: what it says, and the line of each of its cells."""
        numbers = {tuple(line): number for number, line in enumerate(self.manifest.lines.values)}

        @cache
        def read(layout: int) -> tuple[list[Any], list[int]]:
            series, cells = json.loads(self.manifest.layouts.values[layout])
            return [series, cells], [numbers[key] for key in keys_of(series, cells)]

        return read

    def _shapes(self, places: Sequence[int], wanted: Wanted) -> dict[int, _Shape]:
        mask = np.array([wanted(name) for name in self.manifest.line_names], np.bool_)
        found = {}
        for layout in {self.manifest.places[place].layout for place in places}:
            (series, cells), lines = self._layout(layout)
            numbers = np.array(lines, np.int64)
            there = np.flatnonzero(mask[numbers]) if len(numbers) else numbers
            there = there[np.argsort(numbers[there])]
            text = json.dumps([series, [cells[place] for place in there.tolist()]], separators=(",", ":"))
            found[layout] = _Shape(text.encode(), numbers[there])
        return found

    def _read(
        self, names: Sequence[str], places: dict[str, list[int]], shapes: dict[int, _Shape], chosen: Sequence[int]
    ) -> dict[int, Rows]:
        """The rows of places in some partitions, held against what the index says they are."""
        here = sorted(place for name in names for place in places[name])
        paths = [parquet_of(self.store, name) for name in names]
        few = 2 * len(chosen) < len(self.manifest.lines.values)
        columns = read_columns(paths, chosen if few else None, self._connection)
        lines, owners = columns["line"].astype(np.int64), columns["place"].astype(np.int64)
        mask = np.zeros(max(len(self.manifest.lines.values), int(lines.max(initial=0)) + 1), np.bool_)
        mask[chosen] = True
        kept = np.flatnonzero(np.isin(owners, here) & mask[lines])
        order = kept[np.lexsort((lines[kept], owners[kept]))]
        wanted = [shapes[self.manifest.places[place].layout].lines for place in here]
        counts = [len(one) for one in wanted]
        meant = np.concatenate(wanted)
        if not np.array_equal(lines[order], meant) or not np.array_equal(owners[order], np.repeat(here, counts)):
            raise StoreError(
                f"{points_of(self.store)} lacks rows that its index names. Delete the folder, and the runs are read "
                "instead; `fp8bench store compact` makes it again."
            )
        rows = rows_of(columns)[order]
        ends = np.cumsum(counts).tolist()
        return {place: rows[low:high] for place, low, high in zip(here, [0, *ends], ends, strict=False)}


def keys_of(series: Sequence[Sequence[str]], cells: Sequence[tuple[int, object]]) -> list[LineKey]:
    return [LineKey(series[rank][0], json.dumps(cell), *series[rank][1:4]) for rank, cell in cells]


def open_compacted(store: Path) -> tuple[Compacted | None, tuple[str, ...]]:
    """What was compacted of a store, None where there is nothing of use, and sentences on what does not serve.

    Raises StoreError where that was all there is.
    """
    try:
        manifest = load_manifest(store)
    except FileNotFoundError:
        return None, ()
    except OSError as error:
        return None, (f"{index_of(store)} cannot be read ({error.strerror}); the runs are read instead",)
    except UnreadableIndex as error:
        if not all_files(store):
            raise without_runs(store, error) from None
        again = "" if error.newer else "; `fp8bench store compact` makes it again"
        return None, (f"{index_of(store)} does not serve: {error}. The runs are read instead{again}",)
    if duckdb_here() is None:
        return None, (f"{points_of(store)} is not read without DuckDB: pip install 'fp8bench[fleet]'",)
    bad = [name for name, partition in manifest.partitions.items() if not counts_as(parquet_of(store, name), partition)]
    files = stamps_of(store)
    is_alone = not files and bool(manifest.files)
    troubles = [f"{store} has no runs: figures are those that were compacted. {_RESTORES} the runs"] if is_alone else []
    lacking = 0 if is_alone else len(manifest.files.keys() - files.keys())
    if lacking:
        are = "a run file that was compacted is" if lacking == 1 else f"{lacking} run files that were compacted are"
        troubles.append(f"{are} not in {store}: {_RESTORES} what lacks, `fp8bench store compact` forgets it")
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        if is_alone:
            path = parquet_of(store, bad[0])
            raise StoreError(f"{path}{more} is not the file that was written, and {store} has no runs. Copy it again.")
        own = "is not the file that was written, and the runs are read instead; `fp8bench store compact` makes it again"
        troubles.append(f"{parquet_of(store, bad[0])}{more} {own}")
    return Compacted(store, manifest, manifest.files if is_alone else files, frozenset(bad), is_alone), tuple(troubles)


def stamps_of(store: Path) -> dict[str, tuple[int, int]]:
    """All run files by their names in the store, newest first, with size and date."""
    found = {}
    begin = len(str(store / "runs"))
    for path in map(str, all_files(store)):
        try:
            status = os.stat(path)  # noqa: PTH116 - thousands of them, and pathlib takes twice as long
        except OSError:
            continue
        found[f"runs{path[begin:]}"] = (status.st_size, status.st_mtime_ns)
    return found
