"""The quickstart's model with a chat template, and its prompts: what the topologies beside this file train.

python make_model.py makes the folder `made/`. The template writes the contents of messages one after another, so
that a chat of one message reads just the ids of a prompt as it stands.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from busrl.quickstart import ensure

MADE = Path(__file__).parent / "made"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def main() -> None:
    quickstart = ensure("tiny:sort")
    MADE.mkdir(exist_ok=True)
    shutil.copytree(quickstart.model, MADE / "model", dirs_exist_ok=True)
    (MADE / "model" / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copy(quickstart.train, MADE / "train.jsonl")
    shutil.copy(quickstart.validation, MADE / "validation.jsonl")


if __name__ == "__main__":
    main()
