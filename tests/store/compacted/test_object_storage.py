"""What was compacted, published and fetched: one publication whole, or a sentence, and no object of others touched."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import zlib
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from fp8bench.errors import StoreError, UsageError
from fp8bench.store.compacted.manifest import points_of
from fp8bench.store.compacted.object_storage import Copied, fetch, publish
from fp8bench.store.compacted.restore import Restored
from fp8bench.store.runs.listing import index_of
from tests.histories import keep, run_at
from tests.store.compacted.test_compacted import compacted, opened, told, words
from tests.store.compacted.test_compacted_edges import six_months

ADDRESS = "memory://bucket/box"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five months, compacted."""
    found = tmp_path_factory.mktemp("made")
    six_months(found)
    compacted(found)
    return found


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """A copy of it, with the dates of its files."""
    return shutil.copytree(made, tmp_path / "box")


def objects() -> Any:
    return fsspec.filesystem("memory").store


def figures(store: Path) -> str:
    return words([told(opened(store))[place] for place in (1, 2)])


def another_month(store: Path) -> None:
    """A new run in the first month, and one in a month of its own."""
    keep(store, run_at(6, 20))
    keep(store, run_at(7, 9000))
    compacted(store)


def test_what_is_fetched_is_what_was_published(store: Path, tmp_path: Path) -> None:
    assert publish(store, ADDRESS) == Copied(10, 0, 0)
    assert publish(store, ADDRESS) == Copied(0, 10, 0)
    there = tmp_path / "there"
    assert fetch(ADDRESS, there) == (Copied(10, 0, 0), Restored(written=6))
    assert fetch(ADDRESS, there) == (Copied(0, 10, 0), Restored(there=6))
    assert figures(there) == figures(store)
    another_month(store)
    assert publish(store, f"{ADDRESS}/") == Copied(4, 8, 2)
    assert fetch(f"{ADDRESS}/", there) == (Copied(4, 8, 0), Restored(written=2, there=6))
    assert figures(there) == figures(store)
    assert len(objects()) == 13


def test_what_was_not_compacted_is_said(store: Path, tmp_path: Path) -> None:
    """Not of a store whose runs are elsewhere: what was compacted is all of it."""
    keep(store, run_at(6, 20))
    found = publish(store, ADDRESS)
    assert found == Copied(10, 0, 0, stale=True)
    assert found.words.endswith("run files have changed since: `fp8bench store compact` takes them in")
    fetch(ADDRESS, tmp_path / "there")
    assert publish(tmp_path / "there", f"{ADDRESS}/copy") == Copied(10, 0, 0)


