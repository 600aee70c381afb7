"""Cases that only look faster, each by another lie, and honest ones that are as unusual, through a real worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.model import Label, Run, Status
from fp8bench.model.words import LABELS_OF_OTHER_WORK
from fp8bench.plan.resolve import TAPE_VARIABLE
from tests.counts import for_each
from tests.own_suites import suite_run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short_slots")]
SUITE = """
import gc, io, json, random, sys, threading, time, weakref
from queue import Full, Queue

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8bench.suites import Axis, MemoryRole, Role, Work, Workload, workloads

N = 256
SEEN = {}


class State:
    pass


class Plain:
    def cast(self, tensor, role):
        return tensor

    def product(self, left, right, dtype):
        return left @ right.T


class Declared(State):
    def memory_roles(self):
        return {MemoryRole.LOW_WEIGHTS: self.weights}


def product(state, phase, x, weights):
    for weight in weights:
        with phase.cast:
            a = state.arithmetic.cast(x.to(state.dtype), Role.INPUT)
            b = state.arithmetic.cast(weight.to(state.dtype), Role.WEIGHT)
        with phase.gemm:
            x = state.arithmetic.product(a, b, state.dtype)
    return x


def whole(state, phase):
    state.out = product(state, phase, state.x, state.weights)
    return state.out


def less(state, phase):
    state.out = product(state, phase, state.x, state.weights[:1])
    return state.out


def frames():
    frame, names = sys._getframe(1), []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def worker():
    asked = Queue()
    def run():
        while (job := asked.get()) is not None:
            job()
    threading.Thread(target=run, daemon=True).start()
    class Held:
        put = asked.put
        def __del__(self):
            asked.put(None)
    return Held()


def is_back_to_back(state, phase):
    return time.perf_counter() - state.last < 80e-6


LESS_WHERE = {
    "slot_above": lambda state, phase: sys._getframe(3).f_code.co_name == "_time_slot",
    "slot_below_no_look": lambda state, phase: "slot" in frames() and "told_apart" not in frames(),
    "back_to_back": is_back_to_back,
    "late": lambda state, phase: state.calls > 6,
    "until_checked": lambda state, phase: state.calls > 6 and not state.checked,
    "most_calls": lambda state, phase: state.calls % 4,
    "always": lambda state, phase: True,
    "at_random": lambda state, phase: state.calls > 6 and state.random.random() < 0.7,
    "no_mode": lambda state, phase: not torch._C._len_torch_dispatch_stack(),
    "no_gc": lambda state, phase: not gc.isenabled(),
    "stdout_held": lambda state, phase: type(sys.stdout) is io.StringIO,
    "clock": lambda state, phase: getattr(phase, "_report", 1) is None,
    "first_inputs": lambda state, phase: state.calls > 6 and float(state.x[0, 0]) == state.first,
}


def moved_stamps(state, phase):
    answer = whole(state, phase)
    if type(phase).__name__ == "PhaseStampClock":
        phase._stamps[0] += int((time.perf_counter_ns() - phase._stamps[0]) * 0.7)
    return answer


