"""The same training twice with the real SDK: while processes of the service are killed in turn, and undisturbed.

    python crash.py BUSRL TOPOLOGY FOLDER NAME STEPS SECONDS

BUSRL is the program, FOLDER the model's, NAME its name for clients; every SECONDS about, but not before the client has
got an answer since the last kill, one of door, tuner, engine, broker and launch gets SIGKILL; launch is called again in
the same directory. There are STEPS steps, or as many as it takes until each of the five was killed. Prints one line of
JSON: steps, seconds of both, kills by process, whether all answers are equal, and what the audit says.
"""

import collections
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
KILLED = ("tinker", "tuner", "rollout/0", "bus", "launch")
SETTINGS = (f"model.path={FOLDER}", f"tinker.base={NAME}", f"tinker.tokenizer={FOLDER}", "tinker.port=0",
            "tinker.context=256", "tinker.state_every_s=2", "limits.crash_attempts=1000",
            "limits.restart_attempts=1000")


class Service:
    """A service in a directory of its own, whose launch may be called again."""

    def __init__(self):
        self.run_dir = pathlib.Path(tempfile.mkdtemp()) / "run"
        self.launch()
        self.url = self.address()

    def launch(self):
        settings = [part for setting in SETTINGS for part in ("--set", setting)]
        with open(f"{self.run_dir}.out", "a") as out:
            command = [BUSRL, "launch", TOPOLOGY, "--run-dir", str(self.run_dir), *settings]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def address(self):
        for _ in range(1200):
            try:
                url = json.loads((self.run_dir / "tinker.json").read_text())["base_url"]
                urllib.request.urlopen(url + "/api/v1/healthz", timeout=1)
                return url
            except (OSError, ValueError):
                assert self.process.poll() is None, pathlib.Path(f"{self.run_dir}.out").read_text()
                time.sleep(0.1)
        raise SystemExit("the service was not there after two minutes")

    def kill(self, name):
        """Kill the newest process of that name; False if it is not there now."""
        if name == "launch":
            self.process.kill()
            self.process.wait()
            self.launch()
            return True
        started = re.findall(r"(\S+) started, pid (\d+)", (self.run_dir / "logs" / "launch.log").read_text())
        pid = int(dict(started)[name])
        try:
            if not os.readlink(f"/proc/{pid}/fd/2").startswith(str(self.run_dir)):
                return False  # another process has its number by now
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        return True

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        self.audit = subprocess.run([BUSRL, "audit", str(self.run_dir)], capture_output=True, text=True, check=False)
        if "--keep" in sys.argv:
            print(self.run_dir)
        else:
            shutil.rmtree(self.run_dir.parent)


def train(url, said, is_enough):
    """Train until `is_enough` of the number of steps, which is returned, and add to `said` what the client is told."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=url)
    training = service.create_lora_training_client(base_model=NAME, rank=4, seed=7).result()
    step = 0
    while not is_enough(step):
        sampler = training.save_weights_and_get_sampling_client().result()
        prompts = [[5 + a, 6, 7 + step % 4] for a in range(4)]
        futures = [sampler.sample(types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=6, seed=step))
                   for prompt in prompts]
        data = []
        for prompt, future in zip(prompts, futures):
            for sequence in future.result().sequences:
                before = len(prompt) - 1
                said.append([sequence.tokens, sequence.logprobs])
                data.append(types.Datum(
                    model_input=types.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": [0] * before + sequence.tokens,
                        "logprobs": [0.0] * before + sequence.logprobs,
                        "advantages": [0.0] * before + [1.0 if sequence.tokens[0] % 2 else -1.0] * len(sequence.tokens),
                    }))
        first, second = (training.forward_backward(half, "importance_sampling") for half in (data[:4], data[4:]))
        stepped = training.optim_step(types.AdamParams(learning_rate=3e-3))
        said.append([first.result().metrics, second.result().metrics, stepped.result().metrics])
        step += 1
    said.append(training.save_state("end").result().path.split("/")[-1])
    service.close("success").result()
    return step


def run(kills, steps):
    service = Service()
    os.environ["TINKER_API_KEY"] = (service.run_dir / "tinker.key").read_text()
    said, over, killed, rng = [], threading.Event(), collections.Counter(), random.Random(1)

    def killer():
        told = 0
        while not over.wait(EVERY * rng.uniform(0.5, 1.5)):
            if len(said) > told:  # else a machine that starts them slower than that would never come to its end
                name = KILLED[killed.total() % len(KILLED)]
                if service.kill(name):
                    killed[name], told = killed[name] + 1, len(said)

    thread, began = threading.Thread(target=killer), time.time()
    if kills:
        thread.start()
    try:
        done = train(service.url, said, lambda done: done >= steps and (not kills or len(killed) == len(KILLED)))
        return said, killed, time.time() - began, service, done
    finally:
        over.set()
        if kills:
            thread.join()
        service.stop()


rough, killed, rough_s, service, steps = run(True, STEPS)
calm, _, calm_s, _, _ = run(False, steps)
same = json.dumps(calm) == json.dumps(rough)
difference = next(((a, b) for a, b in zip(calm, rough) if a != b), None)
print(json.dumps({"steps": steps, "calm_s": round(calm_s, 1), "rough_s": round(rough_s, 1), "kills": killed.total(),
                  "killed": killed, "equal": same, "first_difference": difference,
                  "audit": service.audit.returncode, "audit_said": service.audit.stdout}))
