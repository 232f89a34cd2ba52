"""Tests of chat templates whose loop over the messages is in a block that captures its text.

Such a block is `{% set %}`. The labels are those of a template with `{% generation %}`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.data.chat.targets import Chat
from megatrain.runtime.data.columns import Conversation
from megatrain.runtime.data.documents import TARGET
from megatrain.runtime.data.tokens.tokenize import load_tokenizer

Folder = Callable[..., Path]
BODY = (
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for c in m.tool_calls %}({{ c.function.name }}{{ c.function.arguments | tojson }}){% endfor"
    " %}{{ m.content }}<|im_end|>"
)
HEAD = "<|im_start|>{{ m.role }}\n"
LOOP = "{% for m in messages %}" + HEAD + BODY + "\n{% endfor %}"
MARKED = (
    "{% for m in messages %}"
    + HEAD
    + "{% if m.role == 'assistant' %}{% generation %}"
    + BODY
    + "{% endgeneration %}{% else %}"
    + BODY
    + "{% endif %}{{ '\n' }}{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NUMBERS = LOOP.replace(
    "{% for m in messages %}", "{% for i in range(messages | length) %}{% set m = messages[i] %}"
)
EACH = LOOP.replace("messages", "all")
TEMPLATES = {
    "set": "{% set text %}" + LOOP + PROMPT + "{% endset %}{{ text }}",
    "set, numbers": "{% set text %}" + NUMBERS + "{% endset %}{{ text }}" + PROMPT,
    "set, of a namespace": (
        "{% set all = namespace() %}{% set all.text %}"
        + LOOP
        + "{% endset %}{{ all.text ~ '' }}"
        + PROMPT
    ),
    "set, with a filter": (
        "{% set text | replace('<', '<') %}" + LOOP + "{% endset %}{{ text }}" + PROMPT
    ),
    "set, with a filter's option": (
        "{% set text | replace('<', new='<') %}" + LOOP + "{% endset %}{{ text }}" + PROMPT
    ),
    "set, looked at": (
        "{% set text %}"
        + LOOP
        + "{% endset %}{% if text and '<|im_end|>' in text %}{{ text }}{% endif %}"
        + PROMPT
    ),
    "set, in another loop": (
        "{% set text %}"
        + LOOP
        + "{% endset %}{% for m in messages %}{% if loop.last %}{{ text }}{% endif %}{% endfor %}"
        + PROMPT
    ),
    "macro": "{% macro text(all) %}" + EACH + "{% endmacro %}{{ text(messages) }}" + PROMPT,
    "macro, of one message": (
        "{% macro one(m) %}"
        + HEAD
        + BODY
        + "{{ '\n' }}{% endmacro %}{% macro text(all) %}{% for m in all %}{{ one(m) }}{% endfor %}"
        "{% endmacro %}{% set text = text(messages) %}{{ text }}" + PROMPT
    ),
    "macro, in parts": (
        "{% macro text(all) %}"
        + EACH
        + "{% endmacro %}{{ text(messages[:1]) }}{{ text(messages[1:]) }}"
        + PROMPT
    ),
    "macro, calling itself": (
        "{% macro text(all) %}"
        + EACH.replace("in all", "in all[:1]")
        + "{% if all[1:] %}{{ text(all[1:]) }}{% endif %}{% endmacro %}{{ text(messages) }}"
        + PROMPT
    ),
    "call": (
        "{% macro put() %}{{ caller() }}{% endmacro %}{% call put() %}"
        + LOOP
        + "{% endcall %}"
        + PROMPT
    ),
    "call, with messages": (
        "{% macro each(all) %}{% for m in all %}{{ caller(m) }}{% endfor %}{% endmacro %}"
        "{% call(m) each(messages) %}" + HEAD + BODY + "{{ '\n' }}{% endcall %}" + PROMPT
    ),
    "filter": "{% filter replace('#', '#') %}" + LOOP + "{% endfilter %}" + PROMPT,
    "set, trimmed": "{% set text %}\n" + LOOP + " \n{% endset %}{{ text | trim }}\n" + PROMPT,
    "set, trimmed by a filter": (
        "{% set text | trim %}" + LOOP + "{% endset %}{{ text }}\n" + PROMPT
    ),
    "macro, trimmed": (
        "{% macro text(all) %} " + EACH + "{% endmacro %}{{ text(messages).strip() }}\n" + PROMPT
    ),
    "call, trimmed": (
        "{% macro put() %}{{ caller() | trim }}{% endmacro %}{% call put() %}"
        + LOOP
        + "{% endcall %}{{ '\n' }}"
        + PROMPT
    ),
    "filter, trimmed": "{% filter trim %}" + LOOP + "{% endfilter %}{{ '\n' }}" + PROMPT,
    "filter, of another block": (
        "{% set text %}{% filter string %}"
        + LOOP
        + "{% endfilter %}{% endset %}{{ text }}"
        + PROMPT
    ),
}
CHANGED = {
    "set": "{% set text %}" + LOOP + "{% endset %}{{ text[:-2] }}",
    "macro": "{% macro text(all) %}" + EACH + "{% endmacro %}{{ text(messages)[:-2] }}",
    "call": (
        "{% macro put() %}{{ caller()[:-2] }}{% endmacro %}{% call put() %}"
        + LOOP
        + "{% endcall %}"
    ),
    "filter": "{% filter wordwrap(9) %}" + LOOP + "{% endfilter %}",
}
"""Templates that change the text which their block captured."""
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "the"}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


CONVERSATIONS = {
    "one turn": [user("hello"), answer("world")],
    "many turns": [user("hello"), answer("world"), user("you"), answer("one"), answer("other")],
    "a thought": [user("hello"), answer("world", reasoning_content="hm")],
    "thoughts": [
        user("hello"),
        answer("world", reasoning_content="hm"),
        user("you"),
        answer("one", reasoning_content="other"),
    ],
    "a call": [user("hello"), answer("", tool_calls=CALL)],
    "calls and a thought": [
        user("hello"),
        answer("world", tool_calls=CALL, reasoning_content="hm"),
        {"role": "tool", "content": "the one"},
        answer("", tool_calls=CALL),
        {"role": "tool", "content": "the other"},
        answer("one", reasoning_content="other"),
    ],
}


@pytest.fixture
def encode(tokenizer_folder: Folder) -> Callable[..., Any]:
    def encoded(template: str, messages: list[dict[str, Any]]) -> Any:
        tokenizer = load_tokenizer(tokenizer_folder())
        assert tokenizer is not None
        tokenizer.chat_template = template
        (found,) = Chat(tokenizer, "assistant", "the model").encode(
            [Conversation(messages=messages)]
        )
        return found if isinstance(found, str) else found.tolist()

    return encoded


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_the_markers_are_those_of_transformers(
    tokenizer_folder: Folder, encode: Callable[..., Any], kind: str
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder())
    assert tokenizer is not None
    tokenizer.chat_template = MARKED
    theirs: Any = tokenizer.apply_chat_template(
        CONVERSATIONS[kind], return_dict=True, return_assistant_tokens_mask=True
    )
    assert encode(MARKED, CONVERSATIONS[kind]) == [
        token | (TARGET if target else 0)
        for token, target in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True)
    ]


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_loop_in_a_block_that_captures_text_has_the_labels_of_markers(
    encode: Callable[..., Any], name: str, kind: str
) -> None:
    assert encode(TEMPLATES[name], CONVERSATIONS[kind]) == encode(MARKED, CONVERSATIONS[kind])


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_markers_may_stand_in_text_that_is_trimmed(encode: Callable[..., Any], kind: str) -> None:
    trimmed = "{% filter trim %}" + MARKED + "{% endfilter %}{{ '\n' }}" + PROMPT
    assert encode(trimmed, CONVERSATIONS[kind]) == encode(MARKED, CONVERSATIONS[kind])


def test_a_filter_may_change_letters(encode: Callable[..., Any], tokenizer_folder: Folder) -> None:
    tokenizer = load_tokenizer(tokenizer_folder())
    assert tokenizer is not None
    for loop in (LOOP, MARKED):
        found = encode(
            "{% filter upper %}" + loop + PROMPT + "{% endfilter %}", CONVERSATIONS["thoughts"]
        )
        learned = [token - TARGET for token in found if token >= TARGET]
        assert "".join(str(tokenizer.decode(learned)).split()) == (
            "<THINK>HM</THINK>WORLD<|IM_END|><THINK>OTHER</THINK>ONE<|IM_END|>"
        )


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("block", CHANGED)
def test_text_that_is_changed_after_a_block_captured_it_is_refused_by_the_block_s_name(
    encode: Callable[..., Any], block: str, kind: str
) -> None:
    first = "{% for m in messages[:1] %}" + HEAD + BODY + "{{ '\n' }}{% endfor %}"
    for before in ("", first):  # with another loop, which does write marks
        assert encode(before + CHANGED[block] + PROMPT, CONVERSATIONS[kind]) == (
            f"the chat template changes the text of messages after {{% {block} %}} took it; {{%"
            " generation %} in it would mark the text that the model generates"
        )


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize(
    "looks",
    [
        # whether there are calls
        (
            "{% macro calls() %}{% for m in messages %}{% if m.tool_calls %}true{% endif %}"
            "{% endfor %}{% endmacro %}{% if calls() | trim == 'true' %}<s>{% endif %}"
        ),
        # the number of the last user's message
        (
            "{% set last %}{% for m in messages %}{% if m.role == 'user' %}{{ loop.index0 }}"
            "{% endif %}{% endfor %}{% endset %}{% if last | int > 0 %}<s>{% endif %}"
        ),
        "{% set no %}{% for m in messages %}{% endfor %}{% endset %}{% if no %}<s>{% endif %}",
        (
            "{% set roles %}{% for m in messages %}{{ m.role }} {% endfor %}{% endset %}"
            "{% if roles != 'user assistant ' %}{{ raise_exception('x') }}{% endif %}"
        ),
    ],
)
def test_a_block_may_look_at_messages_without_writing_them(
    encode: Callable[..., Any], looks: str, kind: str
) -> None:
    found = encode(looks + LOOP + PROMPT, CONVERSATIONS[kind])
    assert found == encode(looks + MARKED + PROMPT, CONVERSATIONS[kind])
    assert isinstance(found, list) or "reports: x" in found
