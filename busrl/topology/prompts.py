"""Prompts in tokens: what `generation.max_prompt_tokens = "auto"` comes to, and which prompts a given limit leaves out.

Counts with the tokenizer of the model folder and, for chats, through its chat template, without torch. Talks to the
prompt files that `busrl.data.check` has scanned. Knows nothing of other keys' rules.

- A file of up to ALL prompts is counted whole; of a larger one the longest by bytes and some spread evenly are, and
  what is said names how many. The rest is bounded by the most tokens for a byte that were seen.
- Where nothing can be counted a byte counts as a token, which no common tokenizer exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from busrl import quickstart
from busrl.errors import DataError, Problem
from busrl.topology import machine
from busrl.topology.schema import TINY, Topology

if TYPE_CHECKING:
    from busrl.data.chat import LightTokenizer
    from busrl.data.check import Scan

ALL = 20_000  # prompts that are all counted,
ALL_BYTES = 16 << 20  # if they are not more than this
SOME = 5_000  # of a larger file: so many of the longest, and so many spread evenly
BATCH = 1_000
TOO_MANY = 0.01  # share of prompts above a given limit that a run is not started with
UNKNOWN = 1  # tokens, where prompts can not be looked at: no rule about long ones is broken by it
BYTES_PER_TOKEN = 4  # of a scripted engine


@dataclass(frozen=True)
class Counted:
    """Prompts of one file: `tokens` of those that were counted, `lines` (from 1) where these stand. `spread` says which
    of them stand for the whole file (all, where all were counted)."""

    path: str
    prompts: int
    tokens: tuple[int, ...]
    lines: tuple[int, ...]
    spread: tuple[bool, ...]
    bound: int  # no prompt is longer, as far as can be told
    how: str

    @property
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest prompt that was counted, and its line."""
        return max(zip(self.tokens, self.lines), default=(0, 0))

    def over(self, limit: int) -> int:
        """How many prompts of the file have more tokens; of a file that was not counted whole an estimate."""
        known = sum(n > limit for n in self.tokens)
        some = [n for n, spread in zip(self.tokens, self.spread) if spread]
        return max(known, round(self.prompts * sum(n > limit for n in some) / max(1, len(some))))

    def fits_most(self) -> int:
        """A limit that leaves out no more than is allowed."""
        some = sorted(n for n, spread in zip(self.tokens, self.spread) if spread)
        return some[max(0, len(some) - 1 - int(TOO_MANY * len(some)))] if some else self.bound


@dataclass(frozen=True)
class Limit:
    """The limit in force, what was counted as text for `busrl check`, and the (key, problem) pairs found."""

    tokens: int = UNKNOWN
    text: str = ""
    problems: tuple[tuple[str, Problem], ...] = ()


def limit_of(topology: Topology, scans: Mapping[str, Scan], context: int) -> Limit:
    """`scans` by key (data.train, validation.data); `context`: tokens that the model takes, 0 if unknown."""
    given = topology.generation.max_prompt_tokens
    try:
        counted = list(_counted(topology, scans))
    except DataError as problem:
        rule, _, remedy = str(problem).rpartition("; ")
        text = Problem("", "", rule or remedy, remedy if rule else "correct the prompt, or the template")
        return Limit(given if isinstance(given, int) else UNKNOWN, "", (("data.template", text),))
    if not counted:
        return Limit(given if isinstance(given, int) else UNKNOWN)
    limit = given if isinstance(given, int) else _auto(topology, counted, context)
    told = [*(f"{_told(one)}" for one in counted), *(_left_out(one, limit) for one in counted if one.over(limit))]
    room = context if limit != given else 0  # what "auto" had to keep to
    problems = [("generation.max_prompt_tokens", _too_many(one, limit, room)) for one in counted
                if one.over(limit) > TOO_MANY * one.prompts]  # fmt: skip
    auto = "" if isinstance(given, int) else " (auto)"
    return Limit(limit, f"tokens: {'; '.join(told)}; generation.max_prompt_tokens = {limit}{auto}", tuple(problems))


def _auto(topology: Topology, counted: Sequence[Counted], context: int) -> int:
    """The longest prompt, as far as the model has room for it and an answer."""
    longest = max(1, *(one.bound for one in counted))
    room = context - topology.generation.max_new_tokens
    return min(longest, room) if context and room > 0 else longest


def _told(one: Counted) -> str:
    longest, line = one.longest
    place = f"{one.path}:{line}" if line else one.path
    return f"the longest prompt has {longest or one.bound} ({place}; {one.how})"


def _left_out(one: Counted, limit: int) -> str:
    return f"{_about(one)}{one.over(limit)} of {one.path} are longer than {limit} and will be set aside"


def _about(one: Counted) -> str:
    return "about " if len(one.tokens) < one.prompts else ""


def _too_many(one: Counted, limit: int, context: int) -> Problem:
    over, (longest, line) = one.over(limit), one.longest
    rule = (
        f"{_about(one)}{over} of the {one.prompts} prompts of {one.path} ({over / one.prompts:.1%}) are longer than "
        f"{limit} tokens and would be set aside; the longest has {longest} (line {line}; {one.how})"
    )
    if context:
        room = f"the model takes {context} tokens, prompt and answer"
        return Problem("", "", rule, f"{room}: lower generation.max_new_tokens, or shorten the prompts")
    return Problem("", "", rule, f'"auto" or {max(longest, one.bound)} fits all, {one.fits_most()} fits 99 %')


