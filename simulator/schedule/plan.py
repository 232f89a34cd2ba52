"""Plan: the small TOML file that says how a model is trained on a machine. It holds the model,
workload, policy, knobs and memory limits, and what was predicted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.field_types import check_types
from megatrain.simulator.base.files import read_toml, write_toml
from megatrain.simulator.base.units import counted
from megatrain.simulator.model.families import CAN_SAVE_ATTENTION
from megatrain.simulator.model.optimizer import ADAMW
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import EXACT
from megatrain.simulator.model.workload import Workload

FORMAT = 1
MOST_GPUS = 16
"""The most GPUs of one host."""
MOST_HOSTS = 4
"""The most hosts of a plan."""
MOST_NETWORK_GB_PER_S = 1e6
"""The highest rate of a network, in GB/s. It stands for a network without limit."""


OF_DECODERS = ("saved_activations", "offloaded_inputs", "saved_attention", "offloaded_attention")
"""The fields of a placement in which only decoder layers are allowed."""


class Placement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the data of layers is kept, one field for each class of data.

    A field names layers and ranges of layers, such as `e,0-11,h` (`e` is the embedding, `h` the
    head), or `all`. An empty field means no layer. No field changes a bit of the result.
    """

    weights: str = ""
    """Layers whose weights stay on the device. The others are streamed."""
    master_low: str = ""
    """Layers whose low halves of the master weights stay on the device."""
    moments: str = ""
    """Layers whose moments stay on the device."""
    gradients: str = ""
    """Layers whose gradients stay on the device until the update."""
    saved_activations: str = ""
    """Decoder layers whose activations are saved from forward to backward, not recomputed."""
    offloaded_inputs: str = ""
    """Decoder layers whose input is kept in host memory until the backward pass. Ignored for layers
    in `saved_activations`."""
    saved_attention: str = ""
    """Decoder layers that keep their attention output and log-sum-exp on the device, so that
    recompute skips attention. Ignored for layers in `saved_activations`."""
    offloaded_attention: str = ""
    """Decoder layers of `saved_attention` whose attention is kept in host memory until the backward
    pass. Other layers here are ignored."""
    host_updated: str = ""
    """Layers updated on the CPU. Their state stays in host memory, and only their weights
    are copied to the device. Overrides the fields above."""

    def __post_init__(self) -> None:
        check_types(self, "placement")


_MOST_SLOTS = 4096
"""The most buffers of a kind. A plan with millions of them would take minutes to lower."""
_RANGES = (
    ("weight_slots", 1, _MOST_SLOTS),
    ("gradient_slots", 1, _MOST_SLOTS),
    ("gradient_staging", 0, _MOST_SLOTS),
    ("chunk_bytes", 4096, 2**40),
    ("checkpoint_interval", 1, 2**40),
    ("state_slots", 1, _MOST_SLOTS),
    ("micro_batch_group", 1, 2**40),
    ("exchange_bytes", 0, 2**40),
)
"""Fields of `Knobs`, with the least and the largest value of each."""


class Knobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers that a policy reads and the planner chooses. Raises UserError if one is out of range.

    None changes a bit of the result of eager layers, or of compiled layers in deterministic mode.
    """

    weight_slots: int = 2
    """Device buffers that the weights of decoder layers are streamed through."""
    gradient_slots: int = 2
    """Device buffers that the gradients of decoder layers are copied out of."""
    gradient_staging: int = 2
    """Pinned host buffers between the gradient slots and the gradients in host memory. With 0,
    gradients are copied directly, which is possible only if no gradients are accumulated."""
    chunk_bytes: int = 64 * 2**20
    """Bytes of one copy over the link. 64 MiB reaches 99 % of the link rate of an H200."""
    checkpoint_interval: int = 1
    """K: every K-th decoder layer keeps its input, from which the backward pass recomputes the K
    layers."""
    state_slots: int = 2
    """Device buffers, of one chunk for each class of data, that optimizer state is streamed
    through."""
    weights_ahead: int = 0
    """0 or 1. It has an effect if layers are updated inside the backward pass. With 1, the weights
    of the next layer are loaded before the optimizer state of the layer that is updated, so the
    next layer starts earlier. With 0, both are loaded in the order of use."""
    micro_batch_group: int = 1
    """Micro-batches that pass through a layer, one after the other, before the next layer is
    loaded. A group loads weights and stores gradients once, and keeps the layer inputs of all its
    micro-batches. The accumulation must be a multiple of this number."""
    rebuild_outputs: int = 0
    """0 or 1. With 1, compiled layers do not save the outputs of norms and the product of gate and
    up. The backward pass computes them again (`rebuilt_bytes`). The activations of a
    layer then take up to a third less memory, and its backward pass takes about 2 % longer. It has
    no effect on layers that cannot rebuild outputs (`ModelSpec.rebuilding_products`)."""
    exchange_bytes: int = 0
    """With several GPUs: bytes of device memory in which gradients are exchanged. A gradient that
    does not fit is exchanged in several pieces: those that a GPU receives and those that it sends
    must fit. Each piece waits for the matrix product under way. With 0, the pieces that a GPU
    receives are together as large as a chunk."""
    placement: Placement = Placement()
    """Where the data of layers is kept."""

    def __post_init__(self) -> None:
        check_types(self, "knobs")
        for field, least, most in _RANGES:
            if not least <= getattr(self, field) <= most:
                default = getattr(Knobs(), field)
                raise UserError(
                    f"knobs: {field}",
                    found=getattr(self, field),
                    allowed=f"{least} to {most}",
                    fix="leave it out" if field == "exchange_bytes" else f"set {field} = {default}",
                )
        for field in ("weights_ahead", "rebuild_outputs"):
            if getattr(self, field) not in (0, 1):
                raise UserError(
                    f"knobs: {field}",
                    found=getattr(self, field),
                    allowed="0 or 1",
                    fix=f"set {field} = 1",
                )


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the simulator predicted when the plan was made."""

    step_seconds: float
    """Duration of one optimizer step."""
    lower_bound_seconds: float
    """A lower bound of the duration of one optimizer step."""
    device_peak_bytes: int
    """Peak device memory; with several GPUs, of each."""
    host_peak_bytes: int
    """Peak host memory; with several GPUs, of each rank."""
    binding: str
    """What limits the plan: a lane, or a memory pool if the plan does not fit."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to train one model on one machine. Raises UserError if a value, or a combination of
    values, is not allowed.
    """

    format: int = FORMAT
    """The version of the file format."""
    policy: str
    """The name of the policy that turns the plan into a schedule."""
    digest: str = ""
    """The digest of the schedule that `policy` makes from this plan. The runtime refuses a plan if
    it computes another digest."""
    gpus: int = 1
    """GPUs that train together, each with a process of its own (a rank). All ranks execute the same
    schedule, on their own micro-batches and their own part of the state. The number does not change
    a bit of the result."""
    hosts: int = 1
    """Hosts that have these GPUs, the same number each. Rank r is on host r // `gpus_per_host`. The
    number changes neither the schedule nor a bit of the result."""
    network_gb_per_s: float | None = None
    """GB/s that each host receives from the other hosts, for predictions. None means the number of
    the machine. It has no effect with one host."""
    hardware: str
    """The machine: a name in the library, or the path of a calibrated file, relative to the
    plan."""
    source: str
    """Where the weights are: a Hugging Face folder, relative to the plan, or a name in the
    library."""
    device_limit_bytes: int
    """Device memory in bytes that each GPU may use."""
    host_limit_bytes: int
    """Host memory in bytes that each rank may use. With one GPU, that is the whole run."""
    model: ModelSpec
    """The model that is trained."""
    workload: Workload
    """How it is trained."""
    knobs: Knobs = Knobs()
    """The numbers that the policy reads."""
    prediction: Prediction | None = None
    """What was predicted when the plan was made."""

    def __post_init__(self) -> None:
        check_types(self, "plan")
        if self.format != FORMAT:
            raise UserError(
                "plan: format",
                found=self.format,
                allowed=FORMAT,
                fix="make the plan again with `megatrain plan`",
            )
        for field in ("device_limit_bytes", "host_limit_bytes"):
            if not 0 < getattr(self, field) < 2**60:
                raise UserError(
                    f"plan: {field}",
                    found=getattr(self, field),
                    allowed=">= 1",
                    fix=f"set {field} to the bytes that the run may use",
                )
        self._refuse_gpus()
        group, accumulation = self.knobs.micro_batch_group, self.micro_batches
        if group > 1 and (self.model.tied or accumulation % group):
            raise UserError(
                "knobs: micro_batch_group",
                found=group,
                allowed=(
                    "1 with tied embeddings, whose gradients are added one micro-batch at a time"
                    if self.model.tied
                    else f"a divisor of the accumulation, {accumulation}"
                ),
                fix="set micro_batch_group = 1",
            )

    def _refuse_gpus(self) -> None:
        """Raises UserError if the numbers of GPUs and hosts do not fit each other or the step."""
        work, most = self.workload, MOST_GPUS * max(self.hosts, 1)
        if not 1 <= self.gpus <= most or work.accumulation % (self.gpus * work.sum_group):
            raise UserError(
                "plan: gpus",
                found=self.gpus,
                allowed=(
                    f"1 to {most}, and a divisor of the {work.accumulation // work.sum_group}"
                    " groups of micro-batches of a step (accumulation / sum_group)"
                ),
                fix=(
                    f"set accumulation to a multiple of {self.gpus * work.sum_group}"
                    if 1 <= self.gpus <= most
                    else f"set gpus to 1 to {most}"
                ),
            )
        if not 1 <= self.hosts <= MOST_HOSTS or self.gpus % self.hosts:
            raise UserError(
                "plan: hosts",
                found=self.hosts,
                allowed=f"1 to {MOST_HOSTS}, and a divisor of the {counted(self.gpus, 'GPU')}",
                fix="set hosts = 1, or gpus to a multiple of hosts",
            )
        rate = self.network_gb_per_s
        if rate is not None and not 0.001 <= rate <= MOST_NETWORK_GB_PER_S:
            raise UserError(
                "plan: network_gb_per_s",
                found=rate,
                allowed=f"0.001 to {MOST_NETWORK_GB_PER_S:,.0f} GB/s",
                fix="set network_gb_per_s to the GB/s that a host receives",
            )

    @property
    def gpus_per_host(self) -> int:
        """GPUs of each host."""
        return self.gpus // self.hosts

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each rank in a step: with one GPU, the accumulation."""
        return self.workload.accumulation // self.gpus

    def placed(self, name: str) -> frozenset[str]:
        """Returns the layers in the field `name` of the placement. Raises UserError if the field
        does not name layers of this model.
        """
        fused = self.model.fuses_scores(self.workload)
        return _placed(self.model, name, getattr(self.knobs.placement, name), fused)

    def save(self, path: Path | str) -> None:
        """Writes the plan as TOML to `path`. Files that define its policy or optimizer are written
        relative to the folder of `path`.
        """
        folder = Path(path).parent
        data: dict[str, Any] = msgspec.to_builtins(
            self.with_files(lambda _, file: plugins.path_from(folder, file))
        )
        for field, default in (
            ("documents", False),
            ("no_dropout", False),
            ("optimizer", ADAMW),
            ("state", EXACT),
            ("gradients", "exact"),
            ("sum_group", 1),
        ):
            if data["workload"][field] == default:
                del data["workload"][field]
        if not self.knobs.placement.offloaded_attention:
            del data["knobs"]["placement"]["offloaded_attention"]
        for field in ("gpus", "hosts"):
            if data[field] == 1:
                del data[field]
        if self.knobs.micro_batch_group == 1:
            del data["knobs"]["micro_batch_group"]
        for knob in ("rebuild_outputs", "exchange_bytes"):
            if not getattr(self.knobs, knob):
                del data["knobs"][knob]
        write_toml(
            Path(path),
            data,
            "A megatrain plan. Run it with `megatrain simulate` or `megatrain train`.",
        )

    @classmethod
    def load(cls, path: Path | str) -> Plan:
        """Reads a plan. Raises UserError if the file is missing or malformed, has another format
        version, or has an unknown key. Files that define its policy or optimizer are found relative
        to the folder of `path` (`plugins.path_in`).
        """
        folder = Path(path).parent
        return read_toml(Path(path), cls).with_files(lambda _, file: plugins.path_in(folder, file))

    def with_files(self, change: Callable[[str, str], str]) -> Plan:
        """Returns the plan with other paths of the `.py` files of its policy and its optimizer.
        `change` gets what a file defines, "policy" or "optimizer", and its path.
        """
        policy, optimizer = (
            change(what, name) if name.endswith(".py") else name
            for what, name in (("policy", self.policy), ("optimizer", self.workload.optimizer))
        )
        if (policy, optimizer) == (self.policy, self.workload.optimizer):
            return self
        workload = msgspec.structs.replace(self.workload, optimizer=optimizer)
        return msgspec.structs.replace(self, policy=policy, workload=workload)


@functools.lru_cache(maxsize=4096)
def _placed(model: ModelSpec, name: str, text: str, fused: bool) -> frozenset[str]:
    """Returns the layers of `model` that `text` names. `name` is the field of the placement, and
    `fused` is the result of `ModelSpec.fuses_scores`.
    """
    stack = list(model.stack)
    decoders = [layer for layer in stack if model.stack[layer].kind == "decoder"]
    allowed = decoders if name in OF_DECODERS else stack
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
                f"knobs.placement: {name}",
                found=repr(part),
                allowed=(
                    f"`all`, or layers and ranges of {allowed[0]} to {allowed[-1]}, such as 0-3"
                ),
                fix="name layers that the model has",
            )
    if name == "saved_attention":
        _refuse_kept_attention(model, chosen, fused)
    return frozenset(chosen)


def _refuse_kept_attention(model: ModelSpec, chosen: set[str], fused: bool) -> None:
    """Raises UserError if the runtime cannot save the attention of a chosen layer."""
    unable = next(
        (
            layer
            for layer in model.stack
            if layer in chosen and not model.can_save_attention(layer, fused=fused)
        ),
        None,
    )
    if unable is not None:
        raise UserError(
            "knobs.placement: saved_attention",
            found=f"layer {unable} of a {model.family} model, {model.stack[unable].attention}",
            allowed=(
                f"full causal attention of {', '.join(CAN_SAVE_ATTENTION)}, or attention with sinks"
                " and the kernel flash"
            ),
            fix="leave `saved_attention` empty for this model",
        )
