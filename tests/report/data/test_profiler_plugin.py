"""Traces as TensorBoard's profiler plugin reads them: runs, workers, views, operators, and our phases in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8bench.measure.passes import TraceFolder
from fp8bench.model import Case, Request
from fp8bench.model.raw import Settings
from fp8bench.plan.make import make_plan
from fp8bench.worker.bench import Bench
from tests.facts import CPU

SMALL = (("part", ("layer",)), ("sequence", ("32",)), ("heads", ("2",)), ("head_width", ("16",)))

# In a separate process: the plugin starts threads and processes, and its warnings would be errors here.
PROGRAM = """
import gzip, json, sys, time
from urllib.parse import urlencode
from tensorboard.plugins.base_plugin import TBContext
from torch_tb_profiler.plugin import TorchProfilerPlugin
from werkzeug.test import Client

if __name__ == "__main__":
    apps = TorchProfilerPlugin(TBContext(logdir=sys.argv[1])).get_plugin_apps()

    def get(route, **query):
        answer = Client(apps[route]).get("/?" + urlencode(query))
        assert answer.status_code == 200, (route, query, answer.data)
        raw = gzip.decompress(answer.data) if answer.headers.get("Content-Encoding") == "gzip" else answer.data
        return json.loads(raw)

    end = time.monotonic() + 120
    while not get("/runs")["runs"] and time.monotonic() < end:
        time.sleep(0.1)
    (run,) = get("/runs")["runs"]
    views = get("/views", run=run)
    workers = get("/workers", run=run, view="Operator")
    (span,) = get("/spans", run=run, worker=workers[0]) or [None]
    where = dict(run=run, worker=workers[0], **({"span": span} if span else {}))
    print(json.dumps({
        "run": run, "views": views, "workers": workers,
        "overview": get("/overview", **where),
        "operators": get("/operation/table", group_by="Operation", **where),
        "events": get("/trace", **where)["traceEvents"],
    }))
"""


@pytest.mark.slow
def test_it_finds_the_steps_the_operators_and_our_phases(tmp_path: Path) -> None:
    """Only the timeline has phases: its tables contain only operators."""
    pytest.importorskip("torch_tb_profiler")
    case: Case = make_plan(Request("attention", ("bf16",), ("cpu",), axes=SMALL), (CPU,)).groups[0].cases[0].case
    threads = torch.get_num_threads()
    Bench(Settings()).trace(case, CPU, str(tmp_path / TraceFolder(tmp_path, 1767614400000).name_trace_file(case)))
    torch.set_num_threads(threads)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0 and "Failed to parse" not in done.stderr, done.stderr
    read = json.loads(done.stdout)
    assert read["run"].startswith("attention-part=layer,sequence=32") and read["workers"] == ["fp8bench"]
    assert {"Overview", "Operator", "Trace"} <= set(read["views"])
    assert [row[0] for row in read["overview"]["steps"]["rows"]] == ["1", "2", "3"]
    assert "aten::mm" in {row["name"] for row in read["operators"]["data"]}
    assert {"fp8bench.gemm", "fp8bench.attention", "fp8bench.cast"} <= {event.get("name") for event in read["events"]}
