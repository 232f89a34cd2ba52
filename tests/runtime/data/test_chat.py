"""Tests of chat data: which tokens of a conversation have loss.

The templates here treat earlier turns, ends of turns, thoughts and tools as those of released
models do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.data import long_text
from megatrain.runtime.data.chat.chat_template import ChatTemplate, _misplaced
from megatrain.runtime.data.chat.marks import Rendering, TextSpan
from megatrain.runtime.data.chat.targets import Chat
from megatrain.runtime.data.columns import Conversation
from megatrain.runtime.data.documents import TARGET
from megatrain.runtime.data.long_text import LongText
from megatrain.runtime.data.options import Loss
from megatrain.runtime.data.tokens.tokenize import load_tokenizer

Folder = Callable[..., Path]
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OPENS_THOUGHT = PROMPT.replace("assistant\n", "assistant\n<think>\n")
HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
BODY = "{{ m.content }}<|im_end|>\n{% endfor %}"
PARTS = (
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{%"
    " endfor %}"
)
TEMPLATES = {
    "plain": HEAD + BODY + PROMPT,
    "counts": "{{ messages | length }} messages\n" + HEAD + BODY + PROMPT,
    # Only the last turn has a thought.
    "last thought": (
        HEAD + "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content"
        " }}\n</think>\n{% endif %}" + BODY + PROMPT
    ),
    # As above, and the prompt opens the thought.
    "opened thought": (
        HEAD + "{% if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content"
        " }}\n</think>\n{% endif %}" + BODY + OPENS_THOUGHT
    ),
    # The prompt for an answer ends with `<think>`, which no turn contains.
    "cut thought": HEAD + BODY + OPENS_THOUGHT,
    # The last turn has another end.
    "other end": (
        HEAD
        + "{{ m.content }}{% if loop.last %}<|end|>{% else %}<|im_end|>{% endif %}{% endfor %}"
        + PROMPT
    ),
    # Content is a list of parts, as in templates for images.
    "parts": HEAD + PARTS + "{{ m.note }}<|im_end|>\n{% endfor %}" + PROMPT,
    "marked parts": (
        HEAD + "{% if m.role == 'assistant' %}{% generation %}" + PARTS + "<|im_end|>{%"
        " endgeneration %}{% else %}" + PARTS + "<|im_end|>{% endif %}\n{% endfor %}" + PROMPT
    ),
    "upper": HEAD + BODY.replace("m.content", "m.content | upper") + PROMPT,
    # Thoughts are left out.
    "no thoughts": HEAD + BODY.replace("m.content", "m.content.split('</think>')[-1]") + PROMPT,
    # A token ends the conversation, but is not before the prompt.
    "end of text": (
        HEAD
        + BODY
        + "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{%"
        " endif %}"
    ),
    # Only the beginning of the next turn stops the model.
    "no end": (
        "{% for m in messages %}{% if m.role == 'user' %}<s>{% else %}<|im_start|>{% endif %}{{"
        " m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    ),
    # The last message writes the prompt.
    "inside": (
        HEAD + "{{ m.content }}<|im_end|>\n{% if loop.last and add_generation_prompt"
        " %}<|im_start|>assistant\n{% endif %}{% endfor %}"
    ),
    # There is no prompt.
    "no prompt": (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% else %}{{ m.content"
        " }}<|end|>{% endif %}{% endfor %}"
    ),
    "numbers": (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}<|im_start|>{{ m.role }}\n"
        + BODY
        + PROMPT
    ),
    # A first loop reads all messages, with blanks around its statements.
    "two loops": (
        "{% for m in messages %}\n  {% set last = m.content %} \n{% endfor %}\n\n"
        + HEAD
        + BODY
        + PROMPT
    ),
    # The answer of a tool is written into its call.
    "answer inside": (
        HEAD.replace("\n", "{% if m.role != 'tool' %}\n")
        + "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}"
        + "{% for k in range(loop.index0 + 1, messages | length) %}{% if messages[k].role == 'tool'"
        " and m.tool_calls %}{% set t = messages[k] %}={{ t.content }}{% endif %}"
        + "{% endfor %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        + PROMPT
    ),
    "tools": (
        "{% for t in tools %}{{ t.function.name }} {% endfor %}"
        + HEAD
        + "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}"
        + BODY
        + PROMPT
    ),
    "some calls": HEAD + "{% if not m.content %}{{ m.tool_calls }}{% endif %}" + BODY + PROMPT,
    "arguments as text": (
        HEAD + "{% for c in m.tool_calls %}({{ c.function.name }}={{ c.function.arguments }}){%"
        " endfor %}" + BODY + PROMPT
    ),
    "arguments as JSON": (
        HEAD
        + "{% for c in m.tool_calls %}({{ c.function.name }}={{ c.function.arguments | tojson }}){%"
        " endfor %}" + BODY + PROMPT
    ),
    "argument": (
        HEAD
        + "{% if m.role == 'assistant' and mood is defined %}{{ mood }}: {% endif %}"
        + BODY
        + PROMPT
    ),
    "user and assistant": (
        "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
    ),
    # The system message must be the first.
    "first system": (
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
    ),
    # Texts are written, but not as they are.
    "trimmed": HEAD + BODY.replace("m.content", "m.content | trim") + PROMPT,
    "as JSON": HEAD + BODY.replace("m.content", "m.content | tojson") + PROMPT,
    "escaped": HEAD + BODY.replace("m.content", "m.content | e") + PROMPT,
    "title": HEAD + BODY.replace("m.content", "m.content | title") + PROMPT,
    # The text is collected before it is written.
    "collected": "{% set text %}" + HEAD + BODY + "{% endset %}{{ text }}" + PROMPT,
    "collected, changed": (
        "{% set text %}" + HEAD + BODY + "{% endset %}{{ text[:-2] }}\n" + PROMPT
    ),
    "blank": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}{% if"
        " add_generation_prompt %}assistant: {% endif %}"
    ),
    "marked": (
        HEAD
        + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration"
        " %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
    ),
    "marked, touching": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{%"
        " endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "marked, twice": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.role }}{%"
        " endgeneration %}: {% generation %}{{ m.content }}{% endgeneration %}{% else %}{{"
        " m.content }}{% endif %}{% endfor %}{% generation %}<|end|>{% endgeneration %}"
    ),
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def called(arguments: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]


CALL = called({})
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
FOUR = [
    user("hello"),
    answer("world", reasoning_content="hm"),
    user("you"),
    answer("one", reasoning_content="other"),
]


@pytest.fixture
def targets(tokenizer_folder: Folder) -> Callable[..., Any]:
    """Returns a function that returns the text of each run of targets, or the reason for none."""

    def find(
        template: str, conversation: Conversation, loss: Loss = "assistant", stop: str = ""
    ) -> Any:
        tokenizer = load_tokenizer(tokenizer_folder())
        assert tokenizer is not None
        tokenizer.chat_template = TEMPLATES[template]
        (ids,) = Chat(tokenizer, loss, "the model").encode([conversation])
        if isinstance(ids, str):
            return ids
        plain = tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tools,
            return_dict=False,
            **conversation.arguments,
        )
        assert [int(token) & (TARGET - 1) for token in ids] == [
            *plain,
            *tokenizer(stop)["input_ids"],
        ]
        runs = [
            list(run)
            for target, run in itertools.groupby(ids.tolist(), lambda token: token >= TARGET)
            if target
        ]
        return [tokenizer.decode([token & (TARGET - 1) for token in run]) for run in runs]

    return find


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("plain", ["world<|im_end|>", "one<|im_end|>"]),
        ("counts", ["world<|im_end|>", "one<|im_end|>"]),
        ("last thought", ["world<|im_end|>", "<think>\nother\n</think>\none<|im_end|>"]),
        ("opened thought", ["world<|im_end|>", "other\n</think>\none<|im_end|>"]),
        ("cut thought", ["world<|im_end|>", "one<|im_end|>"]),
        ("other end", ["world<|im_end|>", "one<|end|>"]),
        ("end of text", ["world<|im_end|>", "one<|im_end|>\n<|end|>"]),
        ("inside", ["world<|im_end|>", "one<|im_end|>"]),
        ("no prompt", ["world<|end|>", "one<|end|>"]),
        ("numbers", ["world<|im_end|>", "one<|im_end|>"]),
        ("two loops", ["world<|im_end|>", "one<|im_end|>"]),
        ("marked", ["world<|im_end|>", "one<|im_end|>"]),
    ],
)
def test_each_turn_has_loss_from_the_prompt_to_its_end(
    targets: Callable[..., Any], template: str, expected: list[str]
) -> None:
    assert targets(template, Conversation(messages=FOUR)) == expected
    assert targets(template, Conversation(messages=FOUR), "last") == expected[1:]
    assert len(targets(template, Conversation(messages=FOUR[:2]))) == 1


def test_an_answer_that_begins_like_the_rest_of_the_prompt_has_loss_from_its_beginning(
    targets: Callable[..., Any],
) -> None:
    assert targets("cut thought", Conversation(messages=[user("hello"), answer("<think>")])) == [
        "<think><|im_end|>"
    ]
    assert targets("cut thought", Conversation(messages=[user("hello"), answer("<b>")])) == [
        "<b><|im_end|>"
    ]


def test_the_token_that_begins_the_next_turn_is_learned_where_a_turn_has_no_end(
    targets: Callable[..., Any],
) -> None:
    four, three, last = (
        Conversation(messages=FOUR),
        Conversation(messages=[*FOUR[:2], FOUR[3]]),
        Conversation(messages=FOUR[2:]),
    )
    assert targets("no end", four, stop="<s>") == ["world<s>", "one<s>"]
    assert targets("no end", four, "last", stop="<s>") == ["one<s>"]
    assert targets("no end", three, stop="<s>") == [
        "world",
        "one<s>",
    ]  # the model's own next turn does not stop it
    assert targets("no end", last, stop="<s>") == ["one<s>"]
    assert targets("no end", replace(four, silent=frozenset({3}))) == ["world<s>"]
    assert targets("no end", Conversation(messages=[*FOUR, user("you")])) == ["world<s>", "one<s>"]


def test_a_token_across_the_end_of_the_prompt_is_the_answers(targets: Callable[..., Any]) -> None:
    """A token across the end of the prompt belongs to the answer, as in transformers."""
    assert targets("blank", Conversation(messages=[user("hello"), answer("world")])) == [
        " world<|end|>"
    ]


def test_the_answer_of_a_tool_has_no_loss_wherever_it_is_written(
    targets: Callable[..., Any],
) -> None:
    messages = [user("hello"), answer("one", tool_calls=CALL), {"role": "tool", "content": "other"}]
    assert targets("answer inside", Conversation(messages=[*messages, answer("world")])) == [
        "(weather)",
        "one<|im_end|>",
        "world<|im_end|>",
    ]


def test_a_conversation_may_begin_with_the_assistant(targets: Callable[..., Any]) -> None:
    for template in ("plain", "opened thought", "inside", "end of text", "marked"):
        assert targets(template, Conversation(messages=FOUR[1:]))[0] == "world<|im_end|>"


def test_tools_and_arguments_reach_the_template(targets: Callable[..., Any]) -> None:
    messages = [user("hello"), answer("", tool_calls=CALL)]
    assert targets("tools", Conversation(messages=messages, tools=TOOLS)) == ["(weather)<|im_end|>"]
    assert targets("argument", Conversation(messages=FOUR, arguments={"mood": "the"})) == [
        "the: world<|im_end|>",
        "the: one<|im_end|>",
    ]


@pytest.mark.parametrize("template", ["arguments as text", "arguments as JSON"])
@pytest.mark.parametrize("arguments", ['{"city": "the"}', {"city": "the"}])
def test_arguments_reach_the_template_in_the_form_that_it_takes(
    tokenizer_folder: Folder, template: str, arguments: object
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder())
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATES[template]
    (ids,) = Chat(tokenizer, "assistant", "").encode(
        [Conversation(messages=[user("hello"), answer("", tool_calls=called(arguments))])]
    )
    assert not isinstance(ids, str)
    assert (
        tokenizer.decode([int(token) & (TARGET - 1) for token in ids if token >= TARGET])
        == '(weather={"city": "the"})<|im_end|>'
    )


@pytest.mark.parametrize("loss", ["assistant", "last", "all"])
def test_a_call_that_the_template_leaves_out_makes_a_bad_row_for_any_loss(
    targets: Callable[..., Any], loss: Loss
) -> None:
    messages = [user("hello"), answer("world", tool_calls=CALL), user("you"), answer("one")]
    for template in ("some calls", "marked"):
        assert "tool calls" in targets(template, Conversation(messages=messages), loss)


@pytest.mark.parametrize("loss", ["assistant", "last", "all"])
@pytest.mark.parametrize("template", ["parts", "marked parts"])
def test_an_answer_that_is_left_out_makes_a_bad_row(
    targets: Callable[..., Any], template: str, loss: Loss
) -> None:
    """The model would learn to end its turn at once."""
    messages = [user("hello"), answer("a"), user("you"), answer("one")]
    reason = "the chat template leaves out the text of message {}, which is a string; "
    found = targets(template, Conversation(messages=messages), loss)
    assert found.startswith(reason.format(4 if loss == "last" else 2))
    some = Conversation(messages=messages, silent=frozenset({1}))
    assert targets(template, some, loss).startswith(reason.format(4))
    messages[1]["content"] = " "
    found = targets(template, Conversation(messages=messages), loss)
    assert found.startswith(reason.format(4))


@pytest.mark.parametrize(
    ("template", "message", "expected"),
    [
        ("plain", answer(""), "<|im_end|>"),
        ("parts", answer(""), "<|im_end|>"),
        ("marked parts", answer(" "), "<|im_end|>"),
        ("parts", answer("one", note="two"), "two<|im_end|>"),
        ("collected", answer("ONE"), "ONE<|im_end|>"),
        ("upper", answer("one"), "ONE<|im_end|>"),
        ("no thoughts", answer("<think>one</think>"), "<|im_end|>"),
    ],
)
def test_an_answer_that_is_empty_or_written_otherwise_stays(
    targets: Callable[..., Any], template: str, message: dict[str, Any], expected: str
) -> None:
    assert targets(template, Conversation(messages=[user("hello"), message])) == [expected]


def test_the_whole_conversation_has_loss_on_request(targets: Callable[..., Any]) -> None:
    for template in ("plain", "collected", "marked"):
        (whole,) = targets(template, Conversation(messages=FOUR[:2]), "all")
        assert (
            whole == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n"
        )
    assert targets("plain", Conversation(messages=FOUR[:2], silent=frozenset({0})), "all") == [
        "<|im_start|>assistant\nworld<|im_end|>\n"
    ]
    assert "changes the text" in targets(
        "collected, changed", Conversation(messages=FOUR[:2], silent=frozenset({0})), "all"
    )


@pytest.mark.parametrize("template", ["plain", "marked"])
def test_a_message_may_have_no_loss(targets: Callable[..., Any], template: str) -> None:
    assert targets(template, Conversation(messages=FOUR, silent=frozenset({1}))) == [
        "one<|im_end|>"
    ]
    assert targets(template, Conversation(messages=FOUR, silent=frozenset({3}))) == [
        "world<|im_end|>"
    ]
    assert targets(template, Conversation(messages=FOUR, prompt=2)) == ["one<|im_end|>"]
    assert (
        targets(template, Conversation(messages=FOUR, silent=frozenset({3})), "last")
        == "the chat template shows no assistant turn"
    )


def test_the_last_turn_by_markers_is_the_last_assistant_message(
    targets: Callable[..., Any],
) -> None:
    empty = [user("hello"), answer("world"), user("you"), answer("")]
    assert (
        targets("marked, touching", Conversation(messages=empty), "last")
        == "the chat template shows no assistant turn"
    )
    assert targets(
        "marked, touching",
        Conversation(messages=[user("hello"), answer("world"), answer("one")]),
        "last",
    ) == ["one"]
    assert targets("marked, twice", Conversation(messages=FOUR), "last") == [
        "assistant",
        " one<|end|>",
    ]  # the token of the word includes the blank


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            "collected, changed",
            FOUR,
            (
                "the chat template changes the text of messages after {% set %} took it;"
                " {% generation %} in it would mark the text that the model generates"
            ),
        ),
        (
            "plain",
            [user("hello"), answer("world", tool_calls=CALL)],
            "the chat template writes no tool calls: it does not mention `tool_calls`",
        ),
        (
            "marked",
            [user("hello"), answer("world", tool_calls=CALL)],
            "the chat template writes no tool calls: it does not mention `tool_calls`",
        ),
        (
            "some calls",
            [user("hello"), answer("world", tool_calls=CALL)],
            "the chat template leaves out the tool calls of message 2",
        ),
        (
            "tools",
            [user("hello"), answer("", tool_calls=called("x"))],
            "message 2: the arguments of a tool call are not a JSON object",
        ),
    ],
)
def test_a_row_with_unknown_turns_gives_the_reason(
    targets: Callable[..., Any], template: str, messages: list[dict[str, Any]], reason: str
) -> None:
    assert targets(template, Conversation(messages=messages)) == reason


@pytest.mark.parametrize(
    "text",
    ["\ufdd1", "\ufdd1item 3 1\ufdd2", "\ufdd1closes\ufdd2", "\ufdd1end x\ufdd2", "\ufdd1\ufdd2"],
)
def test_a_message_that_looks_like_a_mark_is_a_bad_row(
    targets: Callable[..., Any], text: str
) -> None:
    assert targets("plain", Conversation(messages=[user(f"a{text}b"), answer("world")])).startswith(
        ("a message contains", "the chat template does not show")
    )


@pytest.mark.parametrize(
    ("template", "conversation", "remark"),
    [
        (
            "no end",
            Conversation(messages=FOUR),
            (
                "the template has no token that ends a turn, so 1 conversations end with the token"
                " that begins the next message"
            ),
        ),
        (
            "plain",
            Conversation(messages=FOUR),
            "the template leaves out the reasoning in the last turn of 1 conversations",
        ),
        (
            "plain",
            Conversation(messages=[user("a"), answer("b")], tools=TOOLS),
            "the template does not write the tools of 1 conversations",
        ),
    ],
)
def test_a_remark_names_what_a_template_leaves_out(
    tokenizer_folder: Folder, template: str, conversation: Conversation, remark: str
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder())
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATES[template]
    chat = Chat(tokenizer, "assistant", "the model")
    chat.encode([Conversation(messages=[user("a"), answer("b")])] if template == "plain" else [])
    assert chat.remarks() == []
    chat.encode([conversation])
    assert remark in chat.remarks()


def chat_of(folder: Path, template: str | dict[str, str]) -> Chat:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    tokenizer.chat_template = template
    return Chat(tokenizer, "assistant", "the model")


def remarks_on(folder: Path, template: str, *conversations: Conversation) -> list[str]:
    """Returns the remarks after `conversations`, none of which may be refused."""
    chat = chat_of(folder, TEMPLATES[template])
    assert not [found for found in chat.encode(list(conversations)) if isinstance(found, str)]
    return chat.remarks()


def test_a_remark_counts_the_empty_turns_with_loss(tokenizer_folder: Folder) -> None:
    messages = [user("a"), answer(""), user("b"), answer("c")]
    one, prompt, silent = (
        Conversation(messages=messages, **others)
        for others in ({}, {"prompt": 2}, {"silent": frozenset({1})})
    )
    folder = tokenizer_folder()
    assert remarks_on(folder, "plain", prompt, silent) == []
    assert remarks_on(folder, "plain", prompt, one) == ["1 assistant turn is empty"]
    assert remarks_on(folder, "plain", one, one) == ["2 assistant turns are empty"]


def unwritten(role: str, conversations: str) -> str:
    return f"the chat template does not write the {role} message of {conversations}"


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_remark_names_the_role_of_a_text_that_the_template_leaves_out(
    tokenizer_folder: Folder, role: str
) -> None:
    dropped = Conversation(messages=[{"role": role, "content": "dropped"}, *FOUR[:2]])
    kept = Conversation(messages=[user("hello"), answer("world")])
    found = remarks_on(tokenizer_folder(), "user and assistant", kept, dropped, kept)
    assert unwritten(role, "1 conversation") in found
    found = remarks_on(tokenizer_folder(), "user and assistant", *[dropped] * 3)
    assert unwritten(role, "3 conversations") in found
    assert not [line for line in remarks_on(tokenizer_folder(), "plain", dropped) if role in line]


def test_an_answer_that_repeats_the_result_of_a_tool_does_not_hide_that_it_is_left_out(
    tokenizer_folder: Folder,
) -> None:
    messages = [user("hello"), {"role": "tool", "content": "one"}, answer("one"), user("you")]
    assert remarks_on(
        tokenizer_folder(), "user and assistant", *[Conversation(messages=messages)] * 2
    ) == [unwritten("tool", "2 conversations")]


def test_each_role_whose_text_is_left_out_is_named_once_for_a_conversation(
    tokenizer_folder: Folder,
) -> None:
    four = [
        {"role": role, "content": text}
        for role, text in (("system", "S"), ("tool", "T"), ("developer", "D"), ("tool", "U"))
    ]
    messages = Conversation(messages=[*four, user("hello"), answer("world")])
    assert remarks_on(tokenizer_folder(), "user and assistant", messages) == [
        unwritten(role, "1 conversation") for role in ("system", "developer", "tool")
    ]


def test_a_later_text_of_a_role_may_be_left_out(tokenizer_folder: Folder) -> None:
    system = [{"role": "system", "content": text} for text in ("one", "other")]
    turns = [user("hello"), answer("world")]
    first = Conversation(messages=[*system[:1], *turns])
    later = Conversation(messages=[*system[:1], *turns, *system[1:], *turns])
    assert remarks_on(tokenizer_folder(), "first system", first) == []
    assert remarks_on(tokenizer_folder(), "first system", first, later) == [
        unwritten("system", "1 conversation")
    ]


@pytest.mark.parametrize("text", ["", " \n", " one\n", 'a\n"b" <c> & é \\', '{"a": "b"}'])
@pytest.mark.parametrize(
    "template", ["plain", "trimmed", "as JSON", "escaped", "upper", "title", "collected"]
)
def test_a_text_that_the_template_writes_in_another_way_is_not_left_out(
    tokenizer_folder: Folder, template: str, text: str
) -> None:
    others = [{"role": role, "content": text} for role in ("system", "developer", "user", "tool")]
    messages = Conversation(messages=[*others, answer("world")])
    assert remarks_on(tokenizer_folder(), template, messages) == []


@pytest.mark.parametrize(
    "part",
    [
        "m.content.split('<out>')[1]",
        "m.content.split('<out>')[1].split('</out>')[0]",
        "(m.content if '<out>' in m.content else '')",
        "m.content[:4]",
        "m.content[-3:]",
        "m.content | list | join(' ')",
    ],
)
def test_a_part_of_a_text_is_a_text_that_is_written(
    tokenizer_folder: Folder, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setitem(TEMPLATES, "part", HEAD + BODY.replace("m.content", part) + PROMPT)
    text = "one <out>two</out> three"
    others = [{"role": role, "content": text} for role in ("system", "developer", "user", "tool")]
    messages = Conversation(messages=[*others, answer(text)])
    assert remarks_on(tokenizer_folder(), "part", messages) == []


def test_a_conversation_that_is_left_out_is_not_counted(tokenizer_folder: Folder) -> None:
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    chat = chat_of(tokenizer_folder(), users + "{% generation %}{% endgeneration %}")
    system = {"role": "system", "content": "dropped"}
    (found,) = chat.encode([Conversation(messages=[system, user("hello"), answer("world")])])
    assert isinstance(found, str)
    assert found == "the chat template shows no assistant turn"
    assert chat.remarks() == []


@pytest.fixture
def renderings(tokenizer_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a function that returns how often each of some conversations is rendered. They have
    the given messages, and an answer.
    """
    count = 0
    render = ChatTemplate.render

    def counting(*args: Any, **options: Any) -> str:
        nonlocal count
        count += 1
        return render(*args, **options)

    def find(template: str, *conversations: list[dict[str, Any]]) -> list[int]:
        nonlocal count
        chat = chat_of(tokenizer_folder(), TEMPLATES[template])
        found = []
        for messages in conversations:
            count = 0
            chat.encode([Conversation(messages=[*messages, answer("world")])])
            found.append(count)
        return found

    monkeypatch.setattr(ChatTemplate, "render", counting)
    return find


