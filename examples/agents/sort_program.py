"""A program for each episode: `program = ["python3", "{here}/../examples/agents/sort_program.py"]`.

Any OpenAI client would do; this one is plain Python, so that it starts fast. Its last line is the reward.
"""

import json
import os
import urllib.request

with open(os.environ["BUSRL_TASK"]) as file:
    task = json.load(file)
request = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/completions",
    json.dumps({"model": "policy", "prompt": task["prompt"]}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=300) as answer:
    text = json.load(answer)["choices"][0]["text"]
print(json.dumps({"reward": float(text.rpartition("|")[2] == task["answer"])}))
