"""Defines the closed sets of names: phases, levels of support, statuses, labels, roles of memory, and verdicts."""

from __future__ import annotations

from enum import StrEnum

# A run prints this text while it measures the ceilings of a device, once a week.
MEASURING_CEILINGS = "measuring what this machine can do, once a week"


class Phase(StrEnum):
    """The kind of work that a part of a step does. Suites cannot add phases, so that workloads can be compared."""

    DATA_LOAD = "data_load"
    DECODE = "decode"
    CAST = "cast"
    GEMM = "gemm"
    ATTENTION = "attention"
    ACCUMULATE = "accumulate"
    OPTIMIZER_STEP = "optimizer_step"
    ELEMENTWISE = "elementwise"
    COMMUNICATION = "communication"


UNATTRIBUTED = "unattributed"
# The name of the precision of a user's unchanged model.
UNTOUCHED = "untouched"
# The optimization levels of MS-AMP. They can be arms of a training, but they are not precisions.
MSAMP_LEVELS = ("msamp-o1", "msamp-o2", "msamp-o3")
PHASES: tuple[str, ...] = tuple(Phase)
# The phases that load data and compute nothing with tensors.
LOADING_PHASES = frozenset({Phase.DATA_LOAD, Phase.DECODE})
# All phases and the unattributed time (the part of a step outside of all phases), in the order of tables.
CELL_PHASES: tuple[str, ...] = (*PHASES, UNATTRIBUTED)


class Level(StrEnum):
    """How a device supports a precision."""

    NATIVE = "native"
    EMULATED = "emulated"
    REFUSED = "refused"


class Status(StrEnum):
    """The outcome of a case."""

    OK = "ok"
    SKIPPED = "skipped"
    FAILED = "failed"


class Provenance(StrEnum):
    """How a number was obtained."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    DERIVED = "derived"


class Label(StrEnum):
    """A machine-readable reason to doubt a result, or something worth knowing about it."""

    NOISY = "noisy"
    AA_FAILED = "aa-failed"
    ABOVE_CEILING = "above-ceiling"
    WORK_MISMATCH = "work-mismatch"
    FALLBACK = "fallback"
    OTHER_INPUTS = "other-inputs"
    HANDICAP = "handicap"
    CONTENDED = "contended"
    SHARED = "shared"
    THROTTLED = "throttled"
    POWER_CAPPED = "power-capped"
    CLOCK_OFFSET = "clock-offset"
    MEMORY_FULL = "memory-full"
    UNSETTLED = "unsettled"
    LAUNCH_BOUND = "launch-bound"
    BELOW_FLOOR = "below-floor"
    FLAT_TIME = "flat-time"
    BIMODAL = "bimodal"
    UNEVEN = "uneven"
    WHOLE_STEPS = "whole-steps"
    DRIFT = "drift"
    POSITION = "position"
    FEW_SAMPLES = "few-samples"
    UNPAIRED = "unpaired"
    IN_PROCESS = "in-process"
    VARYING = "varying-steps"
    EAGER_QUANTISER = "eager-quantiser"
    NO_WORK = "no-work"
    LEAK = "leak"
    NOT_FINITE = "not-finite"
    ENERGY_UNRESOLVED = "energy-unresolved"
    REPLAY_PACE = "replay-pace"
    CROSS_RUN = "cross-run"

    @property
    def casts_doubt(self) -> bool:
        return self not in REMARK_LABELS


# Labels that are only remarks: they do not cast doubt on a measured speed.
REMARK_LABELS = frozenset({Label.POWER_CAPPED, Label.WHOLE_STEPS, Label.ENERGY_UNRESOLVED, Label.REPLAY_PACE})
# The labels of a case that may do other work than its name promises, or other work than the reference. They cast doubt
# on a verdict however large the effect is.
LABELS_OF_OTHER_WORK = frozenset(
    {
        Label.ABOVE_CEILING, Label.WORK_MISMATCH, Label.FALLBACK, Label.FLAT_TIME, Label.NO_WORK, Label.NOT_FINITE,
        Label.OTHER_INPUTS, Label.HANDICAP, Label.EAGER_QUANTISER, Label.UNPAIRED, Label.CROSS_RUN,
    }
)  # fmt: skip


class MemoryRole(StrEnum):
    """The purpose of a tensor's memory in a step, such as weights or activations."""

    WEIGHTS = "weights"
    LOW_WEIGHTS = "low_precision_weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOW_ACTIVATIONS = "low_precision_activations"
    DATA = "data"
    WORKSPACE = "workspace"
    OTHER = "other"


class Verdict(StrEnum):
    """The answer to the question whether a case is faster than the reference."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    UNSURE = "cannot tell"
    REFERENCE = "reference"
    EMULATED = "emulated"
    NONE = "none"
