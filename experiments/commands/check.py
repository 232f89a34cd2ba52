"""Report whether a model fits a machine, how fast it trains, and what would help.

Without MODEL, it lists the models of the library that fit. Without --hardware, the machine is this
one. The exit status is 0 if the model fits, 3 if it does not, and 2 for a mistake in the command.
With `--gpus N`, it says whether the model fits N GPUs and they can train it.
"""

from __future__ import annotations

import argparse
import json
import textwrap
import warnings

from megatrain.experiments.cli import options
from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection
from megatrain.simulator.base.errors import DoesNotFit, UserError

describe = options.add_check


@without_garbage_collection()
def run(args: argparse.Namespace) -> int:
    from megatrain.experiments.cli.verdict import from_options, layout, policy_table
    from megatrain.experiments.cli.verdict import text as verdict_text
    from megatrain.experiments.cli.verdict.next_commands import next_commands
    from megatrain.experiments.cli.verdict.what_fits import list_what_fits
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.policies.policy import PolicyWarning
    from megatrain.simulator.verdict.multi_gpu import check_gpus
    from megatrain.simulator.verdict.verdict import explored, summarize

    model = ModelSpec.load(args.model) if args.model is not None else None
    hardware = from_options.machine(args)
    args = options.with_dtype(args, hardware)
    options.refuse_network_of_one_host(args)
    check_gpus(args.gpus, hardware, args.hosts)
    if args.policy == "all" and args.gpus != 1:
        raise UserError(
            "--gpus",
            found=f"{args.gpus} with --policy all",
            allowed="one policy, or best",
            fix="name a policy, or leave --gpus out",
        )
    if model is None and args.gpus != 1:
        raise UserError(
            "--gpus",
            found=f"{args.gpus} without MODEL",
            allowed="one GPU for the list of the models that fit",
            fix="name a model, or leave --gpus out",
        )
    if model is None:
        return list_what_fits(args, hardware)
    asked = args  # the verdict is on one GPU, and its part on several has their own workload
    args = from_options.with_fitting_state(options.replaced(args, gpus=1, hosts=1), hardware, model)
    chunk_chosen, kernel_chosen = args.loss_chunk is None, args.attention is None
    args, chosen = from_options.with_fitting_workload(args, hardware, model)
    with warnings.catch_warnings():
        if args.policy == "all":  # the table names the policies that are left out
            warnings.simplefilter("ignore", PolicyWarning)
        choices = from_options.choices(args, hardware, args.model, args.hardware or hardware.name)
    if args.policy == "all":
        verdicts = [
            summarize(choice, hardware, tokens=args.tokens, kernel_chosen=kernel_chosen)
            for choice in choices
        ]
        if args.json:
            print(json.dumps({"policies": [from_options.as_json(verdict) for verdict in verdicts]}))
        else:
            width, first = layout.terminal_width(), verdicts[0]
            about = (
                f"{first.model} on {verdict_text.where(first)}, with"
                f" {verdict_text.step_tokens(first.workload)} a step:"
            )
            print("\n".join(textwrap.wrap(about, width)), end="\n\n")
            print(policy_table.table(verdicts, width, names=from_options.policies("all")))
        executable = [verdict for verdict in verdicts if not verdict.prediction_only]
        return 0 if executable[0].feasible else DoesNotFit.status
    shared = None
    if asked.gpus > 1:
        shared = from_options.shared_workload(asked, choices[0], hardware, model)
    verdict = from_options.described(
        asked,
        choices[0],
        hardware,
        batch_chosen=chosen,
        chunk_chosen=chunk_chosen,
        kernel_chosen=kernel_chosen,
        shared_work=shared,
    )
    width, measured = layout.terminal_width(), options.machine_notes(hardware, model)
    # The answer is known after half of the command's time or less. If the model does not fit, the
    # answer names the memory with which another plan fits, and only the advice finds that.
    early = verdict.feasible and not args.json
    if early:
        lines = verdict_text.answer_lines(verdict, width, about_machine=measured)
        print("\n".join(lines), flush=True)
    verdict = explored(
        verdict,
        choices[0],
        hardware,
        from_options.policies(args.policy),
        # This search takes a tenth of the command's time, and no other output shows its result.
        marginal=args.why or args.json,
    )
    if args.json:
        print(json.dumps(from_options.as_json(verdict)))
    else:
        before = [] if early else verdict_text.answer_lines(verdict, width, about_machine=measured)
        commands = next_commands(asked, verdict)
        rest = verdict_text.advice_lines(verdict, width, why=args.why, commands=commands)
        print("\n".join([*before, *rest]))
    several = verdict.multi_gpu
    fits = several.feasible and not several.refused if several else verdict.feasible
    return 0 if fits else DoesNotFit.status
