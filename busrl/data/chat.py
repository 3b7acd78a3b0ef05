"""Chat templates and token counts of a model folder in processes that load no model, and so no torch.

Used by `busrl check`, which counts tokens, and by agents. Reads tokenizer_config.json and the template files; needs the
packages tokenizers and jinja2, which transformers brings. Knows nothing of prompt files.

- The tokenizer is the engines' one: the one that transformers makes of the folder, as some of its classes split texts
  in another way than tokenizer.json states. Without transformers it is that of tokenizer.json alone.
- A template writes every special token itself, so its text is encoded without adding any.
- A template is foreign code: it runs in jinja2's sandbox, and sees plain data only.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl.data.prompts import Chat, Message, Prompt
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
    """The chat template of a model folder, "" if it has none; with `tools` its template for tools, if there is one."""
    templates = _templates(folder)
    if tools and TOOL_USE in templates:
        return templates[TOOL_USE]
    return templates.get(DEFAULT, "")


def _templates(folder: Path) -> dict[str, str]:
    """Templates by name: template files take precedence over tokenizer_config.json."""
    texts: dict[str, str] = {}
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    for name, path in files.items():
        texts[name] = path.read_text(encoding="utf-8")
    if texts:
        return texts
    for source in ("tokenizer_config.json", "chat_template.json"):
        value = read_map(folder / source).get("chat_template")
        if isinstance(value, str):
            return {DEFAULT: value}
        if isinstance(value, list):
            entries = [entry for entry in value if isinstance(entry, dict) and {"name", "template"} <= entry.keys()]
            return {str(entry["name"]): str(entry["template"]) for entry in entries}
    return {}


class LightTokenizer:
    """Text and token counts of prompts by the tokenizer of `folder`; `of` gives None where it cannot be loaded.

    `core` None: for `text` alone. `as_engines`: whether it is surely the engines' tokenizer."""

    def __init__(self, folder: Path, core: Any, tools: Sequence[Any] = (), as_engines: bool = True) -> None:
        self._core, self.as_engines = core, as_engines
        self.highest = 0  # the highest id in the texts of `counts`
        self._tools = list(tools) or None
        self._special = special_tokens(folder)
        self._templates = {with_tools: template_of(folder, with_tools) for with_tools in (False, True)}
        self._render: dict[bool, Callable[..., str]] = {}

    @classmethod
    def of(cls, folder: Path, tools: Sequence[Any] = (), by_file: bool = False) -> LightTokenizer | None:
        """The tokenizer of a folder; None without the packages, or where neither transformers nor tokenizer.json gives
        one. `by_file`: busrl made the folder, and its tokenizer.json is complete."""
        try:
            import jinja2  # noqa: F401
            from tokenizers import Tokenizer

            from busrl.data.library import library_tokenizer  # only here: engines count nothing

            path = folder / "tokenizer.json"
            core = Tokenizer.from_file(str(path)) if path.is_file() else None
            if not by_file and (text := library_tokenizer(folder)):
                return cls(folder, Tokenizer.from_str(text), tools)
            return None if core is None else cls(folder, core, tools, as_engines=by_file)
        except Exception:  # a package is missing, or the file cannot be read: then nothing is counted
            return None

    def text(self, prompt: Prompt, generation: bool = True) -> str:
        """The prompt as the model reads it, with the beginning of the assistant's turn unless `generation` is False;
        DataError with the reason if the template refuses the messages."""
        if isinstance(prompt, str):
            return prompt
        chat, tools, arguments = parts_of(prompt)
        with_tools = bool(tools or self._tools)
        template = self._templates[with_tools]
        if not template:
            raise DataError('data.template = "chat": the model\'s tokenizer has no chat template')
        try:
            if with_tools not in self._render:
                self._render[with_tools] = _compiled(template)
            return self._render[with_tools](
                messages=chat, tools=tools or self._tools, documents=None, add_generation_prompt=generation,
                **{**self._special, **arguments},
            )
        except Exception as problem:  # the template is foreign code
            raise DataError(f"the chat template refuses the messages: {problem}") from problem

    def ids(self, prompt: Prompt) -> list[int]:
        return self._encoded(self.text(prompt), isinstance(prompt, str))

    def encode(self, text: str) -> list[int]:
        """Ids of a text that a template wrote: its special tokens are encoded as such, and none are added."""
        return self._encoded(text, False)

    def _encoded(self, text: str, add: bool) -> list[int]:
        """Encode by the call for many texts: it alone releases the GIL, and a long text takes seconds."""
        ids: list[int] = self._core.encode_batch([text], add_special_tokens=add)[0].ids
        return ids

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
        """The text without at least `tokens` tokens of its beginning (`left`) or of its end."""
        spans = self._core.encode(text, add_special_tokens=False).offsets
        if tokens >= len(spans):
            return ""
        return text[spans[tokens][0] :] if left else text[: spans[len(spans) - tokens - 1][1]]

    def turn_end(self) -> tuple[int, str] | None:
        """Id and text of the special token that ends the assistant's turn in the template; None without one."""
        mark = "4711"
        turns = (("user", "a"), ("assistant", mark), ("user", "b"))
        chat: list[Message] = [{"role": role, "content": text} for role, text in turns]
        try:
            after = self.text(chat).partition(mark)[2].lstrip()
        except DataError:
            return None
        special = self.special_ids()
        mark_of_end = max((text for text in special if after.startswith(text)), key=len, default="")
        return (special[mark_of_end], mark_of_end) if mark_of_end else None

    def id_of(self, text: str) -> int | None:
        number: int | None = self._core.token_to_id(text)
        return number

    @property
    def end(self) -> str:
        """The tokenizer's own end token, "" if it has none."""
        return self._special.get("eos_token", "")

    def counts(self, texts: Sequence[str], plain: bool) -> list[int]:
        """Count the tokens of each text that `text` made; `plain`: without a template."""
        encodings = self._core.encode_batch_fast(list(texts), add_special_tokens=plain)
        self.highest = max([self.highest, *(max(encoding.ids) for encoding in encodings if encoding.ids)])
        return [len(encoding) for encoding in encodings]


def tools_of_chats(settings: Openai) -> list[Any]:
    """The tools of every chat request, which the template gets too."""
    path = settings.tools if settings.endpoint == "chat" else ""
    try:
        listed = json.loads(Path(path).read_bytes()) if path else None
    except (OSError, ValueError, RecursionError):
        return []
    return listed if isinstance(listed, list) else []


def special_tokens(folder: Path) -> dict[str, str]:
    """The named special tokens that a template may write, such as bos_token."""
    tokens: dict[str, str] = {}
    for source in ("special_tokens_map.json", "tokenizer_config.json"):
        for name, value in read_map(folder / source).items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _compiled(template: str) -> Callable[..., str]:
    """The template, compiled with the extensions, filters and globals that transformers provides."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, which marks the assistant's words for training; in a prompt it has no effect."""

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
