"""`fp8bench history regressions` and `ack`, over stores made by hand: texts, exit codes, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8bench.model import Request, Status
from fp8bench.store.acks import acks_of
from tests.commands import Say, unfolding
from tests.histories import commit, history, keep, records, run_at, tree

SERIES = "gemm.Gemm.track_time(bf16, 512)"
ALL = "*bf16*"
# How the times of 30 commits differ by nothing that matters.
WOBBLE = [1 + 2e-3 * ((number * 7919) % 101 - 50) / 50 for number in range(60)]


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    """Run a command of history's."""
    return unfolding(fp8bench, "history")


def times(*pieces: tuple[int, float]) -> list[float]:
    """So many commits of each level, in milliseconds."""
    levels = [level for count, level in pieces for _ in range(count)]
    return [level * wobble for level, wobble in zip(levels, WOBBLE, strict=False)]


def goes_on(store: Path, first: int, *milliseconds: float) -> None:
    """More commits behind those that are there."""
    for number, time in enumerate(milliseconds, first):
        keep(store, run_at(number, records=tuple(records(time))))


def test_a_regression_is_told_with_code_1(store: Path, say: Say) -> None:
    """All that steps with it, too; nothing is written but what can be made again."""
    history(store, *times((12, 1.0), (4, 1.1)))
    before = tree(store)
    code, out, err = say("regressions", "--explain")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == ".fp8bench: 8 regressions and 0 improvements in 12 series"
    assert lines[2:5] == [
        "regressions",
        "  series                                         before    after  change                  chance",
        "after 0000000b and up to 0000000c",
    ]
    (line,) = [one for one in lines if one.startswith(f"  {SERIES} ")]
    assert line.split()[2:6] == ["1.13", "ms", "1.24", "ms"] and line.split()[-1] == "<0.01%"
    assert "improvements\n  series" not in out and "duel them" in out.replace("\n    ", " ")
    assert lines[-1].startswith("  fp8bench history ack 'gemm.Gemm.track_")
    after = tree(store)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith(("figures/", "points/")) for name in set(after) - set(before))


def test_a_flat_history_is_fine(store: Path, say: Say) -> None:
    """With code 0, and it says how much was looked at."""
    history(store, *times((14, 1.0)))
    assert say("regressions") == (0, ".fp8bench: 0 regressions and 0 improvements in 12 series\n", "")


def test_an_improvement_has_code_0(store: Path, say: Say) -> None:
    """And is told."""
    history(store, *times((12, 1.0), (4, 0.9)))
    code, out, _ = say("regressions")
    assert code == 0 and "0 regressions and 8 improvements" in out and "\nimprovements\n" in out
    assert "history ack" not in out and "duel them" not in out


def test_acknowledge_and_undo(store: Path, say: Say) -> None:
    """One series stops alarming, then all; an undo makes it alarm again."""
    history(store, *times((12, 1.0), (4, 1.1)))
    code, out, err = say("ack", SERIES, "--because", "checks for NaN now")
    assert (code, err) == (0, "")
    assert out == f".fp8bench: acknowledged\n  {SERIES}, after 0000000b and up to 0000000c\n"
    code, out, _ = say("regressions")
    assert code == 1 and f"  {SERIES} " not in out and "; 1 change acknowledged" in out
    assert say("ack", "gemm.Gemm.track_*")[0] == 0
    code, out, _ = say("regressions")
    assert code == 0 and out == ".fp8bench: 0 regressions and 0 improvements in 12 series; 8 changes acknowledged\n"
    code, out, _ = say("regressions", "--all")
    assert code == 0 and "\nacknowledged\n" in out and ": checks for NaN now\n" in out
    code, out, _ = say("ack", SERIES, "--undo")
    assert code == 0 and out.startswith(".fp8bench: not acknowledged any more\n")
    assert say("regressions")[0] == 1
    code, _, err = say("ack", SERIES, "--undo")
    assert code == 2 and "nothing is acknowledged of" in err


def test_an_acknowledged_change_alarms_again_when_it_gets_worse(store: Path, say: Say) -> None:
    """And not while it stays as it was."""
    history(store, *times((12, 1.0), (4, 1.1)))
    say("ack", ALL)
    say("ack", "*fp32*")
    goes_on(store, 16, *times((5, 1.1)))
    assert say("regressions")[0] == 0
    goes_on(store, 21, *times((4, 1.2)))
    code, out, _ = say("regressions")
    assert code == 1 and "8 regressions" in out and out.count("after 00000014 and up to 00000015\n") == 1


