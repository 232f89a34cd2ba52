"""Figure 4: host memory by model size, for a step of one sequence of 1,024 tokens with all state on
the host. The simulation takes about 1 s.

There is no memory limit. `paper` is the paper's 12 bytes per parameter. All other numbers are the
memory account of a schedule with every pool, including staging buffers.
"""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.answers import PAPER_KNOBS, stated_format
from megatrain.experiments.paper_data.published_vs_ours import published
from megatrain.simulator.memory.account import account
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import EXACT
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower, outline
from megatrain.simulator.policies.megatrain_code import Ablation, lower_ablated
from megatrain.simulator.schedule import DataClass
from megatrain.simulator.schedule.plan import Knobs, Plan

MODELS = (
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "qwen2.5-3b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "gpt-oss-120b",
)
_DEFAULT_KNOBS = Knobs()
STATE: tuple[DataClass, ...] = ("weights", "master_low", "gradients", "moments")


def simulate() -> Any:
    """Returns the data of `Size` in paper_figures for each of MODELS."""
    reported = {row.model: row for row in published("paper Figure 4")}
    return [
        {
            **_host_gb(ModelSpec.load(name)),
            "paper": reported[name].value if name in reported else None,
            "sure": reported[name].sure if name in reported else "",
        }
        for name in MODELS
    ]


def _host_gb(model: ModelSpec) -> dict[str, Any]:
    """Returns the fields of `Size` that do not come from the paper."""

    def plan(policy: str, knobs: Knobs = _DEFAULT_KNOBS, state: str = EXACT) -> Plan:
        work = Workload(batch=1, sequence=1024, state=state)
        return Plan(
            policy=policy,
            hardware="any",
            source=model.name,
            model=model,
            workload=work,
            device_limit_bytes=2**59,
            host_limit_bytes=2**59,
            knobs=knobs,
        )

    ours = plan("overlapped", Knobs(chunk_bytes=2**28))
    with stated_format() as state:
        stated = outline(plan("double_buffer", PAPER_KNOBS, state))
    schedules = {
        "paper_stated": stated,
        "paper_schedule": outline(plan("double_buffer", PAPER_KNOBS)),
        "code": lower_ablated(plan("megatrain_code"), Ablation()),
        "code_earlier": lower_ablated(plan("megatrain_code"), Ablation(copies=False)),
        "ours": outline(ours),
        **{peer: lower(plan(peer)) for peer in ("zero3_offload", "zero_offload", "fsdp2_offload")},
    }
    accounts = {
        name: account(schedule, 2**59, 2**59, None, 0) for name, schedule in schedules.items()
    }
    return {
        "model": model.name,
        "parameters": model.parameters,
        "host_gb": {name: found.host_peak_bytes / 1e9 for name, found in accounts.items()},
        "ours_state_gb": accounts["ours"].held("host", *STATE) / 1e9,
        "code_state_gb": accounts["code"].held("host", *STATE) / 1e9,
    }
