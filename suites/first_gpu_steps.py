"""Steps on a first GPU: their commands, the lines of the table with targets, and how figures are read."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fp8bench.analysis.samples import get_sustained_samples
from fp8bench.files import write_whole
from fp8bench.model.consumed import EnergyWindow
from fp8bench.store.runs.listing import run_files
from fp8bench.store.runs.run_file import load_run
from suites.first_gpu_cards import Card, Published, card_of_probe
from suites.trials import ROOT


class NoFigure(Exception):
    """A step gave no figure; the text is the reason."""


class Measured(NamedTuple):
    """A figure, and its text. `number` is None if there is only a text."""

    number: float | None
    text: str


Reader = Callable[["StepFiles"], Measured]


class Line(NamedTuple):
    """A line of the table.

    A `speed` of low precision is withheld until casts and products conform. `target` returns the figure that a card
    should reach, None if unknown; `low` and `high` hold for all cards.
    """

    what: str
    read: Reader
    low: float | None = None
    high: float | None = None
    speed: bool = False
    target: Callable[[Card], float | None] = lambda card: None
    published: Published | None = None

    def least(self, card: Card) -> float | None:
        return self.low if self.low is not None else self.target(card)

    def target_words(self, card: Card) -> str:
        high, low = "-" if self.high is None else f"at most {self.high:g}", self.least(card)
        return high if low is None else f"at least {low:.4g}"

    def reached(self, number: float, card: Card) -> bool:
        low = self.least(card)
        return (low is None or number >= low) and (self.high is None or number <= self.high)


class FirstStep(NamedTuple):
    """A step: its command after `python -m`, its usual seconds, its lines, and the rows of docs/status.md that it
    answers.

    The device must multiply one of the precisions in `needs` natively, if there are any.
    """

    name: str
    words: str
    seconds: int
    lines: tuple[Line, ...]
    rows: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def missing_units(self, native: Mapping[str, str]) -> str:
        """Returns why the step would only measure emulations on a device; '' if it would not."""
        asked = next((word for word in self.words.split() if word.startswith(NATIVE)), "")
        low = [name for name in asked.removeprefix(NATIVE).split(",") if name and base_of(name) not in _CARRIERS]
        low += self.needs
        if not low or any(native.get(base_of(name), "native") == "native" for name in low):
            return ""
        return f"this GPU multiplies none of {', '.join(low)}"


NATIVE = "native:"
# Precisions that are native on every GPU. Low precision is compared with them.
_CARRIERS = frozenset({"bf16", "fp16", "fp32", "tf32"})


def base_of(mode: str) -> str:
    return mode.partition(":")[0]


@dataclass(frozen=True)
class StepFiles:
    """The files of a step in a folder."""

    step: FirstStep
    folder: Path

    def path(self, kind: str) -> Path:
        return self.folder / f"{self.step.name}.{kind}"

    def _document(self, kind: str) -> dict[str, Any]:
        path = self.path(kind)
        return json.loads(path.read_text()) if path.exists() else {}

    def state(self) -> dict[str, Any]:
        """Returns the state of the step; {} if it has not begun."""
        return self._document("state.json")

    def write(self, state: dict[str, Any]) -> None:
        write_whole(self.path("state.json"), json.dumps(state, indent=1) + "\n")

    def device(self) -> dict[str, Any]:
        """Returns what the probe found; {} without a GPU."""
        return self._document("json")

    @property
    def store(self) -> Path:
        """The step's separate store, which has only the step's runs."""
        return self.folder / "stores" / self.step.name

    def begun(self) -> list[Path]:
        """Returns the runs or trainings of the step, oldest first."""
        kind = self.step.words.split()[1]
        paths = run_files(self.store) if kind == "suite" else (self.store / "trainings").glob("*-*")
        return sorted(paths, key=lambda path: path.stem)

    def text(self) -> str:
        return self.path("out").read_text(errors="replace")

    def last_line(self) -> str:
        """Returns the last line that the step printed, first of all to stderr."""
        for path in (self.path("err"), self.path("out")):
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            if lines and lines[-1].strip():
                return lines[-1][:300]
        return "it printed nothing"

    def json(self) -> Any:
        try:
            return self._document("json") or json.loads(self.text())
        except ValueError:
            raise NoFigure(self.last_line()) from None

    def rows(self) -> list[dict[str, str]]:
        if not self.path("csv").exists():
            raise NoFigure(self.last_line())
        with self.path("csv").open() as file:
            return list(csv.DictReader(file))

    @property
    def card(self) -> Card:
        return card_of_probe(StepFiles(PROBE, self.folder).device())

    def clocks(self) -> dict[str, float]:
        """Returns the median clock in hertz and the median power in watts over the cases, if they were read."""
        if not self.path("csv").exists():
            return {}
        values_by_metric: dict[str, list[float]] = {}
        for row in self.rows():
            if row["phase"] == "step" and row["median_in_unit"]:
                values_by_metric.setdefault(row["metric"], []).append(float(row["median_in_unit"]))
        medians = {}
        for metric, name in (("sm_clock", "clock"), ("sustained_clock", "clock"), ("sustained_power", "power")):
            if metric in values_by_metric:
                medians[name] = median(values_by_metric[metric])
        return medians

    def values(self, metric: str, precision: str, *params: str) -> dict[str, float]:
        """Returns a metric of whole steps by case, for one precision and for cases with these parameters.

        Raises NoFigure with the reason if the precision was not measured natively.
        """
        rows = [row for row in self.rows() if row["precision"] == precision]
        rows = [row for row in rows if all(param in f"{row['params']} " for param in params)]
        if not rows:
            raise NoFigure(f"{precision} was not measured: the GPU does not multiply it")
        if bad := next((row for row in rows if row["status"] != "ok"), None):
            raise NoFigure(f"{bad['status']}: {bad['reason']}".splitlines()[0])
        if rows[0]["level"] != "native":
            raise NoFigure(f"{precision} was {rows[0]['level']}")
        rows = [row for row in rows if row["metric"] == metric and row["phase"] == "step" and row["median_in_unit"]]
        if not rows:
            raise NoFigure(f"{precision} has no {metric}")
        return {row["params"]: float(row["median_in_unit"]) for row in rows}


def ratio(metric: str, above: str, below: str, *params: str) -> Reader:
    """Returns a reader of the ratio between two precisions of a metric, summed over all cases."""

    def read(files: StepFiles) -> Measured:
        over, under = files.values(metric, above, *params), files.values(metric, below, *params)
        if over.keys() != under.keys():
            raise NoFigure(f"{above} and {below} have not the same cases")
        ratios = ", ".join(f"{over[case] / under[case]:.3g}" for case in over)
        total = sum(over.values()) / sum(under.values())
        return Measured(total, f"{total:.3g} (by case {ratios})")

    return read


def sustained(above: str, below: str) -> Reader:
    """Returns a reader of the ratio between two precisions of the sustained times in energy windows, with clock and
    power.
    """

    def read(files: StepFiles) -> Measured:
        for precision in (above, below):
            files.values("time", precision)  # raises if a precision was not measured
        seconds: dict[str, dict[Any, float]] = {above: {}, below: {}}
        windows: list[EnergyWindow] = []
        for record in load_run(files.begun()[-1]).records:
            if record.case.precision in seconds:
                seconds[record.case.precision][record.case.params] = median(get_sustained_samples(record))
            if record.case.precision == below and record.energy:
                windows += record.energy.windows
        slow, fast = seconds[above], seconds[below]
        total = sum(slow.values()) / sum(fast[case] for case in slow)
        clock = median(window.sm_clock or 0 for window in windows)
        watts = median(window.joules / window.seconds for window in windows)
        ratios = ", ".join(f"{slow[case] / fast[case]:.3g}" for case in slow)
        return Measured(total, f"{total:.3g} (by case {ratios}) at {clock / 1e9:.2f} GHz, {watts:.0f} W")

    return read


def bandwidth_share(precision: str, element_bytes: int) -> Reader:
    """Returns a reader of the share of a copy's bandwidth that casts to a precision reach, in percent."""

    def read(files: StepFiles) -> Measured:
        copy = files.card.copy
        if copy is None:
            raise NoFigure("this card's copy bandwidth is unknown")
        shares = []
        for params, seconds in files.values("time", precision).items():
            sides = dict(pair.split("=") for pair in params.split())
            shares.append(int(sides["rows"]) * int(sides["columns"]) * element_bytes / seconds / copy)
        best = 100 * max(shares)
        return Measured(best, f"{best:.3g}%, {best * copy / 1e14:.3g} of {copy / 1e12:g} TB/s")

    return read


