"""`fp8bench history regressions` and `ack`, over stores made by hand: texts, exit codes, and what they leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8bench.model import Request, Status
from fp8bench.store.acks import get_acks_path
from tests.cli.commands.conftest import Anew
from tests.commands import Say, session, unfolding
from tests.histories import history, keep, records, run_at, tree
from tests.told_before import Told, as_before

SERIES = "gemm.Gemm.track_time(bf16, 512)"
ALL = "*bf16*"
# Relative times of 30 commits that differ by noise.
WOBBLE = [1 + 2e-3 * ((number * 7919) % 101 - 50) / 50 for number in range(60)]


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    return unfolding(fp8bench, "history")


def times(*pieces: tuple[int, float]) -> list[float]:
    levels = [level for count, level in pieces for _ in range(count)]
    return [level * wobble for level, wobble in zip(levels, WOBBLE, strict=False)]


def goes_on(store: Path, first: int, *milliseconds: float) -> None:
    for number, time in enumerate(milliseconds, first):
        keep(store, run_at(number, records=tuple(records(time))))


LOOK = "history regressions"


@pytest.mark.slow
@as_before
def test_history_regressions(fp8bench: Say, anew: Anew) -> Told:
    store = anew()
    history(store, *times((12, 1.0), (4, 1.1)))
    yield "a regression is told with code 1, and all that steps with it", session(fp8bench, f"{LOOK} --explain")
    ack = f"history ack '{SERIES}'"
    yield (
        "one series stops alarming, then all; an undo makes it alarm again",
        session(
            fp8bench,
            f"{ack} --because 'checks for NaN now'",
            LOOK,
            "history ack gemm.Gemm.track_*",
            LOOK,
            f"{LOOK} --all",
            f"{ack} --undo",
            LOOK,
            f"{ack} --undo",
        ),
    )
    store = anew()
    history(store, *times((12, 1.0), (4, 1.1)))
    session(fp8bench, f"history ack {ALL}", "history ack *fp32*")
    goes_on(store, 16, *times((5, 1.1)))
    yield "an acknowledged change does not alarm while it stays as it was", session(fp8bench, LOOK)
    goes_on(store, 21, *times((4, 1.2)))
    yield "and alarms again when it gets worse", session(fp8bench, LOOK)
    history(anew(), *times((14, 1.0)))
    yield "a flat history is fine", session(fp8bench, LOOK)
    history(anew(), *times((12, 1.0), (4, 0.9)))
    yield "an improvement has code 0", session(fp8bench, LOOK)
    history(anew(), *times((12, 1.0), (10, 1.1), (5, 1.2)))
    yield "all open changes of a series are acknowledged together", session(fp8bench, LOOK, ack, ack)
    store = anew()
    history(store, *times((12, 1.0)))
    yield (
        "what cannot be acknowledged is refused",
        session(
            fp8bench,
            "history ack track_tiem(bf16",
            "history ack track_time",
            "history ack *nothing*",
            ack,
            f"{ack} --undo --because x",
            "history ack",
            f"{LOOK} gemm",
            f"{LOOK} --store nowhere",
        ),
    )
    assert not get_acks_path(store).exists()
    store = anew()
    history(store, 1.0)
    yield "a history too short to look at is not taken for fine", session(fp8bench, LOOK, ack)
    for number, time in enumerate(times((12, 1.0), (4, 1.1)), 1):
        name = "box" if number < 9 else "new-name"
        keep(store, run_at(number, records=tuple(records(time)), facts={"machine": name, "asv_machine": name}))
    yield "nor is a machine that was renamed, and began a new line", session(fp8bench, LOOK)
    store = anew()
    history(store, *times((12, 1.0)))
    keep(store, run_at(12, records=tuple(records(1.0, status=Status.FAILED))))
    keep(store, run_at(13, request=Request("gemm", quick=True), records=tuple(records(1.1, rounds=5))))
    goes_on(store, 14, *times((4, 1.1)))
    yield "a commit that failed and a hasty one between the levels may be the one", session(fp8bench, LOOK)
    store = anew()
    for number, time in enumerate(times((12, 1.0), (4, 1.1))):
        for name in ("box", "other"):
            keep(
                store,
                run_at(
                    number,
                    number + (name == "other") / 2,
                    records=tuple(records(time)),
                    facts={"machine": name, "asv_machine": name},
                ),
            )
    yield "a change is that of one machine, and so is its ack, unless both are meant", session(fp8bench, LOOK, ack)
    anew()
    history(Path("elsewhere"), *times((12, 1.0), (4, 1.1)))
    yield (
        "commands that go on look into the same store, and know the same suites",
        session(fp8bench, f"{LOOK} --store elsewhere --import json"),
    )


def test_looking_writes_nothing_but_what_can_be_made_again(store: Path, say: Say) -> None:
    history(store, *times((12, 1.0), (4, 1.1)))
    before = tree(store)
    assert say("regressions")[0] == 1
    after = tree(store)
    assert {name: after[name] for name in before} == before
    assert set(after) <= set(before)


def test_acks_are_merged_with_the_runs(store: Path, say: Say, tmp_path: Path) -> None:
    other = tmp_path / "other" / ".fp8bench"
    history(other, *times((12, 1.0), (4, 1.1)))
    say("ack", "*", "--store", str(other))
    goes_on(store, 16, 1.1)
    code, out, err = say("merge", str(other))
    assert (code, err) == (0, "") and "new acknowledgements: 8\n" in out
    assert say("regressions")[0] == 0
