"""Tests of the predicted memory of a compiled layer, for every family that was counted.

`compiled_memory.toml` has two counts in bytes for each kind of layer of a family, with 2 x 2,048
tokens: the saved activations with the output, and the highest peak of the passes with saved
activations and weight gradients (`counted_compiled.py`). `many_tokens_memory.toml` has the same
counts with 32 x 1,024 tokens. There the peak is the larger one of layers with a short recompute and
of whole ones, because a plan may have both. With many tokens, activations take most of the memory,
and with few tokens the gradients of weights do.

Widths are those of `wide_models.py`. The counts change with the code of transformers or PyTorch.
This command counts all families again, in an hour, or only the given ones:

`PYTHONPATH=typings:tests/shared python tests/simulator/memory/test_compiled_memory.py [FAMILY ...]`
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from counted_compiled import counted_compiled, counted_compiled_head
from decoder_layers import different_layers
from family_sample import others_nightly
from transformers import AutoConfig
from wide_models import wide_model

from megatrain.simulator.memory.formulas import activations_estimate, workspace_estimate
from megatrain.simulator.model.attention_masks import mask_bytes, saved_mask_bytes
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.layer import DTYPE_BYTES, LayerSpec
from megatrain.simulator.model.layer_memory import backward_bytes, saved_bytes
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

FILE = Path(__file__).with_name("compiled_memory.toml")
Counts = dict[str, list[tuple[int, int]]]


def counts_in(file: Path) -> Counts:
    read = tomllib.loads(file.read_text()) if file.exists() else {}
    return {family: [(saved, peak) for saved, peak in kinds] for family, kinds in read.items()}


COUNTED = counts_in(FILE)
MANY_FILE = FILE.with_name("many_tokens_memory.toml")
MANY_TOKENS = counts_in(MANY_FILE)
FP8 = counts_in(FILE.with_name("fp8_memory.toml"))
"""The same counts for layers with fp8 products, for families with dense layers of each kind."""
SINKS_FILE = FILE.with_name("sinks_memory.toml")
SINKS = counts_in(SINKS_FILE)
"""The same counts for layers with sinks and the flash kernel, with few tokens, then with many."""
WORKLOAD = Workload(batch=2, sequence=2048, compiled=True)
NOT_COUNTED = ("apertus", "gemma3n_text")
"""Families whose layers read a value of a tensor. Fake tensors have no values."""
MEASURED = Workload(batch=32, sequence=1024, compiled=True)
MEASURED_SAVED, MEASURED_PEAK = 5_204_870_144, round((5.912 + 0.21875) * 2**30)
"""Measured bytes of a compiled layer of Qwen2.5-7B's shape on an H200 with PyTorch 2.11.

