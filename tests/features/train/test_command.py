"""`fp8bench train` from its command line to its table, with a real lab and a few steps."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8bench.cli.config_file import parse_with_config
from fp8bench.cli.main import build_parser, subparsers_by_name
from fp8bench.features.train import run as job
from fp8bench.features.train.command import request_from
from fp8bench.features.train.kind import KIND, load_training
from fp8bench.features.train.request import TrainerSettings, TrainingRequest
from fp8bench.features.train.values import LayerReading, StoredTraining
from fp8bench.features.train.words import FAILURE_WORDS
from fp8bench.measure.handle import LocalWorker
from tests.commands import Say, only_sentence, unfolding
from tests.counts import for_each
from tests.trainings import FakeLab, strikes, write_text

TINY = (
    "--data",
    "text.txt",
    "--steps",
    "4",
    "--seeds",
    "1",
    "--batch",
    "1",
    "--sequence",
    "16",
    "--evaluate",
    "4",
    "--dtypes",
    "bf16,fp8",
)


@pytest.fixture
def say(store: Path, fp8bench: Say) -> Say:
    write_text()
    return unfolding(fp8bench, "train")


def newest(store: Path) -> StoredTraining:
    return load_training(KIND.files(store)[0])


@for_each(
    ("words", "sentence"),
    [
        (["--dtypes", "bf16,fb8"], "Did you mean 'fp8'"),
        (["--arch", "rnn"], "invalid choice: 'rnn'"),
        (["--steps", "0"], "--steps: expected a whole number from 1 to 10000000, got '0'"),
        (["--margin", "100"], "--margin: expected a percentage"),
        (["--optimizer", "adamw:betas=0.9"], "two numbers from 0 to 0.999999 as betas"),
        (["--device", "cuda:9"], "unknown device on this machine 'cuda:9'"),
        (["--data", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--wire", "fp8"], "--wire only works with several ranks"),
        (["--dry-run", "--csv", "-"], "--dry-run measures nothing"),
        (["--resume", "last"], "The store has no trainings yet"),
        (["--fail-on", "worse,divreged"], "Did you mean 'diverged'"),
        (["--live", "a.html", "--dry-run"], "--live would have no data"),
        (["--resume", "last", "--steps", "3"], "and --steps was given too"),
    ],
)
def test_an_impossible_command_line_is_one_sentence(words: list[str], sentence: str, say: Say, local: None) -> None:
    code, out, err = say(*words)
    assert (code, out) == (2, "") and sentence in only_sentence(err)
    assert not KIND.files(Path(".fp8bench"))


def test_help_names_what_it_may_fail_on() -> None:
    (words,) = (
        action.help for action in subparsers_by_name(build_parser())["train"]._actions if action.dest == "fail_on"
    )
    assert words is not None and all(name in words for name in FAILURE_WORDS)


@for_each(("more", "length"), [("", (300, 5)), ("--quick", (60, 1)), ("--quick --steps 9 --seeds 2", (9, 2))])
def test_quick_is_one_short_seed_unless_told(more: str, length: tuple[int, int]) -> None:
    request = request_from(build_parser().parse_args(["train", *more.split()]))
    assert (request.steps, request.seeds) == length


def test_a_training_is_printed_kept_shown_and_exported(say: Say, fp8bench: Say, store: Path, local: None) -> None:
    """With the same figures on the terminal, in JSON and in CSV."""
    code, out, err = say(*TINY, "--csv", "rows.csv")
    assert code == 0 and "seed 1/1, step 4/4: bf16 " in err and "Traceback" not in err
    kept = newest(store)
    told = " ".join(out.split())
    key = kept.training.id
    name = Path(kept.path).parent.name
    assert kept.finished and not kept.troubles and re.search(r"\n  fp8 +cannot tell", out)
    assert "1 seed counts" in told and "nondeterminism is zero" in fp8bench("show", key, "--all")[1]
    rows = Path("rows.csv").read_text().splitlines()
    (loss,) = (row.split(",")[-1] for row in rows if re.match("fp8,fp8,candidate,0,3,StepRow,.*,loss,", row))
    document: dict[str, Any] = json.loads(fp8bench("show", key, "--json")[1])
    steps = [line for line in document["lines"] if line["line"] == "StepRow" and line["arm"] == "fp8"]
    assert repr(steps[3]["loss"]) == loss and document["finished"]
    assert all(fp8bench("show", word) == (0, out, "") for word in (key, key[:4], "last"))
    assert f"{key} of {kept.training.started[:10]} " in fp8bench("history", "list", "--runs")[1]
    code, again, err = say("--resume", "last")
    assert (code, again) == (0, out) and f"training {key} is finished; nothing was missing" in err
    assert say("--resume", "last", "--fail-on", "worse,diverged,alarm")[0] == 0
    code, said, _ = fp8bench("report", key, "--md", "told.md")
    assert code == 0 and said.split() == [f".fp8bench/reports/{name}/report.html", "told.md"]
    assert "Does it still learn?" in Path(said.split()[0]).read_text() and "fp8" in Path("told.md").read_text()
    assert (store / "reports" / name / "results.csv").read_text().startswith("arm,precision,role,seed,step")


def test_an_interrupt_says_how_to_resume(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    labs = iter((FakeLab(strikes("fp8", 2, KeyboardInterrupt())), FakeLab()))
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: next(labs))
    code, out, err = say(*TINY, "--keep", "1")
    command = re.search(r"To continue: fp8bench train (--resume \w+)\n", err)
    assert code == 130 and command and re.search("cut off in seed 0 after [23] steps", out)
    code, out, err = say(*command[1].split())
    assert code == 0 and "cut off" not in out and "resumed from step 2" in " ".join(out.split())


def test_where_no_arm_can_be_built_it_ends_at_once(say: Say, local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh worker would have as little memory."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(LocalWorker, "restart", lambda worker: pytest.fail("a fresh worker was tried"))
    monkeypatch.setattr("fp8bench.features.train.lab.trainer.Trainer", full)
    code, out, err = say(*TINY)
    assert (code, out) == (3, "") and "Cannot allocate memory. Free some, or raise" in " ".join(err.split())


@for_each(("arm", "said"), [("fp8", "this arm is excluded"), ("bf16", "the worker crashed during 'advance'")])
def test_an_arm_that_is_out_is_an_exit_code(arm: str, said: str, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab(strikes(arm, 2, times=2)))
    code, out, err = say(*TINY, "--keep", "1")
    assert code == 3 and said in err and ("the worker crashed" in out) == bool(out) == (arm == "fp8")


CONFIG = """
dtypes: [bf16, fp8]
use_fp8: true
fp8_format: e4m3
fp8_amax_history_len: 16
fp8_amax_compute_algo: max
max_grad_norm: 0.5/kind
rate: 2e-3
schedule: plateau
optimizer: adamw:betas=0.9,0.95:weight_decay=0.2
rates: {attn: 0.5, blocks.0: 2}
max_batch_size: 4
micro-batches: 2
checkpointing: blocks
torch_compile: false
use_flash_attention: true
precision_map: "embed=fp16, attn=fp8, mlp=fp8, norm=fp16, output=fp16"
steps: 7
"""


def configured(*words: str) -> TrainingRequest:
    Path("my.yaml").write_text(CONFIG)
    parser = build_parser()
    words = ("train", "--config", "my.yaml", *words)
    return request_from(parse_with_config(parser, subparsers_by_name(parser)["train"], words, Path("my.yaml")))


def test_a_file_of_options_equals_the_command_line(store: Path) -> None:
    wanted = TrainerSettings(
        clip="0.5/kind",
        rate=2e-3,
        schedule="plateau",
        optimizer="adamw:betas=0.9,0.95:weight_decay=0.2",
        batch=4,
        micro_batches=2,
        checkpointing="blocks",
        rates=(("attn", 0.5), ("blocks.0", 2.0)),
        precision_map=(("embed", "fp16"), ("attn", "fp8"), ("mlp", "fp8"), ("norm", "fp16"), ("output", "fp16")),
    )
    request = configured()
    assert request.settings == wanted and request.steps == 7
    assert request.dtypes == ("bf16", "fp8", "fp8-delayed:history=16:formats=e4m3")
    assert configured("--clip", "2", "--seeds", "3").settings == replace(wanted, clip=2.0)


@for_each(
    ("text", "why"),
    {
        "max_grad_nrm: 1": "my.yaml: unknown key 'max_grad_nrm'. Did you mean 'max_grad_norm'?",
        "clip: 1\nmax_grad_norm: 2": "my.yaml: 'max_grad_norm' sets what another key sets",
        "use_flash_attention: false": (
            "my.yaml: use_flash_attention: 'false' is not supported: torch chooses the kernel of attention here"
        ),
        "rates: {atn: 2}": "unknown parameters of --rates 'atn'. Did you mean 'attn'?",
        "rates: {attn: fast}": "my.yaml: rates: expected kinds of parameters",
        "clip: 1/layer": "my.yaml: clip: expected a number from 0, alone or as NUMBER/GROUP",
        "precision_map: {norm: tf32}": "--precision-map norm=tf32: tf32 rounds what products read",
    }.items(),
)
def test_what_a_file_cannot_say_of_a_training(text: str, why: str, say: Say) -> None:
    Path("my.yaml").write_text(text)
    code, out, err = say("--config", "my.yaml", "--dry-run")
    assert (code, out) == (2, "") and why in err


def test_the_command_line_has_the_last_word_and_resume_takes_no_file(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "ProcessWorker", lambda settings, module: FakeLab())
    typed = "fp8bench train --config my.yaml --rate 1e-3"
    monkeypatch.setattr("fp8bench.features.train.command.command_line", lambda: typed)
    Path("my.yaml").write_text("max_grad_norm: 0.5\nrate: 2e-3\noptimizer: sgd\nbands: none\n")
    code, out, err = say("--config", "my.yaml", "--rate", "1e-3", *TINY)
    assert code == 0
    assert "batch 1, sequence 16, optimizer sgd, clip 0.5" in " ".join(out.split())
    code, out, err = say("--config", "my.yaml", "--resume", "last")
    assert (code, out) == (2, "") and "--config was given too" in err


@pytest.mark.slow
def test_scales_of_a_training_are_taken_by_another(store: Path, local: None, say: Say) -> None:
    short = (*TINY, "--steps", "2", "--bands", "none")
    assert say(*short)[0] == 0
    code, out, _ = say(*short, "--scales-from", "last")
    assert code == 0 and "scales-from last" in " ".join(out.split())
    newest, first = (load_training(path) for path in KIND.files(store))
    known = {(mode, layer, role): amax for mode, layer, role, amax in newest.training.request.settings.scales}
    amaxes = {(line.arm, line.layer, line.role): line.amax for line in first.select_lines(LayerReading)}
    weight = "fp8", "blocks.0.mlp.up", "weight"
    assert known[weight] == amaxes[weight]
    code, _, err = say(*TINY, "--arch", "mlp", "--scales-from", "last")
    assert code == 2 and "has no scale for window, a layer of --model nano." in err
