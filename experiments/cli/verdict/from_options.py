"""The machine, the plans and the verdict that the options of a command ask for."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING

from megatrain.experiments.cli import options
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.optimizer import WITH_STATE_FORMATS
from megatrain.simulator.model.state_format import ANY, EXACT, FORMATS

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.planner.search import Choice
    from megatrain.simulator.verdict.verdict import Verdict

BATCHES = (32, 16, 8, 4, 2, 1)
"""Micro-batches to try where none is named. A larger one is seldom faster, and needs more
memory."""


PIECES = tuple(2**power for power in range(11, 17))
"""Tokens of a piece to try where none is named and the model does not fit without pieces. Smaller
pieces take more time, and larger ones seldom less."""


def policies(named: str) -> list[str]:
    """Returns the names of the policies that `--policy` selects.

    `best` selects the policies that the runtime executes and that can be the fastest. `all` also
    selects policies that serve as baselines, and models of other systems.
    """
    from megatrain.simulator.policies import contenders, names, peers

    return {"best": contenders(), "all": [*names(), *peers()]}.get(named, [named])


def choices(
    args: argparse.Namespace,
    hardware: HardwareSpec,
    source: str,
    hardware_name: str,
    model: ModelSpec | None = None,
) -> list[Choice]:
    """Returns the best plan of each policy that `args.policy` selects, the best plan first.

    With `--tokens-per-step`, the plans are those of the fastest split into micro-batches.

    Args:
        source: the model, as the plan names it.
        hardware_name: the hardware, as the plan names it.
        model: the model. The default is the one that `args.model` names.

    Raises UserError if both `--tokens-per-step` and `--accumulation` are given, or if the machine
    does not have the memory of `--device-memory`.
    """
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.planner.search import candidates

    model = model or ModelSpec.load(args.model)
    work, limits = (
        options.workload(args, model),
        {
            "device_limit": options.device_limit(args.device_memory, hardware),
            "host_limit": args.host_memory,
        },
    )
    step_tokens = getattr(args, "tokens_per_step", None)
    if step_tokens is None:
        return candidates(
            model,
            hardware,
            work,
            source=source,
            hardware_name=hardware_name,
            policies=policies(args.policy),
            **limits,
        )
    from megatrain.simulator.planner.batch_splits import best_split

    if work.accumulation > 1:
        raise UserError(
            "--tokens-per-step",
            found="--accumulation as well",
            allowed="--tokens-per-step or --accumulation",
            fix="leave --accumulation and --batch out",
        )
    return best_split(
        model,
        hardware,
        work,
        step_tokens,
        source=source,
        hardware_name=hardware_name,
        policies=policies(args.policy),
        choose_chunk=args.loss_chunk is None,
        **limits,
    )


def outlook(
    args: argparse.Namespace, hardware: HardwareSpec, source: str, model: ModelSpec
) -> Choice | None:
    """Returns what is known of the best plan before plans are searched, or None if nothing is.

    If it does not fit, it is the plan that `choices` returns, without its digest and its time.
    Otherwise, only its speed is right, as the most that any plan can have.

    The arguments are those of `choices`. Raises UserError as `choices` does.
    """
    import msgspec

    from megatrain.simulator.planner.outlook import outlook as found_by_memory

    found = found_by_memory(
        model,
        hardware,
        options.workload(args, model, quiet=True),
        device_limit=options.device_limit(args.device_memory, hardware),
        host_limit=args.host_memory,
        policies=policies(args.policy),
    )
    if found is None:
        return None
    return msgspec.structs.replace(found, plan=msgspec.structs.replace(found.plan, source=source))


def outlook_verdict(args: argparse.Namespace, choice: Choice, hardware: HardwareSpec) -> Verdict:
    """Returns the verdict on a choice of `outlook`. Only what is right in it is right here."""
    from megatrain.simulator.verdict.verdict import summarize

    return _stated(summarize(choice, hardware), args)


def as_json(verdict: Verdict) -> dict[str, object]:
    """Returns what `--json` prints: all fields of the verdict, in bytes and seconds."""
    import msgspec

    found: dict[str, object] = msgspec.to_builtins(verdict)
    return found


def with_fitting_state(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with a state format instead of `--state any`.

    The format is the one with the most bytes in which the model fits, if necessary with a
    micro-batch of one sequence. If it fits in none, it is the one with the fewest bytes.
    """
    if args.state != ANY:
        return args
    from megatrain.simulator.policies import find

    executed = any(not find(name).prediction_only for name in policies(args.policy))
    coded = executed and args.dtype in ("bf16", options.FP8)
    coded = coded and args.optimizer in WITH_STATE_FORMATS
    able = tuple(FORMATS) if coded else (EXACT,)
    tried = [argparse.Namespace(**{**vars(args), "state": state}) for state in able]
    batches = BATCHES[::-1] if args.batch is None else (args.batch,)
    fitting = (each for each in tried if _fitting(each, hardware, model, batches, least=True)[0])
    return next(fitting, tried[-1])


