"""Groups: which weight decay and which learning rate each tensor gets, and a layer's flat buffer cut into stretches that get the same.

By default matrices decay by the settings' `weight_decay`, and norms, biases (of experts too, which have two dimensions) and what
belongs to the embedding table do not; a head that is tied to the table counts as embedding. Patterns are matched against names that begin with `model.`
whatever the family, since a plan's groups are known before its transformers model is.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.hyperparameters import AdamW
from megatrain.simulator.errors import UserError
from megatrain.simulator.specs import LayerSpec, ModelSpec, TensorSpec


class Treatment(NamedTuple):
    """What AdamW does to a tensor apart from its settings."""

    weight_decay: float
    rate_factor: float

    @property
    def frozen(self) -> bool:
        """It is not trained: as with `requires_grad = False` its weights stay, and nothing of its gradient is seen."""
        return self.rate_factor == 0


def treatment(settings: AdamW, layer: LayerSpec, tensor: TensorSpec) -> Treatment:
    """Of one tensor: its group's, or the default."""
    plain = len(tensor.shape) < 2 or tensor.name.endswith("bias") or layer.kind == "embedding"
    decay = 0.0 if plain else settings.weight_decay
    name = hub_name(layer.name, tensor.name)
    for group in settings.groups:
        if fnmatchcase(name, group.match):
            return Treatment(decay if group.weight_decay is None else group.weight_decay, group.rate_factor)
    return Treatment(decay, 1.0)


def stretches(settings: AdamW, layer: LayerSpec, first: int, count: int) -> list[tuple[slice, Treatment]]:
    """Elements `first` to `first + count` of the layer's flat buffer as the fewest stretches of one treatment each, counted from `first`.

    A tensor's padding belongs to it: zero under any treatment. Where all is treated alike there is one stretch.
    """
    made: list[tuple[slice, Treatment]] = []
    start = -first
    for tensor in layer.tensors:
        begin, end = max(start, 0), min(start + tensor.padded, count)
        start += tensor.padded
        if begin >= end:
            continue
        wanted = treatment(settings, layer, tensor)
        if made and made[-1][1] == wanted:
            made[-1] = (slice(made[-1][0].start, end), wanted)
        else:
            made.append((slice(begin, end), wanted))
    return made


def refuse_unmatched(settings: AdamW, model: ModelSpec) -> None:
    """Raises UserError for a group whose pattern is the name of no tensor."""
    names = [hub_name(layer.name, tensor.name) for layer in model.stack.values() for tensor in layer.tensors]
    for group in settings.groups:
        if not any(fnmatchcase(name, group.match) for name in names):
            raise UserError(
                "optimizer: groups: match", found=repr(group.match), allowed=f"a pattern of the model's tensors: {_some(names)}", fix="correct the pattern"
            )


def _some(names: Iterable[str]) -> str:
    *shown, last = list(names)
    return ", ".join([*shown[:4], "...", last])
