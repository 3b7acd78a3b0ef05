"""Prompts: the seeded endless stream over a JSONL file, its check, and the text that an engine is given.

Knows nothing of the ring, groups or tokenizers: a draw number goes in, the raw bytes of one line come out.
"""

from busrl.data.check import Scan, decode_line, scan
from busrl.data.prompt import ChatTemplate, TemplateSettings, render
from busrl.data.stream import Item, JsonlStream

__all__ = ["ChatTemplate", "Item", "JsonlStream", "Scan", "TemplateSettings", "decode_line", "render", "scan"]
