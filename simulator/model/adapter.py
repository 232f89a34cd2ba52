"""adapter_in: finds a LoRA adapter in a model folder. Adapters are not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_json

CONFIG = "adapter_config.json"
"""The file that describes an adapter."""
WEIGHTS = "adapter_model.safetensors"
"""The weights of an adapter."""
_LONGEST_NAME = 200


def adapter_in(folder: Path) -> str:
    """Returns a phrase that describes the adapter in `folder`, or an empty text if there is none.

    Raises UserError if its config is unreadable.
    """
    if not (folder / CONFIG).is_file():
        return ""
    config = read_json(folder / CONFIG)
    keys: dict[str, Any] = config if isinstance(config, dict) else {}
    kind = "a LoRA adapter" if keys.get("peft_type") == "LORA" else "an adapter"
    base = keys.get("base_model_name_or_path")
    of = f" of {base[:_LONGEST_NAME]}" if isinstance(base, str) and base.isprintable() else ""
    return f"{kind}{of} ({CONFIG})"


def no_whole_weights(folder: Path, adapter: str) -> UserError:
    """Returns the error for a folder that has an adapter, but not the weights of a model.

    Args:
        folder: the folder.
        adapter: the phrase that `adapter_in` returns for it.
    """
    return UserError(
        f"model {folder}",
        found=f"a folder that holds {adapter}, without the model's own weights",
        allowed="a folder with whole weights",
        fix="merge the adapter into its base first (peft: merge_and_unload), and train the result",
    )
