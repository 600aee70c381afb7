"""Names to leaves: aliases, unknown names, duplicates, and a user's own modules."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8bench.errors import Fp8benchError, ImportFailed, UnknownName
from fp8bench.protocols import Workload
from fp8bench.registry import Registry, devices, digest_of, import_user_modules, precisions, workloads

ROOT = Path(__file__).resolve().parents[1]


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


@pytest.mark.parametrize(
    "content",
    ["raise BaseException('no luck')", "raise GeneratorExit", "import asyncio\nraise asyncio.CancelledError"],
    ids=["BaseException", "GeneratorExit", "CancelledError"],
)
def test_whatever_a_module_raises_is_a_failed_import(folder: Path, content: str) -> None:
    """Kinds that `except Exception` lets through would end in a traceback."""
    (folder / "raises_oddly.py").write_text(content)
    with pytest.raises(ImportFailed, match="importing 'raises_oddly' failed"):
        import_user_modules(["raises_oddly"])


def test_an_interrupt_while_a_module_is_imported_stays_one(folder: Path) -> None:
    """Ctrl-C is the user's word, not the module's."""
    (folder / "interrupted_import.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_user_modules(["interrupted_import"])


@pytest.mark.parametrize(
    "name", [3, None, "", "all", "a,b", "a b", "a\n", "a/b", "mine.py", "a\x1b[2J", "a\ud800"], ids=repr
)
def test_a_word_that_could_not_be_asked_for_is_no_name(registry: Registry[Thing], name: str) -> None:
    """Neither as the name nor as an alias."""
    for words in ((name,), ("good", name)):
        with pytest.raises(Fp8benchError, match=r"registers as .*, which is no name for a thing\. Give a word"):
            registry.register(*words)(Thing)
    assert registry.names() == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"summary": 3}, "has summary = 3, and it must be text"),
        ({"summary": None}, "has summary = None, and it must be text"),
        ({"version": 2}, "has version = 2, and it must be text"),
    ],
    ids=["a number as summary", "None as summary", "a number as version"],
)
def test_words_of_the_wrong_kind_are_refused_when_registered(words: dict[str, object], sentence: str) -> None:
    """Lists and files hold them as text."""
    methods = dict.fromkeys(("axes", "work", "prepare", "step"), lambda self, *_: None)
    leaf = type("Leaf", (Workload,), {"name": "odd", "summary": "fine", **methods, **words})
    with pytest.raises(Fp8benchError, match=sentence):
        workloads.register("odd")(leaf)
    assert "odd" not in workloads.names()


LOUD = (
    "import os, sys\nos.system('echo a child')\nos.write(1, b'a descriptor\\n')\nsys.__stdout__.write('a stream\\n')\n"
)


@pytest.mark.parametrize(
    ("redirection", "err"),
    [("", ["a child", "a descriptor", "a stream"]), ("2>&-", []), ("1>&-", []), ("1>&- 2>&-", [])],
    ids=["open", "no stderr", "no stdout", "neither"],
)
def test_what_a_module_and_its_children_print_is_no_output(tmp_path: Path, redirection: str, err: list[str]) -> None:
    """Below Python's streams, too; and stdout is stdout again afterwards, whatever is closed."""
    (tmp_path / "loud.py").write_text(LOUD if "1>&-" not in redirection else "import os\nos.system('echo a child')\n")
    (tmp_path / "program.py").write_text(
        "import sys\nprint('before')\nfrom fp8bench.registry import import_user_modules\n"
        "import_user_modules([sys.argv[1]])\nprint('after')\n"
    )
    command = f"exec {shlex.join([sys.executable, 'program.py', './loud.py'])} {redirection}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ([] if "1>&-" in redirection else ["before", "after"])
    assert sorted(done.stderr.splitlines()) == err or "1>&-" in redirection


def test_the_digest_is_of_the_code_and_not_of_its_place(folder: Path) -> None:
    """A package counts with all its files, loaded or not."""
    assert digest_of([]) is None
    digests = []
    for place in ("one", "two"):
        (folder / place).mkdir()
        path = folder / place / "digested.py"
        path.write_text("x = 1\n")
        import_user_modules([str(path)])
        digests.append(digest_of([str(path)]))
    assert digests[0] == digests[1] is not None
    path.write_text("x = 2\n")
    assert digest_of([str(path)]) not in (digests[0], None)
    package = folder / "digested_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("y = 1\n")
    import_user_modules(["digested_package"])
    before = digest_of(["digested_package"])
    (package / "inner.py").write_text("y = 2\n")
    assert before is not None and digest_of(["digested_package"]) not in (before, None)


def test_the_worker_finds_what_the_parent_finds(tmp_path: Path) -> None:
    """`python -c` and notebooks have the working directory on their path as an empty text."""
    (tmp_path / "beside_the_notebook.py").write_text("x = 1\n")
    program = (
        "from fp8bench.registry import import_user_modules\nfrom fp8bench.measure.raw import Settings\n"
        "from fp8bench.measure.handle import ProcessWorker\nimport sys\nassert '' in sys.path\n"
        "import_user_modules(['beside_the_notebook'])\n"
        "with ProcessWorker(Settings(imports=('beside_the_notebook',))) as worker:\n"
        "    print(worker.probe()[0].key)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stderr
