"""Tests of remarks and preview: a run begins with remarks on unexpected data.

It also shows the first document.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatrain.runtime.data.documents import Documents
from megatrain.runtime.data.opening import open_data
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.data.preview import preview
from megatrain.runtime.data.tokens.tokenize import load_tokenizer
from megatrain.simulator.model.workload import Workload

Folder = Callable[..., Path]
CHAT = {
    "messages": [
        {"role": "user", "content": "hello\nyou"},
        {"role": "assistant", "content": "world"},
    ]
}
STOP = "does not learn to stop"
TURNS = "only assistant turns have loss"
DATE = "the chat template writes today's date"
TRUNCATED = "documents longer than a row are cut at their end"
CONTINUED = "a text that does not fit into the rest of its row"
FILE = "a text file is one document"
KINDS = "only one kind of files in the folder is read"
FRACTION = "the fraction kept for evaluation counts documents"
ALL = (STOP, TURNS, DATE, TRUNCATED, CONTINUED, FILE, KINDS, FRACTION)


@pytest.fixture
def said(tmp_path: Path) -> Callable[..., list[str]]:
    def make(data: Path, folder: Path, **changes: Any) -> list[str]:
        notes: list[str] = []
        options = DataOptions(
            **{
                "data": str(data),
                "cache": str(tmp_path / "cache"),
                "packing": "documents",
                **changes,
            }
        )
        open_data(options, Workload(batch=1, sequence=64), folder, 400, notes.append)
        return notes

    return make


def remarks(notes: list[str]) -> set[str]:
    return {text for text in ALL for note in notes if text in note}


def copy_with(folder: Path, to: Path, template: Callable[[str], str]) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    (to / "chat_template.jinja").write_text(template((folder / "chat_template.jinja").read_text()))
    return to


def test_a_run_names_the_messages_that_its_chat_template_does_not_write_also_from_the_cache(
    said: Callable[..., list[str]], jsonl: Folder, tokenizer_folder: Folder, tmp_path: Path
) -> None:
    folder = copy_with(
        tokenizer_folder("marked"),
        tmp_path / "no_developer",
        lambda text: text.replace(
            "for m in messages", "for m in messages if m.role != 'developer'"
        ),
    )
    developed = {"messages": [{"role": "developer", "content": "one"}, *CHAT["messages"]]}
    rows = jsonl([CHAT, *[developed] * 3])
    for _ in range(2):
        notes = "\n".join(said(rows, folder))
        assert notes.count("does not write") == 1
        assert "the chat template does not write the developer message of 3 conversations" in notes


def test_each_remark_is_made_where_it_applies(
    said: Callable[..., list[str]], jsonl: Folder, tokenizer_folder: Folder, tmp_path: Path
) -> None:
    chat = jsonl([CHAT] * 20)
    assert remarks(said(chat, tokenizer_folder("marked"))) == {TURNS}
    assert remarks(said(chat, tokenizer_folder("marked"), evaluation_fraction=0.5)) == {
        TURNS,
        FRACTION,
    }
    long = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "one " * 90}]}
    assert remarks(said(jsonl([CHAT, long], "long.jsonl"), tokenizer_folder("marked"))) == {
        TURNS,
        TRUNCATED,
    }
    dated = copy_with(
        tokenizer_folder("marked"),
        tmp_path / "dated",
        lambda text: "{{ strftime_now('%Y') }}" + text,
    )
    assert remarks(said(chat, dated)) == {TURNS, DATE}
    unstopped = copy_with(
        tokenizer_folder("marked"),
        tmp_path / "unstopped",
        lambda text: text.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}"),
    )
    assert remarks(said(chat, unstopped)) == {TURNS, STOP}
    # The template ends with a line end, which has loss as well here.
    assert remarks(said(chat, tokenizer_folder("marked"), loss="all")) == set()

    pair = jsonl([{"prompt": "hello", "completion": "world"}] * 90, "pairs.jsonl")
    assert remarks(said(pair, tokenizer_folder("marked"))) == set()
    turns = {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]}
    assert remarks(said(jsonl([turns] * 20, "turns.jsonl"), tokenizer_folder("marked"))) == {TURNS}

    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text("hello world " * 30)
    assert remarks(said(texts, tokenizer_folder())) == {FILE, CONTINUED}
    (texts / "about.csv").write_text("text\nabout")
    assert remarks(said(texts, tokenizer_folder())) == {FILE, CONTINUED, KINDS}
    assert (
        remarks(
            said(
                jsonl([{"text": "hello world"}] * 90, "text.jsonl"),
                tokenizer_folder(),
                packing="none",
            )
        )
        == set()
    )


def test_the_first_document_is_shown_with_what_has_loss(
    said: Callable[..., list[str]], jsonl: Folder, tokenizer_folder: Folder
) -> None:
    shown = said(jsonl([CHAT, *[{"messages": []}] * 3, CHAT]), tokenizer_folder("marked"))[-3:]
    assert shown[0].startswith("  the first document, ")
    assert shown[0].endswith(" tokens, loss on text between « and »:")
    assert shown[1:] == [
        "      <|im_start|>user\\nhello\\nyou<|im_end|>\\n<|im_start|>assistant\\n«world<",
        "      |im_end|>»\\n",
    ]

    text = said(jsonl([{"text": "hello\x1b[2J\nworld"}] * 20), tokenizer_folder())[-2:]
    assert text == [
        f"  the first document, {_count(text[0])} tokens, loss on every token:",
        "      hello\\x1b[2J\\nworld<|end|>",
    ]


def test_a_later_document_is_named_by_its_number(tokenizer_folder: Folder) -> None:
    tokenizer = load_tokenizer(tokenizer_folder())
    assert tokenizer is not None
    ids = tokenizer("hello world")["input_ids"]
    begins = np.arange(3) * len(ids)
    documents = Documents(tokens=np.array(3 * ids), begins=begins, ends=begins + len(ids))
    first, text = preview(documents, tokenizer, number=1)
    assert first == f"document 2, {len(ids)} tokens, loss on every token:"
    assert "hello world" in text


def _count(line: str) -> str:
    return line.split(", ")[1].split(maxsplit=1)[0]


def test_a_long_document_is_shown_only_around_the_beginning_of_loss(
    said: Callable[..., list[str]], jsonl: Folder, tokenizer_folder: Folder
) -> None:
    rows = [{"prompt": "the words " * 60, "completion": "hello world " * 5000}] * 80
    notes = said(jsonl(rows), tokenizer_folder(), packing="plain")
    shown = [note.removeprefix("      ") for note in notes if note.startswith("      ")]
    assert 1 < len(shown) <= 7
    assert max(map(len, shown)) <= 74, "a line of 80 columns with its indentation"
    text = "".join(shown)
    assert text.count(" [...] ") == 3
    assert text.startswith("the words the words")
    assert "«" in text
