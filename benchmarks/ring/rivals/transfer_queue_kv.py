"""TransferQueue: put and get of `--batch` samples by key in one process, with its default storage; nothing answers.

Keys are cleared after every round trip, outside the clock, so that its storage does not grow.
"""

from __future__ import annotations

import logging
import os
import time

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from benchmarks.ring.rivals.measure import Trips, arguments, say

PARTITION = "bench"


def main() -> None:
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    options = arguments()
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=256 << 20)
    tq.init()
    sample = torch.ones(options.size, dtype=torch.uint8)
    batch = TensorDict({"data": sample.expand(options.batch, -1).contiguous()}, batch_size=options.batch)
    trips = Trips(options.count)
    for turn in range(options.count):
        keys = [f"{turn}_{k}" for k in range(options.batch)]
        start = time.perf_counter()
        if options.batch == 1:
            tq.kv_put(keys[0], PARTITION, {"data": sample})
        else:
            tq.kv_batch_put(keys, PARTITION, batch)
        got = tq.kv_batch_get(keys, PARTITION)
        trips.add(time.perf_counter() - start)
        if got["data"].numel() != options.size * options.batch:
            raise SystemExit("TransferQueue returned something else")
        tq.kv_clear(keys, PARTITION)
    trips.end()
    say("TransferQueue", tq, trips, batch=options.batch)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
