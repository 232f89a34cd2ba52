"""The `megatrain` command. Each verb is a module of `commands` with `describe(parser)` and `run(args)`; only `run` imports what is heavy."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatrain.experiments.commands import calibrate, check, compare, plan, simulate, train
from megatrain.experiments.options import OneLineParser
from megatrain.simulator.errors import UserError

VERBS = {"check": check, "plan": plan, "simulate": simulate, "calibrate": calibrate, "train": train, "compare": compare}


def parser() -> OneLineParser:
    """All verbs and their options."""
    top = OneLineParser(
        prog="megatrain", description="Train language models far larger than a GPU's memory on one GPU, and know beforehand exactly how it will go."
    )
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=OneLineParser)
    for name, module in VERBS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        verb = verbs.add_parser(name, help=summary, description=module.__doc__)
        module.describe(verb)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command: 0 for success, 2 for a mistake of the user or a plan that does not fit, 130 after Ctrl-C."""
    try:
        args = parser().parse_args(arguments)
        status: int = VERBS[args.verb].run(args)
        return status
    except UserError as error:
        print(f"megatrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatrain: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
