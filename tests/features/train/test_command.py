"""`fp8bench train` from words to a table, with a real lab on a model of a few steps."""

from __future__ import annotations

import errno
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.config_file import with_config
from fp8bench.cli.main import build_parser, commands_of
from fp8bench.features.train import run as job
from fp8bench.features.train.arms import check_training
from fp8bench.features.train.command import request_from
from fp8bench.features.train.kind import load_training, training_files
from fp8bench.features.train.lab.lab import Lab
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import ArmCost, LayerReading, StepRow, TrainingEvent
from fp8bench.features.train.words import FAILURES
from fp8bench.measure.handle import LocalWorker
from tests.commands import Say, unfolded, unfolding
from tests.counts import for_each
from tests.trainings import FakeLab, strikes

TINY = (
    "--data", "text.txt", "--steps", "4", "--seeds", "1", "--batch", "1", "--sequence", "16", "--evaluate", "4",
    "--dtypes", "bf16,fp8",
)  # fmt: skip
REFUSED = {
    "an unknown dtype": (["--dtypes", "bf16,fb8"], "Did you mean 'fp8'"),
    "one alone": (["--dtypes", "bf16"], "bf16 alone has nothing to be compared with"),
    "an unknown model": (["--model", "nani"], "unknown model 'nani'. Did you mean 'nano'?"),
    "an unknown architecture": (["--arch", "rnn"], "invalid choice: 'rnn'"),
    "no steps": (["--steps", "0"], "--steps: expected a whole number from 1 to 10000000, got '0'"),
    "no seeds": (["--seeds", "0"], "--seeds: expected a whole number from 1"),
    "steps that are no number": (["--steps", "many"], "--steps: expected a whole number"),
    "a margin beyond": (["--margin", "100"], "--margin: expected a percentage from 0 to below 100"),
    "a rate of nothing": (["--rate", "0"], "--rate: expected a number above 0"),
    "a loss scale": (["--loss-scale", "0.5"], "--loss-scale: expected auto, dynamic, or a number from 1 to 2^32"),
    "rates": (["--rates", "norm=x"], "--rates: expected kinds of parameters (embedding,"),
    "tokens": (["--tokens", "words"], "--tokens: expected bytes, bpe, or bpe:N"),
    "a sweep of nothing": (["--sweep", "histroy=1"], "unknown setting or option to sweep 'histroy'"),
    "an unknown layer": (["--precision-map", "mpl=fp8"], "unknown layer of model nano 'mpl'. Did you mean 'mlp'"),
    "an unknown device": (["--device", "cuda:9"], "unknown device on this machine 'cuda:9'"),
    "no text": (["--data", "nowhere.txt"], "--data nowhere.txt cannot be read"),
    "two outputs": (["--json", "--csv", "-"], "would both print on stdout"),
    "rows of a plan": (["--dry-run", "--csv", "-"], "--dry-run measures nothing"),
    "nothing to resume": (["--resume", "last"], "no training 'last' in .fp8bench. The store has no trainings yet"),
    "a reason to fail": (["--fail-on", "worse,divreged"], "unknown reason to fail 'divreged'. Did you mean 'diverged'"),
    "a resumption of something else": (["--resume", "last", "--steps", "3"], "and --steps was given too"),
    "an unknown option": (["--step", "3"], "Did you mean --steps?"),
}


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labs are opened in this process, and look at a sixteenth of the held-out text: three quarters of the time."""
    monkeypatch.setattr("fp8bench.features.train.lab.evaluate._TOKENS", 256)
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: LocalWorker(settings, Lab))


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    """Run `train` on a text of its own."""
    Path("text.txt").write_text("every token is a byte of this text. " * 4000)
    return unfolding(fp8bench, "train")


@for_each("name", REFUSED)
def test_what_cannot_be_meant_is_one_sentence(name: str, say: Say, local: None) -> None:
    words, sentence = REFUSED[name]
    code, out, err = say(*words)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1
    assert not training_files(Path(".fp8bench"))


def test_help_names_what_it_may_fail_on() -> None:
    (words,) = (one.help for one in commands_of(build_parser())["train"]._actions if one.dest == "fail_on")
    assert words is not None and all(name in words for name in FAILURES)


def test_every_setting_of_the_request_can_be_said() -> None:
    words = (
        "train --dtypes bf16,fp8-delayed --reference bf16 --arch moe --model gpt2-124m --batch 2 --sequence 64 "
        "--micro-batches 3 --dropout 0.1 --compile yes --checkpointing blocks --precision-map mlp=fp8 "
        "--sweep history=1,16 --sweep margin=1 --sweep history=4 --data a.txt "
        "--other-data b.txt --tokens bpe:64 --steps 7 --seeds 2 "
        "--margin 2.5 --seed 3 --stride 4 --evaluate 5 --keep 6 --device cpu --threads 2 --rate 0.01 --warmup 0.2 "
        "--floor 0.3 --weight-decay 0.4 --clip 0.5 --loss-scale 1024 --optimizer-states fp8lm --master fp16-scaled "
        "--gradients bf16 --on-nan skip --rates norm=0,head=2 --no-isolation "
        "--bands one-ulp,repeat --until 2.5 --shift 0.5 --start last:fp8 --rewinds 2 --experiment shift"
    )
    settings = TrainerSettings(
        model="gpt2-124m", arch="moe", batch=2, sequence=64, micro_batches=3, dropout=0.1,
        checkpointing="blocks", compile="yes", precision_map=(("mlp", "fp8"),), rate=0.01, warmup=0.2, floor=0.3,
        weight_decay=0.4, clip=0.5,
        loss_scale="1024", optimizer_states="fp8lm", master="fp16-scaled", gradients="bf16", on_nan="skip",
        rates=(("norm", 0.0), ("head", 2.0)), shift=0.5, start="last:fp8", rewinds=2,
    )  # fmt: skip
    assert request_from(build_parser().parse_args(words.split())) == TrainingRequest(
        ("bf16", "fp8-delayed"), "bf16", settings, 7, 2, 3, ("one-ulp", "repeat"), 0.025,
        (("history", ("1", "16", "4")), ("margin", ("1",))),
        "cpu", 2, "a.txt", "b.txt", "bpe:64", 4, 5, 6, isolation=False, until=2.5,
        experiment="shift",
    )  # fmt: skip


@for_each(("words", "steps", "seeds"), [("", 300, 5), ("--quick", 60, 1), ("--quick --steps 9 --seeds 2", 9, 2)])
def test_quick_is_one_seed_of_few_steps(words: str, steps: int, seeds: int) -> None:
    request = request_from(build_parser().parse_args(["train", *words.split()]))
    assert (request.steps, request.seeds, request.settings) == (steps, seeds, TrainerSettings())


def test_a_training_is_told_kept_shown_and_exported(say: Say, fp8bench: Say, store: Path, local: None) -> None:
    """The same figures on the terminal, in JSON and in CSV, whenever they are asked for."""
    code, out, err = say(*TINY, "--csv", "rows.csv")
    assert code == 0 and "seed 1/1, step 4/4: bf16 " in err and "Traceback" not in err
    (path,) = training_files(store)
    kept = load_training(path)
    assert kept.finished and not kept.troubles and len(kept.lines) > 16
    assert re.search(r"\n  fp8 +emulated +\d\.\d{4} +\d\.\d{4} +[-+]\d", out)
    assert "inconclusive: 1 seed counts, fewer than 5; 4 more would do" in " ".join(out.split())
    assert "nondeterminism is zero: the repeat has the same loss in each of 4 steps, bit for bit" in " ".join(
        out.split()
    )
    rows = Path("rows.csv").read_text().splitlines()
    losses = [
        row.split(",")[-1] for row in rows if row.startswith("fp8,fp8,candidate,0,3,StepRow,") and ",loss," in row
    ]
    assert len(losses) == 1
    costs = {row.rpartition(",")[0].split(",")[-1] for row in rows if row.startswith("fp8,fp8,candidate,0,0,ArmCost,")}
    assert {"kept weights", "peak_memory", "peak_memory optimizer"} <= costs
    assert re.search(r"\n  fp8 .* 16 +[\d.]+ MiB +[\d.]+ MiB +0", out)
    shown = fp8bench("show", kept.training.id)
    assert shown == (0, out, "")
    _, text, _ = fp8bench("show", kept.training.id, "--json")
    document: dict[str, Any] = json.loads(text)
    steps = [line for line in document["lines"] if line["line"] == "StepRow" and line["arm"] == "fp8"]
    assert repr(steps[3]["loss"]) == losses[0] and document["finished"]
    assert document["verdicts"]["fp8"]["words"].startswith("inconclusive")
    assert document["arms"]["fp8"]["words"] == document["verdicts"]["fp8"]["words"] and document["bands"]
    looks = out.partition("never trained on")[2]
    losses_told, _, perplexities = looks.partition("perplexity of a token")
    assert re.search(r"\n  fp8 +\d\.\d{3} +", losses_told) and re.search(r"\n  fp8 +\d+\.?\d* +", perplexities)
    _, planned, _ = say(*TINY, "--dtypes", "bf16,fp8,mxfp8", "--seeds", "100", "--dry-run")
    assert re.search(r"time: about [\d.]+ \w+.* for the steps, .*, and what mxfp8 takes", " ".join(planned.split()))
    _, listed, _ = fp8bench("history", "list", "--runs")
    assert f"{kept.training.id} of {kept.training.started[:10]} " in listed and ": nano in bf16, fp8" in listed
    code, out, err = say("--resume", "last")
    assert code == 0 and out == shown[1] and f"training {kept.training.id} is finished; nothing was missing" in err
    code, _, err = say("--resume", "last", "--fail-on", "worse,inconclusive")
    assert code == 1 and "--fail-on: fp8: inconclusive: 1 seed counts, fewer than 5" in err
    assert say("--resume", "last", "--fail-on", "worse,diverged,alarm")[0] == 0
    for name in (f"runs/box/20260105T120000.000Z-aaaaaaaa-{kept.training.id[:4]}0000.jsonl",):
        (store / name).parent.mkdir(parents=True)
        (store / name).write_text("{}")
    code, _, err = fp8bench("show", kept.training.id[:4])
    assert code == 2 and f"and the training {path.parent.name}. Give more of the id." in unfolded(err)
    (store / name).unlink()
    assert fp8bench("show", kept.training.id[:4]) == shown
    assert fp8bench("show", "last") == shown
    code, again, err = fp8bench("show", kept.training.id, "--tensorboard", "board")
    assert (code, again) == (0, out)
    assert "tensorboard: 10 curves in board; `tensorboard --logdir board`" in unfolded(err)
    has_a_report_of_its_own(path.parent.name, store, fp8bench)


def has_a_report_of_its_own(name: str, store: Path, fp8bench: Say) -> None:
    """By its id, alone: page, Markdown and rows lie in the store, and wherever else they are wanted."""
    code, out, _ = fp8bench("report", name[-8:], "--md", "told.md")
    assert code == 0 and out.strip() == f".fp8bench/reports/{name}/report.html"
    folder = store / "reports" / name
    assert "Does it still learn?" in (folder / "report.html").read_text() and "fp8" in Path("told.md").read_text()
    assert (folder / "results.csv").read_text().startswith("arm,precision,role,seed,step")
    code, _, err = fp8bench("report", name[-8:], name[-8:])
    assert code == 2 and "is a training, which has a report of its own" in unfolded(err)


def last_losses(store: Path) -> dict[str, float]:
    """Of every arm of the only training, in its last step."""
    return {row.arm: row.loss for row in load_training(training_files(store)[0]).of(StepRow)}


SWEPT = {
    "formats": ("--dtypes bf16,fp8 --sweep formats=hybrid,e4m3,e5m2", ["fp8", "fp8:formats=e4m3", "fp8:formats=e5m2"]),
    "attention and loss scales": (
        "--dtypes fp32,fp16 --sweep attention=auto,rounded --sweep loss-scale=auto,1",
        ["fp16", "fp16 loss-scale=1", "fp16 attention=rounded", "fp16 attention=rounded loss-scale=1"],
    ),
}


@pytest.mark.slow
@for_each("name", SWEPT)
def test_whatever_is_swept_takes_effect(name: str, say: Say, store: Path, local: None) -> None:
    """Every arm is trained, and learns otherwise than all others."""
    words, arms = SWEPT[name]
    assert say(*TINY, *words.split())[0] == 0
    losses = last_losses(store)
    assert len(set(losses.values())) == len(losses) - 1, "the repeat alone has the reference's bits"
    assert {*arms} < {*losses}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is kept by Linux alone")
def test_the_largest_batch_is_looked_for_by_running_it(say: Say, store: Path, local: None) -> None:
    """Of each arm, within the limit, and the next one is beyond it."""
    code, out, _ = say(*TINY, "--max-batch", "--memory-limit", "96MiB", "--model", "nano")
    found = [one.capacity for one in load_training(training_files(store)[0]).of(ArmCost) if one.capacity]
    assert code == 0 and len(found) == 2 and out.count("largest batch that fits into 96.0 MiB: ") == 2
    for one in found:
        assert one.batch and one.beyond == one.batch + 1 and one.tokens == 16 * one.batch and "more" in one.why
        assert one.peak is not None and 0.9 * (96 << 20) < one.peak <= 96 << 20


@pytest.mark.slow
def test_arms_that_do_not_fit_together_come_to_the_same_losses_in_pairs(say: Say, store: Path, local: None) -> None:
    """Bit for bit, within a limit that two of them fit into."""
    losses = []
    for limit in (["--memory-limit", "48MiB"], []):
        assert say(*TINY, "--model", "nano", *limit)[0] == 0
        kept = load_training(training_files(store)[0])
        losses.append({(row.arm, row.step): row.loss for row in kept.of(StepRow)})
        assert [event.kind for event in kept.of(TrainingEvent)] == (["pairs"] if limit else [])
        assert len(kept.of(StepRow)) == len(losses[-1]) == 5 * 4
    assert losses[0] == losses[1]


def test_a_plan_is_told_and_nothing_is_trained(say: Say, store: Path, local: None) -> None:
    code, out, err = say(*TINY, "--seeds", "3", "--sweep", "gradients=fp32,bf16", "--dry-run")
    words = " ".join(out.split())
    assert (code, err) == (0, "") and not training_files(store)
    assert "fp8 gradients=bf16 candidate emulated" in words and "bf16 again repeat native" in words
    assert "steps: 64 in all, 4 steps of 6 arms in 3 seeds" in words and "16 a step, 1024 in all" in words
    assert "time: not known before such a model was trained here; --quick tells" in words
    assert re.search(r"parameters: [\d,]+ ", words) and "bytes a parameter (weights 4, gradients 4," in words


def test_an_interrupt_says_how_to_go_on(
    say: Say, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 130, what was kept is told, and the command that is named does the rest."""
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab(strikes("fp8", 2, KeyboardInterrupt())))
    code, out, err = say(*TINY, "--keep", "1")
    told = re.search(r"To go on: fp8bench train (--resume \w+)\n", err)
    assert (
        code == 130 and told and re.search("cut off in seed 0 after [23] steps: what is said is of what was kept", out)
    )
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab())
    code, out, err = say(*told[1].split())
    assert code == 0 and "cut off" not in out and "gone on with from step 2" in " ".join(out.split())


