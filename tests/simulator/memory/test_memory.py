"""Tests of the memory account: bytes of pools, plans at the limit, advice, and usage over time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from calibrated_models import calibrated_model
from whole_models import model_of

from megatrain.simulator import policies
from megatrain.simulator.costs import Replayed, cost_model
from megatrain.simulator.engine.evaluator import evaluate
from megatrain.simulator.hardware.cost_table import Workspace
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import SlotBytes, account, peak_workspace_bytes, usage
from megatrain.simulator.memory.formulas import (
    activation_estimates,
    activations_estimate,
    added_transients,
    workspace_estimate,
)
from megatrain.simulator.model.attention_masks import (
    added_mask_bytes,
    lasting_mask_bytes,
    mask_bytes,
    repeated_bytes,
)
from megatrain.simulator.model.families.part import Compiled
from megatrain.simulator.model.layer_memory import backward_bytes, saved_bytes, transient_bytes
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner import assessment
from megatrain.simulator.planner.assessment import layer_activations, plan_account, slot_bytes
from megatrain.simulator.planner.search import plans_of
from megatrain.simulator.schedule import Buffer, Op, Schedule
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.schedule.timeline import Span, Timeline

LAYERS_THAT_DIFFER: dict[str, dict[str, object]] = {
    "qwen3_next": {"full_attention_interval": 4, "mlp_only_layers": []},
    "deepseek_v3": {"first_k_dense_replace": 4},
}
"""Family -> keys of a config with layers that save different amounts."""
SCHEDULE = Schedule(
    policy="test",
    buffers=(
        Buffer(id="host.weights:0", bytes=5000, data="weights", dtype="bf16", persistent=True),
        Buffer(id="device.weights:0", bytes=300, data="weights", dtype="bf16", knob="weight_slots"),
        Buffer(id="device.weights:1", bytes=300, data="weights", dtype="bf16", knob="weight_slots"),
        Buffer(
            id="device.activations:0",
            bytes=10_000,
            data="activations",
            dtype="mixed",
            dynamic=True,
            knob="checkpoint_interval",
        ),
    ),
    ops=(
        Op(id="W0", lane="h2d", writes=("device.weights:0",), acquires=("device.weights:0",)),
        Op(id="W1", lane="h2d", writes=("device.weights:1",), acquires=("device.weights:1",)),
        Op(
            id="F0",
            lane="compute",
            after=("W0",),
            reads=("device.weights:0",),
            releases=("device.weights:0",),
        ),
        Op(
            id="F1",
            lane="compute",
            after=("W1",),
            reads=("device.weights:1",),
            releases=("device.weights:1",),
        ),
    ),
)


def test_buffers_are_rounded_up_and_pools_summed() -> None:
    verdict = account(SCHEDULE, 2**20, 2**20, None, 77, {"device.context": 5})
    assert verdict.pools == {
        "device.activations": 10_240,
        "host.weights": 8192,
        "device.weights": 1024,
        "device.workspace": 77,
        "device.context": 5,
    }
    assert (verdict.device_peak_bytes, verdict.host_peak_bytes) == (10_240 + 1024 + 77 + 5, 8192)
    assert (verdict.fits, verdict.advice, verdict.excess_bytes) == (True, "", 0)


def test_measured_activations_win_over_the_estimate() -> None:
    measured: SlotBytes = {"activations": 1234, "saved_activations": 99}
    assert account(SCHEDULE, 2**20, 2**20, measured, 0).pools["device.activations"] == 1234


@pytest.mark.parametrize(
    ("device", "host", "fits", "binding"),
    [
        (11_341, 8192, True, "device.activations"),
        (11_342, 8192, True, "host.weights"),
        (11_340, 9000, False, "device.activations"),
        (12_000, 8191, False, "host.weights"),
    ],
)
def test_the_limit_is_the_last_byte_that_fits(
    device: int, host: int, fits: bool, binding: str
) -> None:
    verdict = account(SCHEDULE, device, host, None, 77)
    assert (verdict.fits, verdict.binding, verdict.advice == "") == (fits, binding, fits)


def test_advice_names_the_knob_that_costs_least() -> None:
    verdict = account(SCHEDULE, 11_000, 8192, None, 77)
    assert verdict.advice == "weight_slots = 1 would save 512 B"


def test_advice_without_a_knob_names_the_memory_to_add() -> None:
    """2,338 bytes are 2.283 KiB. Rounded to 2.28, they would not be enough."""
    assert (
        account(SCHEDULE, 9003, 8000, None, 77).advice
        == "2.29 KiB more of device memory (--device-memory) and 192 B more of host memory"
        " (--host-memory) would be enough"
    )


@pytest.mark.parametrize("knob", ["weight_slots", "gradient_slots", "gradient_staging"])
def test_a_plan_that_follows_advice_fits(make_plan: Callable[..., Plan], knob: str) -> None:
    plan = make_plan("k_buffer", **{"weight_slots": 1, "gradient_slots": 1, knob: 4})
    full = account(policies.lower(plan), 2**40, 2**40, None, 0)
    device, host = (
        full.device_peak_bytes - (knob != "gradient_staging"),
        full.host_peak_bytes - (knob == "gradient_staging"),
    )
    verdict = account(policies.lower(plan), device, host, None, 0)
    assert verdict.advice.startswith(f"{knob} = 3 ")
    better = msgspec.structs.replace(plan, knobs=msgspec.structs.replace(plan.knobs, **{knob: 3}))
    assert account(policies.lower(better), device, host, None, 0).fits


def costs(duration: int) -> Replayed:
    return Replayed(
        Timeline(
            name="measured",
            digest="",
            spans=tuple(
                Span(op=op.id, lane=op.lane, start_ns=0, end_ns=duration) for op in SCHEDULE.ops
            ),
        )
    )


def test_slots_are_held_from_acquire_to_release() -> None:
    steps = usage(SCHEDULE, evaluate(SCHEDULE, costs(10)))
    assert steps["device.weights"] == [(0, 512), (10, 1024), (20, 512), (30, 0)]
    assert steps["host.weights"] == [(0, 8192)]
    assert steps["device.activations"] == [(0, 0)]


@pytest.mark.parametrize("policy", policies.names())
def test_usage_never_exceeds_the_account_and_ends_where_it_began(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    schedule = policies.lower(make_plan(policy, checkpoint_interval=2))
    durations = Timeline(
        name="measured",
        digest="",
        spans=tuple(
            Span(op=op.id, lane=op.lane, start_ns=0, end_ns=1 + index % 7)
            for index, op in enumerate(schedule.ops)
        ),
    )
    measured: SlotBytes = {"activations": 500, "saved_activations": 500}
    pools = account(schedule, 2**40, 2**40, measured, 0).pools
    steps = usage(schedule, evaluate(schedule, Replayed(durations)), measured)
    persistent = {buffer.pool for buffer in schedule.buffers if buffer.persistent}
    for pool, points in steps.items():
        assert [time for time, _ in points] == sorted({time for time, _ in points})
        assert max(size for _, size in points) <= pools[pool]
        assert points[-1][1] == (pools[pool] if pool in persistent else 0)
    assert (
        max(size for _, size in steps["device.activations"]) == pools["device.activations"] == 1000
    )


@pytest.mark.parametrize(
    "stored",
    sorted((Path(__file__).parents[3] / "experiments" / "results").glob("*/hardware.toml")),
    ids=lambda path: path.parent.name,
)
def test_saved_activations_of_eager_layers_are_those_measured(stored: Path) -> None:
    """The estimate of saved activations is what eager layers keep.

    Compiled layers keep less, so for them it is an upper bound.
    """
    table = HardwareSpec.load(str(stored)).costs
    assert table is not None
    for shape, (tokens, size) in table.activations.items():
        model = calibrated_model(shape)
        estimate = activations_estimate(model, Workload(batch=1, sequence=tokens))
        assert estimate >= size * 0.999
        if not shape.endswith("compiled"):
            assert estimate == pytest.approx(size, rel=0.001)


def test_the_workspace_s_formula_in_figures() -> None:
    """The formula of the workspace gives these numbers.

    The head needs 12 bytes for each of 1024 x 152064 logits, and its norm. With several chunks, it
    also needs the gradient of a 152064 x 3584 matrix at 2 bytes and its sum at 4 bytes per element.
    A layer needs the gradient of its last matrix, two rows of its MLP for each token, and tables of
    positions.
    """
    model = ModelSpec.load("qwen2.5-7b")
    assert (
        workspace_estimate(model, Workload(batch=4, sequence=1024)).head
        == 1024 * 152_064 * 12 + 152_064 * 3584 * 6 + 1024 * 3584 * 18
    )
    assert (
        workspace_estimate(model, Workload(batch=1, sequence=1024)).head
        == 1024 * 152_064 * 12 + 1024 * 3584 * 18
    )
    many = Workload(batch=64, sequence=1024)
    assert (
        workspace_estimate(model, many).layer
        == 3584 * 18_944 * 2 + 2 * many.tokens * 18_944 * 2 + 24 * many.sequence * 128
    )


def test_head_and_update_use_the_memory_of_the_saved_activations() -> None:
    """The workspace of head and update uses the memory of the saved activations.

    The schedule saves 10,240 bytes, which are free when head and update run. Moments are on the
    device only in the last case.
    """
    assert peak_workspace_bytes(Workspace(layer=70, head=5000), SCHEDULE, None) == 70
    assert peak_workspace_bytes(Workspace(layer=70, head=11_000), SCHEDULE, None) == 760
    measured: SlotBytes = {"activations": 10_960}
    assert peak_workspace_bytes(Workspace(layer=70, head=11_000), SCHEDULE, measured) == 70
    assert peak_workspace_bytes(Workspace(layer=70, head=0, update=99_999), SCHEDULE, None) == 70
    updating = msgspec.structs.replace(
        SCHEDULE,
        buffers=(
            *SCHEDULE.buffers,
            Buffer(id="device.moments:0", bytes=8, data="moments", dtype="fp32", persistent=True),
        ),
    )
    assert peak_workspace_bytes(Workspace(layer=70, head=0, update=10_400), updating, None) == 160


@pytest.mark.parametrize("stored", ["", "3", "2-3", "all", "0", "0,2", "1-2"])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_recomputed_layers_use_the_memory_of_saved_layers_that_are_done(
    make_plan: Callable[..., Plan], stored: str, interval: int
) -> None:
    """The account has room for the most saved activations that exist at one time.

    This number follows from the order of the compute lane.
    """
    plan = make_plan(
        "overlapped",
        checkpoint_interval=interval,
        placement=Placement(saved_activations=stored),
        accumulation=2,
    )
    schedule, held, most = policies.lower(plan), 0, 0
    for op in schedule.lanes["compute"]:
        held += sum(schedule.buffer[name].dynamic for name in op.acquires)
        most = max(most, held)
        held -= sum(schedule.buffer[name].dynamic for name in op.releases)
    assert held == 0
    pools = plan_account(
        plan, schedule, cost_model(HardwareSpec.load("h200"), plan.model, plan.workload)
    ).pools
    assert pools.get("device.saved_activations", 0) + pools.get(
        "device.activations", 0
    ) == most * activations_estimate(plan.model, plan.workload)
    if stored in ("3", "2-3", "all") and interval == 1:
        assert not pools.get("device.activations")


@pytest.mark.parametrize("stored", ["", "7", "4-7", "all", "0", "3", "0-3", "1,5-6", "0-6"])
@pytest.mark.parametrize(
    ("family", "compiled"), [("qwen3_next", False), ("qwen3_next", True), ("deepseek_v3", False)]
)
@pytest.mark.parametrize("calibrated", [False, True])
def test_each_layer_counts_with_the_activations_that_it_saves(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    family: str,
    compiled: bool,
    calibrated: bool,
) -> None:
    """The account has room for the largest sum of saved activations and temporary tensors at any
    time, and for at most one layer's difference more.

    The first four layers of one model save less than the others, and two of the other model's eight
    layers, which are the only ones that can be compiled. Calibration measures only the largest
    layer.
    """
    plan = make_plan(
        "overlapped",
        model=model_of(family, num_hidden_layers=8, **LAYERS_THAT_DIFFER[family]),
        placement=Placement(saved_activations=stored),
        accumulation=2,
        loss_chunk=1,
        compiled=compiled,
    )
    model, work = plan.model, plan.workload
    eager = msgspec.structs.replace(work, compiled=False)
    runs = {
        layer.name: work if layer.compilable else eager  # linear attention is never compiled
        for layer in model.decoders
    }
    usual = transient_bytes(model, eager)
    kept = {name: saved_bytes(model, name, run) for name, run in runs.items()}
    temporary = {
        layer.name: backward_bytes(model, layer, runs[layer.name]) - kept[layer.name]
        for layer in model.decoders
    }
    estimates = activation_estimates(model, work)
    assert len({estimates[name] - kept[name] for name in kept}) == 1, "what all layers have"
    assert added_transients(model, work) == {
        name: max(size - usual, 0) for name, size in temporary.items()
    }
    largest, least = max(estimates.values()), min(estimates.values())
    assert largest > 1.02 * least
    costs, scale = cost_model(HardwareSpec.load("h200"), model, work), 3 if calibrated else 1
    measured = scale * largest if calibrated else None
    monkeypatch.setattr(type(costs), "activations_bytes", lambda *_: measured)
    schedule, held, most = policies.lower(plan), dict[str, float](), 0.0
    for op in schedule.lanes["compute"]:
        for name in op.acquires:
            if schedule.buffer[name].dynamic:
                held[name] = scale * estimates[op.layer]
        if op.kind == "backward":
            most = max(most, sum(held.values()) + scale * temporary[op.layer])
        for name in op.releases:
            held.pop(name, None)
    pools = plan_account(plan, schedule, costs).pools
    counted = pools.get("device.saved_activations", 0) + pools.get("device.activations", 0)
    counted += scale * usual
    assert most <= counted + model.layers
    more = largest - least + max(usual - size for size in temporary.values())
    assert counted <= most + scale * more + 2 * model.layers


@pytest.mark.parametrize(
    ("stored", "group", "each"),
    [
        ("", 1, 200),
        ("0-1", 1, 150),
        ("2-3", 1, 115),
        ("all", 1, 133),
        ("all", 3, 128),
        ("2", 2, 110),
    ],
)
def test_the_bytes_of_a_saved_layer_are_a_mean_with_temporary_tensors(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    group: int,
    each: int,
) -> None:
    """Layers save 100, 200, 100 and 100 bytes for a micro-batch by the estimates, and the largest
    200 by a measurement. The workspace lacks 20 bytes for layer 2 and 30 for layer 3.
    """
    plan = make_plan(
        "overlapped",
        placement=Placement(saved_activations=stored),
        accumulation=group,
        micro_batch_group=group,
    )
    assert plan.model.layers == 4
    estimates, added = {"0": 50, "1": 100, "2": 50, "3": 50}, {"0": 0, "1": 0, "2": 20, "3": 30}
    monkeypatch.setattr(assessment, "activation_estimates", lambda *_: estimates)
    monkeypatch.setattr(assessment, "added_transients", lambda *_: added)
    monkeypatch.setattr(assessment, "activations_bytes", lambda *_: 200)
    costs = cost_model(HardwareSpec.load("h200"), plan.model, plan.workload)
    assessment._in_proportion.cache_clear()
    sizes = layer_activations(plan, costs)
    assessment._in_proportion.cache_clear()
    assert sizes == {"0": 100, "1": 200, "2": 100, "3": 100}
    assert slot_bytes(plan, sizes) == {"activations": 200, "saved_activations": each}


def test_a_layer_counts_with_its_own_estimate_if_that_is_larger(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate of the largest layer may be too large, and those of others right."""
    plan = make_plan("overlapped")
    monkeypatch.setattr(
        assessment, "activation_estimates", lambda *_: {"0": 50, "1": 100, "2": 97, "3": 3}
    )
    assessment._in_proportion.cache_clear()
    found = assessment._in_proportion(plan.model, plan.workload, 90)
    assessment._in_proportion.cache_clear()
    assert found == {"0": 50, "1": 90, "2": 90, "3": 3}


