"""Real model folders for tests of chats: a tiny model, a tokenizer that adds a BOS, a chat template, two end ids.

`make` writes one as transformers saves them; the fixture `chat_folder` (tests/conftest.py) keeps one of each template
for the session. Characters are tokens, so ids can be read; weights are random, so answers end by either end id.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

PAD, END, BOS, TURN, TURN_END = "<pad>", "</s>", "<s>", "<|im_start|>", "<|im_end|>"
SPECIAL = [PAD, END, BOS, TURN, TURN_END]
CHARACTERS = string.ascii_letters + string.digits + " \n.,:;?!+-*/=<>|'\"#_()[]{}"
VOCABULARY = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
END_IDS = {VOCABULARY[END], VOCABULARY[TURN_END]}

TEMPLATES = {
    # as Qwen's: no BOS, tools named in the system turn
    "chatml": (
        "{%- if tools %}\n{{- '<|im_start|>system\\n' }}\n"
        "{%- for tool in tools %}\n{{- tool | tojson }}\n{%- endfor %}\n"
        "{{- '<|im_end|>\\n' }}\n{%- endif %}\n"
        "{%- for message in messages %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    # as Llama 3's: the template writes the BOS that the tokenizer would add too
    "bos": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
    ),
    # as Gemma's: no system message is allowed, and turns have to alternate
    "strict": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
    ),
}


def make(folder: Path, template: str = "chatml", positions: int = 512, heads: int = 2, width: int = 32) -> Path:
    """A tiny random Qwen3 with that template ("" = none); generation_config.json has two end ids, config.json one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=width // heads, tie_word_embeddings=True,
        max_position_embeddings=positions, pad_token_id=0, bos_token_id=VOCABULARY[BOS], eos_token_id=VOCABULARY[END],
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [VOCABULARY[TURN_END], VOCABULARY[END]]
    model.save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def tokenizer(template: str = "chatml") -> Any:
    """One token per character; encoding a text puts the BOS before it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, VOCABULARY[BOS])])
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=END, bos_token=BOS, unk_token=PAD,
        additional_special_tokens=[TURN, TURN_END], clean_up_tokenization_spaces=False,
    )
    if template:
        made.chat_template = TEMPLATES[template]
    return made


def make_bpe(folder: Path) -> Path:
    """A tiny random Qwen2 with a byte-level BPE whose tokenizer.json keeps words and numbers whole: transformers' class
    for that kind of model splits texts by a rule of its own, digit by digit, whatever the file says."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = [f"what is {n * 37 % 9999} + {n * 91 % 9999} + {n * 53 % 9999}?" for n in range(400)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([*texts, "what is 1234 + 5678 + 9012?" * 20], trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False))
    made: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")
    folder.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(folder)
    torch.manual_seed(0)
    model: Any = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(made), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=0, pad_token_id=0, bos_token_id=None))
    model.save_pretrained(folder)
    return folder
