"""A run counts once, whatever copies there are; files of one id that differ count not at all; stored scales."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8bench.errors import StoreError, UsageError
from fp8bench.jobs.report_files import ReportDestinations, write_named_report
from fp8bench.model import LayerScale, Request
from fp8bench.store.commit_runs import find_runs
from fp8bench.store.figures.history import open_store_history
from fp8bench.store.merge_stores import merge_runs, rebuild_asv_view
from fp8bench.store.runs import listing as reading
from fp8bench.store.runs.listing import REFUSED_REASON, RUN_COPY_REASON, find_run, find_run_id, listing, run_files
from fp8bench.store.runs.run_file import load_run
from tests.commands import Say, unfolded
from tests.histories import commit, history, read_trends

OTHER_NAME = "20270101T000000.000Z-0000000f-ffffffff.jsonl"


def placed(path: Path, content: bytes, folder: str = "box", name: str = OTHER_NAME) -> Path:
    target = path.parent.parent / folder / name
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(content)
    return target


def rewritten(content: bytes) -> bytes:
    """JSON as other tools write it: spaces, other line ends, another last line."""
    lines = [json.dumps(json.loads(line)) for line in content.splitlines()]
    return ("\r\n".join(lines) + "\n\n").encode()


# Changes of a run's file, and the expected cache next to it.
COPIES: dict[str, Callable[[Path], Path]] = {
    "another name": lambda path: placed(path, path.read_bytes()),
    "another machine's folder": lambda path: placed(path, path.read_bytes(), "abox", path.name),
    "no name at all": lambda path: placed(path, path.read_bytes(), name="x.jsonl"),
    "line ends and a mark": lambda path: placed(path, b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n")),
    "written down otherwise": lambda path: placed(path, rewritten(path.read_bytes())),
    "a beginning": lambda path: placed(path, path.read_bytes()[:-700], "abox", path.name),
    "whole lines of it": lambda path: placed(path, path.read_bytes().splitlines(True)[0], "abox", path.name),
}


def edited(old: bytes, new: bytes) -> Callable[[Path], Path]:
    def copy(path: Path) -> Path:
        content = path.read_bytes()
        assert old in content
        return placed(path, content.replace(old, new, 1))

    return copy


LIES = {
    "the header edited": edited(b'"box"', b'"bax"'),
    "another commit": edited(commit(1).encode(), commit(2).encode()),
    "a record edited": edited(b"187500,", b"150000,"),
    "resumed apart": lambda path: placed(path, path.read_bytes().splitlines(True)[0] + b'{"note":"there"}\n'),
}


def links(path: Path) -> Path:
    target = path.with_name(OTHER_NAME)
    target.symlink_to(path.resolve())
    return target


def numbers(store: Path) -> tuple[object, int, dict[str, int]]:
    """All figures of a history by its files of figures, asserted to equal those of the runs."""
    opened = open_store_history(store, lambda done, runs: None)
    trends = opened.trends(lambda _: True)
    assert trends == read_trends(store, lambda _: True).trends
    return trends, opened.runs, dict(opened.skipped_run_reasons)


def test_a_copy_counts_once(store: Path, fp8bench: Say) -> None:
    path = history(store, 1.0, 1.5)[1]
    own = load_run(path).id
    trends, runs, left = numbers(store)
    assert (runs, left) == (2, {})
    compared = fp8bench("compare", commit(0), commit(1))[1]
    for name, copy in {**COPIES, "a link": links}.items():
        other = copy(path)
        assert numbers(store) == (trends, 2, {RUN_COPY_REASON: 1}) and len(list(run_files(store))) == 2, name
        assert fp8bench("compare", commit(0), commit(1))[1] == compared, name
        assert {load_run(file).id for file in listing(store).files} == {own, "00000064"}, name
        assert load_run(find_run(own, store)).finished, name
        assert rebuild_asv_view(store).skipped_run_reasons[RUN_COPY_REASON] == 1, name
        other.unlink()
        assert numbers(store) == (trends, 2, {}), name


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_two_contents_of_one_id_are_both_refused(store: Path, lie: Callable[[Path], Path], fp8bench: Say) -> None:
    path = history(store, 1.0, 1.5)[1]
    whole = numbers(store)
    other, own = lie(path), load_run(path).id
    trends, runs, left = numbers(store)
    assert (runs, left) == (1, {REFUSED_REASON: 2}) and trends != whole[0]
    words = (
        f"compare {commit(0)} {own}",
        f"compare {commit(0)} {path},{other}",
        f"show {own}",
        "show last",
    )
    for line in words:
        code, _, err = fp8bench(*line.split())
        assert code == 2 and str(path) in unfolded(err) and str(other) in unfolded(err), (line, err)
    code, out, err = fp8bench("history", "regressions")
    assert str(path) in err and str(other) in err and own in err
    code, out, _ = fp8bench("history", "verify")
    assert code == 3 and "so none of them counts" in " ".join(out.split())
    code, out, _ = fp8bench("gate", commit(1), commit(0), "--no-rerun")
    assert code == 4 and "the baseline is missing" in out
    other.unlink()
    assert numbers(store) == whole


def test_a_run_that_is_named_twice_counts_once(store: Path, tmp_path: Path) -> None:
    second = history(store, 1.0, 1.5)[1]
    copy = COPIES["another name"](second)
    (tmp_path / "link").symlink_to(store.resolve())
    other = tmp_path / "other" / "runs" / "box" / second.name
    other.parent.mkdir(parents=True)
    other.write_bytes(second.read_bytes())
    for words in (
        f"{second},{copy}",
        f"{second},{other}",
        f"{commit(1)},{tmp_path}/other",
        f"{tmp_path}/link,{second}",
    ):
        meant = find_runs(words, store)
        assert len(meant.files) == 1, words
    assert "counts once" in " ".join(find_runs(f"{second},{copy}", store).notes)
    with pytest.raises(UsageError, match="was given twice"):
        write_named_report([str(second), str(copy)], store, ReportDestinations())
    edit = edited(b"187500,", b"150000,")(second)
    with pytest.raises(StoreError, match="but different contents"):
        write_named_report([str(second), str(edit)], store, ReportDestinations())


def test_a_copy_with_a_later_name_is_not_the_last_run(store: Path, fp8bench: Say) -> None:
    old, new = history(store, 1.0, 1.5)
    COPIES["another name"](old)
    assert find_run("last", store) == new
    assert find_runs(str(store), store).files == find_runs("last", store).files == (new,)
    out = fp8bench("gate", "--history", "--no-rerun")[1]
    assert load_run(new).id in out


def test_merging_stores_with_copies(store: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    path = history(theirs, 1.0, 1.5)[1]
    COPIES["another name"](path)
    assert [one.name for one in merge_runs(store, theirs).copied_files] == [
        file.name for file in reversed(list(run_files(theirs)))
    ]
    copied = next(file for file in run_files(store) if find_run_id(file) == find_run_id(path))
    copied.rename(copied.with_name("renamed.jsonl"))
    again = merge_runs(store, theirs)
    assert (again.copied_files, again.extended_paths, again.same, again.failed) == ([], [], 2, [])
    edited(b"187500,", b"150000,")(path)
    lied = merge_runs(store, theirs)
    assert not lied.copied_files and lied.same == 1 and len(lied.failed) == 1 and str(path) in lied.failed[0]


def test_files_without_a_header_are_told_apart_by_content(store: Path) -> None:
    path = history(store, 1.0)[0]
    head, *rest = path.read_bytes().splitlines(True)
    shuffled = placed(path, b"".join([*rest, rewritten(head)]), name="x.jsonl")
    assert find_run_id(path) == find_run_id(shuffled) == "00000064"  # wherever the header is
    shuffled.unlink()
    path.write_bytes(b"".join(rest))
    placed(path, path.read_bytes())
    assert len(list(run_files(store))) == 1
    broken = [placed(path, b"\xff{", name=f"{number}.jsonl") for number in range(2)]
    assert set(broken) < set(run_files(store))


def test_copies_of_unreadable_files_stop_nothing(store: Path) -> None:
    path = history(store, 1.0, 1.5)[1]
    head = path.read_bytes().splitlines(True)[0]
    later = head.replace(b'"schema":1', b'"schema":99').replace(b"000000c8", b"00000bad")
    newer = [placed(path, later, name=f"{number}.jsonl") for number in range(2)]
    torn = [placed(path, head[:300].replace(b"000000c8", b"0000bad1"), name=f"torn{n}.jsonl") for n in range(2)]
    there = listing(store)
    assert there.copies == {newer[1]: newer[0], torn[1]: torn[0]} and not there.refused
    assert open_store_history(store, lambda done, runs: None).runs == 2


def test_a_file_that_is_deleted_meanwhile_stops_nothing(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = history(store, 1.0, 1.5)[1]
    copy = COPIES["another name"](path)
    known = {file: find_run_id(file) for file in (path, copy)}
    monkeypatch.setattr(reading, "find_run_id", lambda file: known.get(file, str(file)))
    copy.unlink()
    assert set(reading.list_distinct_runs([path, copy]).files) == {path, copy}


def test_the_newest_files_are_asked_for_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run reads a hundred at its start, of however many exist."""
    paths = history(tmp_path, 1.0, 1.1, 1.2)
    asked: list[Path] = []
    monkeypatch.setattr(reading, "_may_be_run", lambda path: not asked.append(path))
    assert next(reading.iterate_newest_files(tmp_path)) == paths[-1] and asked == paths[-1:]
    assert reading.list_all_files(tmp_path) == paths[::-1]