@pytest.mark.parametrize("template", ["plain", "as JSON"])
def test_a_role_that_is_written_costs_no_further_rendering(
    renderings: Callable[..., Any], template: str
) -> None:
    first, second, blank = renderings(
        template,
        *(
            [{"role": role, "content": text} for role in ("system", "user", "tool")]
            for text in ('a\n"b" é', 'c\n"d" ü', "")
        ),
    )
    assert first > second == blank


def test_a_role_that_is_left_out_costs_few_renderings(renderings: Callable[..., Any]) -> None:
    tool = {"role": "tool", "content": "dropped"}
    _, one, five, none = renderings("user and assistant", [user("a")], [tool], [tool] * 5, [])
    assert one == five == none + 2


@pytest.mark.parametrize("first", ["default", "tool_use"])
def test_another_template_for_tools_may_leave_out_what_the_first_one_writes(
    tokenizer_folder: Folder, first: str
) -> None:
    """The text is also in the answer, so a search does not show that it is left out."""
    templates = dict.fromkeys(["default", "tool_use"], TEMPLATES["user and assistant"])
    chat = chat_of(tokenizer_folder(), {**templates, first: TEMPLATES["plain"]})
    messages = [{"role": "developer", "content": "one"}, user("weather"), answer("one")]
    both = [Conversation(messages=messages), Conversation(messages=messages, tools=TOOLS)]
    for conversation in both if first == "default" else both[::-1]:
        assert "developer" not in "".join(chat.remarks())
        chat.encode([conversation])
    assert unwritten("developer", "1 conversation") in chat.remarks()