def with_loss_chunk(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with the loss chunk that the planner chooses, if none is named.

    With `--tokens-per-step` it depends on the batch, so `choices` chooses it later.
    """
    if args.loss_chunk is not None or getattr(args, "tokens_per_step", None) is not None:
        return args
    from megatrain.simulator.planner.loss_chunk import with_loss_chunk as with_chunk

    chosen = with_chunk(
        model,
        hardware,
        options.workload(args, model, quiet=True),
        device_limit=options.device_limit(args.device_memory, hardware),
        host_limit=args.host_memory,
        policies=policies(args.policy),
    )
    return argparse.Namespace(**{**vars(args), "loss_chunk": chosen.loss_chunk})


def with_fitting_piece(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with a number of tokens for `--token-piece` if it is not named, if the model
    does not fit with one sequence, and if it fits with pieces: the number with the fastest plan. A
    micro-batch that is not named then has one sequence.
    """
    one = argparse.Namespace(**{**vars(args), "batch": 1})
    sizes = [piece for piece in PIECES if piece < args.seq * (args.batch or 1)]
    obstacle = model.pieces_obstacle(compiled=args.compile)
    able = not (args.dtype == options.FP8 or obstacle)
    if args.token_piece or not (able and sizes) or _fitting(one, hardware, model, (1,))[0]:
        return args
    found: dict[float, argparse.Namespace] = {}
    for piece in sizes:
        tried = argparse.Namespace(**{**vars(args), "batch": args.batch or 1, "token_piece": piece})
        if _fitting(tried, hardware, model, (tried.batch,))[0]:
            best = choices(tried, hardware, model.name, hardware.name, model)[0]
            if best.feasible:
                found.setdefault(best.step_seconds, tried)
    if not found:
        return args
    # A search may find a plan that fits although those that `_fitting` looks at do not.
    whole = argparse.Namespace(**{**vars(args), "batch": args.batch or 1})
    fits = choices(whole, hardware, model.name, hardware.name, model)[0].feasible
    return args if fits else found[min(found)]


def with_fitting_batch(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with the largest of the usual micro-batches that fits, or 1 if none does.

    With `--token-piece` it is the fastest of them, because layers in pieces compute no faster with
    more sequences, and those take more memory.

    A size for which a calibrated machine has no costs is left out. If it has none for any, the
    largest is taken, so that the search says what is missing.
    """
    fitting, priced = _fitting(args, hardware, model, BATCHES)
    if args.token_piece and fitting and fitting[0].batch > BATCHES[-1]:
        return _fastest(args, hardware, model, fitting[0].batch)
    return (fitting or priced)[0]


def with_fitting_workload(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> tuple[argparse.Namespace, bool]:
    """Returns `args` with a piece of tokens, a micro-batch and a loss chunk where none is named.

    The second result says whether the micro-batch is the one of `with_fitting_batch`. It has one
    sequence if a piece was chosen.
    """
    args = with_fitting_piece(args, hardware, model)
    chosen = args.batch is None and args.tokens_per_step is None
    if chosen:
        args = with_fitting_batch(args, hardware, model)
    args = argparse.Namespace(**{**vars(args), "batch": args.batch or 1})
    return with_loss_chunk(args, hardware, model), chosen


def _fastest(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec, largest: int
) -> argparse.Namespace:
    """Returns `args` with the micro-batch of the most tokens a second. `largest` is the largest of
    the usual ones that fits. Smaller ones are tried as long as they are faster.
    """
    best, least = argparse.Namespace(**{**vars(args), "batch": largest}), math.inf
    for batch in (size for size in BATCHES if size <= largest):
        tried = argparse.Namespace(**{**vars(args), "batch": batch})
        planned = with_loss_chunk(tried, hardware, model)
        choice = choices(planned, hardware, model.name, hardware.name, model)[0]
        seconds = choice.step_seconds / batch if choice.feasible else math.inf
        if seconds >= least:
            break
        best, least = tried, seconds
    return best


def _fitting(
    args: argparse.Namespace,
    hardware: HardwareSpec,
    model: ModelSpec,
    batches: tuple[int, ...],
    *,
    least: bool = False,
) -> tuple[list[argparse.Namespace], list[argparse.Namespace]]:
    """Returns `args` with the first of `batches` that fits, or nothing; and with the last of them
    that the machine has costs for, or the first if it has none.

    With `least`, and if no loss chunk is named, it fits with a chunk that the planner may choose.
    """
    import msgspec

    from megatrain.simulator.planner.loss_chunk import least_chunks
    from megatrain.simulator.policies import find
    from megatrain.simulator.schedule.plan import Plan
    from megatrain.simulator.verdict.alternatives import fits

    limit = options.device_limit(args.device_memory, hardware) or hardware.device_bytes
    names = [name for name in policies(args.policy) if not find(name).prediction_only]
    sized = [argparse.Namespace(**{**vars(args), "batch": batch}) for batch in batches]
    priced = sized[:1]
    for tried in sized if names else ():
        work = options.workload(tried, model, quiet=True)
        chosen = least and args.loss_chunk is None
        works = least_chunks(work, hardware) if chosen else (work,)
        plan = Plan(
            policy=names[0],
            hardware=hardware.name,
            source=model.name,
            model=model,
            workload=work,
            device_limit_bytes=limit,
            host_limit_bytes=args.host_memory or hardware.host_bytes,
        )
        try:
            plans = (msgspec.structs.replace(plan, workload=each) for each in works)
            if any(fits(each, hardware, names) for each in plans):
                return [tried], [tried]
        except UserError:
            continue
        priced = [tried]
    return [], priced


def machine(args: argparse.Namespace) -> HardwareSpec:
    """Returns the machine that `--hardware` names, or this one, with the cores of `--cores`."""
    from megatrain.simulator.hardware.machine import HardwareSpec

    if args.hardware:
        found = HardwareSpec.load(args.hardware)
    else:
        from megatrain.experiments.cli.verdict.this_machine import this_machine

        found = this_machine()
    return found.with_cores(args.cores) if args.cores else found


def explained(
    args: argparse.Namespace,
    choice: Choice,
    hardware: HardwareSpec,
    *,
    batch_chosen: bool,
    chunk_chosen: bool,
    explore: bool = True,
    marginal: bool = True,
) -> Verdict:
    """Returns the verdict on a choice for the options of `args`.

    Args:
        batch_chosen: whether the micro-batch was chosen because none was named.
        chunk_chosen: whether the loss chunk was chosen because none was named.
        explore: whether to add what other plans would give, as `explored` does.
        marginal: whether that includes what one more GiB gains.
    """
    import msgspec

    from megatrain.simulator.verdict.verdict import described, explored

    verdict = described(
        choice, hardware, gpus=args.gpus, tokens=args.tokens, chunk_chosen=chunk_chosen
    )
    verdict = _stated(msgspec.structs.replace(verdict, batch_chosen=batch_chosen), args)
    if not explore:
        return verdict
    return explored(verdict, choice, hardware, policies(args.policy), marginal=marginal)


def _stated(verdict: Verdict, args: argparse.Namespace) -> Verdict:
    """Returns `verdict`, whose host memory is not assumed if an option states it, or if the machine
    is this one.
    """
    import msgspec

    stated = args.hardware is None or args.host_memory is not None
    return msgspec.structs.replace(
        verdict, host_memory_assumed=verdict.host_memory_assumed and not stated
    )
