"""Predicts the speed of several GPUs, from a plan for one GPU.

If a policy can share the step, the prediction is that of the best plan for N GPUs
(`planner/shared_step.py`). Otherwise several GPUs cannot train it. The result then has the reason,
and an estimate for data parallelism, which the text of `megatrain check` leaves out. Each of N GPUs
trains its own batch and loads all streamed weights. Optimizer state and summed gradients are in
host memory once, and each GPU copies and updates 1/N of them. If nothing streams, each GPU holds
and updates everything. The all-reduce of gradients is left out. It would take tens of milliseconds
for a 7B model over NVLink, and far more over PCIe. The memory that it needs on each GPU is counted.
If the plan for one GPU does not leave it free, the estimate is that of the best plan that does.

The links share the host's DRAM (`costs/several_gpus.py`), or have the rates at which several GPUs
were measured. NUMA and additional CPU cores are not modelled.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, costs_of
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.costs.several_gpus import has_own_memory, link_share
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import PROCESS, TUNING, Account
from megatrain.simulator.model.metrics import tokens_per_second
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice
from megatrain.simulator.planner.assessment import step_seconds as expected_seconds
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.planner.shared_step import obstacle, shared_step
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.schedule.arithmetic import ways_of
from megatrain.simulator.schedule.plan import MOST_GPUS, MOST_HOSTS, MOST_NETWORK_GB_PER_S, Plan

_SHARED = (
    "load_state",
    "save_state",
    "update",
    "save_gradients",
    "load_gradients",
    "accumulate_gradients",
    "norm",
    "encode_gradients",
    "cpu_update",
    "load_second_moment",
    "update_ratios",
)
"""Kinds of ops whose work is divided equally among the GPUs."""
_SHARED_NOTE = "from the schedule of `megatrain plan --gpus`: each owns 1/N of the state; "
_NOT_MEASURED = (
    "links share the host's memory bandwidth; measured steps of two and four GPUs took up to 9 %"
    " longer"
)


class NetworkCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the network between hosts costs in one step."""

    gb_per_s: float
    """GB/s that each host receives, as assumed."""
    received_bytes: int
    """Bytes that each host receives from the other hosts."""
    seconds: float
    """Seconds by which the step is longer than that of the same plan with a network of unlimited
    rate."""


class MultiGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction, or a first estimate, of the speed of several GPUs."""

    gpus: int
    """Number of GPUs."""
    hosts: int = 1
    """Number of hosts that have these GPUs."""
    network: NetworkCost | None = None
    """What the network between the hosts costs. None for one host."""
    workload: Workload | None = None
    """The workload of a step of all GPUs if they share it. None for an estimate, in which each GPU
    has the workload of one."""
    step_seconds: float
    """Predicted seconds of one step."""
    tokens_per_second: float
    """Tokens per second of all GPUs together. Each GPU trains a whole workload per step."""
    speedup: float
    """Tokens per second divided by those of one GPU. The ratio exceeds `gpus` if copies of state
    limit the step of one GPU, because each GPU has only a part of the state. It means nothing if
    the model does not fit on one GPU."""
    host_peak_bytes: int
    """Peak of the memory of a host for all its GPUs, in bytes."""
    host_limit_bytes: int
    """Memory of a host that all its GPUs may use, in bytes."""
    feasible: bool
    """Whether host and device memory suffice."""
    device_peak_bytes: int | None = None
    """Peak of the memory of each device, in bytes, if it exceeds the limit. None otherwise."""
    refused: str = ""
    """Why several GPUs cannot train this: the error of `megatrain plan --gpus`. Empty if they share
    the step."""
    gb_per_s: float
    """Copy rate of each GPU in GB/s, with one direction busy."""
    gb_per_s_both: float
    """Copy rate of each GPU and direction in GB/s, with both directions busy."""
    note: str = (
        "first estimate: data parallel, state once in host memory and 1/N of it moved by each;"
        " links share the host's memory bandwidth; summing among GPUs left out"
    )
    """What the prediction assumes, in words."""


def check_gpus(gpus: int, hardware: HardwareSpec, hosts: int = 1) -> None:
    """Raises UserError if `gpus` is more than a host has, or more than one on a machine with
    unified memory. With several `hosts`, also if they cannot have the same number of GPUs each, or
    if the machine has no rate of the network.
    """
    if hardware.unified and gpus != 1:
        raise UserError(
            "--gpus",
            found=gpus,
            allowed=f"1: {hardware.name} has one memory for CPU and GPU",
            fix="leave it out",
        )
    if not 1 <= hosts <= MOST_HOSTS or gpus % hosts:
        raise UserError(
            "--hosts",
            found=f"{hosts} with --gpus {gpus}",
            allowed=f"1 to {MOST_HOSTS}, and a divisor of --gpus, the GPUs of all hosts",
            fix="write it like --gpus 8 --hosts 2",
        )
    if not 1 <= gpus <= MOST_GPUS * hosts:
        raise UserError(
            "--gpus",
            found=gpus,
            allowed=f"1 to {MOST_GPUS}, on one host"
            if hosts == 1
            else f"{hosts} to {MOST_GPUS * hosts}, on {hosts} hosts",
            fix="write it like --gpus 8",
        )
    if hosts > 1 and hardware.network_gb_per_s is None:
        raise UserError(
            "--network",
            found=f"none, with --hosts {hosts}",
            allowed=f"the GB/s that a host receives from the others, which {hardware.name} does not"
            " have",
            fix="write it like --network 50, for 400 Gbit/s",
        )


def network_cost(choice: Choice, hardware: HardwareSpec) -> NetworkCost | None:
    """Returns what the network costs in a step of `choice`, or None for a plan for one host."""
    plan = choice.plan
    rate = plan.network_gb_per_s or hardware.network_gb_per_s
    if plan.hosts == 1 or rate is None:
        return None
    unlimited = msgspec.structs.replace(plan, network_gb_per_s=MOST_NETWORK_GB_PER_S)
    schedule = policies.lower(plan)
    received = sum(
        ways_of(op.kind, op.bytes, plan.gpus, plan.hosts)[1]
        for op in schedule.ops
        if op.lane == "exchange"
    )
    return NetworkCost(
        gb_per_s=rate,
        received_bytes=received,
        seconds=choice.step_seconds - expected_seconds(schedule, costs_of(unlimited, hardware)),
    )


def predicted(
    choice: Choice,
    schedule: Schedule,
    hardware: HardwareSpec,
    costs: CostModel,
    gpus: int,
    work: Workload | None = None,
    hosts: int = 1,
    names: list[str] | None = None,
) -> MultiGpu:
    """Returns the prediction for `gpus` GPUs that share the step of `choice`, a plan for one GPU.

    The policy of the plan shares it if it can, and otherwise the first of `names` that can. If none
    can, the result is that of `estimate`, which is for one host.

    Args:
        choice: The plan for one GPU and its prediction.
        schedule: The schedule of the plan.
        hardware: The machine.
        costs: The cost model of one GPU.
        gpus: The number of GPUs.
        work: The workload of each GPU if they share the step. None means that of the plan.
        hosts: The number of hosts that have the GPUs.
        names: Policies that may share the step. The default is every policy that may be the
            fastest.

    Raises UserError as `check_gpus` does, and if several hosts cannot share the step.
    """
    check_gpus(gpus, hardware, hosts)
    plan, alone = choice.plan, choice.step_seconds
    common = msgspec.structs.replace(plan, workload=work or plan.workload, digest="")
    able = [
        name
        for name in (policies.contenders() if names is None else names)
        if policies.find(name).shards
    ]
    if able and not policies.find(plan.policy).shards:
        common = msgspec.structs.replace(common, policy=able[0], prediction=None)
    if refusal := obstacle(common, gpus, hosts):
        if hosts > 1:
            raise UserError(
                "--hosts",
                found=f"{hosts}, and a step that GPUs cannot share",
                allowed="1, or a step that `megatrain plan --gpus` can plan",
                fix="leave --hosts out",
            )
        leaving = _leaving(choice, hardware, costs.collective_bytes(gpus))
        if leaving.plan != plan:
            schedule = policies.lower(leaving.plan)
        first = estimate(leaving.plan, schedule, leaving.account, hardware, costs, alone, gpus)
        return msgspec.structs.replace(first, refused=str(refusal))
    shared = shared_step(common, hardware, gpus, hosts)
    links = link_share(hardware, gpus // hosts)
    speed = tokens_per_second(shared.plan.workload, shared.step_seconds)
    return MultiGpu(
        gpus=gpus,
        hosts=hosts,
        network=network_cost(shared, hardware),
        workload=shared.plan.workload,
        step_seconds=shared.step_seconds,
        tokens_per_second=speed,
        speedup=speed / tokens_per_second(plan.workload, alone),
        host_peak_bytes=gpus // hosts * shared.account.host_peak_bytes,
        host_limit_bytes=gpus // hosts * shared.account.host_limit_bytes,
        feasible=shared.feasible,
        device_peak_bytes=(
            shared.account.device_peak_bytes
            if shared.account.device_peak_bytes > shared.account.device_limit_bytes
            else None
        ),
        gb_per_s=links.alone,
        gb_per_s_both=links.together,
        note=_shared_note(hardware, gpus, hosts),
    )


def _shared_note(hardware: HardwareSpec, gpus: int, hosts: int) -> str:
    """Returns `MultiGpu.note` of GPUs that share a step."""
    measured = hardware.measured_together(gpus // hosts)
    together = (
        f"{measured.gpus} GPUs were measured together on {measured.date}"
        if measured
        else _NOT_MEASURED
    )
    return _SHARED_NOTE + together + ("; several hosts were not measured" if hosts > 1 else "")


def _leaving(choice: Choice, hardware: HardwareSpec, size: int) -> Choice:
    """Returns the best plan of the policy of `choice` that leaves `size` bytes of device memory
    free. Returns `choice` if it leaves them, if it does not fit, or if no plan leaves them.
    """
    plan, limit = choice.plan, choice.account.device_limit_bytes - size
    peer = policies.find(plan.policy).prediction_only
    if choice.account.device_peak_bytes <= limit or not choice.feasible or peer or limit <= 0:
        return choice
    best = candidates(
        plan.model,
        hardware,
        plan.workload,
        source=plan.source,
        hardware_name=plan.hardware,
        device_limit=limit,
        host_limit=plan.host_limit_bytes,
        policies=[plan.policy],
    )[0]
    if not best.feasible:
        return choice
    account = msgspec.structs.replace(best.account, device_limit_bytes=limit + size)
    return msgspec.structs.replace(best, account=account)


def estimate(
    plan: Plan,
    schedule: Schedule,
    account: Account,
    hardware: HardwareSpec,
    costs: CostModel,
    step_seconds: float,
    gpus: int,
) -> MultiGpu:
    """Returns the estimate for `gpus` GPUs that execute `plan` with data parallelism. Each GPU also
    needs memory for collectives (`CostModel.collective_bytes`).

    `schedule`, `account` and `step_seconds` are the schedule, the memory and the step time of the
    plan on one GPU, and `costs` is the cost model of one GPU. Raises UserError as `check_gpus`
    does.
    """
    check_gpus(gpus, hardware)
    own_memory, links = has_own_memory(hardware), link_share(hardware, gpus)
    streams = "h2d" in schedule.lanes and any(
        op.kind in _SHARED for op in (*schedule.lanes["h2d"], *schedule.lanes.get("d2h", ()))
    )

    def change(op: Op) -> Op:
        # The host's cores do the work of all GPUs, so their ops take as long as with one GPU.
        if not streams or op.kind not in _SHARED or (not own_memory and op.lane == "cpu"):
            return op
        return msgspec.structs.replace(
            op, bytes=-(-op.bytes // gpus), parameters=-(-op.parameters // gpus)
        )

    changed = ScaledCosts(costs, change, links.slower, links.both_slower)
    seconds = expected_seconds(schedule, changed)
    speed = gpus * tokens_per_second(plan.workload, seconds)
    # Each GPU has its own process, which also tunes the kernels that it runs.
    per_gpu = account.pools.get(PROCESS, 0) + account.pools.get(TUNING, 0)
    per_gpu += sum(
        size
        for pool, size in account.pools.items()
        if (kind := account.kinds.get(pool)) and kind.place == "host" and kind.per_gpu
    )
    host = account.host_peak_bytes + (gpus - 1) * per_gpu
    limit = account.host_limit_bytes * (gpus if own_memory else 1)
    device = account.device_peak_bytes + costs.collective_bytes(gpus)
    too_large = device > account.device_limit_bytes
    return MultiGpu(
        gpus=gpus,
        step_seconds=seconds,
        tokens_per_second=speed,
        speedup=speed / tokens_per_second(plan.workload, step_seconds),
        host_peak_bytes=host,
        host_limit_bytes=limit,
        feasible=host <= limit and not too_large,
        device_peak_bytes=device if too_large else None,
        gb_per_s=links.alone,
        gb_per_s_both=links.together,
    )