def test_temporary_tensors_of_a_layer_that_saves_less_may_be_larger() -> None:
    model = model_of("qwen3_next", num_hidden_layers=4, **LAYERS_THAT_DIFFER["qwen3_next"])
    work = Workload(batch=2, sequence=64)
    added, usual = added_transients(model, work), transient_bytes(model, work)
    assert added.keys() == {"0", "1", "2", "3"}
    for layer in model.decoders:
        own = backward_bytes(model, layer, work) - saved_bytes(model, layer.name, work)
        assert added[layer.name] == max(own - usual, 0)


@pytest.mark.parametrize("loss_chunk", [16, 4096], ids=["layers need most", "the head needs most"])
def test_each_micro_batch_of_a_group_has_masks_of_its_own_between_documents(
    make_plan: Callable[..., Plan], make_model: Callable[..., ModelSpec], loss_chunk: int
) -> None:
    """Without documents, all micro-batches share the mask of a window."""
    model = make_model(
        family="gemma2", head_dim=16, sliding_window=8, tied=False, vocabulary=4 * loss_chunk
    )
    for documents in (False, True):
        plans = [
            make_plan(
                "overlapped",
                model=model,
                sequence=64,
                dtype="fp32",
                documents=documents,
                accumulation=4,
                loss_chunk=loss_chunk,
                micro_batch_group=group,
            )
            for group in (1, 4)
        ]
        single, four = (
            plan_account(
                plan,
                policies.outline(plan),
                cost_model(HardwareSpec.load("h200"), plan.model, plan.workload),
            ).pools["device.workspace"]
            for plan in plans
        )
        more = 3 * mask_bytes(plans[0].model, plans[0].workload) if documents else 0
        assert four - single == more


