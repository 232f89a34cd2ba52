"""Tests of how measurements become the numbers of a cost table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from schedule_text import from_text
from whole_models import model_of

from megatrain.runtime.calibration import measured_costs as module
from megatrain.runtime.calibration.contention import Contention
from megatrain.runtime.calibration.link import LinkRates
from megatrain.runtime.calibration.measured_costs import GridPoint
from megatrain.runtime.calibration.microbenchmarks import MeasuredRates
from megatrain.runtime.calibration.profile_steps import StepProfile
from megatrain.simulator.hardware.cost_table import FixedCosts, Workspace
from megatrain.simulator.hardware.machine import AttentionRate
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.timeline import Span, Timeline

MIB = 2**20


def steps(*times: tuple[int, int, float]) -> StepProfile:
    """Returns steps of one op on the compute lane. `times` are its start and end in ns, and the
    duration of the step in seconds.
    """
    schedule = from_text("schedule test\nF0 compute\n")
    timelines = [
        Timeline(
            name="measured",
            digest="",
            spans=(Span(op="F0", lane="compute", start_ns=start, end_ns=end),),
        )
        for start, end, _ in times
    ]
    return StepProfile(schedule, timelines, [seconds for *_, seconds in times], None, {}, 0, 0, 0)


def rates(**changes: Any) -> MeasuredRates:
    fixed = FixedCosts(launch_ns=5, event_ns=0, first_touch_gb_per_s=1.0, registration_gb_per_s=0.0)
    usual = {
        "link": LinkRates({"load_weights": [(100, 10), (200, 19)]}, [], [], {}),
        "contention": Contention({"h2d": {"cpu": 0.5}}, None, {}),
        "matmul_flops": 1e12,
        "device_bytes_per_s": 1e9,
        "host_bytes_per_s": 1e9,
        "thread_bytes_per_s": 1e9,
        "cpu_adam_per_s": 1e9,
        "fixed": fixed,
        "spread": {"load_weights 100": 0.3},
        "fp8_flops": 0.0,
    }
    return MeasuredRates(**{**usual, **changes})


def table(profile: StepProfile, points: list[GridPoint] = []) -> Any:  # noqa: B006
    return module.cost_table(
        {
            ("forward", "a/1x16-fp32"): [30, 10, 20],
            ("cpu_update", 64): [400, 200, 300, 100],
            ("cpu_update", 16): [50],
        },
        {("forward", "a/1x16-fp32"): 1600},
        {},
        [],
        rates(),
        profile,
        points,
        {},
        1024,
        {},
        torch.device("cpu"),
    )


def test_a_duration_is_the_median_of_its_samples() -> None:
    found = table(steps((2, 5, 15e-9), (1, 5, 10e-9), (4, 5, 10e-9)))
    assert found.compute == {"forward": {"a/1x16-fp32": (1600, 20)}}
    assert found.curves == {
        "load_weights": ((100, 10), (200, 19)),
        "cpu_update": ((16, 50), (64, 250)),
    }
    assert found.dispatch_ns == {"compute": 2}
    assert found.spread == {
        "load_weights 100": 0.3,
        "dispatch_ns.compute": 1.5,
        "step_overhead_ns": 1.0,
        "forward a/1x16-fp32": 1.0,
        "cpu_update 16": 0.0,
        "cpu_update 64": 1.0,
    }
    assert (found.contention, found.fixed) == ({"h2d": {"cpu": 0.5}}, rates().fixed)


@pytest.mark.parametrize(("seconds", "overhead"), [(1.5, 500_000_000), (0.9, 0)])
def test_the_overhead_of_a_step_is_its_time_without_the_lanes(
    seconds: float, overhead: int
) -> None:
    """The clocks of the step and of its ops differ, so it may come out below zero."""
    found = table(steps((0, 10**9, seconds)))
    assert (found.step_overhead_ns, found.dispatch_ns) == (overhead, {"compute": 0})


def test_memory_is_only_in_the_table_where_it_was_measured() -> None:
    space = Workspace(layer=5, head=6, update=7)
    found = table(
        steps((0, 5, 1e-8)), [GridPoint("a", 32, 640, space), GridPoint("b", 64, 0, None)]
    )
    assert (found.activations, found.workspace) == ({"a": (32, 640)}, {"a": space})


@pytest.mark.parametrize(("forward", "layer"), [(9000, 3000), (7000, 1000), (100, 0)])
def test_the_workspace_is_the_largest_peak_with_a_margin(forward: int, layer: int) -> None:
    """The margin is 2 MiB and half a percent of the activations of a layer."""
    peaks = {
        "forward": forward,
        "recompute": 6400,
        "backward": 5000,
        "embed": 10,
        "head": 400,
        "embed_backward": 20,
    }
    if layer == 0:
        peaks |= {"recompute": 50, "backward": 60}
    profile = steps((0, 5, 1e-8))._replace(peaks=peaks, saved_bytes=6000)
    margin = 2 * MIB + 30
    assert module.workspace(profile) == Workspace(
        layer=layer + margin, head=400 + margin, update=margin
    )
    profile.peaks.update(update=70, norm=90)
    assert module.workspace(profile).update == 90 + margin


@pytest.fixture
def layer() -> tuple[ModelSpec, Workload, Any]:
    """A model, a workload, and the work of its first layer."""
    model, work = model_of("qwen2"), Workload(batch=2, sequence=16)
    return model, work, op_work(model, "forward", model.decoders[0].name, work)


def efficiency(layer: tuple[ModelSpec, Workload, Any], seconds: float, **changes: Any) -> float:
    model, work, _ = layer
    shape = f"{model.decoders[0].signature}/{work.shape}"
    times: Any = SimpleNamespace(compute={"forward": {shape: (0, round(seconds * 1e9))}})
    usual = {"device_bytes_per_s": 1e6, "matmul_flops": 1e9}
    attention = AttentionRate(efficiency=0.5, half_tokens=32)
    return module.linear_efficiency(times, rates(**{**usual, **changes}), model, work, attention)


def test_the_rest_of_a_layers_time_is_that_of_its_matrix_products(layer: Any) -> None:
    """A layer also moves memory, and computes attention at its own rate: of rows of 16 tokens with
    32 half tokens, each FLOP counts three times.
    """
    work = layer[2]
    rest = work.moved_bytes / 1e6 + 3 * work.attention_flops / (0.5 * 1e9)
    products = work.linear_flops / (0.25 * 1e9)
    slow = max(products, 3 * rest)
    found = efficiency(layer, slow + rest)
    assert found == pytest.approx(work.linear_flops / slow / 1e9, rel=1e-5)
    assert efficiency(layer, 1e-9, device_bytes_per_s=1e18, matmul_flops=1e3) == 1.0


def test_flops_in_fp8_count_as_the_time_that_they_take(layer: Any, monkeypatch: Any) -> None:
    """If half of the FLOPs are four times as fast, the layer has five eighths of its FLOPs."""
    usual = layer[2]
    half = usual.linear_flops / 2
    monkeypatch.setattr(
        module,
        "op_work",
        lambda *_: SimpleNamespace(
            moved_bytes=0, attention_flops=0, linear_flops=2 * half, fp8_flops=half
        ),
    )
    found = efficiency(layer, 2 * half / 1e9, fp8_flops=4e9)
    assert found == pytest.approx(5 / 8, rel=1e-5)


def test_a_rate_is_that_of_the_largest_size() -> None:
    assert module.rate_at_the_end(((10, 1), (100, 50))) == pytest.approx(2e9)


def test_windows_of_updates_from_four_million_parameters_count() -> None:
    windows = {("cpu_update", 2**22): [110.0], ("cpu_update", 2**22 - 1): [120.0]}
    samples = {key: [100] for key in windows}
    assert module.host_factors(windows, samples) == (1.1,)