def fastest(precision: str) -> Reader:
    def read(files: StepFiles) -> Measured:
        best = max(files.values("flops_per_second", precision).values()) / 1e12
        return Measured(best, f"{best:.4g} TFLOP/s")

    return read


def marker_share(files: StepFiles) -> Measured:
    """Reads the host's cost of all phase markers in a bf16 step, in percent of the step's time."""
    step = files.values("time", "bf16")
    run = load_run(files.begun()[-1])
    record = next(record for record in run.records if record.case.precision == "bf16" and record.timing)
    marks = sum(count for _, count in record.timing.entries) if record.timing else 0
    share = 100 * dict(run.overheads)[record.case.device].marker_on * marks / min(step.values())
    return Measured(share, f"{share:.2g}%, {marks} marks")


def conforms(files: StepFiles) -> Measured:
    """Counts native casts and products with an unexplained difference. One that was not compared does not conform."""
    native = [mode for mode in files.json()["modes"] if mode["support"]["level"] == "native"]
    differences = [case["difference"] for mode in native for case in mode["found"]]
    if not [difference for difference in differences if difference]:
        raise NoFigure(next((case["why"] for mode in native for case in mode["found"]), files.last_line()))
    kinds = ", ".join(f"{differences.count(kind)} {kind or 'not done'}" for kind in dict.fromkeys(differences))
    return Measured(differences.count("unexplained"), f"{len(native)} native precisions: {kinds}")


