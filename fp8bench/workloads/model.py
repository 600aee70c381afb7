"""The suite model: a training step or a forward step of a user's model, both unchanged and with its products in other
precisions.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.errors import Fp8benchError, ModelNotSendable, NotRepeatable, UsageError
from fp8bench.formats.hardware import native, refused
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.model.words import UNTOUCHED
from fp8bench.protocols import Covered, Phases, Precision, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import devices, precisions, workloads
from fp8bench.user_code import own_words  # describes an error of the user's code in one line
from fp8bench.user_code.named import named

if TYPE_CHECKING:
    from fp8bench.nn.own_model import ConvertedUserModel, MakeResult

OPTIMIZERS = ("adamw", "sgd", "none")
COMPILE_SECONDS = 600.0
# Two runs of a model count as reproducible if they differ at most by this relative difference, or by this share of the
# measured error.
_MAX_REPRODUCIBLE_DIFFERENCE = 1e-4
_MAX_DIFFERENCE_ERROR_SHARE = 0.1
# The results of users' functions in this process, by the function's name and the seed. Every case gets a copy.
LOADED_MODELS: dict[tuple[str, int], MakeResult] = {}
# Maps the name of a model's class to a function that returns the model, for models that exist as objects in this
# process.
MODEL_MAKERS_IN_PROCESS: dict[str, Callable[[], Any]] = {}


def load_transferred_model(file: str) -> Any:
    """Loads a model, batch and loss from a file that another process of the same user has written. Such a file can run
    code, so files of other users are refused.
    """
    import torch

    try:
        with Path(file).open("rb") as binary_file:
            if (owner_id := os.fstat(binary_file.fileno()).st_uid) != os.getuid():
                raise PermissionError(f"{file} belongs to user {owner_id}")
            return torch.load(binary_file, weights_only=False)
    except Exception as error:
        raise ModelNotSendable(own_words(error)) from error


def _parse_model_target(text: str) -> str:
    module, colon, name = text.rpartition(":")
    if text not in MODEL_MAKERS_IN_PROCESS and not (
        colon and module and name and text.isprintable() and "=" not in text
    ):
        raise ValueError("expected module:function, or file.py:function, as `fp8bench profile` takes it")
    return text


@workloads.register("model")
class Model(Workload):
    """Times a user's model. The function `make` returns the model and a batch, and every case gets a copy of both. The
    precision `untouched` is the unchanged model.

    fp8bench cannot see where forward and backward begin. Only casts and products of converted layers have phases, and
    all other time is unattributed. `--shares` divides the unattributed time in a separate pass.
    """

    name = "model"
    summary = "your own model, unchanged and converted (fp8bench profile)"
    listed = False
    examined = True  # a worker calls `examine` before the measurement
    may_diverge = True
    dtypes = (UNTOUCHED, "bf16", "fp8")

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (
            Axis(
                "make", "module:function that gives (model, batch), or (model, batch, loss)", ("",), _parse_model_target
            ),
            Axis.choice(
                "pass",
                "training: forward, loss, backward, optimizer; forward: the forward pass alone, without gradients",
                "training",
                "forward",
            ),
            Axis.choice("optimizer", "optimizer of a training pass", *OPTIMIZERS),
            Axis.choice(
                "compile",
                "yes: torch.compile of the unchanged and of the converted model",
                "no",
                "yes",
            ),
            Axis(
                "skip",
                "kinds or paths of modules (with * and ?) that are not converted, separated by semicolons",
                ("",),
                str,
                quiet=True,
            ),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        case_params = {**params, "optimizer": "none"} if params["pass"] == "forward" else params
        return (tuple(case_params.items()),)

    def work(self, params: Scalars) -> Work:
        """Declares no FLOPs, because the tape counts the FLOPs of a user's model."""
        return Work(setup_seconds=COMPILE_SECONDS if params["compile"] == "yes" else 0.0)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # An unchanged model is never refused, whatever dtypes it computes in.
        if precision.name == UNTOUCHED:
            return native("the unchanged model")
        # `prepares` returns the support of a library that converts whole models, and None for other precisions.
        support = precision.prepares(facts) or precision.support(facts)
        if support.level is not Level.REFUSED and precision.remembers and params["compile"] == "yes":
            return refused(
                f"{precision.mode} depends on earlier casts, which a compiled graph does not know: omit --compile, "
                "or choose a dtype that casts from the tensor alone, like fp8"
            )
        return support

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        converts_whole_model = precision.prepares(facts) is not None
        return precision.support(facts) if converts_whole_model else self.support(params, precision, facts)

    def examine(self, setup: Setup) -> tuple[str, ...]:
        """Runs one uncompiled step of a copy of the model. If the step fails, raises UsageError with the error of the
        user's code.
        """
        state = _make_converted_model(setup, compiles=False)
        try:
            state.step(SilentPhases())
        except Fp8benchError:
            raise  # this error already explains itself to the user
        # Running out of memory is not a fault of the model. Other precisions may fit.
        except Exception as error:
            if not is_out_of_memory_error(error):
                raise UsageError(
                    f"{_read_target_name(setup)}: its model fails in {state.running_part}: {own_words(error)}."
                ) from error
            raise
        return ()

    def preload(self, setup: Setup) -> None:
        load_target_model(_read_target_name(setup), setup.seed, setup.facts)

    def prepare(self, setup: Setup) -> ConvertedUserModel:
        return _make_converted_model(setup)

    def step(self, state: ConvertedUserModel, phase: Phases) -> object:  # type: ignore[override]
        return state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares outputs, loss and gradients with those of the unchanged model. Both have the same weights, batch
        and random numbers.
        """
        from fp8bench.nn.own_model import ConvertedUserModel, compute_errors

        # 1. Run the unchanged model twice. The difference between the two runs is not an error of the precision.
        first_outcome, second_outcome = (
            ConvertedUserModel(_copy_user_model(setup), setup, compiles=False, converts=False).outcome()
            for _ in range(2)
        )
        differences_between_repeats = compute_errors(second_outcome, first_outcome)
        # 2. Run the converted copy with the same random numbers.
        state = _make_converted_model(setup, draws_alike=True)
        if setup.settles:
            state.outcome()  # this pass only fills the history from which the precision gets its scales
        errors = compute_errors(state.outcome(), first_outcome)
        # 3. Reject errors that are not clearly larger than the difference between the two runs.
        if _is_irreproducible(errors, differences_between_repeats):
            raise NotRepeatable(
                "the unchanged model gives different numbers from the same seed, perhaps because it draws them from "
                "a separate generator. Seed that in forward, or draw by torch, random or numpy.random"
            )
        return errors

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        """Trains on the model's only batch and returns the losses. A `setup.draw` other than 0 starts from the model
        that `make` returns with a different seed.
        """
        from fp8bench.nn.own_model import ConvertedUserModel, seed_generators

        model_copy = _copy_user_model(setup)
        if setup.draw:
            # Take the model of a second seed, but keep the batch of the first seed.
            model_copy_of_other_seed = _copy_user_model(replace(setup, seed=setup.seed + setup.draw))
            model_copy = model_copy._replace(model=model_copy_of_other_seed.model)
        state = ConvertedUserModel(
            model_copy, setup, _find_native_multiples(setup), converts=_is_model_converted(setup)
        )
        with seed_generators(setup.seed, setup.facts):
            return state.losses(steps)

    def gradient_error(self, setup: Setup, reference: Setup) -> float | None:
        from fp8bench.nn.own_model import compute_errors

        outcome = _make_converted_model(setup, compiles=False).outcome()
        exact = _make_converted_model(reference, compiles=False).outcome()
        errors = compute_errors(outcome, exact)
        differences_between_repeats = compute_errors(_make_converted_model(reference, compiles=False).outcome(), exact)
        return None if _is_irreproducible(errors, differences_between_repeats) else errors.get("gradient_error")

    def covered(self, setup: Setup) -> Covered | None:
        """Returns what is needed to compute the FLOP coverage: the unchanged model, its weights and a step. Returns
        None if the case does not convert the model.
        """
        from fp8bench.nn import conversion
        from fp8bench.nn.own_model import ConvertedUserModel, make_conversion

        if not _is_model_converted(setup):
            return None
        # Coverage counts the products of the unchanged model, and which of them the conversion would replace.
        state = ConvertedUserModel(_copy_user_model(setup), setup, compiles=False, converts=False)
        product_weights = make_conversion(state.model, setup, _find_native_multiples(setup)).product_weights
        # Accelerate decides which layers it converts, so look at the model that it returns.
        if isinstance(setup.arithmetic, conversion.AcceleratedModel):
            converted_names = conversion.find_converted_layers(_make_converted_model(setup, compiles=False).model)
            product_weights = tuple(
                weight if weight.name in converted_names else conversion.explain_unconverted_weight(weight)
                for weight in product_weights
            )
        multiple = max(precisions.get(setup.case.precision).multiples)
        return Covered(
            model=state.model,
            held=product_weights,
            step=lambda: state.step(SilentPhases()),
            multiple=multiple,
            loss=lambda: state.loss_words,  # a function, because the text exists only after the step
        )


def _make_converted_model(setup: Setup, **options: bool) -> ConvertedUserModel:
    """Returns a copy of the case's model, converted to the case's precision."""
    from fp8bench.nn.own_model import ConvertedUserModel

    return ConvertedUserModel(
        _copy_user_model(setup), setup, _find_native_multiples(setup), converts=_is_model_converted(setup), **options
    )


def _is_irreproducible(errors: Mapping[str, float], repeat_difference: Mapping[str, float]) -> bool:
    """Returns whether errors cannot be trusted, because two runs of the unchanged model differ by more than a different
    order of sums explains, and by more than a tenth of the error.
    """
    return any(
        difference > max(_MAX_REPRODUCIBLE_DIFFERENCE, _MAX_DIFFERENCE_ERROR_SHARE * errors.get(name, 0.0))
        for name, difference in repeat_difference.items()
    )


def _is_model_converted(setup: Setup) -> bool:
    return setup.case.precision != UNTOUCHED


def _find_native_multiples(setup: Setup) -> tuple[int, int]:
    """Returns two numbers: in the case's native products, K must be a multiple of the first, and N a multiple of the
    second. Returns (1, 1) if the case has no native products in a low precision.
    """
    modes = [precisions.get(word) for word in (setup.case.precision, *dict(setup.case.precision_map).values())]
    native_side_multiples = [precision.multiples for precision in modes if precision.support(setup.facts).is_native]
    if not native_side_multiples or not setup.facts.accelerated:
        return 1, 1
    return max(k for k, _ in native_side_multiples), max(n for _, n in native_side_multiples)


def _read_target_name(setup: Setup) -> str:
    return str(setup.params["make"])


def _copy_user_model(setup: Setup) -> MakeResult:
    return copy_target_model(_read_target_name(setup), setup.seed, setup.facts)


def load_target_model(name: str, seed: int, facts: DeviceFacts) -> MakeResult:
    """Returns the model, batch and loss that a user's function returns. The function is called once in each process."""
    from fp8bench.nn.own_model import parse_make_return_value, seed_generators

    # Call the function once for all cases, because it may load files. So all cases have the same weights and batch.
    if (name, seed) not in LOADED_MODELS:
        with seed_generators(seed, facts):
            parts = parse_make_return_value(name, _call_target(name), seed)
        _refuse_model_parameters(name, parts)
        LOADED_MODELS[name, seed] = parts
    return LOADED_MODELS[name, seed]