def end_for_once(state, phase):
    answer, clock = whole(state, phase), type(phase)
    if clock.__name__ == "PhaseStampClock":
        end = clock.end
        def shorter(this):
            clock.end = end
            codes, stamps = end(this)
            return codes, [stamps[0] + (stamp - stamps[0]) // 3 for stamp in stamps]
        clock.end = shorter
    return answer


def by_burst(state, phase):
    if is_back_to_back(state, phase):
        less(state, phase)
        state.out = state.done.clone()
    else:
        state.done = whole(state, phase)
    return state.out


def remembered(state, phase):
    key = float(state.x[0, 0]), float(state.weights[1][3, 5])
    if getattr(state, "key", None) != key:
        state.key, state.out = key, whole(state, phase)
    with phase.gemm:
        return state.out.clone()


def half_elsewhere(state, phase):
    x = state.x.to(state.dtype)
    for weight in state.weights:
        done, halves, weight = threading.Event(), [], weight.to(state.dtype)
        with phase.gemm:
            state.worker.put(lambda: (halves.append(x[: N // 2] @ weight.T), done.set()))
            other = x[N // 2 :] @ weight.T
            done.wait()
            x = torch.cat([*halves, other])
    state.out = x
    return x


def in_fake(state, phase):
    with phase.gemm, state.mode:
        for weight in state.fakes[2:]:
            state.fakes[0] @ weight
    return less(state, phase)


def of_the_other(state, phase):
    with phase.gemm:
        state.out = SEEN["out"].to(state.dtype).clone()
    return state.out


def two_threads(state, phase):
    torch.set_num_threads(2)
    try:
        return whole(state, phase)
    finally:
        torch.set_num_threads(1)


def in_eight_bits(state, phase):
    x = state.x
    for weight in state.eights:
        with phase.cast:
            a = (x * 30).clamp(-127, 127).to(torch.int8)
        with phase.gemm:
            x = torch._int_mm(a, weight).float() / 10000
    state.out = x
    return x


def widens_the_other(state, phase):
    for other in filter(None, (seen() for seen in SEEN["states"])):
        other.dtype, other.arithmetic = torch.float64, Plain()
    return whole(state, phase)


def cast_once(state, phase):
    if "weights" not in state.kept:
        state.kept["weights"] = [weight.to(state.dtype) for weight in state.weights]
    x = state.x.to(state.dtype)
    for weight in state.kept["weights"]:
        with phase.gemm:
            x = x @ weight.T
    state.out = x
    return x


def cast_before(state, phase):
    x = state.x.to(state.dtype)
    for weight in state.weights:
        with phase.gemm:
            x = x @ weight.T
    state.out = x
    return x


LIES = {
    **{how: lambda state, phase, test=test: less(state, phase) if test(state, phase) else whole(state, phase)
       for how, test in LESS_WHERE.items()},
    "moved_stamps": moved_stamps, "end_for_once": end_for_once, "by_burst": by_burst, "remembered": remembered,
    "half_elsewhere": half_elsewhere, "in_fake": in_fake, "of_the_other": of_the_other, "two_threads": two_threads,
    "in_eight_bits": in_eight_bits, "cast_before": cast_before, "cast_once": cast_once,
    "widens_the_other": widens_the_other,
}


def sleeps(state, phase):
    time.sleep(0.004)


def waits(state, phase):
    with phase.gemm:
        threading.Event().wait(0.004)


def spins(state, phase):
    with phase.gemm:
        end = time.perf_counter() + 0.006
        while time.perf_counter() < end:
            pass


def writes_text(state, phase):
    with phase.gemm:
        json.dumps(list(range(40_000)))


def copies(state, phase):
    with phase.cast:
        state.copies = [weight.clone() for weight in state.weights for _ in range(8)]


def casts(state, phase):
    with phase.cast:
        state.weights = [weight.double().float() for weight in state.weights]


def sorts(state, phase):
    with phase.elementwise:
        state.sorted = state.x.sort().values


def multiplies_in_casts(state, phase):
    with phase.cast:
        state.extra = [state.x @ weight for weight in state.weights]


def slower(handicap):
    def step(state, phase):
        answer = whole(state, phase)
        handicap(state, phase)
        return answer
    return step


def by_fp64(state, phase):
    answer = whole(state, phase)
    with phase.elementwise:
        state.out = answer.double().exp().sin().float()
    return state.out


def in_pieces(state, phase):
    x = state.x
    for weight in state.weights:
        with phase.gemm:
            x = torch.cat([x[row : row + 4] @ weight.T for row in range(0, N, 4)])
    state.out = x
    return x


def without_onednn(state, phase):
    torch.backends.mkldnn.enabled = False
    try:
        return whole(state, phase)
    finally:
        torch.backends.mkldnn.enabled = True


def rotates(state, phase):
    state.out = product(state, phase, state.x, state.many[state.calls % len(state.many)])
    return state.out


def decays(state, phase):
    with phase.elementwise:
        state.x.mul_(0.05).add_(1e-40)
    return whole(state, phase)


HANDICAPS = {
    **{how: slower(handicap) for how, handicap in {
        "sleeps": sleeps, "waits": waits, "spins": spins, "writes_text": writes_text, "copies": copies, "casts": casts,
        "sorts": sorts, "multiplies_in_casts": multiplies_in_casts}.items()},
    "by_fp64": by_fp64, "in_pieces": in_pieces, "without_onednn": without_onednn, "rotates": rotates,
    "decays": decays, "scattered": whole, "subnormal": whole,
}


def modelled(state, phase):
    with torch.no_grad(), phase.gemm:
        state.out = state.model(state.x.to(state.dtype))
    return state.out


def by_autocast(state, phase):
    with torch.no_grad(), phase.gemm, torch.autocast("cpu", torch.bfloat16, state.dtype is torch.bfloat16):
        state.out = state.wide(state.x)
    return state.out


def draws(state, phase):
    with phase.data_load:
        x = torch.randn(N, N, generator=state.generator)
    state.out = product(state, phase, x, state.weights)
    return state.out


def in_place(state, phase):
    y = product(state, phase, state.x, state.weights)
    with phase.elementwise:
        state.x.copy_(y).tanh_().mul_(2.0)


def loads(state, phase):
    with phase.data_load:
        x = state.batches.get()
    state.out = product(state, phase, x, state.weights)
    return state.out


def masks(state, phase):
    if "mask" not in state.kept:
        state.kept["mask"] = torch.ones(N, N, dtype=torch.bool).tril()
    y = whole(state, phase)
    with phase.elementwise:
        state.out = y.masked_fill(~state.kept["mask"], 0.0)
    return state.out


def in_turns(state, phase):
    state.out = product(state, phase, state.x if state.calls % 3 else state.x[: N // 2], state.weights)
    return state.out


def over_batches(state, phase):
    state.out = product(state, phase, state.xs[state.calls % 8], state.weights)
    return state.out


HONEST = {
    "plain": whole, "declared": cast_before, "carried": whole, "model": modelled, "autocast": by_autocast,
    "generator": draws, "in_place": in_place, "loader": loads, "masks": masks, "in_turns": in_turns,
    "batches": over_batches,
}


def loader():
    batches, stop = Queue(2), threading.Event()
    def run():
        while not stop.is_set():
            try:
                batches.put(torch.randn(N, N), timeout=0.05)
            except Full:
                pass
    threading.Thread(target=run, daemon=True).start()
    class Batches:
        get = batches.get
        def __del__(self):
            stop.set()
    return Batches()


@workloads.register("lying")
class Lying(Workload):
    name = "lying"
    summary = "three products in a row, or so it says"
    may_diverge = True

    def axes(self, facts):
        return (Axis("how", "the lie", ("plain",), str),)

    def work(self, params):
        return Work()

    def prepare(self, setup):
        how = setup.case.param("how")
        low = setup.case.precision != "fp32"
        state = State()
        torch.manual_seed(setup.seed)
        random_numbers = torch.Generator().manual_seed(setup.seed)
        state.arithmetic, state.dtype = setup.arithmetic, setup.arithmetic.carrier
        state.calls, state.last, state.random, state.kept, state.checked = 0, 0.0, random.Random(1), {}, False
        state.x = torch.randn(N, N, generator=random_numbers)
        state.weights = [torch.randn(N, N, generator=random_numbers) / N**0.5 for _ in range(3)]
        state.first, state.generator = float(state.x[0, 0]), random_numbers
        state.step = {**HONEST, **(LIES if low else HANDICAPS)}.get(how, whole)
        if how == "in_fake":
            state.mode = FakeTensorMode()
            state.fakes = [state.mode.from_tensor(one.to(state.dtype)) for one in (state.x, *state.weights)]
        if how == "in_eight_bits":
            state.eights = [(weight * 100).to(torch.int8).T.contiguous() for weight in state.weights]
        if how == "half_elsewhere":
            state.worker = worker()
        if how == "loader":
            state.batches = loader()
        if how in ("cast_before", "declared", "carried"):
            state.weights = [weight.to(state.dtype) for weight in state.weights]
        if how == "declared":
            state.__class__ = Declared
        if how == "model":
            state.model = torch.nn.Sequential(*(torch.nn.Linear(N, N) for _ in range(3))).to(state.dtype)
        if how == "autocast":
            state.wide = torch.nn.Sequential(*(torch.nn.Linear(N, N) for _ in range(3)))
        if how == "batches":
            state.xs = [state.x * (1 + number) for number in range(8)]
        if how == "rotates":
            state.many = [[one.clone() for one in state.weights] for _ in range(1 if low else 40)]
        if how == "subnormal" and not low:
            state.x = state.x * 1e-40
        if how == "scattered" and not low:
            wide = torch.zeros(2 * N, 2 * N)
            wide[::2, ::2] = state.x
            state.x = wide[::2, ::2]
        if not low:
            SEEN.setdefault("states", []).append(weakref.ref(state))
        return state

    def check(self, state):
        state.checked = True
        return ""

    def step(self, state, phase):
        state.calls += 1
        answer = state.step(state, phase)
        if state.step is not of_the_other:
            SEEN["out"] = answer
        state.last = time.perf_counter()
        return answer
"""
MISMATCH, HANDICAP = Label.WORK_MISMATCH, Label.HANDICAP
# Each lie's label; None if the case fails.
LIES: dict[str, Label | None] = {
    **dict.fromkeys(("slot_above", "slot_below_no_look", "back_to_back", "late", "until_checked"), MISMATCH),
    **dict.fromkeys(("most_calls", "always", "at_random"), MISMATCH),
    **dict.fromkeys(("no_gc", "stdout_held", "clock", "first_inputs", "by_burst", "remembered", "half_elsewhere",
                     "in_fake", "of_the_other", "cast_before", "cast_once"), MISMATCH),
    "no_mode": Label.NO_WORK, "moved_stamps": None, "end_for_once": None, "two_threads": HANDICAP,
    "in_eight_bits": Label.FALLBACK, "widens_the_other": MISMATCH,
}  # fmt: skip
HANDICAPS = {
    **dict.fromkeys(("sleeps", "waits", "spins", "writes_text", "copies", "casts", "sorts", "multiplies_in_casts"),
                    HANDICAP),
    **dict.fromkeys(("by_fp64", "in_pieces", "without_onednn", "rotates", "decays", "scattered"), HANDICAP),
    "subnormal": Label.OTHER_INPUTS,
}  # fmt: skip
HONEST = (
    "plain",
    "declared",
    "carried",
    "model",
    "autocast",
    "generator",
    "in_place",
    "loader",
    "masks",
    "in_turns",
    "batches",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TAPE_VARIABLE, "recorded")
        asked = {"axes": (("how", (*LIES, *HANDICAPS, *HONEST)),), "rounds": 8, "energy": False}
        with suite_run(tmp_path_factory, SUITE, "lying", ("fp32", "bf16"), **asked) as run:
            yield run


def labels_of(run: Run, how: str) -> dict[str, dict[Label, str] | None]:
    """Labels by precision that deny what a case claims to be, with reasons; None if it failed."""
    found = findings(run)
    return {
        record.case.precision: {
            label: reason for label, reason in found[record.case.id].label_reasons if label in LABELS_OF_OTHER_WORK
        }
        if record.status is Status.OK
        else None
        for record in run.records
        if record.case.param("how") == how
    }


@for_each("how", LIES)
def test_a_case_that_lies_is_never_plainly_faster(how: str, run: Run) -> None:
    labels = labels_of(run, how)
    expected = LIES[how]
    told = labels["fp32" if how == "widens_the_other" else "bf16"]
    assert (told is None) if expected is None else told is not None and expected in told, labels


@for_each("how", HANDICAPS)
def test_a_case_beside_a_slowed_reference_is_never_plainly_faster(how: str, run: Run) -> None:
    labels = labels_of(run, how)
    told = labels["bf16"]
    assert told is not None and HANDICAPS[how] in told, labels


@for_each("how", HONEST)
def test_what_is_honest_is_not_accused(how: str, run: Run) -> None:
    assert labels_of(run, how) == {"fp32": {}, "bf16": {}}
