"""Explains the terms of a report in one sentence each. For each label, it explains the meaning, the usual cause and
the remedy.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.analysis.verdicts import SAME_BAND, VERDICT_BAND
from fp8bench.model import UNATTRIBUTED, Label, MemoryRole, Phase
from fp8bench.model.specs import REPLAY, find_metric_spec
from fp8bench.model.stopping import LEAST_ROUNDS

# Short titles for columns of phases.
PHASE_TITLES: dict[str, str] = {
    Phase.DATA_LOAD: "data",
    Phase.DECODE: "decode",
    Phase.CAST: "cast",
    Phase.GEMM: "matmul",
    Phase.ATTENTION: "attention",
    Phase.ACCUMULATE: "accum",
    Phase.OPTIMIZER_STEP: "optimizer",
    Phase.ELEMENTWISE: "elementwise",
    Phase.COMMUNICATION: "comm",
    UNATTRIBUTED: "other",
}

LARGE, NOT_FINITE = "large", "not finite"
_ERROR_WORDS = ("negligible", "small", "moderate", LARGE, NOT_FINITE)


def describe_error_size(errors: Iterable[tuple[str, float]]) -> str:
    """Describes the worst of some errors, given as (metric, error), as 'negligible', 'small', 'moderate', 'large' or
    'not finite'. The limits are those of each metric's spec.
    """
    return _ERROR_WORDS[max(_error_size_index(metric, abs(error)) for metric, error in errors)]


def _error_size_index(metric: str, error: float) -> int:
    if not math.isfinite(error):
        return _ERROR_WORDS.index(NOT_FINITE)
    return bisect_left(find_metric_spec(metric).error_sizes, error)


BEST_TIME_LEGEND = (
    "best: time of an undisturbed step: the sum over its parts between marks of phases, each as the mean of its "
    "fastest quarter of rounds (less than most single steps); for a case, the reference's best / its speed-up; spread: "
    "distance of the quartiles / median, over all calls; throughput: of the best case"
)
CACHE_LEGEND = (
    "cache: content of the last-level cache when a call begins; hot (the default): as the previous call left it; cold: "
    "overwritten between calls; rotating: each call takes the next of several states"
)
# The column of this figure has the heading 'replayed'.
REPLAYED_LEGEND = f"replayed: {REPLAY.description}"
VERDICT_LEGEND = (
    f"verdict: faster or slower if the whole interval is outside +-{units.percent(VERDICT_BAND)} (or outside the "
    f"proven difference between the reference and its control), same if inside +-{units.percent(SAME_BAND, 0)}, else "
    "cannot tell"
)
# Reports show such a range where they would otherwise show '[low, high]' or 'could be'.
ROUNDS_RANGE_LEGEND = (
    f"(low to high), or 'seen', is the range of the rounds, not a confidence interval: there were fewer than "
    f"{LEAST_ROUNDS} rounds, or other programs disturbed them"
)
BREAK_EVEN_LEGEND = (
    "The sizes at which a precision takes less time than its rival (bf16 for lower precisions, if it was measured, "
    "else the reference). Between two sizes the logarithm of the speed-up is interpolated linearly over that of the "
    "size; in brackets: where the crossing may be, from the intervals of the ratios, 0.5%, and the bend of the curve. "
    "Sizes outside the measured range are not judged."
)
NO_VERDICT_LEGEND = (
    "no verdict: if identical code differed, the hardware throttled, the host limited the device, less than a fifth of "
    "a core was free, clocks differed, or a case does not do what it declares; also if that holds for its reference"
)
EMULATED_LEGEND = (
    "emulated: the error is real; ignore time and memory, which are the cost of emulation; (est.): estimated for "
    "hardware that has the format"
)
PHASES_LEGEND = (
    "time of a step: shares of its total; other: time outside of all phases; -: no such phase, or a part of other"
)
BELOW_FLOOR_LEGEND = f"<: too short for a share, below {BELOW_FLOOR_MARKERS} times the cost of marking it"

DATA_LEGEND = (
    "data: the tensors of a step; amax: the largest magnitude; under a format: % overflow (above its largest value) / "
    "% underflow (not zero, but would become zero); -: none"
)

# For each use of memory: the title of its column, and its name within a sentence.
_MEMORY_ROLES: dict[str, tuple[str, str]] = {
    MemoryRole.WEIGHTS: ("weights", "weights"),
    MemoryRole.LOW_WEIGHTS: ("low w", "low-precision copies of weights"),
    MemoryRole.GRADIENTS: ("grads", "gradients"),
    MemoryRole.OPTIMIZER: ("optim", "optimizer state"),
    MemoryRole.ACTIVATIONS: ("activ", "activations"),
    MemoryRole.LOW_ACTIVATIONS: ("low a", "low-precision copies of activations"),
    MemoryRole.DATA: ("data", "data"),
    MemoryRole.WORKSPACE: ("work", "workspace"),
    MemoryRole.OTHER: ("other", "the rest"),
}
MEMORY_ROLE_TITLES = {role: title for role, (title, _) in _MEMORY_ROLES.items()}
MEMORY_ROLE_DESCRIPTIONS = {role: words for role, (_, words) in _MEMORY_ROLES.items()}
MEMORY_LEGEND = (
    "memory: tensors allocated through torch at the highest point of a step, by use, including the state; low w, low "
    "a: copies of weights and activations cast for products; work: buffers of running operations; in: the phase of "
    "the highest point"
)
ENERGY_LEGEND = (
    "energy: of the device for one step, the median of the windows (gross); net: without the device's idle energy with "
    "the same states in memory; per token, TFLOP or GB: gross; power: while steps ran; (+-): uncertainty of a window"
)


ENERGY_RATIO_LEGEND = (
    "energy vs the reference: below 1x is less; [low, high]: over all pairs of windows, with their uncertainty; less "
    "or more if the windows of the two differ by more than those of either, else unclear; emulated cases are not "
    "compared"
)
SPEED_UP_LEGEND = (
    "speed-up: step time of the reference / that of the case, above 1x is faster; [low, high], or 'could be': 99% "
    f"interval, at least as wide as earlier runs differ; {ROUNDS_RANGE_LEGEND}"
)


class LabelDescription(NamedTuple):
    """The meaning of a label, its usual cause, and the remedy."""

    meaning: str
    cause: str
    remedy: str


def explain_label(label: Label, heading: str = "", addition: str = "") -> str:
    """Returns the explanation of a label, as 'noisy: the A/A interval ... Usual cause: other work on the machine.
    Remedy: free the machine'.
    """
    meaning, cause, remedy = WORDS_BY_LABEL[label]
    return f"{heading or label}: {meaning}{addition}. Usual cause: {cause}. Remedy: {remedy}"


WORDS_BY_LABEL: dict[Label, LabelDescription] = {
    Label.NOISY: LabelDescription(
        "the interval of identical code (A/A) reaches further than 3% from 1",
        "other work on the machine, or steps of microseconds", "free the machine; `--rounds 96`; a larger case",
    ),
    Label.AA_FAILED: LabelDescription(
        "identical code differed: the A/A interval is 2% or more away from 1",
        "the machine changed while it was measured", "free the machine and measure again; `fp8bench selftest`",
    ),
    Label.ABOVE_CEILING: LabelDescription(
        "its declared work, over its time, exceeds the peak of this machine",
        "`work` counts too much, or the step leaves work out", "compare with `fp8bench tape NAME`",
    ),
    Label.WORK_MISMATCH: LabelDescription(
        "its operators do less work than it declares, or many times as much, so its rates are wrong",
        "`work` of the suite is wrong, or a branch is taken only untimed", "compare with `fp8bench tape NAME`",
    ),
    Label.FALLBACK: LabelDescription(
        "its products were computed in a different precision",
        "a library took a higher precision for this shape or device", "`fp8bench lint-shapes`; another `--backend`",
    ),
    Label.OTHER_INPUTS: LabelDescription(
        "its inputs differ from those of the reference",
        "`prepare` draws its numbers in the dtype of the case", "draw them in one dtype from the seed, then round",
    ),
    Label.HANDICAP: LabelDescription(
        "its reference is unnecessarily slow: it sleeps, copies, or multiplies wider or slower; or the two differ in "
        "threads or switches",
        "the reference sleeps, copies or pads where the case does not",
        "make the reference as fast as you can, with the same threads and switches",
    ),
    Label.CONTENDED: LabelDescription(
        "other processes took the CPU in most slots: wall time was well above CPU time",
        "builds, browsers, other users, or a virtual machine's neighbours", "free the machine; pin processors",
    ),
    Label.SHARED: LabelDescription(
        "other processes use the GPU or other slices of it; whether they ran during the rounds is unknown",
        "another process has memory on the GPU, or MIG is on", "look at `nvidia-smi`; use an unshared GPU",
    ),
    Label.THROTTLED: LabelDescription(
        "the device lowered its clocks, and not only for its power cap",
        "heat, or a limit of the power supply", "cool the device; wait; `--sustained 5` measures the lasting speed",
    ),
    Label.POWER_CAPPED: LabelDescription(
        "the device's power cap limits its clocks, as is normal for large products",
        "large products reach the power limit", "none needed; `--sustained 5` compares lasting speeds",
    ),
    Label.CLOCK_OFFSET: LabelDescription(
        "the device's clock was more than 1% different from that of the reference",
        "one precision heats the device more than the other", "lock the clocks; `--sustained 5`",
    ),
    Label.MEMORY_FULL: LabelDescription(
        "the device ran out of memory while timing, until torch released its cached memory",
        "the batch nearly fills the memory", "a smaller batch; `--max-batch` finds the largest",
    ),
    Label.UNSETTLED: LabelDescription(
        "the device's clock or temperature still moved when the first round began",
        "the device was cold or busy before the run", "measure again, without `--quick`",
    ),
    Label.LAUNCH_BOUND: LabelDescription(
        "enqueuing a step took more than half of its time, so part of that time is the host's",
        "short kernels on a fast GPU", "see the column `replayed`; a larger case; `--set compile=yes`",
    ),
    Label.BELOW_FLOOR: LabelDescription(
        f"all phases are shorter than {BELOW_FLOOR_MARKERS} times the cost of marking them",
        "a case of microseconds", "a larger case; read only the time of the whole step",
    ),
    Label.FLAT_TIME: LabelDescription(
        "it takes no longer than a smaller size of the same suite with at most half of its work",
        "a fixed cost hides the work, or the step ignores its size", "larger sizes; `fp8bench tape NAME`",
    ),
    Label.BIMODAL: LabelDescription(
        "the times fall into two clusters: two states of the machine or the code were measured as one",
        "clocks, huge pages or a neighbour switch between two states", "measure again; `--sessions 3`",
    ),
    Label.UNEVEN: LabelDescription(
        "some calls take much longer: the mean over all calls differs from the fastest ones",
        "some calls wait: garbage collection, a disk, a neighbour", "free the machine and measure again",
    ),
    Label.WHOLE_STEPS: LabelDescription(
        "the sum of the fastest stretches is less than any step that ran, so whole steps are compared",
        "different stretches are fast in different steps", "none needed",
    ),
    Label.DRIFT: LabelDescription(
        "the ratio to the reference moved while measuring",
        "the device warms up, or a load begins or ends", "measure again; `--sessions 3@10m`",
    ),
    Label.POSITION: LabelDescription(
        "the time of a slot depends on its position in the round, whichever case runs in it",
        "a case finds the cache content that the previous case left", "`--set cache=cold`; more rounds",
    ),
    Label.FEW_SAMPLES: LabelDescription(
        f"fewer than {LEAST_ROUNDS} rounds: the range of the rounds is shown instead of an interval",
        "`--quick`, or a short `--budget`", "leave out these options, or raise `--rounds`",
    ),
    Label.UNPAIRED: LabelDescription(
        "it did not fit into memory together with the reference, so it was measured at a different time",
        "the cases do not fit into memory together", "a smaller size; fewer precisions at once",
    ),
    Label.IN_PROCESS: LabelDescription(
        "the model was measured in the calling process, with everything else that runs there",
        "a live model of a notebook could not be sent", "put `make()` into a file and name it",
    ),
    Label.VARYING: LabelDescription(
        "steps differed in their sequence of phases, so their phases are not comparable",
        "a branch, or layers that are dropped at random", "fix the branch by the seed; use the time of the step only",
    ),
    Label.EAGER_QUANTISER: LabelDescription(
        "quantisers ran as many small operations instead of one compiled kernel each, so casts are slow",
        "no compiler here, or `FP8BENCH_QUANTISERS=eager`", "`fp8bench doctor` names what is missing",
    ),
    Label.NO_WORK: LabelDescription(
        "its results do not depend on its inputs, or it does less work while it is timed",
        "the result is thrown away, or cached between steps", "store it in the state, or return it",
    ),
    Label.LEAK: LabelDescription(
        "memory grows with every step, so later steps may differ from earlier ones",
        "a list, a graph or a cache grows in the state", "detach tensors that stay in the state",
    ),
    Label.NOT_FINITE: LabelDescription(
        "values of its state became infinite or NaN, which its suite allows but which can change times",
        "the suite lets its state diverge", "a lower rate; docs/how-to.md explains how to find the cause of NaN",
    ),
    Label.ENERGY_UNRESOLVED: LabelDescription(
        "its energy is unknown or uncertain, or differs between its windows",
        "windows shorter than the counter's ticks, or no counter", "`fp8bench doctor`; longer steps",
    ),
    Label.REPLAY_PACE: LabelDescription(
        "its phases take a different time alone than within a step, so their joules may not apply to the step",
        "a phase alone finds a different cache content", "use the joules of the whole step",
    ),
    Label.CROSS_RUN: LabelDescription(
        "the two sides were measured at different times, so changes in between affect the ratio",
        "two stored runs were compared", "`fp8bench duel --against REVISION` measures both at once",
    ),
}  # fmt: skip
