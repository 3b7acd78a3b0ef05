"""The core calls alone, by any version of the SDK since 0.24; says what each gave, and ends with 1 if one failed.

    TINKER_API_KEY=... PYTHONPATH=FOLDER_OF_A_VERSION python small.py URL NAME
"""

import math
import pickle
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
URL, NAME = sys.argv[1:3]


def made(client, call):
    """The client that a call gives at once in some versions, by a future in others."""
    return client if hasattr(client, call) else client.result()


def loss(future):
    return future.result().metrics["loss:sum"]


service = tinker.ServiceClient(base_url=URL)
print("tinker", tinker.__version__)
training = made(service.create_lora_training_client(base_model=NAME, rank=4, seed=7), "forward_backward")
ids = training.get_tokenizer().encode("What is 1 plus 2? 3")
inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
before = loss(training.forward([datum], "cross_entropy"))
both = training.forward_backward([datum] * 3, "cross_entropy")
step = training.optim_step(types.AdamParams(learning_rate=1e-2))
assert math.isclose(loss(both), 3 * before, rel_tol=1e-5), (loss(both), before)
step.result()
after = loss(training.forward([datum], "cross_entropy"))
assert after < before
print("loss", before, after)

named = ("now",) if tinker.__version__ < "0.25" else ()
sampler = made(training.save_weights_and_get_sampling_client(*named), "sample")
prompt = types.ModelInput.from_ints(ids[:4])
futures = [sampler.sample(prompt, 2, types.SamplingParams(max_tokens=4)) for _ in range(6)]
assert [len(future.result().sequences) for future in futures] == [2] * 6
scores = sampler.compute_logprobs(types.ModelInput.from_ints(ids)).result()
assert abs(sum(scores[1:]) + after) < 1e-3, (scores, after)
clone = pickle.loads(pickle.dumps(sampler))
print("clone", clone.sample(prompt, 1, types.SamplingParams(max_tokens=2)).result().sequences[0].stop_reason)

path = training.save_state("s").result().path
again = made(service.create_training_client_from_state_with_optimizer(path), "forward_backward")
assert loss(again.forward([datum], "cross_entropy")) == after
print("from state", path)
