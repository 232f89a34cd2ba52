"""HardwareSpec and CostTable: a machine, from its datasheet and as measured.

They describe one GPU, its link and its host: rates, memory sizes, and how much busy lanes slow each
other down. They do not describe several GPUs, NUMA nodes, disks, temperature, or the time that a
kernel launch takes.

While other lanes are busy, a lane runs at this share of its full speed:

    rate(lane) = product over the other busy lanes of contention[lane][other]

A pair that is not in `contention` has the factor 1. Two structs replace factors if they are given:
HostMemorySpec those between the link and the CPU, which share the host's DRAM, and
KernelInterleaving those between compute and update. `costs/contention.py` applies them.
"""

from __future__ import annotations

import functools
import itertools
import os
from pathlib import Path

import msgspec

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_toml
from megatrain.simulator.base.names import meant, suggestion
from megatrain.simulator.schedule import CODES, LANES

GROUP = "megatrain.hardware"
"""The entry point group of machines that installed packages define."""
COMPUTE_KINDS = ("embed", "forward", "head", "recompute", "backward", "embed_backward")
"""Kinds whose duration depends on `Op.shape`."""
LAYER_KINDS = ("forward", "recompute", "backward")
"""The compute kinds of a decoder layer."""
EVALUATION_KINDS = ("loss",)
"""Compute kinds that only an evaluation uses. Calibrations before 2026-11-22 did not measure
them."""
COPY_KINDS = (
    "load_weights",
    "save_gradients",
    "load_gradients",
    "load_state",
    "save_state",
    "save_activations",
    "load_activations",
    "load_second_moment",
)
"""Copies, whose size is in bytes. All copies in one direction have the same curve: `load_weights`
to the device, `save_gradients` to the host. The size of other kinds with a curve is in
parameters."""
WIDE_KINDS = ("norm", "update_ratios", "update", "cpu_update", "accumulate_gradients")
"""Kinds that read or write the gradient of a step. It is fp32 if several gradients are summed."""
PASS_KINDS = ("cpu_adam", "host_pass", "thread_pass", "device_pass")
"""Kinds that only schedules of other systems have. Their size is in bytes, and the machine's rates
give their durations."""
CURVE_KINDS = tuple(
    kind
    for kind in CODES.values()
    if kind not in COMPUTE_KINDS + EVALUATION_KINDS + PASS_KINDS + COPY_KINDS[2:]
)
"""Kinds with a measured curve of duration over size."""
DRAM_LANES = {"h2d": "d2h+cpu", "d2h": "h2d+cpu", "cpu": "h2d+d2h"}
"""The lanes that share the host's memory. The value is the key in `contention` for the case that
both other lanes are busy."""
_FIX = "correct the file, or make it again with `megatrain calibrate`"


class Workspace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peak device bytes of temporary tensors in an op, by the kind of op.

    The three never exist at the same time. Only the first exists together with the saved
    activations of a recomputed layer.
    """

    layer: int
    """Bytes in a decoder layer's forward, recompute or backward, without its saved activations."""
    head: int
    """Bytes in the head and the embedding."""
    update: int = 0
    """Bytes in the optimizer on the device."""


class HostMemorySpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bandwidth of the host's DRAM, which the CPU cores and the link's copies share. The
    numbers are fitted to the rates that pairs of them reach together.
    """

    gb_per_s: float
    """The most that all cores read and write together, in 10^9 bytes per second."""
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
    """How the kernels of the compute and update lanes share the device. They take turns, so one
    lane gains what the other loses.

    While compute is busy, an update op that takes d alone runs at share = d / (d + wait) of its
    full speed, and compute runs at 1 - share x loss of its own. The loss is 1 if nothing overlaps.
    A wait of 1.7 ms fits measurements on an H200 (docs/lab_notes.md, "AdamW during a forward
    pass").
    """

    wait_ns: int
    """Time from the launch of an update op to its turn."""
    forward_loss: float = 1.0
    """Loss for a forward, a recompute or a head: the speed that it loses for each unit of `share`
    that the update has."""
    backward_loss: float = 1.0
    """Loss for a backward: the speed that it loses for each unit of `share` that the update has."""

    def __post_init__(self) -> None:
        _within("turns: wait_ns", self.wait_ns, 0, 10**9)
        for field in ("forward_loss", "backward_loss"):
            _within(f"turns: {field}", getattr(self, field), 0, 1)


class FixedCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fixed costs on the host. They are for the reader only, because measured durations already
    include them.
    """

    launch_ns: int
    """Time to enqueue a kernel."""
    event_ns: int
    """Time to record a timing event, or 0 without a GPU."""
    first_touch_gb_per_s: float
    """Rate at which all threads write new pages of host memory for the first time."""
    registration_gb_per_s: float
    """Rate at which touched pages are pinned, or 0 without a GPU."""


class CostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations and bytes measured on one machine. Sizes are in bytes for copies and in parameters
    for elementwise ops. Durations are in integer nanoseconds.
    """

    measured_on: str
    """The machine."""
    date: str
    """The date of the calibration."""
    loss_chunk: int = 0
    """The `loss_chunk` with which heads were measured, or 0 if it is unknown."""
    step_overhead_ns: int = 0
    """Host time per step outside the schedule."""
    process_bytes: int = 0
    """Host memory that a process with state on the host needs in addition to its pools: threads,
    the driver's queues, staging."""
    fixed: FixedCosts | None = None
    """Fixed costs on the host, for the reader."""
    dispatch_ns: dict[str, int] = {}
    """Time from an op being ready to its start, by lane."""
    contention: dict[str, dict[str, float]] = {}
    """Share of its full speed, (0, 1], that a lane keeps while another lane is busy, by lane and
    other lane. A missing pair means 1. A lane of `DRAM_LANES` may also have the key for both others
    being busy."""
    host_memory: HostMemorySpec | None = None
    """The host's DRAM. It replaces the contention between the link and the cpu lane."""
    turns: KernelInterleaving | None = None
    """The sharing of the device. It replaces the contention between compute and update."""
    curves: dict[str, tuple[tuple[int, int], ...]]
    """Points (size, duration_ns) by kind of op, in ascending order of size. A single point of size
    0 is a constant, as for `clip`. Other keys are for variants of a kind:

    * `KIND@LANE`: the kind on a lane where it has other durations, such as `norm@compute`
    * `KIND:add`: the op also reads what it writes, such as `accumulate_gradients:add`
    * `KIND:wide`: the gradient is fp32 while layers compute in bf16
    """
    compute: dict[str, dict[str, tuple[int, int]]]
    """(amount, duration_ns) of compute ops, by kind and `Op.shape`. The amount is `Op.amount`, by
    which durations of other shapes are scaled."""
    activations: dict[str, tuple[int, int]] = {}
    """(tokens, bytes of one decoder layer's saved activations), by `MODEL_SHAPE/WORKLOAD_SHAPE`."""
    workspace: dict[str, Workspace] = {}
    """Peak device bytes in addition to the pools and the saved activations, by
    `MODEL_SHAPE/WORKLOAD_SHAPE`."""
    spread: dict[str, float] = {}
    """Interquartile range over median of a measured number. The key is `KIND SIZE` for a curve,
    `KIND SHAPE` for compute, or the path of a field of this table or of HardwareSpec, such as
    `contention.h2d.cpu` or `duplex_curve 1048576`. It is used by `megatrain calibrate --again` and
    for the uncertainty of a predicted step."""

    def __post_init__(self) -> None:
        for key, points in self.curves.items():
            _known(
                f"costs.curves.{key}",
                key.partition("@")[0].removesuffix(":add").removesuffix(":wide"),
                CURVE_KINDS,
            )
            if "@" in key:
                _known(f"costs.curves.{key}", key.partition("@")[2], LANES)
            if not points or any(size < 0 or duration < 0 for size, duration in points):
                raise UserError(
                    f"costs.curves.{key}",
                    found="no point" if not points else "a negative number",
                    allowed="points (size, ns) >= 0",
                    fix=_FIX,
                )
            for (left, _), (right, _) in itertools.pairwise(points):
                if left >= right:
                    raise UserError(
                        f"costs.curves.{key}",
                        found=f"size {right} after {left}",
                        allowed="ascending sizes",
                        fix=_FIX,
                    )
        for kind, durations in self.compute.items():
            _known(f"costs.compute.{kind}", kind, COMPUTE_KINDS + EVALUATION_KINDS)
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
"""Rates of causal flash attention with heads of 128 elements on an H200, measured 2026-11-21
(docs/lab_notes.md, "Flash attention")."""


class AttentionRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of the peak that an attention kernel reaches: efficiency x S / (S + half_tokens)
    for sequences of S tokens.
    """

    efficiency: float
    """Share of the peak for long sequences, (0, 1], forward and backward together. A backward
    counts as 2.5 forwards."""
    half_tokens: int
    """Sequence length at which the kernel reaches half of `efficiency`."""


Curve = tuple[tuple[int, float], ...]
"""Points (bytes of a copy, GB/s), in ascending order of bytes. Between two points, the time is
linear in the bytes."""


class HardwareSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine. GB are 10^9 bytes. Rates are those of one lane while the others are idle."""

    name: str
    """The name of the machine."""
    source: str
    """Where the numbers come from."""
    title: str = ""
    """The name that people write, such as `RTX 4090`. Empty if there is none but `name`."""
    gpu_names: tuple[str, ...] = ()
    """The names that the driver reports for this GPU, such as `NVIDIA GeForce RTX 4090`. A machine
    of the library without them is never recognised."""
    unified: bool = False
    """True if CPU and GPU share one memory, so that nothing is copied. A GPU with its own memory is
    not unified, however fast the link is (GH200, GB200)."""
    device_bytes: int
    """GPU memory that a process can use. On a unified machine, the part of `host_bytes` that the
    GPU can use."""
    host_bytes: int
    """Host memory. On a unified machine, the whole memory."""
    cores: int
    """CPU cores of the host."""
    peak_tflops: dict[str, float]
    """Peak of dense matrix products with fp32 accumulation, in 10^12 FLOP/s by dtype (`bf16`,
    `fp32`)."""
    linear_efficiency: float
    """Share of the peak that the matrix products of a decoder layer reach, (0, 1]."""
    attention_efficiency: float = ATTENTION_EFFICIENCY
    """Share of the peak that attention reaches for long sequences, forward and backward together. A
    backward counts as 2.5 forwards."""
    attention_half_tokens: int = ATTENTION_HALF_TOKENS
    """Sequence length at which attention reaches half of `attention_efficiency`."""
    attention: dict[str, AttentionRate] = {}
    """Rates of the kernels `flash` and `cudnn`, if they differ from the two fields above."""
    device_gb_per_s: float
    """Rate at which a copy within GPU memory reads and writes, both counted."""
    link: str = ""
    """The link, such as `PCIe 5.0 x16` or `NVLink-C2C`. It is for the reader only."""
    h2d_gb_per_s: float
    """Rate of large copies from pinned host memory to the device."""
    d2h_gb_per_s: float
    """Rate of large copies from the device to pinned host memory."""
    link_latency_ns: int = 9000
    """Fixed time of one copy, used without a curve. The default was measured on an H200,
    2026-11-21."""
    h2d_curve: Curve = ()
    """Measured rates of copies to the device, used in place of rate and latency."""
    d2h_curve: Curve = ()
    """Measured rates of copies to the host, used in place of rate and latency."""
    duplex_fraction: float
    """Share of its rate, (0, 1], that each direction of the link keeps while both are busy."""
    duplex_curve: Curve = ()
    """Rate of each direction while both are busy with copies of that size."""
    host_gb_per_s: float
    """Rate at which elementwise ops on all cores (sum of squares, accumulation) read and write."""
    thread_gb_per_s: float
    """Rate at which the copy of one thread reads and writes."""
    cpu_update_per_s: float
    """Parameters per second that the runtime's AdamW updates on the host."""
    cpu_adam_per_s: float
    """Parameters per second that a fused, vectorized AdamW such as DeepSpeed's updates on the host,
    with bf16 weights and gradients and fp32 moments. The host's DRAM limits it."""
    watts: float | None = None
    """Board power of the GPU, or of the whole package of a unified machine."""
    uncertainty: float = 0.25
    """Fraction by which a step predicted from these rates may be longer or shorter: 0.10 if link
    and layers were measured, 0.25 for a datasheet."""
    contention: dict[str, dict[str, float]] = {}
    """The field `contention` of CostTable. Between the two directions of the link it overrides
    `duplex_fraction`."""
    host_memory: HostMemorySpec | None = None
    """The host's DRAM. It replaces the contention between the link and the cpu lane."""
    turns: KernelInterleaving | None = None
    """The sharing of the device. It replaces the contention between compute and update."""
    dispatch_ns: dict[str, int] = {}
    """Time from an op being ready to its start, by lane."""
    costs: CostTable | None = None
    """The calibration of this machine, used in place of the rates above. None for a datasheet."""
    measured_by_others: str = ""
    """The date on which others measured the rates of this machine (`shared.py`). Empty if they are
    estimates, or if `costs` has a calibration."""
    corrections: dict[str, float] = {}
    """Measured divided by predicted duration of a run's ops, as `megatrain train --adapt` found it,
    by `KIND@LANE`, by lane for other kinds on it, and `all` for other lanes."""
    cost_model: str = ""
    """A cost model from outside the package, used in place of the built-in ones: the name that an
    installed package gives it (`megatrain.cost_models`), or the path of a `.py` file."""

    def __post_init__(self) -> None:
        where = f"hardware {self.name}"
        for field, (least, most) in _LIMITS.items():
            _within(f"{where}: {field}", getattr(self, field), least, most)
        for field in _SHARES:
            if not _LEAST_SHARE <= getattr(self, field) <= 1:
                raise UserError(
                    f"{where}: {field}",
                    found=getattr(self, field),
                    allowed=f"above 0 ({_LEAST_SHARE:g}), at most 1",
                    fix=f"correct {field}",
                )
        if not self.peak_tflops:
            raise UserError(
                f"{where}: peak_tflops",
                found="no rate",
                allowed="bf16, fp32",
                fix="add the peak of the dtype that you train in",
            )
        for dtype, peak in self.peak_tflops.items():
            _known(f"{where}: peak_tflops.{dtype}", dtype, ("bf16", "fp32"))
            _within(f"{where}: peak_tflops.{dtype}", peak, 1e-6, 1e6)
        for kernel, reached in self.attention.items():
            _known(f"{where}: attention", kernel, ("flash", "cudnn"))
            _within(f"{where}: attention.{kernel}.efficiency", reached.efficiency, 0.001, 1)
            _within(
                f"{where}: attention.{kernel}.half_tokens",
                reached.half_tokens,
                *_LIMITS["attention_half_tokens"],
            )
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
            alone = max(
                dict(self.h2d_curve).get(size, self.h2d_gb_per_s),
                dict(self.d2h_curve).get(size, self.d2h_gb_per_s),
            )
            if rate > alone:
                raise UserError(
                    f"{where}: duplex_curve",
                    found=f"{rate} GB/s each at {size} bytes",
                    allowed=f"at most the {alone} of one direction alone",
                    fix="correct the curve",
                )
        _check_lanes(where, self.contention, self.dispatch_ns)
        for key, factor in self.corrections.items():
            _known(f"{where}: corrections.{key}", key.rpartition("@")[2], (*LANES, "all"))
            _within(f"{where}: corrections.{key}", factor, 1e-9, 1e9)

    @classmethod
    def load(cls, source: str) -> HardwareSpec:
        """Returns the machine of a TOML file, the library, others, or an installed package.

        `source` is the path of the file, or a name. The library is `simulator/library/hardware`. If
        others measured a machine of it (`shared.py`), their rates replace its estimates. A package
        names machines under the entry point group `megatrain.hardware`. Raises UserError if there
        is no such machine, or if its file is wrong.
        """
        name = hardware_name(source)
        if _is_file(name):
            return read_toml(Path(name), cls)
        if name in library():
            return cls.of_library(name)
        if name in (measured := _only_measured()):
            return measured[name]
        found = plugins.load(GROUP, name)
        if isinstance(found, str | Path):
            return read_toml(Path(found), cls)
        return plugins.load_as(GROUP, name, cls, "a HardwareSpec, or the path of its TOML file")

    @classmethod
    def of_library(cls, name: str) -> HardwareSpec:
        """Returns the machine of the library with this `name`, as others measured it if they did.
        A file of this name is not read.
        """
        return _as_measured(read_toml(library()[name], cls))

    @classmethod
    def of_gpu(cls, gpu: str) -> HardwareSpec | None:
        """Returns the machine of the library, or of others, whose GPU the driver calls `gpu`. None
        if there is none.
        """
        known = _of_gpu(gpu)
        if known is not None:
            return _as_measured(known)
        return next((each for each in _only_measured().values() if gpu in each.gpu_names), None)

    def datasheet_tflops(self, dtype: str) -> float | None:
        """Returns the GPU's peak of matrix products by its datasheet, in 10^12 FLOP/s.

        In a calibration, `peak_tflops` is what a large product reached, so the peak is that of the
        library's machine with the same GPU. None if the library has no such GPU, or if the
        peak of `dtype` is not known.
        """
        sheet: HardwareSpec | None = self
        if self.costs is not None:
            sheet = _of_gpu(self.costs.measured_on)
        elif self.measured_by_others:
            sheet = _of_gpu(self.gpu_names[0])
        return sheet.peak_tflops.get(dtype) if sheet else None


def known_names() -> list[str]:
    """Returns the names of the machines in the library, of others, and of installed packages."""
    return list(dict.fromkeys([*library(), *_only_measured(), *plugins.installed(GROUP)]))


def _as_measured(estimated: HardwareSpec) -> HardwareSpec:
    """Returns a machine of the library as others measured it, or unchanged if nobody did."""
    from megatrain.simulator.hardware.shared import shared_machines

    shared = shared_machines()
    gpu = next((gpu for gpu in estimated.gpu_names if gpu in shared), None)
    return estimated if gpu is None else shared[gpu][1].replacing(estimated)


def _only_measured() -> dict[str, HardwareSpec]:
    """Returns the machines that others measured, without those of which the library has the GPU."""
    from megatrain.simulator.hardware.shared import shared_machines

    return {
        name: machine.machine(name)
        for gpu, (name, machine) in shared_machines().items()
        if _of_gpu(gpu) is None
    }


@functools.cache
def _of_gpu(gpu: str) -> HardwareSpec | None:
    """Returns the machine of the library whose GPU the driver calls `gpu`, or None."""
    for file in library().values():
        # Most files do not have the name, and searching one is faster than parsing it.
        if f'"{gpu}"' in file.read_text(encoding="utf-8"):
            found = read_toml(file, HardwareSpec)
            if gpu in found.gpu_names:
                return found
    return None


def _known(where: str, found: str, allowed: tuple[str, ...]) -> None:
    """Raises UserError if `found` is not one of `allowed`."""
    if found not in allowed:
        raise UserError(
            where,
            found=repr(found),
            allowed=", ".join(allowed),
            fix="correct its spelling, or remove it",
        )


_RATES = ("device_gb_per_s", "h2d_gb_per_s", "d2h_gb_per_s", "host_gb_per_s", "thread_gb_per_s")
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_RATES, (0.001, 1000000.0)),
    "device_bytes": (2**20, 2**60),
    "host_bytes": (2**20, 2**60),
    "h2d_gb_per_s": (0.001, 5000.0),
    "d2h_gb_per_s": (0.001, 5000.0),
    "cores": (1, 2**16),
    "cpu_update_per_s": (1, 1e15),
    "cpu_adam_per_s": (1, 1e15),
    "attention_half_tokens": (0, 2**20),
    "link_latency_ns": (0, 10**9),
    "watts": (0.001, 1e6),
    "uncertainty": (0, 0.9),
}
"""Limits that hold for every machine. A number outside of them is probably in the wrong unit."""
_LEAST_SHARE = 1e-6  # layers of an 11 M model reach 5e-4 of an H200's peak
_SHARES = ("linear_efficiency", "attention_efficiency", "duplex_fraction")


