"""A user's model: a step of it unchanged, and the same step with products of other precisions."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.errors import Fp8benchError, NotRepeatable, NotSent, UsageError
from fp8bench.formats.hardware import native, refused
from fp8bench.model import DeviceFacts, Level, Params, Scalars, Support, Work
from fp8bench.model.words import UNTOUCHED
from fp8bench.protocols import Covered, Phases, Precision, Setup, SilentPhases, Workload
from fp8bench.protocols.axes import Axis
from fp8bench.registry import devices, precisions, workloads
from fp8bench.user_code import own_words
from fp8bench.user_code.named import named

if TYPE_CHECKING:
    from fp8bench.nn.own_model import Given, Outcome, OwnModel

OPTIMIZERS = ("adamw", "sgd", "none")
COMPILE_SECONDS = 600.0
# A model counts as reproducible if it differs from itself by less than the first, or by a smaller share of an error.
_REPEATS = 1e-4
_TELLING = 0.1
# Results of makers in this process, by name and seed; arms get copies.
MADE: dict[tuple[str, int], Given] = {}
# Makers of live models, by the name of the model's class.
LIVE: dict[str, Callable[[], Any]] = {}


def load_sent(file: str) -> Any:
    """Loads the model, batch and loss that another process of this user has written to a file; code in it may run."""
    import torch

    try:
        with Path(file).open("rb") as opened:
            if (owner := os.fstat(opened.fileno()).st_uid) != os.getuid():
                raise PermissionError(f"{file} belongs to user {owner}")
            return torch.load(opened, weights_only=False)
    except Exception as error:
        raise NotSent(own_words(error)) from error


def _target(text: str) -> str:
    place, colon, name = text.rpartition(":")
    if text not in LIVE and not (colon and place and name and text.isprintable() and "=" not in text):
        raise ValueError("expected module:function, or file.py:function, as `fp8bench profile` takes it")
    return text


@workloads.register("model")
class Model(Workload):
    """A user's model: `make` returns it and a batch; every arm has a copy. Precision `untouched` is the unchanged
    model. Only the model itself knows where forward and backward are: their time is unattributed, except casts and
    products of converted layers. `--shares` divides it in a separate pass."""

    name = "model"
    summary = "a model of your own, as it came and converted (fp8bench profile)"
    listed = False
    examined = True
    may_diverge = True
    dtypes = (UNTOUCHED, "bf16", "fp8")

    def axes(self, facts: DeviceFacts) -> tuple[Axis, ...]:
        return (
            Axis("make", "module:function that gives (model, batch), or (model, batch, loss)", ("",), _target),
            Axis.choice(
                "pass",
                "training: forward, loss, backward, optimizer; forward: that alone, without gradients",
                "training",
                "forward",
            ),
            Axis.choice("optimizer", "of a training pass", *OPTIMIZERS),
            Axis.choice(
                "compile",
                "yes: torch.compile, both as it came and converted",
                "no",
                "yes",
            ),
            Axis(
                "skip",
                "kinds, or paths of modules with * and ?, that stay as they came; semicolons between",
                ("",),
                str,
                quiet=True,
            ),
        )

    def expand(self, params: Scalars) -> tuple[Params, ...]:
        case_params = {**params, "optimizer": "none"} if params["pass"] == "forward" else params
        return (tuple(case_params.items()),)

    def work(self, params: Scalars) -> Work:
        """Declares no FLOPs, which the tape counts."""
        return Work(setup_seconds=COMPILE_SECONDS if params["compile"] == "yes" else 0.0)

    def support(self, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        # Whatever it computes in, it is what its owner runs.
        if precision.name == UNTOUCHED:
            return native("the model as it came")
        support = precision.prepares(facts) or precision.support(facts)
        if support.level is not Level.REFUSED and precision.remembers and params["compile"] == "yes":
            return refused(
                f"{precision.mode} depends on earlier casts, which a compiled graph does not know: leave --compile "
                "out, or choose a dtype without memory, like fp8"
            )
        return support

    def layer_support(self, kind: str, params: Scalars, precision: Precision, facts: DeviceFacts) -> Support:
        prepares = precision.prepares(facts) is not None
        return precision.support(facts) if prepares else self.support(params, precision, facts)

    def examine(self, setup: Setup) -> tuple[str, ...]:
        """Takes one step of a copy, uncompiled; raises UsageError with the user's error if it fails."""
        state = _own_model(setup, compiles=False)
        try:
            state.step(SilentPhases())
        except Fp8benchError:
            raise
        # Exhausted memory is not a mistake of the model: other precisions may fit.
        except Exception as error:
            if not is_exhausted(error):
                raise UsageError(f"{_name(setup)}: its model fails in {state.doing}: {own_words(error)}.") from error
            raise
        return ()

    def prepare(self, setup: Setup) -> OwnModel:
        return _own_model(setup)

    def step(self, state: OwnModel, phase: Phases) -> object:  # type: ignore[override]
        return state.step(phase)

    def error(self, setup: Setup) -> dict[str, float]:
        """Compares outputs, loss and gradients with the unchanged model's, from the same weights, batch and random
        numbers."""
        from fp8bench.nn.own_model import errors_between

        # 1. Run the unchanged model twice: its difference from itself is not an error of the precision.
        untouched, apart = _untouched_twice(setup)
        # 2. Run the converted copy, with the same random numbers.
        state = _own_model(setup, draws_alike=True)
        if setup.settles:
            state.outcome()
        errors = errors_between(state.outcome(), untouched)
        # 3. Reject an error that is not larger than that difference.
        if _is_drowned(errors, apart):
            raise NotRepeatable(
                "the unchanged model gives different numbers from the same seed, perhaps because it draws them from "
                "a separate generator. Seed that in forward, or draw by torch, random or numpy.random"
            )
        return errors

    def losses(self, setup: Setup, steps: int) -> Sequence[float]:
        """Trains on the model's one batch; another draw is the model that its maker returns under another seed."""
        from fp8bench.nn.own_model import OwnModel, seed_generators

        made = _copy_of(setup)
        if setup.draw:
            made = made._replace(model=_copy_of(replace(setup, seed=setup.seed + setup.draw)).model)
        state = OwnModel(made, setup, _multiples(setup), converts=_converts(setup))
        with seed_generators(setup.seed, setup.facts):
            return state.losses(steps)

    def gradient_error(self, setup: Setup, reference: Setup) -> float | None:
        from fp8bench.nn.own_model import errors_between

        outcome = _own_model(setup, compiles=False).outcome()
        exact = _own_model(reference, compiles=False).outcome()
        errors = errors_between(outcome, exact)
        apart = errors_between(_own_model(reference, compiles=False).outcome(), exact)
        return None if _is_drowned(errors, apart) else errors.get("gradient_error")

    def covered(self, setup: Setup) -> Covered | None:
        from fp8bench.nn import conversion
        from fp8bench.nn.own_model import OwnModel, conversion_of

        if not _converts(setup):
            return None
        # Coverage counts products of the unchanged model, by whether conversion would replace them.
        state = OwnModel(_copy_of(setup), setup, compiles=False, converts=False)
        held = conversion_of(state.model, setup, _multiples(setup)).held
        # Accelerate itself decides what it converts, so only its result shows that.
        if isinstance(setup.arithmetic, conversion.AcceleratedModel):
            low = conversion.converted_in(_own_model(setup, compiles=False).model)
            held = tuple(holder if holder.name in low else conversion.explain_unchanged(holder) for holder in held)
        multiple = max(precisions.get(setup.case.precision).multiples)
        return Covered(state.model, held, lambda: state.step(SilentPhases()), multiple, lambda: state.loss_words)


