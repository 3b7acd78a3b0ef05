"""The control bus: publish and subscribe through one broker, for messages that may be lost.

Imports ZeroMQ, `protocol`, `keys` and `errors`; knows nothing of the ring or of roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from busrl.bus.broker import CurveListener, Refusal, run_broker
from busrl.bus.endpoint import Endpoint, EndpointStats
from busrl.bus.security import allow_many_connections, private_directory, tcp_pair

if TYPE_CHECKING:
    from busrl.bus.aio import AsyncEndpoint

__all__ = [
    "AsyncEndpoint",
    "CurveListener",
    "Endpoint",
    "EndpointStats",
    "Refusal",
    "allow_many_connections",
    "private_directory",
    "run_broker",
    "tcp_pair",
]


def __getattr__(name: str) -> Any:
    """The asyncio face when somebody asks for it: the broker must be back soon after a death, and asyncio is slow."""
    if name == "AsyncEndpoint":
        from busrl.bus.aio import AsyncEndpoint

        return AsyncEndpoint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