def _within(where: str, found: float | None, least: float, most: float) -> None:
    """Raises UserError if `found` is neither None nor between `least` and `most`."""
    if found is not None and not least <= found <= most:  # also true for NaN
        number = "a number" if least == 0 else "a positive number"
        raise UserError(
            where,
            found=found,
            allowed=f"{number}, {least:g} to {most:g}",
            fix=f"correct {where.rpartition(' ')[2]}",
        )


def _check_curve(where: str, points: Curve) -> None:
    """Raises UserError if sizes are not ascending or a larger copy takes less time."""
    for size, rate in points:
        if not 1 <= size <= 2**60:
            raise UserError(
                where, found=f"a copy of {size} bytes", allowed=f"1 to {2**60}", fix=_FIX
            )
        _within(where, rate, 0.001, 1e6)
    for (left, slow), (right, fast) in itertools.pairwise(points):
        if left >= right:
            raise UserError(
                where, found=f"{right} bytes after {left}", allowed="ascending bytes", fix=_FIX
            )
        if left / slow > (1 + 1e-9) * right / fast:  # rates are rounded
            raise UserError(
                where,
                found=f"{right} bytes in less time than {left}",
                allowed="larger copies that take longer",
                fix=_FIX,
            )


def _at_least(where: str, found: int, least: int) -> None:
    """Raises UserError if `found` is less than `least`."""
    if found < least:
        raise UserError(where, found=found, allowed=f">= {least}", fix="correct this value")


