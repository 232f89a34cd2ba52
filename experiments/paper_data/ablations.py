"""Ablations: our best plan for a step of a 7B model on the calibrated H200, and the same plan
without one of its optimizations, as in the paper's Table 4.

* `no overlapped update`: AdamW runs on the host after backward, in the best plan of the policy
  `k_buffer`. It saves no activations, as the plan that was measured.
* `no residency`: weights, gradients and optimizer state of the full plan are streamed. Its
  activations are unchanged.
* `no compile`: layers are eager, with their measured times (experiments/published/h200.csv). The
  time of the head is modelled with the library's rates, and the memory by formulas.
* `no chunked loss`: all logits of a micro-batch exist at one time. They take 2 bytes per logit by
  `formulas.workspace_estimate`. The head is assumed to take as long as the calibrated one.
"""

from __future__ import annotations

import functools
import math
import os
from typing import NamedTuple

import msgspec

from megatrain.experiments.paper_data.stored import RESULTS
from megatrain.experiments.validation.rows import load_rows
from megatrain.simulator.costs import Datasheet, cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.formulas import workspace_estimate
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, assess, with_knobs
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.schedule import Op, OpId
from megatrain.simulator.schedule.plan import Placement, Plan

CASES = ("full", "no overlapped update", "no residency", "no compile", "no chunked loss")
MODELLED = ("no compile", "no chunked loss")
"""Cases that were not calibrated as a whole."""
MODEL = "qwen2.5-7b"
CALIBRATED = RESULTS / "h200-qwen2.5-7b-batches" / "hardware.toml"
HOST_BYTES = 118 * 2**30
"""Host memory that a run may use, of the H200's 128 GiB."""
MODELLED_DEVICE_BYTES = 122 * 2**30
"""Device memory for MODELLED cases: 15 GiB less than tensors can have, because temporary memory was
not measured for them. For eager layers it was predicted 6 GiB too small (H200).
"""
LOSS_CHUNK = 4096
WORK = Workload(batch=32, sequence=1024, compiled=True, loss_chunk=LOSS_CHUNK)
"""The workload of experiments/results/h200-qwen2.5-7b-batches/32x1024.json, which measures the full
plan.
"""


class Eager(NamedTuple):
    """Times of an eager layer."""

    forward: float
    """Time of the forward pass in ms."""
    backward: float
    """Time of the backward pass in ms."""


def streamed(plan: Plan) -> Plan:
    """Returns `plan` with no weights, gradients or optimizer state resident on the device.
    Activations and the layers that the host updates are unchanged.
    """
    lean = msgspec.structs.replace(
        plan.knobs.placement, **dict.fromkeys(("weights", "master_low", "moments", "gradients"), "")
    )
    return msgspec.structs.replace(
        plan, knobs=msgspec.structs.replace(plan.knobs, placement=lean), digest="", prediction=None
    )


def whole_loss(work: Workload) -> Workload:
    """Returns the workload with all logits of a micro-batch at one time."""
    return msgspec.structs.replace(work, loss_chunk=work.tokens)


def layer_times(name: str) -> Eager:
    """Returns the times of an item of experiments/published/h200.csv, such as `layer 7b x 32,
    eager`.
    """
    found = {row.quantity: row.value or 0.0 for row in load_rows() if row.item == name}
    return Eager(found["layer_forward_ms"], found["layer_both_ms"] - found["layer_forward_ms"])


def machine(case: str, model: ModelSpec) -> HardwareSpec:
    """Returns the calibrated machine with the modelled costs and the memory of one of CASES."""
    calibrated = HardwareSpec.load(str(CALIBRATED))
    calibrated = msgspec.structs.replace(calibrated, host_bytes=HOST_BYTES)
    table, work = calibrated.costs, workload(case)
    assert table is not None
    shape = f"{model.shape}/{work.shape}"
    if case == "no compile":
        rates, eager = (
            Datasheet(HardwareSpec.load("h200"), model, work),
            layer_times("layer 7b x 32, eager"),
        )
        layers = {"forward": eager.forward, "recompute": eager.forward, "backward": eager.backward}
        compute = {kind: dict(known) for kind, known in table.compute.items()}
        for kind, known in compute.items():
            (amount, _), *_ = known.values()
            known[shape] = (
                amount,
                (
                    math.ceil(1e6 * layers[kind])
                    if kind in layers
                    else rates.duration_ns(Op(id=str(OpId(kind, micro=0)), lane="compute"))
                ),
            )
        table = msgspec.structs.replace(table, compute=compute)
    elif case == "no chunked loss":
        measured = table.workspace[shape]
        whole = msgspec.structs.replace(measured, head=workspace_estimate(model, work).head)
        table = msgspec.structs.replace(table, workspace={**table.workspace, shape: whole})
    device = MODELLED_DEVICE_BYTES if case in MODELLED else calibrated.device_bytes
    return msgspec.structs.replace(calibrated, costs=table, device_bytes=device)


def workload(case: str) -> Workload:
    """Returns the workload of one of CASES."""
    if case == "no chunked loss":
        return whole_loss(WORK)
    return msgspec.structs.replace(WORK, compiled=case != "no compile")


@functools.cache
def ablated(case: str) -> Choice:
    """Returns the plan of one of CASES for the H200, with its prediction."""
    model, work = ModelSpec.load(MODEL), workload(case)
    hardware = machine(case, model)
    names = ["k_buffer"] if case == "no overlapped update" else None
    best = candidates(
        model,
        hardware,
        work,
        source=MODEL,
        hardware_name=os.path.relpath(CALIBRATED),
        policies=names,
    )[0]
    if case == "no residency":
        changed = streamed(best.plan)
    elif case == "no overlapped update":
        changed = with_knobs(best.plan, placement=Placement())
    else:
        return best
    return assess(changed, cost_model(hardware, model, work))
