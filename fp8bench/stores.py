"""The store that a command was given: whether there is one, its history, and which series a word means."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Collection
from pathlib import Path

from fp8bench.arguments import DEFAULT_STORE
from fp8bench.errors import StoreError, UsageError
from fp8bench.history.environments import load_renamings
from fp8bench.history.runs import closed_folders, run_files
from fp8bench.index.opening import History, open_history
from fp8bench.streams import complain

# Reading so many takes longer than one waits without a word.
_MANY_RUNS = 200
_MOST_NAMED = 20


def existing_store(path: Path) -> Path:
    """The store, if there is one."""
    try:
        if (path / "runs").is_dir() or (path / "asv").is_dir():
            return path
        what = "is no store: it has neither runs nor asv in it" if path.exists() else "is not there"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise StoreError(f"the store {path} {what}. Give --store DIR, or begin one with: fp8bench suite gemm --grid.")


def announce(store: Path, reading: bool = True) -> int:
    """How many run files there are; what a person should know before they are read, if all of them are."""
    trouble = load_renamings(store).trouble
    if trouble:
        complain(trouble)
    try:
        count = sum(1 for _ in run_files(store))
    except OSError as error:
        raise StoreError(f"the store {store} cannot be read ({error.strerror}).") from None
    for folder in closed_folders(store):
        complain(f"{folder} may not be read, so that its runs are left out")
    if reading and count > _MANY_RUNS:
        complain(f"reading {count} runs")
    return count


def opened(store: Path) -> History:
    """The history of a store, with a word where that takes a while or something about its figures' files was wrong."""
    history = open_history(store, lambda runs: complain(f"reading {runs} runs") if runs > _MANY_RUNS else None)
    for trouble in history.troubles:
        complain(trouble)
    return history


def in_store(store: Path) -> str:
    """' --store DIR' for a store that commands do not look into by themselves."""
    return "" if store == Path(DEFAULT_STORE) else f" --store {shlex.quote(str(store))}"


def options_of(arguments: argparse.Namespace) -> str:
    """The words that another command needs to find the same: ' --store DIR --import MODULE'."""
    return in_store(arguments.store) + "".join(f" --import {shlex.quote(one)}" for one in arguments.imports)


def series_meant(word: str, found: History, store: Path) -> str:
    """The name of the one series that a word fits: its own, or a part of it."""
    names = [name for name in found.names if word.lower() in name.lower()]
    exact = [name for name in names if name.lower() == word.lower()]
    if len(exact or names) == 1:
        return (exact or names)[0]
    if names:
        more = f"\n  and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        listed = "".join(f"\n  {name}" for name in names[:_MOST_NAMED])
        raise UsageError(f"{word!r:.80} fits {len(names)} series. Give more of the name of one:{listed}{more}")
    raise UsageError(f"no series has {word!r:.80} in its name.{_nearest(word, store, found.names, found.left)}")


def _nearest(word: str, store: Path, names: Collection[str], left: Collection[str]) -> str:
    """What a mistyped name was meant to be, perhaps, or why runs are `left` out."""
    if not names:
        why = f" Not in it: {'; '.join(left)}." if left else " Begin with: fp8bench suite gemm --grid"
        return f" The store {store} has no series yet.{why}"
    unknown = [why for why in left if "--import" in why]
    if unknown:
        return f" Not in it: {'; '.join(unknown)}."
    short = {name.partition("track_")[2].lower(): name for name in names}
    whole = {name.lower(): name for name in names}
    for known in (whole, short):
        near = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.5)
        if near:
            return f" Did you mean {known[near[0]]!r}?"
    return " `fp8bench history list` names them all."
