"""`fp8bench train`: a model trained in several precisions side by side, or a training that is gone on with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, cast

from fp8bench.cli import option_types as types
from fp8bench.cli.grammar import check_alone, shared
from fp8bench.cli.outputs import check_outputs, in_store, print_training, tell, wanted_of
from fp8bench.cli.progress import TERMINAL
from fp8bench.cli.streams import complain
from fp8bench.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REGRESSION, NotKept, UnknownName
from fp8bench.jobs.observer import TrainingObserver
from fp8bench.jobs.train.arms import check_training
from fp8bench.measure.environment import command_line
from fp8bench.measure.interrupts import only_once
from fp8bench.model.request import PERCENT
from fp8bench.model.training import QUICK_STEPS, KeptTraining, TrainerSettings, TrainingEvent, TrainingRequest, asked
from fp8bench.model.training_rules import CHOICES, SETTINGS_RULES, TRAINING_RULES
from fp8bench.nn.sizes import SIZES
from fp8bench.store.trainings import training_named

_BESIDE_RESUME = {"--resume", "--store", "--json", "--csv", "--explain", "--tensorboard", "--wandb", "--fail-on"}
_REQUEST = TrainingRequest()
_MODEL = {
    "arch": ("", "the model's architecture"),
    "model": ("NAME", f"its size: {', '.join(SIZES)}"),
    "batch": ("N", "sequences in a micro-batch; default the model's own"),
    "sequence": ("N", "tokens in a sequence; default the model's own"),
    "micro_batches": ("N", "micro-batches that a step accumulates"),
    "dropout": ("SHARE", "share of values that are dropped, the same in all arms"),
    "checkpointing": ("", "blocks: keep each block's input only, compute it again in backward"),
    "compile": ("", "yes: torch.compile, forward and backward as one graph each"),
    "attention": ("", "rounded: its scores in the arm's precision, too; prescaled: queries are scaled ahead of them"),
}
_RECIPE = {
    "rate": ("NUMBER", "the largest learning rate"),
    "warmup": ("SHARE", "share of the steps in which the rate rises"),
    "scale_growth": ("N", "steps without an overflow after which a dynamic loss scale doubles"),
    "floor": ("SHARE", "share of the rate that is left at the end of the cosine"),
    "weight_decay": ("NUMBER", "of matrices"),
    "clip": ("NUMBER", "norm of all gradients above which they are clipped; 0: never"),
    "loss_scale": ("SCALE", "auto (the precision's own), dynamic, or a number from 1 to 2^32"),
    "optimizer_states": ("", "what AdamW's moments are kept in"),
    "master": ("", "what the weights are kept in"),
    "gradients": ("", "what gradients are kept in"),
    "on_nan": ("", "what is done about a step that is not finite"),
}
_RANKS = {
    "parallel": ("", "how: ddp (parts of a batch), fsdp (these, and rows of all weights), tp (parts of each block)"),
    "amax_group": ("", "whose largest magnitude a tensor's scale is from: each rank's own, or all ranks' (usual)"),
}


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = (
        "Trains the same model on the same batches in several precisions, beside each other, and says of each whether "
        "it still learns as the reference does: a gap of the loss, paired over seeds, with its interval."
    )
    parser.epilog = (
        "Exit codes: 0 fine, 1 what --fail-on names, 2 wrong usage, 3 an arm could not be trained to its end, 130 "
        "interrupted. Without --fail-on a verdict is no exit code."
    )
    group = parser.add_argument_group("what to train")
    shared(group, "--dtypes", help=f"precisions; default {','.join(_REQUEST.dtypes)}")
    words = "what the others are compared with; default the highest precision"
    group.add_argument("--reference", metavar="DTYPE", help=words)
    _add_settings(group, _MODEL)
    words = "layers that take another precision, as in suite; the reference stays pure"
    group.add_argument("--precision-map", type=types.precision_map, default=(), metavar="LAYER=DTYPE,...", help=words)
    words = "arms for each value of a setting, or of an option of the dtypes: history=1,16,1024; several multiply"
    group.add_argument("--sweep", action="append", default=[], type=types.axis, metavar="NAME=A,B", help=words)
    shared(group, "--data", help="a text, a token file (.bin) or a saved dataset; default Python's own sources")
    shared(group, "--import")
    _add_text(group)
    _add_how(parser.add_argument_group("how long, and how sure"))
    recipe = parser.add_argument_group("how it learns")
    _add_settings(recipe, _RECIPE)
    words = "factors of the rate by kind of parameters"
    kinds = types.factors(SETTINGS_RULES["rates"])
    recipe.add_argument("--rates", type=kinds, default=(), metavar="KIND=FACTOR,...", help=words)
    _add_where(parser.add_argument_group("where"))


def _add_text(group: argparse._ArgumentGroup) -> None:
    words = "text of another kind to validate on, too"
    group.add_argument("--other-data", metavar="FILE", help=words)
    words = f"bytes, bpe, or bpe:N by N merges that are learnt from the text; default {_REQUEST.tokens}"
    rule = types.text(TRAINING_RULES["tokens"])
    group.add_argument("--tokens", type=rule, default=_REQUEST.tokens, metavar="KIND", help=words)


def _add_settings(group: argparse._ArgumentGroup, options: dict[str, tuple[str, str]]) -> None:
    """An option for each of these settings, which takes what its rule says."""
    for name, (metavar, words) in options.items():
        default, rule = getattr(TrainerSettings(), name), SETTINGS_RULES[name]
        known: dict[str, Any] = {"default": default}
        if name in CHOICES:
            known |= {"choices": tuple(filter(None, CHOICES[name]))}
        else:
            parse = {int: types.whole, float: types.number, str: types.text}[type(default)]
            known |= {"type": parse(rule), "metavar": metavar}
        own = "" if words.endswith("own") or not default else f"; default {default}"
        group.add_argument(f"--{name.replace('_', '-')}", help=f"{words}{own}", **known)


def _add_how(group: argparse._ArgumentGroup) -> None:
    def whole(name: str, words: str, default: int | None = None) -> None:
        rule = types.whole(TRAINING_RULES[name])
        group.add_argument(f"--{name}", type=rule, default=default, metavar="N", help=words)

    whole("steps", f"optimizer steps of every arm; default {_REQUEST.steps}")
    whole("seeds", f"how often all of it is done, with other weights and batches; default {_REQUEST.seeds}")
    words = "the loss gap, as a share of the reference's loss, that does not matter; default 1"
    margin = types.number(PERCENT)
    group.add_argument("--margin", type=margin, default=100 * _REQUEST.margin, metavar="PERCENT", help=words)
    shared(group, "--quick", help=f"one seed of {QUICK_STEPS} steps, to see that it runs: too little for a verdict")
    shared(group, "--seed", help="the first seed; default 0")
    whole("stride", f"every so many steps are watched closely; default {_REQUEST.stride}", _REQUEST.stride)
    words = f"steps between two looks at the held-out text; default {_REQUEST.evaluate}"
    whole("evaluate", words, _REQUEST.evaluate)
    whole("keep", f"steps between two checkpoints; default {_REQUEST.keep}", _REQUEST.keep)
    words = "at an arm's first alarm, try what may help from the checkpoint before it, side by side, and say what did"
    group.add_argument("--try-fix", action="store_true", help=words)
    words = "measure no energy; else it is where a device can tell it, in windows of steps after the last one"
    group.add_argument("--no-energy", dest="energy", action="store_false", help=words)
    words = "after the last step, also look for the largest batch of each arm, by running it and the next one"
    group.add_argument("--max-batch", action="store_true", help=words)
    words = (
        "what all arms have to fit into, like 2GiB, else they are trained in pairs with the reference, and each with "
        "--max-batch; default the device's own"
    )
    group.add_argument("--memory-limit", type=types.size, metavar="SIZE", help=words)
    group.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1; default the first GPU, else cpu")
    shared(group, "--threads")
    whole("ranks", "train every arm in so many processes together, each on a device of its own if there are GPUs")
    _add_settings(group, _RANKS)
    group.add_argument("--dry-run", action="store_true", help="print the arms and what they come to, train nothing")
    shared(group, "--no-isolation", help="train in this process, without a worker")


def _add_where(group: argparse._ArgumentGroup) -> None:
    shared(group, "--store", help="where trainings are kept, below trainings/; default .fp8bench")
    words = "go on with a training that was cut off: an id, its folder, or last"
    group.add_argument("--resume", metavar="TRAINING", help=words)
    words = "end with 1 where an arm is so: worse, diverged, did-not-learn, inconclusive, or has an alarm"
    group.add_argument("--fail-on", type=types.words, default=(), metavar="WHAT,...", help=words)
    shared(group, "--explain")
    shared(group, "--json", help="print the training as JSON, every line of it and the verdicts, instead of the table")
    shared(group, "--csv", help="also write its lines there, one figure a row; '-' prints them instead of the table")
    shared(group, "--tensorboard", help="also write its curves there as TensorBoard's scalars, by step, arm and seed")
    shared(group, "--wandb", help="also send its curves to Weights & Biases, a run an arm and seed; as in suite")


def request_from(arguments: argparse.Namespace) -> TrainingRequest:
    """What the arguments ask for."""
    given = vars(arguments)
    settings = {one.name: given[one.name] for one in fields(TrainerSettings) if one.name in given}
    own = {one.name: given[one.name] for one in fields(TrainingRequest) if one.name in given}
    sweep: dict[str, tuple[str, ...]] = {}
    for name, values in arguments.sweep:
        sweep[name] = (*sweep.get(name, ()), *values)
    return asked(arguments.quick, **{
        **own,
        "settings": TrainerSettings(**settings),
        "margin": arguments.margin / 100,
        "sweep": tuple(sweep.items()),
        "imports": tuple(arguments.imports),
    })  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Train, or go on with a training; tell. An interrupt ends it early: what was kept is told all the same."""
    from fp8bench.jobs.train.run import planned, resume, train

    check_outputs(arguments)
    _check_reasons(arguments.fail_on)
    if arguments.resume is not None:
        check_alone(arguments.words, _BESIDE_RESUME)
        path = training_named(arguments.resume, arguments.store)
        with _training(arguments) as observer:
            resumed, kept = resume(path, arguments.store, observer)
        if not resumed:
            complain(f"training {kept.training.id} is finished; nothing was missing")
        return _ended(kept, arguments)
    request = request_from(arguments)
    check_training(request)
    if arguments.dry_run:
        from fp8bench.report.terminal.training import expected_time, plan_page

        found = planned(request, arguments.store)
        time = expected_time(found.seconds, found.unknown)
        tell(arguments, partial(plan_page, request, found.arms, found.device, found.reference, time))
        return EXIT_OK
    with _training(arguments) as observer:
        kept = train(request, arguments.store, observer, command_line())
    return _ended(kept, arguments)


