"""Prompts: the seeded endless stream over a JSONL file, its check, and the text or chat that an engine is given.

Knows nothing of the ring, groups or tokenizers: a draw number goes in, the raw bytes of one line come out.
"""

from busrl.data.check import Scan, decode_line, scan
from busrl.data.prompt import Message, Prompt, PromptSettings, plain_text, prompt_of
from busrl.data.stream import Item, JsonlStream

__all__ = [
    "Item", "JsonlStream", "Message", "Prompt", "PromptSettings", "Scan", "decode_line", "plain_text", "prompt_of",
    "scan",
]  # fmt: skip