The saved bytes are those of experiments/results/h200-qwen2.5-7b-batches/hardware.toml. The peak of
`torch.cuda` was measured on the same machine on 2026-11-23, with the layer's output.
"""


def predicted(spec: ModelSpec, layer: LayerSpec, work: Workload) -> tuple[int, int]:
    """Returns the predicted saved bytes with the output, and the predicted peak."""
    more = work.tokens * spec.carried * DTYPE_BYTES[work.dtype] + saved_mask_bytes(spec, work)
    peak = backward_bytes(spec, layer, work)
    return saved_bytes(spec, layer.name, work) + more, peak + more + mask_bytes(spec, work)


def shares(
    family: str, stored: Counts = COUNTED, work: Workload = WORKLOAD
) -> Iterator[tuple[float, float]]:
    """Returns (saved, peak) of each kind of layer, as ratios of predicted to counted bytes."""
    spec = wide_model(family)
    for layer, counts in zip(different_layers(spec), stored[family], strict=True):
        saved, peak = predicted(spec, layer, work)
        yield saved / counts[0], peak / counts[1]


def count(family: str, work: Workload = WORKLOAD) -> list[tuple[int, int]]:
    spec = wide_model(family)
    found = [counted_compiled(spec, layer, work) for layer in different_layers(spec)]
    return [(each.saved, each.all) for each in found]


def count_many(family: str) -> list[tuple[int, int]]:
    """Returns the entry of a family in `many_tokens_memory.toml`."""
    spec, short = wide_model(family), msgspec.structs.replace(MEASURED, short_recompute=True)
    whole = count(family, MEASURED)
    if not any(spec.last_products(layer.name, short) for layer in spec.decoders):
        return whole
    return [
        (saved, max(peak, other))
        for (saved, peak), (_, other) in zip(whole, count(family, short), strict=True)
    ]


def test_every_family_that_can_be_counted_is_counted() -> None:
    assert sorted(FAMILIES) == sorted([*COUNTED, *NOT_COUNTED])
    assert sorted(COUNTED) == sorted(MANY_TOKENS)


@pytest.mark.parametrize("family", COUNTED)
def test_nothing_of_a_compiled_layer_is_predicted_too_low(family: str) -> None:
    for saved, peak in (*shares(family), *shares(family, MANY_TOKENS, MEASURED)):
        assert saved >= 1
        assert peak >= 1


def test_most_saved_bytes_are_predicted_within_10_percent() -> None:
    """The others are in the file. They have linear attention, a state-space mixer or own parts."""
    found = [saved for family in COUNTED for saved, _ in shares(family)]
    assert sum(share <= 1.1 for share in found) >= 0.88 * len(found)


def test_most_peaks_with_many_tokens_are_predicted_within_10_percent() -> None:
    """Most of the others write out scores, which are counted on top of other temporary tensors, or
    have linear attention, a state-space mixer or own parts.
    """
    found = [each[1] for family in COUNTED for each in shares(family, MANY_TOKENS, MEASURED)]
    assert sum(share <= 1.1 for share in found) >= 0.7 * len(found)


@pytest.mark.parametrize("family", ["cohere", "deepseek_v3", "glm", "glm4", "gpt_neox", "phi3"])
def test_peaks_of_layers_with_own_orders_of_gradients(family: str) -> None:
    """Gate and up from one projection, attention and MLP with the same input, and tensors that the
    compiler keeps to use their memory again.
    """
    assert all(1 <= peak <= 1.15 for _, peak in shares(family, MANY_TOKENS, MEASURED))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"mlp_bias": True}),
        ("stablelm", {"use_parallel_residual": True}),
        ("cohere", {"use_qk_norm": True}),
        ("gpt_neox", {"use_parallel_residual": False}),
    ],
)
@pytest.mark.nightly
def test_peaks_of_other_configs_are_not_predicted_too_low(
    family: str, changes: dict[str, object]
) -> None:
    config = AutoConfig.for_model(family).to_dict()
    spec = ModelSpec.from_config({**config, **changes}, "config.json").shortest(1)
    layer = spec.decoders[0]
    for short in (False, True):
        work = msgspec.structs.replace(MEASURED, short_recompute=short)
        found, (saved, peak) = counted_compiled(spec, layer, work), predicted(spec, layer, work)
        assert 1 <= saved / found.saved <= 1.01
        assert 1 <= peak / found.all <= 1.25


def test_a_counted_layer_takes_the_bytes_measured_on_a_gpu() -> None:
    """The count of a compiled layer of Qwen2.5-7B's shape, and its prediction."""
    model = ModelSpec.load("qwen2.5-7b").shortest(1)
    found = counted_compiled(model, model.decoders[0], MEASURED)
    assert found.saved == pytest.approx(MEASURED_SAVED, rel=1e-3)
    assert found.backward == pytest.approx(MEASURED_PEAK, rel=1e-3)
    saved, layer = activations_estimate(model, MEASURED), workspace_estimate(model, MEASURED).layer
    assert found.saved <= saved <= 1.01 * found.saved
    assert found.all <= saved + layer <= 1.1 * found.all


@pytest.mark.nightly
@pytest.mark.parametrize(
    "changes", [{}, {"fp8": "rowwise"}, {"batch": 1, "sequence": 16384, "token_piece": 4096}]
)
def test_a_short_recompute_takes_no_more_memory(changes: dict[str, object]) -> None:
    """The compiler could compute what the product reads in the backward pass, which took 36 % more
    memory.
    """
    model = ModelSpec.load("qwen2.5-7b").shortest(1)
    full, short = (
        counted_compiled(
            model,
            model.decoders[0],
            msgspec.structs.replace(MEASURED, short_recompute=short, **changes),
        )
        for short in (False, True)
    )
    assert short.saved == full.saved
    assert short.backward <= 1.001 * full.backward


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [1, 2, 6, 8])
@pytest.mark.parametrize(("family", "changes"), [("llama", {"mlp_bias": True}), ("cohere", {})])
def test_peaks_of_other_numbers_of_tokens(
    family: str, changes: dict[str, object], batch: int
) -> None:
    """With as many tokens as hidden elements, 4,096 of Llama and 8,192 of Cohere, activations have
    the size of gradients of weights, and the compiler keeps some of them longer.
    """
    config = AutoConfig.for_model(family).to_dict()
    spec = ModelSpec.from_config({**config, **changes}, "config.json").shortest(1)
    work = Workload(batch=batch, sequence=2048 if family == "llama" else 1024, compiled=True)
    found = counted_compiled(spec, spec.decoders[0], work)
    assert 1 <= predicted(spec, spec.decoders[0], work)[1] / found.all <= 1.3


