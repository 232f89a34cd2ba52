"""HardwareSpec: a machine, from its datasheet or as measured (`cost_table.py`).

It describes one GPU, its link and its host: rates, memory sizes, and how much busy lanes slow each
other down. `several` has what several GPUs of the host do to each other, if that was measured. NUMA
nodes, disks, temperature, and the time that a kernel launch takes are not described.

While other lanes are busy, a lane runs at this share of its full speed:

    rate(lane) = product over the other busy lanes of contention[lane][other]

A pair that is not in `contention` has the factor 1. If a HostMemorySpec is given, it replaces the
factors between the link and the CPU, which share the host's DRAM. If a KernelInterleaving is given,
it replaces the factors between compute and update. `costs/contention.py` applies all of them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, get_args

import msgspec

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_toml
from megatrain.simulator.base.names import meant, suggestion
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.limits import (
    at_least,
    check_curve,
    check_lanes,
    refuse_unknown,
    within,
)
from megatrain.simulator.hardware.rates import Rates
from megatrain.simulator.hardware.several_gpus import SeveralGpus, check_measured_counts, nearest
from megatrain.simulator.hardware.shared import (
    SharedMachine,
    check_date,
    machines_folder,
    shared_machines,
)
from megatrain.simulator.model.workload import Kernel
from megatrain.simulator.schedule import LANES
from megatrain.simulator.schedule.plan import MOST_NETWORK_GB_PER_S

GROUP = "megatrain.hardware"
"""The entry point group of machines that installed packages define."""
ATTENTION_EFFICIENCY, ATTENTION_HALF_TOKENS = 0.337, 970
"""Defaults of `AttentionRate`: causal flash attention with heads of 128 elements on an H200,
measured 2026-11-21 (docs/lab_notes.md, "Flash attention")."""
MOST_HALF_TOKENS = 2**20
"""The highest `AttentionRate.half_tokens` that a machine may have."""
_SIMILAR = 0.7
"""The `similar_share` of names of machines (`base/names.py`). With 0.6, names of other GPUs are
similar, such as `rtx 6000 ada` and `a6000`."""
_FP8_SHARE = 0.925
"""The share of the peak that fp8 products reach, divided by the share that bf16 products reach. On
an H200, whose fp8 peak is twice its bf16 peak, fp8 products were 1.85 times as fast
(docs/lab_notes.md, "fp8 products"). The number is used for every machine."""


class AttentionRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of the peak that an attention kernel reaches: efficiency x S / (S + half_tokens)
    for sequences of S tokens.
    """

    efficiency: float
    """Share of the peak for long sequences, (0, 1], forward and backward together. The FLOPs of a
    backward count as 2.5 times those of a forward."""
    half_tokens: int
    """Sequence length in tokens at which the kernel reaches half of `efficiency`."""

    @classmethod
    def usual(cls) -> AttentionRate:
        """Returns the rate of a machine whose attention was not measured."""
        return cls(efficiency=ATTENTION_EFFICIENCY, half_tokens=ATTENTION_HALF_TOKENS)


COLLECTIVE_BYTES = 1292 * 2**20
"""The default of `HardwareSpec.collective_bytes`, measured on two H100 with NVLink, 2026-11-26."""
COLLECTIVE_PEER_BYTES = 446 * 2**20
"""The default of `HardwareSpec.collective_peer_bytes`, measured on H100s with NVLink, 2026-11-26
and 28."""


