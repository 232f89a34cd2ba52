"""Scheduling policies: they turn a plan into the schedule of one optimizer step.

A policy writes a step as a sequential program over buffers. The builder derives the dependencies,
and lanes and slots give the overlap. `Policy` is the interface, and `registry.py` finds policies by
name. Most functions below take a plan and call the policy that it names.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model import optimizer
from megatrain.simulator.model.families import ONE_KERNEL
from megatrain.simulator.model.state_format import EXACT
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies.building.evaluation import forward_only
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.policies.registry import find, registered
from megatrain.simulator.schedule import Schedule, ScheduleError
from megatrain.simulator.schedule.arithmetic import kept_moments, refuse_on_host
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.schedule import late_dependency
from megatrain.simulator.schedule.step_check import check_copies, check_layers, check_step

__all__ = [
    "Policy",
    "contenders",
    "evaluation",
    "executable",
    "find",
    "flush_update",
    "lower",
    "lower_uncached",
    "names",
    "outline",
    "peers",
    "sensible",
    "lower_for_timing",
    "updating",
    "verified",
]


def names() -> list[str]:
    """Returns the registered policies that the runtime can execute."""
    return [name for name in registered() if not find(name).prediction_only]


def contenders() -> list[str]:
    """Returns the policies of `names` that no other policy dominates.

    The fastest plan uses one of these.
    """
    return [name for name in names() if not find(name).dominated_by]


def updating(names: Iterable[str], workload: Workload) -> list[str]:
    """Returns the policies of `names` that support the optimizer and the gradient format of
    `workload`.

    If none does, returns all of `names`. `lower` then raises an error that says why.
    """
    chosen = list(names)
    able = [
        name
        for name in chosen
        if not (optimizer.find(workload.optimizer).by_tensor and find(name).updates_on_host)
        and (workload.gradients == "exact" or find(name).places_state)
    ]
    return able or chosen


def sensible(names: Iterable[str], *, unified: bool) -> list[str]:
    """Returns the policies of `names` that are useful on a machine. On a machine with `unified`
    memory, these are the policies that copy nothing between host and device.
    """
    return [name for name in names if not (unified and find(name).streams)]


def peers() -> list[str]:
    """Returns the registered policies of other systems, which are only for prediction."""
    return [name for name in registered() if find(name).prediction_only]


@plugins.unchanging()
def lower(plan: Plan) -> Schedule:
    """Returns the schedule of `plan` under its policy.

    Raises UserError if the policy is unknown, refuses the plan, or fails.
    """
    find(plan.policy)
    blank = msgspec.structs.replace(
        plan, digest="", prediction=None, device_limit_bytes=1, host_limit_bytes=1
    )
    return _lowered(blank)


@plugins.cached(maxsize=2)
def _lowered(plan: Plan) -> Schedule:
    """Returns what `lower_uncached` returns. Cached because a plan is lowered three times: to time,
    assess and explain it. Lowering a dense 120B model takes 0.4 s.
    """
    return lower_uncached(plan)


@plugins.unchanging()
def lower_uncached(plan: Plan) -> Schedule:
    """Returns what `lower` returns, without its cache."""
    policy = _policy(plan)
    with _failures_named(plan.policy, "lower"):
        schedule = _schedule(policy.lower(plan))
        _refuse_empty(bool(schedule.ops))
        if _is_outside(policy):
            check_copies(schedule)
        return schedule


@plugins.unchanging()
def lower_for_timing(plan: Plan) -> Schedule:
    """Returns a schedule with the `compiled` and `sizes` of the one that `lower` returns. Its ops
    and buffers may be missing.

    This is enough to time a step, and takes half the time of `lower`.
    """
    policy = _policy(plan)
    with _failures_named(plan.policy, "lower"):
        schedule = _schedule(policy.lower_for_timing(plan))
        _refuse_empty(bool(schedule.compiled.lanes))
        if schedule.compiled.fault:
            raise late_dependency(schedule.compiled.fault)
        if _is_outside(policy):
            check_copies(schedule)
        return schedule


@plugins.unchanging()
def outline(plan: Plan, *, merged: bool = False) -> Schedule:
    """Returns a schedule with the buffers of the one that `lower` returns. Its ops may be missing.

    This takes a tenth of the time of `lower`. With `merged`, the buffers of a pool may be merged
    into one, for callers that only need the bytes of each pool.
    """
    policy = _policy(plan)
    if type(policy).buffers is Policy.buffers:
        return lower(plan)
    with _failures_named(plan.policy, "buffers"):
        return _schedule(policy.buffers(plan, merged=merged))


def _policy(plan: Plan) -> Policy:
    """Returns the policy of `plan`.

    Raises UserError if the policy cannot execute the plan's workload:

    * the plan is for several GPUs, or sums groups of micro-batches, and the policy does neither
    * gradients are stored in 8 bits, and the policy cannot do that, or embeddings are tied
    * layers are computed in pieces of tokens, and the model or the policy cannot do that
    * the policy updates on the host, and the optimizer needs whole matrices
    * the policy belongs to another system, and the state format is not `exact`, products are in
      fp8, or the optimizer is not AdamW
    """
    policy = find(plan.policy)
    _refuse_groups(plan, policy)
    if plan.workload.gradients != "exact":
        _refuse_coded_gradients(plan, policy)
    if policy.prediction_only and plan.workload.state != EXACT:
        raise UserError(
            f"policy {plan.policy}: state",
            found=plan.workload.state,
            allowed=f"{EXACT}, since that system has other formats",
            fix="use another policy, or leave out --state",
        )
    if policy.prediction_only and plan.workload.fp8:
        raise UserError(
            f"policy {plan.policy}: fp8",
            found=plan.workload.fp8,
            allowed="products in bf16, as that system was described",
            fix="use another policy, or --dtype bf16",
        )
    if plan.workload.token_piece:
        _refuse_pieces(plan, policy)
    if plan.workload.groups > 1:
        _refuse_head_groups(plan, policy)
    if policy.prediction_only and plan.workload.optimizer != optimizer.ADAMW:
        raise UserError(
            f"policy {plan.policy}: optimizer",
            found=plan.workload.optimizer,
            allowed=f"{optimizer.ADAMW}, as that system was described",
            fix="use another policy, or leave out --optimizer",
        )
    if policy.updates_on_host:
        where = f"policy {plan.policy}: optimizer"
        refuse_on_host(plan, plan.model.stack.keys(), where, "use policy overlapped")
    return policy


def _refuse_groups(plan: Plan, policy: Policy) -> None:
    """Raises UserError if the policy cannot share a step among GPUs, or cannot sum the gradients of
    groups of micro-batches first.
    """
    work = plan.workload
    if policy.shards:
        return
    sharing = " or ".join(name for name in names() if find(name).shards)
    if plan.gpus > 1:
        raise UserError(
            f"policy {plan.policy}: gpus",
            found=plan.gpus,
            allowed=f"1: only {sharing} shares a step among several GPUs",
            fix=f"use policy {sharing}, or plan for one GPU",
        )
    if work.sum_group not in (1, work.accumulation):
        raise UserError(
            f"policy {plan.policy}: sum_group",
            found=work.sum_group,
            allowed=f"1 or {work.accumulation}: only {sharing} sums groups of micro-batches first",
            fix=f"use policy {sharing}, or set sum_group = 1",
        )


def _refuse_pieces(plan: Plan, policy: Policy) -> None:
    """Raises UserError if the layers of the model cannot be computed in pieces of tokens."""
    obstacle = plan.model.pieces_obstacle(compiled=plan.workload.compiled)
    eager = obstacle and not plan.model.pieces_obstacle(compiled=False)
    if policy.prediction_only:
        obstacle = f"{plan.policy}, a system that was described without pieces"
    if obstacle:
        raise UserError(
            "workload: token_piece",
            found=f"{plan.workload.token_piece} with {obstacle}",
            allowed="a model whose layers each have one MLP or one mixture of experts, with this"
            " project's policies",
            fix=f"leave out {'--compile or ' if eager else ''}--token-piece",
        )


def _refuse_head_groups(plan: Plan, policy: Policy) -> None:
    """Raises UserError if the attention of the model cannot be computed in groups of heads."""
    model, groups = plan.model, plan.workload.groups
    allowed = f"a divisor of its {model.heads.pairs} key-value heads"
    obstacle = f"{groups} for {model.name}" if model.heads.pairs % groups else ""
    fused = model.fuses_scores(plan.workload)
    if not all(model.can_save_attention(layer.name, fused=fused) for layer in model.decoders):
        obstacle = f"{groups} for a {model.family} model"
        allowed = ONE_KERNEL
    if policy.prediction_only:
        obstacle = f"{groups} with {plan.policy}, a system that was described without groups"
        allowed = "this project's policies"
    if obstacle:
        raise UserError(
            "workload: head_groups",
            found=obstacle,
            allowed=allowed,
            fix="use another number, or leave out --head-groups",
        )


def _refuse_coded_gradients(plan: Plan, policy: Policy) -> None:
    """Raises UserError if the policy cannot store the model's gradients in 8 bits."""
    if not policy.places_state:
        placing = " or ".join(name for name in names() if find(name).places_state)
        raise UserError(
            f"policy {plan.policy}: gradients",
            found=plan.workload.gradients,
            allowed=f"exact, since only {placing} stores gradients in 8 bits",
            fix=f"use policy {placing}, or leave out --gradients",
        )
    if plan.model.tied:
        raise UserError(
            f"policy {plan.policy}: gradients",
            found=f"{plan.workload.gradients} with tied embeddings",
            allowed="exact, since gradients of tied embeddings are stored before they are added",
            fix="leave out --gradients",
        )


