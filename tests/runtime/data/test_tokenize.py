"""Tests of tokenization: ids and targets of every layout, by markers and by prefixes.

Errors name what a template or a tokenizer cannot do.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megatrain.runtime.data.chat.targets import Chat
from megatrain.runtime.data.columns import Conversation, Layout, recognize
from megatrain.runtime.data.documents import TARGET
from megatrain.runtime.data.options import Loss
from megatrain.runtime.data.rows import formats
from megatrain.runtime.data.rows.formats import BadRow, TextRow, rows
from megatrain.runtime.data.rows.sources import find
from megatrain.runtime.data.tokens.tokenize import Encoder, load_tokenizer, tokenizer_digest
from megatrain.simulator.base.errors import UserError

Folder = Callable[..., Path]
HERE = Path("rows.jsonl")
TURNS = [
    {"role": "user", "content": "hello  world"},
    {"role": "assistant", "content": "you are 🙂 the one"},
    {"role": "user", "content": "other ö"},
    {"role": "assistant", "content": "<|im_end|> the\nwords "},
]


def encoder(folder: Path, row: dict[str, Any], loss: Loss = "assistant") -> Encoder:
    tokenizer, layout = load_tokenizer(folder), recognize(row.keys())
    assert tokenizer is not None
    assert layout is not None
    return Encoder(tokenizer, layout, loss, "the model")


def encoded(folder: Path, rows: list[dict[str, Any]], loss: Loss = "assistant") -> list[Any]:
    return list(
        encoder(folder, rows[0], loss).encode(
            TextRow(HERE, number, row) for number, row in enumerate(rows, 1)
        )
    )


def parts(folder: Path, ids: np.ndarray) -> list[tuple[bool, str]]:
    """Returns the text of each run, and whether it is a run of targets."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    targets = ids >= TARGET
    borders = [0, *(np.flatnonzero(targets[1:] != targets[:-1]) + 1).tolist(), len(ids)]
    return [
        (bool(targets[a]), str(tokenizer.decode((ids[a:b] & np.uint32(TARGET - 1)).tolist())))
        for a, b in itertools.pairwise(borders)
    ]


def test_text_ends_with_the_end_of_sequence_token(tokenizer_folder: Folder) -> None:
    (ids, closes), nothing, (second, _) = encoded(
        tokenizer_folder(), [{"text": "hello"}, {"text": ""}, {"text": "world<|end|>"}]
    )
    assert closes
    assert parts(tokenizer_folder(), ids) == [(False, "hello<|end|>")]
    assert nothing is None
    assert second.tolist().count(0) == 1


def test_text_begins_as_the_tokenizer_begins_a_text(tokenizer_folder: Folder) -> None:
    folder = tokenizer_folder(None, eos_token="<|end|>", bos_token="<s>")
    ((ids, _),) = encoded(folder, [{"text": "hello"}])
    assert ids[0] != 3  # this tokenizer has a bos token but does not begin a text with it

    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 3)]
    )
    ((ids, _),) = list(
        Encoder(tokenizer, Layout("text", ("text",)), "assistant", "").encode(
            [TextRow(HERE, 1, {"text": "hello"})]
        )
    )
    assert (ids[0], ids[-1]) == (3, 0)
    assert ids.tolist().count(3) == 1


def test_pieces_of_a_text_are_one_document(tokenizer_folder: Folder) -> None:
    layout = Layout("text", ())
    tokenizer = load_tokenizer(tokenizer_folder())
    assert tokenizer is not None
    rows = [
        TextRow(HERE, 1, b"hello\n", closes=False),
        TextRow(HERE, 2, b"world\n", closes=False),
        TextRow(HERE, 3, b""),
        TextRow(HERE, 1, b""),
    ]
    *pieces, nothing = Encoder(tokenizer, layout, "assistant", "").encode(rows)
    assert nothing is None
    found = [piece for piece in pieces if isinstance(piece, tuple)]
    assert [closes for _, closes in found] == [True]
    ((whole, _),) = Encoder(tokenizer, layout, "assistant", "").encode(
        [TextRow(HERE, 1, b"hello\nworld\n")]
    )  # type: ignore[misc]
    assert np.concatenate([ids for ids, _ in found]).tolist() == whole.tolist()


