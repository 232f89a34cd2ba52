"""Print a script with which a shell completes verbs, options and their values.

The script is for the options of this version, and does not start Python. For bash:
megatrain completion bash > ~/.local/share/bash-completion/completions/megatrain
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from megatrain.simulator.base.errors import UserError

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "FOLDER", "PATH", "MODEL", "PLAN", "RUN", "DIR", "SOURCE", "H")
"""Words in a metavar that mean a file or a folder."""


def describe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish")


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise UserError(
            "completion",
            found="no shtab, which writes the script",
            allowed="shtab 1.13 or newer",
            fix="run `pip install shtab`",
        ) from None
    from megatrain.experiments.cli.main import VERBS, parser

    top = parser(*VERBS)
    for action in _actions(top):
        if _takes_a_file(action):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(top, shell=args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the argparse actions of a parser and of its verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)
        else:
            yield action


def _takes_a_file(action: argparse.Action) -> bool:
    """Returns whether the value of `action` may be a file or a folder."""
    named = str(action.metavar or "").replace("[", "|").replace(":", "|").split("|")
    return not action.choices and (action.type is Path or any(word in _FILES for word in named))
