"""A tiny model that plays both games of `games.py` badly, and their tasks: `python make_games.py [FOLDER]`.

It learns from transcripts with so many wrong moves that the mean reward is about 0.3: reinforcement learning then has
something to undo within minutes on a CPU. Takes half a minute on one core. The model is that of the quickstart, with
fresh weights.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch.nn import functional

from busrl.quickstart.maker import new_model, new_tokenizer, save
from busrl.quickstart.task import VOCABULARY, Recipe

MADE = Path(__file__).parent / "made"
IDS = {token: index for index, token in enumerate(VOCABULARY)}
TEMPLATE = (  # contents one after another; a call of the calculator is the digits of its arguments
    "{% for message in messages %}{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.arguments.a }}{{ call.function.arguments.b }}{% endfor %}{% endfor %}"
)
STEPS, BATCH, LR, WRONG, WILD = 400, 128, 2e-3, 0.36, 0.62
Moves = list[tuple[str, bool]]  # text, and whether it is the model's


def calculation(rng: random.Random) -> Moves:
    """A transcript of the calculator: each of the model's three digits is wrong in a third of all cases."""
    a, b = rng.randrange(10), rng.randrange(10)
    keys = [str(rng.randrange(10)) if rng.random() < WRONG else str(digit) for digit in (a, b)]
    show = sum(map(int, keys)) % 10
    answer = rng.randrange(10) if rng.random() < WRONG else show
    return [(f"{a}{b}=", False), ("".join(keys), True), (f"|{show}=", False), (str(answer), True)]


def guessing(rng: random.Random) -> Moves:
    """A transcript of guessing: the model takes the middle of the numbers that are left, or else any digit."""
    hidden, low, high = rng.randint(1, 6), 1, 6
    moves: Moves = [("=", False)]
    for _ in range(3):
        digit = rng.randint(1, 6) if rng.random() < WILD else (low + high) // 2
        moves.append((str(digit), True))
        if digit == hidden:
            break
        moves.append(("|" if digit < hidden else ".", False))
        low, high = (max(low, digit + 1), high) if digit < hidden else (low, min(high, digit - 1))
        low, high = (low, high) if low <= high else (1, 6)
    return moves


def batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [calculation(rng) if rng.random() < 0.5 else guessing(rng) for _ in range(BATCH)]
    width = max(sum(len(text) for text, _ in row) for row in rows)
    ids, labels = torch.zeros(BATCH, width, dtype=torch.long), torch.full((BATCH, width), -100)
    for place, row in enumerate(rows):
        letters = [(IDS[letter], by_model) for text, by_model in row for letter in text]
        ids[place, : len(letters)] = torch.tensor([index for index, _ in letters])
        labels[place, : len(letters)] = torch.tensor([index if by_model else -100 for index, by_model in letters])
    return ids, labels


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    recipe, rng = Recipe(), random.Random(0)
    model = new_model(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for _ in range(STEPS):
        ids, labels = batch(rng)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "model", recipe, new_tokenizer(recipe), model)
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    sums = [{"prompt": f"{a}{b}=", "answer": str((a + b) % 10)} for a in range(10) for b in range(10)]
    numbers = [{"prompt": "=", "answer": str(number)} for number in range(1, 7)]
    for name, tasks in (("calculator", sums), ("guess", numbers)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else MADE)
