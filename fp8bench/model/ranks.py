"""Values of several processes (ranks) that measure together: what each rank took, and the heartbeats in their files."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fp8bench.model.words import CELL_PHASES

# The format of a heartbeat file: the number of the beat, the phase (-1 outside of steps), the time on the machine's
# monotonic clock, and the request on which the rank works.
BEAT = struct.Struct("<qqd40s")
OUTSIDE = -1
# The libraries by which ranks communicate, by kind of device.
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# A name in the folder of a launch: the socket of the process that measures.
PARENT = "parent"
# A name in the folder of a launch: the file by which ranks find each other. Only the user who owns file and folder
# can open them.
MEETING = "meeting"
# The name of an environment variable. Every rank and each process that it starts have it, with the name of the
# launch.
MARK = "FP8BENCH_RANKS"


def ranks_in_words(ranks: int, kind: str) -> str:
    """Returns the number of ranks and the library by which they communicate, such as '2 gloo'. Figures for which
    this text differs cannot be compared."""
    return f"{ranks} {BACKENDS.get(kind, 'gloo')}"


def beat_file(rank: int) -> str:
    return f"rank-{rank}.beat"


def stderr_file(rank: int) -> str:
    return f"rank-{rank}.err"


@dataclass(frozen=True)
class RankCalls:
    """The time of each call of a slot on one rank, and how much of this time was communication, in nanoseconds."""

    rank: int
    step_ns: tuple[int, ...]
    communication_ns: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """The bytes of one step of a collective. `logical` are those of the complete input vector, and `payload` those in
    the dtype that is sent. `wire` are those that a rank sends to others over the network.

    `counted` means that `wire` was counted from the sent tensors. Otherwise `wire` is computed for a ring that sends
    the tensor given to torch. `bus_factor` is that of nccl-tests: bytes / time * factor can be compared with the rate
    of a link.
    """

    logical: float
    payload: float
    wire: float
    bus_factor: float
    counted: bool


@dataclass(frozen=True)
class Overlap:
    """The seconds of four things in each round: products alone (`compute`), communication alone, both at the same
    time, and one after the other (`in_turn`). Each is the time of the slowest rank. If rounds are missing, `why` is
    the reason.
    """

    compute: tuple[float, ...] = ()
    communication: tuple[float, ...] = ()
    both: tuple[float, ...] = ()
    in_turn: tuple[float, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Sent:
    """The bytes that one operation in one dtype makes a rank send to others, in one step. For a collective, they are
    computed as if the ranks formed a ring.
    """

    rank: int
    operation: str
    dtype: str
    calls: int
    bytes: float


@dataclass(frozen=True)
class RankScaling:
    """The seconds of one step in each round, measured in three ways. `whole`: one rank has the complete batch.
    `share`: one rank has its part of the batch. `together`: all ranks have the complete batch.
    """

    whole: tuple[float, ...]
    share: tuple[float, ...]
    together: tuple[float, ...]


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank at the highest point of its step, and their roles."""

    rank: int
    peak: int
    roles: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class FailedRank:
    """The rank that made a case fail: its request, the phase of its step ('' outside of steps), and the number of its
    last heartbeat. `silent_seconds` is the age of that heartbeat when the failure was noticed.
    """

    rank: int
    ranks: int
    request: str
    phase: str
    beats: int
    silent_seconds: float


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank: its number, what the rank was doing, and when."""

    rank: int
    sequence: int
    phase: str
    request: str
    seconds: float

    @property
    def doing(self) -> str:
        """What the rank was doing, such as "phase gemm of 'slot'" or "'prepare'"."""
        return f"phase {self.phase} of {self.request!r}" if self.phase else repr(self.request)


def parse_heartbeat(rank: int, raw: bytes) -> Heartbeat:
    """Parses the heartbeat file of a rank. An empty file gives a heartbeat with the number 0."""
    if len(raw) < BEAT.size:
        return Heartbeat(rank, 0, "", "start", 0.0)
    sequence, code, seconds, request = BEAT.unpack(raw[: BEAT.size])
    phase = CELL_PHASES[code] if 0 <= code < len(CELL_PHASES) else ""
    return Heartbeat(rank, sequence, phase, request.rstrip(b"\0").decode(errors="replace"), seconds)
