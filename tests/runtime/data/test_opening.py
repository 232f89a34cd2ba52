"""Tests of open_data, from files to batches: its notes and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from msgspec.structs import replace
from small_rows import BOTTOM, CHAT, WORK, same

from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.rows import csv_rows
from megatrain.runtime.data.tokens import byte_level
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert
from megatrain.simulator.model.workload import Workload

Folder = Callable[..., Path]


def test_a_note_gives_what_was_found_and_counted(opened: Callable[..., Any], jsonl: Folder) -> None:
    rows = [{"messages": CHAT}] * 20 + [
        "{",
        {"messages": []},
        {"text": "no"},
        "[]",
        {"messages": [CHAT[0], {"role": "assistant", "content": "one " * 60}]},
    ]
    path = jsonl(rows)
    corpus, evaluation, notes = opened(path)
    assert evaluation is None
    assert corpus.truncated_documents == 1
    text = "\n".join(notes)
    assert f"data {path}: jsonl, 1 file" in text
    assert (
        "recognized: messages, chat template of the tokenizer, loss on all assistant turns, found"
        " by its generation markers" in text
    )
    assert "25 rows, 21 documents, " in text
    assert "tokenized now, and cached" in text
    assert f"4 bad rows left out, the first of each kind: {path}:21: invalid JSON: " in text
    assert (
        f"; {path}:22: `messages` is not a list of messages; {path}:23: `messages` is not a list of"
        f" messages; the row has the columns of text; {path}:24: a list, not an object" in text
    )
    assert "training: 21 documents, " in text
    assert "% padding; 1 document truncated by " in text


def test_the_summary_counts_rows_documents_and_tokens_with_loss(
    opened: Callable[..., Any], jsonl: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers agree with the batches of an epoch and with the data files."""
    monkeypatch.setattr("megatrain.runtime.data.documents._BLOCK", 7)
    long = [CHAT[0], {"role": "assistant", "content": "one " * 60}]
    never = [{"role": "user", "content": "one " * 60}, CHAT[1]]
    rows = [{"messages": messages} for messages in (*[CHAT] * 20, long, never)]
    path = jsonl([*rows, "{"])
    summaries: dict[str, Any] = {}
    corpus, held_out, _ = opened(path, evaluation_documents=2, on_summary=summaries.update)
    training, evaluation = summaries["training"], summaries["evaluation"]
    assert (training.rows, training.unusable, training.empty) == (23, 1, 0)
    assert evaluation.rows is None, "those rows are counted in the training data"
    assert (evaluation.documents, evaluation.left_out, evaluation.cut) == (1, 1, 2)
    assert (training.documents, training.left_out, training.cut) == (20, 0, 0)
    for found, data in ((training, corpus), (evaluation, held_out)):
        labels = np.concatenate([batch.labels.numpy().ravel() for batch in data.batches()])
        assert found.targets == (labels >= 0).sum()
        assert 0 < found.targets < found.tokens == data.tokens
        assert (found.packed_rows, found.padding) == (data.rows, data.padding)


