"""Tests of attention: kept outputs, compiled graphs, and refused kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import reference_lengths
import torch
from tiny_families import config_of as tiny_config

from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers import attention, lengths
from megatrain.runtime.layers.attention import kernel_of, refuse_attention
from megatrain.runtime.layers.functional_layers import (
    FunctionalLayers,
    SavedForBackward,
    config_of,
    layer_tensors,
)
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.training.config import Config, TrainingSettings
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.attention_kernel import KERNELS, choosable, is_optional, optional
from megatrain.simulator.model.specs import ModelSpec, library
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.schedule.plan import Placement, Plan

CPU = torch.device("cpu")
SLOT = "device.weights:0"


@pytest.fixture
def slot() -> Iterator[Arenas]:
    """Returns arenas with one slot of 1 MiB."""
    arenas = Arenas(
        Schedule(
            policy="test",
            buffers=(Buffer(id=SLOT, bytes=2**20, data="attention", dtype="mixed"),),
            ops=(),
        ),
        CPU,
        device_limit_bytes=2**22,
        host_limit_bytes=1,
    )
    yield arenas
    arenas.close()


def made(plan: Plan) -> FunctionalLayers:
    return FunctionalLayers(plan.model, plan.workload, config_of(plan.model), CPU, keeps=True)


def drawn(
    plan: Plan, arenas: Arenas, functional_layers: FunctionalLayers
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns a layer's weights in the slot, its input, and a gradient of its output."""
    tensors, weights = (
        layer_tensors(arenas, plan.model.stack["0"], SLOT, functional_layers.dtype),
        random_weights(1),
    )
    for name, tensor in tensors.items():
        tensor.copy_(weights("0", name, tuple(tensor.shape)) + 0.01)
    generator = torch.Generator().manual_seed(0)
    shape = (plan.workload.batch, plan.workload.sequence, plan.model.hidden)
    x, gradient = (
        torch.randn(shape, generator=generator).to(functional_layers.dtype) for _ in range(2)
    )
    return tensors, x, gradient


