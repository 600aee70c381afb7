"""Trains from Python and notebooks. Also watches users' training loops, and compares them."""

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

from fp8bench.cli.calls import accept_request_fields, fields_by_keyword
from fp8bench.cli.calls import request_fields as fields_given
from fp8bench.cli.main import DEFAULT_STORE
from fp8bench.cli.option_types import as_name_value_pairs, parse_folder_option, split_names
from fp8bench.cli.outputs import CommandResult, check_output_files, parse_log_argument
from fp8bench.cli.streams import write_sentence_to_stderr
from fp8bench.errors import StoreError, UsageError
from fp8bench.features.train.data import list_csv_rows
from fp8bench.features.train.health.health import TrainingHealth
from fp8bench.features.train.kind import KIND, STREAM_KIND, find_training
from fp8bench.features.train.kind import load_training as read_training
from fp8bench.features.train.lines import line_to_json
from fp8bench.features.train.progress import add_training_outputs, observe_on_terminal
from fp8bench.features.train.request import TrainerSettings, TrainingRequest, request_with_defaults
from fp8bench.features.train.run import resume as go_on_training
from fp8bench.features.train.run import train as train_all
from fp8bench.features.train.streams import load_recorded_loops, make_watched_training
from fp8bench.features.train.values import (
    Arm,
    ArmRole,
    Lines,
    StoredTraining,
    TrainingEvent,
    TrainingObserver,
)
from fp8bench.features.train.verdicts.summary import JudgedTraining
from fp8bench.files import append
from fp8bench.jobs.report_files import PAGE_NAME, result_report_folder, short_path
from fp8bench.measure.environment import command_line
from fp8bench.pipeline import now
from fp8bench.registry import precisions
from fp8bench.report.data.plain import results_frame
from fp8bench.report.notebook import page_as_html
from fp8bench.report.terminal import layout
from fp8bench.user_code.named import named
from fp8bench.workloads.model import LOADED_MODELS, MODEL_MAKERS_IN_PROCESS

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from fp8bench.features.train.lab.own_loop import UserLoopRecorder


# the file of a stream or, for several seeds, one file per seed
StreamFiles = str | Path | Sequence[str | Path]


class TrainingResult(StoredTraining):
    """A training as returned by calls: a StoredTraining with a display for terminals and notebooks."""

    def __repr__(self) -> str:
        arms = ", ".join(arm.name for arm in self.training.arms)
        state = "finished" if self.finished else "unfinished"
        return f"<Training {self.training.id}: {arms}, {state}, {self.path}>"

    def __str__(self) -> str:
        return layout.render(replace(KIND.view(self).page(), footer=())).rstrip("\n")

    @cached_property
    def results(self) -> pd.DataFrame:
        """The rows of --csv as a pandas frame."""
        return results_frame(list_csv_rows(JudgedTraining(self)))

    def _repr_html_(self) -> str:
        page = result_report_folder(Path(self.path).parent.name, Path(self.path).parents[2]) / PAGE_NAME
        return page_as_html(KIND.view(self).page(), short_path(page) if page.is_file() else "")


def _make_result(stored: StoredTraining) -> TrainingResult:
    return TrainingResult(**{field.name: getattr(stored, field.name) for field in fields(stored)})


