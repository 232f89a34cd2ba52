"""Gradients that are rounded to the compute dtype in pieces."""

from __future__ import annotations

import pytest
import torch

from megatrain.runtime.execution import binding
from megatrain.runtime.execution.binding import round_and_add


@pytest.mark.parametrize("at_once", [1, 24, 1000])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float32])
def test_a_gradient_rounded_in_pieces_has_the_bits_of_one_rounded_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int, wide: torch.dtype
) -> None:
    """Pieces are a single row, two rows and a last shorter piece, and all rows."""
    monkeypatch.setattr(binding, "ROUNDED_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(13, 12, generator=generator) for _ in range(2))
    whole = torch.full((13, 20), 7.0, dtype=wide)
    target = whole[:, 4:16]  # columns of a wider table
    round_and_add(target, first, torch.bfloat16, first=True)
    assert torch.equal(target, first.bfloat16().to(wide))
    round_and_add(target, second, torch.bfloat16, first=False)
    assert torch.equal(target, first.bfloat16().to(wide) + second.bfloat16().to(wide))
    assert (whole[:, :4] == 7).all()
    assert (whole[:, 16:] == 7).all()
