"""Weights in and out: Hugging Face folders (config.json and safetensors), or random ones, to and from the arenas."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from megatrain.runtime import optimizer
from megatrain.runtime.files.checkpoint_names import CheckpointNames, hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE, COMPANIONS, INDEX, inside, weight_files
from megatrain.runtime.files.tensor_file import read_entries
from megatrain.runtime.files.tensor_stream import Source, write_tensors
from megatrain.runtime.memory.arenas import TORCH_DTYPE, Arenas
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.specs import LayerSpec, ModelSpec
from megatrain.simulator.workload import Dtype, Workload

_SHARD_BYTES = 4 * 10**9
_PIECE = 2**22  # elements: 16 MiB in fp32, and twice as much to round them
Weights = Callable[[str, str, tuple[int, ...]], torch.Tensor]
"""(layer, tensor name, shape) -> its values"""
Plane = Callable[[int, int], torch.Tensor]
"""(first, end) -> these elements of a layer's flat weights, or of the low plane of their masters"""


def random_weights(seed: int, device: torch.device = torch.device("cpu")) -> Weights:  # noqa: B008
    """Matrices from N(0, 0.02), norms one, biases zero; a tensor depends on the seed, its own name and the kind of `device` that draws it: a GPU
    draws 7 G parameters in a second, one core in a minute.
    """

    def make(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if tensor.endswith("bias") else torch.ones(shape)
        generator = torch.Generator(device).manual_seed(
            seed * 1_000_003 + sum(byte * 257**place for place, byte in enumerate(hub_name(layer, tensor).encode())) % 2**31
        )
        return torch.randn(shape, generator=generator, device=device) * 0.02

    return make


@contextlib.contextmanager
def folder_weights(folder: Path) -> Iterator[Weights]:
    """The tensors of a Hugging Face folder, by memory map, one at a time; of its files one is open at a time.

    Raises UserError, before any tensor is read, where a file is missing, malformed, a pickle or outside the folder, or two files have the same tensor;
    and where a tensor is missing or of another shape. A tensor that the folder has in parts (experts) is a copy, and maps the files of its parts.
    """
    where: dict[str, Path] = {}
    for file in weight_files(folder):
        for name in read_entries(file):
            if where.setdefault(name, file) is not file:
                raise UserError(str(file), found=f"tensor {name}, which {where[name].name} has too", allowed="each tensor once", fix="fetch the model again")
    opened = _OneFile()
    stack, value_of = _reader(folder, where, lambda key: opened.tensor(where[key], key))

    def read(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = hub_name(layer, tensor, stack)
        fix = "use weights that belong to this config.json"
        try:
            value = value_of(name)
        except KeyError:
            raise UserError(str(folder), found=f"no tensor {name}", allowed=f"a tensor {name} of shape {shape}", fix=fix) from None
        if tuple(value.shape) != shape:
            raise UserError(f"{folder}: {name}", found=f"shape {tuple(value.shape)}", allowed=str(shape), fix=fix)
        if not value.is_floating_point():
            raise UserError(f"{folder}: {name}", found=str(value.dtype), allowed="floating-point numbers, not quantised", fix=fix)
        return value

    with contextlib.closing(opened):
        yield read


class _OneFile:
    """The safetensors file that was read last, mapped; so a load maps no more than one shard."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._stack = contextlib.ExitStack()
        self._file: Any = None

    def tensor(self, path: Path, name: str) -> torch.Tensor:
        """Of the file at `path`: its memory is the file's own."""
        try:
            if path != self._path:
                self.close()
                self._file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._path = path
            value: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(str(path), found=f"a file that cannot be read ({error})", allowed="a whole safetensors file", fix="fetch the file again") from None
        return value

    def close(self) -> None:
        self._stack.close()
        self._path = self._file = None


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
    return names.stack, names.reader(keys, tensor_of)


class ModelState:
    """A schedule's persistent model state, wherever the schedule keeps it: fp32 masters in, fp32 masters out."""

    def __init__(self, plan: Plan, schedule: Schedule, memory: Callable[[], Arenas], buffers: Mapping[str, Mapping[str, torch.Tensor]] | None = None) -> None:
        """`memory`: called at every access, gives the schedule's pools with no update owed: `Executor.memory`. `buffers`: what decoder layers have besides parameters that belongs into a checkpoint, by layer and name: `Templates.persistent`."""
        self._plan, self._schedule, self._memory, self._buffers = plan, schedule, memory, buffers or {}
        self._dtype = TORCH_DTYPE[plan.workload.dtype]

    def home(self, name: str, layer: str) -> str | None:
        """The buffer that keeps the layer's `weights`, `low` plane or `moments`; None where there is none."""
        return next(
            (
                buffer
                for place in ("host", "device")
                if (buffer := f"{place}.{name}:{layer}") in self._schedule.buffer and self._schedule.buffer[buffer].persistent
            ),
            None,
        )

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
        """Writes the layers' buffers alone."""
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

    A bf16 export is what the layers computed with, the high plane; an fp32 one is the master. Tokenizer and generation config come from the folder
    `source`, where the model came from; the file `chat_template`, where it exists, replaces the tokenizer's template. Streamed: no second copy of a tensor
    is made, but of the one under way that a checkpoint has in parts (a layer's experts). Raises UserError where `folder` exists or cannot be written.
    """
    if folder.exists():
        raise UserError(str(folder), found="something there already", allowed="a folder that does not exist", fix="name another one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise UserError(str(folder), found=str(error.strerror).lower(), allowed="a folder that can be made", fix="name another one") from None
    try:
        _write(state, plan, config, aside, TORCH_DTYPE[dtype or plan.workload.dtype])
        for name in COMPANIONS if source is not None else ():
            if source is not None and (source / name).exists():
                shutil.copyfile(inside(source, name), aside / name)
        if chat_template is not None and chat_template.exists():
            shutil.copyfile(chat_template, aside / CHAT_TEMPLATE)
            (aside / "chat_template.json").unlink(missing_ok=True)
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(str(folder), found=str(error).lower(), allowed="a disk with room", fix="free some space or name another folder") from None
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(state: Exportable, plan: Trained, config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> None:
    names = CheckpointNames(config)
    shards: list[dict[str, Source]] = [{}]
    for layer in plan.model.stack.values():
        held = {**state.sources(layer, dtype), **{name: Source.of(buffer.contiguous()) for name, buffer in state.buffers(layer).items()}}
        for name, stored in names.saved({hub_name(layer.name, name, names.stack): source for name, source in held.items()}).items():
            if shards[-1] and sum(other.bytes for other in shards[-1].values()) + stored.bytes > _SHARD_BYTES:
                shards.append({})
            shards[-1][name] = stored
    files = ["model.safetensors"] if len(shards) == 1 else [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        write_tensors(folder / file, shard)
    if len(files) > 1:
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(stored.bytes for shard in shards for stored in shard.values())
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))
    exported = copy.deepcopy(config)
    exported.architectures = exported.architectures or [names.architecture]
    exported.dtype, exported.use_cache = dtype, True  # training has no cache, who loads it wants one
    exported.save_pretrained(folder)
