"""Tests of what a calibration runs, in which order, and which numbers of the machine it derives.

Here nothing is measured, so these tests take milliseconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import msgspec
import pytest
import torch

from megatrain.runtime.calibration import calibrate as module
from megatrain.runtime.calibration.calibrate import Subject, calibrate, collective_memory
from megatrain.runtime.calibration.contention import Contention
from megatrain.runtime.calibration.link import LinkRates
from megatrain.runtime.calibration.measured_costs import OPTIMIZER_KINDS
from megatrain.runtime.calibration.microbenchmarks import MeasuredRates
from megatrain.runtime.calibration.profile_steps import StepProfile
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.base.errors import DoesNotFit, UserError
from megatrain.simulator.hardware.cost_table import FixedCosts
from megatrain.simulator.hardware.machine import (
    ATTENTION_EFFICIENCY,
    ATTENTION_HALF_TOKENS,
    AttentionRate,
    HardwareSpec,
)
from megatrain.simulator.model.op_work import attention_shape, op_work
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Span, Timeline

CPU = torch.device("cpu")
NO_ROOM = UserError("memory", found="too little", allowed="more", fix="take fewer layers")


def done(plan: Plan) -> StepProfile:
    """Returns a step in which each op takes 1 ns."""
    schedule = lower(plan)
    spans = tuple(Span(op=op.id, lane=op.lane, start_ns=0, end_ns=1) for op in schedule.ops)
    timeline = Timeline(name="measured", digest="", spans=spans)
    return StepProfile(schedule, [timeline], [1e-9], None, {}, 0, 0, 1)


RATES = MeasuredRates(
    LinkRates(
        copies={
            "load_weights": [(1000, 200), (4000, 400)],
            "save_gradients": [(1000, 100), (4000, 500)],
        },
        duplex=[],
        shares=[],
        spread={},
    ),
    contention=Contention({"h2d": {"d2h": 0.75}, "d2h": {"h2d": 0.5}}, None, {}),
    matmul_flops=2e12,
    device_bytes_per_s=3e9,
    host_bytes_per_s=4e9,
    thread_bytes_per_s=5e9,
    cpu_adam_per_s=6e9,
    fixed=FixedCosts(launch_ns=5, event_ns=0, first_touch_gb_per_s=1.0, registration_gb_per_s=0.0),
    spread={},
    fp8_flops=0.0,
)


class Calibration:
    """A calibration in which each measurement only adds a line to `log`."""

    def __init__(self, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plan, self.log, self.said = plan, list[str](), list[str]()
        self.made: list[tuple[int, str]] = []
        self.quick: list[Workload] = []
        self.rates, self.points = RATES, ((512, 1, 1),)
        self.moments: list[int] = []
        """Number of lines in `log` at each measurement of the link."""
        log = self.log

        def chunks(count: int, _dtype: object, _threads: int, state: str = "") -> Any:
            self.made.append((count, state))
            return SimpleNamespace(
                close=lambda: log.append("closed"),
                in_turn=lambda: None,
                window=lambda _: {},
                measure=lambda seconds: log.append(f"update for {seconds:g} s") or {},
            )

        def measure_optimizer(bench: Any, _: Subject, workload: Workload) -> None:
            self.quick.append(workload)
            bench.samples["cpu_update", 2**14] = [2**13]

        def layers(_bench: Any, subject: Subject, work: Workload, base: Workload) -> None:
            assert base.accumulation == work.accumulation == 1
            log.append(f"{subject.model.hidden} {work.batch}x{work.sequence}")

        for name, replaced in {
            "ChunkUpdates": chunks,
            "preflight": lambda plan, *_, **__: log.append(f"checked {plan.model.hidden}"),
            "profile_steps": lambda plan, *_, **__: done(plan),
            "_measure_optimizer": measure_optimizer,
            "_measure_host_optimizer": lambda *given: log.append(f"turn {given[-1]}"),
            "attention_curve": lambda *_: self.points,
            "attention_curves": lambda *_: {None: self.points, "flash": self.points},
            "measure_rates": lambda *_: self.rates,
            "LinkBench": lambda *_: SimpleNamespace(
                measure=lambda: self.moments.append(len(log)), rates=lambda: None
            ),
            "linear_efficiency": lambda *_: 0.123456,
        }.items():
            monkeypatch.setattr(module, name, replaced)
        monkeypatch.setattr(module._Bench, "layers", layers)
        monkeypatch.setattr(module.ReusablePinnedPool, "reserve", lambda *_: None)

    def run(self, **changes: Any) -> HardwareSpec:
        plan = self.plan
        options = {"host_bytes": 2**33, "device_bytes": 2**32, "progress": self.said.append}
        return calibrate(
            "here",
            plan.model,
            changes.pop("workload", plan.workload),
            config_of(plan.model),
            CPU,
            **{**options, **changes},
        )


@pytest.fixture
def calibration(executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> Calibration:
    return Calibration(executable(), monkeypatch)


@pytest.mark.parametrize(
    ("points", "order"),
    [
        (1, "turn 1, 32 2x16, turn 2"),
        (3, "turn 1, 32 2x16, turn 2, 32 3x16, turn 3, 32 4x16, turn 4"),
        (
            7,
            "turn 1, 32 2x16, 32 3x16, 32 4x16, turn 2, 32 5x16, 32 6x16, 32 7x16, turn 3, 32 8x16,"
            " turn 4",
        ),
    ],
)
def test_the_host_is_measured_in_at_most_four_turns_between_the_layers(
    calibration: Calibration, points: int, order: str
) -> None:
    """Its speed varies within minutes, so its turns are spread over the whole time."""
    work = calibration.plan.workload
    grid = [msgspec.structs.replace(work, batch=2 + number) for number in range(points)]
    calibration.run(grid=grid)
    assert calibration.log == ["checked 32", *order.split(", "), "closed"]
    layers = [line for line in calibration.said if line.startswith("layers")]
    assert len(layers) == points
    assert layers[0] == "layers of small, 2 x 16 tokens"
    turns = [line for line in calibration.said if line.startswith("copies")]
    assert len(turns) == len(calibration.moments)
    turn = [number for number, line in enumerate(calibration.log, 1) if line.startswith("turn")]
    assert calibration.moments == turn, "the link is measured after each turn of the optimizer"
    assert [line for line in calibration.said if line not in layers + turns] == [
        "host memory: touching and registering",
        "all lanes together",
        "attention alone",
        "rates",
    ]


def test_all_models_are_checked_before_the_first_is_measured(
    calibration: Calibration, executable: Callable[..., Plan]
) -> None:
    other = executable(hidden=48).model
    calibration.run(others=[Subject(other, config_of(other))])
    assert calibration.log == [
        "checked 32",
        "checked 48",
        "turn 1",
        "32 2x16",
        "turn 2",
        "48 2x16",
        "turn 3",
        "closed",
    ]


@pytest.mark.parametrize(
    ("batch", "sequence", "rows"), [(2, 16, 2), (300, 16, 256), (300, 24, 170), (3, 8192, 1)]
)
def test_optimizers_are_measured_after_small_micro_batches(
    calibration: Calibration, batch: int, sequence: int, rows: int
) -> None:
    """Their time does not depend on the tokens, of which 4,096 are enough."""
    workload = Workload(batch=batch, sequence=sequence, accumulation=3)
    calibration.run(workload=workload)
    (quick,) = calibration.quick
    assert (quick.batch, quick.sequence, quick.accumulation) == (rows, sequence, 1)
    assert isinstance(quick.batch, int)


def test_memory_is_that_of_the_machine_unless_the_user_names_it(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.machine, "usable_device_bytes", lambda _: 2**30)
    monkeypatch.setattr(module, "usable_host_bytes", lambda: 2**31)
    found = calibration.run(host_bytes=None, device_bytes=None)
    assert (found.device_bytes, found.host_bytes) == (2**30, 2**30), "parts of one memory"
    found = calibration.run(host_bytes=None, device_bytes=2**29)
    assert (found.device_bytes, found.host_bytes) == (2**29, 2**31 - 2**29)
    with pytest.raises(UserError, match=r"--device-memory: found 2\.00 GiB; allowed: less"):
        calibration.run(host_bytes=None, device_bytes=2**31)
    found = calibration.run(host_bytes=2**29, device_bytes=2**28)
    assert (found.device_bytes, found.host_bytes) == (2**28, 2**29)


@pytest.mark.parametrize("place", ["device", "host"])
def test_too_little_memory_is_refused_before_anything_is_measured(
    calibration: Calibration, place: str
) -> None:
    message = rf"{place} memory: found 1\.00 KiB; allowed: at least .* with 3 layers of .*;"
    with pytest.raises(DoesNotFit, match=rf"{message} fix: give more with --{place}-memory; or"):
        calibration.run(**{f"{place}_bytes": 1024})
    assert calibration.quick == []


def test_numbers_of_the_machine_are_in_the_units_of_their_names(calibration: Calibration) -> None:
    found = calibration.run()
    assert found.peak_tflops == {calibration.plan.workload.dtype: 2.0}
    assert (found.device_gb_per_s, found.host_gb_per_s, found.thread_gb_per_s) == (3.0, 4.0, 5.0)
    assert (found.cpu_adam_per_s, found.cpu_update_per_s) == (6e9, 2e9)
    assert found.h2d_curve == ((1000, 5.0), (4000, 10.0))
    assert found.d2h_curve == ((1000, 10.0), (4000, 8.0))
    assert (found.h2d_gb_per_s, found.d2h_gb_per_s) == (10.0, 8.0)
    assert (found.link_latency_ns, found.duplex_fraction) == (200, 0.5)
    assert found.linear_efficiency == 0.12346
    assert (found.library_bytes, found.collective_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("library", "missing"), [("h200", "attention_kernels"), ("mi300x", "peer_gb_per_s")]
)
def test_what_one_process_cannot_measure_is_that_of_the_same_gpu_in_the_library(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch, library: str, missing: str
) -> None:
    known = HardwareSpec.load(library)
    name = known.gpu_names[0]
    monkeypatch.setattr(module.machine, "describe", lambda _: {"device": name, "cores": 7})
    found = calibration.run()
    assert found.library_bytes == known.library_bytes > 0
    assert (found.collective_bytes, found.collective_peer_bytes) == (1292 * 2**20, 446 * 2**20)
    for field in ("peer_gb_per_s", "attention_kernels"):
        assert getattr(found, field) == getattr(known, field)
        assert (getattr(found, field) is None) == (field == missing)
    assert found.source.startswith(f"measured on {name}, 7 cores")


def test_a_gpu_that_the_library_does_not_have_has_the_usual_memory_of_nccl() -> None:
    of_gpu, of_cpu = (collective_memory(None, torch.device(kind)) for kind in ("cuda", "cpu"))
    assert (of_gpu, of_cpu) == ((1292 * 2**20, 446 * 2**20), (0, 0))


def test_fp8_has_a_peak_of_its_own(calibration: Calibration) -> None:
    calibration.rates = dataclasses.replace(RATES, fp8_flops=4e12)
    dtype = calibration.plan.workload.dtype
    assert calibration.run().peak_tflops == {dtype: 2.0, "fp8": 4.0}


def test_attention_has_the_rate_of_its_curve_if_two_rows_were_timed(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = calibration.run()
    usual = (ATTENTION_EFFICIENCY, ATTENTION_HALF_TOKENS)
    assert (found.attention_efficiency, found.attention_half_tokens) == usual
    assert found.costs.attention == {}
    rate = AttentionRate(efficiency=0.43, half_tokens=77)
    monkeypatch.setattr(module, "attention_rate", lambda *_: rate)
    calibration.points = ((512, 1, 1), (2048, 4, 4))
    found = calibration.run()
    assert (found.attention_efficiency, found.attention_half_tokens) == (0.43, 77)
    assert found.attention == {"flash": rate}
    assert found.costs.attention == {
        attention_shape(calibration.plan.model, work): calibration.points
        for work in (
            calibration.plan.workload,
            msgspec.structs.replace(calibration.plan.workload, attention="flash"),
        )
    }


def test_another_state_format_is_measured_over_large_updates(calibration: Calibration) -> None:
    """It has four turns of the CPU optimizer at once."""
    calibration.run(state="bf16-sr")
    assert calibration.made[1:] == [(module._LEAST_UPDATED, "bf16-sr")]
    assert calibration.log[-3:] == ["closed", "update for 4 s", "closed"]
    assert len(calibration.made) == 2
    calibration.run()
    assert len(calibration.made) == 3, "the usual format is measured in every calibration"


class Bench(module._Bench):
    """A bench whose steps only record the plan. Plans of the policies in `large` do not fit."""

    def __init__(self, large: tuple[str, ...] = ()) -> None:
        super().__init__(CPU, (2**33, 2**33), (said := list[str]()).append)
        self.said, self.large = said, large
        self.ran: list[tuple[Plan, tuple[str, ...], dict[str, Any]]] = []

    def run(self, _: Subject, plan: Plan, kinds: Any, **options: Any) -> StepProfile:
        self.ran.append((plan, tuple(kinds), options))
        if plan.policy in self.large:
            raise NO_ROOM
        return done(plan)


@pytest.fixture
def subject(executable: Callable[..., Plan]) -> Subject:
    model = executable(layers=5).model
    return Subject(model, config_of(model))


def test_the_optimizer_is_measured_on_the_device_on_the_cpu_and_in_chunks(subject: Subject) -> None:
    bench, work = Bench(), Workload(batch=2, sequence=16)
    module._measure_optimizer(bench, subject, work)
    ran = [
        (plan.policy, plan.workload.accumulation, plan.workload.clipping, kinds)
        for plan, kinds, _ in bench.ran
    ]
    assert ran == [
        ("resident", 1, "global", OPTIMIZER_KINDS),
        ("resident", 2, "global", OPTIMIZER_KINDS),
        ("overlapped", 1, "global", OPTIMIZER_KINDS),
        ("sequential", 1, "update", ("update_ratios",)),
        ("overlapped", 1, "update", ("update_ratios",)),
        ("resident", 1, "update", ("update_ratios",)),
    ]
    assert all(options["alone"] for plan, _, options in bench.ran if plan.policy == "overlapped")
    assert {plan.model.layers for plan, *_ in bench.ran} == {3}
    assert len(bench.said) == len(ran)


def test_a_model_that_cannot_be_resident_is_measured_with_other_policies(subject: Subject) -> None:
    work, small = Workload(batch=2, sequence=16), Bench(("resident",))
    module._measure_optimizer(small, subject, work)
    assert len(small.ran) == 6
    with pytest.raises(UserError):
        module._measure_optimizer(Bench(("overlapped",)), subject, work)


def test_the_cpu_adds_gradients_in_the_second_micro_batch(subject: Subject) -> None:
    bench: Any = Bench()
    chunks: Any = SimpleNamespace(measure=lambda _: {})
    module._measure_host_optimizer(bench, chunks, subject, Workload(batch=2, sequence=16), 1)
    assert [
        (plan.policy, plan.workload.accumulation, plan.model.layers) for plan, *_ in bench.ran
    ] == [("sequential", 1, 3), ("sequential", 2, 3)]
    assert all("accumulate_gradients" in kinds for _, kinds, _ in bench.ran)


BASE = Workload(batch=4, sequence=16)


@pytest.mark.parametrize(
    ("changes", "saves", "evaluates"),
    [
        ({}, True, True),
        ({"batch": 8}, False, True),
        ({"batch": 2, "sequence": 32}, True, True),
        ({"compiled": True}, True, True),
        ({"batch": 8, "compiled": True}, False, False),
    ],
)
def test_saved_attention_and_evaluations_are_measured_where_they_can_differ(
    subject: Subject,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    saves: bool,
    evaluates: bool,
) -> None:
    """The time that saved attention saves per token depends on the length only. With compiled
    layers, each evaluation would be compiled.
    """
    monkeypatch.setattr(module, "_LEAST_ATTENTION", 0.0)
    base = msgspec.structs.replace(BASE, compiled=changes.get("compiled", False))
    bench = Bench()
    point = bench.layers(subject, msgspec.structs.replace(BASE, **changes), base)
    (_, _, options), *others = bench.ran
    assert options["evaluates"] == evaluates
    assert [(kinds, plan.knobs.placement.saved_attention) for plan, kinds, _ in others] == (
        [(("recompute",), "0,1,2")] if saves else []
    )
    assert point is not None
    assert (point.saved_bytes, point.workspace) == (0, None)


def test_a_workload_that_does_not_fit_is_skipped_and_said(subject: Subject) -> None:
    bench = Bench(("sequential",))
    assert bench.layers(subject, BASE, BASE) is None
    assert bench.said == ["skipped, does not fit: 4 x 16 tokens"]


@pytest.mark.parametrize(("sequence", "saves"), [(16, False), (4096, True)])
def test_attention_is_saved_where_it_is_a_part_of_the_work(
    subject: Subject, sequence: int, saves: bool
) -> None:
    """With long rows, attention has most FLOPs of a layer. With short rows, to save it gains little
    time, and the measurement would be mostly noise.
    """
    work = Workload(batch=1, sequence=sequence)
    shares = {
        layer.name: flops.attention_flops / flops.flops
        for layer in subject.model.decoders
        for flops in [op_work(subject.model, "recompute", layer.name, work)]
    }
    assert all((share > 0.05) == saves for share in shares.values())
    assert module._attention_to_save(subject.model, work) == (list(shares) if saves else [])


@pytest.mark.parametrize(("dtype", "wide"), [("fp32", False), ("bf16", True)])
def test_sums_of_gradients_are_wide_only_in_bf16(
    executable: Callable[..., Plan], dtype: str, wide: bool
) -> None:
    """Updates from fp32 sums read more memory than updates from bf16 gradients."""
    plan = executable("sequential", dtype=dtype, accumulation=2)
    bench = module._Bench(CPU, (2**33, 2**33), lambda _: None)
    for op in lower(plan).ops:
        if op.kind == "cpu_update":
            bench._collect(plan, op, [7])
    assert {kind for kind, _ in bench.samples} == {"cpu_update:wide" if wide else "cpu_update"}


def test_only_a_gpus_memory_is_registered() -> None:
    assert not module._Bench(CPU, (1, 2), lambda _: None).memory._registered


def test_rows_with_documents_have_the_attention_curve_of_this_device(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has one kernel. Its curve is found for the workload that was calibrated."""
    points = ((512, 1, 1), (2048, 4, 4))
    monkeypatch.setattr(module, "attention_curves", lambda *_: {None: points})
    work = msgspec.structs.replace(calibration.plan.workload, documents=True)
    found = calibration.run(workload=work)
    assert found.costs.attention[attention_shape(calibration.plan.model, work)]


