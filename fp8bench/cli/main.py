"""The door: words on a command line to a command, and how it ends to an exit code.

What `--help`, a bare `list` and bad usage need is light; the rest is imported by the command that needs it, so that a
mistyped name costs a tenth of a second and not two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8bench.cli.grammar import COMMANDS, build_parser, command_module, commands_of, meant_by, parse
from fp8bench.cli.streams import complain, make_usable, say, silence
from fp8bench.errors import EXIT_INTERRUPTED, EXIT_OK, Fp8benchError, UnknownName
from fp8bench.measure.interrupts import ends_are_interrupts


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    make_usable()
    try:
        with ends_are_interrupts():
            return _run(words)
    except Fp8benchError as error:
        complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        silence()  # the reader of our output has left
        return EXIT_OK


def _run(words: list[str]) -> int:
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UnknownName("command", words[0], COMMANDS)
    parser = build_parser([word for word in words if word in COMMANDS][:1])
    arguments = parse(parser, words)
    if getattr(arguments, "config", None) is not None:
        from fp8bench.cli.config_file import with_config

        arguments = with_config(parser, commands_of(parser)[arguments.command], words, arguments.config)
        for sentence in arguments.unused:
            complain(sentence)
    arguments.words = words
    if arguments.command is None or getattr(arguments, "subcommand", "") is None:
        meant_by(parser, arguments).print_help()
        return EXIT_OK
    _import_own(arguments)
    code = int(command_module(arguments.command).run(arguments))
    say("")
    return code


def _import_own(arguments: argparse.Namespace) -> None:
    if "imports" not in arguments:
        return
    from fp8bench.plan.asked_suites import files_of
    from fp8bench.user_code import import_user_modules

    # The script `fp8bench` does not have the working directory on its path, `python -m fp8bench` does.
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    suite = getattr(arguments, "suite", None) or getattr(arguments, "what", None) or ""
    import_user_modules((*arguments.imports, *files_of(suite)))
