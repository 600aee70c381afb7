"""Makes the arms of a training from its request and the device's facts, and checks that they fit into memory
together.

The functions are pure, and are tested for any device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.errors import UnknownName, UsageError
from fp8bench.features.train.lab.models import (
    check_rank_count,
    check_trainer_settings,
    check_wire_has_effect,
    find_support,
    list_elementwise_layers,
    list_layers,
    make_config,
)
from fp8bench.features.train.request import (
    TrainerSettings,
    TrainingRequest,
    find_start_weights_file,
    parse_precision_change,
)
from fp8bench.features.train.tasks import check_sequence
from fp8bench.features.train.values import Arm, ArmCost, ArmRole, Training
from fp8bench.model import DeviceFacts, Level, Params, Scalar
from fp8bench.model.words import UNTOUCHED
from fp8bench.nn.sizes import SIZES
from fp8bench.plan.make import find_device
from fp8bench.plan.precision_map import check_map_keys, check_precisions_can_mix
from fp8bench.protocols.axes import Option
from fp8bench.registry import precisions
from fp8bench.suggestions import guess_intended_name
from fp8bench.units import parse_number_or_text, size
from fp8bench.workloads.model import MODEL_MAKERS_IN_PROCESS

MAX_ARMS = 64
# Settings that a sweep inside one training cannot change. Some must be equal in all arms, because arms share weights
# and batches. The values of others, such as --rates, cannot be written in a sweep.
_SETTINGS_WITHOUT_SWEEP = {
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
# The defaults of the last three settings do not show the type of their values.
_PARSER_BY_SETTING: dict[str, Callable[[str], Scalar]] = {
    name: type(value) for name, value in vars(TrainerSettings()).items() if name not in _SETTINGS_WITHOUT_SWEEP
} | {"clip": parse_number_or_text, "refresh_scales": int, "saturation_bound": float}


# MS-AMP's levels as its documentation defines them: formats of weights, gradients and moments, with power-of-two
# scales. The format in which ranks send is not part of a level, but set by --wire.
MSAMP_LEVELS: Mapping[str, Arm] = {
    name: Arm(name, "fp8:scale=pow2", settings=(("gradients", "fp8"), *settings.items()))
    for name, settings in {
        "msamp-o1": {"master": "fp16-scaled"},
        "msamp-o2": {"master": "fp16-scaled", "optimizer_states": "fp8lm"},
        "msamp-o3": {"optimizer_states": "fp8lm", "master": "fp16-fp8"},
    }.items()
}


def make_arms(request: TrainingRequest, facts: DeviceFacts) -> tuple[Arm, ...]:
    """Returns the reference, its repeats, its one-ulp arm, and the candidates. A candidate that the device refuses
    has the reason in `skip`. Raises UsageError if nothing can be compared.
    """
    arms = tuple(add_arm_support(arm, request, facts) for arm in _make_named_arms(request))
    if arms[0].skip:
        raise UsageError(f"the reference {arms[0].name} cannot be trained on {facts.key}: {arms[0].skip}.")
    candidates = [arm for arm in arms if arm.role is ArmRole.CANDIDATE]
    # The report explains why a candidate is skipped. Only a training without any candidate is an error.
    if all(arm.skip for arm in candidates):
        reasons = "; ".join(f"{arm.name}: {arm.skip}" for arm in candidates)
        raise UsageError(f"nothing is left to compare with {arms[0].name} on {facts.key}: {reasons}.")
    return arms


def select_arms_of_seed(arms: Sequence[Arm], number: int) -> tuple[Arm, ...]:
    """Returns the arms that are trained in seed `number`, counted from 0. The arm with weights one ulp apart is trained
    in the first seed only.
    """
    # One seed is enough to show how chaotic the training is.
    return tuple(arm for arm in arms if not arm.skip and (number == 0 or arm.role is not ArmRole.CHAOS))


def choose_device(request: TrainingRequest, facts: Sequence[DeviceFacts]) -> DeviceFacts:
    if request.device is not None:
        return find_device(request.device, facts)
    # The CPU is the first entry of `facts`. Use the CPU if there is no accelerator.
    return next((fact for fact in facts if fact.accelerated), facts[0])


def check_training(request: TrainingRequest) -> None:
    from fp8bench.jobs.profile import check_function_name

    arms = _make_named_arms(request)
    settings = request.settings
    # A metric that cannot be imported fails before a worker starts.
    for metric in settings.metric:
        check_function_name(metric.removesuffix("=lower"))
    if settings.make:
        _check_user_model(request)
    else:
        architecture = settings.arch
        config = make_config(settings, 1)
        if settings.tasks:
            check_sequence("--tasks", config.sequence)
        layers = (*list_layers(architecture, config), *list_elementwise_layers(architecture, config))
        check_map_keys(settings.precision_map, layers, f"model {settings.model}")
    settings_by_arm = {arm: arm.merge_settings(settings) for arm in arms}
    check_wire_has_effect([*settings_by_arm.values()])
    if request.own_batch is not None and request.ranks is not None:
        raise UsageError("--own-batch is of one process, and --ranks asks for several. Leave one of them out.")
    for arm, arm_settings in settings_by_arm.items():
        check_trainer_settings(arm_settings)
        _check_precision_change(arm, arm_settings, request)
        if request.ranks is not None:
            check_rank_count(arm_settings, request.ranks)
        for _, precision in settings.precision_map if arm.role is ArmRole.CANDIDATE else ():
            check_precisions_can_mix(arm.precision, precision)


def _check_precision_change(arm: Arm, settings: TrainerSettings, request: TrainingRequest) -> None:
    # 1. Reject renewed scales and --then where they do not work.
    renews_scales = settings.refresh_scales is not None or settings.saturation_bound is not None
    if renews_scales and settings.compile == "yes":
        raise UsageError("scales cannot be renewed in a compiled graph. Choose --compile no, or do not renew them.")
    for option, is_given in (
        ("--refresh-scales and --saturation-bound", renews_scales),
        ("--then", bool(settings.then)),
    ):
        if is_given and request.ranks is not None:
            raise UsageError(f"{option} work in one process, and --ranks asks for several. Leave one of them out.")
    if not settings.then:
        return
    # 2. Check that the arm can change from its precision to the second one.
    precision, _ = parse_precision_change(settings.then)
    modes = [precisions.get(arm.precision), precisions.get(precision)]
    check_precisions_can_mix(arm.precision, precision)
    if modes[0].mode == modes[1].mode:
        raise UsageError(
            f"--then {settings.then}: {arm.name} is in {precision} from its beginning. Choose another dtype."
        )
    for mode in modes:
        if mode.unit_scaled:
            raise UsageError(f"--then: {mode.mode} needs a model that is unit-scaled from its beginning. Choose fp8.")


# Settings that apply to built-in models, but not to a user's model.
_BUILT_IN_SETTINGS = (
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


def _check_user_model(request: TrainingRequest) -> None:
    from fp8bench.jobs.profile import check_function_name

    settings = request.settings
    default_settings = TrainerSettings()
    name = request.settings.make
    if name in SIZES:
        raise UsageError(
            f"{name} is a built-in model, and a function was expected here. Give --model {name}.",
            name,
            f"--model {name}",
        )
    # Otherwise, a misspelt built-in model would be taken for a function's name.
    suggested_model_name = guess_intended_name("model", name, SIZES)
    if suggested_model_name and ":" not in name and not Path(f"{name}.py").is_file():
        message = f"fp8bench has no model {name!r:.80}. Did you mean --model {suggested_model_name}?"
        raise UsageError(
            f"{message} For your own model, give FILE.py:FUNCTION.", name, f"--model {suggested_model_name}"
        )
    if name not in MODEL_MAKERS_IN_PROCESS:
        check_function_name(name)
    # An option in --sweep counts as given.
    swept_setting_names = {axis.replace("-", "_") for axis, _ in request.sweep}
    non_default_options = {
        word for word in _BUILT_IN_SETTINGS if getattr(settings, word) != getattr(default_settings, word)
    }
    non_default_options |= {word for word in ("data", "own_batch") if getattr(request, word) is not None}
    for word in (*_BUILT_IN_SETTINGS, "data", "own_batch"):
        if word in non_default_options or word in swept_setting_names:
            option = f"--{word.replace('_', '-')}"
            raise UsageError(f"{option} is for built-in models and texts, and {name} has its own. Leave it out.")
    refusal_rules = (
        (
            bool(settings.start) and find_start_weights_file(settings.start) is None,
            f"--start {settings.start}",
            "only a file with its state dict does",
        ),
        (request.ranks is not None, "--ranks", "one process reads its batches"),
        (
            "micro_batches" in swept_setting_names,
            "--sweep micro-batches",
            "arms would not read the same batches in a step",
        ),
    )
    for is_refused, option, reason in refusal_rules:
        if is_refused:
            raise UsageError(f"{option} does not work with your own model ({name}): {reason}. Leave it out.")


def split_request_by_model(request: TrainingRequest) -> list[TrainingRequest]:
    """Returns one request for each model in `--sweep model=A,B`. The arms of one training share initial weights, so
    each model needs a separate training.
    """
    sweep_without_model = tuple(axis for axis in request.sweep if axis[0] != "model")
    model_names = dict(request.sweep).get("model", ())
    if not model_names:
        return [request]
    if request.settings.make or request.settings.start:
        option = request.settings.make or "--start"
        raise UsageError(f"--sweep model trains built-in models from their beginning, and not {option}. Leave one out.")
    for model in model_names:
        if model_names.count(model) > 1 or model not in SIZES:
            raise UsageError(f"--sweep model takes each of {', '.join(SIZES)} at most once, got {model!r:.80}.")
    return [
        replace(request, sweep=sweep_without_model, settings=replace(request.settings, model=model))
        for model in model_names
    ]


def _make_named_arms(request: TrainingRequest) -> tuple[Arm, ...]:
    # A single precision of a user's model is compared with the unchanged model.
    if request.settings.make and len(request.dtypes) == 1 and not (request.sweep or request.reference):
        request = replace(request, dtypes=(UNTOUCHED, *request.dtypes))
    # A precision may have two spellings, such as 'fp8' and 'float8'.
    modes = list(
        dict.fromkeys(word if word in MSAMP_LEVELS else precisions.find_canonical_name(word) for word in request.dtypes)
    )
    reference_modes = [mode for mode in modes if mode not in MSAMP_LEVELS]
    if request.reference in MSAMP_LEVELS or not (reference_modes or request.reference):
        raise UsageError(
            f"{request.reference or modes[0]} is one of MS-AMP's levels. Add bf16 to --dtypes, or another --reference."
        )
    # By default, the highest of the precisions is the reference.
    reference = min(reference_modes, key=lambda mode: precisions.get(mode).rank, default="")
    if request.reference is not None:
        reference = precisions.find_canonical_name(request.reference)
    # If only settings are swept, the candidates have the reference's precision.
    compared_modes = [mode for mode in modes if mode != reference] or [reference]
    candidates = {}
    for mode, settings in _list_swept_arms(request, compared_modes):
        # A sweep must not change a setting that an MS-AMP level sets.
        unswept_arm = MSAMP_LEVELS.get(mode, Arm(mode, mode))
        name = " ".join((mode, *(f"{key.replace('_', '-')}={value}" for key, value in settings)))
        if conflicts := {axis.replace("-", "_") for axis, _ in request.sweep} & dict(unswept_arm.settings).keys():
            raise UsageError(
                f"--sweep {min(conflicts).replace('_', '-')}: {mode} sets it already. Leave one of them out."
            )
        candidates[name] = replace(unswept_arm, name=name, settings=(*unswept_arm.settings, *settings))
    # A candidate with the reference's precision and the training's settings would repeat the reference.
    candidates.pop(reference, None)
    if not candidates:
        raise UsageError(
            f"{reference} has nothing to compare with. Add a precision to --dtypes, or --sweep master=fp32,fp16-scaled."
        )
    # Candidates are compared with the reference at its best rate, so the reference is trained at every swept rate.
    reference_rates = () if reference in compared_modes else dict(request.sweep).get("rate", ())
    arms = [*_list_reference_arms(reference, request, reference_rates), *candidates.values()]
    if len(arms) > MAX_ARMS:
        raise UsageError(f"{len(arms)} arms are more than the {MAX_ARMS} that one training takes. Sweep less.")
    return tuple(arms)


def _list_reference_arms(reference: str, request: TrainingRequest, rates: Sequence[str]) -> Iterator[Arm]:
    """Yields the reference, the arms that repeat it, and the reference at other learning rates."""
    yield Arm(reference, reference, ArmRole.REFERENCE)
    for role, title in ((ArmRole.REPEAT, "again"), (ArmRole.CHAOS, "one ulp")):
        if role.value in request.bands:
            yield Arm(f"{reference} {title}", reference, role)
    for rate in (_parse_value("rate", text) for text in rates):
        if rate != request.settings.rate:
            yield Arm(f"{reference} rate={rate}", reference, ArmRole.OTHER_RATE, (("rate", rate),))


def _list_swept_arms(request: TrainingRequest, modes: Sequence[str]) -> Iterator[tuple[str, Params]]:
    """Yields every precision with every combination of the swept settings, and of the swept options that this
    precision has."""
    axes = dict(_parse_axis(name, values, modes) for name, values in request.sweep)
    for mode in modes:
        names = [name for name in axes if name in _PARSER_BY_SETTING or _has_precision_option(mode, name)]
        for values in itertools.product(*(axes[name] for name in names)):
            precision = mode
            changed_settings: dict[str, Scalar] = {}
            for name, value in zip(names, values, strict=True):
                if name not in _PARSER_BY_SETTING:
                    precision += f":{name}={value}"
                # An arm's settings and name contain only what differs from the settings of the training.
                elif value != getattr(request.settings, name):
                    changed_settings[name] = value
            if "micro_batches" in changed_settings:
                changed_settings["batch"] = _compute_micro_batch_size(
                    request.settings, int(changed_settings["micro_batches"])
                )
            arm_precision = precision if precision in MSAMP_LEVELS else precisions.find_canonical_name(precision)
            yield arm_precision, tuple(changed_settings.items())


def _compute_micro_batch_size(settings: TrainerSettings, micro_batches: int) -> int:
    """Returns the batch size with which `micro_batches` micro-batches have the same sequences as a step of the
    reference.
    """
    sequences = make_config(settings, 1).batch * settings.micro_batches
    if sequences % micro_batches:
        raise UsageError(
            f"--sweep micro-batches: {micro_batches} micro-batches do not divide the {sequences} sequences of a step, "
            f"which all arms share. Give a --batch that is a multiple of {micro_batches}, or other micro-batches."
        )
    return sequences // micro_batches


def _parse_axis(name: str, values: Sequence[str], modes: Sequence[str]) -> tuple[str, Sequence[Scalar]]:
    setting_name = name.replace("-", "_")
    if setting_name == "model":
        raise UsageError("--sweep model trains one model after the other, which the command does. Give each --model.")
    if setting_name in _PARSER_BY_SETTING:
        return setting_name, [_parse_value(setting_name, value) for value in values]
    if not any(_has_precision_option(mode, name) for mode in modes):
        sweepable_names = {key.replace("_", "-") for key in _PARSER_BY_SETTING}
        for mode in modes:
            sweepable_names.update(option.name for option in _list_precision_options(mode))
        raise UnknownName("setting or option to sweep", name, sweepable_names)
    return name, values


def _parse_value(setting: str, text: str) -> Scalar:
    try:
        value = _PARSER_BY_SETTING[setting](text)
        # Settings validate themselves on construction.
        Arm("", "", settings=((setting, value),)).merge_settings(TrainerSettings())
    except (ValueError, UsageError) as error:
        reason = str(error) if isinstance(error, UsageError) else f"{text!r:.80} is not a number."
        raise UsageError(f"--sweep {setting.replace('_', '-')}: {reason}") from None
    return value


def _has_precision_option(mode: str, name: str) -> bool:
    return any(name in (option.name, *option.aliases) for option in _list_precision_options(mode))


def _list_precision_options(mode: str) -> Sequence[Option]:
    return () if mode in MSAMP_LEVELS else precisions.get(mode).options


def add_arm_support(arm: Arm, request: TrainingRequest, facts: DeviceFacts) -> Arm:
    """Returns the arm with the device's support for it. The arm is native if the device supports all of
    its precisions natively. If the device refuses one of them, `skip` has the reason.
    """
    settings = arm.merge_settings(request.settings)
    config = make_config(settings, 1)
    # The device must support all precisions of the arm.
    later_precisions = [parse_precision_change(settings.then)[0]] if settings.then else []
    precisions_used = (arm.precision, *later_precisions, *(word for _, word in settings.precision_map))
    support_per_precision = [find_support(settings, config, precisions.get(word), facts) for word in precisions_used]
    refusal_reasons = [support.reason for support in support_per_precision if support.level is Level.REFUSED]
    is_native = all(support.level is Level.NATIVE for support in support_per_precision)
    return replace(arm, native=is_native, skip=facts.unusable or "".join(refusal_reasons[:1]))


# The share of a device's memory that arms may use: context, fragmentation and readings need the rest.
_USABLE_MEMORY_SHARE = 0.9


def check_training_memory(training: Training, costs: Iterable[ArmCost]) -> None:
    """Raises UsageError if all arms together do not fit into memory. Does nothing if an arm's memory is unknown."""
    facts = training.device
    # Each rank on a GPU has separate memory. Ranks on a CPU share the memory.
    available_bytes = int(_USABLE_MEMORY_SHARE * facts.memory_bytes) // (1 if facts.accelerated else facts.ranks)
    reference, *_ = arms = select_arms_of_seed(training.arms, 0)
    costs_by_arm = {cost.arm: cost for cost in costs if cost.memory}
    # The state of every arm stays in memory. Arms train one at a time, so add only the largest memory of a step.
    required_bytes = largest_step_bytes = 0
    for arm in arms:
        cost = costs_by_arm.get(reference.name if arm.is_chance_arm else arm.name)
        if cost is None or cost.memory is None:
            return
        state_bytes = sum(bytes_kept for _, bytes_kept in cost.kept)
        required_bytes += state_bytes
        largest_step_bytes = max(largest_step_bytes, cost.memory.peak - state_bytes)
    required_bytes += largest_step_bytes
    if available_bytes and required_bytes > available_bytes:
        raise UsageError(
            f"the {len(arms)} arms need {size(required_bytes)} together, and there are {size(available_bytes)}. Train "
            "fewer at a time (--dtypes, --bands none), or choose a smaller --model, --batch or --sequence."
        )
