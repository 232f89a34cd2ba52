"""Loads weights from Hugging Face folders or random weights into the arenas, and exports them."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, PretrainedConfig

from megatrain.runtime.files.checkpoint_names import CheckpointNames, hub_name, is_multimodal
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.files.folder_tensors import FolderTensors
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE, COMPANIONS, INDEX, WHOLE, inside
from megatrain.runtime.files.quantized import KINDS, kept_key_note, quantized_weights
from megatrain.runtime.files.stored_tensors import StoredTensors, summary
from megatrain.runtime.files.tensor_stream import TensorSource, write_tensors
from megatrain.runtime.memory.arenas import TORCH_DTYPE, Arenas, length_of
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.ranks import Ranks
from megatrain.simulator.base.atomic_files import AtomicWrite
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.adapter import adapter_in
from megatrain.simulator.model.layer import LayerSpec, TensorSpec
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Dtype, Workload
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.arithmetic import part_elements
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.update_layout import update_layout

_SHARD_BYTES = 4 * 10**9
_OTHER_WEIGHTS = "use weights that belong to this config.json"
_LAYER = "layer"
"""The message of rank 0 to the other ranks when it reads a layer."""
_PIECE = 2**22
"""Elements that are converted at a time: 16 MiB in fp32, and twice as much for rounding."""
_DRAWN = 2**26
"""Elements of a tensor that are drawn at a time: 256 MiB in fp32."""
Weights = Callable[[str, str, tuple[int, ...]], torch.Tensor]
"""Returns the values of a tensor: (layer, tensor name, shape) -> values."""
ReadElements = Callable[[int, int], torch.Tensor]
"""Returns elements `first` to `end` of a layer's flat weights or low halves: (first, end) ->
[n]."""


class RandomWeights:
    """Random weights: matrices from a normal distribution with standard deviation 0.02, norms 1,
    biases 0.

    The values of a tensor depend on the seed, on the name of the tensor, and on the type of
    `device`. A GPU draws 7 billion parameters in a second, and a CPU core in a minute.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device

    def __call__(self, layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.zeros(shape) if tensor.endswith("bias") else torch.ones(shape)
        values = torch.empty(shape, device=self._device)
        flat = values.view(-1)
        for number, first in enumerate(range(0, values.numel(), _DRAWN)):
            self._draw(layer, tensor, number, flat[first : first + _DRAWN])
        return values

    def runs(
        self, layer: str, tensor: str, shape: tuple[int, ...], first: int, end: int
    ) -> Iterator[torch.Tensor]:
        """Yields the elements `first` to `end` of the flat tensor, in runs of at most `_DRAWN`
        elements. A run is valid until the next one is asked for, which has the same memory. So a
        large tensor needs little memory beside a plan that fills the GPU.
        """
        if len(shape) == 1:
            yield self(layer, tensor, shape)[first:end]
            return
        elements = math.prod(shape)
        memory = torch.empty(min(_DRAWN, elements), device=self._device)
        for number in range(first // _DRAWN, -(-end // _DRAWN)):
            begin = number * _DRAWN
            drawn = memory[: elements - begin]
            self._draw(layer, tensor, number, drawn)
            yield drawn[max(first - begin, 0) : end - begin]

    def _draw(self, layer: str, tensor: str, number: int, out: torch.Tensor) -> None:
        """Draws the elements of a tensor from `number` times `_DRAWN` on."""
        name = hub_name(layer, tensor) + (f" {number}" if number else "")
        generator = torch.Generator(self._device).manual_seed(
            self._seed * 1_000_003
            + sum(byte * 257**place for place, byte in enumerate(name.encode())) % 2**31
        )
        out.normal_(generator=generator).mul_(0.02)


def random_weights(seed: int, device: torch.device = torch.device("cpu")) -> Weights:  # noqa: B008
    """Returns `RandomWeights`. They do not include buffers: a run with random weights keeps the
    initial buffers of transformers.
    """
    return RandomWeights(seed, device)


@contextlib.contextmanager
def folder_weights(
    folder: Path, on_note: Callable[[str], None] = lambda _: None
) -> Iterator[Weights]:
    """Opens the weights of a Hugging Face folder.

    Tensors are mapped from their files, and only one file is open at a time. A tensor that the
    folder has in several parts, such as experts, is copied.

    Args:
        folder: the model's folder.
        on_note: called with a line of text about files and tensors that do not belong to the model.

    Raises:
        UserError: before any tensor is read, if a file is missing, malformed, a pickle or outside
            the folder, if two files have the same tensor, if a tensor is missing or quantized, or
            if two matrices differ although the config ties them. When a tensor is read, if its
            shape is wrong or it is quantized.
    """
    tensors = FolderTensors(folder)
    if tensors.files == [folder / WHOLE] and (folder / INDEX).exists():
        on_note(
            f"{folder / INDEX} is not read, because {WHOLE} is also there and transformers reads"
            " that"
        )
    stack, value_of = _reader(folder, tensors.entries, tensors.tensor)
    if isinstance(value_of, StoredTensors):
        dtypes = {key: tensors.entries[key].dtype for key in value_of.weight_keys()}
        if quantized := {key: dtype for key, dtype in dtypes.items() if dtype in KINDS}:
            raise quantized_weights(folder, quantized)
        for name, shape in value_of.missing.items():
            raise _missing(folder, name, shape)
        value_of.refuse_untied(str(folder))
        if value_of.foreign and not value_of.multimodal:
            on_note(
                f"{folder} has {len(value_of.foreign)} tensors that do not belong to the model and"
                f" are neither trained nor exported: {summary(value_of.foreign)}"
            )
    if note := kept_key_note(folder):
        on_note(note)
    adapter = ""
    with contextlib.suppress(UserError):  # the adapter is not used, so its config may be damaged
        adapter = adapter_in(folder)
    if adapter:
        on_note(
            f"{folder} also holds {adapter}, which is neither trained nor exported: only the"
            " model's own weights are"
        )

    def read(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
        name = hub_name(layer, tensor, stack)
        try:
            value = value_of(name)
        except KeyError:
            raise _missing(folder, name, shape) from None
        if tuple(value.shape) != shape:
            raise UserError(
                f"{folder}: {name}",
                found=f"shape {tuple(value.shape)}",
                allowed=str(shape),
                fix=_OTHER_WEIGHTS,
            )
        if value.dtype in KINDS:
            raise quantized_weights(folder, {name: value.dtype})
        if not value.is_floating_point():
            raise UserError(
                f"{folder}: {name}",
                found=str(value.dtype),
                allowed="floating-point numbers, not quantized",
                fix=_OTHER_WEIGHTS,
            )
        return value

    with tensors:
        yield read


def _missing(folder: Path, name: str, shape: tuple[int, ...]) -> UserError:
    return UserError(
        str(folder),
        found=f"no tensor {name}",
        allowed=f"a tensor {name} of shape {shape}",
        fix=_OTHER_WEIGHTS,
    )


def _reader(
    folder: Path, keys: Iterable[str], tensor_of: Callable[[str], torch.Tensor]
) -> tuple[DecoderStack, Callable[[str], torch.Tensor]]:
    """Returns the decoder stack of the folder's model, and a function that reads a tensor by its
    name in the model. If the model's config cannot be read, uses the default stack and the names in
    the files.
    """
    try:
        names = CheckpointNames(
            AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        )
    except (OSError, ValueError, KeyError):
        known = frozenset(keys)

        def read(name: str) -> torch.Tensor:
            if name not in known:
                raise KeyError(name)
            return tensor_of(name)

        return DecoderStack(), read
    return names.stack, names.stored(keys, tensor_of)


class ModelState:
    """The weights and moments of a model, in the buffers of a schedule. Loads weights into these
    buffers, and reads master weights from them.
    """

    def __init__(
        self,
        plan: Plan,
        schedule: Schedule,
        memory: Callable[[], Arenas],
        buffers: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Does not access memory yet.

        Args:
            plan: the plan.
            schedule: the schedule of the plan.
            memory: applies a deferred update and returns the schedule's pools (`Executor.memory`).
                Called at every access.
            buffers: buffers of the decoder layers that a Hugging Face checkpoint contains, by layer
                and name (`FunctionalLayers.persistent`).
            ranks: the ranks of a plan for several GPUs. Rank 0 reads copies of the weights of the
                whole model, while the other ranks are in `follow`.
        """
        self._plan, self._schedule, self._memory, self._buffers = (
            plan,
            schedule,
            memory,
            buffers or {},
        )
        self._dtype, self._ranks = TORCH_DTYPE[plan.workload.dtype], ranks
        self._read: tuple[tuple[str, int], tuple[torch.Tensor, torch.Tensor | None]] | None = None
        """The last layer that rank 0 has read, the number of collectives at that time, and the
        halves of the layer."""

    def home(self, name: str, layer: str) -> str | None:
        """Returns the buffer with the layer's state `name`, or None if there is no such buffer.

        `name` is `weights`, `master_low`, `moments` or `moving_norms`.
        """
        return self._schedule.state.get((name, layer))

    def _halves(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the layer's flat weights, and the low halves of its masters or None.

        Raises UserError on every rank except rank 0, because only rank 0 can ask for the parts.
        """
        if self._ranks is None:
            return self._own_halves(layer)
        if not self._ranks.leads:
            raise UserError(
                "training: state",
                found=f"a read of the weights on rank {self._ranks.rank}",
                allowed="reads on rank 0, to which the other ranks send their parts",
                fix="read them only if `trainer.executor.rank` is 0",
            )
        self._memory()  # applies a deferred update before the key is computed
        key = layer.name, self._ranks.board.collectives
        if self._read is None or self._read[0] != key:
            self._read = None
            self._ranks.send([_LAYER, layer.name])
            high, low = self._gathered(layer)
            assert high is not None, "rank 0 receives the parts"
            self._read = key, (high, low)
        return self._read[1]

    def _gathered(self, layer: LayerSpec) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the halves of the whole layer on rank 0. Other ranks send their parts."""
        ranks = self._ranks
        assert ranks is not None
        wholes = [
            None if part is None else ranks.gathered(part) for part in self._own_halves(layer)
        ]
        high, low = (
            None if whole is None else whole.view(-1)[: layer.elements] for whole in wholes
        )
        return high, low

    def follow(self) -> Any:
        """Sends this rank's part of each layer that rank 0 reads. Returns the first message from
        rank 0 that is not about a layer. Every rank except rank 0 must call this while rank 0 reads
        weights. Rank 0 then calls `end_reads`.
        """
        assert self._ranks is not None
        while True:
            message = self._ranks.receive()
            if not (isinstance(message, list) and message[:1] == [_LAYER]):
                return message
            self._gathered(self._plan.model.stack[message[1]])

    def end_reads(self, value: object) -> None:
        """Sends `value` from rank 0 to the other ranks, where `follow` returns it. Also releases
        the layer that rank 0 has read last, because no plan counts this memory.
        """
        assert self._ranks is not None
        self._read = None
        self._ranks.send(value)

    def first(self, layer: LayerSpec) -> int:
        """Returns the index of the layer's first element that this rank owns; 0 with one GPU."""
        rank = self._ranks.rank if self._ranks else 0
        return min(rank * part_elements(self._plan, layer.name), layer.elements)

    def _own_halves(self, layer: LayerSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns `_halves` for the part of the layer that this rank owns, without copying."""
        weights, low = self.home("weights", layer.name), self.home("master_low", layer.name)
        assert weights is not None
        memory = self._memory()
        count = part_elements(self._plan, layer.name)
        flat = memory.flat(weights, self._dtype, count)
        if low is None:
            return flat, None
        dtype = TORCH_DTYPE[self._schedule.buffer[low].dtype]
        return flat, memory.flat(low, dtype, count)

    def _moments(self, layer: LayerSpec) -> torch.Tensor | None:
        """Returns the moments of this rank's part of the layer, or None if the optimizer keeps no
        moments.

        They are [moments, elements] fp32 or, in 8 bits, [moments, bytes of the records] uint8. If
        tensors of the layer keep different numbers of moments, all values are in one flat tensor.
        """
        if (home := self.home("moments", layer.name)) is None:
            return None
        dtype = self._schedule.buffer[home].dtype
        name = self._plan.workload.optimizer
        layout = update_layout(name, layer)
        elements = part_elements(self._plan, layer.name)
        length = length_of(dtype, layout.values if layout else elements)
        shape = (length,) if layout else (find(name).moments, length)
        return self._memory().tensor(home, TORCH_DTYPE[dtype], shape)

    def _moving_norms(self, layer: LayerSpec) -> torch.Tensor | None:
        """Returns the moving norms, [tensors] fp32. None unless clipping is by `adagc`."""
        if (home := self.home("moving_norms", layer.name)) is None:
            return None
        return self._memory().flat(home, torch.float32, len(layer.tensors))

    def load(self, weights: Weights, progress: Callable[[int], None] = lambda _: None) -> None:
        """Writes the weights and buffers of all layers, and sets moments and moving norms to zero.
        `progress` is called after each layer with its number of parameters.
        """
        for layer in self._plan.model.stack.values():
            high, low = self._own_halves(layer)
            first = len(high) * (self._ranks.rank if self._ranks else 0)
            for tensor, offset in zip(layer.tensors, layer.offsets, strict=True):
                begin = max(first - offset, 0)
                end = min(first + len(high) - offset, tensor.elements)
                place = offset + begin - first
                for piece in _pieces(weights, layer.name, tensor, begin, end):
                    # rounded where the values are: a GPU sends 2 or 4 instead of 4 pageable bytes
                    master = piece.float().contiguous()
                    part = slice(place, place + master.numel())
                    place += master.numel()
                    if low is None:
                        high[part].copy_(optimizer.rounded(master, high.dtype))
                    else:
                        halves = [torch.empty_like(master, dtype=to.dtype) for to in (high, low)]
                        optimizer.split(master, *halves)
                        high[part].copy_(halves[0])
                        low[part].copy_(halves[1])
            for kept in (self._moments(layer), self._moving_norms(layer)):
                if kept is not None:
                    kept.zero_()
            progress(layer.parameters)
        self.load_buffers(weights)

    def load_buffers(self, weights: Weights) -> None:
        """Writes the buffers of all layers. With random weights, buffers keep the initial values of
        transformers.
        """
        if isinstance(weights, RandomWeights):
            return
        for layer, buffers in self._buffers.items():
            for name, buffer in buffers.items():
                buffer.copy_(weights(layer, name, tuple(buffer.shape)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the state of all layers by name, `LAYER.CLASS`. These are the tensors of a
        checkpoint. With several GPUs, returns this rank's part of the state: the elements of each
        layer from `first` on, which may be empty.

        Weights and low halves are flat. Moments are [moments, elements] fp32 or [moments, bytes of
        the records] uint8, or flat if tensors of the layer keep different numbers of moments.
        Moving norms are [tensors] fp32. Names and shapes are the same for every plan of a model and
        a workload. The tensors are views of the pools, so they are not valid after the next step.
        """
        tensors = {}
        for layer in self._plan.model.stack.values():
            high, low = self._own_halves(layer)
            # the part of the last rank may extend past the end of the layer
            own = slice(layer.elements - self.first(layer) if self._ranks else None)
            tensors[f"{layer.name}.weights"] = high[own]
            if low is not None:
                tensors[f"{layer.name}.master_low"] = low[own]
            if (moments := self._moments(layer)) is not None:
                tensors[f"{layer.name}.moments"] = moments[:, own] if self._ranks else moments
            if (moving := self._moving_norms(layer)) is not None:
                tensors[f"{layer.name}.moving_norms"] = moving
        return tensors

    def sources(self, layer: LayerSpec, dtype: torch.dtype) -> dict[str, TensorSource]:
        """Returns the layer's weights by tensor name, as sources in `dtype`, bf16 or fp32. Weights
        that are stored in another dtype are converted one piece at a time.
        """

        def read(half: int, first: int, end: int) -> torch.Tensor:
            values = self._halves(layer)[half]
            assert values is not None
            return values[first:end]

        has_low = self.home("master_low", layer.name) is not None
        high, low = (functools.partial(read, half) for half in range(2))
        return weight_sources(layer, dtype, high, low if has_low else None)

    def not_finite(self) -> list[str]:
        """Returns the names of tensors whose weights contain infinity or NaN."""
        bad = []
        for layer in self._plan.model.stack.values():
            high, _ = self._halves(layer)
            for tensor, offset in zip(layer.tensors, layer.offsets, strict=True):
                values = high[offset : offset + tensor.elements]
                if not all(bool(piece.isfinite().all()) for piece in values.split(_PIECE)):
                    bad.append(hub_name(layer.name, tensor.name))
        return bad

    def masters(self, layer: LayerSpec) -> dict[str, torch.Tensor]:
        """Returns copies of the layer's fp32 master weights by tensor name."""
        high, low = self._halves(layer)
        master = high.float().clone() if low is None else optimizer.join(high, low)
        return {
            tensor.name: master[offset : offset + tensor.elements].view(tensor.shape)
            for tensor, offset in zip(layer.tensors, layer.offsets, strict=True)
        }

    def buffers(self, layer: LayerSpec) -> Mapping[str, torch.Tensor]:
        """Returns the layer's buffers by name."""
        return self._buffers.get(layer.name, {})


def weight_sources(
    layer: LayerSpec, dtype: torch.dtype, high: ReadElements, low: ReadElements | None
) -> dict[str, TensorSource]:
    """Returns the layer's weights by tensor name, as sources in `dtype`.

    Args:
        layer: the layer.
        dtype: bf16 or fp32.
        high: reads the weights.
        low: reads the low halves of the masters; None without low halves.
    """
    return {
        tensor.name: TensorSource(
            dtype,
            tensor.shape,
            functools.partial(_converted, high, low, offset, offset + tensor.elements, dtype),
        )
        for tensor, offset in zip(layer.tensors, layer.offsets, strict=True)
    }


def _pieces(
    weights: Weights, layer: str, tensor: TensorSpec, first: int, end: int
) -> Iterator[torch.Tensor]:
    """Yields the elements `first` to `end` of a flat tensor, at most `_PIECE` at a time."""
    if first >= end:
        return
    if isinstance(weights, RandomWeights):
        runs = weights.runs(layer, tensor.name, tensor.shape, first, end)
    else:
        runs = iter([weights(layer, tensor.name, tensor.shape).reshape(-1)[first:end]])
    for run in runs:
        yield from run.split(_PIECE)


def _converted(
    high: ReadElements, low: ReadElements | None, first: int, end: int, dtype: torch.dtype
) -> Iterator[torch.Tensor]:
    for start in range(first, end, _PIECE):
        stop = min(start + _PIECE, end)
        piece = high(start, stop)
        if piece.dtype == dtype:
            yield piece
        elif low is None:
            yield optimizer.rounded(piece, dtype)
        else:
            yield optimizer.join(piece, low(start, stop))


class Exportable(Protocol):
    """The weights of a model that can be exported: a `ModelState`, or a checkpoint on disk."""

    def sources(self, layer: LayerSpec, dtype: torch.dtype) -> dict[str, TensorSource]:
        """Returns the layer's weights by tensor name, as sources in `dtype`."""

    def buffers(self, layer: LayerSpec) -> Mapping[str, torch.Tensor]:
        """Returns the buffers of the layer that a Hugging Face checkpoint contains, by name."""


class TrainedState(Protocol):
    """A description of the model and its workload: a plan, or the manifest of a checkpoint."""

    @property
    def model(self) -> ModelSpec:
        """Returns the model."""

    @property
    def workload(self) -> Workload:
        """Returns the workload."""


def export(
    state: Exportable,
    plan: TrainedState,
    config: PretrainedConfig,
    folder: Path,
    *,
    dtype: Dtype | None = None,
    source: Path | None = None,
    chat_template: Path | None = None,
) -> None:
    """Writes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` can load.

    The folder is written completely or not at all. Tensors are streamed to the files without a
    second copy in memory. The exceptions are tensors that a checkpoint has in several parts, such
    as the experts of a layer. One such tensor at a time is copied.

    Args:
        state: the weights.
        plan: describes the model and the workload.
        config: the config to write. If it describes a multimodal model, the other tensors of the
            model are copied unchanged from `source`.
        folder: the folder to write. It must not exist.
        dtype: bf16 for the weights that the layers compute with, fp32 for the master weights. None:
            the compute dtype.
        source: the folder that the model came from, or None. Tokenizer and generation config are
            copied from this folder. Required for a multimodal model.
        chat_template: a file that replaces the tokenizer's chat template, if the file exists.

    Raises UserError if `folder` exists or cannot be written.
    """
    if folder.exists():
        raise UserError(
            str(folder),
            found="something there already",
            allowed="a folder that does not exist",
            fix="name another one",
        )
    try:
        aside = AtomicWrite(folder, folder=True)
    except OSError as error:
        raise UserError(
            str(folder),
            found=str(error.strerror).lower(),
            allowed="a folder that can be made",
            fix="name another one",
        ) from None
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
        raise UserError(
            str(folder),
            found=(error.strerror or str(error)).lower(),
            allowed="a disk with room",
            fix="free some space or name another folder",
        ) from None


def _wide(state: Exportable, layer: LayerSpec, names: CheckpointNames) -> dict[str, TensorSource]:
    """Returns the master weights of tensors that transformers keeps in fp32 in a bf16 model, such
    as the weights of a router.
    """
    wide = [
        tensor.name
        for tensor in layer.tensors
        if hub_name(layer.name, tensor.name, names.stack) in names.wide
    ]
    masters = state.sources(layer, torch.float32) if wide else {}
    return {name: masters[name] for name in wide}


def _write(
    state: Exportable,
    plan: TrainedState,
    config: PretrainedConfig,
    folder: Path,
    dtype: torch.dtype,
    source: Path | None,
) -> None:
    names = CheckpointNames(config)
    shards: list[dict[str, TensorSource]] = [{}]

    def add(tensors: Mapping[str, TensorSource]) -> None:
        for name, stored in tensors.items():
            if (
                shards[-1]
                and sum(other.bytes for other in shards[-1].values()) + stored.bytes > _SHARD_BYTES
            ):
                shards.append({})
            shards[-1][name] = stored

    for layer in plan.model.stack.values():
        buffers = {
            name: TensorSource.of(buffer.contiguous())
            for name, buffer in state.buffers(layer).items()
        }
        sources = {**state.sources(layer, dtype), **_wide(state, layer, names), **buffers}
        add(
            names.saved(
                {
                    hub_name(layer.name, name, names.stack): tensor
                    for name, tensor in sources.items()
                }
            )
        )
    with contextlib.ExitStack() as opened:
        if is_multimodal(config):
            assert source is not None, "a multimodal model is exported with its folder"
            others = opened.enter_context(FolderTensors(source))
            add({key: others.source(key) for key in names.other_keys(others.entries)})
        _write_shards(shards, folder)
    exported = copy.deepcopy(config)
    exported.architectures = exported.architectures or [names.architecture]
    for part in (exported, exported.get_text_config()):
        part.dtype, part.use_cache = dtype, True  # training switched the cache off
    exported.save_pretrained(folder)


def _write_shards(shards: Sequence[Mapping[str, TensorSource]], folder: Path) -> None:
    files = (
        ["model.safetensors"]
        if len(shards) == 1
        else [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            for number in range(1, len(shards) + 1)
        ]
    )
    for file, shard in zip(files, shards, strict=True):
        write_tensors(folder / file, shard)
    if len(files) > 1:
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        total = sum(stored.bytes for shard in shards for stored in shard.values())
        (folder / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
        )
