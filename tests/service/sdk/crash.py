"""The same training twice with the real SDK: undisturbed, and while processes of the service are killed in turn.

    python crash.py BUSRL TOPOLOGY FOLDER NAME STEPS SECONDS

BUSRL is the program, FOLDER the model's, NAME its name for clients; every SECONDS about one of door, tuner, engine and
broker gets SIGKILL. Prints one line of JSON: steps, seconds of both, kills, and whether all answers are equal.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import warnings

warnings.simplefilter("ignore")
BUSRL, TOPOLOGY, FOLDER, NAME, STEPS, EVERY = *sys.argv[1:5], int(sys.argv[5]), float(sys.argv[6])
KILLED = ("tinker", "tuner", "rollout/0", "bus")
SETTINGS = (f"model.path={FOLDER}", f"tinker.base={NAME}", f"tinker.tokenizer={FOLDER}", "tinker.port=0",
            "tinker.context=256", "tinker.state_every_s=2", "limits.crash_attempts=1000",
            "limits.restart_attempts=1000")


def launched(run_dir):
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    with open(f"{run_dir}.out", "w") as out:
        command = [BUSRL, "launch", TOPOLOGY, "--run-dir", str(run_dir), *settings]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    return process, address(run_dir, process)


def address(run_dir, process):
    for _ in range(1200):
        try:
            url = json.loads((run_dir / "tinker.json").read_text())["base_url"]
            urllib.request.urlopen(url + "/api/v1/healthz", timeout=1)
            return url
        except (OSError, ValueError):
            assert process.poll() is None, pathlib.Path(f"{run_dir}.out").read_text()
            time.sleep(0.1)
    raise SystemExit("the service was not there after two minutes")


def pids(run_dir):
    """The newest pid of each process, as launch logged it."""
    started = re.findall(r"(\S+) started, pid (\d+)", (run_dir / "logs" / "launch.log").read_text())
    return {name: int(pid) for name, pid in started}


def train(url):
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base_model=NAME, rank=4, seed=7).result()
    said = []
    for step in range(STEPS):
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [[5 + a, 6, 7 + step % 4] for a in range(4)]
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=6, seed=step))
                   for prompt in prompts]
        data = []
        for prompt, future in zip(prompts, futures):
            for sequence in future.result().sequences:
                before = len(prompt) - 1
                said.append(sequence.tokens)
                data.append(types.Datum(
                    model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": [0] * before + sequence.tokens,
                        "logprobs": [0.0] * before + [round(value, 3) for value in sequence.logprobs],
                        "advantages": [0.0] * before + [1.0 if sequence.tokens[0] % 2 else -1.0] * len(sequence.tokens),
                    }))
        first, second = (training.forward_backward(half, "importance_sampling") for half in (data[:4], data[4:]))
        stepped = training.optim_step(types.AdamParams(learning_rate=3e-3))
        said.append([first.result().metrics, second.result().metrics, stepped.result().metrics])
    said.append(training.save_state("end").result().path.split("/")[-1])
    service.close("success").result()
    return said


def run(kills):
    run_dir = pathlib.Path(tempfile.mkdtemp()) / "run"
    process, url = launched(run_dir)
    os.environ["TINKER_API_KEY"] = (run_dir / "tinker.key").read_text()
    over, killed, rng = threading.Event(), [], random.Random(1)

    def killer():
        while not over.wait(EVERY * rng.uniform(0.5, 1.5)):
            name = KILLED[len(killed) % len(KILLED)]
            try:
                os.kill(pids(run_dir)[name], signal.SIGKILL)
                killed.append(name)
            except ProcessLookupError:
                pass

    thread, began = threading.Thread(target=killer), time.time()
    if kills:
        thread.start()
    try:
        return train(url), killed, time.time() - began
    finally:
        over.set()
        if kills:
            thread.join()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        if "--keep" not in sys.argv:
            shutil.rmtree(run_dir.parent)
        else:
            print(run_dir)


calm, _, calm_s = run(False)
rough, killed, rough_s = run(True)
same = json.dumps(calm) == json.dumps(rough)
difference = next(((a, b) for a, b in zip(calm, rough) if a != b), None)
print(json.dumps({"steps": STEPS, "calm_s": round(calm_s, 1), "rough_s": round(rough_s, 1), "kills": len(killed),
                  "equal": same, "first_difference": difference}))
