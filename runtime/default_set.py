"""Default set: the layers that `megatrain calibrate` measures where no model is named, and the workloads that it measures around one.

A few widths of decoder layers with heads of 128 and grouped queries, as most models have them. Another model's layers are predicted from the nearest of
these by FLOPs, and flagged as extrapolated.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Dtype, Workload


class DefaultSet(NamedTuple):
    """Layers, and where they are measured."""

    models: tuple[str, ...]
    """names in the library; of a CPU's, which has a small vocabulary too, `llama-WIDTH`. The first stands for the machine's rates"""
    batch: int
    sequence: int
    grid: tuple[tuple[int, int], ...]
    """(batch, sequence) besides"""
    dtype: Dtype = "bf16"


LARGE = DefaultSet(("qwen2.5-3b", "llama-3.1-8b", "qwen2.5-14b"), 32, 1024, ((4, 1024), (16, 1024), (8, 4096)))
"""2048, 4096 and 5120 wide"""
SMALL = DefaultSet(("qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-3b"), 8, 1024, ((1, 1024), (4, 1024), (2, 4096)))
"""1024, 1536 and 2048 wide"""
CPU = DefaultSet(("llama-256", "llama-512", "llama-768"), 2, 128, ((4, 128), (1, 256)), "fp32")
"""in fp32: where a CPU has no products in bf16, one takes many times as long"""
LARGE_DEVICE_BYTES, LARGE_HOST_BYTES = 64 * 2**30, 32 * 2**30
"""from which on LARGE is measured: its last model with all state on the device, its first with all state on the host"""
_HEAD_SIZE, _VOCABULARY = 128, 4096


def default_set(device_type: str, device_bytes: int, host_bytes: int) -> DefaultSet:
    """What fits the machine, and takes less than four minutes on a GPU (`LARGE` on an H200), less than two on two cores."""
    if device_type != "cuda":
        return CPU
    return LARGE if device_bytes >= LARGE_DEVICE_BYTES and host_bytes >= LARGE_HOST_BYTES else SMALL


def model_of(name: str) -> ModelSpec:
    """One of a set's models."""
    if name not in CPU.models:
        return ModelSpec.load(name)
    hidden = int(name.rpartition("-")[2])
    heads = hidden // _HEAD_SIZE
    config = {
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": hidden, "intermediate_size": 7 * hidden // 2, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": _HEAD_SIZE, "vocab_size": _VOCABULARY, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return ModelSpec.from_config(config, name, name)


def usual_grid(workload: Workload) -> list[Workload]:
    """Around `workload`: an eighth, half and twice its batch, and as many tokens in sequences half and twice as long. Compiled, where every point is
    compiled anew, a quarter and twice alone, and the longer sequences.
    """
    batch, sequence = workload.batch, workload.sequence
    points = [(batch // 8, sequence), (batch // 2, sequence), (2 * batch, sequence), (2 * batch, sequence // 2), (batch // 2, 2 * sequence)]
    if workload.compiled:
        points = [(batch // 4, sequence), (2 * batch, sequence), (batch // 2, 2 * sequence)]
    made = [msgspec.structs.replace(workload, batch=max(rows, 1), sequence=max(length, 1)) for rows, length in points]
    return [point for point in dict.fromkeys(made) if point != workload]
