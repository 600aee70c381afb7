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
    """A file with a suite that adds up so many whole numbers."""
    return _SUITE.format(name=name, title=name.capitalize(), values=tuple(map(str, values)), history=history)


@contextmanager
def forgotten(folder: Path) -> Iterator[None]:
    """What files below a folder register in the body, and their modules, are forgotten afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        for registry in (workloads, precisions, backends, devices):
            registry.names()  # all of fp8bench's own are there before one is added
            patch.setattr(registry, "_leaves", dict(registry._leaves))
        yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@contextmanager
def suite_file(folder: Path, code: str) -> Iterator[str]:
    """A file of that code, which is imported: what it registers is known in the body, and forgotten afterwards."""
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
    """A run, on a processor, of suites whose code this is."""
    from fp8bench import pipeline
    from fp8bench.model import Request
    from fp8bench.protocols import SilentObserver

    folder = folders.mktemp("own")
    with suite_file(folder, code) as file:
        request = Request(suites, dtypes, ("cpu",), imports=(file,), **asked)
        yield pipeline.execute(request, folder / "store", observer or SilentObserver(), "a test")
