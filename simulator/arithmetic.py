"""What every schedule of a plan has to agree on: which gradients are summed, in which dtypes state is kept, and what an op's cost depends on.

The order in which micro-batches' gradients are added is part of the result. A policy adds them in the order of the micro-batches, and of a tied
embedding the head's before the embedding's own.
"""

from __future__ import annotations

from typing import Any, Literal

from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import KEPT, BufferDtype
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING
from megatrain.simulator.workload import Dtype

SCALAR_BYTES = 8  # one fp32 value; 8 keeps pools of them aligned
RATIO_ROW = 64
"""Elements whose g^2 / v are summed first: of one tensor and in one chunk always, since both are whole multiples of it (`specs.ALIGNMENT`)"""
StateClass = Literal["weights", "low", "moments", "gradients"]
STATE: tuple[StateClass, ...] = ("weights", "low", "moments", "gradients")
"""classes of data that every layer has in whole"""


def contributions(plan: Plan, layer: str) -> int:
    """Gradients that `layer` gets in one step: one per micro-batch, two where embedding and head share it."""
    return plan.workload.accumulation * (2 if layer == EMBEDDING and plan.model.tied else 1)


def gradient_dtype(plan: Plan, layer: str) -> Dtype:
    """The dtype of a layer's step gradient: fp32 where several are summed, the compute dtype otherwise."""
    return "fp32" if contributions(plan, layer) > 1 else plan.workload.dtype


def gradient_bytes(plan: Plan, layer: str) -> int:
    """Bytes of a layer's step gradient per parameter."""
    return DTYPE_BYTES[gradient_dtype(plan, layer)]


def state_bytes(plan: Plan, name: StateClass, layer: str) -> int:
    """Bytes per parameter of the layer's `weights`, `low` half, `moments` or `gradients`; 0 where there is none."""
    width = DTYPE_BYTES[plan.workload.dtype]
    return {"weights": width, "low": 4 - width, "moments": 8, "gradients": gradient_bytes(plan, layer)}[name]


def state_dtype(plan: Plan, name: StateClass, layer: str) -> BufferDtype:
    """The dtype of the layer's `weights`, `low` half, `moments` or `gradients`."""
    work = plan.workload.dtype
    dtypes: dict[StateClass, BufferDtype] = {"weights": work, "low": "int16", "moments": "fp32", "gradients": gradient_dtype(plan, layer)}
    return dtypes[name]


def cost_keys(plan: Plan, kind: str, layer: str, *, kept: bool = False) -> dict[str, Any]:
    """What the duration of a compute op depends on, the same for all layers of one signature. `layer` is empty for embedding and head; `kept`
    says that the attention need not be computed.
    """
    model, work = plan.model, plan.workload
    flops = model.work(kind, layer, work, kept=kept).flops
    signature = (model.stack[layer].signature if layer else model.shape) + (KEPT if kept else "")
    return {"flops": flops, "elements": 0 if flops else work.tokens * model.hidden, "shape": f"{signature}/{work.shape}"}


def blocks_of(plan: Plan) -> list[list[int]]:
    """Decoder layers in runs of at most K that are recomputed together; a stored layer is a run of its own."""
    stored, blocks = plan.placed("stored"), list[list[int]]()
    for index in range(plan.model.layers):
        alone = str(index) in stored or not blocks or str(blocks[-1][-1]) in stored
        if alone or len(blocks[-1]) == plan.knobs.checkpoint_interval:
            blocks.append([index])
        else:
            blocks[-1].append(index)
    return blocks
