"""preflight: checks whether the runtime can execute a plan.

Each command calls it once, before it allocates memory or reads a weight, and passes the returned
schedule to the Executor. An Executor without a schedule calls it itself. `megatrain plan` calls it
for a model folder without a device, because the plan may be for another machine.
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
    """Checks that the runtime can execute `plan`, and returns the schedule to execute. The amount
    of memory is checked elsewhere (`memory/fitting.py`, `Arenas`).

    Args:
        plan: The plan to check.
        settings: The optimizer's hyperparameters.
        device: The device that would execute the plan. None means that only plans that no
            device can execute are refused.
        deterministic: Check for PyTorch's deterministic mode, even if this process has not enabled
            it yet.
        schedule: The schedule to return, which is not verified. By default the schedule of `plan`.
        ranks: The ranks of a plan for several GPUs. None for one GPU.

    Raises:
        UserError: The runtime cannot execute the model, workload, policy or optimizer of the plan,
            or cannot execute them on `device`.
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
