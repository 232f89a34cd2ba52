"""The `megatrain` command.

Each verb is a module in `commands` with two functions: `describe(parser)` adds its options, and
`run(args)` executes it. Only `run` imports slow packages. The module's docstring is the verb's
help text, and its first line is the summary in the list of verbs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatrain.experiments.cli.commands import (
    calibrate,
    check,
    compare,
    export,
    figures,
    plan,
    report,
    simulate,
    sweep,
    train,
)
from megatrain.experiments.cli.options import OneLineParser
from megatrain.experiments.cli.program import interrupted, interruptible, path_error
from megatrain.simulator.base.errors import RunError, UserError

VERBS = {
    "check": check,
    "plan": plan,
    "simulate": simulate,
    "calibrate": calibrate,
    "train": train,
    "export": export,
    "compare": compare,
    "report": report,
    "sweep": sweep,
    "figures": figures,
}


def parser() -> OneLineParser:
    """Returns the parser for all verbs and their options."""
    top = OneLineParser(
        prog="megatrain",
        description=(
            "Train language models larger than your GPU's memory on one GPU, and predict whether a"
            " model fits and how fast it will train."
        ),
    )
    verbs = top.add_subparsers(
        dest="verb", required=True, metavar="VERB", parser_class=OneLineParser
    )
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.describe(verb)
    return top


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed options of one verb.

    Raises UserError for anything that cannot be parsed, with the verb's options as the allowed
    ones.
    """
    top = parser()
    args, unknown = top.parse_known_args(arguments)
    if unknown:
        verb = OneLineParser(prog=f"megatrain {args.verb}")
        VERBS[args.verb].describe(verb)
        verb.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    The status is 0 for success, 1 for a run that failed, 2 for a mistake of the user, 3 for a model
    or a plan that does not fit in memory, 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP,
    and 141 if the reader of standard output has gone.
    """
    try:
        args = parse(arguments)
        with interruptible():
            status: int = VERBS[args.verb].run(args)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"megatrain: {error}", file=sys.stderr)
        return error.status
    except RunError as error:
        print(f"megatrain: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has gone, as in `megatrain ... | head`. Buffered output goes to /dev/null, so
        # that Python's final flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if (shown := path_error(error)) is None:
            raise
        print(f"megatrain: {shown}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return interrupted("megatrain", error)
