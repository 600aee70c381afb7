"""Of every label what mostly causes it, and what to do: the docs' own words beside the meaning that fp8bench prints."""

from fp8bench.model import Label

REMEDIES: dict[Label, tuple[str, str]] = {
    Label.NOISY: (
        "other work on the machine, or steps of microseconds",
        "free the machine; `--rounds 96`; a larger case",
    ),
    Label.AA_FAILED: (
        "the machine changed while it was measured",
        "free the machine and measure again; `fp8bench selftest`",
    ),
    Label.ABOVE_CEILING: (
        "`work` counts too much, or the step leaves work out",
        "hold it against `fp8bench tape NAME`",
    ),
    Label.WORK_MISMATCH: (
        "`work` of the suite is wrong, or a branch is taken only untimed",
        "hold it against `fp8bench tape NAME`",
    ),
    Label.FALLBACK: (
        "a library took a higher precision for this shape or device",
        "`fp8bench lint-shapes`; another `--backend`",
    ),
    Label.OTHER_INPUTS: (
        "`prepare` draws its numbers in the case's own dtype",
        "draw them in one dtype from the seed, then round",
    ),
    Label.HANDICAP: (
        "the reference sleeps, copies or pads where the case does not",
        "make the reference as good as you can",
    ),
    Label.CONTENDED: (
        "builds, browsers, other users, or a virtual machine's neighbours",
        "free the machine; pin processors",
    ),
    Label.SHARED: ("another process has memory on the GPU, or MIG is on", "`nvidia-smi`; take a GPU of your own"),
    Label.THROTTLED: ("heat, or a limit of the power supply", "cool it; wait; `--sustained 5` says what it keeps"),
    Label.POWER_CAPPED: (
        "large products reach the power limit",
        "nothing: it is normal; `--sustained 5` compares what lasts",
    ),
    Label.CLOCK_OFFSET: ("one precision heats the device more than the other", "lock the clocks; `--sustained 5`"),
    Label.MEMORY_FULL: ("the batch is close to the memory's end", "a smaller batch; `--max-batch` says what fits"),
    Label.UNSETTLED: ("the device was cold or busy ahead of the run", "measure again, without `--quick`"),
    Label.LAUNCH_BOUND: ("short kernels on a fast GPU", "read `replayed`; a larger case; `--set compile=yes`"),
    Label.BELOW_FLOOR: ("a case of microseconds", "a larger case; read the whole step alone"),
    Label.FLAT_TIME: (
        "a fixed cost hides the work, or the step ignores its size",
        "larger sizes; `fp8bench tape NAME`",
    ),
    Label.BIMODAL: ("clocks, huge pages or a neighbour switch between two states", "measure again; `--sessions 3`"),
    Label.UNEVEN: (
        "some calls wait: garbage collection, a disk, a neighbour",
        "read the mean beside the best; free the machine",
    ),
    Label.WHOLE_STEPS: ("stretches are fast in turn and never together", "nothing: whole steps are compared"),
    Label.DRIFT: ("the device warms up, or a load begins or ends", "measure again; `--sessions 3 --apart 10m`"),
    Label.POSITION: ("a case leaves the cache to the next one", "`--set cache=cold`; more rounds"),
    Label.FEW_SAMPLES: ("`--quick`, or a short `--budget`", "leave them out, or raise `--rounds`"),
    Label.UNPAIRED: ("the cases do not fit into memory together", "a smaller size; fewer precisions at once"),
    Label.IN_PROCESS: ("a live model of a notebook could not be sent", "put `make()` into a file and name it"),
    Label.VARYING: (
        "a branch, or layers that are dropped at random",
        "fix the branch by the seed; read the step alone",
    ),
    Label.EAGER_QUANTISER: (
        "no compiler here, or `FP8BENCH_QUANTISERS=eager`",
        "`fp8bench doctor` names what is missing",
    ),
    Label.NO_WORK: ("the result is thrown away, or cached between steps", "keep it in the state, or return it"),
    Label.LEAK: ("a list, a graph or a cache grows in the state", "detach what is kept between steps"),
    Label.NOT_FINITE: ("the suite lets its state diverge", "a lower rate; [by symptom](../symptoms.md#loss-is-nan)"),
    Label.ENERGY_UNRESOLVED: (
        "windows shorter than the counter's ticks, or no counter",
        "`fp8bench doctor`; longer steps",
    ),
    Label.REPLAY_PACE: ("a phase by itself finds another cache than in the step", "read the step's joules"),
    Label.CROSS_RUN: ("two stored runs were compared", "`fp8bench duel --against REVISION` measures both at once"),
}
