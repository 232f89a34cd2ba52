"""Finds the machine, the plans and the verdict for the options of a command.

The functions `with_...` choose what the options leave open. If the command has `--gpus N`, they
choose it for N GPUs that share a step, as far as N GPUs can share it.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatrain.experiments.cli import options
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.optimizer import WITH_STATE_FORMATS
from megatrain.simulator.model.state_format import ANY, EXACT, FORMATS
from megatrain.simulator.model.workload import LEAST_PIECE, LONG_SEQUENCE

if TYPE_CHECKING:
    from megatrain.simulator.hardware.machine import HardwareSpec
    from megatrain.simulator.model.specs import ModelSpec
    from megatrain.simulator.model.workload import Workload
    from megatrain.simulator.planner.search import Choice
    from megatrain.simulator.schedule.plan import Plan
    from megatrain.simulator.verdict.verdict import Verdict

BATCHES = (32, 16, 8, 4, 2, 1)
"""Micro-batches to try if `--batch` is not given. Larger ones are seldom faster, and need more
memory."""
PIECES = tuple(LEAST_PIECE * 2**power for power in range(6))
"""Values of `--token-piece` to try if it is not given (`with_fitting_piece`). Larger ones seldom
take less time."""
_WORTH = 1.02
"""How many times as long as with pieces a step must take without them, if it fits, before pieces
are used."""


def policies(named: str) -> list[str]:
    """Returns the names of the policies that `--policy` selects.

    `best` selects the policies that the runtime executes and that can be the fastest. `all` also
    selects the baselines, and the models of other systems.
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

    With `--tokens-per-step`, the step is split into micro-batches in the fastest way.

    Args:
        args: the options of the command.
        hardware: the machine.
        source: the name of the model in the plan.
        hardware_name: the name of the hardware in the plan.
        model: the model, or None for the model that `args.model` names.

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
            "host_limit": options.host_limit(args.host_memory, hardware),
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
    """Returns what memory alone tells about the best plan before a search, or None if nothing.

    If no plan fits, it is the plan that `choices` would return, without its digest and its step
    time. Otherwise, only its step time means something: no plan is faster.

    Arguments and errors are the same as in `choices`.
    """
    from megatrain.simulator.planner.outlook import outlook as by_memory

    return _found(by_memory, args, hardware, source, model)


def first_plan(
    args: argparse.Namespace, hardware: HardwareSpec, source: str, model: ModelSpec
) -> Choice | None:
    """Returns a plan that fits and is probably a few percent slower than the best, or None if none
    was found. This takes a fraction of the time of `choices`.

    Arguments and errors are the same as in `choices`.
    """
    from megatrain.simulator.planner.outlook import first_plan as by_bounds

    return _found(by_bounds, args, hardware, source, model)


def _found(
    search: Callable[..., Choice | None],
    args: argparse.Namespace,
    hardware: HardwareSpec,
    source: str,
    model: ModelSpec,
) -> Choice | None:
    """Returns the result of `search` for the options of `args`. Its plan names `source`."""
    import msgspec

    choice = search(
        model,
        hardware,
        options.workload(args, model, quiet=True),
        device_limit=options.device_limit(args.device_memory, hardware),
        host_limit=options.host_limit(args.host_memory, hardware),
        policies=policies(args.policy),
    )
    if choice is None:
        return None
    return msgspec.structs.replace(choice, plan=msgspec.structs.replace(choice.plan, source=source))


def outlook_verdict(args: argparse.Namespace, choice: Choice, hardware: HardwareSpec) -> Verdict:
    """Returns the verdict on the result of `outlook`, which says which of the numbers are valid."""
    from megatrain.simulator.verdict.verdict import summarize

    return _stated(summarize(choice, hardware), args)


def as_json(verdict: Verdict) -> dict[str, object]:
    """Returns the object that `--json` prints: all fields of the verdict, in bytes and seconds."""
    import msgspec

    plain: dict[str, object] = msgspec.to_builtins(verdict)
    return plain


