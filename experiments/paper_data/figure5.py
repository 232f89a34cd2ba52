"""Figure 5: speed and memory by depth, 28 to 180 layers of 7B's width on a GH200. The simulation
takes about 20 s.

`device` has the peak of device memory at each depth with the same batch, which shows whether it
depends on depth. A batch of `rows` is the paper's, or fills the device.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from megatrain.experiments.paper_data.answers import paper_schedule, stated_format
from megatrain.experiments.paper_data.published_vs_ours import (
    published,
    published_vs_ours,
    unpublished,
)
from megatrain.experiments.validation.predict import predict
from megatrain.experiments.validation.rows import load_settings

BATCH, SEQUENCE = 32, 1024
PEERS = {
    "code": "megatrain_code",
    "zero3_offload": "zero3_offload",
    "fsdp2_offload": "fsdp2_offload",
}


def simulate() -> Any:
    """Returns the data of `Figure5Data` in paper_figures."""
    rows = published("paper Figure 5")
    setting, device = load_settings()["gh200"], []
    roomy = structs.replace(setting.machine(), host_bytes=2**50)
    for layers in sorted({row.spec().layers for row in rows}):
        row = unpublished(
            "",
            "gh200",
            "",
            "qwen2.5-7b",
            "device_gib",
            "GiB",
            changes={"num_hidden_layers": str(layers)},
            batch=BATCH,
            sequence=SEQUENCE,
        )
        peaks = {}
        for name, policy in PEERS.items():
            found = predict(structs.replace(row, policy=policy), setting)
            peaks[name] = found.value if found else None
        with stated_format() as state:
            stated = paper_schedule(row.spec(), roomy, BATCH, SEQUENCE, intervals=(4,), state=state)
        peaks["paper_stated"] = stated.device_gib
        device.append({"layers": layers, "batch": BATCH, "sequence": SEQUENCE, "gib": peaks})
    return {"rows": published_vs_ours(rows), "device": device}
