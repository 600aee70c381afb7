"""Whether what was compacted is what was written, every bit of it."""

from __future__ import annotations

from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.files import PARTIAL
from fp8bench.model import Fault
from fp8bench.store.compacted.archive import contents, is_whole
from fp8bench.store.compacted.manifest import ARCHIVE, Archive, Partition, Unreadable, load_manifest, points_of
from fp8bench.store.compacted.parquet import check_file, connected, counts_as, duckdb_here
from fp8bench.store.runs.listing import all_files, index_of

_AGAIN = "`fp8bench store compact` makes it again; until then the runs are read"


def check_compacted(store: Path) -> tuple[list[Fault], int]:
    """What is wrong with it, and how many files it has. Nothing is lost by any of it: the runs have all."""
    try:
        written = load_manifest(store).written(store)
    except FileNotFoundError:
        return [], 0
    except (OSError, Unreadable) as error:
        why = error.strerror if isinstance(error, OSError) else error
        remedy = _AGAIN if all_files(store) else "Get it from a copy; the fp8bench that wrote it restores its runs"
        return [Fault(str(index_of(store)), f"it does not serve ({why})", remedy)], 0
    faults = []
    for path, one in written.items():
        why = _why_not(path, one)
        faults += [Fault(str(path), why, _AGAIN)] if why else []
    packed = (path for path in (store / ARCHIVE).rglob("*") if path.is_file() and not path.name.endswith(PARTIAL))
    foreign = sorted({*points_of(store).glob("*/*/points.parquet"), *packed} - written.keys())
    what, remedy = "it is of no compaction, and nothing reads it", "Look whether it is of use, and delete it"
    faults += [Fault(str(path), what, remedy, broken=False) for path in foreign]
    return faults, len(written)


def _why_not(path: Path, one: Partition | Archive) -> str:
    try:
        if not path.exists():
            return "it is not there"
        if isinstance(one, Partition) and not counts_as(path, one):
            return "it is not the file that was written"
        if not is_whole(path, one.size, one.digest):
            return "it does not hold what was written into it"
        if not _has_all(path, one):
            return "it lacks rows that were written into it"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except StoreError as error:
        return str(error).removeprefix(f"{path} ").partition(". ")[0]
    return ""


def _has_all(path: Path, one: Partition | Archive) -> bool:
    """Whether everything is in it, each value and byte of which is read. Raises StoreError."""
    if isinstance(one, Archive):
        return sum(1 for _ in contents(path, one)) == len(one.files)
    if duckdb_here() is None:
        return True
    with connected() as connection:
        return check_file(path, connection) == (one.rows, one.total)
