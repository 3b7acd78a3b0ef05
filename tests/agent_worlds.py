"""Chat templates with the habits of well-known families, a tokenizer, and an engine that disobeys it, for tests.

The templates are our own. Each does with a history what the family that it is named for does; the tokens are those of
one byte-level BPE that all of them share.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from busrl.agents.episode import Call, EngineAnswer, Episode, OwnTime, Settings
from busrl.agents.parsers import MessageMaker, hermes, parser_of
from busrl.agents.renderer import Renderer
from busrl.agents.seats import Seat
from busrl.agents.tree import Tree, Turn
from busrl.data.chat import LightTokenizer
from busrl.data.episodes import EpisodeLimits
from busrl.states import Finish

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "[INST]", "[/INST]",
    "[TOOL_CALLS]", "</s>",
]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

_TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
_RESULT = (  # results that follow each other share one turn of the user
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
)
_START = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_THINKING_START = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
_LAST = (  # index of the last message of the user: thinking before it is dropped
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_OTHERS = "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
_BEGIN = "{% for m in messages %}{% if m.role == 'tool' %}" + _RESULT + "{% elif m.role == 'assistant' %}"
_CHATML = _TOOLS + _BEGIN + "<|im_start|>assistant\n{{ m.content }}" + _CALLS + "<|im_end|>\n" + _OTHERS
_THINKING = (
    _TOOLS + _LAST + _BEGIN + "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}<think>\n{{ m.reasoning_content or '' }}\n"
    "</think>\n\n{% endif %}{{ m.content }}" + _CALLS + "<|im_end|>\n" + _OTHERS
)
_BARE_CALL = '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
_ARGUMENTS = _BARE_CALL.replace("parameters", "arguments")
_REFUSE = "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"

TEMPLATES = {
    "qwen2_5": _CHATML + _START,
    "qwen3": _THINKING + _START,
    "opened": _THINKING + _THINKING_START,  # the prompt opens the thinking, as DeepSeek R1's and Qwen3.5's does
    # a beginning of the sequence, trimmed contents, no line break behind a turn, one call in a turn
    "llama3": (
        "{{ '<|endoftext|>' }}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
        "<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n{% if m.tool_calls %}"
        "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
        "{% for c in m.tool_calls %}" + _BARE_CALL + "{% endfor %}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}{# <|python_tag|> #}"
    ),
    # no tools, no system message, turns alternate
    "gemma": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + _REFUSE + "{% endif %}"
        "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
    ),
    # a turn ends with the mark of the next one, which the model samples as its stop
    "glm": (
        "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\n<tool_response>\n"
        "{{ m.content }}\n</tool_response>{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
        "<arg_value>{{ v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
        "{% else %}<|user|>\n{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    # a turn with calls shows no text; results are JSON
    "mistral": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'tool' %}"
        '[INST]{"content": {{ m.content | tojson }}}[/INST]{% elif m.tool_calls %}[TOOL_CALLS] ['
        "{% for c in m.tool_calls %}{% if not loop.first %}, {% endif %}" + _ARGUMENTS
        + "{% endfor %}]</s>{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    # the result stands inside the model's turn, as with Gemma 4: no suffix, but the next prompt extends the last
    "inside": (
        "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{{ m.content }}</tool_response>"
        "{% elif m.role == 'assistant' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
        "<|im_start|>model\n{% endif %}{{ m.content }}" + _CALLS + "{% if not m.tool_calls %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>model\n{% endif %}"
    ),
    # the last turn ends in another way than earlier ones, as with gpt-oss: neither
    "closing": _CHATML.replace("<|im_end|>\n{% else %}", "{{ '</s>' if loop.last else '<|im_end|>' }}\n{% else %}")
    + _START,
}
TEMPLATES = {name: text.replace("%}\n", "%}{{ '\\n' }}") for name, text in TEMPLATES.items()}  # jinja2 drops the others
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}


@cache
def _tokenizer() -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    docs = Path(__file__).parents[1] / "docs"
    files = [str(docs / name) for name in ("architecture.md", "concepts.md", "protocol.md")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train(files, trainers.BpeTrainer(vocab_size=2000, special_tokens=SPECIAL, initial_alphabet=alphabet,
                                          show_progress=False))
    core.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return str(core.to_str())


def folder(path: Path, template: str) -> Path:
    """What `LightTokenizer` reads of a model folder, with the template of that name, or that source."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(_tokenizer())
    (path / "tokenizer_config.json").write_text("{}")
    (path / "chat_template.jinja").write_text(TEMPLATES.get(template, template))
    return path


def renderer(path: Path, template: str, history: Any = "extend") -> Renderer:
    text = LightTokenizer.of(folder(path, template))
    assert text is not None
    special = text.special_ids()
    ends = ("<|im_end|>", "<|endoftext|>", "</s>", "<|user|>", "<|observation|>")
    return Renderer(text, frozenset(special[name] for name in ends), history)


