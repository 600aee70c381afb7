"""What a workload answers about its cases, held against what a plan can keep: foreign code may answer anything.

A wrong answer becomes one sentence before anything is measured, and not when a run is written, or read, hours later.
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
    """What a user's own workload raises meanwhile becomes a sentence; what ours raise is to be reported."""
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
    """Its own axes, of which the quiet ones have one default, and those that every workload has."""
    axes = workload.axes(facts)
    for axis in axes:
        if axis.quiet and len(axis.default) != 1:
            raise _cannot(
                workload, f"its axis {axis.name!r} is quiet and has the defaults {axis.default!r:.80}, not one"
            )
        if axis.name in _COMMON:
            raise _cannot(workload, f"every suite has an axis {axis.name!r}, and it has one of its own. Rename that")
    return (*axes, *COMMON)


@_asks
def cases_of(workload: Workload, axes: tuple[Axis, ...], chosen: Scalars) -> tuple[Params, ...]:
    """The parameters of the cases that one value of each axis stands for; quiet axes need not be among them.

    The workload is asked about its own axes; what is chosen of those that all have stands behind.
    """
    quiet = {axis.name: axis.of({}) for axis in axes if axis.quiet}
    every = {**chosen, **{name: value for name, value in quiet.items() if name not in chosen}}
    common = [(name, value) for name, value in every.items() if name in _COMMON]
    expanded = workload.expand({name: value for name, value in every.items() if name not in _COMMON})
    return tuple(
        tuple(pair for pair in (*_sound_params(workload, params), *common) if pair not in quiet.items())
        for params in expanded
    )


@_asks
def parameters_of(workload: Workload, request: Request, facts: DeviceFacts, corpus: str | None) -> tuple[Params, ...]:
    """The parameters of all cases of a suite on a device, each once."""
    axes = axes_of(workload, facts)
    values = _values(request, workload, axes, facts)
    combinations = math.prod(map(len, values))
    if combinations > MOST_CASES:
        raise UsageError(f"--set asks for {combinations} combinations; the most is {MOST_CASES}. Choose fewer values.")
    text = (("data", corpus),) if corpus and workload.uses_corpus else ()
    names = [axis.name for axis in axes]
    chosen = (dict(zip(names, combination, strict=True)) for combination in itertools.product(*values))
    return tuple(dict.fromkeys((*params, *text) for given in chosen for params in cases_of(workload, axes, given)))


def _values(request: Request, workload: Workload, axes: Sequence[Axis], facts: DeviceFacts) -> list[list[Scalar]]:
    """The values of every axis of a suite: those given, else the grid's if it is asked for, else the device's own."""
    given, smaller = dict(request.axes), request.quick
    if request.grid and workload.history is not None:
        given = {**(workload.history.gpu if facts.accelerated else workload.history.cpu), **given}
        smaller = False  # other sizes than the grid's have no history
    return [axis.values(given.get(axis.name) or (smaller and axis.quick) or axis.default) for axis in axes]


