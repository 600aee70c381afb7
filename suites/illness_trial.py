"""Tests whether alarms find ordinary mistakes in training loops, and leave healthy loops alone, without a reference
run.

`python -m suites.illness_trial --folder DIR` runs every style of loop under `fp8bench.watch`, and plants an illness
in one from its onset on. Lines are stored in the folder, so that no training is repeated, and the present rules judge
them. Thresholds may be tuned on `--seeds tune`; figures of `--seeds judge` are reported.

`--kinds lead` are illnesses that end in a loss or norm that is not finite, for which the figure is how many steps
earlier the first alarm came. A delay is counted until the step in which the alarm is shown. A diagnosis is right if
one of the first alarms comes from a rule that the illness names.
"""

from __future__ import annotations

import gzip
import json
import math
import pickle
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.features.train.health.health import Health
from fp8bench.features.train.values import Arm, ArmRole, StepRow, StreamLine, TrainingEvent
from suites import illness_families
from suites.loop_styles import STYLES, WELL_STEPS, Kind, Loop, drawn
from suites.trials import Row, conditions, options, say

SEEDS = {"tune": range(2), "judge": range(10, 12)}
# Further seeds of healthy styles give 100,000 steps. Seeds 10 and 12 are left out, because a rule was fixed with
# them.
WELL_SEEDS = {"tune": (0,), "judge": (11, 13, 14)}
NANO_STEPS, WAIT = 200, 100
# Rules that report a value that is not finite after it has occurred.
NOT_FINITE = ("not-finite", "tensor-not-finite")


def upper_bound(events: int, trials: int, level: float = 0.95) -> float:
    """Returns Clopper and Pearson's bound: the rate at which so few events occur with a probability of 1 - `level`."""
    low, high = 0.0, 1.0
    for _ in range(100):
        rate = (low + high) / 2
        shares = (
            math.exp(math.log(math.comb(trials, count)) + count * math.log(rate) + (trials - count) * math.log1p(-rate))
            for count in range(events + 1)
        )
        low, high = (rate, high) if math.fsum(shares) > 1 - level else (low, rate)
    return high


def stands_still(loop: Loop) -> None:
    first = loop.batch(0)
    loop.batch = lambda number: first


def lost(loop: Loop) -> None:
    """Gives the optimizer copies of the weights, so that the model's weights do not change."""
    for group in loop.optimizer.param_groups:
        group["params"] = [nn.Parameter(weight.detach().clone()) for weight in group["params"]]


def undone(loop: Loop) -> None:
    """Undoes every update, as if updates were too small for the dtype of the weights."""
    weights = [weight.detach() for weight in loop.model.parameters()]
    torch._foreach_copy_(weights, loop.notes.setdefault("kept", [weight.clone() for weight in weights]))


def bias(loop: Loop, value: float) -> None:
    loop.layer().bias.detach().fill_(value)
    for module in loop.model.modules():
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            module.bias.detach().fill_(value)


