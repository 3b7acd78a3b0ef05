"""Worker extension with faults on purpose: half a load, one that leaves a wrong output head, slow steps."""

from __future__ import annotations

import time

import torch

from busrl.engines.vllm.worker import Extension


class Breakable(Extension):
    def busrl_break(self) -> None:
        model = self.model_runner.get_model()
        load_all = type(model).load_weights

        def half(tensors):  # type: ignore[no-untyped-def]
            all_of_them = list(tensors)
            load_all(model, iter(all_of_them[: len(all_of_them) // 2]))
            raise RuntimeError("broken on purpose")

        model.load_weights = half

    def busrl_corrupt(self) -> None:
        """What vLLM's CPU backend did to tied models: everything is new but the output head."""
        model = self.model_runner.get_model()
        whole, head = type(model).load_weights, model.lm_head.weight.data.clone()

        def all_but_the_head(tensors):  # type: ignore[no-untyped-def]
            taken = whole(model, tensors)
            with torch.no_grad():
                model.lm_head.weight.copy_(head)
            return taken

        model.load_weights = all_but_the_head

    def busrl_mend(self) -> None:
        del self.model_runner.get_model().load_weights

    def busrl_slow_down(self, seconds: float) -> None:
        """Lengthen every step: a test that must catch running answers may then lose its core for a while."""
        runner = self.model_runner
        whole = type(runner).execute_model

        def slow(*args, **more):  # type: ignore[no-untyped-def]
            time.sleep(seconds)
            return whole(runner, *args, **more)

        runner.execute_model = slow

    def busrl_full_speed(self) -> None:
        del self.model_runner.execute_model

    def busrl_routes_left(self) -> int:
        """Requests whose routes nobody has taken."""
        return self.busrl_capture.kept