def alarms(files: StepFiles) -> Measured:
    """Counts verdicts on candidates that equal the reference, and are therefore false alarms."""
    same = [row for row in files.json()["rows"] if row["planted"] == 0]
    wrong, trials = sum(row["slower"] + row["faster"] for row in same), sum(row["trials"] for row in same)
    if not trials:
        raise NoFigure("no trial was done")
    return Measured(wrong, f"{wrong} of {trials}")


def counted(bad: str, good: str) -> Reader:
    """Returns a reader that counts failures by one pattern, if either pattern matches. A matched number counts as
    that many.
    """

    def read(files: StepFiles) -> Measured:
        matches = (re.findall(pattern, files.text(), re.MULTILINE) for pattern in (bad, good))
        wrong, right = (sum(int(word) if word.isdigit() else 1 for word in words) for words in matches)
        if not wrong + right:
            raise NoFigure(files.last_line())
        return Measured(wrong, f"{wrong} failed, {right} held")

    return read


def driver(files: StepFiles) -> Measured:
    return Measured(None, "; ".join(f"{name} {value}" for name, value in files.json()["driver"].items()))


def marker(files: StepFiles) -> Measured:
    micros = 1e6 * files.json()["overheads"]["marker_on"]
    return Measured(micros, f"{micros:.2g} us")


def energy(files: StepFiles) -> Measured:
    """Reads how far windows are from NVML's counter, in percent."""
    probed = files.json()["energy"]
    if "why" in probed:
        raise NoFigure(probed["why"])
    difference = 100 * abs(probed["window_watts"] / probed["nvml_watts"] - 1)
    return Measured(difference, f"{difference:.2g}% of {probed['nvml_watts']:.0f} W, by {probed['source']}")


def printed(pattern: str) -> Reader:
    """Returns a reader of the first printed line that matches a pattern."""

    def read(files: StepFiles) -> Measured:
        line = next((line for line in files.text().splitlines() if re.search(pattern, line)), None)
        if line is None or files.state()["code"] not in (0, 1):
            raise NoFigure(files.last_line())
        return Measured(None, line.strip())

    return read


def fails(files: StepFiles) -> Measured:
    """Reads the exit code of an audit: 1 if it fails. Raises NoFigure without a verdict."""
    return Measured(files.state()["code"], printed("PASS|FAIL")(files).text)


def cases(files: StepFiles) -> Measured:
    """Reads how many cases were measured, of how many."""
    status = {row["case"]: (row["status"], row["reason"]) for row in files.rows()}
    bad = [f"{name}: {reason}".splitlines()[0] for name, (word, reason) in status.items() if word != "ok"]
    words = f"{len(status) - len(bad)} of {len(status)} cases" + (f"; {bad[0][:200]}" if bad else "")
    if len(status) == len(bad):
        raise NoFigure(words)
    return Measured(None, words)


def learns(files: StepFiles) -> Measured:
    verdicts = files.json()["verdicts"]
    return Measured(None, "; ".join(f"{arm}: {verdict['words']}" for arm, verdict in verdicts.items()))


PROBE = FirstStep("probe", "suites.gpu_probe --json {json}", 60, (
    Line("driver, clocks, power cap", driver),
    Line("event clock, us a marker", marker),
    Line("energy windows compared with NVML's total, %", energy, high=2),
), ("energy, state and throttle reasons by NVML",))  # fmt: skip
_STEP = "fp8bench suite transformer --set size=gpt2-124m --dtypes"
PYTEST = "pytest -q -o addopts=--import-mode=importlib -W ignore:Unknown -p no:cacheprovider -p no:benchmark"


def _suite(name: str, words: str, seconds: int, *lines: Line, rows: tuple[str, ...] = ()) -> FirstStep:
    return FirstStep(name, words, seconds, lines or (Line(f"{name}: cases measured", cases),), rows)


