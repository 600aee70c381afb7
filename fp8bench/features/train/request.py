"""The options of a training, declared field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.files import is_no_folder
from fp8bench.model.request import (
    KNOWN_SCALES,
    MEMORY_SIZE,
    REQUEST_RULES,
    Request,
    Rule,
    check_fields,
    number,
    option,
    options_of,
    whole_number,
)
from fp8bench.nn.sizes import SIZES
from fp8bench.units import number_of

ARCHITECTURES = ("gpt", "mlp", "cnn", "moe")
# Kinds of parameters that may have their own learning rates.
PARAMETER_KINDS = ("embedding", "norm", "layer", "head")
# Groups of gradients that may be clipped by the norm of each.
CLIP_GROUPS = ("kind", "block", "tensor")
LOSS_SCALES = ("auto", "dynamic")
LARGEST_LOSS_SCALE = float(1 << 32)
MOST_STEPS = 10_000_000
# Classes of torch.optim that --optimizer names, and the keys that may be set, with our defaults.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "adafactor": {"beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.1},
}
# Why other classes of torch.optim are not supported.
NOT_STEPPED = {
    "muon": "it updates matrices only, and a model also has norms and biases",
    "sparseadam": "it takes sparse gradients, and these are dense",
    "lbfgs": "it computes the loss several times in a step, and a step here computes it once",
}
_WARMUP: Mapping[str, Any] = {"warmup": 0.1}
_WARMUP_AND_FLOOR: Mapping[str, Any] = {"warmup": 0.1, "floor": 0.1}
# Schedules of torch.optim.lr_scheduler (wsd and inverse-sqrt by its LambdaLR). Both keys are shares: of the steps in
# which the rate rises, and of the rate at the end.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "cosine": _WARMUP_AND_FLOOR,
    "linear": _WARMUP_AND_FLOOR,
    "constant": _WARMUP,
    "wsd": _WARMUP_AND_FLOOR,
    "one-cycle": _WARMUP_AND_FLOOR,
    "inverse-sqrt": _WARMUP_AND_FLOOR,
    "plateau": _WARMUP_AND_FLOOR,
}
# The least and the largest value of a key.
_BOUNDS = {
    "betas": (0, 0.999999),
    "momentum": (0, 0.999999),
    "eps": (0, 1),
    "weight_decay": (0, 10),
    "beta2_decay": (-10, 0),
    "d": (1, 1e6),
    "warmup": (0, 1),
    "floor": (0, 1),
}
# How several ranks train together.
PARALLEL = ("ddp", "zero", "fsdp", "tp", "sp")
# The formats they send, and the ways that have this choice.
WIRES, WIRED = ("fp32", "bf16", "fp8"), ("zero", "sp")
# The ways that divide blocks.
CUT = ("tp", "sp")
# Tasks that a trained model may be scored on (tasks.py).
TASKS = ("cloze", "copy", "retrieval")
# Arms that show the effect of chance on the reference.
BANDS = ("repeat", "one-ulp")


def _is_loss_scale(value: object) -> bool:
    if value in LOSS_SCALES:
        return True
    return isinstance(value, str) and 1.0 <= number_of(value) <= LARGEST_LOSS_SCALE


def _are_rates(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(name, str) and name and isinstance(factor, int | float) and 0 <= factor < math.inf
        for name, factor in value
    )


def change_of(then: str) -> tuple[str, float]:
    """Returns the dtype in `--then`, and the share of the steps after which it begins; a share of 1 for none."""
    word, _, share = then.rpartition("@")
    return word, number_of(share.removesuffix("%")) / 100 if then else 1.0


def _is_change(value: object) -> bool:
    if value == "":
        return True
    return isinstance(value, str) and value.endswith("%") and bool(change_of(value)[0]) and 0 < change_of(value)[1] < 1


def clip_of(clip: float | str) -> tuple[float, str]:
    """Returns the largest norm in `--clip`, and the kind of group that it applies to; '' for all gradients together."""
    most, _, group = str(clip).partition("/")
    return number_of(most), group


def _is_clip(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    most, group = clip_of(value)
    return 0 <= most < math.inf and ("/" in str(value)) == (group in CLIP_GROUPS)


def parse_optimizer(word: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and all keys in 'NAME[:key=value...]', or the class and the given keys in 'FILE.py:CLASS[:...]'.
    Raises UsageError for unlisted ones."""
    name, _, tail = word.partition(":")
    target, _, keys = tail.partition(":")
    # Keys hold an equals sign; the class of a user's file does not.
    if name not in OPTIMIZERS and target and "=" not in target:
        return f"{name}:{target}", {key: number_of(value) for key, value in _pairs(keys)}
    listed = f"optimizer must be one of {', '.join(OPTIMIZERS)}, or FILE.py:CLASS for your torch optimizer"
    if name not in OPTIMIZERS:
        reason = NOT_STEPPED.get(name.lower())
        raise UsageError(f"{listed}, got {name!r:.80}{f': {reason}' if reason else ''}.")
    return name, _keys_of("optimizer", name, tail, OPTIMIZERS[name])


