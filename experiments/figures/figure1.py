"""Figure 1: speed against size, all systems on a GH200 and on an H200 with 1.5 TB. Some 40 s."""

from __future__ import annotations

from typing import Any

from megatrain.experiments.figures.beside import beside, published, unpublished

MODELS = {"7b": "qwen2.5-7b", "14b": "qwen2.5-14b", "32b": "qwen2.5-32b", "72b": "qwen2.5-72b", "120b": "gpt-oss-120b"}
SYSTEMS = {"MegaTrain": "megatrain_code", "ZeRO-3": "zero3_offload", "FSDP": "fsdp2_offload", "ZeRO-Offload": "zero_offload"}


def simulate() -> Any:
    told = published("paper Figure 1")
    speeds = {(row.setting, row.policy, row.model) for row in told if row.quantity == "tflops"}
    more = [
        unpublished(f"{system} {size}", setting, policy, model) for setting in ("gh200", "h200-paper") for size, model in MODELS.items()
        for system, policy in SYSTEMS.items() if (setting, policy, model) not in speeds
    ]  # fmt: skip
    return beside([*told, *more])
