"""What a lab answers, its arms beside each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8bench.errors import StoreError
from fp8bench.features.train.arms import LEVELS
from fp8bench.features.train.lab.lab import MODULE, Lab, NotFinite
from fp8bench.features.train.lab.trainer import Trainer
from fp8bench.features.train.values import FALLBACK, Arm, ArmCost, ArmRole, TrainingEvent
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model import MemoryRole
from fp8bench.model.raw import Settings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.plan.corpus import Corpus
from fp8bench.precisions.fp8 import Fp8
from fp8bench.registry import precisions
from tests.features.train.lab.labs import lab_of, rows, task_of


def test_arms_of_a_seed_are_paired(corpus: Corpus) -> None:
    """The repeat is the reference bit for bit, however their steps are interleaved; another seed is another start."""
    arms = (Arm("bf16", "bf16", ArmRole.REFERENCE), Arm("again", "bf16", ArmRole.REPEAT))
    lab = lab_of(task_of(corpus, *arms, Arm("other", "bf16", ArmRole.OTHER_SEED), "fp32"))
    first = [*lab.advance("bf16", 2), *lab.advance("fp32", 1), *lab.advance("bf16", 1)]
    losses = {name: [row.loss for row in rows(lab.advance(name, 3))] for name in ("again", "other")}
    bf16 = [row.loss for row in rows(first) if row.arm == "bf16"]
    fp32 = next(row.loss for row in rows(first) if row.arm == "fp32")
    assert losses["again"] == bf16 and losses["other"][0] != bf16[0]
    assert fp32 == pytest.approx(bf16[0], rel=5e-3) and fp32 != bf16[0]


def test_an_arm_that_multiplies_in_another_precision_is_told(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first step, once, by the numbers of a product; one that keeps its promise says nothing."""

    def events(mode: str) -> list[TrainingEvent]:
        lines = lab_of(task_of(corpus, mode, steps=2)).advance(mode, 2)
        assert len(rows(lines)) == 2
        return [line for line in lines if isinstance(line, TrainingEvent)]

    assert not events("fp8")
    monkeypatch.setattr(Fp8, "arithmetic", lambda self, facts: PlainArithmetic(torch.bfloat16))
    (event,) = events("fp8")
    assert (event.kind, event.step) == (FALLBACK, 0)
    assert event.words == "the numbers of a product are those of bfloat16, not of fp8"


LOW = (("optimizer_states", "fp8lm"), ("master", "fp16-scaled"), ("gradients", "fp8"), ("micro_batches", 2))
DRAWN = (("master", "bf16-stochastic"), ("dropout", 0.1))
HALF = (("optimizer_states", "bf16"), ("gradients", "bf16"), ("dropout", 0.1), ("checkpointing", "blocks"))
MODES = (
    "nvfp4", Arm("fp8lm", "fp8", settings=LOW), Arm("drawn", "bf16", settings=DRAWN),
    Arm("o3", "fp8:scale=pow2", settings=LEVELS["msamp-o3"].settings),
    Arm("half", "fp8-delayed:history=3", settings=HALF), Arm("dynamic", "fp16", settings=(("loss_scale", "dynamic"),)),
)  # fmt: skip
MANY = (
    *precisions.names(), "fp8-delayed:algorithm=most_recent:margin=1", "fp8-delayed:history=2:interval=2",
    "nvfp4:hadamard=off", "nvfp4:stochastic=off",
)  # fmt: skip


def test_fewer_bits_in_the_sums_are_further_from_float32_sums(corpus: Corpus) -> None:
    """Of every product of a training: in its first steps, before they have led elsewhere."""
    modes = ["fp8", *(f"fp8:accumulator={bits}" for bits in (14, 8, 4, 2))]
    lab = lab_of(task_of(corpus, *modes, batch=8))
    exact, *short = ([(row.loss, row.gradient_norm) for row in rows(lab.advance(mode, 3))] for mode in modes)
    apart = [sum(abs(a - b) + abs(c - d) for (a, c), (b, d) in zip(one, exact, strict=True)) for one in short]
    assert 0 < apart[0] < apart[1] < apart[2] < apart[3], apart


@pytest.mark.slow
def test_few_enough_bits_in_the_sums_are_a_loss_gap(corpus: Corpus) -> None:
    """Over three seeds: none of a training that is so short shows with 14 or 8 bits, and with 2 it does."""
    gaps = dict.fromkeys(("fp8:accumulator=short", "fp8:accumulator=8", "fp8:accumulator=2"), 0.0)
    for seed in range(3):
        lab = lab_of(task_of(corpus, "fp8", *gaps, seed=seed, steps=40, rate=3e-3, batch=16))
        last = {mode: sum(row.loss for row in rows(lab.advance(mode, 40))[-8:]) for mode in ("fp8", *gaps)}
        gaps = {mode: gap + (last[mode] / last["fp8"] - 1) / 3 for mode, gap in gaps.items()}
    short, eight, two = gaps.values()
    assert abs(short) < 1.5e-3 and abs(eight) < 1.5e-3 and two > 3e-3, gaps


