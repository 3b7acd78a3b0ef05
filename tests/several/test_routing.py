"""Calls of three models of different vocabularies reach each its own: what a learner was given is what its model says
of it, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checks import check_end
from harness import Run, running

from busrl.ledger.wal import SampleRecord, Wal

SPECIAL = ("<pad>", "<eos>", "<unk>")
MODELS = {  # tag -> its letters, and its width: the same text has other ids in each
    "alpha": (*SPECIAL, *"=0123456789+"),
    "beta": (*"98765=43210abc", *reversed(SPECIAL)),
    "gamma": ("<unk>", *"xyz02468", "<eos>", *"=13579.-uvw", "<pad>"),
}
WIDTHS = {"alpha": 32, "beta": 48, "gamma": 64}
BOUND = 1e-4
EPISODE = '''
async def episode(task, llm):
    """A text goes round: each model reads the task, and what the one before has said."""
    said, worth = "", {}
    for name in ("gamma", "alpha", "beta", "gamma"):
        answer = await llm[name].complete(f"{task['prompt']}{said}", max_tokens=6)
        said, worth[name] = "".join(letter for letter in answer.text if letter in "0123456789"), sum(answer.ids) % 5
    return worth
'''
TOPOLOGY = '''
{models}
[data]
train = "{folder}/tasks.jsonl"
[groups]
size = 4
[generation]
max_new_tokens = 8
max_prompt_tokens = 16
[learner]
lr = 1e-3
[weights]
mode = "sync"
max_staleness = 0
[agents]
episodes = 32
context = 24
[[process]]
role = "agent"
function = "{folder}/episode.py:episode"
'''


def make_model(folder: Path, tokens: tuple[str, ...], width: int) -> None:
    """A random model that prefers some tokens strongly, with one token for each of these."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    ids = {token: at for at, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated"), decoders.Fuse()
    made: Any = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.save_pretrained(folder)
    torch.manual_seed(width)
    config = Qwen3Config(
        vocab_size=len(ids), hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=width // 2, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.3, pad_token_id=ids["<pad>"], eos_token_id=ids["<eos>"],
        bos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)


def three(folder: Path, steps: int) -> Run:
    for tag, tokens in MODELS.items():
        make_model(folder / tag, tokens, WIDTHS[tag])
    (folder / "tasks.jsonl").write_text("".join(f'{{"prompt": "{a}{b}="}}\n' for a in range(10) for b in range(10)))
    (folder / "episode.py").write_text(EPISODE)
    rows = "".join(f'[[model]]\ntag = "{tag}"\npath = "{folder / tag}"\n' for tag in MODELS)
    (folder / "three.toml").write_text(TOPOLOGY.format(models=rows, folder=folder))
    settings = ("learner.trigger.n_min=4", "learner.checkpoint_every=0")
    run = Run(folder / "run", *settings, config=folder / "three.toml", steps=steps)
    run.settings = [setting for setting in run.settings if not setting.startswith("validation")]
    return run


def furthest(model: Any, sample: SampleRecord) -> float:
    """How far a recorded log-probability is from this model's, at most; infinite where it lacks an id."""
    ids, recorded, worst, at = sample.token_array(), sample.logprob_array(), 0.0, 0
    if ids.max() >= model.config.vocab_size:
        return float("inf")
    begins = np.cumsum([0, *sample.seqs]).tolist()
    for sequence, begin, end, _ in sample.turn_array().tolist():
        row = torch.from_numpy(ids[begins[sequence] : begins[sequence + 1]].astype(np.int64))
        said = torch.log_softmax(model(input_ids=row[None]).logits[0].float(), -1)
        own = said[torch.arange(begin - 1, end - 1), row[begin:end]].numpy()
        worst = max(worst, float(np.abs(own - recorded[at : at + end - begin]).max()))
        at += end - begin
    assert at == len(recorded)
    return worst


@pytest.mark.long
@torch.no_grad()
def test_every_record_is_scored_by_its_own_model_and_no_other(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = three(tmp_path, steps=3)
    with running(run):
        check_end(run, run.wait())
    models = {tag: AutoModelForCausalLM.from_pretrained(tmp_path / tag) for tag in MODELS}
    for tag in MODELS:
        paths = run.paths if tag == next(iter(MODELS)) else run.paths.of_tag(tag)  # the first one leads
        samples = [sample for record in Wal(paths.wal).records() for sample in record.samples]
        drawn = [sample for sample in samples if not sample.version_array().any()]  # by the folder's own weights
        assert len(drawn) >= 8 and len(samples) > len(drawn), [sample.version_array().tolist() for sample in samples]
        for sample in drawn:
            far = {other: furthest(model, sample) for other, model in models.items()}
            assert far.pop(tag) < BOUND, (tag, sample.uid)
            assert min(far.values()) > BOUND, (tag, sample.uid, far)
