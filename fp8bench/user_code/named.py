"""The user's callables, found by module and name, and the signature that an audit declares for them."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from fp8bench.errors import ImportFailed, UsageError
from fp8bench.model.promises import SIGNATURE_WORDS, AuditKind, Signature, Takes
from fp8bench.user_code import import_user_modules, user_module

F = TypeVar("F", bound=Callable[..., Any])
_DECLARED = "__fp8bench_audited__"


def audited(
    kind: str,
    precision: str,
    *,
    takes: str = "values",
    second: str = "nk",
    multiple: int = 1,
    causal: bool = False,
) -> Callable[[F], F]:
    """Declares what a kernel promises, for `fp8bench audit module:function`. The function itself is unchanged."""
    signature = signed(kind, precision, takes, second, multiple, causal)

    def declare(function: F) -> F:
        setattr(function, _DECLARED, signature)
        return function

    return declare


audited.__doc__ = "\n".join((f"{audited.__doc__}\n", *map(": ".join, SIGNATURE_WORDS.items())))


def signed(kind: str, precision: str, *how: Any, **named: Any) -> Signature:
    """Makes a signature from these words; raises UsageError if they do not form a valid one."""
    given: Any = Signature(kind, precision, *how, **named)  # type: ignore[arg-type]
    for name, known in (("kind", AuditKind), ("takes", Takes), ("second", ("nk", "kn"))):
        if (word := getattr(given, name)) not in tuple(known):
            raise UsageError(f"an audit's {name} is {word!r:.80}. Give one of {', '.join(known)}.")
    if type(given.multiple) is not int or not 1 <= given.multiple <= 1024:
        raise UsageError(f"an audit's multiple is {given.multiple!r:.80}. Give a whole number from 1 to 1024.")
    if given.takes == Takes.CODES and kind != AuditKind.PRODUCT:
        raise UsageError(f"a {kind} takes values: only a product can be given codes.")
    if given.second != "nk" and kind != AuditKind.PRODUCT:
        raise UsageError(f"a {kind} has no second operand to transpose: only a product has one.")
    if given.causal and kind != AuditKind.ATTENTION:
        raise UsageError(f"a {kind} cannot be causal: only attention can.")
    signature: Signature = replace(given, kind=AuditKind(kind), takes=Takes(given.takes))
    return signature


def declared_of(function: Callable[..., Any]) -> Signature | None:
    signature = getattr(function, _DECLARED, None)
    return signature if isinstance(signature, Signature) else None


def split_target(target: str) -> tuple[str, str]:
    """Splits 'module:name' or 'file.py:name'; raises UsageError if either part is missing."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        module, _, function = target.rpartition(".")
        if module and function != "py":
            meant = f"{module}:{function}"
            raise UsageError(f"{target!r:.200} is not a function. A colon stands before it: {meant}.", target, meant)
        raise UsageError(f"{target!r:.200} is not a function. Give module:function, or file.py:function.")
    return place, name


def named(target: str) -> Callable[..., Any]:
    """Returns the callable that 'package.module:name' or 'file.py:name' names; the name may have dots. Raises
    ImportFailed or UsageError."""
    place, name = split_target(target)
    import_user_modules([place])
    module = sys.modules[user_module(place)] if place.endswith(".py") else importlib.import_module(place)
    try:
        value = reduce(getattr, name.split("."), module)
    except AttributeError:
        known = [word for word, member in vars(module).items() if callable(member) and not word.startswith("_")]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ImportFailed(
            f"{place} has no {name!r:.80}.{hint} Callables in it: {', '.join(known[:12]) or 'none'}."
        ) from None
    if not callable(value):
        raise UsageError(f"{target} is {type(value).__name__}, and cannot be called. Give a function.")
    return value
