"""Tests of columns: the layout of a row, the columns that are read, and rows that are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatrain.runtime.data.columns import (
    LAYOUTS,
    Conversation,
    Layout,
    Pair,
    Unusable,
    alpaca_text,
    extract,
    recognize,
    unknown_columns,
)

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
SYSTEM = {"role": "system", "content": "s"}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
CALLS = [{"type": "function", "function": CALL}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


def chat(*messages: dict[str, Any], **others: Any) -> Conversation:
    return Conversation(messages=list(messages), **others)


def layout(row: dict[str, Any]) -> Layout:
    found = recognize(row.keys())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [
        ({"text": "t", "id": 3}, "text", "t"),
        ({"prompt": "p", "completion": "c"}, "prompt/completion", Pair("p", "c")),
        ({"messages": CHAT, "prompt": "p", "prompt_id": "x"}, "messages", chat(*CHAT)),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a", "weight": None},
                ]
            },
            "sharegpt",
            chat(*CHAT),
        ),
        (
            {
                "conversation": [
                    {"from": "user", "value": "q"},
                    {"role": "assistant", "content": "a"},
                ]
            },
            "sharegpt",
            chat(*CHAT),
        ),
        (
            {"conversations": [{"from": "gpt", "value": "a"}], "system": "s"},
            "sharegpt",
            chat(SYSTEM, CHAT[1], prompt=1),
        ),
        ({"instruction": "q", "output": "a", "input": "", "text": "all"}, "alpaca", chat(*CHAT)),
        (
            {"instruction": "i", "output": "a", "input": "q"},
            "alpaca",
            chat({"role": "user", "content": "i\n\nq"}, CHAT[1]),
        ),
        (
            {"instruction": "q", "output": "a", "system": "s", "input": None},
            "alpaca",
            chat(SYSTEM, *CHAT),
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "thinking": "hm", "name": None}]},
            "messages",
            chat(CHAT[0], {**CHAT[1], "thinking": "hm"}),
        ),
    ],
)
def test_layouts_are_recognized_and_rows_extracted(
    row: dict[str, Any], name: str, value: object
) -> None:
    assert layout(row).name == name
    assert extract(row, layout(row)) == value


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": 3}, "`text` is not a string"),
        ({"text": None}, "no `text`"),
        ({"prompt": "p", "completion": ""}, "`completion` is empty"),
        (
            {"prompt": CHAT[:1], "completion": "c"},
            "`completion` is not a list of messages, as the other column is",
        ),
        ({"prompt": CHAT, "completion": CHAT[:1]}, "no assistant turn in `completion`"),
        ({"messages": '[{"role": "user"'}, "`messages` is not a list of messages"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "weight": 0}]},
            "no assistant turn with loss in `messages`",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]},
            "message 2: `weight` is neither 0 nor 1, neither true nor false",
        ),
        ({"messages": CHAT, "tools": "weather"}, "`tools` is not a list"),
        ({"messages": CHAT, "tools": ["weather"]}, "`tools` is not a list of objects"),
        ({"messages": CHAT, "chat_template_kwargs": []}, "`chat_template_kwargs` is not an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "message 1 of `messages`: `content` has a part of type 'image_url' that is not text",
        ),
        (
            {"conversations": [{"from": "function_call", "value": "weather()"}]},
            "message 1 of `conversations`: a function_call is not an object with `name`",
        ),
        ({"messages": "hello"}, "`messages` is not a list of messages"),
        ({"messages": []}, "`messages` is not a list of messages"),
        ({"messages": ["hello"]}, "message 1 of `messages` is not an object"),
        ({"messages": CHAT[:1]}, "no assistant turn in `messages`"),
        (
            {"messages": [CHAT[0], {"role": "bot", "content": "a"}]},
            "message 2 of `messages` has the unknown role 'bot'; known: system, developer, user, ",
        ),
        ({"messages": [{"content": "a"}]}, "message 1 of `messages` has no `role`; known: "),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "text"}]}]},
            "message 2 of `messages`: `content` has a part of type 'text' that is not text",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant"}]},
            "message 2 of `messages`: `content` is not a string",
        ),
        (
            {"conversations": [{"from": "bot", "value": "a"}]},
            "message 1 of `conversations` has the unknown from 'bot'; known: system, developer,"
            " user, assistant, tool, human, gpt, ",
        ),
        (
            {"conversations": [{"from": "gpt", "value": 3}]},
            "message 1 of `conversations`: `value` is not a string",
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "another"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ],
                "system": "s",
            },
            "`system` differs from the system turn of `conversations`",
        ),
        ({"instruction": "", "output": "a"}, "`instruction` is empty"),
        ({"instruction": None, "output": "a"}, "no `instruction`"),
        ({"instruction": "q", "output": ""}, "`output` is empty"),
        ({"instruction": "q", "output": "a", "input": 3}, "`input` is not a string"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as error:
        extract(row, layout(row))
    assert str(error.value).startswith(reason)


EMPTY = {"role": "assistant", "content": ""}


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_row_that_teaches_to_answer_nothing_is_refused_in_every_layout(text: str) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        (
            {"messages": [CHAT[0], {**EMPTY, "content": text, "tool_calls": []}]},
            "every assistant turn in `messages` is empty",
        ),
        (
            {"messages": [*CHAT[:1], {**EMPTY, "content": [text]}, *CHAT[:1], EMPTY]},
            "every assistant turn in `messages` is empty",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "weight": 0}, CHAT[0], {**EMPTY, "thinking": text}]},
            "every assistant turn with loss in `messages` is empty",
        ),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": text}]},
            "every assistant turn in `conversations` is empty",
        ),
        (
            {"prompt": CHAT, "completion": [{**EMPTY, "content": text}]},
            "every assistant turn in `completion` is empty",
        ),
        ({"prompt": "p", "completion": text}, "`completion` is empty"),
        ({"instruction": "i", "output": text}, "`output` is empty"),
    ]
    for row, reason in rows:
        with pytest.raises(Unusable) as error:
            extract(row, layout(row))
        assert str(error.value) == reason


@pytest.mark.parametrize("others", [{"reasoning_content": "hm"}, {"tool_calls": CALLS}])
def test_a_turn_with_reasoning_or_calls_alone_is_an_answer(others: dict[str, Any]) -> None:
    messages = [CHAT[0], {**EMPTY, **others}]
    assert extract({"messages": messages}, LAYOUTS[0]) == chat(*messages)


def test_an_empty_turn_among_others_stays() -> None:
    messages = [CHAT[0], EMPTY, *CHAT]
    assert extract({"messages": messages}, LAYOUTS[0]) == chat(*messages)


def test_a_row_without_a_column_of_its_layout_gives_the_reason() -> None:
    with pytest.raises(Unusable, match="no `completion`"):
        extract(
            {"prompt": "p"},
            next(layout for layout in LAYOUTS if layout.name == "prompt/completion"),
        )


def test_the_error_for_unknown_columns_names_the_known_ones() -> None:
    assert recognize(["question", "answer"]) is None
    assert recognize(["messages", "text"], "text") == layout({"text": ""})
    assert recognize(["messages"], "text") is None
    assert (
        str(unknown_columns("data rows.jsonl", {"question", "answer"}, "auto"))
        == "data rows.jsonl: columns: found answer, question; allowed: messages (messages),"
        " or conversations (sharegpt), or conversation (sharegpt), or prompt and completion"
        " (prompt/completion), or instruction and output (alpaca), or text (text); fix: rename the"
        " columns of a row to those of one layout"
    )


def test_alpaca_without_a_chat_template_has_headings() -> None:
    row = {"instruction": "i", "input": "q", "output": "a", "system": "s"}
    conversation = extract(row, layout(row))
    assert isinstance(conversation, Conversation)
    assert alpaca_text(conversation) == Pair(
        "s\n\n### Instruction:\ni\n\nq\n\n### Response:\n", "a"
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": CHAT, "tools": TOOLS}, chat(*CHAT, tools=TOOLS)),
        ({"messages": CHAT, "tools": json.dumps(TOOLS)}, chat(*CHAT, tools=TOOLS)),
        ({"messages": CHAT, "tools": [json.dumps(TOOLS[0])]}, chat(*CHAT, tools=TOOLS)),
        ({"messages": CHAT, "tools": []}, chat(*CHAT)),
        ({"messages": CHAT, "tools": None, "chat_template_kwargs": None}, chat(*CHAT)),
        (
            {"messages": CHAT, "tools": "", "chat_template_kwargs": '{"enable_thinking": false}'},
            chat(*CHAT, arguments={"enable_thinking": False}),
        ),
        (
            {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": True, "other": None}},
            chat(*CHAT, arguments={"enable_thinking": True}),
        ),
        (
            {
                "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
                "tools": json.dumps(TOOLS),
            },
            chat(*CHAT, tools=TOOLS),
        ),
    ],
)
def test_tools_and_arguments_of_the_template_are_read_as_lists_or_as_json(
    row: dict[str, Any], expected: Conversation
) -> None:
    assert extract(row, layout(row)) == expected


@pytest.mark.parametrize(
    ("column", "turns", "systems"),
    [
        ("s", ["system", "human"], [0]),
        (" s\n", ["system", "human"], [0]),
        (" ", ["system", "human"], [0]),
        (None, ["system", "human"], [0]),
        ("s", ["human"], [0]),
        ("s", ["human", "gpt", "system", "human"], [0, 3]),
    ],
)
def test_a_system_column_is_no_second_system_turn(
    column: str | None, turns: list[str], systems: list[int]
) -> None:
    row = {
        "conversations": [{"from": name, "value": name[0]} for name in [*turns, "gpt"]],
        "system": column,
    }
    found = extract(row, layout(row))
    assert isinstance(found, Conversation)
    roles = [message["role"] for message in found.messages]
    assert [place for place, role in enumerate(roles) if role == "system"] == systems
    assert found.messages[0] == SYSTEM


@pytest.mark.parametrize(
    ("key", "no", "yes"),
    [("weight", 0, 1), ("weight", 0.0, 1.0), ("train", False, True), ("training", False, True)],
)
def test_a_message_may_say_that_it_has_no_loss(key: str, no: object, yes: object) -> None:
    row = {
        "messages": [CHAT[0], {**CHAT[1], key: no}, {**CHAT[0], key: None}, {**CHAT[1], key: yes}]
    }
    assert extract(row, layout(row)) == chat(*CHAT, *CHAT, silent=frozenset({1}))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": json.dumps(CHAT)}, chat(*CHAT)),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, chat(*CHAT, prompt=1)),
        (
            {"prompt": json.dumps(CHAT), "completion": json.dumps(CHAT), "tools": TOOLS},
            chat(*CHAT, *CHAT, prompt=2, tools=TOOLS),
        ),
        ({"prompt": "[1]", "completion": "[2]"}, Pair("[1]", "[2]")),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": CALLS}]},
            chat(CHAT[0], {"role": "assistant", "tool_calls": CALLS}),
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "tool_calls": CALLS}]},
            chat(CHAT[0], {"role": "assistant", "tool_calls": CALLS}),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "q", "image": None}]},
                    CHAT[1],
                ]
            },
            chat(*CHAT),
        ),
        (
            {
                "messages": [
                    CHAT[0],
                    {
                        "role": "assistant",
                        "content": [{"type": "text", "text": "one"}, {"text": " two"}],
                    },
                ]
            },
            chat(CHAT[0], {"role": "assistant", "content": "one two"}),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "sunny"},
                ]
            },
            chat(
                CHAT[0],
                {"role": "assistant", "content": "", "tool_calls": CALLS},
                {"role": "tool", "content": "sunny"},
            ),
        ),
    ],
)
def test_other_ways_of_writing_conversations(row: dict[str, Any], expected: object) -> None:
    assert extract(row, layout(row)) == expected


def test_unread_columns_that_matter_are_listed() -> None:
    found = recognize(["messages", "functions", "tools", "id", "images"])
    assert found is not None
    assert found.ignored == ("functions", "images")
    found = recognize(["messages", "system"])
    assert found is not None
    assert found.ignored == ("system",)
    found = recognize(["text", "tools"])
    assert found is not None
    assert found.ignored == ("tools",)
