"""The bench of one rank: joins the others in a process group, and reports its progress.

It refuses connections of strangers, because gloo accepts any connection without authentication. Only Linux reveals the
owner of a connection. How well communication is hidden is measured by running the parts of a step alone, at once and in
sequence, in rounds of random order.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Case, DeviceFacts, Scalar, StepEffect
from fp8bench.model.codec import PlainUnpickler
from fp8bench.model.ranks import BEAT, MEETING, OUTSIDE, Sent, Transfer
from fp8bench.model.raw import Settings
from fp8bench.protocols.measuring import Markers, TellingMarker
from fp8bench.protocols.workload import StepParts
from fp8bench.registry import workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import PhaseClock

_FILE = "start-line"
_NUMBER = 8
# A rank spins for this long: one that sleeps wakes up too late to begin with the others.
_AWAKE_SECONDS = 5e-4
_NAP_SECONDS = 1e-4


class Heart:
    """Writes this rank's progress into a mapped file: half a microsecond per beat."""

    def __init__(self, file: Path) -> None:
        self.folder = file.parent
        file.write_bytes(bytes(BEAT.size))
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), BEAT.size)
        self._beats = 0
        self._request = b"start"

    def request(self, name: str) -> None:
        self._request = name.encode()[:40]
        self.phase(OUTSIDE)

    def phase(self, code: int) -> None:
        """Records the phase of a step. If an exception leaves a phase, it stays recorded, because the rank failed in
        it."""
        if sys.exception() is not None:
            return
        self._beats += 1
        BEAT.pack_into(self._page, 0, self._beats, code, time.monotonic(), self._request)

    def markers(self) -> Markers[AbstractContextManager[None]]:
        stack = [UNATTRIBUTED]
        self.phase(CELL_PHASES.index(UNATTRIBUTED))
        return Markers(lambda name: TellingMarker(name, stack, lambda phase: self.phase(CELL_PHASES.index(phase))))


class StartLine:
    """Where ranks begin something together: `meet` returns when all have come as often as this one. A barrier of gloo
    or NCCL wakes threads and sends messages, 0.3 ms and more for each slot, which ranks of one machine do not need."""

    def __init__(self, folder: Path, rank: int, ranks: int, wait_seconds: float) -> None:
        with (folder / _FILE).open("ab") as opened:
            os.ftruncate(opened.fileno(), ranks * _NUMBER)  # the same on all ranks: existing content is kept
        with (folder / _FILE).open("r+b") as opened:
            self._times = memoryview(mmap.mmap(opened.fileno(), ranks * _NUMBER)).cast("q")
        self._rank = rank
        self._wait_seconds = wait_seconds

    def meet(self) -> None:
        times = self._times
        count_here = times[self._rank] = times[self._rank] + 1
        begun = time.monotonic()
        while min(times) < count_here:
            waited = time.monotonic() - begun
            if waited > self._wait_seconds:
                late = ", ".join(f"rank {rank}" for rank, count in enumerate(times) if count < count_here)
                raise TimeoutError(f"{late} did not reach the start line within {self._wait_seconds:g} s")
            if waited < _AWAKE_SECONDS:
                os.sched_yield()  # a late rank may need this core
            else:
                time.sleep(_NAP_SECONDS)


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_ESTABLISHED, _LISTENING = "01", "0A"


class _End(NamedTuple):
    """One end of a connection of this machine, as in /proc/net/tcp: both addresses, state, owner, inode."""

    here: str
    there: str
    state: str
    owner: int
    inode: str


def watch_groups(c10d: Any) -> None:
    """Makes torch raise when it makes a process group to which a stranger is connected. All connections of a group
    exist once it is made, and none comes later, so that no stranger's bytes are read."""
    make: Callable[..., Any] = c10d._new_process_group_helper

    def make_checked(*arguments: Any, **named: Any) -> Any:
        group = make(*arguments, **named)
        refuse_strangers()
        return group

    c10d._new_process_group_helper = make_checked


