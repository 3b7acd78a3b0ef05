"""Weight updates by shm and broadcast, whole and sparse, against memcpy and raw Gloo, in one run, on CPU.

    python -m benchmarks weights [--sizes 1,10,100] [--dtype float32] [--peers 2] [--rounds 9] [--link-gbit 1]
                                   [--json FILE]

Real processes: one learner (this process) and --peers engines. All figures are medians over rounds, in seconds:
  memcpy          one block of the same bytes to another, both touched before
  shm publish     tensors into the segment; shm fetch: segment into an engine's tensors, one engine at a time
  broadcast       from publish() until every engine has the version; fetch: from there into the engine's tensors
  raw gloo        one torch.distributed broadcast of the same bytes from this process to the same number of peers
  sparse          the same updates with --changed of the values changed, finding them included
With --pause: how long a torch engine stands for an update, against one decoding step and the copy. With --link-gbit
everything runs in a network of its own whose loopback is that slow (`tc`, `unshare`): a stand-in for a link between two
hosts. The JSON is what `tables --weights` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import COMMAND, ROOT
from benchmarks.common import report, sides
from busrl.weights.factory import TransportSettings, make_receiver, make_sender

DEADLINE_S = 120.0


# -- an engine, in a process of its own ---------------------------------------------------------------------------


def engine(plain: dict[str, Any], name: str, mb: float, dtype: str) -> None:
    """Says when it has each version and how long the copy into its tensors took."""
    torch.set_num_threads(1)
    here = model(mb, dtype)
    mine = make_receiver(TransportSettings.from_plain(plain), name)
    say("ready")
    version = 0
    for line in sys.stdin:
        if line.strip() == "end":
            break
        wanted = int(line)
        version, _ = mine.wait_for(wanted, DEADLINE_S)
        arrived = time.monotonic()
        mine.fetch(here)
        say(f"{version} {arrived} {time.monotonic() - arrived} {digest(here)}")
    mine.close()


def gloo_peer(where: str, rank: int, size: int, nbytes: int, rounds: int) -> None:
    torch.set_num_threads(1)
    group, block = gloo(where, rank, size), torch.zeros(nbytes, dtype=torch.uint8)
    for _ in range(rounds):
        group.broadcast(block, root=0).wait()
        group.allreduce(torch.zeros(1)).wait()


def gloo(where: str, rank: int, size: int) -> Any:
    host, _, port = where.partition(":")
    store = dist.TCPStore(host, int(port), is_master=rank == 0, wait_for_workers=False)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, size, options)


# -- this process -------------------------------------------------------------------------------------------------


def model(mb: float, dtype: str, layers: int = 16) -> dict[str, torch.Tensor]:
    """Tensors in the proportions of a small decoder: a large embedding, matrices and vectors per layer."""
    kind: torch.dtype = getattr(torch, dtype)
    values = int(mb * 1e6) // torch.empty(0, dtype=kind).element_size()
    width = max(8, int((values / (layers * 12 + 48)) ** 0.5))
    generator = torch.Generator().manual_seed(0)
    named = {"embed": torch.randn(48 * width, width, generator=generator).to(kind)}
    for layer in range(layers):
        for part, columns in (("qkv", 3), ("out", 1), ("up", 4), ("down", 4)):
            named[f"{layer}.{part}"] = torch.randn(width, columns * width, generator=generator).to(kind)
        named[f"{layer}.norm"] = torch.ones(width, dtype=kind)
    return named


def change(named: dict[str, torch.Tensor], share: float, seed: int) -> None:
    """Change that share of the values, spread at random."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in named.values():
        flat = tensor.view(-1)
        count = max(1, int(share * flat.numel()))
        at = torch.randint(flat.numel(), (count,), generator=generator)
        flat[at] = torch.randn(count, generator=generator).to(tensor.dtype)


def digest(named: dict[str, torch.Tensor]) -> int:
    from busrl.weights.tensors import Manifest

    return Manifest.of(named).digest(named, 0, 0)


def nbytes(named: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in named.values())


def memcpy(size: int, rounds: int) -> float:
    a, b = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    to, source = b.numpy(), a.numpy()
    return median(rounds, lambda: to.__setitem__(slice(None), source))


def raw_gloo(size: int, peers: int, rounds: int) -> float:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    children = [
        spawn("--peer", where, str(rank), str(peers + 1), str(size), str(rounds)) for rank in range(1, peers + 1)
    ]
    group, block, times = gloo(where, 0, peers + 1), torch.ones(size, dtype=torch.uint8), []
    for _ in range(rounds):
        begun = time.perf_counter()
        group.broadcast(block, root=0).wait()
        group.allreduce(torch.zeros(1)).wait()  # all have it
        times.append(time.perf_counter() - begun)
    for child in children:
        child.wait(DEADLINE_S)
    return statistics.median(times)


