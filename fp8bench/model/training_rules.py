"""What may be asked of a training, field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fp8bench.errors import UsageError
from fp8bench.model.request import REQUEST_RULES, Rule, number, whole_number

ARCHITECTURES = ("gpt", "mlp", "cnn", "moe")
# Of parameters: those that learn at rates of their own.
PARAMETER_KINDS = ("embedding", "norm", "layer", "head")
LOSS_SCALES = ("auto", "dynamic")
LARGEST_LOSS_SCALE = float(1 << 32)
MOST_STEPS = 10_000_000
# How several ranks train together.
PARALLEL = ("ddp", "fsdp", "tp")
# What a field is one of.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "arch": ARCHITECTURES,
    "optimizer_states": ("fp32", "bf16", "fp8lm"),
    "master": ("fp32", "fp16-scaled"),
    "gradients": ("fp32", "bf16", "fp8"),
    "checkpointing": ("no", "blocks"),
    "compile": ("no", "yes"),
    "attention": ("auto", "rounded", "prescaled"),
    "on_nan": ("stop", "skip", "lower-rate"),
    "nudge": ("", "ulp", "order"),
    "parallel": ("", *PARALLEL),
    "amax_group": ("", "own", "parallel"),
}
USUAL_MERGES = 1024
# With the bytes themselves they are all that 16 bits can tell apart.
MOST_MERGES = (1 << 16) - 256


def merges_of(tokens: str) -> int | None:
    """How many merges 'bytes', 'bpe' or 'bpe:512' ask for; None where it is none of these."""
    word, _, number = tokens.partition(":")
    if tokens in ("bytes", "bpe"):
        return 0 if tokens == "bytes" else USUAL_MERGES
    right = word == "bpe" and number.isascii() and number.isdigit() and 1 <= int(number) <= MOST_MERGES
    return int(number) if right else None


def _one_of(names: tuple[str, ...]) -> Rule:
    return Rule(f"one of {', '.join(filter(None, names))}", lambda value: value in names)


def _above_nothing(what: str, most: float = math.inf) -> Rule:
    return number(what, lambda value: 0 < value <= most and math.isfinite(value))


def _is_loss_scale(value: object) -> bool:
    if value in LOSS_SCALES:
        return True
    try:
        return isinstance(value, str) and 1.0 <= float(value) <= LARGEST_LOSS_SCALE
    except ValueError:
        return False


def _are_rates(value: object) -> bool:
    return isinstance(value, tuple) and all(
        kind in PARAMETER_KINDS and isinstance(factor, int | float) and 0 <= factor < math.inf for kind, factor in value
    )


_SHARE = number("a share from 0 to 1", lambda value: 0 <= value <= 1)
# What each of the settings must be.
SETTINGS_RULES: Mapping[str, Rule] = {
    "model": Rule("a model's name", lambda value: isinstance(value, str) and bool(value)),
    "batch": whole_number(0, 4096, "a whole number from 1 to 4096, or 0 for the model's own"),
    "sequence": whole_number(0, 1 << 16, "a whole number from 1 to 65536, or 0 for the model's own"),
    "micro_batches": whole_number(1, 1024),
    "rate": _above_nothing("a number above 0 and up to 10", 10.0),
    "rates": Rule(
        f"kinds of parameters ({', '.join(PARAMETER_KINDS)}) and factors, like embedding=0.5,head=2", _are_rates
    ),
    "warmup": _SHARE,
    "floor": _SHARE,
    "weight_decay": number("a number from 0 to 10", lambda value: 0 <= value <= 10),
    "clip": number("a number above 0, or 0 for none", lambda value: 0 <= value < math.inf),
    "dropout": number("a share from 0 to below 1", lambda value: 0 <= value < 1),
    "loss_scale": Rule("auto, dynamic, or a number from 1 to 2^32", _is_loss_scale),
    "scale_growth": whole_number(1, MOST_STEPS),
    "handicap": _above_nothing("a number above 0 and up to 1000", 1000.0),
    "precision_map": REQUEST_RULES["precision_map"],
    **{name: _one_of(names) for name, names in CHOICES.items()},
}
# What each field of a request of a training must be, where it is given.
TRAINING_RULES: Mapping[str, Rule] = {
    "steps": whole_number(1, MOST_STEPS),
    "seeds": whole_number(1, 10_000),
    "margin": number("a share above 0 and below 1", lambda value: 0 < value < 1),
    "sweep": Rule(
        "settings or options of a dtype with at least one value each, like {'history': ('1', '16')}",
        REQUEST_RULES["axes"].holds,
    ),
    "device": Rule("a device's name", lambda value: isinstance(value, str) and bool(value)),
    "other_data": REQUEST_RULES["data"],
    "tokens": Rule(
        f"bytes, bpe, or bpe:N with 1 to {MOST_MERGES} merges",
        lambda value: isinstance(value, str) and merges_of(value) is not None,
    ),
    "stride": whole_number(1, MOST_STEPS),
    "evaluate": whole_number(1, MOST_STEPS),
    "keep": whole_number(1, MOST_STEPS),
    "try_fix": REQUEST_RULES["quick"],
    **{name: REQUEST_RULES[name] for name in (
        "dtypes", "reference", "seed", "threads", "data", "imports", "isolation", "max_batch", "memory_limit",
        "energy", "ranks",
    )},
}  # fmt: skip


def refuse_ranks(request: Any) -> None:
    """Raise UsageError where a request of a training asks for several ranks and one, or for neither."""
    ranks, settings = request.ranks, request.settings
    if ranks is not None and not settings.parallel:
        raise UsageError(
            f"--ranks {ranks} does not say how they train together. Add --parallel {' or '.join(PARALLEL)}."
        )
    swept = {f"--{name.replace('_', '-')}" for name, _ in request.sweep}
    for option, given in ("--parallel", settings.parallel), ("--amax-group", settings.amax_group):
        if ranks is None and (given or option in swept):
            raise UsageError(f"{option} is about several ranks, and there is one. Add --ranks N.")
    for option, given in ("--no-isolation", not request.isolation), ("--max-batch", request.max_batch):
        if ranks is not None and given:
            raise UsageError(f"{option} is of one process, and --ranks asks for several. Leave one of them out.")
