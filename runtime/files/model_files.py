"""Weights in and out: Hugging Face folders (config.json and safetensors), or random ones, to and from the arenas."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig, PretrainedConfig

from megatrain.runtime import optimizer
from megatrain.runtime.files.checkpoint_names import CheckpointNames, hub_name, is_multimodal
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.files.folder_tensors import FolderTensors
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE, COMPANIONS, INDEX, WHOLE, inside
from megatrain.runtime.files.stored_tensors import StoredTensors, summary
from megatrain.runtime.files.tensor_stream import Source, write_tensors
from megatrain.runtime.memory.arenas import TORCH_DTYPE, Arenas
from megatrain.simulator.aside import Aside
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.specs import LayerSpec, ModelSpec
from megatrain.simulator.workload import Dtype, Workload

_SHARD_BYTES = 4 * 10**9
_OTHER_WEIGHTS = "use weights that belong to this config.json"
_PIECE = 2**22  # elements: 16 MiB in fp32, and twice as much to round them
Weights = Callable[[str, str, tuple[int, ...]], torch.Tensor]
"""(layer, tensor name, shape) -> its values"""
Plane = Callable[[int, int], torch.Tensor]
"""(first, end) -> these elements of a layer's flat weights, or of the low plane of their masters"""


class Drawn:
    """Random weights: matrices from N(0, 0.02), norms one, biases zero. A tensor depends on the seed, its own name and the kind of `device` that draws it:
    a GPU draws 7 G parameters in a second, one core in a minute.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def __call__(self, layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if tensor.endswith("bias") else torch.ones(shape)
        generator = torch.Generator(self._device).manual_seed(
            self._seed * 1_000_003 + sum(byte * 257**place for place, byte in enumerate(hub_name(layer, tensor).encode())) % 2**31
        )
        return torch.randn(shape, generator=generator, device=self._device) * 0.02


def random_weights(seed: int, device: torch.device = torch.device("cpu")) -> Weights:  # noqa: B008
    """`Drawn` ones. Buffers are not among them: a run that begins with these has those that transformers starts with."""
    return Drawn(seed, device)


@contextlib.contextmanager
def folder_weights(folder: Path, on_note: Callable[[str], None] = lambda _: None) -> Iterator[Weights]:
    """The tensors of a Hugging Face folder, by memory map, one at a time; of its files one is open at a time. `on_note` is called with a line for what
    the folder has besides the model.

    Raises UserError, before any tensor is read, where a file is missing, malformed, a pickle or outside the folder, two files have the same tensor, a
    tensor is missing, or two matrices differ that the config ties; and where a tensor is of another shape. A tensor that the folder has in parts
    (experts) is a copy, and maps the files of its parts.
    """
    tensors = FolderTensors(folder)
    if tensors.files == [folder / WHOLE] and (folder / INDEX).exists():
        on_note(f"{folder / INDEX} is not read, since {WHOLE} is there too and transformers reads that")
    stack, value_of = _reader(folder, tensors.entries, tensors.tensor)
    if isinstance(value_of, StoredTensors):
        for name, shape in value_of.missing.items():
            raise _missing(folder, name, shape)
        value_of.refuse_untied(str(folder))
        if value_of.foreign and not value_of.multimodal:
            on_note(f"{folder} has {len(value_of.foreign)} tensors that are not the model's, neither trained nor exported: {summary(value_of.foreign)}")

    def read(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = hub_name(layer, tensor, stack)
        try:
            value = value_of(name)
        except KeyError:
            raise _missing(folder, name, shape) from None
        if tuple(value.shape) != shape:
            raise UserError(f"{folder}: {name}", found=f"shape {tuple(value.shape)}", allowed=str(shape), fix=_OTHER_WEIGHTS)
        if not value.is_floating_point():
            raise UserError(f"{folder}: {name}", found=str(value.dtype), allowed="floating-point numbers, not quantised", fix=_OTHER_WEIGHTS)
        return value

    with tensors:
        yield read


def _missing(folder: Path, name: str, shape: tuple[int, ...]) -> UserError:
    return UserError(str(folder), found=f"no tensor {name}", allowed=f"a tensor {name} of shape {shape}", fix=_OTHER_WEIGHTS)


def _reader(folder: Path, keys: Iterable[str], tensor_of: Callable[[str], torch.Tensor]) -> tuple[DecoderStack, Callable[[str], torch.Tensor]]:
    """Where the decoder layers of the folder's model are, and what reads a tensor of it. Where its config cannot be read: as in most, and the files' own."""
    try:
        names = CheckpointNames(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
    except (OSError, ValueError, KeyError):
        held = frozenset(keys)

        def read(name: str) -> torch.Tensor:
            if name not in held:
                raise KeyError(name)
            return tensor_of(name)

        return DecoderStack(), read
    return names.stack, names.stored(keys, tensor_of)


class ModelState:
    """A schedule's persistent model state, wherever the schedule keeps it: fp32 masters in, fp32 masters out."""

    def __init__(self, plan: Plan, schedule: Schedule, memory: Callable[[], Arenas], buffers: Mapping[str, Mapping[str, torch.Tensor]] | None = None) -> None:
        """`memory`: called at every access, gives the schedule's pools with no update owed: `Executor.memory`. `buffers`: what decoder layers have besides parameters that belongs into a checkpoint, by layer and name: `Templates.persistent`."""
        self._plan, self._schedule, self._memory, self._buffers = plan, schedule, memory, buffers or {}
        self._dtype = TORCH_DTYPE[plan.workload.dtype]

    def home(self, name: str, layer: str) -> str | None:
        """The buffer that keeps the layer's `weights`, `low` half or `moments`; None where there is none."""
        return self._schedule.state.get((name, layer))

    def _planes(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights, low = self.home("weights", layer.name), self.home("low", layer.name)
        assert weights is not None
        memory = self._memory()
        flat = memory.flat(weights, self._dtype, layer.elements)
        return flat, None if low is None else memory.flat(low, torch.int16, layer.elements)

    def load(self, weights: Weights, progress: Callable[[int], None] = lambda _: None) -> None:
        """Writes every layer's weights and buffers and zeroes its moments; `progress` hears of each layer's parameters."""
        for layer in self._plan.model.stack.values():
            high, low = self._planes(layer)
            offset = 0
            for tensor in layer.tensors:
                values = weights(layer.name, tensor.name, tensor.shape).reshape(-1)
                for start in range(0, tensor.elements, _PIECE):
                    master = values[start : start + _PIECE].to(high.device, torch.float32)
                    part = slice(offset + start, offset + start + master.numel())
                    if low is None:
                        high[part].copy_(master)
                    else:
                        optimizer.split(master.contiguous(), high[part], low[part])
                offset += tensor.padded
            moments = self.home("moments", layer.name)
            assert moments is not None
            self._memory().flat(moments, torch.float32, 2 * layer.elements).zero_()
            progress(layer.parameters)
        self.load_buffers(weights)

    def load_buffers(self, weights: Weights) -> None:
        """Writes the layers' buffers alone; where weights are drawn, they stay as transformers starts them."""
        if isinstance(weights, Drawn):
            return
        for layer, buffers in self._buffers.items():
            for name, buffer in buffers.items():
                buffer.copy_(weights(layer, name, tuple(buffer.shape)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of the state where it lies, flat, by `LAYER.CLASS`: what a checkpoint holds, the same for every plan of a model and a workload.

        Not copies: they change, or become out of date, with the next step.
        """
        found = {}
        for layer in self._plan.model.stack.values():
            high, low = self._planes(layer)
            found[f"{layer.name}.weights"] = high
            if low is not None:
                found[f"{layer.name}.low"] = low
            moments = self.home("moments", layer.name)
            assert moments is not None
            found[f"{layer.name}.moments"] = self._memory().tensor(moments, torch.float32, (2, layer.elements))
        return found

    def sources(self, layer: LayerSpec, dtype: torch.dtype) -> dict[str, Source]:
        """The layer's weights by tensor name, to be written in `dtype`, bf16 or fp32: from where they lie, or converted a piece at a time."""
        high, low = self._planes(layer)
        return weight_sources(layer, dtype, lambda first, end: high[first:end], None if low is None else lambda first, end: low[first:end])

    def not_finite(self) -> list[str]:
        """The names of tensors with an infinity or a NaN among the weights that layers compute with."""
        found = []
        for layer in self._plan.model.stack.values():
            high, _ = self._planes(layer)
            offset = 0
            for tensor in layer.tensors:
                if not all(bool(piece.isfinite().all()) for piece in high[offset : offset + tensor.elements].split(_PIECE)):
                    found.append(hub_name(layer.name, tensor.name))
                offset += tensor.padded
        return found

    def masters(self, layer: LayerSpec) -> dict[str, torch.Tensor]:
        """The layer's fp32 master weights by tensor name; copies."""
        high, low = self._planes(layer)
        master = high.clone() if low is None else optimizer.join(high, low)
        made, offset = {}, 0
        for tensor in layer.tensors:
            made[tensor.name] = master[offset : offset + tensor.elements].view(tensor.shape)
            offset += tensor.padded
        return made

    def buffers(self, layer: LayerSpec) -> Mapping[str, torch.Tensor]:
        """The layer's buffers by name."""
        return self._buffers.get(layer.name, {})


def weight_sources(layer: LayerSpec, dtype: torch.dtype, high: Plane, low: Plane | None) -> dict[str, Source]:
    """The layer's tensors by name, to be written in `dtype`, from the plane that it computes with and, where that is bf16, the masters' low one."""
    made, offset = {}, 0
    for tensor in layer.tensors:
        made[tensor.name] = Source(dtype, tensor.shape, functools.partial(_converted, high, low, offset, offset + tensor.elements, dtype))
        offset += tensor.padded
    return made


def _converted(high: Plane, low: Plane | None, first: int, end: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    for start in range(first, end, _PIECE):
        stop = min(start + _PIECE, end)
        piece = high(start, stop)
        if piece.dtype == dtype:
            yield piece
        elif low is None:
            yield optimizer.round_to_bf16(piece)
        else:
            yield optimizer.join(piece, low(start, stop))


class Exportable(Protocol):
    """Whatever has a model's weights: a `ModelState`, or a checkpoint on disk."""

    def sources(self, layer: LayerSpec, dtype: torch.dtype) -> dict[str, Source]:
        """The layer's weights by tensor name, in `dtype`."""

    def buffers(self, layer: LayerSpec) -> Mapping[str, torch.Tensor]:
        """The layer's buffers by name that belong into a checkpoint."""


class Trained(Protocol):
    """What says which model it is and what it computes in: a plan, or a checkpoint's manifest."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def workload(self) -> Workload: ...


def export(
    state: Exportable,
    plan: Trained,
    config: PretrainedConfig,
    folder: Path,
    *,
    dtype: Dtype | None = None,
    source: Path | None = None,
    chat_template: Path | None = None,
) -> None:
    """Writes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads, in `dtype` or the compute dtype: whole, or not at all.

    Where `config` is that of a multimodal model, so is the folder: its other tensors are copied unchanged from `source`, which is needed then.
    A bf16 export is what the layers computed with, the high plane; an fp32 one is the master. Tokenizer and generation config come from the folder
    `source`, where the model came from; the file `chat_template`, where it exists, replaces the tokenizer's template. Streamed: no second copy of a tensor
    is made, but of the one under way that a checkpoint has in parts (a layer's experts). Raises UserError where `folder` exists or cannot be written.
    """
    if folder.exists():
        raise UserError(str(folder), found="something there already", allowed="a folder that does not exist", fix="name another one")
    try:
        aside = Aside(folder, folder=True)
    except OSError as error:
        raise UserError(str(folder), found=str(error.strerror).lower(), allowed="a folder that can be made", fix="name another one") from None
    try:
        with aside as written:
            _write(state, plan, config, written, TORCH_DTYPE[dtype or plan.workload.dtype], source)
            for name in COMPANIONS if source is not None else ():
                if source is not None and (source / name).exists():
                    shutil.copyfile(inside(source, name), written / name)
            if chat_template is not None and chat_template.exists():
                shutil.copyfile(chat_template, written / CHAT_TEMPLATE)
                (written / "chat_template.json").unlink(missing_ok=True)
            written.chmod(0o755)
            written.rename(folder)
    except OSError as error:
        raise UserError(str(folder), found=str(error).lower(), allowed="a disk with room", fix="free some space or name another folder") from None


def _wide(state: Exportable, layer: LayerSpec, names: CheckpointNames) -> dict[str, Source]:
    """Those of the layer's tensors that transformers keeps in fp32 beside bf16 weights, such as a router's: the masters."""
    wide = [tensor.name for tensor in layer.tensors if hub_name(layer.name, tensor.name, names.stack) in names.wide]
    made = state.sources(layer, torch.float32) if wide else {}
    return {name: made[name] for name in wide}


def _write(state: Exportable, plan: Trained, config: PretrainedConfig, folder: Path, dtype: torch.dtype, source: Path | None) -> None:
    names = CheckpointNames(config)
    shards: list[dict[str, Source]] = [{}]

    def add(tensors: Mapping[str, Source]) -> None:
        for name, stored in tensors.items():
            if shards[-1] and sum(other.bytes for other in shards[-1].values()) + stored.bytes > _SHARD_BYTES:
                shards.append({})
            shards[-1][name] = stored

    for layer in plan.model.stack.values():
        buffers = {name: Source.of(buffer.contiguous()) for name, buffer in state.buffers(layer).items()}
        held = {**state.sources(layer, dtype), **_wide(state, layer, names), **buffers}
        add(names.saved({hub_name(layer.name, name, names.stack): tensor for name, tensor in held.items()}))
    with contextlib.ExitStack() as opened:
        if is_multimodal(config):
            assert source is not None, "the other tensors of a multimodal model are in its folder"
            others = opened.enter_context(FolderTensors(source))
            add({key: others.source(key) for key in names.other_keys(others.entries)})
        _write_shards(shards, folder)
    exported = copy.deepcopy(config)
    exported.architectures = exported.architectures or [names.architecture]
    for part in {id(each): each for each in (exported, exported.get_text_config())}.values():
        part.dtype, part.use_cache = dtype, True  # training has no cache, who loads it wants one
    exported.save_pretrained(folder)


def _write_shards(shards: Sequence[Mapping[str, Source]], folder: Path) -> None:
    files = ["model.safetensors"] if len(shards) == 1 else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(folder / file, shard)
    if len(files) > 1:
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(stored.bytes for shard in shards for stored in shard.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))