@dataclass
class World:
    """One episode, and an engine whose tokens are cut where the tokenizer would not; it keeps what it read and drew.

    The texts that it draws are given by the test; their ids are encoded piece by piece, at random borders.
    """

    chat: Renderer
    random: random.Random
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    log: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = Tree(self.limits)
        source = self.chat.tokenizer.template()  # type: ignore[attr-defined]
        self.maker = MessageMaker(parser_of("auto", source, "."))
        self.streams: list[int] = []

    def ask(self, messages: Sequence[Any], tools: Any = None, wanted: int = 4096, arguments: Any = None) -> Any:
        """A call under way: (asked, what the renderer said)."""
        history = self.tree.read(messages, tools, arguments)
        prompted = self.chat.prompt(self.tree, history, tools, arguments)
        call = self.tree.ask(prompted.parent, prompted.new, wanted, history, prompted.text)
        self.streams.append(call.stream)
        return call, tools or []

    def answer(self, call: Any, text: str, end: str | None = None, deliver: bool = True) -> Turn:
        under_way, tools = call
        prompt = tuple(under_way.prompt.tolist())
        ids = [*self.split(text), self.chat.special_ids[end or self.end_of(text)]]
        finish = Finish.EOS if len(ids) <= under_way.room else Finish.LENGTH
        ids = ids[: under_way.room]
        scores = tuple(float(np.float32(-self.random.random())) for _ in ids)
        words, ended = self.chat.text_and_end(ids)
        message, _ = self.maker.message(words, under_way.text or "", tools, under_way.number)
        version = len(self.log)
        turn = self.tree.answer(under_way, ids, scores, [version] * len(ids), finish, message, words, ended)
        turn.delivered = deliver
        self.log.append((prompt, tuple(ids), scores))
        return turn

    def call(self, messages: Sequence[Any], text: str, tools: Any = None, **how: Any) -> Turn:
        wanted, arguments = how.pop("wanted", 4096), how.pop("arguments", None)
        return self.answer(self.ask(messages, tools, wanted, arguments), text, **how)

    def end_of(self, text: str) -> str:
        """The id with which a model of the template's family ends a turn."""
        calls = "</tool_call>" in text
        if not self.chat.turn_end:
            return "<|observation|>" if calls else "<|user|>"
        return "<|observation|>" if calls and self.chat.probes[2].how == "splice" else self.chat.turn_end

    def split(self, text: str) -> list[int]:
        """Ids of `text` that the tokenizer would not choose; a special token stays one."""
        ids: list[int] = []
        while text:
            special = next((token for token in (*SPECIAL, *MARKS) if text.startswith(token)), "")
            piece = special or text[: self.random.randint(1, 6)]
            if not special and "<" in piece[1:]:
                piece = piece[: piece.index("<", 1)]
            ids += self.chat.tokenizer.encode(piece)
            text = text[len(piece):]
        return ids

    def exact(self) -> tuple[int, int, int, int]:
        """Turns that are wrong, lost or doubled in the arrays for training, and those that were left out."""
        trajectory = self.tree.trajectory()
        if trajectory is None:
            return 0, 0, 0, len(self.log)
        log, seen = Counter(self.log), Counter(turns_of(trajectory))
        lost = (log - seen).total() - trajectory.undelivered
        doubled = sum(count > log[turn] for turn, count in seen.items() if turn in log)
        wrong = sum(count for turn, count in seen.items() if turn not in log)
        return wrong, lost, doubled, trajectory.undelivered


