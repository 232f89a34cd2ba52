"""Tests of the verdict: sums, the most that fits, advice, and the estimate for several GPUs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import small_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import config_of as tiny_config

from megatrain.simulator import judge as exported
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import parse_bytes, parse_count
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.exposed import WAITING, exposed_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import CLASSES, class_of
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess, plan_account, with_knobs
from megatrain.simulator.planner.capacity import MemoryFootprint, least_memory_plans
from megatrain.simulator.planner.search import candidates, plans_of, search
from megatrain.simulator.planner.shared_step import shared_step
from megatrain.simulator.policies import contenders, lower, names, outline, peers
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan
from megatrain.simulator.schedule.timeline import Span, Timeline
from megatrain.simulator.verdict import notes
from megatrain.simulator.verdict.multi_gpu import MOST_GPUS
from megatrain.simulator.verdict.verdict import Verdict, judge, summarize

GIB = 2**30
H200 = HardwareSpec.load("h200")
WORK = Workload(batch=8, sequence=1024)
SMALL = small_model.SMALL.with_layers(6)


def small(
    workload: Workload = WORK,
    hardware: HardwareSpec = H200,
    *,
    advise: bool = False,
    **options: Any,
) -> Verdict:
    return judge(SMALL, hardware, workload, advise=advise, **options)


def with_options(workload: Workload, options: dict[str, str]) -> dict[str, Any]:
    """Returns the arguments of `judge` for the options of a suggestion."""
    limits = {
        f"{place}_limit": parse_bytes(options[f"{place}-memory"])
        for place in ("device", "host")
        if f"{place}-memory" in options
    }
    fields = {
        "batch": "batch",
        "seq": "sequence",
        "loss-chunk": "loss_chunk",
        "accumulation": "accumulation",
    }
    changes: dict[str, Any] = {
        field: int(options[name]) for name, field in fields.items() if name in options
    }
    if "clipping" in options:
        changes["clipping"] = options["clipping"]
    if "compile" in options:
        changes["compiled"] = True
    return {"workload": msgspec.structs.replace(workload, **changes), **limits}


def test_from_python_in_three_lines() -> None:
    verdict = exported(SMALL, H200, WORK)
    assert verdict.feasible
    assert verdict.tokens_per_second == pytest.approx(8 * 1024 / verdict.step_seconds)


@pytest.mark.parametrize("device_limit", [3 * GIB, 9 * GIB, None])
def test_sums(device_limit: int | None) -> None:
    """Classes and pools add up to the memory peaks, and times add up to the step.

    The lower bound is not above the step.
    """
    verdict = small(device_limit=device_limit)
    for place, peak in (("device", verdict.device_peak_bytes), ("host", verdict.host_peak_bytes)):
        assert sum(verdict.classes[place].values()) == peak
        assert (
            sum(size for pool, size in verdict.pools.items() if pool.startswith(f"{place}."))
            == peak
        )
        assert set(verdict.classes[place]) <= set(CLASSES)
    assert verdict.lower_bound_seconds <= verdict.step_seconds
    assert verdict.lower_bound_lane in verdict.lane_seconds
    assert set(verdict.exposed_seconds) == set(verdict.lane_seconds) - {"compute"} | {WAITING}
    exposed = sum(verdict.exposed_seconds.values())
    assert (
        0 <= exposed <= verdict.step_seconds - verdict.lane_seconds["compute"] + 1e-6
    )  # contention makes compute longer than its ops
    assert verdict.step_seconds_low is not None
    assert verdict.step_seconds_high is not None
    assert verdict.step_seconds_low < verdict.step_seconds < verdict.step_seconds_high
    assert sum(verdict.step_shares.values()) == pytest.approx(1)
    assert all(share >= -1e-9 for share in verdict.step_shares.values())
    outside = exposed + H200.step_overhead_ns / 1e9
    assert verdict.step_shares["compute"] == pytest.approx(1 - outside / verdict.step_seconds)
    assert verdict.tokens_per_second_high == pytest.approx(8 * 1024 / verdict.step_seconds_low)
    assert verdict.tokens_per_second_low == pytest.approx(8 * 1024 / verdict.step_seconds_high)


def span(lane: str, start: int, end: int) -> Span:
    return Span(op=f"{lane}{start}", lane=lane, start_ns=start, end_ns=end)


def test_exposed_time_is_shared_by_the_lanes_that_run_while_compute_is_idle() -> None:
    """While compute is idle, the lanes that run share the time equally."""
    spans = (
        span("h2d", 0, 10),
        span("compute", 10, 20),
        span("d2h", 15, 40),
        span("h2d", 30, 36),
        span("cpu", 50, 53),
        span("compute", 53, 60),
    )
    timeline = Timeline(name="predicted", digest="", spans=spans)
    assert exposed_ns(timeline) == {"h2d": 10 + 3, "d2h": 10 + 3 + 4, "cpu": 3, WAITING: 10}
    assert sum(exposed_ns(timeline).values()) + timeline.busy_ns("compute") == timeline.makespan_ns


def test_nothing_is_exposed_behind_compute() -> None:
    spans = (span("compute", 0, 10), span("h2d", 2, 9), span("compute", 10, 20))
    assert exposed_ns(Timeline(name="predicted", digest="", spans=spans)) == {"h2d": 0, WAITING: 0}


@pytest.mark.parametrize(
    "limits",
    [
        {"device_limit": 5 * GIB},
        {"device_limit": 8 * GIB, "host_limit": 8 * GIB},
        {"device_limit": 30 * GIB},
    ],
)
def test_the_most_that_fits_fits_and_one_more_does_not(limits: dict[str, int]) -> None:
    verdict = small(**limits)
    assert verdict.largest_batch
    assert verdict.longest_context
    for work, more in (
        (
            msgspec.structs.replace(WORK, batch=verdict.largest_batch),
            {"batch": verdict.largest_batch + 1},
        ),
        (
            msgspec.structs.replace(WORK, batch=1, sequence=verdict.longest_context),
            {"sequence": verdict.longest_context + 2},
        ),  # one more may fit because sizes are rounded
    ):
        assert small(work, **limits).feasible
        larger = msgspec.structs.replace(work, **more)
        assert not small(larger, **limits).feasible


def test_a_plan_that_fits_is_within_the_largest_that_fits() -> None:
    """The batch and the sequence of a plan that fits are at most the largest that fit.

    The placement of that plan may take less memory than the smallest plan of a policy with slots.
    The limits are chosen so that the plan just fits.
    """
    work = Workload(batch=2, sequence=4096, clipping="update", documents=True)
    machine = HardwareSpec.load("mi300x")
    limits = {"device_limit": machine.device_bytes // 10, "host_limit": 25 * 2**30}
    verdict = judge(ModelSpec.load("llama-3.2-3b"), machine, work, advise=False, **limits)
    assert verdict.feasible
    assert (verdict.largest_batch or 0) >= 2
    assert (verdict.longest_context or 0) >= 4096


@settings(max_examples=15)
@given(
    st.sampled_from(contenders()),
    st.sampled_from(["", "all"]),
    st.integers(1, 64),
    st.sampled_from([256, 1024, 4096]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([4, 16, 64]),
)
def test_a_footprint_is_the_account_of_the_lowered_plan(
    policy: str,
    offloaded: str,
    batch: int,
    sequence: int,
    accumulation: int,
    interval: int,
    chunk: int,
) -> None:
    """A footprint gives the account of the lowered plan.

    This also holds for other batch and sequence sizes than those it was made with.
    """
    work = Workload(batch=4, sequence=1024, accumulation=accumulation)
    knobs = Knobs(
        checkpoint_interval=interval,
        chunk_bytes=chunk * 2**20,
        placement=Placement(offloaded_inputs=offloaded),
    )
    plan = Plan(
        policy=policy,
        hardware="h200",
        source="small",
        device_limit_bytes=2**50,
        host_limit_bytes=2**50,
        model=SMALL,
        workload=work,
        knobs=knobs,
    )
    costs = cost_model(H200, SMALL, work)
    other = msgspec.structs.replace(work, batch=batch, sequence=sequence)
    moved = msgspec.structs.replace(plan, workload=other)
    expected, found = (
        plan_account(moved, lower(moved), costs),
        MemoryFootprint(plan, costs).account(other),
    )
    for peak in ("device_peak_bytes", "host_peak_bytes"):
        assert getattr(found, peak) == pytest.approx(getattr(expected, peak), abs=4096 * 64)


def test_state_that_the_host_cannot_hold_is_placed_on_the_device() -> None:
    plan = Plan(
        policy="overlapped",
        hardware="h200",
        source="small",
        device_limit_bytes=2**40,
        host_limit_bytes=3 * GIB,
        model=SMALL,
        workload=WORK,
    )
    footprint = next(least_memory_plans(plan, cost_model(H200, SMALL, WORK), ["overlapped"]))
    placed = footprint.placed()
    assert footprint.account().fits
    assert plan_account(placed, outline(placed), footprint.costs).fits
    nowhere = with_knobs(placed, placement=Placement())
    assert not plan_account(nowhere, outline(nowhere), footprint.costs).fits


@settings(max_examples=3)
@given(st.integers(2, 14), st.integers(1, 20), st.integers(1, 6))
def test_more_memory_never_makes_a_model_infeasible(device: int, host: int, more: int) -> None:
    before = small(device_limit=device * GIB, host_limit=host * GIB)
    for changed in (
        {"device_limit": (device + more) * GIB, "host_limit": host * GIB},
        {"device_limit": device * GIB, "host_limit": (host + more) * GIB},
    ):
        after = small(**changed)
        assert after.feasible or not before.feasible
        assert after.largest_batch >= before.largest_batch  # type: ignore[operator]
        assert after.longest_context >= before.longest_context  # type: ignore[operator]


@pytest.mark.parametrize(
    ("limits", "batch"),
    [((3, 100), 128), ((2, 4), 4), ((4, 1), 8), ((2, 3), 32), ((3, 6), 64), ((3, 1), 1)],
    ids=str,
)
def test_the_first_suggestion_makes_the_model_fit(limits: tuple[int, int], batch: int) -> None:
    work = msgspec.structs.replace(WORK, batch=batch)
    given_limits = {"device_limit": limits[0] * GIB, "host_limit": limits[1] * GIB}
    verdict = small(work, **given_limits, advise=True)
    if verdict.feasible:
        pytest.skip("fits")
    assert verdict.reason.startswith("the nearest plan lacks ")
    first = verdict.advice[0]
    assert first.fits
    assert not first.compressed
    again = given_limits | with_options(work, first.options)
    assert small(again.pop("workload"), **again).feasible
    assert [entry.fits for entry in verdict.advice] == sorted(
        (entry.fits for entry in verdict.advice), reverse=True
    )


def test_the_least_memory_that_fits_a_small_model_is_not_rounded_to_gib() -> None:
    tiny = small_model.SMALL.with_layers(1)
    work = Workload(batch=1, sequence=16, loss_chunk=16)
    verdict = judge(tiny, H200, work, device_limit=600 * 2**20)
    assert not verdict.feasible
    entry = next(entry for entry in verdict.advice if "device-memory" in entry.options)
    size = parse_bytes(entry.options["device-memory"])
    assert entry.options["device-memory"].endswith("MiB")
    assert judge(tiny, H200, work, device_limit=size, advise=False).feasible
    assert not judge(tiny, H200, work, device_limit=size - 2**20, advise=False).feasible


def test_a_gpu_s_memory_is_not_to_be_bought() -> None:
    """Another machine and a smaller model are suggested instead, and they do fit."""
    model, work = ModelSpec.load("llama-3.2-1b"), Workload(batch=64, sequence=4096)
    hardware = HardwareSpec.load("rtx3080-10gb")
    verdict = judge(model, hardware, work)
    assert not verdict.feasible
    assert not [entry for entry in verdict.advice if "device-memory" in entry.options]
    (machine,) = [entry for entry in verdict.advice if "hardware" in entry.options]
    other = judge(model, HardwareSpec.load(machine.options["hardware"]), work, advise=False)
    assert other.feasible
    assert other.tokens_per_second == pytest.approx(machine.tokens_per_second, rel=0.02)
    for entry in verdict.advice:
        if entry.model:
            assert judge(ModelSpec.load(entry.model), hardware, work, advise=False).feasible


def test_a_suggestion_gains_the_speed_that_it_states() -> None:
    """A suggestion's gain is what a search with its options finds. A search can find a plan that is
    a little faster.
    """
    work = msgspec.structs.replace(WORK, batch=2)
    verdict = small(work, device_limit=4 * GIB, advise=True)
    assert verdict.feasible
    gains = [entry.gain for entry in verdict.advice if not entry.compressed]
    assert gains == sorted(gains, reverse=True)  # type: ignore[type-var]
    assert {"batch", "accumulation", "clipping", "device-memory"} & {
        name for entry in verdict.advice for name in entry.options
    }
    for entry in verdict.advice:
        assert entry.gain is not None
        assert entry.tokens_per_second == pytest.approx(
            verdict.tokens_per_second * (1 + entry.gain)
        )
        if not entry.compressed:  # A format is only tried with the chosen plan.
            changed = {"device_limit": 4 * GIB} | with_options(work, entry.options)
            found = small(changed.pop("workload"), **changed)
            share = found.tokens_per_second / entry.tokens_per_second
            assert 1 - 1e-6 <= share <= 1.005
            assert ("nothing streams" in entry.change) == (
                "device_limit" in changed and "device-memory" in entry.options and not found.streams
            )


@pytest.mark.parametrize(
    ("model", "machine", "work", "change", "gain"),
    [
        (
            "llama-3.2-1b",
            "dgx-spark",
            Workload(batch=1, sequence=512, accumulation=4, clipping="update", loss_chunk=256),
            "batch",
            0.22,
        ),
        (
            "qwen2.5-0.5b",
            "rtx3080-10gb",
            Workload(batch=1, sequence=1024, accumulation=2),
            "accumulation",
            None,
        ),
    ],
)
def test_more_tokens_in_a_step_gain_the_stated_speed(
    model: str, machine: str, work: Workload, change: str, gain: float | None
) -> None:
    """Advice to double the batch or the accumulation gives the gain that a search with it finds.

    The first micro-batch sums no gradients, and with more of them the search chooses another plan.
    """
    spec, hardware = ModelSpec.load(model), HardwareSpec.load(machine)
    before = judge(spec, hardware, work)
    entry = next(entry for entry in before.advice if change in entry.options)
    again = with_options(work, entry.options)
    found = judge(spec, hardware, again.pop("workload"), advise=False)
    assert entry.gain == pytest.approx(
        found.tokens_per_second / before.tokens_per_second - 1, abs=0.001
    )
    if gain is not None:
        assert entry.gain == pytest.approx(gain, abs=0.02)


def test_advice_for_a_unified_machine_counts_no_offloading() -> None:
    """Advice for a unified machine does not count on offloading to the host."""
    work = Workload(batch=32, sequence=8192, accumulation=4, dtype="fp32", loss_chunk=256)
    model, hardware = ModelSpec.load("qwen3-1.7b"), HardwareSpec.load("apple-m4-max")
    verdict = judge(model, hardware, work)
    assert not verdict.feasible
    assert not [entry for entry in verdict.advice if "clipping" in entry.options], (
        "a resident plan holds all gradients, however they are clipped"
    )
    assert any("batch" in entry.options or "seq" in entry.options for entry in verdict.advice)


def test_only_knobs_that_have_an_effect_are_named() -> None:
    """Eager layers cannot rebuild outputs, and one GPU exchanges no gradients."""
    work, knobs = Workload(batch=1, sequence=256), Knobs(rebuild_outputs=1, exchange_bytes=2**20)
    for compiled, gpus in ((False, 1), (True, 2)):
        plan = Plan(
            model=ModelSpec.load("qwen2.5-0.5b").with_layers(2),
            workload=msgspec.structs.replace(work, compiled=compiled, accumulation=gpus),
            policy="overlapped",
            knobs=knobs,
            hardware="h200",
            source="qwen2.5-0.5b",
            gpus=gpus,
            device_limit_bytes=2**36,
            host_limit_bytes=2**36,
        )
        hardware = HardwareSpec.load("h200")
        costs = cost_model(hardware, plan.model, plan.workload, gpus)
        named = summarize(assess(plan, costs), hardware).knobs
        assert ("rebuild_outputs" in named) is compiled
        assert ("exchange_bytes" in named) is (gpus > 1)


def test_training_arithmetic() -> None:
    verdict = small(tokens=10**9)
    assert verdict.training is not None
    assert verdict.training.days == pytest.approx(1e9 / verdict.tokens_per_second / 86400)
    assert verdict.training.hours == pytest.approx(24 * verdict.training.days)
    assert verdict.training.hours_low == pytest.approx(0.9 * verdict.training.hours)
    assert verdict.training.hours_high == pytest.approx(1.1 * verdict.training.hours)
    assert verdict.training.energy_kwh == pytest.approx(700 * verdict.training.days * 24 / 1000)
    unstated = small(hardware=msgspec.structs.replace(H200, watts=None), tokens=10**9)
    assert unstated.training is not None
    assert unstated.training.energy_kwh is None


def test_eight_gpus_share_what_the_host_sustains() -> None:
    one, eight = small(device_limit=8 * GIB), small(device_limit=8 * GIB, gpus=8, tokens=10**9)
    several = eight.multi_gpu
    assert several is not None
    assert several.note.startswith("from the schedule of")
    assert (several.gb_per_s, several.gb_per_s_both) == (175 / 8, 175 / 16)
    assert several.tokens_per_second == pytest.approx(8 * 8 * 1024 / several.step_seconds)
    assert several.speedup == pytest.approx(several.tokens_per_second / one.tokens_per_second)
    assert eight.step_seconds == one.step_seconds
    assert eight.training is not None
    assert eight.training.days == pytest.approx(1e9 / several.tokens_per_second / 86400)
    assert eight.training.energy_kwh == pytest.approx(8 * 700 * eight.training.days * 24 / 1000)


def test_where_nothing_streams_several_gpus_do_not_disturb_each_other() -> None:
    work = msgspec.structs.replace(WORK, clipping="layer")  # which no schedule of GPUs supports
    verdict = small(work, policies=["resident"], gpus=4)
    assert verdict.multi_gpu is not None
    assert verdict.multi_gpu.speedup == pytest.approx(4)


@pytest.mark.parametrize("policy", ["overlapped", "k_buffer"])
def test_an_estimate_is_that_of_a_plan_that_leaves_memory_for_collectives(policy: str) -> None:
    """The best plan for one GPU fills the memory."""
    work = msgspec.structs.replace(WORK, clipping="layer")  # which no schedule of GPUs supports
    verdict = small(work, policies=[policy], device_limit=5 * GIB, gpus=2)
    several = verdict.multi_gpu
    assert several is not None
    assert "data parallel" in several.note
    assert several.feasible
    if policy == "overlapped":
        assert verdict.device_peak_bytes + H200.collective_bytes > verdict.device_limit_bytes
    less = small(work, policies=[policy], device_limit=2 * GIB, gpus=2)
    assert less.feasible
    assert less.multi_gpu is not None
    assert not less.multi_gpu.feasible
    assert less.multi_gpu.device_peak_bytes
    assert less.multi_gpu.device_peak_bytes > 2 * GIB


def test_the_best_plan_for_several_gpus_does_not_depend_on_the_policy_for_one() -> None:
    """It may have any of the policies that may be chosen, but no other one."""
    resident, streamed = (
        small(policies=[name, "overlapped"], gpus=4).multi_gpu
        for name in ("resident", "double_buffer")
    )
    assert resident is not None
    assert streamed is not None
    assert resident.note.startswith("from the schedule of")
    assert resident.step_seconds == streamed.step_seconds
    assert resident.host_peak_bytes == 0, "all state is on the GPUs"
    alone = small(policies=["resident"], gpus=4).multi_gpu
    assert alone is not None
    assert "only overlapped shares a step among several GPUs" in alone.refused


def test_several_gpus_may_fit_what_one_does_not() -> None:
    # In 4 GiB there is no room for what NCCL keeps.
    machine = msgspec.structs.replace(
        HardwareSpec.load("h200"), collective_bytes=0, collective_peer_bytes=0
    )
    verdict = small(hardware=machine, device_limit=4 * GIB, host_limit=GIB // 4, gpus=8)
    assert not verdict.feasible
    assert verdict.multi_gpu is not None
    assert verdict.multi_gpu.feasible


@pytest.mark.parametrize(
    ("machine", "end"),
    [
        ("h200", "would be enough for each of 4 GPUs, which share --host-memory"),
        ("gh200-96", "would be enough for each of 4 GPUs"),
    ],
)
def test_the_memory_that_several_gpus_lack_is_that_of_each(machine: str, end: str) -> None:
    """With NVLink-C2C, each GPU has the host memory that the user states."""
    hardware = msgspec.structs.replace(
        HardwareSpec.load(machine), collective_bytes=0, collective_peer_bytes=0
    )
    (plan,) = plans_of(
        SMALL, hardware, WORK, device_limit=3 * GIB, host_limit=GIB // 8, policies=["overlapped"]
    )
    choice = shared_step(plan, hardware, 4)
    assert not choice.feasible
    reason = summarize(choice, hardware).reason
    assert reason.endswith(f"more of host memory (--host-memory) {end}")


@pytest.mark.parametrize("device_limit", [4 * GIB, None], ids=["shared", "resident"])
def test_more_gpus_than_the_host_has_are_refused(device_limit: int | None) -> None:
    """The error names the option, also if the GPUs could share the step."""
    allowed = f"^--gpus: found {MOST_GPUS + 1}; allowed: 1 to {MOST_GPUS}, on one host;"
    with pytest.raises(UserError, match=allowed):
        small(gpus=MOST_GPUS + 1, device_limit=device_limit)


def test_several_gpus_are_refused_where_cpu_and_gpu_share_a_memory() -> None:
    with pytest.raises(UserError, match="one memory"):
        judge(SMALL, HardwareSpec.load("dgx-spark"), WORK, gpus=2)


def test_a_unified_machine_has_one_memory() -> None:
    spark = HardwareSpec.load("dgx-spark")
    verdict = small(hardware=spark)
    assert (verdict.unified, verdict.policy, verdict.host_peak_bytes) == (True, "resident", 0)
    assert not small(hardware=spark, host_limit=2 * GIB).feasible
    assert not small(hardware=spark, device_limit=2 * GIB).feasible
    assert set(verdict.lane_seconds) <= {"compute", "update"}


def test_every_pool_has_a_class() -> None:
    """Every pool with data of the model has a class other than `workspace`."""
    pools = set()
    for policy in names() + peers():
        for accumulation in (1, 2):
            knobs = Knobs(
                chunk_bytes=2**40,
                weight_slots=1 if policy == "sequential" else 2,
                placement=Placement(offloaded_inputs="all"),
            )
            work = Workload(batch=1, sequence=64, accumulation=accumulation)
            plan = Plan(
                policy=policy,
                hardware="h200",
                source="small",
                device_limit_bytes=2**50,
                host_limit_bytes=2**50,
                model=SMALL,
                workload=work,
                knobs=knobs,
            )
            pools |= {
                buffer.pool for buffer in lower(plan).buffers if class_of(buffer) == "workspace"
            }
    rest = {pool.partition(".")[2] for pool in pools}
    assert rest <= {"tokens", "losses", "norm", "clips", "workspace", "rounding", "logits"}


@pytest.mark.parametrize(
    ("text", "count"),
    [("1B", 10**9), ("300M", 3 * 10**8), ("2.5T", 25 * 10**11), ("12 k", 12_000), ("7", 7)],
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "x", "0", "-1B", "1Q", "nan", "1e9", "B"])
def test_texts_that_are_no_counts(text: str) -> None:
    with pytest.raises(UserError, match="--tokens: found "):
        parse_count(text, "--tokens")


def test_a_policy_that_the_search_leaves_out_is_not_faster() -> None:
    for limits in ({"device_limit": 4 * GIB}, {}):
        found = candidates(SMALL, H200, WORK, **limits)
        everything = search(SMALL, H200, WORK, policies=contenders(), **limits)
        assert found[0].plan == everything[0].plan
        assert {choice.plan.policy for choice in found} <= set(contenders())


def test_extrapolated_ops_are_counted() -> None:
    """`summarize`, whose verdicts `check --policy all` prints, names their kinds with the number 0,
    which says that they were not counted.
    """
    far = msgspec.structs.replace(
        H200, h2d_curve=((2**18, 17.0), (2**20, 38.4)), d2h_curve=(), duplex_curve=()
    )
    limits: dict[str, Any] = {"policies": ["k_buffer"], "device_limit": 4 * GIB}
    verdict = small(hardware=far, **limits)
    schedule: Schedule = lower(Plan(**_plan_fields(verdict)))
    beyond: list[Op] = [
        op for op in schedule.ops if op.kind == "load_weights" and not 2**18 <= op.bytes <= 2**20
    ]
    assert verdict.extrapolated["load_weights"] == len(beyond) > 0
    uncounted = summarize(candidates(SMALL, far, WORK, **limits)[0], far).extrapolated
    assert uncounted == dict.fromkeys(verdict.extrapolated, 0)


def _plan_fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "policy": verdict.policy,
        "hardware": "h200",
        "source": "small",
        "device_limit_bytes": 2**40,
        "host_limit_bytes": 2**40,
        "model": SMALL,
        "workload": verdict.workload,
        "knobs": Knobs(**verdict.knobs),
    }


def test_the_memory_of_compiled_written_out_scores_is_a_condition() -> None:
    """This memory was never measured, so the verdict says how much more would still fit."""
    cut = ModelSpec.load("gpt-oss-20b").with_layers(4)
    work = Workload(batch=16, sequence=1024, compiled=True)
    found = judge(cut, H200, work, policies=["resident"], advise=False)
    assert found.feasible
    assert found.fits_if_bytes == found.device_limit_bytes - found.device_peak_bytes
    assert found.fits_if.startswith(
        "compiled layers with written-out attention scores, which nobody measured,"
    )
    eager = msgspec.structs.replace(work, compiled=False)
    known = judge(cut, H200, eager, policies=["resident"], advise=False)
    assert (known.fits_if, known.fits_if_bytes) == ("", None)
    apart = ModelSpec.load("qwen3-next-80b-a3b").with_layers(4)
    linear = [
        judge(apart, H200, each, policies=["resident"], advise=False) for each in (work, eager)
    ]
    assert not linear[0].fits_if, "layers with linear attention are not compiled"
    assert linear[0].eager == (
        "3 of 4 layers are not compiled, since layers with linear attention always run eagerly"
    )
    assert not linear[1].eager
    config = tiny_config("falcon_h1", num_hidden_layers=2).to_dict()
    mixers = ModelSpec.from_config(config, "config.json")
    assert notes.eager(mixers, work) == (
        "2 of 2 layers are not compiled, since layers with a state-space mixer always run eagerly"
    )
    assert not found.eager
    assert not any(layer.compilable for layer in apart.decoders[:3])
    assert linear[0].device_peak_bytes < linear[1].device_peak_bytes, "the other layer saves less"
    assert not small(work).fits_if, "compiled layers of a dense model need less than eager ones"
