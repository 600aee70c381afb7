"""Whether what was compacted is what was written, every bit of it."""

from __future__ import annotations

from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.model import Fault
from fp8bench.store.compacted.archive import contents, is_whole, open_archive
from fp8bench.store.compacted.manifest import (
    Archive,
    Partition,
    Unreadable,
    load_manifest,
    parquet_files,
    parquet_of,
)
from fp8bench.store.compacted.parquet import check_file, connected, counts_as, duckdb_here
from fp8bench.store.runs.listing import index_of

_AGAIN = "`fp8bench store compact` makes it again; until then the runs are read"


def check_compacted(store: Path) -> tuple[list[Fault], int]:
    """What is wrong with it, and how many Parquet files there are. Nothing is lost by any of it: the runs have all."""
    try:
        parquet = load_manifest(store).parquet
    except FileNotFoundError:
        return [], 0
    except (OSError, Unreadable) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return [Fault(str(index_of(store)), f"it does not serve ({why})", _AGAIN)], 0
    faults = []
    for name, one in parquet.items():
        path = parquet_of(store, name)
        why = _why_not(path, one)
        faults += [Fault(str(path), why, _AGAIN)] if why else []
    known = {parquet_of(store, name) for name in parquet}
    foreign = [path for path in parquet_files(store) if path not in known]
    what, remedy = "it is of no compaction, and nothing reads it", "Look whether it is of use, and delete it"
    faults += [Fault(str(path), what, remedy, broken=False) for path in foreign]
    return faults, len(parquet)


def _why_not(path: Path, one: Partition | Archive) -> str:
    try:
        if not path.exists():
            return "it is not there"
        if isinstance(one, Partition) and not counts_as(path, one):
            return "it is not the file that was written"
        if not is_whole(path, one.size, one.digest):
            return "it does not hold what was written into it"
        if duckdb_here() is not None and not _has_all(path, one):
            return "it lacks rows that were written into it"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except StoreError as error:
        return str(error).removeprefix(f"{path} ").partition(". ")[0]
    return ""


def _has_all(path: Path, one: Partition | Archive) -> bool:
    """Whether everything is in it, each value and byte of which is read."""
    if isinstance(one, Partition):
        with connected() as connection:
            return check_file(path, connection) == (one.rows, one.total)
    with open_archive() as connection:
        sizes = [file.size for file, _ in contents(path, connection)]
        return (len(sizes), sum(sizes)) == (one.files, one.bytes)