def test_calls_in_the_form_that_the_template_takes_do_not_hide_a_text_that_is_left_out(
    tokenizer_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This template raises an error for arguments that are an object."""
    monkeypatch.setitem(
        TEMPLATES,
        "concatenated",
        HEAD
        + "{% for c in m.tool_calls %}{{ c.function.name + '=' + c.function.arguments }}{% endfor"
        " %}{% if m.role != 'tool' %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + PROMPT,
    )
    messages = [
        user("hello"),
        answer("", tool_calls=called({"a": "b"})),
        {"role": "tool", "content": "dropped"},
        answer("world"),
    ]
    assert remarks_on(tokenizer_folder(), "concatenated", Conversation(messages=messages)) == [
        unwritten("tool", "1 conversation")
    ]


@pytest.mark.parametrize("template", ["plain", "marked"])
def test_a_long_conversation_has_the_targets_of_its_whole_text(
    tokenizer_folder: Folder, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder())
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATES[template]
    conversation = Conversation(
        messages=[
            message
            for turn in range(30)
            for message in (user("hello the " * turn), answer("world, the one\n" * turn))
        ]
    )
    (whole,) = Chat(tokenizer, "assistant", "the model").encode([conversation])
    for name, value in (("CONTEXT", 47), ("_WINDOW", 150), ("_ZONE", 60)):
        monkeypatch.setattr(long_text, name, value)
    count = len(list(LongText(tokenizer).encode([("hello the " * 100, True)])))
    assert count > 3  # the text takes several windows
    (found,) = Chat(tokenizer, "assistant", "the model").encode([conversation])
    assert not isinstance(whole, str)
    assert not isinstance(found, str)
    assert found.tolist() == whole.tolist()


def test_a_text_at_the_start_or_end_of_the_output_is_not_misplaced() -> None:
    """A template may write nothing before the first message and after the last."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    text = "Hi\nHello\nBye"
    spans = {1: [TextSpan(3, 8)]}
    assert not _misplaced(messages, Rendering(text, spans, generated=[], last_loop=""))
    messages[0]["content"] = "ello"
    assert _misplaced(messages, Rendering(text, spans, generated=[], last_loop=""))
