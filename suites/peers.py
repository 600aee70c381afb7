"""Compares fp8bench with asv, pyperf, pytest-benchmark and torch.utils.benchmark, for docs/performance.md.

`python -m suites.peers` compares a product of two matrices with itself, and with copies that take 1, 2.5 and 5%
longer, as each tool would, with the same seconds for each function. `pip install --group peers` installs the other
tools. A tool that is not installed has no row.
"""

import csv
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path
from typing import Any

from suites import harness
from suites.quantisers import CASTS, over_copy
from suites.trials import FP8BENCH, Table, cpu_seconds, least_seconds, options, run_command, scratch

SIDES = (288, 544, 1344)  # about 0.3, 2 and 30 ms on a core of 2023
PLANTED = {"same": 0.0, "slower_1": 0.01, "slower_2_5": 0.025, "slower_5": 0.05}
UNPLANTED = "product"  # the function without a planted slow-down, with which the others are compared
Samples = Mapping[str, list[float]]
Answer = tuple[float, str]  # the ratio of times, and 'slower', 'faster' or ''
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# The functions under test. The planted slow-down is a loop that does nothing, because it uses neither memory nor
# caches.
FUNCTIONS = """
from itertools import repeat
import torch

def inputs(device, seed):
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randn({side}, {side}, generator=draw) for _ in range(2))

def product(x, w):
    return torch.mm(x, w)
""" + "".join(
    f"""
def {name}(x, w):
    for _ in repeat(None, {{{name}}}):
        pass
    return torch.mm(x, w)
"""
    for name in PLANTED
)
# Programs that print the seconds per call of each function as JSON.
TIMER = """
from torch.utils.benchmark import Timer
def measure(call):
    timed = Timer("call(x, w)", globals=dict(call=call, x=x, w=w)).blocked_autorange(min_run_time=SECONDS)
    return [timed.times, timed.significant_figures]
"""
ASV = """
from asv_runner.benchmarks.time import TimeBenchmark
def measure(call):
    benchmark = TimeBenchmark("time_it", lambda: call(x, w), [])
    benchmark.repeat, benchmark.timeout = (10, 100_000, SECONDS), None
    result = benchmark.run()
    return [result["samples"], result["number"]]
"""
IN_PROCESS = """
import json, planted
SECONDS = {seconds}
x, w = planted.inputs("cpu", 0)
{program}
print(json.dumps({{name: measure(getattr(planted, name)) for name in {names}}}))
"""
PYPERF = """
import planted, pyperf
runner = pyperf.Runner(values=5, processes=3)
x, w = planted.inputs("cpu", 0)
for name in {names}:
    runner.bench_func(name, getattr(planted, name), x, w)
"""
PYTEST = """
import planted, pytest
@pytest.mark.parametrize("name", {names})
def test_time(name, benchmark):
    benchmark(getattr(planted, name), *planted.inputs("cpu", 0))
"""


def plant(folder: Path, side: int) -> float:
    """Writes the functions into the folder; returns the seconds of the product."""
    import torch

    torch.set_num_threads(1)
    x, w = torch.randn(side, side), torch.randn(side, side)

    def spin() -> None:
        for _ in repeat(None, 100_000):
            pass

    step, loop = least_seconds(30, lambda: torch.mm(x, w), spin)
    turns = {name: round(share * step / loop * 100_000) for name, share in PLANTED.items()}
    (folder / "planted.py").write_text(FUNCTIONS.format(side=side, **turns))
    return step


def run_program(folder: Path, program: str, seconds: float) -> dict[str, Any]:
    text = IN_PROCESS.format(seconds=seconds, program=program, names=[UNPLANTED, *PLANTED])
    (folder / "measure.py").write_text(text)  # asv reads the source of what it times
    document: dict[str, Any] = json.loads(run_command((sys.executable, "measure.py"), folder, more=ONE_THREAD).stdout)
    return document


