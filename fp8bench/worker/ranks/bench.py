"""The bench of one rank, which joins the process group of all ranks and reports its progress.

It refuses connections of other users, because gloo accepts any connection without authentication. Only Linux shows
the owner of a connection. It also measures how well computing hides communication. For this it runs the parts of a
step alone, at the same time, and one after the other, in rounds of random order.
"""

from __future__ import annotations

import gc
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8bench.model import CELL_PHASES, Case, DeviceFacts, Scalar, StepEffect
from fp8bench.model.codec import PlainUnpickler
from fp8bench.model.ranks import HEARTBEAT_LAYOUT, OUTSIDE_OF_STEPS, RANK_MEETING_FILE, Sent, Transfer
from fp8bench.model.raw import Settings
from fp8bench.protocols import Phases
from fp8bench.protocols.workload import StepParts
from fp8bench.registry import workloads
from fp8bench.worker.bench import Bench
from fp8bench.worker.clock import UNATTRIBUTED_CODE, PhaseStampClock, make_reporting_phases

_START_LINE_FILE = "start-line"
_ARRIVAL_COUNT_BYTES = 8
# A rank that waits for others polls for this many seconds before it sleeps. A sleeping rank wakes up too late to
# begin together with the others.
_SPINNING_SECONDS = 5e-4
_POLL_SLEEP_SECONDS = 1e-4


class HeartbeatWriter:
    """Writes this rank's progress into a memory-mapped file, in half a microsecond per heartbeat."""

    def __init__(self, file: Path) -> None:
        self.folder = file.parent
        file.write_bytes(bytes(HEARTBEAT_LAYOUT.size))
        with file.open("r+b") as opened:
            self._page = mmap.mmap(opened.fileno(), HEARTBEAT_LAYOUT.size)
        self._beats = 0
        self._request = b"start"

    def request(self, name: str) -> None:
        self._request = name.encode()[:40]  # HEARTBEAT_LAYOUT has space for 40 bytes
        self.phase(OUTSIDE_OF_STEPS)

    def phase(self, code: int) -> None:
        """Writes a heartbeat with the code of the current phase. Writes nothing while an exception is handled, so that
        the last heartbeat shows in which phase the rank failed.
        """
        if sys.exception() is not None:
            return
        self._beats += 1
        HEARTBEAT_LAYOUT.pack_into(self._page, 0, self._beats, code, time.monotonic(), self._request)

    def make_phase_markers(self) -> Phases:
        self.phase(UNATTRIBUTED_CODE)
        return make_reporting_phases(lambda phase: self.phase(CELL_PHASES.index(phase)))


