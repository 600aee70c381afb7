"""Trainings from Python and notebooks, and users' training loops: watched, and compared."""

from __future__ import annotations

import importlib
import json
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from fp8bench.cli.calls import keywords_of, takes_options_of
from fp8bench.cli.calls import request_fields as fields_given
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.option_types import folder, names, pairs
from fp8bench.cli.outputs import CommandResult, check_files, log_targets
from fp8bench.cli.streams import complain
from fp8bench.errors import StoreError, UsageError
from fp8bench.features.train.data import rows_of
from fp8bench.features.train.health.health import Health
from fp8bench.features.train.kind import KIND, STREAM_KIND, find_training
from fp8bench.features.train.kind import load_training as read_training
from fp8bench.features.train.lines import plain
from fp8bench.features.train.progress import on_terminal, outward
from fp8bench.features.train.request import TrainerSettings, TrainingRequest, request_with_defaults
from fp8bench.features.train.run import resume as go_on_training
from fp8bench.features.train.run import train as train_all
from fp8bench.features.train.streams import loops_of, watched_training
from fp8bench.features.train.values import (
    Arm,
    ArmRole,
    KeptTraining,
    Lines,
    TrainingEvent,
    TrainingObserver,
)
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.files import append
from fp8bench.jobs.report_files import PAGE, folder_of_kept, short_path
from fp8bench.measure.environment import command_line
from fp8bench.pipeline import now
from fp8bench.registry import precisions
from fp8bench.report.data.plain import results_frame
from fp8bench.report.notebook import as_html
from fp8bench.report.terminal import layout
from fp8bench.user_code.named import named
from fp8bench.workloads.model import LIVE, MADE

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from fp8bench.features.train.lab.own_loop import OwnLoop


# The file of a stream, or one for each seed.
Stream = str | Path | Sequence[str | Path]


class TrainingResult(KeptTraining):
    """A training as returned by calls: a KeptTraining with a display for terminals and notebooks."""

    def __repr__(self) -> str:
        arms, state = ", ".join(arm.name for arm in self.training.arms), "finished" if self.finished else "unfinished"
        return f"<Training {self.training.id}: {arms}, {state}, {self.path}>"

    def __str__(self) -> str:
        return layout.render(replace(KIND.view(self).page(), footer=())).rstrip("\n")

    @cached_property
    def results(self) -> pd.DataFrame:
        """The rows of --csv as a pandas frame."""
        return results_frame(rows_of(JudgedTraining(self)))

    def _repr_html_(self) -> str:
        page = folder_of_kept(Path(self.path).parent.name, Path(self.path).parents[2]) / PAGE
        return as_html(KIND.view(self).page(), short_path(page) if page.is_file() else "")


def _to_result(stored: KeptTraining) -> TrainingResult:
    return TrainingResult(**{field.name: getattr(stored, field.name) for field in fields(stored)})


@takes_options_of(TrainingRequest, TrainerSettings, without=("settings", "scales"))
def train(
    *,
    dtypes: str | Iterable[str] = (),
    steps: int | None = None,
    seeds: int | None = None,
    quick: bool = False,
    margin: float = 1.0,
    precision_map: Mapping[str, str] | None = None,
    rates: Mapping[str, float] | None = None,
    log: str | Iterable[str] = (),
    live: str | Path | None = None,
    on_alarm: str = "",
    store: str | Path = DEFAULT_STORE,
    progress: bool = True,
    observer: TrainingObserver | None = None,
    make: str | Callable[[], object] = "",
    skip: str | Iterable[str] = (),
    **options: Any,
) -> TrainingResult:
    """Train the same model in several precisions side by side; returns the stored training.

    A `make` that a worker cannot import is trained in this process. Raises Fp8benchError for a bad request;
    events of a step are lines. `training.results` are the rows of --csv as a pandas frame.

    make: a function that returns a model of your own with its batches, or 'module:function'
    """
    name = make if isinstance(make, str) else name_of_maker(make)
    # A worker cannot import a function that only this process has.
    in_process = not isinstance(make, str) and ":" not in name
    if in_process:
        options["isolation"] = False
        LIVE[name] = cast(Callable[[], Any], make)
    # Options of the training; the remaining ones belong to the trainer.
    given_options = {name: options.pop(name) for name in list(options) if name in keywords_of(TrainingRequest)}
    # Options that the command line shares are checked by the same declarations.
    request = request_with_defaults(
        quick,
        steps,
        seeds,
        names(dtypes),
        margin=margin / 100,
        **fields_given(TrainingRequest, given_options),
        settings=TrainerSettings(
            **options, make=name, skip=names(skip), precision_map=pairs(precision_map), rates=pairs(rates)
        ),
    )
    targets = log_targets(log)
    try:
        store_folder, page = folder("store", store), None if live is None else Path(live)
        check_files({"live": page})
        # Progress goes to the inner observer, pages and boards to the outer one.
        with _observing(observer, progress) as inner, outward(inner, store_folder, page, targets, on_alarm) as outer:
            done = train_all(request, store_folder, outer, command_line())
    finally:
        if in_process:
            LIVE.pop(name, None)
            MADE.clear()
    return _to_result(done)


