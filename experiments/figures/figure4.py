"""Figure 4: host memory against size, of a step on one sequence of 1,024 tokens whose state is all on the host. Some 1 s.

No machine's limit plays a part. `told` is the paper's 12 bytes a parameter; everything else is the account of a schedule: every pool, staging included.
"""

from __future__ import annotations

from typing import Any

from megatrain.experiments.figures.answers import PAPER_KNOBS
from megatrain.experiments.figures.beside import published
from megatrain.simulator.memory import account
from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.policies import lower, outline
from megatrain.simulator.policies.megatrain_code import Ablation, lower_ablated
from megatrain.simulator.schedule import DataClass
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b", "gpt-oss-120b")
STATE: tuple[DataClass, ...] = ("weights", "low", "gradients", "moments")


def simulate() -> Any:
    told = {row.model: row for row in published("paper Figure 4")}
    return [
        {**_host_gb(ModelSpec.load(name)), "paper": told[name].value if name in told else None, "sure": told[name].sure if name in told else ""}
        for name in MODELS
    ]


def _host_gb(model: ModelSpec) -> dict[str, Any]:
    def plan(policy: str, knobs: Knobs = Knobs()) -> Plan:  # noqa: B008 (frozen)
        work = Workload(batch=1, sequence=1024)
        return Plan(
            policy=policy, hardware="any", source=model.name, model=model, workload=work, device_limit_bytes=2**59, host_limit_bytes=2**59, knobs=knobs
        )  # fmt: skip

    ours = plan("overlapped", Knobs(chunk_bytes=2**28))
    schedules = {
        "paper_schedule": outline(plan("double_buffer", PAPER_KNOBS)), "code": lower_ablated(plan("megatrain_code"), Ablation()),
        "code_earlier": lower_ablated(plan("megatrain_code"), Ablation(copies=False)), "ours": outline(ours),
        **{peer: lower(plan(peer)) for peer in ("zero3_offload", "zero_offload", "fsdp2_offload")},
    }  # fmt: skip
    accounts = {name: account(schedule, 2**59, 2**59, None, 0) for name, schedule in schedules.items()}
    return {
        "model": model.name, "parameters": model.parameters, "host_gb": {name: found.host_peak_bytes / 1e9 for name, found in accounts.items()},
        "ours_state_gb": accounts["ours"].held("host", *STATE) / 1e9,
        "code_state_gb": accounts["code"].held("host", *STATE) / 1e9,
    }  # fmt: skip