HEADS = ("qwen2.5-7b", "gemma-2-9b", "smollm3-3b", "granite-3.1-2b", "command-r7b")
"""Library models. The logits of the second have a soft cap, and the vocabulary of the fourth is no
multiple of 8."""


@pytest.mark.parametrize("name", others_nightly(HEADS, among=HEADS[1:2]))
@pytest.mark.parametrize("chunk", [1024, pytest.param(8192, marks=pytest.mark.nightly)])
def test_the_peak_of_a_compiled_head_is_predicted(name: str, chunk: int) -> None:
    """The head has two loss chunks. The matrix or the logits take most of the memory."""
    model = ModelSpec.load(name).shortest(1)
    work = Workload(batch=1, sequence=2 * chunk, loss_chunk=chunk, compiled=True)
    share = workspace_estimate(model, work).head / counted_compiled_head(model, work)
    padded = model.vocabulary % 8  # a GPU pads more than a CPU
    assert 0.999 <= share <= (1.8 if padded else 1.02)


@pytest.mark.parametrize("family", others_nightly(COUNTED, among=("llama",)))
def test_a_compiled_layer_in_pieces_is_not_predicted_too_low(family: str) -> None:
    spec, work = wide_model(family), Workload(batch=1, sequence=6144, compiled=True)
    pieces = msgspec.structs.replace(work, token_piece=3072)
    linear = any(each.attention in ("linear_attention", "hybrid") for each in spec.decoders)
    if spec.pieces_obstacle() or spec.writes_scores or mask_bytes(spec, work) or linear:
        pytest.skip("not in pieces, or dominated by scores or by a mask")
    for layer in different_layers(spec):
        found = counted_compiled(spec, layer, pieces)
        saved, peak = predicted(spec, layer, pieces)
        whole = predicted(spec, layer, work)
        assert 1 <= saved / found.saved <= 1.3
        assert 1 <= peak / found.all <= (1.55 if layer.experts else 1.4)
        assert saved < whole[0]


@pytest.mark.parametrize(
    ("name", "batch", "measured"),
    [
        ("qwen2.5-7b", 8, 1.69),
        ("qwen2.5-7b", 32, 6.19),
        ("qwen2.5-7b", 64, 12.13),
        ("qwen2.5-14b", 8, 1.56),
        ("qwen2.5-14b", 32, 5.57),
        ("qwen2.5-14b", 64, 10.89),
    ],
)
def test_measured_peaks_of_compiled_layers_are_predicted(
    name: str, batch: int, measured: float
) -> None:
    """The peaks are those of experiments/published/h200.csv in GiB.

    They include up to 102 MiB that libraries keep.
    """
    model, work = ModelSpec.load(name), Workload(batch=batch, sequence=1024, compiled=True)
    peak = activations_estimate(model, work) + workspace_estimate(model, work).layer
    assert measured * 2**30 <= peak + 102 * 2**20
    assert peak <= 1.1 * measured * 2**30


def count_sinks(family: str) -> list[tuple[int, int]]:
    """Returns the entry of a family in `sinks_memory.toml`."""
    works = (msgspec.structs.replace(work, attention="flash") for work in (WORKLOAD, MEASURED))
    return [each for work in works for each in count(family, work)]


@pytest.mark.parametrize("family", SINKS)
def test_nothing_of_a_compiled_layer_with_sinks_is_predicted_too_low(family: str) -> None:
    """There is one entry for layers with a window, and one for full layers."""
    spec, counts = wide_model(family), iter(SINKS[family])
    layers = different_layers(spec)
    assert {layer.attention for layer in layers} == {"sliding_attention", "full_attention"}
    for work in (WORKLOAD, MEASURED):
        for layer in layers:
            counted, flash = next(counts), msgspec.structs.replace(work, attention="flash")
            saved, peak = predicted(spec, layer, flash)
            assert 1 <= saved / counted[0] <= 1.01
            assert 1 <= peak / counted[1] <= 1.3
            written = predicted(spec, layer, work)
            assert saved < written[0]
            assert peak < written[1]
    assert not list(counts)


