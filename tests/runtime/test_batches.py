"""Tests of batches that are refused in one line before anything runs.

A batch must be int64 of shape [batch, sequence] with ids of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

GOOD = torch.arange(32).view(2, 16)
BAD: list[tuple[str, Any, str]] = [
    ("ids", GOOD[:1], r"ids: found \[1, 16\] int64; allowed: \[2, 16\] int64"),
    ("ids", GOOD[:, :1], r"ids: found \[2, 1\] int64"),
    ("ids", GOOD[:, :15], r"ids: found \[2, 15\] int64"),
    ("ids", GOOD[0], r"ids: found \[16\] int64"),
    ("ids", GOOD[None], r"ids: found \[1, 2, 16\] int64"),
    ("ids", GOOD + 0.7, r"ids: found \[2, 16\] float32"),
    ("ids", GOOD.int(), r"ids: found \[2, 16\] int32"),
    ("ids", GOOD.tolist(), r"ids: found a list"),
    ("ids", GOOD.to("meta"), r"ids: found a tensor on meta"),
    ("ids", GOOD.to_sparse(), r"ids: found a sparse tensor"),
    ("ids", GOOD + 225, r"ids: found ids from 225 to 256; allowed: 0 to 255"),
    ("ids", GOOD - 1, r"ids: found ids from -1 to 30; allowed: 0 to 255"),
    ("labels", GOOD[:1], r"labels: found \[1, 16\] int64"),
    ("labels", GOOD.double(), r"labels: found \[2, 16\] float64"),
    ("labels", GOOD + 250, r"labels: found ids from 250 to 281; allowed: 0 to 255, or -100"),
    ("labels", GOOD - 1, r"labels: found ids from -1 to 30; allowed: 0 to 255, or -100"),
    ("documents", GOOD[:1], r"documents: found \[1, 16\] int64"),
    ("documents", GOOD.float(), r"documents: found \[2, 16\] float32"),
    ("documents", GOOD - 2, r"documents: found numbers from -2"),
]


@pytest.fixture(scope="module")
def running(executable: Callable[..., Plan], session: Callable[..., Any]) -> Any:
    with session(executable(layers=1, accumulation=2, documents=True)) as made:
        yield made


@pytest.mark.parametrize(("field", "value", "message"), BAD)
@pytest.mark.parametrize("verb", ["step", "evaluate"])
def test_a_batch_of_another_shape_type_or_vocabulary_is_refused(
    running: Any, field: str, value: Any, message: str, verb: str
) -> None:
    good = Batch(GOOD, GOOD, torch.zeros_like(GOOD))
    bad = good._replace(**{field: value})
    play = (
        running.executor.evaluate
        if verb == "evaluate"
        else lambda batches: running.executor.step(batches, rate=1e-3, number=1)
    )
    before = running.executor.checksum()
    with pytest.raises(UserError, match=rf"^data: micro-batch 2: {message}.*; fix: [^\n]*$"):
        play([good, bad])
    assert running.executor.checksum() == before


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_step_needs_as_many_micro_batches_as_the_plan(running: Any, count: int) -> None:
    with pytest.raises(
        UserError, match=rf"^data: found {count} micro-batches; allowed: 2, as planned"
    ):
        running.executor.step([Batch(GOOD, GOOD)] * count, rate=1e-3, number=1)


def test_the_first_id_the_last_id_and_ignored_labels_are_accepted(running: Any) -> None:
    ids = torch.tensor([0, 255]).repeat(2, 8)
    labels = torch.tensor([0, 255, IGNORED, IGNORED]).repeat(2, 4)
    padded = torch.tensor([0] * 12 + [-1] * 4).repeat(2, 1)
    unread = labels.masked_fill(padded < 0, 256)  # the label of a padded position is not read
    found = running.executor.evaluate([Batch(ids, unread, padded), Batch(ids, labels)])
    assert found.labelled == 12 + 16


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([Batch(GOOD, GOOD), (GOOD, GOOD)], "micro-batch 2: found a tuple; allowed: Batch"),
        ([{"input_ids": GOOD}] * 2, "micro-batch 1: found a dict; allowed: Batch"),
        ([GOOD, GOOD], "micro-batch 1: found a Tensor; allowed: Batch"),
        ((batch for batch in ()), "micro-batches: found a generator; allowed: a list of Batch"),
        (None, "micro-batches: found a NoneType; allowed: a list of Batch"),
    ],
)
@pytest.mark.parametrize("verb", ["step", "evaluate"])
def test_something_else_than_batches_is_refused(
    running: Any, batches: Any, message: str, verb: str
) -> None:
    more = {"rate": 1e-3, "number": 1} if verb == "step" else {}
    with pytest.raises(UserError, match=rf"^data: {message}.*; fix: [^\n]*$"):
        getattr(running.executor, verb)(batches, **more)


@pytest.mark.parametrize(
    ("rate", "number"), [(1e-3, 0), (1e-3, -1), (-1e-3, 1), (float("nan"), 1), (float("inf"), 1)]
)
def test_a_step_has_a_number_from_1_and_a_finite_rate(
    running: Any, rate: float, number: int
) -> None:
    """AdamW's bias correction would divide by zero, in the next step if the update is deferred."""
    good = Batch(GOOD, GOOD, torch.zeros_like(GOOD))
    with pytest.raises(UserError, match=rf"^step: found number {number} and rate {rate};"):
        running.executor.step([good, good], rate=rate, number=number)
