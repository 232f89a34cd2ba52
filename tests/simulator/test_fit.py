"""The fit of host DRAM: it finds what made the rates, explains what was measured, and says nothing where copies do not suffer."""

from __future__ import annotations

import pytest

from megatrain.simulator.fit import HostRates, fit_host_memory, together
from megatrain.simulator.hardware import HostMemory

MACHINE_B = HostRates(h2d=55.4, d2h=55.3, cpu=220.0)  # DeepSpeed's CPUAdam: 10.0e9 parameters/s of 22 bytes
COMBINATIONS = (("h2d", "cpu"), ("d2h", "cpu"), ("h2d", "d2h", "cpu"))


def test_the_rates_of_machine_b_are_explained_within_five_per_cent() -> None:
    """h200.md, 2026-11-21; under both directions the middle of 18 to 22 GB/s."""
    measured = [HostRates(h2d=25, cpu=7.7 * 22), HostRates(d2h=23, cpu=7.5 * 22), HostRates(h2d=20, d2h=20, cpu=6.4 * 22)]
    memory = fit_host_memory(MACHINE_B, measured, 0.908)
    assert memory is not None
    for lanes, rates in zip(COMBINATIONS, measured, strict=True):
        assert together(memory, MACHINE_B, lanes, 0.908) == pytest.approx(rates, rel=0.05)
    assert 220 <= memory.gb_per_s < 230
    assert (memory.h2d_cost, memory.d2h_cost, memory.cpu_weight) == (pytest.approx(2.0, rel=0.1), pytest.approx(2.3, rel=0.1), pytest.approx(3.3, rel=0.1))


@pytest.mark.parametrize(
    "truth",
    [
        HostMemory(gb_per_s=220.0),
        HostMemory(gb_per_s=190.0, h2d_cost=1.5, d2h_cost=2.8, cpu_weight=2.0),
        HostMemory(gb_per_s=90.0, h2d_cost=1.0, d2h_cost=1.0, cpu_weight=1.0),
    ],
    ids=str,
)
def test_a_known_memory_is_found_again(truth: HostMemory) -> None:
    """One that leaves both directions of the link their measured rate: the fit holds on to that."""
    alone = HostRates(h2d=50.0, d2h=48.0, cpu=0.9 * truth.gb_per_s)
    measured = [together(truth, alone, lanes, 0.9) for lanes in COMBINATIONS]
    found = fit_host_memory(alone, measured, 0.9)
    assert found is not None
    for lanes, rates in zip(COMBINATIONS, measured, strict=True):
        assert together(found, alone, lanes, 0.9) == pytest.approx(rates, rel=0.02)


def test_copies_that_do_not_suffer_tell_nothing() -> None:
    """As on machine A beside the runtime's own sums: the cores slow down, the copies hardly do."""
    measured = [HostRates(h2d=53.8, cpu=27), HostRates(d2h=55.0, cpu=25), HostRates(h2d=50, d2h=50, cpu=24)]
    assert fit_host_memory(HostRates(h2d=55.4, d2h=55.3, cpu=30.0), measured, 0.908) is None


def test_what_dram_does_not_explain_is_left_to_the_pairs() -> None:
    """Copies at a tenth of their speed beside cores that lose nothing, but only in one direction and never in both."""
    measured = [HostRates(h2d=5, cpu=30), HostRates(d2h=55, cpu=3), HostRates(h2d=50, d2h=50, cpu=30)]
    assert fit_host_memory(HostRates(h2d=55.4, d2h=55.3, cpu=30.0), measured, 0.908) is None
