"""Makes the arms of a training from its request and a device's facts, and decides which of them share memory.

All arms of a seed do or, if they do not fit, each with the reference. Pure functions, tested for any device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.lab.models import (
    around_of,
    check,
    check_effective,
    check_ranks,
    config_of,
    layers_of,
    support,
)
from fp8bench.features.train.request import TrainerSettings, TrainingRequest, change_of, file_of
from fp8bench.features.train.tasks import check_sequence
from fp8bench.features.train.values import Arm, ArmCost, ArmRole, Training
from fp8bench.model import DeviceFacts, Level, Params, Scalar
from fp8bench.nn.sizes import SIZES
from fp8bench.plan.make import device_named
from fp8bench.plan.precision_map import check_keys, check_mixed
from fp8bench.protocols.axes import Option
from fp8bench.registry import precisions
from fp8bench.suggestions import meant_name
from fp8bench.units import number_or_text_of, size
from fp8bench.workloads.model import LIVE

MOST_ARMS = 64
# Settings that must be equal in all arms, which share weights and batches, or that no sweep can express.
_SHARED = {
    "make",
    "skip",
    "model",
    "arch",
    "batch",
    "sequence",
    "rates",
    "precision_map",
    "scales",
    "parallel",
    "start",
    "tasks",
    "metric",
}
_SWEPT: dict[str, Callable[[str], Scalar]] = {
    name: type(value) for name, value in vars(TrainerSettings()).items() if name not in _SHARED
} | {"clip": number_or_text_of, "refresh_scales": int, "saturation_bound": float}


# MS-AMP's levels, by the table in its documentation: the formats of a parameter's states, with power-of-two scales.
# --wire sets what ranks send.
LEVELS: Mapping[str, Arm] = {
    name: Arm(name, "fp8:scale=pow2", settings=(("gradients", "fp8"), *settings))
    for name, settings in {
        "msamp-o1": (("master", "fp16-scaled"),),
        "msamp-o2": (("master", "fp16-scaled"), ("optimizer_states", "fp8lm")),
        "msamp-o3": (("optimizer_states", "fp8lm"), ("master", "fp16-fp8")),
    }.items()
}


def make_arms(request: TrainingRequest, facts: DeviceFacts) -> tuple[Arm, ...]:
    """Returns the reference, its bands and candidates; refused ones have a reason. Raises UsageError if nothing can be
    compared."""
    arms = tuple(add_support(arm, request, facts) for arm in _name_arms(request))
    if arms[0].skip:
        raise UsageError(f"the reference {arms[0].name} cannot be trained on {facts.key}: {arms[0].skip}.")
    candidates = [arm for arm in arms if arm.role is ArmRole.CANDIDATE]
    # One refused candidate is a note in the report; nothing to compare is an error.
    if all(arm.skip for arm in candidates):
        whys = "; ".join(f"{arm.name}: {arm.skip}" for arm in candidates)
        raise UsageError(f"nothing is left to compare with {arms[0].name} on {facts.key}: {whys}.")
    return arms


def arms_of_seed(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    """Returns the arms trained in seed `number`, counted from 0; the one-ulp arm only in the first seed."""
    # Chaotic divergence is a property of the training, so one seed is enough to show it.
    return tuple(arm for arm in arms if not arm.skip and (number == 0 or arm.role is not ArmRole.CHAOS))


def device_of(request: TrainingRequest, facts: Sequence[DeviceFacts]) -> DeviceFacts:
    if request.device is not None:
        return device_named(request.device, facts)
    # The CPU is first in the facts, and is used if there is nothing else.
    return next((fact for fact in facts if fact.accelerated), facts[0])


def check_training(request: TrainingRequest) -> None:
    from fp8bench.jobs.profile import function_named

    arms, settings = _name_arms(request), request.settings
    # A metric that cannot be imported should fail before any worker starts.
    for metric in settings.metric:
        function_named(metric.removesuffix("=lower"))
    if settings.make:
        _check_own(request)
    else:
        arch, config = settings.arch, config_of(settings, 1)
        if settings.tasks:
            check_sequence("--tasks", config.sequence)
        layers = (*layers_of(arch, config), *around_of(arch, config))
        check_keys(settings.precision_map, layers, f"model {settings.model}")
    taken = {arm: arm.merge_settings(settings) for arm in arms}
    check_effective([*taken.values()])
    if request.own_batch is not None and request.ranks is not None:
        raise UsageError("--own-batch is of one process, and --ranks asks for several. Leave one of them out.")
    for arm, arm_settings in taken.items():
        check(arm_settings)
        _check_change(arm, arm_settings, request)
        if request.ranks is not None:
            check_ranks(arm_settings, request.ranks)
        for _, word in settings.precision_map if arm.role is ArmRole.CANDIDATE else ():
            check_mixed(arm.precision, word)


def _check_change(arm: Arm, settings: TrainerSettings, request: TrainingRequest) -> None:
    renewed = settings.refresh_scales is not None or settings.saturation_bound is not None
    if renewed and settings.compile == "yes":
        raise UsageError("scales cannot be renewed in a compiled graph. Choose --compile no, or do not renew them.")
    for option, is_given in (("--refresh-scales and --saturation-bound", renewed), ("--then", bool(settings.then))):
        if is_given and request.ranks is not None:
            raise UsageError(f"{option} work in one process, and --ranks asks for several. Leave one of them out.")
    if not settings.then:
        return
    word, _ = change_of(settings.then)
    modes = [precisions.get(arm.precision), precisions.get(word)]
    check_mixed(arm.precision, word)
    if modes[0].mode == modes[1].mode:
        raise UsageError(f"--then {settings.then}: {arm.name} is in {word} from its beginning. Choose another dtype.")
    for mode in modes:
        if mode.unit_scaled:
            raise UsageError(f"--then: {mode.mode} needs a model that is unit-scaled from its beginning. Choose fp8.")


# Settings of the built-in models and of their division among ranks.
_BUILT_IN = (
    "model",
    "arch",
    "batch",
    "sequence",
    "rates",
    "dropout",
    "checkpointing",
    "compile",
    "attention",
    "parallel",
    "wire",
    "tasks",
)


def _check_own(request: TrainingRequest) -> None:
    from fp8bench.jobs.profile import function_named

    settings, usual, name = request.settings, TrainerSettings(), request.settings.make
    if name in SIZES:
        raise UsageError(
            f"{name} is a built-in model, and a function was expected here. Give --model {name}.",
            name,
            f"--model {name}",
        )
    # A misspelt built-in model is parsed as the name of a function.
    meant = meant_name("model", name, SIZES)
    if meant and ":" not in name and not Path(f"{name}.py").is_file():
        message = f"{name!r:.80} is no model that fp8bench has. Did you mean --model {meant}?"
        raise UsageError(f"{message} Give one of your own as FILE.py:FUNCTION.", name, f"--model {meant}")
    if name not in LIVE:
        function_named(name)
    # A swept option counts as given.
    swept = {axis.replace("-", "_") for axis, _ in request.sweep}
    refused = [word for word in _BUILT_IN if getattr(settings, word) != getattr(usual, word) or word in swept]
    refused += [word for word in ("data", "own_batch") if getattr(request, word) is not None]
    if refused:
        raise UsageError(
            f"--{refused[0].replace('_', '-')} is for built-in models and texts, and {name} has its own. Leave it out."
        )
    refusals = (
        (
            bool(settings.start) and file_of(settings.start) is None,
            f"--start {settings.start}",
            "a stored training of a built-in model begins it. Give a file with its state dict, or leave --start out",
        ),
        (request.ranks is not None, "--ranks", "one process reads its batches"),
        ("micro_batches" in swept, "--sweep micro-batches", "arms would not read the same batches in a step"),
    )
    for wrong, option, reason in refusals:
        if wrong:
            raise UsageError(f"{option} does not work with your own model ({name}): {reason}. Leave it out.")


def requests_by_model(request: TrainingRequest) -> list[TrainingRequest]:
    """Returns a request for each model in `--sweep model=A,B`, since the arms of a training share initial weights."""
    sweep = tuple(axis for axis in request.sweep if axis[0] != "model")
    models = dict(request.sweep).get("model", ())
    if not models:
        return [request]
    if request.settings.make or request.settings.start:
        option = request.settings.make or "--start"
        raise UsageError(f"--sweep model trains built-in models from their beginning, and not {option}. Leave one out.")
    for model in models:
        if models.count(model) > 1 or model not in SIZES:
            raise UsageError(f"--sweep model takes each of {', '.join(SIZES)} at most once, got {model!r:.80}.")
    return [replace(request, sweep=sweep, settings=replace(request.settings, model=model)) for model in models]


def _name_arms(request: TrainingRequest) -> tuple[Arm, ...]:
    # The same precision may have two spellings, 'fp8' and 'float8'.
    modes = list(dict.fromkeys(word if word in LEVELS else precisions.canonical(word) for word in request.dtypes))
    leads = [mode for mode in modes if mode not in LEVELS]
    if request.reference in LEVELS or not (leads or request.reference):
        raise UsageError(
            f"{request.reference or modes[0]} is one of MS-AMP's levels. Add bf16 to --dtypes, or another --reference."
        )
    reference = min(leads, key=lambda mode: precisions.get(mode).rank, default="")
    if request.reference is not None:
        reference = precisions.canonical(request.reference)
    # If only settings are swept, the precision is compared with itself.
    modes_compared = [mode for mode in modes if mode != reference] or [reference]
    candidates = {}
    for mode, settings in _swept(request, modes_compared):
        # A level of MS-AMP has settings that no sweep may change.
        level = LEVELS.get(mode, Arm(mode, mode))
        name = " ".join((mode, *(f"{key.replace('_', '-')}={value}" for key, value in settings)))
        if both := {axis.replace("-", "_") for axis, _ in request.sweep} & dict(level.settings).keys():
            raise UsageError(f"--sweep {min(both).replace('_', '-')}: {mode} sets it already. Leave one of them out.")
        candidates[name] = replace(level, name=name, settings=(*level.settings, *settings))
    # Swept settings at their defaults would repeat the reference.
    candidates.pop(reference, None)
    if not candidates:
        raise UsageError(
            f"{reference} has nothing to compare with. Add a precision to --dtypes, or --sweep master=fp32,fp16-scaled."
        )
    bands = (
        Arm(f"{reference} again", reference, ArmRole.REPEAT),
        Arm(f"{reference} one ulp", reference, ArmRole.CHAOS),
    )
    # The reference also runs at every other swept rate: arms are compared with its best one.
    swept = () if reference in modes_compared else dict(request.sweep).get("rate", ())
    rates = [_value("rate", value) for value in swept]
    arms = (
        Arm(reference, reference, ArmRole.REFERENCE),
        *(arm for arm in bands if arm.role.value in request.bands),
        *(
            Arm(f"{reference} rate={rate}", reference, ArmRole.OTHER_RATE, (("rate", rate),))
            for rate in rates
            if rate != request.settings.rate
        ),
        *candidates.values(),
    )
    if len(arms) > MOST_ARMS:
        raise UsageError(f"{len(arms)} arms are more than the {MOST_ARMS} that one training takes. Sweep less.")
    return arms


def _swept(request: TrainingRequest, modes: Sequence[str]) -> Iterator[tuple[str, Params]]:
    """Yields every precision with every combination of the swept settings, and of the swept options that it has."""
    axes, base = [_axis(name, values, modes) for name, values in request.sweep], request.settings
    for mode in modes:
        arm_axes = [axis for axis in axes if axis[0] in _SWEPT or _has_option(mode, axis[0])]
        for values in itertools.product(*(values for _, values in arm_axes)):
            chosen = [(name, value) for (name, _), value in zip(arm_axes, values, strict=True)]
            word = ":".join((mode, *(f"{name}={value}" for name, value in chosen if name not in _SWEPT)))
            # Names omit values that equal the training's.
            changed = [(name, value) for name, value in chosen if name in _SWEPT and value != getattr(base, name)]
            own_mode = word if word in LEVELS else precisions.canonical(word)
            yield own_mode, (*changed, *_batch_for(dict(changed), base))


def _batch_for(changed: Mapping[str, Scalar], base: TrainerSettings) -> Iterator[tuple[str, Scalar]]:
    """Yields the batch of an arm with a different number of micro-batches, so that its steps read the reference's
    sequences."""
    if "micro_batches" not in changed:
        return
    count, sequences = int(changed["micro_batches"]), config_of(base, 1).batch * base.micro_batches
    if sequences % count:
        raise UsageError(
            f"--sweep micro-batches: {count} micro-batches do not divide the {sequences} sequences of a step, which "
            f"all arms share. Give a --batch that is a multiple of {count}, or other micro-batches."
        )
    yield "batch", sequences // count


def _axis(name: str, values: Sequence[str], modes: Sequence[str]) -> tuple[str, Sequence[Scalar]]:
    setting = name.replace("-", "_")
    if setting == "model":
        raise UsageError("--sweep model trains one model after the other, which the command does. Give each --model.")
    if setting in _SWEPT:
        return setting, [_value(setting, value) for value in values]
    if not any(_has_option(mode, name) for mode in modes):
        sweepable = {key.replace("_", "-") for key in _SWEPT}
        for mode in modes:
            sweepable.update(option.name for option in _options_of(mode))
        raise UnknownName("setting or option to sweep", name, sweepable)
    return name, values


def _value(setting: str, text: str) -> Scalar:
    try:
        value = _SWEPT[setting](text)
        # Settings validate themselves on construction.
        Arm("", "", settings=((setting, value),)).merge_settings(TrainerSettings())
    except (ValueError, UsageError) as error:
        reason = str(error) if isinstance(error, UsageError) else f"{text!r:.80} is not a number."
        raise UsageError(f"--sweep {setting.replace('_', '-')}: {reason}") from None
    return value


def _has_option(mode: str, name: str) -> bool:
    return any(name in (option.name, *option.aliases) for option in _options_of(mode))


def _options_of(mode: str) -> Sequence[Option]:
    return () if mode in LEVELS else precisions.get(mode).options


def add_support(arm: Arm, request: TrainingRequest, facts: DeviceFacts) -> Arm:
    """Returns the arm with its support by the device: as native as the least native precision of its layers."""
    settings = arm.merge_settings(request.settings)
    config = config_of(settings, 1)
    # A precision map mixes precisions: the worst of them decides.
    later = [change_of(settings.then)[0]] if settings.then else []
    words = (arm.precision, *later, *(word for _, word in settings.precision_map))
    supports = [support(settings, config, precisions.get(word), facts) for word in words]
    refused = next(
        (support_of_mode.reason for support_of_mode in supports if support_of_mode.level is Level.REFUSED), ""
    )
    native = all(support_of_mode.level is Level.NATIVE for support_of_mode in supports)
    return replace(arm, native=native, skip=facts.unusable or refused)


# Share of a device's memory for arms: context, allocator rounding and readings of watched steps need the rest.
_USABLE = 0.9


def check_room(training: Training, costs: Iterable[ArmCost]) -> None:
    """Raises UsageError if the arms do not fit into memory together, if their sizes are known. Ranks on a CPU share its
    memory."""
    facts = training.device
    # Each rank on a GPU has its own memory; on a CPU they share it.
    room = int(_USABLE * facts.memory_bytes) // (1 if facts.accelerated else facts.ranks)
    reference, *_ = arms = arms_of_seed(training.arms, 0)
    costs_by_arm = {cost.arm: cost for cost in costs if cost.memory}
    measured = [costs_by_arm.get(reference.name if arm.is_band else arm.name) for arm in arms]
    # Bytes that all arms keep between steps, plus the largest number that a step of one adds.
    needed = most_added = 0
    for cost in measured:
        if cost is None or cost.memory is None:
            return
        between_steps = sum(bytes_kept for _, bytes_kept in cost.kept)
        needed += between_steps
        most_added = max(most_added, cost.memory.peak - between_steps)
    needed += most_added
    if room and needed > room:
        raise UsageError(
            f"the {len(arms)} arms need {size(needed)} together, and there are {size(room)}. Train fewer at a time "
            "(--dtypes, --bands none), or choose a smaller --model, --batch or --sequence."
        )
