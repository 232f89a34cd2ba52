"""Writes a measured machine as a TOML file, with comments that explain each section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megatrain.simulator.base.files import write_toml
from megatrain.simulator.base.plugins import path_from
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.hardware.shared import SharedMachine

_HEADING = """A machine, measured by `{command}`. 1 GB is 10^9 bytes, and 1 ns is 10^-9 s.
Each measured number is a median or a mean. Its spread is in costs.spread, the last section,
under the same name: the interquartile range of the repeats divided by their median.
`megatrain calibrate --again` measures the machine once more and reports whether the two
calibrations agree within these spreads.
Derived numbers have no spread. From costs.curves: keys that begin with h2d or d2h,
link_latency_ns and cpu_update_per_s. From costs.contention: duplex_fraction.
From costs.compute: linear_efficiency. From costs.attention: attention_efficiency and
attention_half_tokens; without it, they are those of an H200.
Bytes are counted and have no spread either.
uncertainty is an assumption, and applies to predictions that use the rates only."""
_SHARED = """A machine, measured by `megatrain calibrate --share`. 1 GB is 10^9 bytes.
The file has no name of a person or a host, and no path. In ~/.config/megatrain/machines, or in the
folder that MEGATRAIN_MACHINES names, it replaces the library's estimates of the machine with this
GPU."""
_TOGETHER = """A machine, with measurements of several of its GPUs together by `{command}`.
1 GB is 10^9 bytes, and 1 ns is 10^-9 s. `source` says where all other numbers come from."""
_CORRECTED = (
    """The machine of a plan, corrected by `{command}`, which measured the operations of a run."""
)
_COMMENTS = {
    "corrections": (
        "Measured divided by predicted duration, by KIND@LANE, by lane for other kinds on it, and\n"
        "`all` for other lanes."
    ),
    "h2d_curve": "[bytes of a copy, GB/s], to the device (h2d) and to the host (d2h)",
    "duplex_curve": "[bytes of a copy, GB/s of each direction while both are busy]",
    "peak_tflops": "Speed of a large matrix product in 10^12 FLOP/s, by dtype.",
    "several": (
        "What several GPUs do to each other while all of them work, for the slowest GPU.\n"
        "h2d and d2h: copies of copy_bytes over the link of each GPU, in one or both directions.\n"
        "gather and exchange: all-gathers of weights and all-to-alls of gradients take latency_ns\n"
        "plus the received bytes / gb_per_s. sum_gb_per_s: the sum of received gradients.\n"
        "compute_beside: the share of its speed that compute keeps. wait: how much longer a\n"
        "kernel takes beside compute, relative to the longest matrix product.\n"
        "several.spread: interquartile range divided by the median. For gather and exchange, the\n"
        "sum over all sizes, or that of the differences from the formula, divided by all times."
    ),
    "costs": (
        "Durations of measured operations, which are used instead of the rates above.\n"
        "process_bytes: host memory of a process besides its pools.\n"
        "host_factors: times of the CPU optimizer in short windows, divided by the times in the\n"
        "curves. Each is equally likely."
    ),
    "costs.fixed": (
        "Host time of one kernel launch, of one function that autograd calls and of recording one\n"
        "event, and the rates at which new pages are allocated. Predictions use launch_ns and\n"
        "backward_call_ns only."
    ),
    "costs.attention": (
        "The attention kernel alone, by its heads: tokens of a causal sequence, ns of a forward,\n"
        "and ns of a backward."
    ),
    "costs.dispatch_ns": "By lane, the ns from an operation being ready to its start.",
    "costs.contention": (
        "By pair of lanes, the share of its speed that the first keeps while the second is busy.\n"
        "h2d+d2h: while both copy lanes are busy. 1 where the measured share differs from 1 by\n"
        "less than two standard errors."
    ),
    "costs.turns": (
        "How updates and layers share the GPU: the ns that an update waits for its turn, and the\n"
        "loss of compute's speed for each share of its own speed that the update has.\n"
        "Used instead of the contention between these two lanes."
    ),
    "costs.host_memory": (
        "Bandwidth of the host's DRAM, fitted once. Used instead of the contention between the\n"
        "link and the cpu lane."
    ),
    "costs.curves": (
        "[size, ns] by kind of operation. The size is in bytes for load_weights and\n"
        "save_gradients, which represent all copies to the device and to the host, and in\n"
        "parameters for other kinds. It is 0 for kinds without a size.\n"
        "KIND@LANE: on this lane instead of the usual one. KIND:add: added to a sum.\n"
        "KIND:wide: with fp32 gradients."
    ),
    "costs.compute": (
        "[amount, ns] by kind of operation and shape. The amount is in FLOPs, or in elements for\n"
        "an embedding. A shape is\n"
        "FAMILY-HIDDENxMLP-HEADS:KEY_VALUE_HEADSxHEAD_SIZE-vVOCABULARY/BATCHxSEQUENCE-DTYPE.\n"
        "-kept: with saved attention, so that it is not recomputed. -fp8: with fp8 products, and\n"
        "how they are scaled. -compiled: by torch.compile. -documents: with several documents in\n"
        "a row, kept apart."
    ),
    "costs.activations": "[tokens, bytes that one decoder layer saves for its backward] by shape.",
    "costs.workspace": (
        "Peak device bytes of operations besides the plan's pools and the saved activations: in a\n"
        "decoder layer, in head or embedding, and in the optimizer."
    ),
    "costs.spread": (
        "Interquartile range divided by the median, by the name of the number. `KIND SIZE` and\n"
        "`KIND SHAPE` are numbers of costs.curves and costs.compute."
    ),
}
"""Key or section -> the comment above it."""


def write_hardware(path: Path, hardware: HardwareSpec, command: str) -> None:
    """Writes `hardware` to the TOML file `path` in one atomic operation. The heading names
    `command`, which measured or corrected the machine.

    Empty fields are left out. `HardwareSpec.load` returns an equal value. A file of its cost model
    is written relative to the folder of `path`.
    """
    plain = msgspec.to_builtins(hardware)
    if hardware.cost_model.endswith(".py"):
        plain["cost_model"] = path_from(path.parent, hardware.cost_model)
    content = _without_empty({"name": hardware.name, "source": hardware.source, **plain})
    if "costs" in content:
        content["costs"] = _without_empty(content["costs"])
    heading = _CORRECTED if hardware.corrections else _HEADING if hardware.costs else _TOGETHER
    write_toml(path, content, heading.format(command=command), _COMMENTS)


def write_shared(path: Path, machine: SharedMachine) -> None:
    """Writes the part of a calibration that may be shared to the TOML file `path` in one atomic
    operation.
    """
    plain = msgspec.to_builtins(machine)
    first = {name: plain[name] for name in ("format", "gpu", "cpu", "date", "megatrain")}
    write_toml(path, _without_empty({**first, **plain}), _SHARED, _COMMENTS)


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value not in ("", [], (), {}, None)}
