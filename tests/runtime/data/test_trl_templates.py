"""Tests of the chat templates of released models in TRL.

Targets match those of TRL's training variants, in which its authors marked what the model
generates. Only TRL's files are read. If a training variant writes another text than the original,
a pattern finds the turns in the original's text.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatrain.runtime.data.chat.targets import Chat
from megatrain.runtime.data.chat.tool_calls import with_texts
from megatrain.runtime.data.columns import Conversation
from megatrain.runtime.data.documents import TARGET

_spec = importlib.util.find_spec("trl")
if _spec is None or not _spec.submodule_search_locations:
    pytest.skip("TRL is not installed", allow_module_level=True)
FOLDER = Path(next(iter(_spec.submodule_search_locations))) / "chat_templates"
IMAGES = ("idefics3", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm")
NAMES = sorted(
    name
    for file in FOLDER.glob("*_training.jinja")
    if (name := file.stem.removesuffix("_training")) not in IMAGES
)
SPECIAL = re.compile(
    r"<[｜|][^<>\s]+?[｜|]>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<channel\|>|<\|channel>"
    r"|<\|?tool_(?:call|response)\|>|<\|tool_(?:call|response)>"
)

CHATML = r"<\|im_start\|>assistant\n{}(.*?<\|im_end\|>)"
DEEPSEEK = r"(?:<｜Assistant｜>|<｜tool▁outputs▁end｜>)(.*?<｜end▁of▁sentence｜>)"
PATTERNS = {
    "deepseek_r1_distill": DEEPSEEK,
    "deepseekv3": DEEPSEEK,
    "qwen3": CHATML.format(""),
    "qwen3_5_nothink": CHATML.format(r"(?:<think>\n(?:\n</think>\n\n)?)?"),
    "qwen3_5_nothink, thoughts in the text": CHATML.format(
        ""
    ),  # the message begins like the prompt's empty thought
    "qwen3_5_think": CHATML.format(r"(?:<think>\n)?"),
    "qwen3_6": CHATML.format(r"(?:<think>\n)?"),
}
"""patterns that find the model's turns in the original's text"""
NO_CALLS = ("cohere", "cohere2", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5")
"""templates without tool calls; some of them refuse messages of tools"""
NULL_CALLS = ("deepseek_r1_distill",)
"""templates that write tool calls only if `content` is null; transformers drops keys that
are null"""

NO_TOOL_MESSAGES = ("cohere2", "phi3", "phi3_5")
"""templates that leave out messages of tools"""
NO_DEVELOPER = (
    *("cohere2", "deepseek_r1_distill", "deepseekv3", "glm4moe", "muse_glimmer", "phi3", "phi3_5"),
    *("qwen2_5", "qwen3", "qwen3_instruct_2507"),
)
"""templates that leave out messages of the developer"""
NO_ENDS = ("glm4moe",)
"""templates without a token at the end of a turn: the token that would begin the next message
follows the last turn, as in the training variant"""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **others}


def calls(arguments: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS},
    }
]
ANSWERED = {"role": "tool", "name": "weather", "content": "sunny"}
THOUGHT = answer("<think>\nhm, well\n</think>\n\nhello")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("hi"), answer("hello")],
    "two turns": [user("hi"), answer("hello"), user("more"), answer("yes")],
    "a system message": [
        {"role": "system", "content": "be brief"},
        user("hi"),
        answer("hello"),
        user("more"),
        answer("yes"),
    ],
    "a thought": [user("hi"), answer("hello", reasoning_content="hm, well")],
    "two thoughts": [
        user("hi"),
        answer("hello", reasoning_content="hm, well"),
        user("more"),
        answer("yes", reasoning_content="so"),
    ],
    "thoughts in the text": [
        user("hi"),
        THOUGHT,
        user("more"),
        answer("<think>\nso\n</think>\n\nyes"),
    ],
    "a call": [
        user("hi"),
        answer("let me see", tool_calls=calls({"city": "Paris"})),
        ANSWERED,
        answer("it is sunny"),
        user("thanks"),
        answer("bye"),
    ],
    "a call without words": [
        user("hi"),
        answer("", tool_calls=calls({"city": "Paris"})),
        ANSWERED,
        answer("it is sunny"),
    ],
}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each byte and each special token of the template."""
    vocabulary = {
        character: number
        for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = sorted(set(SPECIAL.findall(template)))
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", extra_special_tokens=special
    )
    made.chat_template = template
    return made


def runs(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[bool]
) -> list[tuple[int, str]]:
    """Returns the end and the text of each run of targets. Adjacent runs count as one."""
    places = [
        list(group) for _, group in itertools.groupby(range(len(ids)), lambda place: mask[place])
    ]
    return [
        (group[-1], str(tokenizer.decode([ids[place] for place in group])))
        for group in places
        if mask[group[0]]
    ]