def test_a_long_text_file_has_the_ids_of_its_whole_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long text file has the ids of the whole text.

    Metaspace adds a blank before a text, but must not add it before later pieces.
    """
    monkeypatch.setattr(formats, "_PIECE_BYTES", 1000)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.train_from_iterator(
        ["hello the world\n"],
        trainers.BpeTrainer(vocab_size=60, special_tokens=["</s>"], show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    text = "hello the world\n" * 3 * 2**14
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": text}))
    for name in ("text.txt", "rows.jsonl"):
        found = list(
            Encoder(tokenizer, Layout("text", ("text",)), "assistant", "").encode(
                rows(find(tmp_path / name))
            )
        )
        assert len(found) > 1
        assert np.concatenate([ids for ids, _ in found]).tolist() == [
            *tokenizer(text)["input_ids"],
            0,
        ]  # type: ignore[misc]


def test_a_completion_has_loss_and_its_prompt_none(tokenizer_folder: Folder) -> None:
    rows = [
        {"prompt": "hello ", "completion": "world"},
        {"prompt": "hel", "completion": "lo"},
        {"prompt": "", "completion": "one"},
    ]
    one, across, alone = (ids for ids, _ in encoded(tokenizer_folder(), rows))
    assert parts(tokenizer_folder(), one) == [
        (False, "hello"),
        (True, " world<|end|>"),
    ]  # the token of the word includes the blank
    assert parts(tokenizer_folder(), across)[-1] == (
        True,
        "hello<|end|>" if len(across) == 2 else "lo<|end|>",
    )
    assert "".join(text for _, text in parts(tokenizer_folder(), across)) == "hello<|end|>"
    assert parts(tokenizer_folder(), alone) == [(True, "one<|end|>")]


@pytest.mark.parametrize("template", ["marked", "unmarked"])
def test_every_assistant_turn_has_loss_up_to_its_last_token(
    tokenizer_folder: Folder, template: str
) -> None:
    folder = tokenizer_folder(template)
    ((ids, closes),) = encoded(folder, [{"messages": TURNS}])
    assert closes
    assert parts(folder, ids) == [
        (False, "<|im_start|>user\nhello  world<|im_end|>\n<|im_start|>assistant\n"),
        (True, "you are 🙂 the one<|im_end|>"),
        (False, "\n<|im_start|>user\nother ö<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<|im_end|> the\nwords <|im_end|>"),
        (False, "\n"),
    ]
    ((last, _),) = encoded(folder, [{"messages": TURNS}], "last")
    assert parts(folder, last)[1] == (True, "<|im_end|> the\nwords <|im_end|>")
    assert len(parts(folder, last)) == 3
    assert ((ids ^ last) & np.uint32(TARGET - 1) == 0).all()


def test_markers_and_prefixes_agree_in_a_batch_of_many(tokenizer_folder: Folder) -> None:
    rows = [
        {"messages": TURNS[: 2 + 2 * (number % 2)] + TURNS[: 2 * (number % 3)]}
        for number in range(30)
    ]
    marked, unmarked = (
        encoded(tokenizer_folder(template), rows) for template in ("marked", "unmarked")
    )
    for (left, _), (right, _) in zip(marked, unmarked, strict=True):
        assert left.tolist() == right.tolist()


def test_a_thought_in_the_last_turn_alone_does_not_hide_the_others(
    tokenizer_folder: Folder,
) -> None:
    folder = tokenizer_folder("thought")
    ((ids, _),) = encoded(folder, [{"messages": TURNS}])
    assert [text for target, text in parts(folder, ids) if target] == [
        "you are 🙂 the one<|im_end|>",
        "<think>\n\n</think>\n\n<|im_end|> the\nwords <|im_end|>",
    ]


@pytest.mark.parametrize("marked", [False, True])
def test_an_error_of_a_template_in_one_row_concerns_that_row_alone(
    tokenizer_folder: Folder, marked: bool
) -> None:
    folder = tokenizer_folder("strict")
    rows = [{"messages": TURNS}, {"messages": TURNS[1:]}, {"messages": TURNS[:2]}]
    made = encoder(folder, rows[0])
    if marked:
        made._tokenizer.chat_template = made._tokenizer.get_chat_template().replace(
            "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
        )
        made = Encoder(made._tokenizer, made.layout, "assistant", "")
    good, bad, other = made.encode(TextRow(HERE, number, row) for number, row in enumerate(rows, 1))
    assert bad == BadRow(HERE, 2, "the chat template reports: roles must alternate")
    assert isinstance(good, tuple)
    assert isinstance(other, tuple)


def test_alpaca_goes_through_the_chat_template_or_gets_headings(tokenizer_folder: Folder) -> None:
    row = {"instruction": "hello", "input": "world", "output": "one"}
    ((ids, _),) = encoded(tokenizer_folder("marked"), [row])
    assert (True, "one<|im_end|>") in parts(tokenizer_folder("marked"), ids)
    ((ids, _),) = encoded(tokenizer_folder(), [row])
    assert parts(tokenizer_folder(), ids) == [
        (False, "### Instruction:\nhello\n\nworld\n\n### Response:\n"),
        (True, "one<|end|>"),
    ]
    assert "headings" in encoder(tokenizer_folder(), row).describe()


def test_messages_without_a_chat_template_are_refused(tokenizer_folder: Folder) -> None:
    with pytest.raises(
        UserError,
        match=(
            r"tokenizer the model: found no chat template; allowed: one, for messages rows; fix:"
            r" name a template"
        ),
    ):
        encoded(tokenizer_folder(), [{"messages": TURNS}])


def test_several_templates_without_a_default_are_refused(tokenizer_folder: Folder) -> None:
    tokenizer = load_tokenizer(tokenizer_folder("marked"))
    assert tokenizer is not None
    tokenizer.chat_template = {"tool_use": "x", "rag": "y"}
    with pytest.raises(
        UserError,
        match=(
            r"chat template of the model: found .*; allowed: a default template; fix: name one of"
            r" them"
        ),
    ):
        Encoder(tokenizer, Layout("messages", ("messages",)), "assistant", "the model")


@pytest.mark.parametrize(
    ("template", "row", "loss", "words"),
    [
        (None, {"text": "a"}, "all", "text, loss on every token"),
        (
            None,
            {"prompt": "a", "completion": "b"},
            "assistant",
            "prompt/completion, loss on the completion",
        ),
        (
            "marked",
            {"prompt": "a", "completion": "b"},
            "all",
            "prompt/completion, loss on every token",
        ),
        (
            None,
            {"instruction": "a", "output": "b"},
            "last",
            (
                "alpaca, with headings because the tokenizer has no chat template, loss on the "
                "output"
            ),
        ),
        (
            None,
            {"instruction": "a", "output": "b"},
            "all",
            "alpaca, with headings because the tokenizer has no chat template, loss on every token",
        ),
        (
            "marked",
            {"messages": TURNS},
            "last",
            (
                "messages, chat template of the tokenizer, loss on the last assistant turn, found"
                " by its generation markers"
            ),
        ),
        (
            "unmarked",
            {"messages": TURNS},
            "assistant",
            (
                "messages, chat template of the tokenizer, loss on all assistant turns, found by"
                " its loop over messages"
            ),
        ),
        (
            "unmarked",
            {"messages": TURNS},
            "all",
            "messages, chat template of the tokenizer, loss on every token",
        ),
    ],
)
def test_the_summary_says_which_tokens_have_loss(
    tokenizer_folder: Folder, template: str | None, row: dict[str, Any], loss: Loss, words: str
) -> None:
    assert encoder(tokenizer_folder(template), row, loss).describe() == words


def test_bad_rows_stay_in_their_place(tokenizer_folder: Folder) -> None:
    folder = tokenizer_folder("marked")
    rows = [
        TextRow(HERE, 1, {"messages": TURNS}),
        BadRow(HERE, 2, "invalid JSON"),
        TextRow(HERE, 3, {"messages": []}),
        TextRow(HERE, 4, {"messages": TURNS}),
    ]
    found = list(encoder(folder, {"messages": TURNS}).encode(rows))
    assert [str(row) for row in found[1:3]] == [
        "rows.jsonl:2: invalid JSON",
        "rows.jsonl:3: `messages` is not a list of messages",
    ]
    assert found[0][0].tolist() == found[3][0].tolist()  # type: ignore[index]


def test_a_missing_tokenizer_is_none_and_a_broken_one_a_one_line_error(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(
        UserError, match=r"tokenizer .*: found .*; allowed: a tokenizer that transformers can load"
    ):
        load_tokenizer(tmp_path)


def test_the_digest_covers_the_files_of_the_tokenizer(
    tmp_path: Path, tokenizer_folder: Folder
) -> None:
    for file in tokenizer_folder("marked").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert tokenizer_digest(tmp_path) == tokenizer_digest(tokenizer_folder("marked"))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(tmp_path) == tokenizer_digest(tokenizer_folder("marked"))
    (tmp_path / "chat_template.jinja").write_text("other")
    assert tokenizer_digest(tmp_path) != tokenizer_digest(tokenizer_folder("marked"))


def test_code_that_comes_with_a_tokenizer_is_not_run(
    tokenizer_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that comes with a tokenizer is only run if the options allow it.

    Answering yes to a question on the terminal does not allow it.
    """
    folder = tmp_path / "model"
    shutil.copytree(tokenizer_folder(), folder)
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    (folder / "own.py").write_text("raise SystemExit('run')\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(
        UserError,
        match=(
            r"tokenizer .*model.*; fix: read that code, and pass --trust-remote-code if it may run"
        ),
    ):
        load_tokenizer(folder)
    with pytest.raises(SystemExit, match="run"):
        load_tokenizer(folder, trust_remote_code=True)