@accept_request_fields(TrainingRequest, TrainerSettings, excluded=("settings", "scales"))
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
    """Train the same model in several precisions side by side, and return the stored training.

    If a worker cannot import `make`, its model is trained in this process. A bad request raises Fp8benchError. An
    event in a step, such as NaN, raises nothing and becomes a line of the training. `training.results` are the rows
    of --csv as a pandas frame.

    make: a function that returns your model with its batches, or 'module:function'
    """
    name = make if isinstance(make, str) else name_maker(make)
    # A worker cannot import a function that exists in this process only.
    is_function_in_process = not isinstance(make, str) and ":" not in name
    if is_function_in_process:
        options["isolation"] = False
        MODEL_MAKERS_IN_PROCESS[name] = cast(Callable[[], Any], make)
    # Take out the options of TrainingRequest. The remaining options belong to the trainer.
    training_request_options = {
        name: options.pop(name) for name in list(options) if name in fields_by_keyword(TrainingRequest)
    }
    # Options that the command line shares are checked by the same declarations.
    request = request_with_defaults(
        quick,
        steps,
        seeds,
        split_names(dtypes),
        margin=margin / 100,
        **fields_given(TrainingRequest, training_request_options),
        settings=TrainerSettings(
            **options,
            make=name,
            skip=split_names(skip),
            precision_map=as_name_value_pairs(precision_map),
            rates=as_name_value_pairs(rates),
        ),
    )
    targets = parse_log_argument(log)
    try:
        store_folder = parse_folder_option("store", store)
        page = None if live is None else Path(live)
        check_output_files({"live": page})
        # `inner` shows progress. `outer` also writes pages, and logs scalars to TensorBoard or wandb.
        with (
            _choose_observer(observer, progress) as inner,
            add_training_outputs(inner, store_folder, page, targets, on_alarm) as outer,
        ):
            stored_training = train_all(request, store_folder, outer, command_line())
    finally:
        # Otherwise this process would keep the function and its models.
        if is_function_in_process:
            MODEL_MAKERS_IN_PROCESS.pop(name, None)
            LOADED_MODELS.clear()
    return _make_result(stored_training)


def name_maker(make: Callable[..., Any]) -> str:
    """Returns the name by which a worker can import `make`. If no worker can import it (a lambda, or a function from an
    interactive session), returns only the function's name.
    """
    module = getattr(make, "__module__", "")
    function_name = getattr(make, "__qualname__", type(make).__name__)
    name = f"{module}:{function_name}"
    if module in ("", "__main__", None) or "<" in function_name:
        return "".join(letter for letter in function_name if letter.isalnum() or letter in "._") or "make"
    try:
        imported_function = named(name)
    except Exception:  # noqa: BLE001 - it cannot be imported, for whatever reason
        imported_function = None
    # The name may refer to another object.
    return name if imported_function is make else function_name


def _choose_observer(observer: TrainingObserver | None, progress: bool) -> AbstractContextManager[TrainingObserver]:
    return observe_on_terminal() if observer is None and progress else nullcontext(observer or TrainingObserver())


def resume_training(
    training: str | Path | StoredTraining,
    *,
    store: str | Path = DEFAULT_STORE,
    progress: bool = True,
    observer: TrainingObserver | None = None,
) -> TrainingResult:
    """Resume a training that was cut off, from its newest checkpoint. A finished training is returned unchanged.

    training: the training, its id, its folder, or 'last'
    """
    store_folder = parse_folder_option("store", store)
    path = find_training(training.path if isinstance(training, StoredTraining) else str(training), store_folder)
    with _choose_observer(observer, progress) as outer:
        return _make_result(go_on_training(path, store_folder, outer)[1])


