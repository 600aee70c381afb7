"""The same as the command line, from Python and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fp8bench import model
from fp8bench.analysis.findings import findings as findings_of
from fp8bench.analysis.learning.verdicts import verdicts_of
from fp8bench.cli.grammar import DEFAULT_STORE
from fp8bench.errors import UnknownName, UsageError
from fp8bench.files import is_address
from fp8bench.jobs.after_run import into_history
from fp8bench.jobs.callbacks import for_hugging_face, for_lightning
from fp8bench.jobs.fleet.report import fleet_report
from fp8bench.jobs.observer import SilentTraining, TrainingObserver
from fp8bench.jobs.own_loop import Told, watched
from fp8bench.jobs.profile import profile as profile_maker
from fp8bench.jobs.profile import profile_axes, profile_dtypes, profile_live
from fp8bench.jobs.train.run import resume as go_on_training
from fp8bench.jobs.train.run import train as train_all
from fp8bench.measure.environment import command_line
from fp8bench.model import Request
from fp8bench.model.request import STEP_ENERGY
from fp8bench.model.training import KeptTraining, TrainerSettings, asked
from fp8bench.pipeline import execute
from fp8bench.pipeline import resume as go_on
from fp8bench.plan.asked_suites import files_of
from fp8bench.protocols import Observer, SilentObserver
from fp8bench.report.data.boards import check_tensorboard, write_tensorboard
from fp8bench.report.data.fleet_frames import FleetFrames
from fp8bench.report.data.frames import RunFrames, TrainingFrames
from fp8bench.report.data.training_boards import write_training
from fp8bench.report.notebook import Findings, as_html, speed_chart
from fp8bench.report.terminal import layout
from fp8bench.report.terminal.run import render
from fp8bench.report.terminal.training import page_of as training_page
from fp8bench.store.runs.listing import find_run, load_named, store_of
from fp8bench.store.trainings import load_training as read_training
from fp8bench.store.trainings import training_named
from fp8bench.units import bytes_of

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

    from fp8bench.training.own_loop import OwnLoop


class Run(model.Run):
    """A run as calls return it: the value that is stored, with what notebooks show of it.

    These methods read reports, which the value itself may not import.
    """

    def _repr_html_(self) -> str:
        return as_html(self, findings(self))

    def plot(self) -> Figure:
        """The speed-ups of its cases, with their intervals, as a figure of matplotlib."""
        return speed_chart(self, findings(self))


def run(
    suite: str,
    *,
    dtypes: Iterable[str] = (),
    devices: Iterable[str] = (),
    reference: str | None = None,
    set: Mapping[str, object] | None = None,
    precision_map: Mapping[str, str] | None = None,
    data: str | Path | None = None,
    quick: bool = False,
    budget: float | None = None,
    rounds: int | None = None,
    seed: int = 0,
    threads: int = 1,
    imports: Iterable[str] = (),
    isolation: bool = True,
    case_timeout: float | None = None,
    grid: bool = False,
    trace: str | Path | None = None,
    static_scales: int | None = None,
    refresh_scales: int | None = None,
    saturation_bound: float | None = None,
    energy: bool = True,
    energy_of: str = STEP_ENERGY,
    sustained: float | None = None,
    tape: bool = False,
    shares: bool = False,
    ranks: int | None = None,
    max_batch: bool = False,
    memory_limit: int | str | None = None,
    backend: str = "auto",
    tensorboard: str | Path | None = None,
    store: str | Path = DEFAULT_STORE,
    observer: Observer | None = None,
) -> Run:
    """Plan, measure and keep a suite; returns the Run.

    Arguments are the command line's options. `set` maps an axis to a value or a list of values. With
    `isolation=False` everything runs in this process, so that workloads defined in a notebook can be measured; then
    a crash cannot be survived. Raises Fp8benchError with a sentence for what cannot be done; failed cases are records.
    """
    request = Request(
        suite=suite, dtypes=_names(dtypes), devices=_names(devices), reference=reference,
        axes=_pairs(set, _texts), precision_map=_pairs(precision_map), data=_plain(data), quick=quick, budget=budget,
        rounds=rounds, seed=seed, threads=threads, imports=_names(imports), isolation=isolation,
        case_timeout=case_timeout, grid=grid, trace=_plain(trace), static_scales=static_scales,
        refresh_scales=refresh_scales, saturation_bound=saturation_bound, energy=energy, energy_of=energy_of,
        sustained=sustained, max_batch=max_batch, memory_limit=_bytes(memory_limit), backend=backend, tape=tape,
        shares=shares,
        ranks=ranks,
    )  # fmt: skip
    request = replace(request, imports=(*request.imports, *files_of(suite)))
    return _measured(partial(execute, request), store, observer, tensorboard)


def _measured(
    measure: Callable[[Path, Observer, str], model.Run],
    store: str | Path,
    observer: Observer | None,
    tensorboard: str | Path | None,
) -> Run:
    """A run with its history and its curves."""
    board = None if tensorboard is None else _folder("tensorboard", tensorboard)
    if board is not None:
        check_tensorboard(board)
    done = measure(_folder("store", store), observer or SilentObserver(), command_line())
    into_history(done, _folder("store", store))
    if board is not None:
        write_tensorboard(done, findings_of(done), board)
    return _shown(done)


def profile(
    model: str | torch.nn.Module,
    batch: object = None,
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    dtypes: Iterable[str] = (),
    skip: Iterable[str] = (),
    precision_map: Mapping[str, str] | None = None,
    forward: bool = False,
    optimizer: str = "adamw",
    compile: bool = False,
    reference: str | None = None,
    isolation: bool = True,
    tensorboard: str | Path | None = None,
    store: str | Path = DEFAULT_STORE,
    observer: Observer | None = None,
    **how: Any,
) -> Run:
    """Measure a model as it came beside copies whose products are in other precisions; returns the Run.

    `model` is 'module:function' for what `fp8bench profile` takes, or a live one, with a `batch` as its forward takes
    it and, where it gives no loss itself, what makes one of its output. It is not changed: arms are copies, in
    processes of their own where it can be sent to one. `how` are options of `run`: devices, quick, budget, rounds,
    seed, threads, imports, case_timeout, backend, trace, energy, energy_of, sustained, tape.
    """
    known = {field.name for field in fields(Request)} - _NOT_OF_A_PROFILE
    for name in how:
        if name not in known:
            raise UnknownName("argument of profile", name, known)
    live = not isinstance(model, str)
    if live == (batch is None) or (loss is not None and not live):
        raise UsageError("profile takes 'module:function' alone, or a model with a batch, and a loss if it needs one.")
    target = type(model).__name__ if live else str(model)
    options: dict[str, Any] = {**how, "trace": _plain(how.get("trace"))}
    options |= {name: _names(how.get(name, ())) for name in ("devices", "imports")}
    request = Request(
        **profile_dtypes(_names(dtypes), reference), **options,
        axes=profile_axes(target, forward, optimizer, compile, _names(skip)), precision_map=_pairs(precision_map),
        isolation=isolation,
    )  # fmt: skip
    given = (model, batch) if loss is None else (model, batch, loss)
    measure = partial(profile_live, given, request) if live else partial(profile_maker, request)
    return _measured(measure, store, observer, tensorboard)


# Fields of a request that a profile has words of its own for, or none.
_NOT_OF_A_PROFILE = {
    "suite", "dtypes", "reference", "axes", "precision_map", "data", "isolation", "grid", "static_scales",
    "refresh_scales", "saturation_bound", "max_batch", "memory_limit",
}  # fmt: skip


def resume(run: str | Path | model.Run, *, store: str | Path = DEFAULT_STORE, observer: Observer | None = None) -> Run:
    """Go on with a run that was cut off: only what it lacks is measured; a run that lacks nothing is returned.

    What to measure, and how, is taken from the run. Raises Fp8benchError where its second half would not be measured
    as its first one was.
    """
    if isinstance(run, model.Run) and not run.path:
        raise UsageError(f"the run {run.id} was not stored. Give a stored run, its id, its file, or 'last'.")
    kept = _folder("store", store)
    path = Path(run.path) if isinstance(run, model.Run) else find_run(str(run), kept)
    resumed, done = go_on(path, kept, observer or SilentObserver(), command_line())
    if resumed:
        into_history(done, store_of(path) or kept)
    return _shown(done)


def train(
    *,
    dtypes: Iterable[str] = (),
    reference: str | None = None,
    steps: int | None = None,
    seeds: int | None = None,
    quick: bool = False,
    margin: float = 1.0,
    seed: int = 0,
    precision_map: Mapping[str, str] | None = None,
    rates: Mapping[str, float] | None = None,
    sweep: Mapping[str, object] | None = None,
    data: str | Path | None = None,
    other_data: str | Path | None = None,
    tokens: str = "bytes",
    stride: int = 10,
    evaluate: int = 50,
    keep: int = 50,
    try_fix: bool = False,
    max_batch: bool = False,
    memory_limit: int | str | None = None,
    energy: bool = True,
    device: str | None = None,
    threads: int = 1,
    imports: Iterable[str] = (),
    isolation: bool = True,
    ranks: int | None = None,
    tensorboard: str | Path | None = None,
    store: str | Path = DEFAULT_STORE,
    observer: TrainingObserver | None = None,
    **settings: Any,
) -> KeptTraining:
    """Train the same model in several precisions beside each other; returns what was kept of it.

    Arguments are the command line's options; `settings` are those of the model and of how it learns (`model`, `rate`,
    `loss_scale`). `sweep` maps a setting, or an option of the dtypes, to values. `margin` is in percent. Raises
    Fp8benchError with a sentence for what cannot be done; what happens in a step is an event.
    """
    known = [field.name for field in fields(TrainerSettings)]
    for name in settings:
        if name not in known:
            raise UnknownName("setting", name, known)
    request = asked(
        quick, steps, seeds, _names(dtypes), reference=reference, margin=margin / 100, seed=seed,
        settings=TrainerSettings(**settings, precision_map=_pairs(precision_map), rates=_pairs(rates)),
        sweep=_pairs(sweep, _texts), data=_plain(data), other_data=_plain(other_data), tokens=tokens, stride=stride,
        evaluate=evaluate, keep=keep, try_fix=try_fix, device=device, threads=threads, imports=_names(imports),
        isolation=isolation, max_batch=max_batch, memory_limit=_bytes(memory_limit), energy=energy, ranks=ranks,
    )  # fmt: skip
    board = None if tensorboard is None else _folder("tensorboard", tensorboard)
    if board is not None:
        check_tensorboard(board)
    done = train_all(request, _folder("store", store), observer or SilentTraining(), command_line())
    if board is not None:
        write_training(done, verdicts_of(done.training, done.lines), board)
    return done


def resume_training(
    training: str | Path | KeptTraining, *, store: str | Path = DEFAULT_STORE, observer: TrainingObserver | None = None
) -> KeptTraining:
    """Go on with a training that was cut off, from its newest checkpoint; one that is finished is returned."""
    kept = _folder("store", store)
    path = training_named(training.path if isinstance(training, KeptTraining) else str(training), kept)
    return go_on_training(path, kept, observer or SilentTraining())[1]


def _shown(run: model.Run) -> Run:
    return run if isinstance(run, Run) else Run(**{field.name: getattr(run, field.name) for field in fields(run)})


def watch(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | Path | None = None,
    *,
    told: Told | None = None,
    name: str = "own",
    stride: int = 10,
    tokens: int = 0,
    scaler: Any = None,
    precision: str = "fp32",
    health: bool = True,
) -> AbstractContextManager[OwnLoop]:
    """Watch a training loop of one's own in a `with` block: a row a step, all of the module every `stride` steps.

    Lines go to a new file at `path` and to `told`; alarms of the health rules are among them. A step ends when the
    optimizer makes one. The loss is what the module gives back (a number, or what is called `loss`); else say it by
    `loss(value)` of what the block is given. `tokens` are those of a step. `scaler` is a GradScaler. By the word
    `precision` for what the module is trained in, remedies are chosen.
    """
    options = {"name": name, "stride": stride, "tokens": tokens, "scaler": scaler}
    return watched(module, optimizer, None if path is None else Path(path), told, precision, health, **options)


def hugging_face_callback(path: str | Path | None = None, **options: Any) -> Any:
    """A callback for transformers' Trainer that watches what it trains; options are those of `watch`."""
    return for_hugging_face(lambda module, optimizer: watch(module, optimizer, path, **options))


