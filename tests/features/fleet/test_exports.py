"""Text for schedulers, read back: by a shell, by the models of Kubernetes' own package."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from fp8bench.errors import UsageError
from fp8bench.features.fleet.exports import Tasks, Volume, text_for
from fp8bench.model import Request
from fp8bench.model.run import Cell, FleetPlan
from tests.counts import for_each

_HOSTILE = """it's "a" $(touch x) `touch y` $HOME ${HOME} $$ \\ ; | & #\n- a: [b] %s"""
_GPU = Cell("gemm[m=16]@cuda:0*4", kind="h200", gpus=4)
_PLAN = FleetPlan("1a2b3c4d", "", "", Request("gemm"), (Cell("gemm[m=16]@cpu", kind="cpu"), _GPU), "")
_MOUNT = Volume("claim", PurePosixPath("/data"))
_TASKS = Tasks(_PLAN, "/data/plan.json", "/data/store", "python3", 90, 2, "here/fp8bench:1", _MOUNT)
_BARE = replace(_TASKS, image="", volume=None)


def shell_of(name: str, text: str) -> str:
    """Returns what a node is told, as its scheduler hands it to a shell."""
    if name == "sbatch":
        return text
    content = yaml.safe_load(text)
    (container,) = content["spec"]["template"]["spec"]["containers"]
    shell, option, words = container["command"]
    assert (shell, option) == ("sh", "-c") and not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", words)
    return str(words).replace("$$", "$")


@for_each(("name", "workers"), [("sbatch", None), ("sbatch", 3), ("k8s", None)])
def test_the_command_arrives_whole(name: str, workers: int | None, tmp_path: Path) -> None:
    folder = tmp_path / _HOSTILE.replace("/", "")
    folder.mkdir()
    program = folder / "python"
    program.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    program.chmod(0o755)
    tasks = replace(_BARE, python=str(program), workers=workers, file=f"/data/{_HOSTILE}", store=f"/data/{_HOSTILE}/s")
    text = text_for(name, tasks if name == "sbatch" else replace(tasks, image="i", volume=_MOUNT))
    script = tmp_path / "script"
    script.write_text(shell_of(name, text))
    indices = {"SLURM_ARRAY_TASK_ID": "1", "JOB_COMPLETION_INDEX": "1"}
    ran = subprocess.run(
        ["bash", str(script)], env={**os.environ, **indices}, capture_output=True, cwd=tmp_path, check=False
    )
    words = ["-m", "fp8bench", "fleet", "work", f"/data/{_HOSTILE}", "--store", f"/data/{_HOSTILE}/s"]
    assert ran.stdout.decode().split("\0")[:-1] == [*words, *(() if workers else ("--cell", "1"))], ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["script", folder.name])


def test_options_are_those_of_the_scheduler() -> None:
    each = text_for("sbatch", replace(_BARE, workers=None, options={"partition": "a b"}))
    assert "#SBATCH --array=0-1\n" in each and '#SBATCH --partition="a b"\n' in each
    job = yaml.safe_load(text_for("k8s", replace(_TASKS, workers=None, options={"a/b": "no"})))["spec"]
    pod = job["template"]["spec"]
    assert job["completions"] == 2 and pod["nodeSelector"] == {"a/b": "no"} and pod["activeDeadlineSeconds"] == 5400
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "4"}}


@for_each(
    ("name", "tasks", "words"),
    [
        ("sbatch", _TASKS, "--image and --volume are not for --to sbatch"),
        ("sbatch", replace(_BARE, store="/data/\udcff"), "is not UTF-8"),
        ("sbatch", replace(_BARE, options={"comment": "a\n#SBATCH --x"}), "no line of sbatch can hold"),
        ("k8s", replace(_TASKS, image=""), "give --image"),
        ("k8s", replace(_TASKS, volume=None), "give --volume"),
        ("k8s", replace(_TASKS, store="store"), "--store 'store' is not on the volume"),
        ("k8s", replace(_TASKS, file="/data/../p"), "--plan-path '/data/../p' is not on the volume"),
        ("k8s", replace(_TASKS, plan=replace(_PLAN, cells=(replace(_GPU, setting="a@xpu:0"),))), "Intel's GPUs"),
        ("k8s", replace(_TASKS, plan=replace(_PLAN, cells=(_GPU, replace(_GPU, kind="b200")))), "b200 and h200"),
    ],
)
def test_what_is_lacking_is_said(name: str, tasks: Tasks, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        text_for(name, tasks)


def strict(models: Any, kind: str, value: object, where: str) -> None:
    """Checks that every field is one of the model's, of its type; its package would ignore unknown ones."""
    if inner := re.fullmatch(r"([Ll]ist|[Dd]ict)\[(?:str, ?)?(.+)\]", kind):
        assert isinstance(value, list | dict), where
        for item in value.values() if isinstance(value, dict) else value:
            strict(models, inner[2], item, where)
    elif kind in ("str", "int", "bool"):
        assert type(value).__name__ == kind, (where, value)
    elif kind != "object":
        model = getattr(models, kind)
        names = {model.attribute_map[name]: types for name, types in model.openapi_types.items()}
        assert isinstance(value, dict) and value.keys() <= names.keys(), (where, value)
        for name, item in value.items():
            strict(models, names[name], item, f"{where}.{name}")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_kubernetes_knows_every_field() -> None:
    models = pytest.importorskip("kubernetes.client.models")
    for tasks in (_TASKS, replace(_TASKS, workers=None, options={"disk": "ssd"})):
        job = yaml.safe_load(text_for("k8s", tasks))
        strict(models, "V1Job", job, "Job")
        job["spec"]["template"]["spec"]["restartpolicy"] = "Never"
        with pytest.raises(AssertionError):
            strict(models, "V1Job", job, "Job")