def test_which_of_several_changes(store: Path, say: Say) -> None:
    """They are listed by what --until takes."""
    history(store, *times((12, 1.0), (10, 1.1), (5, 1.2)))
    code, _, err = say("ack", SERIES)
    assert code == 2 and "several open changes" in err and f"{SERIES} --until 00000016" in err
    code, _, err = say("ack", SERIES, "--until", "00000001")
    assert code == 2 and "up to the commit '00000001'" in err and "--until 0000000c" in err
    code, _, err = say("ack", SERIES, "--until", "000000")
    assert code == 2 and "several open changes" in err
    assert say("ack", SERIES, "--until", commit(12))[0] == 0
    code, _, err = say("ack", SERIES, "--until", "0000000c")
    assert code == 2 and "--until 00000016" in err and "0000000c\n" not in err
    assert say("ack", SERIES)[0] == 0
    code, _, err = say("ack", SERIES)
    assert code == 2 and "acknowledged already" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ack", "track_tiem(bf16"], "Did you mean"),
        (["ack", "track_time"], "fits 6 series"),
        (["ack", "*nothing*"], "no series is called '*nothing*'"),
        (["ack", SERIES], "has no open changes"),
        (["ack", SERIES, "--until", "0000"], "no open change"),
        (["ack", SERIES, "--until", ""], "'' is no commit; give at least four digits"),
        (["ack", SERIES, "--until", "HEAD"], "'HEAD' is no commit"),
        (["ack", SERIES, "--undo", "--because", "x"], "Leave one out"),
        (["ack"], "required: SERIES"),
        (["regressions", "gemm"], "unknown argument 'gemm'"),
        (["regressions", "--store", "nowhere"], "is not there"),
    ],
)
def test_what_cannot_be(store: Path, say: Say, words: list[str], sentence: str) -> None:
    """One sentence, code 2, and nothing is written down."""
    history(store, *times((12, 1.0)))
    code, out, err = say(*words)
    assert (code, out) == (2, "") and sentence in err and not acks_of(store).exists()


def test_a_history_too_short_to_look_at(store: Path, say: Say) -> None:
    """One point, or a machine that was renamed and began a new line: said, and not taken for fine."""
    history(store, 1.0)
    code, out, _ = say("regressions")
    assert code == 0 and out.startswith(".fp8bench: no series was long enough to look for changes\n\nnot looked at\n")
    assert "12 series: fewer than 11 commits" in out
    assert "Not looked at: fewer than 11 commits" in say("ack", SERIES)[2]
    for number, time in enumerate(times((12, 1.0), (4, 1.1)), 1):
        name = "box" if number < 9 else "new-name"
        keep(store, run_at(number, records=tuple(records(time)), facts={"machine": name, "asv_machine": name}))
    code, out, _ = say("regressions")
    assert code == 0 and "24 series: fewer than 11 commits" in out


def test_gaps_are_in_the_range(store: Path, say: Say) -> None:
    """A commit that failed and a hasty one between the levels may be the one."""
    history(store, *times((12, 1.0)))
    keep(store, run_at(12, records=tuple(records(1.0, status=Status.FAILED))))
    keep(store, run_at(13, request=Request("gemm", quick=True), records=tuple(records(1.1, rounds=5))))
    goes_on(store, 14, *times((4, 1.1)))
    (range_,) = [line for line in say("regressions")[1].splitlines() if line.startswith("after 0000000b and up to ")]
    assert range_ == (
        "after 0000000b and up to 0000000e, one of 3 commits (2 of them without a figure that compares), most"
    )


def test_two_machines_are_told_apart(store: Path, say: Say) -> None:
    """A change is that of one machine, and so is its ack, unless both are meant."""
    for number, time in enumerate(times((12, 1.0), (4, 1.1))):
        for name in ("box", "other"):
            keep(store, run_at(number, number + (name == "other") / 2, records=tuple(records(time)),
                               facts={"machine": name, "asv_machine": name}))  # fmt: skip
    out = say("regressions")[1]
    assert "16 regressions" in out and out.count("on box (") == out.count("on other (") == 1
    out = say("ack", SERIES)[1]
    assert out.count(SERIES) == 2


