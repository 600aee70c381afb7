"""What the words of a report mean: one sentence each."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.analysis.verdicts import BAND, SAME
from fp8bench.model import UNATTRIBUTED, Label, MemoryRole, Phase
from fp8bench.model.specs import REPLAY
from fp8bench.model.stopping import LEAST_ROUNDS

LABELS: dict[Label, str] = {
    Label.NOISY: "so much noise that the A/A interval reaches further than 3% from 1",
    Label.AA_FAILED: "identical code was provably told apart: the A/A interval lies 2% or more away from 1",
    Label.ABOVE_CEILING: "the work that it declares, over its time, is more than this machine can do",
    Label.WORK_MISMATCH: "its operators do less work than it declares, or many times as much: rates of it are wrong",
    Label.FALLBACK: "its products were computed in another precision than its own",
    Label.OTHER_INPUTS: "its steps are not given the numbers that the reference's are given",
    Label.HANDICAP: "its reference is slower than it need be: it sleeps, copies, or multiplies wider or slower",
    Label.CONTENDED: "other processes took the CPU in most slots: wall time was well above CPU time",
    Label.SHARED: "other processes had work on the GPU, or other slices of it are there: whether they ran nobody says",
    Label.THROTTLED: "the device held its clocks back, and not for its power cap alone",
    Label.POWER_CAPPED: "the clocks are those that the device's power cap allows, as is normal for large products",
    Label.CLOCK_OFFSET: "the device ran it at another clock than the reference, by more than 1%",
    Label.MEMORY_FULL: "the device's memory sufficed only once what torch kept was given back, while it was timed",
    Label.UNSETTLED: "the device's clock or temperature still moved when the first round began",
    Label.LAUNCH_BOUND: "enqueuing a step took more than half of its time: some of that is the host's",
    Label.BELOW_FLOOR: f"all phases are shorter than {BELOW_FLOOR_MARKERS} times the cost of marking them",
    Label.FLAT_TIME: "it takes no longer than a smaller size of the same suite, which declares half its work or less",
    Label.BIMODAL: "the times fall into two clusters: two states of the machine or the code were measured as one",
    Label.UNEVEN: "some calls take much longer than others: all calls say something else than the fastest ones",
    Label.WHOLE_STEPS: "the fastest stretches come to less than any step that ran: whole steps are compared",
    Label.DRIFT: "the ratio to the reference moved while measuring",
    Label.POSITION: "a slot takes another time for its place in the round, whatever case it is of",
    Label.FEW_SAMPLES: f"fewer than {LEAST_ROUNDS} rounds: the range of the rounds stands where an interval would",
    Label.UNPAIRED: "it did not fit into memory beside the reference, so it was measured at another time",
    Label.IN_PROCESS: "the model was measured in the process that asked, with all else that goes on in it",
    Label.VARYING: "steps differed in their sequence of phases, so cells of different steps were not comparable",
    Label.EAGER_QUANTISER: "quantisers ran as many operations, not as one compiled kernel each: its casts are slow",
    Label.NO_WORK: "what its steps give does not change with what they are given, or they do less work while timed",
    Label.LEAK: "tensors take more memory with every step, and go on so: later steps need not be like earlier ones",
    Label.NOT_FINITE: "numbers of its state became infinite or NaN, as its suite says they may: that can change times",
    Label.ENERGY_UNRESOLVED: "its energy has no number, or one that is not sure, or on which its windows do not agree",
    Label.REPLAY_PACE: "by themselves its phases take another time than in a step: their joules may not be the step's",
    Label.CROSS_RUN: "the two sides were measured at different times: what changed in between is in the ratio",
}

# The same in half a sentence, for what a label does to a verdict: 'perhaps faster, but ...'.
REASONS: dict[Label, str] = {
    Label.NOISY: "the times varied a lot",
    Label.AA_FAILED: "the reference differs from itself",
    Label.ABOVE_CEILING: "it claims more than this machine can do",
    Label.WORK_MISMATCH: "it does other work than it declares",
    Label.FALLBACK: "it did not compute in its precision",
    Label.OTHER_INPUTS: "it has other inputs than the reference",
    Label.HANDICAP: "the reference is handicapped",
    Label.CONTENDED: "other processes took the CPU",
    Label.SHARED: "it shared its GPU",
    Label.THROTTLED: "the device held its clocks back",
    Label.POWER_CAPPED: "it ran at the clocks that the device's power cap allows",
    Label.CLOCK_OFFSET: "it ran at another clock than the reference",
    Label.MEMORY_FULL: "the device's memory was full",
    Label.UNSETTLED: "the device had not warmed up",
    Label.LAUNCH_BOUND: "its time is partly the host's",
    Label.BELOW_FLOOR: "its phases are too short to be timed",
    Label.FLAT_TIME: "its time does not grow with its work",
    Label.BIMODAL: "its times fall into two clusters",
    Label.UNEVEN: "its calls are not alike",
    Label.WHOLE_STEPS: "its stretches make up for each other",
    Label.DRIFT: "the ratio moved while measuring",
    Label.POSITION: "its time depends on its place in the round",
    Label.FEW_SAMPLES: "it rests on few rounds",
    Label.UNPAIRED: "it was measured at another time than the reference",
    Label.IN_PROCESS: "it was measured in the process that asked",
    Label.VARYING: "its steps were not alike",
    Label.EAGER_QUANTISER: "its quantisers were not compiled",
    Label.NO_WORK: "its steps do no work",
    Label.LEAK: "its memory grows step by step",
    Label.NOT_FINITE: "its numbers became infinite or NaN",
    Label.ENERGY_UNRESOLVED: "its energy is not resolved",
    Label.REPLAY_PACE: "its phases take another time by themselves",
    Label.CROSS_RUN: "its sides were measured at different times",
}

# The parts of a step: short names for the columns of the phases table, what a sentence calls them, and whether that is
# a plural.
_PHASES: dict[str, tuple[str, str, bool]] = {
    Phase.DATA_LOAD: ("data", "data loading", False),
    Phase.DECODE: ("decode", "decoding", False),
    Phase.CAST: ("cast", "casts", True),
    Phase.GEMM: ("gemm", "products", True),
    Phase.ATTENTION: ("attn", "attention", False),
    Phase.ACCUMULATE: ("accum", "accumulation", False),
    Phase.OPTIMIZER_STEP: ("optim", "the optimizer step", False),
    Phase.ELEMENTWISE: ("elem", "elementwise work", False),
    Phase.COMMUNICATION: ("comm", "communication between ranks", False),
    UNATTRIBUTED: ("unattr", "the rest", False),
}
PHASE_TITLES = {phase: title for phase, (title, *_) in _PHASES.items()}
PHASE_WORDS = {phase: (words, is_plural) for phase, (_, words, is_plural) in _PHASES.items()}

# What a relative error is called up to a size; beyond the last it is large.
_ERROR_SIZES = ((1e-5, "negligible"), (1e-2, "small"), (1e-1, "moderate"), (math.inf, "large"))
ERRORS = "error: relative; negligible up to 1e-05, small up to 1%, moderate up to 10%, else large"
NOT_FINITE = "not finite"


def error_word(errors: Sequence[float]) -> str:
    """By the largest of them; NOT_FINITE if any is no number."""
    if not all(map(math.isfinite, errors)):
        return NOT_FINITE
    return next(word for size, word in _ERROR_SIZES if max(map(abs, errors)) <= size)


BEST = (
    "best: the step undisturbed, the sum over its stretches of each one's fastest quarter of the rounds (less than "
    "most single steps); median and spread (distance of the quartiles / median): over all calls; throughput: at the "
    "median"
)
CACHE = (
    "cache: what the last cache holds when a call begins; hot, what the call before left, where nothing is said; cold: "
    "written over between calls; rotating: each call takes another state"
)
REPLAYED = f"replayed: {REPLAY.description}"
VERDICT = (
    f"verdict: faster or slower if the interval lies wholly outside +-{units.percent(BAND)} (or what the reference "
    f"provably differs from its own control), same if wholly inside +-{units.percent(SAME, 0)}, else unsure"
)
RANGE = f"(low to high): the range of fewer than {LEAST_ROUNDS} rounds, or of such that others held up: no interval"
BREAK_EVEN = (
    "The sizes at which a precision takes less time than what it is held against (bf16 for what lies below it, "
    "where that was measured, else the reference). Between two sizes the logarithm of the speed-up runs straight over "
    "that of the size; in brackets stands where the crossing may be, by the intervals of the ratios, 0.5%, and the "
    "bend of the curve. Nothing is said beyond the measured sizes."
)
HARD = (
    "no verdict: where identical code was told apart, the device's hardware slowed it down, the host set the time of a "
    "device, less than a fifth of a core was left, clocks differed, or a case is not what it says; nor beside such a "
    "reference"
)
EMULATED = "emulated: right in numbers, but no speed: its time and memory are the cost of emulation"
PHASES = "phases: shares of the best case; unattr (unattributed): all else in the step; -: no such phase"
BELOW_FLOOR = f"<: shorter than {BELOW_FLOOR_MARKERS} times the cost of marking it, so no share is given"

DATA = (
    "data: what a step works on; amax: the largest magnitude; under a format: the share of the values above its "
    "largest / the share that is not zero and would become zero; -: none"
)

# What memory is for: short names for the columns of the memory table, and what a sentence calls them.
_ROLES: dict[str, tuple[str, str]] = {
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
MEMORY_TITLES = {role: title for role, (title, _) in _ROLES.items()}
MEMORY_WORDS = {role: words for role, (_, words) in _ROLES.items()}
MEMORY = (
    "memory: tensors allocated through torch, the state included, at the highest point of a step, by what they are "
    "for; low w, low a: copies of weights and activations cast for products; work: what an operation needs while it "
    "runs; in: the phase of the highest point"
)
ENERGY = (
    "energy: what the device took while steps ran, for one of them (gross; the median of its windows); net: beyond "
    "what it takes idle beside the same states; per token, TFLOP or GB: gross; power: while steps ran; (+-): how far "
    "a window can be off"
)
ENERGY_EMULATED = "energy of an emulated case is the cost of emulation, and compares with nothing"


def energy_versus(reference: str) -> str:
    return (
        f"energy vs {reference}: of a step / that of {reference}, below 1x is less; [low, high]: of all pairs of "
        "windows, with their uncertainty; less or more if windows of the two lie apart by more than those of either, "
        "else unclear"
    )


def speed_up(reference: str, levels: Collection[float]) -> str:
    """What the column of speed-ups says, with intervals of these levels; 0 is none."""
    known = "/".join(units.percent(level).replace(".0%", "%") for level in sorted({*levels} - {0.0}))
    words = [f"[low, high]: {known} interval of these rounds, at least as wide as runs lie apart"] if known else []
    words += [RANGE] if 0.0 in levels else []
    return f"speed-up: step time of {reference} / that of the case, above 1x is faster; {'; '.join(words)}"
