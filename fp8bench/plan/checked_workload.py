"""Calls the methods of workloads and checks what they return, because a user's workload may return anything.

A wrong value raises UsageError before anything is measured. Without the check, it would cause an error hours later,
when a run is written or read.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.model import DeviceFacts, Level, Params, Request, Scalar, Scalars, Support, Work
from fp8bench.protocols import Layer, Precision, Workload
from fp8bench.protocols.axes import COMMON_AXES, Axis
from fp8bench.registry import workloads
from fp8bench.user_code import own_words

MAX_CASES = 20_000
_MAX_WORK_TOKENS = 1 << 62
_COMMON_AXES = frozenset(axis.name for axis in COMMON_AXES)

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def user_errors_as_usage(workload: Workload) -> Iterator[None]:
    """A context that turns an exception of a user's workload into UsageError. Exceptions of built-in workloads are not
    changed, because they are bugs of fp8bench.
    """
    try:
        yield
    # An error of fp8bench already has a message for the user.
    except Fp8benchError:
        raise
    except Exception as error:
        if type(workload).__module__.startswith("fp8bench."):
            raise
        error_description = own_words(error)
        raise _make_planning_error(workload, error_description) from error


def _translates_user_errors(
    method: Callable[Concatenate[Workload, _P], _R],
) -> Callable[Concatenate[Workload, _P], _R]:
    @functools.wraps(method)
    def call_method(workload: Workload, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with user_errors_as_usage(workload):
            return method(workload, *args, **kwargs)

    return call_method


@_translates_user_errors
def list_checked_axes(workload: Workload, facts: DeviceFacts) -> tuple[Axis, ...]:
    """Returns the axes of a workload, followed by the axes that all workloads have. Raises UsageError if a quiet axis
    does not have exactly one default. A case's name omits a quiet axis that has its default.
    """
    axes = workload.axes(facts)
    for axis in axes:
        if axis.quiet and len(axis.default) != 1:
            raise _make_planning_error(
                workload, f"its axis {axis.name!r} is quiet and has the defaults {axis.default!r:.80}, not one"
            )
        if axis.name in _COMMON_AXES:
            raise _make_planning_error(workload, f"every suite already has an axis {axis.name!r}. Rename this one")
    return (*axes, *COMMON_AXES)


@_translates_user_errors
def expand_cases(workload: Workload, axes: tuple[Axis, ...], chosen_values: Scalars) -> tuple[Params, ...]:
    """Returns the parameters of the cases for one value of every axis. `chosen_values` need not contain quiet axes.

    The workload receives only the values of the axes that it declares. The values of common axes are added after its
    parameters. A quiet axis is left out of the parameters if it has its default, so that a new quiet axis does not
    change the ids of existing cases.
    """
    # `of` returns the default of a quiet axis that the parameters ({}) leave out.
    default_by_quiet_axis = {axis.name: axis.of({}) for axis in axes if axis.quiet}
    # Put chosen values first, because the order is part of a case's id. They also override the defaults.
    values = {**chosen_values, **default_by_quiet_axis, **chosen_values}
    common_params = [(name, values[name]) for name in values if name in _COMMON_AXES]
    cases = []
    for params in workload.expand({name: values[name] for name in values if name not in _COMMON_AXES}):
        param_value_pairs = (*_check_params(workload, params), *common_params)
        cases.append(tuple(pair for pair in param_value_pairs if pair not in default_by_quiet_axis.items()))
    return tuple(cases)


@_translates_user_errors
def expand_request(workload: Workload, request: Request, facts: DeviceFacts, corpus: str | None) -> tuple[Params, ...]:
    """Returns the parameters of each case of a suite that a request asks for on a device. Each case occurs once."""
    axes = list_checked_axes(workload, facts)
    values = _choose_axis_values(request, workload, axes, facts)
    axis_combination_count = math.prod(len(choices) for choices in values)
    if axis_combination_count > MAX_CASES:
        raise UsageError(
            f"--set asks for {axis_combination_count} combinations; the most is {MAX_CASES}. Choose fewer values."
        )
    text_params = (("data", corpus),) if corpus and workload.uses_corpus else ()
    names = [axis.name for axis in axes]
    # A dictionary drops cases that several combinations have in common.
    cases: dict[Params, None] = {}
    for combination in itertools.product(*values):
        for params in expand_cases(workload, axes, dict(zip(names, combination, strict=True))):
            cases[(*params, *text_params)] = None
    return tuple(cases)


def _choose_axis_values(
    request: Request, workload: Workload, axes: Sequence[Axis], facts: DeviceFacts
) -> list[list[Scalar]]:
    """Returns the values of each axis: those of the request; otherwise, with --grid, those of the workload's `history`;
    otherwise the defaults of the axis.
    """
    requested_values_by_axis = dict(request.axes)
    uses_quick_sizes = request.quick
    if request.grid and workload.history is not None:
        requested_values_by_axis = {
            **(workload.history.gpu if facts.accelerated else workload.history.cpu),
            **requested_values_by_axis,
        }
        uses_quick_sizes = False  # the sizes of --quick are not in the grid, so they have no history
    values = []
    for axis in axes:
        requested_axis_values = (
            *requested_values_by_axis.get(axis.name, ()),
            *requested_values_by_axis.get(axis.alias, ()),
        )
        values.append(axis.values(requested_axis_values or (uses_quick_sizes and axis.quick) or axis.default))
    return values


def _check_params(workload: Workload, params: Params) -> Params:
    """Returns `params` unchanged. Raises UsageError unless each parameter is a pair of a name and a plain value that
    can be printed on one line.
    """
    returned_value: object = params
    if not isinstance(returned_value, tuple) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in returned_value
    ):
        raise _make_planning_error(
            workload, f"its parameters are {returned_value!r:.120}, and must be a tuple of pairs"
        )
    for name, value in returned_value:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise _make_planning_error(
                workload, f"a parameter is called {name!r:.80}, and its name must be text on one line"
            )
        subject = f"parameter {name!r} is {value!r:.80}"
        if type(value) not in (int, float, str, bool):
            raise _make_planning_error(
                workload, f"{subject} ({type(value).__name__}), and must be an int, float, str or bool"
            )
        # Control characters would break tables. Lone surrogates cannot be written to files other than JSON.
        if not (value.isprintable() if isinstance(value, str) else math.isfinite(value)):
            raise _make_planning_error(workload, f"{subject}, and must be finite, or text on one line")
    return params


@_translates_user_errors
def get_checked_work(workload: Workload, params: Scalars) -> Work:
    work = workload.work(params)
    returned_value: object = work
    if not isinstance(returned_value, Work):
        raise _make_planning_error(workload, f"work() returned {returned_value!r:.80}, and must return a Work")
    for name, value in vars(returned_value).items():
        is_count = name == "tokens"
        subject = f"work() returned {name} = {value!r:.80}"
        if type(value) is not int and (is_count or type(value) is not float):
            expected_type_text = "a whole number (int)" if is_count else "a number (float)"
            raise _make_planning_error(workload, f"{subject}, and it must be {expected_type_text}")
        if not math.isfinite(value) or value < 0 or (is_count and value >= _MAX_WORK_TOKENS):
            raise _make_planning_error(workload, f"{subject}, which is not a count")
    return work


@_translates_user_errors
def get_checked_memory(workload: Workload, params: Scalars, precision: Precision) -> float:
    returned_value: object = workload.memory(params, precision)
    # Convert the text, because an integer that is too large for a float then becomes infinity instead of an exception.
    if (
        type(returned_value) not in (int, float)
        or not math.isfinite(byte_count := float(str(returned_value)))
        or byte_count < 0
    ):
        raise _make_planning_error(
            workload, f"memory() returned {returned_value!r:.80}, and must return a number of bytes (float)"
        )
    return byte_count


@_translates_user_errors
def get_checked_support(
    workload: Workload, params: Scalars, precision: Precision, facts: DeviceFacts, kind: str = ""
) -> Support:
    """Returns how a device supports a precision in a workload. With `kind`, only the workload's layers of this kind
    count.
    """
    if reason := _explain_refusal(workload, params, precision, kind):
        return Support(Level.REFUSED, reason)
    if kind:
        support = workload.layer_support(kind, params, precision, facts)
    else:
        support = workload.support(params, precision, facts)
    level = getattr(support, "level", None)
    support_reason = getattr(support, "reason", None)
    if type(support) is not Support or not isinstance(level, Level) or not isinstance(support_reason, str):
        raise _make_planning_error(
            workload, f"support() returned {support!r:.120}, and must return a Support of a Level and a text"
        )
    return support


def _explain_refusal(workload: Workload, params: Scalars, precision: Precision, kind: str) -> str:
    """Returns why no device can run this precision in this workload. Returns '' if some device might."""
    backend = precision.backend
    suites = map(workloads.get, workloads.names())
    # Without linear layers, the step must call casts and products separately. This needs support of workload and
    # backend.
    if backend is not None and precision.whole_layers and not workload.linear_layers:
        if not workload.single_products:
            usable_suite_names = ", ".join(suite.name for suite in suites if suite.linear_layers)
            why = f"{backend.name} replaces linear layers, and suite {workload.name} has none"
            return f"{why}: choose {usable_suite_names}"
        if reason := backend.why_inseparable(precision):
            return reason
    # Unit scaling needs a whole model, so a precision map cannot give it to layers of one kind.
    if precision.unit_scaled and (kind or not workload.unit_scales):
        usable_suite_names = ", ".join(f"suite {suite.name}" for suite in suites if suite.unit_scales)
        subject = f"{kind} layers of another model" if kind else f"suite {workload.name}"
        why = f"{precision.mode} casts without scales, which only works in unit-scaled models; {subject} cannot be one"
        return f"{why}: choose {usable_suite_names} or train, or fp8 here"
    refused_cases = backend.refuses.items() if backend else ()
    return next((why for (axis, value), why in refused_cases if params.get(axis) == value), "")


@_translates_user_errors
def checked_layers(workload: Workload, params: Scalars, keys: Iterable[str] = ()) -> tuple[Layer, ...]:
    """Returns the layers of a case that a precision map can name, with or without a matrix product.

    Only a worker knows the layers of a user's model. For such a model, all layers in `keys` are assumed to exist.
    """
    if workload.examined:
        return tuple(Layer(key, key) for key in keys)
    return _check_layers(workload, (*checked_products(workload, params), *workload.around(params)))


@_translates_user_errors
def checked_products(workload: Workload, params: Scalars) -> tuple[Layer, ...]:
    return _check_layers(workload, workload.layers(params))


def merge_layers(workload: Workload, settings: Iterable[Params], keys: Sequence[str] = ()) -> list[Layer]:
    """Returns the layers of the cases with the parameters `settings`, each layer once."""
    layers = (checked_layers(workload, dict(params), keys) for params in settings)
    return list(dict.fromkeys(itertools.chain.from_iterable(layers)))


def _check_layers(workload: Workload, layers: object) -> tuple[Layer, ...]:
    """Returns `layers` unchanged. Raises UsageError unless it is a tuple of layers with unique names, and each name and
    kind can be a key of a precision map.
    """
    if not isinstance(layers, tuple):
        raise _make_planning_error(workload, f"layers() returned {layers!r:.120}, and must return a tuple of Layer")
    for layer in layers:
        subject = f"layers() returned {layer!r:.120}"
        if (
            not isinstance(layer, Layer)
            or not _is_precision_map_key(layer.name)
            or not _is_precision_map_key(layer.kind)
        ):
            rule = "name and kind must be text without commas, spaces, '=' and empty parts between dots"
            raise _make_planning_error(workload, f"{subject}, which is not a Layer, or whose {rule}")
        if layer.high not in (True, False):
            raise _make_planning_error(workload, f"{subject}, whose `high` must be True or False")
    if len({layer.name for layer in layers}) < len(layers):
        raise _make_planning_error(workload, "two of its layers have the same name")
    return layers


def _is_precision_map_key(text: object) -> bool:
    """Returns whether a text can be a key of a precision map, like 'attn.qkv'."""
    if not isinstance(text, str) or not text.isprintable() or any(letter in ",= " for letter in text):
        return False
    return all(text.split("."))


def _make_planning_error(workload: Workload, reason: str) -> UsageError:
    return UsageError(f"suite {workload.name!r} cannot be planned: {reason}. Fix the file.")
