"""A folder of models and data sets under names that clients know, all made here.

With it as its working directory a recipe finds the folder `Qwen/Qwen3-8B`, a tiny model of random weights, and the data
sets of both recipes, before it asks the hub.

    python hub.py FOLDER [SEED]
"""

import json
import pathlib
import random
import sys

import tokenizers
import torch
import transformers

NAME = "Qwen/Qwen3-8B"
TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
REPEATS = 100  # of the 16 questions
ASKED = " Provide a numerical answer without units, written inside \\boxed{}."


def sums():
    pairs = [(a, b) for a in range(4) for b in range(4)]
    random.Random(0).shuffle(pairs)
    return pairs


def write_tokenizer(folder):
    lines = [f"What is {a} plus {b}?{ASKED[:-1]}{a + b}}}." for a, b in sums()]
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=letters)
    core.train_from_iterator(lines * 3, trainer)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[1:3], chat_template=TEMPLATE,
    ).save_pretrained(folder)


def write_model(folder, seed):
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=2,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def write_data(root):
    questions = root / "openai/gsm8k/main"
    questions.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {a} plus {b}?", "answer": f"{a} + {b}\n#### {a + b}"} for a, b in sums() * REPEATS]
    (questions / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = ("---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n")
    (questions.parent / "README.md").write_text(card)
    chats = root / "HuggingFaceH4/no_robots"
    chats.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": [{"role": "user", "content": f"What is {a} plus {b}?{ASKED}"},
                          {"role": "assistant", "content": f"\\boxed{{{a + b}}}"}]} for a, b in sums() * 48]
    (chats / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write(root, seed=0):
    folder = root / NAME
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_model(folder, seed)
    write_data(root)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
