"""Counts of the tokens in a run's prompts, before it starts: the limit "auto", and what one leaves out.

Counts with the tokenizer that engines have and, for chats, through its chat template, without torch.

- "auto" is no exact bound: another version of a library may count a little more, and a run that goes on with it, or an
  engine that has it, must not lose its longest prompts.
- A file of up to ALL prompts is counted whole; of a larger one the longest by bytes and some spread evenly are, and
  the text says how many. The rest is bounded by the most tokens for a byte that were seen.
- Where nothing can be counted a byte counts as a token, which no common tokenizer exceeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from busrl.data import pretrained
from busrl.data.chat import LightTokenizer, template_of, tools_of_chats
from busrl.data.prompts import Scan, prompt_of
from busrl.data.vocabulary import vocabulary_size
from busrl.errors import DataError
from busrl.preflight.findings import Finding
from busrl.states import TINY
from busrl.topology.schema import BYTES_PER_TOKEN, Topology

ALL = 20_000  # prompts that are all counted,
ALL_BYTES = 16 << 20  # if they are not more than this
SOME = 5_000  # of a larger file: so many of the longest, and so many spread evenly
BATCH = 1_000
TOO_MANY = 0.01  # share of prompts above a given limit that a run is not started with
LEAST_MARGIN, MARGIN = 8, 8  # "auto": so many tokens above the longest prompt, or one for so many of its tokens
UNKNOWN = 1  # tokens, where prompts cannot be looked at: no rule about long ones is broken by it


@dataclass(frozen=True)
class Counted:
    """Prompts of one file: `tokens` of those that were counted, `lines` (from 1) where these stand. `spread` says which
    of them stand for the whole file (all, where all were counted)."""

    path: str
    prompts: int
    tokens: tuple[int, ...]
    lines: tuple[int, ...]
    spread: tuple[bool, ...]
    bound: int  # no prompt is longer, as far as is known
    how: str
    highest: int = 0  # token id
    margin: int = 0  # tokens that another version of the tokenizer may count more

    @property
    def longest(self) -> tuple[int, int]:
        return max(zip(self.tokens, self.lines), default=(0, 0))

    @property
    def about(self) -> str:
        """The word before a number that is an estimate."""
        return "about " if len(self.tokens) < self.prompts else ""

    def longest_in_words(self) -> str:
        longest, line = self.longest
        place = f"{self.path}:{line}" if line else self.path
        return f"the longest prompt has {longest or self.bound} ({place}; {self.how})"

    def over(self, limit: int) -> int:
        """Count the prompts of the file that have more tokens; of a file that was not counted whole an estimate."""
        at_least = sum(n > limit for n in self.tokens)
        some = [n for n, spread in zip(self.tokens, self.spread) if spread]
        return max(at_least, round(self.prompts * sum(n > limit for n in some) / max(1, len(some))))

    def fits_most(self) -> int:
        """A limit that leaves out no more than is allowed."""
        some = sorted(n for n, spread in zip(self.tokens, self.spread) if spread)
        return some[max(0, len(some) - 1 - int(TOO_MANY * len(some)))] if some else self.bound


@dataclass(frozen=True)
class Limit:
    """The limit in force, what was counted as text for `busrl check`, and what is wrong."""

    tokens: int = UNKNOWN
    text: str = ""
    findings: tuple[Finding, ...] = ()


def limit_of(topology: Topology, scans: Mapping[str, Scan], context: int) -> Limit:
    """`scans` by key (data.train, validation.data, validation.set.0.data); `context`: tokens that the model takes, 0 if
    unknown."""
    setting = topology.generation.max_prompt_tokens
    auto = not isinstance(setting, int)
    findings: list[Finding] = []
    counted: list[Counted] = []
    try:
        counted = list(_counted(topology, scans))
    except DataError as problem:
        rule, _, remedy = str(problem).rpartition("; ")
        remedies = (rule, remedy) if rule else (remedy, "correct the prompt, or the template")
        findings.append(Finding(("data.template",), *remedies))
    limit = setting if isinstance(setting, int) else max([UNKNOWN, *(file.bound + file.margin for file in counted)])
    if auto and (left := context - topology.generation.max_new_tokens) > 0:
        limit = min(limit, left)  # as far as the model has room for the longest prompt and an answer
    if not counted:
        return Limit(limit, "", tuple(findings))
    lines = [file.longest_in_words() for file in counted]
    lines += [f"{file.about}{file.over(limit)} of {file.path} are longer than {limit} and will be set aside"
              for file in counted if file.over(limit)]
    room = context if auto else 0  # what "auto" had to keep to
    findings = [_too_many(file, limit, room) for file in counted if file.over(limit) > TOO_MANY * file.prompts]
    findings += _foreign_ids(topology, counted)
    margin = ", some more than the longest has" if any(file.margin for file in counted) else ""
    text = f"tokens: {'; '.join(lines)}; generation.max_prompt_tokens = {limit}{f' (auto{margin})' if auto else ''}"
    return Limit(limit, text, tuple(findings))


def _foreign_ids(topology: Topology, counted: Sequence[Counted]) -> Iterator[Finding]:
    """Ids in prompts for which the model has no row: its first layer would fail, on an accelerator without a word."""
    folder = pretrained.model_at(topology.model.path)
    size = vocabulary_size(folder) if folder else 0
    for file in counted if size else ():
        if file.highest >= size:
            rule = f"prompts of {file.path} have token ids up to {file.highest}, and the model has {size} (vocab_size)"
            yield Finding(("model.path",), rule, "put the tokenizer of this model there, or resize its embeddings")
            return


def _too_many(file: Counted, limit: int, context: int) -> Finding:
    over, (longest, line) = file.over(limit), file.longest
    rule = (
        f"{file.about}{over} of the {file.prompts} prompts of {file.path} ({over / file.prompts:.1%}) are longer than "
        f"{limit} tokens and would be set aside; the longest has {longest} (line {line}; {file.how})"
    )
    remedy = f'"auto" or {max(longest, file.bound)} fits all, {file.fits_most()} fits 99 %'
    if context:
        room = f"the model takes {context} tokens, prompt and answer"
        remedy = f"{room}: lower generation.max_new_tokens, or shorten the prompts"
    return Finding(("generation.max_prompt_tokens",), rule, remedy)


# -- counting -----


def _counted(topology: Topology, scans: Mapping[str, Scan]) -> Iterator[Counted]:
    if topology.scripted:
        for scan in scans.values():
            tokens = tuple(-(-size // BYTES_PER_TOKEN) for size in scan.sizes)
            lines = tuple(range(1, scan.count + 1))
            how = f"one for {BYTES_PER_TOKEN} bytes"
            yield Counted(str(scan.path), scan.count, tokens, lines, (True,) * scan.count, max(tokens, default=1), how)
        return
    light = tokenizer_of(topology)
    sets = {f"validation.set.{index}.data": named_set.data for index, named_set in enumerate(topology.validation.set)}
    for key, path in {"data.train": topology.data.train, "validation.data": topology.validation.data, **sets}.items():
        if path.startswith(TINY):
            yield _tiny(path, light)
        elif key in scans:
            yield _by_bytes(topology, scans[key]) if light is None else _by_tokens(topology, scans[key], light)


def tokenizer_of(topology: Topology) -> LightTokenizer | None:
    folder, tiny = pretrained.model_at(topology.model.path), topology.model.path.startswith(TINY)
    return LightTokenizer.of(folder, tools_of_chats(topology.openai), by_file=tiny) if folder else None


def _tiny(path: str, light: LightTokenizer | None) -> Counted:
    """A tiny task's prompts have a known length in characters, made or not."""
    task = pretrained.maker().RECIPES.get(path)
    longest = int(task.max_prompt_tokens) if task else UNKNOWN
    tokens = len(light.ids("9" * longest)) if light is not None else longest
    return Counted(path, 1, (), (), (), max(longest, tokens), "a bound")


