"""Table 4: the paper's ablation on a GH200, and ours: there, and with an H200's measured costs (`ablations.py`). Some 15 s.

On the GH200 nobody measured compiled layers, and the datasheet counts eager ones: compiled, its compute is modelled to take as much less time as a 14B
layer of 64 x 1024 tokens takes on an H200. Plans there are the best for eager layers; a micro-batch that does not fit is split.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.experiments.figures import ablations
from megatrain.experiments.figures.ablations import LOSS_CHUNK, ablated, layer_times, streamed, whole_loss
from megatrain.experiments.figures.answers import PAPER_KNOBS, Answer, answer, ours, paper_schedule
from megatrain.experiments.figures.beside import beside, published
from megatrain.experiments.validation.rows import load_settings
from megatrain.simulator.assessment import assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.changed import Changed
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.planner import candidates
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

ABLATED: dict[str, tuple[str, Knobs, int]] = {
    "full": ("double_buffer", PAPER_KNOBS, 96),
    "no double buffering": ("k_buffer", msgspec.structs.replace(PAPER_KNOBS, weight_slots=1), 96),
    "no slab pool": ("k_buffer", msgspec.structs.replace(PAPER_KNOBS, gradient_slabs=1), 96),
    "checkpoint interval 1": ("k_buffer", PAPER_KNOBS, 64),
}
"""what a row of the paper is called -> policy, knobs, batch"""


def compiled_share() -> float:
    """Of an eager 14B layer's time on an H200: forward, recompute and backward, measured."""
    times = [layer_times(f"layer 14b x 64, {how}") for how in ("compiled", "eager")]
    compiled, eager = (2 * time.forward + time.backward for time in times)
    return compiled / eager


def split(model: ModelSpec, hardware: HardwareSpec, work: Workload, policies: list[str] | None = None) -> Plan:
    """The planner's best, with the micro-batch that `ours` finds."""
    found = ours(model, hardware, work, policies)
    same = msgspec.structs.replace(work, batch=found.batch, accumulation=found.accumulation)
    return candidates(model, hardware, same, policies=policies)[0].plan


def own(model: ModelSpec, hardware: HardwareSpec, work: Workload) -> dict[str, Answer]:
    """Ours and its ablations on a machine that was not calibrated."""
    full, share = split(model, hardware, work), compiled_share()

    def judged(plan: Plan, *, compiled: bool = True) -> Answer:
        costs = cost_model(hardware, model, plan.workload)
        return answer(assess(plan, Changed(costs, lambda op: op, {"compute": share}) if compiled else costs), hardware)

    found = (
        judged(full), judged(split(model, hardware, work, ["k_buffer"])), judged(streamed(full)), judged(full, compiled=False),
        judged(split(model, hardware, whole_loss(work))),
    )  # fmt: skip
    return dict(zip(ablations.CASES, found, strict=True))


def simulate() -> Any:
    rows = beside(published("paper Table 4"))
    machine, model = load_settings()["gh200"].machine(), ModelSpec.load("qwen2.5-14b")
    for record in rows:
        name = record["item"].partition(", ")[2]
        policy, knobs, batch = ABLATED[name]
        intervals = (1,) if "interval" in name else (4, 2, 1)
        record["paper_schedule"] = msgspec.to_builtins(paper_schedule(model, machine, batch, 1024, policy=policy, knobs=knobs, intervals=intervals))
    calibrated = {case: answer(ablated(case), ablations.machine(case, ModelSpec.load(ablations.MODEL))) for case in ablations.CASES}
    return {
        "rows": rows, "compiled_share": compiled_share(), "h200": msgspec.to_builtins(calibrated),
        "gh200": msgspec.to_builtins(own(model, machine, Workload(batch=96, sequence=1024, loss_chunk=LOSS_CHUNK))),
    }  # fmt: skip