@pytest.mark.parametrize("words", [["regressions"], ["list"], ["list", "--runs"], ["show", SERIES]])
def test_as_markdown(words: list[str], store: Path, say: Say) -> None:
    """A file beside what is printed: the same page, as tables. Where it cannot be is said before anything is read."""
    history(store, *times((12, 1.0), (4, 1.1)))
    code, out, err = say(*words, "--md", "page.md")
    page = Path("page.md").read_text()
    assert (
        (code, out, err) == say(*words)
        and page.startswith("# ")
        and SERIES.partition(".")[0] in page
        and "\n| ---" in page
    )
    assert page.splitlines()[0].removeprefix("# ").replace("\\", "") == out.splitlines()[0]
    assert say(*words, "--md", "no/such/page.md")[::2] == (
        2, "fp8bench: --md 'no/such/page.md' cannot be written: there is no directory no/such. Give a file.\n",
    )  # fmt: skip


def test_as_json(store: Path, say: Say) -> None:
    """All of it, the acknowledged with what was said, on one line of strict JSON."""
    history(store, *times((12, 1.0), (4, 1.1)))
    say("ack", SERIES, "--because", "wanted")
    code, out, err = say("regressions", "--json")
    found = json.loads(out)
    assert (code, err, out.count("\n")) == (1, "", 1) and found["looked_at"] == 12 and found["left"] == {}
    assert [one["state"] for one in found["changes"]].count("open") == 7
    (one,) = [one for one in found["changes"] if one["series"] == SERIES]
    assert one["ack"]["because"] == "wanted" and one["evidence"] == "history" and one["direction"] == "worse"
    assert (one["since"], one["until"], one["first"]) == (commit(11), commit(12), commit(12))
    assert one["ratio"]["low"] < 1.1 < one["ratio"]["high"] and 0 <= one["p_value"] < 1e-6


def test_a_torn_ack_is_said_and_counts_for_nothing(store: Path, say: Say) -> None:
    """Verify names it too; those around it hold."""
    history(store, *times((12, 1.0), (4, 1.1)))
    say("ack", ALL)
    content = acks_of(store).read_bytes()
    acks_of(store).write_bytes(content[: content.rstrip().rfind(b"\n") + 40])
    say("ack", "*fp32*")
    code, out, err = say("regressions")
    assert code == 1 and "1 regression " in out
    assert err == "fp8bench: .fp8bench/acks.jsonl: line 4 is no JSON, and acknowledges nothing\n"
    code, out, _ = say("verify")
    assert code == 3 and "line 4 is no JSON" in out.replace("\n    ", " ")


def test_acks_are_merged_with_the_runs(store: Path, say: Say, tmp_path: Path) -> None:
    """What was acknowledged on another machine need not be again."""
    other = tmp_path / "other" / ".fp8bench"
    history(other, *times((12, 1.0), (4, 1.1)))
    say("ack", "*", "--store", str(other))
    goes_on(store, 16, 1.1)
    code, out, err = say("merge", str(other))
    assert (code, err) == (0, "") and "acknowledgements that are new here: 8\n" in out
    assert say("regressions")[0] == 0


def test_a_store_that_may_not_be_written(store: Path, say: Say) -> None:
    """Regressions are read from it; an ack says why it is none."""
    history(store, *times((12, 1.0), (4, 1.1)))
    acks_of(store).mkdir()
    code, _, err = say("regressions")
    assert code == 1 and "it cannot be read (" in err
    code, out, err = say("ack", SERIES)
    assert (code, out) == (2, "") and "cannot be written" in err


def test_the_commands_that_go_on_look_into_the_same_store(say: Say, tmp_path: Path) -> None:
    """And know the same suites."""
    other = tmp_path / "elsewhere"
    history(other, *times((12, 1.0), (4, 1.1)))
    out = say("regressions", "--store", str(other), "--import", "json")[1]
    lines = [line for line in out.replace(" \\\n    ", " ").splitlines() if line.startswith("  fp8bench ")]
    assert len(lines) == 3 and all(line.endswith(f" --store {other} --import json") for line in lines)
    assert lines[1].startswith("  fp8bench duel suite gemm --against 0000000b")
