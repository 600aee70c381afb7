"""Whether what was compacted is what was written, every bit of it."""

from __future__ import annotations

from pathlib import Path

from fp8bench.errors import StoreError
from fp8bench.model import Fault
from fp8bench.store.compacted.manifest import Partition, Unreadable, index_of, load_manifest, points_of
from fp8bench.store.compacted.parquet import FILE, check_file, connected, counts_as, duckdb_here
from fp8bench.store.index.figure_files import digest_of

_AGAIN = "`fp8bench store compact` makes it again; until then the runs are read"


def check_compacted(store: Path) -> tuple[list[Fault], int]:
    """What is wrong with it, and how many Parquet files there are. Nothing is lost by any of it: the runs have all."""
    try:
        partitions = load_manifest(store).partitions
    except FileNotFoundError:
        return [], 0
    except (OSError, Unreadable) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return [Fault(str(index_of(store)), f"it does not serve ({why})", _AGAIN)], 0
    faults = []
    for name, one in partitions.items():
        path = points_of(store) / name / FILE
        why = _why_not(path, one)
        faults += [Fault(str(path), why, _AGAIN)] if why else []
    known = {points_of(store) / name / FILE for name in partitions}
    foreign = sorted(set(points_of(store).glob(f"*/*/{FILE}")) - known)
    what, remedy = "it is of no compaction, and nothing reads it", "Look whether it is of use, and delete it"
    faults += [Fault(str(path), what, remedy, broken=False) for path in foreign]
    return faults, len(partitions)


def _why_not(path: Path, partition: Partition) -> str:
    try:
        if not counts_as(path, partition):
            return "it is not the file that was written" if path.exists() else "it is not there"
        if digest_of(path) != partition.digest:
            return "it does not hold what was written into it"
        if duckdb_here() is not None:
            with connected() as connection:
                if check_file(path, connection) != (partition.rows, partition.total):
                    return "it lacks rows that were written into it"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except StoreError as error:
        return str(error).removeprefix(f"{path} ").partition(". ")[0]
    return ""