def _sound_params(workload: Workload, params: Params) -> Params:
    """The parameters, if they are pairs of a name and a plain value that can be printed on a line."""
    given: object = params
    if not isinstance(given, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        raise _cannot(workload, f"its parameters are {given!r:.120}, and must be a tuple of pairs")
    for name, value in given:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise _cannot(workload, f"a parameter is called {name!r:.80}, and its name must be text on one line")
        if type(value) not in (int, float, str, bool):
            kind = type(value).__name__
            raise _cannot(
                workload, f"parameter {name!r} is {value!r:.80} ({kind}), and must be an int, float, str or bool"
            )
        # Line breaks and control characters would break tables, halves of surrogate pairs every file but JSON.
        if (isinstance(value, str) and not value.isprintable()) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise _cannot(workload, f"parameter {name!r} is {value!r:.80}, and must be finite, or text on one line")
    return params


@_asks
def work_of(workload: Workload, params: Scalars) -> Work:
    work = workload.work(params)
    given: object = work
    if not isinstance(given, Work):
        raise _cannot(workload, f"work() gave {given!r:.80}, and must give a Work")
    for name, value in vars(given).items():
        whole = name == "tokens"
        if type(value) is not int and (whole or type(value) is not float):
            wanted = "a whole number (int)" if whole else "a number (float)"
            raise _cannot(workload, f"work() gave {name} = {value!r:.80}, and it must be {wanted}")
        if not math.isfinite(value) or value < 0 or (whole and value >= _MOST_TOKENS):
            raise _cannot(workload, f"work() gave {name} = {value!r:.80}, which is no count")
    return work


@_asks
def memory_of(workload: Workload, params: Scalars, precision: Precision) -> float:
    given: object = workload.memory(params, precision)
    if type(given) not in (int, float) or not math.isfinite(number := float(str(given))) or number < 0:
        raise _cannot(workload, f"memory() gave {given!r:.80}, and must give a number of bytes (float)")
    return number


@_asks
def support_of(
    workload: Workload, params: Scalars, precision: Precision, facts: DeviceFacts, kind: str = ""
) -> Support:
    """How a device does a workload, or its layers of a kind, in a precision; a backend of whole layers needs some."""
    if refused := _refused(workload, params, precision, kind):
        return Support(Level.REFUSED, refused)
    asked = (params, precision, facts)
    support = workload.layer_support(kind, *asked) if kind else workload.support(*asked)
    level, reason = getattr(support, "level", None), getattr(support, "reason", None)
    if type(support) is not Support or not isinstance(level, Level) or not isinstance(reason, str):
        raise _cannot(workload, f"support() gave {support!r:.120}, and must give a Support of a Level and a text")
    return support


def _refused(workload: Workload, params: Scalars, precision: Precision, kind: str) -> str:
    """Why no device can do that, '' where it is the device's question."""
    if precision.whole_layers and not workload.linear_layers:
        assert precision.backend is not None
        having = ", ".join(name for name in workloads.names() if workloads.get(name).linear_layers)
        why = f"{precision.backend.name} multiplies in layers of its own, and suite {workload.name} has none for it"
        return f"{why}: choose {having}"
    if precision.unit_scaled and (kind or not workload.unit_scales):
        having = ", ".join(f"suite {name}" for name in workloads.names() if workloads.get(name).unit_scales)
        what = f"{kind} layers of another model have" if kind else f"suite {workload.name} has"
        why = f"{precision.mode} casts without scales, in a model that is unit-scaled as a whole, and {what} no such"
        return f"{why} constants: choose {having} or train, or fp8 here"
    refuses = precision.backend.refuses if precision.backend else {}
    return next((why for (axis, value), why in refuses.items() if params.get(axis) == value), "")


@_asks
def layers_of(workload: Workload, params: Scalars, keys: Iterable[str] = ()) -> tuple[Layer, ...]:
    """The layers of a case, and what stands around them; those that `keys` name where only a worker knows them."""
    if workload.examined:
        return tuple(Layer(key, key) for key in keys)
    return _sound_layers(workload, (*products_of(workload, params), *workload.around(params)))


@_asks
def products_of(workload: Workload, params: Scalars) -> tuple[Layer, ...]:
    return _sound_layers(workload, workload.layers(params))


def layers_of_all(workload: Workload, settings: Iterable[Params], keys: Sequence[str] = ()) -> list[Layer]:
    """The layers of several cases, each once."""
    cases = (layers_of(workload, dict(params), keys) for params in settings)
    return list(dict.fromkeys(itertools.chain.from_iterable(cases)))


def _sound_layers(workload: Workload, layers: object) -> tuple[Layer, ...]:
    """The layers, if each has a name of its own and a kind that a precision map can be written with."""
    if not isinstance(layers, tuple):
        raise _cannot(workload, f"layers() gave {layers!r:.120}, and must give a tuple of Layer")
    for layer in layers:
        if (
            not isinstance(layer, Layer)
            or not all(map(_word, (layer.name, layer.kind)))
            or layer.high not in (True, False)
        ):
            words = "name and kind must be text without commas, blanks, '=' and empty parts between points"
            raise _cannot(workload, f"layers() gave {layer!r:.120}, which is no Layer, or whose {words}")
    if len({layer.name for layer in layers}) < len(layers):
        raise _cannot(workload, "two of its layers have the same name")
    return layers


def _word(text: object) -> bool:
    if not isinstance(text, str) or not text.isprintable() or any(letter in ",= " for letter in text):
        return False
    return all(text.split("."))


def _cannot(workload: Workload, why: str) -> UsageError:
    return UsageError(f"suite {workload.name!r} cannot be planned: {why}. Fix the file.")