def load_training(training: str | Path | StoredTraining, store: str | Path = DEFAULT_STORE) -> TrainingResult:
    """Returns a stored training. Its `.results` are the rows of --csv as a pandas frame.

    training: its id, its folder, or 'last'; a StoredTraining is returned unchanged
    """
    if not isinstance(training, StoredTraining):
        training = read_training(find_training(str(training), parse_folder_option("store", store)))
    return _make_result(training)


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
) -> Iterator[UserLoopRecorder]:
    """Watch your training loop in a `with` block: a row for each step, and the whole module every `stride` steps.

    A step ends when the optimizer takes a step. The loss is the module's output, if that is a number or has a `loss`.
    Otherwise it is the number with which backward begins. You can also give the loss by `loss(value)` of the object
    that the `with` block returns.

    module: the model that is trained
    optimizer: the optimizer that updates it
    path: a new file for the lines of the training
    told: a function that receives the lines; its exceptions end the loop. Without a function, alarms go to stderr
    name: the name of the loop in comparisons
    stride: steps from one reading of the whole module to the next
    tokens: the tokens of a step, for tokens per second
    scaler: the GradScaler of the loop
    precision: the precision of the training, or one that you consider: measures what casting each layer to it loses
    eager: whether watched steps run compiled modules without compilation, so that their layers are watched
    health: whether health rules read the lines; without them there are no alarms
    on_alarm: a function that receives each alarm, and whose exceptions end the loop; or a command to run for each
    log: where curves are logged while the loop runs: tensorboard[:DIR] or wandb[:PROJECT]
    live: an HTML page of the stream in `path`, rewritten while the loop runs
    """
    from fp8bench.features.train.lab.own_loop import UserLoopRecorder
    from fp8bench.features.train.lab.own_ranks import Ranks

    # There is only one arm, so rules that compare two arms find nothing.
    training_health = (
        TrainingHealth((Arm(name, precisions.find_canonical_name(precision), ArmRole.REFERENCE),)) if health else None
    )
    if live is not None and path is None:
        raise UsageError("live shows the stream in a file. Give a path as well.")
    training = replace(make_watched_training(f"{name}-{secrets.token_hex(4)}", [name]), started=now())
    page = None if live is None else Path(live)
    with ExitStack() as stack:
        # Rank 0 receives the rows of all ranks, so it alone writes files.
        is_first_rank = Ranks.get_rank() == 0
        write_lines = _append_to_file(Path(path), stack) if path is not None and is_first_rank else None
        targets = parse_log_argument(log)
        command, call = (on_alarm, None) if isinstance(on_alarm, str) else ("", on_alarm)
        outputs = (page, targets, command) if is_first_rank else (None, (), "")
        output_observer = stack.enter_context(add_training_outputs(_NotePrintingObserver(), Path(path or ""), *outputs))
        output_observer.begun(training)

        def pass_lines(lines: Lines) -> None:
            lines = (*lines, *training_health.find_alarms(lines)) if training_health is not None else lines
            if write_lines is not None:
                write_lines(lines)
            output_observer.trained(0, max((line.step for line in lines), default=0), lines)
            try:
                (print_events if told is None else told)(lines)
                for line in lines:
                    if call is not None and isinstance(line, TrainingEvent) and line.kind == "alarm":
                        call(line)
            except Exception as error:
                watched_training_loop.user_error = error
                raise

        options = (name, stride, tokens, scaler, precision, eager)
        watched_training_loop = UserLoopRecorder(module, optimizer, pass_lines, *options)
        stack.enter_context(watched_training_loop)
        del module, optimizer  # watching keeps no model in memory that its loop has dropped
        yield watched_training_loop


class _NotePrintingObserver(TrainingObserver):
    def note(self, sentence: str) -> None:
        write_sentence_to_stderr(sentence)


def print_events(lines: Lines) -> None:
    """Prints the events among the lines. `watch` calls this function unless it gets another function for lines."""
    for line in lines:
        if isinstance(line, TrainingEvent):
            write_sentence_to_stderr(line.describe(is_watched=True))


def _append_to_file(path: Path, stack: ExitStack) -> Callable[[Lines], None]:
    """Appends lines to a new file. A full disk ends the file with a warning, but not the training."""
    try:
        # Opening fails if the file exists: two streams in one file would be unreadable.
        file: IO[bytes] | None = stack.enter_context(path.open("xb"))
    except OSError as error:
        raise StoreError(f"{path} cannot be made ({error.strerror}). Give another file.") from None

    line_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

    def write_lines(lines: Lines) -> None:
        nonlocal file
        if file is None:
            return
        text = "".join(line_encoder.encode(line_to_json(line)) + "\n" for line in lines)
        try:
            # Not synced: the text survives the end of this process, and the loop does not wait for the disk
            append(file, text, sync=False)
        except OSError as error:
            warnings.warn(f"{path} ends here ({error.strerror}); the training goes on.", stacklevel=2)
            file = None

    return write_lines


