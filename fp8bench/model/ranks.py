"""Several processes that measure together: what each of them took, and the heartbeats that they leave in files."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fp8bench.model.words import CELL_PHASES

# Of a rank's file: how many beats there have been, the phase that it is in (-1 outside of steps), the time on the
# machine's steady clock, and the request that it works on.
BEAT = struct.Struct("<qqd40s")
OUTSIDE = -1
# Who carries what ranks send, by the kind of device that holds it.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# What lies in the folder of a launch: the socket of the process that measures.
PARENT = "parent"
# And the file by which ranks find each other. Both are their owner's alone, as the folder is.
MEETING = "meeting"
# A variable of every rank and of what it starts: the name of its launch.
MARK = "FP8BENCH_RANKS"


def ranks_in_words(ranks: int, kind: str) -> str:
    """How many, and by whom they talk: '2 gloo'. Numbers of two of these never compare."""
    return f"{ranks} {BACKENDS.get(kind, 'gloo')}"


def beat_file(rank: int) -> str:
    return f"rank-{rank}.beat"


def words_file(rank: int) -> str:
    """What a rank writes on stderr."""
    return f"rank-{rank}.err"


@dataclass(frozen=True)
class RankCalls:
    """What the calls of a slot took one rank, and how much of each of them was communication, in nanoseconds."""

    rank: int
    step_ns: tuple[int, ...]
    communication_ns: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """What one step of a collective moves, in bytes: of the whole vector as it is taken in (`logical`) and in the dtype
    that is sent (`payload`), and what a rank hands to the network for others (`wire`).

    `counted` says that these are the tensors that were sent; else they are a ring's share of the one that torch was
    given. `bus_factor` is nccl-tests': bytes over time times it compares with a link's rate.
    """

    logical: float
    payload: float
    wire: float
    bus_factor: float
    counted: bool


@dataclass(frozen=True)
class Overlap:
    """Rounds of products alone, of communication alone, of both at once and of both in turn, in seconds; of each round
    the slowest rank's. `why` says why there are none."""

    compute: tuple[float, ...] = ()
    communication: tuple[float, ...] = ()
    both: tuple[float, ...] = ()
    in_turn: tuple[float, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Sent:
    """What a rank sends to others in one step by one operation in one dtype, in bytes.

    Of a collective a ring's share of the tensors that torch was given.
    """

    rank: int
    operation: str
    dtype: str
    calls: int
    bytes: float


@dataclass(frozen=True)
class RankScaling:
    """Rounds of one step in seconds: of one rank alone with the whole batch (`whole`) and with one rank's share of it
    (`share`), the others waiting, and of all ranks together with the whole batch."""

    whole: tuple[float, ...]
    share: tuple[float, ...]
    together: tuple[float, ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the highest point of its step, and what they are for."""

    rank: int
    peak: int
    roles: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class FailedRank:
    """Which of so many ranks a case failed by: the request that it was at, the phase of a step ('' outside of steps),
    and its last heartbeat, the number of which among its own and its age in seconds when that was noticed."""

    rank: int
    ranks: int
    request: str
    phase: str
    beats: int
    silent_seconds: float


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a rank: its number among the rank's own, what it was doing, and when."""

    rank: int
    sequence: int
    phase: str
    request: str
    seconds: float

    @property
    def doing(self) -> str:
        """'phase gemm of slot', 'prepare'."""
        return f"phase {self.phase} of {self.request!r}" if self.phase else repr(self.request)


def heartbeat_of(rank: int, raw: bytes) -> Heartbeat:
    """What a rank's file says; none was left where it is empty."""
    if len(raw) < BEAT.size:
        return Heartbeat(rank, 0, "", "start", 0.0)
    sequence, code, seconds, request = BEAT.unpack(raw[: BEAT.size])
    phase = CELL_PHASES[code] if 0 <= code < len(CELL_PHASES) else ""
    return Heartbeat(rank, sequence, phase, request.rstrip(b"\0").decode(errors="replace"), seconds)
