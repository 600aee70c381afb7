"""Trainings from Python and notebooks: the same as `fp8bench train`, and watching a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8bench.cli.given import folder, in_bytes, names, pairs, plain, texts
from fp8bench.cli.grammar import DEFAULT_STORE
from fp8bench.errors import UnknownName
from fp8bench.features.train.callbacks import Told, for_hugging_face, for_lightning, watched
from fp8bench.features.train.data import write_training
from fp8bench.features.train.frames import TrainingFrames
from fp8bench.features.train.kept import load_training as read_training
from fp8bench.features.train.kept import training_named
from fp8bench.features.train.observer import SilentTraining, TrainingObserver
from fp8bench.features.train.request import TrainerSettings, asked
from fp8bench.features.train.run import resume as go_on_training
from fp8bench.features.train.run import train as train_all
from fp8bench.features.train.values import KeptTraining
from fp8bench.features.train.verdicts.verdicts import verdicts_of
from fp8bench.measure.environment import command_line
from fp8bench.report.data.boards import check_tensorboard

if TYPE_CHECKING:
    import torch

    from fp8bench.features.train.lab.own_loop import OwnLoop


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
        quick, steps, seeds, names(dtypes), reference=reference, margin=margin / 100, seed=seed,
        settings=TrainerSettings(**settings, precision_map=pairs(precision_map), rates=pairs(rates)),
        sweep=pairs(sweep, texts), data=plain(data), other_data=plain(other_data), tokens=tokens, stride=stride,
        evaluate=evaluate, keep=keep, try_fix=try_fix, device=device, threads=threads, imports=names(imports),
        isolation=isolation, max_batch=max_batch, memory_limit=in_bytes(memory_limit), energy=energy, ranks=ranks,
    )  # fmt: skip
    board = None if tensorboard is None else folder("tensorboard", tensorboard)
    if board is not None:
        check_tensorboard(board)
    done = train_all(request, folder("store", store), observer or SilentTraining(), command_line())
    if board is not None:
        write_training(done, verdicts_of(done.training, done.lines), board)
    return done


def resume_training(
    training: str | Path | KeptTraining, *, store: str | Path = DEFAULT_STORE, observer: TrainingObserver | None = None
) -> KeptTraining:
    """Go on with a training that was cut off, from its newest checkpoint; one that is finished is returned."""
    kept = folder("store", store)
    path = training_named(training.path if isinstance(training, KeptTraining) else str(training), kept)
    return go_on_training(path, kept, observer or SilentTraining())[1]


def load_training(training: str | Path | KeptTraining, store: str | Path = DEFAULT_STORE) -> TrainingFrames:
    """A training and its lines as pandas frames: one at hand, or a stored one by id, folder, or 'last'.

    `.training` is the training; `.arms`, `.steps`, `.readings`, `.figures`, `.validations`, `.costs` and `.events` are
    made when they are first asked for.
    """
    if not isinstance(training, KeptTraining):
        training = read_training(training_named(str(training), folder("store", store)))
    return TrainingFrames(training)


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
