"""CostTable: the durations and bytes that a calibration measured, and structs that datasheets also
use.
"""

from __future__ import annotations

import itertools

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.limits import (
    CALIBRATE_AGAIN,
    at_least,
    check_lanes,
    refuse_unknown,
    within,
)
from megatrain.simulator.model.state_format import FORMATS
from megatrain.simulator.schedule import CODES, LANES

COMPUTE_KINDS = ("embed", "forward", "head", "recompute", "backward", "embed_backward")
"""Kinds whose duration depends on `Op.shape`."""
LAYER_KINDS = ("forward", "recompute", "backward")
"""The compute kinds of a decoder layer."""
EVALUATION_KINDS = ("loss",)
"""Compute kinds of evaluations. Calibrations before 2026-11-22 did not measure them."""
COPY_KINDS = (
    "load_weights",
    "save_gradients",
    "load_gradients",
    "load_state",
    "save_state",
    "save_activations",
    "load_activations",
    "save_attention",
    "load_attention",
    "load_second_moment",
)
"""Kinds of copies. Their size is in bytes, and the size of other kinds with a curve is in
parameters. All copies in one direction have the same curve: `load_weights` to the device,
`save_gradients` to the host."""
WIDE_KINDS = ("norm", "update_ratios", "update", "cpu_update", "accumulate_gradients")
"""Kinds that read or write the gradient of a step, which is fp32 if several gradients are
summed."""
PASS_KINDS = ("cpu_adam", "host_pass", "thread_pass", "device_pass")
"""Kinds that only schedules of other systems have. Their size is in bytes, and the machine's rates
give their durations."""
EXCHANGE_KINDS = ("gather_weights", "exchange_gradients", "exchange_sums")
"""Collectives of plans for several GPUs. Their size is the bytes that a rank receives, and the
machine's rates give their durations."""
CURVE_KINDS = tuple(
    kind
    for kind in CODES.values()
    if kind not in COMPUTE_KINDS + EVALUATION_KINDS + PASS_KINDS + COPY_KINDS[2:] + EXCHANGE_KINDS
    and kind != "sum_rows"
)
"""Kinds with a measured curve of duration over size."""


class Workspace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak device bytes of temporary tensors in an op, by the kind of op.

    The temporary tensors of different kinds never exist at the same time. Only those of `layer`
    exist together with the saved activations of a recomputed layer.
    """

    layer: int
    """Bytes in a decoder layer's forward, recompute or backward, without its saved activations."""
    head: int
    """Bytes in the head and the embedding."""
    update: int = 0
    """Bytes in the optimizer on the device."""


class HostMemorySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bandwidth of the host's DRAM, which the CPU cores and the copies over the link share. The
    numbers are fitted to the rates that two of these lanes reach while both are busy.
    """

    gb_per_s: float
    """The highest rate at which all cores together read and write, in 10^9 bytes per second."""
    h2d_cost: float = 2.0
    """DRAM traffic of one byte copied to the device, in bytes of the cores' traffic."""
    d2h_cost: float = 2.3
    """DRAM traffic of one byte copied to the host, in bytes of the cores' traffic."""
    cpu_weight: float = 3.3
    """Weight of the cores when DRAM bandwidth is short. One direction of the link has weight 1."""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not 0.01 <= getattr(self, field) <= 1e6:
                raise UserError(
                    f"host_memory: {field}",
                    found=getattr(self, field),
                    allowed="0.01 to 1e6",
                    fix=f"correct {field}",
                )