def both_ways(
    functional_layers: FunctionalLayers, saved: SavedForBackward, gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the layer's output and every gradient."""
    return [saved.output.detach(), *functional_layers.backward(saved, SLOT, gradient)]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_kept_attention_gives_the_bits_of_one_computed_again(
    make_plan: Callable[..., Plan], slot: Arenas, family: str, dtype: str, kv_heads: int
) -> None:
    plan = make_plan(family=family, dtype=dtype, kv_heads=kv_heads, sequence=33)
    functional_layers = made(plan)
    weights, x, gradient = drawn(plan, slot, functional_layers)
    layer = plan.model.stack["0"]
    plain = both_ways(
        functional_layers, functional_layers.recompute(slot, layer, SLOT, x.clone()), gradient
    )
    output, kept = functional_layers.forward_and_attention(
        "0", {name: tensor.detach() for name, tensor in weights.items()}, x.clone()
    )
    assert torch.equal(output, plain[0])
    assert torch.equal(
        output,
        functional_layers.forward(
            "0", {name: tensor.detach() for name, tensor in weights.items()}, x.clone()
        ),
    )
    again = both_ways(
        functional_layers,
        functional_layers.recompute(slot, layer, SLOT, x.clone(), kept=kept),
        gradient,
    )
    assert all(map(torch.equal, again, plain))
    assert [tuple(tensor.shape) for tensor in kept] == [
        (2, 33, 4, plan.model.hidden // 4),
        (2, 4, 33),
    ]
    bytes_kept = plan.model.kept_attention("0", plan.workload)
    assert (bytes_kept.output, bytes_kept.log_sum_exp) == tuple(tensor.nbytes for tensor in kept)


def test_a_kept_attention_is_used_and_not_computed(
    make_plan: Callable[..., Plan], slot: Arenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recompute uses the kept output, so replacing the output changes the result.

    The kernel's forward function is not called.
    """
    plan = make_plan(dtype="fp32")
    functional_layers = made(plan)
    weights, x, gradient = drawn(plan, slot, functional_layers)
    _, kept = functional_layers.forward_and_attention(
        "0", {name: tensor.detach() for name, tensor in weights.items()}, x
    )
    monkeypatch.setattr(attention, "_forward", None)
    monkeypatch.setattr(attention, "sdpa_attention_forward", None)
    right, wrong = (
        both_ways(
            functional_layers,
            functional_layers.recompute(
                slot, plan.model.stack["0"], SLOT, x.clone(), kept=kept._replace(output=output)
            ),
            gradient,
        )
        for output in (kept.output, kept.output + 1)
    )
    assert not torch.equal(right[0], wrong[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_chosen_flash_attention_equals_pytorch_s_default_on_the_cpu(
    make_plan: Callable[..., Plan], slot: Arenas, dtype: str
) -> None:
    results = []
    for chosen in (None, "flash"):
        plan = make_plan(family="qwen2", dtype=dtype, attention=chosen)
        functional_layers = FunctionalLayers(plan.model, plan.workload, config_of(plan.model), CPU)
        _, x, gradient = drawn(plan, slot, functional_layers)
        results.append(
            both_ways(
                functional_layers,
                functional_layers.recompute(slot, plan.model.stack["0"], SLOT, x),
                gradient,
            )
        )
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("way", ["kernel", "lengths"])
def test_without_a_factor_scores_are_divided_by_the_root_of_the_head_size(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    reference_lengths.install(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 5, 16, generator=generator) for _ in range(3))
    module = torch.nn.Module()
    mask = (
        lengths.bounds(torch.zeros(2, 5, dtype=torch.int64), lengths.Room(2, 5))
        if way == "lengths"
        else None
    )
    found, divided, doubled = (
        attention.attend(module, query, key, value, mask, scaling=scaling, kernel="cpu")[0]
        for scaling in (None, 0.25, 0.5)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(found, divided)
    assert not torch.allclose(found, doubled)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_layers_are_traced_whole_and_once(make_plan: Callable[..., Plan], slot: Arenas) -> None:
    """A layer whose attention was kept is compiled as one graph, which other layers reuse."""
    plan = make_plan(family="qwen2", dtype="bf16")
    functional_layers = made(plan)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    functional_layers._kinds[0].run = torch.compile(
        functional_layers._kinds[0].eager, fullgraph=True, dynamic=False, backend="eager"
    )
    graphs = []
    for _ in range(2):
        weights, x, gradient = drawn(plan, slot, functional_layers)
        detached = {name: tensor.detach() for name, tensor in weights.items()}
        _, kept = functional_layers.forward_and_attention("0", detached, x.clone())
        both_ways(
            functional_layers,
            functional_layers.recompute(slot, plan.model.stack["0"], SLOT, x.clone(), kept=kept),
            gradient,
        )
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1, 1]
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_kernel_that_the_machine_lacks_is_refused_before_anything_is_loaded(
    executable: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = executable(attention="cudnn")
    with pytest.raises(UserError, match=r"workload: attention: found cudnn on cpu"):
        refuse_attention(plan, CPU)
    plan.save(tmp_path / "plan.toml")
    with pytest.raises(UserError, match="cudnn on cpu"):
        Trainer(
            tmp_path / "plan.toml",
            None,
            tmp_path / "nothing.txt",
            Config(training=TrainingSettings(steps=1)),
            out=tmp_path / "out",
            device=CPU,
        )
    assert not (tmp_path / "out").exists()


def test_the_kernel_that_pytorch_would_choose_is_named_or_refused(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    assert kernel_of(plan.model, plan.workload, CPU) == "cpu"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: 0)
    with pytest.raises(UserError, match="PyTorch chooses math for bf16 heads of 8 on cpu"):
        kernel_of(plan.model, plan.workload, CPU)


def test_a_kernel_can_only_be_chosen_for_full_attention(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan(family="gemma2", attention="flash", head_dim=8)
    with pytest.raises(UserError, match="flash for a gemma2 model"):
        refuse_attention(plan, CPU)
    kept = msgspec.structs.replace(plan.knobs, placement=Placement(saved_attention="1"))
    with pytest.raises(
        UserError, match=r"knobs.placement: saved_attention: found layer 1 of a gemma2 model"
    ):
        refuse_attention(
            msgspec.structs.replace(
                plan, knobs=kept, workload=msgspec.structs.replace(plan.workload, attention=None)
            ),
            CPU,
        )


@pytest.mark.parametrize(
    "window",
    [
        pytest.param({}, marks=pytest.mark.nightly, id="full"),
        pytest.param(
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            id="sliding above",
        ),
    ],
)
def test_a_kept_attention_does_not_change_the_masks_of_other_layers(
    executable: Callable[..., Plan], session: Callable[..., Any], window: dict[str, Any]
) -> None:
    """Layers 1 and 2 have a sliding window. Their masks are the same if layer 0 is kept."""
    bits = []
    for kept in ("", "0"):
        model = ModelSpec.from_config(
            tiny_config("qwen2", num_hidden_layers=3, **window).to_dict(), "qwen2", "qwen2"
        )
        plan = executable(
            "overlapped",
            model=model,
            placement=Placement(saved_attention=kept),
            device_limit_bytes=2**30,
            host_limit_bytes=2**30,
        )
        with session(plan) as running:
            arguments = running.executor.functional_layers._causal_arguments
            bits.append(running.bits())
        assert [each["attention_mask"] is None for each in arguments] == [True] + [not window] * 2
    assert bits[0] == bits[1]


def test_a_kind_of_layer_has_one_graph_for_each_way_of_calling_it(
    make_plan: Callable[..., Plan], slot: Arenas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled layer has three graphs.

    One returns its attention, one takes a kept attention, and one does neither. No graph is broken,
    and other layers reuse them.
    """
    compiled, graphs = torch.compile, list[torch.fx.GraphModule]()

    def counted(function: Any, **options: Any) -> Any:
        return compiled(
            function,
            fullgraph=True,
            backend=lambda graph, _: graphs.append(graph) or graph.forward,
            **options,
        )

    monkeypatch.setattr(torch, "compile", counted)
    torch._dynamo.reset()
    plan = make_plan(family="qwen2", dtype="bf16", compiled=True)
    functional_layers, counts = made(plan), []
    for layer in ("0", "1"):
        weights, x, gradient = drawn(plan, slot, functional_layers)
        detached = {name: tensor.detach() for name, tensor in weights.items()}
        _, kept = functional_layers.forward_and_attention(layer, detached, x.clone())
        both_ways(
            functional_layers,
            functional_layers.recompute(slot, plan.model.stack[layer], SLOT, x.clone(), kept=kept),
            gradient,
        )
        both_ways(
            functional_layers,
            functional_layers.recompute(slot, plan.model.stack[layer], SLOT, x.clone()),
            gradient,
        )
        counts.append(len(graphs))
    assert counts == [3, 3]
    assert not any(
        isinstance(node.meta.get("example_value"), torch.SymInt)
        for graph in graphs
        for node in graph.graph.nodes
    ), "a size is a variable of the graph"


SAVED_ATTENTION_SUFFIX: dict[str, Any] = {"placement": Placement(saved_attention="1")}


@pytest.mark.parametrize(
    ("changes", "lengths", "found"),
    [
        ({"attention": "flash"}, True, ""),
        (SAVED_ATTENTION_SUFFIX, True, ""),
        ({"attention": "cudnn"}, True, "attention = 'cudnn'"),
        ({"attention": "flash"}, False, "attention = 'flash'"),
        (SAVED_ATTENTION_SUFFIX, False, "knobs.placement.saved_attention = '1'"),
        ({}, False, ""),
    ],
)
def test_with_documents_kernels_must_take_lengths(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    lengths: bool,
    found: str,
) -> None:
    """With documents on a GPU, a chosen kernel and kept attention need kernels that take lengths.

    The CPU's kernel takes a mask.
    """
    monkeypatch.setattr(attention, "takes_lengths", lambda *_: lengths)
    monkeypatch.setattr(attention, "kernel_of", lambda *_: None)
    plan = make_plan(documents=True, **changes)
    with (
        pytest.raises(UserError, match=f"workload: documents: found true, together with {found}")
        if found
        else contextlib.nullcontext()
    ):
        refuse_attention(plan, torch.device("cuda"))
    if changes.get("attention") != "cudnn":
        refuse_attention(plan, CPU)


def test_cudnn_is_refused_in_deterministic_mode(make_plan: Callable[..., Plan]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(
            UserError, match="workload: attention: found cudnn in deterministic mode"
        ):
            refuse_attention(make_plan(attention="cudnn"), CPU)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_kernel_that_the_planner_chooses_is_not_refused(
    make_plan: Callable[..., Plan], documents: bool, deterministic: bool
) -> None:
    """The planner's kernels are those that no rule refuses, for every model of the library. For
    documents, it names a kernel only if the model has sinks. It chooses no optional kernel, but
    advice may name one.
    """
    tiny, chosen = make_plan(), set()
    for name in library():
        model = ModelSpec.load(name).with_layers(1)
        for dtype in ("bf16", "fp32"):
            work = Workload(batch=1, sequence=32, documents=documents, dtype=dtype)
            for kernel in KERNELS:
                plan = msgspec.structs.replace(
                    tiny, model=model, workload=msgspec.structs.replace(work, attention=kernel)
                )
                try:
                    refuse_attention(plan, None, deterministic=deterministic)
                    refused = False
                except UserError:
                    refused = True
                able = kernel in choosable(model, work, deterministic=deterministic)
                if is_optional(kernel):
                    assert not able
                    able = kernel in optional(model, work)
                assert not (able and refused), (name, kernel)
                if able:
                    chosen.add(kernel)
                elif (
                    (not documents or is_optional(kernel))
                    and model.heads.size <= 128
                    and dtype == "bf16"
                ):
                    assert refused, f"{kernel} for {name}: neither chosen nor refused"
    usual = {"flash"} if documents or deterministic else {"flash", "cudnn"}
    assert chosen == usual | {"flash4"}


def test_the_refusal_of_cudnn_says_how_to_plan_without_it(make_plan: Callable[..., Plan]) -> None:
    """Without `--attention`, the planner might choose cuDNN again."""
    plan = make_plan(attention="cudnn")
    for device, deterministic in ((None, True), (CPU, False)):
        with pytest.raises(UserError, match="fix: make the plan with --attention flash"):
            refuse_attention(plan, device, deterministic=deterministic)
    flash = msgspec.structs.replace(
        plan, workload=msgspec.structs.replace(plan.workload, attention="flash")
    )
    refuse_attention(flash, CPU, deterministic=True)