def copies(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a quarter of the batch, four times."""
    some = max(1, len(x) // 4)
    return torch.cat([x[:some]] * 4), torch.cat([y[:some]] * 4)


def moved(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + x.std(), y


def scale_left_in(loop: Loop, factor: float) -> None:
    """Multiplies gradients by the loss scale, as if they were not divided by it."""
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]


def told_answers(loop: Loop) -> None:
    """Adds the label to the inputs, so that the model can read the answer."""
    inner = loop.criterion
    loop.criterion = lambda x, y: inner(x + 12 * F.one_hot(y, x.shape[-1]), y)


def forgets_moments(loop: Loop) -> None:
    """Clears the optimizer's moments, as after loading a checkpoint that has only weights."""
    loop.optimizer.load_state_dict({**loop.optimizer.state_dict(), "state": {}})


def wrong_labels(loop: Loop) -> None:
    loop.batches(lambda x, y: (x, (y + 1 + torch.randint(int(y.max()), y.shape, generator=drawn(1, loop.step))) % 10))


def louder(loop: Loop, factor: float) -> None:
    loop.batches(lambda x, y: (x * factor, y))


def heavier(loop: Loop, factor: float, kind: type[nn.Module] = nn.Linear, number: int = 0) -> None:
    loop.layer(kind, number).weight.detach().mul_(factor)


def stopped(loop: Loop) -> None:
    for parameter in list(loop.model.parameters())[-4:]:
        parameter.requires_grad_(False)
        parameter.grad = None


ROSE, FIXED, STILL, RATE = "loss-back-up", "no-update", "same-inputs", "a rate too high from the start"
ADAM, SGD, CNN, LSTM = "MLP, AdamW", "MLP, SGD with momentum", "CNN with batch norm", "LSTM, clipped"
ADAPTERS = "adapters of low rank"
KINDS = (
    Kind("30 times the rate", SGD, ROSE, lambda loop: loop.rate(30)),
    *(Kind("30 times the rate", style, f"{ROSE} update-norm-burst", lambda loop: loop.rate(30))
      for style in (LSTM, "nano")),
    Kind(RATE, SGD, ROSE, lambda loop: loop.rate(60), 0),
    Kind(RATE, "nano", ROSE, lambda loop: loop.rate(100), 0),
    Kind("updates uphill", SGD, ROSE, lambda loop: loop.rate(-1)),
    Kind("a schedule that has run out", CNN, FIXED, lambda loop: loop.rate(0)),
    Kind("a rate of 0 from the start", LSTM, FIXED, lambda loop: loop.rate(0), 0),
    Kind("an optimizer of other weights", ADAM, FIXED + " unseen", lost),
    *(Kind("updates taken back", style, FIXED, undone, each=True) for style in ("MLP, autocast", "nano")),
    *(Kind("a loader that stands still", style, STILL, stands_still) for style in (CNN, "nano")),
    Kind("a loader that stands still from the start", LSTM, STILL, stands_still, 0),
    Kind("biases that kill every unit", ADAM, "dead-units", lambda loop: bias(loop, -40)),
    Kind("biases that kill every unit, from the start", CNN, "dead-units", lambda loop: bias(loop, -40), 0),
    *(Kind("inputs 255 times as large", style, "amax-jump", lambda loop: louder(loop, 255)) for style in (ADAM, CNN)),
    *(Kind("a quarter of each batch four times", style, "duplicate-inputs", lambda loop: loop.batches(copies))
      for style in (ADAM, CNN)),
    *(Kind("inputs one deviation higher", style, "data-drift", lambda loop: loop.batches(moved))
      for style in (ADAM, CNN)),
    Kind("inputs of zeros", "MLP, autocast", f"amax-jump dead-units {STILL}", lambda loop: louder(loop, 0)),
    *(Kind("a layer's weights 64 times as large", style, "amax-jump", lambda loop: heavier(loop, 64))
      for style in ("MLP, autocast", "MLP in bf16")),
    Kind("recurrent weights drawn anew, 8 times as large", LSTM, f"amax-jump {ROSE}",
         lambda loop: loop.layer(nn.LSTM).weight_hh_l0.detach().normal_(0, 1)),
    Kind("a table 64 times as large", "sparse tables, two optimizers", "amax-jump",
         lambda loop: heavier(loop, 64, nn.EmbeddingBag)),
    Kind("gains that grow 15% a step", ADAM, "norm-gain", lambda loop: heavier(loop, 1.15, nn.LayerNorm), each=True),
    Kind("a head 200 times as large", "LSTM, SGD", "large-logits amax-jump",
         lambda loop: heavier(loop, 200, number=-1)),
    Kind("a head that grows 8% a step", ADAM, "large-logits", lambda loop: heavier(loop, 1.08, number=-1), each=True),
    Kind("zero_grad forgotten", ADAM, "gradients-left", lambda loop: setattr(loop, "zero", None)),
    Kind("zero_grad forgotten from the start", CNN, "gradients-left", lambda loop: setattr(loop, "zero", None), 0),
    Kind("zero_grad forgotten", LSTM, "gradients-left", lambda loop: setattr(loop, "zero", None)),
    Kind("a loss scale left in", SGD, "gradient-scale gradient-norm-spike", lambda loop: scale_left_in(loop, 2.0**10)),
    Kind("a loss scale left in", ADAPTERS, "gradient-scale", lambda loop: setattr(loop, "times", 2.0**4)),
    Kind("micro-batches that are not divided", "four micro-batches", "gradient-scale",
         lambda loop: setattr(loop, "times", 4.0)),
    Kind("a loss scale left in from the start", "LSTM, SGD", "loss-above-guessing",
         lambda loop: setattr(loop, "times", 2.0**6), 0),
    Kind("gradients a 64th", "nano", "gradient-scale", lambda loop: scale_left_in(loop, 2.0**-6)),
    *(Kind("answers among the inputs", style, "loss-leaked", told_answers) for style in (ADAM, CNN)),
    *(Kind("moments gone on resume", style, "moments-gone", forgets_moments) for style in (ADAM, ADAPTERS)),
    Kind("a head that is frozen by mistake", "two optimizers", "layer-stands-still", stopped),
    *(Kind("labels that are always wrong", style, ROSE, wrong_labels) for style in (ADAM, "CNN, two micro-batches")),
    Kind("a model left in eval mode", "MLP, dropout", "unseen", lambda loop: loop.model.eval()),
    Kind("a weight that is infinite", "LSTM, SGD", "not-finite tensor-not-finite",
         lambda loop: loop.layer(nn.Linear, -1).weight.detach()[0].fill_(math.inf)),
)  # fmt: skip


# Illnesses that end, slowly or at once, in values that are not finite. An alarm of any rule counts.
LEADS = (
    *(Kind("a rate that grows 10% a step", style, "", lambda loop: loop.rate(1.1), each=True)
      for style in (CNN, ADAM, "nano")),
    Kind("updates uphill", SGD, "", lambda loop: loop.rate(-1)),
    Kind("a loss scale left in", SGD, "", lambda loop: scale_left_in(loop, 2.0**10)),
    *(Kind("a layer's weights that grow 30% a step", style, "", lambda loop: heavier(loop, 1.3), each=True)
      for style in (SGD, "MLP in bf16", ADAM)),
    Kind("gains that grow 30% a step", ADAM, "", lambda loop: heavier(loop, 1.3, nn.LayerNorm), each=True),
    Kind("a head that grows 30% a step", ADAM, "", lambda loop: heavier(loop, 1.3, number=-1), each=True),
)  # fmt: skip
ALL_STYLES = STYLES | illness_families.STYLES | illness_families.HEALTHY_STYLES
# Healthy loops, in which nothing is planted.
HEALTHY = tuple(Kind("well", style, "", lambda loop: None) for style in STYLES)
# A training that is finite for this many steps does not count.
LEAD_STEPS = 400


Batches = list[tuple[int, tuple[StreamLine, ...]]]


def lines_of(kind: Kind, seed: int, steps: int) -> Batches:
    """Returns the lines of a training, each with the step in which it was reported."""
    torch.manual_seed(seed)
    loop, batches, onset = ALL_STYLES[kind.style](seed), Batches(), kind.begins(seed)

    def tell(lines: Sequence[StreamLine]) -> None:
        batches.append((loop.step, tuple(lines)))

    with fp8bench.watch(loop.model, loop.optimizer, told=tell, scaler=loop.scaler, health=False):
        for step in range(steps):
            if step == onset or (kind.each and step > onset):
                with torch.no_grad():
                    kind.plant(loop)
            loop.advance()
    return batches


def path_of(folder: Path, kind: Kind, seed: int) -> Path:
    name = re.sub("[^a-z0-9]+", "-", f"{kind.words} {kind.style} {seed}".lower())
    return folder / f"{name}.pickle.gz"


def run(folder: Path, kind: Kind, seed: int, steps: int) -> tuple[Batches, list[tuple[int, str, str]]]:
    """Returns the lines of a training, which are stored, and the alarms by the present rules: step, rule and
    sentence.
    """
    path = path_of(folder, kind, seed)
    if not path.exists():
        path.with_suffix(".part").write_bytes(gzip.compress(pickle.dumps(lines_of(kind, seed, steps)), 4))
        path.with_suffix(".part").rename(path)
    health = Health((Arm("own", "fp32", ArmRole.REFERENCE),))
    batches: Batches = pickle.loads(gzip.decompress(path.read_bytes()))
    alarms = []
    for step, batch in batches:
        events = [line for line in (*batch, *health.find_alarms(batch)) if isinstance(line, TrainingEvent)]
        alarms += [(step, str(dict(event.values).get("rule", event.kind)), event.words) for event in events]
    return batches, alarms


def lead(folder: Path, kind: Kind, seed: int) -> Row:
    """Returns how many steps before the first value that is not finite the first alarm came.

    None if all values are finite, 0 without an earlier alarm. Alarms before the onset do not count.
    """
    onset = kind.begins(seed)
    batches, alarms = run(folder, kind, seed, onset + LEAD_STEPS)
    ended = [
        line.step
        for _, batch in batches
        for line in batch
        if isinstance(line, StepRow) and not (math.isfinite(line.loss) and math.isfinite(line.gradient_norm))
    ]
    first = next(((step, rule) for step, rule, _ in alarms if step >= onset and rule not in NOT_FINITE), None)
    row = {"lead_of": kind.title, "seed": seed, "lead": None, "rule": first and first[1], "after": None}
    if not ended:
        return row
    ahead = max(0, ended[0] - first[0]) if first else 0
    return row | {"lead": ahead, "rule": first[1] if first and ahead else None, "after": ended[0] - onset}


def ill(folder: Path, kind: Kind, seed: int) -> Row:
    """Returns the alarms within WAIT steps after the onset, and those before it."""
    onset = kind.begins(seed)
    try:
        (_, alarms), ended = run(folder, kind, seed, onset + WAIT + 1), ""
    except RuntimeError as error:  # the watch ended the training, so nothing is found
        alarms, ended = [], str(error)
    early = [rule for step, rule, _ in alarms if step < onset]
    late_alarms = [(step - onset, rule, words) for step, rule, words in alarms if step >= onset]
    first = [alarm for alarm in late_alarms if alarm[0] == late_alarms[0][0]]
    right = any(rule in kind.rules.split() for _, rule, _ in first)
    return {
        "kind": kind.title,
        "seed": seed,
        "found": bool(late_alarms),
        "right": right,
        "delay": late_alarms[0][0] if late_alarms else None,
        "rules": [rule for _, rule, _ in late_alarms],
        "words": [words for *_, words in first],
        "early": early,
        "ended": ended,
    }


def well(folder: Path, kind: Kind, seed: int) -> Row:
    steps = NANO_STEPS if kind.style == "nano" else WELL_STEPS // 2 if seed in WELL_SEEDS["tune"] else WELL_STEPS
    _, alarms = run(folder, kind, seed, steps)
    return {"style": kind.style, "seed": seed, "steps": steps, "alarms": list(map(list, alarms))}


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
        found_count, right = (sum(row[name] for row in ills) for name in ("found", "right"))
        delays = [row["delay"] for row in ills if row["found"]]
        kinds = len({row["kind"] for row in ills})
        say(
            f"{kinds} kinds, {len(ills)} trainings: {found_count} found ({found_count / len(ills):.0%}), {right} with "
            f"the right diagnosis first ({right / len(ills):.0%}), "
            f"median delay {statistics.median(delays or [math.nan]):g} "
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
        __doc__,
        folder=(Path, "where rows are kept"),
        seeds=("judge", which),
        only=("", "names with this"),
        kinds=("ill well", "which of them"),
        wells=("", "seeds of healthy styles, like 21,22, in place of those that go with --seeds"),
        families=(False, "the illnesses of suites/illness_families.py: their half that these seeds go with"),
        kept=(False, "judge what is kept, and train nothing"),
        report=("", "folder that gets all rows"),
    )
    torch.set_num_threads(1)
    seeds, leads = SEEDS[arguments.seeds], arguments.folder / "lead"
    well_seeds = tuple(map(int, arguments.wells.split(","))) if arguments.wells else WELL_SEEDS[arguments.seeds]
    leads.mkdir(parents=True, exist_ok=True)
    kinds, healthy = KINDS, HEALTHY
    if arguments.families:
        kinds = tuple(illness_families.split_kinds(illness_families.KINDS)[arguments.seeds])
        healthy = illness_families.HEALTHY
    trainings = {
        "ill": (ill, arguments.folder, [(kind, seed) for kind in kinds for seed in seeds]),
        "lead": (lead, leads, [(kind, seed) for kind in LEADS for seed in seeds]),
        "well": (well, arguments.folder, [(kind, seed) for seed in well_seeds for kind in healthy]),
    }
    rows: list[Row] = []
    for name in (name for name in trainings if name in arguments.kinds):
        judge, folder, planned = trainings[name]
        for kind, seed in planned:
            there = not arguments.kept or path_of(folder, kind, seed).exists()
            if there and arguments.only in kind.title:
                rows.append(judge(folder, kind, seed))
                say(json.dumps(rows[-1]))
    summary(rows)
    if arguments.report:
        Path(arguments.report).mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in ({**conditions(), "seeds": arguments.seeds}, *rows))
        (Path(arguments.report) / "rows.jsonl").write_text(text)


if __name__ == "__main__":
    main()
