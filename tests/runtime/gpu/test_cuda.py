"""Tests on a GPU: every schedule gives the same bits, and memory is as predicted.

The optimizer gives the same bits on the host and on the device. The tests are skipped on machines
without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from reference_step import Reference

from megatrain.runtime.batch import Batch
from megatrain.runtime.calibration import calibrate, contention
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import forget_device_memory
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.runtime.optimizer.kernels.choice import Kernels, kernels
from megatrain.runtime.training.run_folder import measured_memory
from megatrain.simulator import policies
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.hardware.agreement import agreement
from megatrain.simulator.hardware.cost_table import FixedCosts, KernelInterleaving
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.search import assess
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
SLOTS = {"sequential": 1, "double_buffer": 2, "k_buffer": 3, "resident": 2}
PLACEMENTS = [
    Placement(),
    Placement(weights="all", master_low="all", moments="all", gradients="all"),
    Placement(
        weights="all", master_low="all", moments="e,0-1", gradients="all", saved_activations="2-3"
    ),
    Placement(saved_activations="all"),
    Placement(weights="1-2,e", gradients="0", offloaded_inputs="all"),
    Placement(master_low="e", moments="e,3", saved_activations="0", offloaded_inputs="1-2"),
    Placement(weights="0", host_updated="1,3"),
]
EVERY = [
    *(
        (policy, {"weight_slots": slots, "checkpoint_interval": interval})
        for policy, slots in SLOTS.items()
        for interval in (1, 3)
    ),
    *(
        (
            "overlapped",
            {
                "placement": placement,
                "state_slots": 1 + index % 3,
                "chunk_bytes": 2 ** (16 + index % 4),
            },
        )
        for index, placement in enumerate(PLACEMENTS)
    ),
]
"""(policy, knobs)"""
IN_GROUPS = [
    ("overlapped", {"micro_batch_group": group, "state_slots": 2, "placement": placement})
    for group, placement in ((2, PLACEMENTS[0]), (4, PLACEMENTS[2]), (4, PLACEMENTS[4]))
]
"""(policy, knobs) for four micro-batches and embeddings that are not tied"""
STEPS = 10
Master = tuple[str, str, torch.Tensor]
"""(layer, tensor, fp32 master on the CPU)"""


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    ("dtype", "accumulation", "tied", "clipping", "state"),
    [
        ("bf16", 1, False, "global", "exact"),
        ("bf16", 4, True, "global", "exact"),
        ("bf16", 4, False, "global", "exact"),
        ("fp32", 4, False, "layer", "exact"),
        ("bf16", 1, True, "update", "exact"),
        ("bf16", 4, False, "global", "master24"),
        ("bf16", 1, True, "update", "master24"),
        ("bf16", 4, False, "layer", "bf16-sr"),
        ("bf16", 1, True, "global", "bf16-sr"),
        ("bf16", 4, False, "adagc", "exact"),
    ],
)
def test_every_schedule_gives_the_reference_s_bits(
    make_plan: Callable[..., Plan],
    dtype: str,
    accumulation: int,
    tied: bool,
    clipping: str,
    state: str,
) -> None:
    device = torch.device("cuda", 0)
    # The mean gradient of four micro-batches of random tokens has a norm below 0.5.
    settings = AdamW(max_norm=0.1, weight_decay=0.1, adagc_warm_up=4)
    sizes = {
        "hidden": 256,
        "intermediate": 512,
        "head_dim": 64,
        "vocabulary": 1000,
        "batch": 4,
        "sequence": 128,
        "loss_chunk": 100,
    }
    common = {
        **sizes,
        "dtype": dtype,
        "accumulation": accumulation,
        "tied": tied,
        "clipping": clipping,
        "state": state,
        "device_limit_bytes": 2**32,
        "host_limit_bytes": 2**32,
    }
    plan = make_plan("resident", **common)
    model, work, weights = plan.model, plan.workload, random_weights(0)
    generator = torch.Generator().manual_seed(1)
    steps = [
        [
            Batch(
                *torch.randint(
                    model.vocabulary, (2, work.batch, work.sequence), generator=generator
                )
            )
            for _ in range(accumulation)
        ]
        for _ in range(STEPS)
    ]
    masters = {
        layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in model.stack.values()
    }
    reference = Reference(model, work, config_of(model), settings, masters, device)
    wanted = [
        reference.step(
            [Batch(ids.to(device), labels.to(device)) for ids, labels, _ in step],
            rate=1e-2,
            number=number,
        )
        for number, step in enumerate(steps, 1)
    ]
    assert clipping != "global" or all(
        norm is not None and norm > settings.max_norm for _, norm in wanted
    ), "clipping is not active"
    for policy, knobs in [*EVERY, *(IN_GROUPS if accumulation == 4 and not tied else [])]:
        results, trained = execute(
            make_plan(policy, **{"chunk_bytes": 2**18, **common, **knobs}), settings, steps
        )
        assert results == wanted, (policy, knobs)
        for layer, name, master in trained:
            assert torch.equal(master, reference.masters[layer][name].cpu()), (
                policy,
                knobs,
                layer,
                name,
            )


def execute(
    plan: Plan, settings: AdamW, steps: list[list[tuple[torch.Tensor, torch.Tensor]]]
) -> tuple[list[tuple[float, float | None]], list[Master]]:
    """Returns losses and norms, and the masters after the steps."""
    with Executor(
        plan,
        config_of(plan.model),
        settings,
        torch.device("cuda", 0),
        schedule=policies.lower(plan),
    ) as executor:
        state = executor.state
        state.load(random_weights(0))
        results = [
            executor.step(step, rate=1e-2, number=number) for number, step in enumerate(steps, 1)
        ]
        executor.flush_update()
        masters = [
            (layer.name, name, master.cpu())
            for layer in plan.model.stack.values()
            for name, master in state.masters(layer).items()
        ]
    return [(result.loss, result.gradient_norm) for result in results], masters


@pytest.mark.usefixtures("deterministic")
def test_compiled_layers_give_one_set_of_bits_whatever_the_schedule(
    make_plan: Callable[..., Plan],
) -> None:
    sizes = {
        "hidden": 256,
        "intermediate": 512,
        "head_dim": 64,
        "vocabulary": 1000,
        "batch": 4,
        "sequence": 128,
        "loss_chunk": 128,
    }
    common = {
        **sizes,
        "family": "qwen2",
        "compiled": True,
        "device_limit_bytes": 2**32,
        "host_limit_bytes": 2**32,
    }
    generator = torch.Generator().manual_seed(1)
    steps = [[Batch(*torch.randint(1000, (2, 4, 128), generator=generator))] for _ in range(STEPS)]
    settings = AdamW(max_norm=0.5, weight_decay=0.1)
    first = None
    for policy, knobs in EVERY:
        results, masters = execute(
            make_plan(policy, **{"chunk_bytes": 2**18, **common, **knobs}), settings, steps
        )
        first = first or (results, masters)
        assert results == first[0], (policy, knobs)
        for (layer, name, ours), (_, _, theirs) in zip(masters, first[1], strict=True):
            assert torch.equal(ours, theirs), (policy, knobs, layer, name)


@pytest.mark.parametrize("planes", [False, True])
def test_the_optimizer_gives_the_same_bits_on_both_sides_of_the_link(planes: bool) -> None:
    torch.manual_seed(0)
    count = 1_000_003
    master, gradient, moments = (
        torch.randn(count),
        torch.randn(count),
        torch.stack([torch.randn(count) * 0.01, torch.rand(count) * 1e-3]),
    )
    results = []
    for device in ("cpu", "cuda"):
        weights, low = master.to(device, copy=True), None
        if planes:
            high, low = (
                torch.empty(count, dtype=dtype, device=device)
                for dtype in (torch.bfloat16, torch.int16)
            )
            optimizer.split(weights, high, low)
            weights = high
        kept, clip = moments.to(device, copy=True), torch.tensor(0.37, device=device)
        optimizer.update(
            weights,
            low,
            kept,
            gradient.to(device),
            settings=AdamW(weight_decay=0.1),
            rate=1e-2,
            number=3,
            clip=clip,
        )
        updated = weights if low is None else optimizer.join(weights, low)
        results.append(
            [updated.cpu(), kept.cpu(), optimizer.sum_of_squares(gradient.to(device)).cpu()]
        )
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert torch.equal(on_cpu, on_gpu)


SPECIAL = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x007F_FFFF,
    0x0080_0000,
    0x3F80_8000,
    0xBF80_8000,
    0x7F7F_7FFF,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
    0xFFC1_2345,
]
"""zeros, denormals, the smallest normal value, ties between bf16 values, the largest value,
infinities, NaNs"""


def any_floats(count: int) -> torch.Tensor:
    """Returns a float32 tensor of shape [n] on the GPU.

    One eighth of the values are special, half are random bit patterns, and the rest are values as
    in training.
    """
    kind, bits = torch.rand(count), torch.randint(0, 2**32, (count,))
    bits = torch.where(
        kind < 0.125, torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (count,))], bits
    )
    wild = (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)
    return torch.where(
        kind < 0.625, wild, torch.randn(count) * 10.0 ** torch.randint(-6, 2, (count,)).float()
    ).cuda()


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Returns whether two tensors have the same bits. All NaNs count as equal."""
    return torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(
        ours.view(torch.int32)[~ours.isnan()], theirs.view(torch.int32)[~theirs.isnan()]
    )


