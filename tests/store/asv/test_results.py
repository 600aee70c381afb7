"""Results files, held against asv itself: what it writes is read, what is written here it reads, byte for byte."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asv.results import Results
from asv.runner import BenchmarkResult
from asv.util import UserError
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.errors import AsvFileAbsent, AsvFileBroken, AsvFileError, AsvFileOfOtherVersion, AsvFileTorn
from fp8bench.model.codec import MalformedValueError
from fp8bench.store.asv.files import ResultsFile, load_results, save_results
from fp8bench.store.asv.rows import COLUMNS, AsvRow, AsvStats, summarize_samples
from tests.counts import for_each

COMMIT = "66fd6b5c" + "0123456789abcdef" * 2
ENV = "existing-py_bin_python3"
NAME = f"{COMMIT[:8]}-{ENV}.json"
STARTED = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
STARTED_MS = 1767323045000
PARAMS = {"machine": "box", "os": "Linux", "num_cpu": "2", "ram": "25276502016", "gpu": None, "python": "3.11"}
DTYPES = [["'fp8'", "'bf16'"], ["256", "1024"]]
NAN = math.nan
Change = Callable[[dict[str, Any]], object]


def by_asv(folder: Path, *benchmarks: tuple[str, list[list[str]], list[Any]], keep: bool = False) -> Path:
    """A file that asv wrote: for each benchmark, name, params, and samples (or None, or NaN) by combination."""
    results = Results(dict(PARAMS), {}, COMMIT, 1767268800000, "3.11", ENV, {})
    results.set_build_duration(1.25)
    for name, params, samples in benchmarks:
        lists = [sample if isinstance(sample, list) else None for sample in samples]
        values = [NAN if sample != sample else None if sample is None else True for sample in samples]
        outcome = BenchmarkResult(values, lists, [one and 1 for one in lists], 0, "", None)
        benchmark = {"name": name, "version": "1", "params": params}
        results.add_result(benchmark, outcome, STARTED, 0.123456789, record_samples=keep)
    results.save(str(folder))
    return folder / "box" / NAME


def by_us(path: Path, *benchmarks: tuple[str, list[list[str]], list[Any]], keep: bool = False) -> Path:
    rows = {}
    for name, params, samples in benchmarks:
        cells = [summarize_samples(sample) if isinstance(sample, list) else (sample, None) for sample in samples]
        kept = tuple(tuple(sample) if keep and isinstance(sample, list) else None for sample in samples)
        values, stats = zip(*cells, strict=True)
        rows[name] = AsvRow(tuple(map(tuple, params)), "1", values, stats, kept, STARTED_MS, 0.123456789)
    durations = {"<build>": 1.25}
    file = ResultsFile(COMMIT, ENV, 1767268800000, PARAMS, "3.11", {}, {}, rows, durations)
    save_results(path, file)
    return path


def plain(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text())
    assert isinstance(content, dict)
    return content


BENCHMARKS: list[tuple[str, list[list[str]], list[Any]]] = [
    ("gemm.Gemm.track_time", DTYPES, [[1e-3, 2e-3, 3e-3], [1e-3] * 12, None, NAN]),
    ("gemm.Gemm.track_peak", [], [[123456789.123]]),
    ("gemm.Gemm.track_error", [["'fp8'"]], [None]),
    ("gemm.Gemm.track_nothing", [["'fp8'", "'bf16'"]], [NAN, NAN]),
    ("gemm.Gemm.track_late", DTYPES, [None, None, [5e-3, 6e-3], None]),
]


@pytest.mark.parametrize("keep", [False, True])
def test_the_same_results_are_the_same_bytes_as_asvs(tmp_path: Path, keep: bool) -> None:
    theirs = by_asv(tmp_path, *BENCHMARKS, keep=keep)
    ours = by_us(tmp_path / "ours" / NAME, *BENCHMARKS, keep=keep)
    assert ours.read_bytes() == theirs.read_bytes()


@for_each("keep", [False, True])
def test_what_asv_wrote_is_read_and_written_again_unchanged(tmp_path: Path, keep: bool) -> None:
    path = by_asv(tmp_path, *BENCHMARKS, keep=keep)
    before = path.read_bytes()
    file = load_results(path)
    assert file.troubles == () and list(file.rows) == [name for name, _, _ in BENCHMARKS]
    row = file.rows["gemm.Gemm.track_time"]
    assert row.params == (("'fp8'", "'bf16'"), ("256", "1024")) and row.version == "1"
    assert row.values[:3] == (2e-3, 1e-3, None) and math.isnan(row.values[3] or 0)
    assert row.stats[1] == AsvStats(1e-3, 1e-3, 1e-3, 1e-3, 1, 12) and row.stats[2:] == (None, None)
    assert row.samples == (((1e-3, 2e-3, 3e-3), (1e-3,) * 12, None, None) if keep else (None,) * 4)
    assert (row.started_at, row.duration, row.profile) == (STARTED_MS, 0.12346, None)
    assert file.rows["gemm.Gemm.track_error"].values == (None,)
    assert file.rows["gemm.Gemm.track_late"].values == (None, None, 0.0055, None)
    assert (file.params, file.durations, file.date) == (PARAMS, {"<build>": 1.25}, 1767268800000)
    save_results(path, file)
    assert path.read_bytes() == before


NUMBERS = st.one_of(
    st.floats(1e-9, 1e3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(2**60), 2**60),
    st.sampled_from([0.0, 1e-3, 5e-324, 1.7976931348623157e308]),
)
SAMPLES = st.one_of(
    st.lists(NUMBERS, min_size=1, max_size=30),
    st.tuples(NUMBERS, st.integers(1, 30)).map(lambda one: [one[0]] * one[1]),
)


@given(st.lists(st.one_of(st.none(), st.just(NAN), SAMPLES), min_size=2, max_size=2), st.booleans())
def test_statistics_are_asvs(tmp_path_factory: pytest.TempPathFactory, samples: list[Any], keep: bool) -> None:
    """One sample, two, equal ones, huge and tiny ones: the same bytes, unless asv divides by zero."""
    folder = tmp_path_factory.mktemp("oracle", numbered=True)
    benchmark = ("a.B.track_c", [["1", "2"]], samples)
    ours = by_us(folder / "ours" / NAME, benchmark, keep=keep)
    try:
        theirs = by_asv(folder, benchmark, keep=keep)
    except ArithmeticError:
        assert "-Infinity" in ours.read_text() and load_results(ours).troubles == ()
        return
    assert ours.read_bytes() == theirs.read_bytes()
    again = load_results(theirs)
    save_results(ours, again)
    assert ours.read_bytes() == theirs.read_bytes() and again.troubles == ()


def test_a_row_has_an_entry_for_each_combination() -> None:
    with pytest.raises(MalformedValueError, match="2 values, 1 statistics and 1 lists of samples for 1 combinations"):
        AsvRow((), "1", (1.0, 2.0), (None,), (None,))


def with_rows(**rows: Any) -> Change:
    return lambda content: content["results"].update(rows)


def without(*keys: str) -> Change:
    """A change that removes a key, possibly a nested one."""

    def change(content: dict[str, Any]) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


REFUSED: dict[str, tuple[Change, type[AsvFileError], str]] = {
    "no version": (without("version"), AsvFileBroken, "its 'version' is None, expected 2"),
    "version 1": (lambda it: it.update(version=1), AsvFileOfOtherVersion, "by an older asv: its version is 1"),
    "version 3": (lambda it: it.update(version=3), AsvFileOfOtherVersion, "newer asv: .* 3, fp8bench reads version 2"),
    "no results": (without("results"), AsvFileBroken, "it has no 'results'"),
    "no machine": (without("params", "machine"), AsvFileBroken, "have no field 'machine'"),
    "an unknown column": (lambda it: it["result_columns"].append("energy"), AsvFileBroken, "expected columns of asv"),
    "params a list": (lambda it: it.update(params=[]), AsvFileBroken, r"'params' is \[\], expected dict"),
    "no hash": (lambda it: it.update(commit_hash="main"), AsvFileBroken, "its commit 'main' is not a hash"),
    "another commit": (lambda it: it.update(commit_hash="0" * 40), AsvFileBroken, "name does not start .* 00000000-"),
}  # fmt: skip
ASV_READS = {"no hash", "another commit", "no machine", "an unknown column"}


@for_each("what", REFUSED)
def test_a_file_that_asv_cannot_read_gives_a_message(tmp_path: Path, what: str) -> None:
    path = by_asv(tmp_path, *BENCHMARKS)
    content = plain(path)
    change, kind, sentence = REFUSED[what]
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(kind, match=sentence) as caught:
        load_results(path)
    assert type(caught.value) is kind and str(path) in str(caught.value) and str(caught.value).endswith(".")
    if what not in ASV_READS:
        with pytest.raises((UserError, AttributeError, TypeError)):
            Results.load(str(path))


READ: dict[str, Change] = {
    "no env_vars": without("env_vars"),
    "no durations": without("durations"),
    "an unknown key": lambda it: it.update(fp8bench={"torch": [1, {"a": None}]}),
    "fewer columns": lambda it: it.update(results={"a": [[1], []]}, result_columns=["result", "params"]),
    "columns in another order": lambda it: it.update(
        result_columns=[*COLUMNS[1:], "result"], results={"a": [[], "1", *[None] * 10, [1.5]]}
    ),
    "no version of the row": with_rows(a=[[1.5], [], None, 5]),
    "a short row": with_rows(a=[None, [["1", "2"]], "1"]),
    "a short list": with_rows(a=[[1.5], [["1", "2"]], "1"]),
    "cells beyond the columns that are null": with_rows(a=[[1], [], *[None] * 20]),
    "a profile": with_rows(a=[[1], [], *[None] * 10, "eJw="]),
    "a name of a lone surrogate": lambda it: it["results"].update({"\ud800": [[1], []]}),
}


@for_each("what", READ)
def test_what_asv_accepts_is_read_and_kept(tmp_path: Path, what: str) -> None:
    path = by_asv(tmp_path, *BENCHMARKS, keep=True)
    content = plain(path)
    READ[what](content)
    path.write_text(json.dumps(content))
    theirs = Results.load(str(path))
    file = load_results(path)
    assert file.troubles == () and set(file.rows) == set(content["results"]) and set(COLUMNS) <= set(file.columns)
    save_results(path, file)
    again = plain(path)
    # Columns may be added at the end, empty containers and nulls shortened; no information is lost.
    known = set(content) - {"result_columns", "results"}
    assert {key: again[key] for key in known} == {key: content[key] for key in known}
    assert again["result_columns"][: len(content["result_columns"])] == content["result_columns"]
    reread = Results.load(str(path))
    for name in theirs.get_all_result_keys():
        params = theirs.get_result_params(name)
        for get in ("get_result_value", "get_result_stats", "get_result_samples"):
            assert repr(getattr(theirs, get)(name, params)) == repr(getattr(reread, get)(name, params)), (name, get)
    assert theirs.benchmark_version == reread.benchmark_version and theirs.started_at == reread.started_at
    assert theirs.duration == reread.duration


BROKEN: dict[str, tuple[Any, str]] = {
    "no list": ({"result": [1]}, "expected a list, found"),
    "a number": (5, "expected a list, found 5"),
    "no params": ([[1]], "'params' is None, expected lists of texts"),
    "too many values": ([[1, 2, 3], [["1", "2"]]], "'result' has 3 values for 2 combinations"),
    "a value that is true": ([[True], []], "'result' has the value True"),
    "a value beyond a float": ([[10**400], []], "'result' has the value 1000"),
    "result no list": ([1.5, []], "'result' is 1.5, expected a list"),
    "an interval without quartiles": ([[1], [], "1", 5, 1, [0.5], [1.5]], "some statistics of a value are missing"),
    "a repeat that is no count": ([[1], [], "1", 5, 1, [1], [1], [1], [1], [1], [1.5]], "'stats_repeat' has the value"),
    "samples with a hole": ([[1], [], "1", 5, 1, *[None] * 6, [[1.5, None]]], "'samples' has the value [1.5, None]"),
    "a profile that is none": ([[1], [], *[None] * 10, 5], "'profile' is 5"),
    "parameters that multiply": ([None, [["1"] * 100] * 10], "more than 100000 combinations"),
}


@for_each("what", BROKEN)
def test_a_broken_row_is_left_out_named_and_kept(tmp_path: Path, what: str) -> None:
    path = by_asv(tmp_path, *BENCHMARKS)
    content = plain(path)
    cells, trouble = BROKEN[what]
    content["results"] = {"foreign": cells, **content["results"]}
    path.write_text(json.dumps(content))
    file = load_results(path)
    (said,) = file.troubles
    assert said.startswith("the row 'foreign' was left out (") and trouble in said and len(said) < 300
    assert list(file.rows) == [name for name, _, _ in BENCHMARKS] and file.unreadable_rows == {"foreign": cells}
    save_results(path, file)
    assert plain(path)["results"]["foreign"] == cells
    assert replace(load_results(path), rows={}) == replace(file, rows={})
    sound = replace(file, rows={**file.rows, "foreign": file.rows[BENCHMARKS[0][0]]})
    save_results(path, sound)  # measuring again restores its meaning
    assert load_results(path).rows == sound.rows and not load_results(path).unreadable_rows


TEXTS: dict[str, tuple[bytes, type[AsvFileError], str]] = {
    "empty": (b"", AsvFileTorn, "is broken: Expecting value"),
    "torn": (b'{"commit_hash": "66fd', AsvFileTorn, "is broken: Unterminated string"),
    "no UTF-8": (b'{"a": "\xff"}', AsvFileTorn, "codec can't decode byte 0xff"),
    "a list": (b"[]", AsvFileBroken, "expected an object, found list"),
    "a number of many digits": (b"[" + b"1" * 5000 + b"]", AsvFileBroken, "thousands of digits"),
    "deep": (b"[" * 100_000, AsvFileBroken, "nested too deeply"),
}


@for_each("what", TEXTS)
def test_a_file_without_a_json_object_gives_a_message(tmp_path: Path, what: str) -> None:
    path = tmp_path / NAME
    raw, kind, sentence = TEXTS[what]
    path.write_bytes(raw)
    with pytest.raises(kind, match=sentence) as caught:
        load_results(path)
    assert type(caught.value) is kind


def test_an_absent_file_a_mark_before_it_and_a_row_nested_as_deep_as_json_allows(tmp_path: Path) -> None:
    with pytest.raises(AsvFileAbsent, match="does not exist"):
        load_results(tmp_path / NAME)
    path = by_us(tmp_path / NAME, *BENCHMARKS)
    before = path.read_bytes()
    path.write_bytes(b"\xef\xbb\xbf" + before)  # an editor's mark, which asv refuses
    save_results(path, load_results(path))
    assert path.read_bytes() == before
    text = path.read_text()
    deep = "[" * 800 + "]" * 800
    path.write_text(text.replace('"results": {', f'"results": {{"deep": {deep}, "flat": [{deep}, {deep}], ', 1))
    file = load_results(path)
    assert len(file.troubles) == 2 and all(len(trouble) < 200 for trouble in file.troubles)