def refuse_strangers() -> None:
    """Raises PermissionError if another user holds the other end of a connection that this process accepted."""
    ends = list(_ends())
    numbers = set(_own_sockets())
    own_ends = [end for end in ends if end.inode in numbers]
    doors = {connection.here for connection in own_ends if connection.state == _LISTENING}
    taken = {
        (connection.there, connection.here)
        for connection in own_ends
        if connection.state == _ESTABLISHED and connection.here in doors
    }
    for end in ends:
        # An end without an inode has no owner any more, because it was closed.
        if (end.here, end.there) in taken and end.inode != "0" and end.owner != os.geteuid():
            raise PermissionError(
                f"a process of another user (number {end.owner}) has connected to this rank, where only ranks belong: "
                "what it sends would be taken for theirs. Measure again without that process."
            )


def _ends() -> Iterator[_End]:
    for name in ("tcp", "tcp6"):
        file = Path("/proc/self/net", name)
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            words = line.split()
            yield _End(words[1], words[2], words[3], int(words[7]), words[9])


def _own_sockets() -> Iterator[str]:
    folder = Path("/proc/self/fd")
    for file in folder.iterdir() if folder.exists() else ():
        try:
            kind, _, number = str(file.readlink()).partition(":")
        except OSError:  # closed in the meantime
            continue
        if kind == "socket":
            yield number.strip("[]")


# Seconds of each round, by part.
Rounds = dict[str, list[float]]
# Fewer rounds agree by chance too often. Short parts have more, until the slowest rank has taken this many seconds.
_LEAST_ROUNDS, _MOST_ROUNDS, _ROUNDS_SECONDS = 6, 15, 0.15
# Long enough that a barrier's own skew is small.
_LEAST_SECONDS = 3e-3
# Parts that need no warm-up once the others have run.
_MADE_OF_OTHERS = {"both", "in_turn"}


class RankMeeting(NamedTuple):
    """Waits for this rank's device, and for the other ranks."""

    synchronise: Callable[[], None]
    meet: Callable[[], None]


def step_rounds(parts: StepParts, together: RankMeeting, seed: int) -> Rounds:
    """Returns seconds of the parts of a step, of both at once and in sequence, and of rank 0's steps while others
    wait."""
    import torch.distributed as dist

    if parts.together is None:
        parts = _repeat_products(parts, together.synchronise)
    assert parts.together is not None

    def in_turn() -> None:
        parts.compute()
        together.synchronise()
        parts.communicate()

    ours = {"compute": parts.compute, "communication": parts.communicate, "both": parts.together, "in_turn": in_turn}
    if parts.alone is not None:
        ours["whole"], ours["share"] = parts.alone if dist.get_rank() == 0 else (_nothing, _nothing)
    return rounds(ours, together, seed)


def _repeat_products(parts: StepParts, synchronise: Callable[[], None]) -> StepParts:
    """Pairs an asynchronous communication with as many products as last long enough."""
    times = _times(parts.compute, synchronise)

    def products() -> None:
        for _ in range(times):
            parts.compute()

    def both() -> None:
        sent = parts.communicate()
        products()
        sent.wait()

    return StepParts(products, lambda: parts.communicate().wait(), both)


def rounds(parts: Mapping[str, Callable[[], object]], together: RankMeeting, seed: int) -> Rounds:
    """Returns seconds of each part in each round; all ranks begin together, in the same random order."""
    order, seconds = random.Random(seed), {name: list[float]() for name in parts}
    for name, part in parts.items():  # warms up
        if name not in _MADE_OF_OTHERS:
            part()
    together.synchronise()
    begun = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and _most(time.perf_counter() - begun) > _ROUNDS_SECONDS:
            break
        for name in order.sample(list(parts), len(parts)):
            together.meet()
            start = time.perf_counter()
            parts[name]()
            together.synchronise()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _nothing() -> None: ...


def _times(compute: Callable[[], object], synchronise: Callable[[], None]) -> int:
    """Returns how many products last long enough; the fastest rank's number, because all must do the same."""
    compute()
    synchronise()
    start = time.perf_counter()
    compute()
    synchronise()
    return int(_most(max(1.0, _LEAST_SECONDS / max(time.perf_counter() - start, 1e-6))))


