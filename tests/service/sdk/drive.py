"""The real SDK, unmodified, through the calls that it offers a trainer; says what each gave.

    TINKER_API_KEY=... python drive.py URL NAME

Ends with 1 if a call failed.
"""

import asyncio
import pickle
import sys
import time
import warnings

import tinker
import torch
from tinker import types

warnings.simplefilter("ignore")
URL, NAME = sys.argv[1:3]
FAILED = []


def case(function):
    began = time.time()
    try:
        said = function()
        print(f"ok    {function.__name__:28s} {time.time() - began:6.2f} s  {said}", flush=True)
    except Exception as error:
        FAILED.append(function.__name__)
        text = f"{type(error).__name__}: {str(error)[:300]}"
        print(f"FAIL  {function.__name__:28s} {time.time() - began:6.2f} s  {text}", flush=True)


def datum(text, **inputs):
    ids = tokenizer.encode(text)
    n = len(ids) - 1
    filled = {k: [float(v)] * n if isinstance(v, (int, float)) else v for k, v in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]),
                       loss_fn_inputs={"target_tokens": ids[1:], **filled})


def prompt_of(text):
    return types.ModelInput.from_ints(tokenizer.encode(text))


service = tinker.ServiceClient(base_url=URL)
rest = tinker.RestClient(base_url=URL)
print("tinker", tinker.__version__, rest.get_server_capabilities().result())
training = service.create_lora_training_client(base_model=NAME, rank=4, seed=7).result()
tokenizer = training.get_tokenizer()
texts = [f"What is {a} plus {b}? {a + b}" for a in range(4) for b in range(2)]
supervised = [datum(text, weights=1.0) for text in texts]
adam = types.AdamParams(learning_rate=1e-2)


@case
def info():
    about = training.get_info()
    return about.model_id[-8:], about.model_data.model_name, about.lora_rank


@case
def forward():
    out = training.forward(supervised, "cross_entropy").result()
    assert len(out.loss_fn_outputs) == 8
    assert len(out.loss_fn_outputs[0]["logprobs"].data) == supervised[0].model_input.length
    return out.metrics


@case
def cross_entropy_learns():
    losses = []
    for _ in range(5):
        loss, step = training.forward_backward(supervised, "cross_entropy"), training.optim_step(adam)
        losses.append(round(loss.result().metrics["loss:sum"], 2))
        step.result()
    assert losses[-1] < losses[0]
    return losses, step.result().metrics


@case
def policy_losses():
    said = {}
    for name in ("importance_sampling", "ppo", "cispo"):
        config = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1} if name in ("ppo", "cispo") else None
        data = [datum(text, logprobs=-4.0, advantages=1.0) for text in texts]
        said[name] = round(training.forward_backward(data, name, config).result().metrics["loss:sum"], 2)
    training.optim_step(adam).result()
    return said


@case
def custom_loss():
    def loss(data, logprobs):
        value = -torch.cat(logprobs).mean()
        return value, {"mine": float(value)}
    future = training.forward_backward_custom(supervised, loss)
    step = training.optim_step(adam)
    out = future.result()
    step.result()
    return out.metrics


@case
def many_chunks():
    """More than 1,024 data: the chunks travel together, the first one last."""
    out = training.forward([datum("a b", weights=1.0) for _ in range(2100)], "cross_entropy").result()
    assert len(out.loss_fn_outputs) == 2100
    return out.metrics


@case
def two_dimensional_targets():
    ids = tokenizer.encode(texts[0])
    wide = torch.tensor([[token, 5] for token in ids[1:]])
    weights = torch.tensor([[0.5, 0.5]] * len(wide))
    one = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]),
                      loss_fn_inputs={"target_tokens": wide, "weights": weights})
    return training.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].shape


@case
def sparse_targets():
    """Targets of which the SDK sends the listed ones alone."""
    ids = tokenizer.encode(texts[0])
    wide, weights = torch.zeros(len(ids) - 1, 8, dtype=torch.int64), torch.zeros(len(ids) - 1, 8)
    wide[:, 0], weights[:, 0] = torch.tensor(ids[1:]), 1.0
    one = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]),
                      loss_fn_inputs={"target_tokens": wide, "weights": weights})
    assert one.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    sparse, plain = (training.forward([data], "cross_entropy").result() for data in (one, datum(texts[0], weights=1.0)))
    gap = abs(sparse.metrics["loss:sum"] - plain.metrics["loss:sum"])
    assert gap < 1e-3, gap
    return sparse.loss_fn_outputs[0]["logprobs"].shape, f"{gap:.1e}"


@case
def sampling():
    global sampler
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=0.7, seed=1)
    out = sampler.sample(prompt_of(texts[0][:14]), 3, params, include_prompt_logprobs=True, topk_prompt_logprobs=2,
                         topk_sample_logprobs=3).result()
    one = out.sequences[0]
    assert len(out.sequences) == 3 and len(one.tokens) == len(one.logprobs) and out.prompt_logprobs[0] is None
    return one.stop_reason, one.sequence_id[-12:], len(out.prompt_logprobs)


@case
def stops():
    said = {}
    for name, stop in (("none", None), ("text", [" "]), ("ids", [tokenizer.encode(" ")[0]])):
        params = types.SamplingParams(max_tokens=12, stop=stop, seed=3)
        out = sampler.sample(prompt_of("What"), 1, params).result()
        said[name] = out.sequences[0].stop_reason, len(out.sequences[0].tokens)
    return said


