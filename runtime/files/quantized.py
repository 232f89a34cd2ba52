"""Quantized weights of a model folder, which cannot be trained, and the config's key for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_config

KEY = "quantization_config"
"""The key of config.json that says how the weights are quantized."""
KINDS = {
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e8m0fnu: "fp8",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "packed int16",
    torch.int32: "packed int32",
}
"""Dtype of tensors that have quantized weights -> its name in messages."""
PACKED = ("F4", "F6_E2M3", "F6_E3M2")
"""Codes of safetensors for numbers of less than a byte, which are quantized weights."""
ALLOWED = "bf16, fp16 or fp32 weights"
FIX = "dequantize the model first, or fetch the unquantized model"
_LONGEST_METHOD = 40


def quant_method(folder: Path) -> str | None:
    """Returns the method of quantization that config.json in `folder` names, an empty string if it
    has the key but names no method, or None if it does not have the key.

    Raises UserError if the file is unreadable.
    """
    file = folder / "config.json"
    config = read_config(file) if file.is_file() else None
    for part in (config, config.get("text_config") if isinstance(config, dict) else None):
        if isinstance(part, dict) and part.get(KEY) is not None:
            method = part[KEY].get("quant_method") if isinstance(part[KEY], dict) else None
            if isinstance(method, str) and method.isprintable():
                return method[:_LONGEST_METHOD]
            return ""
    return None


def quantized_weights(folder: Path, dtypes: Mapping[str, torch.dtype]) -> UserError:
    """Returns the error for the quantized weights of `folder`, given by name and dtype."""
    kinds = " and ".join(dict.fromkeys(KINDS[dtype] for dtype in dtypes.values()))
    method = quant_method(folder)
    named = f", quant_method {method}" if method else ""
    return UserError(
        f"model {folder}",
        found=f"quantized weights: {kinds}{named}, as in {min(dtypes)}",
        allowed=ALLOWED,
        fix=FIX,
    )


def kept_key_note(folder: Path) -> str:
    """Returns a note that the export leaves out the key of the config, or an empty string if the
    config does not have it. The weights of `folder` are not quantized.
    """
    if (method := quant_method(folder)) is None:
        return ""
    named = f" (quant_method {method})" if method else ""
    return (
        f"{folder / 'config.json'} has {KEY}{named}, but the weights are not quantized: an exported"
        " model does not have the key"
    )