def test_where_no_arm_can_be_built_it_ends_at_once(say: Say, local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh worker, which takes seconds, would have as little memory."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(LocalWorker, "restart", lambda worker: pytest.fail("a fresh worker was tried"))
    monkeypatch.setattr("fp8bench.features.train.lab.own_trainer.Trainer", full)
    code, out, err = say(*TINY)
    assert (code, out) == (3, "")
    assert "Cannot allocate memory. Free some, or raise this process's limit (ulimit -v)" in " ".join(err.split())


def test_an_arm_that_is_out_is_an_exit_code(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab(strikes("fp8", 2, times=2)))
    code, out, err = say(*TINY, "--keep", "1")
    assert code == 3 and "the worker crashed" in out and "it is trained no further" in err
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab(strikes("bf16", 2, times=2)))
    code, out, err = say(*TINY, "--keep", "1")
    assert (code, out) == (3, "") and "the worker crashed during 'advance'" in err


@for_each(
    ("words", "why"),
    [
        (
            ["--decay", "0.3"],
            "--decay has no effect: it is of --schedule wsd, and that is cosine. Choose",
        ),
        (
            ["--optimizer", "sgd", "--beta2", "0.9"],
            "--beta2 has no effect: it is of --optimizer adamw or lion, and",
        ),
        (["--scale-first", "2^8"], "--scale-first has no effect: it is of --loss-scale dynamic, and that is auto."),
        (["--optimizer", "adafactor", "--beta1", "0"], "--beta1 has no effect"),
        (["--patience", "5", "--schedule", "linear"], "--patience has no effect"),
    ],
)
def test_what_no_arm_would_take_notice_of(words: list[str], why: str, say: Say, local: None) -> None:
    code, out, err = say(*TINY, *words)
    assert (code, out) == (2, "") and why in err


