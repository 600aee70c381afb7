"""Tests whether alarms find ordinary mistakes in training loops, and leave healthy loops alone, without a reference
run.

`python -m suites.illness_trial --folder DIR` runs every style of loop under `fp8bench.watch`, and plants an illness
in one from its onset on. Lines are stored in the folder, so that no training is repeated, and the present rules judge
them. Thresholds may be tuned on `--seeds tune`; figures of `--seeds judge` are reported.

`--kinds lead` are illnesses that end in a loss or norm that is not finite, for which the figure is how many steps
earlier the first alarm came. A delay is counted until the step in which the alarm is shown. A diagnosis is right if
one of the first alarms comes from a rule that the illness names.
"""

import gzip
import json
import math
import pickle
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8bench
from fp8bench.features.train.health.health import TrainingHealth
from fp8bench.features.train.values import Arm, ArmRole, StepRow, StreamLine, TrainingEvent
from suites import illness_families as families
from suites.loop_styles import STYLES, WELL_STEPS, Batch, Illness, Loop, healthy_loops, in_styles, make_generator
from suites.trials import Row, conditions, options, say

SEEDS = {"tune": range(2), "judge": range(10, 12)}
# Further seeds of healthy styles give 100,000 steps. Seeds 10 and 12 are left out, because a rule was fixed with
# them.
WELL_SEEDS = {"tune": (0,), "judge": (11, 13, 14)}
NANO_STEPS, WAIT = 200, 100
# Rules that report a value that is not finite after it has occurred.
NOT_FINITE = ("not-finite", "tensor-not-finite")


def upper_bound(events: int, trials: int, level: float = 0.95) -> float:
    """Returns Clopper and Pearson's upper bound of a rate.

    At this rate, at most `events` of `trials` occur with a probability of 1 - `level`.
    """
    low, high = 0.0, 1.0
    for _ in range(100):
        rate = (low + high) / 2
        shares = (
            math.exp(math.log(math.comb(trials, count)) + count * math.log(rate) + (trials - count) * math.log1p(-rate))
            for count in range(events + 1)
        )
        low, high = (rate, high) if math.fsum(shares) > 1 - level else (low, rate)
    return high


def repeat_first_batch(loop: Loop) -> None:
    first = loop.batch(0)
    loop.batch = lambda number: first


def optimize_copies(loop: Loop) -> None:
    """Gives the optimizer copies of the weights, so that the model's weights do not change."""
    for group in loop.optimizer.param_groups:
        group["params"] = [nn.Parameter(weight.detach().clone()) for weight in group["params"]]


def undo_updates(loop: Loop) -> None:
    """Undoes every update, as if updates were too small for the dtype of the weights."""
    weights = [weight.detach() for weight in loop.model.parameters()]
    torch._foreach_copy_(weights, loop.notes.setdefault("kept", [weight.clone() for weight in weights]))


def kill_units(loop: Loop) -> None:
    loop.layer().bias.detach().fill_(-40)
    for module in loop.model.modules():
        if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
            module.bias.detach().fill_(-40)


def repeat_quarter(x: Tensor, y: Tensor) -> Batch:
    """Returns a quarter of the batch, four times."""
    count = max(1, len(x) // 4)
    return torch.cat([x[:count]] * 4), torch.cat([y[:count]] * 4)


def shift(x: Tensor, y: Tensor) -> Batch:
    """Shifts the inputs by one standard deviation."""
    return x + x.std(), y


def leave_scale_in(loop: Loop, factor: float) -> None:
    """Multiplies gradients by the loss scale, as if they were not divided by it."""
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]


def leak_labels(loop: Loop) -> None:
    """Adds the label to the inputs, so that the model can read the answer."""
    inner = loop.criterion
    loop.criterion = lambda x, y: inner(x + 12 * F.one_hot(y, x.shape[-1]), y)


def forget_moments(loop: Loop) -> None:
    """Clears the optimizer's moments, as after loading a checkpoint that has only weights."""
    loop.optimizer.load_state_dict({**loop.optimizer.state_dict(), "state": {}})


def falsify_labels(loop: Loop) -> None:
    def change(x: Tensor, y: Tensor) -> Batch:
        return x, (y + 1 + torch.randint(int(y.max()), y.shape, generator=make_generator(1, loop.step))) % 10

    loop.change_batches(change)


def freeze_head(loop: Loop) -> None:
    for parameter in list(loop.model.parameters())[-4:]:
        parameter.requires_grad_(False)
        parameter.grad = None


def redraw_recurrent_weights(loop: Loop) -> None:
    loop.layer(nn.LSTM).weight_hh_l0.detach().normal_(0, 1)