def _is_outside(policy: Policy) -> bool:
    """Returns whether the policy is not one of this package. The package's own are checked by its
    tests.
    """
    return not type(policy).__module__.startswith(__name__)


def _schedule(result: object) -> Schedule:
    """Returns `result`. Raises TypeError if a policy returned something else than a schedule."""
    if not isinstance(result, Schedule):
        raise TypeError(f"it returned {type(result).__name__}, not the Schedule of Builder.build")
    return result


def _refuse_empty(has_ops: bool) -> None:
    """Raises ScheduleError for a schedule without ops, because its step would take no time."""
    if not has_ops:
        raise ScheduleError(
            "a schedule without ops",
            "the ops of one optimizer step",
            "emit the ops with Builder.op before Builder.build",
        )


@contextlib.contextmanager
def _failures_named(name: str, method: str) -> Iterator[None]:
    """Raises UserError with the policy's name if its `method` fails in the block. The error names
    the line of the policy's file.
    """
    try:
        yield
    except UserError:
        raise
    except ScheduleError as error:
        raise UserError(
            f"policy {name}",
            found=f"{error}{_line(name, error)}",
            allowed=error.allowed,
            fix=error.fix,
        ) from error
    except (Exception, SystemExit) as error:  # a policy that exits must not end the command
        text = str(error).splitlines()[0] if str(error) else ""
        raise UserError(
            f"policy {name}",
            found=f"{type(error).__name__} in {method}: {text}{_line(name, error)}",
            allowed="a schedule, or a UserError for a plan that the policy refuses",
            fix="correct the policy, or use another one",
        ) from error


