"""Machine and interpreter names as in asv, which is the oracle, always with a separate home."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench.model import Environment
from fp8bench.model.codec import decode, encode
from fp8bench.store.asv import identity
from fp8bench.store.asv.identity import (
    AsvIdentity,
    find_machine_identity,
    list_identity_facts,
    parse_machine_identity,
    resolve_interpreter,
)
from tests.counts import for_each

ROOT = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NODE = platform.node()
MACHINE = {"machine": NODE, "os": "an OS", "arch": "an arch", "cpu": "a CPU", "num_cpu": "64", "ram": "1"}

# Prints on the last line where asv would file a result, for each home in the arguments.
ASV = f"""
import json, os, sys
from asv import config, environment, machine, results
said = []
for home in sys.argv[1:] or [os.environ["HOME"]]:
    os.environ["HOME"] = home
    try:
        said.append(dict(machine.Machine.load(interactive=True, use_defaults=True).__dict__))
    except Exception as error:
        said.append(type(error).__name__)
here = environment.ExistingEnvironment(config.Config(), "same", {{}}, {{}})
file = os.path.basename(results.get_filename("m", {COMMIT!r}, here.name))
print()
print(json.dumps([said, here.python, here.name, file]))
"""
OURS = f"""
import json
from fp8bench.store.asv.identity import find_machine_identity
here = find_machine_identity()
print(json.dumps([[here.machine], here.python, here.env_name, here.file_name({COMMIT!r})]))
"""

# Contents of a home's ~/.asv-machine.json.
HOMES: dict[str, object] = {
    "none": None,
    "this host": {NODE: MACHINE, "other": {**MACHINE, "machine": "other", "cpu": "other"}, "version": 1},
    "this host, renamed": {NODE: {**MACHINE, "machine": "box"}, "version": 1},
    "one other": {"h200-box": {**MACHINE, "machine": "h200-box"}, "version": 1},
    "two others": {"a": {**MACHINE, "machine": "a"}, "b": {**MACHINE, "machine": "b"}, "version": 1},
    "gpu": {NODE: {**MACHINE, "gpu": "NVIDIA H200", "count": 8, "share": 0.5, "ecc": True, "mig": None}, "version": 1},
    "few words": {NODE: {"machine": "box"}, "version": 1},
    "empty": {"version": 1},
    "version 2": {NODE: MACHINE, "version": 2},
    "version 0": {NODE: MACHINE, "version": 0},
}
# asv fails on these, so they count as missing.
BROKEN: dict[str, object] = {
    "no JSON": "{",
    "not text": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "no version": {NODE: MACHINE},
    "version of text": {NODE: MACHINE, "version": "1"},
    "a list": [1],
    "an entry that is a list": {NODE: [1], "version": 1},
    "no name": {NODE: {"os": "an OS"}, "version": 1},
    "a name that is a number": {NODE: {**MACHINE, "machine": 7}, "version": 1},
    "a name that leads elsewhere": {NODE: {**MACHINE, "machine": "../box"}, "version": 1},
}


def write_home(folder: Path, content: object) -> Path:
    folder.mkdir()
    if content is not None:
        raw = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / ".asv-machine.json").write_bytes(raw.encode() if isinstance(raw, str) else raw)
    return folder


def last_line(command: list[str], home: Path, **more: str) -> Any:
    """The last line of a program's output, parsed as JSON.

    It runs in the home folder, and can import fp8bench and asv.
    """
    packages = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": packages, **more}
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def asv_machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """asv's result for each of HOMES. It writes into them."""
    folder = tmp_path_factory.mktemp("asv")
    homes = [write_home(folder / str(number), content) for number, content in enumerate(HOMES.values())]
    said = last_line([sys.executable, "-c", ASV, *map(str, homes)], homes[0])[0]
    return dict(zip(HOMES, said, strict=True))