def set_infinite_weights(loop: Loop) -> None:
    loop.layer(nn.Linear, -1).weight.detach()[0].fill_(math.inf)


ROSE, FIXED, SAME, RATE = "loss-back-up", "no-update", "same-inputs", "a rate too high from the start"
ADAM, SGD, CNN, LSTM = "MLP, AdamW", "MLP, SGD with momentum", "CNN with batch norm", "LSTM, clipped"
ADAPTERS, AUTOCAST, BF16, LSTM_SGD = "adapters of low rank", "MLP, autocast", "MLP in bf16", "LSTM, SGD"
ILLNESSES = tuple(chain(
    in_styles("30 times the rate", (SGD,), ROSE, Loop.change_rate, 30),
    in_styles("30 times the rate", (LSTM, "nano"), f"{ROSE} update-norm-burst", Loop.change_rate, 30),
    in_styles(RATE, (SGD,), ROSE, Loop.change_rate, 60, onset=0),
    in_styles(RATE, ("nano",), ROSE, Loop.change_rate, 100, onset=0),
    in_styles("updates uphill", (SGD,), ROSE, Loop.change_rate, -1),
    in_styles("a schedule that has run out", (CNN,), FIXED, Loop.change_rate, 0),
    in_styles("a rate of 0 from the start", (LSTM,), FIXED, Loop.change_rate, 0, onset=0),
    in_styles("an optimizer of other weights", (ADAM,), f"{FIXED} unseen", optimize_copies),
    in_styles("updates taken back", (AUTOCAST, "nano"), FIXED, undo_updates, each=True),
    in_styles("a loader that stands still", (CNN, "nano"), SAME, repeat_first_batch),
    in_styles("a loader that stands still from the start", (LSTM,), SAME, repeat_first_batch, onset=0),
    in_styles("biases that kill every unit", (ADAM,), "dead-units", kill_units),
    in_styles("biases that kill every unit, from the start", (CNN,), "dead-units", kill_units, onset=0),
    in_styles("inputs 255 times as large", (ADAM, CNN), "amax-jump", families.scale_inputs, 255),
    in_styles("a quarter of each batch four times", (ADAM, CNN), "duplicate-inputs", Loop.change_batches,
              repeat_quarter),
    in_styles("inputs one deviation higher", (ADAM, CNN), "data-drift", Loop.change_batches, shift),
    in_styles("inputs of zeros", (AUTOCAST,), f"amax-jump dead-units {SAME}", families.scale_inputs, 0),
    in_styles("a layer's weights 64 times as large", (AUTOCAST, BF16), "amax-jump", families.grow, 64),
    in_styles("recurrent weights drawn anew, 8 times as large", (LSTM,), f"amax-jump {ROSE}",
              redraw_recurrent_weights),
    in_styles("a table 64 times as large", ("sparse tables, two optimizers",), "amax-jump",
              families.grow, 64, nn.EmbeddingBag),
    in_styles("gains that grow 15% a step", (ADAM,), "norm-gain", families.grow, 1.15, nn.LayerNorm, each=True),
    in_styles("a head 200 times as large", (LSTM_SGD,), "large-logits amax-jump", families.grow, 200, nn.Linear, -1),
    in_styles("a head that grows 8% a step", (ADAM,), "large-logits", families.grow, 1.08, nn.Linear, -1, each=True),
    in_styles("zero_grad forgotten", (ADAM,), "gradients-left", setattr, "zero", None),
    in_styles("zero_grad forgotten from the start", (CNN,), "gradients-left", setattr, "zero", None, onset=0),
    in_styles("zero_grad forgotten", (LSTM,), "gradients-left", setattr, "zero", None),
    in_styles("a loss scale left in", (SGD,), "gradient-scale gradient-norm-spike", leave_scale_in, 2.0**10),
    in_styles("a loss scale left in", (ADAPTERS,), "gradient-scale", setattr, "times", 2.0**4),
    in_styles("micro-batches that are not divided", ("four micro-batches",), "gradient-scale", setattr, "times", 4.0),
    in_styles("a loss scale left in from the start", (LSTM_SGD,), "loss-above-guessing", setattr, "times", 2.0**6,
              onset=0),
    in_styles("gradients a 64th", ("nano",), "gradient-scale", leave_scale_in, 2.0**-6),
    in_styles("answers among the inputs", (ADAM, CNN), "loss-leaked", leak_labels),
    in_styles("moments gone on resume", (ADAM, ADAPTERS), "moments-gone", forget_moments),
    in_styles("a head that is frozen by mistake", ("two optimizers",), "layer-stands-still", freeze_head),
    in_styles("labels that are always wrong", (ADAM, "CNN, two micro-batches"), ROSE, falsify_labels),
    in_styles("a model left in eval mode", ("MLP, dropout",), "unseen", families.leave_in_eval, nn.Module),
    in_styles("a weight that is infinite", (LSTM_SGD,), "not-finite tensor-not-finite", set_infinite_weights),
))  # fmt: skip
# Illnesses that end, slowly or at once, in values that are not finite. An alarm of any rule counts.
LEADS = tuple(chain(
    in_styles("a rate that grows 10% a step", (CNN, ADAM, "nano"), "", Loop.change_rate, 1.1, each=True),
    in_styles("updates uphill", (SGD,), "", Loop.change_rate, -1),
    in_styles("a loss scale left in", (SGD,), "", leave_scale_in, 2.0**10),
    in_styles("a layer's weights that grow 30% a step", (SGD, BF16, ADAM), "", families.grow, 1.3, each=True),
    in_styles("gains that grow 30% a step", (ADAM,), "", families.grow, 1.3, nn.LayerNorm, each=True),
    in_styles("a head that grows 30% a step", (ADAM,), "", families.grow, 1.3, nn.Linear, -1, each=True),
))  # fmt: skip
ALL_STYLES = STYLES | families.STYLES | families.HEALTHY_STYLES
# A training that is finite for this many steps does not count.
LEAD_STEPS = 400


