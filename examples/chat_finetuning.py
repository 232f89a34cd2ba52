"""Makes a tiny chat model, fine-tunes it, and chats with the result.

    python examples/chat_finetuning.py

It writes the folder `chat-example`: a model in Hugging Face format with a tokenizer and a chat
template, conversations, a plan, and the run. It needs no GPU and no network. With a model of your
own, one command does the same: `megatrain train MODEL --data chat.jsonl --epochs 2 --out RUN`.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatrain.runtime import Config, Trainer
from megatrain.runtime.training.config import TrainingSettings
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.simulator import HardwareSpec, ModelSpec, Workload, search

QUESTIONS = {"Who are you?": "I am tiny.", "How large are you?": "I have few parameters."}
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_model(folder: Path) -> None:
    """Writes a Llama with random weights and a byte-level tokenizer with a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<e>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*QUESTIONS, *QUESTIONS.values()], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<e>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_conversations(file: Path, rows: int = 200) -> None:
    """Writes `rows` conversations as JSON lines, the format of most chat data."""
    pairs = list(QUESTIONS.items())
    with file.open("w", encoding="utf-8") as lines:
        for number in range(rows):
            question, answer = pairs[number % len(pairs)]
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            lines.write(json.dumps({"messages": turns}) + "\n")


def make_plan(model: Path, file: Path) -> None:
    """Plans steps of 8 x 64 tokens and writes the plan.

    The machine is the library's H200. To plan for your machine, run `megatrain calibrate` and load
    the file that it writes.
    """
    workload = Workload(
        batch=8, sequence=64, loss_chunk=64, dtype="fp32", documents=True, short_recompute=True
    )
    machine = HardwareSpec.load("h200")
    best = search(ModelSpec.load(str(model)), machine, workload, source=str(model.absolute()))[0]
    best.plan.save(file)


def chat(model: Path, question: str) -> str:
    """Returns the model's answer to a question."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    trained = AutoModelForCausalLM.from_pretrained(model).eval()
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with_answer = trained.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer: str = tokenizer.decode(
        with_answer[prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return answer


def main(folder: Path = Path("chat-example"), steps: int = 60) -> None:
    """Makes a model, data and a plan in `folder`, trains, and asks the trained model.

    Raises FileExistsError if `folder` exists.
    """
    folder.mkdir(parents=True)
    make_model(folder / "model")
    make_conversations(folder / "chat.jsonl")
    make_plan(folder / "model", folder / "plan.toml")
    # The rate is high because the weights are random. For pretrained weights, leave out `schedule`.
    config = Config(training=TrainingSettings(steps=steps), schedule=LearningRate(rate=1e-2))
    trainer = Trainer(
        folder / "plan.toml", data=folder / "chat.jsonl", config=config, out=folder / "run"
    )
    print(f"loss {trainer.fit().loss:.3f}")
    for question in QUESTIONS:
        print(f"{question} -> {chat(folder / 'run' / 'model', question)}")


if __name__ == "__main__":
    main()