def name_of_maker(make: Callable[..., Any]) -> str:
    """Returns the name by which a worker can import it; for a lambda or a function defined in a session, the bare
    name."""
    module, word = getattr(make, "__module__", ""), getattr(make, "__qualname__", type(make).__name__)
    name = f"{module}:{word}"
    if module in ("", "__main__", None) or "<" in word:
        return "".join(letter for letter in word if letter.isalnum() or letter in "._") or "make"
    try:
        importable = named(name)
    except Exception:  # noqa: BLE001 - it cannot be imported, for whatever reason
        importable = None
    return name if importable is make else word


def _observing(observer: TrainingObserver | None, progress: bool) -> AbstractContextManager[TrainingObserver]:
    return on_terminal() if observer is None and progress else nullcontext(observer or TrainingObserver())


def resume_training(
    training: str | Path | KeptTraining,
    *,
    store: str | Path = DEFAULT_STORE,
    progress: bool = True,
    observer: TrainingObserver | None = None,
) -> TrainingResult:
    """Resume a training that was cut off, from its newest checkpoint; a finished one is returned.

    training: the training, its id, its folder, or 'last'
    """
    store_folder = folder("store", store)
    path = find_training(training.path if isinstance(training, KeptTraining) else str(training), store_folder)
    with _observing(observer, progress) as outer:
        return _to_result(go_on_training(path, store_folder, outer)[1])


def load_training(training: str | Path | KeptTraining, store: str | Path = DEFAULT_STORE) -> TrainingResult:
    """Returns a stored training; its `.results` are the rows of --csv.

    training: its id, its folder, or 'last'; a KeptTraining is returned unchanged
    """
    if not isinstance(training, KeptTraining):
        training = read_training(find_training(str(training), folder("store", store)))
    return _to_result(training)


@contextmanager
def watch(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    path: str | Path | None = None,
    *,
    told: Callable[[Lines], None] | None = None,
    name: str = "own",
    stride: int = 10,
    tokens: int = 0,
    scaler: Any = None,
    precision: str = "fp32",
    health: bool = True,
    on_alarm: Callable[[TrainingEvent], object] | str | None = None,
    log: str | Iterable[str] = (),
    live: str | Path | None = None,
    eager: bool = False,
) -> Iterator[OwnLoop]:
    """Watch your training loop in a `with` block: a row for each step, and the whole module every `stride` steps.

    A step ends when the optimizer takes one. The loss is the module's output (a number, or its `loss`), else the
    number that backward begins with; or give it by `loss(value)` of the block's object.

    module: what is trained
    optimizer: what updates it
    path: a new file for the lines of the training
    told: a function that gets the lines; without it alarms go to stderr. What it raises ends the loop
    name: what the loop is called where it is compared
    stride: steps from one reading of the whole module to the next
    tokens: the tokens of a step, for tokens per second
    scaler: the GradScaler of the loop
    precision: what the module is trained in: decides what alarms advise, and layers that only cast inside are measured
    eager: True: watched steps run compiled modules without compilation, so that their layers are watched
    health: False: no rules look at the lines, so that there are no alarms
    on_alarm: a function that gets each alarm, and ends the loop by what it raises; or a command that runs for each
    log: where curves are logged as they come, tensorboard[:DIR] or wandb[:PROJECT]
    live: a page of the stream in `path`, written again while the loop runs
    """
    from fp8bench.features.train.lab.own_loop import OwnLoop
    from fp8bench.features.train.lab.own_ranks import Ranks

    # Without a second arm, comparing rules find nothing.
    rules = Health((Arm(name, precisions.canonical(precision), ArmRole.REFERENCE),)) if health else None
    if live is not None and path is None:
        raise UsageError("live shows the stream in a file. Give a path as well.")
    training = replace(watched_training(f"{name}-{secrets.token_hex(4)}", [name]), started=now())
    page = None if live is None else Path(live)
    with ExitStack() as stack:
        is_first = Ranks.number() == 0
        keep = _kept_in(Path(path), stack) if path is not None and is_first else None
        targets = log_targets(log)
        command, call = (on_alarm, None) if isinstance(on_alarm, str) else ("", on_alarm)
        sinks = (page, targets, command) if is_first else (None, (), "")
        outside = stack.enter_context(outward(_Notes(), Path(path or ""), *sinks))
        outside.begun(training)

        def tell(lines: Lines) -> None:
            lines = (*lines, *rules.see(lines)) if rules is not None else lines
            if keep is not None:
                keep(lines)
            outside.trained(0, max((line.step for line in lines), default=0), lines)
            try:
                (complain_of if told is None else told)(lines)
                for line in lines:
                    if call is not None and isinstance(line, TrainingEvent) and line.kind == "alarm":
                        call(line)
            except Exception as error:
                loop.ends_by = error
                raise

        options = (name, stride, tokens, scaler, precision, eager)
        loop = OwnLoop(module, optimizer, tell, *options)
        stack.enter_context(loop)
        del module, optimizer  # watching keeps no model in memory that its loop has dropped
        yield loop


