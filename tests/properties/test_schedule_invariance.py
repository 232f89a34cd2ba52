"""Schedule invariance: every plan of a workload gives the bits of the reference.

The tests compare losses, norms, weights and moments. A race, a slot that is reused too early, a
missing chunk or a gradient that is summed in another order changes a bit. Every plan has its
digest, like those of users, and memory limits that leave no byte or a few to spare.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from reference_step import Reference
from tiny_families import config_of as tiny_config

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.blockwise import decoded_first, decoded_second, records
from megatrain.runtime.optimizer.settings import AdamW, GroupSettings
from megatrain.simulator import policies
from megatrain.simulator.memory.account import WITHOUT_ACTIVATIONS, account
from megatrain.simulator.model.layer import DTYPE_BYTES, LayerSpec
from megatrain.simulator.model.optimizer import MUON
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import EXACT, FORMATS
from megatrain.simulator.model.workload import Clipping, Workload
from megatrain.simulator.schedule.plan import OF_DECODERS, Knobs, Placement, Plan

STEPS = 3
"""an ordinary step, one with ignored labels, and one that ignores whole sequences"""
RATE = 1e-2
GROUPS = (
    GroupSettings(match="*self_attn.o_proj*", weight_decay=0.3),
    GroupSettings(match="*up_proj*", rate_factor=0.5),
    GroupSettings(match="*norm*", weight_decay=0.05),
)
SETTINGS = AdamW(max_norm=0.05, weight_decay=0.1, groups=GROUPS, adagc_warm_up=1)
"""Settings that differ between neighboring tensors.

Copies end inside tensors, so a chunk contains several tensors with different settings.
"""
CPU = torch.device("cpu")
ONE_THREAD = dict.fromkeys(("compute", "update", "h2d", "d2h", "cpu"), 1)
CLIPPING = get_args(Clipping)
SLOTS = {"sequential": 1, "double_buffer": 2, "k_buffer": 3, "resident": 2}


@pytest.fixture(autouse=True, scope="module")
def deterministic_mode() -> Iterator[None]:
    """Sets one thread for each matrix product, because the order of additions depends on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


class Trained(NamedTuple):
    """The results of training that must not depend on the schedule."""

    losses: list[float]
    norms: list[float | None]
    tensors: dict[str, torch.Tensor]
    """The bits of the fp32 masters and of both moments, by name."""


SIMPLE = ("llama", "qwen2", "qwen3", "mistral")
OTHERS = (
    "gemma2",
    "gemma3_text",
    "granite",
    "phi",
    "gpt_neox",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "qwen3_next",
    "gemma3n_text",
)
"""Families with features that Llama lacks.

These are layers of several kinds, scaled embeddings, capped logits, biases in the head, experts,
buffers in layers, linear attention, and several streams.
"""
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
"""Those whose layers have experts."""
ROUTED = ("qwen3_moe", "gpt_oss")
"""Those that can be trained with a router loss."""


def model_of(
    *,
    family: str = "llama",
    layers: int = 4,
    hidden: int = 64,
    tied: bool = False,
    routed: bool = False,
) -> ModelSpec:
    if family in OTHERS:
        sizes: dict[str, Any] = {
            "num_hidden_layers": layers,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "vocab_size": 301,
        }
        if family in ("gemma2", "gemma3_text", "gpt_oss"):
            sizes |= {
                "layer_types": (["sliding_attention", "full_attention"] * 3)[:layers],
                "sliding_window": 8,
            }
        if family != "deepseek_v3":
            sizes |= {"head_dim": 16}
        if family == "gemma3n_text":
            sizes |= {
                "layer_types": ["full_attention"] * layers,
                "num_kv_shared_layers": layers // 2,
                "altup_coef_clip": 0.01,
                "activation_sparsity_pattern": [0.5] + [0.0] * (layers - 1),
            }
        if routed:
            sizes |= {"output_router_logits": True, "router_aux_loss_coef": 0.3}
        config = tiny_config(family, **sizes, tie_word_embeddings=tied)
        return ModelSpec.from_config(config.to_dict(), family, "tiny")
    return ModelSpec(
        name="tiny",
        config={
            "model_type": family,
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 301,
            "tie_word_embeddings": tied,
            "sliding_window": 0,
        },
    )


