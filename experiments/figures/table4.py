"""Table 4: the paper's ablation on a GH200, and ours beside: simulated there, and with an H200's measured costs. Some 35 s.

Ours, each against the planner's best: `no overlapped update` is AdamW on the host after backward (policy k_buffer); `no residency` the same plan with all
of its weights, gradients and optimizer state streamed; `no chunked loss` all of a micro-batch's logits at one time. What layers gain by torch.compile
is not simulated: the datasheet's costs do not know it, and the H200's are calibrated for compiled layers alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.experiments.figures.answers import PAPER_KNOBS, Answer, answer, ours, paper_schedule
from megatrain.experiments.figures.beside import beside, published
from megatrain.experiments.figures.stored import RESULTS
from megatrain.experiments.validation.rows import load_settings
from megatrain.simulator.assessment import assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.specs import ModelSpec, Workload
from megatrain.simulator.verdict import candidates

CALIBRATED = RESULTS / "h200-qwen2.5-7b-whole" / "hardware.toml"
HOST_BYTES = 118 * 2**30
"""what a run may take of the H200's 128 GiB"""
ABLATED: dict[str, tuple[str, Knobs, int]] = {
    "full": ("double_buffer", PAPER_KNOBS, 96),
    "no double buffering": ("k_buffer", msgspec.structs.replace(PAPER_KNOBS, weight_slots=1), 96),
    "no slab pool": ("k_buffer", msgspec.structs.replace(PAPER_KNOBS, gradient_slabs=1), 96),
    "checkpoint interval 1": ("k_buffer", PAPER_KNOBS, 64),
}
"""what a row of the paper is called -> policy, knobs, batch"""


def streamed(plan: Plan) -> Plan:
    """`plan` with nothing kept on the device from step to step; activations as they were."""
    kept = plan.knobs.placement
    lean = Placement(stored=kept.stored, parked=kept.parked)
    return msgspec.structs.replace(plan, knobs=msgspec.structs.replace(plan.knobs, placement=lean), digest="", prediction=None)


def undivided(model: ModelSpec, hardware: HardwareSpec, work: Workload, policies: list[str] | None = None) -> Answer:
    """The planner's best with the micro-batch that was measured: another's ops would be extrapolated."""
    return answer(candidates(model, hardware, work, policies=policies)[0], hardware)


def own(model: ModelSpec, hardware: HardwareSpec, work: Workload) -> dict[str, Answer]:
    """Ours and its ablations. Without the chunked loss only where no calibration says what memory the chunked one takes."""
    best = undivided if hardware.costs else ours
    full = best(model, hardware, work)
    same = msgspec.structs.replace(work, batch=full.batch, accumulation=full.accumulation)
    lean = streamed(candidates(model, hardware, same)[0].plan)
    found = {
        "full": full, "no overlapped update": best(model, hardware, work, ["k_buffer"]),
        "no residency": answer(assess(lean, cost_model(hardware, model, same)), hardware),
    }  # fmt: skip
    if not hardware.costs:
        found["no chunked loss"] = best(model, hardware, msgspec.structs.replace(work, loss_chunk=work.tokens))
    return found


def simulate() -> Any:
    rows = beside(published("paper Table 4"))
    machine, model = load_settings()["gh200"].machine(), ModelSpec.load("qwen2.5-14b")
    for record in rows:
        name = record["item"].partition(", ")[2]
        policy, knobs, batch = ABLATED[name]
        intervals = (1,) if "interval" in name else (4, 2, 1)
        record["paper_schedule"] = msgspec.to_builtins(paper_schedule(model, machine, batch, 1024, policy=policy, knobs=knobs, intervals=intervals))
    calibrated = msgspec.structs.replace(HardwareSpec.load(str(CALIBRATED)), host_bytes=HOST_BYTES)
    work = Workload(batch=32, sequence=1024, compiled=True)
    return {
        "rows": rows, "gh200": msgspec.to_builtins(own(model, machine, Workload(batch=96, sequence=1024))),
        "h200": msgspec.to_builtins(own(ModelSpec.load("qwen2.5-7b"), calibrated, work)),
    }  # fmt: skip
