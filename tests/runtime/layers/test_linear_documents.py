"""Tests of linear attention and state-space mixers over packed rows.

A layer computes for each document what it computes for the document alone.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from whole_models import LINEAR, model_of

from megatrain.runtime.layers.documents import positions
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.layers.linear_documents import ARGUMENT, install

LENGTHS = [[70, 1, 2, 3, 64, 60], [200], [1] * 8 + [128, 64], [4, 60, 136]]
"""tokens of the documents of each row; the delta rule works in chunks of 64"""


@pytest.fixture(params=LINEAR)
def layer(request: pytest.FixtureRequest) -> Any:
    """Returns the recurrent mixer of the first layer of transformers' model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config_of(model_of(request.param)))
    install(whole)
    first = whole.model.layers[0]
    return first.linear_attn if hasattr(first, "linear_attn") else first.mamba


def row_and_documents(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    documents = torch.stack(
        [
            torch.cat([torch.full((length,), number) for number, length in enumerate(row)])
            for row in LENGTHS
        ]
    )
    return (
        torch.randn(len(LENGTHS), 200, 64, generator=torch.Generator().manual_seed(seed)),
        documents,
    )


def test_each_document_has_the_results_of_the_document_alone(layer: Any) -> None:
    """The output of each document is within 1e-5 of that of the document alone.

    The input gradient is within 2e-5.
    """
    rows, documents = row_and_documents()
    weight = torch.randn(rows.shape, generator=torch.Generator().manual_seed(1))
    rows.requires_grad_()
    packed = layer(rows, **{ARGUMENT: positions(documents)})
    (gradient,) = torch.autograd.grad((packed * weight).sum(), rows)
    for row, numbers in enumerate(documents):
        for number in range(int(numbers.max()) + 1):
            here = numbers == number
            own = rows[row : row + 1, here].detach().requires_grad_()
            alone = layer(own)
            (expected,) = torch.autograd.grad((alone * weight[row : row + 1, here]).sum(), own)
            assert torch.allclose(
                packed[row, here], alone[0], rtol=0, atol=1e-5 * float(alone.detach().abs().max())
            )
            assert torch.allclose(
                gradient[row, here], expected[0], rtol=0, atol=2e-5 * float(expected.abs().max())
            )


def test_no_document_sees_another_one(layer: Any) -> None:
    """Replacing one document does not change the output of the others.

    This holds even for values that are a thousand times as large.
    """
    rows, documents = row_and_documents()
    other = torch.where((documents == 0)[..., None], 1000 * rows.flip(1), rows)
    first, second = (layer(each, **{ARGUMENT: positions(documents)}) for each in (rows, other))
    untouched = documents > 0
    assert torch.allclose(
        first[untouched], second[untouched], rtol=0, atol=1e-5 * float(first.detach().abs().max())
    )
    plain = [layer(each) for each in (rows, other)]
    assert not torch.allclose(
        plain[0][untouched],
        plain[1][untouched],
        rtol=0,
        atol=1e-2 * float(first.detach().abs().max()),
    )


def test_a_row_of_one_document_is_a_row_without_documents(layer: Any) -> None:
    rows, documents = row_and_documents()
    with torch.no_grad():
        plain, one = layer(rows), layer(rows, **{ARGUMENT: positions(torch.zeros_like(documents))})
    assert torch.allclose(one, plain, rtol=0, atol=1e-6 * float(plain.abs().max()))


def test_the_backward_pass_keeps_no_more_memory_than_without_documents(layer: Any) -> None:
    """The backward pass keeps as much memory as without documents, as predictions assume."""
    rows, documents = row_and_documents()
    sizes = []
    for arguments in ({}, {ARGUMENT: positions(documents)}):
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = layer(rows.clone().requires_grad_(), **arguments)
        sizes.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        del output
    assert sizes[1] == pytest.approx(sizes[0], rel=0.05)


def test_installing_twice_changes_nothing(layer: Any) -> None:
    import sys

    file = sys.modules[type(layer).__module__]
    before = copy.copy(vars(file))
    install(layer)
    assert vars(file) == before
