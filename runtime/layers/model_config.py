"""transformers' config of a ModelSpec, completed with the defaults of its config class, and what of it differs between two models."""

from __future__ import annotations

from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, PretrainedConfig

from megatrain.simulator.errors import UserError
from megatrain.simulator.families import essential, with_nulls
from megatrain.simulator.specs import ModelSpec

_NOTHING = "nothing"
"""stands for a key that a config does not have, or has as null"""


class Difference(NamedTuple):
    """A key that decides what a layer computes, and its value in each of two models."""

    key: str
    """such as `rms_norm_eps`, or `rope_parameters.factor` inside a table"""
    first: Any
    second: Any


def completed(model: ModelSpec) -> PretrainedConfig:
    """transformers' config of `model`: its own keys, and the class's defaults for those that it leaves out.

    Raises UserError for a value that the config class refuses.
    """
    given = with_nulls(model.config)
    tokens = {"bos_token_id": None, "eos_token_id": None}  # a class's default may lie outside the vocabulary, and no layer reads them
    try:
        try:
            made = AutoConfig.for_model(**{**tokens, **given})
        except StrictDataclassFieldValidationError:  # a class that must have these tokens
            made = AutoConfig.for_model(**given)
        made.to_dict()  # fails for some values that the class takes
        return made
    except Exception as error:  # a config class computes on values that nobody has checked
        raise refused_config(f"model {model.name}: config", error) from None


def refused_config(where: str, error: Exception) -> UserError:
    """The error for a config that transformers' class does not take."""
    return UserError(where, found=first_lines(error), allowed="values that transformers accepts", fix="correct config.json")


def first_lines(error: Exception) -> str:
    """What an error of transformers says, in one line that begins with its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def differences(first: ModelSpec, second: ModelSpec) -> list[Difference]:
    """Every key that decides what a layer computes and whose value differs, each model completed with its class's defaults.

    Keys that decide nothing, such as `transformers_version`, are left out. Where the model types differ, that is the only difference.
    """
    if first.family != second.family:
        return [Difference("model_type", first.family, second.family)]
    one, other = (_flat(with_nulls(essential(completed(model).to_dict()))) for model in (first, second))
    keys = sorted(one.keys() | other.keys())
    pairs = (Difference(key, one.get(key, _NOTHING), other.get(key, _NOTHING)) for key in keys)
    return [pair for pair in pairs if pair.first != pair.second]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The entries of tables inside a config under names of their own."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        made |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": _NOTHING if value is None else value}
    return made
