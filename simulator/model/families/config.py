"""ModelConfig: reads a Hugging Face config.json key by key, with checks.

A value that is missing, has another type or is out of range raises a UserError that names the key.
"""

from __future__ import annotations

from typing import Any

from megatrain.simulator.base.errors import UserError

LARGEST_SIZE = 2**24
"""The largest width or vocabulary that is accepted. A larger one is taken for a mistake."""
MOST_LAYERS = 1024
"""The largest number of layers that is accepted."""
_FIX = "correct config.json"
_NOISE = frozenset(
    (
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "quantization_config",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "use_return_dict",
    )
)
"""Keys that affect neither the shapes nor the arithmetic of a training step."""


_ROUTER_LOSS = ("output_router_logits", "router_aux_loss_coef")
"""Keys that have an effect only if the first one is true."""
_SCORES_ON_REQUEST = {"falcon": "output_attentions"}
"""Family -> a key of `_NOISE` with which its model computes attention in another way."""
ZERO_FOR_NULL = ("sliding_window", "q_lora_rank")
"""Keys whose null is stored as 0."""
NULLS = "nulls"
"""The key that lists all other keys whose value is null. Null means *none*, and a missing key means
*the default*."""


class ModelConfig:
    """Checked access to a config. Missing keys have the family's defaults.

    The methods raise UserError if a value has another type or is out of range.
    """

    def __init__(
        self,
        config: dict[str, Any],
        where: str,
        defaults: dict[str, Any],
        names: dict[str, str] | None = None,
    ) -> None:
        """Stores the config without checking it.

        Args:
            config: The keys and values of config.json.
            where: Where the config comes from, for error messages.
            defaults: The defaults of transformers' config class.
            names: Usual keys -> the family's own names for them.
        """
        self.config, self.where, self.defaults, self._names = config, where, defaults, names or {}
        self._nulls = nulls_of(config)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of `key`, or else the family's default, or else `default`.

        The family's default is not used if the key is null.
        """
        own = self._names.get(key, key)
        value = self.config.get(own)
        if value is None and own != key:  # transformers also accepts the usual name
            value = self.config.get(key)
        if value is None and own in self._nulls:
            return default
        return self.defaults.get(own, default) if value is None else value

    def count(
        self, key: str, default: int | None = None, *, least: int = 0, most: int = LARGEST_SIZE
    ) -> int:
        """Returns a whole number from `least` to `most`."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(
                f"{self.where}: {key}",
                found="nothing" if value is None else repr(value),
                allowed="a whole number",
                fix=_FIX,
            )
        if not least <= value <= most:
            raise UserError(
                f"{self.where}: {key}", found=value, allowed=f"{least} to {most}", fix=_FIX
            )
        return value

    def size(self, key: str, default: int | None = None, *, most: int = LARGEST_SIZE) -> int:
        """Returns a whole number from 1 to `most`."""
        return self.count(key, default, least=1, most=most)

    def flag(self, key: str, default: bool = False) -> bool:
        """Returns a boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise UserError(
                f"{self.where}: {key}", found=repr(value), allowed="true or false", fix=_FIX
            )
        return value

    def is_on(self, switch: bool | str) -> bool:
        """Returns `switch`, or the boolean under the key that it names."""
        return self.flag(switch) if isinstance(switch, str) else switch

    def choice(self, key: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Returns one of the texts in `allowed`."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise UserError(
                f"{self.where}: {key}",
                found="nothing" if value is None else repr(value),
                allowed=", ".join(allowed),
                fix=_FIX,
            )
        return value

    def each_layer(self, key: str, allowed: tuple[Any, ...] | None = None) -> list[Any] | None:
        """Returns a list with one entry for each layer, or None if the key is missing.

        The entries must be in `allowed`, unless that is None.
        """
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise UserError(f"{self.where}: {key}", found=repr(value), allowed="a list", fix=_FIX)
        if len(value) != self.layers:
            raise UserError(
                f"{self.where}: {key}",
                found=f"{len(value)} entries",
                allowed=f"num_hidden_layers = {self.layers} entries",
                fix=_FIX,
            )
        wrong = [
            entry
            for entry in value
            if allowed is not None and (isinstance(entry, list | dict) or entry not in allowed)
        ]
        if wrong and allowed is not None:
            raise UserError(
                f"{self.where}: {key}",
                found=repr(wrong[0]),
                allowed=", ".join(map(str, allowed)),
                fix=_FIX,
            )
        return value

    def indices(self, key: str) -> list[int]:
        """Returns a list of layer numbers, empty if the key is missing."""
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(
            isinstance(entry, int) and not isinstance(entry, bool) for entry in value
        ):
            raise UserError(
                f"{self.where}: {key}",
                found=repr(value),
                allowed="a list of layer numbers",
                fix=_FIX,
            )
        return value

    def wrong(self, key: str, allowed: str) -> UserError:
        """Returns the error for the value of `key`, with what is `allowed` instead."""
        return UserError(
            f"{self.where}: {key}", found=repr(self.get(key)), allowed=allowed, fix=_FIX
        )

    @property
    def window(self) -> int:
        """Tokens that a sliding layer attends to, or 0 if there is no window.

        The window is also off if the family has the key `use_sliding_window` and it is false.
        """
        return (
            0
            if "use_sliding_window" in self.defaults and not self.flag("use_sliding_window")
            else self.count("sliding_window", 0)
        )

    @property
    def layers(self) -> int:
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def vocabulary(self) -> int:
        return self.size("vocab_size")

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values. Each is shared by a group of query heads."""
        heads = self.heads
        kv_heads = self.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise UserError(
                f"{self.where}: num_key_value_heads",
                found=kv_heads,
                allowed=f"a divisor of the {heads} attention heads",
                fix="correct num_key_value_heads in config.json",
            )
        return kv_heads

    @property
    def head_dim(self) -> int:
        if self.get("head_dim") is None and self.hidden % self.heads:
            raise UserError(
                f"{self.where}: hidden_size",
                found=self.hidden,
                allowed=f"a multiple of num_attention_heads = {self.heads}",
                fix=_FIX,
            )
        return self.size("head_dim", self.hidden // self.heads)


def essential(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that affect training, in a form that TOML can hold.

    TOML has no null. A null becomes 0 (`ZERO_FOR_NULL`) or an entry in the list under `NULLS`.
    """
    noise = _NOISE if config.get(_ROUTER_LOSS[0]) is True else _NOISE.union(_ROUTER_LOSS)
    asked = _SCORES_ON_REQUEST.get(str(config.get("model_type")))
    if asked and config.get(asked):
        noise -= {asked}
    kept = {
        key: 0 if value is None and key in ZERO_FOR_NULL else value
        for key, value in config.items()
        if isinstance(key, str) and key not in noise
    }
    nulls = nulls_of(kept) | {key for key, value in kept.items() if value is None}
    plain = {
        key: _without_none(value)
        for key, value in kept.items()
        if value is not None and key != NULLS
    }
    return {**plain, NULLS: sorted(nulls)} if nulls else plain


def nulls_of(config: dict[str, Any]) -> set[str]:
    """Returns the keys that `config` lists as null."""
    listed = config.get(NULLS)
    return (
        {key for key in listed if isinstance(key, str) and key != NULLS and config.get(key) is None}
        if isinstance(listed, list | tuple)
        else set()
    )


def _without_none(value: Any) -> Any:
    """Returns `value` without the None entries of nested dicts and lists."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return (
        [_without_none(inner) for inner in value if inner is not None]
        if isinstance(value, list | tuple)
        else value
    )