@pytest.fixture
def triton_kernels() -> Kernels:
    return kernels(torch.device("cuda")) or pytest.skip("needs Triton")


@pytest.mark.parametrize("count", [1, 1000, 1024, 1_000_003])
@pytest.mark.parametrize("offset", [0, 64, 3])
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_update_gives_pytorch_s_bits(
    triton_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    offset: int,
    planes: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(count + offset)
    whole, part = count + offset + 5, slice(offset, offset + count)
    master, gradient, first, second = (any_floats(whole) for _ in range(4))
    gradient = gradient.to(dtype)
    for clip, decay, copied in ((None, 0.0, False), (torch.tensor(0.37, device="cuda"), 0.1, True)):
        results = []
        for chosen in (triton_kernels, None):
            monkeypatch.setattr(optimizer, "kernels", lambda _, chosen=chosen: chosen)
            weights, low, moments = master.clone(), None, torch.stack([first, second])
            if planes:
                high, low = (
                    torch.empty(whole, dtype=torch.bfloat16, device="cuda"),
                    torch.empty(whole, dtype=torch.int16, device="cuda"),
                )
                optimizer.split(weights, high, low)
                weights = high
            copy = torch.zeros_like(weights)
            optimizer.update(
                weights[part],
                None if low is None else low[part],
                moments[:, part],
                gradient[part],
                settings=AdamW(),
                rate=1e-2,
                number=3,
                clip=clip,
                weight_decay=decay,
                copy_to=copy[part] if copied else None,
            )
            assert torch.equal(
                copy[part].view(torch.uint8),
                (weights if copied else torch.zeros_like(weights))[part].view(torch.uint8),
            )
            results.append([weights if low is None else optimizer.join(weights, low), moments])
        for ours, theirs in zip(*results, strict=True):
            assert same_bits(ours, theirs)


@pytest.mark.parametrize("count", [1, 2048, 1_000_003])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("first", [False, True])
def test_the_fused_sum_of_parts_gives_pytorch_s_bits(
    triton_kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    dtype: torch.dtype,
    first: bool,
) -> None:
    torch.manual_seed(count)
    parts = any_floats(2 * 4 * count).to(dtype).view(2, 4, count).transpose(0, 1)
    before, results = any_floats(count), []
    for chosen in (triton_kernels, None):
        total = before.clone()
        monkeypatch.setattr(optimizer, "kernels", lambda _, chosen=chosen: chosen)
        optimizer.sum_parts(total, parts, first=first)
        results.append(total)
    assert same_bits(*results)


@pytest.mark.parametrize("count", [1, 4095, 4096, 1_000_003, 4096 * 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_sum_of_squares_gives_pytorch_s_bits(
    triton_kernels: Kernels, monkeypatch: pytest.MonkeyPatch, count: int, dtype: torch.dtype
) -> None:
    """The fused sum of squares gives PyTorch's bits, on the GPU and on the CPU.

    5,000 rows are summed in more than one piece.
    """
    torch.manual_seed(count)
    values = any_floats(count)
    gradient = torch.where(values.abs() < 1e15, values, 0).to(dtype)
    for given in (gradient, gradient[1:]) if count > 1 else (gradient,):
        monkeypatch.setattr(optimizer, "kernels", lambda _: triton_kernels)
        ours = optimizer.sum_of_squares(given)
        monkeypatch.setattr(optimizer, "kernels", lambda _: None)
        assert torch.equal(ours, optimizer.sum_of_squares(given))
        assert torch.equal(ours.cpu(), optimizer.sum_of_squares(given.cpu()))


@pytest.mark.usefixtures("triton_kernels")
def test_steps_compile_the_fused_update_once() -> None:
    """Another step number or another layer length does not compile another kernel."""
    from megatrain.runtime.optimizer.kernels import device

    def step(count: int, number: int) -> None:
        weights, moments, gradient = (
            torch.ones(count, device="cuda"),
            torch.zeros(2, count, device="cuda"),
            torch.ones(count, device="cuda"),
        )
        optimizer.update(
            weights,
            None,
            moments,
            gradient,
            settings=AdamW(),
            rate=1.0 / number,
            number=number,
            clip=None,
        )

    def compiled() -> int:
        return len(device._adamw.device_caches[torch.cuda.current_device()][0])

    step(1024, 1)
    before = compiled()
    for number, count in enumerate((64, 1000 * 64, 4096, 2**20 + 64), 2):
        step(count, number)
    assert compiled() == before


def test_no_work_is_left_when_lanes_have_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may free the memory at once. On an H200, copies that were still running ended the
    process with a launch failure.
    """
    monkeypatch.setattr(contention, "_WINDOW_SECONDS", 0.05)
    device, size, enqueued = torch.device("cuda", 0), 2**28, list[torch.cuda.Event]()
    pinned, memory = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)],
    )

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        enqueued.append(torch.cuda.current_stream(device).record_event())

    work: dict[str, Callable[[], object]] = {
        "h2d": lambda: copy(memory[0], pinned),
        "d2h": lambda: copy(pinned, memory[1]),
    }
    contention.run_together(work, {"h2d": 1, "d2h": 1}, device)
    assert len(enqueued) >= 10
    assert all(event.query() for event in enqueued)


@pytest.fixture(scope="module")
def machine() -> HardwareSpec:
    """Returns a machine that was calibrated with short measurements.

    Tests only use its bytes and the set of its numbers, and no durations.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_SECONDS", 0.2)
        patch.setattr(contention, "_WINDOW_SECONDS", 0.05)
        return calibrate.calibrate("gpu", MODEL, WORK, config_of(MODEL), torch.device("cuda", 0))


def test_every_number_of_a_gpu_has_its_spread(machine: HardwareSpec) -> None:
    """Numbers that only the calibration of a GPU has also have a spread.

    They are interleaving, both directions of the link at once, events, and registration.
    """
    table = machine.costs
    assert table is not None
    names = {f"turns.{field}" for field in KernelInterleaving.__struct_fields__} | {
        f"fixed.{field}" for field in FixedCosts.__struct_fields__
    }
    names |= {f"duplex_curve {size}" for size, _ in machine.duplex_curve} | {
        "peak_tflops.bf16",
        "device_gb_per_s",
        "step_overhead_ns",
    }
    names |= {
        f"contention.{lane}.{other}"
        for lane, others in table.contention.items()
        for other in others
    }
    assert len(machine.duplex_curve) == 5
    assert names <= table.spread.keys()
    assert all(share >= 0 for share in table.spread.values())
    same = agreement(machine, machine)
    assert (same.differences, same.noisy) == ((), ())


MODEL = ModelSpec(
    name="m",
    config={
        "model_type": "qwen2",
        "num_hidden_layers": 8,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32_000,
    },
)
WORK = Workload(batch=8, sequence=1024)


@pytest.mark.parametrize(
    ("policy", "interval", "accumulation", "group"),
    [
        ("double_buffer", 1, 1, 1),
        ("double_buffer", 4, 1, 1),
        ("k_buffer", 2, 2, 1),
        ("resident", 3, 2, 1),
        ("overlapped", 1, 4, 4),
    ],
)
def test_the_peak_of_device_memory_is_predicted(
    machine: HardwareSpec,
    make_plan: Callable[..., Plan],
    policy: str,
    interval: int,
    accumulation: int,
    group: int,
) -> None:
    """The predicted peak of device memory is at least the measured one, and at most 3 % more."""
    device, work = torch.device("cuda", 0), msgspec.structs.replace(WORK, accumulation=accumulation)
    limits = {"device_limit_bytes": machine.device_bytes, "host_limit_bytes": machine.host_bytes}
    plan = make_plan(
        policy,
        weight_slots=SLOTS.get(policy, 2),
        checkpoint_interval=interval,
        chunk_bytes=2**24,
        accumulation=accumulation,
        micro_batch_group=group,
        **limits,
    )
    costs = cost_model(machine, MODEL, work)
    assert isinstance(costs, Calibrated)
    plan = assess(msgspec.structs.replace(plan, model=MODEL, workload=work), costs).plan
    forget_device_memory(device)
    before = torch.cuda.memory_allocated(device)
    with Executor(plan, config_of(MODEL), AdamW(), device) as executor:
        executor.state.load(random_weights(0))
        for number in range(1, 4):
            batches = [
                Batch(*torch.randint(MODEL.vocabulary, (2, work.batch, work.sequence)))
                for _ in range(accumulation)
            ]
            executor.step(batches, rate=1e-4, number=number)
        peak = int(str(measured_memory(executor, before)["device_peak_bytes"]))
    assert plan.prediction is not None
    assert peak <= plan.prediction.device_peak_bytes <= 1.03 * peak