def kept_scales(*records: tuple[str, float]) -> Any:
    kept = [(SimpleNamespace(precision=mode), LayerScale("up", "input", amax, 448 / amax)) for mode, amax in records]
    return SimpleNamespace(id="a1b2", records=[SimpleNamespace(case=case, scales=(one,)) for case, one in kept])


def test_cases_of_one_precision_give_the_largest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        reading, "load_stored_run", lambda word, store: kept_scales(("fp8", 2.0), ("fp8", 3.0), ("fp8-e4m3", 1))
    )
    request = reading.add_scales_from_run(Request("mlp", scales_from="last"), tmp_path)
    assert request.known_scales == (("fp8", "up", "input", 3.0), ("fp8-e4m3", "up", "input", 1))
    assert request.scales.find_magnitudes("fp8") == {("up", "input"): 3.0}
    assert request.scales.find_magnitudes("fp8-delayed") == {("up", "input"): 3.0}
    assert reading.add_scales_from_run(request, tmp_path) is request
    plain = Request("mlp")
    assert reading.add_scales_from_run(plain, tmp_path) is plain


def test_a_run_without_scales_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reading, "load_stored_run", lambda word, store: kept_scales())
    with pytest.raises(UsageError, match=r"run a1b2 has no stored scales. Measure it with --static-scales N"):
        reading.add_scales_from_run(Request("mlp", scales_from="a1"), tmp_path)
