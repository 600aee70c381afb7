"""Runs in several threads of one process: they run in parallel or are refused, and stdout is intact."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fp8bench
from fp8bench.errors import UsageError
from fp8bench.model import Case
from fp8bench.protocols import SilentObserver
from fp8bench.registry import Registry
from tests.own_suites import adding_up, forgotten


class Pausing(SilentObserver):
    """Stops in the middle of a run until it may go on."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.go_on = threading.Event()

    def working(self, case: Case, doing: str, share: float) -> None:
        self.there.set()
        assert self.go_on.wait(240)


def small(store: Path, isolation: bool, observer: SilentObserver | None = None, *imports: str) -> fp8bench.Run:
    return fp8bench.run(
        "gemm",
        dtypes="fp32",
        set={"shape": 8},
        rounds=1,
        isolation=isolation,
        store=store,
        observer=observer,
        imports=imports,
        energy=False,
    )


def test_a_run_without_isolation_has_the_process_to_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stdout = sys.stdout
    observer = Pausing()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(small, tmp_path, False, observer)
        assert observer.there.wait(240)
        for isolation, which in ((False, "this one"), (True, "that run")):
            with pytest.raises(UsageError, match=f"another run is active in this process, and {which} has no worker"):
                small(tmp_path, isolation)
        observer.go_on.set()
        assert first.result(240).ok
    assert small(tmp_path, False).ok
    assert sys.stdout is stdout
    print("whole")
    assert capfd.readouterr().out == "whole\n"


def test_runs_with_processes_of_their_own_go_on_beside_each_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stdout = sys.stdout
    files = [tmp_path / f"{name}.py" for name in ("one", "two")]
    together = threading.Barrier(2)

    def measured(file: Path) -> fp8bench.Run:
        together.wait(240)
        return small(tmp_path / file.stem, True, None, str(file))

    for file in files:
        file.write_text(f"import time\nprint('{file.stem} begins')\ntime.sleep(0.1)\n{adding_up(file.stem, 3)}")
    with forgotten(tmp_path), ThreadPoolExecutor(2) as pool:
        for run in pool.map(measured, files):
            assert not [record.reason for record in run.records if not record.is_ok]
    assert sys.stdout is stdout
    print("whole")
    shown = capfd.readouterr()
    assert shown.out == "whole\n" and {"one begins", "two begins"} <= set(shown.err.splitlines())


def test_all_names_are_there_for_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "slow_leaves"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fp8bench.registry import Registry\nregistry = Registry('leaf', __name__)\n"
    )
    for name in ("a", "b"):
        (package / f"{name}.py").write_text(
            "import time\nfrom slow_leaves import registry\ntime.sleep(0.1)\n"
            f"registry.register('{name}')(type('{name}', (), {{}}))\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_leaves  # type: ignore[import-not-found]

    registry: Registry[object] = slow_leaves.registry
    together = threading.Barrier(4)

    def names() -> list[str]:
        together.wait(240)
        return registry.names()

    asked: list[Callable[[], list[str]]] = [names] * 4
    with forgotten(tmp_path), ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask) for ask in asked]
        assert [one.result(240) for one in answers] == [["a", "b"]] * 4
    for name in [name for name in sys.modules if name.partition(".")[0] == "slow_leaves"]:
        monkeypatch.delitem(sys.modules, name)
