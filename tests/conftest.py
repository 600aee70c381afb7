"""Setup for all tests: which run by default, no deadlines, no compiling by default; and shared fixtures."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.commands import Say
from tests.durations import pytest_runtest_logreport, pytest_sessionfinish

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish"]  # pytest calls them through this module

if TYPE_CHECKING:  # keeps tests of light imports from loading heavy modules
    from fp8bench.plan.corpus import Corpus
    from fp8bench.worker.bench import Bench

# No deadline: a loaded machine is slow. A change is judged by the same few examples each time; many new ones run
# nightly.
_NIGHT = bool(os.environ.get("FP8BENCH_NEW_EXAMPLES"))
settings.register_profile(
    "house",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not _NIGHT,
    max_examples=500 if _NIGHT else 25,
)
settings.load_profile("house")

# Test tensors are small, and threads of parallel test processes would compete for cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a bytecode cache every started command and worker would compile all of fp8bench again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests create over 20,000 folders. Removing one takes up to 5 ms on disk, none in memory.
_IN_MEMORY, _ENOUGH_BYTES = "/dev/shm", 4 << 30


def _keep_files_in_memory() -> None:
    if "TMPDIR" in os.environ or not Path(_IN_MEMORY).is_dir():
        return
    room = os.statvfs(_IN_MEMORY)
    if room.f_bavail * room.f_frsize >= _ENOUGH_BYTES and not room.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = _IN_MEMORY


_keep_files_in_memory()

# Compiling takes seconds per quantiser. Tests of compiling unset this variable.
os.environ["FP8BENCH_QUANTISERS"] = "eager"
# Measuring ceilings takes seconds in every new store. Tests of ceilings unset this variable.
os.environ["FP8BENCH_CEILINGS"] = "off"
# Tapes need an extra worker in every run. Tests of tapes unset this variable.
os.environ["FP8BENCH_TAPE"] = "off"
# Warming up takes seconds per group where clock or temperature can be read. Tests of it unset this variable.
os.environ["FP8BENCH_WARM_UP"] = "off"
# One more process in every run. Tests of two workers take it out.
os.environ["FP8BENCH_SECOND_WORKER"] = "off"
# Texts are as wide as without a terminal, whatever the tests run in.
os.environ["COLUMNS"] = "100"
# argparse looks on disk for translations of each message in every language of the environment.
os.environ["LANGUAGE"] = "C"


def _are_named(config: pytest.Config) -> bool:
    return any("::" in word for word in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Two processes share the tests by file, so that module fixtures run once.

    Named tests and debuggers use one process; -n sets another number, -n 0 stays in this process.
    """
    option = config.option
    may_share = "PYTEST_XDIST_WORKER" not in os.environ and not option.usepdb and not _are_named(config)
    if may_share and getattr(option, "numprocesses", 0) is None:
        option.numprocesses, option.dist = 2, "loadfile" if option.dist == "no" else option.dist
        option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    """Slow tests run only if selected by marker or by name.

    Under nohup or in the background this process ignores SIGINT or SIGHUP, and so would its children. Handlers are not
    inherited, so installing one here gives children the defaults.
    """
    if not config.option.markexpr and not _are_named(config):
        config.option.markexpr = _QUICK
    if config.option.markexpr == "slow":
        config.option.markexpr = _SLOW_ALONE
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


# The default marker expression.
_QUICK = "not slow and not nightly"
# The marker expression of `-m slow`: the slowest, least useful rows run nightly instead.
_SLOW_ALONE = "slow and not nightly"
# A file with only slow tests; it may import modules that take seconds.
_ALL_SLOW = re.compile(r"^pytestmark = .*\bslow\b", re.MULTILINE)
# The spelling of the mark in such files.
_SLOW = re.compile(r"\bslow\b|\bSLOW\b")


