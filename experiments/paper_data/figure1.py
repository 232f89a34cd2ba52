"""Figure 1: speed by model size for all systems, on a GH200 and on an H200 with 1.5 TB. The
simulation takes about 35 s.

1.5 TB is read as 1,536 GiB. For 120B, 1,500 GB is predicted too.
"""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.published_vs_ours import (
    published,
    published_vs_ours,
    unpublished,
)

NAMES = {
    "7b": "qwen2.5-7b",
    "14b": "qwen2.5-14b",
    "32b": "qwen2.5-32b",
    "72b": "qwen2.5-72b",
    "gpt-oss-120b": "gpt-oss-120b",
}
SYSTEMS = {
    "MegaTrain": "megatrain_code",
    "ZeRO-3": "zero3_offload",
    "FSDP": "fsdp2_offload",
    "ZeRO-Offload": "zero_offload",
}


def simulate() -> Any:
    """Returns the records of the paper's rows, and of the points that the paper does not report.
    Ours has compiled layers.
    """
    reported = published("paper Figure 1")
    speeds = {(row.setting, row.policy, row.model) for row in reported if row.quantity == "tflops"}
    more = [
        unpublished(f"{system} {name}{where}", setting, policy, model)
        for setting, where in (("gh200", ""), ("h200-paper", " on an H200"))
        for name, model in NAMES.items()
        for system, policy in SYSTEMS.items()
        if (setting, policy, model) not in speeds
    ]
    more += [
        unpublished(
            f"{system} gpt-oss-120b on an H200, 1,500 GB",
            "h200-paper-decimal",
            policy,
            NAMES["gpt-oss-120b"],
        )
        for system, policy in SYSTEMS.items()
    ]
    return published_vs_ours([*reported, *more], compiled=True)
