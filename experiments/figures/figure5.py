"""Figure 5: depth, 28 to 180 layers of 7B's width on a GH200. Some 25 s."""

from __future__ import annotations

from typing import Any

from megatrain.experiments.figures.beside import beside, published


def simulate() -> Any:
    return beside(published("paper Figure 5"))
