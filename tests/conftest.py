"""What holds for all tests: which run unasked, no deadlines, nothing compiled unasked; and fixtures of many rooms."""

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

__all__ = ["pytest_runtest_logreport", "pytest_sessionfinish"]  # pytest calls them here

if TYPE_CHECKING:  # the tests of what is light load nothing heavy for this
    from fp8bench.plan.corpus import Corpus
    from fp8bench.worker.bench import Bench

# A loaded machine is slow, not wrong. A change is judged by the same few examples each time; many new ones are tried at
# night.
_NIGHT = bool(os.environ.get("FP8BENCH_NEW_EXAMPLES"))
settings.register_profile(
    "house",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not _NIGHT,
    max_examples=500 if _NIGHT else 25,
)
settings.load_profile("house")

# Threads of one process would wait for those of the other: tensors of tests are small.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every command line and worker that tests start would translate all of fp8bench again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests make 20,000 folders and more files. A disk may take 5 ms to remove a folder; memory takes none.
_IN_MEMORY, _ENOUGH_BYTES = "/dev/shm", 4 << 30


def _keep_files_in_memory() -> None:
    if "TMPDIR" in os.environ or not Path(_IN_MEMORY).is_dir():
        return
    room = os.statvfs(_IN_MEMORY)
    if room.f_bavail * room.f_frsize >= _ENOUGH_BYTES and not room.f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = _IN_MEMORY


_keep_files_in_memory()

# Compiling takes seconds a quantiser. Tests of compiling take it out of their environment.
os.environ["FP8BENCH_QUANTISERS"] = "eager"
# Seconds in every new store. Tests of ceilings take it out of their environment.
os.environ["FP8BENCH_CEILINGS"] = "off"
# A worker of its own in every run. Tests of tapes take it out.
os.environ["FP8BENCH_TAPE"] = "off"
# Seconds a group, where the processor tells its clock or its temperature. Tests of warming up take it out.
os.environ["FP8BENCH_WARM_UP"] = "off"
# One more process in every run. Tests of two workers take it out.
os.environ["FP8BENCH_SECOND_WORKER"] = "off"
# Texts are as wide as without a terminal, whatever the tests run in.
os.environ["COLUMNS"] = "100"
# argparse asks the disk for a translation of each of its words, in every language that the environment names.
os.environ["LANGUAGE"] = "C"


def _are_named(config: pytest.Config) -> bool:
    return any("::" in word for word in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Two processes share the tests, a file each, so that fixtures of a module are made once.

    One is enough for tests that are named, and for a debugger; -n gives another number, and -n 0 this process alone.
    """
    option = config.option
    may_share = "PYTEST_XDIST_WORKER" not in os.environ and not option.usepdb and not _are_named(config)
    if may_share and getattr(option, "numprocesses", 0) is None:
        option.numprocesses, option.dist = 2, "loadfile" if option.dist == "no" else option.dist
        option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    """Slow tests run where they are asked for: by a marker, or by their own name.

    Started in the background or under nohup, this process is told to ignore SIGINT or SIGHUP, and so would be all that
    tests start. A handler is not handed down, so that theirs are the default ones while this one goes on.
    """
    if not config.option.markexpr and not _are_named(config):
        config.option.markexpr = _QUICK
    if config.option.markexpr == "slow":
        config.option.markexpr = _SLOW_ALONE
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


# What runs unasked.
_QUICK = "not slow and not nightly"
# What `-m slow` runs: rows that take as long and add least are left to the night.
_SLOW_ALONE = "slow and not nightly"
# A file whose tests are all slow, which may import what takes seconds.
_ALL_SLOW = re.compile(r"^pytestmark = .*\bslow\b", re.MULTILINE)
# How the mark is spelled in files that have it.
_SLOW = re.compile(r"\bslow\b|\bSLOW\b")


@functools.cache
def _may_be_slow(path: Path) -> bool:
    """By what a file says, or the conftest.py beside it: importing all of them takes 20 s of a processor."""
    beside = path.with_name("conftest.py")
    return any(_SLOW.search(file.read_text()) for file in (path, beside) if file.exists())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: nobody looks for garbage in it, neither meanwhile nor when the session ends."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that shares the tests ends at once: taking torch and all modules apart takes 5 s of a processor."""
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests alone are asked for, files that have none; and where none are, files that have no others."""
    if not collection_path.match("test_*.py"):
        return None
    if config.option.markexpr == _SLOW_ALONE:
        return None if _may_be_slow(collection_path) else True
    return True if config.option.markexpr == _QUICK and _ALL_SLOW.search(collection_path.read_text()) else None


# Until a slow test is taken for one that hangs; the others' limit is in pyproject.toml.
_SLOW_SECONDS = 1200

# Files that take long, the longest first. Where one of them came last, one process would wait for the other.
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
    """Long files first; the order of the other ones stays. A mark that its file does not spell would keep a test out.

    Some slow tests take two minutes of a machine that has other things to do: the limit is for one that hangs.
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
    """Those that tests of this process start."""
    from tests.forked_workers import forked

    with forked():
        yield


@pytest.fixture(scope="session", autouse=True)
def _nobody_waits_for_the_disk() -> Iterator[None]:
    """What a process has written is there when it is killed. A test takes no power away: 10,000 times 4 ms."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "fsync", os.fstat)  # it refuses the same descriptors
        yield


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The store of an empty working directory in no repository, of a person without a home or a job of GitHub's."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Path(".fp8bench")


@pytest.fixture
def fp8bench(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command line in this process: its exit code, stdout and stderr."""
    from fp8bench.cli.main import main

    def say(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return say


@pytest.fixture(scope="module")
def short_slots() -> Iterator[None]:
    """One state a case and few calls a slot, for runs whose times are of no matter."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("fp8bench.measure.arm.STATES", 1)
        patches.setattr("fp8bench.measure.slots.SLOT_SECONDS", 5e-4)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The text that runs use which are given none."""
    from fp8bench.plan.corpus import prepare_corpus

    return prepare_corpus(None, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bench(corpus: Corpus) -> Iterator[Bench]:
    """The worker's side, in this process."""
    import torch

    from fp8bench.model.raw import Settings
    from fp8bench.worker.bench import Bench

    before = torch.get_num_threads()
    yield Bench(Settings(corpus=corpus.path))
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def _what_is_here_stays() -> None:
    """A bench in this process collects garbage between cases, as a worker does: seconds a time, once thousands of tests
    have left millions of objects. A worker looks at none of what was there when it began, and neither does this."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws is the same whatever ran before it, of which the processes that share the tests take turns.

    Asks torch only when a test is marked, so that a run without such tests never imports it for this.
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
