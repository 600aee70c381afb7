"""Finds the suites that a request names."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fp8bench.errors import UnknownName, UsageError
from fp8bench.model import Request
from fp8bench.model.run import CEILINGS
from fp8bench.protocols import Workload
from fp8bench.registry import workloads
from fp8bench.user_code import user_module

ALL = "all"


def known_suites() -> list[str]:
    """Returns all names that `fp8bench suite` accepts. Some of these suites are not in `all`: `ceilings`, and those
    that need several ranks.
    """
    suites_of_several_ranks = (name for name in workloads.names(hidden=True) if workloads.get(name).least_ranks > 1)
    return sorted({*workloads.names(), *suites_of_several_ranks, CEILINGS})


def find_suites(request: Request) -> tuple[Workload, ...]:
    """Returns the suites that a request names. It may name several suites with commas between them, `all`, or a file
    that registers suites.
    """
    suite_names = _split_names(request.suite)
    if not all(suite_names):
        raise UsageError(f"the suite {request.suite!r} has an empty name. Give NAME, NAME,NAME, all, or a .py file.")
    names = dict.fromkeys(chain.from_iterable(map(_find_named_suites, suite_names)))
    suites = tuple(map(workloads.get, names))
    if request.grid:
        suites = tuple(suite for suite in suites if suite.history is not None)
        if not suites:
            raise UsageError(f"the suite {request.suite} declares no grid with a history. Leave --grid out.")
    return suites


def suite_files(suite: str) -> tuple[str, ...]:
    """Returns the .py files among the suites that a request names. These files must be imported before any other name
    is looked up, because they register suites.
    """
    return tuple(name for name in _split_names(suite) if name.endswith(".py"))


def _split_names(suite: str) -> list[str]:
    return [name.strip() for name in suite.split(",")]


def _find_named_suites(name: str) -> Sequence[str]:
    if name == ALL:
        return workloads.names()
    if name.endswith(".py"):
        names = workloads.names_in(user_module(name))
        if not names:
            raise UsageError(
                f"{name} registers no suite. Put @workloads.register('NAME') before a class in it, or load it with "
                "--import and name a suite."
            )
        return names
    # Hidden suites can be named too, such as those that need several ranks. Only internal suites cannot, whose names
    # begin with "_".
    is_internal = name.startswith("_")
    if name in workloads.names(hidden=True) and not is_internal:
        return [name]
    if ":" in name:
        raise UsageError(
            f"the suite {name!r} looks like a model: `fp8bench profile {name}` and `fp8bench train {name}` "
            "take models. Give a suite's name, or a file that ends in .py."
        )
    # The user may have left out the .py of a file.
    python_file = f"{name}.py" if Path(f"{name}.py").is_file() else None
    is_path = "/" in name or Path(name).exists() or python_file is not None
    if is_path:
        raise UsageError(
            f"the suite {name!r} is a path. Give a name, or a file that ends in .py.", given=name, nearest=python_file
        )
    known_names = sorted([*known_suites(), ALL])
    raise UnknownName("suite", name, known_names, f"{', '.join(known_names)}; or a .py file with your suites")
