"""The `megatrain` command.

Each verb is a module in `commands` with two functions: `describe(parser)` adds its options, and
`run(args)` executes it. Only `run` imports slow packages. The module's docstring is the verb's
help text, and its first line is the summary in the list of verbs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.cli.program import run_program
from megatrain.simulator.base.plugins import unchanging

_MODULES = {
    "check": "check",
    "plan": "plan",
    "simulate": "simulate",
    "calibrate": "calibrate",
    "data": "data",
    "train": "train",
    "eval": "evaluate",
    "chat": "chat",
    "export": "export",
    "convert": "convert",
    "compare": "compare",
    "report": "report",
    "serve": "serve",
    "sweep": "sweep",
    "figures": "figures",
    "list": "listing",
    "completion": "completion",
}
"""Verb -> the name of its module in `commands`."""


class _Verbs(Mapping[str, Any]):
    """Maps each verb to its module, which is imported at first use. Importing all takes 0.1 s."""

    def __getitem__(self, verb: str) -> Any:
        return importlib.import_module(f"megatrain.experiments.commands.{_MODULES[verb]}")

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


VERBS = _Verbs()
"""Verb -> its module, in the order in which the help lists them."""


class _Version(argparse.Action):
    """Prints the installed version and ends the command. Looking it up takes 50 ms."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"megatrain {version('megatrain')}")
        raise SystemExit(0)


def parser(*described: str) -> OneLineParser:
    """Returns the parser of all verbs.

    Options are added only to the `described` verbs, because this imports a verb's module.
    """
    top = OneLineParser(
        prog="megatrain",
        description=(
            "Train language models larger than your GPU's memory on one GPU, and predict whether a"
            " model fits and how fast it will train."
        ),
    )
    top.add_argument("--version", action=_Version, help="print the version")
    verbs = top.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=OneLineParser
    )
    for name in VERBS:
        verb = verbs.add_parser(name, help=_summary(name))
        if name in described:
            verb.description = VERBS[name].__doc__
            VERBS[name].describe(verb)
    return top


def _summary(verb: str) -> str:
    """Returns the first line of the docstring of the verb's module, without importing it."""
    file = Path(__file__).parents[1] / "commands" / f"{_MODULES[verb]}.py"
    with file.open(encoding="utf-8") as lines:
        return lines.readline().strip().strip('"')


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed options of one verb, from `arguments` or, if None, from `sys.argv`.

    Raises UserError for arguments that cannot be parsed. The error names the verb's options.
    """
    words = sys.argv[1:] if arguments is None else arguments
    first = next((word for word in words if not word.startswith("-")), None)
    top = parser(first) if first and first in VERBS else parser()
    args, unknown = top.parse_known_args(arguments)
    if unknown:
        verb = OneLineParser(prog=f"megatrain {args.verb}")
        VERBS[args.verb].describe(verb)
        verb.refuse_unknown(unknown)
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, with `arguments` or, if None, with `sys.argv`. Returns its exit status.

    The status is 0 for success, 1 for a run that failed, 2 for a mistake of the user, 3 for a model
    or a plan that does not fit in memory, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP,
    and 141 if the reader of standard output has closed it.
    """

    def run() -> int:
        args = parse(arguments)
        with unchanging():
            status: int = VERBS[args.verb].run(args)
        return status

    return run_program("megatrain", run)
