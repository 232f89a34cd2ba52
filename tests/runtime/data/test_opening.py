"""open_data, from files to batches: what it says, what it refuses, what it keeps for evaluation, and that the cache changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.data import Corpus, DataOptions, open_data
from megatrain.runtime.data.documents import Documents
from megatrain.runtime.data.opening import split
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import convert
from megatrain.simulator.workload import Workload

Folder = Callable[..., Path]
WORK = Workload(batch=2, sequence=48)
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
BOTTOM = [{"text": f"hello {number} world"} for number in range(50)]


@pytest.fixture
def opened(tmp_path: Path, tokenizer_folder: Folder) -> Callable[..., Any]:
    """(training corpus, evaluation corpus, notes)"""

    def make(
        data: Path, *, template: str | None = "marked", work: Workload = WORK, vocabulary: int = 400, folder: Path | None = None, seed: int = 0, **changes: Any
    ) -> Any:
        notes: list[str] = []
        options = DataOptions(**{"data": str(data), "cache": str(tmp_path / "cache"), "packing": "documents", **changes})
        return (*open_data(options, work, folder or tokenizer_folder(template), vocabulary, notes.append, seed=seed), notes)

    return make


def same(left: list[Batch], right: list[Batch]) -> bool:
    return all(a is b is None or torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def test_what_is_found_and_counted_is_said(opened: Callable[..., Any], jsonl: Folder) -> None:
    rows = [{"messages": CHAT}] * 20 + ["{", {"messages": []}, {"text": "no"}, "[]", {"messages": [CHAT[0], {"role": "assistant", "content": "one " * 60}]}]
    path = jsonl(rows)
    corpus, evaluation, notes = opened(path)
    assert evaluation is None
    assert corpus.truncated_documents == 1
    text = "\n".join(notes)
    assert f"data {path}: jsonl, 1 file" in text
    assert "recognised: messages, chat template of the tokenizer, loss on all assistant turns, found by its generation markers" in text
    assert "25 rows, 21 documents, " in text
    assert "tokenised now, and cached" in text
    assert f"4 bad rows left out, the first of each kind: {path}:21: invalid JSON: " in text
    assert (
        f"; {path}:22: `messages` is not a list of messages; {path}:23: `messages` is not a list of messages; the row has the columns of text; {path}:24: a list, not an object"
        in text
    )
    assert "training: 21 documents, " in text
    assert "% padding; 1 document truncated by " in text


def test_the_second_time_tokens_come_from_the_cache_and_are_the_same(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path) -> None:
    path = jsonl([*BOTTOM, "{"])
    first, _, notes = opened(path)
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    second, _, again = opened(path)
    assert ("tokenised now" in notes[2], "from the cache" in again[2]) == (True, True)
    assert [note for note in notes if "tokenised" not in note] == [note for note in again if "cache" not in note]
    file.write_bytes(whole[:100] + b"?" + whole[101:])
    third, _, rebuilt = opened(path)
    assert "tokenised now" in rebuilt[2]
    assert file.read_bytes() == whole
    for number in (5, 1, 9):
        assert same(first.step(number), second.step(number))
        assert same(first.step(number), third.step(number))
    with pytest.raises(UserError, match=r"bad row .*rows\.jsonl:51: found invalid JSON"):
        opened(path, strict=True)


def test_other_files_options_and_tokenizers_have_a_cache_of_their_own(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path) -> None:
    rows = [{"messages": CHAT}] * 20
    path = jsonl(rows)

    def entries(**changes: Any) -> int:
        opened(path, **changes)
        return len(list((tmp_path / "cache").iterdir()))

    assert entries() == 1
    assert entries(seed=3, packing="none", work=Workload(batch=1, sequence=64)) == 1  # not what tokens depend on
    assert entries(loss="last") == 2
    assert entries(columns="messages") == 3
    assert entries(template="unmarked") == 4
    os.utime(path, ns=(1, 1))
    assert entries() == 5
    jsonl([*rows, {"messages": CHAT}])
    assert entries() == 6


def test_a_file_replaced_by_another_of_its_size_and_time_is_read_again(opened: Callable[..., Any], jsonl: Folder) -> None:
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


def test_a_tokenizers_code_and_its_models_type_are_part_of_what_tokens_are(
    opened: Callable[..., Any], jsonl: Folder, tokenizer_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder(), folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}, "eos_token": "<|end|>"})
    )
    path = jsonl(BOTTOM)
    found = []
    for code in (_OWN, _OWN.replace("one", "two")):
        (folder / "own.py").write_text(code)
        corpus, _, notes = opened(path, folder=folder, trust_remote_code=True)
        found.append((corpus.digest, "tokenised now" in notes[2]))
    assert found[0][0] != found[1][0]
    assert opened(path, folder=folder, trust_remote_code=True)[0].digest == found[1][0]
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 3}')
    assert "tokenised now" in opened(path, folder=folder, trust_remote_code=True)[2][2]
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 4}')
    assert "from the cache" in opened(path, folder=folder, trust_remote_code=True)[2][2]


def test_a_file_that_changes_while_it_is_read_is_refused(opened: Callable[..., Any], jsonl: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.runtime.data import opening

    path = jsonl(BOTTOM)
    tokenise = opening._tokenise

    def slowly(*given: Any) -> None:
        tokenise(*given)
        path.write_text(path.read_text() + "\n")

    monkeypatch.setattr(opening, "_tokenise", slowly)
    with pytest.raises(UserError, match="found files that changed while they were read"):
        opened(path)


def test_bad_rows_are_counted_by_what_is_wrong_with_them(opened: Callable[..., Any], jsonl: Folder) -> None:
    wrong = [{"messages": [CHAT[0], {"role": name, "content": "a"}]} for name in ("bot", "robot")] + [{"messages": CHAT[:1]}] * 3
    rows = [{"messages": CHAT}] * 30 + wrong + [{"messages": [{"role": "user", "content": number}, CHAT[1]]} for number in range(4)]
    path = jsonl(rows)
    for _ in range(2):  # the second time from the cache
        note = opened(path)[2][3]
        assert note.startswith(f"9 bad rows left out, the first of each kind: {path}:31: message 2 of `messages` has the unknown role 'bot'; known: ")
        assert f" (and 1 more like it); {path}:33: no assistant turn in `messages` (and 2 more like it); {path}:36: message 1 of `messages`: " in note
        assert note.endswith("`content` is not a string (and 3 more like it)")


def test_rows_whose_turns_are_not_known_are_left_out_and_not_the_run(opened: Callable[..., Any], jsonl: Folder) -> None:
    called = {**CHAT[1], "tool_calls": [{"function": {"name": "weather"}}]}
    path = jsonl([*[{"messages": CHAT}] * 20, {"messages": [CHAT[0], called]}])
    _, _, notes = opened(path, template="unmarked")
    assert notes[3].endswith(f"{path}:21: the chat template leaves out the tool calls of message 2")
    with pytest.raises(UserError, match=r"bad row .*:21: found the chat template leaves out the tool calls"):
        opened(path, template="unmarked", strict=True)
    with pytest.raises(UserError, match=r"found no row that can be used, the first .*:1: the chat template leaves out the tool calls of message 2"):
        opened(jsonl([{"messages": [CHAT[0], called]}]), template="unmarked")


def test_a_template_of_ones_own_is_used_instead_of_the_tokenizers(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path) -> None:
    path, template = jsonl([{"messages": CHAT}] * 20), tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    counts = set()
    for name in ("unmarked", None):  # whether or not the tokenizer has one
        corpus, _, notes = opened(path, template=name, chat_template=str(template))
        assert f"recognised: messages, chat template {template}, loss on all assistant turns" in notes[1]
        counts.add(corpus.tokens)
    assert len(counts) == 1
    template.write_text("{% for m in messages %}{{ m.content }}!<|end|>{% endfor %}")
    corpus, _, notes = opened(path, chat_template=str(template))
    assert "tokenised now" in notes[2]
    assert {corpus.tokens - 20 * 2} == counts  # another token in each message
    template.write_text("{% for m in messages %}{{ m.content } }{% endfor %}")
    with pytest.raises(UserError, match=r"chat template .*own\.jinja: found .* \(line 1\); allowed: a Jinja template"):
        opened(path, chat_template=str(template))
    with pytest.raises(UserError, match=r"none\.jinja"):
        opened(path, chat_template=str(tmp_path / "none.jinja"))


def test_strict_stops_at_the_first_bad_row(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bad row .*rows\.jsonl:21: found `text` is not a string; allowed: rows that can be used; fix: correct it, or run"):
        opened(jsonl([*BOTTOM[:20], {"text": 3}, *BOTTOM]), strict=True)
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(UserError, match=r"rows\.jsonl:1: found invalid JSON"):
        opened(jsonl(["{"]), strict=True)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "found no rows"),
        (["", ""], "found no rows"),
        ([{"text": ""}], "found no text"),
        (["{"], r"found no row that can be read, the first .*rows\.jsonl:1: invalid JSON"),
        ([{"text": 3}, {"text": 4}], r"found no row that can be used, the first .*rows\.jsonl:1: `text` is not a string"),
        ([{"messages": CHAT[:1]}], "the first .*:1: no assistant turn in `messages`"),
        ([{"question": "q", "answer": "a"}, {"id": 3}], r"columns: found answer, id, question; allowed: messages: messages; .*text: text; fix: rename"),
        ([{"text": "hello"}], "found 2 tokens; allowed: at least the 96 of one step; fix: give more text, or a smaller batch or sequence"),
    ],
)
def test_nothing_to_train_on_is_one_line(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path, rows: list, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        opened(jsonl(rows))
    assert "\n" not in str(error.value)
    assert not any(file.name.startswith(".") for file in (tmp_path / "cache").glob("*"))


def test_without_a_tokenizer_text_is_bytes_and_messages_are_refused(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "text.txt").write_text("hello world " * 20)
    corpus, _, notes = opened(tmp_path / "text.txt", folder=tmp_path / "model", packing="plain", vocabulary=257)
    assert notes[1] == "text as bytes, at most 67,108,864 of them: the model's folder has no tokenizer"
    assert corpus.step(1)[0].documents is None
    assert int(corpus.step(1)[0].ids.max()) <= 256
    with pytest.raises(UserError, match=rf"^tokenizer {tmp_path}/model: found none; allowed: one in the model's folder, for jsonl data; fix: copy"):
        opened(jsonl([{"messages": CHAT}]), folder=tmp_path / "model")


def test_a_vocabulary_smaller_than_an_id_is_refused_from_the_cache_too(opened: Callable[..., Any], jsonl: Folder) -> None:
    path = jsonl(BOTTOM)
    for _ in range(2):
        with pytest.raises(UserError, match=r"model: vocabulary, for data .*: found 200; allowed: >= 2\d\d, the tokens' largest id \+ 1"):
            opened(path, vocabulary=200)
    opened(path)


def test_every_kind_of_file_gives_the_same_batches(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    table = pyarrow.Table.from_pylist(BOTTOM)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "saved" / "data: arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data: arrow"}]}')
    corpora = [opened(path)[0] for path in (jsonl(BOTTOM), tmp_path / "rows.parquet", tmp_path / "saved")]
    assert same(corpora[0].step(3), corpora[1].step(3))
    assert same(corpora[0].step(3), corpora[2].step(3))


def test_rows_with_the_columns_of_another_layout_are_counted(opened: Callable[..., Any], jsonl: Folder) -> None:
    path = jsonl([*BOTTOM, {"messages": CHAT}, {"messages": CHAT}, {"prompt": "a", "completion": "b"}, {"other": 1}])
    for _ in range(2):  # from the cache too
        notes = opened(path)[2]
        assert f"4 bad rows left out, the first of each kind: {path}:51: no `text`; the row has the columns of messages (and 1 more like it); " in "\n".join(
            notes
        )
        assert "2 of these have the columns of messages: the first rows decide how all are read, or --columns does" in notes
        assert "1 of these have the columns of prompt/completion: the first rows decide how all are read, or --columns does" in notes


def test_text_files_are_documents(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text("hello world, " * (number % 3 + 1))
    (tmp_path / "texts" / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "texts" / "empty.txt").touch()
    corpus, _, notes = opened(tmp_path / "texts", work=Workload(batch=1, sequence=48))
    assert notes[1] == "recognised: text, loss on every token"
    assert notes[2].startswith("42 rows, 1 without text, 40 documents, ")
    assert "1 bad row left out, the first of each kind: " in notes[3]
    batches = [corpus.step(number)[0] for number in range(1, corpus.rows + 1)]
    assert sum(int(((batch.ids == 0) & (batch.documents >= 0)).sum()) for batch in batches) == 40  # each ends


# ---- evaluation ----


def documents_of(count: int, *, whole: bool = False) -> Documents:
    return Documents(tokens=np.arange(count * 10), begins=np.arange(count) * 10, ends=np.arange(count) * 10 + 10, whole=whole)


@settings(max_examples=100)
@given(st.integers(2, 200), st.floats(0.001, 0.99))
def test_a_fraction_is_drawn_once_and_shares_no_document(count: int, fraction: float) -> None:
    options = DataOptions(evaluation_fraction=fraction)
    size = max(1, round(count * fraction))
    if size >= count:
        with pytest.raises(UserError, match=f"data: evaluation: found {size} of {count} documents; allowed: at most {count - 1}"):
            split(documents_of(count), options)
        return
    training, evaluation = split(documents_of(count), options)
    assert evaluation is not None
    assert sorted([*training.begins, *evaluation.begins]) == [10 * index for index in range(count)]
    assert len(evaluation) == size
    again = split(documents_of(count), options)[1]
    assert again is not None
    assert again.begins.tolist() == evaluation.begins.tolist()


def test_the_last_documents_can_be_kept() -> None:
    training, evaluation = split(documents_of(10), DataOptions(evaluation_documents=3))
    assert evaluation is not None
    assert evaluation.begins.tolist() == [70, 80, 90]
    assert len(training) == 7
    with pytest.raises(UserError, match="found 10 of 10 documents; allowed: at most 9"):
        split(documents_of(10), DataOptions(evaluation_documents=10))


def test_of_a_single_text_the_end_is_kept() -> None:
    training, evaluation = split(documents_of(1), DataOptions(evaluation_fraction=0.3))
    assert evaluation is not None
    assert (training.begins[0], training.ends[0], evaluation.begins[0], evaluation.ends[0]) == (0, 7, 7, 10)
    with pytest.raises(UserError, match="found 1 of 1 documents"):
        split(documents_of(1, whole=True), DataOptions(evaluation_fraction=0.3))


def test_a_file_of_its_own_is_evaluated_in_its_order(opened: Callable[..., Any], jsonl: Folder) -> None:
    corpus, evaluation, notes = opened(jsonl(BOTTOM), evaluation_data=str(jsonl([{"text": "one"}, {"text": "two"}], "other.jsonl")))
    (batch,) = evaluation.batches()
    assert batch.documents[0].tolist()[:2] == [0, 0]
    assert int((batch.labels != IGNORED).sum()) == evaluation.tokens - 2
    (note,) = (note for note in notes if note.startswith("evaluation: "))
    assert note.startswith(f"evaluation: 2 documents, {evaluation.tokens} tokens in 1 row of 48; packing documents, ")
    assert isinstance(corpus, Corpus)


def test_a_split_of_its_own_is_evaluated(opened: Callable[..., Any], jsonl: Folder, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for name, text in (("train", "hello"), ("test", "one"), ("dev", "two words")):
        jsonl([{"text": text}] * 50, f"rows/{name}.jsonl")
    folder = tmp_path / "rows"

    corpus, evaluation, notes = opened(folder)
    assert evaluation is None
    assert notes[0] == f"data {folder}: jsonl, 1 file, split train; not read: split validation (1 file), split test (1 file)"
    corpus, evaluation, notes = opened(folder, evaluation_data=str(folder))
    assert f"data {folder}: jsonl, 1 file, split validation; not read: split train (1 file), split test (1 file)" in notes
    assert corpus.tokens != evaluation.tokens
    assert not any("warning" in note for note in notes)
    assert opened(folder, evaluation_split="validation")[1].digest == evaluation.digest
    assert opened(folder, evaluation_split="test")[1].digest not in (corpus.digest, evaluation.digest)
    assert opened(folder, split="test")[0].digest == opened(folder, evaluation_split="test")[1].digest
    with pytest.raises(UserError, match="rows: split: found 'other'; allowed: train, validation, test"):
        opened(folder, evaluation_split="other")


def test_rows_that_are_trained_and_evaluated_on_are_said(opened: Callable[..., Any], jsonl: Folder) -> None:
    path = jsonl(BOTTOM)
    assert any(
        note.startswith("warning: 1 file of the evaluation data is trained on: its loss says nothing") for note in opened(path, evaluation_data=str(path))[2]
    )
    copy = jsonl(BOTTOM, "copy.jsonl")
    assert any(note.startswith("warning: the evaluation data has the same rows as") for note in opened(path, evaluation_data=str(copy))[2])
    other = jsonl(BOTTOM[1:], "other.jsonl")
    assert not any(note.startswith("warning") for note in opened(path, evaluation_data=str(other))[2])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"evaluation_fraction": 0.1, "evaluation_split": "test"}, "data: evaluation: found more than one of"),
        ({"packing": "tight"}, "data: packing: found 'tight'; allowed: '', 'documents', 'plain', 'none'"),
        ({"loss": "none"}, "data: loss: found 'none'; allowed: 'assistant', 'last', 'all'"),
        ({"columns": "csv"}, "data: columns: found 'csv'; allowed: 'auto', 'text', "),
        ({"evaluation_fraction": 1.0}, "data: evaluation_fraction: found 1.0; allowed: `float` < 1.0"),
        ({"evaluation_fraction": float("nan")}, "data: evaluation_fraction: found nan; allowed: `float`"),
        ({"evaluation_documents": -1}, "data: evaluation_documents: found -1; allowed: `int` >= 0"),
        ({"evaluation_fraction": 0.1, "evaluation_data": "x"}, "data: evaluation: found more than one of a fraction, documents and a file or split"),
    ],
)
def test_options_that_cannot_be_are_one_line(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        convert(changes, DataOptions, "data")


def test_memory_does_not_grow_with_the_text(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Tokens stay in the file: the array is a map of it."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in BOTTOM))
    corpus, _, _ = opened(path)
    assert isinstance(corpus._documents.tokens, np.memmap)
