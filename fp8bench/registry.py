"""Names of workloads, precisions, backends and devices ("leaves"), and the registries that import them.

A leaf registers itself with a decorator; a registry finds leaves by importing every module of its package. Names that
start with an underscore, and leaves with `listed = False`, are left out of lists.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fp8bench.errors import Fp8benchError, UnknownName, UsageError
from fp8bench.model import Scalar
from fp8bench.model.words import MSAMP_LEVELS
from fp8bench.protocols import Backend, Device, Precision, Workload

T = TypeVar("T")

# Required attributes of leaves, and their types.
_KINDS = {"name": str, "summary": str, "version": str, "rank": int, "kind": str}


class Registry(Generic[T]):
    """The leaves of one kind, in the order of their modules.

    `base` is their base class, `words` the attributes that each must have; the first of these is its name.
    """

    def __init__(self, kind: str, package: str, base: type = object, words: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.package = package
        self._base = base
        self._words = words
        self._leaves: dict[str, type[T]] = {}
        self._aliases: dict[str, str] = {}
        self._makers: list[Callable[[str], T | None]] = []
        self._walked = False
        self._walking = threading.RLock()

    def register(self, name: str, *aliases: str) -> Callable[[type[T]], type[T]]:
        """Class decorator. Raises if another class has the name.

        Defining the same class again replaces the old one, because a notebook cell may run twice.
        """

        def decorate(leaf: type[T]) -> type[T]:
            for word in (name, *aliases):
                self._check_name(word, leaf)
            self._check(name, leaf)
            # All names are checked before any is entered, so that a failure leaves the registry as it was.
            for word in (name, *aliases):
                holder = self._leaves.get(self._aliases.get(word, word))
                if holder is not None and _address(holder) != _address(leaf):
                    raise Fp8benchError(
                        f"two {self.kind}s are called {word!r}: {_address(holder)} and {_address(leaf)}. Rename one."
                    )
            self._leaves[name] = leaf
            self._aliases.update(dict.fromkeys(aliases, name))
            return leaf

        return decorate

    def names(self, hidden: bool = False) -> list[str]:
        """Returns names without aliases, and by default without hidden ones."""
        self._walk()
        return [
            name
            for name, leaf in self._leaves.items()
            if hidden or (not name.startswith("_") and getattr(leaf, "listed", True))
        ]

    def names_in(self, module: str) -> list[str]:
        """Returns the names that one module registered, without hidden ones."""
        return [name for name in self.names() if self._leaves[name].__module__ == module]

    def aliases(self) -> dict[str, str]:
        self._walk()
        return dict(self._aliases)

    def canonical(self, word: str) -> str:
        """Returns the name behind a name or alias; raises for unknown words, suggesting the nearest."""
        self._walk()
        name = self._aliases.get(word, word)
        if name not in self._leaves:
            raise UnknownName(self.kind, word, [*self.names(), *self._aliases])
        return name

    def get(self, word: str) -> T:
        """Returns a new instance of the leaf with that name or alias."""
        return self._leaves[self.canonical(word)]()

    def _check_name(self, name: object, leaf: type[T]) -> None:
        """Rejects names that could be mistaken for lists (commas), paths (slashes), or every suite ('all')."""
        wrong = not isinstance(name, str) or not name or name == "all" or name.endswith(".py")
        if wrong or any(letter in ",/" or letter.isspace() or not letter.isprintable() for letter in str(name)):
            raise Fp8benchError(
                f"{_address(leaf)} registers as {name!r:.80}, which is not a valid name for a {self.kind}. Give a word "
                "without commas, blanks and slashes, which is not 'all' and does not end in .py."
            )

    def _check(self, name: str, leaf: type[T]) -> None:
        """Raises at registration, not during a run, if an attribute of a leaf is missing or has the wrong type."""
        if not issubclass(leaf, self._base):
            raise Fp8benchError(
                f"the {self.kind} {name!r} is not a {self._base.__name__}: derive {_address(leaf)} from it."
            )
        missing = sorted(getattr(leaf, "__abstractmethods__", ()))
        missing += [word for word in self._words if not hasattr(leaf, word)]
        if missing:
            raise Fp8benchError(f"the {self.kind} {name!r} lacks {', '.join(missing)}: give them to {_address(leaf)}.")
        if self._words and getattr(leaf, self._words[0]) != name:
            raise Fp8benchError(
                f"{_address(leaf)} registers as {name!r} and has {self._words[0]} = {getattr(leaf, self._words[0])!r}. "
                "Write the same name twice."
            )
        # The wrong type would show much later, in a report or a comparison.
        for word, kind in _KINDS.items():
            value = getattr(leaf, word, None)
            if word in self._words and type(value) is not kind:
                raise Fp8benchError(
                    f"the {self.kind} {name!r} has {word} = {value!r:.80}, and it must be "
                    f"{'text' if kind is str else 'a whole number'}. Correct it in {_address(leaf)}."
                )

    def _walk(self) -> None:
        with self._walking:  # another thread waits until all names are registered
            if self._walked:
                return
            self._walked = True
            package = importlib.import_module(self.package)
            modules = [f"{self.package}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
            for name in modules:
                importlib.import_module(name)
            # Sort leaves by module: some were imported earlier, in any order, and lists and `suite all` must be stable.
            place = {name: index for index, name in enumerate(modules)}
            leaves = sorted(self._leaves.items(), key=lambda pair: place.get(pair[1].__module__, len(modules)))
            self._leaves = dict(leaves)


# The backend that lets fp8bench choose.
AUTO = "auto"
_BACKEND = "backend="
_EXACT = frozenset({"fp64", "float64", "double"})


class PrecisionRegistry(Registry[Precision]):
    """Precisions by name, optionally with options: `fp8-delayed:history=16:margin=1`."""

    def add_maker(self, make: Callable[[str], Precision | None]) -> None:
        """Adds a function that makes precisions for names that cannot be registered, such as those of callables. It is
        asked first, and returns None for other names."""
        self._makers.append(make)

    def canonical(self, word: str) -> str:
        """Returns the canonical spelling of a mode: its name, options in declared order, without defaults."""
        return self.get(word).mode if ":" in word else self._name(word)

    def unit_scaled(self, word: str) -> bool:
        """Whether a mode casts in a unit-scaled model; False for modes that this version does not know."""
        try:
            return self.get(word).unit_scaled
        except UsageError:
            return False

    def _name(self, word: str) -> str:
        if (level := word.lower()) in MSAMP_LEVELS:
            raise UsageError(
                f"{level} is one of MS-AMP's levels, an arm of a training, not a precision: fp8bench train --dtypes "
                f"bf16,{level}, without options. Elsewhere choose fp8:scale=pow2, in which it multiplies."
            )
        is_registered = word in self._leaves or word in self._aliases
        if level.removeprefix("torch.") in _EXACT and not is_registered:
            message = f"{word} is no dtype to compare: every error here is against fp64 already."
            raise UsageError(f"{message} The usual reference is fp32.", word, "fp32")
        return super().canonical(word)

    def get(self, word: str) -> Precision:
        """A precision with the options of the word; raises UsageError for options it does not take."""
        # Makers read words that are no leaf's name, such as a precision with its own syntax.
        for make in self._makers:
            if (from_maker := make(word)) is not None:
                return from_maker
        name, *pairs = word.split(":")
        leaf = self._leaves[self._name(name)]
        chosen = [pair.removeprefix(_BACKEND) for pair in pairs if pair.startswith(_BACKEND)]
        precision = leaf(self._chosen(word, leaf, [pair for pair in pairs if not pair.startswith(_BACKEND)]))
        if not chosen or chosen == [AUTO]:
            return precision
        if len(chosen) > 1:
            raise UsageError(f"the dtype {word!r} gives backend twice. Keep one of the two.")
        if not leaf.takes_backend:
            raise UsageError(
                f"{leaf.name} is torch's own, and no other backend multiplies in it. Leave {_BACKEND}{chosen[0]} out."
            )
        return precision.by(backends.get(chosen[0]))

    def _chosen(self, word: str, leaf: type[Precision], pairs: Sequence[str]) -> dict[str, Scalar]:
        chosen: dict[str, Scalar] = {}
        by_name = {key: option for option in leaf.options for key in (option.name, *option.aliases)}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not key or not equals or not value:
                raise UsageError(
                    f"the dtype {word!r} has no OPTION=VALUE behind a colon but {pair!r}. {_options(leaf)}"
                )
            if key not in by_name:
                raise UnknownName(f"option of dtype {leaf.name}", key, by_name)
            option = by_name[key]
            if option.name in chosen:
                raise UsageError(f"the dtype {word!r} gives {option.name} twice. Keep one of the two.")
            chosen[option.name] = option.value(leaf.name, value)
        return chosen


def _options(leaf: type[Precision]) -> str:
    words = ", ".join(option.name for option in leaf.options)
    return f"{leaf.name} takes {words}." if words else f"{leaf.name} takes no options."


def _address(leaf: type) -> str:
    return f"{leaf.__module__}.{leaf.__qualname__}"


backends: Registry[Backend] = Registry("backend", "fp8bench.backends", Backend, ("name", "summary"))
workloads: Registry[Workload] = Registry("suite", "fp8bench.workloads", Workload, ("name", "summary", "version"))
precisions = PrecisionRegistry("dtype", "fp8bench.precisions", Precision, ("name", "summary", "rank"))
devices: Registry[Device] = Registry("device", "fp8bench.devices", Device, ("kind",))
