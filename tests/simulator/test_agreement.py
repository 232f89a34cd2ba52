"""Two calibrations of one machine: what agrees, what does not, and when the machine is called noisy."""

from __future__ import annotations

from megatrain.simulator.agreement import agreement
from megatrain.simulator.hardware import CostTable


def table(factor: float, spread: float, slow: int = 0) -> CostTable:
    """Twenty points of a curve and a layer; `slow` of the points take half as long again."""
    points = tuple((size, round(1000 * size * factor * (1.5 if size <= slow else 1))) for size in range(1, 21))
    spreads = {f"norm {size}": spread for size in range(1, 21)} | {"forward a/1x1-bf16": spread, "gone 7": 0.1}
    return CostTable(measured_on="", date="", curves={"norm": points}, compute={"forward": {"a/1x1-bf16": (1, round(10**6 * factor))}}, spread=spreads)


def test_numbers_agree_within_both_spreads() -> None:
    found = agreement(table(1, 0.03), table(1.07, 0.03))
    assert (found.compared, found.differences, found.noisy) == (21, (), False)
    beyond = agreement(table(1, 0.03), table(1.09, 0.03))
    assert len(beyond.differences) == 21
    assert beyond.noisy


def test_one_number_that_moved_is_told_and_is_no_noise() -> None:
    found = agreement(table(1, 0.03), table(1, 0.03, slow=2))
    assert [difference.name for difference in found.differences] == ["norm 1", "norm 2"]
    assert found.differences[0].change == 0.5
    assert not found.noisy
    assert agreement(table(1, 0.03), table(1, 0.03, slow=3)).noisy
