"""Figure 5: depth, 28 to 180 layers of 7B's width on a GH200. Takes about 25 s."""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours


def simulate() -> Any:
    return published_vs_ours(published("paper Figure 5"))
