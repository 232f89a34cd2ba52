"""preflight: checks once, before anything is allocated, whether the runtime can execute a plan.

Each entrance calls it once, before memory is allocated or a weight is read, and passes the schedule
that it returns to the Executor. An Executor without a schedule calls it itself. `megatrain plan`
calls it for a model folder, without a device, because it may run on another machine.
"""

from __future__ import annotations

import torch

from megatrain.runtime.layers.attention import refuse_attention
from megatrain.runtime.layers.fp8_linear import refuse_fp8
from megatrain.runtime.layers.supported import refuse_unsupported
from megatrain.runtime.layers.transformers_model import refuse_unlike_transformers
from megatrain.runtime.optimizer.outside import refuse_optimizer
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.ranks import Ranks, refuse_without_ranks
from megatrain.simulator.policies import executable
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan


def preflight(
    plan: Plan,
    settings: AdamW,
    device: torch.device | None,
    *,
    deterministic: bool = False,
    schedule: Schedule | None = None,
    ranks: Ranks | None = None,
) -> Schedule:
    """Returns the schedule to execute for `plan`: its own, or `schedule`, which is not verified.

    Without a device, only what no device can execute is refused. `deterministic` asks for PyTorch's
    deterministic mode, in which the process may not be yet. The amount of memory is checked
    elsewhere (`memory/fitting.py`, `Arenas`).

    `ranks` are needed to execute a plan for several GPUs.

    Raises UserError for a model, a workload, a device, a policy or an optimizer that the runtime
    cannot execute as they are.
    """
    if device is not None:
        refuse_without_ranks(plan, ranks)
    refuse_unsupported(plan.model, plan.workload)
    refuse_attention(plan, device, deterministic=deterministic)
    refuse_fp8(plan.workload, device)
    schedule = schedule or executable(plan)
    refuse_optimizer(plan, settings)
    refuse_unlike_transformers(plan.model)
    return schedule