class KernelInterleaving(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the kernels of compute share the device with those of updates and collectives
    (`simulator/costs/contention.py`). Kernels of compute and update take turns, so one lane gains
    what the other loses.

    While compute is busy, an update op that takes the time d alone runs at share = d / (d + wait)
    of its full speed, and compute runs at 1 - share x loss of its full speed. The loss is 1 if
    kernels of the two lanes never overlap. A wait of 1.7 ms fits measurements on an H200
    (docs/lab_notes.md, "AdamW during a forward pass").
    """

    wait_ns: int
    """Time from the launch of an update op to its turn, in nanoseconds. Predictions use it only if
    the time of a layer's matrix products is unknown."""
    forward_loss: float = 1.0
    """The loss of a forward, a recompute or a head, [0, 1]."""
    backward_loss: float = 1.0
    """The loss of a backward, [0, 1]."""

    def __post_init__(self) -> None:
        within("turns: wait_ns", self.wait_ns, 0, 10**9)
        for field in ("forward_loss", "backward_loss"):
            within(f"turns: {field}", getattr(self, field), 0, 1)


class FixedCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fixed costs on the host. Measured durations include them. Only `launch_ns` and
    `backward_call_ns` are used, for loops over chunks of a row (`Part.loop`).
    """

    launch_ns: int
    """Time to enqueue a kernel, in nanoseconds."""
    backward_call_ns: int = 0
    """Time of a function that autograd calls in a backward pass, in nanoseconds, or 0 if it was not
    measured."""
    event_ns: int
    """Time to record a timing event in nanoseconds, or 0 without a GPU."""
    first_touch_gb_per_s: float
    """Rate at which all threads write new pages of host memory for the first time, in GB/s."""
    registration_gb_per_s: float
    """Rate at which touched pages are pinned in GB/s, or 0 without a GPU."""


class CostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations and bytes measured on one machine. Sizes are in bytes for copies and in parameters
    for elementwise ops. Durations are in integer nanoseconds. Raises UserError if a key is unknown,
    a number is out of range, or points are not in ascending order.
    """

    measured_on: str
    """The machine: the name that the driver reports for its GPU."""
    date: str
    """The date of the calibration."""
    loss_chunk: int = 0
    """The `loss_chunk` with which heads were measured, or 0 if it is unknown."""
    step_overhead_ns: int = 0
    """Host time per step outside the schedule, in nanoseconds."""
    process_bytes: int = 0
    """Host memory that a process with state on the host needs in addition to its pools, in bytes:
    threads, the driver's queues, staging."""
    fixed: FixedCosts | None = None
    """Fixed costs on the host, for information."""
    dispatch_ns: dict[str, int] = {}
    """Lane -> time from an op being ready to its start, in nanoseconds."""
    contention: dict[str, dict[str, float]] = {}
    """Lane -> other lane -> the share of its full speed, (0, 1], that the lane keeps while the
    other lane is busy. A missing pair means 1. A lane of `DRAM_LANES` may also have the key for
    both other such lanes being busy."""
    host_memory: HostMemorySpec | None = None
    """The host's DRAM. It replaces the contention between the link and the lane `cpu`."""
    turns: KernelInterleaving | None = None
    """How compute and update share the device. It replaces the contention between them."""
    curves: dict[str, tuple[tuple[int, int], ...]]
    """Kind of op -> points (size, duration_ns) in ascending order of size. A single point of size 0
    is a constant, as for `clip`. Other keys are for variants of a kind:

    * `KIND@LANE`: the kind on a lane where it has other durations, such as `norm@compute`
    * `KIND:add`: the op adds to a buffer, such as `accumulate_gradients:add`
    * `KIND:wide`: the gradient is fp32 while layers compute in bf16
    * `cpu_update:STATE` and `cpu_update:STATE:wide`: the update in a state format other than
      `exact`
    """
    compute: dict[str, dict[str, tuple[int, int]]]
    """Kind of compute op -> `Op.shape` -> (amount, duration_ns). The amount is `Op.amount`, by
    which durations of other shapes are scaled."""
    attention: dict[str, tuple[tuple[int, int, int], ...]] = {}
    """`attention_shape` -> points (S, forward_ns, backward_ns) of the attention kernel
    alone, on one causal sequence of S tokens, in ascending order of S. They are used to predict a
    layer at other sequence lengths: its attention and its other work scale differently."""
    activations: dict[str, tuple[int, int]] = {}
    """`MODEL_SHAPE/WORKLOAD_SHAPE` -> (tokens, bytes of one decoder layer's saved activations)."""
    workspace: dict[str, Workspace] = {}
    """`MODEL_SHAPE/WORKLOAD_SHAPE` -> peak device bytes in addition to the pools and the saved
    activations."""
    heads: dict[str, tuple[tuple[int, int, int], ...]] = {}
    """`MODEL_SHAPE/WORKLOAD_SHAPE` -> points (loss chunk, duration_ns, bytes as in
    `Workspace.head`) of the head with other loss chunks than `loss_chunk`, in ascending order of
    chunks. The bytes are 0 if they are unknown. `compute` and `workspace` have the same shape with
    `loss_chunk`."""
    spread: dict[str, float] = {}
    """Measured number -> its interquartile range divided by its median. The key is `KIND SIZE` for
    a curve, `KIND SHAPE` for compute, or the path of a field of this table or of HardwareSpec, such
    as `contention.h2d.cpu` or `duplex_curve 1048576`. It is used by `megatrain calibrate --again`
    and for the uncertainty of a predicted step."""
    host_factors: tuple[float, ...] = ()
    """How much the speed of the host's cores varies: mean durations of CPU updates in short windows
    that are spread over the calibration, divided by the durations in `curves`, in ascending order.
    Each is equally likely. Empty if they were not measured."""

    def __post_init__(self) -> None:
        for key, points in self.curves.items():
            kind = key.partition("@")[0].removesuffix(":add").removesuffix(":wide")
            if kind.startswith("cpu_update:"):
                refuse_unknown(f"costs.curves.{key}", kind.partition(":")[2], tuple(FORMATS))
            else:
                refuse_unknown(f"costs.curves.{key}", kind, CURVE_KINDS)
            if "@" in key:
                refuse_unknown(f"costs.curves.{key}", key.partition("@")[2], LANES)
            if not points or any(size < 0 or duration < 0 for size, duration in points):
                raise UserError(
                    f"costs.curves.{key}",
                    found="no point" if not points else "a negative number",
                    allowed="points (size, ns) >= 0",
                    fix=CALIBRATE_AGAIN,
                )
            for (left, _), (right, _) in itertools.pairwise(points):
                if left >= right:
                    raise UserError(
                        f"costs.curves.{key}",
                        found=f"size {right} after {left}",
                        allowed="ascending sizes",
                        fix=CALIBRATE_AGAIN,
                    )
        for kind, durations in self.compute.items():
            refuse_unknown(f"costs.compute.{kind}", kind, COMPUTE_KINDS + EVALUATION_KINDS)
            for shape, (amount, duration) in durations.items():
                at_least(f"costs.compute.{kind}.{shape}: amount", amount, 1)
                at_least(f"costs.compute.{kind}.{shape}: duration_ns", duration, 0)
        for shape, rows in self.attention.items():
            where = f"costs.attention.{shape}"
            for point in rows:
                for name, value in zip(
                    ("sequence", "forward_ns", "backward_ns"), point, strict=True
                ):
                    at_least(f"{where}: {name}", value, 1)
            for (left, *_), (right, *_) in itertools.pairwise(rows):
                if left >= right:
                    raise UserError(
                        where,
                        found=f"sequence {right} after {left}",
                        allowed="ascending sequences",
                        fix=CALIBRATE_AGAIN,
                    )
        for shape, (tokens, size) in self.activations.items():
            at_least(f"costs.activations.{shape}: tokens", tokens, 1)
            at_least(f"costs.activations.{shape}: bytes", size, 0)
        for shape, workspace in self.workspace.items():
            for field in workspace.__struct_fields__:
                at_least(f"costs.workspace.{shape}.{field}", getattr(workspace, field), 0)
        for shape, heads in self.heads.items():
            where = f"costs.heads.{shape}"
            for head in heads:
                for name, value, least in zip(
                    ("loss_chunk", "duration_ns", "bytes"), head, (1, 1, 0), strict=True
                ):
                    at_least(f"{where}: {name}", value, least)
            for (left, *_), (right, *_) in itertools.pairwise(heads):
                if left >= right:
                    raise UserError(
                        where,
                        found=f"loss chunk {right} after {left}",
                        allowed="ascending loss chunks",
                        fix=CALIBRATE_AGAIN,
                    )
        if (
            list(self.host_factors) != sorted(self.host_factors)
            or min(self.host_factors, default=1) <= 0
        ):
            raise UserError(
                "costs.host_factors",
                found=str(list(self.host_factors)),
                allowed="positive numbers in ascending order",
                fix=CALIBRATE_AGAIN,
            )
        at_least("costs.step_overhead_ns", self.step_overhead_ns, 0)
        at_least("costs.process_bytes", self.process_bytes, 0)
        check_lanes("costs", self.contention, self.dispatch_ns)

    def workloads_of(self, layer: str, kind: str = "forward") -> list[str]:
        """Returns the workloads with which a decoder layer was measured.

        Args:
            layer: The layer's signature (`LayerSpec.signature`).
            kind: The kind of op.

        Returns:
            The part of each shape after `/`, such as `16x1024-bf16`. The list is empty if no op of
            this kind of the layer was measured. Recomputes that skip attention count too.
        """
        shapes = (shape.partition("/") for shape in self.compute.get(kind, {}))
        return [work for name, _, work in shapes if name == layer or name.startswith(f"{layer}-")]
