"""Tests of evaluation: under any plan, it returns the loss of a step on the same batches.

The loss has the same bits. Evaluation only changes the state by applying a deferred update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from family_sample import FEW, others_nightly
from reference_step import Reference
from tiny_families import config_of as tiny_config
from whole_models import without_draws

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import CANNOT_SEPARATE_DOCUMENTS, FAMILIES
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.policies import evaluation, lower, names
from megatrain.simulator.schedule.plan import Plan

PLACEMENTS = {"": {}, "all resident": {"weights": "all"}, "some": {"weights": "0,2,h"}}


def placed(plan: Plan, placement: dict[str, str]) -> Plan:
    knobs = msgspec.structs.replace(
        plan.knobs, placement=msgspec.structs.replace(plan.knobs.placement, **placement)
    )
    plan = msgspec.structs.replace(plan, knobs=knobs)
    return msgspec.structs.replace(plan, digest=lower(plan).digest)


@pytest.mark.parametrize("clipping", ["global", "none"])
@pytest.mark.parametrize("policy", names())
def test_the_loss_is_the_next_step_s_and_nothing_changes(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str, clipping: str
) -> None:
    plan = executable(policy, accumulation=2, clipping=clipping, tied=policy == "k_buffer")
    with session(plan) as straight:
        wanted = straight.bits(steps=3)
    with session(plan) as running:
        results = []
        for number in (1, 2, 3):
            batches = running.batches(number)
            found = running.executor.evaluate(batches)
            again = running.executor.evaluate(batches)
            assert (again.loss, again.labelled) == (found.loss, found.labelled)
            result = running.step(number)
            assert found.loss == result.loss
            results.append((result.loss, result.gradient_norm))
        deferred = running.executor._deferred is not None
        running.executor.evaluate(running.batches(9))
        assert running.executor._deferred is None, (
            "the evaluation did not apply the deferred update"
        )
        assert results == wanted.results
        assert running.masters() == wanted.masters, "the evaluation changed the weights"
        assert deferred == (clipping == "global" and policy == "overlapped")


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_streamed_and_resident_weights_give_the_same_bits(
    executable: Callable[..., Plan], session: Callable[..., Any], placement: dict[str, str]
) -> None:
    losses = []
    for plan in (
        executable("resident", accumulation=2),
        placed(executable("overlapped", accumulation=2), placement),
    ):
        with session(plan) as running:
            running.step(1)
            losses.append(running.executor.evaluate(running.batches(5)).loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_loss_is_the_reference_s(
    executable: Callable[..., Plan], session: Callable[..., Any], dtype: str
) -> None:
    plan, weights = (
        executable("overlapped", accumulation=2, dtype=dtype, loss_chunk=13),
        random_weights(0),
    )
    masters = {
        layer.name: {t.name: weights(layer.name, t.name, t.shape) for t in layer.tensors}
        for layer in plan.model.stack.values()
    }
    reference = Reference(
        plan.model, plan.workload, config_of(plan.model), AdamW(), masters, torch.device("cpu")
    )
    with session(plan) as running:
        batches = running.batches(1)
        batches[0].labels[:, 3:] = IGNORED
        found = running.executor.evaluate(batches)
    assert found.loss == reference.step(batches, rate=0.0, number=1)[0]
    assert found.labelled == sum(int((batch.labels != IGNORED).sum()) for batch in batches)


@pytest.mark.parametrize("policy", names())
def test_an_evaluation_needs_no_more_memory_than_a_step(
    executable: Callable[..., Plan], session: Callable[..., Any], policy: str
) -> None:
    plan = executable(policy, accumulation=2)
    with session(plan) as running:
        found = running.executor.evaluate(running.batches(1))
        schedule, step = evaluation(plan), running.executor.schedule
        schedule.check()
        assert all(step.buffer[buffer.id] == buffer for buffer in schedule.buffers)
        assert schedule.lanes.keys() <= step.lanes.keys()
        assert (found.timeline.digest, [span.op for span in found.timeline.spans]) == (
            schedule.digest,
            [op.id for op in schedule.ops],
        )
        assert {op.kind for op in schedule.ops} - {"load_weights"} == {"embed", "forward", "loss"}
        assert all(span.duration_ns > 0 for span in found.timeline.spans if span.lane == "compute")


APART = (
    "llama",
    "gemma3_text",
    "gemma3n_text",
    "gpt_oss",
    "qwen3_moe",
    "qwen3_next",
    "falcon_h1",
    "deepseek_v3",
    "llama4_text",
    "bloom",
    "gpt2",
)
"""Families whose packed documents normal tests evaluate: at least one for each way in which layers
keep documents apart. Training on packed documents is tested with all of the sample."""


def of_family(
    executable: Callable[..., Plan], family: str, config: dict[str, Any], **changes: Any
) -> Plan:
    limits = {"device_limit_bytes": 2**30, "host_limit_bytes": 2**30}
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
    }
    model = ModelSpec.from_config(
        tiny_config(family, **{**sizes, **config}).to_dict(), family, family
    )
    return executable("overlapped", model=model, accumulation=2, loss_chunk=13, **limits, **changes)


@pytest.mark.parametrize(
    ("family", "documents"),
    [*others_nightly(FAMILIES, False, among=FEW), *others_nightly(FAMILIES, True, among=APART)],
)
def test_every_family_s_loss_is_the_step_s(
    executable: Callable[..., Plan], session: Callable[..., Any], family: str, documents: bool
) -> None:
    if documents and family in CANNOT_SEPARATE_DOCUMENTS:
        pytest.skip("this family cannot separate documents")
    changes = without_draws(family)
    if family == "mimo_v2_flash":
        changes["num_key_value_heads"] = 2
    # A router without noise still draws between equal scores, which occur in bf16.
    dtype = "fp32" if FAMILIES[family].draws else "bf16"
    plan = of_family(executable, family, changes, documents=documents, dtype=dtype)
    packed = torch.tensor([[0] * 5 + [1] * 11, [0] * 12 + [-1] * 4])
    with session(plan) as running:
        batches = [
            Batch(batch.ids, batch.labels, packed if documents else None)
            for batch in running.batches(1)
        ]
        found = running.executor.evaluate(batches)
        assert not running.executor.functional_layers._arguments, "a micro-batch is still open"
        assert (
            found.loss
            == running.executor.evaluate(batches).loss
            == running.executor.step(batches, rate=1e-2, number=1).loss
        )
        assert found.labelled == 2 * (28 if documents else 32)
        assert not running.executor.functional_layers._arguments, "a micro-batch is still open"


@pytest.mark.parametrize("documents", [False, True])
def test_the_routers_loss_is_left_out(
    executable: Callable[..., Plan], session: Callable[..., Any], documents: bool
) -> None:
    """Evaluation returns the loss of the language model without the routers' loss.

    A step's loss includes the routers' loss.
    """
    evaluated, stepped = [], []
    for routed in (False, True):
        plan = of_family(
            executable,
            "qwen3_moe",
            {"output_router_logits": routed, "router_aux_loss_coef": 0.7},
            documents=documents,
        )
        with session(plan) as running:
            evaluated.append(running.executor.evaluate(running.batches(1)).loss)
            stepped.append(running.step(1).loss)
    assert evaluated[0] == evaluated[1] == stepped[0]
    assert stepped[1] > stepped[0] + 0.1


def test_documents_that_were_not_planned_are_refused(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    with session(executable()) as running:
        (batch,) = running.batches(1)
        with pytest.raises(
            UserError,
            match=(
                r"data: found rows of several documents; .*; fix: make the plan without"
                r" --plain-packing"
            ),
        ):
            running.executor.step(
                [batch._replace(documents=torch.zeros_like(batch.ids))], rate=0.0, number=1
            )


def test_ranks_have_patience_in_the_first_two_steps_and_evaluations(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    """An evaluation compiles functions of its own, also if it is after many steps."""
    news = list[bool]()

    def watched(_: torch.device, *, new: bool) -> contextlib.AbstractContextManager[None]:
        news.append(new)
        return contextlib.nullcontext()

    with session(executable()) as running:
        executor = running.executor
        running.step()
        executor.ranks = SimpleNamespace(watched=watched)
        for _ in range(2):
            executor._run(executor._step)
        for _ in range(3):
            executor._run(executor._bound("evaluation", lambda: evaluation(executor.plan)))
        executor.ranks = None
    assert news == [True, False, True, True, False]