def test_masks_are_counted_where_attention_is_not_only_causal(
    make_model: Callable[..., ModelSpec],
) -> None:
    """The workspace includes masks for windows and documents, unless a kernel takes lengths."""
    plain, both = (
        make_model(),
        make_model(
            family="qwen3",
            layer_types=["full_attention", "sliding_attention"] * 2,
            use_sliding_window=True,
            sliding_window=8,
        ),
    )
    capped = make_model(family="gemma2", head_dim=16, sliding_window=16)
    work, pairs = Workload(batch=3, sequence=16, dtype="fp32"), 16 * 16
    packed = msgspec.structs.replace(work, documents=True)
    assert mask_bytes(plain, work) == 0
    assert mask_bytes(plain, packed) == 3 * pairs + 3 * pairs * 4
    assert mask_bytes(both, work) == pairs + 3 * pairs * 4, "one mask of the window for all rows"
    assert mask_bytes(both, packed) == 2 * 3 * pairs + 3 * pairs * 4
    assert mask_bytes(both, Workload(batch=3, sequence=7)) == 0, "no mask for such a long window"
    assert mask_bytes(both, Workload(batch=3, sequence=8)) > 0, "transformers makes one"
    for model in (plain, both):
        grown = workspace_estimate(model, packed).layer - workspace_estimate(model, work).layer
        saved = activations_estimate(model, packed) - activations_estimate(model, work)
        masks, added, copies = (
            count(model, packed) - count(model, work)
            for count in (mask_bytes, added_mask_bytes, repeated_bytes)
        )
        assert (grown, saved) == (masks - added, added + copies)
        shared = model.heads.queries - model.heads.pairs
        assert repeated_bytes(model, packed) == 2 * shared * model.heads.size * 3 * 16 * 4
        assert mask_bytes(model, msgspec.structs.replace(packed, dtype="bf16")) == 0, (
            "the kernel takes lengths instead of a mask"
        )
    assert (
        mask_bytes(capped, msgspec.structs.replace(packed, dtype="bf16"))
        == 2 * (3 * pairs + 3 * pairs * 2) + 3 * pairs * 2
    ), (
        "without a fused kernel, each type of attention has a mask in both forms, and there is one"
        " more of the larger form"
    )


