"""Datasheet: a cost model for machines that were not measured. Durations follow from rates.

* Copies: the time on the link's curve (`interpolate`). Without a curve, latency + bytes / rate. On
  a unified machine, 0.
* Compute ops, with sequences of S tokens:

      linear FLOPs / (peak x linear efficiency) x `products_slowdown`, if rates are not calibrated
      (those in fp8 divided by the machine's `fp8_speed`)
      + attention FLOPs / (peak x attention efficiency x S / (S + half tokens))
      + traffic share x moved bytes / device rate

  It is at least the time in which the host calls the functions of a loop over chunks of a row
  (`Part.loop`), because these are short. The time of other kernel launches is not counted, so
  predictions for a few hundred tokens are too fast.
* Collectives among GPUs: latency + bytes received / rate between GPUs, and the sum of gradients.
  If several GPUs were measured together, latency and rates are those of the measurement. With
  several hosts, the bytes that a host receives over the network take their own time
  (`_network_ns`). The network's use of the host's DRAM and links is not modelled.
* Other ops: bytes or parameters divided by a rate. The matrix products of an update take their
  FLOPs divided by the rate of linear layers in bf16. On the host, the time of another optimizer's
  update is that of AdamW, scaled by the bytes that both move.

The three terms of a compute op are added because its kernels run one after the other. A matrix
product also takes longer by about the time of reading its weights (docs/lab_notes.md, "Matrix
products of few tokens"). `op_work` counts the traffic of eager PyTorch, and `traffic_share`
corrects it for compiled layers and for experts.

The attention rate is that of the workload's kernel, if the machine has it. With documents, flash
attention receives their lengths. Its time is that of documents of `Workload.document_length`, or of
rows that are one document if there is no length. A kernel that receives a mask, for documents or
for a window, also computes masked pairs (`computed_pairs`). Masks for documents were not measured.

Copies beyond a measured curve are flagged as extrapolated, and so are layers whose attention uses a
mask for documents. The machine's `uncertainty` says how inaccurate the rates may be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs.contention import ContentionModel
from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.interpolation import interpolate
from megatrain.simulator.costs.kernel_traffic import products_slowdown, traffic_share
from megatrain.simulator.costs.protocol import FIX, EstimatedCosts
from megatrain.simulator.hardware.cost_table import (
    COMPUTE_KINDS,
    COPY_KINDS,
    EVALUATION_KINDS,
    EXCHANGE_KINDS,
    LAYER_KINDS,
    PASS_KINDS,
    CostTable,
)
from megatrain.simulator.hardware.machine import AttentionRate, HardwareSpec
from megatrain.simulator.hardware.several_gpus import CollectiveRate, SeveralGpus
from megatrain.simulator.model.attention_kernel import is_optional, package
from megatrain.simulator.model.attention_masks import document_attention, document_tokens
from megatrain.simulator.model.families import UNFUSED_ATTENTION
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.op_work import (
    LENGTHS,
    Work,
    attention_shape,
    computed_pairs,
    longest_product_flops,
    op_work,
    share_of_row,
)
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload, is_rebuilding
from megatrain.simulator.schedule import (
    SAVED_ATTENTION_SUFFIX,
    Op,
    computes_output,
    has_saved_attention,
)
from megatrain.simulator.schedule.arithmetic import summed_columns, ways_of
from megatrain.simulator.schedule.operands import exchanged, pieces

_ADAM_BYTES = 22
"""Bytes per parameter that the AdamW of `cpu_adam_per_s` reads and writes: bf16 weight 2 + 2, bf16
gradient 2, fp32 moments 8 + 8. Memory bandwidth limits AdamW, so with other dtypes its time is
proportional to their bytes (docs/lab_notes.md, "DeepSpeed's CPUAdam by dtype")."""
_PASS_SHARE = 107 / 136.4
"""The GB/s of a copy by all threads, relative to those of this AdamW. Both were measured on an
H200's host (library/hardware/h200.toml). The ratio is used for every elementwise pass and every
machine."""
_THREAD_NORM_NS = 0.265
"""Time per parameter of PyTorch's norm of a bf16 tensor on a CPU. It runs on one thread and is
limited by a chain of additions, not by memory, so it is used for every host (docs/lab_notes.md,
"PyTorch's norm on the host")."""
_CLIP_NS = 100_000
"""Time of a layer's clipping factor on a GPU in ns: 70 to 150 us on an H100
(experiments/results/h100-x4-large-models)."""
_SUM_NS, _SUMMED_ELEMENT_NS = 150_000, 0.012
"""Time of summing an embedding's gradient by token on a GPU, in addition to its traffic: for
sorting the tokens and for each block of columns (`summed_columns`), and for each element of a
token's row. It was measured alone on an H200, with the embedding of 7B: 1.25 ms with 8,192 tokens
and 1 block, 1.62 ms with 4 blocks; 3.28 and 3.77 ms with 32,768 tokens. It is hardly limited by the
memory's bandwidth, so it is used for every GPU."""
_CALL_NS = 7_200
"""The host's time of calling a PyTorch function on a GPU, if it was not measured. Calibrated H200
machines need 7.2 to 10.2 us (experiments/results/h200-*/hardware.toml, launch_ns)."""
_BACKWARD_CALL = 1.6
"""The time of a function that autograd calls, relative to `launch_ns`, if it was not measured: 1.55
to 1.71 on an H200 with 16 cores (docs/lab_notes.md, "Calls of the host")."""
_ATTENTION_BACKWARD = 1.25
"""FLOPs of the backward pass of flash attention, relative to those in `op_work`. It has five
matrix products instead of four, because it recomputes the scores (Dao, 2023)."""