def drawn_steps(model: ModelSpec, work: Workload) -> list[list[Batch]]:
    """Returns the batches of every step.

    From the second step on, a third of the labels is ignored. In the third step, all labels of one
    sequence are ignored, and all of one micro-batch if there are several.
    """
    generator = torch.Generator().manual_seed(7)
    steps = []
    for number in range(1, STEPS + 1):
        micro_batches = []
        for micro in range(work.accumulation):
            ids, labels = torch.randint(
                model.vocabulary, (2, work.batch, work.sequence), generator=generator
            )
            if number > 1:
                labels[torch.rand(labels.shape, generator=generator) < 1 / 3] = IGNORED
            if number == 3:
                labels[0 if micro != 1 else slice(None)] = IGNORED
            micro_batches.append(Batch(ids, labels))
        steps.append(micro_batches)
    return steps


@functools.lru_cache(maxsize=32)
def reference(model: ModelSpec, work: Workload) -> Trained:
    """Returns the reference's results, computed once for each workload."""
    weights = random_weights(0)
    masters = {
        layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in model.stack.values()
    }
    yardstick = Reference(model, work, config_of(model), SETTINGS, masters, CPU)
    results = [
        yardstick.step(batches, rate=RATE, number=number)
        for number, batches in enumerate(drawn_steps(model, work), 1)
    ]
    if work.clipping in ("global", "layer"):
        assert all(norm is not None and norm > 2 * SETTINGS.max_norm for _, norm in results), (
            "clipping must be active in every step"
        )
    if work.clipping == "update":
        assert min(yardstick.scales) < 0.95, "updates must be clipped"
    if work.clipping == "adagc":
        assert yardstick.clip_factor < 0.9, "gradients must be clipped after the warm-up"
    tensors = {
        f"{layer} {name}": tensor
        for layer, named in yardstick.masters.items()
        for name, tensor in named.items()
    }
    for layer, named in yardstick.moments.items():
        tensors |= {
            f"{layer} {name} moment {order}": moment
            for name, pair in named.items()
            for order, moment in enumerate(pair, 1)
        }
    for layer in model.stack.values() if work.clipping == "adagc" else ():
        zero = torch.zeros(())
        kept = [yardstick.moving.get((layer.name, t.name), zero) for t in layer.tensors]
        tensors[f"{layer.name} moving norms"] = torch.stack(kept)
    moved = [
        name
        for name, tensor in tensors.items()
        if name.endswith("moment 2") and not tensor.count_nonzero()
    ]
    assert not moved, f"no gradient reached {moved}"
    return Trained([loss for loss, _ in results], [norm for _, norm in results], as_bits(tensors))


def as_bits(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous().view(torch.int32) for name, tensor in tensors.items()}


def execute(plan: Plan) -> Trained:
    """Returns the runtime's results."""
    with Executor(plan, config_of(plan.model), SETTINGS, CPU, threads=ONE_THREAD) as executor:
        state = executor.state
        state.load(random_weights(0))
        results = [
            executor.step(batches, rate=RATE, number=number)
            for number, batches in enumerate(drawn_steps(plan.model, plan.workload), 1)
        ]
        executor.flush_update()
        tensors: dict[str, torch.Tensor] = {}
        for layer in plan.model.stack.values():
            tensors |= {
                f"{layer.name} {name}": tensor for name, tensor in state.masters(layer).items()
            }
            if (moving := state.tensors().get(f"{layer.name}.moving_norms")) is not None:
                tensors[f"{layer.name} moving norms"] = moving.clone()
            flat = state.tensors()[f"{layer.name}.moments"]
            if plan.workload.optimizer == MUON:
                tensors |= muon_moments(layer, flat)
                continue
            first, second = flat
            if first.dtype == torch.uint8:
                first, second = decoded_first(first), decoded_second(second)
            for order, moments in enumerate((first, second), 1):
                tensors |= {
                    f"{layer.name} {name} moment {order}": moment
                    for name, moment in by_tensor(layer, moments).items()
                }
        return Trained(
            [result.loss for result in results],
            [result.gradient_norm for result in results],
            as_bits(tensors),
        )


