"""Facts that all schedules of one plan share: which gradients are summed, the dtypes of the state,
and what an op's cost depends on.

The order in which gradients are added is part of the result, because floating-point addition is not
associative. Every policy adds them in the order of the micro-batches. With tied embeddings, it adds
the head's gradient before the embedding's own. Several micro-batches in a group keep this order,
except with tied embeddings: the head's gradients of the whole group would come first. `Plan`
refuses such a group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, NamedTuple

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import FORMATS, PLANE_BYTES, PlaneDtype
from megatrain.simulator.model.workload import Dtype, Gradients, Workload, rebuilding, shortened
from megatrain.simulator.schedule import SAVED_ATTENTION_SUFFIX, WHOLE_SUFFIX, BufferDtype
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.update_layout import needing_whole_matrices, update_layout

SCALAR_BYTES = 8  # room for one fp32 value; 8 bytes keep a pool of them aligned
RATIO_ROW = 64
"""Consecutive elements whose g^2 / v are summed into one value. They always belong to one tensor
and one chunk, because tensors and chunks are whole multiples of this size (`specs.ALIGNMENT`)."""
NORM_ROW = 4096
"""Elements in a row of a gradient. A sum of squares first sums each row and then adds the rows, so
its bits depend on this number. With several GPUs, the parts of a layer are whole multiples of it,
so the sum has the same bits as on one GPU."""
_SUMMED_AT_ONCE = 2**25
"""The most elements of an embedding's gradient that are summed in fp32 at one time: 128 MiB."""
_COLUMNS = 128
StateClass = Literal["weights", "master_low", "moments", "gradients"]
UPDATED: tuple[StateClass, ...] = ("weights", "master_low", "moments")
"""The classes of data that an update changes."""
STATE: tuple[StateClass, ...] = (*UPDATED, "gradients")
"""The classes of data that make up a layer's state."""