def _own_model(setup: Setup, **options: bool) -> OwnModel:
    """Returns a copy of the case's model, converted to its precision."""
    from fp8bench.nn.own_model import OwnModel

    return OwnModel(_copy_of(setup), setup, _multiples(setup), converts=_converts(setup), **options)


def _untouched_twice(setup: Setup) -> tuple[Outcome, dict[str, float]]:
    """Returns the results of the unchanged model, and how far a repetition differs from them."""
    from fp8bench.nn import own_model

    first, second = (
        own_model.OwnModel(_copy_of(setup), setup, compiles=False, converts=False).outcome() for _ in range(2)
    )
    return first, own_model.errors_between(second, first)


def _is_drowned(errors: Mapping[str, float], apart: Mapping[str, float]) -> bool:
    """Whether the model differs from itself by a tenth of an error or more, and by more than sums in a different
    order."""
    return any(difference > max(_REPEATS, _TELLING * errors.get(name, 0.0)) for name, difference in apart.items())


def _converts(setup: Setup) -> bool:
    return setup.case.precision != UNTOUCHED


def _multiples(setup: Setup) -> tuple[int, int]:
    """Returns the multiples for native products of the case's device; 1 if they are emulated, or torch's own."""
    modes = [precisions.get(word) for word in (setup.case.precision, *dict(setup.case.precision_map).values())]
    native = [precision.multiples for precision in modes if precision.support(setup.facts).is_native]
    return tuple(map(max, zip(*native, strict=True))) if native and setup.facts.accelerated else (1, 1)


