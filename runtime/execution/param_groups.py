"""Parameter groups: the weight decay and the learning rate of each tensor.

By default, matrices have the weight decay of the settings. Norms, all tensors of the embedding and
all biases, including the two-dimensional biases of experts, have no weight decay. A head that is
tied to the embedding counts as embedding. Patterns are matched against names that begin with
`model.` in every family, because the groups of a plan are checked before its transformers model is
loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.layer import LayerSpec, TensorSpec
from megatrain.simulator.model.specs import ModelSpec


class ParamGroup(NamedTuple):
    """The hyperparameters that differ between tensors."""

    weight_decay: float
    """Decoupled weight decay."""
    rate_factor: float
    """Factor on the learning rate; 0 freezes the tensor."""

    @property
    def frozen(self) -> bool:
        """Whether the tensor is not trained. As with `requires_grad=False`, its weights do not
        change and its gradient is not used.
        """
        return self.rate_factor == 0


def param_group(settings: AdamW, layer: LayerSpec, tensor: TensorSpec) -> ParamGroup:
    """Returns the group of `tensor`: the first group of the settings whose pattern matches the
    tensor's name or, if no pattern matches, the default group.
    """
    exempt = len(tensor.shape) < 2 or tensor.name.endswith("bias") or layer.kind == "embedding"
    decay = 0.0 if exempt else settings.weight_decay
    name = hub_name(layer.name, tensor.name)
    for group in settings.groups:
        if fnmatchcase(name, group.match):
            return ParamGroup(
                decay if group.weight_decay is None else group.weight_decay, group.rate_factor
            )
    return ParamGroup(decay, 1.0)


def group_slices(
    settings: AdamW, layer: LayerSpec, first: int, count: int
) -> list[tuple[slice, ParamGroup]]:
    """Splits elements `first` to `first + count` of the layer's flat buffer by parameter group.

    Returns the smallest number of slices such that all tensors in a slice have the same group. The
    indices of a slice count from `first`. The padding of a tensor belongs to the tensor's slice. It
    is zero and stays zero.
    """
    slices: list[tuple[slice, ParamGroup]] = []
    for tensor, offset in zip(layer.tensors, layer.offsets, strict=True):
        begin, end = max(offset - first, 0), min(offset - first + tensor.padded, count)
        if begin >= end:
            continue
        group = param_group(settings, layer, tensor)
        if slices and slices[-1][1] == group:
            slices[-1] = (slice(slices[-1][0].start, end), group)
        else:
            slices.append((slice(begin, end), group))
    return slices


def refuse_unmatched(settings: AdamW, model: ModelSpec) -> None:
    """Raises UserError if the pattern of a group matches no tensor of `model`."""
    names = [
        hub_name(layer.name, tensor.name)
        for layer in model.stack.values()
        for tensor in layer.tensors
    ]
    for group in settings.groups:
        if not any(fnmatchcase(name, group.match) for name in names):
            raise UserError(
                "optimizer: groups: match",
                found=repr(group.match),
                allowed=f"a pattern of the model's tensors: {_first_and_last(names)}",
                fix="correct the pattern",
            )


def _first_and_last(names: Iterable[str]) -> str:
    """Returns the first four names and the last one as text."""
    *shown, last = list(names)
    return ", ".join([*shown[:4], "...", last])
