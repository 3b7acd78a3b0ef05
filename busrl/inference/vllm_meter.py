"""What vLLM's own scheduler tells after every step, kept as a few numbers for `Engine.statistics`.

Handed to AsyncLLM as a logger of statistics. Imports vLLM inside a function only; where a version tells nothing, the
numbers stay 0.
"""

from __future__ import annotations

from typing import Any


class Meter:
    """Counts of one engine, over its restarts."""

    def __init__(self) -> None:
        self.steps = 0
        self.usage = 0.0  # share of the key-value cache in use

    def factory(self) -> Any:
        """What AsyncLLM makes a logger with."""

        def made(config: Any, engine_index: int = 0) -> Any:
            from vllm.v1.metrics.loggers import StatLoggerBase

            meter = self

            class Told(StatLoggerBase):  # type: ignore[misc, unused-ignore]
                def __init__(self, config: Any, engine_index: int = 0) -> None: ...

                def record(self, scheduler_stats: Any = None, *args: Any, **more: Any) -> None:
                    if scheduler_stats is not None:
                        meter.steps += 1
                        meter.usage = float(getattr(scheduler_stats, "kv_cache_usage", 0.0) or 0.0)

                def log_engine_initialized(self) -> None: ...

            return Told(config, engine_index)

        return made