def test_o3_of_ms_amp_trains_as_o2_does(corpus: Corpus) -> None:
    """Bit for bit: a weight that is in FP8 under a power of two already is the same once it is cast."""
    arms = [Arm(name, level.precision, settings=level.settings) for name, level in LEVELS.items()]
    lab = lab_of(task_of(corpus, "bf16", *arms, batch=2))
    plain, o1, o2, o3 = ([row.loss for row in rows(lab.advance(name, 6))] for name in ("bf16", *LEVELS))
    assert o2 == o3 != o1 and o1 == pytest.approx(plain, rel=0.02)


def test_nudged_arms_differ_as_rounding_does(corpus: Corpus) -> None:
    """A little, and at all: equal bits would prove nothing."""
    nudged = [Arm(word, "fp32", settings=(("nudge", word),)) for word in ("ulp", "order")]
    lab = lab_of(task_of(corpus, "fp32", *nudged, batch=2))
    plain, *others = ([row.loss for row in rows(lab.advance(name, 12))] for name in ("fp32", "ulp", "order"))
    for losses in others:
        assert losses != plain and losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("arms", [MODES, pytest.param(MANY, marks=pytest.mark.slow)], ids=["some", "all"])
def test_it_goes_on_from_a_checkpoint_with_the_same_bits(
    arms: tuple[Arm | str, ...], corpus: Corpus, tmp_path: Path
) -> None:
    """In a lab that has begun anew, and done other steps before it was given the checkpoint."""
    task = task_of(corpus, *arms, steps=4)
    names = [arm.name for arm in task.arms]
    lab, other = lab_of(task), lab_of(task)
    for name in names:
        lab.advance(name, 2)
    assert lab.save(str(tmp_path / "kept")) == ()
    wanted = [rows(lab.advance(name, 5)) for name in names]
    assert {len(one) for one in wanted} == {2}, "no more steps than the task has"
    for name in names[:2]:
        other.advance(name, 1)
    assert other.restore(str(tmp_path / "kept")) == tuple((name, 2) for name in names)
    for name, before in zip(names, wanted, strict=True):
        assert rows(other.advance(name, 2)) == before


@pytest.mark.parametrize("arch", ["cnn", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("mlp", "moe"))])
def test_so_does_every_architecture(corpus: Corpus, tmp_path: Path, arch: str) -> None:
    """Statistics that batch norm keeps are part of what is kept: evaluation goes by them."""
    task = task_of(corpus, "fp8", arch=arch, steps=3)
    lab = lab_of(task)
    lab.advance("fp8", 1)
    lab.save(str(tmp_path / "kept"))
    wanted = rows(lab.advance("fp8", 2)), lab.validate("fp8")
    other = lab_of(task)
    other.restore(str(tmp_path / "kept"))
    assert (rows(other.advance("fp8", 2)), other.validate("fp8")) == wanted


def test_an_arm_that_cannot_be_built_says_so_when_it_is_asked_for(corpus: Corpus, tmp_path: Path) -> None:
    lab = Lab(Settings())
    task = task_of(corpus, "bf16", Arm("odd", "bf16", settings=(("model", "vast"),)))
    (state,) = lab.begin(task)
    assert state.arm == "bf16" and len(lab.advance("bf16", 1)) > 0
    for ask in (lambda: lab.advance("odd", 1), lambda: lab.validate("odd")):
        with pytest.raises(RuntimeError, match="UnknownName: unknown model 'vast'"):
            ask()
    lab.drop("odd")
    assert lab.save(str(tmp_path / "kept")) == () and lab.restore(str(tmp_path / "kept")) == (("bf16", 1),)


