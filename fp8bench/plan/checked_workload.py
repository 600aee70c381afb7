"""What a workload says of its cases, held against what a plan can keep: foreign code may answer anything.

Said in one sentence before anything is measured, and not when a run is written, or read, hours later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fp8bench.errors import Fp8benchError, UsageError
from fp8bench.model import DeviceFacts, Level, Params, Scalar, Support, Work
from fp8bench.protocols import Layer, Workload
from fp8bench.protocols.axes import COMMON, Axis
from fp8bench.user_code import own_words

_MOST_TOKENS = 1 << 62
_COMMON = frozenset(axis.name for axis in COMMON)


@contextmanager
def answering(workload: Workload) -> Iterator[None]:
    """What a user's own workload raises while it is asked about its cases, as a sentence; ours are to be reported."""
    try:
        yield
    except Fp8benchError:
        raise
    except Exception as error:
        if type(workload).__module__.startswith("fp8bench."):
            raise
        raise _cannot(workload, own_words(error)) from error


def sound_axes(workload: Workload, facts: DeviceFacts) -> tuple[Axis, ...]:
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


def cases_of(workload: Workload, axes: tuple[Axis, ...], chosen: Mapping[str, Scalar]) -> tuple[Params, ...]:
    """The parameters of the cases that one value of each axis stands for; quiet axes need not be among them.

    The workload is asked about its own axes; what is chosen of those that all have stands behind.
    """
    quiet = {axis.name: axis.of({}) for axis in axes if axis.quiet}
    every = {**chosen, **{name: value for name, value in quiet.items() if name not in chosen}}
    common = [(name, value) for name, value in every.items() if name in _COMMON]
    expanded = workload.expand({name: value for name, value in every.items() if name not in _COMMON})
    return tuple(
        tuple(pair for pair in (*sound_params(workload, params), *common) if pair not in quiet.items())
        for params in expanded
    )


def sound_params(workload: Workload, params: Params) -> Params:
    """The parameters, if they are pairs of a name and a plain value that can be printed on a line."""
    given: object = params
    if not isinstance(given, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
        raise _cannot(workload, f"its parameters are {given!r:.120}, and must be a tuple of pairs")
    for name, value in given:
        if not isinstance(name, str) or not name.isprintable() or not name:
            raise _cannot(workload, f"a parameter is called {name!r:.80}, and its name must be text on one line")
        if type(value) not in (int, float, str, bool):
            kind = type(value).__name__
            words = f"parameter {name!r} is {value!r:.80} ({kind}), and must be an int, float, str or bool"
            raise _cannot(workload, words)
        # Line breaks and control characters would break tables, halves of surrogate pairs every file but JSON.
        if (isinstance(value, str) and not value.isprintable()) or (
            isinstance(value, float) and not math.isfinite(value)
        ):
            raise _cannot(workload, f"parameter {name!r} is {value!r:.80}, and must be finite, or text on one line")
    return params


def sound_work(workload: Workload, work: Work) -> Work:
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


def sound_memory(workload: Workload, given: object) -> float:
    if type(given) not in (int, float) or not math.isfinite(number := float(str(given))) or number < 0:
        raise _cannot(workload, f"memory() gave {given!r:.80}, and must give a number of bytes (float)")
    return number


def sound_support(workload: Workload, support: Support) -> Support:
    level, reason = getattr(support, "level", None), getattr(support, "reason", None)
    if type(support) is not Support or not isinstance(level, Level) or not isinstance(reason, str):
        raise _cannot(workload, f"support() gave {support!r:.120}, and must give a Support of a Level and a text")
    return support


def sound_layers(workload: Workload, layers: object) -> tuple[Layer, ...]:
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