class HardwareSpec(Rates, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine. Raises UserError if a name is unknown or a number is out of range."""

    name: str
    """The name of the machine."""
    source: str
    """Where the numbers come from."""
    title: str = ""
    """The name that people write, such as `RTX 4090`. Empty if it is `name`."""
    gpu_names: tuple[str, ...] = ()
    """The names that the driver reports for this GPU, such as `NVIDIA GeForce RTX 4090`. A machine
    in the library without such a name is never recognised."""
    unified: bool = False
    """True if CPU and GPU share one memory, so that nothing is copied. A GPU with its own memory is
    not unified, however fast the link is (GH200, GB200). The rates of the link are not used on a
    unified machine."""
    peak_tflops: dict[str, float]
    """Peak of dense matrix products with fp32 accumulation, in 10^12 FLOP/s by dtype (`bf16`,
    `fp32`, `fp8`). A machine without `fp8` has no fp8 matrix products."""
    attention_efficiency: float = ATTENTION_EFFICIENCY
    """`AttentionRate.efficiency` of the kernels that are not in `attention`."""
    attention_half_tokens: int = ATTENTION_HALF_TOKENS
    """`AttentionRate.half_tokens` of the kernels that are not in `attention`."""
    attention: dict[str, AttentionRate] = msgspec.field(default_factory=dict)
    """Kernel -> its rate, if it differs from the two fields above. The kernels are `flash`, `cudnn`
    and `flash4`. A machine without a rate for `flash4` does not have this kernel."""
    cuda: bool = True
    """Whether PyTorch uses the GPU as a CUDA device, so that the runtime can train on it. PyTorch
    for ROCm does. Other machines are for prediction only."""
    attention_kernels: tuple[Kernel, ...] | None = None
    """The attention kernels that the GPU can have. If it is None, as for NVIDIA's GPUs, these are
    all kernels."""
    link: str = ""
    """The link, such as `PCIe 5.0 x16` or `NVLink-C2C`. With `C2C` in its name, each GPU has host
    memory of its own."""
    link_latency_ns: int = 9000
    """Fixed time of one copy in nanoseconds. It is used if there is no curve. The default was
    measured on an H200, 2026-11-21."""
    peer_gb_per_s: float | None = None
    """GB/s that each GPU receives from the other GPUs of its host in a collective. If it is None,
    the rate of the link to the host is used."""
    network_gb_per_s: float | None = None
    """GB/s that the host receives from other hosts. Its GPUs share this rate. A plan for several
    hosts is refused if it is None here and in the plan."""
    network_latency_ns: int = 20_000
    """Fixed time of one exchange between hosts in nanoseconds. The default is assumed, not
    measured."""
    watts: float | None = None
    """Board power of the GPU, or of the whole package of a unified machine, in watts."""
    library_bytes: int = 0
    """GPU memory that libraries for matrix products keep, in bytes, and what PyTorch's allocator
    gives a tensor beyond its size: it does not split a block if less than 1 MiB would be left. A
    measured workspace includes both."""
    collective_bytes: int | None = None
    """GPU memory that NCCL keeps on each of two GPUs, in bytes. If it is None, `COLLECTIVE_BYTES`,
    but 0 in a calibration. Calibrations state it since 2026-11-29."""
    collective_peer_bytes: int | None = None
    """GPU memory that NCCL keeps on each GPU for each GPU beyond the second, in bytes. If it is
    None, `COLLECTIVE_PEER_BYTES`, but 0 in a calibration."""
    several: tuple[SeveralGpus, ...] = ()
    """Measurements of several GPUs of this host at the same time, one for each number of GPUs, in
    ascending order. They are used instead of `peer_gb_per_s`, `collective_bytes` and constants."""
    uncertainty: float = 0.25
    """Fraction by which a step predicted from these rates may be longer or shorter: 0.10 if link
    and layers were measured, 0.25 for a datasheet."""
    costs: CostTable | None = None
    """The calibration of this machine, used instead of the rates. None for a datasheet."""
    measured_by_others: str = ""
    """The date on which others measured the rates of this machine (`shared.py`), which then has
    `gpu_names`. Empty if they are estimates, or if `costs` has a calibration."""
    corrections: dict[str, float] = msgspec.field(default_factory=dict)
    """Measured divided by predicted duration of a run's ops, from `megatrain train --adapt`. The
    key is `KIND@LANE`, a lane for the other kinds on it, or `all` for the other lanes."""
    cost_model: str = ""
    """A cost model from outside the package, used instead of the built-in ones: the name that an
    installed package gives it (`megatrain.cost_models`), or the path of a `.py` file. In a TOML
    file, the path is relative to the file."""

    def __hash__(self) -> int:
        return hash(self.name)

    def __post_init__(self) -> None:
        where = f"hardware {self.name}"
        for field, (least, most) in _LIMITS.items():
            within(f"{where}: {field}", getattr(self, field), least, most)
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
            refuse_unknown(f"{where}: peak_tflops.{dtype}", dtype, ("bf16", "fp32", "fp8"))
            within(f"{where}: peak_tflops.{dtype}", peak, 1e-6, 1e6)
        for kernel, reached in self.attention.items():
            refuse_unknown(f"{where}: attention", kernel, get_args(Kernel))
            within(f"{where}: attention.{kernel}.efficiency", reached.efficiency, 0.001, 1)
            within(
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
            check_curve(f"{where}: {field}", getattr(self, field))
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
        check_lanes(where, self.contention, self.dispatch_ns)
        at_least(f"{where}: step_overhead_ns", self.step_overhead_ns, 0)
        if self.measured_by_others:
            check_date(f"{where}: measured_by_others", self.measured_by_others)
            if not self.gpu_names:
                raise UserError(
                    f"{where}: measured_by_others",
                    found=f"{self.measured_by_others}, without gpu_names",
                    allowed="a date like 2026-11-23 of a machine with gpu_names, or nothing",
                    fix="add the name that the driver reports to gpu_names, or leave it out",
                )
        check_measured_counts(f"{where}: several", self.several)
        for key, factor in self.corrections.items():
            refuse_unknown(f"{where}: corrections.{key}", key.rpartition("@")[2], (*LANES, "all"))
            within(f"{where}: corrections.{key}", factor, 1e-9, 1e9)

    def with_network(self, gb_per_s: float | None) -> HardwareSpec:
        """Returns the machine with `network_gb_per_s`, or unchanged for None. Raises UserError if
        the rate is out of range.
        """
        if gb_per_s is None:
            return self
        return msgspec.structs.replace(self, network_gb_per_s=gb_per_s)

    def memory_limits(
        self, device_limit: int | None = None, host_limit: int | None = None
    ) -> tuple[int, int]:
        """Returns the limits of device and host memory of a plan for this machine, in bytes.

        A limit that is None is set to the memory of the machine. On a unified machine, both limits
        are set to the lower one, because they limit the same memory.
        """
        device = self.device_bytes if device_limit is None else device_limit
        host = self.host_bytes if host_limit is None else host_limit
        return (min(device, host),) * 2 if self.unified else (device, host)

    def with_cores(self, cores: int) -> HardwareSpec:
        """Returns the machine with `cores` cores. With fewer cores, the rates of the CPU optimizer
        are scaled in proportion. With more, they stay, because DRAM limits them: DeepSpeed's and
        PyTorch's AdamW were hardly faster on a host with 32 cores than a host with 16 is predicted
        (experiments/results/h100-x2-qwen2.5-7b).

        Raises UserError if the machine was measured with another number of cores.
        """
        if self.costs is not None and cores != self.cores:
            raise UserError(
                "--cores",
                found=cores,
                allowed=f"{self.cores}, the number with which {self.name} was measured",
                fix="calibrate on the other machine, or leave --cores out",
            )
        share = min(cores / self.cores, 1)
        return msgspec.structs.replace(
            self,
            cores=cores,
            cpu_update_per_s=self.cpu_update_per_s * share,
            cpu_adam_per_s=self.cpu_adam_per_s * share,
        )

    def shared(self, cpu: str, version: str) -> SharedMachine:
        """Returns the part of the calibration that can be shared. The machine must have one.

        Args:
            cpu: The name of the processor.
            version: The version of megatrain that measured.
        """
        table = self.costs
        assert table is not None, "a datasheet is not a measurement"
        ((dtype, rate),) = (pair for pair in self.peak_tflops.items() if pair[0] != "fp8")
        known: dict[str, Any] = {field: getattr(self, field) for field in Rates.__struct_fields__}
        for field in ("contention", "host_memory", "turns", "dispatch_ns", "step_overhead_ns"):
            known[field] = getattr(table, field)
        return SharedMachine(
            gpu=table.measured_on,
            cpu=cpu,
            date=table.date,
            megatrain=version,
            dtype="bf16" if dtype == "bf16" else "fp32",
            matrix_tflops=rate,
            **known,
        )

    @classmethod
    def load(cls, source: str) -> HardwareSpec:
        """Returns the machine of a TOML file, or the machine with a name.

        A name is searched in the library (`simulator/library/hardware`), in the machines that other
        users measured (`shared.py`), and in the entry point group `megatrain.hardware` of installed
        packages. Measurements of a library machine by other users replace its estimates. Raises
        UserError if there is no such machine, or if its file cannot be used.

        Args:
            source: The path of the file, or the name.
        """
        name = hardware_name(source)
        if _is_file(name):
            return _of_file(Path(name))
        if name in library():
            return cls.of_library(name)
        if name in (measured := _only_measured()):
            return measured[name]
        found = plugins.load(GROUP, name)
        if isinstance(found, str | Path):
            return _of_file(Path(found))
        return plugins.load_as(GROUP, name, cls, "a HardwareSpec, or the path of its TOML file")

    @classmethod
    def of_library(cls, name: str) -> HardwareSpec:
        """Returns the library machine `name`, with the rates that other users measured, if there
        are any. Unlike `load`, it never reads a file at the path `name`.
        """
        return _as_measured(read_toml(library()[name], cls))

    @classmethod
    def of_gpu(cls, gpu: str) -> HardwareSpec | None:
        """Returns the machine with a GPU that the driver calls `gpu`, from the library or measured
        by other users, or None if there is none.
        """
        known = _of_gpu(gpu)
        if known is not None:
            return _as_measured(known)
        return next(
            (machine for machine in _only_measured().values() if gpu in machine.gpu_names), None
        )

    def collectives(self, gpus: int) -> int:
        """Returns the GPU memory that NCCL keeps on each of `gpus` GPUs, in bytes.

        If another number of GPUs was measured, `collective_peer_bytes` are added or subtracted for
        each GPU more or less.
        """
        if gpus == 1:
            return 0
        of_two, of_peer = (
            (0 if self.costs else usual) if stated is None else stated
            for stated, usual in (
                (self.collective_bytes, COLLECTIVE_BYTES),
                (self.collective_peer_bytes, COLLECTIVE_PEER_BYTES),
            )
        )
        measured = self.measured_together(gpus)
        known, size = (measured.gpus, measured.collective_bytes) if measured else (2, of_two)
        return max(size + (gpus - known) * of_peer, 0)

    def measured_together(self, gpus: int) -> SeveralGpus | None:
        """Returns the measurement that predictions for `gpus` GPUs use, the nearest one of
        `several`, or None if there is none or `gpus` is 1.
        """
        return nearest(self.several, gpus)

    def datasheet_tflops(self, dtype: str) -> float | None:
        """Returns the peak of the GPU's matrix products by its datasheet, in 10^12 FLOP/s. None if
        the library has no such GPU, or if the peak of `dtype` is not known.

        In a calibration, `peak_tflops` is the rate that a large product reached. The peak is then
        taken from the library machine with the same GPU.
        """
        sheet: HardwareSpec | None = self
        if self.costs is not None:
            sheet = _of_gpu(self.costs.measured_on)
        elif self.measured_by_others:
            sheet = _of_gpu(self.gpu_names[0])
        return sheet.peak_tflops.get(dtype) if sheet else None

    def fp8_speed(self) -> float | None:
        """Returns the speed of the machine's fp8 products relative to bf16 products. None if it has
        no fp8 products, or if their rate is not known.

        It is measured if the calibration has both rates. Otherwise it follows from the datasheet.
        """
        if self.costs is not None and {"bf16", "fp8"} <= self.peak_tflops.keys():
            return self.peak_tflops["fp8"] / self.peak_tflops["bf16"]
        fp8, bf16 = self.datasheet_tflops("fp8"), self.datasheet_tflops("bf16")
        return _FP8_SHARE * fp8 / bf16 if fp8 and bf16 else None


def known_names() -> list[str]:
    """Returns the names of the machines in the library, those that other users measured, and those
    of installed packages.
    """
    return list(dict.fromkeys([*library(), *_only_measured(), *plugins.installed(GROUP)]))


def _of_file(path: Path) -> HardwareSpec:
    """Returns the machine of a TOML file. A file of its cost model is found relative to the folder
    of `path`.

    Raises UserError if the file cannot be used. For a file of `calibrate --share`, which has
    another format, the error names the folder where such files belong.
    """
    try:
        machine = read_toml(path, HardwareSpec)
        if machine.cost_model.endswith(".py"):
            found = plugins.path_in(path.parent, machine.cost_model)
            machine = msgspec.structs.replace(machine, cost_model=found)
        return machine
    except UserError:
        try:
            shared = read_toml(path, SharedMachine)
        except UserError:
            shared = None
        if shared is None:
            raise
        raise UserError(
            str(path),
            found=f"a file of `megatrain calibrate --share`, measured on {shared.gpu}",
            allowed="a file of `megatrain calibrate --out`, or the name of a machine",
            fix=f"put it into {machines_folder()}, or the folder that MEGATRAIN_MACHINES names,"
            " and name the machine that `megatrain list hardware` then prints",
        ) from None


def _as_measured(estimated: HardwareSpec) -> HardwareSpec:
    """Returns a library machine with the rates that other users measured, or unchanged if there are
    none.

    The peak stays that of the datasheet, and `linear_efficiency` becomes a share of this peak.
    """
    measured = shared_machines(_of_others)
    gpu = next((gpu for gpu in estimated.gpu_names if gpu in measured), None)
    if gpu is None:
        return estimated
    machine = measured[gpu][1]
    rates = machine.rates()
    del rates["linear_efficiency"]
    if peak := estimated.peak_tflops.get(machine.dtype):
        share = machine.linear_efficiency * machine.matrix_tflops / peak
        rates["linear_efficiency"] = min(max(share, _LEAST_SHARE), 1.0)
    if estimated.unified:
        rates["device_bytes"] = min(machine.device_bytes, machine.host_bytes)
    return msgspec.structs.replace(estimated, **rates)


def _only_measured() -> dict[str, HardwareSpec]:
    """Returns name -> machine for the machines that other users measured and whose GPU is not in
    the library.
    """
    return {
        name: _of_others(name, machine)
        for gpu, (name, machine) in shared_machines(_of_others).items()
        if _of_gpu(gpu) is None
    }


def _of_others(name: str, machine: SharedMachine) -> HardwareSpec:
    """Returns a machine that other users measured, as a HardwareSpec called `name`.

    Raises UserError if `name` means a library machine with another GPU, because then only the
    library machine could be found by this name.
    """
    if _of_gpu(machine.gpu) is None and (taken := meant(name, library())):
        raise UserError(
            "name of the file",
            found=f"the name of the library's {taken}, whose GPU is not {machine.gpu}",
            allowed="a name that the library does not have",
            fix="rename it",
        )
    return HardwareSpec(
        name=name,
        title=machine.gpu,
        gpu_names=(machine.gpu,),
        peak_tflops={machine.dtype: machine.matrix_tflops},
        **machine.rates(),
    )


@functools.cache
def _of_gpu(gpu: str) -> HardwareSpec | None:
    """Returns the machine of the library whose GPU the driver calls `gpu`, or None."""
    for file in library().values():
        # Searching a file for the name is faster than parsing it, and most files do not have it.
        if f'"{gpu}"' in file.read_text(encoding="utf-8"):
            machine = read_toml(file, HardwareSpec)
            if gpu in machine.gpu_names:
                return machine
    return None


_RATES = ("device_gb_per_s", "h2d_gb_per_s", "d2h_gb_per_s", "host_gb_per_s", "thread_gb_per_s")
_LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_RATES, (0.001, 1000000.0)),
    "device_bytes": (2**20, 2**60),
    "library_bytes": (0, 2**40),
    "collective_bytes": (0, 2**40),
    "collective_peer_bytes": (0, 2**40),
    "host_bytes": (2**20, 2**60),
    "h2d_gb_per_s": (0.001, 5000.0),
    "d2h_gb_per_s": (0.001, 5000.0),
    "cores": (1, 2**16),
    "cpu_update_per_s": (1, 1e15),
    "cpu_adam_per_s": (1, 1e15),
    "attention_half_tokens": (0, MOST_HALF_TOKENS),
    "link_latency_ns": (0, 10**9),
    "network_gb_per_s": (0.001, MOST_NETWORK_GB_PER_S),
    "network_latency_ns": (0, 10**9),
    "watts": (0.001, 1e6),
    "uncertainty": (0, 0.9),
}
"""Field -> (lowest, highest) value for every machine. A number outside of these limits is probably
in the wrong unit."""
_LEAST_SHARE = 1e-6  # layers of an 11 M model reach 5e-4 of an H200's peak
_SHARES = ("linear_efficiency", "attention_efficiency", "duplex_fraction")


def library() -> dict[str, Path]:
    """Returns name -> file of the library's machines."""
    folder = Path(__file__).parents[1] / "library" / "hardware"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def hardware_name(source: str) -> str:
    """Returns the name of the machine that `source` means (`base/names.py`), or the path of a file.

    `source` may also be a name that the driver reports for the GPU of one machine. Raises UserError
    if there is no such file or name.
    """
    if _is_file(source):
        return source
    known = known_names()
    if name := meant(source, known):
        return name
    gpus = _gpu_names()
    if name := meant(source, known, gpus):
        return name
    raise UserError(
        f"hardware {source}",
        found="no such file or machine",
        allowed="a calibrated TOML file, or a name that `megatrain list hardware` prints, such as"
        " h200",
        fix=suggestion(source, known, "check the path or the name", gpus, _SIMILAR),
    )


def _gpu_names() -> dict[str, str]:
    """Returns name that the driver reports for a GPU -> name of its machine, for the machines of
    the library and those that other users measured.
    """
    machines = [read_toml(file, HardwareSpec) for file in library().values()]
    machines += _only_measured().values()
    return {gpu: machine.name for machine in machines for gpu in machine.gpu_names}


def is_calibrated(file: Path) -> bool:
    """Returns whether `file` describes a machine with a calibration. False if the file is missing
    or damaged.
    """
    try:
        return "costs" in read_toml(file, dict)
    except UserError:
        return False


def _is_file(source: str) -> bool:
    """Returns whether `source` is a path: it ends in `.toml`, or there is such a file or folder."""
    return Path(source).suffix == ".toml" or os.path.exists(source)
