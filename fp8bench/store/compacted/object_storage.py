"""What was compacted, in object storage: published there by one store, and fetched by whoever wants to read it.

A Parquet file becomes an object whose name has its digest, and the index is put after all of them, so that whoever
fetches gets one publication whole or a sentence. The files of the store come with it, so that every command works on
what was fetched. fsspec comes with torch and knows the addresses; what speaks to them are packages of their own: s3fs
for s3://, gcsfs for gs://, adlfs for az://.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fp8bench.errors import Fp8benchError, StoreError, UsageError
from fp8bench.files import PARTIAL, is_address, locked, make_store, write_whole
from fp8bench.store.compacted.archive import is_current, is_whole
from fp8bench.store.compacted.manifest import (
    ARCHIVE,
    Archive,
    Manifest,
    Partition,
    Unreadable,
    parquet_files,
    parquet_of,
    points_of,
    read_manifest,
)
from fp8bench.store.compacted.parquet import need_duckdb
from fp8bench.store.compacted.restore import Fetched, Restored, load_fetched, save_fetched, update
from fp8bench.store.runs.listing import all_files, index_of

_INDEX = "index.json"
# An index from elsewhere must not say where else on this machine to write.
_PARTITION = re.compile(rf"({ARCHIVE}/)?machine=[^/\\]+/month=[\w-]+|{ARCHIVE}/beside")
_LOCK_SECONDS = 5.0


class Copied(NamedTuple):
    """How many Parquet files were copied, were there already, and were removed because nothing names them any more;
    `stale` where run files are others than when the store was compacted."""

    copied: int
    there: int
    removed: int
    stale: bool = False

    @property
    def words(self) -> str:
        """For a person."""
        later = "; run files have changed since: `fp8bench store compact` takes them in" if self.stale else ""
        return f"{self.copied} Parquet files copied, {self.there} there already, {self.removed} removed{later}"


def publish(store: Path, address: str) -> Copied:
    """Make what was compacted of a store what lies at an address. Raises UsageError or StoreError."""
    with _at(address) as (files, root), locked(points_of(store), _LOCK_SECONDS):
        try:
            content = index_of(store).read_bytes()
        except FileNotFoundError:
            raise StoreError(f"nothing was compacted of {store}: run `fp8bench store compact` first.") from None
        manifest = _read(content, str(index_of(store)))
        sizes = {key: about["size"] for key, about in files.find(root, detail=True).items()}
        wanted = {_object(root, name, one): (name, one) for name, one in manifest.parquet.items()}
        before = _objects_before(files, root, address) if f"{root}/{_INDEX}" in sizes else set()
        missing = [key for key, (_, one) in wanted.items() if sizes.get(key) != one.size]
        for key in missing:
            name, one = wanted[key]
            path = parquet_of(store, name)
            if not is_whole(path, one.size, one.digest):
                raise StoreError(f"{path} is not the file that was written: run `fp8bench store compact` first.")
            files.makedirs(key.rpartition("/")[0], exist_ok=True)
            files.put_file(str(path), key)
        files.pipe_file(f"{root}/{_INDEX}", content)
        old = [key for key in before - wanted.keys() if key in sizes]
        for key in old:
            files.rm_file(key)
        stale = bool(all_files(store)) and not is_current(store, manifest)
        return Copied(len(missing), len(wanted) - len(missing), len(old), stale)


def _objects_before(files: Any, root: str, address: str) -> set[str]:
    """The Parquet files of the publication before: what else lies there is somebody's, and stays."""
    try:
        manifest = read_manifest(files.cat_file(f"{root}/{_INDEX}"))
    except Unreadable as error:
        raise StoreError(f"{address}/{_INDEX} does not serve: {error}. Give another address, or delete it.") from None
    return {_object(root, name, one) for name, one in manifest.parquet.items()}


def fetch(address: str, store: Path) -> tuple[Copied, Restored]:
    """Make a store what was published at an address: a new one, or one that was fetched from there before.

    Files of its own stay, and those from there that were changed here. Raises UsageError or StoreError.
    """
    need_duckdb()
    address = address.rstrip("/")
    with _at(address) as (files, root):
        before = _fetched_before(store, address)
        try:
            content = files.cat_file(f"{root}/{_INDEX}")
        except FileNotFoundError:
            raise StoreError(
                f"nothing was published at {address}: {_INDEX} is not there. `fp8bench store publish` puts it there."
            ) from None
        manifest = _read(content, f"{address}/{_INDEX}")
        make_store(store)
        with locked(points_of(store), _LOCK_SECONDS):
            paths = {parquet_of(store, name): (name, one) for name, one in manifest.parquet.items()}
            missing = [path for path, (_, one) in paths.items() if not is_whole(path, one.size, one.digest)]
            for path in missing:
                _get(files, _object(root, *paths[path]), path, paths[path][1], address)
            # Before any file of the store: of those that a kill has kept from coming the index says that they lack.
            save_fetched(store, before)
            write_whole(index_of(store), content)
            old = [path for path in parquet_files(store) if path not in paths]
            for path in old:
                path.unlink()
            restored = update(store, manifest, before)
        return Copied(len(missing), len(paths) - len(missing), len(old)), restored


def _fetched_before(store: Path, address: str) -> Fetched:
    """What a store has from an address. Raises StoreError for one that is of something else."""
    before = load_fetched(store)
    if before.address not in ("", address):
        what = f"was fetched from {before.address}"
    elif not before.address and (index_of(store).exists() or all_files(store)):
        what = "has runs of its own"
    else:
        return before._replace(address=address)
    raise StoreError(f"{store} {what}. Give --store a folder for what was published at {address}.")


def _get(files: Any, key: str, path: Path, one: Partition | Archive, address: str) -> None:
    """Get an object in the place of a file, if it is what the index says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{one.digest}{PARTIAL}")
    try:
        with contextlib.suppress(FileNotFoundError):
            files.get_file(key, str(partial))
        if not is_whole(partial, one.size, one.digest):
            raise StoreError(
                f"{key} is not there, or not what the index of {address} says: somebody published meanwhile, or it was "
                "changed. Fetch again; if that does not help, publish again."
            )
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _object(root: str, name: str, one: Partition | Archive) -> str:
    return f"{root}/{name}/{one.digest}.parquet"


def _read(content: bytes, name: str) -> Manifest:
    try:
        manifest = read_manifest(content)
        if not all(_PARTITION.fullmatch(one) for one in manifest.parquet):
            raise Unreadable("it is not what was written")
    except Unreadable as error:
        raise StoreError(f"{name} does not serve: {error}.") from None
    return manifest


@contextlib.contextmanager
def _at(address: str) -> Iterator[tuple[Any, str]]:
    """What speaks to an address, and its path there. Whatever is raised in the body becomes a StoreError."""
    import fsspec

    if not is_address(address):
        raise UsageError(f"ADDRESS is {address!r}; expected one like s3://bucket/box.")
    try:
        files, root = fsspec.url_to_fs(address, use_listings_cache=False)
    except (ImportError, ValueError) as error:  # the package that speaks to it is not installed; nobody knows it
        raise UsageError(f"{address}: {_told(error)}.") from None
    try:
        yield files, root.rstrip("/")
    except Fp8benchError:
        raise
    except Exception as error:
        raise StoreError(
            f"{address}: {type(error).__name__}: {_told(error)}. What was copied stays; run it again to go on."
        ) from None


def _told(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or "it says no more"
