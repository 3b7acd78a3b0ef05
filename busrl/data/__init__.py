"""Prompts: the seeded endless stream over a JSONL file, its check, and the text or chat for an engine.

Knows nothing of the ring, groups or tokenizers: a draw number goes in, the raw bytes of one line come out.
"""

from busrl.data.prompts import JsonlStream, Prompt, plain_text, prompt_of, scan, training_stream

__all__ = ["JsonlStream", "Prompt", "plain_text", "prompt_of", "scan", "training_stream"]
