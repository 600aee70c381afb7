"""Thousands of asv's files that something happened to: each is read, or refused with a sentence."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from asv.results import Results

from fp8bench.errors import AsvFileError, StoreError
from fp8bench.model import Series
from fp8bench.store.asv.files import (
    ResultsFile,
    load_asv_machine,
    load_benchmarks,
    load_results,
    merge_benchmarks,
    save_benchmarks,
    save_machine,
    save_results,
)
from fp8bench.store.asv.rows import AsvRow, summarize_samples
from tests.counts import counts
from tests.faults import damage

COMMIT = "66fd6b5c" + "0123456789abcdef" * 2
NAME = f"{COMMIT[:8]}-existing-py_python.json"
WORDS = (
    b"\xef\xbb\xbf",
    b"\xff",
    b"\xc3",
    b"\x00",
    b"[" * 2000,
    b'{"a":' * 2000,
    b"9" * 5000,
    b"1e999",
    b"-NaN",
    b"//",
    b'"version": 2,',
    b'"results": {},',
    b"\\ud800",
    b"\\u12",
    b"null",
    b"{}",
)
Again = Callable[[Path], object]


def insert(chance: random.Random, content: bytes) -> bytes:
    place = chance.choice((0, len(content), chance.randrange(len(content))))
    return content[:place] + chance.choice(WORDS) + content[place:]


def overwrite(chance: random.Random, content: bytes) -> bytes:
    place = chance.randrange(len(content))
    return content + content[place:] if chance.random() < 0.5 else content[:place] + content


def replace_values(chance: random.Random, content: bytes) -> bytes:
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        content = damage.replace_value(chance, content)
    return content


MUTATIONS: Sequence[damage.Mutation] = (damage.flip, damage.cut, insert, overwrite, *[replace_values] * 6)


def read_results(path: Path) -> None:
    """asv reads the file without errors if fp8bench does; writing and reading it again changes nothing."""
    file = load_results(path)
    if not file.troubles and not path.read_bytes().startswith(b"\xef\xbb\xbf"):
        Results.load(str(path))
    save_results(path, file)
    written = path.read_bytes()
    again = load_results(path)
    assert (len(again.rows), again.troubles) == (len(file.rows), file.troubles)
    save_results(path, again)
    assert path.read_bytes() == written


def read_benchmarks(path: Path) -> None:
    """Merging loses nothing."""
    known = load_benchmarks(path)
    save_benchmarks(path, merge_benchmarks(known, [Series("new.New.track_new", "new", "new", "s", (), (), "1")]))
    assert set(load_benchmarks(path)) == {*known, "new.New.track_new"}


def read_machine(path: Path) -> None:
    known = load_asv_machine(path)
    save_machine(path, known)
    assert repr(sorted(load_asv_machine(path).items())) == repr(sorted(known.items()))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, bytes, Again]]:
    """Small valid files of each kind: results of three benchmarks with samples, their list, and a machine."""
    folder = tmp_path_factory.mktemp("originals")
    params = (("'fp8'", "'bf16'"), ("256", "1024"))
    cells = [summarize_samples([1e-3 * place, 1e-3 * (place + 1), 1e-3 * (place + 4)]) for place in range(3)]
    values, stats = zip(*cells, (float("nan"), None), strict=True)
    samples = (None, (1e-3, 2.0, 3), None, None)
    rows = {
        "gemm.Gemm.track_time": AsvRow(params, "1", values, stats, samples, 1767323045000, 0.5),
        "gemm.Gemm.track_peak": AsvRow((), "2", (5,), (None,), (None,), 1767323045000),
        "gemm.Gemm.track_error": AsvRow((("1",),), None, (None,), (None,), (None,), None, None, "eJw="),
    }
    machine = {"machine": "box", "os": "Linux", "cpu": "a cpu", "num_cpu": "2"}
    file = ResultsFile(
        COMMIT,
        "existing-py_python",
        1767268800000,
        {**machine, "python": "3.11"},
        "3.11",
        {"a": "1"},
        {"B": ""},
        rows,
        {"<build>": 1.5},
        unknown_fields={"fp8bench": {"torch": "2.13.0"}},
    )
    series = [Series(name, "", "", "s", ("a", "b")[: len(row.params)], row.params, "1") for name, row in rows.items()]
    save_results(folder / NAME, file)
    save_benchmarks(folder / "benchmarks.json", merge_benchmarks({}, series))
    save_machine(folder / "machine.json", machine)
    checks: list[tuple[str, Again]] = [
        (NAME, read_results),
        ("benchmarks.json", read_benchmarks),
        ("machine.json", read_machine),
    ]
    return [(name, (folder / name).read_bytes(), check) for name, check in checks]


@counts(400, 10_000)
def test_whatever_happened_to_a_file_of_asvs_it_is_refused_or_read(
    count: int, originals: list[tuple[str, bytes, Again]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # many files, none kept
    chance = random.Random(20261202)
    seen: Counter[str] = Counter()
    for number in range(count):
        name, whole, check = originals[chance.choice((0, 0, 0, 0, 1, 2))]
        mutate = MUTATIONS[number % len(MUTATIONS)]
        content = mutate(chance, whole)
        path = tmp_path / name
        path.write_bytes(content)
        try:
            check(path)
            seen[f"{name} read"] += 1
        except AsvFileError as error:
            said = str(error).replace(str(path), "")
            assert 20 < len(said) < 400 and said.endswith(".") and said.isprintable(), said
            seen[f"{name} refused"] += 1
        except Exception as error:
            (tmp_path / "failing").write_bytes(content)
            raise AssertionError(f"{type(error).__name__}: {error} ({mutate.__name__}, number {number})") from error
    assert issubclass(AsvFileError, StoreError) and len(seen) == 6 and min(seen.values()) > count / 100, seen
