"""Tiny models for the examples of this folder, and their tasks: `python make_several.py [FOLDER]`.

A solver that adds two digits and is right two times in ten, a judge of its answers that is right a little more often
than not, a critic that is what this judge was before it learnt mistakes, and a player of the taking game that moves at
random. Reinforcement learning has mistakes to undo, which takes minutes on a CPU. Making them takes a minute or two.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from transformers.utils.logging import disable_progress_bar

from busrl.quickstart.maker import new_model, new_tokenizer, save
from busrl.quickstart.task import VOCABULARY, Recipe

MADE = Path(__file__).parent / "made"
IDS = {token: index for index, token in enumerate(VOCABULARY)}
BATCH, RISE, STONES, SOLVED_TOO = 128, 50, 7, 0.4
RIGHT, WRONG = "|", "."  # what a judge says
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
Example = tuple[str, str]  # what is read, and the one token that follows
Draw = Callable[[random.Random, float], Example]
Stage = tuple[str, Draw, float, int, float]  # its name, what is drawn, the share of mistakes, steps, learning rate


def sum_of(prompt: str) -> str:
    """The answer to `47=`: the last digit of the sum."""
    return str((int(prompt[0]) + int(prompt[1])) % 10)


def solved(rng: random.Random, mistakes: float) -> Example:
    prompt = f"{rng.randrange(10)}{rng.randrange(10)}="
    return prompt, str(rng.randrange(10)) if rng.random() < mistakes else sum_of(prompt)


def judged(rng: random.Random, mistakes: float) -> Example:
    """A prompt with an answer, right in half of the cases, and a verdict; or a prompt to be solved, without which a
    model would not find out what makes a verdict right."""
    if rng.random() < SOLVED_TOO:
        return solved(rng, 0.0)
    prompt = f"{rng.randrange(10)}{rng.randrange(10)}="
    answer = sum_of(prompt) if rng.random() < 0.5 else str(rng.randrange(10))
    said = (answer == sum_of(prompt)) != (rng.random() < mistakes)
    return f"{prompt}{answer}=", RIGHT if said else WRONG


def taken(rng: random.Random, mistakes: float) -> Example:
    """A position of the taking game, as `games` writes it, and a move: 1 or 2 of the stones that are left."""
    text, left = f"{STONES}=", STONES
    for _ in range(rng.randrange(STONES - 1)):
        move = rng.randint(1, min(2, left))
        if left - move == 0:
            break
        text, left = f"{text}{move}{left - move}=", left - move
    return text, str(rng.randint(1, min(2, left)))


def train(stages: list[Stage], folder: Path) -> None:
    """Train one model by stages, and save it after each that has a name."""
    rng, model = random.Random(0), new_model(Recipe())
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for name, draw, mistakes, steps, lr in stages:
        for step in range(steps):
            rows = [draw(rng, mistakes) for _ in range(BATCH)]
            ids = torch.zeros(BATCH, max(len(text) for text, _ in rows), dtype=torch.long)
            for place, (text, _) in enumerate(rows):
                ids[place, : len(text)] = torch.tensor([IDS[letter] for letter in text])
            last = torch.tensor([len(text) - 1 for text, _ in rows])
            logits = model(input_ids=ids, use_cache=False).logits[torch.arange(BATCH), last]
            loss = functional.cross_entropy(logits, torch.tensor([IDS[target] for _, target in rows]))
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (step + 1) / RISE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if name:
            save(folder / name, Recipe(), new_tokenizer(Recipe()), model)
            (folder / name / "chat_template.jinja").write_text(TEMPLATE)


TEACH, MASK = 2e-3, 3e-4  # learning rates
MODELS: list[list[Stage]] = [
    [("", solved, 0.0, 200, TEACH), ("solver", solved, 0.78, 150, MASK)],
    [("", solved, 0.0, 200, TEACH), ("critic", judged, 0.0, 500, TEACH), ("judge", judged, 0.4, 150, MASK)],
    [("player", taken, 0.0, 100, TEACH)],
]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    for stages in MODELS:
        train(stages, folder)
    prompts = [f"{a}{b}=" for a in range(10) for b in range(10)]
    sums = [{"prompt": prompt, "answer": sum_of(prompt)} for prompt in prompts]
    for name, tasks in (("sums", sums), ("stones", [{"prompt": f"{STONES}="}])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else MADE)
