"""Makes transformers' config of a ModelSpec, and compares the configs of two models."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, PretrainedConfig

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import essential, with_nulls
from megatrain.simulator.model.specs import ModelSpec

_NOTHING = "nothing"
"""The value that is shown for a key that is missing or null in a config."""


class ConfigDifference(NamedTuple):
    """A config key that affects what layers compute, with its values in two models."""

    key: str
    """Name of the key, such as `rms_norm_eps`, or `rope_parameters.factor` in a table."""
    first: Any
    """Value in the first model."""
    second: Any
    """Value in the second model."""


def full_config(model: ModelSpec) -> PretrainedConfig:
    """Returns transformers' config of `model`. Keys that are not in the model's config have the
    defaults of transformers' config class.

    Raises UserError if the config class refuses a value.
    """
    # A copy, because a config class may change tables such as `rope_parameters` in place.
    values = copy.deepcopy(with_nulls(model.config))
    # None, because the defaults of a class may be outside the vocabulary. No layer reads them.
    tokens = {"bos_token_id": None, "eos_token_id": None}
    try:
        try:
            config = AutoConfig.for_model(**{**tokens, **values})
        except StrictDataclassFieldValidationError:  # this class requires these tokens
            config = AutoConfig.for_model(**values)
        config.to_dict()  # fails for some values that the class accepts
        return config
    except Exception as error:  # values of a wrong type may cause any exception
        raise refused_config(f"model {model.name}: config", error) from None


def refused_config(where: str, error: Exception) -> UserError:
    """Returns the UserError for a config that transformers does not accept."""
    return UserError(
        where,
        found=first_lines(error),
        allowed="values that transformers accepts",
        fix="correct config.json",
    )


def first_lines(error: Exception) -> str:
    """Returns the type of `error` and the first two lines of its text, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def differences(first: ModelSpec, second: ModelSpec) -> list[ConfigDifference]:
    """Returns the config keys that affect what layers compute and whose values differ between two
    models.

    Keys that are missing in a config have the defaults of its config class. Keys that affect
    nothing, such as `transformers_version`, are ignored. If the model types differ, returns only
    this difference.

    Raises UserError if transformers refuses a value of either config.
    """
    if first.family != second.family:
        return [ConfigDifference("model_type", first.family, second.family)]
    one, other = (
        _flat(with_nulls(essential(full_config(model).to_dict()))) for model in (first, second)
    )
    keys = sorted(one.keys() | other.keys())
    pairs = (
        ConfigDifference(key, one.get(key, _NOTHING), other.get(key, _NOTHING)) for key in keys
    )
    # The text is compared too, because NaN differs from itself.
    return [
        pair
        for pair in pairs
        if pair.first != pair.second and repr(pair.first) != repr(pair.second)
    ]


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the config without nested tables. The keys of tables become `table.key`."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": _NOTHING if value is None else value}
        )
    return flat