def fp8_speed(hardware: HardwareSpec) -> float:
    """Returns the speed of the machine's fp8 products relative to bf16 products. Raises UserError
    if it has no fp8 products.
    """
    speed = hardware.fp8_speed()
    if speed is None:
        raise UserError(
            f"hardware {hardware.name}: peak_tflops",
            found="no rate for fp8",
            allowed="a GPU with fp8 matrix products, compute capability 8.9 or later, such as h200",
            fix="use --dtype bf16",
        )
    return speed


class Datasheet(EstimatedCosts):
    """Durations from the rates of a HardwareSpec. Raises UserError if the machine has no peak for
    the workload's dtype, or no rate of the network if there are several hosts.
    """

    dispatch_ns: Mapping[str, int]

    def __init__(
        self,
        hardware: HardwareSpec,
        model: ModelSpec,
        workload: Workload,
        gpus: int = 1,
        hosts: int = 1,
        *,
        several: SeveralGpus | None = None,
    ) -> None:
        """Makes the cost model.

        Args:
            hardware: The machine.
            model: The model.
            workload: The workload.
            gpus: The number of GPUs that exchange data.
            hosts: The number of hosts that have them.
            several: The rates of collectives of the GPUs of a host, if they were measured.
        """
        self.hardware, self.model, self.workload = hardware, model, workload
        self._gpus, self._hosts, self.several = gpus, hosts, several
        if hosts > 1 and hardware.network_gb_per_s is None:
            raise UserError(
                f"hardware {hardware.name}: network_gb_per_s",
                found=f"no rate, and {hosts} hosts",
                allowed="the GB/s that a host receives from other hosts",
                fix="pass --network, such as --network 50, or set network=50 in a plan with"
                " `megatrain plan --from`",
            )
        if workload.dtype not in hardware.peak_tflops:
            raise UserError(
                f"hardware {hardware.name}: peak_tflops",
                found=f"no rate for {workload.dtype}",
                allowed=", ".join(hardware.peak_tflops),
                fix="add the rate, or train in another dtype",
            )
        flops_per_ns = hardware.peak_tflops[workload.dtype] * 1e3
        self._linear_flops_per_ns = flops_per_ns * hardware.linear_efficiency
        self._fp8_speed = fp8_speed(hardware) if workload.fp8 else 1.0
        duplex = {
            "h2d": {"d2h": hardware.duplex_fraction},
            "d2h": {"h2d": hardware.duplex_fraction},
        }
        named = hardware.contention
        pairs = {
            lane: {**duplex.get(lane, {}), **named.get(lane, {})} for lane in {**duplex, **named}
        }
        self.sharing = ContentionModel(
            pairs,
            hardware.host_memory,
            hardware.duplex_curve,
            hardware.turns,
            high_priority=find(workload.optimizer).by_tensor,
            product_ns=self.product_ns,
            several=several,
        )
        self._elementwise = Elementwise(model, workload, hardware.cores)
        self.dispatch_ns = hardware.dispatch_ns
        self.step_overhead_ns = hardware.step_overhead_ns
        self.library_bytes = hardware.library_bytes
        usual = AttentionRate(
            efficiency=hardware.attention_efficiency, half_tokens=hardware.attention_half_tokens
        )
        _refuse_kernel(hardware, workload)
        attention = hardware.attention.get(workload.kernel or "", usual)
        fused = model.fuses_scores(workload)
        # Written-out scores always include the masked pairs, so documents change nothing there.
        self.masked = (
            workload.documents
            and document_attention(model, workload) == "mask"
            and (model.family not in UNFUSED_ATTENTION or fused)
        )
        products = hardware.peak_tflops.get("bf16", hardware.peak_tflops[workload.dtype])
        self._products_per_ns = products * 1e3 * hardware.linear_efficiency
        """FLOPs per ns of matrix products in bf16, as in Muon's updates."""
        self._attention = attention
        self._flops_per_ns = flops_per_ns
        self._row = measured_row(hardware.costs, model, workload)
        length = document_tokens(model, workload)
        self._documents = (
            Datasheet(
                hardware,
                model,
                msgspec.structs.replace(
                    workload, batch=1, sequence=length, document_length=None, token_piece=None
                ),
            )
            if length is not None
            else None
        )
        """The costs of a row that is one document of the typical length, or None if rows are one
        document."""
        self._computed: dict[tuple[str, str, bool, bool], int] = {}
        self._curves = {
            lane: tuple((size, round(size / rate)) for size, rate in curve)
            for lane, curve in (("h2d", hardware.h2d_curve), ("d2h", hardware.d2h_curve))
        }
        self._rates = {"h2d": hardware.h2d_gb_per_s, "d2h": hardware.d2h_gb_per_s}
        adam_gb_per_s = _ADAM_BYTES * hardware.cpu_adam_per_s / 1e9
        self._pass_gb_per_s = {
            "cpu_adam": adam_gb_per_s,
            "host_pass": _PASS_SHARE * adam_gb_per_s,
            "thread_pass": hardware.thread_gb_per_s,
            "device_pass": hardware.device_gb_per_s,
        }

    @property
    def product_ns(self) -> float:
        """The time of the longest matrix product of a decoder layer, in ns."""
        flops = longest_product_flops(self.model, self.workload, self._fp8_speed)
        return flops / self._linear_flops_per_ns

    def collective_bytes(self, gpus: int) -> int:
        return self.hardware.collectives(gpus)

    def touched_bytes(self, op: Op) -> int:
        return self._elementwise.touched_bytes(op) or 0

    def _copy(self, op: Op) -> tuple[int, bool]:
        """Returns (duration in ns, extrapolated) of a copy."""
        if self.hardware.unified:
            return 0, False
        if curve := self._curves[op.lane]:
            return interpolate(curve, op.bytes)
        return math.ceil(self.hardware.link_latency_ns + op.bytes / self._rates[op.lane]), False

    def whole(self, op: Op) -> tuple[Op, float]:
        """Returns the full recompute of the layer of `op`, a recompute that skips attention, and
        the duration of `op` divided by the duration of the full recompute.
        """
        layer, _, workload = op.shape.partition("/")
        kind = _work_of(op)
        full = msgspec.structs.replace(
            op,
            flops=op_work(self.model, kind, op.layer, self.workload).flops,
            shape=f"{layer.removesuffix(SAVED_ATTENTION_SUFFIX)}/{workload}",
        )
        return full, self._op_ns(op) / self._op_ns(full)

    def _op_ns(self, op: Op) -> int:
        """Returns the time of a compute op in ns."""
        kept, rebuilt = has_saved_attention(op.shape), is_rebuilding(op.shape)
        return self._compute_ns(_work_of(op), op.layer, kept=kept, rebuilt=rebuilt)

    def _compute_ns(
        self, kind: str, layer: str, *, kept: bool = False, rebuilt: bool = False
    ) -> int:
        """Returns the time of a compute op in ns. `kept` and `rebuilt` are those of `op_work`."""
        key = (kind, layer, kept, rebuilt)
        if key not in self._computed:
            work = op_work(self.model, kind, layer, self.workload, kept=kept, rebuilt=rebuilt)
            device = (
                self.products_of_layers_ns(work) * self._products_slowdown(kind, layer)
                + (0 if kept else self.attention_ns(kind, layer))
                + self._moved_bytes(work, kind, layer) / self.hardware.device_gb_per_s
                + (self._summing_ns() if kind == "embed_backward" else 0)
            )
            self._computed[key] = math.ceil(max(device, self.calls_ns(kind, layer)))
        return self._computed[key]

    def calls_ns(self, kind: str, layer: str) -> int:
        """Returns the host's time of calling the functions of a decoder layer's loop over chunks of
        a row, in ns, or 0 if the layer has no loop. The GPU waits for them if it is faster.
        """
        if kind not in LAYER_KINDS:
            return 0
        calls = op_work(self.model, kind, layer, self.workload).calls
        fixed = self.hardware.costs.fixed if self.hardware.costs else None
        each = fixed.launch_ns if fixed else _CALL_NS
        if kind == "backward":
            each = (fixed.backward_call_ns if fixed else 0) or round(_BACKWARD_CALL * each)
        return calls * each

    def _products_slowdown(self, kind: str, layer: str) -> float:
        """Returns the time of a compute op's matrix products relative to `linear_efficiency`. It is
        1 if the machine was calibrated, because a calibration times layers without pauses.
        """
        if self.hardware.costs is not None:
            return 1.0
        return products_slowdown(self.model, self.workload, kind, layer)

    def _summing_ns(self) -> float:
        """Returns the time of summing the gradients of the embedding's tables, in ns, in addition
        to their traffic.
        """
        tables = self.model.table_shapes
        at_once = summed_columns(self.workload.tokens)
        parts = sum(1 + -(-columns // at_once) for _, columns in tables)
        elements = self.workload.tokens * sum(columns for _, columns in tables)
        return _SUM_NS * parts + _SUMMED_ELEMENT_NS * elements

    def _moved_bytes(self, work: Work, kind: str, layer: str) -> float:
        """Returns the bytes that a compute op moves, corrected by `traffic_share`."""
        share = traffic_share(self.model, self.workload, kind, layer)
        return share * (work.moved_bytes - work.unfused_bytes) + work.unfused_bytes

    def products_of_layers_ns(self, work: Work) -> float:
        """Returns the time of the matrix products with weights in a compute op, in ns."""
        flops = work.linear_flops - work.fp8_flops + work.fp8_flops / self._fp8_speed
        return flops / self._linear_flops_per_ns

    @property
    def knows_attention(self) -> bool:
        """Whether the machine's calibration measured the attention kernel of this model alone."""
        return self._row is not None

    def attention_ns(self, kind: str, layer: str) -> float:
        """Returns the time of attention in a compute op, in ns, if attention was not saved.

        With a length of documents, it is the time for a document of this length, multiplied by the
        number of such documents.

        If the kernel was measured, it is the time of one full causal row, multiplied by the number
        of pairs of tokens in the op and divided by their number in that row.
        """
        if self._documents is not None:
            one = self._documents
            return one.attention_ns(kind, layer) * self.workload.tokens / one.workload.tokens
        flops = op_work(self.model, kind, layer, self.workload).attention_flops
        if not flops:
            return 0.0
        computed = computed_pairs(self.model, layer, self.workload)
        if self._row and (share := share_of_row(self.model, layer, self.workload)):
            return computed * share * self._row[kind == "backward"]
        backward = _ATTENTION_BACKWARD if kind == "backward" else 1
        return computed * backward * flops / self._attention_rate(self.workload.sequence)

    def _attention_rate(self, sequence: int) -> float:
        """Returns the FLOPs per ns of causal attention on sequences of `sequence` tokens."""
        rate = self._attention
        return self._flops_per_ns * rate.efficiency * sequence / (sequence + rate.half_tokens)

    def scaled(self, op: Op, workload: Workload, duration: int) -> float:
        """Returns the duration of a decoder layer's `op` in ns, from `duration`, the measured time
        of the same op with another `workload`.

        The time of attention is replaced, and the rest is scaled by the tokens.
        """
        more = self.workload.tokens / workload.tokens
        if has_saved_attention(op.shape):
            return duration * more
        then = Datasheet(self.hardware, self.model, workload)
        now, before = (sheet.attention_ns(op.kind, op.layer) for sheet in (self, then))
        # The attention kernel and the op were measured separately, so the kernel alone may take
        # longer than the op that contains it. The op then counts as attention alone.
        attention = min(before, duration)
        growth = now / before if before else more
        return (duration - attention) * more + attention * growth

    def extrapolated(self, op: Op) -> bool:
        return (op.kind in COPY_KINDS and self._copy(op)[1]) or (
            self.masked and op.kind in LAYER_KINDS
        )

    def share(self, op: Op, other: Op, sheet: Datasheet) -> float:
        """Returns the time of a decoder layer's `op` divided by the time of `other`, the same op
        with the workload of `sheet`, which has the same number of tokens.
        """
        return self._op_ns(op) / sheet._op_ns(other)

    def with_flops(self, op: Op) -> Op:
        """Returns a decoder layer's `op` with the FLOPs that its shape has in this workload."""
        work = op_work(
            self.model, _work_of(op), op.layer, self.workload, kept=has_saved_attention(op.shape)
        )
        return msgspec.structs.replace(op, flops=work.flops)

    def duration_ns(self, op: Op) -> int:
        hardware, kind = self.hardware, op.kind
        if kind == "thread_pass" and op.parameters:  # a norm
            return math.ceil(
                max(op.bytes / hardware.thread_gb_per_s, op.parameters * _THREAD_NORM_NS)
            )
        if kind in PASS_KINDS:
            return math.ceil(op.bytes / self._pass_gb_per_s[kind])
        if kind in COPY_KINDS:
            return self._copy(op)[0]
        if kind in COMPUTE_KINDS + EVALUATION_KINDS:
            return self._op_ns(op)
        if kind in EXCHANGE_KINDS:
            return self._exchange_ns(op)
        if kind == "clip":
            return _CLIP_NS if op.lane == "update" and op.layer else 0
        if kind == "cpu_update":
            exact_ns = op.parameters / hardware.cpu_update_per_s * 1e9
            return math.ceil(self._elementwise.update_ns(op, exact_ns))
        touched = self._elementwise.touched_bytes(op)
        if touched is None:
            raise UserError(
                f"hardware {hardware.name}: {op.id}",
                found=f"an op of kind {kind}",
                allowed="a kind with a datasheet formula",
                fix=FIX,
            )
        elementwise = math.ceil(
            touched / (hardware.host_gb_per_s if op.lane == "cpu" else hardware.device_gb_per_s)
        )
        return elementwise + self.products_ns(op)

    def _exchange_ns(self, op: Op) -> int:
        """Returns the time of a collective in ns: of receiving the bytes and, for gradients, of
        adding them. One kernel reads each part once and writes the fp32 sum. It also reads the sum
        if the op adds to it. If the parts are exchanged in pieces, each piece has the latency of a
        collective, and the pieces that are sent are copied first.

        With several hosts, links and network are busy at the same time (`ways_of`), so the longer
        time counts.
        """
        rate = self._collective_rate(op.kind)
        added, times = 0.0, 1
        if op.kind == "exchange_gradients":
            width = 4 if self.workload.sum_group > 1 else DTYPE_BYTES[self.workload.dtype]
            part, sources = width * op.parameters, exchanged(op)
            parts = sources + op.bytes // part
            adding = any(name in op.reads for name in op.writes)
            added = self._sum_slowdown * (parts * part + (1 + adding) * 4 * op.parameters)
            times = sources * pieces(op)
            added += 2 * parts * part if pieces(op) > 1 else 0
        linked, entering = ways_of(op.kind, op.bytes, self._gpus, self._hosts)
        moving = max(linked / rate.gb_per_s, self._network_ns(entering, times))
        return math.ceil(times * rate.latency_ns + moving + added / self.hardware.device_gb_per_s)

    @property
    def _sum_slowdown(self) -> float:
        """How much longer a byte of the sum of gradients takes than a byte of a copy."""
        return self.hardware.device_gb_per_s / self.several.sum_gb_per_s if self.several else 1.0

    def _collective_rate(self, kind: str) -> CollectiveRate:
        """Returns the rate of collectives of `kind`: measured, or of the machine."""
        if self.several:
            return self.several.exchange if kind == "exchange_gradients" else self.several.gather
        hardware = self.hardware
        peer = hardware.peer_gb_per_s or min(hardware.h2d_gb_per_s, hardware.d2h_gb_per_s)
        return CollectiveRate(latency_ns=hardware.link_latency_ns, gb_per_s=peer)

    def _network_ns(self, entering: int, times: int) -> float:
        """Returns the time in ns in which a host receives `entering` bytes over its network, in
        `times` exchanges.
        """
        rate = self.hardware.network_gb_per_s
        if not entering or rate is None:
            return 0.0
        return times * self.hardware.network_latency_ns + entering / rate

    def products_ns(self, op: Op) -> int:
        """Returns the time of an update's matrix products in ns, from their FLOPs."""
        return math.ceil(op.flops / self._products_per_ns) if op.flops else 0


def _refuse_kernel(hardware: HardwareSpec, workload: Workload) -> None:
    """Raises UserError if the workload names an attention kernel that the GPU cannot have, or an
    optional one for which the machine has no rate.
    """
    kernel, able = workload.attention, hardware.attention_kernels
    if kernel and able is not None and kernel not in able:
        raise UserError(
            f"hardware {hardware.name}: attention_kernels",
            found=f"no {kernel}",
            allowed=" or ".join((*able, "PyTorch's choice")),
            fix="leave --attention out",
        )
    if kernel is None or not is_optional(kernel) or kernel in hardware.attention:
        return
    raise UserError(
        f"hardware {hardware.name}: attention",
        found=f"no rate for {kernel}",
        allowed=f"a machine with [attention.{kernel}]: the library's Hopper GPUs, or a Hopper or"
        f" Blackwell GPU that was calibrated with the package {package(kernel)} installed",
        fix="leave --attention out, or calibrate again with the package installed",
    )


def _work_of(op: Op) -> str:
    """Returns the kind whose work a compute op has. It is `forward` for a recompute that computes
    the layer's output, and otherwise its own kind.
    """
    return "forward" if op.kind == "recompute" and computes_output(op.shape) else op.kind


def attention_points(
    table: CostTable | None, model: ModelSpec, workload: Workload
) -> tuple[tuple[int, int, int], ...]:
    """Returns the points (S, forward_ns, backward_ns) of `table` for the attention kernel of
    `workload`. There are none if it was not measured.
    """
    if table is None:
        return ()
    shape = attention_shape(model, workload)
    return table.attention.get(shape) or table.attention.get(shape.removesuffix(LENGTHS), ())


def measured_row(
    table: CostTable | None, model: ModelSpec, workload: Workload
) -> tuple[float, float] | None:
    """Returns the forward and backward times in ns of the model's attention kernel on one causal
    row of `workload.sequence` tokens, or None if the kernel was not measured at two lengths.

    A kernel that receives lengths has the times of the same kernel on rows if it was measured only
    there.

    The time divided by the sequence length S is linear in S (`interpolation.py`), between the
    measured lengths and beyond them.
    """
    points = attention_points(table, model, workload)
    if len(points) < 2:
        return None
    picoseconds = (
        tuple((point[0], round(1000 * point[which] / point[0])) for point in points)
        for which in (1, 2)
    )
    forward, backward = (
        interpolate(curve, workload.sequence)[0] * workload.sequence / 1000 for curve in picoseconds
    )
    return forward, backward