@pytest.mark.nightly
@pytest.mark.parametrize("family", SINKS)
def test_the_counts_of_compiled_layers_with_sinks_have_not_changed(family: str) -> None:
    for now, before in zip(count_sinks(family), SINKS[family], strict=True):
        assert now == pytest.approx(before, rel=0.004)


@pytest.mark.parametrize("family", FP8)
def test_nothing_of_a_compiled_fp8_layer_is_predicted_too_low(family: str) -> None:
    """The predicted peak is an upper bound. The peak of some families is half of it."""
    spec, work = wide_model(family), msgspec.structs.replace(WORKLOAD, fp8="rowwise")
    saved, layer = activations_estimate(spec, work), workspace_estimate(spec, work).layer
    most = max(each for each, _ in FP8[family])
    assert most <= saved <= 1.12 * most
    assert max(peak for _, peak in FP8[family]) <= saved + layer


def test_the_predicted_memory_of_an_fp8_layer_is_near_that_measured_on_a_gpu() -> None:
    """A layer of Qwen2.5-7B's shape saved 3.252 GiB and its output, and its peak was 10.814 GiB
    with the output (experiments/results/h200-qwen2.5-7b-fp8).
    """
    model = ModelSpec.load("qwen2.5-7b").shortest(1)
    work = msgspec.structs.replace(MEASURED, fp8="rowwise")
    output = work.tokens * model.hidden * 2
    saved, layer = activations_estimate(model, work), workspace_estimate(model, work).layer
    assert 3.252 * 2**30 + output <= saved <= 1.01 * (3.252 * 2**30 + output)
    assert 10.814 * 2**30 + output <= saved + layer <= 1.05 * (10.814 * 2**30 + output)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FP8)
def test_the_counts_of_compiled_fp8_layers_have_not_changed(family: str) -> None:
    work = msgspec.structs.replace(WORKLOAD, fp8="rowwise")
    for now, before in zip(count(family, work), FP8[family], strict=True):
        assert now == pytest.approx(before, rel=0.004)


@pytest.mark.nightly
@pytest.mark.parametrize("family", MANY_TOKENS)
def test_the_counts_with_many_tokens_have_not_changed(family: str) -> None:
    for now, before in zip(count_many(family), MANY_TOKENS[family], strict=True):
        assert now == pytest.approx(before, rel=0.004)


@pytest.mark.nightly
@pytest.mark.parametrize("family", COUNTED)
def test_the_counts_of_compiled_layers_have_not_changed(family: str) -> None:
    for now, before in zip(count(family), COUNTED[family], strict=True):
        assert now == pytest.approx(before, rel=0.004)


def write_sinks() -> None:
    """Counts the families in `sinks_memory.toml` again."""
    lines = [
        "# Counted bytes of each kind of compiled layer with sinks and the flash kernel:",
        "# [saved with the output, peak], with 2 x 2,048 tokens, then with 32 x 1,024, and the",
        "# default widths of transformers.",
        *(f"{family} = {[list(kind) for kind in count_sinks(family)]}" for family in SINKS),
    ]
    SINKS_FILE.write_text("\n".join(lines) + "\n")


def write(file: Path, counts: Counts, tokens: str) -> None:
    """Writes the counts to `file`, in the order of the families' names."""
    kinds = (f"{each} = {[list(kind) for kind in counts[each]]}" for each in sorted(counts))
    lines = [
        "# Counted bytes of each kind of compiled layer: [saved with the output, peak],"
        f" with {tokens} tokens",
        "# and the default widths of transformers.",
        *kinds,
    ]
    file.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FAMILIES.keys() - set(NOT_COUNTED)):
        COUNTED[name], MANY_TOKENS[name] = count(name), count_many(name)
        write(FILE, COUNTED, "2 x 2,048")
        write(MANY_FILE, MANY_TOKENS, "32 x 1,024")
    if not sys.argv[1:] or SINKS.keys() & set(sys.argv[1:]):
        write_sinks()
