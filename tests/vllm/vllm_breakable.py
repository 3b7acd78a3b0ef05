"""The worker extension with a fault on purpose: a load that fails when half of the tensors are in."""

from __future__ import annotations

from busrl.inference.vllm_worker import Extension


class Breakable(Extension):
    def busrl_break(self) -> None:
        model = self.busrl_plane._model
        whole = type(model).load_weights

        def half(tensors):  # type: ignore[no-untyped-def]
            all_of_them = list(tensors)
            whole(model, iter(all_of_them[: len(all_of_them) // 2]))
            raise RuntimeError("broken on purpose")

        model.load_weights = half

    def busrl_mend(self) -> None:
        del self.busrl_plane._model.load_weights
