"""What each label means, in half a sentence too, what mostly causes it, and what to do."""

from __future__ import annotations

from typing import NamedTuple

from fp8bench.analysis.findings import BELOW_FLOOR_MARKERS
from fp8bench.model import Label
from fp8bench.model.stopping import LEAST_ROUNDS


class LabelWords(NamedTuple):
    """`reason` is what stands in a sentence about a verdict: 'perhaps faster, but ...'."""

    meaning: str
    reason: str
    cause: str
    remedy: str


def explained(label: Label, heading: str = "", more: str = "") -> str:
    """'noisy: so much noise ... from 1. Usual cause: other work on the machine. What to do: free the machine'."""
    words = LABELS[label]
    return f"{heading or label}: {words.meaning}{more}. Usual cause: {words.cause}. What to do: {words.remedy}"


LABELS: dict[Label, LabelWords] = {
    Label.NOISY: LabelWords(
        "so much noise that the A/A interval reaches further than 3% from 1",
        "the times varied a lot",
        "other work on the machine, or steps of microseconds", "free the machine; `--rounds 96`; a larger case",
    ),
    Label.AA_FAILED: LabelWords(
        "identical code was provably told apart: the A/A interval lies 2% or more away from 1",
        "the reference differs from itself",
        "the machine changed while it was measured", "free the machine and measure again; `fp8bench selftest`",
    ),
    Label.ABOVE_CEILING: LabelWords(
        "the work that it declares, over its time, is more than this machine can do",
        "it claims more than this machine can do",
        "`work` counts too much, or the step leaves work out", "hold it against `fp8bench tape NAME`",
    ),
    Label.WORK_MISMATCH: LabelWords(
        "its operators do less work than it declares, or many times as much: rates of it are wrong",
        "it does other work than it declares",
        "`work` of the suite is wrong, or a branch is taken only untimed", "hold it against `fp8bench tape NAME`",
    ),
    Label.FALLBACK: LabelWords(
        "its products were computed in another precision than its own",
        "it did not compute in its precision",
        "a library took a higher precision for this shape or device", "`fp8bench lint-shapes`; another `--backend`",
    ),
    Label.OTHER_INPUTS: LabelWords(
        "its steps are not given the numbers that the reference's are given",
        "it has other inputs than the reference",
        "`prepare` draws its numbers in the case's own dtype", "draw them in one dtype from the seed, then round",
    ),
    Label.HANDICAP: LabelWords(
        "its reference is slower than it need be: it sleeps, copies, or multiplies wider or slower",
        "the reference is handicapped",
        "the reference sleeps, copies or pads where the case does not", "make the reference as good as you can",
    ),
    Label.CONTENDED: LabelWords(
        "other processes took the CPU in most slots: wall time was well above CPU time",
        "other processes took the CPU",
        "builds, browsers, other users, or a virtual machine's neighbours", "free the machine; pin processors",
    ),
    Label.SHARED: LabelWords(
        "other processes had work on the GPU, or other slices of it are there: whether they ran nobody says",
        "it shared its GPU",
        "another process has memory on the GPU, or MIG is on", "`nvidia-smi`; take a GPU of your own",
    ),
    Label.THROTTLED: LabelWords(
        "the device held its clocks back, and not for its power cap alone",
        "the device held its clocks back",
        "heat, or a limit of the power supply", "cool it; wait; `--sustained 5` says what it keeps",
    ),
    Label.POWER_CAPPED: LabelWords(
        "the clocks are those that the device's power cap allows, as is normal for large products",
        "it ran at the clocks that the device's power cap allows",
        "large products reach the power limit", "nothing: it is normal; `--sustained 5` compares what lasts",
    ),
    Label.CLOCK_OFFSET: LabelWords(
        "the device ran it at another clock than the reference, by more than 1%",
        "it ran at another clock than the reference",
        "one precision heats the device more than the other", "lock the clocks; `--sustained 5`",
    ),
    Label.MEMORY_FULL: LabelWords(
        "the device's memory sufficed only once what torch kept was given back, while it was timed",
        "the device's memory was full",
        "the batch is close to the memory's end", "a smaller batch; `--max-batch` says what fits",
    ),
    Label.UNSETTLED: LabelWords(
        "the device's clock or temperature still moved when the first round began",
        "the device had not warmed up",
        "the device was cold or busy ahead of the run", "measure again, without `--quick`",
    ),
    Label.LAUNCH_BOUND: LabelWords(
        "enqueuing a step took more than half of its time: some of that is the host's",
        "its time is partly the host's",
        "short kernels on a fast GPU", "read `replayed`; a larger case; `--set compile=yes`",
    ),
    Label.BELOW_FLOOR: LabelWords(
        f"all phases are shorter than {BELOW_FLOOR_MARKERS} times the cost of marking them",
        "its phases are too short to be timed",
        "a case of microseconds", "a larger case; read the whole step alone",
    ),
    Label.FLAT_TIME: LabelWords(
        "it takes no longer than a smaller size of the same suite, which declares half its work or less",
        "its time does not grow with its work",
        "a fixed cost hides the work, or the step ignores its size", "larger sizes; `fp8bench tape NAME`",
    ),
    Label.BIMODAL: LabelWords(
        "the times fall into two clusters: two states of the machine or the code were measured as one",
        "its times fall into two clusters",
        "clocks, huge pages or a neighbour switch between two states", "measure again; `--sessions 3`",
    ),
    Label.UNEVEN: LabelWords(
        "some calls take much longer than others: all calls say something else than the fastest ones",
        "its calls are not alike",
        "some calls wait: garbage collection, a disk, a neighbour", "read the mean beside the best; free the machine",
    ),
    Label.WHOLE_STEPS: LabelWords(
        "the fastest stretches come to less than any step that ran: whole steps are compared",
        "its stretches make up for each other",
        "stretches are fast in turn and never together", "nothing: whole steps are compared",
    ),
    Label.DRIFT: LabelWords(
        "the ratio to the reference moved while measuring",
        "the ratio moved while measuring",
        "the device warms up, or a load begins or ends", "measure again; `--sessions 3 --apart 10m`",
    ),
    Label.POSITION: LabelWords(
        "a slot takes another time for its place in the round, whatever case it is of",
        "its time depends on its place in the round",
        "a case leaves the cache to the next one", "`--set cache=cold`; more rounds",
    ),
    Label.FEW_SAMPLES: LabelWords(
        f"fewer than {LEAST_ROUNDS} rounds: the range of the rounds stands where an interval would",
        "it rests on few rounds",
        "`--quick`, or a short `--budget`", "leave them out, or raise `--rounds`",
    ),
    Label.UNPAIRED: LabelWords(
        "it did not fit into memory beside the reference, so it was measured at another time",
        "it was measured at another time than the reference",
        "the cases do not fit into memory together", "a smaller size; fewer precisions at once",
    ),
    Label.IN_PROCESS: LabelWords(
        "the model was measured in the process that asked, with all else that goes on in it",
        "it was measured in the process that asked",
        "a live model of a notebook could not be sent", "put `make()` into a file and name it",
    ),
    Label.VARYING: LabelWords(
        "steps differed in their sequence of phases, so cells of different steps were not comparable",
        "its steps were not alike",
        "a branch, or layers that are dropped at random", "fix the branch by the seed; read the step alone",
    ),
    Label.EAGER_QUANTISER: LabelWords(
        "quantisers ran as many operations, not as one compiled kernel each: its casts are slow",
        "its quantisers were not compiled",
        "no compiler here, or `FP8BENCH_QUANTISERS=eager`", "`fp8bench doctor` names what is missing",
    ),
    Label.NO_WORK: LabelWords(
        "what its steps give does not change with what they are given, or they do less work while timed",
        "its steps do no work",
        "the result is thrown away, or cached between steps", "keep it in the state, or return it",
    ),
    Label.LEAK: LabelWords(
        "tensors take more memory with every step, and go on so: later steps need not be like earlier ones",
        "its memory grows step by step",
        "a list, a graph or a cache grows in the state", "detach what is kept between steps",
    ),
    Label.NOT_FINITE: LabelWords(
        "numbers of its state became infinite or NaN, as its suite says they may: that can change times",
        "its numbers became infinite or NaN",
        "the suite lets its state diverge", "a lower rate; docs/how-to.md says where NaN comes from",
    ),
    Label.ENERGY_UNRESOLVED: LabelWords(
        "its energy has no number, or one that is not sure, or on which its windows do not agree",
        "its energy is not resolved",
        "windows shorter than the counter's ticks, or no counter", "`fp8bench doctor`; longer steps",
    ),
    Label.REPLAY_PACE: LabelWords(
        "by themselves its phases take another time than in a step: their joules may not be the step's",
        "its phases take another time by themselves",
        "a phase by itself finds another cache than in the step", "read the step's joules",
    ),
    Label.CROSS_RUN: LabelWords(
        "the two sides were measured at different times: what changed in between is in the ratio",
        "its sides were measured at different times",
        "two stored runs were compared", "`fp8bench duel --against REVISION` measures both at once",
    ),
}
