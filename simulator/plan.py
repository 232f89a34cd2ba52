"""Plan: the small file that says how a model is trained on a machine: model, workload, policy, knobs, and what was predicted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

from megatrain.simulator.errors import UserError
from megatrain.simulator.families import KEEP_ATTENTION
from megatrain.simulator.files import read_toml, write_toml
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

FORMAT = 1


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers by what is done with a class of their data: names and ranges of the stack, `e,0-11,h`, or `all`."""

    weights: str = ""
    """kept on the device, not streamed; so too the next three"""
    low: str = ""
    moments: str = ""
    gradients: str = ""
    stored: str = ""
    """decoder layers whose activations are kept from forward to backward, not recomputed"""
    parked: str = ""
    """decoder layers whose input waits in host memory for the backward pass"""
    attention: str = ""
    """decoder layers whose attention output and log-sum-exp stay on the device, so a recompute does all but the attention; means nothing of a stored one"""
    host_updated: str = ""
    """layers that the host's cores update: all of their state stays in host memory, whatever stands above, and only weights come to the device"""


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy may choose without changing a bit of the result."""

    weight_slots: int = 2
    """device buffers that decoder layers' weights stream through"""
    gradient_slots: int = 2
    """device buffers that decoder layers' gradients leave through"""
    gradient_slabs: int = 2
    """pinned host buffers between a device gradient slot and the host's gradient arena; 0 copies straight into the arena, where nothing is accumulated there"""
    chunk_bytes: int = 64 * 2**20
    """bytes of one copy over the link: 64 MiB reaches 99 % of an H200's link rate"""
    checkpoint_interval: int = 1
    """decoder layers per activation checkpoint (K)"""
    state_slots: int = 2
    """device buffers, for a chunk of each class, that optimizer state streams through"""
    weights_ahead: int = 0
    """1: where a layer is updated inside the backward pass, the next layer's weights are loaded ahead of its optimizer state, which else delays them"""
    placement: Placement = Placement()

    def __post_init__(self) -> None:
        for field, least in (
            ("weight_slots", 1),
            ("gradient_slots", 1),
            ("gradient_slabs", 0),
            ("chunk_bytes", 4096),
            ("checkpoint_interval", 1),
            ("state_slots", 1),
        ):
            if not least <= getattr(self, field) <= 2**40:
                raise UserError(f"knobs: {field}", found=getattr(self, field), allowed=f"{least} to {2**40}", fix=f"set {field} = {max(least, 1)}")
        if self.weights_ahead not in (0, 1):
            raise UserError("knobs: weights_ahead", found=self.weights_ahead, allowed="0 or 1", fix="set weights_ahead = 1")


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the simulator said of this plan when it was made."""

    step_seconds: float
    lower_bound_seconds: float
    device_peak_bytes: int
    host_peak_bytes: int
    binding: str
    """the lane or the memory that decides"""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to train one model on one machine."""

    format: int = FORMAT
    policy: str
    digest: str = ""
    """of the schedule that `policy` lowers this plan to; the runtime refuses a plan whose digest it cannot reproduce"""
    hardware: str
    """a name in the library, or the path of a calibrated file, relative to this plan"""
    source: str
    """where the weights are: a Hugging Face folder relative to this plan, or a library name"""
    device_limit_bytes: int
    host_limit_bytes: int
    model: ModelSpec
    workload: Workload
    knobs: Knobs = Knobs()
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise UserError("plan: format", found=self.format, allowed=FORMAT, fix="make the plan again with `megatrain plan`")
        for field in ("device_limit_bytes", "host_limit_bytes"):
            if not 0 < getattr(self, field) < 2**60:
                raise UserError(f"plan: {field}", found=getattr(self, field), allowed=">= 1", fix=f"set {field} to the bytes that the run may use")

    def placed(self, name: str) -> frozenset[str]:
        """The layers that the placement names for `name`. Raises UserError for a text that is no set of this model's layers."""
        return _placed(self.model, name, getattr(self.knobs.placement, name))

    def save(self, path: Path) -> None:
        told: dict[str, Any] = msgspec.to_builtins(self)
        for field in ("documents", "no_dropout"):
            if not told["workload"][field]:
                del told["workload"][field]
        write_toml(path, told, "A megatrain plan. Lower it with `megatrain simulate`, run it with `megatrain train`.")

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises UserError for a file that is missing, malformed, of another format, or has an unknown key."""
        return read_toml(path, cls)


@functools.lru_cache(maxsize=4096)
def _placed(model: ModelSpec, name: str, text: str) -> frozenset[str]:
    """The layers of `model` that `text` names for `name`."""
    stack = list(model.stack)
    decoders = [layer for layer in stack if model.stack[layer].kind == "decoder"]
    allowed = decoders if name in ("stored", "parked", "attention") else stack
    chosen: set[str] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        first, dash, last = part.partition("-")
        if part == "all":
            chosen.update(allowed)
        elif part in allowed:
            chosen.add(part)
        elif dash and first in decoders and last in decoders and int(first) <= int(last):
            chosen.update(decoders[int(first) : int(last) + 1])
        else:
            raise UserError(
                f"knobs.placement: {name}", found=repr(part), allowed=f"`all`, or layers and ranges of {allowed[0]} to {allowed[-1]}, such as 0-3",
                fix="name layers that the model has",
            )  # fmt: skip
    if name == "attention":
        _refuse_kept_attention(model, chosen)
    return frozenset(chosen)


def _refuse_kept_attention(model: ModelSpec, chosen: set[str]) -> None:
    unable = next((layer for layer in model.stack if layer in chosen and not model.keeps_attention(layer)), None)
    if unable is not None:
        raise UserError(
            "knobs.placement: attention", found=f"layer {unable} of a {model.family} model, {model.stack[unable].attention}",
            allowed=f"full causal attention of {', '.join(KEEP_ATTENTION)}", fix="leave `attention` empty for this model",
        )  # fmt: skip