def copy_target_model(name: str, seed: int, facts: DeviceFacts) -> MakeResult:
    """Returns a copy of the model, batch and loss that a user's function returns."""
    parts = load_target_model(name, seed, facts)
    try:
        model, batch, loss = copy.deepcopy((parts.model, parts.batch, parts.loss))
        return parts._replace(model=model.to(facts.key), batch=batch, loss=loss)
    except Exception as error:
        if is_out_of_memory_error(error):
            raise
        raise UsageError(
            f"{name}: its model cannot be copied, but every arm needs a copy: {own_words(error)}. Keep objects "
            "that cannot be copied out of model, batch and loss."
        ) from error


def _refuse_model_parameters(name: str, parts: MakeResult) -> None:
    """Raises UsageError if a parameter of the user's model cannot be converted, trained or compared."""
    from torch.nn.parameter import is_lazy

    for path, parameter in parts.model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"{name}: its parameter {path} is created in the first call, after copies are converted. "
                "Call the model once in the function that returns it."
            )
        if parameter.is_complex():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(
                f"{name}: its parameter {path} is {dtype}, but casts, optimizers and errors need real numbers. "
                "Store it as pairs of real numbers, and take torch.view_as_complex of it in forward."
            )


def _call_target(name: str) -> Any:
    # MODEL_MAKERS_IN_PROCESS has functions of this process. All other functions are imported by `named`.
    function = MODEL_MAKERS_IN_PROCESS.get(name) or named(name)
    # Check the signature before the call. Otherwise a TypeError inside the function would look like a wrong signature.
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        remedy = "Give a function that takes none and returns a model and its batches (docs/profile.md)"
        raise UsageError(f"{name} is called without arguments, and {error}. {remedy}.") from None
    except ValueError:
        pass  # Python cannot read the signature of this function, so call it without a check
    try:
        return function()
    except Exception as error:
        if isinstance(error, ModelNotSendable) or is_out_of_memory_error(error):
            raise
        raise UsageError(f"{name} fails: {own_words(error)}.") from error


def is_out_of_memory_error(error: BaseException) -> bool:
    """Returns whether an error means that a device ran out of memory. Callers do not blame the user's model for it."""
    return any(devices.get(device_kind).is_out_of_memory(error) for device_kind in devices.names())
