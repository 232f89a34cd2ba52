"""The `megatrain` command. Each verb is a module of `commands` with `describe(parser)` and `run(args)`; only `run` imports what is heavy."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from megatrain.experiments.commands import calibrate, check, compare, export, figures, plan, report, simulate, sweep, train
from megatrain.experiments.options import OneLineParser
from megatrain.experiments.script import interrupted, interruptible, path_error
from megatrain.simulator.errors import RunError, UserError

VERBS = {
    "check": check, "plan": plan, "simulate": simulate, "calibrate": calibrate, "train": train, "export": export, "compare": compare, "report": report,
    "sweep": sweep, "figures": figures,
}  # fmt: skip


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of one verb. Raises UserError, also for options that the verb does not have."""
    top = parser()
    args, unknown = top.parse_known_args(arguments)
    if unknown:
        verb = OneLineParser(prog=f"megatrain {args.verb}")
        VERBS[args.verb].describe(verb)
        verb.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """One command: 0 for success, 1 for a run that failed, 2 for a mistake of the user or a plan that does not fit, 130 after Ctrl-C, 143 after SIGTERM,
    129 after SIGHUP.
    """
    try:
        args = parse(arguments)
        with interruptible():
            status: int = VERBS[args.verb].run(args)
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"megatrain: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"megatrain: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `megatrain ... | head`: the reader has seen enough; what is still buffered has nowhere to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if (shown := path_error(error)) is None:
            raise
        print(f"megatrain: {shown}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return interrupted("megatrain", error)


if __name__ == "__main__":
    sys.exit(main())
