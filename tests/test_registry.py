"""Names to leaves: aliases, unknown names, duplicates, and a user's own modules."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8bench.errors import Fp8benchError, ImportFailed, UnknownName
from fp8bench.registry import Registry, devices, import_user_modules, precisions, workloads


class Thing:
    """What the registries of this test hold."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[Thing]]:
    """A registry over an empty package."""
    package = tmp_path / "things_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Registry("thing", "things_of_a_test")
    sys.modules.pop("things_of_a_test", None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_what_is_registered_is_found_by_name_and_alias(registry: Registry[Thing]) -> None:
    """Each call gives a new instance, whichever word asks for it."""
    registry.register("one", "uno", "ein")(Thing)
    assert registry.names() == ["one"]
    assert registry.aliases() == {"uno": "one", "ein": "one"}
    assert registry.canonical("uno") == "one" and registry.canonical("one") == "one"
    assert isinstance(registry.get("ein"), Thing)
    assert registry.get("one") is not registry.get("one")


def test_names_with_an_underscore_are_hidden_but_usable(registry: Registry[Thing]) -> None:
    """The self-test's own leaves are nobody's choice on the command line."""
    registry.register("_secret")(Thing)
    assert registry.names() == [] and registry.names(hidden=True) == ["_secret"]
    assert isinstance(registry.get("_secret"), Thing)


def test_unknown_names_list_the_known_ones_and_the_nearest(registry: Registry[Thing]) -> None:
    """The message is enough to type it right the second time."""
    registry.register("transformer", "trafo")(Thing)
    registry.register("_hidden")(Thing)
    with pytest.raises(UnknownName, match="Did you mean 'transformer'") as caught:
        registry.get("transfomer")
    assert caught.value.nearest == "transformer"
    assert caught.value.known == ["trafo", "transformer"]
    with pytest.raises(UnknownName) as caught:
        registry.get("zzzzzz")
    assert caught.value.nearest is None and "Did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second"),
    [(("a",), ("a",)), (("a", "x"), ("b", "x")), (("a",), ("b", "a")), (("a", "b"), ("b",))],
    ids=["name and name", "alias and alias", "name and alias", "alias and name"],
)
def test_two_leaves_of_one_name_are_refused(
    registry: Registry[Thing], first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    """One would hide the other."""

    class Other(Thing):
        pass

    registry.register(*first)(Thing)
    with pytest.raises(Fp8benchError, match="Rename one"):
        registry.register(*second)(Other)


def test_the_same_class_defined_again_replaces_the_old_one(registry: Registry[Thing]) -> None:
    """A notebook cell may be run twice."""
    registry.register("thing")(Thing)
    again = type("Thing", (), {"__qualname__": Thing.__qualname__})
    registry.register("thing")(again)
    assert type(registry.get("thing")) is again


def test_leaves_of_a_package_are_found_by_walking_it(folder: Path) -> None:
    """A file in the package is all it takes."""
    package = folder / "walked_things"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from fp8bench.registry import Registry\nthings = Registry('thing', 'walked_things')\n"
    )
    (package / "leaf.py").write_text("from walked_things import things\n@things.register('leaf')\nclass Leaf: pass\n")
    things = __import__("walked_things").things
    assert things.names() == ["leaf"]


def test_the_three_registries_know_what_the_road_needs() -> None:
    """The names of issue and README."""
    assert {"transformer", "gemm"} <= set(workloads.names())
    assert {"fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "mxfp4", "nvfp4"} <= set(precisions.names())
    assert precisions.canonical("fp4") == "nvfp4"
    assert devices.names() == ["cpu", "cuda"]


def test_a_users_file_and_module_are_imported_once(folder: Path) -> None:
    """Files end in .py, modules are found on the path."""
    for name in ("imported_by_name", "imported_by_path"):
        (folder / f"{name}.py").write_text("import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\n")
    try:
        for _ in range(2):
            import_user_modules(["imported_by_name", str(folder / "imported_by_path.py")])
        assert sys.counted == 2  # type: ignore[attr-defined]
    finally:
        del sys.counted  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", ["raise OSError('no luck')", "def broken(:", "import no_such_module_at_all"])
@pytest.mark.parametrize("by_path", [True, False])
def test_a_module_that_fails_is_refused_with_its_reason(folder: Path, content: str, by_path: bool) -> None:
    """And a second try fails the same way: nothing half imported is left."""
    path = folder / "fails_to_import.py"
    path.write_text(content)
    word = str(path) if by_path else "fails_to_import"
    for _ in range(2):
        with pytest.raises(ImportFailed, match=r"importing '.*fails_to_import.*' failed: \w+Error"):
            import_user_modules([word])


@pytest.mark.parametrize(
    "word", ["no_such_module_at_all", "nowhere/no_such_file.py", "", ".", "a b", "x" * 400 + ".py"]
)
def test_a_module_that_does_not_exist_is_refused(word: str) -> None:
    """Whatever the word looks like."""
    with pytest.raises(ImportFailed, match="importing"):
        import_user_modules([word])


def test_a_folder_that_ends_in_py_is_no_module(tmp_path: Path) -> None:
    """It would else be an empty namespace."""
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ImportFailed, match=r"folder\.py is a directory"):
        import_user_modules([str(tmp_path / "folder.py")])