def compare_by_fp8bench(folder: Path, seconds: float) -> dict[str, Answer]:
    functions = [f"planted.py:{name}" for name in PLANTED]
    budget = str(seconds * (len(PLANTED) + 2))  # the reference is measured twice
    run_command(
        (*FP8BENCH, "bench", *functions, "--against", f"planted.py:{UNPLANTED}", "--budget", budget, "--no-report"),
        folder,
    )
    run_command((*FP8BENCH, "show", "last", "--csv", "run.csv"), folder)
    with (folder / "run.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if (row["phase"], row["metric"]) == ("step", "time")]
    ratios = {row["precision"].partition(":")[2]: row for row in rows if row["ratio_to_reference"]}
    return {name: (float(row["ratio_to_reference"]), row["verdict"]) for name, row in ratios.items() if name in PLANTED}


def compare_by_torch(folder: Path, seconds: float) -> dict[str, Answer]:
    """Compares medians after `Compare.trim_significant_figures`, as torch.utils.benchmark does."""
    from torch.utils.benchmark.utils.common import trim_sigfig

    results = run_program(folder, TIMER, seconds)

    samples = {name: times for name, (times, _) in results.items()}

    def differs(name: str) -> bool:
        digits = min(results[name][1], results[UNPLANTED][1])
        median, reference = (trim_sigfig(statistics.median(samples[key]), digits) for key in (name, UNPLANTED))
        return median != reference

    return judge(samples, differs)


def compare_by_asv(folder: Path, seconds: float) -> dict[str, Answer]:
    """Compares with the test of `asv compare`, but without its factor, which hides differences below 10%."""
    from asv._stats import is_different
    from asv_runner.statistics import compute_stats

    results = run_program(folder, ASV, seconds)
    stats = {name: compute_stats(*result)[1] for name, result in results.items()}
    samples = {name: values for name, (values, _) in results.items()}
    return judge(samples, lambda name: is_different(samples[name], samples[UNPLANTED], stats[name], stats[UNPLANTED]))


def compare_by_pyperf(folder: Path, seconds: float) -> dict[str, Answer]:
    """Compares means with the t-test of `pyperf compare_to`. Three processes share the seconds."""
    import pyperf
    from pyperf._compare import is_significant

    (folder / "timed.py").write_text(PYPERF.format(names=[UNPLANTED, *PLANTED]))
    value = seconds / 3 / 5  # each process takes five values
    run_command(
        (sys.executable, "timed.py", "-o", "pyperf.json", "--min-time", str(value), "--copy-env"),
        folder,
        more=ONE_THREAD,
    )
    suite = pyperf.BenchmarkSuite.load(str(folder / "pyperf.json"))
    (folder / "pyperf.json").unlink()
    samples = {benchmark.get_name(): benchmark.get_values() for benchmark in suite}
    return judge(samples, lambda name: is_significant(samples[name], samples[UNPLANTED])[0], statistics.mean)


def compare_by_pytest(folder: Path, seconds: float) -> dict[str, Answer]:
    """Compares with `--benchmark-compare-fail=min:5%`, the example in pytest-benchmark's documentation, because it
    has no statistical test.
    """
    (folder / "test_planted.py").write_text(PYTEST.format(names=[UNPLANTED, *PLANTED]))
    limit = f"--benchmark-max-time={seconds}"
    run_command(
        (sys.executable, "-m", "pytest", "-q", "--benchmark-json=times.json", limit, "test_planted.py"),
        folder,
        more=ONE_THREAD,
    )
    results = json.loads((folder / "times.json").read_text())["benchmarks"]
    samples = {result["params"]["name"]: [result["stats"]["min"]] for result in results}
    return judge(samples, lambda name: abs(samples[name][0] / samples[UNPLANTED][0] - 1) > 0.05)


def judge(
    samples: Samples, differs: Callable[[str], bool], middle: Callable[[list[float]], float] = statistics.median
) -> dict[str, Answer]:
    answers = {}
    for name in PLANTED:
        ratio = middle(samples[name]) / middle(samples[UNPLANTED])
        answers[name] = (ratio, ("slower" if ratio > 1 else "faster") if differs(name) else "")
    return answers


TOOLS: dict[str, tuple[str, Callable[[Path, float], dict[str, Answer]]]] = {
    "fp8bench": ("fp8bench", compare_by_fp8bench),
    "torch.utils.benchmark": ("torch", compare_by_torch),
    "asv": ("asv", compare_by_asv),
    "pyperf": ("pyperf", compare_by_pyperf),
    "pytest-benchmark": ("pytest_benchmark", compare_by_pytest),
}


def show_detection(tools: list[str], trials: int, seconds: float) -> None:
    for side in SIDES:
        with scratch() as folder:
            step = plant(folder, side)
            title = f"\ndetection: product of {side}, {1e3 * step:.2f} ms a call, {seconds:g} s a function"
            table = Table(title, "false alarms", "1%", "2.5%", "5%", "spread of A/A", "wall s", name=24)
            answers: dict[str, list[dict[str, Answer]]] = {name: [] for name in tools}
            spent = dict.fromkeys(answers, 0.0)
            for _ in range(trials):  # tools take turns, so that all see the same hours of the machine
                for name in answers:
                    spent[name] -= time.monotonic()
                    answers[name].append(TOOLS[name][1](folder, seconds))
                    spent[name] += time.monotonic()
            for name, found in answers.items():
                alarms = sum(answer["same"][1] in ("slower", "faster") for answer in found)
                hits = [sum(answer[planted][1] == "slower" for answer in found) for planted in list(PLANTED)[1:]]
                gap = max(abs(answer["same"][0] - 1) for answer in found)
                counts = [f"{count}/{trials}" for count in (alarms, *hits)]
                table.row(name, *counts, f"{100 * gap:.1f}%", f"{spent[name] / trials:.0f}")


def show_start() -> None:
    """Prints the CPU time of the tools' starts, compared with that of an empty Python."""
    imported = ("fp8bench", "pyperf", "pytest_benchmark.plugin", "torch.utils.benchmark")
    commands: dict[str, tuple[str, ...]] = {"python -c pass": (sys.executable, "-c", "pass")}
    commands |= {
        f"{tool} --help": (sys.executable, "-m", tool, "--help") for tool in ("fp8bench", "asv", "pyperf", "pytest")
    }
    commands |= {f"import {module}": (sys.executable, "-c", f"import {module}") for module in imported}
    table = Table("\nstart: CPU time, least and median of 5", "least ms", "median ms", name=32)
    with scratch() as folder:
        for name, words in commands.items():
            module = name.removeprefix("import ").partition(" ")[0].partition(".")[0]
            if module == "python" or find_spec(module):
                times = sorted(cpu_seconds(words, folder) for _ in range(5))
                table.row(name, *(f"{1e3 * seconds:.0f}" for seconds in (times[0], times[2])))


def show_markers() -> None:
    """Prints the CPU time to mark a part of a step."""
    from torch.profiler import record_function

    def mark() -> None:
        for _ in range(1000):
            with record_function("part"):
                pass

    on, off = harness._markers()
    (function,) = least_seconds(20, mark)
    table = Table("\nmarkers: least time of one", "us", name=40)
    table.row("fp8bench, timing", f"{1e6 * on:.2f}")
    table.row("fp8bench, not timing", f"{1e6 * off:.2f}")
    table.row("torch record_function, no profiler", f"{1e3 * function:.2f}")


def torchao_over_copy() -> float:
    """Returns the CPU time of torchao's compiled cast for FP8 training, with one scale per tensor, over copying the
    tensor.
    """
    import torch
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    torch.set_num_threads(1)
    x = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x)

    @torch.compile
    def cast(values: torch.Tensor) -> Any:
        return hp_tensor_to_float8_dynamic(values, torch.float8_e4m3fn, LinearMMConfig()).to_original_precision()

    cast(x)
    cast_seconds, copy_seconds = least_seconds(15, lambda: cast(x), lambda: out.copy_(x))
    return cast_seconds / copy_seconds


