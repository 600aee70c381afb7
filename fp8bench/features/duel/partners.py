"""Workers of a duel's sides, which may have another interpreter, other code, or other settings of an allocator.

A worker gets the path of fp8bench's package (this or another one) and of the user's code, and nothing else of this
interpreter's path, whose packages would shadow its own. Allocators read settings when a process starts, and ignore what
they do not understand; so what would be ignored is refused here.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import difflib
import os
import platform
import random
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fp8bench.errors import UsageError, WorkerFault, WorkerLost
from fp8bench.measure.arm import Quantisers
from fp8bench.measure.handle import START_SECONDS, ProcessWorker
from fp8bench.measure.interrupts import ignored
from fp8bench.measure.limits import HANG_SECONDS
from fp8bench.measure.process import WorkerProcess
from fp8bench.model import DeviceFacts, PlannedCase, Request, Scalar
from fp8bench.model.raw import PROTOCOL, Settings
from fp8bench.plan.make import make_plan

AllocatorSettings = tuple[tuple[str, str], ...]
TUNABLES, PRELOAD = "GLIBC_TUNABLES", "LD_PRELOAD"
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1", "/lib64/ld64.so.2", "/lib/ld64.so.1")
_SECONDS = 10.0
_ELF = b"\x7fELF"
Wrong = Callable[[str], str]
"""Returns what is expected in place of a value, '' if the value is fine."""


def _whole(low: int) -> Wrong:
    return lambda text: "" if text.isdecimal() and int(text) >= low else f"a whole number from {low}"


def _one_of(*words: str) -> Wrong:
    return lambda text: "" if text in words else f"one of {', '.join(words)}"


def _share(text: str) -> str:
    return "" if re.fullmatch(r"0?\.\d*[1-9]\d*", text) else "a share between 0 and 1"


def _divisions(text: str) -> str:
    powers = [part.rpartition(":")[2] for part in text.strip("[]").split(",")]
    right = all(power.isdecimal() and int(power) > 0 and int(power) & (int(power) - 1) == 0 for power in powers)
    return "" if right else "a power of 2, or [256:1,512:2,>:8]"


_YES = _one_of("True", "False")
# Options of torch's allocator on a GPU, whose parser ignores unknown names.
TORCH_OPTIONS: Mapping[str, Wrong] = {
    "backend": _one_of("native", "cudaMallocAsync"),
    "expandable_segments": _YES,
    "max_split_size_mb": _whole(20),
    "garbage_collection_threshold": _share,
    "roundup_power2_divisions": _divisions,
    "per_process_memory_fraction": _share,
    "large_segment_size_mb": _whole(20),
    "release_lock_on_cudamalloc": _YES,
    "throw_on_cudamalloc_oom": _YES,
    "graph_capture_record_stream_reuse": _YES,
    "pinned_use_cuda_host_register": _YES,
    "pinned_use_background_threads": _YES,
    "pinned_num_register_threads": _one_of("1", "2", "4", "8", "16", "32", "64", "128"),
    "pinned_reserve_segment_size_mb": _whole(1),
}


def _torch_options(text: str) -> str:
    for part in re.split(r",(?![^\[]*\])", text):
        name, _, value = part.partition(":")
        known = TORCH_OPTIONS.get(name)
        if known is None:
            near = difflib.get_close_matches(name, TORCH_OPTIONS, n=1)
            hint = f" (the nearest to {name!r:.60} is {near[0]})" if near else ""
            return f"NAME:VALUE of {', '.join(TORCH_OPTIONS)}{hint}"
        if wrong := known(value):
            return f"{name} to be {wrong}"
    return ""


def _tunables(text: str) -> str:
    """Asks the system's own loader which tunables it takes, and as which values."""
    loader = next((path for path in _LOADERS if Path(path).exists()), None)
    pairs = [part.partition("=") for part in text.split(":")]
    if loader is None:
        return "glibc, whose loader is not where it is elsewhere: use the MALLOC_ variables"
    listed = _listed(loader, text)
    for name, _, value in pairs:
        if name not in listed or not name.startswith("glibc.malloc."):
            names = (known for known in listed if known.startswith("glibc.malloc."))
            return f"NAME=VALUE, joined by colons, of {', '.join(names)}"
        took, low, high = listed[name]
        number = int(value, 0) if re.fullmatch(r"0x[0-9a-fA-F]+|0|[1-9]\d*", value) else None
        if number is None or number != took or not low <= number <= high:
            return f"{name} to be a number from {low} to {high}"
    return ""