def _line(name: str, error: BaseException) -> str:
    """Returns the line of the policy's file, or of a module that it imports from its folder, that
    `error` passed through last. Returns an empty text if it passed through none.
    """
    return plugins.line_in(type(find(name)).__module__, error)


def flush_update(plan: Plan) -> Schedule | None:
    """Returns the deferred update of a step of `plan` as a schedule on the step's buffers.

    Returns None if the policy defers no update. Raises UserError if the policy fails.
    """
    with _failures_named(plan.policy, "flush_update"):
        return find(plan.policy).flush_update(plan)


@plugins.unchanging()
def evaluation(plan: Plan) -> Schedule:
    """Returns the schedule of a forward pass with loss over the micro-batches of one step, on the
    step's buffers. With several GPUs, it is the schedule of one rank.

    Raises UserError if the policy lacks a buffer that evaluation needs.
    """
    return forward_only(plan, lower(plan))


@plugins.unchanging()
def verified(plan: Plan) -> Schedule:
    """Returns the plan's schedule after checking it.

    Raises UserError if its digest differs from the plan's, or if the schedule is not correct
    (`Schedule.check`, `check_step`).
    """
    schedule = lower(plan)
    if (again := plan.digest != schedule.digest and lower_uncached(plan).digest) and (
        again != schedule.digest
    ):
        raise UserError(
            f"policy {plan.policy}",
            found=f"schedules {schedule.digest} and {again} of the same plan",
            allowed="a `lower` that always returns the same schedule of a plan",
            fix="take out what changes from call to call, such as random numbers or sets",
        )
    if plan.digest != schedule.digest:
        raise UserError(
            "plan: digest",
            found=repr(plan.digest),
            allowed=f"{schedule.digest}, the digest of its schedule under policy {plan.policy}",
            fix="if the plan or its policy was edited, write it again with `megatrain plan --from"
            " PLAN --out NEW`; otherwise make a new plan",
        )
    with _failures_named(plan.policy, "lower"), _ops_described(schedule):
        check_layers(plan, schedule)
        schedule.check(kept_moments(plan))
        flush = flush_update(plan)
        if find(plan.policy).defers_update(plan) != (flush is not None):
            raise ScheduleError(
                f"defers_update is {flush is None} and flush_update returns"
                f" {'no' if flush is None else 'a'} schedule",
                allowed="True and a schedule, or False and None",
                fix="define both methods, or neither",
            )
        check_step(plan, schedule, flush)
    return schedule


