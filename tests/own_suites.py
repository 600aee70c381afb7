"""Suites of people's own: files that register a workload, which is forgotten after the test that imports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fp8bench.registry import backends, devices, precisions, workloads

if TYPE_CHECKING:
    from fp8bench.model import Run
    from fp8bench.protocols import SilentObserver

_SUITE = """
from fp8bench.suites import Axis, Grid, Work, Workload, whole_number, workloads

@workloads.register("{name}")
class {title}(Workload):
    name = "{name}"
    summary = "adds up whole numbers"
    history = {history}

    def axes(self, facts):
        return (Axis("n", "how many", {values}, whole_number(low=0)),)

    def work(self, params):
        return Work(1.0)

    def prepare(self, setup):
        return setup.case.param("n")

    def step(self, state, phase):
        with phase.gemm:
            sum(range(state))
"""


def adding_up(name: str, *values: int, history: str = "None") -> str:
    """A file with a suite that adds whole numbers, as many as its value says."""
    return _SUITE.format(name=name, title=name.capitalize(), values=tuple(map(str, values)), history=history)


@contextmanager
def forgotten(folder: Path) -> Iterator[None]:
    """Unregisters and unloads, after the body, everything that files below a folder registered."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        for registry in (workloads, precisions, backends, devices):
            registry.names()  # load all built-in ones before adding one
            patch.setattr(registry, "_leaves", dict(registry._leaves))
        yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@contextmanager
def suite_file(folder: Path, code: str) -> Iterator[str]:
    """Imports a file of that code; its registrations end with the body."""
    from fp8bench.user_code import import_user_modules

    file = folder / "own_suite.py"
    file.write_text(code)
    with forgotten(folder):
        import_user_modules([str(file)])
        yield str(file)


@contextmanager
def suite_run(
    folders: pytest.TempPathFactory,
    code: str,
    suites: str,
    dtypes: tuple[str, ...],
    observer: SilentObserver | None = None,
    **asked: Any,
) -> Iterator[Run]:
    """A CPU run of suites with this code."""
    from fp8bench import pipeline
    from fp8bench.model import Request
    from fp8bench.protocols import SilentObserver

    folder = folders.mktemp("own")
    with suite_file(folder, code) as file:
        request = Request(suites, dtypes, ("cpu",), imports=(file,), **asked)
        yield pipeline.execute(request, folder / "store", observer or SilentObserver(), "a test")