@pytest.mark.parametrize(
    ("documents", "attention"), [(False, None), (True, None), (True, "flash4")]
)
def test_a_gpu_has_the_curve_of_the_kernel_that_receives_lengths(
    calibration: Calibration,
    monkeypatch: pytest.MonkeyPatch,
    documents: bool,
    attention: Literal["flash4"] | None,
) -> None:
    """One calibration serves rows of one document and packed rows."""
    measured: list[tuple[bool, str | None]] = []

    def curve(_model: object, work: Workload, _device: object) -> object:
        measured.append((work.documents, work.kernel))
        return packed

    rows, packed = ((512, 1, 1), (2048, 4, 4)), ((512, 2, 2), (2048, 6, 6))
    monkeypatch.setattr(module, "takes_lengths", lambda *_: True)
    monkeypatch.setattr(module, "attention_curve", curve)
    dense = dict.fromkeys((None, "flash", "flash4"), rows)
    monkeypatch.setattr(module, "attention_curves", lambda *_: dense)
    model = calibration.plan.model
    work = msgspec.structs.replace(
        calibration.plan.workload, dtype="bf16", documents=documents, attention=attention
    )
    curves = calibration.run(workload=work).costs.attention
    assert curves[attention_shape(model, msgspec.structs.replace(work, documents=True))] == packed
    assert curves[attention_shape(model, msgspec.structs.replace(work, documents=False))] == rows
    assert measured == [(True, attention or "flash")]


def test_a_rate_of_one_kernel_is_not_stored_without_that_of_the_usual_one(
    calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the planner would compare a measured kernel with an assumed one."""
    points = ((512, 1, 1), (2048, 4, 4))
    rate = AttentionRate(efficiency=0.43, half_tokens=77)
    monkeypatch.setattr(module, "attention_rate", lambda _, rows, __: rate if rows else None)
    curves: dict[str | None, Any] = {None: (), "flash": (), "cudnn": points}
    monkeypatch.setattr(module, "attention_curves", lambda *_: curves)
    found = calibration.run()
    assert found.attention == {}
    assert found.attention_efficiency == ATTENTION_EFFICIENCY
    curves["flash"] = points
    found = calibration.run()
    assert found.attention == {"flash": rate, "cudnn": rate}
    assert found.attention_efficiency == rate.efficiency
