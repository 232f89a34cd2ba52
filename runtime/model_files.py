"""Weights in and out: Hugging Face folders (config.json and safetensors), or random ones, to and from the arenas."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from megatrain.runtime import optimizer
from megatrain.runtime.arenas import TORCH_DTYPE, Arenas
from megatrain.runtime.checkpoint_names import CheckpointNames, hub_name
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.specs import LayerSpec

_SHARD_BYTES = 4 * 10**9
Weights = Callable[[str, str, tuple[int, ...]], torch.Tensor]
"""(layer, tensor name, shape) -> its values"""


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
    """The tensors of a Hugging Face folder, one at a time. Raises UserError where a file or a tensor is missing, malformed or of another shape."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            str(folder), found="no *.safetensors file", allowed="a Hugging Face model folder with its weights", fix="check the path, or pass --init random"
        )
    with contextlib.ExitStack() as stack:
        where = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                where.update(dict.fromkeys(opened.keys(), opened))
            except (SafetensorError, OSError) as error:
                raise UserError(
                    str(file), found=f"a file that cannot be read ({error})", allowed="a whole safetensors file", fix="fetch the file again"
                ) from None

        names = CheckpointNames(AutoConfig.from_pretrained(folder, local_files_only=True))
        value_of = names.reader(where, lambda key: where[key].get_tensor(key))

        def read(layer: str, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
            name = hub_name(layer, tensor, names.prefix)
            try:
                value = value_of(name)
            except KeyError:
                raise UserError(
                    str(folder), found=f"no tensor {name}", allowed=f"a tensor {name} of shape {shape}", fix="use weights that belong to this config.json"
                ) from None
            if tuple(value.shape) != shape:
                raise UserError(f"{folder}: {name}", found=f"shape {tuple(value.shape)}", allowed=str(shape), fix="use weights that belong to this config.json")
            return value

        yield read


class ModelState:
    """A schedule's persistent model state, wherever the schedule keeps it: fp32 masters in, fp32 masters out."""

    def __init__(self, plan: Plan, schedule: Schedule, arenas: Arenas, buffers: Mapping[str, Mapping[str, torch.Tensor]] | None = None) -> None:
        """`buffers`: what decoder layers have besides parameters that belongs into a checkpoint, by layer and name: `Templates.persistent`."""
        self._plan, self._schedule, self._arenas, self._buffers = plan, schedule, arenas, buffers or {}
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
        flat = self._arenas.flat(weights, self._dtype, layer.elements)
        return flat, None if low is None else self._arenas.flat(low, torch.int16, layer.elements)

    def load(self, weights: Weights, progress: Callable[[int], None] = lambda _: None) -> None:
        """Writes every layer's weights and buffers and zeroes its moments; `progress` hears of each layer's parameters."""
        for layer in self._plan.model.stack.values():
            high, low = self._planes(layer)
            offset = 0
            for tensor in layer.tensors:
                master = weights(layer.name, tensor.name, tensor.shape).to(high.device, torch.float32).reshape(-1)
                part = slice(offset, offset + tensor.elements)
                if low is None:
                    high[part].copy_(master)
                else:
                    optimizer.split(master.contiguous(), high[part], low[part])
                offset += tensor.padded
            moments = self.home("moments", layer.name)
            assert moments is not None
            self._arenas.flat(moments, torch.float32, 2 * layer.elements).zero_()
            for name, buffer in self._buffers.get(layer.name, {}).items():
                buffer.copy_(weights(layer.name, name, tuple(buffer.shape)))
            progress(layer.parameters)

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


def export(state: ModelState, plan: Plan, config: PretrainedConfig, folder: Path) -> None:
    """Writes a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads, in the compute dtype: whole, or not at all.

    A bf16 export is what the layers computed with, the high plane. Raises UserError where `folder` exists or cannot be written.
    """
    if folder.exists():
        raise UserError(str(folder), found="something there already", allowed="a folder that does not exist", fix="name another one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise UserError(str(folder), found=str(error.strerror).lower(), allowed="a folder that can be made", fix="name another one") from None
    try:
        _write(state, plan, config, aside)
        aside.chmod(0o755)
        aside.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UserError(str(folder), found=str(error).lower(), allowed="a disk with room", fix="free some space or name another folder") from None
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(state: ModelState, plan: Plan, config: PretrainedConfig, folder: Path) -> None:
    dtype, total, names = TORCH_DTYPE[plan.workload.dtype], 0, CheckpointNames(config)
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    shards: list[str] = []

    def flush() -> None:
        name = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shards.append(name)
        shard.clear()

    for layer in plan.model.stack.values():
        values = {name: optimizer.round_to_bf16(master) if dtype == torch.bfloat16 else master for name, master in state.masters(layer).items()}
        made = names.saved({hub_name(layer.name, name, names.prefix): value.cpu() for name, value in [*values.items(), *state.buffers(layer).items()]})
        shard |= made
        total += sum(value.nbytes for value in made.values())
        if sum(value.nbytes for value in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    if len(shards) == 1:
        (folder / shards[0]).rename(folder / "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1))
    config.architectures = config.architectures or [_architecture(config)]
    config.dtype = dtype
    config.save_pretrained(folder)


def _architecture(config: PretrainedConfig) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type])