class _LoopCallback:
    def __init__(self) -> None:
        self._stack = ExitStack()
        self._loop: UserLoopRecorder | None = None

    def on_train_end(self, *_: Any, **known: Any) -> None:
        self._loop = None
        self._stack.close()


def hugging_face_callback(path: str | Path | None = None, **options: Any) -> Any:
    """Returns a callback for transformers' Trainer that watches what it trains.

    If a training raises, its hooks stay until the next training begins, or until `on_train_end`.

    path: a new file for the lines of the training
    options: those of `fp8bench.watch`
    """
    callback_class: Any = _import_package("transformers").TrainerCallback

    class WatchCallback(_LoopCallback, callback_class):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
            # The previous training may have raised before `on_train_end`.
            self._stack.close()
            # Accelerate wraps the optimizer, and hooks of the wrapper would never run.
            optimizer = known["optimizer"]
            unwrapped_optimizer = getattr(optimizer, "optimizer", optimizer)
            self._loop = self._stack.enter_context(watch(known["model"], unwrapped_optimizer, path, **options))

        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **known: Any) -> None:
            # An evaluation before the first step happens before the loop is watched.
            if self._loop is not None and "eval_loss" in (metrics or {}):
                self._loop.held_out(metrics["eval_loss"])

    return WatchCallback()


def lightning_callback(path: str | Path | None = None, **options: Any) -> Any:
    """Returns a callback for Lightning's Trainer that watches what it trains. The loss is the one that backward begins
    with.

    path: a new file for the lines of the training
    options: those of `fp8bench.watch`
    """
    callback_class: Any = _import_package("lightning.pytorch", "pytorch_lightning").Callback

    class WatchCallback(_LoopCallback, callback_class):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if len(trainer.optimizers) != 1:
                raise UsageError(
                    f"{len(trainer.optimizers)} optimizers do not share a step. Watch one part and its optimizer."
                )
            self._loop = self._stack.enter_context(watch(pl_module, trainer.optimizers[0], path, **options))

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            if self._loop is not None:  # Lightning has divided the loss by the number of micro-batches
                self._loop.loss(loss * trainer.accumulate_grad_batches)

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if self._loop is not None and not trainer.sanity_checking and "val_loss" in trainer.callback_metrics:
                self._loop.held_out(trainer.callback_metrics["val_loss"])

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self._stack.close()

    return WatchCallback()


def _import_package(*names: str) -> Any:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise UsageError(f"{names[0]} cannot be imported here: pip install {names[0].partition('.')[0]}")


def compare_streams(reference: StreamFiles, *others: StreamFiles, margin: float = 1.0) -> CommandResult:
    """Compare how your own loops learned with a reference loop, from streams that `fp8bench.watch` has written.

    Held-out losses count if the loops gave any (by `loop.held_out`, or by the callbacks). Speed is not compared,
    because other programs may have run at the same time. A stream does not show whether two loops had the same initial
    weights and batches. Both are assumed to be the same.

    reference: the file of the loop that all other loops are compared with; for several seeds a list of files
    others: a file for each other loop; for several seeds a list of files in the same order
    """
    if not others:
        raise UsageError("compare_streams was given one stream. Give a reference's, and at least one more.")
    if not 0 < margin < 100:
        raise UsageError(f"margin is a percentage above 0 and below 100, not {margin:g}.")
    stream_files = [
        list(map(Path, [stream] if isinstance(stream, str | Path) else stream)) for stream in (reference, *others)
    ]
    recorded_loops = load_recorded_loops(stream_files, margin / 100)
    return CommandResult(JudgedTraining(recorded_loops).verdicts, *STREAM_KIND.view(recorded_loops))