class RankBarrier:
    """A barrier for ranks on one machine. Each call of `wait_for_ranks` returns once all ranks have called it.

    A barrier of gloo or NCCL would take 0.3 ms or more for each use, because it wakes threads and sends messages.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, wait_seconds: float) -> None:
        file = folder / _START_LINE_FILE
        file.touch()
        with file.open("r+b") as opened:
            opened.truncate(ranks * _ARRIVAL_COUNT_BYTES)  # `truncate` keeps counts that other ranks have written
            self._arrival_counts = memoryview(mmap.mmap(opened.fileno(), ranks * _ARRIVAL_COUNT_BYTES)).cast("q")
        self._rank = rank
        self._wait_seconds = wait_seconds

    def wait_for_ranks(self) -> None:
        arrival_counts = self._arrival_counts
        rank_meeting_number = arrival_counts[self._rank] = arrival_counts[self._rank] + 1
        start = time.monotonic()
        while min(arrival_counts) < rank_meeting_number:
            waited_seconds = time.monotonic() - start
            if waited_seconds > self._wait_seconds:
                late_ranks_text = ", ".join(
                    f"rank {rank}" for rank, count in enumerate(arrival_counts) if count < rank_meeting_number
                )
                raise TimeoutError(f"{late_ranks_text} did not reach the start line within {self._wait_seconds:g} s")
            if waited_seconds < _SPINNING_SECONDS:
                os.sched_yield()  # another rank may need this core
            else:
                time.sleep(_POLL_SLEEP_SECONDS)


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# States of a TCP connection, as /proc/net/tcp writes them.
_ESTABLISHED, _LISTENING = "01", "0A"


class _TcpConnectionEnd(NamedTuple):
    """One end of a TCP connection, as /proc/net/tcp lists it. `owner_user_id` is the user id and `inode` the inode of
    the end's socket.
    """

    local_address: str
    remote_address: str
    state: str
    owner_user_id: int
    inode: str


def check_new_process_groups(c10d: Any) -> None:
    """Makes torch raise an error when it creates a process group, if a different user's process has connected to this
    rank.

    A group gets all its connections when it is created, so this check is in time: no bytes from other users are read.
    """
    create_group: Callable[..., Any] = c10d._new_process_group_helper

    def make_checked_group(*arguments: Any, **named: Any) -> Any:
        group = create_group(*arguments, **named)
        refuse_other_users()
        return group

    c10d._new_process_group_helper = make_checked_group


def refuse_other_users() -> None:
    """Raises PermissionError if another user owns the other end of a connection that this process has accepted."""
    connection_ends = list(_read_connection_ends())
    process_socket_inodes = set(_list_own_sockets())
    process_connections = [end for end in connection_ends if end.inode in process_socket_inodes]
    listening_addresses = {
        connection.local_address for connection in process_connections if connection.state == _LISTENING
    }
    accepted_connections = {
        (connection.remote_address, connection.local_address)
        for connection in process_connections
        if connection.state == _ESTABLISHED and connection.local_address in listening_addresses
    }
    for end in connection_ends:
        # For a closed end of a connection, the system reports neither inode nor owner.
        if (
            (end.local_address, end.remote_address) in accepted_connections
            and end.inode != "0"
            and end.owner_user_id != os.geteuid()
        ):
            raise PermissionError(
                f"a process of another user (number {end.owner_user_id}) has connected to this rank, which would take "
                "its messages for those of other ranks. End that process, and measure again."
            )


def _read_connection_ends() -> Iterator[_TcpConnectionEnd]:
    for name in ("tcp", "tcp6"):
        file = Path("/proc/self/net", name)
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            fields = line.split()
            yield _TcpConnectionEnd(fields[1], fields[2], fields[3], int(fields[7]), fields[9])


def _list_own_sockets() -> Iterator[str]:
    folder = Path("/proc/self/fd")
    for file in folder.iterdir() if folder.exists() else ():
        try:
            kind, _, inode_number = str(file.readlink()).partition(":")
        except OSError:  # the descriptor was closed after listing it
            continue
        if kind == "socket":
            yield inode_number.strip("[]")


# Maps each part of a step to the seconds that it takes in each round.
PartSeconds = dict[str, list[float]]
# The least and the most rounds of timing the parts of a step. With fewer rounds, noise would decide too often. After
# the least rounds, more rounds follow until the slowest rank has taken _MIN_ROUNDS_SECONDS.
_MIN_ROUNDS, _MAX_ROUNDS, _MIN_ROUNDS_SECONDS = 6, 15, 0.15
# The least seconds that a part of a step must take. Ranks leave a barrier at slightly different times, and these
# differences must be short in comparison.
_MIN_PART_SECONDS = 3e-3
# Parts that only combine `compute` and `communication`. They need no warm-up besides that of these two parts.
_COMBINED_STEP_PARTS = {"both", "in_turn"}


class RankSyncFunctions(NamedTuple):
    """Two functions for timing on several ranks: `synchronise` waits for this rank's device, `wait_for_ranks` for the
    other ranks.
    """

    synchronise: Callable[[], None]
    wait_for_ranks: Callable[[], None]


def time_step_parts(parts: StepParts, together: RankSyncFunctions, seed: int) -> PartSeconds:
    """Times the parts of a step (products and communication) alone, at the same time, and one after the other. Also
    times steps of rank 0 while the other ranks wait.
    """
    import torch.distributed as dist

    # 1. Without a function that runs both parts at the same time, run products during a transfer.
    if parts.together is None:
        parts = _repeat_step_products(parts, together.synchronise)
    assert parts.together is not None

    # 2. Run the parts one after the other, as if communication could not overlap with products.
    def run_in_turn() -> None:
        parts.compute()
        together.synchronise()
        parts.communicate()

    step_part_functions = {
        "compute": parts.compute,
        "communication": parts.communicate,
        "both": parts.together,
        "in_turn": run_in_turn,
    }
    # 3. Run steps of rank 0 alone: with the whole batch, and with one rank's share of it. All ranks need functions with
    # these names, because all ranks time the parts in the same order.
    if parts.alone is not None:
        rank_0_steps = dict(zip(("whole", "share"), parts.alone, strict=True))
        step_part_functions |= rank_0_steps if dist.get_rank() == 0 else dict.fromkeys(rank_0_steps, _do_nothing)
    return time_rounds(step_part_functions, together, seed)


def _repeat_step_products(parts: StepParts, synchronise: Callable[[], None]) -> StepParts:
    """Returns the timed parts of a step (products, communication, and both at the same time), with products repeated
    until they take _MIN_PART_SECONDS.
    """
    product_repetitions = _count_product_repetitions(parts.compute, synchronise)

    def run_products() -> None:
        for _ in range(product_repetitions):
            parts.compute()

    def run_at_same_time() -> None:
        pending_transfer = parts.communicate()
        run_products()
        pending_transfer.wait()

    return StepParts(run_products, lambda: parts.communicate().wait(), run_at_same_time)


def time_rounds(parts: Mapping[str, Callable[[], object]], together: RankSyncFunctions, seed: int) -> PartSeconds:
    """Times each part of a step in several rounds. In each round, all ranks run the parts in the same random order, and
    begin each part at the same time.
    """
    generator = random.Random(seed)
    seconds_by_part = {name: list[float]() for name in parts}
    for name, part in parts.items():  # a warm-up
        if name not in _COMBINED_STEP_PARTS:
            part()
    together.synchronise()
    first_round_start = time.perf_counter()
    for round_number in range(_MAX_ROUNDS):
        if (
            round_number >= _MIN_ROUNDS
            and _find_largest_of_ranks(time.perf_counter() - first_round_start) > _MIN_ROUNDS_SECONDS
        ):
            break
        for name in generator.sample(list(parts), len(parts)):
            together.wait_for_ranks()
            start = time.perf_counter()
            parts[name]()
            together.synchronise()
            seconds_by_part[name].append(time.perf_counter() - start)
    return seconds_by_part


def _do_nothing() -> None: ...


def _count_product_repetitions(compute: Callable[[], object], synchronise: Callable[[], None]) -> int:
    """Returns how many products take at least _MIN_PART_SECONDS together. All ranks get the largest number that any
    rank needs.
    """
    compute()
    synchronise()
    start = time.perf_counter()
    compute()
    synchronise()
    return int(_find_largest_of_ranks(max(1.0, _MIN_PART_SECONDS / max(time.perf_counter() - start, 1e-6))))


def _find_largest_of_ranks(value: float) -> float:
    import torch
    import torch.distributed as dist

    largest_value = torch.tensor([value], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(largest_value, dist.ReduceOp.MAX)
    return float(largest_value)


# The bytes that a rank sends in a step, and the seconds of each part of the step (such as communication) in each round.
# If these are unknown, a text with the reason. None if the suite does not divide its step into parts.
StepPartsAnswer = tuple[tuple[Sent, ...], PartSeconds] | str | None
# Prefixes of environment variables that configure launchers and communication libraries.
RECORDED_VARIABLE_PREFIXES = (
    "OMP_",
    "MKL_NUM",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NCCL_",
    "GLOO_",
    "TORCH_",
)


# How long ranks wait for each other at the start, because they import torch and the user's code at different speeds.
_START_TIMEOUT_SECONDS = 300.0


def _wait_for_all_ranks(folder: Path, rank: int, ranks: int) -> Store:
    """Waits until all ranks have started. Returns the store in which they exchange the ports on which they listen."""
    from torch._C._distributed_c10d import FileStore, PrefixStore

    # Use a file in a private folder as the store: a store that listens on a port would trust any connection.
    store = FileStore(str(folder / RANK_MEETING_FILE), ranks)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{number}" for number in range(ranks)], timedelta(seconds=_START_TIMEOUT_SECONDS))
    return PrefixStore("group", store)


class RankBench(Bench):
    """Answers requests on one of `size` ranks. All ranks get the same requests at the same time."""

    def __init__(self, settings: Settings, heartbeat_writer: HeartbeatWriter, wait_seconds: float) -> None:
        import torch
        import torch.distributed as dist

        super().__init__(settings)
        self._make_clock = partial(PhaseStampClock, report=heartbeat_writer.phase)
        self._make_unmarked_phases = heartbeat_writer.make_phase_markers
        self._alone = False
        self._parts: dict[Case, StepPartsAnswer] = {}
        self._size = int(os.environ["WORLD_SIZE"])
        self._rank = int(os.environ["RANK"])
        # Ranks exchange objects as pickles. Unpickling must not run code.
        dist.distributed_c10d._unpickler = PlainUnpickler
        check_new_process_groups(dist.distributed_c10d)
        has_gpu = torch.cuda.is_available()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
            timeout=timedelta(seconds=wait_seconds),
            store=_wait_for_all_ranks(heartbeat_writer.folder, self._rank, self._size),
            rank=self._rank,
            world_size=self._size,
            device_id=torch.device("cuda", 0) if has_gpu else None,  # a rank sees only one GPU
        )
        # Slots of all ranks begin at the same time, so that the delay of each rank can be measured.
        self._meet_ranks = RankBarrier(heartbeat_writer.folder, self._rank, self._size, wait_seconds).wait_for_ranks
        self._any_rank = lambda here: _find_largest_of_ranks(here) > 0

    def probe(self) -> tuple[DeviceFacts, ...]:
        return tuple(replace(device, ranks=self._size) for device in super().probe())

    def software(self) -> dict[str, Scalar | None]:
        """Returns the facts of every bench, and this rank's environment settings, which a launcher may have changed."""
        settings = {
            f"env {name}": text
            for name, text in sorted(os.environ.items())
            if name.startswith(RECORDED_VARIABLE_PREFIXES)
        }
        return {**super().software(), **settings}

    def release(self, key: str) -> tuple[str, ...]:
        """Frees a state. After the last state, also excludes all remaining objects from garbage collection.

        The remaining objects are imported modules. For DTensor and torchao, each garbage collection would take 0.1 s.
        """
        running_task_names = super().release(key)
        if not (self._prepared or self._kept):
            gc.freeze()
        return running_task_names

    def effect(self, case: Case, facts: DeviceFacts) -> StepEffect:
        return StepEffect(
            None, "several ranks take its steps together, so the inputs of all ranks would have to be replaced alike"
        )

    def transfer(self, case: Case, facts: DeviceFacts) -> Transfer | None:
        with self._open_untimed_pass(case, facts) as (workload, _, setup):
            return workload.transfer(setup())

    def step_parts(self, case: Case, facts: DeviceFacts) -> StepPartsAnswer:
        communication_case = replace(case, params=workloads.get(case.workload).sent_by(case))
        if communication_case not in self._parts:
            self._parts[communication_case] = self._measure_step_parts(case, facts)
        return self._parts[communication_case]

    def _measure_step_parts(self, case: Case, facts: DeviceFacts) -> StepPartsAnswer:
        with self._open_untimed_pass(case, facts) as (workload, device, setup):
            parts = workload.step_parts(setup())
            if parts is None or isinstance(parts, str):
                return parts
            rank_meeting = RankSyncFunctions(partial(device.synchronise, facts.index), self._meet_ranks)
            return parts.sent, time_step_parts(parts, rank_meeting, self._settings.seed)
