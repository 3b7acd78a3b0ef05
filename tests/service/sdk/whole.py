"""A service that trains all weights, by the core calls of the SDK; says what each gave, and ends with 1 if one failed.

    TINKER_API_KEY=... python whole.py URL NAME
"""

import math
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
URL, NAME = sys.argv[1:3]
CLOSE = 2e-3  # between what an engine says of a prompt, and the trainer


def loss_of(client):
    return client.forward([datum], "cross_entropy").result().metrics["loss:sum"]


service = tinker.ServiceClient(base_url=URL)
print("tinker", tinker.__version__)
training = service.create_lora_training_client(base_model=NAME, rank=4, seed=7).result()
about = training.get_info()
assert not about.is_lora, about
ids = training.get_tokenizer().encode("What is 1 plus 2? 3")
inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
losses, samplers, paths = [], [], []
for _ in range(3):
    losses.append(loss_of(training))
    samplers.append(training.save_weights_and_get_sampling_client().result())
    paths.append(training.save_state(f"s{len(paths)}").result().path)
    both = training.forward_backward([datum] * 2, "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-3))
    assert math.isclose(both.result().metrics["loss:sum"], 2 * losses[-1], rel_tol=1e-5)
    step.result()
print("losses", losses)
assert losses[0] > losses[1] > losses[2]

prompt, whole = types.ModelInput.from_ints(ids[:4]), types.ModelInput.from_ints(ids)
futures = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)) for sampler in samplers * 2]
scores = [sampler.compute_logprobs(whole) for sampler in samplers]  # each waits for its own weights
assert [len(future.result().sequences) for future in futures] == [2] * 6
gaps = [abs(sum(score.result()[1:]) + loss) for score, loss in zip(scores, losses, strict=True)]
print("samplers", [f"{gap:.1e}" for gap in gaps])
assert max(gaps) < CLOSE, gaps

training.load_state(paths[0]).result()
assert loss_of(training) == losses[0], "the weights of an earlier state are back to the bit"
print("loaded", paths[0])
try:
    service.create_lora_training_client(base_model=NAME, rank=4).result()
except Exception as refusal:
    print("refused", str(refusal)[:200])
else:
    raise SystemExit("a second model was not refused")
