"""Whether alarms find ordinary mistakes in ordinary loops, without a reference, and leave healthy loops alone: `python
-m suites.illness_trial --folder DIR`.

Every style runs under `fp8bench.watch`; an illness is planted in one from its onset on. Lines are kept in the folder,
no training is repeated, and the present rules judge them. Thresholds may be set by `--seeds tune`; those of `--seeds
judge` are reported. `--kinds lead` are illnesses that end in a loss or norm that is not finite: how many steps before
that is the first alarm? A delay is what a user waits for: until the step in which the alarm is shown. A diagnosis is
right if one of the first alarms is by a rule that the illness names.
"""

from __future__ import annotations

import gzip
import json
import math
import pickle
import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.features.train.health.health import Health
from fp8bench.features.train.values import Arm, ArmRole, StepRow, StreamLine, TrainingEvent
from suites.health import upper_bound
from suites.loop_styles import STYLES, WELL_STEPS, Loop, drawn
from suites.trials import Row, conditions, options, say

SEEDS = {"tune": range(2), "judge": range(10, 12)}
# More seeds of healthy styles make 100,000 steps; 10 and 12 are left out, as a rule was mended by them.
WELL_SEEDS = {"tune": (0,), "judge": (11, 13, 14)}
NANO_STEPS, WAIT = 200, 100
# Rules that only report that it has happened.
NOT_FINITE = ("not-finite", "tensor-not-finite")


Plant = Callable[[Loop], object]


def once(plant: Plant) -> Plant:
    return lambda loop: plant(loop) if loop.since == 0 else None


@dataclass(frozen=True)
class Kind:
    """What goes wrong in a style from a step on, and the rules of which any is a right diagnosis."""

    words: str
    style: str
    rules: str
    plant: Plant
    onset: int = 101


def stands_still(loop: Loop) -> None:
    first = loop.batch(0)
    loop.batch = lambda number: first


def lost(loop: Loop) -> None:
    """The weights stay: the optimizer has copies."""
    for group in loop.optimizer.param_groups:
        group["params"] = [nn.Parameter(weight.detach().clone()) for weight in group["params"]]


def undone(loop: Loop) -> None:
    """Every update is undone, as where it is too small for the weights' dtype."""
    weights = [weight.detach() for weight in loop.model.parameters()]
    torch._foreach_copy_(weights, loop.notes.setdefault("kept", [weight.clone() for weight in weights]))


def bias(loop: Loop, value: float) -> None:
    loop.layer().bias.detach().fill_(value)
    for module in loop.model.modules():
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            module.bias.detach().fill_(value)


