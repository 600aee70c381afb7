"""What a lab answers, its arms beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8bench.features.train.arms import LEVELS
from fp8bench.features.train.lab.lab import MODULE, Lab, NotFinite
from fp8bench.features.train.values import FALLBACK, Arm, ArmRole, StepFigure, TrainingEvent
from fp8bench.measure.handle import ProcessWorker
from fp8bench.model.raw import Settings
from fp8bench.nn.arithmetics import PlainArithmetic
from fp8bench.plan.corpus import Corpus
from fp8bench.precisions.fp8 import Fp8
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


def test_clipping_by_group_is_told_as_a_share_of_all_gradients(corpus: Corpus) -> None:
    lab = lab_of(task_of(corpus, "bf16", steps=3, clip_by="tensor", clip=1e-3))
    trainer = lab._trainers["bf16"]
    list(trainer.advance(watched=False))
    gradients = trainer._optimizer.gradients.of(list(trainer._parameters.values()))
    own = [one.norm() for one in gradients]
    after = torch.stack([norm / max(1.0, float(norm) / 1e-3) for norm in own]).norm()
    (row,) = rows(lab.advance("bf16", 1))
    lab = lab_of(task_of(corpus, "bf16", steps=3, clip_by="tensor", clip=1e-3))
    (first,) = rows(lab.advance("bf16", 1))
    assert first.clipped == pytest.approx(1 - float(after) / first.gradient_norm, rel=1e-4)
    assert row.clipped > 0.9


def test_a_table_that_collapses_is_seen_as_the_model_sees_it(corpus: Corpus) -> None:
    """In four bits of which most are lost; the weights that are kept stay apart."""
    spread = {}
    for word in ("fp16", "custom:format=e2m1:scaling=none"):
        lab = lab_of(task_of(corpus, "bf16", steps=1, precision_map=(("embed", word),)))
        lines = lab.advance("bf16", 1)
        (spread[word],) = [one.value for one in lines if isinstance(one, StepFigure) and one.name == "embedding_spread"]
    assert spread["custom:format=e2m1:scaling=none"] == 0.0 < spread["fp16"]