@case
def compute_logprobs():
    prompt = prompt_of(texts[0])
    whole = sampler.compute_logprobs(prompt).result()
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    out = training.forward([datum(texts[0], weights=1.0)], "cross_entropy").result()
    gap = max(abs(a - b) for a, b in zip(whole[1:], out.loss_fn_outputs[0]["logprobs"].data))
    assert gap < 1e-4 and last[:-2] == [None] * (len(last) - 2)
    return f"sampler and trainer differ by {gap:.1e}"


@case
def targets_of_a_prompt():
    """Two ids at two places, as a sparse tensor; one of them is the prompt's own."""
    ids = tokenizer.encode(texts[0])
    cells = torch.full((len(ids) - 1, 4), -1, dtype=torch.int64)
    cells[1, 1], cells[4, 0], cells[4, 2] = ids[2], 6, ids[5]
    target = types.TensorData.from_torch_sparse(cells, pad_value=-1)
    assert target.sparse_crow_indices is not None
    out = sampler.sample(types.ModelInput.from_ints(ids), 1, types.SamplingParams(max_tokens=1),
                         include_prompt_logprobs=True, target_prompt_logprobs=target).result()
    told = out.target_prompt_logprobs.to_torch()
    assert out.target_prompt_logprobs.sparse_crow_indices is not None and told.shape == cells.shape
    assert abs(told[1, 1] - out.prompt_logprobs[2]) < 1e-5 and abs(told[4, 2] - out.prompt_logprobs[5]) < 1e-5
    return int((told != 0).sum())


@case
def snapshot_is_pinned():
    """A sampler keeps the weights it was made from while training goes on."""
    prompt = prompt_of(texts[0])
    before = sampler.compute_logprobs(prompt).result()
    training.forward_backward(supervised, "cross_entropy")
    training.optim_step(adam).result()
    later = training.save_weights_and_get_sampling_client().result()
    assert sampler.compute_logprobs(prompt).result() == before != later.compute_logprobs(prompt).result()


@case
def pickled_sampler():
    copy = pickle.loads(pickle.dumps(sampler))
    out = copy.sample(types.ModelInput.from_ints([5, 6]), 1, types.SamplingParams(max_tokens=2)).result()
    return out.sequences[0].sequence_id.split(":")[-2]


@case
def base_model_sampler():
    base = service.create_sampling_client(base_model=NAME).result()
    out = base.sample(types.ModelInput.from_ints([5]), 1, types.SamplingParams(max_tokens=3)).result()
    return base.get_base_model(), len(out.sequences)


@case
def save_and_load():
    def loss(client):
        return client.forward(supervised, "cross_entropy").result().metrics["loss:sum"]

    path, at = training.save_state("one", overwrite=True).result().path, loss(training)
    for kind in (service.create_training_client_from_state, service.create_training_client_from_state_with_optimizer):
        assert loss(kind(path).result()) == at
    training.load_state_with_optimizer(path).result()
    assert loss(training) == at
    return path.split("/", 3)[-1], round(at, 3)


@case
def named_sampler():
    path = training.save_weights_for_sampler("s1").result().path
    named = service.create_sampling_client(model_path=path).result()
    return named.get_base_model(), rest.get_weights_info_by_tinker_path(path).result().lora_rank


@case
def two_models_at_once():
    other = service.create_lora_training_client(base_model=NAME, rank=2, seed=1).result()
    losses = [client.forward_backward(supervised, "cross_entropy") for client in (other, training)]
    for step in [client.optim_step(adam) for client in (other, training)]:
        step.result()
    return [round(loss.result().metrics["loss:sum"], 2) for loss in losses]


@case
def user_error():
    """A bad datum: the future fails, and the model goes on."""
    nonsense = types.TensorData(data=[1.0] * 3, dtype="float32", shape=[3])
    try:
        training.forward_backward([datum(texts[0], nonsense=nonsense)], "cross_entropy").result()
    except tinker.RequestFailedError as error:
        said = error.category.name, str(error)[:90]
    training.forward(supervised, "cross_entropy").result()
    return said


@case
def no_half_step():
    """One chunk of a call is refused: the step behind it too, and nothing has changed."""
    client = service.create_lora_training_client(base_model=NAME, rank=2).result()
    good, bad = datum("a b", weights=1.0), datum("a b", weights=1.0, advantages=1.0)
    before = client.forward([good], "cross_entropy").result().metrics
    said = []
    for future in (client.forward_backward([good] * 1024 + [bad], "cross_entropy"), client.optim_step(adam)):
        try:
            said.append(future.result().metrics)
        except tinker.RequestFailedError as error:
            said.append(error.category.name)
    assert client.forward([good], "cross_entropy").result().metrics == before
    assert not any(isinstance(answer, dict) for answer in said), said
    return said


@case
def awaited():
    async def main():
        futures = [training.forward(supervised[:1], "cross_entropy") for _ in range(3)]
        return [round((await future).metrics["loss:sum"], 2) for future in futures]
    return asyncio.run(main())


@case
def refused():
    said = {}
    unknown = "tinker://x/sampler_weights/y"
    for name, call in (
        ("unknown model", lambda: service.create_lora_training_client(base_model="Other/Model").result()),
        ("unknown path", lambda: service.create_sampling_client(model_path=unknown).result()),
        ("wrong key", lambda: tinker.RestClient(base_url=URL, api_key="tml-o").get_server_capabilities().result()),
    ):
        try:
            call()
        except Exception as error:
            said[name] = type(error).__name__
    assert len(said) == 3
    return said


@case
def heartbeat_and_close():
    time.sleep(11)
    service.close("success").result()


print(f"failed: {FAILED}")
sys.exit(bool(FAILED))
