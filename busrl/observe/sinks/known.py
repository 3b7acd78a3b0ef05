"""Sinks that a topology names by one word: TensorBoard, Weights & Biases, Trackio, Prometheus.

Each is a class that takes a RunCard (`busrl.observe.sinks.Sink`) and imports its package when an object is made. Knows
nothing of a run's files.
"""

from __future__ import annotations

import html
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from busrl.observe.sinks import Live, RunCard, Sink
from busrl.pages import opened
from busrl.system.listener import bounded

METRICS = opened("docs/metrics.md")
TABLE_S = 60.0  # between two tables of samples, which are files of their own there
COLUMNS = ("step", "uid", "prompt", "completion", "reward", "tokens", "finish", "version")


class TensorBoard(Sink):
    """Event files below `sinks/tensorboard`, without torch or TensorFlow."""

    def __init__(self, card: RunCard) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._proto, self._tensor, self._types = event_pb2, summary_pb2, tensor_pb2, types_pb2
        self._writer = EventFileWriter(str(card.folder))
        self._write(0, [self._text("topology", f"```\n{json.dumps(card.topology, indent=1, default=str)}\n```")])

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        value_of = self._proto.Summary.Value
        self._write(step, [value_of(tag=name, simple_value=value) for name, value in values.items()])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        head = f"|{'|'.join(COLUMNS)}|\n|{'---|' * len(COLUMNS)}\n"
        body = "".join("|" + "|".join(_cell(row.get(name, "")) for name in COLUMNS) + "|\n" for row in rows)
        self._write(step, [self._text("samples", head + body)])

    def _text(self, tag: str, markdown: str) -> Any:
        plugin = self._proto.SummaryMetadata.PluginData(plugin_name="text")
        return self._proto.Summary.Value(
            tag=f"{tag}/text_summary", metadata=self._proto.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensor.TensorProto(dtype=self._types.DT_STRING, string_val=[markdown.encode()]),
        )

    def _write(self, step: int, values: list[Any]) -> None:
        summary = self._proto.Summary(value=values)
        self._writer.add_event(self._event.Event(step=step, wall_time=time.time(), summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    """A cell of a table in Markdown. A model's text stays text: what would be markup is escaped."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", html.escape(text)).replace("\n", "<br>")


class Wandb(Sink):
    """A run of Weights & Biases with the run's uuid as its id, so that a later start goes on with it. WANDB_MODE,
    WANDB_API_KEY, WANDB_ENTITY are as everywhere; with WANDB_MODE=offline its files lie below `sinks/wandb`."""

    def __init__(self, card: RunCard) -> None:
        import wandb

        self._tools = wandb
        self._run = wandb.init(
            project=card.project, name=card.name, id=card.uuid, resume="allow", dir=str(card.folder),
            config=dict(card.topology), settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # a round of validation may come after later steps
        self._next_table = 0.0

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if time.monotonic() < self._next_table:
            return
        self._next_table = time.monotonic() + TABLE_S
        data = [[_plain(row.get(name)) for name in COLUMNS] for row in rows]
        self._run.log({"samples": self._tools.Table(columns=list(COLUMNS), data=data), "step": step})

    def close(self) -> None:
        self._run.finish()


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else json.dumps(value, default=str)


class Trackio(Sink):
    """A run of Trackio, in its local database (TRACKIO_DIR) or in the Space of its settings."""

    def __init__(self, card: RunCard) -> None:
        import trackio

        self._run = trackio.init(
            project=card.project, name=f"{card.name}-{card.uuid[:8]}", config=dict(card.topology), resume="allow",
            embed=False,
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class Prometheus(Sink):
    """`http://HOST:PORT/metrics` with the newest value of each number, and the present values of the ring."""

    def __init__(self, card: RunCard) -> None:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import GaugeMetricFamily

        self._family, self._card = GaugeMetricFamily, card
        self._values: dict[str, float] = {}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = start_http_server(card.port, card.host, registry)
        bounded(self._server)
        card.say(f"prometheus: http://{card.host}:{self._server.server_port}/metrics")

    def collect(self) -> Iterator[Any]:
        numbers = [Live(name, {}, value) for name, value in self._values.items()]
        families: dict[str, Any] = {}
        for name, labels, value in [*numbers, *self._card.live()]:
            full, all_labels = "busrl_" + re.sub("[^a-zA-Z0-9_]", "_", name), {"run": self._card.name, **labels}
            family = families.setdefault(full, self._family(full, f"{name} ({METRICS})", labels=list(all_labels)))
            family.add_metric(list(all_labels.values()), value)
        yield from families.values()

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self._values = {**self._values, **values, "step": max(float(step), self._values.get("step", 0.0))}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


KNOWN: dict[str, Callable[[RunCard], Sink]] = {
    "tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio, "prometheus": Prometheus,
}