def lightning_callback(path: str | Path | None = None, **options: Any) -> Any:
    """A callback for Lightning's Trainer that watches what it trains; options are those of `watch`."""
    return for_lightning(lambda module, optimizer: watch(module, optimizer, path, **options))


def _names(given: object) -> tuple[str, ...]:
    """Names from a list, or from a text with commas as on the command line."""
    if isinstance(given, str):
        return tuple(word.strip() for word in given.split(","))
    return cast(tuple[str, ...], tuple(given) if isinstance(given, Iterable) else given)


def _pairs(given: object, made: Callable[[Any], Any] = lambda value: value) -> Any:
    """A mapping as pairs. What is none is refused by the request."""
    if isinstance(given, Mapping):
        return tuple((name, made(value)) for name, value in given.items())
    return () if given is None else given


def _texts(value: object) -> tuple[str, ...]:
    """The values of an axis: one, or several."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return (str(value),)
    return tuple(str(one) for one in value)


def _plain(path: Any) -> Any:
    return str(path) if isinstance(path, Path) else path


def _bytes(value: Any) -> Any:
    """Bytes, from a size in words too. What is none is refused by the request."""
    with suppress(ValueError):
        return bytes_of(value) if isinstance(value, str) else value
    return value


def _folder(name: str, given: object) -> Path:
    if not isinstance(given, str | Path) or not str(given):
        raise UsageError(f"{name} cannot be {given!r:.80}: give a folder.")
    if is_address(str(given)):
        raise UsageError(f"{name} cannot be {given!r:.80}, which is an address: mount it, and give the folder.")
    return Path(given)


def load(run: str | Path | model.Run, store: str | Path = DEFAULT_STORE) -> RunFrames:
    """A run and its tables as pandas frames: a Run at hand, or a stored one by id, file stem, path, or 'last'.

    `.run` is the Run; `.results`, `.samples` and `.statistics` are made when they are first asked for.
    """
    return RunFrames(_shown(run if isinstance(run, model.Run) else load_named(str(run), _folder("store", store))))


def load_training(training: str | Path | KeptTraining, store: str | Path = DEFAULT_STORE) -> TrainingFrames:
    """A training and its lines as pandas frames: one at hand, or a stored one by id, folder, or 'last'.

    `.training` is the training; `.arms`, `.steps`, `.readings`, `.figures`, `.validations`, `.costs` and `.events` are
    made when they are first asked for.
    """
    if not isinstance(training, KeptTraining):
        training = read_training(training_named(str(training), _folder("store", store)))
    return TrainingFrames(training)


def load_fleet(source: str | Path, store: str | Path = DEFAULT_STORE, *, machines: Iterable[str] = ()) -> FleetFrames:
    """A fleet's machines beside each other as pandas frames: of a plan's runs in `store`, or of those in a store.

    `machines` are names of some that should be in it. `.report` is all of it; `.cases`, `.machines`, `.kinds` and
    `.alarms` are made when they are first asked for.
    """
    return FleetFrames(fleet_report(_folder("source", source), _folder("store", store), _names(machines)))


def findings(run: model.Run) -> Findings:
    """Verdicts, ratios, best-case times and labels, from the run's raw samples.

    By short names, which tell the cases of the run apart ('bf16 shape=64'); a case's id will do as well.
    """
    return Findings(findings_of(run))


def table(run: model.Run | KeptTraining, width: int = 100) -> str:
    """The run, or the training, as the table the command line prints."""
    if isinstance(run, KeptTraining):
        return layout.render(training_page(run, verdicts_of(run.training, run.lines)), width)
    return render(run, findings_of(run), width)
