"""Chat templates and token counts of a model folder in processes that load no model, and so no torch.

Used by `busrl check`, which counts tokens, and by agents. Reads tokenizer_config.json and the template files; needs the
packages tokenizers and jinja2, which transformers brings. Knows nothing of prompt files.

- The tokenizer is the one that engines have: that which transformers makes of the folder. Some of its classes split
  texts in a way of their own, whatever tokenizer.json says. Without transformers it is that of tokenizer.json alone.
- A template writes every special token itself, so what it wrote is encoded without adding any.
- A template is foreign code: it runs in jinja2's sandbox, and sees plain data only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.data.prompts import Chat, Message, Prompt
from busrl.data.vocabulary import library_tokenizer
from busrl.errors import DataError
from busrl.system.files import read_map

if TYPE_CHECKING:
    from busrl.topology.schema import Openai

DEFAULT, TOOL_USE = "default", "tool_use"


def parts_of(prompt: list[Message] | Chat) -> tuple[list[Message], list[Any], dict[str, Any]]:
    """Messages, tools and arguments of the template of a chat."""
    if isinstance(prompt, list):
        return prompt, [], {}
    return prompt["messages"], prompt["tools"], prompt["arguments"]


def template_of(folder: Path, tools: bool = False) -> str:
    """The chat template of a model folder, "" if it has none; with `tools` the one for tools, if there is one."""
    named = _templates(folder)
    if tools and TOOL_USE in named:
        return named[TOOL_USE]
    return named.get(DEFAULT, "")


def _templates(folder: Path) -> dict[str, str]:
    """Templates by name: files of their own stand above what tokenizer_config.json holds."""
    found: dict[str, str] = {}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    for name, path in files.items():
        found[name] = path.read_text(encoding="utf-8")
    if found:
        return found
    for source in ("tokenizer_config.json", "chat_template.json"):
        value = read_map(folder / source).get("chat_template")
        if isinstance(value, str):
            return {DEFAULT: value}
        if isinstance(value, list):
            parts = [one for one in value if isinstance(one, dict) and {"name", "template"} <= one.keys()]
            return {str(one["name"]): str(one["template"]) for one in parts}
    return {}


class LightTokenizer:
    """Text and token counts of prompts as the tokenizer of `folder` makes them; `of` gives None where it cannot.

    `core` None: for `text` alone. `as_engines`: whether it is known to be the one that engines have."""

    def __init__(self, folder: Path, core: Any, tools: Sequence[Any] = (), as_engines: bool = True) -> None:
        self._core, self.as_engines = core, as_engines
        self.highest = 0  # id among those that `counts` has seen
        self._tools = list(tools) or None
        self._special = special_tokens(folder)
        self._templates = {named: template_of(folder, named) for named in (False, True)}
        self._render: dict[bool, Callable[..., str]] = {}

    @classmethod
    def of(cls, folder: Path, tools: Sequence[Any] = (), by_file: bool = False) -> LightTokenizer | None:
        """None without the packages, or for a tokenizer that neither transformers nor tokenizer.json has. `by_file`:
        one of busrl's own making, of which tokenizer.json is known to say all."""
        try:
            import jinja2  # noqa: F401
            from tokenizers import Tokenizer

            path = folder / "tokenizer.json"
            own = Tokenizer.from_file(str(path)) if path.is_file() else None  # one that cannot be read is none
            if not by_file and (text := library_tokenizer(folder)):
                return cls(folder, Tokenizer.from_str(text), tools)
            return None if own is None else cls(folder, own, tools, as_engines=by_file)
        except Exception:  # no such package, or a file of another kind: then nothing is counted
            return None

    def text(self, prompt: Prompt, generation: bool = True) -> str:
        """The prompt as the model reads it, up to the start of the answer, or with `generation` False without that
        start; DataError says why the template refuses."""
        if isinstance(prompt, str):
            return prompt
        chat, tools, arguments = parts_of(prompt)
        named = bool(tools or self._tools)
        template = self._templates[named]
        if not template:
            raise DataError('data.template = "chat": the model\'s tokenizer has no chat template')
        try:
            if named not in self._render:
                self._render[named] = _compiled(template)
            return self._render[named](
                messages=chat, tools=tools or self._tools, documents=None, add_generation_prompt=generation,
                **{**self._special, **arguments},
            )
        except Exception as problem:  # the template is foreign code
            raise DataError(f"the chat template refuses the messages: {problem}") from problem

    def ids(self, prompt: Prompt) -> list[int]:
        return self._encoded(self.text(prompt), isinstance(prompt, str))

    def encode(self, text: str) -> list[int]:
        """Ids of what a template wrote: special tokens in it are such, and none are added."""
        return self._encoded(text, False)

    def _encoded(self, text: str, add: bool) -> list[int]:
        """By the call of many texts: it alone lets other threads run meanwhile, seconds where the text is long."""
        found: list[int] = self._core.encode_batch([text], add_special_tokens=add)[0].ids
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens kept."""
        return str(self._core.decode(ids, skip_special_tokens=False))

    def special_ids(self) -> dict[str, int]:
        return {token.content: number for number, token in self._core.get_added_tokens_decoder().items()
                if token.special}

    def vocabulary(self) -> int:
        """The number after the highest id that stands for a text."""
        return max(self._core.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def template(self) -> str:
        """The source of the chat template, "" without one."""
        return self._templates[False]

    def cut(self, text: str, tokens: int, left: bool) -> str:
        """The text without so many tokens (at least) of its beginning, or of its end."""
        spans = self._core.encode(text, add_special_tokens=False).offsets
        if tokens >= len(spans):
            return ""
        return text[spans[tokens][0] :] if left else text[: spans[len(spans) - tokens - 1][1]]

    def turn_end(self) -> tuple[int, str] | None:
        """Id and text of the special token with which the template ends the assistant's turn; None without one."""
        mark = "4711"
        turns = (("user", "a"), ("assistant", mark), ("user", "b"))
        chat: list[Message] = [{"role": role, "content": text} for role, text in turns]
        try:
            after = self.text(chat).partition(mark)[2].lstrip()
        except DataError:
            return None
        special = self.special_ids()
        found = max((text for text in special if after.startswith(text)), key=len, default="")
        return (special[found], found) if found else None

    def id_of(self, text: str) -> int | None:
        found: int | None = self._core.token_to_id(text)
        return found

    @property
    def end(self) -> str:
        """The tokenizer's own end token, "" if it names none."""
        return self._special.get("eos_token", "")

    def counts(self, texts: Sequence[str], plain: bool) -> list[int]:
        """Count the tokens of each text of `text`; `plain`: no template wrote them."""
        found = self._core.encode_batch_fast(list(texts), add_special_tokens=plain)
        self.highest = max([self.highest, *(max(one.ids) for one in found if one.ids)])
        return [len(one) for one in found]


def tools_of_chats(settings: Openai) -> list[Any]:
    """The tools that every chat request names, and the template with it."""
    path = settings.tools if settings.endpoint == "chat" else ""
    try:
        listed = json.loads(Path(path).read_bytes()) if path else None
    except (OSError, ValueError, RecursionError):
        return []
    return listed if isinstance(listed, list) else []


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens that a template may write, such as bos_token."""
    found: dict[str, str] = {}
    for source in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_map(folder / source).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                found[name] = text
    return found


def _compiled(template: str) -> Callable[..., str]:
    """The template in the surroundings that transformers gives it."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the assistant's words for training on them; a prompt has none."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template).render


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
             sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
