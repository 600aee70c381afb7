"""What the words of a report mean, one sentence for each; and what labels mean, what causes them, and what to do."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from fp8bench import units
from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.analysis.verdicts import BAND, SAME
from fp8bench.model import UNATTRIBUTED, Label, MemoryRole, Phase
from fp8bench.model.specs import REPLAY, spec_of
from fp8bench.model.stopping import LEAST_ROUNDS

# Short titles of columns.
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


def error_word(errors: Iterable[tuple[str, float]]) -> str:
    """Returns the word for the worst of some errors, each with the name of its metric, which decides what is small."""
    return _ERROR_WORDS[max(_size_of(metric, abs(error)) for metric, error in errors)]


def _size_of(metric: str, error: float) -> int:
    if not math.isfinite(error):
        return _ERROR_WORDS.index(NOT_FINITE)
    return bisect_left(spec_of(metric).error_sizes, error)


BEST = (
    "best: the step undisturbed, the sum over its stretches of each one's fastest quarter of the rounds (less than "
    "most single steps), and of a case the reference's over the speed-up; spread: distance of the quartiles / median, "
    "over all calls; throughput: of the best case"
)
CACHE = (
    "cache: what the last cache holds when a call begins; hot, what the call before left, where nothing is said; cold: "
    "written over between calls; rotating: each call takes another state"
)
REPLAYED = f"replayed: {REPLAY.description}"
VERDICT = (
    f"verdict: faster or slower if the interval lies wholly outside +-{units.percent(BAND)} (or what the reference "
    f"provably differs from its own control), same if wholly inside +-{units.percent(SAME, 0)}, else cannot tell"
)
RANGE = f"(low to high): the range seen, no interval: fewer than {LEAST_ROUNDS} rounds, or other programs held them up"
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
PHASES = "time of a step: shares of its total; other: the time under no phase; -: no such phase"
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


ENERGY_VERSUS = (
    "energy vs the reference: below 1x is less; [low, high]: of all pairs of windows, with their uncertainty; less or "
    "more if windows of the two lie apart by more than those of either, else unclear; of an emulated case it is the "
    "cost of emulation, and compares with nothing"
)
SPEED_UP = (
    "speed-up: step time of the reference / that of the case, above 1x is faster; [low, high]: interval of these "
    f"rounds, at least as wide as runs lie apart; {RANGE}"
)


class LabelWords(NamedTuple):
    """What a label means, what it usually comes from, and what to do."""

    meaning: str
    cause: str
    remedy: str


def explain_label(label: Label, heading: str = "", more: str = "") -> str:
    """'noisy: so much noise ... from 1. Usual cause: other work on the machine. What to do: free the machine'."""
    words = LABELS[label]
    return f"{heading or label}: {words.meaning}{more}. Usual cause: {words.cause}. What to do: {words.remedy}"


LABELS: dict[Label, LabelWords] = {
    Label.NOISY: LabelWords(
        "so much noise that the A/A interval reaches further than 3% from 1",
        "other work on the machine, or steps of microseconds", "free the machine; `--rounds 96`; a larger case",
    ),
    Label.AA_FAILED: LabelWords(
        "identical code was provably told apart: the A/A interval lies 2% or more away from 1",
        "the machine changed while it was measured", "free the machine and measure again; `fp8bench selftest`",
    ),
    Label.ABOVE_CEILING: LabelWords(
        "the work that it declares, over its time, is more than this machine can do",
        "`work` counts too much, or the step leaves work out", "hold it against `fp8bench tape NAME`",
    ),
    Label.WORK_MISMATCH: LabelWords(
        "its operators do less work than it declares, or many times as much: rates of it are wrong",
        "`work` of the suite is wrong, or a branch is taken only untimed", "hold it against `fp8bench tape NAME`",
    ),
    Label.FALLBACK: LabelWords(
        "its products were computed in another precision than its own",
        "a library took a higher precision for this shape or device", "`fp8bench lint-shapes`; another `--backend`",
    ),
    Label.OTHER_INPUTS: LabelWords(
        "its steps are not given the numbers that the reference's are given",
        "`prepare` draws its numbers in the case's own dtype", "draw them in one dtype from the seed, then round",
    ),
    Label.HANDICAP: LabelWords(
        "its reference is slower than it need be: it sleeps, copies, or multiplies wider or slower; or one of the two "
        "has more threads or other switches",
        "the reference sleeps, copies or pads where the case does not",
        "make the reference as good as you can, and let both run alike",
    ),
    Label.CONTENDED: LabelWords(
        "other processes took the CPU in most slots: wall time was well above CPU time",
        "builds, browsers, other users, or a virtual machine's neighbours", "free the machine; pin processors",
    ),
    Label.SHARED: LabelWords(
        "other processes had work on the GPU, or other slices of it are there: whether they ran is unknown",
        "another process has memory on the GPU, or MIG is on", "`nvidia-smi`; take a GPU of your own",
    ),
    Label.THROTTLED: LabelWords(
        "the device held its clocks back, and not for its power cap alone",
        "heat, or a limit of the power supply", "cool it; wait; `--sustained 5` says what it keeps",
    ),
    Label.POWER_CAPPED: LabelWords(
        "the clocks are those that the device's power cap allows, as is normal for large products",
        "large products reach the power limit", "nothing: it is normal; `--sustained 5` compares what lasts",
    ),
    Label.CLOCK_OFFSET: LabelWords(
        "the device ran it at another clock than the reference, by more than 1%",
        "one precision heats the device more than the other", "lock the clocks; `--sustained 5`",
    ),
    Label.MEMORY_FULL: LabelWords(
        "the device's memory sufficed only once what torch kept was given back, while it was timed",
        "the batch is close to the memory's end", "a smaller batch; `--max-batch` says what fits",
    ),
    Label.UNSETTLED: LabelWords(
        "the device's clock or temperature still moved when the first round began",
        "the device was cold or busy ahead of the run", "measure again, without `--quick`",
    ),
    Label.LAUNCH_BOUND: LabelWords(
        "enqueuing a step took more than half of its time: some of that is the host's",
        "short kernels on a fast GPU", "read `replayed`; a larger case; `--set compile=yes`",
    ),
    Label.BELOW_FLOOR: LabelWords(
        f"all phases are shorter than {BELOW_FLOOR_MARKERS} times the cost of marking them",
        "a case of microseconds", "a larger case; read the whole step alone",
    ),
    Label.FLAT_TIME: LabelWords(
        "it takes no longer than a smaller size of the same suite, which declares half its work or less",
        "a fixed cost hides the work, or the step ignores its size", "larger sizes; `fp8bench tape NAME`",
    ),
    Label.BIMODAL: LabelWords(
        "the times fall into two clusters: two states of the machine or the code were measured as one",
        "clocks, huge pages or a neighbour switch between two states", "measure again; `--sessions 3`",
    ),
    Label.UNEVEN: LabelWords(
        "some calls take much longer than others: the mean over all calls differs from the fastest ones",
        "some calls wait: garbage collection, a disk, a neighbour", "free the machine and measure again",
    ),
    Label.WHOLE_STEPS: LabelWords(
        "the fastest stretches come to less than any step that ran: whole steps are compared",
        "stretches are fast in turn and never together", "nothing: whole steps are compared",
    ),
    Label.DRIFT: LabelWords(
        "the ratio to the reference moved while measuring",
        "the device warms up, or a load begins or ends", "measure again; `--sessions 3@10m`",
    ),
    Label.POSITION: LabelWords(
        "a slot takes another time for its place in the round, whatever case it is of",
        "a case leaves the cache to the next one", "`--set cache=cold`; more rounds",
    ),
    Label.FEW_SAMPLES: LabelWords(
        f"fewer than {LEAST_ROUNDS} rounds: the range of the rounds stands where an interval would",
        "`--quick`, or a short `--budget`", "leave them out, or raise `--rounds`",
    ),
    Label.UNPAIRED: LabelWords(
        "it did not fit into memory beside the reference, so it was measured at another time",
        "the cases do not fit into memory together", "a smaller size; fewer precisions at once",
    ),
    Label.IN_PROCESS: LabelWords(
        "the model was measured in the process that asked, with all else that goes on in it",
        "a live model of a notebook could not be sent", "put `make()` into a file and name it",
    ),
    Label.VARYING: LabelWords(
        "steps differed in their sequence of phases, so cells of different steps were not comparable",
        "a branch, or layers that are dropped at random", "fix the branch by the seed; read the step alone",
    ),
    Label.EAGER_QUANTISER: LabelWords(
        "quantisers ran as many operations, not as one compiled kernel each: its casts are slow",
        "no compiler here, or `FP8BENCH_QUANTISERS=eager`", "`fp8bench doctor` names what is missing",
    ),
    Label.NO_WORK: LabelWords(
        "what its steps give does not change with what they are given, or they do less work while timed",
        "the result is thrown away, or cached between steps", "keep it in the state, or return it",
    ),
    Label.LEAK: LabelWords(
        "tensors take more memory with every step, and go on so: later steps need not be like earlier ones",
        "a list, a graph or a cache grows in the state", "detach what is kept between steps",
    ),
    Label.NOT_FINITE: LabelWords(
        "numbers of its state became infinite or NaN, as its suite says they may: that can change times",
        "the suite lets its state diverge", "a lower rate; docs/how-to.md says where NaN comes from",
    ),
    Label.ENERGY_UNRESOLVED: LabelWords(
        "its energy has no number, or one that is not sure, or on which its windows do not agree",
        "windows shorter than the counter's ticks, or no counter", "`fp8bench doctor`; longer steps",
    ),
    Label.REPLAY_PACE: LabelWords(
        "by themselves its phases take another time than in a step: their joules may not be the step's",
        "a phase by itself finds another cache than in the step", "read the step's joules",
    ),
    Label.CROSS_RUN: LabelWords(
        "the two sides were measured at different times: what changed in between is in the ratio",
        "two stored runs were compared", "`fp8bench duel --against REVISION` measures both at once",
    ),
}  # fmt: skip
