"""Which modules come from below a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from fp8bench.measure.loaded import modules_under


def loaded(monkeypatch: pytest.MonkeyPatch, name: str, file: str | None) -> None:
    """A module that says it comes from there."""
    module = ModuleType(name)
    module.__file__ = file
    monkeypatch.setitem(sys.modules, name, module)


def test_modules_of_a_folder_by_where_they_really_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through links; not its installed packages, not fp8bench, none of the next folder, none that is made up."""
    top = tmp_path / "project"
    (top / "src").mkdir(parents=True)
    (tmp_path / "link").symlink_to(top)
    loaded(monkeypatch, "a_library", str(top / "src" / "a_library.py"))
    loaded(monkeypatch, "a_library.part", str(tmp_path / "link" / "src" / "part.py"))
    loaded(monkeypatch, "installed_there", str(top / ".venv" / "site-packages" / "x.py"))
    loaded(monkeypatch, "fp8bench.something", str(top / "fp8bench" / "something.py"))
    loaded(monkeypatch, "fp8bench_user_suite", str(top / "suite.py"))
    loaded(monkeypatch, "a_neighbour", str(tmp_path / "project2" / "x.py"))
    loaded(monkeypatch, "made_up", "_classes.py")
    loaded(monkeypatch, "built_in", None)
    monkeypatch.chdir(top)
    assert modules_under(top) == ("a_library", "a_library.part", "fp8bench_user_suite")
    assert modules_under(tmp_path / "link") == modules_under(top) and modules_under(tmp_path / "nowhere") == ()
