"""A Job of Kubernetes, which numbers its pods."""

from __future__ import annotations

from fp8bench.errors import UsageError
from fp8bench.features.fleet.export import Form, Tasks, Volume, document, forms

_LABELS = {"app": "fp8bench"}
_INDEX = "JOB_COMPLETION_INDEX"


@forms.register("k8s")
class Kubernetes(Form):
    """No two pods share a node. A pod that failed is not started again, and the others go on: a limit for each index
    alone says so, while a backoffLimit of the Job would end all.
    """

    name = "k8s"
    summary = "an indexed Job of Kubernetes (1.33 or later)"
    takes = "labels that nodes must have, like nvidia.com/gpu.product=NVIDIA-H200"
    contained = True

    def _text(self, tasks: Tasks) -> str:
        if not tasks.image:
            raise UsageError("Kubernetes runs images: give --image NAME, one with fp8bench in it.")
        return document({
            "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": tasks.name, "labels": _LABELS},
            "spec": {
                "completionMode": "Indexed", "completions": tasks.count, "parallelism": tasks.count,
                "backoffLimitPerIndex": 0, "template": {"metadata": {"labels": _LABELS}, "spec": _pod(tasks)},
            },
        })  # fmt: skip


def _pod(tasks: Tasks) -> dict[str, object]:
    assert isinstance(tasks.volume, Volume)
    apart = {"labelSelector": {"matchLabels": _LABELS}, "topologyKey": "kubernetes.io/hostname"}
    # $$ is one $ to Kubernetes, which would put in variables itself.
    shell = f"exec {tasks.command(_INDEX)}".replace("$", "$$")
    container: dict[str, object] = {
        "name": "fp8bench", "image": tasks.image, "command": ["sh", "-c", shell],
        "volumeMounts": [{"name": "shared", "mountPath": str(tasks.volume.mount)}],
    }  # fmt: skip
    if tasks.gpus:
        container["resources"] = {"limits": {_resource(tasks): str(tasks.gpus)}}
    return {
        "restartPolicy": "Never", "activeDeadlineSeconds": 60 * tasks.minutes,
        **({"nodeSelector": dict(tasks.options)} if tasks.options else {}),
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [container],
        "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": tasks.volume.name}}],
    }  # fmt: skip


def _resource(tasks: Tasks) -> str:
    """What device plugins call those GPUs."""
    if any("@xpu" in cell.setting for cell in tasks.plan.cells):
        raise UsageError("what Kubernetes calls Intel's GPUs depends on their driver: fp8bench does not know it.")
    return "amd.com/gpu" if tasks.kind.startswith("mi") else "nvidia.com/gpu"
