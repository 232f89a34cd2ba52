"""Table 4: the paper's ablation on a GH200, and ours on a GH200 and with an H200's measured costs
(`ablations.py`). The simulation takes about 15 s.

Compiled layers were not measured on the GH200, and the datasheet's rates are for eager layers. So
the time of compiled layers is the time of eager layers times a measured ratio: that of a 14B layer
with 64 x 1024 tokens on an H200. Plans for the GH200 are the best ones for eager layers. A
micro-batch that does not fit is split.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.experiments.paper_data import ablations
from megatrain.experiments.paper_data.ablations import (
    LOSS_CHUNK,
    ablated,
    layer_times,
    streamed,
    whole_loss,
)
from megatrain.experiments.paper_data.answers import (
    PAPER_KNOBS,
    PredictedStep,
    answer,
    ours,
    paper_schedule,
    stated_format,
)
from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours
from megatrain.experiments.validation.predict import predict
from megatrain.experiments.validation.rows import load_settings
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.schedule.plan import Knobs, Plan

ABLATED: dict[str, tuple[str, Knobs, int]] = {
    "full": ("double_buffer", PAPER_KNOBS, 96),
    "no double buffering": ("k_buffer", msgspec.structs.replace(PAPER_KNOBS, weight_slots=1), 96),
    "no slab pool": ("k_buffer", msgspec.structs.replace(PAPER_KNOBS, gradient_staging=1), 96),
    "checkpoint interval 1": ("k_buffer", PAPER_KNOBS, 64),
}
"""A row's name in the paper -> (policy, knobs, batch)."""


def compiled_share() -> float:
    """Returns the measured time of a compiled 14B layer on an H200 as a share of the eager layer's:
    forward, recompute and backward.
    """
    times = [layer_times(f"layer 14b x 64, {how}") for how in ("compiled", "eager")]
    compiled, eager = (2 * time.forward + time.backward for time in times)
    return compiled / eager


def split(
    model: ModelSpec, hardware: HardwareSpec, work: Workload, policies: list[str] | None = None
) -> Plan:
    """Returns the planner's best plan, with the split into micro-batches that `ours` chooses."""
    found = ours(model, hardware, work, policies)
    same = msgspec.structs.replace(work, batch=found.batch, accumulation=found.accumulation)
    return candidates(model, hardware, same, policies=policies)[0].plan


def own(model: ModelSpec, hardware: HardwareSpec, work: Workload) -> dict[str, PredictedStep]:
    """Returns case of `ablations.CASES` -> its prediction on a machine that was not calibrated."""
    full, share = split(model, hardware, work), compiled_share()

    def judged(plan: Plan, *, compiled: bool = True) -> PredictedStep:
        costs = cost_model(hardware, model, plan.workload)
        return answer(
            assess(
                plan, ScaledCosts(costs, lambda op: op, {"compute": share}) if compiled else costs
            ),
            hardware,
        )

    found = (
        judged(full),
        judged(split(model, hardware, work, ["k_buffer"])),
        judged(streamed(full)),
        judged(full, compiled=False),
        judged(split(model, hardware, whole_loss(work))),
    )
    return dict(zip(ablations.CASES, found, strict=True))


def simulate() -> Any:
    """Returns the data of `Table4Data` in paper_figures."""
    rows = published_vs_ours(published("paper Table 4"))
    machine, model = load_settings()["gh200"].machine(), ModelSpec.load("qwen2.5-14b")
    for record in rows:
        name = record["item"].partition(", ")[2]
        policy, knobs, batch = ABLATED[name]
        intervals = (1,) if "interval" in name else (4, 2, 1)
        record["paper_schedule"] = msgspec.to_builtins(
            paper_schedule(
                model, machine, batch, 1024, policy=policy, knobs=knobs, intervals=intervals
            )
        )
        with stated_format() as state:
            stated = paper_schedule(
                model,
                machine,
                batch,
                1024,
                policy=policy,
                knobs=knobs,
                intervals=intervals,
                state=state,
            )
        record["paper_stated"] = msgspec.to_builtins(stated)
    packing = msgspec.structs.replace(load_settings()["gh200"], packs=True)
    packed = {
        row.item: found.value
        for row in published("paper Table 4")
        if row.quantity == "tflops" and (found := predict(row, packing))
    }
    calibrated = {
        case: answer(ablated(case), ablations.machine(case, ModelSpec.load(ablations.MODEL)))
        for case in ablations.CASES
    }
    return {
        "rows": rows,
        "packed": packed,
        "compiled_share": compiled_share(),
        "h200": msgspec.to_builtins(calibrated),
        "gh200": msgspec.to_builtins(
            own(model, machine, Workload(batch=96, sequence=1024, loss_chunk=LOSS_CHUNK))
        ),
    }
