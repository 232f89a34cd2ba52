"""Table 7: contexts of 1K to 512K tokens, 7B on a GH200. Takes about 5 s."""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours


def simulate() -> Any:
    return published_vs_ours(published("paper Table 7"))