def test_the_digest_of_chosen_documents_tells_other_choices_apart(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    """The seed, the sequence, the packing and the folder of the data do not change it."""
    rows = jsonl([{"text": f"{word} one two three"} for word in "abcdefghijklmnopqrst"])
    text, copy = tmp_path / "one.txt", tmp_path / "copy.txt"
    for file in (text, copy):
        file.write_text("one two three " * 100)

    def summaries(data: Path, **changes: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        opened(data, on_summary=found.update, **changes)
        return found

    shorter = replace(WORK, sequence=WORK.sequence // 2)
    for first, second, alike in (
        (summaries(text, evaluation_fraction=0.1), summaries(text, evaluation_fraction=0.3), False),
        (summaries(rows, evaluation_fraction=0.1), summaries(rows, evaluation_documents=2), False),
        (
            summaries(text, evaluation_fraction=0.1),
            summaries(copy, evaluation_fraction=0.1, work=shorter, seed=1, packing="plain"),
            True,
        ),
    ):
        for part in ("training", "evaluation"):
            assert (first[part].chosen == second[part].chosen) == alike
            assert first[part].digest == second[part].digest, "resuming compares this one"


def test_another_separator_is_noted_also_with_tokens_from_the_cache(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of an earlier version, which knew no other separator, are not used."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.csv").write_text("text\n" + "one two\n" * 20)
    (folder / "b.csv").write_text("text;note\n" + "one, two;three\n" * 20)
    with monkeypatch.context() as patch:
        patch.setattr(csv_rows, "SEPARATORS", (",",))
        corpus, _, notes = opened(folder)
        assert corpus.count == 20
        assert "separated" not in "".join(notes)
    for state in ("tokenized now, and cached", "tokens from the cache"):
        corpus, _, notes = opened(folder)
        assert corpus.count == 40
        assert "recognized: text, loss on every token; columns separated by ';'" in notes
        assert state in notes[2]


def test_bad_rows_are_counted_by_what_is_wrong_with_them(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    wrong = [
        {"messages": [CHAT[0], {"role": name, "content": "a"}]} for name in ("bot", "robot")
    ] + [{"messages": CHAT[:1]}] * 3
    rows = (
        [{"messages": CHAT}] * 30
        + wrong
        + [{"messages": [{"role": "user", "content": number}, CHAT[1]]} for number in range(4)]
    )
    path = jsonl(rows)
    for _ in range(2):  # the second time from the cache
        note = opened(path)[2][3]
        assert note.startswith(
            f"9 bad rows left out, the first of each kind: {path}:31: message 2 of `messages` has"
            " the unknown role 'bot'; known: "
        )
        assert (
            f" (and 1 more like it); {path}:33: no assistant turn in `messages` (and 2 more like"
            f" it); {path}:36: message 1 of `messages`: " in note
        )
        assert note.endswith("`content` is not a string (and 3 more like it)")


def test_rows_with_unknown_turns_are_left_out_and_do_not_stop_the_run(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    called = {**CHAT[1], "tool_calls": [{"function": {"name": "weather"}}]}
    path = jsonl([*[{"messages": CHAT}] * 20, {"messages": [CHAT[0], called]}])
    _, _, notes = opened(path, template="unmarked")
    assert notes[3].endswith(
        f"{path}:21: the chat template writes no tool calls: it does not mention `tool_calls`"
    )
    with pytest.raises(
        UserError, match=r"bad row .*:21: found the chat template writes no tool calls"
    ):
        opened(path, template="unmarked", strict=True)
    with pytest.raises(
        UserError,
        match=(
            r"found no row that can be used, the first .*:1: the chat template writes no tool"
            r" calls: it does not mention `tool_calls`"
        ),
    ):
        opened(jsonl([{"messages": [CHAT[0], called]}]), template="unmarked")


def test_a_template_of_the_user_replaces_that_of_the_tokenizer(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    path, template = jsonl([{"messages": CHAT}] * 20), tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    counts = set()
    for name in ("unmarked", None):  # whether or not the tokenizer has a template
        corpus, _, notes = opened(path, template=name, chat_template=str(template))
        assert (
            f"recognized: messages, chat template {template}, loss on all assistant turns"
            in notes[1]
        )
        counts.add(corpus.tokens)
    assert len(counts) == 1
    template.write_text("{% for m in messages %}{{ m.content }}!<|end|>{% endfor %}")
    corpus, _, notes = opened(path, chat_template=str(template))
    assert "tokenized now" in notes[2]
    assert {corpus.tokens - 20 * 2} == counts  # each message has another token
    template.write_text("{% for m in messages %}{{ m.content } }{% endfor %}")
    with pytest.raises(
        UserError,
        match=r"chat template .*own\.jinja: found .* \(line 1\); allowed: a Jinja template",
    ):
        opened(path, chat_template=str(template))
    with pytest.raises(UserError, match=r"none\.jinja"):
        opened(path, chat_template=str(tmp_path / "none.jinja"))


def test_strict_stops_at_the_first_bad_row(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"bad row .*rows\.jsonl:21: found `text` is not a string; allowed: rows that can be"
            r" used; fix: correct the row, or run"
        ),
    ):
        opened(jsonl([*BOTTOM[:20], {"text": 3}, *BOTTOM]), strict=True)
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(UserError, match=r"rows\.jsonl:1: found invalid JSON"):
        opened(jsonl(["{"]), strict=True)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "found an empty file; allowed: files with data"),
        (["", ""], "found no rows"),
        ([{"text": ""}], "found no text"),
        (["{"], r"found no row that can be read, the first .*rows\.jsonl:1: invalid JSON"),
        (
            [{"text": 3}, {"text": 4}],
            r"found no row that can be used, the first .*rows\.jsonl:1: `text` is not a string",
        ),
        (
            [{"messages": CHAT[:1]}],
            "the first .*:1: no assistant turn in `messages`; allowed: at least one row without",
        ),
        (
            [{"question": "q", "answer": "a"}, {"id": 3}],
            (
                r"columns: found answer, id, question; allowed: messages \(messages\), or .*"
                r" text.*; fix: rename"
            ),
        ),
        (
            [{"text": "hello"}],
            (
                "found 2 tokens; allowed: at least the 96 of one step; fix: give more text, or a"
                " smaller batch or sequence"
            ),
        ),
    ],
)
def test_nothing_to_train_on_gives_a_one_line_error(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path, rows: list, reason: str
) -> None:
    with pytest.raises(UserError, match=reason) as error:
        opened(jsonl(rows))
    assert "\n" not in str(error.value)
    assert not any(file.name.startswith(".") for file in (tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    ("indent", "found", "fix"),
    [
        (None, "an object whose `data` is an array of objects", "write the array of `data` at the"),
        (1, "no row that can be read, the first ", "correct the data"),
    ],
)
def test_an_array_inside_of_an_object_is_refused_by_name(
    opened: Callable[..., Any], tmp_path: Path, indent: int | None, found: str, fix: str
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": [{"text": "hello"}] * 3}, indent=indent))
    allowed = "one array of objects at the top of the file"
    with pytest.raises(
        UserError, match=rf"json: found {found}.*; allowed: {allowed}.*; fix: {fix}"
    ):
        opened(path)


def test_without_a_tokenizer_text_is_bytes_and_messages_are_refused(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "text.txt").write_text("hello world " * 20)
    corpus, _, notes = opened(
        tmp_path / "text.txt", folder=tmp_path / "model", packing="plain", vocabulary=257
    )
    assert notes[1] == "the model's folder has no tokenizer, so each byte of the text is a token"
    assert not any("left out" in note for note in notes)
    assert corpus.step(1)[0].documents is None
    assert int(corpus.step(1)[0].ids.max()) <= 256
    with pytest.raises(
        UserError,
        match=(
            rf"^tokenizer {tmp_path}/model: found none; allowed: one in the model's folder, for"
            r" jsonl data; fix: copy"
        ),
    ):
        opened(jsonl([{"messages": CHAT}]), folder=tmp_path / "model")


@pytest.mark.parametrize(
    ("sizes", "left_out"), [((900,), False), ((1024,), False), ((1025,), True), ((1024, 1), True)]
)
def test_a_note_names_text_that_is_left_out(
    sizes: tuple[int, ...],
    left_out: bool,
    opened: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(byte_level, "MOST_BYTES", 1024)
    (tmp_path / "model").mkdir()
    (tmp_path / "texts").mkdir()
    for number, size in enumerate(sizes):
        (tmp_path / "texts" / f"{number}.txt").write_text("x" * size)
    _, _, notes = opened(
        tmp_path / "texts", folder=tmp_path / "model", packing="plain", vocabulary=257
    )
    note = "only the first 1.00 KiB of the text are read; the rest is left out"
    assert (note in notes) == left_out


def test_a_vocabulary_smaller_than_an_id_is_refused_from_the_cache_too(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    path = jsonl(BOTTOM)
    for _ in range(2):
        with pytest.raises(
            UserError,
            match=(
                r"model: vocabulary, for data .*: found 200; allowed: >= 2\d\d, the largest token"
                r" id \+ 1"
            ),
        ):
            opened(path, vocabulary=200)
    opened(path)


def test_every_kind_of_file_gives_the_same_batches(
    opened: Callable[..., Any], jsonl: Folder, tmp_path: Path
) -> None:
    (tmp_path / "saved").mkdir()
    table = pyarrow.Table.from_pylist(BOTTOM)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "saved" / "data: arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data: arrow"}]}')
    corpora = [
        opened(path)[0] for path in (jsonl(BOTTOM), tmp_path / "rows.parquet", tmp_path / "saved")
    ]
    assert same(corpora[0].step(3), corpora[1].step(3))
    assert same(corpora[0].step(3), corpora[2].step(3))


def test_rows_with_the_columns_of_another_layout_are_counted(
    opened: Callable[..., Any], jsonl: Folder
) -> None:
    path = jsonl(
        [
            *BOTTOM,
            {"messages": CHAT},
            {"messages": CHAT},
            {"prompt": "a", "completion": "b"},
            {"other": 1},
        ]
    )
    for _ in range(2):  # the second time from the cache
        notes = opened(path)[2]
        assert (
            f"4 bad rows left out, the first of each kind: {path}:51: no `text`; the row has the"
            " columns of messages (and 1 more like it); " in "\n".join(notes)
        )
        assert (
            "2 of the rows left out have the columns of messages, but every row is read with the"
            " layout of the first rows, or with that of --columns" in notes
        )
        assert (
            "1 of the rows left out has the columns of prompt/completion, but every row is read"
            " with the layout of the first rows, or with that of --columns" in notes
        )


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("strict", [False, True])
def test_data_in_another_encoding_is_to_be_converted(
    opened: Callable[..., Any], tmp_path: Path, encoding: str, *, strict: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "zölf"}\n{"text": "zwölf"}\n'.encode(encoding))
    with pytest.raises(UserError, match=r"(not|invalid) UTF-8") as caught:
        opened(path, strict=strict)
    assert caught.value.fix == "convert it to UTF-8"


def test_a_note_on_rows_in_another_encoding_has_the_fix(
    opened: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "hello"}\n' * 99 + b'{"text": "z\xf6lf"}\n{"text": 1}\n')
    line = next(note for note in opened(path)[2] if "left out" in note)
    assert f"{path}:100: invalid UTF-8; " in line
    assert line.endswith("; fix: convert it to UTF-8")


def test_text_files_are_documents(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text("hello world, " * (number % 3 + 1))
    (tmp_path / "texts" / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "texts" / "empty.txt").touch()
    corpus, _, notes = opened(tmp_path / "texts", work=Workload(batch=1, sequence=48))
    assert notes[1] == "recognized: text, loss on every token"
    assert notes[2].startswith("42 rows, 1 without text, 40 documents, ")
    assert "1 bad row left out, the first of each kind: " in notes[3]
    batches = [corpus.step(number)[0] for number in range(1, corpus.rows + 1)]
    assert (
        sum(int(((batch.ids == 0) & (batch.documents >= 0)).sum()) for batch in batches) == 40
    )  # each document has an end


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"evaluation_fraction": 0.1, "evaluation_split": "test"},
            "data: evaluation: found more than one of",
        ),
        (
            {"packing": "tight"},
            "data: packing: found 'tight'; allowed: '', 'documents', 'plain', 'none'",
        ),
        ({"loss": "none"}, "data: loss: found 'none'; allowed: 'assistant', 'last', 'all'"),
        ({"columns": "csv"}, "data: columns: found 'csv'; allowed: 'auto', 'text', "),
        (
            {"evaluation_fraction": 1.0},
            "data: evaluation_fraction: found 1.0; allowed: `float` < 1.0",
        ),
        (
            {"evaluation_fraction": float("nan")},
            "data: evaluation_fraction: found nan; allowed: `float`",
        ),
        ({"evaluation_documents": -1}, "data: evaluation_documents: found -1; allowed: `int` >= 0"),
        (
            {"evaluation_fraction": 0.1, "evaluation_data": "x"},
            "data: evaluation: found more than one of a fraction, a number of documents,",
        ),
    ],
)
def test_invalid_options_give_one_line_errors(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        convert(changes, DataOptions, "data")


def test_memory_does_not_grow_with_the_text(opened: Callable[..., Any], tmp_path: Path) -> None:
    """Tokens stay in their file. The array is a memory map of it."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in BOTTOM))
    corpus, _, _ = opened(path)
    assert isinstance(corpus._documents.tokens, np.memmap)
