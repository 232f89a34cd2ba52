"""Tests that the predicted numbers of every family are those that were compared with PyTorch.

Nightly tests compare them for every family (`test_family_bytes.py`, `test_counted_memory.py`,
`test_compiled_memory.py`), which takes long. `family_numbers.toml` has the numbers themselves, so
that any test run notices a change. After a deliberate one, run the nightly tests of the families
that it names, and write the file again:

`PYTHONPATH=typings:tests/shared/models python tests/simulator/model/test_family_numbers.py`
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from decoder_layers import different_layers
from tiny_families import OWN, SMALL

from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.specs import LayerSpec, ModelSpec
from megatrain.simulator.model.workload import Workload

FILE = Path(__file__).with_name("family_numbers.toml")
MODES = {
    "layers": Workload(batch=2, sequence=512),
    "compiled": Workload(batch=2, sequence=512, compiled=True),
    "pieces": Workload(batch=2, sequence=512, token_piece=64),
    "compiled_pieces": Workload(batch=2, sequence=512, token_piece=64, compiled=True),
}
SHORT = 8
"""So few tokens that weights and their gradients are the largest part of a peak."""


def tiny_spec(family: str) -> ModelSpec:
    """Returns a small model whose config.json leaves out every key that it can."""
    given = {"model_type": family, **SMALL, **OWN.get(family, {})}
    content = {key: value for key, value in given.items() if value is not None}
    return ModelSpec.from_config(content, "config.json")


def numbers(spec: ModelSpec, layer: LayerSpec, work: Workload) -> list[int]:
    """Returns what kernels move forward and backward, the FLOPs forward, what is saved, and the
    peak of the backward pass, with the tokens of `work` and with few tokens.
    """
    forward, backward = (spec.work(kind, layer.name, work) for kind in ("forward", "backward"))
    sizes = (work.tokens, work.sequence, work.dtype, work.piece)
    few = (SHORT, SHORT, *sizes[2:])
    return [
        forward.moved_bytes,
        backward.moved_bytes,
        forward.flops,
        spec.saved_bytes(layer.name, *sizes, compiled=work.compiled),
        spec.backward_bytes(layer, *sizes, compiled=work.compiled),
        spec.backward_bytes(layer, *few, compiled=work.compiled),
    ]


def of_family(family: str) -> dict[str, list[list[int]]]:
    """Returns `numbers` of each kind of layer, in each mode that the family has."""
    spec = tiny_spec(family)
    return {
        mode: [numbers(spec, layer, work) for layer in different_layers(spec)]
        for mode, work in MODES.items()
        if not (work.piece and spec.pieces_obstacle(compiled=work.compiled))
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_predicted_numbers_are_those_compared_with_pytorch(family: str) -> None:
    assert of_family(family) == tomllib.loads(FILE.read_text())[family]


if __name__ == "__main__":
    head = (
        "# Of each kind of layer of a tiny model of each family: bytes moved forward and backward,"
        " FLOPs forward, bytes\n# saved, and the peak of the backward pass with many and with few"
        " tokens."
    )
    lines = [head]
    for family in FAMILIES:
        lines += [
            f"\n[{family}]",
            *(f"{mode} = {rows}" for mode, rows in of_family(family).items()),
        ]
    FILE.write_text("\n".join(lines) + "\n")