def test_an_arm_that_takes_notice_is_enough(store: Path) -> None:
    settings = TrainerSettings(decay=0.3)
    check_training(TrainingRequest(settings=settings, sweep=(("schedule", ("cosine", "wsd")),)))


CONFIG = """
dtypes: [bf16, fp8]
use_fp8: true
fp8_format: e4m3
fp8_amax_history_len: 16
fp8_amax_compute_algo: max
max_grad_norm: 0.5
learning_rate: 2e-3
lr_scheduler_type: reduce_lr_on_plateau
optim: adamw_torch
adam_beta2: 0.95
weight_decay: 0.2
max_batch_size: 4
gradient_accumulation_steps: 2
gradient_checkpointing: true
torch_compile: false
use_flash_attention: true
initial_loss_scale: 2^10
growth_factor: 4
rates: {attn: 0.5, blocks.0: 2}
precision_map: "embed=fp16, attn=fp8, mlp=fp8, norm=fp16, output=fp16"
steps: 7
"""


def configured(*words: str, text: str = CONFIG) -> TrainingRequest:
    Path("my.yaml").write_text(text)
    parser = build_parser()
    words = ("train", "--config", "my.yaml", *words)
    return request_from(with_config(parser, commands_of(parser)["train"], words, Path("my.yaml")))


