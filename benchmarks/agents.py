"""Bookkeeping of an episode per model call, by the length of its history: tree of turns, rendering, parsing.

    python -m benchmarks agents [--ids 1000 16000 64000] [--turns 40]

Makes a model folder of its own (a byte-level BPE, ChatML), and plays an episode whose history has that many ids; then
times single calls at its end, which are cancelled so that the next finds the same: median and 99th percentile in
milliseconds. `tree`: match and open a call, and take its answer, of messages that arrive as JSON; `objects`: the same
of Python objects; `suffix`: the new messages to ids; `parse`: an answer with a tool call to a message.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks import ROOT
from busrl.agents.parsers import MessageMaker, hermes
from busrl.agents.renderer import Renderer
from busrl.agents.tree import Tree
from busrl.data.chat import LightTokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content }}<|im_end|>{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
REPEATS = 300


def renderer(folder: Path) -> Renderer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    docs = ROOT / "docs"
    core.train([str(path) for path in sorted(docs.glob("*.md"))], trainers.BpeTrainer(
        vocab_size=8000, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    text = LightTokenizer.of(folder)
    assert text is not None
    return Renderer(text, frozenset({1}))


class Episode:
    """An episode of `turns` calls and about `ids` ids; `raw` are its messages with one more of the user."""

    def __init__(self, chat: Renderer, ids: int, turns: int) -> None:
        self.chat, self.tree, self.messages = chat, Tree(), [{"role": "user", "content": "Go."}]
        words = (ROOT / "docs" / "architecture.md").read_text()
        for turn in range(turns):
            text = (words * 100)[: 4 * ids // turns // 2]
            drawn = np.array([*chat.tokenizer.encode(f"{turn} {text}")[: ids // turns // 2], 1], np.int32)
            asked = self.ask([json.dumps(message).encode() for message in self.messages])
            content, end = chat.text_and_end(drawn)
            message = {"role": "assistant", "content": content}
            self.tree.answer(asked, drawn, -np.ones(len(drawn), np.float32), np.ones(len(drawn), np.uint32), 1, message,
                             content, end).delivered = True
            self.messages += [message, {"role": "user", "content": text}]
        self.raw = [msgspec.Raw(msgspec.json.encode(message)) for message in self.messages]
        self.parent, count = self.tree.match(self.tree.read(self.raw))
        assert self.parent is self.tree.turns[-1] and count == len(self.raw) - 1

    def ask(self, raw):
        history = self.tree.read(raw)
        prompt = self.chat.prompt(self.tree, history)
        return self.tree.ask(prompt.parent, prompt.new, 4096, history, prompt.text)

    def by_tree(self, messages) -> None:
        """Everything of a call but rendering and parsing; then it is forgotten, its answer with it."""
        history = self.tree.read(messages)
        parent, _ = self.tree.match(history)
        asked = self.tree.ask(parent, NEW, 512, history, "")
        assert len(asked.prompt) > parent.end
        turn = self.tree.answer(asked, DRAWN, SCORES, VERSIONS, 1, {"role": "assistant", "content": "x"}, "x", "")
        parent.children.remove(turn)
        self.tree.turns.pop()


NEW, DRAWN = np.arange(200, dtype=np.int32), np.arange(400, dtype=np.int32)
SCORES, VERSIONS = -np.ones(400, np.float32), np.ones(400, np.uint32)


def measured(call: Callable[[], object]) -> str:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return "{:6.3f} {:6.3f}".format(*(1e3 * value for value in np.percentile(times, (50, 99))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ids", type=int, nargs="+", default=[1000, 16000, 64000])
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chat = renderer(Path(folder))
    print(f"{options.turns} turns; ms per call: median, 99th percentile\n{'ids':>7}  {'tree':^13}  {'objects':^13}  "
          f"{'suffix':^13}  {'parse':^13}")
    for ids in options.ids:
        episode = Episode(chat, ids, options.turns)
        history, maker = episode.tree.read(episode.raw), MessageMaker(hermes)
        columns = [
            measured(lambda episode=episode: episode.by_tree(episode.raw)),
            measured(lambda episode=episode: episode.by_tree(episode.messages)),
            measured(lambda episode=episode, history=history: chat.prompt(episode.tree, history)),
            measured(lambda maker=maker: maker.message(CALL, "", TOOLS, 3)),
        ]
        print(f"{episode.parent.end:7}  " + "  ".join(columns))