@pytest.mark.slow
def test_a_process_of_its_own(corpus: Corpus) -> None:
    """Asked as a worker is, and it knows the devices."""
    task = task_of(corpus, "bf16", model="nano", batch=1, sequence=16)
    with ProcessWorker(Settings(), module=MODULE) as worker:
        assert worker.probe()[0].kind == "cpu"
        (state,) = worker.ask(60, "begin", task)
        assert state.parameters > 900_000 and state.tokens == 16
        assert dict(state.bytes_per_parameter)["weights"] == 4
        assert [row.step for row in rows(worker.ask(60, "advance", "bf16", 2))] == [0, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:dynamo_pgo force disabled:UserWarning")  # torch's own
def test_a_compiled_arm_learns_what_an_eager_one_does(corpus: Corpus) -> None:
    """Forward and backward as one graph; the held-out text is looked at by the model itself."""
    task = task_of(corpus, "bf16", Arm("compiled", "bf16", settings=(("compile", "yes"),)), micro_batches=2)
    lab = lab_of(task)
    eager, graph = (rows(lab.advance(name, 4)) for name in ("bf16", "compiled"))
    assert [row.loss for row in graph] == pytest.approx([row.loss for row in eager], rel=2e-3)
    assert lab.validate("compiled")[0].loss == pytest.approx(lab.validate("bf16")[0].loss, rel=2e-3)


def test_micro_batches_checkpointing_and_dropout(corpus: Corpus) -> None:
    """A block that is computed again has the dropout that it had; two micro-batches are one batch of twice the size."""
    dropped = (("dropout", 0.5),)
    arms = [
        Arm("dropped", "fp32", settings=dropped),
        Arm("again", "fp32", settings=(*dropped, ("checkpointing", "blocks"))),
        Arm("whole", "fp32", settings=(("batch", 4), ("micro_batches", 1))),
        Arm("halves", "fp32", settings=(("batch", 2), ("micro_batches", 2))),
    ]
    lab = lab_of(task_of(corpus, *arms))
    losses = {arm.name: [row.loss for row in rows(lab.advance(arm.name, 3))] for arm in arms}
    assert losses["dropped"] == losses["again"]
    assert losses["whole"] == pytest.approx(losses["halves"], rel=1e-5)
    assert losses["dropped"][0] != losses["halves"][0]


def test_attention_in_the_arms_precision(corpus: Corpus, tmp_path: Path) -> None:
    """Every layer's core with what it remembers; scores beyond fp16 are lost unless queries are scaled ahead."""
    arms = [
        Arm(f"{mode} {word}", mode, settings=(("attention", word), ("on_nan", "skip")))
        for mode, word in (("fp8-delayed:history=4", "rounded"), ("fp16", "rounded"), ("fp16", "prescaled"))
    ]
    task = task_of(corpus, "fp16", *arms)
    lab = lab_of(task)
    for arm in task.arms:
        assert rows(lab.advance(arm.name, 2))[0].loss < 7
    lab.save(str(tmp_path / "kept"))
    wanted = rows(lab.advance(arms[0].name, 2))
    lab.restore(str(tmp_path / "kept"))
    assert rows(lab.advance(arms[0].name, 2)) == wanted
    skipped = {}
    for arm in arms[1:]:
        parameter = lab._trainers[arm.name]._parameters["blocks.0.attn.qkv.weight"]
        parameter.detach()[:64].mul_(75)  # queries and keys: scores as large as 5,000 become 28 million
        skipped[arm.name] = rows(lab.advance(arm.name, 1))[0].skipped
    assert skipped == {"fp16 rounded": True, "fp16 prescaled": False}


def test_a_branch_goes_on_from_a_checkpoint(corpus: Corpus, tmp_path: Path) -> None:
    """As the arm itself goes on, bit for bit; with another precision or rate from the same weights."""
    task = task_of(corpus, "fp8-delayed", steps=20)
    lab, folder, settings = lab_of(task), str(tmp_path / "kept"), task.settings
    lab.advance("fp8-delayed", 3)
    lab.save(folder)
    own = rows(lab.advance("fp8-delayed", 3))
    trials = {
        "as it was": ("fp8-delayed", settings),
        "margin": ("fp8-delayed:margin=1", settings),
        "slower": ("fp8-delayed", replace(settings, rate=settings.rate / 2)),
        "scaled": ("fp8-delayed", replace(settings, loss_scale="dynamic")),
    }
    for name, (precision, changed) in trials.items():
        assert lab.branch(folder, "fp8-delayed", Arm(name, precision), changed) == 3
    found = {name: rows(lab.advance(name, 3)) for name in trials}
    assert [replace(row, arm="fp8-delayed") for row in found["as it was"]] == own
    losses = {name: [row.loss for row in some] for name, some in found.items()}
    assert losses["margin"] == pytest.approx(losses["as it was"], rel=0.01) and losses["margin"] != losses["as it was"]
    slower, before = found["slower"], found["as it was"]
    assert slower[0].loss == before[0].loss and slower[0].rate == before[0].rate / 2
    assert slower[1].loss != before[1].loss
    assert found["scaled"][0].loss_scale == 2.0**16, "a scale that finds itself begins where it always does"
    assert lab.branch("", "fp8-delayed", Arm("anew", "bf16"), settings) == 0
    with pytest.raises(StoreError, match="nothing of other"):
        lab.branch(folder, "other", Arm("x", "bf16"), settings)


LOW_STATES = Arm("low", "fp8-delayed", settings=(("optimizer_states", "fp8lm"), ("gradients", "bf16")))
# Of a batch this large what is kept for backward is what a step needs most.
LARGE = {"batch": 256}
SAVED = (MemoryRole.ACTIVATIONS, MemoryRole.LOW_ACTIVATIONS, MemoryRole.LOW_WEIGHTS, MemoryRole.DATA)


def cost_of(corpus: Corpus, arm: Arm | str, lab: Lab | None = None, **settings: Any) -> ArmCost:
    return (lab or Lab(Settings())).alone(task_of(corpus, arm, **settings))


def saved_for_backward(trainer: Trainer) -> int:
    """Bytes that autograd keeps in one step beside the weights, each memory once."""
    weights = {one.untyped_storage().data_ptr() for one in trainer.memory_roles()[MemoryRole.WEIGHTS]}  # type: ignore[attr-defined]
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        list(trainer.advance())
    return sum(one.untyped_storage().nbytes() for one in kept.values())


MORE = (pytest.param(one, marks=pytest.mark.nightly) for one in ("fp32", "bf16"))


@pytest.mark.parametrize("arm", ["fp8", *MORE])
def test_what_lies_at_the_highest_point_is_what_autograd_keeps(arm: str, corpus: Corpus) -> None:
    """And weights, moments and gradients of so many bytes a parameter; all parts sum to the peak."""
    memory = cost_of(corpus, arm, **LARGE).memory
    assert memory is not None and memory.why == ""
    roles = {MemoryRole(name): size for name, size in memory.roles}
    assert sum(roles.values()) == memory.peak
    trainer = Trainer(task_of(corpus, arm, **LARGE), Arm(arm, arm))
    list(trainer.advance())
    assert sum(roles.get(role, 0) for role in SAVED) == pytest.approx(saved_for_backward(trainer), abs=64)
    count = trainer.state().parameters
    assert roles[MemoryRole.WEIGHTS] == 4 * count and roles[MemoryRole.OPTIMIZER] == pytest.approx(8 * count, abs=64)


def test_what_is_kept_between_two_steps(corpus: Corpus) -> None:
    """Low states are low, and histories of delayed scales are counted once they are there."""
    lab = lab_of(task_of(corpus, "bf16", "fp8"))
    plain, low = dict(cost_of(corpus, "bf16", lab).kept), dict(cost_of(corpus, LOW_STATES, lab).kept)
    count = plain["weights"] / 4
    assert plain["gradients"] == 4 * count and low["gradients"] == 2 * count and "casts" not in plain
    assert low["first moment"] < 1.01 * count and low["second moment"] < 2.02 * count
    assert low["casts"] == 4 * 3 * (1024 * 4 + 4 + 4), "a history, a scale and a count of each role of four layers"
    beside = cost_of(corpus, "bf16", lab).memory
    alone = cost_of(corpus, "bf16", lab_of(task_of(corpus, "fp32"))).memory
    assert beside and alone and (beside.peak, beside.roles) == (alone.peak, alone.roles), "other arms are forgotten"


def test_an_arm_that_stops_has_no_memory_to_tell_of(corpus: Corpus) -> None:
    with pytest.raises(NotFinite, match="its steps were not finite after 1, and it stopped"):
        cost_of(corpus, "fp16", rate=10.0, handicap=1000.0, loss_scale="4294967296")


@pytest.mark.slow
def test_a_batch_is_tried_in_two_steps_of_the_arm_alone(corpus: Corpus) -> None:
    """More take more, checkpointing less; what a step needs at its highest point is what the memory pass says."""
    lab = lab_of(task_of(corpus, "fp32"))
    blocks = Arm("blocks", "fp32", settings=(("checkpointing", "blocks"),))
    small, middle, large = (lab.try_alone(task_of(corpus, "fp32", batch=one), 1 << 30) for one in (32, 64, 128))
    less = lab.try_alone(task_of(corpus, blocks, batch=128), 1 << 30)
    assert small and middle and large and less and large - middle == 2 * (middle - small) > 0 and less < large
    memory = cost_of(corpus, "fp32", batch=128).memory
    assert memory is not None and large == pytest.approx(memory.peak, rel=0.01)


def test_further_steps_go_over_the_last_ones_again(corpus: Corpus) -> None:
    """Of an arm that is done: real ones, which change its weights and nobody else's; one that stops says so."""
    lab = lab_of(task_of(corpus, "fp32", "bf16", steps=3))
    for arm in ("fp32", "bf16"):
        lab.advance(arm, 3)
    before = lab.validate("fp32"), lab.validate("bf16")
    assert lab.loop("fp32", 5) > 0 and lab.check("fp32").wrong == ""
    assert (lab.validate("fp32")[0].loss != before[0][0].loss) and lab.validate("bf16") == before[1]
    wild = lab_of(task_of(corpus, "fp16", steps=3, rate=10.0, handicap=1000.0, loss_scale="4294967296"))
    with pytest.raises(NotFinite):
        wild.loop("fp16", 3)
    assert wild.check("fp16").wrong == "it has stopped: its numbers are not finite"
