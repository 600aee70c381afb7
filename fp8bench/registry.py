"""The registries of workloads, precisions, backends and devices. A registered class is called a leaf.

A decorator registers a leaf under its name. A registry finds its leaves by importing every module of its package.
Lists leave out leaves with `listed = False`, and leaves whose names start with an underscore.
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


class Registry(Generic[T]):
    """The leaves (registered classes) of one kind, in the order of their modules.

    `base` is the base class of the leaves. `attributes` are the names of the attributes that each leaf must have. The
    first one holds the leaf's name. All of them are texts, except for `rank`, which is a number.
    """

    def __init__(self, kind: str, package: str, base: type = object, attributes: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.package = package
        self._base = base
        self._attributes = attributes
        self._leaves: dict[str, type[T]] = {}
        self._aliases: dict[str, str] = {}
        self._makers: list[Callable[[str], T | None]] = []
        self._are_imported = False
        # Reentrant, because modules that are imported under the lock may ask for names.
        self._import_lock = threading.RLock()

    def register(self, name: str, *aliases: str) -> Callable[[type[T]], type[T]]:
        """Returns a decorator that registers a class under a name. Raises Fp8benchError if another class has the
        name.

        Defining the same class again replaces the old one, because a notebook cell may run twice.
        """

        def decorate(leaf: type[T]) -> type[T]:
            for registered_name in (name, *aliases):
                self._check_leaf_name(registered_name, leaf)
            self._check_attributes(name, leaf)
            # Check all names before registering any, so that a failure leaves the registry unchanged.
            for registered_name in (name, *aliases):
                existing_leaf = self._leaves.get(self._aliases.get(registered_name, registered_name))
                if existing_leaf is not None and _qualified_name(existing_leaf) != _qualified_name(leaf):
                    raise Fp8benchError(
                        f"two {self.kind}s are called {registered_name!r}: {_qualified_name(existing_leaf)} and "
                        f"{_qualified_name(leaf)}. Rename one."
                    )
            self._leaves[name] = leaf
            self._aliases.update(dict.fromkeys(aliases, name))
            return leaf

        return decorate

    def names(self, hidden: bool = False) -> list[str]:
        """Returns the names of the registered classes, without aliases. Hidden classes are included only if `hidden` is
        True.
        """
        self._import_all_leaf_modules()
        return [
            name
            for name, leaf in self._leaves.items()
            if hidden or (not name.startswith("_") and getattr(leaf, "listed", True))
        ]

    def names_in(self, module: str) -> list[str]:
        """Returns the names of the classes that a module registered. Hidden classes are left out."""
        return [name for name in self.names() if self._leaves[name].__module__ == module]

    def aliases(self) -> dict[str, str]:
        self._import_all_leaf_modules()
        return dict(self._aliases)

    def find_canonical_name(self, word: str) -> str:
        """Returns the registered name for a name or alias. Raises UnknownName, which suggests the most similar name."""
        self._import_all_leaf_modules()
        name = self._aliases.get(word, word)
        if name not in self._leaves:
            raise UnknownName(self.kind, word, [*self.names(), *self._aliases])
        return name

    def get(self, word: str) -> T:
        """Returns a new instance of the registered class with that name or alias."""
        return self._leaves[self.find_canonical_name(word)]()

    def _check_leaf_name(self, name: object, leaf: type[T]) -> None:
        """Rejects names that could be mistaken for lists (commas), paths (slashes), or every suite ('all')."""
        is_invalid_name = not isinstance(name, str) or not name or name == "all" or name.endswith(".py")
        if is_invalid_name or any(
            letter in ",/" or letter.isspace() or not letter.isprintable() for letter in str(name)
        ):
            raise Fp8benchError(
                f"{_qualified_name(leaf)} registers as {name!r:.80}, which is not a valid name for a {self.kind}. Give "
                "a word without commas, blanks and slashes, which is not 'all' and does not end in .py."
            )

    def _check_attributes(self, name: str, leaf: type[T]) -> None:
        """Checks a class that is being registered: it must derive from the base class and have valid attributes. Raises
        Fp8benchError.
        """
        if not issubclass(leaf, self._base):
            raise Fp8benchError(
                f"the {self.kind} {name!r} is not a {self._base.__name__}: derive {_qualified_name(leaf)} from it."
            )
        missing_names = sorted(getattr(leaf, "__abstractmethods__", ()))
        missing_names += [attribute for attribute in self._attributes if not hasattr(leaf, attribute)]
        if missing_names:
            raise Fp8benchError(
                f"the {self.kind} {name!r} lacks {', '.join(missing_names)}: give them to {_qualified_name(leaf)}."
            )
        if self._attributes and getattr(leaf, self._attributes[0]) != name:
            raise Fp8benchError(
                f"{_qualified_name(leaf)} registers as {name!r} and has {self._attributes[0]} = "
                f"{getattr(leaf, self._attributes[0])!r}. Use the same name in both places."
            )
        # A wrong type would otherwise be noticed much later, in a report or a comparison.
        for attribute in self._attributes:
            value, attribute_type = getattr(leaf, attribute), int if attribute == "rank" else str
            if type(value) is not attribute_type:
                raise Fp8benchError(
                    f"the {self.kind} {name!r} has {attribute} = {value!r:.80}, and it must be "
                    f"{'text' if attribute_type is str else 'a whole number'}. Correct it in {_qualified_name(leaf)}."
                )

    def _import_all_leaf_modules(self) -> None:
        with self._import_lock:  # a second thread waits here until the first one has imported all modules
            if self._are_imported:
                return
            # Set this first, because a module may use this registry while it is imported.
            self._are_imported = True
            package = importlib.import_module(self.package)
            modules = [f"{self.package}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
            for name in modules:
                importlib.import_module(name)
            # Sort leaves by module. Some modules were imported earlier in any order, but lists and `suite all` need a
            # fixed order.
            module_order = {name: index for index, name in enumerate(modules)}
            sorted_leaf_items = sorted(
                self._leaves.items(), key=lambda pair: module_order.get(pair[1].__module__, len(modules))
            )
            self._leaves = dict(sorted_leaf_items)


# The backend name that lets fp8bench choose the backend.
AUTO = "auto"
_BACKEND_OPTION = "backend="
_FLOAT64_NAMES = frozenset({"fp64", "float64", "double"})


class PrecisionRegistry(Registry[Precision]):
    """Precisions by name, optionally with options: `fp8-delayed:history=16:margin=1`."""

    def add_precision_maker(self, make: Callable[[str], Precision | None]) -> None:
        """Adds a function that makes precisions from names that cannot be registered, such as the name of a callable.
        `get` calls it before it searches the registered names. It returns None for any other name.
        """
        self._makers.append(make)

    def find_canonical_name(self, word: str) -> str:
        """Returns the canonical spelling of a mode (a precision with options): options in declared order, without
        defaults.
        """
        return self.get(word).mode if ":" in word else self._expand_alias(word)

    def unit_scaled(self, word: str) -> bool:
        """Returns whether a mode casts in a unit-scaled model. Returns False for a mode that this version of fp8bench
        does not know.
        """
        try:
            return self.get(word).unit_scaled
        except UsageError:
            return False

    def _expand_alias(self, word: str) -> str:
        if (level := word.lower()) in MSAMP_LEVELS:
            raise UsageError(
                f"{level} is a level of MS-AMP: an arm of a training, not a precision: fp8bench train --dtypes "
                f"bf16,{level}, without options. Elsewhere choose fp8:scale=pow2, in which MS-AMP multiplies."
            )
        is_registered = word in self._leaves or word in self._aliases
        if level.removeprefix("torch.") in _FLOAT64_NAMES and not is_registered:
            message = f"{word} is not a precision to compare: all errors are already relative to fp64."
            raise UsageError(f"{message} The usual reference is fp32.", word, "fp32")
        return super().find_canonical_name(word)

    def get(self, word: str) -> Precision:
        """Returns the precision that a text such as `fp8-delayed:history=16` describes. Raises UsageError for options
        that the precision does not have.
        """
        # Call the makers first: they handle names that cannot be registered, such as those of callables.
        for make_precision in self._makers:
            if (made_precision := make_precision(word)) is not None:
                return made_precision
        name, *pairs = word.split(":")
        leaf = self._leaves[self._expand_alias(name)]
        backend_pairs = [pair for pair in pairs if pair.startswith(_BACKEND_OPTION)]
        precision = leaf(self._parse_options(word, leaf, [pair for pair in pairs if pair not in backend_pairs]))
        if backend_pairs in ([], [f"{_BACKEND_OPTION}{AUTO}"]):
            return precision
        if len(backend_pairs) > 1:
            raise UsageError(f"the dtype {word!r} gives backend twice. Keep one of the two.")
        if not leaf.takes_backend:
            raise UsageError(
                f"{leaf.name} is torch's own, and no other backend multiplies in it. Leave {backend_pairs[0]} out."
            )
        return precision.by(backends.get(backend_pairs[0].removeprefix(_BACKEND_OPTION)))

    def _parse_options(self, word: str, leaf: type[Precision], pairs: Sequence[str]) -> dict[str, Scalar]:
        values: dict[str, Scalar] = {}
        option_by_name = {key: option for option in leaf.options for key in (option.name, *option.aliases)}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not key or not equals or not value:
                raise UsageError(
                    f"the dtype {word!r} has {pair!r} after a colon, expected OPTION=VALUE. {_describe_options(leaf)}"
                )
            if key not in option_by_name:
                raise UnknownName(f"option of dtype {leaf.name}", key, option_by_name)
            option = option_by_name[key]
            if option.name in values:
                raise UsageError(f"the dtype {word!r} gives {option.name} twice. Keep one of the two.")
            values[option.name] = option.value(leaf.name, value)
        return values


def _describe_options(leaf: type[Precision]) -> str:
    names = ", ".join(option.name for option in leaf.options)
    return f"{leaf.name} takes {names}." if names else f"{leaf.name} takes no options."


def _qualified_name(leaf: type) -> str:
    return f"{leaf.__module__}.{leaf.__qualname__}"


backends: Registry[Backend] = Registry("backend", "fp8bench.backends", Backend, ("name", "summary"))
workloads: Registry[Workload] = Registry("suite", "fp8bench.workloads", Workload, ("name", "summary", "version"))
precisions = PrecisionRegistry("precision", "fp8bench.precisions", Precision, ("name", "summary", "rank"))
devices: Registry[Device] = Registry("device", "fp8bench.devices", Device, ("kind",))