def _listed(loader: str, text: str) -> dict[str, tuple[int, int, int]]:
    """Returns each tunable's value under these settings, with its least and largest one."""
    environment = {**os.environ, TUNABLES: text}
    try:
        done = subprocess.run(
            [loader, "--list-tunables"], env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = re.findall(r"^(\S+): (\S+) \(min: (\S+), max: (\S+)\)", done.stdout, re.MULTILINE)
    return {name: (int(value, 0), int(low, 0), int(high, 0)) for name, value, low, high in rows}


_OF_GLIBC: Mapping[str, Wrong] = {
    "MALLOC_ARENA_MAX": _whole(1), "MALLOC_ARENA_TEST": _whole(1), "MALLOC_MMAP_MAX_": _whole(0),
    "MALLOC_MMAP_THRESHOLD_": _whole(0), "MALLOC_TRIM_THRESHOLD_": _whole(0), "MALLOC_TOP_PAD_": _whole(0),
    TUNABLES: _tunables,
}  # fmt: skip
_OF_A_GPU: Mapping[str, Wrong] = dict.fromkeys(
    ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), _torch_options
)
_OF_A_CPU: Mapping[str, Wrong] = {"THP_MEM_ALLOC_ENABLE": _one_of("0", "1")}
KNOWN = (*_OF_GLIBC, *_OF_A_CPU, PRELOAD, *_OF_A_GPU)


def settings_of(words: Sequence[str], option: str) -> AllocatorSettings:
    """Parses words NAME=VALUE, sorted by name. Raises UsageError for what no allocator would obey."""
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f" The nearest is {near[0]}." if near else ""
            raise UsageError(
                f"{option} {word!r:.200} sets no allocator. Give NAME=VALUE, the name one of {', '.join(KNOWN)}.{hint}"
            )
        if name in settings:
            raise UsageError(f"{option} sets {name} twice, and a process has it once. Leave one out.")
        settings[name] = _checked(name, value, option)
    return tuple(sorted(settings.items()))


def _checked(name: str, value: str, option: str) -> str:
    if name == PRELOAD:
        return " ".join(_library(text, option) for text in value.split()) or _library("", option)
    if name in _OF_GLIBC and platform.libc_ver()[0] != "glibc":
        raise UsageError(f"{option} {name} is read by glibc's allocator, and this system has another. Leave it out.")
    rule = {**_OF_GLIBC, **_OF_A_CPU, **_OF_A_GPU}[name]
    if wrong := rule(value):
        raise UsageError(f"{option} {name} cannot be {value!r:.200}: expected {wrong}.")
    return value


def _library(word: str, option: str) -> str:
    """Returns the path of a library given by path or as 'jemalloc'. The loader itself would ignore what it cannot
    load."""
    name = word if "/" in word else ctypes.util.find_library(word)
    path = Path(name) if name and "/" in name else _beside_libc(name)
    magic = b""
    if path is not None and path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:
            magic = file.read(len(_ELF))
    if path is None or magic != _ELF:
        raise UsageError(
            f"{option} {PRELOAD} {word!r:.200} is no library here. Give the path of an allocator's .so file, or the "
            "name of one that is installed: jemalloc, tcmalloc, mimalloc."
        )
    return str(path.resolve())


def _beside_libc(name: str | None) -> Path | None:
    if not name:
        return None
    folders = [Path(folder) for folder in (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64", "/usr/lib",
                                           "/usr/local/lib", "/lib64", "/lib")]  # fmt: skip
    return next((folder / name for folder in folders if (folder / name).exists()), None)


def of_host(settings: AllocatorSettings) -> bool:
    """Whether any setting is for the host's allocator; then a duel's own settings for it must stay away."""
    return any(name in _OF_GLIBC or name == PRELOAD for name, _ in settings)


def of_gpu(settings: AllocatorSettings) -> str:
    return next((name for name, _ in settings if name in _OF_A_GPU), "")


def not_preloaded(settings: AllocatorSettings, pid: int, maps: str = "/proc/{}/maps") -> str:
    """Returns the first library that a process should have loaded and has not; '' if all are there, or nobody can
    look."""
    wanted = dict(settings).get(PRELOAD, "").split()
    try:
        mapped = Path(maps.format(pid)).read_text(errors="replace") if wanted else ""
    except OSError:
        return ""
    return next((path for path in wanted if path not in mapped), "")


def words_of(settings: AllocatorSettings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings)


