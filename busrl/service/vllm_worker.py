"""The extension of a worker of vLLM in a service that trains all weights: it reads folders of whole models.

vLLM imports this module in every worker; the rollout process calls the method by name. Knows nothing of requests.

- A tensor is read at a time, into the live model: there is no second copy.
"""

from __future__ import annotations

from pathlib import Path

from busrl.engines.vllm.worker import Extension, load_into
from busrl.service.model_folders import read_all


class FolderExtension(Extension):
    def busrl_read_folder(self, folder: str) -> bool:
        """Load the weights of a folder, while no request runs. An error leaves the model dirty."""
        runner = self.model_runner
        load_into(runner.get_model() if hasattr(runner, "get_model") else runner.model, read_all(Path(folder)))
        return True
