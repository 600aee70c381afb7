"""The request of a comparison of callables. The user's files are read here, but only workers import them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.features.bench.values import AGAINST, DTYPE, INPUTS, SHAPE, TENSOR_FILES
from fp8bench.features.bench.workload import precision_of
from fp8bench.files import read_file
from fp8bench.protocols.axes import CACHE
from fp8bench.user_code.named import split_target

# The module that workers import: it registers the workload.
IMPORTED = "fp8bench.features.bench.workload"
_DEFINES_INPUTS = re.compile(rf"^def {INPUTS}\b".encode(), re.MULTILINE)


def check_targets(targets: Sequence[str], against: str) -> tuple[str, ...]:
    """Returns the names of the callables, the reference first. Raises UsageError if one is named twice."""
    named = (against, *targets)
    for number, target in enumerate(named):
        _check_place(target)
        if precision_of(target) is None:
            raise UsageError(f"{target!r:.200} is not a callable. Give module:function, or file.py:function.")
        if target in named[:number]:
            raise UsageError(
                f"{target} is named twice. Name it once: the reference is measured twice in every round anyway."
            )
    return named


def _check_place(target: str) -> None:
    from fp8bench.jobs.profile import function_named  # heavy

    place, _ = split_target(function_named(target))
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"{target}: there is no file {place!r:.200} here. Give its path.")


def choose_axes(
    targets: Sequence[str], shapes: Sequence[str], dtype: str | None, inputs: str | None, cache: str
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the source of inputs: shapes, a file of tensors, a function, or else `inputs` in a callable's file.

    The reference is the first of the targets.
    """
    if (inputs and shapes) or (dtype and not shapes):
        raise UsageError(
            "--shape and --dtype draw the inputs; --inputs, or the function `inputs` of a file, makes other ones. Give "
            "--shape, with --dtype if you like, or leave both out."
        )
    source = "" if shapes else _checked_source(inputs) if inputs else _inputs_beside(targets)
    drawn = {SHAPE: tuple(shapes), DTYPE: (dtype or "fp32",)} if shapes else {INPUTS: (source,)}
    return tuple({**drawn, AGAINST: (targets[0],), CACHE.name: (cache,)}.items())


def _checked_source(inputs: str) -> str:
    if not inputs.endswith(TENSOR_FILES):
        _check_place(inputs)
    elif not Path(inputs).is_file():
        raise UsageError(f"--inputs {inputs!r:.200}: there is no such file. Give its path.")
    return inputs


def _inputs_beside(targets: Sequence[str]) -> str:
    """Returns the function `inputs` of the first file that has one: a candidate's, or else the reference's."""
    against, *others = (split_target(target)[0] for target in targets)
    files = [file for file in (*others, against) if file.endswith(".py")]
    if found := next((file for file in files if _DEFINES_INPUTS.search(read_file(Path(file)))), ""):
        return f"{found}:{INPUTS}"
    where = f"define inputs(device, seed) in {files[0]}" if files else "name a function of (device, seed) by --inputs"
    raise UsageError(
        f"no inputs are given for {targets[1]}. Give a shape for each argument, as in "
        f"--shape 1024x4096,4096x1024, or {where}."
    )
