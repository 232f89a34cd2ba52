"""Several GPUs of one host: a first estimate, not a plan that runs.

Data parallel. Every GPU trains a batch of its own and loads all weights that stream; optimizer state and summed gradients lie in host memory
once, and each GPU moves and updates its N-th of them. All links together copy no more than the host's DRAM sustains, T GB/s:

    rate of one GPU = min(its link, T / N) with one direction busy on all, min(its link, T / 2N) each with both

T is the machine's own, what its cores reach over what a copied byte takes of that; a host for several GPUs is taken to sustain the 175 GB/s
that four H200 on one host reached (2026-11-21), if no more than N such machines would. Over NVLink-C2C each GPU brings its own host memory.

Left out: summing gradients among the GPUs (over NVLink tens of milliseconds for 7B, over PCIe far more), NUMA, more cores. Where nothing
streams every GPU keeps and updates everything.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator.costs import CostModel
from megatrain.simulator.costs.changed import Changed
from megatrain.simulator.engine import makespan_ns
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.memory import PROCESS, Account
from megatrain.simulator.metrics import tokens_per_second
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.sharing import link_gb_per_s

DMA_GB_PER_S = 175.0
"""all GPUs' copies together, both directions, four H200 on one host of 64 cores, 2026-11-21"""
MOST_GPUS = 16
_SHARED = ("load_state", "save_state", "update", "save_gradients", "load_gradients", "accumulate_gradients", "norm", "cpu_update", "load_second", "ratios")


class Several(msgspec.Struct, frozen=True, kw_only=True):
    """What `gpus` GPUs of one host would reach together: a first estimate."""

    gpus: int
    step_seconds: float
    tokens_per_second: float
    """of all GPUs, each with the whole workload's tokens a step"""
    speedup: float
    """over one GPU; more than `gpus` where moving the state binds, because each moves a part of it"""
    host_peak_bytes: int
    feasible: bool
    gb_per_s: float
    """of each GPU's copies in one direction"""
    gb_per_s_both: float
    """in each direction, both busy"""
    note: str = "first estimate: data parallel, state once in host memory and 1/N of it moved by each; links limited by DRAM; summing among GPUs left out"


def check_gpus(gpus: int, hardware: HardwareSpec) -> None:
    """Raises UserError for more GPUs than a host has, or for more than one on a unified machine."""
    if hardware.unified and gpus != 1:
        raise UserError("--gpus", found=gpus, allowed=f"1: {hardware.name} has one memory for CPU and GPU", fix="leave it out")
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError("--gpus", found=gpus, allowed=f"1 to {MOST_GPUS}, on one host", fix="write it like --gpus 8")


def estimate(plan: Plan, schedule: Schedule, account: Account, hardware: HardwareSpec, costs: CostModel, step_seconds: float, gpus: int) -> Several:
    """For `plan`, which takes `step_seconds` on one GPU. Raises UserError like `check_gpus`."""
    check_gpus(gpus, hardware)
    own_memory = "C2C" in hardware.link
    one, both = (min(hardware.h2d_gb_per_s, hardware.d2h_gb_per_s) * share for share in (1.0, hardware.duplex_fraction))
    memory = hardware.host_memory
    machine = memory.gb_per_s / max(memory.h2d_cost, memory.d2h_cost) if memory else DMA_GB_PER_S
    total = 2 * gpus * one if own_memory else max(machine, min(gpus * machine, DMA_GB_PER_S))
    alone, together = link_gb_per_s(gpus, one, both, total)
    streams = "h2d" in schedule.lanes and any(op.kind in _SHARED for op in (*schedule.lanes["h2d"], *schedule.lanes.get("d2h", ())))

    def change(op: Op) -> Op:
        if not streams or op.kind not in _SHARED or (not own_memory and op.lane == "cpu"):
            return op  # the host's cores do all GPUs' work, one after the other or together
        return msgspec.structs.replace(op, bytes=-(-op.bytes // gpus), parameters=-(-op.parameters // gpus))

    slower = one / alone
    changed = Changed(costs, change, {"h2d": slower, "d2h": slower}, (both / one) / (together / alone))
    seconds = (makespan_ns(schedule, changed) + costs.step_overhead_ns) / 1e9
    speed = gpus * tokens_per_second(plan.workload, seconds)
    extra = account.pools.get(PROCESS, 0)  # every GPU has a process
    extra += sum(size for pool, size in account.pools.items() if (kind := account.kinds.get(pool)) and kind.place == "host" and kind.per_gpu)
    host = account.host_peak_bytes + (gpus - 1) * extra
    limit = account.host_limit_bytes * (gpus if own_memory else 1)
    return Several(
        gpus=gpus, step_seconds=seconds, tokens_per_second=speed, speedup=speed / tokens_per_second(plan.workload, step_seconds), host_peak_bytes=host,
        feasible=host <= limit and account.device_peak_bytes <= account.device_limit_bytes, gb_per_s=alone, gb_per_s_both=together,
    )  # fmt: skip
