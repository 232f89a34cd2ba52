"""On a GPU: the same bits whatever the schedule and on whichever side the optimizer runs, and memory that was foretold. Skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from megatrain.runtime import calibrate, optimizer, rates
from megatrain.runtime.executor import Executor
from megatrain.runtime.machine import forget_device_memory
from megatrain.runtime.model_files import ModelState, random_weights
from megatrain.runtime.optimizer import AdamW
from megatrain.runtime.reference import Reference
from megatrain.runtime.templates import config_of
from megatrain.runtime.trainer import measured_memory
from megatrain.simulator import policies
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Plan
from megatrain.simulator.planner import assess
from megatrain.simulator.specs import ModelSpec, Workload

pytestmark = pytest.mark.cuda
SLOTS = {"sequential": 1, "double_buffer": 2, "k_buffer": 3, "resident": 2}
STEPS = 5


@pytest.fixture
def deterministic() -> Iterator[None]:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("dtype", "accumulation", "tied"), [("bf16", 1, False), ("bf16", 4, True), ("fp32", 4, False)])
def test_every_schedule_gives_the_reference_s_bits(make_plan: Callable[..., Plan], dtype: str, accumulation: int, tied: bool) -> None:
    device, settings = torch.device("cuda", 0), AdamW(max_norm=0.5, weight_decay=0.1)
    sizes = {"hidden": 256, "intermediate": 512, "head_dim": 64, "vocabulary": 1000, "batch": 4, "sequence": 128, "loss_chunk": 100}
    common = {**sizes, "dtype": dtype, "accumulation": accumulation, "tied": tied, "device_limit_bytes": 2**32, "host_limit_bytes": 2**32}
    plan = make_plan("resident", **common)
    model, work, weights = plan.model, plan.workload, random_weights(0)
    generator = torch.Generator().manual_seed(1)
    steps = [[tuple(torch.randint(model.vocabulary, (2, work.batch, work.sequence), generator=generator)) for _ in range(accumulation)] for _ in range(STEPS)]
    masters = {layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors} for layer in model.stack.values()}
    reference = Reference(model, work, config_of(model), settings, masters, device)
    wanted = [reference.step([(ids.to(device), labels.to(device)) for ids, labels in step], rate=1e-2, number=number) for number, step in enumerate(steps, 1)]
    assert all(norm is not None and norm > settings.max_norm for _, norm in wanted), "clipping is active"
    for policy, slots in SLOTS.items():
        for interval in (1, 3):
            chosen = make_plan(policy, weight_slots=slots, checkpoint_interval=interval, chunk_bytes=2**18, **common)
            with Executor(chosen, config_of(model), settings, device, schedule=policies.lower(chosen)) as executor:
                state = ModelState(chosen, executor.schedule, executor.arenas)
                state.load(weights)
                results = [executor.step(step, rate=1e-2, number=number) for number, step in enumerate(steps, 1)]
                assert [(result.loss, result.gradient_norm) for result in results] == wanted, (policy, interval)
                for layer in model.stack.values():
                    for name, master in state.masters(layer).items():
                        assert torch.equal(master.cpu(), reference.masters[layer.name][name].cpu()), (policy, interval, layer.name, name)


@pytest.mark.parametrize("planes", [False, True])
def test_the_optimizer_gives_the_same_bits_on_both_sides_of_the_link(planes: bool) -> None:
    torch.manual_seed(0)
    count = 1_000_003
    master, gradient, moments = torch.randn(count), torch.randn(count), torch.stack([torch.randn(count) * 0.01, torch.rand(count) * 1e-3])
    results = []
    for device in ("cpu", "cuda"):
        weights, low = master.to(device, copy=True), None
        if planes:
            high, low = (torch.empty(count, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.int16))
            optimizer.split(weights, high, low)
            weights = high
        kept, clip = moments.to(device, copy=True), torch.tensor(0.37, device=device)
        optimizer.update(weights, low, kept, gradient.to(device), settings=AdamW(weight_decay=0.1), rate=1e-2, number=3, clip=clip)
        updated = weights if low is None else optimizer.join(weights, low)
        results.append([updated.cpu(), kept.cpu(), optimizer.sum_of_squares(gradient.to(device)).cpu()])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert torch.equal(on_cpu, on_gpu)


@pytest.fixture(scope="module")
def machine() -> HardwareSpec:
    """Calibrated in a hurry: only its bytes are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "_SECONDS", 0.2)
        patch.setattr(rates, "_PAIR_SECONDS", 0.05)
        return calibrate.calibrate("gpu", MODEL, WORK, config_of(MODEL), torch.device("cuda", 0))


MODEL = ModelSpec(
    name="m",
    config={
        "model_type": "qwen2", "num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 32_000,
    },
)  # fmt: skip  # fmt: skip
WORK = Workload(batch=8, sequence=1024)


@pytest.mark.parametrize(("policy", "interval", "accumulation"), [("double_buffer", 1, 1), ("double_buffer", 4, 1), ("k_buffer", 2, 2), ("resident", 3, 2)])
def test_the_device_s_peak_is_foretold(machine: HardwareSpec, make_plan: Callable[..., Plan], policy: str, interval: int, accumulation: int) -> None:
    """Not under-predicted, and within 3 %."""
    device, work = torch.device("cuda", 0), msgspec.structs.replace(WORK, accumulation=accumulation)
    limits = {"device_limit_bytes": machine.device_bytes, "host_limit_bytes": machine.host_bytes}
    plan = make_plan(policy, weight_slots=SLOTS[policy], checkpoint_interval=interval, chunk_bytes=2**24, **limits)
    costs = cost_model(machine, MODEL, work)
    assert isinstance(costs, Calibrated)
    plan = assess(msgspec.structs.replace(plan, model=MODEL, workload=work), costs).plan
    forget_device_memory(device)
    before = torch.cuda.memory_allocated(device)
    with Executor(plan, config_of(MODEL), AdamW(), device) as executor:
        ModelState(plan, executor.schedule, executor.arenas).load(random_weights(0))
        for number in range(1, 4):
            batches = [tuple(torch.randint(MODEL.vocabulary, (2, work.batch, work.sequence))) for _ in range(accumulation)]
            executor.step(batches, rate=1e-4, number=number)
        peak = int(str(measured_memory(executor, before)["device_peak_bytes"]))
    assert plan.prediction is not None
    assert peak <= plan.prediction.device_peak_bytes <= 1.03 * peak