class Rig:
    """A sender here and engines elsewhere."""

    def __init__(self, transport: str, mb: float, dtype: str, peers: int, folder: Path, **more: Any) -> None:
        self.named = model(mb, dtype)
        self.settings = TransportSettings(
            transport, f"/dev/shm/busrl.bench.{os.getpid()}.weights", str(folder / "store"), **more
        )
        self.sender = make_sender(self.settings)
        plain = json.dumps(self.settings.plain())
        self.engines = [spawn("--engine", plain, f"engine/{k}", str(mb), dtype) for k in range(peers)]
        for process in self.engines:
            heard(process)
        self.version = 0

    def update(self, share: float) -> tuple[float, float, float]:
        """Seconds of publish, until all have it, and of the slowest fetch; checked to be bit-identical."""
        change(self.named, share, self.version)
        self.version += 1
        together = self.settings.transport == "broadcast"
        if together:
            self.ask(self.engines)
        begun = time.monotonic()
        self.sender.publish(self.version, self.version, self.named)
        published = time.monotonic() - begun
        replies = []
        for process in self.engines:
            if not together:
                self.ask([process])
            replies.append(heard(process).split())
        assert all(int(words[0]) == self.version and int(words[3]) == digest(self.named) for words in replies)
        return published, max(float(words[1]) for words in replies) - begun, max(float(words[2]) for words in replies)

    def ask(self, engines: list[subprocess.Popen[str]]) -> None:
        for process in engines:
            assert process.stdin is not None
            process.stdin.write(f"{self.version}\n")
            process.stdin.flush()

    def close(self) -> None:
        for process in self.engines:
            assert process.stdin is not None
            process.stdin.write("end\n")
            process.stdin.close()
        for process in self.engines:
            process.wait(DEADLINE_S)
        self.sender.close()
        Path(self.settings.segment).unlink(missing_ok=True)


def updates(rig: Rig, share: float, rounds: int) -> dict[str, float]:
    for warm in range(3):
        rig.update(share if warm else 1.0)
    rows = [rig.update(share) for _ in range(rounds)]
    rig.close()
    names = ("publish", "arrived", "fetch")
    return {name: statistics.median(row[k] for row in rows) for k, name in enumerate(names)}


def one_size(mb: float, args: argparse.Namespace) -> dict[str, Any]:
    named = model(mb, args.dtype)
    size = nbytes(named)
    figures: dict[str, Any] = {"bytes": size, "itemsize": next(iter(named.values())).element_size(),
                             "memcpy": memcpy(size, args.rounds)}
    figures["raw gloo"] = raw_gloo(size, args.peers, args.rounds)
    for transport in ("shm", "broadcast"):
        for sparse in (False, True):
            # A key frame among the rounds would be a full update among the sparse ones.
            more: dict[str, Any] = {"threshold": 0.1, "key_every": 65536} if sparse else {}
            with tempfile.TemporaryDirectory() as folder:
                rig = Rig(transport, mb, args.dtype, args.peers, Path(folder), **more)
                share = args.changed if sparse else 1.0
                figures[f"{transport} sparse" if sparse else transport] = updates(rig, share, args.rounds)
    figures["ratios"] = ratios(figures)
    return figures


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    shm, cast = figures["shm"], figures["broadcast"]
    less, thin = figures["shm sparse"], figures["broadcast sparse"]
    return {
        "shm publish / memcpy bandwidth": figures["memcpy"] / shm["publish"],
        "shm fetch / memcpy bandwidth": figures["memcpy"] / shm["fetch"],
        "broadcast / raw gloo bandwidth": figures["raw gloo"] / cast["arrived"],
        "broadcast with fetch / raw gloo bandwidth": figures["raw gloo"] / (cast["arrived"] + cast["fetch"]),
        "sparse / full, shm": (less["publish"] + less["fetch"]) / (shm["publish"] + shm["fetch"]),
        "sparse / full, shm, engine's part": less["fetch"] / shm["fetch"],
        "sparse / full, broadcast": (thin["arrived"] + thin["fetch"]) / (cast["arrived"] + cast["fetch"]),
    }


def pause(mb: float, args: argparse.Namespace) -> dict[str, float]:
    """A torch engine that decodes while versions come: the gap between two steps with an update in it."""
    from busrl.engines.base import Request
    from busrl.engines.torch.engine import TorchEngine

    torch.set_num_threads(1)
    tuned, tokens = tiny(mb)
    engine = TorchEngine(tuned, tokens, capacity=8, max_length=512)
    import numpy as np

    ids = np.arange(2, 18, dtype=np.int32)
    none = np.empty(0, np.int32)
    engine.submit([Request(k, k, 0, ids, none, 480, 1.0, 1.0, 0) for k in range(8)])
    named = {name: tensor.detach().clone() for name, tensor in engine.parameters().items()}
    settings = TransportSettings("shm", f"/dev/shm/busrl.bench.{os.getpid()}.weights", "")
    sends, mine = make_sender(settings), make_receiver(settings, "engine/0")
    steps, stands, copies = [], [], []
    for turn in range(args.rounds * 4):
        begun = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - begun)
        if turn % 4 == 3:
            sends.publish(turn, turn, named)
            begun = time.perf_counter()
            engine.update_weights(mine)
            stands.append(time.perf_counter() - begun)
            copies.append(memcpy(nbytes(named), 1))
    mine.close()
    sends.close()
    Path(settings.segment).unlink(missing_ok=True)
    step, stand, copy = (statistics.median(values) for values in (steps, stands, copies))
    return {"step": step, "pause": stand, "memcpy": copy, "pause / (step + memcpy)": stand / (step + copy)}