def parse_schedule(word: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and all keys in 'NAME[:key=value...]'. Raises UsageError for unlisted ones."""
    name, _, keys = word.partition(":")
    if name not in SCHEDULES:
        raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r:.80}.")
    return name, _keys_of("schedule", name, keys, SCHEDULES[name])


def _pairs(keys: str) -> list[tuple[str, str]]:
    pairs = [pair.partition("=") for pair in keys.split(":") if pair]
    return [(key, value) for key, _, value in pairs]


def _keys_of(option: str, name: str, keys: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults with the given keys; raises UsageError for others and for values out of bounds."""
    values = dict(defaults)
    for key, text in _pairs(keys):
        if key not in defaults:
            raise UsageError(f"{option} must be {name} with only the keys {', '.join(defaults)}, got {key!r:.80}.")
        default = defaults[key] if isinstance(defaults[key], tuple) else (defaults[key],)
        numbers = tuple(number_of(part) for part in text.split(","))
        low, high = _BOUNDS[key]
        if len(numbers) != len(default) or not all(low <= number <= high for number in numbers):
            expected = "two numbers" if len(default) > 1 else "a number"
            usual = ",".join(map(str, default))
            raise UsageError(
                f"{option} must be {name} with {expected} from {low} to {high:g} as {key}, like {key}={usual}, "
                f"got {text!r:.80}."
            )
        values[key] = numbers if len(default) > 1 else numbers[0]
    return values


def _is_optimizer(value: object) -> bool:
    return isinstance(value, str) and bool(parse_optimizer(value))


def _is_schedule(value: object) -> bool:
    return isinstance(value, str) and bool(parse_schedule(value))


WHAT, LENGTH, LEARNING = "what to train", "how long, and how sure", "how it learns"
_OF_A_RUN = options_of(Request)


def _choice(default: str, names: tuple[str, ...], words: str = "", group: str = LEARNING) -> Any:
    rule = Rule(f"one of {', '.join(filter(None, names))}", lambda value: value in names)
    return option(default, rule, words, group=group, choices=names)


def _count(default: int, most: int, words: str, group: str = LENGTH) -> Any:
    return option(default, whole_number(1, most), words, "N", group)


def _as_in_a_run(default: Any, name: str, words: str = "", group: str = LENGTH) -> Any:
    """Returns a field that runs have as well, with a separate default and, if given, separate help."""
    shared = _OF_A_RUN[name]
    return option(
        default, shared.rule, words or shared.help, shared.metavar, group, called=shared.called, parse=shared.parse
    )


def file_of(start: str) -> Path | None:
    """Returns the file that --start names, also with its digest after '::'; None for a training or its checkpoint."""
    path = Path(start.partition("::")[0])
    return path if start and is_no_folder(path) else None


def refuse_ranks(request: Any) -> None:
    ranks, settings = request.ranks, request.settings
    if ranks is not None and not settings.parallel:
        raise UsageError(f"--ranks {ranks} needs a way to train together. Add --parallel {' or '.join(PARALLEL)}.")
    # A swept option counts as given.
    swept = {f"--{name.replace('_', '-')}" for name, _ in request.sweep}
    of_ranks = {"--parallel": settings.parallel, "--wire": settings.wire != "fp32"}
    for word, is_set in of_ranks.items():
        if ranks is None and (is_set or word in swept):
            raise UsageError(f"{word} only works with several ranks, but there is one. Add --ranks N.")
    if ranks is not None and not request.isolation:
        raise UsageError("--no-isolation is for one process, and --ranks starts several. Leave one of them out.")


@dataclass(frozen=True)
class TrainerSettings:
    """How a model is trained. An arm may replace some of these by name (`Arm.settings`). `make` names the maker of a
    user's model and batches; settings of the built-in models then do not apply."""

    model: str = option(
        "nano",
        Rule("a model's name", lambda value: isinstance(value, str) and bool(value)),
        f"its size: {', '.join(SIZES)}; default {{default}}",
        "NAME",
        WHAT,
    )
    make: str = option("", Rule("module:function, or file.py:function", lambda value: isinstance(value, str)), group="")
    skip: tuple[str, ...] = option(
        (),
        Rule("a list of layers", lambda value: isinstance(value, tuple) and all(map(str, value))),
        "layers of your model that are not converted: kinds (head, linear), or paths with * and ?",
        "A,B",
        WHAT,
    )
    arch: str = _choice("gpt", ARCHITECTURES, "the model's architecture; default {default}", WHAT)
    batch: int = option(
        0,
        whole_number(0, 4096, "a whole number from 1 to 4096, or 0 for the model's own"),
        "sequences in a micro-batch; default the model's own",
        "N",
        WHAT,
    )
    sequence: int = option(
        0,
        whole_number(0, 1 << 16, "a whole number from 1 to 65536, or 0 for the model's own"),
        "tokens in a sequence; default the model's own",
        "N",
        WHAT,
    )
    micro_batches: int = _count(1, 1024, "micro-batches that a step accumulates; default {default}", WHAT)
    rate: float = option(
        1e-3,
        number("a number above 0 and up to 10", lambda value: 0 < value <= 10),
        "the largest learning rate; default {default}",
        "NUMBER",
        LEARNING,
    )
    rates: tuple[tuple[str, float], ...] = option(
        (),
        Rule(
            f"kinds of parameters ({', '.join(PARAMETER_KINDS)}) or of layers, or paths, and factors, like "
            "embedding=0.5,attn=2,blocks.0=0.1",
            _are_rates,
        ),
        "factors of the rate: by kind of parameters or layers (attn, mlp), or the front of their path (blocks.0)",
        "NAME=FACTOR,...",
        LEARNING,
        parse="factors",
    )
    optimizer: str = option(
        "adamw",
        Rule(f"one of {', '.join(OPTIMIZERS)}, or FILE.py:CLASS", _is_optimizer),
        "what updates the weights: adamw, sgd, adafactor, or FILE.py:CLASS, your torch optimizer; keys as in "
        "torch: adamw:betas=0.9,0.95, sgd:momentum=0.9; matrices decay by weight_decay, default 0.1; default {default}",
        "NAME[:KEY=VALUE...]",
        LEARNING,
    )
    updates: str = _choice(
        "fp32", ("fp32", "bf16", "fp8"), "format of each update, also of your optimizer; default {default}"
    )
    schedule: str = option(
        "cosine",
        Rule(f"one of {', '.join(SCHEDULES)}", _is_schedule),
        f"how the rate changes: {', '.join(SCHEDULES)}; keys: warmup, the share of the steps in which it rises, and "
        "floor, the share of it at the end, 0.1 each; wsd falls in the last fifth of the steps, plateau halves after "
        "3 validations without a better held-out loss; default {default}",
        "NAME[:KEY=VALUE...]",
        LEARNING,
    )
    clip: float | str = option(
        1.0,
        Rule(f"a number from 0, alone or as NUMBER/GROUP (groups: {', '.join(CLIP_GROUPS)})", _is_clip),
        "norm of all gradients above which they are clipped; 0: never; 1.0/kind, 1.0/block or 1.0/tensor: norm of each "
        "kind (attn, mlp, embedding, norm, head), block or tensor; default {default}",
        "NUMBER[/GROUP]",
        LEARNING,
    )
    start: str = option(
        "",
        Rule("a training, TRAINING:ARM, or a file with a state dict", lambda value: isinstance(value, str)),
        "begin with the weights in the newest checkpoint of a stored training (its reference's, or ARM's), or of a "
        "file with a state dict (.pt, .safetensors), also of your model",
        "TRAINING:ARM|FILE",
        WHAT,
    )
    tasks: tuple[str, ...] = option(
        (),
        Rule(f"some of {', '.join(TASKS)}", lambda value: isinstance(value, tuple) and set(value) <= set(TASKS)),
        f"score arms after the last step on {', '.join(TASKS)}; --data task:copy,retrieval is a text that teaches the "
        "last two",
        "NAME,...",
        WHAT,
    )
    metric: tuple[str, ...] = option(
        (),
        Rule("your functions, like my_pkg:f", lambda value: isinstance(value, tuple) and all(value)),
        "measure arms after the last step by f(model, held_out), which returns a number or several by name; more is "
        "better, unless =lower is added",
        "MODULE:FUNCTION[=lower],...",
        WHAT,
    )
    dropout: float = option(
        0.0,
        number("a share from 0 to below 1", lambda value: 0 <= value < 1),
        "share of values that are dropped, the same ones in all arms",
        "SHARE",
        WHAT,
    )
    loss_scale: str = option(
        "auto",
        Rule("auto, dynamic, or a number from 1 to 2^32", _is_loss_scale),
        "auto (the precision's own), dynamic (from 2^16, halved at an overflow, doubled after 200 steps without), or a "
        "number from 1 to 2^32; default {default}",
        "SCALE",
        LEARNING,
    )
    optimizer_states: str = _choice(
        "fp32", ("fp32", "bf16", "fp8lm"), "format of the optimizer's moments; default {default}"
    )
    master: str = _choice(
        "fp32",
        ("fp32", "fp16-scaled", "fp16-fp8", "bf16-stochastic"),
        "format of the stored weights; fp16-fp8: fp16-scaled, with fp8 copies for the passes; bf16-stochastic: rounded "
        "stochastically; default {default}",
    )
    gradients: str = _choice("fp32", ("fp32", "bf16", "fp8"), "format of stored gradients; default {default}")
    checkpointing: str = _choice(
        "no", ("no", "blocks"), "blocks: keep each block's input alone, and recompute the rest; default {default}", WHAT
    )
    compile: str = _choice(
        "no", ("no", "yes"), "yes: torch.compile, forward and backward as one graph each; default {default}", WHAT
    )
    attention: str = _choice(
        "auto",
        ("auto", "rounded", "prescaled"),
        "rounded: attention's products in the arm's precision as well; prescaled: queries first; default {default}",
        WHAT,
    )
    on_nan: str = _choice(
        "stop", ("stop", "skip", "lower-rate"), "what an arm does after a step that is not finite; default {default}"
    )
    precision_map: tuple[tuple[str, str], ...] = _as_in_a_run(
        (), "precision_map", "layers with another precision, as in suite; the reference has none", group=WHAT
    )
    # Largest magnitudes from `scales_from`, by precision, layer and role.
    scales: tuple[tuple[str, str, str, float], ...] = option((), KNOWN_SCALES, group="")
    refresh_scales: int | None = _as_in_a_run(
        None,
        "refresh_scales",
        "scales from the first step's data, or --scales-from, renewed in every M-th step; the reference has none",
        LEARNING,
    )
    saturation_bound: float | None = _as_in_a_run(None, "saturation_bound", group=LEARNING)
    then: str = option(
        "",
        Rule("a dtype and the share of the steps after which it begins, like bf16@80%", _is_change),
        "finish in another dtype, like bf16@80%%: the last fifth of the steps in bf16; the reference has none",
        "DTYPE@PERCENT",
        WHAT,
    )
    parallel: str = _choice(
        "",
        ("", *PARALLEL),
        "how ranks divide the work: ddp (the batch), zero (also whole weights), fsdp (also rows of weights), tp (parts "
        "of each block), sp (tp, and tokens between blocks)",
        LENGTH,
    )
    wire: str = _choice(
        "fp32",
        WIRES,
        "widest format that is sent: zero's gradients and weights, sp's activations, unless the arm's dtype is "
        "narrower; fp8: codes, with a scale for each tensor; default {default}",
        LENGTH,
    )

    def __post_init__(self) -> None:
        check_fields(self, SETTINGS_RULES)

    @property
    def display_name(self) -> str:
        return self.make or self.model


SETTINGS_RULES: Mapping[str, Rule] = {name: own.rule for name, own in options_of(TrainerSettings).items()}


@dataclass(frozen=True)
class TrainingRequest:
    """The options of `fp8bench train`. `margin` is a share of the reference's loss."""

    dtypes: tuple[str, ...] = _as_in_a_run(("bf16", "fp8"), "dtypes", group="")
    reference: str | None = _as_in_a_run(None, "reference", group=WHAT)
    settings: TrainerSettings = TrainerSettings()
    steps: int = option(300, whole_number(1, MOST_STEPS), group="")
    seeds: int = option(5, whole_number(1, 10_000), group="")
    seed: int = _as_in_a_run(0, "seed", "the first seed; default 0")
    bands: tuple[str, ...] = option(
        BANDS,
        Rule(
            f"none, or some of {', '.join(BANDS)}",
            lambda value: isinstance(value, tuple) and (value == ("none",) or set(value) <= set(BANDS)),
        ),
        "arms that show what chance does to the reference: repeat (nondeterminism), one-ulp (chaos, in the first "
        "seed), or none; default both",
        "NAME,...",
        LENGTH,
    )
    margin: float = option(0.01, number("a share above 0 and below 1", lambda value: 0 < value < 1), group="")
    sweep: tuple[tuple[str, tuple[str, ...]], ...] = option(
        (),
        Rule(
            "settings or options of a dtype with at least one value each, like {'history': ('1', '16')}",
            REQUEST_RULES["axes"].holds,
        ),
        "an arm for each value of a setting, or of an option of the dtypes: history=1,16,1024; several multiply; "
        "model=nano,micro: a training of each, and the trend of the gap",
        "NAME=A,B",
        WHAT,
        parse="axis",
    )
    device: str | None = option(
        None,
        Rule("a device's name", lambda value: isinstance(value, str) and bool(value)),
        "cpu, cuda, cuda:1; default the first GPU, else cpu",
        "NAME",
        LENGTH,
    )
    threads: int = _as_in_a_run(1, "threads")
    data: str | None = _as_in_a_run(
        None, "data", "a text, a token file (.bin) or a saved dataset; default Python's own sources", group=WHAT
    )
    stride: int = _count(10, MOST_STEPS, "steps from one watched step to the next; default {default}")
    evaluate: int = _count(50, MOST_STEPS, "steps between validations; default {default}")
    keep: int = _count(50, MOST_STEPS, "steps between checkpoints; default {default}")
    energy: bool = _as_in_a_run(
        True, "energy", "measure no energy; else it is measured after the last step, where a device has a counter"
    )
    scales_from: str | None = _as_in_a_run(
        None,
        "scales_from",
        "fixed scales from a stored training or run (its id, or last) in place of those of each tensor; the reference "
        "has none",
        group=LEARNING,
    )
    own_batch: int | None = option(
        None,
        MEMORY_SIZE,
        "also find the largest batch of each native arm in SIZE of memory, like 2GiB, and compare arms at them",
        "SIZE",
        LENGTH,
        parse="memory",
    )
    imports: tuple[str, ...] = _as_in_a_run((), "imports", group=WHAT)
    isolation: bool = _as_in_a_run(True, "isolation", "train in this process, without a worker")
    ranks: int | None = _as_in_a_run(None, "ranks", "train every arm in N processes together, each on a separate GPU")

    def __post_init__(self) -> None:
        check_fields(self, TRAINING_RULES)
        if not self.dtypes:
            raise UsageError("no dtype was named. Give --dtypes two or more, like bf16,fp8.")
        refuse_ranks(self)


TRAINING_RULES: Mapping[str, Rule] = {name: own.rule for name, own in options_of(TrainingRequest).items()}
# A quick training has one seed with this many steps.
QUICK_STEPS = 60


def request_with_defaults(
    quick: bool, steps: int | None, seeds: int | None, dtypes: tuple[str, ...], **fields: Any
) -> TrainingRequest:
    usual = TrainingRequest()
    steps = (QUICK_STEPS if quick else usual.steps) if steps is None else steps
    seeds = (1 if quick else usual.seeds) if seeds is None else seeds
    return TrainingRequest(**{**fields, "dtypes": dtypes or usual.dtypes, "steps": steps, "seeds": seeds})
