"""Model folders with more rows than their tokenizer has tokens, as many are padded; here these rows are likely."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

FIRST_COPIED = 2  # the row that the first new one is a copy of


def widen(source: Path, folder: Path, rows: int) -> Path:
    """A copy of a model folder with so many rows: the new ones are copies of rows 2, 3, ..., as likely as those."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(source, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    there = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight[there:] = table.weight[FIRST_COPIED : FIRST_COPIED + rows - there]
    model.save_pretrained(folder)
    return folder


def forget(folder: Path, ids: set[int]) -> Path:
    """The same folder, whose tokenizer does not know these ids any more."""
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"] = {token: one for token, one in data["model"]["vocab"].items() if one not in ids}
    data["added_tokens"] = [one for one in data["added_tokens"] if one["id"] not in ids]
    path.write_text(json.dumps(data))
    return folder
