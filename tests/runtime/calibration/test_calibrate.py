"""Tests of calibration: a calibration of a tiny model on the CPU measures what every policy needs,
and can be saved and loaded.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from schedule_text import from_text
from whole_models import model_of as whole_model_of

from megatrain.runtime.calibration import (
    attention_kernel,
    contention,
    link,
    measured_costs,
    profile_steps,
)
from megatrain.runtime.calibration import calibrate as module
from megatrain.runtime.calibration import cpu_adam_bench as chunk_updates
from megatrain.runtime.calibration import microbenchmarks as rates
from megatrain.runtime.calibration.compute_alone import compute_alone, fill
from megatrain.runtime.calibration.profile_steps import StepProfile
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import Weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import write_toml
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.agreement import agreement
from megatrain.simulator.hardware.cost_table import COMPUTE_KINDS, CURVE_KINDS, EVALUATION_KINDS
from megatrain.simulator.hardware.machine import AttentionRate, HardwareSpec
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import evaluation, lower, peers
from megatrain.simulator.schedule import LANES, SAVED_ATTENTION_SUFFIX, Schedule, serialized
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Span, Timeline

POLICIES = ("sequential", "double_buffer", "k_buffer", "resident", "overlapped")


@pytest.mark.timeout(120)
def test_a_calibrated_machine_can_simulate_every_policy(
    executable: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A calibration has every number that simulating a policy needs. One test checks them all,
    because a calibration takes seconds.
    """
    monkeypatch.setattr(module, "_SECONDS", 0.02)
    monkeypatch.setattr(module, "_HOST_SECONDS", 0.02)
    monkeypatch.setattr(module, "_COMPUTE_SECONDS", 0.001)
    monkeypatch.setattr(module, "_WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(contention, "_WINDOW_SECONDS", 0.02)
    monkeypatch.setattr(link, "COPY_SIZES", sizes := (2**16, 2**18, 2**20))
    monkeypatch.setattr(chunk_updates, "_SIZES", (64, 512))
    monkeypatch.setattr(measured_costs, "_LEAST_WINDOW", 512)
    monkeypatch.setattr(rates, "_TOUCHED_BYTES", 2**22)
    monkeypatch.setitem(rates._MATRIX_ROWS, "cpu", 128)
    monkeypatch.setattr(module, "_LEAST_ATTENTION", 0.0)
    plan = executable(vocabulary=300, loss_chunk=13)
    chunk, most = plan.workload.loss_chunk, plan.workload.tokens
    assert 8 < chunk < most
    monkeypatch.setattr(module, "_LOSS_CHUNKS", (8, chunk, most - 1, most))
    messages: list[str] = []
    hardware = module.calibrate(
        "here",
        plan.model,
        plan.workload,
        config_of(plan.model),
        torch.device("cpu"),
        host_bytes=2**33,
        device_bytes=2**32,
        progress=messages.append,
    )
    assert len(messages) == len(set(messages)) >= 3
    assert [line for line in messages if "turn" in line] == [
        line
        for turn in (1, 2)
        for line in (
            f"optimizer on the CPU: layers, chunks and gradient accumulation, turn {turn}",
            f"copies, alone and together, turn {turn}",
        )
    ]
    assert {64, 512} <= {size for size, _ in hardware.costs.curves["cpu_update"]}, (
        "parts of layers were not measured"
    )
    assert (hardware.host_bytes, hardware.device_bytes, hardware.name) == (2**33, 2**32, "here")
    table = hardware.costs
    assert table is not None

    assert len(table.host_factors) > 10, "there are windows in each turn and after each plan"
    assert list(table.host_factors) == sorted(table.host_factors)
    assert table.host_factors[0] > 0
    assert table.process_bytes == 0, (
        "without a GPU, the pools of device memory would count as the process'"
    )

    # Every kind of op has a curve, and compute ops are measured for this model and workload.
    # The time to code gradients in 8 bits is predicted from the datasheet's rates.
    assert {key.partition("@")[0].partition(":")[0] for key in table.curves} == set(CURVE_KINDS) - {
        "encode_gradients"
    }
    shape = f"{plan.model.shape}/{plan.workload.shape}"
    # The head is also measured with the other loss chunks that are smaller than the micro-batch.
    assert {key: [head[0] for head in heads] for key, heads in table.heads.items()} == {
        shape: [8, most - 1]
    }
    assert all(duration > 0 == size for _, duration, size in table.heads[shape])
    assert table.compute.keys() == {*COMPUTE_KINDS, *EVALUATION_KINDS}
    kept = shape.replace("/", f"{SAVED_ATTENTION_SUFFIX}/")
    assert all(
        durations.keys() - {kept} == {shape} and min(durations[shape]) > 0
        for durations in table.compute.values()
    )
    assert {kind for kind, durations in table.compute.items() if kept in durations} == {"recompute"}
    assert 0 < table.compute["recompute"][kept][0] < table.compute["recompute"][shape][0]
    amounts = {op.kind: op.amount for op in (*lower(plan).ops, *evaluation(plan).ops) if op.shape}
    assert {kind: durations[shape][0] for kind, durations in table.compute.items()} == amounts
    assert "accumulate_gradients:add" in table.curves
    assert {"norm@compute", "norm@update", "update_ratios", "update_ratios@update"} <= set(
        table.curves
    )
    assert len(table.curves["update_ratios@update"]) >= 2, (
        "only one of layer and chunk was measured"
    )
    assert len(table.curves["update"]) >= 2, "only one of layer and chunk was measured"

    # The numbers have plausible units on a machine of any speed and load.
    for kind in ("load_weights", "save_gradients"):
        assert tuple(size for size, _ in table.curves[kind]) == sizes[:-1], "all but the largest"
    assert all(0 < share <= 1 for others in table.contention.values() for share in others.values())
    measured = set(LANES) - {"exchange"}  # this curve needs several GPUs
    assert {lane: set(others) for lane, others in table.contention.items()} == {
        lane: measured - {lane} for lane in measured
    }
    assert 0.001 < hardware.h2d_gb_per_s < 10_000
    assert 0.001 < hardware.thread_gb_per_s < 10_000
    assert 1e5 < hardware.cpu_adam_per_s < 1e13
    assert hardware.peak_tflops["bf16"] > 0
    assert [size for size, _ in hardware.h2d_curve] == [
        size for size, _ in table.curves["load_weights"]
    ]
    assert hardware.h2d_curve[-1][1] == pytest.approx(hardware.h2d_gb_per_s)
    assert hardware.link_latency_ns == table.curves["load_weights"][0][1]
    assert hardware.uncertainty == 0.10
    assert table.fixed is not None
    assert 0 < table.fixed.launch_ns < 10**8
    assert 0 < table.fixed.backward_call_ns < 10**8
    assert 0.0001 < table.fixed.first_touch_gb_per_s < 10_000
    assert table.fixed.event_ns == table.fixed.registration_gb_per_s == 0, "only a GPU has these"

    # Every measured number has a spread, so that a second calibration can be compared with it.
    numbers = {f"{kind} {size}" for kind, points in table.curves.items() for size, _ in points}
    numbers |= {f"{kind} {shape}" for kind, shapes in table.compute.items() for shape in shapes}
    numbers |= {
        f"contention.{lane}.{other}" for lane in measured for other in measured if lane != other
    } | {f"dispatch_ns.{lane}" for lane in table.dispatch_ns}
    numbers |= {
        "peak_tflops.bf16",
        "device_gb_per_s",
        "host_gb_per_s",
        "thread_gb_per_s",
        "cpu_adam_per_s",
    }
    numbers |= {"step_overhead_ns", "fixed.first_touch_gb_per_s"}
    numbers |= {"fixed.launch_ns", "fixed.backward_call_ns"}
    single = {
        f"{kind} {points[1][0]}"
        for kind, points in table.curves.items()
        if len(points) == 2 and points[1] == tuple(2 * number for number in points[0])
    }
    assert table.spread.keys() == numbers - single, (
        "all but the second point of a rate have a spread"
    )
    assert all(share >= 0 for share in table.spread.values())
    assert {"h2d", "d2h", "compute", "cpu"} <= table.dispatch_ns.keys()
    same = agreement(hardware, hardware)
    assert (same.differences, same.noisy) == ((), ())
    assert same.compared >= len(table.spread) - len(table.dispatch_ns) - 1, (
        "only zeros are not compared"
    )

    # The file holds the same calibration.
    write_toml(tmp_path / "here.toml", hardware)
    assert HardwareSpec.load(str(tmp_path / "here.toml")) == hardware

    # Every policy can be simulated, with and without accumulation and with each kind of clipping.
    costs = cost_model(hardware, plan.model, plan.workload)
    assert isinstance(costs, Calibrated)
    for policy in POLICIES:
        for changes in (
            {},
            {"accumulation": 3},
            {"clipping": "none", "checkpoint_interval": 2},
            {"clipping": "layer"},
            {"clipping": "update"},
        ):
            schedule = lower(executable(policy, vocabulary=300, chunk_bytes=2**16, **changes))
            predicted = simulate(schedule, costs)
            assert {span.op for span in predicted.spans} == {op.id for op in schedule.ops}
            assert predicted.makespan_ns > sum(
                span.duration_ns for span in predicted.spans if span.kind == "backward"
            )
            assert not [op.id for op in schedule.ops if op.shape and costs.extrapolated(op)]
    for policy in peers():
        assert simulate(lower(executable(policy, vocabulary=300)), costs).makespan_ns > 0


def test_a_model_that_does_not_fit_cannot_be_calibrated(executable: Callable[..., Plan]) -> None:
    plan = executable()
    with pytest.raises(
        UserError, match=r"^host memory: found 4\.00 KiB; allowed: at least "
    ):  # The error comes before any page is touched.
        module.calibrate(
            "here",
            plan.model,
            plan.workload,
            config_of(plan.model),
            torch.device("cpu"),
            host_bytes=2**12,
            device_bytes=2**33,
        )
    with pytest.raises(UserError, match=r"^device memory: found .*; allowed: at least "):
        module.calibrate(
            "here",
            plan.model,
            plan.workload,
            config_of(plan.model),
            torch.device("cpu"),
            host_bytes=2**33,
            device_bytes=2**12,
        )


def test_a_calibration_that_fails_leaves_nothing_behind(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, closed = executable(), list[str]()
    monkeypatch.setattr(module, "_measure_optimizer", lambda *_: 1 / 0)
    for name, kind, method in (
        ("pool", module.ReusablePinnedPool, "free"),
        ("parts", module.ChunkUpdates, "close"),
    ):
        usual = getattr(kind, method)
        monkeypatch.setattr(
            kind, method, lambda self, name=name, usual=usual: (closed.append(name), usual(self))
        )
    with pytest.raises(ZeroDivisionError):
        module.calibrate(
            "here",
            plan.model,
            plan.workload,
            config_of(plan.model),
            torch.device("cpu"),
            host_bytes=2**33,
            device_bytes=2**33,
        )
    assert sorted(closed) == ["parts", "pool"]


def test_optimizers_are_measured_with_layers_that_are_not_compiled(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their times do not depend on it, and compiling takes minutes."""
    plan, quick = executable(), list[Workload]()
    compiled = msgspec.structs.replace(plan.workload, compiled=True)
    monkeypatch.setattr(
        module, "_measure_optimizer", lambda _, __, work: (quick.append(work), 1 / 0)
    )
    with pytest.raises(ZeroDivisionError):
        module.calibrate(
            "here",
            plan.model,
            compiled,
            config_of(plan.model),
            torch.device("cpu"),
            host_bytes=2**33,
            device_bytes=2**33,
        )
    assert [(work.compiled, work.fp8) for work in quick] == [(False, None)]


def test_the_link_is_measured_next_to_host_updates_of_whole_layers(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's updates are measured over whole layers, whatever the limit of host memory.

    During updates of a few parameters, a copy would wait for Python's lock.
    """
    plan, made = executable(), list[int]()
    monkeypatch.setattr(module, "ChunkUpdates", lambda count, *_: made.append(count) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.calibrate(
            "here",
            plan.model,
            plan.workload,
            config_of(plan.model),
            torch.device("cpu"),
            host_bytes=2**20,
            device_bytes=2**33,
        )
    assert made == [sum(layer.elements for layer in plan.model.shortest(module._LAYERS).decoders)]


def test_the_memory_of_the_process_is_the_median_over_the_turns_of_the_host_s_optimizer(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, cuda = executable(), torch.device("cuda")
    bench = module._Bench(torch.device("cpu"), (2**33, 2**33), lambda _: None)
    grown = iter([4, 6])

    @contextlib.contextmanager
    def growth() -> Iterator[list[int]]:
        yield [next(grown)]

    monkeypatch.setattr(
        module,
        "profile_steps",
        lambda plan, *_, **__: StepProfile(lower(plan), [], [], None, {}, 0, 0, 1),
    )
    monkeypatch.setattr(module, "growth", growth)
    monkeypatch.setattr(bench, "_collect", lambda *_: None)
    subject = module.Subject(plan.model, config_of(plan.model))
    bench.run(subject, bench.plan("resident", plan.model, plan.workload), ())
    for turn in (1, 2):
        module._measure_host_optimizer(
            bench, SimpleNamespace(measure=lambda _: {}), subject, plan.workload, turn
        )
    assert bench.process_growth == [4, 6]
    assert measured_costs._process_bytes(bench.process_growth, cuda) == 5
    assert measured_costs._process_bytes(bench.process_growth, torch.device("cpu")) == 0, (
        "on the CPU, the pools of the device are memory of the process too"
    )
    assert measured_costs._process_bytes([], cuda) == 0


def test_steps_are_counted_after_the_warm_up_and_evaluations_after_the_first(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that advances by one second per reading, two steps take three seconds."""
    plan = executable("resident")
    clock = itertools.count()
    monkeypatch.setattr(profile_steps, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for steps, seconds, done in ((3, 0.0, 3), (1, 3.0, 3)):
        found = profile_steps.profile_steps(
            plan,
            config_of(plan.model),
            torch.device("cpu"),
            steps=steps,
            seconds=seconds,
            evaluates=True,
        )
        assert len(found.timelines) == len(found.seconds) == done
        assert found.evaluation is not None
        op, durations = found.evaluation
        assert op.kind == "loss"
        assert len(durations) == 3


def test_compute_alone_runs_on_random_weights_and_without_other_ops(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of zeros would be too fast, so every buffer that a forward reads is filled."""
    plan, executors = executable(), list[Executor]()

    def filled(executor: Executor, weights: Weights) -> None:
        fill(executor, weights)
        executors.append(executor)
        for op in executor.schedule.ops:
            if op.kind == "forward":
                for buffer in op.reads[:2]:
                    assert executor.memory().flat(buffer, torch.float32, 32).abs().min() > 0

    monkeypatch.setattr(profile_steps, "fill", filled)
    found = profile_steps.profile_steps(
        plan, config_of(plan.model), torch.device("cpu"), steps=1, seconds=0, compute_only=True
    )
    assert len(executors) == 1
    assert {op.kind for op in found.schedule.ops} == set(COMPUTE_KINDS)
    assert len(found.timelines) == 1
    assert found.host_bytes == 0


class Profiles:
    """Replaces `profile_steps`. Each op takes `duration_ns`, and plans of which `large` is true do
    not fit.
    """

    def __init__(self, duration_ns: int, large: Callable[[Plan], bool]) -> None:
        self.duration_ns, self.large = duration_ns, large
        self.runs: list[tuple[str, int, bool, bool]] = []
        """Policy and number of layers of each plan, and whether only compute ran and whether memory
        was watched."""

    def __call__(
        self,
        plan: Plan,
        *_: object,
        schedule: Schedule,
        compute_only: bool,
        watches: bool,
        **__: object,
    ) -> StepProfile:
        self.runs.append((plan.policy, plan.model.layers, compute_only, watches))
        if compute_only and self.large(plan):
            raise UserError("memory", found="too little", allowed="more", fix="take fewer layers")
        made = compute_alone(plan) if compute_only else schedule
        spans = [
            Span(op=op.id, lane=op.lane, start_ns=0, end_ns=self.duration_ns) for op in made.ops
        ]
        timeline = Timeline(name="measured", digest="", spans=tuple(spans))
        peaks = dict.fromkeys(COMPUTE_KINDS, 2**30) if watches else {}
        return StepProfile(made, [timeline], [1.0], None, peaks, 0, 0, 1)


@pytest.mark.parametrize(
    ("duration_ns", "most", "counts"),
    [
        (40_000_000, 99, [8]),  # forward, recompute and backward of 8 layers take about 1 s
        (40_000_000, 5, [8, 3]),
        (40_000_000, 2, [8, 3]),
        (1_000_000, 99, [16]),
        (300_000_000, 99, [3]),
    ],
)
def test_a_gpu_times_compute_alone_for_a_second_a_step(
    executable: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    duration_ns: int,
    most: int,
    counts: list[int],
) -> None:
    """A GPU at its power limit is faster after a pause, so many layers run without one.

    Their number follows from a run of three layers. If they do not fit, three are timed. If three
    do not fit either, the workload is left out.
    """
    plan, collected = executable(layers=20), set[str]()
    profiles = Profiles(duration_ns, lambda plan: plan.model.layers > most)
    runs = profiles.runs
    monkeypatch.setattr(module, "profile_steps", profiles)
    bench = module._Bench(torch.device("cpu"), (2**33, 2**33), lambda _: None)
    bench._cuda = True
    monkeypatch.setattr(bench, "_collect", lambda _, op, __: runs[-1][2] and collected.add(op.kind))
    subject = module.Subject(plan.model, config_of(plan.model))
    found = bench.layers(subject, plan.workload, plan.workload)
    assert runs[0] == ("resident", 3, False, True)
    assert runs[1 : 1 + len(counts)] == [("double_buffer", count, True, False) for count in counts]
    assert (found is None) == (most < 3)
    assert collected == (set(COMPUTE_KINDS) if found else set())


@pytest.mark.parametrize(
    ("duration_ns", "most", "counts"),
    [(10_000_000, 99, [8]), (1_000_000, 99, [16]), (1_000_000, 2, [16, 1]), (10**9, 99, [1])],
)
def test_a_gpu_times_a_head_behind_several_layers(
    executable: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    duration_ns: int,
    most: int,
    counts: list[int],
) -> None:
    """The host calls the head's functions while the GPU computes the layers, as in a whole model.

    Behind one layer, the time would be that of the host's calls.
    """
    plan = executable(layers=20, batch=64)
    profiles = Profiles(
        duration_ns, lambda plan: plan.workload.loss_chunk == 2048 and plan.model.layers > most
    )
    runs = profiles.runs
    monkeypatch.setattr(module, "profile_steps", profiles)
    monkeypatch.setattr(module, "_LOSS_CHUNKS", (2048,))
    bench = module._Bench(torch.device("cpu"), (2**33, 2**33), lambda _: None)
    bench._cuda = True
    subject = module.Subject(plan.model, config_of(plan.model))
    work = msgspec.structs.replace(plan.workload, batch=4096, loss_chunk=1024)
    point = bench.layers(subject, work, work)
    runs.clear()
    heads = bench.heads(subject, [work], [point])
    assert runs == [("double_buffer", count, True, True) for count in counts]
    ((chunk, duration, size),) = heads[f"{plan.model.shape}/{work.shape}"]
    assert (chunk, duration) == (2048, duration_ns)
    assert size >= 2**30


def test_ops_run_one_at_a_time_only_if_asked(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, schedules = executable("double_buffer"), list[Schedule]()

    def profile(_plan: Plan, *_: object, schedule: Schedule, **__: object) -> StepProfile:
        schedules.append(schedule)
        return StepProfile(schedule, [], [], None, {}, 0, 0, 1)

    monkeypatch.setattr(module, "profile_steps", profile)
    bench = module._Bench(torch.device("cpu"), (2**33, 2**33), lambda _: None)
    subject = module.Subject(plan.model, config_of(plan.model))
    bench.run(subject, plan, ())
    bench.run(subject, plan, (), alone=True)
    assert schedules == [lower(plan), serialized(lower(plan))] != [lower(plan)] * 2


def test_dispatch_is_the_median_wait_of_a_ready_op() -> None:
    """The dispatch time of a lane is the median time from when an op could start to when it starts.
    F0 ends at 10 and F1 starts at 13, so F1 waits 3. F2 needs W0, which ends at 40, and starts at
    45.
    """
    text = "schedule test\nF0 compute\nW0 h2d\nF1 compute\nF2 compute after=W0\n"
    times: dict[str, tuple[int, int]] = {
        "F0": (1, 10),
        "W0": (7, 40),
        "F1": (13, 20),
        "F2": (45, 50),
    }
    schedule = from_text(text)
    spans = tuple(
        Span(op=op.id, lane=op.lane, start_ns=times[op.id][0], end_ns=times[op.id][1])
        for op in schedule.ops
    )
    trial = StepProfile(
        schedule, [Timeline(name="measured", digest="", spans=spans)], [1.0], None, {}, 0, 0, 0
    )
    assert measured_costs._waits(trial) == {"compute": [[1, 3, 5]], "h2d": [[7]]}
    assert measured_costs._dispatch(measured_costs._waits(trial)) == {"compute": 3, "h2d": 7}


def test_half_of_the_first_layer_s_time_counts_as_matrix_products() -> None:
    """Here memory is so slow that the elementwise kernels would take longer than the whole layer.

    No other layer needs to be measured.
    """
    model, work = whole_model_of("qwen3_moe", mlp_only_layers=[0]), Workload(batch=2, sequence=16)
    layer = model.decoders[0]
    assert layer.signature != model.decoders[-1].signature
    times = {f"{layer.signature}/{work.shape}": (0, 2_000_000)}
    table: Any = SimpleNamespace(compute={"forward": times})
    flops = op_work(model, "forward", layer.name, work).linear_flops
    slow: Any = SimpleNamespace(device_bytes_per_s=1.0, matmul_flops=4000 * flops)
    found = measured_costs.linear_efficiency(table, slow, model, work, AttentionRate.usual())
    assert found == pytest.approx(0.25)


def test_attention_alone_is_measured_over_lengths() -> None:
    """Each row is four times as long as the previous one, and forward and backward are measured.

    A model that writes out its scores has no kernel to measure.
    """
    model, work = whole_model_of("qwen2"), Workload(batch=2, sequence=16, dtype="fp32")
    points = attention_kernel.attention_curve(model, work, torch.device("cpu"))
    assert len(points) > 1
    assert [length for length, _, _ in points] == [512 * 4**index for index in range(len(points))]
    assert all(forward > 0 and backward > 0 for _, forward, backward in points)
    scores = whole_model_of("bloom")
    assert not attention_kernel.attention_curve(scores, work, torch.device("cpu"))


def test_short_rows_are_measured_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has as many tokens as a step, and its time is divided by the number of rows."""
    seen: list[tuple[int, int]] = []
    attend = attention_kernel.scaled_dot_product_attention

    def recorded(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append((query.shape[0], query.shape[2]))
        return attend(query, *others, **options)

    monkeypatch.setitem(attention_kernel._TOKENS, "cpu", 1024)
    monkeypatch.setitem(attention_kernel._MOST_SECONDS, "cpu", 0.0)
    monkeypatch.setattr(attention_kernel, "scaled_dot_product_attention", recorded)
    monkeypatch.setattr(
        attention_kernel, "time_repeatedly", lambda *_, **__: SimpleNamespace(value=2000 / 1e9)
    )
    model, work = whole_model_of("qwen2"), Workload(batch=2, sequence=16, dtype="fp32")
    points = attention_kernel.attention_curve(model, work, torch.device("cpu"))
    assert seen == [(2, 512), (1, 2048)]
    assert points == ((512, 1000, 1000), (2048, 2000, 2000))


def test_the_rate_of_attention_is_that_of_the_two_longest_rows() -> None:
    """With an efficiency of 1/4 of 1e12 FLOP/s and 1,000 half tokens, rows take these times."""
    model = whole_model_of("qwen2")
    heads, _, size = model.heads

    def nanoseconds(length: int) -> int:
        return round(7 * heads * size * length * (length + 1000) / 0.25e12 * 1e9)

    points = tuple(
        (length, nanoseconds(length) // 4, nanoseconds(length) - nanoseconds(length) // 4)
        for length in (512, 8192, 32768)
    )
    rate = attention_kernel.attention_rate(model, points, 1e12)
    assert rate
    assert rate.efficiency == pytest.approx(0.25, rel=1e-3)
    assert rate.half_tokens == pytest.approx(1000, abs=2)
    assert attention_kernel.attention_rate(model, points[:1], 1e12) is None


def test_a_larger_copy_that_was_faster_counts_as_long_as_the_smaller() -> None:
    assert measured_costs.copy_curve([(100, 50), (200, 40), (400, 80), (800, 0)]) == (
        (100, 2.0),
        (200, 4.0),
        (400, 5.0),
        (800, 10.0),
    )


def test_both_directions_at_once_are_no_faster_than_one_alone() -> None:
    h2d, d2h = (
        measured_costs.copy_curve([(100, 10), (200, 9), (400, 30)]),
        measured_costs.copy_curve([(100, 11), (200, 12), (400, 33)]),
    )
    curve = measured_costs.duplex_curve([(100, 5), (200, 15), (400, 14)], h2d, d2h)
    assert curve == (
        (100, 10.0),
        (200, pytest.approx(200 / 15, rel=1e-4)),
        (400, pytest.approx(400 / 30, rel=1e-4)),
    )
    spec = {
        "name": "x",
        "source": "",
        "device_bytes": 2**30,
        "host_bytes": 2**30,
        "cores": 1,
        "peak_tflops": {"bf16": 1.0},
        "linear_efficiency": 1.0,
    }
    rates_ = dict.fromkeys(
        ("device_gb_per_s", "h2d_gb_per_s", "d2h_gb_per_s", "host_gb_per_s", "thread_gb_per_s"), 1.0
    )
    others = {
        "duplex_fraction": 1.0,
        "cpu_update_per_s": 1e9,
        "cpu_adam_per_s": 1e9,
        "h2d_curve": h2d,
        "d2h_curve": d2h,
    }
    assert HardwareSpec(**spec, **rates_, **others, duplex_curve=curve).duplex_curve == curve


def test_points_are_sorted_and_a_single_point_is_extended_in_proportion() -> None:
    assert measured_costs._ascending([(30, 3), (10, 1)]) == ((10, 1), (30, 3))
    assert measured_costs._ascending([(100, 7)]) == ((100, 7), (200, 14))
    assert measured_costs._ascending([(0, 7)]) == ((0, 7),)


def test_the_update_in_another_format_is_measured_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_HOST_SECONDS", 0.001)
    said: list[str] = []
    bench: Any = SimpleNamespace(
        device=torch.device("cpu"), progress=said.append, samples={("cpu_update", 2**14): [1]}
    )
    module._measure_format(bench, "bf16-sr", 2**15)
    assert said == ["optimizer on the CPU in bf16-sr"]
    assert set(bench.samples) == {
        ("cpu_update", 2**14),
        ("cpu_update:bf16-sr", 2**14),
        ("cpu_update:bf16-sr:wide", 2**14),
    }


def test_measured_shapes_are_listed_by_their_numbers_of_rows() -> None:
    samples = {("forward", "a/12x512"): [1], ("forward", "a/3x512"): [2], ("copy", 2**20): [3]}
    assert [key for key, _ in sorted(samples.items(), key=measured_costs._by_number)] == [
        ("copy", 2**20),
        ("forward", "a/3x512"),
        ("forward", "a/12x512"),
    ]


def test_host_factors_are_windows_relative_to_the_cost_table() -> None:
    """Updates of few parameters and ops without a size are left out."""
    windows = {
        ("cpu_update", 2**24): [100.0, 110.0, 100.0, 90.0],
        ("cpu_update:wide", 2**25): [30.0, 20.0, 20.0],
        ("cpu_update", 2**14): [1.0, 9.0],
        ("forward", "a/1x2-bf16"): [1.0, 9.0],
    }
    samples = {("cpu_update", 2**24): [99, 100, 200], ("cpu_update:wide", 2**25): [20, 30]}
    assert measured_costs.host_factors(windows, samples) == (0.8, 0.8, 0.9, 1, 1, 1.1, 1.2)
    assert measured_costs.host_factors({}, samples) == ()


def test_the_cpu_optimizer_has_a_window_in_each_turn_and_after_each_plan(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows have the mean durations of updates, and their samples are pooled."""
    plan = executable()
    bench = module._Bench(torch.device("cpu"), (2**33, 2**33), lambda _: None)
    monkeypatch.setattr(
        module,
        "profile_steps",
        lambda plan, *_, **__: StepProfile(lower(plan), [], [], None, {}, 0, 0, 1),
    )
    monkeypatch.setattr(bench, "_collect", lambda *_: None)
    subject = module.Subject(plan.model, config_of(plan.model))

    class Chunks:
        """Takes longer each time."""

        times = itertools.count(1)

        def window(self, _: float) -> dict[tuple[str, str | int], list[int]]:
            time = 10 * next(self.times)
            return {("cpu_update", 2**24): [time, time + 2]}

        def measure(self, seconds: float) -> dict[tuple[str, str | int], list[int]]:
            return {**self.window(seconds), ("cpu_update", 2**14): [7, 9]}

    bench.updates = chunks = Chunks()
    bench.run(subject, bench.plan("resident", plan.model, plan.workload), ())
    assert bench.host_windows == {("cpu_update", 2**24): [11]}
    module._measure_host_optimizer(bench, chunks, subject, plan.workload, 1)
    assert bench.host_windows == {
        ("cpu_update", 2**24): [11, 21, 31, 41],
        ("cpu_update", 2**14): [8],
    }
    assert bench.samples == {
        ("cpu_update", 2**24): [10, 12, 20, 22, 30, 32, 40, 42],
        ("cpu_update", 2**14): [7, 9],
    }


def test_updates_are_as_large_as_the_layers_of_the_largest_model(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates of the first model may be too small to show how the host's speed varies."""
    plan, other, made = executable(), executable(hidden=48), list[int]()
    sizes = [
        sum(layer.elements for layer in each.model.shortest(module._LAYERS).decoders)
        for each in (plan, other)
    ]
    assert sizes[0] < sizes[1]
    monkeypatch.setattr(module, "ChunkUpdates", lambda count, *_: made.append(count) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.calibrate(
            "here",
            plan.model,
            plan.workload,
            config_of(plan.model),
            torch.device("cpu"),
            others=[module.Subject(other.model, config_of(other.model))],
            host_bytes=2**33,
            device_bytes=2**33,
        )
    assert made == [sizes[1]]


@pytest.mark.parametrize("fits", [True, False])
def test_updates_leave_host_memory_for_the_plans_of_all_models(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A model that does not fit is skipped, so it needs no memory."""
    plan, other, made = executable(), executable(hidden=48), list[int]()
    work = msgspec.structs.replace(plan.workload, accumulation=2)
    bench = module._Bench(torch.device("cpu"), (2**33, 2**33), lambda _: None)
    first, largest = (
        sum(
            buffer.allocated
            for buffer in lower(
                bench.plan("sequential", each.model.shortest(module._LAYERS), work)
            ).buffers
            if buffer.place == "host"
        )
        for each in (plan, other)
    )
    assert first < largest
    limit = largest + 180 if fits else largest - 1
    monkeypatch.setattr(module, "_LEAST_UPDATED", 1)
    monkeypatch.setattr(module, "ChunkUpdates", lambda count, *_: made.append(count) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.calibrate(
            "here",
            plan.model,
            plan.workload,
            config_of(plan.model),
            torch.device("cpu"),
            others=[module.Subject(other.model, config_of(other.model))],
            host_bytes=limit,
            device_bytes=2**33,
        )
    assert made == [(limit - (largest if fits else first)) // module.BYTES]


def test_a_window_has_the_largest_updates_of_the_state() -> None:
    chunks = chunk_updates.ChunkUpdates(2**15 + 10, torch.bfloat16, 1)
    try:
        ((key, durations),) = chunks.window(0.0).items()
    finally:
        chunks.close()
    assert key == ("cpu_update", 2**14)
    assert len(durations) == chunk_updates._LEAST
