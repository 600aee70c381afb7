"""The names of the figures that fp8bench tells of every case by itself; what a workload measures has other names.

Whoever tells such a figure takes its name from here, so that no other list says which names are taken.
"""

from __future__ import annotations

from enum import StrEnum

from fp8bench.model.words import CELL_PHASES, MemoryRole

# The part of a step that is all of it, beside its phases.
STEP = "step"


class OwnMetric(StrEnum):
    """Figures of a case."""

    TIME = "time"
    REPLAY_TIME = "replay_time"
    MEAN_TIME = "mean_time"
    RELATIVE_TIME = "relative_time"
    RELATIVE_MEAN_TIME = "relative_mean_time"
    SUSTAINED_TIME = "sustained_time"
    SUSTAINED_CLOCK = "sustained_clock"
    SUSTAINED_POWER = "sustained_power"
    SM_CLOCK = "sm_clock"
    SHARE_OF_STEP = "share_of_step"
    SECONDS_PER_TFLOP = "seconds_per_tflop"
    SECONDS_PER_MTOK = "seconds_per_mtok"
    SECONDS_PER_GB = "seconds_per_gb"
    TOKENS_PER_SECOND = "tokens_per_second"
    FLOPS_PER_SECOND = "flops_per_second"
    BYTES_PER_SECOND = "bytes_per_second"
    CEILING_RATE = "ceiling_rate"
    SHARE_OF_CEILING = "share_of_ceiling"
    SHARE_OF_DATASHEET = "share_of_datasheet"
    FLOPS = "flops"
    MOVED_BYTES = "moved_bytes"
    LAUNCHES = "launches"
    UNKNOWN_OPERATORS = "unknown_operators"
    INTENSITY = "intensity"
    SHARE_8BIT = "share_of_flops_in_8_bits"
    SHARE_4BIT = "share_of_flops_in_4_bits"
    SHARE_32BIT = "share_of_flops_in_32_bits"
    SHARE_CONVERTED = "share_of_flops_converted"
    ENERGY = "energy"
    ENERGY_NET = "energy_net"
    ENERGY_UNCERTAINTY = "energy_uncertainty"
    ENERGY_LOW = "energy_low"
    ENERGY_HIGH = "energy_high"
    ENERGY_RESIDUAL = "energy_residual"
    ENERGY_PER_TOKEN = "energy_per_token"
    ENERGY_PER_TFLOP = "energy_per_tflop"
    ENERGY_PER_GB = "energy_per_gb"
    POWER = "power"
    IDLE_POWER = "idle_power"
    PEAK_MEMORY = "peak_memory"
    RESERVED_MEMORY = "reserved_memory"
    PROCESS_MEMORY = "process_memory"
    RESIDENT_MEMORY = "resident_memory"
    MAX_BATCH = "max_batch"
    MAX_BATCH_TOKENS = "max_batch_tokens"
    MAX_BATCH_MEMORY = "max_batch_memory"
    MAX_BATCH_LIMIT = "max_batch_limit"
    BREAK_EVEN = "break_even"
    RANK_SKEW = "rank_skew"
    RANK_TIME = "rank_time"
    RANK_COMMUNICATION = "rank_communication_time"
    RANK_WAITING = "rank_waiting_time"
    RANK_MEMORY = "rank_memory"
    MEMORY_SKEW = "memory_skew"
    COMMUNICATION = "communication_time"
    EXPOSED = "exposed_time"
    HIDDEN_COMMUNICATION = "hidden_communication"
    WIRE_BYTES = "wire_bytes"
    LOGICAL_BYTES = "logical_bytes"
    ALGBW = "algbw"
    BUSBW = "busbw"
    EFFECTIVE_BUSBW = "effective_busbw"
    BUBBLE = "bubble"
    IDEAL_BUBBLE = "ideal_bubble"
    STRONG_SCALING = "strong_scaling"
    WEAK_SCALING = "weak_scaling"
    VALUES = "values"
    AMAX = "amax"


# A training's mean loss over the reference's: near 1, and little of it matters.
RELATIVE_LOSS = "relative_loss"
# What stands before the name of a format that values do not fit into, or vanish in.
SHARE_ABOVE, SHARE_VANISHING = "share_above_", "share_vanishing_"


def time_of_phase(phase: str) -> str:
    """'time_gemm', where phases have no column of their own."""
    return f"{OwnMetric.TIME}_{phase}"


def memory_of_role(role: str) -> str:
    """'memory_weights'."""
    return f"memory_{role}"


_TAKEN = frozenset((*OwnMetric, STEP, *CELL_PHASES, *map(time_of_phase, CELL_PHASES), *map(memory_of_role, MemoryRole)))


def taken(name: str) -> str:
    """Why a workload may not call a number of its own so, '' if it may."""
    if name in _TAKEN or name.startswith((SHARE_ABOVE, SHARE_VANISHING)):
        return f"{name!r} is the name of a figure or a phase that fp8bench tells by itself. Rename it"
    return ""