# The lines of a training that were reported together, with the step in which they were.
Reports = list[tuple[int, tuple[StreamLine, ...]]]


def train(illness: Illness, seed: int, steps: int) -> Reports:
    """Returns the lines that watching a training reports, by step."""
    torch.manual_seed(seed)
    loop, reports, onset = ALL_STYLES[illness.style](seed), Reports(), illness.find_onset(seed)

    def store(lines: Sequence[StreamLine]) -> None:
        reports.append((loop.step, tuple(lines)))

    with fp8bench.watch(loop.model, loop.optimizer, told=store, scaler=loop.scaler, health=False):
        for step in range(steps):
            if step == onset or (illness.each and step > onset):
                with torch.no_grad():
                    illness.plant(loop, *illness.arguments)
            loop.advance()
    return reports


def run(folder: Path, illness: Illness, seed: int, steps: int) -> tuple[Reports, list[tuple[int, str, str]]]:
    """Returns the lines of a training, which are stored, and the alarms by the present rules: step, rule and
    sentence.
    """
    name = re.sub("[^a-z0-9]+", "-", f"{illness.words} {illness.style} {seed}".lower())
    path = folder / f"{name}.pickle.gz"
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_bytes(gzip.compress(pickle.dumps(train(illness, seed, steps)), 4))
        part.rename(path)
    health = TrainingHealth((Arm("own", "fp32", ArmRole.REFERENCE),))
    reports: Reports = pickle.loads(gzip.decompress(path.read_bytes()))
    alarms = []
    for step, lines in reports:
        events = [line for line in (*lines, *health.find_alarms(lines)) if isinstance(line, TrainingEvent)]
        alarms += [(step, str(dict(event.values).get("rule", event.kind)), event.words) for event in events]
    return reports, alarms


def judge_lead(folder: Path, illness: Illness, seed: int) -> Row:
    """Returns how many steps before the first value that is not finite the first alarm came.

    None if all values are finite, 0 without an earlier alarm. Alarms before the onset do not count.
    """
    onset = illness.find_onset(seed)
    reports, alarms = run(folder, illness, seed, onset + LEAD_STEPS)
    rows = [line for _, lines in reports for line in lines if isinstance(line, StepRow)]
    ends = [row.step for row in rows if not (math.isfinite(row.loss) and math.isfinite(row.gradient_norm))]
    first = next(((step, rule) for step, rule, _ in alarms if step >= onset and rule not in NOT_FINITE), None)
    row = {"lead_of": illness.title, "seed": seed, "lead": None, "rule": first and first[1], "after": None}
    if not ends:
        return row
    lead = max(0, ends[0] - first[0]) if first else 0
    return row | {"lead": lead, "rule": first[1] if first and lead else None, "after": ends[0] - onset}


def judge_illness(folder: Path, illness: Illness, seed: int) -> Row:
    """Returns the alarms within WAIT steps after the onset, and those before it."""
    onset = illness.find_onset(seed)
    try:
        (_, alarms), error = run(folder, illness, seed, onset + WAIT + 1), ""
    except RuntimeError as failure:  # the watch ended the training, so nothing is found
        alarms, error = [], str(failure)
    late_alarms = [(step - onset, rule, words) for step, rule, words in alarms if step >= onset]
    delay = late_alarms[0][0] if late_alarms else None
    first = [(rule, words) for step, rule, words in late_alarms if step == delay]
    return {
        "kind": illness.title,
        "seed": seed,
        "found": bool(late_alarms),
        "right": any(rule in illness.rules.split() for rule, _ in first),
        "delay": delay,
        "rules": [rule for _, rule, _ in late_alarms],
        "words": [words for _, words in first],
        "early": [rule for step, rule, _ in alarms if step < onset],
        "ended": error,
    }


