"""Finds a user's function by module and name, and the signature that the function declares for an audit. An audit
(`fp8bench audit`) checks whether a kernel fulfils the promises of its signature.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from fp8bench.errors import ImportFailed, UsageError
from fp8bench.model.promises import SIGNATURE_WORDS, AuditedCallableKind, CallablePromise, OperandForm
from fp8bench.user_code import import_user_modules, user_module

F = TypeVar("F", bound=Callable[..., Any])
_SIGNATURE_ATTRIBUTE = "__fp8bench_audited__"


def audited(
    kind: str,
    precision: str,
    *,
    takes: str = "values",
    second: str = "nk",  # the layout (N, K)
    multiple: int = 1,
    causal: bool = False,
) -> Callable[[F], F]:
    """Declares the promises of a kernel for `fp8bench audit module:function`. The function itself is not changed."""
    signature = make_signature(kind, precision, takes, second, multiple, causal)

    def attach_signature(function: F) -> F:
        setattr(function, _SIGNATURE_ATTRIBUTE, signature)
        return function

    return attach_signature


# Append an explanation of each parameter, such as "second: the layout of a product's second operand".
audited.__doc__ = "\n".join((f"{audited.__doc__}\n", *map(": ".join, SIGNATURE_WORDS.items())))


def make_signature(kind: str, precision: str, *promises: Any, **named_promises: Any) -> CallablePromise:
    """Returns the signature of a kernel to audit: a CallablePromise. The promises are its fields after `kind` and
    `precision`, in order or by name. Raises UsageError if a value is invalid.
    """
    unchecked_signature: Any = CallablePromise(kind, precision, *promises, **named_promises)  # type: ignore[arg-type]
    for name, valid_words in (("kind", AuditedCallableKind), ("takes", OperandForm), ("second", ("nk", "kn"))):
        word = getattr(unchecked_signature, name)
        if word not in tuple(valid_words):
            raise UsageError(f"an audit's {name} is {word!r:.80}. Give one of {', '.join(valid_words)}.")
    # Compare the type, because isinstance would accept True as a whole number.
    if type(unchecked_signature.multiple) is not int or not 1 <= unchecked_signature.multiple <= 1024:
        raise UsageError(
            f"an audit's multiple is {unchecked_signature.multiple!r:.80}. Give a whole number from 1 to 1024."
        )
    if unchecked_signature.takes == OperandForm.CODES and kind != AuditedCallableKind.PRODUCT:
        raise UsageError(f"a {kind} takes values: only a product can be given codes.")
    if unchecked_signature.second != "nk" and kind != AuditedCallableKind.PRODUCT:
        raise UsageError(f"a {kind} has no second operand to transpose: only a product has one.")
    if unchecked_signature.causal and kind != AuditedCallableKind.ATTENTION:
        raise UsageError(f"a {kind} cannot be causal: only attention can.")
    signature: CallablePromise = replace(
        unchecked_signature, kind=AuditedCallableKind(kind), takes=OperandForm(unchecked_signature.takes)
    )
    return signature


def find_declared_signature(function: Callable[..., Any]) -> CallablePromise | None:
    signature = getattr(function, _SIGNATURE_ATTRIBUTE, None)
    return signature if isinstance(signature, CallablePromise) else None


def split_target(target: str) -> tuple[str, str]:
    """Splits 'module:name' or 'file.py:name' at the colon. Raises UsageError if a part is missing."""
    module_or_file, _, name = target.rpartition(":")
    if not module_or_file or not name:
        module, _, function = target.rpartition(".")
        # 'file.py' also has a dot, but names no function.
        if module and function != "py":
            suggestion = f"{module}:{function}"
            raise UsageError(
                f"{target!r:.200} is not a function. Write a colon before the function: {suggestion}.",
                given=target,
                nearest=suggestion,
            )
        raise UsageError(f"{target!r:.200} is not a function. Give module:function, or file.py:function.")
    return module_or_file, name


def named(target: str) -> Callable[..., Any]:
    """Imports the callable that 'package.module:name' or 'file.py:name' names. The name may contain dots.

    Raises ImportFailed or UsageError if it does not exist.
    """
    module_or_file, name = split_target(target)
    import_user_modules([module_or_file])
    module = sys.modules[user_module(module_or_file)]
    try:
        value = reduce(getattr, name.split("."), module)
    except AttributeError:
        callable_names = [
            word for word, member in vars(module).items() if callable(member) and not word.startswith("_")
        ]
        similar_names = difflib.get_close_matches(name, callable_names, n=1)
        hint = f" Did you mean {similar_names[0]!r}?" if similar_names else ""
        raise ImportFailed(
            f"{module_or_file} has no {name!r:.80}.{hint} Callables in it: {', '.join(callable_names[:12]) or 'none'}."
        ) from None
    if not callable(value):
        raise UsageError(f"{target} is {type(value).__name__}, and cannot be called. Give a function.")
    return value