def turns_of(trajectory: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """(what was read, what was drawn, its log-probabilities) of each turn, from the arrays alone; their rules hold."""
    starts = np.concatenate([[0], np.cumsum(trajectory.seqs)])
    assert starts[-1] == len(trajectory.ids) and len(trajectory.seqs) >= 1 and len(trajectory.turns) >= 1
    turns, at, place = [], 0, (-1, 0)
    for sequence, begin, end, *_ in trajectory.turns.tolist():
        assert 1 <= begin < end <= trajectory.seqs[sequence] and (sequence, begin) >= place
        place = (sequence, end)
        ids = trajectory.ids[starts[sequence] : starts[sequence + 1]].tolist()
        scores = trajectory.logprobs[at : at + end - begin]
        assert np.isfinite(scores).all() and (scores <= 0).all()
        assert len(set(trajectory.versions[at : at + end - begin].tolist())) == 1
        turns.append((tuple(ids[:begin]), tuple(ids[begin:end]), tuple(map(float, scores))))
        at += end - begin
    assert at == len(trajectory.logprobs) == len(trajectory.versions)
    return turns


def calling(template: str, *pairs: tuple[int, int], text: str = "", gap: str = " ") -> str:
    """A turn with calls of `add`, as a model of that family writes it."""
    bodies = ['{"name": "add",%s"arguments": {"a": %d,%s"b": %d}}' % (gap, a, gap, b) for a, b in pairs]  # noqa: UP031
    if template == "mistral":
        return f"{text}[TOOL_CALLS] [{', '.join(bodies)}]"
    if template == "llama3":
        return bodies[0].replace("arguments", "parameters")
    if template == "glm":
        values = "<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>b</arg_key>\n<arg_value>{}</arg_value>\n"
        bodies = ["add\n" + values.format(*pair) for pair in pairs]
        return text + "".join(f"\n<tool_call>{body}</tool_call>" for body in bodies)
    return (f"{text}\n" if text else "") + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def rebuilt(message: dict[str, Any]) -> dict[str, Any]:
    """A message as frameworks write it back: stripped, JSON re-spelt, other ids, reasoning gone."""
    echo: dict[str, Any] = {"content": (message["content"] or "").strip() or None, "role": message["role"]}
    if calls := message.get("tool_calls"):
        echo["tool_calls"] = [
            {"type": "function", "id": f"x{place}", "function": {
                "arguments": json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())), indent=1),
                "name": call["function"]["name"]}}
            for place, call in enumerate(calls)
        ]
    return echo


def dumped(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a client's `model_dump()` writes it: with all that it knows, mostly null."""
    return {"refusal": None, "annotations": None, "function_call": None, "tool_calls": None, **message}


class Engine:
    """Draws the texts in turn, and "Word N." when they are used up, after any number of steps of the loop; logs what it
    read and drew. Answers nothing until `open` is set. A listener gets all ids but the last before `ending` is set.
    `instead` answers calls in its place."""

    def __init__(self, chat: Renderer, texts: Iterator[str] | None = None) -> None:
        self.world = World(chat, random.Random(4))
        self.texts = texts or iter(())
        self.running = self.most = self.calls = 0
        self.near: list[int] = []
        self.open, self.ending = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.ending.set()
        self.fails = 0
        self.instead: Callable[[Call], Awaitable[EngineAnswer]] | None = None

    async def __call__(self, call: Call) -> EngineAnswer:
        if self.instead is not None:
            return await self.instead(call)
        self.calls += 1
        number, self.running = self.calls, self.running + 1
        self.most, prompt = max(self.most, self.running), tuple(call.prompt.tolist())
        self.near.append(call.near)
        try:
            text = next(self.texts, f"Word {number}.")
            await self.open.wait()
            for _ in range(self.world.random.randint(0, 5)):
                await asyncio.sleep(0)
            if self.fails:
                self.fails -= 1
                raise ConnectionError("the engine is gone")
        finally:
            self.running -= 1
        ids = [*self.world.split(text), self.world.chat.special_ids["<|im_end|>"]]
        finish = Finish.EOS if len(ids) <= call.max_new_tokens else Finish.LENGTH
        ids = ids[: call.max_new_tokens]
        if call.on_ids is not None:
            for token in ids[:-1]:
                call.on_ids([token])
            await self.ending.wait()
            call.on_ids(ids[-1:])
        scores = np.array([-self.world.random.random() for _ in ids], np.float32)
        self.world.log.append((prompt, tuple(ids), tuple(map(float, scores))))
        return EngineAnswer(np.array(ids, np.int32), scores, np.full(len(ids), number, np.uint32), finish,
                            engine=number, step=10 * number)


def of(chat: Renderer, texts: list[str] | None = None, clock: Any = None, **how: Any) -> tuple[Episode, Engine]:
    engine = Engine(chat, iter(texts or []))
    settings = Settings(how.pop("max_new_tokens", 200), EpisodeLimits(**how.pop("limits", {})), **how)
    more = {"clock": clock} if clock else {}
    episode = Episode(5, engine, chat, MessageMaker(hermes), settings, **more)
    engine.world.tree = episode.tree
    return episode, engine


class Table:
    """An episode of these seats, each with an engine of its own."""

    def __init__(self, chat: Renderer, seats: Sequence[Seat], **how: Any) -> None:
        self.engines, own = {seat.name: Engine(chat) for seat in seats}, OwnTime(how.pop("parallel", 8))
        parts = [
            Episode(5, self.engines[seat.name], chat, MessageMaker(hermes), Settings(50, salt=salt, **how), seat=seat,
                    own=own) for salt, seat in enumerate(seats) if salt
        ]
        first = self.engines[seats[0].name]
        self.episode = Episode(5, first, chat, MessageMaker(hermes), Settings(50, **how), seat=seats[0], own=own,
                               others=parts)

    def drawn(self) -> dict[str, int]:
        return {name: len(one.tree.turns) for name, one in self.episode.seats.items()}