def check_outside(plan: Plan) -> None:
    """Checks the schedule and the outline of a plan if its policy is not one of this package.

    The package's own policies are checked by its tests for every family and placement, and before a
    plan is saved or executed (`verified`). A search has no time to check each of their plans.

    Raises UserError if the schedule is not correct, or if the memory of the outline is not that of
    the schedule.
    """
    if not _is_outside(find(plan.policy)):
        return
    schedule = lower(plan)
    verified(msgspec.structs.replace(plan, digest=schedule.digest))
    expected = _pools(schedule)
    for merged in (False, True):
        found = _pools(outline(plan, merged=merged))
        for pool in (pool for pool in {**expected, **found} if expected[pool] != found[pool]):
            raise UserError(
                f"policy {plan.policy}: buffers",
                found=f"{found[pool]} bytes of {pool}" + (" with merged=True" if merged else ""),
                allowed=f"{expected[pool]}, as in the schedule of `lower`",
                fix="return the same buffers as `lower`, or leave out `buffers`",
            )


def _pools(schedule: Schedule) -> Counter[str]:
    """Returns pool -> the bytes that its buffers take, as merged buffers have them."""
    sizes = Counter[str]()
    for buffer in schedule.buffers:
        sizes[buffer.pool] += buffer.allocated
    return sizes


@contextlib.contextmanager
def _ops_described(schedule: Schedule) -> Iterator[None]:
    """Puts the kind of op in front of each op id in the text of a ScheduleError."""
    try:
        yield
    except ScheduleError as error:
        words = str(error).split(" ")
        ids = [word.rstrip(":,") for word in words]
        known = [schedule.by_id.get(id) for id in ids]
        text = [f"{op.kind} {word}" if op else word for op, word in zip(known, words, strict=True)]
        raise ScheduleError(" ".join(text), error.allowed, error.fix) from error


def executable(plan: Plan) -> Schedule:
    """Returns the plan's schedule, checked, for the runtime.

    Raises UserError if the digest differs, or if the policy is only for prediction.
    """
    schedule = verified(plan)
    if find(plan.policy).prediction_only:
        raise UserError(
            "plan: policy",
            found=f"{plan.policy}, the policy of another system, which is only for prediction",
            allowed=", ".join(names()),
            fix="plan with one of these, or use that system itself",
        )
    return schedule
