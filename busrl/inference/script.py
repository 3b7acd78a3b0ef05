"""What a scripted engine answers: lengths and rewards of the trace that is data.train, and made-up tokens.

Talks to the trace through `JsonlStream`, as the scheduler does: the uid of a sample names its draw and its member.
Knows nothing of time or of rows. Imports no torch.

- A sample's answer depends on (seed, uid) and its line alone: any actor can continue another one's segment.
- Tokens are drawn evenly from the model's plain ids and their log-probability is that of this draw, so a real learner
  can train on them. It learns nothing.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from busrl.data import JsonlStream, Prompt, plain_text, trace
from busrl.errors import UserError
from busrl.topology.machine import Vocabulary, vocabulary

if TYPE_CHECKING:
    from busrl.topology import Topology

BYTES_PER_TOKEN = 4  # of a prompt: what tokenizers come to for plain text
LINES_KEPT = 4096
RIGHT = 0.5  # a reward of the trace that is at least this is a right answer
WRONG = "wrong"


class _Line(NamedTuple):
    task: trace.Task
    answer: str


class Script:
    """Answers by uid. `groups_of` is the group size, `right` the share of right answers where a line does not say."""

    def __init__(
        self,
        stream: JsonlStream,
        ids: Vocabulary,
        groups_of: int,
        *,
        seed: int = 0,
        right: float = 0.5,
        answer_key: str = "answer",
    ) -> None:
        self.stream, self.group_size, self.seed, self.right = stream, groups_of, seed, right
        self.answer_key = answer_key
        self._plain = np.array(ids.plain, np.int32)
        self._eos = ids.eos
        self._lines: OrderedDict[int, _Line] = OrderedDict()

    def length(self, uid: int) -> int:
        """Tokens of the whole answer, the end of sequence included."""
        line, member = self._of(uid)
        return line.task.length(member)

    def tokens(
        self, uid: int, begin: int, end: int, ended: bool
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Ids and log-probabilities of tokens [begin, end) of the answer; the last is the end of sequence if it has
        `ended`."""
        drawn = np.random.default_rng([self.seed, uid]).integers(len(self._plain), size=end)[begin:]
        ids = self._plain[drawn]
        if ended:
            ids[-1] = self._eos
        return ids, np.full(len(ids), -math.log(len(self._plain) + 1), np.float32)

    def text(self, uid: int, ended: bool) -> str:
        """The right answer, or a wrong one; what was cut is wrong."""
        line, member = self._of(uid)
        given = line.task.reward(member)
        right = self._coin(uid) < self.right if given is None else given >= RIGHT
        if right and ended:
            return line.answer
        return WRONG if line.answer != WRONG else f"not {WRONG}"

    def encode(self, prompt: Prompt) -> list[int]:
        """A prompt as plain ids, one for each four bytes; of a chat the words count, not the template."""
        data = plain_text(prompt).encode()
        words = np.frombuffer(data.ljust(-(-len(data) // BYTES_PER_TOKEN) * BYTES_PER_TOKEN, b" "), "<u4")
        found: list[int] = self._plain[words % len(self._plain)].tolist()
        return found

    def _of(self, uid: int) -> tuple[_Line, int]:
        draw, member = uid // (2 * self.group_size), uid % self.group_size
        line = self._lines.get(draw)
        if line is None:
            line = self._lines[draw] = self._read(draw)
            if len(self._lines) > LINES_KEPT:
                self._lines.popitem(last=False)
        return line, member

    def _read(self, draw: int) -> _Line:
        item = self.stream.item(draw)
        place = f"{self.stream.path}:{item.index + 1}"
        given = self.stream.record(item).get(self.answer_key, "")
        answer = (given if isinstance(given, str) else json.dumps(given)).strip()
        return _Line(trace.parse(item.line, place, self.stream.prompt_key), answer)

    def _coin(self, uid: int) -> float:
        return zlib.crc32(f"{self.seed} {uid}".encode()) / (1 << 32)


def make_script(topology: Topology) -> Script:
    """The script of a topology; `UserError` if the model does not say which token ids it has."""
    data, seed = topology.data, topology.run.seed
    ids = vocabulary(Path(topology.model.path))
    if ids is None:
        raise UserError(f"{topology.model.path}: config.json does not say vocab_size and eos_token_id; see model.path")
    stream = JsonlStream(data.train, seed, data.shuffle, data.prompt_key)
    return Script(
        stream, ids, topology.groups.size, seed=seed, right=topology.mock.right, answer_key=topology.reward.answer_key
    )