def judge_healthy(folder: Path, healthy: Illness, seed: int) -> Row:
    steps = WELL_STEPS // 2 if seed in WELL_SEEDS["tune"] else WELL_STEPS
    if healthy.style == "nano":
        steps = NANO_STEPS
    _, alarms = run(folder, healthy, seed, steps)
    return {"style": healthy.style, "seed": seed, "steps": steps, "alarms": list(map(list, alarms))}


def summarize_leads(rows: Sequence[Row]) -> str:
    leads = [row["lead"] for row in rows]
    early = [row for row in rows if row["lead"]]
    delays = [row["after"] - row["lead"] for row in early]
    return (
        f"{len(rows)} trainings came to what is not finite: an alarm ahead of {len(early)}, by "
        f"{statistics.median(leads):g} steps in the middle, {min(leads)} at least, {max(leads)} at most, and "
        f"{statistics.median(delays):g} after the onset in the middle; rules "
        f"{dict(Counter(row['rule'] for row in early))}"
    )


def summarize_illnesses(rows: Sequence[Row]) -> str:
    found_count, right_count = (sum(row[name] for row in rows) for name in ("found", "right"))
    delays = [row["delay"] for row in rows if row["found"]]
    kinds = len({row["kind"] for row in rows})
    return (
        f"{kinds} kinds, {len(rows)} trainings: {found_count} found ({found_count / len(rows):.0%}), {right_count} "
        f"with the right diagnosis first ({right_count / len(rows):.0%}), median delay "
        f"{statistics.median(delays or [math.nan]):g} steps, {sum(bool(row['early']) for row in rows)} with an alarm "
        "before"
    )


def summarize_healthy(rows: Sequence[Row]) -> str:
    steps = sum(row["steps"] for row in rows)
    alarms = Counter(rule for row in rows for _, rule, _ in row["alarms"])
    most = upper_bound(alarms.total(), steps) if alarms.total() < 100 else math.nan
    styles = len({row["style"] for row in rows})
    return (
        f"{styles} healthy styles, {steps:,} steps: {alarms.total()} false alarms {dict(alarms)}, at most "
        f"{2e4 * most:.2f} in 20,000 steps (95%)"
    )


def main() -> None:
    arguments = options(
        __doc__,
        folder=(Path, "where the lines of trainings are stored"),
        seeds=("judge", "tune: thresholds may be set by them; judge: those that are reported"),
        only=("", "only illnesses and styles with this text in their title"),
        kinds=("ill well", "trials to run: ill, lead and well"),
        wells=("", "seeds of healthy styles, like 21,22, instead of those of --seeds"),
        families=(False, "the illnesses of suites/illness_families.py: the half that belongs to --seeds"),
        report=(Path, "folder that gets all rows"),
    )
    torch.set_num_threads(1)
    seeds, leads = SEEDS[arguments.seeds], arguments.folder / "lead"
    well_seeds = tuple(map(int, arguments.wells.split(","))) if arguments.wells else WELL_SEEDS[arguments.seeds]
    leads.mkdir(parents=True, exist_ok=True)
    illnesses, healthy = ILLNESSES, healthy_loops(STYLES)
    if arguments.families:
        illnesses = tuple(families.split_in_halves()[arguments.seeds])
        healthy = families.HEALTHY
    trials = {
        "ill": (judge_illness, arguments.folder, product(illnesses, seeds), summarize_illnesses),
        "lead": (judge_lead, leads, product(LEADS, seeds), summarize_leads),
        "well": (judge_healthy, arguments.folder, product(healthy, well_seeds), summarize_healthy),
    }
    rows: list[Row] = []
    summaries = []
    for name in (name for name in trials if name in arguments.kinds):
        judge, folder, planned, summarize = trials[name]
        own_rows = []
        for illness, seed in planned:
            if arguments.only in illness.title:
                own_rows.append(judge(folder, illness, seed))
                say(json.dumps(own_rows[-1]))
        rows += own_rows
        if judged_rows := [row for row in own_rows if row.get("lead", 0) is not None]:
            summaries.append(summarize(judged_rows))
    say("\n".join(summaries))
    if arguments.report:
        arguments.report.mkdir(parents=True, exist_ok=True)
        lines = ({**conditions(), "seeds": arguments.seeds}, *rows)
        (arguments.report / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