def _check_lanes(
    where: str, contention: dict[str, dict[str, float]], dispatch_ns: dict[str, int]
) -> None:
    """Raises UserError if a lane is unknown or a value is out of range."""
    for lane, others in contention.items():
        _known(f"{where}: contention", lane, LANES)
        for other, rate in others.items():
            alone = tuple(name for name in LANES if name != lane)
            _known(
                f"{where}: contention.{lane}",
                other,
                (*alone, *([DRAM_LANES[lane]] if lane in DRAM_LANES else [])),
            )
            if not 0.001 <= rate <= 1:
                raise UserError(
                    f"{where}: contention.{lane}.{other}",
                    found=rate,
                    allowed="a rate from 0.001 to 1",
                    fix="give the share of its speed that the lane keeps",
                )
    for lane, latency in dispatch_ns.items():
        _known(f"{where}: dispatch_ns", lane, LANES)
        _at_least(f"{where}: dispatch_ns.{lane}", latency, 0)


def library() -> dict[str, Path]:
    """Returns the files of the library's machines by name."""
    folder = Path(__file__).parents[1] / "library" / "hardware"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def hardware_name(source: str) -> str:
    """Returns the name of the machine that `source` means (`base/names.py`), or the path of a file.

    Raises UserError if there is no such file or name.
    """
    if _is_file(source):
        return source
    known = known_names()
    if name := meant(source, known):
        return name
    raise UserError(
        f"hardware {source}",
        found="no such file or machine",
        allowed="a calibrated TOML file, or a name that `megatrain list hardware` prints, such as"
        " h200",
        fix=suggestion(source, known, "check the path or the name"),
    )


def _is_file(source: str) -> bool:
    """Returns whether `source` is a path. A path that exists is preferred to a name."""
    return Path(source).suffix == ".toml" or os.path.exists(source)