def _name(setup: Setup) -> str:
    return str(setup.case.param("make"))


def _copy_of(setup: Setup) -> Given:
    return copy_made(_name(setup), setup.seed, setup.facts)


def copy_made(name: str, seed: int, facts: DeviceFacts) -> Given:
    """Returns a copy of the model, batch and loss of a maker, which is called once a process."""
    from fp8bench.nn.own_model import parse_given, seed_generators

    # Makers may load files: once is enough, and every arm starts from the same numbers.
    if (name, seed) not in MADE:
        with seed_generators(seed, facts):
            parts = parse_given(name, _call_maker(name), seed)
        _refuse_parameters(name, parts)
        MADE[name, seed] = parts
    parts = MADE[name, seed]
    try:
        model, batch, loss = copy.deepcopy((parts.model, parts.batch, parts.loss))
        return parts._replace(model=model.to(facts.key), batch=batch, loss=loss)
    except Exception as error:
        if is_exhausted(error):
            raise
        raise UsageError(
            f"{name}: its model cannot be copied, but every arm needs a copy: {own_words(error)}. Keep objects "
            "that cannot be copied out of model, batch and loss."
        ) from error


def _refuse_parameters(name: str, made: Given) -> None:
    """Raises UsageError for parameters that cannot be converted, trained or compared."""
    from torch.nn.parameter import is_lazy

    for path, parameter in made.model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(
                f"{name}: its parameter {path} is made in the first call, after copies are converted. Call the model "
                "once in the function that gives it."
            )
        if parameter.is_complex():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(
                f"{name}: its parameter {path} is {dtype}, but casts, optimizers and errors need real numbers. "
                "Store it as pairs of real numbers, and take torch.view_as_complex of it in forward."
            )


def _call_maker(name: str) -> Any:
    function = LIVE.get(name) or named(name)
    # Check first whether it can be called: its own TypeError would look like ours.
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        remedy = "Give a function that takes none and returns a model and its batches (docs/profile.md)"
        raise UsageError(f"{name} is called without arguments, and {error}. {remedy}.") from None
    except ValueError:
        pass  # Python cannot read its signature: just call it
    try:
        return function()
    except Exception as error:
        if isinstance(error, NotSent) or is_exhausted(error):
            raise
        raise UsageError(f"{name} fails: {own_words(error)}.") from error


def is_exhausted(error: BaseException) -> bool:
    """Whether memory ran out, which the worker reports for any case."""
    return any(devices.get(kind).is_out_of_memory(error) for kind in devices.names())
