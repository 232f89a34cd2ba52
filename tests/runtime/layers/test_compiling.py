"""Tests that compiled functions do not count against each other's recompile limit."""

from __future__ import annotations

import pytest
import torch
from small_model import SMALL

from megatrain.runtime.layers.compiling import compiled
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.simulator.model.workload import Workload


class _Scale:
    """Multiplies by a number that is a constant for the compiler."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def run(self, x: torch.Tensor, *, shift: float = 1.0) -> torch.Tensor:
        return x * self.factor + shift


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    """Graphs that were compiled."""
    return []


def test_more_functions_than_pytorch_compiles_of_one_code_object(
    graphs: list[torch.fx.GraphModule],
) -> None:
    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    count = torch._dynamo.config.recompile_limit + 3
    x = torch.ones(2)
    for factor in range(count):
        run = compiled(_Scale(factor + 0.5).run, backend=backend)
        assert torch.equal(run(x, shift=2.0), x * (factor + 0.5) + 2.0)
        assert torch.equal(run(x), x * (factor + 0.5) + 1.0)
    assert len(graphs) >= count


def test_a_closure_keeps_its_cells(graphs: list[torch.fx.GraphModule]) -> None:
    factor = 3.0

    def scaled(x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return factor * x**power

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    x = torch.tensor([2.0])
    assert torch.equal(compiled(scaled, backend=backend)(x), torch.tensor([12.0]))
    assert len(graphs) == 1


def test_each_layer_of_the_plan_has_a_kind() -> None:
    """A config may have more layers than the plan, as in a calibration, but not fewer."""
    work, cpu = Workload(batch=1, sequence=8), torch.device("cpu")
    more = FunctionalLayers(SMALL.with_layers(1), work, config_of(SMALL), cpu)
    assert SMALL.layers > 1 == len(more._kinds)
    with pytest.raises(ValueError, match="zip"):
        FunctionalLayers(SMALL, work, config_of(SMALL.with_layers(1)), cpu)
