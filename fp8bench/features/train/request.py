"""The options of a training, declared field by field."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.files import is_not_folder
from fp8bench.model.request import (
    KNOWN_SCALES,
    MEMORY_SIZE_RULE,
    REQUEST_RULES,
    Request,
    Rule,
    check_request_fields,
    list_request_options,
    number,
    option,
    whole_number,
)
from fp8bench.nn.sizes import SIZES
from fp8bench.units import parse_number

ARCHITECTURES = ("gpt", "mlp", "cnn", "moe")
# Kinds of parameters for which users can set separate learning rates.
PARAMETER_KINDS = ("embedding", "norm", "layer", "head")
# The kinds of groups of gradients. Each group is clipped by its joint norm.
GRADIENT_CLIP_GROUPS = ("kind", "block", "tensor")
LOSS_SCALE_KEYWORDS = ("auto", "dynamic")
MAX_LOSS_SCALE = float(1 << 32)
MAX_STEPS = 10_000_000
# Classes of torch.optim that --optimizer accepts, with the keys that may be set and their defaults here.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
    "adafactor": {"beta2_decay": -0.8, "d": 1.0, "weight_decay": 0.1},
}
# Reasons why other classes of torch.optim are not supported.
UNSUPPORTED_OPTIMIZERS = {
    "muon": "it updates matrices only, and a model also has norms and biases",
    "sparseadam": "it takes sparse gradients, and these are dense",
    "lbfgs": "it computes the loss several times in a step, and a step here computes it once",
}
# Schedules of torch.optim.lr_scheduler (wsd and inverse-sqrt by its LambdaLR).
SCHEDULES = ("cosine", "linear", "constant", "wsd", "one-cycle", "inverse-sqrt", "plateau")
# `warmup` is the share of steps in which the learning rate rises. After that the rate does not fall below `floor`, a
# share of the largest rate; the schedule `constant` has none.
_SCHEDULE_KEY_DEFAULTS: Mapping[str, Any] = {"warmup": 0.1, "floor": 0.1}
# The allowed range of each key of --optimizer and --schedule.
_BOUNDS_BY_KEY = {
    "betas": (0, 0.999999),
    "momentum": (0, 0.999999),
    "eps": (0, 1),
    "weight_decay": (0, 10),
    "beta2_decay": (-10, 0),
    "d": (1, 1e6),
    "warmup": (0, 1),
    "floor": (0, 1),
}
# The values of --parallel: how several ranks share a training.
PARALLEL = ("ddp", "zero", "fsdp", "tp", "sp")
# the formats in which ranks can send values to each other
WIRE_FORMATS = ("fp32", "bf16", "fp8")
# the kinds of parallelism that can send in several formats
PARALLELISMS_WITH_WIRE_FORMAT = ("zero", "sp")
# the kinds of parallelism that divide each block of a model among ranks
TENSOR_CUTTING_METHODS = ("tp", "sp")
# Tasks that a trained model may be scored on (tasks.py).
TASKS = ("cloze", "copy", "retrieval")
# Arms that repeat the reference to show the effect of chance.
CHANCE_ARM_ROLES = ("repeat", "one-ulp")


def _are_valid_rate_factors(rates: tuple[Any, ...]) -> bool:
    return all(
        isinstance(name, str) and name and isinstance(factor, int | float) and 0 <= factor < math.inf
        for name, factor in rates
    )


def parse_precision_change(then: str) -> tuple[str, float]:
    """Splits a --then such as 'bf16@80%' into the dtype and the share of steps before it, 0.8; '' becomes '' and 1."""
    word, _, percent_text = then.rpartition("@")
    return word, parse_number(percent_text.removesuffix("%")) / 100 if then else 1.0


def _is_valid_change(then: str) -> bool:
    if not then.endswith("%"):
        return then == ""
    precision, share = parse_precision_change(then)
    return bool(precision) and 0 < share < 1


def parse_clip_option(clip: float | str) -> tuple[float, str]:
    """Returns the largest norm in `--clip`, and the kind of groups that are clipped separately ('' for none)."""
    max_norm, _, group = str(clip).partition("/")
    return parse_number(max_norm), group


def _is_clip_value(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return False
    max_norm, group = parse_clip_option(value)
    return 0 <= max_norm < math.inf and ("/" in str(value)) == (group in GRADIENT_CLIP_GROUPS)


def parse_optimizer(word: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the values of all keys of 'NAME[:key=value...]'. For 'FILE.py:CLASS[:...]' returns the class
    and the given keys only. Raises UsageError for unknown names and keys."""
    name, _, tail = word.partition(":")
    target, _, keys = tail.partition(":")
    # In 'NAME:KEY=VALUE', the text after the colon has an equals sign. In 'FILE.py:CLASS' it has none.
    if name not in OPTIMIZERS and target and "=" not in target:
        return f"{name}:{target}", {key: parse_number(value) for key, value in _split_into_key_value_pairs(keys)}
    expected_text = f"optimizer must be one of {', '.join(OPTIMIZERS)}, or FILE.py:CLASS for your torch optimizer"
    if name not in OPTIMIZERS:
        reason = UNSUPPORTED_OPTIMIZERS.get(name.lower())
        raise UsageError(f"{expected_text}, got {name!r:.80}{f': {reason}' if reason else ''}.")
    return name, _parse_key_values("optimizer", name, tail, OPTIMIZERS[name])


