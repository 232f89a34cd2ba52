"""Tests that cached tokens change no results: a cache is only used for the same input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_rows import BOTTOM, CHAT, same

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload

Folder = Callable[..., Path]


def test_the_second_time_the_same_tokens_come_from_the_cache(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    path = jsonl([*BOTTOM, "{"])
    first, _, notes = opened(path)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    second, _, again = opened(path)
    assert ("tokenized now" in notes[2], "from the cache" in again[2]) == (True, True)
    assert [note for note in notes if "tokenized" not in note] == [
        note for note in again if "cache" not in note
    ]
    file.write_bytes(whole[:100] + b"?" + whole[101:])
    third, _, rebuilt = opened(path)
    assert "tokenized now" in rebuilt[2]
    assert file.read_bytes() == whole
    for number in (5, 1, 9):
        assert same(first.step(number), second.step(number))
        assert same(first.step(number), third.step(number))
    with pytest.raises(UserError, match=r"bad row .*rows\.jsonl:51: found invalid JSON"):
        opened(path, strict=True)


def test_other_files_options_and_tokenizers_have_a_cache_of_their_own(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    rows = [{"messages": CHAT}] * 20
    path = jsonl(rows)

    def entries(**changes: Any) -> int:
        opened(path, **changes)
        return len(list((tmp_path / "cache").iterdir()))

    assert entries() == 1
    assert (
        entries(seed=3, packing="none", work=Workload(batch=1, sequence=64)) == 1
    )  # tokens do not depend on these
    assert entries(loss="last") == 2
    assert entries(columns="messages") == 3
    assert entries(template="unmarked") == 4
    os.utime(path, ns=(1, 1))
    assert entries() == 5
    jsonl([*rows, {"messages": CHAT}])
    assert entries() == 6


def test_a_file_replaced_by_another_of_its_size_and_time_is_read_again(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    path = jsonl([{"text": "hello"}] * 50)
    first, _, _ = opened(path)
    status = path.stat()
    jsonl([{"text": "world"}] * 50)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert opened(path)[0].digest != first.digest


_OWN = """
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

class Own(PreTrainedTokenizerFast):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.backend_tokenizer.normalizer = normalizers.Replace("hello", "one")
"""


def test_tokens_depend_on_the_tokenizer_s_code_and_the_model_type(
    opened: Callable[..., Any],
    jsonl: Folder,
    tokenizer_folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder(), folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "Own",
                "auto_map": {"AutoTokenizer": [None, "own.Own"]},
                "eos_token": "<|end|>",
            }
        )
    )
    path = jsonl(BOTTOM)
    found = []
    for code in (_OWN, _OWN.replace("one", "two")):
        (folder / "own.py").write_text(code)
        corpus, _, notes = opened(path, folder=folder, trust_remote_code=True)
        found.append((corpus.digest, "tokenized now" in notes[2]))
    assert found[0][0] != found[1][0]
    assert opened(path, folder=folder, trust_remote_code=True)[0].digest == found[1][0]
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 3}')
    assert "tokenized now" in opened(path, folder=folder, trust_remote_code=True)[2][2]
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 4}')
    assert "from the cache" in opened(path, folder=folder, trust_remote_code=True)[2][2]


def test_a_file_that_changes_while_it_is_read_is_refused(
    opened: Callable[..., Any], jsonl: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.runtime.data.tokens import reading

    path = jsonl(BOTTOM)
    tokenize = reading._tokenize

    def slowly(*given: Any) -> None:
        tokenize(*given)
        path.write_text(path.read_text() + "\n")

    monkeypatch.setattr(reading, "_tokenize", slowly)
    with pytest.raises(UserError, match="found files that changed while they were read"):
        opened(path)


def test_a_disk_that_returns_other_bytes_than_were_written_is_reported(
    opened: Callable[..., Any], jsonl: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.runtime.data.tokens import reading

    monkeypatch.setattr(reading, "load", lambda *_: None)
    with pytest.raises(UserError, match=r"cache .*: found a file whose content is not what was"):
        opened(jsonl(BOTTOM))