Handshake = dict[str, Scalar | None]
# They point to the running interpreter's library: another interpreter must not see them.
_ABOUT_THIS_PYTHON = ("PYTHONHOME", "__PYVENV_LAUNCHER__")
# When glibc returns memory to the system is chance, and a process that does so in every step may take 50% longer. With
# these it keeps its memory, on both sides alike; a user's own settings stay.
_CALM = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
}


@dataclass(frozen=True)
class Start:
    """How to start a side: its interpreter, and the folders that come before its own packages. `imports` is the
    user's code. `tree` is the working tree that its code must come from, if it matters. `settings` are of
    allocators; with `calm`, glibc's keeps its memory."""

    name: str
    python: str
    paths: tuple[str, ...]
    title: str = ""
    imports: tuple[str, ...] = ()
    commit: str = ""
    tree: Path | None = None
    settings: AllocatorSettings = ()
    calm: bool = True

    @property
    def side(self) -> str:
        return f"side {self.name} ({self.python})"


class PartnerWorker(ProcessWorker):
    """A worker that greets first. Raises UsageError if it speaks another protocol, or has no torch."""

    def __init__(self, settings: Settings, start: Start) -> None:
        super().__init__(settings, start.python)
        self._start = start
        self.handshake: Handshake = {}

    def start(self) -> None:
        self.ask(START_SECONDS, "quantisers")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in super()._environment().items() if name not in _ABOUT_THIS_PYTHON}
        calm = _CALM if self._start.calm else {}
        return {**calm, **kept, **dict(self._start.settings), "PYTHONPATH": os.pathsep.join(self._start.paths)}

    def _begin(self, process: WorkerProcess) -> None:
        side = self._start.side
        try:
            self.handshake = cast(Handshake, self._exchange(process, START_SECONDS, "greet"))
            why = refusal(self.handshake, self._start)
        except WorkerFault:
            why = (
                f"{side} has a worker that does not greet: its fp8bench is older than duels. This one speaks protocol "
                f"{PROTOCOL}. Choose a newer revision, or upgrade it."
            )
        except WorkerLost as lost:
            raise WorkerLost(f"{side}: {lost}") from None
        if not why:
            try:
                super()._begin(process)
            except WorkerFault as fault:  # the user's modules may not import there
                why = f"{side}: {str(fault).removeprefix('ImportFailed: ')}"
        if why:
            self.close()
            raise UsageError(why)


def refusal(handshake: Handshake, start: Start) -> str:
    side = start.side
    if handshake.get("protocol") != PROTOCOL:
        return (
            f"{side} speaks protocol {handshake.get('protocol')} of fp8bench {handshake.get('fp8bench')}, and this one "
            f"speaks protocol {PROTOCOL}: they would misunderstand each other. Use the same version on both sides."
        )
    if handshake.get("torch") is None:
        return (
            f"{side} cannot import torch ({handshake.get('torch_missing')}). It needs torch of its own: give another "
            f"--python-{start.name.lower()}, or install torch there."
        )
    return ""


# Processes differ in speed for reasons of their own: with two a side, a few sessions show by how much.
PROCESSES = 2


@dataclass
class SideWorkers:
    """The workers of a side. They are alike; the first one makes the passes for errors and memory."""

    start: Start
    workers: Sequence[PartnerWorker]
    quantisers: Quantisers
    devices: tuple[DeviceFacts, ...] = ()
    cases: dict[str, PlannedCase] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.start.name

    @property
    def facts(self) -> dict[str, DeviceFacts]:
        return {device.key: device for device in self.devices}

    def meet(self, request: Request, suites: Sequence[str], corpus: str | None) -> None:
        self.devices = self.workers[0].probe()
        self.versions = self.workers[0].within(HANG_SECONDS).versions(tuple(suites))
        try:
            plan = make_plan(request, self.devices, corpus, compares=False)
        except UsageError as error:
            raise UsageError(f"side {self.name} ({self.start.python}): {error}") from None
        self.cases = {planned.case.id: planned for group in plan for planned in group.cases}

    def close(self) -> None:
        with ignored():
            for worker in self.workers:
                worker.close()


def refresh(pair: Sequence[SideWorkers], seed: int, number: int) -> None:
    """Starts fresh processes for a session in random order, because a process stays fast or slow until it ends. The
    first session uses those that run."""
    workers = [worker for side_workers in pair for worker in side_workers.workers]
    if number:
        for worker in workers:
            worker.restart()
    random.Random(f"{seed}:{number}:start").shuffle(workers)
    for worker in workers:
        worker.start()
