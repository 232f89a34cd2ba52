"""Tables 8 and 9: an A6000 and an RTX 3090, and the cards that readers asked about. The simulation
takes about 20 s.

For the readers' cards, only our best plan is predicted, with 4 sequences of 1,024 tokens per step
and the library's host memory. The RTX 4090 is also predicted with 256 GiB of host memory.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.experiments.paper_data.answers import ours
from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours
from megatrain.simulator.base.units import parse_bytes
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

CARDS = (
    ("rtx3080-10gb", ""),
    ("rtx4090", ""),
    ("rtx4090", "256GiB"),
    ("ryzen-ai-max-395-128gb", ""),
    ("apple-m4-max", ""),
    ("apple-m3-ultra", ""),
)
"""Machines of the library, with their host memory if it is not the library's."""
MODELS = ("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b")
BATCH, SEQUENCE = 4, 1024


def simulate() -> Any:
    """Returns the data of `Tables89Data` in paper_figures."""
    readers = []
    for card, host in CARDS:
        hardware = HardwareSpec.load(card)
        if host:
            hardware = msgspec.structs.replace(hardware, host_bytes=parse_bytes(host))
        for name in MODELS:
            found = ours(ModelSpec.load(name), hardware, Workload(batch=BATCH, sequence=SEQUENCE))
            readers.append(
                {
                    "card": card,
                    "model": name,
                    "host_gib": hardware.host_bytes / 2**30,
                    "unified": hardware.unified,
                    "ours": msgspec.to_builtins(found),
                }
            )
    return {
        "rows": published_vs_ours([*published("paper Table 8"), *published("paper Table 9")]),
        "readers": readers,
    }