def test_a_newline_after_a_token_special_in_tokenizer_json_alone_has_no_loss(
    tokenizer_folder: Callable[..., Path],
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder("unmarked"))
    assert tokenizer is not None
    tokenizer._special_tokens_map.pop("extra_special_tokens", None)
    tokenizer.extra_special_tokens = []
    assert "<|im_end|>" not in tokenizer.all_special_tokens
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (found,) = Chat(tokenizer, "assistant", "here").encode([Conversation(messages=messages)])
    assert not isinstance(found, str)
    targets = [int(token) & (TARGET - 1) for token in found if int(token) >= TARGET]
    assert tokenizer.decode(targets) == "b<|im_end|>"


def test_beginning_and_end_tokens_are_never_written_twice(tokenizer_folder: Folder) -> None:
    tokenizer = load_tokenizer(tokenizer_folder(None, eos_token="<|end|>", bos_token="<s>"))
    assert tokenizer is not None
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 3)]
    )
    for row in (
        {"text": "<s>hello<|end|>"},
        {"prompt": "<s>hello", "completion": " world<|end|>"},
        {"prompt": "hello", "completion": " world"},
    ):
        layout = recognize(row.keys())
        assert layout is not None
        encoded: Any = Encoder(tokenizer, layout, "assistant", "").encode([TextRow(HERE, 1, row)])
        ((ids, _),) = encoded
        plain = (ids & np.uint32(TARGET - 1)).tolist()
        assert (plain[0], plain[-1], plain.count(3), plain.count(0)) == (3, 0, 1, 1)
        if layout.name != "text":
            assert tokenizer.decode(plain[: (ids >= TARGET).tolist().index(True)]) == "<s>hello"