def test_a_month_that_is_gone_and_what_is_not_ours(store: Path, tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/bucket/box/machine=box/month=2026-01/of-others.parquet", b"theirs")
    publish(store, ADDRESS)
    there = tmp_path / "there"
    fetch(ADDRESS, there)
    months = {path.name[:6]: path for path in sorted((store / "runs").rglob("*.jsonl"), reverse=True)}
    months["202604"].unlink()
    compacted(store)
    assert publish(store, ADDRESS) == Copied(0, 8, 2)
    assert fetch(ADDRESS, there) == (Copied(0, 8, 2), Restored(there=5, removed=1))
    assert figures(there) == figures(store)
    assert sum(name.endswith("of-others.parquet") for name in objects()) == 1


@pytest.mark.parametrize("ends_at", range(7))
def test_a_publication_that_was_cut_off(
    store: Path, tmp_path: Path, ends_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its writes: what is fetched is the one before, and the next one does the rest."""
    publish(store, ADDRESS)
    before = figures(store)
    another_month(store)
    writes = count()

    def cut_off(name: str) -> None:
        real = getattr(MemoryFileSystem, name)

        def write(self: Any, *arguments: Any, **options: Any) -> Any:
            if next(writes) == ends_at:
                raise ConnectionResetError("the line is dead")
            return real(self, *arguments, **options)

        monkeypatch.setattr(MemoryFileSystem, name, write)

    with monkeypatch.context():
        for name in ("put_file", "pipe_file", "rm_file"):
            cut_off(name)
        with pytest.raises(StoreError, match=r"ConnectionResetError: the line is dead\. What was copied stays"):
            publish(store, ADDRESS)
    monkeypatch.undo()
    fetch(ADDRESS, tmp_path / "there")
    assert figures(tmp_path / "there") == (before if ends_at < 5 else figures(store))
    publish(store, ADDRESS)
    fetch(ADDRESS, tmp_path / "there")
    assert figures(tmp_path / "there") == figures(store)


def flipped(content: bytes) -> bytes:
    return content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]


@pytest.mark.parametrize("how", ["flipped", "gone", "cut"])
def test_objects_that_are_not_what_was_published(store: Path, tmp_path: Path, how: str) -> None:
    publish(store, ADDRESS)
    another_month(store)
    files = fsspec.filesystem("memory")
    before = set(objects())
    publish(store, ADDRESS)
    (name, *_) = sorted(set(objects()) - before)
    content = files.cat_file(name)
    if how == "gone":
        files.rm_file(name)
    else:
        files.pipe_file(name, flipped(content) if how == "flipped" else content[:100])
    with pytest.raises(StoreError, match=r"is not there, or not what the index of .* says"):
        fetch(ADDRESS, tmp_path / "there")
    assert not index_of(tmp_path / "there").exists()  # of what was fetched in part nothing is told
    assert not list((tmp_path / "there").rglob("*.partial"))


def with_partition(content: bytes, name: str) -> bytes:
    """An index with a right check sum that names a Parquet file somewhere else."""
    plain = json.loads(content.partition(b"\n")[2])
    plain["partitions"][name] = next(iter(plain["partitions"].values()))
    body = json.dumps(plain).encode()
    return b"%s %08x\n%s" % (content.partition(b"\n")[0].rpartition(b" ")[0], zlib.crc32(body), body)


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "machine=a/month=../b", "machine=a", "archive/../x"])
def test_an_index_that_points_elsewhere(store: Path, tmp_path: Path, name: str) -> None:
    publish(store, ADDRESS)
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/box/index.json", with_partition(files.cat_file("/bucket/box/index.json"), name))
    with pytest.raises(StoreError, match=r"index\.json does not serve: it is not what was written"):
        fetch(ADDRESS, tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_refused(store: Path, tmp_path: Path) -> None:
    publish(store, ADDRESS)
    with pytest.raises(UsageError, match="ADDRESS is 'bucket/box'; expected one like s3://bucket/box"):
        publish(store, "bucket/box")
    with pytest.raises(UsageError, match="foo://bucket: Protocol not known: foo"):
        fetch("foo://bucket", tmp_path / "there")
    with pytest.raises(StoreError, match="has runs of its own"):
        fetch(ADDRESS, store)
    with pytest.raises(StoreError, match=r"nothing was published at memory://bucket/other: index\.json is not there"):
        fetch("memory://bucket/other", tmp_path / "there")
    six_months(tmp_path / "new")
    with pytest.raises(StoreError, match="nothing was compacted of"):
        publish(tmp_path / "new", ADDRESS)
    fsspec.filesystem("memory").pipe_file("/bucket/box/index.json", b"anything")
    with pytest.raises(StoreError, match=r"index\.json does not serve"):
        publish(store, ADDRESS)
    with pytest.raises(StoreError, match=r"index\.json does not serve"):
        fetch(ADDRESS, tmp_path / "there")
    (path, *_) = points_of(store).rglob("points.parquet")
    path.write_bytes(flipped(path.read_bytes()))
    with pytest.raises(StoreError, match="is not the file that was written: run `fp8bench store compact` first"):
        publish(store, "memory://bucket/more")


@pytest.mark.slow
def test_by_s3(store: Path, tmp_path: Path) -> None:
    """Over the protocol, with a server of S3 on this machine: its packages want others than the tests do."""
    folder = os.environ.get("FP8BENCH_S3")
    if not folder:
        pytest.skip("FP8BENCH_S3 is not the folder of `pip install --target FOLDER s3fs 'moto[server]'`")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {
        "PYTHONPATH": folder, "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    serve = [sys.executable, "-c", f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"]
    make = "import boto3, sys; boto3.client('s3').create_bucket(Bucket='bucket')"

    def fp8bench(*line: str) -> tuple[int, str]:
        whole = [sys.executable, "-m", "fp8bench", "store", *line]
        done = subprocess.run(whole, check=False, env=environment, capture_output=True, text=True)
        return done.returncode, " ".join((done.stdout + done.stderr).split())

    with subprocess.Popen(serve, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(600):
                with socket.socket() as tried:
                    if tried.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            code, said = fp8bench("publish", "s3://bucket/box", "--store", str(store))
            assert code == 2 and "The specified bucket does not exist" in said
            subprocess.run([sys.executable, "-c", make], env=environment, check=True)
            assert fp8bench("publish", "s3://bucket/box", "--store", str(store))[0] == 0
            another_month(store)
            code, said = fp8bench("publish", "s3://bucket/box", "--store", str(store))
            assert "4 Parquet files copied, 8 there already, 2 removed" in said and code == 0
            assert fp8bench("fetch", "s3://bucket/box", "--store", str(tmp_path / "there"))[0] == 0
        finally:
            server.terminate()
    assert figures(tmp_path / "there") == figures(store)
    code, said = fp8bench("fetch", "s3://bucket/box", "--store", str(tmp_path / "there"))
    assert code == 2 and "Could not connect to the endpoint URL" in said