# ------------------------------------------------------------------------------------------------------ counting


def _counted(topology: Topology, scans: Mapping[str, Scan]) -> Iterator[Counted]:
    if topology.scripted:
        for scan in scans.values():
            tokens = tuple(-(-size // BYTES_PER_TOKEN) for size in scan.sizes)
            lines = tuple(range(1, scan.count + 1))
            how = f"one for {BYTES_PER_TOKEN} bytes"
            yield Counted(str(scan.path), scan.count, tokens, lines, (True,) * scan.count, max(tokens, default=1), how)
        return
    light = _tokenizer(topology)
    for key in ("data.train", "validation.data"):
        section, _, name = key.partition(".")
        path = str(getattr(getattr(topology, section), name))
        if path.startswith(TINY):
            yield _tiny(path, light)
        elif key in scans:
            yield _by_bytes(topology, scans[key]) if light is None else _by_tokens(topology, scans[key], light)


def _tokenizer(topology: Topology) -> LightTokenizer | None:
    from busrl.data.chat import LightTokenizer

    tools = tools_of_chats(topology)
    if topology.model.path.startswith(TINY):
        made = quickstart.paths(topology.model.path) if quickstart.known(topology.model.path) else None
        return LightTokenizer.of(made.model, tools) if made else None
    return LightTokenizer.of(Path(topology.model.path), tools)


def tools_of_chats(topology: Topology) -> list[Any]:
    """What every chat request names, and the template with it."""
    asked = topology.openai.tools if topology.openai.endpoint == "chat" else ""
    return machine.read_list(Path(asked)) if asked else []


def _tiny(path: str, light: LightTokenizer | None) -> Counted:
    """A tiny task's prompts have a known length in characters, made or not."""
    longest = quickstart.RECIPES[path].max_prompt_tokens if quickstart.known(path) else UNKNOWN
    tokens = light.counts(["9" * longest])[0] if light is not None else longest
    return Counted(path, 1, (), (), (), max(longest, tokens), "a bound")


def _by_bytes(topology: Topology, scan: Scan) -> Counted:
    from busrl.data.chat import template_of

    chat = topology.data.template == "chat"
    written = len(template_of(Path(topology.model.path)).encode()) + len(topology.data.system.encode()) if chat else 0
    how = "a byte counted as a token: there is no tokenizer.json, or no package tokenizers"
    return Counted(str(scan.path), scan.count, (), (), (), scan.longest_prompt + written + 1, how)


def _by_tokens(topology: Topology, scan: Scan, light: LightTokenizer) -> Counted:
    chosen, spread = _chosen(scan)
    tokens = list(_tokens(topology, scan, light, chosen))
    how = "all counted" if len(chosen) == scan.count else (
        f"counted: {len(chosen):,} of {scan.count:,} prompts, the longest by bytes and some spread evenly"
    )  # fmt: skip
    if topology.data.template == "chat":
        how += ", chat template included"
    lines = tuple(index + 1 for index in chosen)
    bound = max([1, *tokens, _rest(scan, chosen, tokens)])
    return Counted(str(scan.path), scan.count, tuple(tokens), lines, tuple(spread), bound, how)


def _chosen(scan: Scan) -> tuple[list[int], list[bool]]:
    """Which lines are counted, in the order of the file, and which of them stand for the whole file."""
    import numpy as np

    sizes = np.frombuffer(scan.sizes, np.int64)
    if scan.count <= ALL and sizes.sum() <= ALL_BYTES:
        return list(range(scan.count)), [True] * scan.count
    some = max(1, min(SOME, scan.count // 2, int(ALL_BYTES / 2 / max(1.0, sizes.mean()))))
    even = np.unique(np.linspace(0, scan.count - 1, some).astype(np.int64))
    by_size = np.argsort(-sizes, kind="stable")[:SOME]
    longest = by_size[: max(1, int(np.searchsorted(np.cumsum(sizes[by_size]), ALL_BYTES / 2)))]
    both = np.union1d(even, longest)
    return both.tolist(), np.isin(both, even).tolist()


def _tokens(topology: Topology, scan: Scan, light: LightTokenizer, chosen: Sequence[int]) -> Iterator[int]:
    """Tokens of the prompts of these lines."""
    import msgspec

    from busrl.data.prompt import prompt_of

    with open(scan.path, "rb") as file:
        for begin in range(0, len(chosen), BATCH):
            prompts = []
            for index in chosen[begin : begin + BATCH]:
                file.seek(scan.starts[index])
                prompt = prompt_of(msgspec.json.decode(file.readline()), topology.data)
                try:
                    prompts.append(light.text(prompt))
                except DataError as problem:
                    raise DataError(f"{scan.path}:{index + 1}: {problem}") from problem
            yield from light.counts_of_texts(prompts, topology.data.template == "none")


def _rest(scan: Scan, chosen: Sequence[int], tokens: Sequence[int]) -> int:
    """A bound on the tokens of the prompts that were not counted."""
    import numpy as np

    if len(chosen) == scan.count:
        return 0
    sizes = np.frombuffer(scan.sizes, np.int64)
    counted, left = sizes[list(chosen)], np.delete(sizes, list(chosen))
    overhead = min(tokens)  # about what the template writes around a short prompt
    most = float(np.max((np.asarray(tokens) - overhead) / np.maximum(1, counted)))
    return overhead + int(most * int(left.max())) + 1
