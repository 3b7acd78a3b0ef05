"""Ray's object store: put and get of one array in the driver; as a second figure, an actor that sends it back."""

from __future__ import annotations

import logging

import numpy as np
import ray

from benchmarks.ring.rivals.measure import arguments, say, timed


@ray.remote
class Echo:
    def __init__(self, size: int) -> None:
        self.source = np.ones(size, np.uint8)

    def answer(self, array: np.ndarray, copies: bool) -> np.ndarray:
        return self.source if copies else array


def main() -> None:
    options = arguments()
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=256 << 20)
    source = np.ones(options.size, np.uint8)
    say("ray put+get", ray, timed(lambda: ray.get(ray.put(source)), options.count))
    echo = Echo.remote(options.size)  # type: ignore[attr-defined]
    ray.get(echo.answer.remote(source, options.own))
    say("ray actor", ray, timed(lambda: ray.get(echo.answer.remote(source, options.own)), options.count))
    ray.shutdown()


if __name__ == "__main__":
    main()
