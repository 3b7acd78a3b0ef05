"""Are prompt ids those of `apply_chat_template`? 1,000 conversations with the real vocabularies that PyPI brings.

    pip install --no-deps --target PACKAGES dashscope llama-models mistral-common
    python -m benchmarks chat-ids --packages PACKAGES

Makes Hugging Face folders of the vocabularies of Qwen (dashscope), Llama 3 and 4 (llama-models) and Mistral's Tekken
(mistral-common), with the layouts that these families publish as chat templates, and compares, conversation by
conversation, the ids of an engine (`Tokens`), of `busrl check` (`LightTokenizer`) and of transformers. Prints a line of
JSON for each family: how many differ, and how many have a doubled BOS.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
LLAMA = (
    "{{- bos_token }}{%- for message in messages %}{{- 'H' + message.role + 'E\\n\\n' + message.content | trim + 'T' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- 'HassistantE\\n\\n' }}{%- endif %}"
)
MISTRAL = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{- message.content + eos_token }}"
    "{%- elif message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{%- else %}{{- '[INST]' + message.content + '[/INST]' }}{%- endif %}{%- endfor %}"
)


def llama(header: str, end: str, turn: str) -> str:
    parts = {"'H'": f"'{header}'", "'Hassistant": f"'{header}assistant", "E\\n": f"{end}\\n", "+ 'T'": f"+ '{turn}'"}
    text = LLAMA
    for old, new in parts.items():
        text = text.replace(old, new)
    return text


def tiktoken_file(path: Path) -> dict[bytes, int]:
    rows = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def tekken_file(path: Path) -> dict[bytes, int]:
    data = json.loads(path.read_bytes())
    size = data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]
    return {base64.b64decode(one["token_bytes"]): one["rank"] for one in data["vocab"][:size]}


FAMILIES: dict[str, tuple[str, Callable[[Path], dict[bytes, int]], str, str, list[str]]] = {
    # file below PACKAGES, its reader, template, BOS ("" = none is added), special tokens with the end of a turn first
    "qwen": ("dashscope/resources/qwen.tiktoken", tiktoken_file, QWEN, "", ["<|im_end|>", "<|im_start|>"]),
    "llama3": (
        "llama_models/llama3/tokenizer.model", tiktoken_file,
        llama("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|begin_of_text|>",
        ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"],
    ),
    "llama4": (
        "llama_models/llama4/tokenizer.model", tiktoken_file,
        llama("<|header_start|>", "<|header_end|>", "<|eot|>"), "<|begin_of_text|>",
        ["<|eot|>", "<|header_start|>", "<|header_end|>", "<|begin_of_text|>"],
    ),
    "mistral": (
        "mistral_common/data/tekken_240911.json", tekken_file, MISTRAL, "<s>",
        ["</s>", "<s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
    ),
}


def make_folder(name: str, packages: Path, folder: Path) -> None:
    """tokenizer.json and its settings: byte-level BPE with that vocabulary."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    file, read, template, bos, special = FAMILIES[name]
    ranks, shown = read(packages / file), bytes_to_unicode()
    text = {token: "".join(shown[byte] for byte in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[left], text[right]) for left, right in pairs]
    core = Tokenizer(models.BPE({text[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False),
    ])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    if bos:
        core.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))])
    made: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=special[0], **({"bos_token": bos} if bos else {})
    )
    made.chat_template = template
    made.save_pretrained(folder)


def conversation(chance: random.Random) -> list[dict[str, str]]:
    """A system message or none, one to four turns, words of several scripts, numbers, code, blank lines."""
    words = ["the", "Berechnung", "数学", "π≈3.14159", "naïve", "def f(x):\n    return x", "\n\n", "  ", "🙂", "42",
             "привет", "1,234.5", "don't", "<b>", "\t", "العربية"]

    def text() -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, 40)))

    turns = [{"role": "system", "content": text()}] if chance.random() < 0.5 else []
    for _ in range(chance.randint(0, 3)):
        turns += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return [*turns, {"role": "user", "content": text()}]


def measure(name: str, folder: Path, count: int) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from busrl.data.chat import LightTokenizer
    from busrl.engines.tokens import Tokens

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    light, chance = LightTokenizer.of(folder), random.Random(7)
    assert light is not None
    engine = Tokens(tokenizer, frozenset({tokenizer.eos_token_id}), chat=True)
    tool = [{"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}]
    found = {"family": name, "vocabulary": len(tokenizer), "conversations": count, "engine differs": 0,
             "check differs": 0, "doubled BOS": 0}
    for number in range(count):
        chat = conversation(chance)
        extra: dict[str, Any] = {}
        prompt: Any = chat
        if name == "qwen" and number % 3 == 0:  # with tools of the line, and arguments of the template
            extra = {"tools": tool, "enable_thinking": False}
            prompt = {"messages": chat, "tools": tool, "arguments": {"enable_thinking": False}}
        extra |= {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        right = tokenizer.apply_chat_template(chat, **extra)
        found["engine differs"] += engine.encode(prompt) != right
        found["check differs"] += light.ids(prompt) != right
        found["doubled BOS"] += engine.encode(prompt)[:2] == [tokenizer.bos_token_id] * 2
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, help="where pip put the three packages")
    parser.add_argument("--count", type=int, default=1000)
    options = parser.parse_args()
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(name, options.packages, Path(folder))
            print(json.dumps(measure(name, Path(folder), options.count)), flush=True)
