"""Builds the request of a comparison of callables. The user's files are read here, but only workers import them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fp8bench.errors import UsageError
from fp8bench.features.bench.values import AGAINST, DTYPE, INPUTS, SHAPE, TENSOR_FILES
from fp8bench.features.bench.workload import find_callable_precision
from fp8bench.files import read_file
from fp8bench.protocols.axes import CACHE
from fp8bench.user_code.named import split_target

# The module that workers import, because it registers the workload.
WORKLOAD_MODULE = "fp8bench.features.bench.workload"
# Found in the text of a file, because only workers import it.
_INPUTS_DEFINITION = re.compile(rf"^def {INPUTS}\b".encode(), re.MULTILINE)


def check_callable_names(targets: Sequence[str], against: str) -> tuple[str, ...]:
    """Returns the names of the callables, the reference first. Raises UsageError if a name is not that of a callable,
    or occurs twice.
    """
    callables = (against, *targets)
    for target_number, target in enumerate(callables):
        _check_file_exists(target)
        if find_callable_precision(target) is None:
            raise UsageError(f"{target!r:.200} is not a callable. Give module:function, or file.py:function.")
        if target in callables[:target_number]:
            raise UsageError(
                f"{target} is named twice. Name it once; the reference is measured twice in every round anyway."
            )
    return callables


def _check_file_exists(target: str) -> None:
    from fp8bench.jobs.profile import check_function_name  # this import is slow

    file, _ = split_target(check_function_name(target))
    if file.endswith(".py") and not Path(file).is_file():
        raise UsageError(f"{target}: the file {file!r:.200} does not exist. Give its path.")


def choose_axes(
    targets: Sequence[str], shapes: Sequence[str], dtype: str | None, inputs: str | None, cache: str
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns the axes that set the inputs of all callables. Inputs come from shapes and a dtype, from a file of
    tensors, or from a function. If none of these is given, they come from the function `inputs` in a callable's file.
    The first target is the reference.
    """
    if inputs and shapes:
        raise UsageError("--shape draws random inputs, and --inputs replaces them. Give one of the two.")
    if dtype and not shapes:
        raise UsageError(
            "--dtype is the dtype of random inputs, whose shapes are unknown. Add --shape, or omit --dtype."
        )
    source = "" if shapes else _check_inputs_source(inputs) if inputs else _find_inputs_function(targets)
    input_axes = {SHAPE: tuple(shapes), DTYPE: (dtype or "fp32",)} if shapes else {INPUTS: (source,)}
    return tuple({**input_axes, AGAINST: (targets[0],), CACHE.name: (cache,)}.items())


def _check_inputs_source(inputs: str) -> str:
    if inputs.endswith(TENSOR_FILES):
        if not Path(inputs).is_file():
            raise UsageError(f"--inputs {inputs!r:.200}: this file does not exist. Give its path.")
    elif ":" in inputs:
        _check_file_exists(inputs)
    else:
        tensor_file_endings = ", ".join(TENSOR_FILES)
        raise UsageError(
            f"--inputs {inputs!r:.200} is neither file.py:function nor a file of tensors ({tensor_file_endings})."
        )
    return inputs


def _find_inputs_function(targets: Sequence[str]) -> str:
    """Returns the function `inputs` of the first file that defines such a function. The files of the callables come
    before the file of the reference.
    """
    reference_file, *candidate_files = (split_target(target)[0] for target in targets)
    inputs_files = [file for file in (*candidate_files, reference_file) if file.endswith(".py")]
    for file in inputs_files:
        if _INPUTS_DEFINITION.search(read_file(Path(file))):
            return f"{file}:{INPUTS}"
    remedy = (
        f"define inputs(device, seed) in {inputs_files[0]}"
        if inputs_files
        else "name a function of (device, seed) by --inputs"
    )
    raise UsageError(
        f"the inputs of {targets[1]} are unknown. Give a shape for each argument, as in "
        f"--shape 1024x4096,4096x1024, or {remedy}."
    )
