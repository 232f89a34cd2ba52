"""Tests of predicted bytes against PyTorch, for every family.

The bytes are those that elementwise kernels move in a decoder layer, and those that autograd saves.

`family_bytes.toml` has the predicted bytes in percent of the counted ones, for each kind of layer
of a tiny model: moved in the forward pass, moved in the backward pass, and saved. The numbers
change with the parts of a family or the code of transformers. This command writes the file again:

`PYTHONPATH=typings:tests/shared python tests/simulator/model/test_family_bytes.py`
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_layers import (
    TORCH_DTYPE,
    different_layers,
    kept_bytes,
    layer_of,
    register_one_kernel,
    turns_of,
)
from family_sample import others_nightly
from tiny_families import config_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from megatrain.runtime.layers import gemma3n, grouped_experts
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.families.parts import rms_norm
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.layer_memory import saved_bytes
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Dtype, Workload

FILE = Path(__file__).with_name("family_bytes.toml")
WORKLOAD = Workload(batch=1, sequence=128)
NOT_COUNTED = (
    "alias",
    "as_strided",
    "chunk",
    "detach",
    "empty",
    "expand",
    "new_empty",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "squeeze",
    "t.",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
    "_unsafe_view",
)
"""Ops that only make views or allocate memory."""
PRODUCTS = ("mm.", "addmm", "bmm", "_scaled_dot", "grouped_mm", "linear", "convolution")


class Moved(TorchDispatchMode):
    """Counts the bytes that kernels read and write, except matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self,
        kernel: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        made, name = kernel(*args, **(kwargs or {})), str(kernel).removeprefix("aten.")
        if not name.startswith(NOT_COUNTED) and not any(product in name for product in PRODUCTS):
            self.bytes += sum(
                _bytes(leaf)
                for leaf in tree_leaves((args, kwargs, made))
                if isinstance(leaf, torch.Tensor)
            )
        return made


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the tensor's elements.

    An element that an expanded tensor repeats counts once.
    """
    return (
        tensor[tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())].numel()
        * tensor.element_size()
    )


def shares(family: str, dtype: Dtype = "bf16") -> Iterator[list[float]]:
    """Returns the predicted bytes of each kind of layer in percent of the counted ones.

    They are the bytes moved in the forward pass, moved in the backward pass, and saved.
    """
    config, width = config_of(family), DTYPE_BYTES[dtype]
    spec = ModelSpec.from_config(config.to_dict(), "config.json")
    work = Workload(batch=WORKLOAD.batch, sequence=WORKLOAD.sequence, dtype=dtype)
    attention = (
        "sdpa" if family == "falcon" else "eager" if spec.writes_scores else "one_kernel"
    )  # falcon calls PyTorch's kernels itself
    model: Any = (
        AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        .to(TORCH_DTYPE[dtype])
        .train()
    )
    grouped_experts.install(model)
    if FAMILIES[family].carried:
        gemma3n.install(model)
    positions = torch.arange(work.sequence)[None]
    for layer in different_layers(spec):
        x_BSH = torch.randn(
            work.batch, work.sequence, spec.carried, dtype=TORCH_DTYPE[dtype], requires_grad=True
        )
        turns, forward, backward = (
            turns_of(model, x_BSH, positions, layer.attention),
            Moved(),
            Moved(),
        )
        module, outputs = layer_of(model, layer.name), []
        embedding_norm = FAMILIES[family].embedding_norm if layer.name == "0" else ""
        norm = (
            getattr(model.get_decoder(), embedding_norm) if embedding_norm else torch.nn.Identity()
        )
        owned = [*module.parameters(), *module.buffers(), *norm.parameters()]
        tensors = tree_leaves((x_BSH, turns, owned))
        given = {
            tensor.untyped_storage().data_ptr()
            for tensor in tensors
            if isinstance(tensor, torch.Tensor)
        }

        def run(
            module: Any = module,
            norm: Any = norm,
            x: torch.Tensor = x_BSH,
            turns: dict[str, Any] = turns,
            outputs: list[Any] = outputs,
        ) -> None:
            outputs.append(module(norm(x), attention_mask=None, position_ids=positions, **turns))

        with forward:
            kept = kept_bytes(run, given)
        made = outputs[0]
        made = made[0] if isinstance(made, tuple) else made
        gradient = torch.ones_like(made)
        with backward:
            made.backward(gradient)
        moved = [
            (op_work(spec, kind, layer.name, work).moved_bytes - passes * width * layer.parameters)
            / counted.bytes
            for kind, passes, counted in (("forward", 1, forward), ("backward", 2, backward))
        ]
        yield [100 * share for share in (*moved, saved_bytes(spec, layer.name, work) / kept)]


@pytest.fixture(scope="module", autouse=True)
def one_kernel_attention() -> None:
    register_one_kernel()


@pytest.mark.parametrize("family", others_nightly(FAMILIES))
def test_the_predicted_share_of_counted_bytes_has_not_changed(family: str) -> None:
    """The percentages are those in `family_bytes.toml`."""
    assert list(shares(family)) == [
        pytest.approx(known, abs=0.4) for known in tomllib.loads(FILE.read_text())[family]
    ]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_bytes_of_the_usual_families_are_right_within_4_percent(family: str) -> None:
    for dtype in ("bf16", "fp32"):
        assert list(shares(family, dtype)) == [pytest.approx([100, 100, 100], abs=4)]


if __name__ == "__main__":
    register_one_kernel()
    found = {
        family: [[round(share, 1) for share in layer] for layer in shares(family)]
        for family in FAMILIES
    }
    head = (
        "# Predicted over counted bytes of each kind of layer, in percent: [moved in the forward,"
        " moved in the backward, kept]."
    )
    FILE.write_text(
        "\n".join([head, *(f"{family} = {layers}" for family, layers in found.items())]) + "\n"
    )


def test_the_first_norm_keeps_its_input_in_fp32_only_as_a_copy() -> None:
    """The first norm's input is the layer's, which is saved anyway. Later norms save theirs."""
    for first, own in ((True, (0, 64)), (False, (64, 0))):
        kept = rms_norm("norm", 64, first=first).kept
        assert (kept.low, kept.wide - 1, kept.upcast) == (128, *own)