def _most(value: float) -> float:
    import torch
    import torch.distributed as dist

    most = torch.tensor([value], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


# The bytes that a rank sends in a step, and seconds per round of the parts of a step; or why they are unknown.
StepAnswer = tuple[tuple[Sent, ...], Rounds] | str | None
# Prefixes of the environment variables that configure launchers and communication libraries.
RECORDED = (
    "OMP_",
    "MKL_NUM",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NCCL_",
    "GLOO_",
    "TORCH_",
)


# Seconds for the first meeting: ranks import torch and users' code at different speeds.
_MEETING_SECONDS = 300.0


def _meet(folder: Path, rank: int, ranks: int) -> Store:
    """Waits until all ranks have arrived. Returns the store in which they exchange their listening ports."""
    from torch._C._distributed_c10d import FileStore, PrefixStore

    # A file in a private folder, because a store that listens on a port would trust any connection.
    store = FileStore(str(folder / MEETING), ranks)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{number}" for number in range(ranks)], timedelta(seconds=_MEETING_SECONDS))
    return PrefixStore("group", store)


class RankBench(Bench):
    """One of `size` benches, which all get the same requests at the same time."""

    def __init__(self, settings: Settings, heart: Heart, wait_seconds: float) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(settings)
        self._clock = partial(PhaseClock, told=heart.phase)
        self._unmarked = heart.markers
        self._alone = False
        self._parts: dict[Case, StepAnswer] = {}
        self._size, self._rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        # Ranks send each other objects as pickles; unpickling them must not run code.
        dist.distributed_c10d._unpickler = PlainUnpickler
        watch_groups(dist.distributed_c10d)
        on_gpu = torch.cuda.is_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            timeout=timedelta(seconds=wait_seconds),
            store=_meet(heart.folder, self._rank, self._size),
            rank=self._rank,
            world_size=self._size,
            device_id=torch.device("cuda", 0) if on_gpu else None,
        )
        # Slots begin together, so that each rank's delay from then on can be measured.
        self._meet = StartLine(heart.folder, self._rank, self._size, wait_seconds).meet
        self._is_so_anywhere = lambda here: _most(here) > 0

    def probe(self) -> tuple[DeviceFacts, ...]:
        return tuple(replace(device, ranks=self._size) for device in super().probe())

    def software(self) -> dict[str, Scalar | None]:
        """Adds this rank's settings, which a launcher may have changed."""
        variables = {name: text for name, text in sorted(os.environ.items()) if name.startswith(RECORDED)}
        return {**super().software(), **{f"env {name}": text for name, text in variables.items()}}

    def release(self, key: str) -> tuple[str, ...]:
        """Like the base class; when no state is left, also freezes the remaining objects: imports that live as long as
        this process. Each garbage collection would spend 0.1 s on DTensor and torchao."""
        still_running = super().release(key)
        if not (self._prepared or self._kept):
            gc.freeze()
        return still_running

    def effect(self, case: Case, facts: DeviceFacts) -> StepEffect:
        return StepEffect(None, "several ranks take its steps together, and their inputs would have to change alike")

    def transfer(self, case: Case, facts: DeviceFacts) -> Transfer | None:
        with self._apart(case, facts) as (workload, _, setup):
            return workload.transfer(setup())

    def step_parts(self, case: Case, facts: DeviceFacts) -> StepAnswer:
        sent_case = replace(case, params=workloads.get(case.workload).sent_by(case))
        if sent_case not in self._parts:
            self._parts[sent_case] = self._step_parts(case, facts)
        return self._parts[sent_case]

    def _step_parts(self, case: Case, facts: DeviceFacts) -> StepAnswer:
        with self._apart(case, facts) as (workload, device, setup):
            parts = workload.step_parts(setup())
            if parts is None or isinstance(parts, str):
                return parts
            beginning = RankMeeting(partial(device.synchronise, facts.index), self._meet)
            return parts.sent, step_rounds(parts, beginning, self._settings.seed)
