"""Several processes that measure together: what each of them took, and the heartbeats that they leave in files."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fp8bench.model.words import CELL_PHASES

# A rank's file: the number of beats, the phase (-1 outside of steps), the time on the machine's steady clock, and the
# request that it works on.
BEAT = struct.Struct("<qqd40s")
OUTSIDE = -1
# Libraries that carry what ranks send, by the kind of device.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# In the folder of a launch: the socket of the process that measures,
PARENT = "parent"
# and the file by which ranks find each other. Only their owner can open them, or the folder.
MEETING = "meeting"
# A variable of every rank and its descendants: the name of the launch.
MARK = "FP8BENCH_RANKS"


def ranks_in_words(ranks: int, kind: str) -> str:
    """How many ranks, and by which library they talk: '2 gloo'. Numbers of two of these never compare."""
    return f"{ranks} {BACKENDS.get(kind, 'gloo')}"


def beat_file(rank: int) -> str:
    return f"rank-{rank}.beat"


def words_file(rank: int) -> str:
    return f"rank-{rank}.err"


@dataclass(frozen=True)
class RankCalls:
    """How long the calls of a slot took one rank, and how much of each was communication, in nanoseconds."""

    rank: int
    step_ns: tuple[int, ...]
    communication_ns: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """The bytes of one step of a collective: of the whole input vector (`logical`), in the dtype that is sent
    (`payload`), and what a rank hands to the network for others (`wire`).

    `counted`: these are the tensors that were sent; else a ring's share of the tensor that torch was given.
    `bus_factor` is nccl-tests': bytes over time times it compares with a link's rate.
    """

    logical: float
    payload: float
    wire: float
    bus_factor: float
    counted: bool


@dataclass(frozen=True)
class Overlap:
    """Rounds of products alone, of communication alone, of both at once and of both in turn, in seconds: the slowest
    rank's of each round. `why` is the reason for their absence."""

    compute: tuple[float, ...] = ()
    communication: tuple[float, ...] = ()
    both: tuple[float, ...] = ()
    in_turn: tuple[float, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Sent:
    """The bytes that a rank sends to others in one step by one operation in one dtype; for a collective, a ring's share
    of its tensors."""

    rank: int
    operation: str
    dtype: str
    calls: int
    bytes: float


@dataclass(frozen=True)
class RankScaling:
    """Rounds of one step in seconds: one rank alone with the whole batch (`whole`) and with one rank's share of it
    (`share`), and all ranks with the whole batch (`together`)."""

    whole: tuple[float, ...]
    share: tuple[float, ...]
    together: tuple[float, ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the highest point of its step, and their roles."""

    rank: int
    peak: int
    roles: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class FailedRank:
    """The rank by which a case failed: its request, the phase of its step ('' outside of steps), the number of its last
    heartbeat, and that heartbeat's age in seconds when the failure was noticed."""

    rank: int
    ranks: int
    request: str
    phase: str
    beats: int
    silent_seconds: float


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a rank: its number among the rank's own, what the rank was doing, and when."""

    rank: int
    sequence: int
    phase: str
    request: str
    seconds: float

    @property
    def doing(self) -> str:
        """ "phase gemm of 'slot'", "'prepare'"."""
        return f"phase {self.phase} of {self.request!r}" if self.phase else repr(self.request)


def heartbeat_of(rank: int, raw: bytes) -> Heartbeat:
    """Reads a rank's file; an empty one gives a heartbeat numbered 0."""
    if len(raw) < BEAT.size:
        return Heartbeat(rank, 0, "", "start", 0.0)
    sequence, code, seconds, request = BEAT.unpack(raw[: BEAT.size])
    phase = CELL_PHASES[code] if 0 <= code < len(CELL_PHASES) else ""
    return Heartbeat(rank, sequence, phase, request.rstrip(b"\0").decode(errors="replace"), seconds)
