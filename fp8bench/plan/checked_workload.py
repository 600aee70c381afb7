"""Asks workloads about their cases and checks the answers, because a user's workload may return anything.

A wrong answer raises UsageError before anything is measured, instead of hours later when a run is written or read.
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
from fp8bench.protocols.axes import COMMON, Axis
from fp8bench.registry import workloads
from fp8bench.user_code import own_words

MOST_CASES = 20_000
_MOST_TOKENS = 1 << 62
_COMMON = frozenset(axis.name for axis in COMMON)

_P = ParamSpec("_P")
_R = TypeVar("_R")


@contextmanager
def answering(workload: Workload) -> Iterator[None]:
    """Turns what a user's workload raises into UsageError. Errors of built-in workloads pass: they are our bugs."""
    try:
        yield
    except Fp8benchError:
        raise
    except Exception as error:
        if type(workload).__module__.startswith("fp8bench."):
            raise
        raise _cannot(workload, own_words(error)) from error


def _asks(question: Callable[Concatenate[Workload, _P], _R]) -> Callable[Concatenate[Workload, _P], _R]:
    @functools.wraps(question)
    def asked(workload: Workload, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with answering(workload):
            return question(workload, *args, **kwargs)

    return asked


@_asks
def axes_of(workload: Workload, facts: DeviceFacts) -> tuple[Axis, ...]:
    """Returns a workload's axes followed by the common ones. A quiet axis must have exactly one default."""
    axes = workload.axes(facts)
    for axis in axes:
        if axis.quiet and len(axis.default) != 1:
            raise _cannot(
                workload, f"its axis {axis.name!r} is quiet and has the defaults {axis.default!r:.80}, not one"
            )
        if axis.name in _COMMON:
            raise _cannot(workload, f"every suite already has an axis {axis.name!r}. Rename this one")
    return (*axes, *COMMON)


@_asks
def cases_of(workload: Workload, axes: tuple[Axis, ...], chosen: Scalars) -> tuple[Params, ...]:
    """Returns the parameters of the cases for one value of each axis. `chosen` may leave out quiet axes.

    The workload sees only its axes; the chosen values of common axes follow its parameters. Quiet axes at their
    default are left out, so that adding such an axis changes no case.
    """
    quiet = {axis.name: axis.of({}) for axis in axes if axis.quiet}
    # Chosen values win, and keep their order in front, because the order of parameters is part of a case's id.
    values = {**chosen, **quiet, **chosen}
    common = [(name, values[name]) for name in values if name in _COMMON]
    cases = []
    for params in workload.expand({name: values[name] for name in values if name not in _COMMON}):
        pairs = (*_check_params(workload, params), *common)
        cases.append(tuple(pair for pair in pairs if pair not in quiet.items()))
    return tuple(cases)


@_asks
def parameters_of(workload: Workload, request: Request, facts: DeviceFacts, corpus: str | None) -> tuple[Params, ...]:
    """Returns the parameters of all cases of a suite on a device, each once."""
    axes = axes_of(workload, facts)
    values = _values(request, workload, axes, facts)
    combinations = math.prod(len(choices) for choices in values)
    if combinations > MOST_CASES:
        raise UsageError(f"--set asks for {combinations} combinations; the most is {MOST_CASES}. Choose fewer values.")
    text = (("data", corpus),) if corpus and workload.uses_corpus else ()
    names = [axis.name for axis in axes]
    cases: dict[Params, None] = {}
    for combination in itertools.product(*values):
        for params in cases_of(workload, axes, dict(zip(names, combination, strict=True))):
            cases[(*params, *text)] = None
    return tuple(cases)


def _values(request: Request, workload: Workload, axes: Sequence[Axis], facts: DeviceFacts) -> list[list[Scalar]]:
    """Returns the values of each axis: those of the request, else the grid's if requested, else the defaults."""
    requested, is_quick = dict(request.axes), request.quick
    if request.grid and workload.history is not None:
        requested = {**(workload.history.gpu if facts.accelerated else workload.history.cpu), **requested}
        is_quick = False  # sizes outside the grid have no history
    values = []
    for axis in axes:
        words = (*requested.get(axis.name, ()), *requested.get(axis.alias, ()))
        values.append(axis.values(words or (is_quick and axis.quick) or axis.default))
    return values


def _check_params(workload: Workload, params: Params) -> Params:
    """Returns the parameters if they are pairs of a name and a plain value, each printable on one line."""
    answer: object = params
    if not isinstance(answer, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in answer):
        raise _cannot(workload, f"its parameters are {answer!r:.120}, and must be a tuple of pairs")
    for name, value in answer:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise _cannot(workload, f"a parameter is called {name!r:.80}, and its name must be text on one line")
        if type(value) not in (int, float, str, bool):
            kind = type(value).__name__
            raise _cannot(
                workload, f"parameter {name!r} is {value!r:.80} ({kind}), and must be an int, float, str or bool"
            )
        # Control characters would break tables, and lone surrogates all files but JSON.
        is_plain = value.isprintable() if isinstance(value, str) else math.isfinite(value)
        if not is_plain:
            raise _cannot(workload, f"parameter {name!r} is {value!r:.80}, and must be finite, or text on one line")
    return params


@_asks
def work_of(workload: Workload, params: Scalars) -> Work:
    work = workload.work(params)
    answer: object = work
    if not isinstance(answer, Work):
        raise _cannot(workload, f"work() returned {answer!r:.80}, and must return a Work")
    for name, value in vars(answer).items():
        is_count = name == "tokens"
        if type(value) is not int and (is_count or type(value) is not float):
            required = "a whole number (int)" if is_count else "a number (float)"
            raise _cannot(workload, f"work() returned {name} = {value!r:.80}, and it must be {required}")
        if not math.isfinite(value) or value < 0 or (is_count and value >= _MOST_TOKENS):
            raise _cannot(workload, f"work() returned {name} = {value!r:.80}, which is not a count")
    return work


@_asks
def memory_of(workload: Workload, params: Scalars, precision: Precision) -> float:
    answer: object = workload.memory(params, precision)
    if type(answer) not in (int, float) or not math.isfinite(number := float(str(answer))) or number < 0:
        raise _cannot(workload, f"memory() returned {answer!r:.80}, and must return a number of bytes (float)")
    return number


@_asks
def support_of(
    workload: Workload, params: Scalars, precision: Precision, facts: DeviceFacts, kind: str = ""
) -> Support:
    """Returns how a device supports a precision in a workload or, with `kind`, in its layers of that kind."""
    if reason := _refusal(workload, params, precision, kind):
        return Support(Level.REFUSED, reason)
    if kind:
        support = workload.layer_support(kind, params, precision, facts)
    else:
        support = workload.support(params, precision, facts)
    level, why = getattr(support, "level", None), getattr(support, "reason", None)
    if type(support) is not Support or not isinstance(level, Level) or not isinstance(why, str):
        raise _cannot(workload, f"support() returned {support!r:.120}, and must return a Support of a Level and a text")
    return support


def _refusal(workload: Workload, params: Scalars, precision: Precision, kind: str) -> str:
    """Returns why no device can run this precision here; '' if it depends on the device."""
    whole_layers = precision.backend if precision.whole_layers and not workload.linear_layers else None
    if whole_layers is not None and workload.single_products:
        if reason := whole_layers.why_inseparable(precision):
            return reason
    elif whole_layers is not None:
        having = ", ".join(name for name in workloads.names() if workloads.get(name).linear_layers)
        why = f"{whole_layers.name} replaces linear layers, and suite {workload.name} has none"
        return f"{why}: choose {having}"
    if precision.unit_scaled and (kind or not workload.unit_scales):
        having = ", ".join(f"suite {name}" for name in workloads.names() if workloads.get(name).unit_scales)
        where = f"{kind} layers of another model" if kind else f"suite {workload.name}"
        why = (
            f"{precision.mode} casts without scales, which needs a unit-scaled model, and {where} cannot be unit-scaled"
        )
        return f"{why}: choose {having} or train, or fp8 here"
    refuses = precision.backend.refuses if precision.backend else {}
    return next((why for (axis, value), why in refuses.items() if params.get(axis) == value), "")


@_asks
def layers_of(workload: Workload, params: Scalars, keys: Iterable[str] = ()) -> tuple[Layer, ...]:
    """Returns the layers of a case and the operations around them.

    Only a worker can examine a user's model; for it, the layers that `keys` name are assumed to exist.
    """
    if workload.examined:
        return tuple(Layer(key, key) for key in keys)
    return _check_layers(workload, (*products_of(workload, params), *workload.around(params)))


@_asks
def products_of(workload: Workload, params: Scalars) -> tuple[Layer, ...]:
    return _check_layers(workload, workload.layers(params))


def layers_of_all(workload: Workload, settings: Iterable[Params], keys: Sequence[str] = ()) -> list[Layer]:
    """Returns the layers of several cases, each once."""
    layers: dict[Layer, None] = {}
    for params in settings:
        layers |= dict.fromkeys(layers_of(workload, dict(params), keys))
    return list(layers)


def _check_layers(workload: Workload, layers: object) -> tuple[Layer, ...]:
    """Returns the layers if names are unique, and names and kinds can be written in a precision map."""
    if not isinstance(layers, tuple):
        raise _cannot(workload, f"layers() returned {layers!r:.120}, and must return a tuple of Layer")
    for layer in layers:
        if not isinstance(layer, Layer) or not _is_key(layer.name) or not _is_key(layer.kind):
            rule = "name and kind must be text without commas, spaces, '=' and empty parts between dots"
            raise _cannot(workload, f"layers() returned {layer!r:.120}, which is not a Layer, or whose {rule}")
        if layer.high not in (True, False):
            raise _cannot(workload, f"layers() returned {layer!r:.120}, whose `high` must be True or False")
    if len({layer.name for layer in layers}) < len(layers):
        raise _cannot(workload, "two of its layers have the same name")
    return layers


def _is_key(text: object) -> bool:
    """Whether a text can be a key of a precision map, like 'attn.qkv'."""
    if not isinstance(text, str) or not text.isprintable() or any(letter in ",= " for letter in text):
        return False
    return all(text.split("."))


def _cannot(workload: Workload, why: str) -> UsageError:
    return UsageError(f"suite {workload.name!r} cannot be planned: {why}. Fix the file.")
