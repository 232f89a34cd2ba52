"""Finds a Hugging Face model folder, fetches it from the hub if needed, and chooses its files.

Only safetensors files in the folder itself are read. Pickles and code are never read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatrain.runtime.files.hub_errors import hub_errors
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.model_source import name_on_hub
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_config, read_json
from megatrain.simulator.model import adapter

WHOLE = "model.safetensors"
"""File with the weights of a model that is not sharded."""
INDEX = "model.safetensors.index.json"
"""Index of the files with the weights of a sharded model."""
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    CHAT_TEMPLATE,
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model other than its config and its weights."""
NO_WEIGHTS = "check the path, or pass --init random"
"""The usual fix for a folder without weights."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_READ_FIRST = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Pickles that transformers reads if there is neither `WHOLE` nor `INDEX`, even if there are other
safetensors files."""


def model_folder(source: str, *, weights: bool = True) -> Path:
    """Returns the folder of a model. Fetches a model on the hub into huggingface_hub's cache. With
    `HF_HUB_OFFLINE=1`, only the cache is used.

    Args:
        source: a folder, or a name on the hub: `org/name`, or `org/name@revision` with a branch, a
            tag or a commit.
        weights: whether to fetch the weights as well.

    Raises UserError if `source` is neither a folder nor a name on the hub, or if the model cannot
    be fetched and is not in the cache.
    """
    named = name_on_hub(source)
    if named is None:
        return Path(source)
    with hub_errors(lambda reason: _unreachable(source, reason)):
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                named.name,
                revision=named.revision,
                allow_patterns=[
                    "config.json",
                    adapter.CONFIG,
                    *COMPANIONS,
                    *([INDEX, "model*.safetensors"] if weights else []),
                ],
            )
        )


def _unreachable(source: str, reason: str) -> UserError:
    return UserError(
        f"model {source}",
        found=f"no such folder, and it could not be fetched from the hub ({reason})",
        allowed="a Hugging Face model folder, or a name on the hub",
        fix="check the name and the network, or fetch the model beforehand and pass its folder",
    )


def weight_files(folder: Path, *, otherwise: str = NO_WEIGHTS) -> list[Path]:
    """Returns the safetensors files of a model, the same files that transformers would read:
    `model.safetensors`, or the files in the index. Without either, all safetensors files in the
    folder, except those of an adapter.

    Args:
        folder: the model's folder.
        otherwise: the fix in the error message if there are no weights.

    Raises UserError if there is no such file, if transformers would read a file of another format,
    or if a file is outside the folder.
    """
    names = list(_named(folder))
    if not names:
        if described := adapter.adapter_in(folder):
            raise adapter.no_whole_weights(folder, described)
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = (
            f"no {WHOLE} and no index of shards, but {pickles[0]}, a pickle, which is never opened:"
            " it may run any program"
            if pickles
            else "no *.safetensors file"
        )
        fix = "convert the weights to safetensors" if pickles else otherwise
        raise UserError(
            str(folder),
            found=found,
            allowed="a Hugging Face model folder with its weights",
            fix=fix,
        )
    return [inside(folder, name) for name in names]


def _named(folder: Path) -> Iterator[str]:
    """Yields the names of the safetensors files to read."""
    _refuse_weights_by_name(folder)
    if (folder / WHOLE).exists():
        yield WHOLE
    elif (folder / INDEX).exists():
        index = read_json(inside(folder, INDEX))
        places = index.get("weight_map") if isinstance(index, dict) else None
        if (
            not isinstance(places, dict)
            or not places
            or not all(isinstance(name, str) for name in places.values())
        ):
            raise UserError(
                str(folder / INDEX),
                found="no `weight_map` of tensor to file",
                allowed="an index of safetensors files",
                fix="fetch the file again",
            )
        yield from sorted(set(places.values()))
    elif not any((folder / name).exists() for name in _READ_FIRST):
        names = {path.name for path in folder.glob("*.safetensors")}
        yield from sorted(names - {adapter.WEIGHTS})


def _refuse_weights_by_name(folder: Path) -> None:
    """Raises UserError if config.json names the file with the weights. transformers would read this
    file instead of the files with the usual names.
    """
    config = read_config(folder / "config.json") if (folder / "config.json").is_file() else None
    if isinstance(config, dict) and config.get("transformers_weights") is not None:
        raise UserError(
            f"{folder / 'config.json'}: transformers_weights",
            found=repr(config["transformers_weights"]),
            allowed=f"weights in {WHOLE} or in shards",
            fix="load the model with transformers and save it again",
        )


def inside(folder: Path, name: str) -> Path:
    """Returns the path of the file `name` in `folder`.

    Raises UserError if `name` is a path or if the file is a link to a place outside the folder, and
    MalformedFile if it is not a regular file. Links to the folder `blobs` of the hub's cache are
    allowed.
    """
    path = folder / name
    if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
        raise UserError(
            str(folder),
            found=f"a file named {name[:80]!r}",
            allowed="a file in the folder itself",
            fix="fetch the model again",
        )
    homes = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(
            str(path),
            found=str(error),
            allowed="a file in the folder itself",
            fix="fetch the model again",
        ) from None
    if target.parent not in homes:
        raise UserError(
            str(path),
            found=f"a link to {target}, outside the folder",
            allowed="a file in the folder itself",
            fix="copy the file there",
        )
    if path.exists() and not path.is_file():
        raise MalformedFile(
            str(path), found="no regular file", allowed="a file", fix="fetch the model again"
        )
    return path
