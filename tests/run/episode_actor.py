"""A process in the place of a rollout: it plays episodes of three turns with the model of the folder."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from busrl.agents.tree import Trajectory, Tree, Turn
from busrl.ring import State
from busrl.roles.actor import Actor
from busrl.roles.episodes import commit_episode, write_episode
from busrl.states import Finish, HeaderWord

TOKENS = 4  # of a turn


class EpisodeActor(Actor):
    role = "rollout"

    def setup(self) -> None:
        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(self.topology.model.path).eval()
        self.first = -1  # the version that this model is

    def work(self) -> bool:
        version, step = self.ring.header(HeaderWord.VERSION), self.ring.header(HeaderWord.VERSION_STEP)
        taken = self.ring.take(State.QUEUED, State.GENERATING, cls=None, limit=4)
        for slot, word in taken:
            line = self.ring.line(slot)
            if self.first < 0:
                self.first, self.step = version, step
            played = self.play(int(line["uid"]), float(line["temperature"]))
            episode = played.trajectory()
            assert episode is not None
            self.commit(slot, word, episode, played)
        return bool(taken)

    def commit(self, slot: int, word: int, episode: Trajectory, played: Tree) -> None:
        write_episode(self.ring, slot, word, episode, episode.text, None, played.transcript(400))
        bell = commit_episode(self.ring, slot, word, episode, episode.step)
        assert bell is not None
        self.ring.add(tokens=len(episode.logprobs), samples=1)
        self.bus.send(bell)

    def play(self, uid: int, temperature: float) -> Tree:
        """Two turns behind each other, a third that was forked from the first; one in eight is not trained."""
        random, tree = np.random.default_rng(uid), Tree()
        words = self.model.config.vocab_size
        first = self.call(tree, None, random.integers(3, words, 5), temperature, random)
        second = self.call(tree, first, random.integers(3, words, 3), temperature, random)
        third = self.call(tree, first, random.integers(3, words, 2), temperature, random, trained=uid % 8 != 0)
        second.reward, third.reward = 0.5 * float(second.ids[0] % 2), -0.25
        return tree

    @torch.no_grad()
    def call(self, tree: Tree, parent: Turn | None, read, temperature: float, random, trained: bool = True) -> Turn:
        asked = tree.ask(parent, read.astype(np.int32), TOKENS, None, None, trained)
        ids, scores = asked.prompt.tolist(), []
        for _ in range(TOKENS):
            logs = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, -1] / temperature, -1)
            chosen = int(random.choice(len(logs), p=torch.softmax(logs.double(), -1).numpy()))
            ids.append(chosen)
            scores.append(min(0.0, float(logs[chosen])))
        drawn = ids[-TOKENS:]
        turn = tree.answer(asked, drawn, scores, [self.first] * TOKENS, Finish.LENGTH, {}, f"{drawn}", step=self.step)
        turn.delivered = True
        self.ring.progress()
        return turn


if __name__ == "__main__":
    sys.exit(EpisodeActor(os.environ["BUSRL_RUN_DIR"], os.environ["BUSRL_NAME"]).main())