def summed_columns(tokens: int) -> int:
    """Returns how many columns of the embedding's gradient of `tokens` tokens are summed at one
    time: a multiple of 128.
    """
    return max(_SUMMED_AT_ONCE // (tokens * _COLUMNS), 1) * _COLUMNS


class StatePart(NamedTuple):
    """The size and the dtype of one class of a layer's state."""

    bytes: float
    """Bytes per parameter, a multiple of 1/32. 0 if the layer does not have this class."""
    dtype: BufferDtype
    """The dtype of its elements."""
    extra: int = 0
    """Bytes of the whole layer in addition to `bytes` per parameter: the moments that only some of
    its tensors keep."""

    def of(self, parameters: int) -> int:
        """Returns the bytes of `parameters` parameters, a multiple of 32, without `extra`."""
        return int(self.bytes * parameters)

    def whole(self, parameters: int) -> int:
        """Returns the bytes of a whole layer, which has `parameters` parameters."""
        return self.of(parameters) + self.extra


def contributions(plan: Plan, layer: str) -> int:
    """Returns how many gradients of `layer` are computed in one step: one per micro-batch, or two
    per micro-batch for a tied embedding.
    """
    return stack_contributions(plan.model, plan.workload)[layer]


@plugins.cached(maxsize=4)
def stack_contributions(model: ModelSpec, work: Workload) -> Mapping[str, int]:
    """Returns layer -> what `contributions` returns for it. Cached because a search asks for it
    with each plan.
    """
    counts = dict.fromkeys(model.stack, work.accumulation)
    counts[EMBEDDING] *= 2 if model.tied else 1
    return counts


def part_elements(plan: Plan, layer: str) -> int:
    """Returns the number of elements in the part of `layer` that each rank owns. With one GPU, the
    part is the whole layer.

    Rank r owns the elements from r times this number on. The last parts may reach beyond the end of
    the layer. Elements beyond the end are zero, or are not read.
    """
    elements = plan.model.stack[layer].elements
    if plan.gpus == 1:
        return elements
    return -(-elements // (plan.gpus * NORM_ROW)) * NORM_ROW


def ways_of(kind: str, received: int, gpus: int, hosts: int) -> tuple[int, int]:
    """Returns the bytes of a collective that pass a link between GPUs of a host, and the bytes that
    a host receives over the network.

    Gradients go directly from each rank to each other rank (all-to-all). All other collectives
    gather. A gather is a ring of the ranks in their order: what a rank receives from all others
    comes over the link from the rank before it, and the first rank of a host has it over the
    network.

    Args:
        kind: The kind of the op.
        received: The bytes that a rank receives from all other ranks, of each the same number.
        gpus: The number of ranks.
        hosts: The number of hosts.
    """
    if hosts == 1:
        return received, 0
    if kind != "exchange_gradients":
        return received, received
    here = gpus // hosts
    from_here = received * (here - 1) // (gpus - 1)
    return from_here, here * (received - from_here)


def micro_batch_of(plan: Plan, rank: int, micro: int) -> int:
    """Returns the micro-batch of the step that is micro-batch `micro` of `rank`.

    Ranks take turns: rank 0 computes the first `sum_group` micro-batches of the step, rank 1 the
    next ones, and so on.
    """
    group = plan.workload.sum_group
    turn, place = divmod(micro, group)
    return (turn * plan.gpus + rank) * group + place


def own_micro_batches(plan: Plan, rank: int) -> list[int]:
    """Returns the micro-batches of the step that `rank` computes, in its order."""
    return [micro_batch_of(plan, rank, micro) for micro in range(plan.micro_batches)]


def sums_on_device(plan: Plan, layer: str) -> bool:
    """Returns whether a slot can hold the gradient of `layer` until it is complete.

    It can if there is one contribution, or if all micro-batches are in one micro-batch group and
    `checkpoint_interval` is 1. With a larger interval, each layer of a block would need a slot.
    """
    count = contributions(plan, layer)
    return count == 1 or (
        count == plan.knobs.micro_batch_group and plan.knobs.checkpoint_interval == 1
    )


def layer_state(plan: Plan, layer: str) -> dict[StateClass, StatePart]:
    """Returns the size and the dtype of each class of a layer's state."""
    return stack_state(plan)[layer]


def stack_state(plan: Plan) -> Mapping[str, dict[StateClass, StatePart]]:
    """Returns layer -> what `layer_state` returns for it."""
    return _stack_state(plan.model, plan.workload)


@plugins.cached(maxsize=4)
def _stack_state(model: ModelSpec, work: Workload) -> dict[str, dict[StateClass, StatePart]]:
    """Returns layer -> its state. Cached because a search asks for it with each plan."""
    return {layer: _layer_state(model, work, layer) for layer in model.stack}


@plugins.cached(maxsize=4)
def state_sizes(
    model: ModelSpec, work: Workload
) -> dict[StateClass, list[tuple[str, int, BufferDtype]]]:
    """Returns class of state -> (layer, bytes, dtype) of each layer that has this class. Cached for
    the same reason as `_stack_state`.
    """
    state = _stack_state(model, work)
    return {
        name: [
            (layer, part.whole(spec.elements), part.dtype)
            for layer, spec in model.stack.items()
            if (part := state[layer][name]).bytes
        ]
        for name in STATE
    }


def _layer_state(model: ModelSpec, work: Workload, layer: str) -> dict[StateClass, StatePart]:
    spec, summed = model.stack[layer], stack_contributions(model, work)[layer] > 1
    layout = update_layout(work.optimizer, spec)
    if layout is None:
        return layer_state_of(
            work.dtype, work.state, find(work.optimizer).moments, summed, work.gradients
        )
    state = layer_state_of(work.dtype, work.state, layout.least, summed, work.gradients)
    moments = state["moments"]
    extra = PLANE_BYTES[FORMATS[work.state].moments] * layout.more(0, spec.elements)
    return {**state, "moments": moments._replace(extra=int(extra))}


def kept_moments(plan: Plan) -> Callable[[str, int, int], int]:
    """Returns a function (layer, first parameter, number of parameters) -> the number of moment
    values that the optimizer keeps for these parameters.
    """
    name, moments = plan.workload.optimizer, find(plan.workload.optimizer).moments

    def kept(layer: str, first: int, count: int) -> int:
        layout = update_layout(name, plan.model.stack[layer])
        return moments * count if layout is None else layout.kept(first, count)

    return kept


def whole_matrices(plan: Plan) -> frozenset[str]:
    """Returns the layers whose update needs whole matrices. Only the device updates them."""
    name = plan.workload.optimizer
    return needing_whole_matrices(name, plan.model) if find(name).by_tensor else frozenset()


def updated_on_device(plan: Plan) -> frozenset[str]:
    """Returns the layers that only the device can update: all layers with several GPUs, and
    otherwise those whose update needs whole matrices.
    """
    return frozenset(plan.model.stack) if plan.gpus > 1 else whole_matrices(plan)


def refuse_on_host(plan: Plan, layers: AbstractSet[str], where: str, fix: str) -> None:
    """Raises UserError if the CPU cannot update one of `layers` because its update needs whole
    matrices. `where` and `fix` are used in the error.
    """
    unable = layers & whole_matrices(plan)
    first = next((layer for layer in plan.model.stack if layer in unable), "")
    if first:
        raise UserError(
            where,
            found=f"layer {first} updated on the CPU with optimizer {plan.workload.optimizer}",
            allowed="updates of its matrices on the GPU, which orthogonalises them",
            fix=fix,
        )


@functools.cache
def layer_state_of(
    work: Dtype, state: str, moments: int, summed: bool, gradients: Gradients = "exact"
) -> dict[StateClass, StatePart]:
    """Returns the size and the dtype of each class of a layer's state.

    `master_low` has 0 bytes in fp32, because there the weight is the whole master. The result is
    cached because a search asks for each layer of each plan.

    Args:
        work: The compute dtype.
        state: The name of the state format.
        moments: The number of moments that the optimizer keeps for each parameter.
        summed: Whether several gradients are summed in a step. The sum is fp32. A single gradient
            has the compute dtype.
        gradients: How a complete gradient is stored.
    """
    planes = FORMATS[state]
    gradient: PlaneDtype = "fp32" if summed else work
    if gradients == "8bit":
        gradient = "block8"
    low = planes.low if work == "bf16" else None
    return {
        "weights": StatePart(PLANE_BYTES[work], work),
        "master_low": StatePart(PLANE_BYTES[low] if low else 0, low or "int16"),
        "moments": StatePart(PLANE_BYTES[planes.moments] * moments, planes.moments),
        "gradients": StatePart(PLANE_BYTES[gradient], gradient),
    }


def cost_keys(
    plan: Plan, kind: str, layer: str, *, kept: bool = False, read: bool = False
) -> dict[str, Any]:
    """Returns the fields of a compute op that its duration depends on: `flops`, `elements` and
    `shape`. They are equal for all layers with the same signature.

    Args:
        layer: a decoder layer, or empty for an op of the embedding or the head.
        kept: True for a recompute that skips attention because the forward saved it.
        read: True for a recompute whose output is read, for example by the recompute of the next
            layer.
    """
    rebuilt = bool(plan.knobs.rebuild_outputs)
    return _cost_keys(plan.model, plan.workload, kind, layer, kept, read, rebuilt)


@plugins.cached(maxsize=4096)
def _cost_keys(
    model: ModelSpec, work: Workload, kind: str, layer: str, kept: bool, read: bool, rebuilt: bool
) -> dict[str, Any]:
    """Returns what `cost_keys` returns. Cached because a search lowers many plans of a workload."""
    whole = read and bool(work.piece)
    short = (
        bool(layer)
        and kind == ("backward" if work.piece else "recompute")
        and not read
        and bool(model.last_products(layer, work))
    )
    flops = op_work(model, "forward" if read else kind, layer, work, kept=kept).flops
    signature = (
        (model.stack[layer].signature if layer else model.shape)
        + (WHOLE_SUFFIX if whole else "")
        + (SAVED_ATTENTION_SUFFIX if kept else "")
    )
    shape = work.shape
    if rebuilt and (short or kind == "backward") and model.rebuilding_products(layer, work):
        shape = rebuilding(shape)
    return {
        "flops": flops,
        "elements": 0 if flops else work.tokens * model.carried,
        "shape": f"{signature}/{shortened(shape) if short else shape}",
    }


def blocks_of(plan: Plan) -> list[list[int]]:
    """Returns the decoder layers in blocks that are recomputed together. A block has at most K
    layers, where K is `checkpoint_interval`. A layer in `saved_activations` is a block by itself.
    """
    if plan.knobs.checkpoint_interval == 1:
        return [[index] for index in range(plan.model.layers)]
    stored, blocks = plan.placed("saved_activations"), list[list[int]]()
    for index in range(plan.model.layers):
        alone = str(index) in stored or not blocks or str(blocks[-1][-1]) in stored
        if alone or len(blocks[-1]) == plan.knobs.checkpoint_interval:
            blocks.append([index])
        else:
            blocks[-1].append(index)
    return blocks
