"""What it costs to render a conversation anew for each turn: the same task with both values of `agents.history`.

    python -m benchmarks rerender [--turns 6] [--steps 60] [--seeds 0 1] [--json FILE]

A tiny model with new weights and a template of Qwen3's kind, which opens a thought in each turn and leaves the thoughts
of earlier turns out. In each turn it is asked for one of two letters; an episode is worth the share of that letter in
what it says behind its thoughts, over its turns. Told of both, per episode: training sequences, ids that the learner
reads, ids that engines compute, and the mean reward of the first and the last ten steps.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import ROOT
from benchmarks.common import report, runs

ANSWER, LETTERS = 16, "abcdefgh"
SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
TEMPLATE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' and loop.last %}<think>\n{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
EPISODE = '''
import random

async def episode(task, llm):
    chance, messages, worth = random.Random(task["prompt"]), [], 0.0
    for _ in range({turns}):
        letter = chance.choice("ab")
        messages.append({{"role": "user", "content": letter}})
        reply = await llm.chat(messages)
        said = (reply["content"] or "").strip() if reply.get("reasoning_content") is not None else ""
        worth += said.count(letter) / len(said) if said else 0.0
        messages.append(reply)
    return worth / {turns}
'''
CONFIG = '''
[run]
name = "rerender"
seed = {seed}
max_steps = {steps}
[model]
path = "{folder}/model"
device = "cpu"
[data]
train = "{folder}/prompts.jsonl"
template = "chat"
[groups]
size = 8
[generation]
max_new_tokens = {answer}
max_batch = 128
[agents]
episodes = 128
context = {context}
sampled = {sampled}
tokens = {tokens}
history = "{history}"
[learner]
lr = 3e-3
[learner.trigger]
n_min = 8
[weights]
max_staleness = 2
[[process]]
role = "learner"
[[process]]
role = "rollout"
[[process]]
role = "agent"
function = "{folder}/talk.py:episode"
'''


def model_folder(folder: Path, positions: int) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = [*SPECIAL, "user", "assistant", "\n", *LETTERS]
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"user|assistant|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens([AddedToken(one, special=one in SPECIAL[:3], normalized=False) for one in SPECIAL])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(str(folder))
    model: Any = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(words), hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, tie_word_embeddings=True, max_position_embeddings=positions, pad_token_id=0,
        eos_token_id=SPECIAL.index("<|im_end|>"), bos_token_id=None,
    ))
    model.save_pretrained(str(folder))


def measured(folder: Path, history: str, turns: int, steps: int, seed: int) -> dict[str, Any]:
    context = turns * (ANSWER + 12)
    config = folder / f"{history}-{seed}.toml"
    config.write_text(CONFIG.format(
        folder=folder, history=history, seed=seed, steps=steps, answer=ANSWER, context=context, sampled=turns * ANSWER,
        tokens=turns * context,
    ))
    with runs.run(config=config) as run:
        if run.wait():
            raise RuntimeError(run.tail())
        rows = [json.loads(line) for line in run.paths.metrics.read_text().splitlines()]
    rows = [row for row in rows if "kind" not in row]

    def mean(value: Any, of: list[dict[str, Any]] = rows) -> float:
        return fmean(value(row) for row in of)

    return {
        "history": history, "seed": seed, "sequences": mean(lambda row: row["episodes"]["sequences_mean"]),
        "read": mean(lambda row: row["episodes"]["context_tokens_mean"] + row["tokens"] / row["samples"]),
        "trained": mean(lambda row: row["tokens"] / row["samples"]),
        "computed": mean(lambda row: row["episodes"]["computed_per_trained"] * row["tokens"] / row["samples"]),
        "learner_s": mean(lambda row: row["forward_s"] + row["backward_s"]),
        "first": mean(lambda row: row["reward"], rows[:10]), "last": mean(lambda row: row["reward"], rows[-10:]),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs.LIMIT_S = 900.0
    told: list[dict[str, Any]] = []
    print(f"{options.turns} turns, {options.steps} steps of 64 episodes; per episode\n"
          "| history | seed | sequences | ids that the learner reads | of them trained | ids that engines compute "
          "| forward and backward of a step | reward, first and last ten steps | load |\n|" + "---|" * 9, flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_folder(folder / "model", options.turns * (ANSWER + 12))
        (folder / "talk.py").write_text(EPISODE.format(turns=options.turns))
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{k}"}) + "\n" for k in range(1000)))
        for seed in options.seeds:
            for history in ("extend", "template"):
                one = measured(folder, history, options.turns, options.steps, seed)
                told.append(one)
                print(f"| {history} | {seed} | {one['sequences']:.2f} | {one['read']:.0f} | {one['trained']:.0f} "
                      f"| {one['computed']:.0f} | {one['learner_s']:.2f} s | {one['first']:.3f}, {one['last']:.3f} "
                      f"| {one['load']:.1f} |", flush=True)
    if options.json:
        made = {"machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%F %R"),
                "turns": options.turns, "steps": options.steps, "runs": told}
        options.json.write_text(json.dumps(made, indent=1) + "\n")