@for_each("name", [*HOMES, *BROKEN])
def test_the_machine_is_the_one_that_asv_uses(
    name: str, asv_machines: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = write_home(tmp_path / "home", {**HOMES, **BROKEN}[name])
    monkeypatch.setenv("HOME", str(home))
    assert find_machine_identity().machine == asv_machines["none" if name in BROKEN else name]
    assert len(list(home.iterdir())) == (name != "none")  # the user's file; without one none is created


def test_the_users_entry_comes_before_the_stores_and_that_before_what_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store's machine.json keeps its series intact when the kernel is updated; its version is the file's."""
    monkeypatch.setenv("HOME", str(write_home(tmp_path / "none", None)))
    before = {**MACHINE, "os": "before the update"}
    assert find_machine_identity({**before, "version": 1}).machine == before
    assert find_machine_identity({"os": "no name"}).machine["machine"] == NODE
    monkeypatch.setenv("HOME", str(write_home(tmp_path / "entry", HOMES["gpu"])))
    assert find_machine_identity(before).machine["gpu"] == "NVIDIA H200"


def test_lists_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`asv publish` fails on them, so a series with one is never drawn."""
    entry = {**MACHINE, "gpus": ["a", "b"], "more": {"a": 1}, "python": "not the machine's"}
    monkeypatch.setenv("HOME", str(write_home(tmp_path / "home", {NODE: entry, "version": 1})))
    assert find_machine_identity().machine == MACHINE


def test_an_unknown_system_has_empty_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_bytes(b"processor\t: 0\nfeatures\nmodel name\t: A: \xe9 CPU \nmodel name\t: second\n")
    assert identity._read_named_value(str(tmp_path / "cpuinfo"), "model name") == "A: � CPU"
    assert identity._read_named_value(str(tmp_path / "cpuinfo"), "MemTotal") == ""
    assert identity._read_named_value(str(tmp_path / "nowhere"), "model name") == ""
    assert [identity._parse_kilobytes(size) for size in ("2 kB", "2", "", "x kB")] == ["2048", "2", "", "x"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert identity._read_sysctl("hw.memsize") == ""


@pytest.mark.skipif(platform.system() != "Linux", reason="the two witnesses are there only on Linux")
def test_a_mac_is_asked_by_sysctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sysctl"
    program.write_text('#!/bin/sh\ntest "$1" = -n && echo "said $2"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    found = identity._discover_machine()
    assert (found["cpu"], found["ram"]) == ("said machdep.cpu.brand_string", "said hw.memsize")


# The interpreter


def test_the_interpreter_is_the_one_that_asv_names(tmp_path: Path) -> None:
    home = write_home(tmp_path / "home", HOMES["this host"])
    assert last_line([sys.executable, "-c", OURS], home) == last_line([sys.executable, "-c", ASV], home)


def test_names_of_one_interpreter(tmp_path: Path) -> None:
    """The same file is not enough: the folder decides which packages there are."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("python", "python3"):
            (tmp_path / folder / name).symlink_to(sys.executable)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "other").write_text("")
    named = {name: str(tmp_path / name) for name in ("a/python", "a/python3", "b/python", "link/python", "a/other")}
    alike = {name: resolve_interpreter(path) for name, path in named.items()}
    assert alike["a/python"] == alike["a/python3"] == alike["link/python"] != named["a/python"]
    assert len(set(alike.values())) == 3
    for nothing in ("", "/nowhere/python", "\0"):
        assert resolve_interpreter(nothing) == nothing


# Names and facts

PATHS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=140).map(lambda text: "/" + text)


@given(PATHS, st.text("0123456789abcdef", min_size=40, max_size=40))
def test_names_are_asvs(path: str, commit: str) -> None:
    from asv import environment, results

    here = AsvIdentity({"machine": "m"}, path)
    name = environment.get_env_name("existing", path.replace(os.sep, "_"), {}, {})
    assert here.env_name == name
    assert f"m{os.sep}{here.file_name(commit)}" == results.get_filename("m", commit, name)
    assert "/" not in here.file_name(commit)
    surrogates = AsvIdentity({"machine": "m"}, os.fsdecode(b"/\xff" * 100))  # bytes that are not UTF-8
    assert surrogates.file_name(COMMIT).startswith("01234567-env-")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
KEYS = st.text().filter(lambda key: key not in ("machine", "python"))
NAMES = st.text(min_size=1).filter(lambda name: "/" not in name and "\0" not in name and name not in (".", ".."))


@given(st.dictionaries(KEYS, SCALARS), NAMES, st.text(min_size=1))
def test_an_identity_survives_a_run_file(more: dict[str, Any], machine: str, python: str) -> None:
    """Including types: to asv 8 and "8" are two series."""
    here = AsvIdentity({"machine": machine, **more}, python, "where it was made")
    plain = json.loads(json.dumps(encode(Environment({"torch": "2", "commit": None, **list_identity_facts(here)}))))
    back = parse_machine_identity(decode(Environment, plain).facts)
    assert back == here
    assert all(type(back.machine[key]) is type(value) for key, value in here.machine.items())


@for_each(
    ("name", "value"),
    [
        *itertools.product(("asv_machine", "asv_python"), (None, 7, True, "")),
        # The name becomes a folder of the store, and run files may be foreign.
        *(("asv_machine", path) for path in ("..", ".", "a/b", "/a", "../a", "a/", "a\0b")),
    ],
)
def test_facts_without_a_machine_or_an_interpreter_are_no_identity(name: str, value: Any) -> None:
    facts = list_identity_facts(AsvIdentity(MACHINE, "/venv/bin/python3"))
    assert (facts["asv_python"], facts["asv_machine"]) == ("/venv/bin/python3", NODE)  # named like asv's parameters
    assert parse_machine_identity({**facts, name: value}) is None
    assert parse_machine_identity({key: kept for key, kept in facts.items() if key != name}) is None
    assert parse_machine_identity({}) is None
