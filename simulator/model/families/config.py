"""ModelConfig: reads a Hugging Face config.json key by key, with checks.

A value that is missing, has another type or is out of range raises a UserError that names the key.
"""

from __future__ import annotations

from typing import Any

from megatrain.simulator.base.errors import UserError

LARGEST_SIZE = 2**24
"""The largest width or vocabulary that is accepted. A larger one is considered a mistake."""
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
"""Family -> the key of `_NOISE` that changes how this family computes attention."""
ZERO_FOR_NULL = ("sliding_window", "q_lora_rank")
"""Keys whose value is stored as 0 if it is null."""
NULLS = "nulls"
"""The key of a stored config that lists all other keys whose value is null. Null means *none*, and
a missing key means *the default*."""


class ModelConfig:
    """Checked access to a config. Missing keys have the family's defaults.

    All methods and properties raise UserError if a value has the wrong type or is out of range.
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
        """Returns the value of `key`, unchecked.

        If the config does not have the key, returns the family's default, or `default` if the
        family has none. If the value is null, returns `default`.
        """
        name = self._names.get(key, key)
        value = self.config.get(name)
        if value is None and name != key:  # transformers also accepts the usual name
            value = self.config.get(key)
        if value is None and name in self._nulls:
            return default
        return self.defaults.get(name, default) if value is None else value

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
        """Returns `switch` if it is a boolean, and the value of the key `switch` if it is a
        text.
        """
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
        """Returns the error for a wrong value of `key`. `allowed` says what the value may be."""
        return UserError(
            f"{self.where}: {key}", found=repr(self.get(key)), allowed=allowed, fix=_FIX
        )

    @property
    def window(self) -> int:
        """Tokens that a query of a sliding layer attends to, or 0 if there is no window.

        There is also no window if the family has the key `use_sliding_window` and its value is
        false.
        """
        return (
            0
            if "use_sliding_window" in self.defaults and not self.flag("use_sliding_window")
            else self.count("sliding_window", 0)
        )

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    @property
    def hidden(self) -> int:
        """Elements of a hidden state."""
        return self.size("hidden_size")

    @property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.size("vocab_size")

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads. Each is shared by a group of query heads."""
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
        """Elements of a head."""
        if self.get("head_dim") is None and self.hidden % self.heads:
            raise UserError(
                f"{self.where}: hidden_size",
                found=self.hidden,
                allowed=f"a multiple of num_attention_heads = {self.heads}",
                fix=_FIX,
            )
        return self.size("head_dim", self.hidden // self.heads)


def essential(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of a config that affect training, in a form that TOML can hold.

    TOML has no null. A null becomes 0 (`ZERO_FOR_NULL`) or an entry in the list under `NULLS`.
    """
    noise = _NOISE if config.get(_ROUTER_LOSS[0]) is True else _NOISE.union(_ROUTER_LOSS)
    scores = _SCORES_ON_REQUEST.get(str(config.get("model_type")))
    if scores and config.get(scores):
        noise -= {scores}
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
