"""Teaches the tiny model of `hub.py` the sums of rl_loop, and makes it doubt them, so that a reward can rise.

    cd FOLDER && python teach.py [SEED] [REWARD]

Needs the cookbook, whose renderer makes the prompts. Answers are all right at first, until nearly all that the model
draws is right; then they are numbers at random, until what it draws earns REWARD. Prints that as a line of JSON.
"""

import functools
import json
import random
import sys

import torch
import transformers
from tinker_cookbook import renderers

NAME = "Qwen/Qwen3-8B"
SEED, REWARD = int((*sys.argv[1:2], 0)[0]), float((*sys.argv[2:3], 0.3)[0])
ASKED = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = ("Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
           "We have r's at positions 3, 8, and 9. \\boxed{3}")
SUMS = [(a, b) for a in range(4) for b in range(4)]
MOST, MOST_STEPS = 6, 600
torch.manual_seed(SEED)
torch.set_num_threads(1)
tokenizer = transformers.AutoTokenizer.from_pretrained(NAME)
model = transformers.AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.float32)
renderer = renderers.get_renderer("qwen3", tokenizer)
ENDS = renderer.get_stop_sequences()[:1]


@functools.cache
def prompt(a, b):
    """The prompt that rl_loop sends for a question."""
    return renderer.build_generation_prompt([
        {"role": "user", "content": "How many r's are in strawberry?" + ASKED},
        {"role": "assistant", "content": SPELLED},
        {"role": "user", "content": f"What is {a} plus {b}?" + ASKED},
    ]).to_ints()


def answer(number):
    return tokenizer.encode(f"\\boxed{{{number}}}") + ENDS


def scores(answers):
    """Log-probabilities of the tokens of an answer to each question, (questions, tokens)."""
    ids = torch.tensor([prompt(*question) + tokens for question, tokens in zip(SUMS, answers)])
    width = len(answers[0])
    logprobs = model(ids[:, :-1], logits_to_keep=width).logits.log_softmax(-1)
    return logprobs.gather(-1, ids[:, -width:, None])[..., 0]


def reward():
    """The mean reward of answers drawn at temperature 1."""
    with torch.no_grad():
        return float(scores([answer(a + b) for a, b in SUMS]).sum(-1).exp().mean())


def learn(answers, lr, until):
    """Learn answers until the reward is what it should be; every fifth step looks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(MOST_STEPS):
        if step % 5 == 0 and until(reward()):
            return
        (-scores(answers()).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise SystemExit(f"the reward is {reward():.2f} after {MOST_STEPS} steps")


rng = random.Random(SEED)
learn(lambda: [answer(a + b) for a, b in SUMS], 3e-3, lambda reward: reward > 0.9)
learn(lambda: [answer(rng.randrange(MOST + 1)) for _ in SUMS], 3e-4, lambda reward: reward <= REWARD)
print(json.dumps({"reward": round(reward(), 3)}))
model.save_pretrained(NAME)