def _by_bytes(topology: Topology, scan: Scan) -> Counted:
    chat = topology.data.template == "chat"
    written = len(template_of(Path(topology.model.path)).encode()) + len(topology.data.system.encode()) if chat else 0
    how = "a byte counted as a token: there is no tokenizer.json, or no package tokenizers"
    return Counted(str(scan.path), scan.count, (), (), (), scan.longest_prompt + written + 1, how)


def _by_tokens(topology: Topology, scan: Scan, light: LightTokenizer) -> Counted:
    chosen, spread = lines_to_count(scan)
    tokens = list(_tokens(topology, scan, light, chosen))
    how = "all counted" if len(chosen) == scan.count else (
        f"counted: {len(chosen):,} of {scan.count:,} prompts, the longest by bytes and some spread evenly"
    )
    if topology.data.template == "chat":
        how += ", chat template included"
    if not light.as_engines:
        how += "; by tokenizer.json, for transformers cannot be asked here: an engine counts again when it starts"
    lines = tuple(index + 1 for index in chosen)
    bound = max([1, *tokens, _rest(scan, chosen, tokens)])
    margin = max(LEAST_MARGIN, bound // MARGIN)
    return Counted(str(scan.path), scan.count, tuple(tokens), lines, tuple(spread), bound, how, light.highest, margin)


def lines_to_count(scan: Scan) -> tuple[list[int], list[bool]]:
    """Choose the lines to count, in the order of the file, and those that stand for the whole file."""
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
            yield from light.counts(prompts, topology.data.template == "none")


def _rest(scan: Scan, chosen: Sequence[int], tokens: Sequence[int]) -> int:
    """A bound on the tokens of the prompts that were not counted."""
    if len(chosen) == scan.count:
        return 0
    sizes = np.frombuffer(scan.sizes, np.int64)
    counted, left = sizes[list(chosen)], np.delete(sizes, list(chosen))
    overhead = min(tokens)  # about what the template writes around a short prompt
    most = float(np.max((np.asarray(tokens) - overhead) / np.maximum(1, counted)))
    return overhead + int(most * int(left.max())) + 1