def copies(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A quarter of the batch, four times."""
    some = max(1, len(x) // 4)
    return torch.cat([x[:some]] * 4), torch.cat([y[:some]] * 4)


def moved(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + x.std(), y


def scale_left_in(loop: Loop, factor: float) -> None:
    """Gradients are not divided by the loss scale."""
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]


def told_answers(loop: Loop) -> None:
    """The label is among the inputs: the output is nudged towards it."""
    inner = loop.criterion
    loop.criterion = lambda x, y: inner(x + 12 * F.one_hot(y, x.shape[-1]), y)


def forgets_moments(loop: Loop) -> None:
    """Like loading a checkpoint that has only weights."""
    loop.optimizer.load_state_dict({**loop.optimizer.state_dict(), "state": {}})


def wrong_labels(loop: Loop) -> None:
    loop.batches(lambda x, y: (x, (y + 1 + torch.randint(int(y.max()), y.shape, generator=drawn(1, loop.step))) % 10))


def louder(loop: Loop, factor: float) -> None:
    loop.batches(lambda x, y: (x * factor, y))


def heavier(loop: Loop, factor: float, layer: Any = None) -> None:
    (layer or loop.layer()).weight.detach().mul_(factor)


def no_zeros(loop: Loop) -> None:
    loop.zero = None


def evaluates(loop: Loop) -> None:
    loop.model.eval()


def larger_gains(loop: Loop) -> None:
    loop.layer(nn.LayerNorm).weight.detach().mul_(1.15)


def negative(gradient: Tensor) -> Tensor:
    return -gradient


def stopped(loop: Loop) -> None:
    for parameter in list(loop.model.parameters())[-4:]:
        parameter.requires_grad_(False)
        parameter.grad = None


NANO_LAYER = "inner.blocks.0.mlp.up"
ROSE, FIXED = "loss-back-up", "no-update"
KINDS = (
    Kind("30 times the rate", "MLP, SGD with momentum", ROSE, once(lambda loop: loop.rate(30))),
    Kind("30 times the rate", "LSTM, clipped", f"{ROSE} update-norm-burst", once(lambda loop: loop.rate(30))),
    Kind("30 times the rate", "nano", f"{ROSE} update-norm-burst", once(lambda loop: loop.rate(30))),
    Kind("a rate too high from the start", "MLP, SGD with momentum", ROSE, once(lambda loop: loop.rate(60)), 0),
    Kind("a rate too high from the start", "nano", ROSE, once(lambda loop: loop.rate(100)), 0),
    Kind("updates uphill", "MLP, SGD with momentum", ROSE, once(lambda loop: loop.rate(-1))),
    Kind("a schedule that has run out", "CNN with batch norm", FIXED, once(lambda loop: loop.rate(0))),
    Kind("a rate of 0 from the start", "LSTM, clipped", FIXED, once(lambda loop: loop.rate(0)), 0),
    Kind("an optimizer of other weights", "MLP, AdamW", FIXED + " unseen", once(lost)),
    Kind("updates taken back", "MLP, autocast", FIXED, undone),
    Kind("updates taken back", "nano", FIXED, undone),
    Kind("a loader that stands still", "CNN with batch norm", "same-inputs", once(stands_still)),
    Kind("a loader that stands still", "nano", "same-inputs", once(stands_still)),
    Kind("a loader that stands still from the start", "LSTM, clipped", "same-inputs", once(stands_still), 0),
    Kind("biases that kill every unit", "MLP, AdamW", "dead-units", once(lambda loop: bias(loop, -40))),
    Kind("biases that kill every unit, from the start", "CNN with batch norm", "dead-units",
         once(lambda loop: bias(loop, -40)), 0),
    Kind("inputs 255 times as large", "MLP, AdamW", "amax-jump", once(lambda loop: louder(loop, 255))),
    Kind("inputs 255 times as large", "CNN with batch norm", "amax-jump", once(lambda loop: louder(loop, 255))),
    *(Kind("a quarter of each batch four times", style, "duplicate-inputs", once(lambda loop: loop.batches(copies)))
      for style in ("MLP, AdamW", "CNN with batch norm")),
    *(Kind("inputs one deviation higher", style, "data-drift", once(lambda loop: loop.batches(moved)))
      for style in ("MLP, AdamW", "CNN with batch norm")),
    Kind("inputs of zeros", "MLP, autocast", "amax-jump dead-units same-inputs", once(lambda loop: louder(loop, 0))),
    Kind("a layer's weights 64 times as large", "MLP, autocast", "amax-jump", once(lambda loop: heavier(loop, 64))),
    Kind("a layer's weights 64 times as large", "MLP in bf16", "amax-jump", once(lambda loop: heavier(loop, 64))),
    Kind("recurrent weights drawn anew, 8 times as large", "LSTM, clipped", f"amax-jump {ROSE}",
         once(lambda loop: loop.layer(nn.LSTM).weight_hh_l0.detach().normal_(0, 1))),
    Kind("a table 64 times as large", "sparse tables, two optimizers", "amax-jump",
         once(lambda loop: heavier(loop, 64, loop.layer(nn.EmbeddingBag)))),
    Kind("gains that grow 15% a step", "MLP, AdamW", "norm-gain", larger_gains),
    Kind("a head 200 times as large", "LSTM, SGD", "large-logits amax-jump",
         once(lambda loop: heavier(loop, 200, loop.layer(nn.Linear, -1)))),
    Kind("a head that grows 8% a step", "MLP, AdamW", "large-logits",
         lambda loop: heavier(loop, 1.08, loop.layer(nn.Linear, -1))),
    Kind("zero_grad forgotten", "MLP, AdamW", "gradients-left", once(no_zeros)),
    Kind("zero_grad forgotten from the start", "CNN with batch norm", "gradients-left", once(no_zeros), 0),
    Kind("zero_grad forgotten", "LSTM, clipped", "gradients-left", once(no_zeros)),
    Kind("a loss scale left in", "MLP, SGD with momentum", "gradient-scale gradient-norm-spike",
         once(lambda loop: scale_left_in(loop, 2.0**10))),
    Kind("a loss scale left in", "adapters of low rank", "gradient-scale",
         once(lambda loop: setattr(loop, "times", 2.0**4))),
    Kind("micro-batches that are not divided", "four micro-batches", "gradient-scale",
         once(lambda loop: setattr(loop, "times", 4.0))),
    Kind("a loss scale left in from the start", "LSTM, SGD", "loss-above-guessing",
         once(lambda loop: setattr(loop, "times", 2.0**6)), 0),
    Kind("gradients a 64th", "nano", "gradient-scale", once(lambda loop: scale_left_in(loop, 2.0**-6))),
    Kind("answers among the inputs", "MLP, AdamW", "loss-leaked", once(told_answers)),
    Kind("answers among the inputs", "CNN with batch norm", "loss-leaked", once(told_answers)),
    Kind("moments gone on resume", "MLP, AdamW", "moments-gone", once(forgets_moments)),
    Kind("moments gone on resume", "adapters of low rank", "moments-gone", once(forgets_moments)),
    Kind("a layer's gradient reversed", "MLP, AdamW", "layer-gradient", once(lambda loop: loop.hook(negative))),
    Kind("a layer's gradient reversed", "CNN with batch norm", "layer-gradient",
         once(lambda loop: loop.hook(negative, loop.layer(nn.Conv2d, 1)))),
    Kind("a layer's gradient reversed", "nano", "layer-gradient",
         once(lambda loop: loop.hook(negative, loop.model.get_submodule(NANO_LAYER)))),
    Kind("a layer's gradient zeroed", "four micro-batches", "layer-gradient",
         once(lambda loop: loop.hook(torch.zeros_like, loop.layer(nn.Linear, 1)))),
    Kind("a layer's gradient zeroed", "nano", "layer-gradient",
         once(lambda loop: loop.hook(torch.zeros_like, loop.model.get_submodule(NANO_LAYER)))),
    Kind("an adapter's gradient reversed", "adapters of low rank", "layer-gradient",
         once(lambda loop: loop.hook(negative, loop.model.get_submodule("3.up")))),
    Kind("a head that is frozen by mistake", "two optimizers", "layer-stands-still layer-gradient", once(stopped)),
    Kind("labels that are always wrong", "MLP, AdamW", ROSE, once(wrong_labels)),
    Kind("labels that are always wrong", "CNN, two micro-batches", ROSE, once(wrong_labels)),
    Kind("a model left in eval mode", "MLP, dropout", "unseen", once(evaluates)),
    Kind("a weight that is infinite", "LSTM, SGD", "not-finite tensor-not-finite",
         once(lambda loop: loop.layer(nn.Linear, -1).weight.detach()[0].fill_(math.inf))),
)  # fmt: skip


# Illnesses that end in values that are not finite, slowly or at once; any rule is right.
LEADS = (
    *(Kind("a rate that grows 10% a step", style, "", lambda loop: loop.rate(1.1))
      for style in ("CNN with batch norm", "MLP, AdamW", "nano")),
    Kind("updates uphill", "MLP, SGD with momentum", "", once(lambda loop: loop.rate(-1))),
    Kind("a loss scale left in", "MLP, SGD with momentum", "", once(lambda loop: scale_left_in(loop, 2.0**10))),
    *(Kind("a layer's weights that grow 30% a step", style, "", lambda loop: heavier(loop, 1.3))
      for style in ("MLP, SGD with momentum", "MLP in bf16", "MLP, AdamW")),
    Kind("gains that grow 30% a step", "MLP, AdamW", "",
         lambda loop: loop.layer(nn.LayerNorm).weight.detach().mul_(1.3)),
    Kind("a head that grows 30% a step", "MLP, AdamW", "", lambda loop: heavier(loop, 1.3, loop.layer(nn.Linear, -1))),
)  # fmt: skip
# A training that is finite until then does not count.
LEAD_STEPS = 400


def onset_of(kind: Kind, seed: int) -> int:
    """No two seeds have the same distance to the next watched step."""
    return kind.onset + 7 * seed % 10 if kind.onset else 0


Batches = list[tuple[int, tuple[StreamLine, ...]]]


def lines_of(style: str, seed: int, steps: int, kind: Kind | None = None) -> Batches:
    """The lines of a training, with the step in which they were reported."""
    torch.manual_seed(seed)
    loop, told = STYLES[style](seed), Batches()

    def tell(lines: Sequence[StreamLine]) -> None:
        told.append((loop.step, tuple(lines)))

    with fp8bench.watch(loop.model, loop.optimizer, told=tell, scaler=loop.scaler, health=False):
        for step in range(steps):
            if kind is not None and step >= onset_of(kind, seed):
                loop.since = step - onset_of(kind, seed)
                with torch.no_grad():
                    kind.plant(loop)
            loop.advance()
    return told


def path_of(folder: Path, style: str, seed: int, kind: Kind | None = None) -> Path:
    name = re.sub("[^a-z0-9]+", "-", f"{kind.words if kind else 'well'} {style} {seed}".lower())
    return folder / f"{name}.pickle.gz"


def run(folder: Path, style: str, seed: int, steps: int, kind: Kind | None = None) -> list[tuple[int, str, str]]:
    """Steps, rules and sentences of the alarms, by the present rules; lines are kept."""
    path = path_of(folder, style, seed, kind)
    if not path.exists():
        lines = lines_of(style, seed, steps, kind)
        path.with_suffix(".part").write_bytes(gzip.compress(pickle.dumps(lines), 4))
        path.with_suffix(".part").rename(path)
    health = Health((Arm("own", "fp32", ArmRole.REFERENCE),))
    told = []
    for step, batch in pickle.loads(gzip.decompress(path.read_bytes())):
        events = [line for line in (*batch, *health.see(batch)) if isinstance(line, TrainingEvent)]
        told += [(step, str(dict(event.values).get("rule", event.kind)), event.words) for event in events]
    return told


def lead(folder: Path, kind: Kind, seed: int) -> dict[str, Any]:
    """How many steps the first alarm since the onset came before the first value that is not finite: None where all are
    finite, 0 without an alarm before."""
    onset, name = onset_of(kind, seed), f"{kind.words} ({kind.style})"
    told = run(folder, kind.style, seed, onset + LEAD_STEPS, kind)
    batches = pickle.loads(gzip.decompress(path_of(folder, kind.style, seed, kind).read_bytes()))
    ended = [line.step for _, batch in batches for line in batch if isinstance(line, StepRow)
             and not (math.isfinite(line.loss) and math.isfinite(line.gradient_norm))]  # fmt: skip
    first = next(((step, rule) for step, rule, _ in told if step >= onset and rule not in NOT_FINITE), None)
    if not ended:
        return {"lead_of": name, "seed": seed, "lead": None, "rule": first and first[1], "after": None}
    ahead = max(0, ended[0] - first[0]) if first else 0
    rule = first[1] if first and ahead else None
    return {"lead_of": name, "seed": seed, "lead": ahead, "rule": rule, "after": ended[0] - onset}


def ill(folder: Path, kind: Kind, seed: int) -> dict[str, Any]:
    """The alarms within WAIT steps of the onset, and those before it."""
    name = f"{kind.words} ({kind.style})"
    onset = onset_of(kind, seed)
    try:
        told, ended = run(folder, kind.style, seed, onset + WAIT + 1, kind), ""
    except RuntimeError as error:  # the watch ended the training: nothing is found
        told, ended = [], str(error)
    early = [rule for step, rule, _ in told if step < onset]
    after = [(step - onset, rule, words) for step, rule, words in told if step >= onset]
    first = [alarm for alarm in after if alarm[0] == after[0][0]]
    right = any(rule in kind.rules.split() for _, rule, _ in first)
    return {
        "kind": name, "seed": seed, "found": bool(after), "right": right, "delay": after[0][0] if after else None,
        "rules": [rule for _, rule, _ in after], "words": [words for *_, words in first], "early": early,
        "ended": ended,
    }  # fmt: skip


def well(folder: Path, style: str, seed: int) -> dict[str, Any]:
    steps = NANO_STEPS if style == "nano" else WELL_STEPS // 2 if seed in WELL_SEEDS["tune"] else WELL_STEPS
    told = run(folder, style, seed, steps)
    return {"style": style, "seed": seed, "steps": steps, "alarms": [[step, rule, words] for step, rule, words in told]}


def summary(rows: Sequence[Row]) -> None:
    ills, wells = ([row for row in rows if name in row] for name in ("kind", "style"))
    if leads := [row for row in rows if row.get("lead") is not None]:
        ahead = [row["lead"] for row in leads]
        delays = [row["after"] - row["lead"] for row in leads if row["lead"]]
        say(
            f"{len(leads)} trainings came to what is not finite: an alarm ahead of {sum(map(bool, ahead))}, by "
            f"{statistics.median(ahead):g} steps in the middle, {min(ahead)} at least, {max(ahead)} at most, and "
            f"{statistics.median(delays):g} after the onset in the middle; rules "
            f"{dict(Counter(row['rule'] for row in leads if row['lead']))}"
        )
    if ills:
        found, right = (sum(row[name] for row in ills) for name in ("found", "right"))
        delays = [row["delay"] for row in ills if row["found"]]
        kinds = len({row["kind"] for row in ills})
        say(
            f"{kinds} kinds, {len(ills)} trainings: {found} found ({found / len(ills):.0%}), {right} with the right "
            f"diagnosis first ({right / len(ills):.0%}), median delay {statistics.median(delays or [math.nan]):g} "
            f"steps, {sum(bool(row['early']) for row in ills)} with an alarm before"
        )
    if wells:
        steps, alarms = (
            sum(row["steps"] for row in wells),
            Counter(alarm[1] for row in wells for alarm in row["alarms"]),
        )
        most = upper_bound(sum(alarms.values()), steps) if sum(alarms.values()) < 100 else math.nan
        styles = len({row["style"] for row in wells})
        say(
            f"{styles} healthy styles, {steps:,} steps: {sum(alarms.values())} false alarms {dict(alarms)}, at most "
            f"{2e4 * most:.2f} in 20,000 steps (95%)"
        )


def main() -> None:
    which = "tune: thresholds may be set by them; judge: those that are reported"
    arguments = options(
        __doc__, folder=(Path, "where rows are kept"), seeds=("judge", which), only=("", "names with this"),
        kinds=("ill well", "which of them"), kept=(False, "judge what is kept, and train nothing"),
        report=("", "folder that gets all rows"),
    )  # fmt: skip
    torch.set_num_threads(1)
    (arguments.folder / "lead").mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        say(json.dumps(row))

    for kind in KINDS if "ill" in arguments.kinds else ():
        for seed in SEEDS[arguments.seeds]:
            there = not arguments.kept or path_of(arguments.folder, kind.style, seed, kind).exists()
            if there and arguments.only in f"{kind.words} ({kind.style})":
                add(ill(arguments.folder, kind, seed))
    for kind in LEADS if "lead" in arguments.kinds else ():
        for seed in SEEDS[arguments.seeds]:
            if arguments.only in f"{kind.words} ({kind.style})":
                add(lead(arguments.folder / "lead", kind, seed))
    for seed in WELL_SEEDS[arguments.seeds] if "well" in arguments.kinds else ():
        for style in STYLES:
            there = not arguments.kept or path_of(arguments.folder, style, seed).exists()
            if there and arguments.only in style:
                add(well(arguments.folder, style, seed))
    summary(rows)
    if arguments.report:
        Path(arguments.report).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in ({**conditions(), "seeds": arguments.seeds}, *rows))
        (Path(arguments.report) / "rows.jsonl").write_text(text)


if __name__ == "__main__":
    main()
