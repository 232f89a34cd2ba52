"""Tests of comparing two calibrations of one machine: differences and noisy parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.simulator.hardware import agreement as agreement_module
from megatrain.simulator.hardware.agreement import agreement
from megatrain.simulator.hardware.cost_table import (
    CostTable,
    FixedCosts,
    KernelInterleaving,
    Workspace,
)
from megatrain.simulator.hardware.machine import HardwareSpec

LIBRARY = HardwareSpec.load("h200")
CALIBRATIONS = Path(__file__).parents[2] / "shared" / "calibrations"


def machine(factor: float, stated: float, slow: int = 0, **changes: Any) -> HardwareSpec:
    """Returns a machine with 20 points of a curve and one layer.

    The `slow` smallest points take 1.5 times as long.
    """
    points = tuple(
        (size, round(1000 * size * factor * (1.5 if size <= slow else 1))) for size in range(1, 21)
    )
    spreads = {f"norm {size}": stated for size in range(1, 21)} | {
        "forward a/1x1-bf16": stated,
        "gone 7": 0.1,
    }
    measured: dict[str, Any] = {
        "curves": {"norm": points},
        "compute": {"forward": {"a/1x1-bf16": (1, round(10**6 * factor))}},
        "spread": spreads,
    }
    return msgspec.structs.replace(
        LIBRARY, costs=CostTable(measured_on="", date="", **{**measured, **changes})
    )


def test_numbers_agree_within_both_spreads() -> None:
    found = agreement(machine(1, 0.03), machine(1.07, 0.03))
    assert (found.compared, found.differences, found.noisy) == (21, (), ())
    beyond = agreement(machine(1, 0.03), machine(1.09, 0.03))
    assert len(beyond.differences) == 21
    assert beyond.noisy == ("host", "device")


@pytest.mark.parametrize(
    ("factor", "agree"), [(0.79, True), (0.77, False), (1.21, True), (1.23, False)]
)
def test_what_is_allowed_is_a_share_of_the_first_number_as_the_change_is(
    factor: float, agree: bool
) -> None:
    found = agreement(machine(1, 0.1), machine(factor, 0.1))
    assert (not found.differences) is agree
    assert all(abs(each.change) > each.allowed for each in found.differences)


def test_one_number_that_differs_is_listed_and_does_not_count_as_noise() -> None:
    """One or two numbers that differ are listed, but do not make a machine noisy."""
    found = agreement(machine(1, 0.03), machine(1, 0.03, slow=2))
    assert [difference.name for difference in found.differences] == ["norm 1", "norm 2"]
    assert found.differences[0].change == 0.5
    assert not found.noisy
    assert agreement(machine(1, 0.03), machine(1, 0.03, slow=3)).noisy == ("host",)


def test_a_part_is_noisy_by_its_own_numbers() -> None:
    """The host is noisy if 3 of its 20 numbers differ, even if 100 numbers of the device agree."""
    shapes = {f"a/{rows}x1-bf16": (rows, 10**6 * rows) for rows in range(1, 101)}
    more: dict[str, Any] = {
        "compute": {"forward": shapes},
        "spread": (
            {f"norm {size}": 0.03 for size in range(1, 21)}
            | {f"forward {shape}": 0.0 for shape in shapes}
        ),
    }
    found = agreement(machine(1, 0.03, **more), machine(1, 0.03, slow=3, **more))
    assert (found.compared, len(found.differences), found.noisy) == (120, 3, ("host",))


def test_each_number_belongs_to_host_link_or_device() -> None:
    """Each number belongs to the host, the link or the device."""
    names = {
        name: agreement_module._part(name)
        for name in agreement_module._numbers(
            HardwareSpec.load(str(CALIBRATIONS / "noisy-host.toml"))
        )
    }
    of = {
        part: {name.split()[0] for name, whose in names.items() if whose == part}
        for part in ("host", "link", "device")
    }
    assert of["host"] >= {
        "cpu_update",
        "cpu_update:wide",
        "norm",
        "update_ratios:wide",
        "accumulate_gradients:add",
        "fixed.first_touch_gb_per_s",
        "step_overhead_ns",
    }
    assert of["link"] >= {
        "load_weights",
        "save_gradients",
        "duplex_curve",
        "contention.h2d.d2h+cpu",
        "dispatch_ns.d2h",
    }
    assert of["device"] >= {
        "forward",
        "head",
        "norm@compute",
        "update_ratios:wide@update",
        "update",
        "workspace.layer",
        "peak_tflops.bf16",
        "contention.update.cpu",
    }


def test_an_h200_whose_host_was_faster_ten_minutes_later() -> None:
    """Two calibrations of one H200, ten minutes apart, show that only its host is noisy."""
    first, later = (
        HardwareSpec.load(str(CALIBRATIONS / f"noisy-host{name}.toml")) for name in ("", "-later")
    )
    found = agreement(first, later)
    assert len(found.differences) < found.compared / 20
    assert "host" in found.noisy
    assert "device" not in found.noisy


LANES: dict[str, Any] = {
    "contention": {"h2d": {"cpu": 0.5}},
    "turns": KernelInterleaving(wait_ns=1000, forward_loss=0.9, backward_loss=0.5),
    "dispatch_ns": {"cpu": 2000},
    "step_overhead_ns": 10**6,
}
FIXED = FixedCosts(
    launch_ns=5000, event_ns=4000, first_touch_gb_per_s=5.0, registration_gb_per_s=25.0
)
OF_LANES = [
    "contention.h2d.cpu",
    "dispatch_ns.cpu",
    "step_overhead_ns",
    "turns.backward_loss",
    "turns.forward_loss",
    "turns.wait_ns",
]
OF_THE_MACHINE = [
    "cpu_adam_per_s",
    "device_gb_per_s",
    "duplex_curve 1048576",
    "fixed.event_ns",
    "fixed.first_touch_gb_per_s",
    "fixed.launch_ns",
    "fixed.registration_gb_per_s",
    "host_gb_per_s",
    "peak_tflops.bf16",
    "thread_gb_per_s",
]


def everything(times: float = 1.0, **changes: Any) -> HardwareSpec:
    """Returns a machine with every number that has no size or shape of an op, times `times`."""
    numbers: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(machine(1, 0.0), duplex_curve=((2**20, 20.0),))
    )
    more: dict[str, Any] = msgspec.to_builtins({**LANES, "fixed": FIXED})
    for part, fields in (
        (numbers, ("cpu_adam_per_s", "device_gb_per_s", "host_gb_per_s", "thread_gb_per_s")),
        (numbers["peak_tflops"], ("bf16",)),
        (more["turns"], more["turns"]),
        (more["fixed"], more["fixed"]),
        (more["contention"]["h2d"], ("cpu",)),
        (more["dispatch_ns"], ("cpu",)),
        (more, ("step_overhead_ns",)),
    ):
        for field in fields:
            part[field] = type(part[field])(part[field] * times)
    numbers["duplex_curve"] = [[2**20, 20.0 * times]]
    numbers["costs"] |= {
        **more,
        "spread": dict.fromkeys([*OF_LANES, *OF_THE_MACHINE], 0.01),
        **changes,
    }
    return msgspec.convert(numbers, HardwareSpec)


def test_every_kind_of_number_is_compared() -> None:
    assert agreement(everything(), everything(0.97)).differences == ()
    found = agreement(everything(), everything(0.9))
    assert sorted(difference.name for difference in found.differences) == sorted(
        OF_LANES + OF_THE_MACHINE
    )
    assert found.compared == len(OF_LANES + OF_THE_MACHINE)
    assert found.differences[0].allowed == pytest.approx(0.04)


def test_numbers_of_other_layers_are_not_compared() -> None:
    found = agreement(everything(), everything(0.9, compute={"forward": {"b/1x1-bf16": (1, 5)}}))
    assert sorted(difference.name for difference in found.differences) == OF_THE_MACHINE
    assert found.compared == len(OF_THE_MACHINE)


def test_zeros_are_not_compared() -> None:
    """A number that is zero was not measured, for example without a GPU, and is not compared."""
    nothing = FixedCosts(
        launch_ns=5000, event_ns=0, first_touch_gb_per_s=5.0, registration_gb_per_s=0.0
    )
    names = {name for name in OF_THE_MACHINE if name.startswith("fixed.")}
    only = dict.fromkeys(names, 0.01)
    assert (
        agreement(
            everything(fixed=nothing, spread=only), everything(fixed=nothing, spread=only)
        ).compared
        == 2
    )


def test_bytes_are_counted_and_may_differ_by_a_fiftieth() -> None:
    """Counted bytes agree if they differ by at most 2 %."""

    def counted(size: int) -> HardwareSpec:
        return machine(
            1,
            0,
            spread={},
            activations={"a/1x1-bf16": (1, size)},
            workspace={"a/1x1-bf16": Workspace(layer=size, head=size)},
        )

    assert agreement(counted(1000), counted(1019)).differences == ()
    found = agreement(counted(1000), counted(1021))
    assert {difference.name for difference in found.differences} == {
        f"{name} a/1x1-bf16" for name in ("activations", "workspace.layer", "workspace.head")
    }
    assert found.compared == 3


def test_a_datasheet_has_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="h200 was not measured"):
        agreement(LIBRARY, machine(1, 0))