def with_fitting_state(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec, *, share: bool = False
) -> argparse.Namespace:
    """Returns `args` with a state format instead of `--state any`.

    It is the least compressed format in which the model fits, if necessary with a micro-batch of
    one sequence. If the model fits in no format, it is the most compressed one. With `share`, only
    the formats with which several GPUs can share a step are tried, if there are any.
    """
    if args.state != ANY:
        return args
    from megatrain.simulator.policies import find

    executed = any(not find(name).prediction_only for name in policies(args.policy))
    compressible = (
        executed and args.dtype in ("bf16", options.FP8) and args.optimizer in WITH_STATE_FORMATS
    )
    states = tuple(FORMATS) if compressible else (EXACT,)
    candidates = [options.replaced(args, state=state) for state in states]
    if share:
        one_row = [options.replaced(entry, batch=args.batch or 1) for entry in candidates]
        able = [_shares(_least_plan(entry, hardware, model), args) for entry in one_row]
        candidates = list(itertools.compress(candidates, able)) or candidates
    batches = BATCHES[::-1] if args.batch is None else (args.batch,)
    fitting = (
        candidate
        for candidate in candidates
        if _fitting(candidate, hardware, model, batches, least=True)[0]
    )
    return next(fitting, candidates[-1])


def with_loss_chunk(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with the loss chunk that the planner chooses, if `--loss-chunk` is not given.

    With `--tokens-per-step` the loss chunk depends on the batch, so `choices` chooses it later.
    """
    if args.loss_chunk is not None or getattr(args, "tokens_per_step", None) is not None:
        return args
    from megatrain.simulator.planner.loss_chunk import with_loss_chunk as with_chunk

    chosen = with_chunk(
        model,
        hardware,
        options.workload(args, model, quiet=True),
        device_limit=options.device_limit(args.device_memory, hardware),
        host_limit=options.host_limit(args.host_memory, hardware),
        policies=policies(args.policy),
        gpus=_gpus(args),
        hosts=_hosts(args),
    )
    return options.replaced(args, loss_chunk=chosen.loss_chunk)


def with_attention_kernel(
    args: argparse.Namespace,
    hardware: HardwareSpec,
    model: ModelSpec,
    *,
    deterministic: bool = False,
) -> argparse.Namespace:
    """Returns `args` with the attention kernel that the planner chooses, if `--attention` is not
    given. With `deterministic`, only deterministic kernels are chosen.
    """
    from megatrain.simulator.planner.attention_kernel import with_attention_kernel as with_kernel

    one_row = options.replaced(args, batch=args.batch or 1)
    chosen = with_kernel(
        model,
        hardware,
        options.workload(one_row, model, quiet=True),
        policies=policies(args.policy),
        deterministic=deterministic,
    )
    return options.replaced(args, attention=chosen.attention)


def with_fitting_piece(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with the `--token-piece` of the fastest plan, if `--token-piece` is not given,
    and if the model fits only with pieces or is faster with them. If a piece is chosen and
    `--batch` is not given, the micro-batch has one sequence.

    If the model fits without pieces, they are tried for sequences of `LONG_SEQUENCE` tokens or more
    if some layers compute their attention twice. With pieces, layers need less memory, so more of
    them can save their attention, which takes most of the time of a long sequence. The largest
    piece is tried first, and smaller ones as long as they are faster or compute the attention of
    fewer layers twice.
    """
    one_row = options.replaced(args, batch=1)
    sizes = [piece for piece in PIECES if piece < args.seq * (args.batch or 1)]
    obstacle = model.pieces_obstacle(compiled=args.compile)
    able = not (args.dtype == options.FP8 or obstacle)
    if args.token_piece or not (able and sizes):
        return args
    without_pieces = options.replaced(args, batch=args.batch or 1)
    whole: Choice | None = None
    if _fitting(one_row, hardware, model, (1,))[0]:
        if args.seq < LONG_SEQUENCE:
            return args
        whole = _best(without_pieces, hardware, model)
        if whole.feasible and not _recomputed_attention(whole.plan):
            return args
    larger: Choice | None = None
    by_seconds: dict[float, argparse.Namespace] = {}
    for piece in reversed(sizes):
        candidate = options.replaced(args, batch=args.batch or 1, token_piece=piece)
        if _fitting(candidate, hardware, model, (candidate.batch,))[0]:
            best = _best(candidate, hardware, model)
            if best.feasible:
                by_seconds.setdefault(best.step_seconds, candidate)
                if larger and not _gains(best, larger):
                    break
                larger = best
    if not by_seconds:
        return args
    # The search may find a plan that fits without pieces although `_fitting` does not.
    whole = whole or _best(without_pieces, hardware, model)
    least = min(by_seconds)
    if whole.feasible and whole.step_seconds < _WORTH * least:
        return args
    return by_seconds[least]


def _best(args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec) -> Choice:
    """Returns the best plan, which is for several GPUs if they can share the step."""
    from megatrain.simulator.planner.shared_step import shared_step

    if _gpus(args) > 1 and getattr(args, "tokens_per_step", None) is None:
        plan = _sharing(_least_plan(args, hardware, model), args)
        if _shares(plan, args):
            return shared_step(plan, hardware, args.gpus, _hosts(args))
    return choices(args, hardware, model.name, hardware.name, model)[0]


def _gains(smaller: Choice, larger: Choice) -> bool:
    """Returns whether a plan with smaller pieces gains speed or memory over one with larger pieces:
    it is faster, or it computes the attention of fewer layers twice.
    """
    return smaller.step_seconds < larger.step_seconds or (
        _recomputed_attention(smaller.plan) < _recomputed_attention(larger.plan)
    )


def _recomputed_attention(plan: Plan) -> int:
    """Returns how many decoder layers compute their attention again in the backward pass."""
    saved = plan.placed("saved_activations") | plan.placed("saved_attention")
    return sum(layer.name not in saved for layer in plan.model.decoders)


def with_fitting_batch(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> argparse.Namespace:
    """Returns `args` with the largest micro-batch of BATCHES that fits, or 1 if none fits. It fits
    the GPUs of `--gpus` if they can share the step, and otherwise one GPU.

    With `--token-piece` it is the fastest of them, because layers in pieces compute no faster with
    more sequences, which take more memory.

    Sizes for which a calibrated machine has no costs are left out. If it has no costs for any size,
    the largest is used, so the error of the search says what is missing.
    """
    fitting, priced = _fitting(args, hardware, model, BATCHES)
    if args.token_piece and fitting and fitting[0].batch > BATCHES[-1]:
        return _fastest(args, hardware, model, fitting[0].batch)
    return (fitting or priced)[0]


def with_fitting_workload(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> tuple[argparse.Namespace, bool]:
    """Returns `args` with an attention kernel, a token piece, a micro-batch and a loss chunk where
    they are not given, and whether `with_fitting_batch` chose the micro-batch.
    """
    args, chosen = with_fitting_size(args, hardware, model)
    return with_loss_chunk(args, hardware, model), chosen


def with_fitting_size(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> tuple[argparse.Namespace, bool]:
    """Returns `args` with an attention kernel, a token piece and a micro-batch where they are not
    given, and whether `with_fitting_batch` chose the micro-batch.

    If a token piece was chosen, the micro-batch has one sequence.
    """
    args = with_attention_kernel(args, hardware, model)
    args = with_fitting_piece(args, hardware, model)
    chosen = args.batch is None and args.tokens_per_step is None
    if chosen:
        args = with_fitting_batch(args, hardware, model)
    return options.replaced(args, batch=args.batch or 1), chosen


def shared_workload(
    args: argparse.Namespace, one: Choice, hardware: HardwareSpec, model: ModelSpec
) -> Workload:
    """Returns the workload of each of the GPUs of `--gpus`.

    It has the state format, the attention kernel, the token piece, the micro-batch and the loss
    chunk that are chosen for these GPUs where `args`, the options as they were given, do not name
    them. If the GPUs cannot share the step, it is that of `one`, the best plan for one GPU.

    With `--tokens-per-step`, the step of each GPU is split as that of `one` if this plan fits and
    its split fits the GPUs. Otherwise it has the largest micro-batch that fits them.
    """
    work, step_tokens = one.plan.workload, args.tokens_per_step
    args = options.replaced(args, tokens_per_step=None)
    if step_tokens is not None:
        args = options.replaced(args, batch=work.batch, accumulation=work.accumulation)
    args = with_fitting_state(args, hardware, model, share=True)
    one_row = options.replaced(args, batch=args.batch or 1)
    plan = _sharing(_least_plan(one_row, hardware, model), args)
    if not _shares(plan, args):
        return work
    args = options.replaced(args, policy=plan.policy)
    if step_tokens is not None:
        args = _with_fitting_split(args, one, step_tokens, hardware, model)
    args, _ = with_fitting_workload(args, hardware, model)
    return options.workload(args, model, quiet=True)


def _with_fitting_split(
    args: argparse.Namespace,
    one: Choice,
    step_tokens: int,
    hardware: HardwareSpec,
    model: ModelSpec,
) -> argparse.Namespace:
    """Returns `args` with the largest micro-batch of a split of `step_tokens` that fits the GPUs of
    `--gpus`. Returns `args` if they have the split of `one`, which fits one GPU and the GPUs, or if
    no split fits.
    """
    from megatrain.simulator.planner.batch_splits import splits

    def fits(entry: argparse.Namespace) -> bool:
        return bool(_fitting(entry, hardware, model, (entry.batch,), least=True)[0])

    if one.feasible and fits(args):
        return args
    able = (
        options.replaced(args, batch=split.batch, accumulation=split.accumulation)
        for split in splits(one.plan.workload, step_tokens)
    )
    return next(filter(fits, able), args)


def _fastest(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec, largest: int
) -> argparse.Namespace:
    """Returns `args` with the micro-batch that has the highest throughput.

    `largest` is the largest micro-batch of BATCHES that fits. Smaller ones are tried as long as
    they are faster.
    """
    best, least = options.replaced(args, batch=largest), math.inf
    for batch in (size for size in BATCHES if size <= largest):
        candidate = options.replaced(args, batch=batch)
        planned = with_loss_chunk(candidate, hardware, model)
        choice = _best(planned, hardware, model)
        seconds = choice.step_seconds / batch if choice.feasible else math.inf
        if seconds >= least:
            break
        best, least = candidate, seconds
    return best


def _fitting(
    args: argparse.Namespace,
    hardware: HardwareSpec,
    model: ModelSpec,
    batches: tuple[int, ...],
    *,
    least: bool = False,
) -> tuple[list[argparse.Namespace], list[argparse.Namespace]]:
    """Returns two lists of at most one element.

    The first list has `args` with the first of `batches` that fits. It is empty if none fits. The
    second list has `args` with the last batch that was tried and that the machine has costs for, or
    with the first of `batches` if it has no costs for any.

    With `least`, and without `--loss-chunk`, a batch fits if it fits with one of the smallest loss
    chunks that the planner may choose.
    """
    import msgspec

    from megatrain.simulator.planner.loss_chunk import least_chunks
    from megatrain.simulator.policies import find

    names = [name for name in policies(args.policy) if not find(name).prediction_only]
    sized = [options.replaced(args, batch=batch) for batch in batches]
    priced = sized[:1]
    for candidate in sized if names else ():
        plan = _least_plan(candidate, hardware, model)
        chosen = least and args.loss_chunk is None
        works = least_chunks(plan.workload, hardware) if chosen else (plan.workload,)
        try:
            if any(
                _fits(msgspec.structs.replace(plan, workload=work), hardware, names, args)
                for work in works
            ):
                return [candidate], [candidate]
        except UserError:
            continue
        priced = [candidate]
    return [], priced


def _gpus(args: argparse.Namespace) -> int:
    """Returns the number of GPUs of `--gpus`. Some commands do not have this option."""
    gpus: int = getattr(args, "gpus", 1)
    return gpus


def _hosts(args: argparse.Namespace) -> int:
    """Returns the number of hosts of `--hosts`. Some commands do not have this option."""
    hosts: int = getattr(args, "hosts", 1)
    return hosts


def _least_plan(args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec) -> Plan:
    """Returns a plan for one GPU with the workload and the memory limits of `args`, and with the
    default knobs.
    """
    from megatrain.simulator.schedule.plan import Plan

    return Plan(
        policy=policies(args.policy)[0],
        hardware=hardware.name,
        source=model.name,
        model=model,
        workload=options.workload(args, model, quiet=True),
        device_limit_bytes=options.device_limit(args.device_memory, hardware)
        or hardware.device_bytes,
        host_limit_bytes=options.host_limit(args.host_memory, hardware) or hardware.host_bytes,
    )


def state_exceeds_memory(
    args: argparse.Namespace, hardware: HardwareSpec, model: ModelSpec
) -> bool:
    """Returns whether the state of the model alone is larger than the memory, so that no plan of
    the package's policies fits. This takes a hundredth of the time of a search.
    """
    import msgspec

    from megatrain.simulator.planner import capacity

    plan = _least_plan(options.replaced(args, batch=args.batch or 1), hardware, model)
    device, host = hardware.memory_limits(plan.device_limit_bytes, plan.host_limit_bytes)
    limits = {"device_limit_bytes": device, "host_limit_bytes": host}
    return capacity.state_exceeds_memory(msgspec.structs.replace(plan, **limits))


def _shares(plan: Plan, args: argparse.Namespace) -> bool:
    """Returns whether the GPUs of `--gpus` can share the step of `plan`, with the policy of
    `_sharing`.
    """
    from megatrain.simulator.planner.shared_step import shares

    return shares(_sharing(plan, args), _gpus(args), _hosts(args))


def _sharing(plan: Plan, args: argparse.Namespace) -> Plan:
    """Returns `plan` with the first policy of `--policy` whose step several GPUs can share. If none
    can, returns `plan`.
    """
    import msgspec

    from megatrain.simulator.policies import find

    able = [name for name in policies(args.policy) if find(name).shards]
    return msgspec.structs.replace(plan, policy=able[0]) if able else plan


def _fits(plan: Plan, hardware: HardwareSpec, names: list[str], args: argparse.Namespace) -> bool:
    """Returns whether a plan of any policy of `names` fits or, if the several GPUs of `--gpus` can
    share the step, whether a plan for them fits. Model, workload and limits are those of `plan`.

    Raises UserError if `hardware` was measured and has no costs for the model and the workload.
    """
    from megatrain.simulator.planner.shared_step import least_fitting, of_all
    from megatrain.simulator.verdict.alternatives import fits

    gpus = _gpus(args)
    if gpus > 1 and _shares(plan, args):
        shared = of_all(_sharing(plan, args), hardware, gpus, _hosts(args))
        return least_fitting(shared, hardware) is not None
    return fits(plan, hardware, names)


def machine(args: argparse.Namespace) -> HardwareSpec:
    """Returns the machine of `--hardware` or, without this option, this machine. If `--cores` and
    `--network` are given, it has this number of cores and this network.
    """
    from megatrain.simulator.hardware.machine import HardwareSpec

    if args.hardware:
        hardware = HardwareSpec.load(args.hardware)
    else:
        from megatrain.experiments.cli.verdict.this_machine import this_machine

        hardware = this_machine()
    hardware = hardware.with_network(getattr(args, "network", None))
    return hardware.with_cores(args.cores) if args.cores else hardware


def described(
    args: argparse.Namespace,
    choice: Choice,
    hardware: HardwareSpec,
    *,
    batch_chosen: bool,
    chunk_chosen: bool,
    kernel_chosen: bool,
    shared_work: Workload | None = None,
) -> Verdict:
    """Returns the verdict on `choice`, with what the options of `args` ask for, but without the
    results of other plans, which `explored` adds.

    Args:
        args: the options of the command.
        choice: the plan and its prediction.
        hardware: the machine.
        batch_chosen: whether the micro-batch was chosen because `--batch` was not given.
        chunk_chosen: whether the loss chunk was chosen because `--loss-chunk` was not given.
        kernel_chosen: whether the planner chose the attention kernel, if there is one, because
            `--attention` was not given.
        shared_work: the workload of each of several GPUs (`shared_workload`), or None for that of
            `choice`.
    """
    import msgspec

    from megatrain.simulator.verdict import verdict as of_choice

    verdict = of_choice.described(
        choice,
        hardware,
        gpus=args.gpus,
        hosts=_hosts(args),
        tokens=args.tokens,
        chunk_chosen=chunk_chosen,
        kernel_chosen=kernel_chosen,
        shared_work=shared_work,
        names=policies(args.policy),
    )
    return _stated(msgspec.structs.replace(verdict, batch_chosen=batch_chosen), args)


def _stated(verdict: Verdict, args: argparse.Namespace) -> Verdict:
    """Returns `verdict` with its host memory marked as known, if `--host-memory` is given, or if
    the machine is this one.
    """
    import msgspec

    stated = args.hardware is None or args.host_memory is not None
    return msgspec.structs.replace(
        verdict, host_memory_assumed=verdict.host_memory_assumed and not stated
    )