def test_masks_exist_during_the_head(make_model: Callable[..., ModelSpec]) -> None:
    """A boolean mask of a window, or a mask in the compute dtype for each kind of attention whose
    scores are written out.

    Regression test: they were counted in layers only, and gemma-2-9b with 3 x 4,096 tokens took
    76 MiB more than predicted.
    """
    work, pairs = Workload(batch=3, sequence=64, loss_chunk=192), 64 * 64
    packed = msgspec.structs.replace(work, dtype="fp32", documents=True)
    plain = make_model(vocabulary=4096)
    capped = make_model(vocabulary=4096, family="gemma2", head_dim=16, sliding_window=16)
    windows = make_model(
        family="qwen3",
        vocabulary=4096,
        layer_types=["full_attention", "sliding_attention"] * 2,
        use_sliding_window=True,
        sliding_window=8,
    )
    for model, workload, masks in (
        (plain, work, 0),
        (windows, work, pairs),
        (plain, packed, 3 * pairs),
        (capped, work, 2 * 3 * pairs * 2),
    ):
        assert lasting_mask_bytes(model, workload) == masks
        plan = plans_of(model, HardwareSpec.load("h200"), workload, policies=["double_buffer"])[0]
        costs = cost_model(HardwareSpec.load("h200"), model, workload)
        found = plan_account(plan, policies.outline(plan), costs).pools["device.workspace"]
        estimate, held = workspace_estimate(model, workload), activations_estimate(model, workload)
        assert estimate.head - held > estimate.layer, "the head needs the most"
        assert found == estimate.head - held + masks + costs.library_bytes


def test_a_part_without_numbers_for_compiled_layers_adds_nothing() -> None:
    nothing = Compiled()
    assert nothing.plus(nothing) == nothing
