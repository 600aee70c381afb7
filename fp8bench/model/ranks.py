"""Values of several processes (ranks) that measure together: the times and bytes of each rank, and the heartbeats that
ranks write to files.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fp8bench.model.words import CELL_PHASES

# The content of a heartbeat file: the number of the heartbeat, the index of the phase (-1 outside of steps), the time
# on the machine's monotonic clock, and the request on which the rank works.
HEARTBEAT_LAYOUT = struct.Struct("<qqd40s")
OUTSIDE_OF_STEPS = -1
# The libraries by which ranks communicate, by kind of device.
RANK_LIBRARIES = {"cpu": "gloo", "cuda": "nccl"}
# The processes of several ranks share a folder. In it, this is the name of the socket of the process that measures.
PARENT_SOCKET = "parent"
# In the folder that the ranks share, the name of the file by which they find each other. Only the owner of file and
# folder can open them.
RANK_MEETING_FILE = "meeting"
# The name of an environment variable that every rank and all processes started by a rank have. Its value identifies
# the ranks that were launched together.
RANKS_LAUNCH_VARIABLE = "FP8BENCH_RANKS"


def describe_ranks(ranks: int, kind: str) -> str:
    """Returns the number of ranks and the library by which they communicate, such as '2 gloo'. Figures with different
    texts cannot be compared.
    """
    return f"{ranks} {RANK_LIBRARIES.get(kind, 'gloo')}"


def heartbeat_file(rank: int) -> str:
    return f"rank-{rank}.beat"


def stderr_file(rank: int) -> str:
    return f"rank-{rank}.err"


@dataclass(frozen=True)
class RankCalls:
    """How long each call of one rank took in a slot (the turn of one case in a round), and how much of it was
    communication, in nanoseconds.
    """

    rank: int
    step_ns: tuple[int, ...]
    communication_ns: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """The bytes of one step of a collective. `logical`: the complete input vector in float32. `payload`: the vector in
    the dtype that is sent. `wire`: what one rank sends to other ranks.

    If `counted` is True, `wire` was counted from the sent tensors. Otherwise it is computed as if the ranks formed a
    ring. `bus_factor` is that of nccl-tests: bytes / time * `bus_factor` can be compared with the rate of a link.
    """

    logical: float
    payload: float
    wire: float
    bus_factor: float
    counted: bool


@dataclass(frozen=True)
class Overlap:
    """The duration of a step in each round, measured in four ways, in seconds of the slowest rank: only products
    (`compute`), only `communication`, `both` at the same time, and one after the other (`in_turn`). If rounds are
    missing, `why` is the reason.
    """

    compute: tuple[float, ...] = ()
    communication: tuple[float, ...] = ()
    both: tuple[float, ...] = ()
    in_turn: tuple[float, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Sent:
    """The bytes that a rank sends to other ranks by one operation in one dtype, in one step. The bytes of a collective
    are computed as if the ranks formed a ring.
    """

    rank: int
    operation: str
    dtype: str
    calls: int
    bytes: float


@dataclass(frozen=True)
class RankScaling:
    """The seconds of one step in each round, measured in three ways. `whole`: one rank alone computes the complete
    batch. `share`: one rank alone computes its part of the batch. `together`: all ranks compute the complete batch.
    """

    whole: tuple[float, ...]
    share: tuple[float, ...]
    together: tuple[float, ...]


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank at the highest point of its step in bytes, also divided by role."""

    rank: int
    peak: int
    roles: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class FailedRank:
    """The rank that made a case fail, and what it was doing: the request that it was executing, the phase of the step
    ('' outside of steps), and the number of its last heartbeat (`beats`). `silent_seconds` is the age of this heartbeat
    when the failure was noticed.
    """

    rank: int
    ranks: int
    request: str
    phase: str
    beats: int
    silent_seconds: float


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank: its number, the phase and request on which the rank worked, and the time."""

    rank: int
    sequence: int
    phase: str
    request: str
    seconds: float

    @property
    def doing(self) -> str:
        """The last activity of the rank, such as "phase gemm of 'slot'" or "'prepare'"."""
        return f"phase {self.phase} of {self.request!r}" if self.phase else repr(self.request)


def parse_heartbeat(rank: int, content: bytes) -> Heartbeat:
    """Parses the content of a rank's heartbeat file. An empty file gives a heartbeat with the number 0."""
    if len(content) < HEARTBEAT_LAYOUT.size:
        return Heartbeat(rank, 0, "", "start", 0.0)
    sequence, phase_index, seconds, request = HEARTBEAT_LAYOUT.unpack(content[: HEARTBEAT_LAYOUT.size])
    phase = CELL_PHASES[phase_index] if 0 <= phase_index < len(CELL_PHASES) else ""
    return Heartbeat(rank, sequence, phase, request.rstrip(b"\0").decode(errors="replace"), seconds)
