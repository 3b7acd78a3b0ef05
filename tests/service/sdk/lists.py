"""The real SDK's lists, deletions and downloads, as its user calls them.

    TINKER_API_KEY=... python lists.py URL NAME FOLDER

Ends with an error at what is not as it should be.
"""

import json
import sys
from pathlib import Path

import tinker
from tinker import types
from tinker_cookbook import weights

URL, NAME, FOLDER = sys.argv[1:4]
service = tinker.ServiceClient(base_url=URL, user_metadata={"who": "lists"})
rest = tinker.RestClient(base_url=URL)
model = service.create_lora_training_client(base_model=NAME, rank=4, train_unembed=False).result()
data = [types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7]),
                    loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})]
model.forward_backward(data, "cross_entropy").result()
model.optim_step(types.AdamParams(learning_rate=0.01)).result()
state = model.save_state("a", user_metadata={"loss": "3"}).result().path
sampler = model.save_weights_for_sampler("b", ttl_seconds=3600).result().path
external = model.save_weights_external("c").result().path

run = rest.get_training_run(model.model_id).result()
assert (run.base_model, run.lora_rank, run.is_lora) == (NAME, 4, True)
assert run.last_checkpoint.tinker_path == state and run.last_sampler_checkpoint.tinker_path == sampler
assert [found.training_run_id for found in rest.list_training_runs().result().training_runs] == [model.model_id]
listed = {found.tinker_path: found for found in rest.list_checkpoints(model.model_id).result().checkpoints}
assert listed.keys() == {state, sampler, external}
assert listed[state].user_metadata == {"loss": "3"} and listed[sampler].expires_at is not None
assert rest.list_user_checkpoints(limit=2).result().cursor.total_count == 3

session = model.model_id.partition(":")[0]
assert session in rest.list_sessions().result().sessions
about = rest.get_session(session).result()
assert about.training_run_ids == [model.model_id] and about.user_metadata == {"who": "lists"}

rest.set_checkpoint_ttl_from_tinker_path(sampler, None).result()
weights.download(tinker_path=external, output_dir=f"{FOLDER}/adapter", base_url=URL)
assert json.loads(Path(FOLDER, "adapter", "adapter_config.json").read_text())["r"] == 4
for path in (state, external):
    rest.delete_checkpoint_from_tinker_path(path).result()
(left,) = rest.list_user_checkpoints().result().checkpoints
assert left.tinker_path == sampler and left.expires_at is None
try:
    service.create_training_client_from_state(state).result()
    raise SystemExit("a deleted state was loaded")
except tinker.NotFoundError as error:
    print(error)
service.close("success").result()
print(f"all of {tinker.__version__} as it should be")
