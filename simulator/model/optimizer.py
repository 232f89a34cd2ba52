"""Optimizer: the interface of an optimizer, and the registry of all optimizers.

A workload names its optimizer. The simulator reads the number of moments, and the runtime calls
`update`. AdamW and Muon are built in, with their updates in `runtime/optimizer/`. Other optimizers
are installed or in a file (`base/registry.py`).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.registry import Registry
from megatrain.simulator.model.muon import Matrices, matrices_of

ADAMW = "adamw"
MUON = "muon"
WITH_STATE_FORMATS = (ADAMW, MUON)
"""The optimizers that support every state format. Other optimizers support only `exact`."""
SETTINGS = ("weight_decay", "betas", "epsilon")
"""The keys of the config's [optimizer] that an optimizer may read. `max_norm` and `groups` apply to
every optimizer."""
_MOST_MOMENTS = 8


class UpdateRule(NamedTuple):
    """How an optimizer updates one tensor."""

    moments: int
    """The number of values that the optimizer keeps for each parameter of the tensor."""
    matrices: Matrices | None = None
    """The matrices that one update must have as a whole. None if the update of an element depends
    on no other element."""


class Optimizer:
    """Updates fp32 master weights.

    A subclass sets `name` and `moments` and defines `update`. Do not import torch outside of
    `update`, because planning should not load it.
    """

    name: ClassVar[str]
    """The name in reports."""
    moments: ClassVar[int]
    """The number of fp32 values that are kept for each parameter. They start at 0."""
    settings: ClassVar[tuple[str, ...]] = ()
    """The names in SETTINGS that `update` takes as keyword arguments. A run that sets another of
    SETTINGS is refused."""
    by_tensor: ClassVar[bool] = False
    """Whether `update_rule` differs between tensors. Only a built-in optimizer can do that."""

    def update_rule(self, kind: str, name: str, shape: tuple[int, ...]) -> UpdateRule:
        """Returns how a tensor is updated.

        Args:
            kind: The kind of the tensor's layer, `LayerSpec.kind`.
            name: The name of the tensor inside the layer.
            shape: The shape of the tensor.
        """
        return UpdateRule(self.moments)

    def update(
        self,
        weights: Any,
        moments: Any,
        gradient: Any,
        *,
        rate: float,
        number: int,
        **settings: Any,
    ) -> None:
        """Updates `weights` and `moments` in place.

        Args:
            weights: Master weights, [n] fp32.
            moments: The optimizer's state, [moments, n] fp32, on the same device.
            gradient: The clipped gradient, [n] fp32. It may be overwritten.
            rate: The learning rate of these parameters.
            number: The number of the step, starting at 1.
            **settings: The values of `settings`. `weight_decay` is that of these parameters.

        The tensors may be any part of a layer, so no element may depend on another one. Weights
        must not change if the rate and the gradient are 0. Every plan gives the same bits if every
        operation rounds once, as `add`, `sub`, `mul` and `sign` do. `lerp`, `addcmul`, and
        operations with `alpha=` or `value=` round differently in different positions and on
        different devices.
        """
        raise NotImplementedError


class _AdamW(Optimizer):
    """AdamW. Its update is in `runtime/optimizer/adamw.py`."""

    name = ADAMW
    moments = 2
    settings = SETTINGS


class _Muon(Optimizer):
    """Muon for the matrices of decoder layers, AdamW for the rest. Only the GPU updates them."""

    name = MUON
    moments = 2
    settings = SETTINGS
    by_tensor = True

    def update_rule(self, kind: str, name: str, shape: tuple[int, ...]) -> UpdateRule:
        """Returns one moment, the momentum, for the matrices of a decoder layer, and two moments
        for every other tensor.
        """
        matrices = matrices_of(kind, name, shape)
        return UpdateRule(1, matrices) if matrices else UpdateRule(self.moments)


def _refuse(optimizer: Optimizer, where: str) -> None:
    """Raises UserError if the attributes or methods of an optimizer from outside are not allowed.
    `where` says where the optimizer comes from.
    """
    moments: object = getattr(optimizer, "moments", None)
    if not isinstance(moments, int) or not 0 <= moments <= _MOST_MOMENTS:
        raise UserError(
            f"{where}: moments",
            found=repr(moments),
            allowed=f"0 to {_MOST_MOMENTS}",
            fix="set `moments` to the fp32 values that it keeps for each parameter",
        )
    unknown = [name for name in optimizer.settings if name not in SETTINGS]
    if unknown:
        raise UserError(
            f"{where}: settings",
            found=", ".join(unknown),
            allowed=", ".join(SETTINGS),
            fix="keep other values in the file",
        )
    if optimizer.by_tensor or type(optimizer).update_rule is not Optimizer.update_rule:
        raise UserError(
            f"{where}: update_rule",
            found="one that differs between tensors",
            allowed="none, since the runtime gives `update` no shapes",
            fix="remove `by_tensor` and `update_rule`",
        )
    if type(optimizer).update is Optimizer.update:
        raise UserError(
            where, found="no `update`", allowed="one", fix="define it as docs/adding.md shows"
        )


OPTIMIZERS: Registry[Optimizer] = Registry(
    "optimizer",
    Optimizer,
    "megatrain.simulator.model.optimizer",
    {ADAMW: _AdamW(), MUON: _Muon()},
    group="megatrain.optimizers",
    refuse=_refuse,
)
find, registered = OPTIMIZERS.find, OPTIMIZERS.registered
