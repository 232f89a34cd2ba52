"""HardwareSpec and CostTable: the machine, as its datasheet says and as it was measured.

Models one GPU, its link and its host: rates, capacities, and how much busy lanes slow each other. Does not model several GPUs, NUMA
nodes, disks, temperature, or the time that launching a kernel takes. While others are busy too, a lane runs at

    rate(lane) = product over the other busy lanes of contention[lane][other]

of its full speed; a pair that is not named does not disturb each other. What both directions of the link and the CPU share is
the host's DRAM: where a HostMemory is given it replaces the factors between them (`sharing.py` says how). So does Turns between compute and update.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec

from megatrain.simulator.errors import UserError, suggestion
from megatrain.simulator.files import read_toml
from megatrain.simulator.schedule import CODES, LANES

COMPUTE_KINDS = ("embed", "forward", "head", "recompute", "backward", "embed_backward")
"""Kinds whose duration hangs on `Op.shape`."""
LAYER_KINDS = ("forward", "recompute", "backward")
"""Those of a decoder layer."""
UNMEASURED_KINDS = ("loss",)
"""Likewise, computed only by an evaluation; in calibrations before 2026-11-22 they were not measured."""
COPY_KINDS = ("load_weights", "save_gradients", "load_gradients", "load_state", "save_state", "save_activations", "load_activations", "load_second")
"""Kinds whose size is bytes, and that cost what any copy in their direction costs: the curve of the first that goes there, `load_weights` or
`save_gradients`. The size of the other curve kinds is parameters."""
WIDE_KINDS = ("norm", "ratios", "update", "cpu_update", "accumulate_gradients")
"""Kinds that read or write a step gradient, which is wider where it is a sum."""
PASS_KINDS = ("cpu_adam", "host_pass", "thread_pass", "device_pass")
"""Kinds of other systems' schedules, whose size is bytes; a machine's rates give their durations."""
CURVE_KINDS = tuple(kind for kind in CODES.values() if kind not in COMPUTE_KINDS + UNMEASURED_KINDS + PASS_KINDS + COPY_KINDS[2:])
"""Kinds with a curve over their size."""
DRAM_LANES = {"h2d": "d2h+cpu", "d2h": "h2d+cpu", "cpu": "h2d+d2h"}
"""Lanes that share the host's memory, each with what stands for the two others in `contention`."""
_FIX = "correct the file, or make it again with `megatrain calibrate`"


class Workspace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak device bytes that ops allocate within themselves, by when: they never run together, nor all beside saved activations."""

    layer: int
    """a decoder layer's forward, recompute or backward, besides what is saved of it"""
    head: int
    """head and embedding, while nothing is saved"""
    update: int = 0
    """the optimizer on the device, likewise"""


class HostMemory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The host's DRAM, shared by its cores and by the link's copies; fitted to what pairs of them reach together."""

    gb_per_s: float
    """read and written by the cores together, at most; 10^9 bytes"""
    h2d_cost: float = 2.0
    """bytes of the cores' traffic that a byte copied to the device takes the place of"""
    d2h_cost: float = 2.3
    """likewise, to the host"""
    cpu_weight: float = 3.3
    """the cores' share where DRAM is short, against one direction of the link"""

    def __post_init__(self) -> None:
        for field in self.__struct_fields__:
            if not 0.01 <= getattr(self, field) <= 1e6:
                raise UserError(f"host_memory: {field}", found=getattr(self, field), allowed="0.01 to 1e6", fix=f"correct {field}")


class Turns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The update lane's kernels beside those of compute: on the device they take turns, and what one lane gains the other loses.

    Beside compute an op that takes d alone runs at d / (d + wait) of its speed, and compute loses so much of its own, times a loss that is 1 where nothing
    overlaps. On an H200, beside a 7B layer's forward, AdamW on 2^23, 2^25, 2^27, 233 M parameters kept 0.066, 0.118, 0.349, 0.462 of its
    speed, and 1.7 ms give 0.059, 0.118, 0.345, 0.459; kernels of 16 to 264 programs instead of as many as there is work for cost compute no less.
    """

    wait_ns: int
    """from an op's launch to its turn"""
    forward_loss: float = 1.0
    """of a forward's, a recompute's or a head's speed, for each share of its own that the update lane has"""
    backward_loss: float = 1.0
    """likewise a backward's"""

    def __post_init__(self) -> None:
        _within("turns: wait_ns", self.wait_ns, 0, 10**9)
        for field in ("forward_loss", "backward_loss"):
            _within(f"turns: {field}", getattr(self, field), 0, 1)


class FixedCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one thing of its kind costs the host, for the reader: measured durations have them in themselves."""

    launch_ns: int
    """enqueueing a kernel"""
    event_ns: int
    """recording a timing event; 0 without a GPU"""
    first_touch_gb_per_s: float
    """new pages of the host's memory, by all threads"""
    registration_gb_per_s: float
    """of touched pages; 0 without a GPU"""


class CostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations measured on one machine. Sizes in bytes (copies) or parameters (elementwise ops), times in integer nanoseconds."""

    measured_on: str
    """the machine"""
    date: str
    loss_chunk: int = 0
    """tokens of a chunk of the loss with which heads were measured; 0 where that was not noted"""
    step_overhead_ns: int = 0
    """host time per step outside the schedule"""
    process_bytes: int = 0
    """host memory that a process with state on the host takes beside its pools: threads, the driver's queues, staging"""
    fixed: FixedCosts | None = None
    dispatch_ns: dict[str, int] = {}
    """lane -> time from an op being ready to its start"""
    contention: dict[str, dict[str, float]] = {}
    """lane -> other lane -> rate of the first, (0, 1], while the other is busy too; 1 where it is not named. Of those of `DRAM_LANES` also while both others are"""
    host_memory: HostMemory | None = None
    """instead of the contention between the link and the cpu lane"""
    turns: Turns | None = None
    """instead of the contention between compute and update"""
    curves: dict[str, tuple[tuple[int, int], ...]]
    """(size, duration_ns) points, sizes ascending, by op kind; by `KIND@LANE` where a kind costs other times on another lane (`norm@compute`),
    by `KIND:add` where it also reads what it writes (`accumulate_gradients:add`), and by `KIND:wide` for a gradient in fp32 where layers compute in bf16. A
    single point of size 0 is a constant (`clip`)."""
    compute: dict[str, dict[str, tuple[int, int]]]
    """op kind -> Op.shape -> (amount, duration_ns); the amount, Op.amount, is what another shape is scaled by"""
    activations: dict[str, tuple[int, int]] = {}
    """model's shape/workload's shape -> (tokens, bytes of one decoder layer's saved activations)"""
    workspace: dict[str, Workspace] = {}
    """Op.shape -> peak device bytes besides the planned pools and the saved activations"""
    spread: dict[str, float] = {}
    """`KIND SIZE` of a curve, `KIND SHAPE` of compute, a key of this table or of HardwareSpec (`contention.h2d.cpu`, `duplex_curve 1048576`) ->
    interquartile range over median: for the reader, for `megatrain calibrate --again`, and for how far a step may be off"""

    def __post_init__(self) -> None:
        for key, points in self.curves.items():
            _known(f"costs.curves.{key}", key.partition("@")[0].removesuffix(":add").removesuffix(":wide"), CURVE_KINDS)
            if "@" in key:
                _known(f"costs.curves.{key}", key.partition("@")[2], LANES)
            if not points or any(size < 0 or duration < 0 for size, duration in points):
                raise UserError(f"costs.curves.{key}", found="no point" if not points else "a negative number", allowed="points (size, ns) >= 0", fix=_FIX)
            for (left, _), (right, _) in itertools.pairwise(points):
                if left >= right:
                    raise UserError(f"costs.curves.{key}", found=f"size {right} after {left}", allowed="ascending sizes", fix=_FIX)
        for kind, durations in self.compute.items():
            _known(f"costs.compute.{kind}", kind, COMPUTE_KINDS + UNMEASURED_KINDS)
            for shape, (amount, duration) in durations.items():
                _at_least(f"costs.compute.{kind}.{shape}: amount", amount, 1)
                _at_least(f"costs.compute.{kind}.{shape}: duration_ns", duration, 0)
        for shape, (tokens, size) in self.activations.items():
            _at_least(f"costs.activations.{shape}: tokens", tokens, 1)
            _at_least(f"costs.activations.{shape}: bytes", size, 0)
        for shape, workspace in self.workspace.items():
            for field in workspace.__struct_fields__:
                _at_least(f"costs.workspace.{shape}.{field}", getattr(workspace, field), 0)
        _at_least("costs.step_overhead_ns", self.step_overhead_ns, 0)
        _at_least("costs.process_bytes", self.process_bytes, 0)
        _check_lanes("costs", self.contention, self.dispatch_ns)


ATTENTION_EFFICIENCY, ATTENTION_HALF_TOKENS = 0.337, 970
"""Of flash attention on an H200, causal, heads of 128 (2026-11-21): 333 of 989 TFLOP/s x S / (S + 970). Measured:
171 at S = 1,024, 272 at 4,096, 324 at 32,768."""


class AttentionRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an attention kernel reaches of the peak: efficiency x S / (S + half_tokens), S tokens a sequence."""

    efficiency: float
    """over long sequences, forward and backward together, a backward counted as 2.5 forwards, (0, 1]"""
    half_tokens: int
    """sequence length at which it reaches half of that"""


Curve = tuple[tuple[int, float], ...]
"""(bytes of a copy, GB/s) points, bytes ascending; between them the time is a line over the bytes."""


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine. GB are 10^9 bytes; rates are those reached by one lane that works alone."""

    name: str
    source: str
    """where the numbers come from"""
    unified: bool = False
    """one memory for CPU and GPU: nothing is copied. A GPU with memory of its own beside the CPU's (GH200, GB200) is not unified, however fast the link"""
    device_bytes: int
    """GPU memory that a process can use; of a unified machine what the GPU may use of `host_bytes`"""
    host_bytes: int
    """the host's memory; of a unified machine all there is, the GPU's share included"""
    cores: int
    peak_tflops: dict[str, float]
    """dense matrix products with fp32 accumulation, by dtype (`bf16`, `fp32`)"""
    linear_efficiency: float
    """what a decoder layer's matrix products reach of the peak, (0, 1]"""
    attention_efficiency: float = ATTENTION_EFFICIENCY
    """what attention reaches of it over long sequences, forward and backward together, a backward counted as 2.5 forwards"""
    attention_half_tokens: int = ATTENTION_HALF_TOKENS
    """sequence length at which attention reaches half of that"""
    attention: dict[str, AttentionRate] = {}
    """by kernel, `flash` or `cudnn`, where it reaches something else"""
    device_gb_per_s: float
    """GPU memory, read and write together, as a copy reaches it"""
    link: str = ""
    """`PCIe 5.0 x16`, `NVLink-C2C`, ...; for the reader"""
    h2d_gb_per_s: float
    """of large copies from pinned memory"""
    d2h_gb_per_s: float
    link_latency_ns: int = 9000
    """fixed time of one copy where there is no curve; an H200's, 2026-11-21"""
    h2d_curve: Curve = ()
    """measured; where it is there, it is used instead of rate and latency"""
    d2h_curve: Curve = ()
    duplex_fraction: float
    """rate of each direction of the link, of its rate alone, while both are busy, (0, 1]"""
    duplex_curve: Curve = ()
    """each direction's rate while both are busy with copies of that size"""
    host_gb_per_s: float
    """bytes that the host's elementwise ops (sum of squares, accumulation) read and write a second, on all cores"""
    thread_gb_per_s: float
    """bytes that one thread's copy reads and writes a second"""
    cpu_update_per_s: float
    """parameters that the runtime's AdamW updates a second on the host"""
    cpu_adam_per_s: float
    """likewise a fused, vectorised AdamW such as DeepSpeed's (bf16 weights and gradients, fp32 moments), which the host's DRAM limits"""
    watts: float | None = None
    """board power of the GPU, or of the whole package of a unified machine"""
    uncertainty: float = 0.25
    """a step predicted from these rates may take this fraction more or less; 0.10 where link and layers were measured, 0.25 for a datasheet"""
    contention: dict[str, dict[str, float]] = {}
    """as in CostTable; for the two directions of the link it wins over `duplex_fraction`"""
    host_memory: HostMemory | None = None
    turns: Turns | None = None
    """as in CostTable"""
    dispatch_ns: dict[str, int] = {}
    """as in CostTable"""
    costs: CostTable | None = None
    """what was measured here, where somebody did; used instead of the rates above"""

    def __post_init__(self) -> None:
        where = f"hardware {self.name}"
        for field, (least, most) in _LIMITS.items():
            _within(f"{where}: {field}", getattr(self, field), least, most)
        for field in _SHARES:
            if not _LEAST_SHARE <= getattr(self, field) <= 1:
                raise UserError(f"{where}: {field}", found=getattr(self, field), allowed=f"above 0 ({_LEAST_SHARE:g}), at most 1", fix=f"correct {field}")
        if not self.peak_tflops:
            raise UserError(f"{where}: peak_tflops", found="no rate", allowed="bf16, fp32", fix="add the peak of the dtype that you train in")
        for dtype, peak in self.peak_tflops.items():
            _known(f"{where}: peak_tflops.{dtype}", dtype, ("bf16", "fp32"))
            _within(f"{where}: peak_tflops.{dtype}", peak, 1e-6, 1e6)
        for kernel, reached in self.attention.items():
            _known(f"{where}: attention", kernel, ("flash", "cudnn"))
            _within(f"{where}: attention.{kernel}.efficiency", reached.efficiency, 0.001, 1)
            _within(f"{where}: attention.{kernel}.half_tokens", reached.half_tokens, *_LIMITS["attention_half_tokens"])
        if self.unified and self.device_bytes > self.host_bytes:
            raise UserError(
                f"{where}: device_bytes",
                found=self.device_bytes,
                allowed=f"at most host_bytes = {self.host_bytes}, which a unified machine shares",
                fix="correct it",
            )
        for field in ("h2d_curve", "d2h_curve", "duplex_curve"):
            _check_curve(f"{where}: {field}", getattr(self, field))
        for size, rate in self.duplex_curve:
            alone = max(dict(self.h2d_curve).get(size, self.h2d_gb_per_s), dict(self.d2h_curve).get(size, self.d2h_gb_per_s))
            if rate > alone:
                raise UserError(
                    f"{where}: duplex_curve",
                    found=f"{rate} GB/s each at {size} bytes",
                    allowed=f"at most the {alone} of one direction alone",
                    fix="correct the curve",
                )
        _check_lanes(where, self.contention, self.dispatch_ns)

    @classmethod
    def load(cls, source: str) -> HardwareSpec:
        """From a TOML file or a name in the library (`simulator/library/hardware`). Raises UserError where it is missing or wrong."""
        path = Path(source)
        if path.suffix != ".toml" and not path.exists():
            library = Path(__file__).parent / "library" / "hardware"
            known = {file.stem: file for file in sorted(library.glob("*.toml"))}
            if source not in known:
                raise UserError(
                    f"hardware {source}", found="no such file",
                    allowed=f"a calibrated TOML file, or one of the {len(known)} names in simulator/library/hardware, such as h200",
                    fix=suggestion(source, known, "check the path or the name"),
                )  # fmt: skip
            path = known[source]
        return read_toml(path, cls)


