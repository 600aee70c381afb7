"""The stub `fp8bench/__init__.pyi` for editors and type checkers is generated from the options.

After a change: `python -m tests.house.test_python_signatures`.
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import fp8bench

STUB = Path(fp8bench.__file__).with_suffix(".pyi")
_HEAD = '''"""The types of fp8bench's calls, made of its options by tests/house/test_python_signatures.py."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch

'''
_ALSO = ("from fp8bench.protocols import Observer", "from fp8bench.features.train.values import TrainingObserver")


def stub() -> str:
    """The stub: imported names unchanged, calls with generated signatures written out."""
    values = {name: getattr(fp8bench, name) for name in fp8bench.__all__ if name != "__version__"}
    made = {name: value for name, value in values.items() if hasattr(value, "__signature__")}
    homes = {name: getattr(value, "__module__", "") for name, value in values.items() if name not in made}
    lines = [f"from {home} import {name} as {name}" for name, home in homes.items()]
    lines += [*_ALSO, "from fp8bench.features.train.api import TrainingResult"]
    calls = []
    for name, value in made.items():
        calls.extend(_call(name, inspect.signature(value)))
    return "\n".join([f"{_HEAD}{lines_sorted(lines)}", "", "__version__: str", "", *calls, ""])


def lines_sorted(lines: list[str]) -> str:
    return "\n".join(sorted(lines, key=str.lower))


def _call(name: str, signature: inspect.Signature) -> list[str]:
    texts = []
    parameters = list(signature.parameters.values())
    for place, parameter in enumerate(parameters):
        keyword_only = parameter.kind is parameter.KEYWORD_ONLY
        if keyword_only and (place == 0 or parameters[place - 1].kind is parameter.POSITIONAL_OR_KEYWORD):
            texts.append("*")
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = "" if star or parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        texts.append(f"{star}{parameter.name}: {parameter.annotation}{default}")
    joined = ", ".join(text.replace(" ", "\0") for text in texts)
    packed = textwrap.wrap(joined, 112, break_long_words=False, break_on_hyphens=False)
    body = [f"    {line}".replace("\0", " ") for line in packed]
    return [line.replace("'", '"') for line in [f"def {name}(", *body, f") -> {signature.return_annotation}: ..."]]


def _default(value: object) -> str:
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else "..."


def test_editors_see_the_options_of_today() -> None:
    assert STUB.read_text() == stub(), "run `python -m tests.house.test_python_signatures`, and read the diff"


def test_every_made_call_has_a_type_for_each_option() -> None:
    commands = "ablate advise audit compare duel gate profile run sensitivity suite train"
    for name in commands.split():
        parameters = inspect.signature(getattr(fp8bench, name)).parameters.values()
        assert all(parameter.annotation not in (parameter.empty, "") for parameter in parameters), name
        assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters), name


if __name__ == "__main__":
    STUB.write_text(stub())
