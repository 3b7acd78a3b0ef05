"""Data of a run: prompts and their sources, chats, vocabularies, model folders, episodes, traces.

This head exports the seeded stream of prompts (`prompts`): a draw number goes in, the raw bytes of one line come out.
The other modules are imported by name. Talks to files and to the libraries that read them. Knows nothing of the ring,
the bus or roles.
"""

from busrl.data.prompts import JsonlStream, Prompt, plain_text, prompt_of, scan, training_stream

__all__ = ["JsonlStream", "Prompt", "plain_text", "prompt_of", "scan", "training_stream"]