def _tests() -> Iterator[FirstStep]:
    """A file each, so that each ends in time."""
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        name = f"tests/gpu/{path.name}"
        line = Line(f"{name}, failures", counted(r"(\d+) (?:failed|error)", r"(\d+) passed"), high=0)
        yield FirstStep(path.stem.replace("_", "-"), f"{PYTEST} {name}", 220, (line,), ("`tests/gpu`",))


# Steps after the first ones (suites/first_gpu_brisk.py).
LATER_STEPS = (
    FirstStep("doctor", "fp8bench doctor", 45, (Line("doctor", printed("cuda")),)),
    FirstStep("selftest", "fp8bench selftest --device cuda", 90, (
        Line("checks of selftest that fail", counted("^FAIL ", "^ok "), high=0),
    ), ("`selftest`, and its `--power`",)),
    _suite(
        "step", f"{_STEP} native:bf16,fp8 --tape --shares", 400,
        Line("launches of a gpt2-124m step, fp8 over bf16", ratio("launches", "fp8", "bf16"), high=1.8),
        Line("gpt2-124m step, fp8 over bf16, times as fast", ratio("time", "bf16", "fp8"), speed=True),
        Line("the same, replayed as one launch", ratio("replay_time", "bf16", "fp8"), speed=True),
        Line("marks of a step, % of it", marker_share, high=0.5), rows=("replays by a CUDA graph",)),
    _suite(
        "compiled-whole", "fp8bench suite transformer --brisk --set size=gpt-350m --set compile=yes --dtypes "
        "native:bf16,fp8", 400, rows=("`compile=yes`",)),
    FirstStep("ceilings", "fp8bench suite ceilings", 90, (Line("ceilings", printed("FLOP/s")),), (
        "ceilings (`suite ceilings`), the roofline by them",)),
    FirstStep("audit", "fp8bench audit suites/gpu_probe.py:scaled_product", 60, (
        Line("audit of torch's scaled product, 1: it fails", fails, high=0),
    ), ("`fp8bench audit`: kernels, converted models",), needs=("fp8",)),
    *_tests(),
    _suite(
        "train-nano", "fp8bench train --steps 200 --dtypes native:bf16,fp8 --json", 260,
        Line("nano, 200 steps", learns),
        rows=("`fp8bench train`: arms, checkpoints, watching, health rules",)),
    FirstStep("power", "fp8bench selftest --power --device cuda --operation small --trials 30 --json {json}", 400, (
        Line("alarms of 30 A/A trials", alarms, high=0),
    )),
    _suite(
        "train-gpt2", "fp8bench train --model gpt2-124m --steps 200 --seeds 1 --dtypes native:bf16,fp8 --json", 300,
        Line("gpt2-124m, 200 steps", learns)),
    _suite(
        "infer", "fp8bench infer --size llama-1b", 240, Line("infer", printed("pays|faster|slower")),
        rows=("`suite prefill`, `suite decode`, `infer`: caches and weights in their own formats, experts",)),
    _suite(
        "moe", "fp8bench suite moe --dtypes native:bf16,fp8-rowwise,mxfp8", 150,
        rows=("`suite moe`: loads, dispatch, combine, router",)),
    _suite(
        "vision", "fp8bench suite vision --set model=vit --dtypes native:bf16,fp8,mxfp8", 150,
        rows=("`suite vision`: layouts, a ViT, image next to text",)),
    FirstStep(
        "layout", "fp8bench ablate vision --set model=resnet --options channels_last,bf16", 120,
        (Line("layout", printed("together: ")),),
    ),
    _suite(
        "diffusion", "fp8bench suite diffusion --set denoiser=dit --dtypes native:bf16,fp8-rowwise,mxfp8", 200,
        rows=("`suite diffusion`: denoisers, sampler, errors and times by step",)),
    _suite("phase-energy", f"{_STEP} native:bf16,fp8 --energy phases", 360),
    _suite("te", f"{_STEP} native:bf16,fp8:backend=te", 150, rows=("backend `te`",)),
    FirstStep(
        "ablate", "fp8bench ablate transformer --reference bf16 --options fp8,compile,cached-weights", 300,
        (Line("ablate", printed("together: ")),), needs=("fp8",),
    ),
    FirstStep("claims", "fp8bench claim --published --device cuda", 500, (
        Line("published figures: within, above, below, or other conditions", printed("claims: ")),
    )),
    FirstStep("calibrate", "fp8bench doctor --calibrate", 300, (Line("harness", printed("phase marker on")),)),
)  # fmt: skip