@pytest.mark.parametrize("kind", CONVERSATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_released_template_has_loss_where_its_training_variant_has(name: str, kind: str) -> None:
    messages, tools = CONVERSATIONS[kind], TOOLS if "call" in kind else None
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text())
    (found,) = Chat(tokenizer, "assistant", name).encode(
        [Conversation(messages=messages, tools=tools)]
    )
    if isinstance(found, str):
        if name in NO_CALLS and tools:
            assert (
                found == "the chat template writes no tool calls: it does not mention `tool_calls`"
            )
        elif name in NULL_CALLS and tools:
            assert found == "the chat template leaves out the tool calls of message 2"
        else:
            assert (name, kind) == ("gemma", "a system message")
            assert found == "the chat template reports: System role not supported"
        return
    assert not (tools and name in NO_CALLS + NULL_CALLS)
    ids = [int(token) & (TARGET - 1) for token in found]
    ours = runs(tokenizer, ids, (found >= np.uint32(TARGET)).tolist())
    if name == "deepseekv3":  # its template takes arguments as text
        messages = with_texts(messages)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    written = str(tokenizer.decode(ids))
    assert written.removeprefix(str(text)) in (
        ("<|user|>", "<|observation|>") if name in NO_ENDS else ("",)
    )
    if name in PATTERNS:
        assert [part for _, part in ours] == re.findall(
            PATTERNS.get(f"{name}, {kind}", PATTERNS[name]), str(text), re.DOTALL
        )
        return
    twin = tokenizer_of((FOLDER / f"{name}_training.jinja").read_text())
    theirs: Any = twin.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    assert twin.decode(theirs["input_ids"]) == written  # for any other text, a pattern is needed
    marked = runs(twin, theirs["input_ids"], [bool(target) for target in theirs["assistant_masks"]])
    assert len(ours) == len(marked)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    prompts = [
        str(
            tokenizer.apply_chat_template(
                messages[:number], tools=tools, tokenize=False, add_generation_prompt=True
            )
        )
        for number in turns
    ]
    for (_, our), (_, their) in zip(ours, marked, strict=True):
        header, middle, after = their.partition(our)
        assert middle
        assert after.strip() == ""  # a newline after the token that stops the model
        assert any(
            header.strip() in prompt[-40:] for prompt in prompts
        )  # the training variant also has loss on the prompt


@pytest.mark.parametrize("name", NAMES)
def test_arguments_as_json_text_are_those_of_an_object(name: str) -> None:
    """Arguments as JSON text, as in OpenAI's format, give the same tokens as an object."""
    conversation = CONVERSATIONS["a call"]
    chat = Chat(tokenizer_of((FOLDER / f"{name}.jinja").read_text()), "assistant", name)
    of_object, of_text = chat.encode(
        [
            Conversation(messages=messages, tools=TOOLS)
            for messages in (conversation, with_texts(conversation))
        ]
    )
    assert with_texts(conversation) != conversation
    assert list(of_object) == list(of_text)


@pytest.mark.parametrize("text", ["be brief", ' {"celsius": "31"}\n', 'a\n\n"b" <c> & é \\ '])
@pytest.mark.parametrize("role", ["system", "developer", "tool"])
@pytest.mark.parametrize("name", NAMES)
def test_a_remark_names_a_role_only_if_the_template_leaves_out_its_text(
    name: str, role: str, text: str
) -> None:
    message = {"role": role, "content": text}
    messages = [message, user("hi"), answer("hello")]
    if role == "tool":
        called = [answer("", tool_calls=calls({"city": "Paris"}))]
        called = [] if name in NO_CALLS + NULL_CALLS else called
        messages = [user("hi"), *called, message, answer(text), user("more"), answer("yes")]
    left_out = (role == "tool" and name in NO_TOOL_MESSAGES) or (
        role == "developer" and name in NO_DEVELOPER
    )
    chat = Chat(tokenizer_of((FOLDER / f"{name}.jinja").read_text()), "assistant", name)
    (found,) = chat.encode([Conversation(messages=messages)])
    if isinstance(found, str):
        assert found.startswith("the chat template reports")
        assert not left_out
    assert [line for line in chat.remarks() if "does not write" in line] == (
        [f"the chat template does not write the {role} message of 1 conversation"]
        if left_out
        else []
    )


@pytest.mark.parametrize("kind", ["one turn", "two turns"])
@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_a_template_that_writes_no_text_is_no_empty_answer(name: str, kind: str) -> None:
    """These templates write only the parts of a list."""
    tokenizer = tokenizer_of((FOLDER / f"{name}.jinja").read_text())
    (found,) = Chat(tokenizer, "assistant", name).encode(
        [Conversation(messages=CONVERSATIONS[kind])]
    )
    assert isinstance(found, str)
    assert found.startswith("the chat template leaves out the text of message 2")


def test_every_template_is_compared() -> None:
    assert len(NAMES) >= 26
    assert {name.partition(",")[0] for name in PATTERNS} <= set(NAMES)