def muon_moments(layer: LayerSpec, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns copies of the moments in `flat`.

    First come the first moments of all tensors, then the second moments of tensors that AdamW
    updates.
    """
    adamw = [
        tensor
        for tensor in layer.tensors
        if layer.kind != "decoder"
        or len(tensor.shape) == 1
        or min(tensor.shape[-2:]) == 1
        or tensor.name.endswith("bias")
    ]
    second = msgspec.structs.replace(layer, tensors=tuple(adamw))
    if flat.dtype == torch.uint8:
        end = records(layer.elements)
        values = decoded_first(flat[:end]), decoded_second(flat[end:])
    else:
        values = flat[: layer.elements], flat[layer.elements :]
    assert [len(each) for each in values] == [layer.elements, second.elements]
    return {
        f"{layer.name} {name} moment {order}": moment
        for order, part, values in ((1, layer, values[0]), (2, second, values[1]))
        for name, moment in by_tensor(part, values).items()
    }


def by_tensor(layer: LayerSpec, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns copies of the tensors in `flat`, and asserts that their padding is zero."""
    made, offset = {}, 0
    for tensor in layer.tensors:
        made[tensor.name] = flat[offset : offset + tensor.elements].clone().view(tensor.shape)
        assert not flat[offset + tensor.elements : offset + tensor.padded].count_nonzero(), (
            f"{layer.name} {tensor.name}: padding has changed"
        )
        offset += tensor.padded
    return made


def planned(
    policy: str, model: ModelSpec, work: Workload, knobs: Knobs, spare_bytes: int = 0
) -> Plan:
    """Returns a plan with its digest and with limits `spare_bytes` above what its pools need."""
    plan = Plan(
        policy=policy,
        hardware="",
        source="",
        device_limit_bytes=1,
        host_limit_bytes=1,
        model=model,
        workload=work,
        knobs=knobs,
    )
    schedule = policies.lower(plan)
    need = account(schedule, 1, 1, WITHOUT_ACTIVATIONS, 0)
    limits = {
        "device_limit_bytes": need.device_peak_bytes + spare_bytes,
        "host_limit_bytes": max(need.host_peak_bytes, 1) + spare_bytes,
    }
    return msgspec.structs.replace(plan, digest=schedule.digest, **limits)


def assert_invariant(plan: Plan) -> None:
    want, got = reference(plan.model, plan.workload), execute(plan)
    assert (got.losses, got.norms) == (want.losses, want.norms)
    assert got.tensors.keys() == want.tensors.keys()
    changed = [
        name for name, bits in want.tensors.items() if not torch.equal(bits, got.tensors[name])
    ]
    assert not changed


@st.composite
def placements(draw: st.DrawFn, model: ModelSpec) -> Placement:
    """Draws any placement of state, activations and saved attention."""
    decoders = [layer.name for layer in model.stack.values() if layer.kind == "decoder"]
    able = all(map(model.can_save_attention, decoders))
    some = {
        name: st.lists(
            st.sampled_from(decoders if name in OF_DECODERS else list(model.stack)), unique=True
        )
        for name in Placement.__struct_fields__
        if name != "saved_attention" or able
    }
    return Placement(
        **{name: draw(st.just("all") | layers.map(",".join)) for name, layers in some.items()}
    )


@st.composite
def plans(
    draw: st.DrawFn, families: tuple[str, ...] = (*SIMPLE, *OTHERS), *, in_pieces: bool = False
) -> Plan:
    """Draws any plan of one of the `families`. With `in_pieces`, it has pieces of tokens."""
    family = draw(st.sampled_from(families))
    model = model_of(
        family=family,
        layers=draw(st.integers(3, 5)),
        hidden=draw(st.sampled_from([64, 48])),
        tied=draw(st.booleans()),
        routed=family in ROUTED and draw(st.booleans()),
    )
    sequence = draw(st.sampled_from([16, 32]))
    state = draw(st.sampled_from(list(FORMATS)))
    work = Workload(
        batch=2,
        sequence=sequence,
        accumulation=draw(st.sampled_from([1, 4])),
        dtype=draw(st.sampled_from(["bf16", "fp32"])) if state == EXACT else "bf16",
        state=state,
        clipping=draw(st.sampled_from(CLIPPING)),
        loss_chunk=draw(st.sampled_from([sequence, 13, 1024])),
        short_recompute=draw(st.booleans()),
    )
    if not model.pieces_obstacle() and (in_pieces or draw(st.booleans())):
        work = msgspec.structs.replace(work, token_piece=draw(st.sampled_from([5, 8, 24])))
    if all(map(model.can_save_attention, (layer.name for layer in model.decoders))):
        # On a CPU, the number of groups changes no bit. The reference has none.
        work = msgspec.structs.replace(work, head_groups=draw(st.sampled_from([1, 2])))
    policy = draw(st.sampled_from(policies.names()))
    stores_one = work.clipping == "global" and work.accumulation == 1 and not model.tied
    if policy == "overlapped" and stores_one and draw(st.booleans()):
        work = msgspec.structs.replace(work, gradients="8bit")
    layer_bytes = DTYPE_BYTES[work.dtype] * model.stack["0"].elements
    summed = work.accumulation > 1 or model.tied
    knobs = Knobs(
        weight_slots=(
            draw(st.integers(1, model.layers + 1)) if policy == "k_buffer" else SLOTS.get(policy, 2)
        ),
        gradient_slots=draw(st.integers(1, 3)),
        gradient_staging=draw(
            st.integers(1 if summed and policy not in ("resident", "overlapped") else 0, 3)
        ),
        chunk_bytes=draw(
            st.sampled_from([4096, layer_bytes, 2**30]) | st.integers(4096, layer_bytes + 4096)
        ),
        checkpoint_interval=draw(st.integers(1, model.layers + 1)),
        state_slots=draw(st.sampled_from([1, 2, 3, 40])),
        placement=draw(placements(model)),
        weights_ahead=draw(st.integers(0, 1)),
        micro_batch_group=draw(
            st.sampled_from([1] if model.tied or work.accumulation == 1 else [1, 2, 4])
        ),
    )
    event(
        f"{policy}, {work.dtype}, accumulation {work.accumulation} in groups of"
        f" {knobs.micro_batch_group}, clipping {work.clipping}"
    )
    event(f"{policy}, {state}")
    return planned(policy, model, work, knobs, draw(st.sampled_from([0, 1, 4096])))


@st.composite
def muon_plans(draw: st.DrawFn) -> Plan:
    """Draws any plan with Muon, with which the host cannot update decoder layers."""
    plan = draw(plans().filter(lambda plan: plan.policy in ("resident", "overlapped")))
    work = msgspec.structs.replace(
        plan.workload,
        optimizer=MUON,
        gradients="exact",
        clipping=draw(st.sampled_from([kind for kind in CLIPPING if kind != "update"])),
    )
    able = [layer for layer in plan.model.stack if not layer.isdigit()]
    on_host = draw(st.lists(st.sampled_from(able), unique=True))
    placement = msgspec.structs.replace(
        plan.knobs.placement, host_updated="" if plan.policy == "resident" else ",".join(on_host)
    )
    knobs = msgspec.structs.replace(plan.knobs, placement=placement)
    return planned(plan.policy, plan.model, work, knobs)


@given(muon_plans())
@settings(max_examples=3, suppress_health_check=list(HealthCheck))
def test_any_plan_with_muon_gives_the_reference_s_bits(plan: Plan) -> None:
    assert_invariant(plan)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(muon_plans())
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
def test_hundreds_of_plans_with_muon_give_the_reference_s_bits(plan: Plan) -> None:
    assert_invariant(plan)


@given(plans())
@settings(max_examples=4)
def test_any_plan_gives_the_reference_s_bits(plan: Plan) -> None:
    assert_invariant(plan)


@given(plans(MIXTURES, in_pieces=True))
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
def test_any_plan_with_experts_in_pieces_gives_the_reference_s_bits(plan: Plan) -> None:
    assert_invariant(plan)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(plans(MIXTURES, in_pieces=True))
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
def test_hundreds_of_plans_with_experts_in_pieces_give_the_reference_s_bits(plan: Plan) -> None:
    assert_invariant(plan)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@given(plans())
@settings(max_examples=1000, suppress_health_check=list(HealthCheck))
def test_a_thousand_plans_give_the_reference_s_bits(plan: Plan) -> None:
    assert_invariant(plan)


def normal_if(normal: bool, *values: Any) -> Any:
    """Returns the values of a test's parameters, marked as nightly if they are not `normal`."""
    return pytest.param(*values, marks=[] if normal else [pytest.mark.nightly])


CASES = [("global", dtype, accumulation) for dtype in ("fp32", "bf16") for accumulation in (1, 4)]
CASES += [
    (clipping, dtype, accumulation)
    for clipping in ("layer", "update")
    for dtype, accumulation in (("bf16", 1), ("fp32", 4))
]
CASES += [("adagc", "bf16", 4), ("adagc", "fp32", 1)]
NORMAL_CASES = [
    ("global", "bf16", 4),
    ("layer", "bf16", 1),
    ("update", "fp32", 4),
    ("adagc", "bf16", 4),
]


@pytest.mark.parametrize(
    ("clipping", "dtype", "accumulation"),
    [normal_if(case in NORMAL_CASES, *case) for case in CASES],
)
@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_in_both_dtypes_with_and_without_accumulation(
    policy: str, clipping: Any, dtype: Any, accumulation: int
) -> None:
    """Every policy with every clipping gives the reference's bits on one workload.

    Random plans may miss some of these important cases.
    """
    work = Workload(
        batch=2,
        sequence=16,
        accumulation=accumulation,
        dtype=dtype,
        clipping=clipping,
        loss_chunk=13,
    )
    knobs = Knobs(
        weight_slots=SLOTS.get(policy, 2),
        gradient_slots=1,
        gradient_staging=1,
        chunk_bytes=20_000,
        checkpoint_interval=3,
    )
    assert_invariant(planned(policy, model_of(family="qwen2"), work, knobs))


@pytest.mark.parametrize(
    ("state", "clipping"),
    [
        normal_if((state, clipping) in (("master24", "global"), ("bf16-sr", "update")), *case)
        for case in itertools.product(FORMATS, CLIPPING)
        for state, clipping in [case]
        if state != EXACT
    ],
)
def test_every_policy_in_every_state_format(state: str, clipping: Any) -> None:
    """Host and device update chunks or whole layers, with or without sums of gradients."""
    work = Workload(
        batch=2,
        sequence=16,
        accumulation=2 if clipping == "layer" else 1,
        clipping=clipping,
        loss_chunk=13,
        state=state,
    )
    model = model_of(family="qwen2", layers=3)
    for policy, placement in (
        *((policy, Placement()) for policy in policies.names()),
        ("overlapped", Placement(host_updated="e,1", weights="2", master_low="0", moments="0,h")),
    ):
        knobs = Knobs(
            weight_slots=SLOTS.get(policy, 2),
            gradient_slots=1,
            gradient_staging=1,
            chunk_bytes=20_000,
            state_slots=1,
            checkpoint_interval=2,
            placement=placement,
        )
        assert_invariant(planned(policy, model, work, knobs))


@pytest.mark.parametrize(
    ("policy", "dtype", "accumulation"),
    [
        normal_if(policy == "overlapped" or (dtype, summed) == ("bf16", 2), policy, dtype, summed)
        for policy in policies.names()
        for dtype in ("fp32", "bf16")
        for summed in (1, 2)
    ],
)
def test_a_kept_attention_changes_no_bit(policy: str, dtype: Any, accumulation: int) -> None:
    """Saving the attention of some layers changes no bit.

    Two layers offload their attention, one saves its activations, and one offloads its input.
    """
    work = Workload(batch=2, sequence=16, accumulation=accumulation, dtype=dtype, loss_chunk=13)
    placement = Placement(
        saved_attention="0-1,3-4",
        offloaded_attention="1,3-4",
        saved_activations="3",
        offloaded_inputs="0",
    )
    knobs = Knobs(
        weight_slots=SLOTS.get(policy, 2),
        gradient_slots=1,
        chunk_bytes=20_000,
        checkpoint_interval=2,
        placement=placement,
    )
    assert_invariant(planned(policy, model_of(family="qwen2", layers=5), work, knobs))


@pytest.mark.parametrize(
    ("group", "clipping", "dtype", "interval"),
    [
        (4, "global", "bf16", 1),
        (2, "global", "fp32", 1),
        (4, "update", "bf16", 1),
        (2, "layer", "fp32", 3),
    ],
)
def test_micro_batches_may_go_through_a_layer_together(
    group: int, clipping: Any, dtype: Any, interval: int
) -> None:
    """One layer saves its activations, one saves its attention, and one offloads its inputs.

    The host updates one layer, one keeps its gradient on the device, and one keeps all its state
    there.
    """
    work = Workload(
        batch=2, sequence=16, accumulation=4, clipping=clipping, dtype=dtype, loss_chunk=13
    )
    placement = Placement(
        saved_activations="4",
        saved_attention="0-2",
        offloaded_attention="0-1",
        offloaded_inputs="0-3",
        host_updated="1,h",
        gradients="0,2",
        weights="2",
        moments="2",
        master_low="2",
    )
    knobs = Knobs(
        gradient_slots=1,
        chunk_bytes=20_000,
        checkpoint_interval=interval,
        placement=placement,
        micro_batch_group=group,
    )
    assert_invariant(planned("overlapped", model_of(family="qwen2", layers=5), work, knobs))


@pytest.mark.parametrize("host_updated", ["", "all", "e,1-2"])
@pytest.mark.parametrize("clipping", CLIPPING)
def test_the_host_may_update_any_layers(clipping: Any, host_updated: str) -> None:
    """The host may update some layers and the device the others.

    Among the other layers, one streams all its state, one streams a part, and one streams nothing.
    The next weights are always loaded ahead.
    """
    work = Workload(
        batch=2, sequence=16, accumulation=4 if host_updated == "e,1-2" else 1, clipping=clipping
    )
    placement = Placement(host_updated=host_updated, weights="2-3", master_low="3", moments="0,3")
    knobs = Knobs(
        gradient_slots=2, chunk_bytes=20_000, state_slots=1, weights_ahead=1, placement=placement
    )
    assert_invariant(planned("overlapped", model_of(tied=clipping == "update"), work, knobs))


@pytest.mark.parametrize(
    ("state_slots", "loads"), [(1, {"load_state", "load_second_moment"}), (40, {"load_state"})]
)
def test_clipping_by_update_loads_second_moments_once_where_slots_hold_a_layer(
    state_slots: int, loads: set[str]
) -> None:
    work = Workload(batch=2, sequence=16, clipping="update")
    knobs = Knobs(
        gradient_slots=2,
        chunk_bytes=20_000,
        state_slots=state_slots,
        weights_ahead=1,
        placement=Placement(master_low="1", moments="2"),
    )
    plan = planned("overlapped", model_of(tied=True), work, knobs)
    assert {op.kind for op in policies.lower(plan).ops} & {
        "load_state",
        "load_second_moment",
    } == loads
    assert_invariant(plan)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        normal_if(dtype == "bf16" or family in ("gemma2", "qwen3_moe"), family, dtype)
        for family in OTHERS
        for dtype in ("fp32", "bf16")
    ],
)
def test_every_other_family(family: str, dtype: Any) -> None:
    """A model of every other family streams through two slots that layers of all kinds share.

    One layer saves its activations, and the others recompute them.
    """
    work = Workload(
        batch=2, sequence=16, accumulation=2 if dtype == "fp32" else 1, dtype=dtype, loss_chunk=13
    )
    knobs = Knobs(
        weight_slots=2,
        gradient_slots=1,
        gradient_staging=1,
        chunk_bytes=20_000,
        checkpoint_interval=3,
        placement=Placement(saved_activations="1"),
    )
    assert_invariant(planned("overlapped", model_of(family=family), work, knobs))
