"""A Hugging Face model folder, local or fetched by its hub name: which of its files are read, and where they may lie. Safetensors alone, no pickle, no code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from megatrain.runtime.files.tensor_file import MalformedFile
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_json

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", CHAT_TEMPLATE, "chat_template.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
"""what belongs to a model besides its config and its weights"""
_HUB_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[A-Za-z0-9][\w./-]{0,127}))?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_READ_FIRST = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""what transformers reads where neither of the two is there, whatever other safetensors files there are"""


def model_folder(source: str) -> Path:
    """The folder of a model: `source` itself where it is there, else what the hub has under this name, fetched into huggingface_hub's cache: `org/name`, or
    `org/name@revision` for a branch, a tag or a commit. Offline (`HF_HUB_OFFLINE=1`) the cache alone is asked.

    Raises UserError for what is neither, and where the hub cannot be reached and the cache does not have it.
    """
    folder = Path(source)
    named = _HUB_NAME.fullmatch(source)
    if folder.exists() or not named:
        if folder.is_dir():
            return folder
        raise UserError(
            f"model {source}", found="no such folder", allowed="a Hugging Face model folder, or a name on the hub such as org/name",
            fix="check `source` in the plan, or pass --model or --init random",
        )  # fmt: skip
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(named["name"], revision=named["revision"], allow_patterns=["config.json", INDEX, "model*.safetensors", *COMPANIONS]))
    except (OSError, ValueError, RuntimeError) as error:  # huggingface_hub's errors are these, httpx' are RuntimeErrors or OSErrors
        raise _unreachable(source, error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpcore", "huggingface_hub"):
            raise
        raise _unreachable(source, error) from None


def _unreachable(source: str, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"model {source}", found=f"no such folder, and the hub did not give it ({reason})", allowed="a Hugging Face model folder, or a name on the hub",
        fix="check the name and the network, or fetch the model beforehand and name its folder",
    )  # fmt: skip


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model, those that transformers reads: `model.safetensors`, else the files of the index; where there is neither, all.

    Raises UserError where there is none, where transformers would read another file, and for a file outside the folder.
    """
    names = list(_named(folder))
    if not names:
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        found = (
            f"no {WHOLE} and no index of shards, but {pickles[0]}, a pickle, which is never opened: it may run any program"
            if pickles
            else "no *.safetensors file"
        )
        fix = "convert the weights to safetensors" if pickles else "check the path, or pass --init random"
        raise UserError(str(folder), found=found, allowed="a Hugging Face model folder with its weights", fix=fix)
    return [inside(folder, name) for name in names]


def _named(folder: Path) -> Iterator[str]:
    _refuse_weights_by_name(folder)
    if (folder / WHOLE).exists():
        yield WHOLE
    elif (folder / INDEX).exists():
        index = read_json(inside(folder, INDEX))
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise UserError(str(folder / INDEX), found="no `weight_map` of tensor to file", allowed="an index of safetensors files", fix="fetch the file again")
        yield from sorted(set(places.values()))
    elif not any((folder / name).exists() for name in _READ_FIRST):
        yield from sorted(path.name for path in folder.glob("*.safetensors"))


def _refuse_weights_by_name(folder: Path) -> None:
    """Raises UserError where config.json names the file of the weights, which transformers then reads instead of those of the usual names."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if isinstance(config, dict) and config.get("transformers_weights") is not None:
        raise UserError(
            f"{folder / 'config.json'}: transformers_weights", found=repr(config["transformers_weights"]), allowed=f"weights in {WHOLE} or in shards",
            fix="load the model with transformers and save it again",
        )  # fmt: skip


def inside(folder: Path, name: str) -> Path:
    """The file `name` of `folder`. Raises UserError where it is a path or a link that leaves the folder; the hub's cache links to its own `blobs`."""
    path = folder / name
    if "/" in name or "\\" in name or name in ("", ".", "..") or "\0" in name:
        raise UserError(str(folder), found=f"a file named {name[:80]!r}", allowed="a file in the folder itself", fix="fetch the model again")
    homes = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(str(path), found=str(error), allowed="a file in the folder itself", fix="fetch the model again") from None
    if target.parent not in homes:
        raise UserError(str(path), found=f"a link to {target}, outside the folder", allowed="a file in the folder itself", fix="copy the file there")
    if path.exists() and not path.is_file():
        raise MalformedFile(str(path), found="no regular file", allowed="a file", fix="fetch the model again")
    return path
