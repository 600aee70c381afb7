"""`fp8bench list`: names suites, precisions, backends and devices, and explains labels and health rules."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from fp8bench.cli.options import add_common_options
from fp8bench.cli.outputs import print_lines
from fp8bench.cli.streams import say
from fp8bench.errors import EXIT_OK, UnknownName, UsageError
from fp8bench.feature_list import import_feature_modules
from fp8bench.jobs import doctor
from fp8bench.model import Label
from fp8bench.plan.asked_suites import known_suites, suite_files
from fp8bench.registry import backends, devices, precisions

_LIST_ARGUMENT_SYNONYMS = {"dtypes": "precisions"}


def _collect_glossaries() -> dict[str, Mapping[str, str]]:
    """Returns a glossary (an explanation by name) for each kind of name that has one: 'labels', which mark doubtful
    results of runs, and the kinds that features define, such as 'rules'.
    """
    from fp8bench.report.words.legend import explain_label

    glossaries: dict[str, Mapping[str, str]] = {"labels": {label.value: explain_label(label) for label in Label}}
    for feature_module in import_feature_modules("glossary"):
        glossaries[feature_module.GLOSSARY_NAME] = feature_module.explain_names()
    return glossaries


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        metavar="WHAT",
        help="suites, precisions, backends, devices, labels of runs, rules of trainings, or a suite (its axes)",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a precision, label or rule: its details")
    add_common_options(parser, "--import", help="as in suite")


def run(arguments: argparse.Namespace) -> int:
    files = suite_files(arguments.what or "")
    names_by_kind = {"suites": known_suites(), "precisions": precisions.names()}
    names_by_kind |= {"backends": backends.names(), "devices": devices.names()}
    if arguments.what is None:
        say("".join(f"{kind}: {', '.join(names)}\n" for kind, names in names_by_kind.items()))
        return EXIT_OK
    arguments.what = _LIST_ARGUMENT_SYNONYMS.get(arguments.what, arguments.what)
    glossaries = _collect_glossaries()
    if arguments.what in glossaries:
        texts = glossaries[arguments.what]
        if arguments.name is not None and arguments.name not in texts:
            raise UnknownName(arguments.what.removesuffix("s"), arguments.name, texts)
        print_lines([texts[arguments.name]] if arguments.name else texts.values())
        return EXIT_OK
    known_names = [*names_by_kind, *glossaries, *names_by_kind["suites"]]
    if not files and arguments.what not in known_names:
        raise UnknownName("thing to list", arguments.what, known_names)
    if arguments.name is not None and arguments.what != "precisions":
        raise UsageError(f"{arguments.name!r:.80} was given, but {arguments.what} takes no name. Leave it out.")
    if arguments.name is not None:
        # Raises UnknownName for an unknown precision.
        precisions.get(arguments.name)
    print_lines(doctor.describe_subject(arguments.what, (*arguments.imports, *files), arguments.name))
    return EXIT_OK