class _Notes(TrainingObserver):
    def note(self, sentence: str) -> None:
        complain(sentence)


def complain_of(lines: Lines) -> None:
    """The default alarm sink of `watch`; any function of lines can replace it."""
    for line in lines:
        if isinstance(line, TrainingEvent):
            complain(line.sentence)


def _kept_in(path: Path, stack: ExitStack) -> Callable[[Lines], None]:
    """Appends lines to a new file. A full disk ends the file with a warning, but not the training."""
    try:
        # Opening fails if the file exists: two streams in one file would be unreadable.
        file: IO[bytes] | None = stack.enter_context(path.open("xb"))
    except OSError as error:
        raise StoreError(f"{path} cannot be made ({error.strerror}). Give another file.") from None

    def keep(lines: Lines) -> None:
        nonlocal file
        if file is None:
            return
        text = "".join(json.dumps(plain(line), separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
        try:
            append(file, text, sync=False)  # survives the process without waiting for the disk
        except OSError as error:
            warnings.warn(f"{path} ends here ({error.strerror}); the training goes on.", stacklevel=2)
            file = None

    return keep


class _LoopCallback:
    def __init__(self) -> None:
        self._stack = ExitStack()
        self._loop: OwnLoop | None = None

    def on_train_end(self, *_: Any, **known: Any) -> None:
        self._loop = None
        self._stack.close()


def hugging_face_callback(path: str | Path | None = None, **options: Any) -> Any:
    """Returns a callback for transformers' Trainer that watches what it trains.

    If a training raises, its hooks are removed by the next one, or by `on_train_end`.

    path: a new file for the lines of the training
    options: those of `fp8bench.watch`
    """
    base: Any = _package("transformers").TrainerCallback

    class WatchCallback(_LoopCallback, base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            self._stack.close()
            optimizer = known["optimizer"]
            inner = getattr(optimizer, "optimizer", optimizer)
            self._loop = self._stack.enter_context(watch(known["model"], inner, path, **options))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **known: Any) -> None:
            # Evaluation before the first step has no loop yet.
            if self._loop is not None and "eval_loss" in (metrics or {}):
                self._loop.held_out(metrics["eval_loss"])

    return WatchCallback()


def lightning_callback(path: str | Path | None = None, **options: Any) -> Any:
    """Returns a callback for Lightning's Trainer that watches what it trains. The loss is the one that backward begins
    with.

    path: a new file for the lines of the training
    options: those of `fp8bench.watch`
    """
    base: Any = _package("lightning.pytorch", "pytorch_lightning").Callback

    class WatchCallback(_LoopCallback, base):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise UsageError(
                    f"{len(trainer.optimizers)} optimizers do not share a step. Watch one part and its optimizer."
                )
            self._loop = self._stack.enter_context(watch(pl_module, trainer.optimizers[0], path, **options))

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if self._loop is not None:  # Lightning has divided it by the number of micro-batches
                self._loop.loss(loss * trainer.accumulate_grad_batches)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if self._loop is not None and not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
                self._loop.held_out(trainer.callback_metrics["val_loss"])

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._stack.close()

    return WatchCallback()


def _package(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError(f"{names[0]} cannot be imported here: pip install {names[0].partition('.')[0]}")


def compare_streams(reference: Stream, *others: Stream, margin: float = 1.0) -> CommandResult:
    """Verdicts on how your own loops learned compared with a reference's, from streams of `fp8bench.watch`.

    The held-out loss counts where loops gave one (`loop.held_out`, or the callbacks). Speed is not compared, since it
    is unknown what else ran. A stream does not show whether two loops had the same initial weights and batches: that is
    assumed.

    reference: the file of the loop that the others are compared with; of several seeds a list of files
    others: a file for each other loop; of several seeds a list of files in the same order
    """
    if not others:
        raise UsageError("compare_streams was given one stream. Give a reference's, and at least one more.")
    if not 0 < margin < 100:
        raise UsageError(f"margin is a percentage above 0 and below 100, not {margin:g}.")
    files = [list(map(Path, [stream] if isinstance(stream, str | Path) else stream)) for stream in (reference, *others)]
    loops = loops_of(files, margin / 100)
    return CommandResult(JudgedTraining(loops).verdicts, *STREAM_KIND.view(loops))