@contextmanager
def _training(arguments: argparse.Namespace) -> Iterator[TrainingObserver]:
    """Told on the terminal. Where the store takes no more, what it has is shown, and how to go on."""
    try:
        with only_once(), TERMINAL.training() as observer:
            yield observer
    except NotKept as error:
        kept = cast(KeptTraining, error.run)
        print_training(kept, arguments)
        _tell_how_to_go_on(kept, arguments)
        raise


def _ended(kept: KeptTraining, arguments: argparse.Namespace) -> int:
    from fp8bench.jobs.after_run import training_exported

    if not kept.finished:
        _tell_how_to_go_on(kept, arguments)
    print_training(kept, arguments)
    if not kept.finished or not training_exported(kept, arguments.store, wanted_of(arguments), complain):
        return EXIT_INTERRUPTED
    if any(event.kind == "out" for event in kept.of(TrainingEvent)):
        return EXIT_FAILED
    return _judged(kept, arguments.fail_on)


def _check_reasons(wanted: Sequence[str]) -> None:
    from fp8bench.report.words.learning import FAILURES

    for name in wanted:
        if name not in FAILURES:
            raise UnknownName("reason to fail", name, FAILURES)


def _judged(kept: KeptTraining, wanted: Sequence[str]) -> int:
    """What --fail-on makes of a training, with a sentence for each reason. Of an arm that was not trained it knows
    nothing, and that is no pass."""
    from fp8bench.analysis.learning.verdicts import verdicts_of
    from fp8bench.report.words.learning import failures

    if not wanted:
        return EXIT_OK
    for arm in (missing := [one for one in kept.training.arms if one.skip]):
        complain(f"--fail-on: {arm.name} was not trained: {arm.skip}")
    reasons = list(failures(kept, verdicts_of(kept.training, kept.lines), wanted))
    for reason in reasons:
        complain(f"--fail-on: {reason}")
    if missing:
        return EXIT_FAILED
    return EXIT_REGRESSION if reasons else EXIT_OK


def _tell_how_to_go_on(kept: KeptTraining, arguments: argparse.Namespace) -> None:
    command = f"fp8bench train --resume {kept.training.id}{in_store(arguments.store)}"
    complain(f"cut off; what was trained is kept in {kept.path}.\n  To go on: {command}")
