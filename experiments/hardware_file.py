"""Hardware file: a measured machine as a TOML file that says, section by section, what its numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megatrain.simulator.files import write_toml
from megatrain.simulator.hardware import HardwareSpec

_HEADING = """A machine, measured by `{command}`. GB are 10^9 bytes; ns are 10^-9 s.
Each measured number is a median or a mean; costs.spread, the last section, has under its name the interquartile range of its repeats over their median.
`megatrain calibrate --again` measures all of it anew, and says whether the two agree within these spreads.
Derived, so without a spread: what begins with h2d and d2h, link_latency_ns, cpu_update_per_s (from costs.curves), duplex_fraction (from costs.contention),
linear_efficiency (from costs.compute). Bytes are counted, and have none either.
attention_efficiency and attention_half_tokens are an H200's, not measured here; uncertainty is stated, of what is predicted from the rates alone."""
_COMMENTS = {
    "h2d_curve": "[bytes of a copy, GB/s], to the device and to the host",
    "duplex_curve": "[bytes of a copy, GB/s of each direction while both are busy]",
    "peak_tflops": "What a large matrix product reaches, 10^12 FLOP/s, by dtype.",
    "costs": "What was measured op by op: used instead of the rates above. process_bytes: host memory that a process takes beside its pools.",
    "costs.fixed": "What one launch of a kernel and one recording of an event cost the host, and the rates of new pages; for the reader alone.",
    "costs.dispatch_ns": "Of each lane, ns from an op being ready to its start.",
    "costs.contention": "Of each lane, the share of its speed that it keeps while the other lane is busy too; h2d+d2h: while both are.\n"
    "1 where it is less than two standard errors from that.",
    "costs.turns": "How updates and layers share the device: ns that an update waits for its turn, and what compute loses of its speed\n"
    "for each share of its own that the update has. Used instead of the contention between the two.",
    "costs.host_memory": "The host's DRAM, as fitted once: instead of the contention between the link and the cpu lane.",
    "costs.curves": "[size, ns] by kind of op. The size is bytes for load_weights and save_gradients, which stand for every copy to the device and to the host,\n"
    "and parameters for all others; 0 for what has none. KIND@LANE: on that lane instead of its usual one. KIND:add: onto a sum. KIND:wide: of an fp32 gradient.",
    "costs.compute": "[amount, ns] by kind of op and shape. Another shape's time is in proportion to the amount: FLOPs, or elements of an embedding.\n"
    "A shape is FAMILY-HIDDENxMLP-HEADS:KEY_VALUE_HEADSxHEAD_SIZE-vVOCABULARY/BATCHxSEQUENCE-DTYPE. -kept: without the attention, which\n"
    "was kept; -compiled: by torch.compile; -documents: several in a row, kept apart.",
    "costs.activations": "[tokens, bytes that one decoder layer saves for its backward] by shape.",
    "costs.workspace": "Peak device bytes that ops take besides the plan's pools and what is saved: in a decoder layer, in head or embedding, in the optimizer.",
    "costs.spread": "Interquartile range over median, by the name of the number: `KIND SIZE` and `KIND SHAPE` stand for those of costs.curves and costs.compute.",
}
"""key or section -> what stands above the first of it"""


def write_hardware(path: Path, hardware: HardwareSpec, command: str) -> None:
    """`hardware`, measured by `command`, at `path`, atomically; what is empty is left out. Reads back equal with `HardwareSpec.load`."""
    told = _without_empty(msgspec.to_builtins(hardware))
    if "costs" in told:
        told["costs"] = _without_empty(told["costs"])
    write_toml(path, told, _HEADING.format(command=command), _COMMENTS)


def _without_empty(table: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if value not in ("", [], (), {}, None)}