@functools.cache
def _may_be_slow(path: Path) -> bool:
    """Decides by the text of the file or of its conftest.py, because importing all files takes 20 s of CPU time."""
    beside = path.with_name("conftest.py")
    return any(_SLOW.search(file.read_text()) for file in (path, beside) if file.exists())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes collected objects: they live to the end, so garbage collection need not visit them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends a worker process at once, because unloading torch and all modules takes 5 s of CPU time."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files without slow tests if only slow ones run, and files with only slow tests if none run."""
    if not collection_path.match("test_*.py"):
        return None
    if config.option.markexpr == _SLOW_ALONE:
        return None if _may_be_slow(collection_path) else True
    return True if config.option.markexpr == _QUICK and _ALL_SLOW.search(collection_path.read_text()) else None


# Timeout of slow tests; the limit of the others is in pyproject.toml.
_SLOW_SECONDS = 1200

# Long files, longest first. If one came last, the other process would wait.
_LONG = (
    "features/gate",
    "features/train/lab/test_rank_lab.py",
    "measure/ranks",
    "features/audit",
    "test_energy_suite.py",
    "workloads/test_parallel.py",
    "worker/test_lying_steps.py",
    "features/duel",
    "faults",
    "nn/parallel/test_real_ranks.py",
    "test_phase_energy_suite.py",
    "features/fleet",
    "browser",
    "golden",
    "contracts",
    "features/train",
    "worker",
    "rehearsal",
    "formats",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs long files first and leaves other files in order.

    A marker that the file's text does not contain would hide a test. Some slow tests need two minutes on a loaded
    machine; the timeout is for hanging ones.
    """
    unspelled = {item.path for item in items if item.get_closest_marker("slow") and not _may_be_slow(item.path)}
    assert not unspelled, f"slow tests in files that `-m slow` does not read: {unspelled}"
    for item in items:
        takes_long = item.get_closest_marker("slow") or item.get_closest_marker("nightly")
        if takes_long and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_SECONDS))
    places = [str(Path(__file__).parent / name) for name in _LONG]

    def rank(item: pytest.Item) -> int:
        return next((rank for rank, place in enumerate(places) if str(item.path).startswith(place)), len(places))

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=sys.platform == "linux")
def _workers_are_forked() -> Iterator[None]:
    """Forks the workers that tests of this process start."""
    from tests.forked_workers import forked

    with forked():
        yield


@pytest.fixture(scope="session", autouse=True)
def _nobody_waits_for_the_disk() -> Iterator[None]:
    """Skips fsync: killed processes lose no written data, and tests never cut the power. Saves 10,000 times 4 ms."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "fsync", os.fstat)  # rejects the same descriptors
        yield


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of an empty working directory outside any repository, without a home folder or GitHub's variables."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Path(".fp8bench")


@pytest.fixture
def fp8bench(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs a command line in this process; returns its exit code, stdout and stderr."""
    from fp8bench.cli.main import main

    def say(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return say


@pytest.fixture(scope="module")
def short_slots() -> Iterator[None]:
    """One state per case and few calls per slot, for runs whose times do not matter."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("fp8bench.measure.arm.STATES_PER_SHORT_STEP", 1)
        patches.setattr("fp8bench.measure.slots.SLOT_SECONDS", 5e-4)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The text that runs use by default."""
    from fp8bench.plan.corpus import prepare_corpus

    return prepare_corpus(None, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bench(corpus: Corpus) -> Iterator[Bench]:
    """A bench (the worker's side) in this process."""
    import torch

    from fp8bench.model.raw import Settings
    from fp8bench.worker.bench import Bench

    before = torch.get_num_threads()
    yield Bench(Settings(corpus=corpus.path))
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _what_is_here_stays() -> None:
    """Freezes existing objects.

    A bench collects garbage between cases, like a worker; with millions of objects from thousands of tests each
    collection would take seconds.
    """
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds the random generators, so that results do not depend on which tests ran before in this process.

    Seeds torch only for marked tests, as importing it takes seconds.
    """
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(0)
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none on this machine")
