"""The models and workloads that `megatrain calibrate` measures by default.

The presets have decoder layers of several widths, with a head size of 128 and grouped-query
attention, as in most models. The layers of another model are predicted from the rates that these
layers reach, and reported as extrapolated.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Dtype, Workload


class CalibrationPreset(NamedTuple):
    """Models whose layers are measured, and the workloads of the measurements."""

    models: tuple[str, ...]
    """Names of models in the library, or `llama-WIDTH` for a small model on a CPU. Costs that do
    not depend on the model are measured with the first."""
    batch: int
    """Number of sequences in a micro-batch."""
    sequence: int
    """Number of tokens in a sequence."""
    grid: tuple[tuple[int, int], ...] | None
    """Further pairs of batch and sequence, or None for the workloads of `usual_grid`."""
    dtype: Dtype = "bf16"
    """The dtype in which layers compute."""


LARGE = CalibrationPreset(
    ("qwen2.5-3b", "llama-3.1-8b", "qwen2.5-14b"), 32, 1024, ((4, 1024), (16, 1024), (8, 4096))
)
"""Hidden sizes 2048, 4096 and 5120."""
SMALL = CalibrationPreset(
    ("qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-3b"), 8, 1024, ((1, 1024), (4, 1024), (2, 4096))
)
"""Hidden sizes 1024, 1536 and 2048."""
CPU = CalibrationPreset(
    ("llama-256", "llama-512", "llama-768"), 2, 128, ((4, 128), (1, 256)), "fp32"
)
"""Hidden sizes 256, 512 and 768, in fp32. On a CPU without bf16 instructions, matrix products in
bf16 take many times as long."""
LARGE_DEVICE_BYTES, LARGE_HOST_BYTES = 64 * 2**30, 32 * 2**30
"""The device and host memory that LARGE needs: its last model has all state on the device, and its
first model has all state on the host."""
CPU_TOKENS, SMALL_TOKENS, LARGE_TOKENS = 512, 8192, 32768
"""For a model that the user names, the number of tokens in the largest micro-batch that is
measured: on a CPU, on a GPU, and on a GPU of at least `LARGE_DEVICE_BYTES`."""
_HEAD_SIZE, _VOCABULARY = 128, 4096
"""The head size and the vocabulary of the models `llama-WIDTH`."""


def preset_for(device_type: str, device_bytes: int, host_bytes: int) -> CalibrationPreset:
    """Returns the preset for a machine with a device of type `cuda` or `cpu` and this much memory.

    Measuring the preset's models takes less than four minutes on a GPU (`LARGE` on an H200), and
    less than two minutes on a CPU with two cores.
    """
    if device_type != "cuda":
        return CPU
    return LARGE if device_bytes >= LARGE_DEVICE_BYTES and host_bytes >= LARGE_HOST_BYTES else SMALL


def most_tokens(device_type: str, device_bytes: int) -> int:
    """Returns the number of tokens in the largest micro-batch that is measured for a model that the
    user names.
    """
    if device_type != "cuda":
        return CPU_TOKENS
    return LARGE_TOKENS if device_bytes >= LARGE_DEVICE_BYTES else SMALL_TOKENS


def row_counts(tokens: int, sequence: int) -> list[int]:
    """Returns the batches to measure: as many rows as fit in `tokens`, an eighth of them, and one.

    >>> row_counts(8192, 1024), row_counts(512, 2048)
    ([8, 1], [1])
    """
    most = max(tokens // sequence, 1)
    return list(dict.fromkeys((most, max(most // 8, 1), 1)))


def set_of_named(
    device_type: str, device_bytes: int, *, sequence: int | None, longest: int | None
) -> CalibrationPreset:
    """Returns the workloads for models that the user names without a batch, and no models.

    `megatrain train` measures the same workloads. On a large GPU, they are the largest of those and
    its neighbours (`usual_grid`).

    Args:
        device_type: `cuda` or `cpu`.
        device_bytes: the memory of the device in bytes.
        sequence: the number of tokens in a row, or None if the user does not name it.
        longest: the maximum sequence length by the model's config, or None.
    """
    cpu = device_type != "cuda"
    default = CPU.sequence if cpu else LARGE.sequence
    length = sequence or min(default, longest or default)
    tokens = most_tokens(device_type, device_bytes)
    first, *others = row_counts(tokens, length)
    grid = None if tokens == LARGE_TOKENS else tuple((rows, length) for rows in others)
    return CalibrationPreset((), first, length, grid, "fp32" if cpu else "bf16")


def model_of(name: str) -> ModelSpec:
    """Returns the model `name` of a preset: a model of the library, or `llama-WIDTH`."""
    if name not in CPU.models:
        return ModelSpec.load(name)
    hidden = int(name.rpartition("-")[2])
    heads = hidden // _HEAD_SIZE
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": hidden,
        "intermediate_size": 7 * hidden // 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": _HEAD_SIZE,
        "vocab_size": _VOCABULARY,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    return ModelSpec.from_config(config, name, name)


def usual_grid(workload: Workload) -> list[Workload]:
    """Returns the workloads to measure around `workload`: with an eighth, half and twice its batch,
    and with the same tokens in sequences of half and twice the length.

    With compiled layers, each workload must be compiled. They are therefore measured only with a
    quarter and twice the batch, and with the longer sequences.
    """
    batch, sequence = workload.batch, workload.sequence
    points = [
        (batch // 8, sequence),
        (batch // 2, sequence),
        (2 * batch, sequence),
        (2 * batch, sequence // 2),
        (batch // 2, 2 * sequence),
    ]
    if workload.compiled:
        points = [(batch // 4, sequence), (2 * batch, sequence), (batch // 2, 2 * sequence)]
    workloads = [
        msgspec.structs.replace(workload, batch=max(rows, 1), sequence=max(length, 1))
        for rows, length in points
    ]
    return [point for point in dict.fromkeys(workloads) if point != workload]
