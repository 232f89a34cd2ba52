"""Ablations: our best plan for a 7B step on the H200 that was calibrated, and the same without one of the things that make it fast, as Table 4 has them.

`no overlapped update`: AdamW on the host after backward, the best plan of policy `k_buffer`. `no residency`: the full plan with its weights, gradients and
optimizer state streamed, activations as they were. `no compile`: eager layers, whose times were measured alone (experiments/published/h200.csv); their head
is modelled with the library's rates, their memory by formula. `no chunked loss`: all logits of a micro-batch at one time, memory by
`memory_formulas.workspace_estimate`, 12 bytes a logit, of which a compiled head was seen to need 2 (`experiments/results/figures/README.md`), their head as
long as the calibrated one: modelled too.
"""

from __future__ import annotations

import functools
import math
import os
from typing import NamedTuple

import msgspec

from megatrain.experiments.figures.stored import RESULTS
from megatrain.experiments.validation.rows import load_rows
from megatrain.simulator.assessment import Choice, assess
from megatrain.simulator.costs import Datasheet, cost_model
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.memory_formulas import workspace_estimate
from megatrain.simulator.plan import Plan
from megatrain.simulator.planner import candidates
from megatrain.simulator.schedule import Op, OpId
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

CASES = ("full", "no overlapped update", "no residency", "no compile", "no chunked loss")
MODELLED = ("no compile", "no chunked loss")
"""not calibrated as a whole"""
MODEL = "qwen2.5-7b"
CALIBRATED = RESULTS / "h200-qwen2.5-7b-batches" / "hardware.toml"
HOST_BYTES = 118 * 2**30
"""what a run may take of the H200's 128 GiB"""
MODELLED_DEVICE_BYTES = 122 * 2**30
"""15 GiB less than tensors can have, since nobody measured what these allocate within an op: planned to 134 GiB, eager layers asked for 2 GiB more than the 70
that were left for activations and workspace, where 66 were foretold (H200, 2026-11-22)
"""
LOSS_CHUNK = 4096
WORK = Workload(batch=32, sequence=1024, compiled=True, loss_chunk=LOSS_CHUNK)
"""as experiments/results/h200-qwen2.5-7b-batches/32x1024.json, which measures the full plan"""


class Eager(NamedTuple):
    """A layer's times in ms."""

    forward: float
    backward: float


def streamed(plan: Plan) -> Plan:
    """`plan` with nothing kept on the device from step to step; activations, and what the host updates, as they were."""
    lean = msgspec.structs.replace(plan.knobs.placement, **dict.fromkeys(("weights", "low", "moments", "gradients"), ""))
    return msgspec.structs.replace(plan, knobs=msgspec.structs.replace(plan.knobs, placement=lean), digest="", prediction=None)


def whole_loss(work: Workload) -> Workload:
    """All logits of a micro-batch at one time."""
    return msgspec.structs.replace(work, loss_chunk=work.tokens)


def layer_times(name: str) -> Eager:
    """Measured: `layer 7b x 32, eager` of the published H200 figures."""
    found = {row.quantity: row.value or 0.0 for row in load_rows() if row.item == name}
    return Eager(found["layer_forward_ms"], found["layer_both_ms"] - found["layer_forward_ms"])


def machine(case: str, model: ModelSpec) -> HardwareSpec:
    """The calibrated machine, with what `case` needs beside its measurements."""
    calibrated = HardwareSpec.load(str(CALIBRATED))
    calibrated = msgspec.structs.replace(calibrated, host_bytes=HOST_BYTES)
    table, work = calibrated.costs, workload(case)
    assert table is not None
    shape = f"{model.shape}/{work.shape}"
    if case == "no compile":
        rates, eager = Datasheet(HardwareSpec.load("h200"), model, work), layer_times("layer 7b x 32, eager")
        layers = {"forward": eager.forward, "recompute": eager.forward, "backward": eager.backward}
        compute = {kind: dict(known) for kind, known in table.compute.items()}
        for kind, known in compute.items():
            (amount, _), *_ = known.values()
            known[shape] = (amount, math.ceil(1e6 * layers[kind]) if kind in layers else rates.duration_ns(Op(id=str(OpId(kind, micro=0)), lane="compute")))
        table = msgspec.structs.replace(table, compute=compute)
    elif case == "no chunked loss":
        measured = table.workspace[shape]
        whole = msgspec.structs.replace(measured, head=workspace_estimate(model, work).head)
        table = msgspec.structs.replace(table, workspace={**table.workspace, shape: whole})
    device = MODELLED_DEVICE_BYTES if case in MODELLED else calibrated.device_bytes
    return msgspec.structs.replace(calibrated, costs=table, device_bytes=device)


def workload(case: str) -> Workload:
    if case == "no chunked loss":
        return whole_loss(WORK)
    return msgspec.structs.replace(WORK, compiled=case != "no compile")


@functools.cache
def ablated(case: str) -> Choice:
    """The plan of one of CASES for the H200, and what is expected of it."""
    model, work = ModelSpec.load(MODEL), workload(case)
    hardware = machine(case, model)
    names = ["k_buffer"] if case == "no overlapped update" else None
    best = candidates(model, hardware, work, source=MODEL, hardware_name=os.path.relpath(CALIBRATED), policies=names)[0]
    return best if case != "no residency" else assess(streamed(best.plan), cost_model(hardware, model, work))
