"""Whole episodes of any shape: every token that an engine drew is trained once, behind just the ids that it had read.

Agents here are random programs: they go on, echo their history as they got it or rebuilt, edit it, fork, start
sub-agents, sum up and begin anew, ask for several answers, ask twice, or go away. The engine cuts its tokens where the
tokenizer would not, so that anything which is decoded and encoded again shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import agent_worlds as worlds
import pytest
from agent_worlds import ADD, World, calling, dumped, rebuilt
from hypothesis import given, settings
from hypothesis import strategies as st

from busrl.agents.renderer import Renderer
from busrl.agents.tree import Turn

WORDS = [
    "alpha", "beta", "the", "a", "sum", "of", "", "two", "\n\n", "12", "0.5", "über", "naïve", "数", "(x)", "->", "y",
    "<b>", "{}", "'quoted'", '"too"',
]
TEMPLATES = ["qwen2_5", "qwen3", "opened", "llama3", "gemma", "glm", "mistral", "inside", "closing"]
APPENDED = [name for name in TEMPLATES if name not in ("closing", "inside")]  # "inside" needs the text to the letter
Renderers = Callable[[str], Renderer]
ECHO = (dict, dumped, rebuilt)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Renderers:
    by_template: dict[str, Renderer] = {}

    def of(template: str) -> Renderer:
        if template not in by_template:
            by_template[template] = worlds.renderer(tmp_path_factory.mktemp("model"), template)
        return by_template[template]

    return of


class Agent:
    """One conversation: its messages, and how it writes answers back."""

    def __init__(self, world: World, template: str, echo: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.world, self.template, self.echo = world, template, echo
        self.chance = world.random
        self.tools = None if template == "gemma" else [ADD]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self.words()}]
        if template != "gemma" and self.chance.random() < 0.5:
            self.messages.insert(0, {"role": "system", "content": "Be brief."})

    def words(self) -> str:
        return " ".join(self.chance.choice(WORDS) for _ in range(self.chance.randint(1, 9))) or "x"

    def text(self) -> str:
        """What the model says: thinking, text, one or two calls in some spelling, or a call that is none."""
        head = f"{self.words()}\n</think>\n\n" if self.template == "opened" else ""
        if self.template == "qwen3" and self.chance.random() < 0.7:
            head = f"<think>\n{self.words()}\n</think>\n\n"
        if self.tools and self.chance.random() < 0.6:
            pairs = [(self.chance.randint(0, 99), 2) for _ in range(1 if self.template == "llama3" else 2)]
            beside = "" if self.chance.random() < 0.5 else self.words()
            return head + calling(self.template, *pairs[: self.chance.randint(1, 2)], text=beside.strip(),
                                  gap=self.chance.choice(["", " ", "  "]))
        return head + self.words() + self.chance.choice(["", "\n", " ", "<tool_call>{", "<tool_call>{}</tool_call>"])

    def ask(self, **how: Any) -> Any:
        return self.world.ask(self.messages, self.tools, **how)

    def go_on(self, turn: Turn) -> None:
        """What follows an answer: results of its calls, or the next question."""
        self.messages.append(self.echo(turn.message))
        calls = self.messages[-1].get("tool_calls") or []
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": self.words()} for call in calls]
        if not calls:
            self.messages.append({"role": "user", "content": self.words()})

    def turn(self, **how: Any) -> Turn:
        wanted = how.pop("wanted", 4096)
        turn = self.world.answer(self.ask(wanted=wanted), self.text(), **how)
        self.go_on(turn)
        return turn


def programs() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(list(ACTIONS)), min_size=1, max_size=10)


def edited(agents: list[Agent], chance: random.Random) -> None:
    """A user message of the history is another one from now on."""
    agent = chance.choice(agents)
    place = chance.choice([n for n, message in enumerate(agent.messages) if message["role"] == "user"])
    agent.messages[place] = {"role": "user", "content": agent.words()}
    agent.turn()


def forked(agents: list[Agent], chance: random.Random) -> None:
    old = chance.choice(agents)
    new = Agent(old.world, old.template, chance.choice(ECHO))
    turns = [n for n, message in enumerate(old.messages) if message["role"] == "user"]
    new.messages = old.messages[: chance.choice(turns) + 1]
    agents.append(new)
    new.turn()


def sub_agents(agents: list[Agent], chance: random.Random) -> None:
    """Two at the same time, on the same messages; their answers come in another order."""
    new = [Agent(agents[0].world, agents[0].template, chance.choice(ECHO)) for _ in range(2)]
    new[1].messages = list(new[0].messages)
    for _ in range(2):
        under_way = [(agent, agent.ask()) for agent in new]
        for agent, call in reversed(under_way):
            agent.go_on(agent.world.answer(call, agent.text()))
    agents += new


def compacted(agents: list[Agent], chance: random.Random) -> None:
    agent = chance.choice(agents)
    summary = agent.turn()
    agent.messages = [{"role": "user", "content": f"So far: {summary.message['content']} Go on."}]
    agent.turn()


def several(agents: list[Agent], chance: random.Random) -> None:
    """n = 3, and one of them is taken further; the others are delivered all the same."""
    agent = chance.choice(agents)
    calls = [agent.ask() for _ in range(3)]
    agent.go_on(chance.choice([agent.world.answer(call, agent.text()) for call in calls]))


def gone(agents: list[Agent], chance: random.Random) -> None:
    """Nobody waits for the answer; the client asks the same anew, or it does not."""
    agent = chance.choice(agents)
    agent.world.answer(agent.ask(), agent.text(), deliver=False)
    if chance.random() < 0.5:
        agent.turn()


def cancelled(agents: list[Agent], chance: random.Random) -> None:
    agent = chance.choice(agents)
    agent.world.tree.cancel(agent.ask()[0])
    agent.turn()


ACTIONS: dict[str, Callable[[list[Agent], random.Random], Any]] = {
    "on": lambda agents, chance: chance.choice(agents).turn(), "cut": lambda agents, chance: chance.choice(agents).turn(
        wanted=chance.randint(1, 9)),
    "edited": edited, "forked": forked, "sub_agents": sub_agents, "compacted": compacted, "several": several,
    "gone": gone, "cancelled": cancelled,
}


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25)
@given(program=programs(), seed=st.integers(0, 2**32))
def test_every_token_is_trained_once_behind_what_the_engine_had_read(
    renderers: Renderers, template: str, program: list[str], seed: int
) -> None:
    chance = random.Random(seed)
    world = World(renderers(template), chance)
    agents = [Agent(world, template, chance.choice(ECHO))]
    for action in program:
        ACTIONS[action](agents, chance)
    wrong, lost, doubled, _ = world.exact()
    assert (wrong, lost, doubled) == (0, 0, 0)
    assert len(set(world.streams)) == len(world.streams), "every call draws numbers of its own"


@pytest.mark.parametrize("template", APPENDED)
@settings(max_examples=15)
@given(cuts=st.lists(st.booleans(), min_size=1, max_size=8), seed=st.integers(0, 2**32), echo=st.sampled_from(ECHO))
def test_an_episode_that_only_goes_on_is_one_sequence(
    renderers: Renderers, template: str, cuts: list[bool], seed: int, echo: Callable[[Any], Any]
) -> None:
    """Whatever the template makes of thinking, and however the client spells what it got."""
    world = World(renderers(template), random.Random(seed))
    agent = Agent(world, template, echo)
    for cut in cuts:
        agent.turn(wanted=world.random.randint(1, 9) if cut else 4096)
    assert world.exact() == (0, 0, 0, 0)
    assert len(world.tree.sequences()) == 1


def test_of_equal_answers_that_with_the_echoed_reasoning_or_call_is_continued(renderers: Renderers) -> None:
    world, user = World(renderers("qwen3"), random.Random(3)), {"role": "user", "content": "A?"}
    for text in ("<think>\n{}\n</think>\n\n42", "<think>\n{}\n</think>\n\n" + calling("qwen3", (1, 2))):
        calls = [world.ask([user], [ADD]) for _ in range(3)]
        turns = [world.answer(call, text.replace("{}", str(n))) for n, call in enumerate(calls)]
        after = {"role": "user", "content": "B?"}
        assert world.ask([user, turns[1].message, after], [ADD])[0].parent is turns[1]
        assert world.ask([user, rebuilt(turns[1].message), after], [ADD])[0].parent is turns[2], "else the newest"