def tiny(mb: float) -> tuple[Any, Any]:
    """A Qwen3 of about that size with random weights, and a tokenizer that is never asked for text."""
    from types import SimpleNamespace

    from transformers import Qwen3Config, Qwen3ForCausalLM

    width = max(64, int((mb * 1e6 / 4 / (4 * 12 + 8)) ** 0.5) // 64 * 64)
    config = Qwen3Config(
        vocab_size=4 * width, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=4, head_dim=64,
        num_attention_heads=width // 64, num_key_value_heads=max(1, width // 128), tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval(), SimpleNamespace(eos_token_id=1, pad_token_id=0)


# -- plumbing -----------------------------------------------------------------------------------------------------


def spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "weights", *arguments]
    return sides.started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"an engine ended with {child.wait(DEADLINE_S)}")
    return line.strip()


def say(text: str) -> None:
    print(text, flush=True)


def median(rounds: int, todo: Callable[[], Any]) -> float:
    todo()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        todo()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def rows(figures: dict[str, Any], changed: float, dtype: str, gbit: float) -> list[dict[str, Any]]:
    """Rows for the table of docs/weights-measured.md; a slow link changes nothing for shm."""
    listed = []
    where = (f", {dtype}" if dtype != "float32" else "") + (f", {gbit:g} Gbit/s" if gbit else "")
    for mode in ("broadcast", "broadcast sparse") if gbit else ("shm", "shm sparse", "broadcast", "broadcast sparse"):
        times, alone = figures[mode], mode.startswith("shm")
        share = changed if "sparse" in mode else 1.0
        limit_s = 2 * figures["memcpy"] if alone else figures["raw gloo"] + figures["memcpy"]
        name = f"{mode} ({changed:.0%} changed)" if share < 1 else mode
        listed.append({
            "mode": name + where, "engine": "tensors", "model_mb": figures["bytes"] / 1e6,
            "moved_mb": figures["bytes"] / 1e6 * (share if share == 1 else share * (1 + 4 / figures["itemsize"])),
            "publish_s": times["publish"], "take_s": 0.0 if alone else max(0.0, times["arrived"] - times["publish"]),
            "apply_s": times["fetch"], "limit_s": limit_s,
            "limit": "two copies of all values" if alone else "raw Gloo and one copy of all values",
        })
    return listed


def on_a_slow_link(gbit: float) -> None:
    """Become this program in a network of its own whose loopback sends no more than that."""
    if os.environ.get("BUSRL_BENCH_LINK"):
        return
    set_up = f"ip link set lo up && tc qdisc add dev lo root tbf rate {gbit * 1000:g}mbit burst 2mb latency 1s"
    command = ["unshare", "-rn", "sh", "-c", f'{set_up} && exec "$@"', "sh", *COMMAND, "weights", *sys.argv[1:]]
    os.execvpe("unshare", command, {**os.environ, "BUSRL_BENCH_LINK": "1"})


def main() -> None:
    if sys.argv[1:2] == ["--engine"]:
        return engine(json.loads(sys.argv[2]), sys.argv[3], float(sys.argv[4]), sys.argv[5])
    if sys.argv[1:2] == ["--peer"]:
        where, *numbers = sys.argv[2:]
        return gloo_peer(where, *map(int, numbers))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,10,100", help="MB of the model, several with commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--pause", action="store_true")
    parser.add_argument("--link-gbit", type=float, default=0.0, help="0 = the loopback as it is")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.link_gbit:
        on_a_slow_link(args.link_gbit)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "machine": report.machine(), "commit": report.commit(ROOT), "date": time.strftime("%Y-%m-%d"),
        "torch": str(torch.__version__), "dtype": args.dtype, "peers": args.peers, "rounds": args.rounds,
        "changed": args.changed, "link_gbit": args.link_gbit, "load": [os.getloadavg()[0]], "sizes": {}, "rows": [],
    }
    for mb in map(float, args.sizes.split(",")):
        figures = result["sizes"][f"{mb:g} MB"] = one_size(mb, args)
        result["rows"] += rows(figures, args.changed, args.dtype, args.link_gbit)
        if args.pause:
            figures["pause"] = pause(mb, args)
        print(json.dumps({f"{mb:g} MB": figures}, indent=1), flush=True)
    result["load"].append(os.getloadavg()[0])
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return None
