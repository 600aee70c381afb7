"""Finds the suites that a request names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Request
from fp8bench.model.run import CEILINGS
from fp8bench.protocols import Workload
from fp8bench.registry import workloads
from fp8bench.user_code import user_module

ALL = "all"


def known_suites() -> list[str]:
    """Returns all names that `suite` accepts: also suites of several ranks and the ceilings, which `all` leaves out."""
    several = (name for name in workloads.names(hidden=True) if workloads.get(name).least_ranks > 1)
    return sorted({*workloads.names(), *several, CEILINGS})


def suites_of(request: Request) -> tuple[Workload, ...]:
    """Returns the suites that a request names: names with commas between them, `all`, or a file that registers some."""
    words = _words(request.suite)
    if not all(words):
        raise UsageError(f"the suite {request.suite!r} has an empty name. Give NAME, NAME,NAME, all, or a .py file.")
    names: dict[str, None] = {}
    for word in words:
        names |= dict.fromkeys(_suites(word))
    suites = tuple(workloads.get(name) for name in names)
    if not request.grid:
        return suites
    tracked = tuple(suite for suite in suites if suite.history is not None)
    if not tracked:
        raise UsageError(f"the suite {request.suite} declares no grid with a history. Leave --grid out.")
    return tracked


def files_of(suite: str) -> tuple[str, ...]:
    """Returns the files among the words of a suite. They must be imported before their suites are known."""
    return tuple(word for word in _words(suite) if word.endswith(".py"))


def _words(suite: str) -> list[str]:
    return [word.strip() for word in suite.split(",")]


def _suites(word: str) -> Sequence[str]:
    if word == ALL:
        return workloads.names()
    if word.endswith(".py"):
        names = workloads.names_in(user_module(word))
        if not names:
            raise UsageError(
                f"{word} registers no suite. Put @workloads.register('NAME') before a class in it, or load it with "
                "--import and name a suite."
            )
        return names
    if word not in workloads.names(hidden=True) or word.startswith("_"):
        if ":" in word:
            raise UsageError(
                f"the suite {word!r} looks like a model: `fp8bench profile {word}` and `fp8bench train {word}` "
                "take models. Give a suite's name, or a file that ends in .py."
            )
        file = f"{word}.py"
        if "/" in word or Path(word).exists() or Path(file).is_file():
            raise UsageError(
                f"the suite {word!r} is a path. Give a name, or a file that ends in .py.",
                word,
                file if Path(file).is_file() else None,
            )
        known = sorted([*known_suites(), ALL])
        raise UnknownName("suite", word, known, f"{', '.join(known)}; or a .py file with your suites")
    return [word]