def _known(where: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise UserError(where, found=repr(found), allowed=", ".join(allowed), fix="correct its spelling, or remove it")


_RATES = ("device_gb_per_s", "h2d_gb_per_s", "d2h_gb_per_s", "host_gb_per_s", "thread_gb_per_s")
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_RATES, (0.001, 1000000.0)),
    "device_bytes": (2**20, 2**60), "host_bytes": (2**20, 2**60), "h2d_gb_per_s": (0.001, 5000.0), "d2h_gb_per_s": (0.001, 5000.0), "cores": (1, 2**16), "cpu_update_per_s": (1, 1e15), "cpu_adam_per_s": (1, 1e15),
    "attention_half_tokens": (0, 2**20), "link_latency_ns": (0, 10**9), "watts": (0.001, 1e6), "uncertainty": (0, 0.9),
}  # fmt: skip
"""What no machine is outside of: a number beyond is in the wrong unit."""
_LEAST_SHARE = 1e-6  # layers of an 11 M model reach 5e-4 of an H200's peak
_SHARES = ("linear_efficiency", "attention_efficiency", "duplex_fraction")


def _within(where: str, found: float | None, least: float, most: float) -> None:
    """Anything but None has to lie between the two."""
    if found is not None and not least <= found <= most:  # not a number is not within
        number = "a number" if least == 0 else "a positive number"
        raise UserError(where, found=found, allowed=f"{number}, {least:g} to {most:g}", fix=f"correct {where.rpartition(' ')[2]}")


def _check_curve(where: str, points: Curve) -> None:
    for size, rate in points:
        if not 1 <= size <= 2**60:
            raise UserError(where, found=f"a copy of {size} bytes", allowed=f"1 to {2**60}", fix=_FIX)
        _within(where, rate, 0.001, 1e6)
    for (left, slow), (right, fast) in itertools.pairwise(points):
        if left >= right:
            raise UserError(where, found=f"{right} bytes after {left}", allowed="ascending bytes", fix=_FIX)
        if left / slow > (1 + 1e-9) * right / fast:  # rates are rounded
            raise UserError(where, found=f"{right} bytes in less time than {left}", allowed="larger copies that take longer", fix=_FIX)


def _at_least(where: str, found: int, least: int) -> None:
    if found < least:
        raise UserError(where, found=found, allowed=f">= {least}", fix="correct this value")


def _check_lanes(where: str, contention: dict[str, dict[str, float]], dispatch_ns: dict[str, int]) -> None:
    for lane, others in contention.items():
        _known(f"{where}: contention", lane, LANES)
        for other, rate in others.items():
            alone = tuple(name for name in LANES if name != lane)
            _known(f"{where}: contention.{lane}", other, (*alone, *([DRAM_LANES[lane]] if lane in DRAM_LANES else [])))
            if not 0.001 <= rate <= 1:
                raise UserError(
                    f"{where}: contention.{lane}.{other}", found=rate, allowed="a rate from 0.001 to 1", fix="give the share of its speed that is left"
                )
    for lane, latency in dispatch_ns.items():
        _known(f"{where}: dispatch_ns", lane, LANES)
        _at_least(f"{where}: dispatch_ns.{lane}", latency, 0)
