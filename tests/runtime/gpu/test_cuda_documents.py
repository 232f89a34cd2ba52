"""Tests on a GPU: flash attention with document lengths separates documents as a mask does.

It does not wait for the GPU. The tests are skipped on machines without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from flash4_kernel import FLASH4

from megatrain.runtime.batch import Batch
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.lanes import LaneGroup
from megatrain.runtime.files.model_files import ModelState, random_weights
from megatrain.runtime.layers import lengths
from megatrain.runtime.layers.attention import Attention, attend
from megatrain.runtime.layers.documents import begins
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

pytestmark = pytest.mark.cuda
SIZES = {
    "family": "qwen2",
    "hidden": 256,
    "intermediate": 512,
    "head_dim": 64,
    "vocabulary": 1000,
    "batch": 2,
    "sequence": 256,
    "loss_chunk": 100,
    "documents": True,
    "device_limit_bytes": 2**32,
    "host_limit_bytes": 2**32,
    "chunk_bytes": 2**18,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2}
PLACEMENTS = [
    Placement(saved_attention=layers, saved_activations=saved, offloaded_inputs=offloaded)
    for layers, saved, offloaded in (("", "", ""), ("all", "", ""), ("1-2", "3", "all"))
]
CUTS = [
    [(100, 1, 99, 56), (256,)],
    [(256,), (256,)],
    [(17,) * 15 + (1,), (128, 128)],
    [(3, 200, 53), (1,) * 256],
]
"""lengths of the documents of two rows, for each micro-batch"""


def documents_of(cuts: list[tuple[int, ...]], device: str = "cpu") -> torch.Tensor:
    """Returns the document numbers of the tokens, [batch, sequence].

    In a row of more than two documents, the last is padding.
    """
    rows = [
        torch.cat([torch.full((length,), number) for number, length in enumerate(row)])
        for row in cuts
    ]
    return torch.stack(
        [
            torch.where(row == row[-1], -1, row) if len(cut) > 2 else row
            for row, cut in zip(rows, cuts, strict=True)
        ]
    ).to(device)


def both_ways(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], gradient: torch.Tensor
) -> list[torch.Tensor]:
    """Returns the output and the gradients of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(
    ("heads", "pairs", "size", "depth"),
    [(4, 4, 64, 64), (28, 4, 128, 128), (8, 2, 20, 20), (4, 4, 192, 128), (8, 1, 256, 256)],
)
@pytest.mark.parametrize("kernel", ["flash", FLASH4])
def test_the_kernel_keeps_documents_apart_as_a_mask_does(
    kernel: Any, heads: int, pairs: int, size: int, depth: int, window: int, compiled: bool
) -> None:
    """Attention with lengths is within 1 % of fp32 attention with a mask.

    The cases have grouped heads, padded heads, values narrower than keys, windows and empty
    documents. The backward pass from a kept output has the same bits. One graph accepts any number
    of documents.
    """
    if kernel == "flash4" and size not in (64, 128):
        pytest.skip("flash4 is not used with this head size")
    torch.manual_seed(0)
    wide = [
        torch.randn(2, 256, count, width, device="cuda").transpose(1, 2)
        for count, width in ((heads, size), (pairs, size), (pairs, depth))
    ]
    inputs = [tensor.bfloat16() for tensor in wide]
    wide = [tensor.float() for tensor in inputs]
    gradient = torch.randn(2, 256, heads, depth, device="cuda").bfloat16()
    module = torch.nn.Module()

    def calculate(
        query: Any, key: Any, value: Any, bounds: Any
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        left: list[torch.Tensor] = []
        return 2 * attend(module, query, key, value, bounds, results=left, kernel=kernel)[0], left

    def go_on(query: Any, key: Any, value: Any, bounds: Any, kept: Attention) -> torch.Tensor:
        # The factor of 2 keeps the compiled output from being an input's memory, which would have
        # no gradient. In a layer, a matrix product follows.
        return 2 * attend(module, query, key, value, bounds, kept=kept, kernel=kernel)[0]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run, run_kept = (
        torch.compile(each, fullgraph=True, dynamic=False) if compiled else each
        for each in (calculate, go_on)
    )
    for cuts in CUTS:
        documents = documents_of(cuts, "cuda")
        bounds = lengths.bounds(documents, lengths.room(documents), window, compiled=compiled)
        index, number = torch.arange(256, device="cuda"), begins(documents).cumsum(1)
        behind = index[:, None] - index
        seen = (
            (behind >= 0) & (number[:, :, None] == number[:, None, :]) & (behind < (window or 256))
        )
        kept: list[torch.Tensor] = []

        def reference(*tensors: torch.Tensor, mask: torch.Tensor = seen[:, None]) -> torch.Tensor:
            query, *rest = tensors
            key, value = (tensor.repeat_interleave(heads // pairs, 1) for tensor in rest)
            scores = (query @ key.transpose(2, 3) * size**-0.5).masked_fill(~mask, -torch.inf)
            return 2 * (scores.softmax(-1) @ value).transpose(1, 2)

        def computed(
            *tensors: torch.Tensor, bounds: Any = bounds, into: list[torch.Tensor] = kept
        ) -> torch.Tensor:
            output, left = run(*tensors, bounds)
            into[:] = [tensor.detach() for tensor in left]
            return output

        def taken(
            *tensors: torch.Tensor, bounds: Any = bounds, left: list[torch.Tensor] = kept
        ) -> torch.Tensor:
            return run_kept(*tensors, bounds, Attention(*left))

        ours = both_ways(computed, inputs, gradient)
        for name, right, found in zip(
            ("output", "query", "key", "value"),
            both_ways(reference, wide, gradient.float()),
            ours,
            strict=True,
        ):
            error = (found.float() - right).norm() / right.norm()
            assert error < 0.01, f"{cuts}, {name}: the error is {error:.4f} of the norm"
        assert [tuple(tensor.shape) for tensor in kept] == [(2, 256, heads, depth), (2, heads, 256)]
        if size == depth:  # attention is only kept in models whose keys and values have one size
            again = both_ways(taken, inputs, gradient)
            assert all(map(torch.equal, again, ours)), cuts
    if compiled:
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs <= 2, f"{graphs} graphs for two functions"


def drawn(plan: Plan, number: int) -> list[Batch]:
    """Returns the micro-batches of a step, each with other documents."""
    work, generator = plan.workload, torch.Generator().manual_seed(number)
    pairs = [
        torch.randint(plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator)
        for _ in range(work.accumulation)
    ]
    return [
        Batch(*pair, documents_of(CUTS[(number + micro) % len(CUTS)]))
        for micro, pair in enumerate(pairs)
    ]


@contextlib.contextmanager
def opened(plan: Plan) -> Iterator[tuple[Executor, ModelState]]:
    """Opens an executor with random weights."""
    with Executor(
        plan,
        config_of(plan.model),
        AdamW(max_norm=0.5),
        torch.device("cuda", 0),
        schedule=policies.lower(plan),
    ) as executor:
        state = executor.state
        state.load(random_weights(0))
        yield executor, state


def trained(plan: Plan) -> tuple[list[float], list[torch.Tensor]]:
    """Returns the losses of three steps, and the masters after them."""
    with opened(plan) as (executor, state):
        losses = [
            executor.step(drawn(plan, number), rate=1e-2, number=number).loss
            for number in (1, 2, 3)
        ]
        executor.flush_update()
        return losses, [
            tensor.cpu()
            for layer in plan.model.stack.values()
            for tensor in state.masters(layer).values()
        ]


def test_the_kernel_of_this_machine_takes_lengths(make_plan: Callable[..., Plan]) -> None:
    """This machine's kernel takes lengths.

    Otherwise the tests below would compare the mask with itself.
    """
    plan = make_plan("overlapped", **SIZES)
    assert lengths.takes_lengths(plan.model, plan.workload, torch.device("cuda", 0))
    assert not lengths.takes_lengths(
        plan.model, msgspec.structs.replace(plan.workload, dtype="fp32"), torch.device("cuda", 0)
    )


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("kernel", [None, FLASH4])
def test_keeping_attention_changes_no_bit(
    make_plan: Callable[..., Plan], kernel: Any, accumulation: int, compiled: bool
) -> None:
    workload = {"attention": kernel, "accumulation": accumulation, "compiled": compiled, **SIZES}
    results = [
        *(trained(make_plan("overlapped", placement=place, **workload)) for place in PLACEMENTS),
        trained(make_plan("resident", checkpoint_interval=2, **workload)),
    ]
    for losses, masters in results[1:]:
        assert losses == results[0][0]
        assert all(map(torch.equal, masters, results[0][1]))


def gradients(plan: Plan) -> tuple[float, torch.Tensor]:
    """Returns the loss of a step, and all gradients as one vector."""
    with opened(plan) as (executor, _):
        loss = executor.step(drawn(plan, 0), rate=0.0, number=1).loss
        flat = [
            executor._arenas.flat(
                buffer := f"device.gradients:{layer.name}",
                executor._binder._dtype(buffer, layer.name),
                layer.elements,
            )
            for layer in plan.model.stack.values()
        ]
        return loss, torch.cat([part.float() for part in flat])


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("compiled", [False, True])
def test_attention_with_lengths_is_as_near_to_fp32_as_with_a_mask(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    compiled: bool,
    changes: dict[str, Any],
) -> None:
    """In a whole bf16 model, lengths give about the same error against fp32 as a mask.

    This holds for the loss and the gradients.
    """
    model = make_plan(**SIZES).model
    model = msgspec.structs.replace(model, config={**model.config, **changes})
    sizes = {
        key: value
        for key, value in SIZES.items()
        if key not in ("family", "hidden", "intermediate", "head_dim", "vocabulary")
    }
    exact_loss, exact = gradients(make_plan("resident", model=model, dtype="fp32", **sizes))
    plan = make_plan("resident", model=model, compiled=compiled, **sizes)
    loss, ours = gradients(plan)
    monkeypatch.setattr(lengths, "takes_lengths", lambda *_: False)
    masked_loss, masked = gradients(plan)
    ours_error, masked_error = (
        float((found - exact).norm() / exact.norm()) for found in (ours, masked)
    )
    assert not torch.equal(ours, masked), "both runs used the same kernel"
    assert ours_error < max(1.5 * masked_error, 0.01), (
        f"the error is {ours_error:.4f} of the norm, and {masked_error:.4f} with a mask"
    )
    assert abs(loss - exact_loss) < max(2 * abs(masked_loss - exact_loss), 2e-3 * exact_loss)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kernel", [None, FLASH4])
@pytest.mark.parametrize("placement", PLACEMENTS[:2])
def test_no_step_waits_or_compiles_again(
    make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    placement: Placement,
    kernel: Any,
    compiled: bool,
) -> None:
    """From the third step on, no step waits or compiles a graph, whatever its documents are.

    A step without documents uses the causal kernel, which is another graph.
    """
    play, played = LaneGroup.play, 0

    def strict(crew: LaneGroup, queues: Any) -> None:
        torch.cuda.set_sync_debug_mode("error" if played > 2 else "default")
        try:
            play(crew, queues)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(LaneGroup, "play", strict)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    workload = {"attention": kernel, "accumulation": 2, "compiled": compiled, **SIZES}
    plan, graphs = make_plan("overlapped", placement=placement, **workload), list[int]()
    with opened(plan) as (executor, _):
        for played in range(1, 8):
            executor.step(drawn(plan, played), rate=1e-3, number=played)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert graphs[2:] == [graphs[1]] * 5, f"graphs after each step: {graphs}"
        assert bool(graphs[-1]) is compiled
        whole = [batch._replace(documents=None) for batch in drawn(plan, 9)]
        played = 0
        assert executor.step(whole, rate=1e-3, number=8).loss > 0