def test_a_file_of_options_is_what_the_command_line_would_be(store: Path) -> None:
    wanted = TrainerSettings(
        clip=0.5, rate=2e-3, schedule="plateau", beta2=0.95, weight_decay=0.2, batch=4, micro_batches=2,
        checkpointing="blocks", scale_first=1024.0, scale_factor=4.0, rates=(("attn", 0.5), ("blocks.0", 2.0)),
        precision_map=(("embed", "fp16"), ("attn", "fp8"), ("mlp", "fp8"), ("norm", "fp16"), ("output", "fp16")),
    )  # fmt: skip
    request = configured()
    assert request.settings == wanted and request.steps == 7
    assert request.dtypes == ("bf16", "fp8", "fp8-delayed:history=16:formats=e4m3")
    assert configured("--clip", "2", "--seeds", "3").settings == replace(wanted, clip=2.0)


WRONG_FILES = {
    "max_grad_nrm: 1": "my.yaml:1: unknown key 'max_grad_nrm'. Did you mean 'max_grad_norm'?",
    "weight_decy: 1": "my.yaml:1: unknown key 'weight_decy'. Did you mean 'weight-decay'?",
    "clip: 1\nmax_grad_norm: 2": "my.yaml:2: 'max_grad_norm' sets what a line above sets. Keep one of the two.",
    "use_flash_attention: false": "my.yaml:1: use_flash_attention cannot be false here",
    "optim: rmsprop": "my.yaml:1: --optimizer: invalid choice: 'rmsprop'",
    "rates: {atn: 2}": "unknown parameters of --rates 'atn'. Did you mean 'attn'?",
    "init_scale: 2^8": "--scale-first has no effect: it is of --loss-scale dynamic",
    "init_scale: big": "my.yaml:1: --scale-first: expected a number from 1 to 2^32, like 2^10, got 'big'.",
    "precision_map: {norm: tf32}": "--precision-map norm=tf32: tf32 rounds what products read, and norm multiplies",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_what_a_file_cannot_say_of_a_training(text: str, store: Path, fp8bench: Say) -> None:
    Path("my.yaml").write_text(text)
    code, out, err = unfolding(fp8bench)("train", "--config", "my.yaml", "--dry-run")
    assert (code, out) == (2, "") and WRONG_FILES[text] in err


def test_the_same_file_beside_resume_and_another_one(
    store: Path, local: None, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command line had the last word on may stand in it; anything else that differs is refused."""
    typed = "fp8bench train --config my.yaml --rate 1e-3"
    monkeypatch.setattr("fp8bench.features.train.command.command_line", lambda: typed)
    Path("my.yaml").write_text("max_grad_norm: 0.5\nlearning_rate: 2e-3\noptim: sgd\nbands: none\n")
    code, out, err = say("--config", "my.yaml", "--rate", "1e-3", *TINY)
    assert code == 0 and "my.yaml:2: learning_rate has no effect: --rate on the command line wins" in err
    assert "settings: batch 1, sequence 16, optimizer sgd, clip 0.5" in out
    code, _, err = say("--config", "my.yaml", "--resume", "last")
    assert code == 0 and "is finished; nothing was missing" in err
    Path("my.yaml").write_text("max_grad_norm: 0.25\n")
    code, out, err = say("--config", "my.yaml", "--resume", "last")
    assert (code, out) == (2, "") and "my.yaml:1: max_grad_norm is 0.25, and training" in err
    assert "was begun with 0.5. Resume it with the file that it was begun with, or without --config." in err


def test_scales_of_a_training_are_taken_by_another(store: Path, local: None, say: Say) -> None:
    assert say(*TINY, "--bands", "none")[0] == 0
    code, out, _ = say(*TINY, "--bands", "none", "--scales-from", "last")
    assert code == 0 and "scales-from last" in out
    newest, first = (load_training(path) for path in training_files(store))
    known = {(mode, layer, role): amax for mode, layer, role, amax in newest.training.request.settings.scales}
    amaxes = {(line.layer, line.role): line.amax for line in first.of(LayerReading) if line.arm == "fp8"}
    assert known["fp8", "blocks.0.mlp.up", "weight"] == amaxes["blocks.0.mlp.up", "weight"]
    weights = [line for line in newest.of(LayerReading) if (line.arm, line.role) == ("fp8", "weight")]
    (scale,) = {line.scale for line in weights if line.layer == "blocks.0.mlp.up"}
    assert scale == pytest.approx(448 / known["fp8", "blocks.0.mlp.up", "weight"])
    code, _, err = say(*TINY, "--arch", "mlp", "--scales-from", "last")
    assert code == 2 and "has no scale of window, which --model nano multiplies by." in err
