"""Columns: which layout a row's columns are, what is taken from them, and why a row cannot be used."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.runtime.data.columns import LAYOUTS, Layout, Pair, Unusable, alpaca_text, extract, recognise, unknown_columns

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def layout(row: dict[str, Any]) -> Layout:
    found = recognise(row.keys())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [
        ({"text": "t", "id": 3}, "text", "t"),
        ({"prompt": "p", "completion": "c"}, "prompt/completion", Pair("p", "c")),
        ({"messages": CHAT, "prompt": "p", "prompt_id": "x"}, "messages", CHAT),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": None}]}, "sharegpt", CHAT),
        ({"conversation": [{"from": "user", "value": "q"}, {"role": "assistant", "content": "a"}]}, "sharegpt", CHAT),
        ({"conversations": [{"from": "gpt", "value": "a"}], "system": "s"}, "sharegpt", [{"role": "system", "content": "s"}, CHAT[1]]),
        ({"instruction": "q", "output": "a", "input": "", "text": "all"}, "alpaca", CHAT),
        ({"instruction": "i", "output": "a", "input": "q"}, "alpaca", [{"role": "user", "content": "i\n\nq"}, CHAT[1]]),
        ({"instruction": "q", "output": "a", "system": "s", "input": None}, "alpaca", [{"role": "system", "content": "s"}, *CHAT]),
        ({"messages": [CHAT[0], {**CHAT[1], "thinking": "hm", "name": None}]}, "messages", [CHAT[0], {**CHAT[1], "thinking": "hm"}]),
    ],
)
def test_rows_are_recognised_and_taken_from(row: dict[str, Any], name: str, value: object) -> None:
    assert layout(row).name == name
    assert extract(row, layout(row)) == value


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": 3}, "`text` is not a string"),
        ({"text": None}, "no `text`"),
        ({"prompt": "p", "completion": ""}, "`completion` is empty"),
        ({"prompt": ["p"], "completion": "c"}, "`prompt` is not a string"),
        ({"messages": "hello"}, "`messages` is not a list of messages"),
        ({"messages": []}, "`messages` is not a list of messages"),
        ({"messages": ["hello"]}, "message 1 of `messages` is not an object"),
        ({"messages": CHAT[:1]}, "no assistant turn in `messages`"),
        ({"messages": [CHAT[0], {"role": "bot", "content": "a"}]}, "message 2 of `messages` has the unknown role 'bot'; known: system, developer, user, "),
        ({"messages": [{"content": "a"}]}, "message 1 of `messages` has no `role`; known: "),
        ({"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "text"}]}]}, "message 2 of `messages`: `content` is not a string"),
        ({"messages": [CHAT[0], {"role": "assistant"}]}, "message 2 of `messages`: `content` is not a string"),
        ({"conversations": [{"from": "function_call", "value": "a"}]}, "message 1 of `conversations` has the unknown from 'function_call'; known: "),
        ({"conversations": [{"from": "gpt", "value": 3}]}, "message 1 of `conversations`: `value` is not a string"),
        ({"instruction": "", "output": "a"}, "no `instruction`"),
        ({"instruction": "q", "output": ""}, "`output` is empty"),
        ({"instruction": "q", "output": "a", "input": 3}, "`input` is not a string"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as error:
        extract(row, layout(row))
    assert str(error.value).startswith(reason)


def test_a_row_without_the_column_that_others_have_says_so() -> None:
    with pytest.raises(Unusable, match="no `completion`"):
        extract({"prompt": "p"}, next(layout for layout in LAYOUTS if layout.name == "prompt/completion"))


def test_unknown_columns_are_named_with_those_that_are_known() -> None:
    assert recognise(["question", "answer"]) is None
    assert recognise(["messages", "text"], "text") == layout({"text": ""})
    assert recognise(["messages"], "text") is None
    assert str(unknown_columns("data rows.jsonl", {"question", "answer"}, "auto")) == (
        "data rows.jsonl: columns: found answer, question; allowed: messages: messages; sharegpt: conversations; sharegpt: conversation; "
        "prompt/completion: prompt + completion; alpaca: instruction + output; text: text; fix: rename the columns"
    )


def test_alpaca_without_a_chat_template_has_headings() -> None:
    row = {"instruction": "i", "input": "q", "output": "a", "system": "s"}
    conversation = extract(row, layout(row))
    assert isinstance(conversation, list)
    assert alpaca_text(conversation) == Pair("s\n\n### Instruction:\ni\n\nq\n\n### Response:\n", "a")
