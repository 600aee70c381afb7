"""Users' modules and files: imported once, refused with a reason, identified by their code."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fp8bench.errors import ImportFailed
from fp8bench.user_code import hash_user_code, import_user_modules, modules_under, own_words
from fp8bench.user_code.named import named
from tests.counts import for_each
from tests.own_suites import forgotten

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    with forgotten(tmp_path):
        yield tmp_path


@for_each(
    ("content", "kind"),
    [
        ("raise OSError('no luck')", "OSError"),
        ("def broken(:", "SyntaxError"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("raise BaseException('no luck')", "BaseException"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
    ],
)
@for_each("by_path", [True, False])
def test_a_module_that_fails_is_refused_with_its_reason(folder: Path, content: str, kind: str, by_path: bool) -> None:
    name = f"fails_by_{kind}_{by_path}"  # a separate file name, as Python caches files by date
    path = folder / f"{name}.py"
    path.write_text(content)
    word = str(path) if by_path else name
    for _ in range(2):
        with pytest.raises(ImportFailed, match=rf"importing '.*{name}.*' failed: {kind}"):
            import_user_modules([word])


@for_each("word", ["no_such_module_at_all", "nowhere/no_such_file.py", "", ".", "a b", "x" * 400 + ".py"])
def test_a_module_that_does_not_exist_is_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(ImportFailed, match="importing"):
        import_user_modules([word])
    (tmp_path / "folder.py").mkdir()  # otherwise it would be an empty namespace package
    with pytest.raises(ImportFailed, match=r"folder\.py is a directory"):
        import_user_modules([str(tmp_path / "folder.py")])


def test_an_interrupt_while_a_module_is_imported_stays_one(folder: Path) -> None:
    (folder / "interrupted_import.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_user_modules(["interrupted_import"])


LOUD = (
    "import os, sys\nos.system('echo a child')\nos.write(1, b'a descriptor\\n')\nsys.__stdout__.write('a stream\\n')\n"
)


@pytest.mark.parametrize(
    ("redirection", "err"),
    [("", ["a child", "a descriptor", "a stream"]), ("2>&-", []), ("1>&-", []), ("1>&- 2>&-", [])],
    ids=["open", "no stderr", "no stdout", "neither"],
)
def test_what_a_module_and_its_children_print_is_no_output(tmp_path: Path, redirection: str, err: list[str]) -> None:
    (tmp_path / "loud.py").write_text(LOUD if "1>&-" not in redirection else "import os\nos.system('echo a child')\n")
    (tmp_path / "program.py").write_text(
        "import sys\nprint('before')\nfrom fp8bench.user_code import import_user_modules\n"
        "import_user_modules([sys.argv[1]])\nprint('after')\n"
    )
    command = f"exec {shlex.join([sys.executable, 'program.py', './loud.py'])} {redirection}"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ([] if "1>&-" in redirection else ["before", "after"])
    assert sorted(done.stderr.splitlines()) == err or "1>&-" in redirection


def test_the_digest_is_of_the_code_and_not_of_its_place(folder: Path) -> None:
    assert hash_user_code([]) is None
    digests = []
    for place in ("one", "two"):
        (folder / place).mkdir()
        path = folder / place / "digested.py"
        path.write_text("x = 1\n")
        import_user_modules([str(path)])
        digests.append(hash_user_code([str(path)]))
    assert digests[0] == digests[1] is not None
    path.write_text("x = 2\n")
    assert hash_user_code([str(path)]) not in (digests[0], None)
    package = folder / "digested_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("y = 1\n")
    import_user_modules(["digested_package"])
    before = hash_user_code(["digested_package"])
    (package / "inner.py").write_text("y = 2\n")
    assert before is not None and hash_user_code(["digested_package"]) not in (before, None)


@pytest.mark.slow
def test_the_worker_finds_what_the_parent_finds(tmp_path: Path) -> None:
    """In `python -c` and notebooks the working directory is an empty text on the path."""
    (tmp_path / "beside_the_notebook.py").write_text("x = 1\n")
    program = (
        "from fp8bench.user_code import import_user_modules\nfrom fp8bench.model.raw import Settings\n"
        "from fp8bench.measure.handle import ProcessWorker\nimport sys\nassert '' in sys.path\n"
        "import_user_modules(['beside_the_notebook'])\n"
        "with ProcessWorker(Settings(imports=('beside_the_notebook',))) as worker:\n"
        "    print(worker.probe()[0].key)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stdout, done.stderr


def test_modules_of_a_folder_by_where_they_really_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "project"
    (top / "src").mkdir(parents=True)
    (tmp_path / "link").symlink_to(top)
    modules = {}
    for name, file in {
        "a_library": top / "src" / "a_library.py",
        "a_library.part": tmp_path / "link" / "src" / "part.py",
        "installed_there": top / ".venv" / "site-packages" / "x.py",
        "fp8bench.something": top / "fp8bench" / "something.py",
        "fp8bench_user_suite": top / "suite.py",
        "a_neighbour": tmp_path / "project2" / "x.py",
        "made_up": "_classes.py",
        "built_in": None,
    }.items():
        modules[name] = ModuleType(name)
        modules[name].__file__ = None if file is None else str(file)
    monkeypatch.chdir(top)
    monkeypatch.setattr(sys, "modules", modules)
    assert modules_under(top) == ("a_library", "a_library.part", "fp8bench_user_suite")
    assert modules_under(tmp_path / "link") == modules_under(top) and modules_under(tmp_path / "nowhere") == ()


def test_a_file_imports_modules_of_its_folder_at_once_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "beside_the_file.py").write_text("x = 1\n")
    (tmp_path / "imported_later.py").write_text("x = 2\n")
    path = tmp_path / "with_siblings.py"
    path.write_text("from beside_the_file import x\ndef later():\n    from imported_later import x\n    return x\n")
    with forgotten(tmp_path):
        first_path = sys.path[0]
        assert named(f"{path}:later")() == 2
        assert (sys.path[0], sys.path[-1]) == (first_path, str(tmp_path)), "other modules stay the same"


def test_an_error_cites_the_last_line_of_the_users_file_and_both_ends_of_a_long_text(tmp_path: Path) -> None:
    path = tmp_path / "fails_in_a_library.py"
    path.write_text(
        "import json, torch\ndef parse():\n    json.loads('{')\ndef call():\n    parse()\n"
        "def forward():\n    torch.nn.Linear(2, 2)(torch.ones(3))\ndef fail():\n    raise ValueError('a' * 600 + 'b')\n"
    )
    for name, words in (("call", "line 3)"), ("forward", "line 7)"), ("fail", "aab (fails_in_a_library.py, line 9)")):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - any error of a library
            named(f"{path}:{name}")()
        assert own_words(caught.value).endswith(words) and len(own_words(caught.value)) < 600
    with pytest.raises(TypeError) as caught_type_error:
        torch.nn.Linear(2, 2)()
    caught_type_error.value.__traceback__ = caught_type_error.value.__traceback__.tb_next  # type: ignore[union-attr]
    assert "module.py" not in own_words(caught_type_error.value)