def test_messages_may_be_a_prompt_and_a_completion(tokenizer_folder: Folder) -> None:
    folder = tokenizer_folder("unmarked")
    rows = [
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"prompt": "hello", "completion": " world"},
    ]
    messages, text = (ids for ids, _ in encoded(folder, rows))
    assert [part for target, part in parts(folder, messages) if target] == [
        "<|im_end|> the\nwords <|im_end|>"
    ]
    assert parts(folder, text) == [(False, "hello"), (True, " world<|end|>")]
    (whole,) = (ids for ids, _ in encoded(folder, rows[1:], "all"))
    assert parts(folder, whole) == [(True, "hello world<|end|>")]
    (without,) = encoded(tokenizer_folder(), rows[:1])
    assert without == BadRow(HERE, 1, "messages, and the tokenizer has no chat template")


def test_columns_that_are_not_read_are_named(tokenizer_folder: Folder) -> None:
    row = {"messages": TURNS, "functions": [], "images": [], "id": 3}
    assert (
        encoder(tokenizer_folder("marked"), row)
        .describe()
        .endswith("; columns that are not read: functions, images")
    )


def test_a_text_longer_than_the_model_s_rows_is_no_warning(
    tokenizer_folder: Folder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut later, when rows are packed."""
    where = tokenizer_folder()
    file = where / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_max_length": 4}))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")  # other tests may have raised it
    plain = AutoTokenizer.from_pretrained(where)
    for tokenizer, warns in ((plain, True), (load_tokenizer(where), False)):
        assert tokenizer is not None
        caplog.clear()
        assert len(tokenizer("hello world " * 10)["input_ids"]) > 4
        assert bool(caplog.records) == warns
