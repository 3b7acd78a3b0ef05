"""Audit of a service by its files alone: were all requests executed in order, once, and what made each answer?

Used by `busrl audit`; `waste` counts what became of sampled tokens. Talks to the files of a run directory. Shares no
code with the processes that write them, but names: a rule that they break together would not be seen otherwise.

- Numbers of a model: answered from the first on, without a gap, each once.
- Each answer is of a request that is in the log; the chain of each answer and each state is that of the requests.
- Contents that are kept no longer are counted: there the digests of requests and the chains of answers speak alone.
- A sample was drawn with the snapshot that its sampler names; saved weights are there by a request that was done.
- What a request saved under a name is there, or was deleted by a request, or its time is over.
- Nothing was loaded or drawn from weights that belong to another key.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from busrl.service import waste

HEAD_BYTES, FRAME = 16, struct.Struct("<4sII")
EXAMPLES = 5
KINDS = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights",
         "save_weights_external": "external_weights"}
LARGE = ("forward_backward", "asample")  # operations whose data is dropped once it is in all states of a model
Record = dict[str, Any]
Name = tuple[str, int]  # model or sampler, and number


class Audited(NamedTuple):
    """The outcome: counts by name, and what is wrong, a line for each kind."""

    counts: dict[str, int]
    errors: list[str]
    waste: dict[str, Any] | None = None  # the account of sampled tokens, where it was asked for

    @property
    def beside(self) -> bool:
        """False: the service is all that the run is."""
        return False

    def lines(self) -> list[str]:
        counted = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        accounted = waste.lines_of(self.waste) if self.waste else ()
        return [f"service: {counted}", *(f"  error: {error}" for error in self.errors), *accounted]


class ServiceAudit:
    """The rules, over the records of one run directory."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._wrong: defaultdict[str, list[str]] = defaultdict(list)
        # Answers first: a service that runs has the request of each answer by then.
        self._answers = self._by_name("answers")
        self._samples = self._by_name("samples")
        self._requests: dict[Name, Record] = {}
        self._firsts: dict[str, int] = {}  # the first number of each model
        self._sessions: dict[str, str] = {}  # of each model
        self._samplers: dict[str, Name] = {}
        self._saves: dict[Name, str] = {}  # the kind and name of what a request saves
        self._owners: dict[str, str] = {}  # of each model and sampler, the name of its key
        self._loads: dict[Name, str] = {}  # the model whose weights a request loads
        self._ends: dict[Name, float] = {}  # when it may go, in Unix seconds; 0: never
        self._published: defaultdict[str, list[int]] = defaultdict(list)  # by model, saves for samplers in flight
        for record in self._records("requests"):
            self._add(record)

    def result(self, with_waste: bool = False) -> Audited:
        self._check_numbers()
        for answers in (self._answers, self._samples):
            self._check_requests(answers)
        chains = self._check_chains()
        self._check_states(chains)
        self._check_samples()
        self._check_saved()
        self._check_kept()
        self._check_owners()
        counts = {
            "models": len(self._firsts), "requests": len(self._requests),
            "answers": len(self._answers), "answers to requests for samples": len(self._samples),
        }
        counts |= {name: count for name, count in self._dropped().items() if count}
        errors = [f"{len(places)} {kind}: {', '.join(places[:EXAMPLES])}" for kind, places in self._wrong.items()]
        return Audited(counts, errors, self._waste() if with_waste else None)

    # -- reading -----

    def _records(self, log: str) -> Iterator[Record]:
        paths = sorted((self._root / log).glob("*.wal"))
        for path in paths:
            end, data = HEAD_BYTES, path.read_bytes()
            while end + FRAME.size <= len(data):
                _, size, crc = FRAME.unpack_from(data, end)
                payload = data[end + FRAME.size : end + FRAME.size + size]
                if len(payload) < size or zlib.crc32(payload, zlib.crc32(data[end + 4 : end + 8])) != crc:
                    break
                end += FRAME.size + size
                yield msgspec.msgpack.decode(payload)
            if end < len(data) and path != paths[-1]:
                self._wrong["damaged segments"].append(f"{path} at byte {end}")

    def _by_name(self, log: str) -> dict[Name, Record]:
        found: dict[Name, Record] = {}
        for record in self._records(log):
            name = record["id"], record["seq"]
            if name in found:
                self._wrong["requests answered twice"].append(shown(name))
            record["payload"] = len(record.get("payload", b""))  # gigabytes, all of them together
            found[name] = record
        return found

    def _add(self, record: Record) -> None:
        kind, name = record["kind"], (record["id"], record.get("seq", 0))
        if kind == "model":
            self._firsts[record["id"]] = record["about"]["first"]
            self._sessions[record["id"]] = record["about"]["session"]
            self._owners[record["id"]] = record["about"].get("owner", "")
        elif kind == "sampler":
            about = record.get("about", {})
            self._samplers[record["id"]] = about.get("model", ""), about.get("seq", 0)
            self._owners[record["id"]] = about.get("owner", "")
        elif kind in ("training", "refused", "sample"):
            if name in self._requests:
                self._wrong["requests logged twice"].append(shown(name))
            self._requests[name] = record
            if kind == "training" and record["op"] in KINDS:
                self._add_save(name, record, json.loads(record["body"]))
            elif kind == "training" and record["op"] == "load_weights":
                self._loads[name] = json.loads(record["body"])["path"].split("/")[2]
            record["body"] = len(record.get("body", b""))
        elif kind == "delete":
            self._ends[name] = record["at"]
        elif kind == "ttl":
            self._ends[name] = record["about"]["expires"]

    def _add_save(self, name: Name, record: Record, body: Record) -> None:
        if body.get("path"):
            self._saves[name] = f"{KINDS[record['op']]}/{body['path']}"
            self._ends[name] = record.get("at", 0) + body["ttl_seconds"] if body.get("ttl_seconds") else 0
        else:
            session = self._sessions[name[0]]
            self._samplers.setdefault(f"{session}:sample:{body['sampling_session_seq_id']}", name)
            if body.get("kind") == "inflight":
                self._published[name[0]].append(name[1])

    def _dropped(self) -> dict[str, int]:
        """Contents that could not be looked at."""
        bodies = (asked for asked in self._requests.values() if asked["op"] in LARGE and asked["kind"] != "refused")
        answers = (*self._answers.values(), *self._samples.values())
        return {"requests whose data is kept no longer": sum(not asked.get("body") for asked in bodies),
                "answers that are kept no longer": sum(not answer.get("payload") for answer in answers)}

    # -- rules -----

    def _check_numbers(self) -> None:
        numbers = defaultdict(list)
        for model, seq in self._answers:
            numbers[model].append(seq)
        for model, answered in numbers.items():
            first = self._firsts.get(model)
            if first is None:
                self._wrong["models that nobody made"].append(model)
            elif missing := sorted(set(range(first, max(answered))) - set(answered)):
                self._wrong["models with gaps in their answers"].append(f"{model} at {missing[0]}")

    def _check_requests(self, answers: dict[Name, Record]) -> None:
        for name, answer in answers.items():
            asked = self._requests.get(name)
            if asked is None:
                self._wrong["answers without a request"].append(shown(name))
            elif asked.get("digest", b"") != answer.get("digest", b""):
                self._wrong["answers to another request"].append(shown(name))

    def _check_chains(self) -> dict[Name, bytes]:
        """The chain behind each request that was answered."""
        chains: dict[Name, bytes] = {}
        for model, first in self._firsts.items():
            chain, seq = b"", first
            while (model, seq) in self._answers and (asked := self._requests.get((model, seq))) is not None:
                link = chain + asked.get("digest", b"") + asked["op"].encode()
                chain = chains[model, seq] = hashlib.blake2b(link, digest_size=16).digest()
                if chain != self._answers[model, seq].get("chain", b""):
                    self._wrong["answers of another chain of requests"].append(shown((model, seq)))
                seq += 1
        return chains

    def _check_states(self, chains: dict[Name, bytes]) -> None:
        models = {model.replace(":", "_"): model for model in self._firsts}
        for path in (self._root / "states").glob("*/*/about.json"):
            if not path.parent.name.isdigit():
                continue  # under way
            name = models.get(path.parent.parent.name, ""), int(path.parent.name)
            try:
                chain = json.loads(path.read_text())["chain"]
            except (ValueError, KeyError):
                self._wrong["states that cannot be read"].append(str(path.parent))
                continue
            if chains.get(name, b"").hex() != chain:
                self._wrong["states of another chain of requests"].append(str(path.parent))

    def _check_samples(self) -> None:
        for name, answer in self._samples.items():
            if answer["state"] != "done":
                continue
            if answer.get("weights", 0) not in self._snapshots(name[0]):
                self._wrong["samples of a snapshot that their sampler has not"].append(shown(name))

    def _snapshots(self, sampler: str) -> set[int]:
        """The snapshots that a sampler may have drawn with: its own, or in flight those published later too."""
        if (save := self._samplers.get(sampler)) is None:
            return set()
        model, seq = save
        if not model:
            return {0}
        published = self._published[model] if seq in self._published[model] else []
        saves = {seq, *(later for later in published if later > seq)}
        return {self._answers.get((model, save), {}).get("weights", 0) for save in saves}

    def _check_saved(self) -> None:
        for path in (self._root / "saved").glob("*/*/*/about.json"):
            model, _, seq = json.loads(path.read_text())["by"].rpartition(":")
            if path.parent.suffix in (".part", ".old"):
                continue
            # One that killed the tuner twice is answered "server", and may have saved before.
            if self._answers.get((model, int(seq)), {}).get("state") == "user":
                self._wrong["saved weights of a request that failed"].append(str(path.parent))
            elif (model, int(seq)) not in self._requests:
                self._wrong["saved weights of no request"].append(str(path.parent))

    def _check_kept(self) -> None:
        newest: dict[tuple[str, str], int] = {}
        for (model, seq), save in self._saves.items():
            if self._answers.get((model, seq), {}).get("state") == "done":
                newest[model, save] = max(seq, newest.get((model, save), seq))
        for (model, save), seq in newest.items():
            ends, folder = self._ends[model, seq], self._root / "saved" / model.replace(":", "_") / save
            if not (0 < ends <= time.time()) and not (folder / "about.json").is_file():
                self._wrong["saved weights that are gone"].append(f"tinker://{model}/{save}")

    def _check_owners(self) -> None:
        for sampler, (model, _) in self._samplers.items():
            if model and self._owners.get(sampler, self._owners.get(model)) != self._owners.get(model):
                self._wrong["samplers of another key's weights"].append(sampler)
        for name, model in self._loads.items():
            done = self._answers.get(name, {}).get("state") == "done"
            if done and self._owners.get(name[0]) != self._owners.get(model):
                self._wrong["loads of another key's weights"].append(shown(name))

    # -- waste -----

    def _waste(self) -> dict[str, Any]:
        """The account of sampled tokens, from a second look at the logs."""
        kept_no_longer: Counter[str] = Counter()
        account = waste.account_of(self._sampled(kept_no_longer), self._trained(kept_no_longer))
        return {**account, "kept_no_longer": dict(kept_no_longer)}

    def _sampled(self, kept_no_longer: Counter[str]) -> Iterator[tuple[waste.Prompt, bytes, str]]:
        asked = (record for record in self._asked("sample") if record.get("body"))
        prompts = {(record["id"], record.get("seq", 0)): waste.prompt_of(record["body"]) for record in asked}
        for answer in self._records("samples"):
            name = answer["id"], answer["seq"]
            if answer["state"] != "done":
                continue
            if name not in prompts or not answer.get("payload"):
                kept_no_longer["samples"] += 1
            elif (prompt := prompts[name]) is not None:
                yield prompt, answer["payload"], self._samplers.get(name[0], ("", 0))[0]

    def _trained(self, kept_no_longer: Counter[str]) -> Iterator[bytes]:
        for record in self._asked("training"):
            name = record["id"], record.get("seq", 0)
            if record["op"] != "forward_backward" or self._answers.get(name, {}).get("state") != "done":
                continue
            if record.get("body"):
                yield record["body"]
            else:
                kept_no_longer["gradients"] += 1

    def _asked(self, kind: str) -> Iterator[Record]:
        return (record for record in self._records("requests") if record["kind"] == kind)


def shown(name: Name) -> str:
    return f"{name[0]}:{name[1]}"


def audit(run_dir: str | Path, with_waste: bool = False) -> Audited | None:
    """The audit of a run directory, with the account of sampled tokens if that is asked for; None if no service ran
    there."""
    root = Path(run_dir) / "service"
    return ServiceAudit(root).result(with_waste) if root.is_dir() else None