def parse_schedule(word: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the values of all keys of 'NAME[:key=value...]'. Raises UsageError for unknown names and
    keys."""
    name, _, keys = word.partition(":")
    if name not in SCHEDULES:
        raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {name!r:.80}.")
    schedule_key_defaults = {"warmup": 0.1} if name == "constant" else _SCHEDULE_KEY_DEFAULTS
    return name, _parse_key_values("schedule", name, keys, schedule_key_defaults)


def _split_into_key_value_pairs(keys: str) -> list[tuple[str, str]]:
    key_value_pairs = [pair.partition("=") for pair in keys.split(":") if pair]
    return [(key, value) for key, _, value in key_value_pairs]


def _parse_key_values(option: str, name: str, keys: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of an option's keys: those in `keys`, and the defaults of all others. Raises UsageError for
    unknown keys or values out of bounds."""
    values = dict(defaults)
    for key, text in _split_into_key_value_pairs(keys):
        if key not in defaults:
            raise UsageError(f"{option} must be {name} with only the keys {', '.join(defaults)}, got {key!r:.80}.")
        key_defaults = defaults[key] if isinstance(defaults[key], tuple) else (defaults[key],)
        numbers = tuple(parse_number(part) for part in text.split(","))
        low, high = _BOUNDS_BY_KEY[key]
        if len(numbers) != len(key_defaults) or not all(low <= number <= high for number in numbers):
            expected = "two numbers" if len(key_defaults) > 1 else "a number"
            default_text = ",".join(map(str, key_defaults))
            raise UsageError(
                f"{option} must be {name} with {expected} from {low} to {high:g} as {key}, like {key}={default_text}, "
                f"got {text!r:.80}."
            )
        values[key] = numbers if len(key_defaults) > 1 else numbers[0]
    return values


def _make_text_rule(words: str, holds: Callable[[str], object] = lambda text: True) -> Rule:
    return Rule(words, lambda value: isinstance(value, str) and bool(holds(value)))


def _make_tuple_rule(words: str, holds: Callable[[tuple[Any, ...]], object]) -> Rule:
    return Rule(words, lambda value: isinstance(value, tuple) and bool(holds(value)))


MODEL = "what to train"
TRAINING_LENGTH_TITLE = "how long, and how sure"
LEARNING_TITLE = "how it learns"
_RUN_REQUEST_OPTIONS = list_request_options(Request)


def _make_choice(default: str, names: tuple[str, ...], help_text: str = "", group: str = LEARNING_TITLE) -> Any:
    rule = Rule(f"one of {', '.join(filter(None, names))}", lambda value: value in names)
    return option(default, rule, help_text, group=group, choices=names)


def _make_count_option(default: int, maximum: int, help_text: str, group: str = TRAINING_LENGTH_TITLE) -> Any:
    return option(default, whole_number(1, maximum), help_text, "N", group)


def _reuse_option(default: Any, name: str, help_text: str = "", group: str = TRAINING_LENGTH_TITLE) -> Any:
    """Returns a training's version of an option of runs: with another default and, if `help_text` is given, another
    help text."""
    shared = _RUN_REQUEST_OPTIONS[name]
    return option(
        default, shared.rule, help_text or shared.help, shared.metavar, group, called=shared.called, parse=shared.parse
    )


def find_start_weights_file(start: str) -> Path | None:
    """Returns the path of the file that --start names, without a '::DIGEST' after it. Returns None if --start names a
    training or a checkpoint.
    """
    path = Path(start.partition("::")[0])
    return path if start and is_not_folder(path) else None


def check_ranks_options(request: Any) -> None:
    ranks = request.ranks
    settings = request.settings
    if ranks is not None and not settings.parallel:
        raise UsageError(f"--ranks {ranks} needs a way to train together. Add --parallel {' or '.join(PARALLEL)}.")
    # An option needs --ranks even if only --sweep sets it.
    swept_option_names = {f"--{name.replace('_', '-')}" for name, _ in request.sweep}
    rank_options = {"--parallel": settings.parallel, "--wire": settings.wire != "fp32"}
    for option_name, is_set in rank_options.items():
        if ranks is None and (is_set or option_name in swept_option_names):
            raise UsageError(f"{option_name} only works with several ranks, but there is one. Add --ranks N.")
    if ranks is not None and not request.isolation:
        raise UsageError("--no-isolation is for one process, and --ranks starts several. Leave one of them out.")


@dataclass(frozen=True)
class TrainerSettings:
    """The settings of a model's training. An arm may replace some of them by name (`Arm.settings`). `make` names a
    user's function that returns a model and batches. Settings of the built-in models do not apply to a user's model."""

    model: str = option(
        "nano",
        _make_text_rule("a model's name", bool),
        f"size of the built-in model: {', '.join(SIZES)}; default {{default}}",
        "NAME",
        MODEL,
    )
    make: str = option("", _make_text_rule("module:function, or file.py:function"), group="")
    skip: tuple[str, ...] = option(
        (),
        _make_tuple_rule("a list of layers", all),
        "layers of your model that are not converted: kinds (head, linear), or paths with * and ?",
        "A,B",
        MODEL,
    )
    arch: str = _make_choice("gpt", ARCHITECTURES, "the model's architecture; default {default}", MODEL)
    batch: int = option(
        0,
        whole_number(0, 4096, "a whole number from 1 to 4096, or 0 for the model's own"),
        "sequences in a micro-batch; default the model's own",
        "N",
        MODEL,
    )
    sequence: int = option(
        0,
        whole_number(0, 1 << 16, "a whole number from 1 to 65536, or 0 for the model's own"),
        "tokens in a sequence; default the model's own",
        "N",
        MODEL,
    )
    micro_batches: int = _make_count_option(1, 1024, "micro-batches that a step accumulates; default {default}", MODEL)
    rate: float = option(
        1e-3,
        number("a number above 0 and up to 10", lambda value: 0 < value <= 10),
        "the largest learning rate; default {default}",
        "NUMBER",
        LEARNING_TITLE,
    )
    rates: tuple[tuple[str, float], ...] = option(
        (),
        _make_tuple_rule(
            f"kinds of parameters ({', '.join(PARAMETER_KINDS)}) or of layers, or paths, and factors, like "
            "embedding=0.5,attn=2,blocks.0=0.1",
            _are_valid_rate_factors,
        ),
        "factors of the rate: by kind of parameters or layers (attn, mlp), or the beginning of their path (blocks.0)",
        "NAME=FACTOR,...",
        LEARNING_TITLE,
        parse="factors",
    )
    optimizer: str = option(
        "adamw",
        _make_text_rule(f"one of {', '.join(OPTIMIZERS)}, or FILE.py:CLASS", parse_optimizer),
        "what updates the weights: adamw, sgd, adafactor, or FILE.py:CLASS, your torch optimizer; keys as in "
        "torch: adamw:betas=0.9,0.95, sgd:momentum=0.9; matrices decay by weight_decay, default 0.1; default {default}",
        "NAME[:KEY=VALUE...]",
        LEARNING_TITLE,
    )
    updates: str = _make_choice(
        "fp32", ("fp32", "bf16", "fp8"), "format of each update, also of your optimizer; default {default}"
    )
    schedule: str = option(
        "cosine",
        _make_text_rule(f"one of {', '.join(SCHEDULES)}", parse_schedule),
        f"how the rate changes: {', '.join(SCHEDULES)}; keys: warmup, the share of the steps in which it rises, and "
        "floor, the share of it at the end, 0.1 each; wsd falls in the last fifth of the steps, plateau halves after "
        "3 validations without a better held-out loss; default {default}",
        "NAME[:KEY=VALUE...]",
        LEARNING_TITLE,
    )
    clip: float | str = option(
        1.0,
        Rule(f"a number from 0, alone or as NUMBER/GROUP (groups: {', '.join(GRADIENT_CLIP_GROUPS)})", _is_clip_value),
        "norm of all gradients above which they are clipped; 0: never; 1.0/kind, 1.0/block or 1.0/tensor: norm of each "
        "kind (attn, mlp, embedding, norm, head), block or tensor; default {default}",
        "NUMBER[/GROUP]",
        LEARNING_TITLE,
    )
    start: str = option(
        "",
        _make_text_rule("a training, TRAINING:ARM, or a file with a state dict"),
        "begin with the weights of a stored training's newest checkpoint (those of its reference, or of ARM), or of "
        "a state dict file (.pt, .safetensors), also for your model",
        "TRAINING:ARM|FILE",
        MODEL,
    )
    tasks: tuple[str, ...] = option(
        (),
        _make_tuple_rule(f"some of {', '.join(TASKS)}", set(TASKS).issuperset),
        f"score arms after the last step on {', '.join(TASKS)}; --data task:copy,retrieval is a text that teaches the "
        "last two",
        "NAME,...",
        MODEL,
    )
    metric: tuple[str, ...] = option(
        (),
        _make_tuple_rule("your functions, like my_pkg:f", all),
        "measure arms after the last step by f(model, held_out), which returns a number or several by name; more is "
        "better, unless =lower is added",
        "MODULE:FUNCTION[=lower],...",
        MODEL,
    )
    dropout: float = option(
        0.0,
        number("a share from 0 to below 1", lambda value: 0 <= value < 1),
        "share of values that are dropped, the same ones in all arms",
        "SHARE",
        MODEL,
    )
    loss_scale: str = option(
        "auto",
        _make_text_rule(
            "auto, dynamic, or a number from 1 to 2^32",
            lambda text: text in LOSS_SCALE_KEYWORDS or 1.0 <= parse_number(text) <= MAX_LOSS_SCALE,
        ),
        "auto (the precision's own), dynamic (from 2^16, halved at an overflow, doubled after 200 steps without), or a "
        "number from 1 to 2^32; default {default}",
        "SCALE",
        LEARNING_TITLE,
    )
    optimizer_states: str = _make_choice(
        "fp32", ("fp32", "bf16", "fp8lm"), "format of the optimizer's moments; default {default}"
    )
    master: str = _make_choice(
        "fp32",
        ("fp32", "fp16-scaled", "fp16-fp8", "bf16-stochastic"),
        "format of the stored weights; fp16-fp8: fp16-scaled, with fp8 copies for forward and backward; "
        "bf16-stochastic: rounded stochastically; default {default}",
    )
    gradients: str = _make_choice("fp32", ("fp32", "bf16", "fp8"), "format of stored gradients; default {default}")
    checkpointing: str = _make_choice(
        "no", ("no", "blocks"), "blocks: store each block's input only, recompute the rest; default {default}", MODEL
    )
    compile: str = _make_choice(
        "no", ("no", "yes"), "yes: torch.compile, forward and backward as one graph each; default {default}", MODEL
    )
    attention: str = _make_choice(
        "auto",
        ("auto", "rounded", "prescaled"),
        "rounded: also attention in the arm's precision; prescaled: same, with queries scaled first; default {default}",
        MODEL,
    )
    on_nan: str = _make_choice(
        "stop", ("stop", "skip", "lower-rate"), "what an arm does after a step with NaN or infinity; default {default}"
    )
    precision_map: tuple[tuple[str, str], ...] = _reuse_option(
        (), "precision_map", "layers with a different precision, as in suite; not for the reference", group=MODEL
    )
    # Largest magnitudes from --scales-from, by precision, layer and role.
    scales: tuple[tuple[str, str, str, float], ...] = option((), KNOWN_SCALES, group="")
    refresh_scales: int | None = _reuse_option(
        None,
        "refresh_scales",
        "scales from the first step's data, or --scales-from, renewed in every M-th step; not for the reference",
        LEARNING_TITLE,
    )
    saturation_bound: float | None = _reuse_option(None, "saturation_bound", group=LEARNING_TITLE)
    then: str = option(
        "",
        _make_text_rule("a dtype and the share of the steps after which it begins, like bf16@80%", _is_valid_change),
        "finish in a different dtype, like bf16@80%%: the last fifth of the steps in bf16; not for the reference",
        "DTYPE@PERCENT",
        MODEL,
    )
    parallel: str = _make_choice(
        "",
        ("", *PARALLEL),
        "how ranks divide the work: ddp (the batch), zero (also whole weights), fsdp (also rows of weights), tp (parts "
        "of each block), sp (tp, and tokens between blocks)",
        TRAINING_LENGTH_TITLE,
    )
    wire: str = _make_choice(
        "fp32",
        WIRE_FORMATS,
        "widest format that is sent: zero's gradients and weights, sp's activations, unless the arm's dtype is "
        "narrower; fp8: codes, with a scale for each tensor; default {default}",
        TRAINING_LENGTH_TITLE,
    )

    def __post_init__(self) -> None:
        check_request_fields(self, SETTINGS_RULES)

    @property
    def display_name(self) -> str:
        return self.make or self.model


SETTINGS_RULES: Mapping[str, Rule] = {name: own.rule for name, own in list_request_options(TrainerSettings).items()}


@dataclass(frozen=True)
class TrainingRequest:
    """The options of `fp8bench train`. `margin` is a share of the reference's loss."""

    dtypes: tuple[str, ...] = _reuse_option(("bf16", "fp8"), "dtypes", group="")
    reference: str | None = _reuse_option(None, "reference", group=MODEL)
    settings: TrainerSettings = TrainerSettings()
    steps: int = option(300, whole_number(1, MAX_STEPS), group="")
    seeds: int = option(5, whole_number(1, 10_000), group="")
    seed: int = _reuse_option(0, "seed", "the first seed; default 0")
    bands: tuple[str, ...] = option(
        CHANCE_ARM_ROLES,
        _make_tuple_rule(
            f"none, or some of {', '.join(CHANCE_ARM_ROLES)}",
            lambda names: names == ("none",) or set(names) <= set(CHANCE_ARM_ROLES),
        ),
        "arms that show the effect of chance on the reference: repeat (nondeterminism), one-ulp (chaos, in the first "
        "seed), or none; default both",
        "NAME,...",
        TRAINING_LENGTH_TITLE,
    )
    margin: float = option(0.01, number("a share above 0 and below 1", lambda value: 0 < value < 1), group="")
    sweep: tuple[tuple[str, tuple[str, ...]], ...] = option(
        (),
        Rule(
            "settings or options of a dtype with at least one value each, like {'history': ('1', '16')}",
            REQUEST_RULES["axes"].holds,
        ),
        "an arm for each value of a setting or of a dtype's option: history=1,16,1024; several are combined; "
        "model=nano,micro: a training of each model, and the trend of the gap",
        "NAME=A,B",
        MODEL,
        parse="axis",
    )
    device: str | None = option(
        None,
        _make_text_rule("a device's name", bool),
        "cpu, cuda, cuda:1; default the first GPU, else cpu",
        "NAME",
        TRAINING_LENGTH_TITLE,
    )
    threads: int = _reuse_option(1, "threads")
    data: str | None = _reuse_option(
        None, "data", "a text, a token file (.bin) or a saved dataset; default Python's own sources", group=MODEL
    )
    stride: int = _make_count_option(10, MAX_STEPS, "steps from one watched step to the next; default {default}")
    evaluate: int = _make_count_option(50, MAX_STEPS, "steps between validations; default {default}")
    keep: int = _make_count_option(50, MAX_STEPS, "steps between checkpoints; default {default}")
    energy: bool = _reuse_option(
        True, "energy", "measure no energy; by default it is measured after the last step if the device has a counter"
    )
    scales_from: str | None = _reuse_option(
        None,
        "scales_from",
        "fixed scales from a stored training or run (its id, or last) instead of scales of each tensor; not for the "
        "reference",
        group=LEARNING_TITLE,
    )
    own_batch: int | None = option(
        None,
        MEMORY_SIZE_RULE,
        "also find the largest batch of each native arm in SIZE of memory, like 2GiB, and compare arms at them",
        "SIZE",
        TRAINING_LENGTH_TITLE,
        parse="memory",
    )
    imports: tuple[str, ...] = _reuse_option((), "imports", group=MODEL)
    isolation: bool = _reuse_option(True, "isolation", "train in this process, without a worker")
    ranks: int | None = _reuse_option(None, "ranks", "train every arm in N processes together, each on a separate GPU")

    def __post_init__(self) -> None:
        check_request_fields(self, TRAINING_RULES)
        if not self.dtypes:
            raise UsageError("no dtype was named. Give --dtypes two or more, like bf16,fp8.")
        check_ranks_options(self)


TRAINING_RULES: Mapping[str, Rule] = {name: own.rule for name, own in list_request_options(TrainingRequest).items()}
# A training with --quick has one seed of this many steps.
QUICK_STEPS = 60


def request_with_defaults(
    quick: bool, steps: int | None, seeds: int | None, dtypes: tuple[str, ...], **fields: Any
) -> TrainingRequest:
    defaults = TrainingRequest()
    steps = (QUICK_STEPS if quick else defaults.steps) if steps is None else steps
    seeds = (1 if quick else defaults.seeds) if seeds is None else seeds
    return TrainingRequest(**{**fields, "dtypes": dtypes or defaults.dtypes, "steps": steps, "seeds": seeds})
