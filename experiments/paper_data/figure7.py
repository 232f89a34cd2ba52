"""Figure 7: an A100 PCIe with 80 GB. Takes about 5 s."""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours


def simulate() -> Any:
    return published_vs_ours(published("paper Figure 7"))
