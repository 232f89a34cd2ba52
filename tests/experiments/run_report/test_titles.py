"""Tests of the titles of a run's pictures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.experiments.run_report import pictures


@pytest.mark.parametrize(
    ("parameters", "text"), [(188_992, "189 k"), (11_400_000, "11 M"), (7_615_616_512, "7,616 M")]
)
def test_the_title_counts_the_parameters_of_a_tiny_model(parameters: int, text: str) -> None:
    model = SimpleNamespace(name="tiny", parameters=parameters)
    plan: Any = SimpleNamespace(model=model, policy="overlapped")
    assert pictures._what(plan) == f"tiny, {text} parameters, policy overlapped"
