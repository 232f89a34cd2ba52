"""Table 7: contexts of 1K to 512K tokens, 7B on a GH200. Some 5 s."""

from __future__ import annotations

from typing import Any

from megatrain.experiments.figures.beside import beside, published


def simulate() -> Any:
    return beside(published("paper Table 7"))
