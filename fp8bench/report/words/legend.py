"""What the words of a report mean: one sentence for each."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.analysis.verdicts import BAND, SAME
from fp8bench.model import UNATTRIBUTED, MemoryRole, Phase
from fp8bench.model.specs import REPLAY
from fp8bench.model.stopping import LEAST_ROUNDS

# Phases: short titles of columns, what a sentence calls them, and whether that is a plural.
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

# What relative errors up to a size are called.
_ERROR_SIZES = ((1e-5, "negligible"), (1e-2, "small"), (1e-1, "moderate"), (math.inf, "large"))
ERRORS = "error: relative; negligible up to 1e-05, small up to 1%, moderate up to 10%, else large"
NOT_FINITE = "not finite"


def error_word(errors: Sequence[float]) -> str:
    """The word for the largest error; NOT_FINITE if any is no number."""
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

# Uses of memory: short titles of columns, and what a sentence calls them.
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
    """What the column of speed-ups says, with intervals of these levels (0 for none)."""
    known = "/".join(units.percent(level).replace(".0%", "%") for level in sorted({*levels} - {0.0}))
    words = [f"[low, high]: {known} interval of these rounds, at least as wide as runs lie apart"] if known else []
    words += [RANGE] if 0.0 in levels else []
    return f"speed-up: step time of {reference} / that of the case, above 1x is faster; {'; '.join(words)}"
