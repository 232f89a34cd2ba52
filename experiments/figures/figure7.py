"""Figure 7: an A100 PCIe of 80 GB. Some 5 s."""

from __future__ import annotations

from typing import Any

from megatrain.experiments.figures.beside import beside, published


def simulate() -> Any:
    return beside(published("paper Figure 7"))
