"""`fp8bench fleet export`: a plan as text for a scheduler that fp8bench does not call."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path, PurePosixPath

from fp8bench.cli import option_types as types
from fp8bench.cli.outputs import write_outputs
from fp8bench.cli.streams import complain, say
from fp8bench.jobs.fleet.export import Tasks, Volume, forms
from fp8bench.model.fleet import FleetPlan
from fp8bench.model.request import whole_number


def add(parser: argparse.ArgumentParser) -> None:
    """Its options."""
    names = forms.names()
    words = "; ".join(f"{name}: {forms.get(name).summary}" for name in names)
    parser.add_argument("--to", choices=names, required=True, help=f"what for. {words}")
    words = "how many tasks, which share the cells; default a task for each cell"
    parser.add_argument("--workers", type=types.whole(whole_number(1, 4096)), metavar="N", help=words)
    words = "where PLAN lies on the machines that measure; default as here"
    parser.add_argument("--plan-path", type=types.path, metavar="PATH", help=words)
    words = "the Python there that has fp8bench; default python3 in an image, else the one that runs this"
    parser.add_argument("--python", metavar="PATH", help=words)
    words = "minutes after which a task is ended; default 1440 (24 hours)"
    parser.add_argument("--minutes", type=types.whole(whole_number(1, 10**6)), default=1440, metavar="N", help=words)
    parser.add_argument("--image", default="", metavar="NAME", help="k8s: the image, which has fp8bench in it")
    words = "k8s, skypilot: the claim or volume that holds plan and store, and where it is mounted"
    parser.add_argument("--volume", type=_volume, metavar="NAME:/MOUNT", help=words)
    words = "; ".join(f"{name}: {forms.get(name).takes}" for name in names)
    parser.add_argument("--option", action="append", default=[], type=option, metavar="NAME=VALUE", help=words)
    parser.add_argument("-o", "--output", type=types.path, metavar="FILE", help="the file to write; default stdout")


def option(text: str) -> tuple[str, str]:
    """'partition=gpu', or a name alone."""
    name, _, value = text.partition("=")
    name = name.removeprefix("--")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", name):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r:.80}")
    return name, value


def _volume(text: str) -> Volume:
    name, colon, mount = text.partition(":")
    if not name or not colon or not re.fullmatch("/[^:]+", mount) or ".." in mount.split("/"):
        raise argparse.ArgumentTypeError(f"expected NAME:/MOUNT, got {text!r:.80}")
    return Volume(name, PurePosixPath(mount))


def export(plan: FleetPlan, arguments: argparse.Namespace) -> None:
    """Print or write it."""
    form = forms.get(arguments.to)
    file, store = arguments.plan_path or arguments.plan, Path(arguments.store)
    if not form.contained:  # those machines see what this one sees
        file, store = file.resolve(), store.resolve()
    python = arguments.python or ("python3" if form.contained else sys.executable)
    text = form.text(Tasks(
        plan, str(file), str(store), python, arguments.minutes, arguments.workers, arguments.image, arguments.volume,
        dict(arguments.option),
    ))  # fmt: skip
    if arguments.output is None:
        say(text)
    else:
        with write_outputs({"--output": (arguments.output, text)}):
            pass  # it raises at its end
        complain(f"{form.summary} for {len(plan.cells)} cells in {arguments.output}")
