"""A task of SkyPilot, whose nodes are workers."""

from __future__ import annotations

from fp8bench.errors import UsageError
from fp8bench.jobs.fleet.export import Form, Tasks, Volume, document, forms


@forms.register("skypilot")
class SkyPilot(Form):
    """It ends all nodes when one fails, so that a node does not: what failed stands in the store."""

    name = "skypilot"
    summary = "a task of SkyPilot"
    takes = "resources, like infra=kubernetes or accelerators=H200:1"
    contained = True

    def _text(self, tasks: Tasks) -> str:
        assert isinstance(tasks.volume, Volume)
        if tasks.workers is None:
            raise UsageError("SkyPilot has no tasks that count up to the cells: give --workers N, which are its nodes.")
        resources: dict[str, object] = {"use_spot": False}  # what was taken away would have to be measured again
        if tasks.gpus:
            resources["accelerators"] = f"{tasks.kind.upper()}:{tasks.gpus}"
        if tasks.image:
            resources["image_id"] = f"docker:{tasks.image}"
        limit = f"timeout --kill-after=60 {tasks.minutes}m"
        return document({
            "name": tasks.name, "num_nodes": tasks.workers, "resources": {**resources, **tasks.options},
            "volumes": {str(tasks.volume.mount): tasks.volume.name},
            "run": f"{limit} {tasks.command('')} || echo 'a cell failed: see fp8bench fleet status'",
        })  # fmt: skip