def show_casts() -> None:
    table = Table("\nvalues rounded through FP8, CPU time over a copy of 4096 x 4096", "ratio", name=32)
    for name in CASTS:
        table.row(name, f"{over_copy(name, 4096, 15):.2f}")
    if find_spec("torchao"):
        table.row("torchao, e4m3 tensor fp32", f"{torchao_over_copy():.2f}")


def show_harness() -> None:
    names = ("harness_over_bare_loop", "history", "history_peak_bytes", "mission_peak_bytes", "memory_above_bare_loop")
    harness.show(names)


PARTS = {"start": show_start, "markers": show_markers, "casts": show_casts, "harness": show_harness}


def main() -> None:
    chosen = options(
        __doc__,
        trials=(10, "trials of each tool at each size"),
        seconds=(2.0, "seconds for each function in a trial"),
        only=(",".join((*PARTS, "detection")), "parts to measure"),
        tools=(",".join(TOOLS), "tools whose detection is measured; those that are not installed are left out"),
    )
    tools = [name for name in chosen.tools.split(",") if find_spec(TOOLS[name][0])]
    for name in chosen.only.split(","):
        if name == "detection":
            show_detection(tools, chosen.trials, chosen.seconds)
        else:
            PARTS[name]()


if __name__ == "__main__":
    main()
