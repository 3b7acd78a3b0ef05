"""The list of all messages, in the order of docs/protocol.md, and each by its name on the wire.

Talks to nothing. A message that stands nowhere here is unknown to the bus.
"""

from __future__ import annotations

from typing import Final

from busrl.protocol import messages as m
from busrl.protocol.gateway import GATEWAY, REMOTE
from busrl.protocol.messages import Message, name_of

ALL: Final[tuple[type[Message], ...]] = (
    m.TaskRequest,
    m.NewTask,
    m.DataGenerated,
    m.RewardComputed,
    m.LearnerStateUpdate,
    m.WeightsPublished,
    m.WeightsGroup,
    m.ValidationStarted,
    m.ValidationDone,
    m.SchedulerState,
    m.Hello,
    m.Heartbeat,
    m.Goodbye,
    m.Error,
    m.Ping,
    m.Pong,
    m.Stop,
    *REMOTE,
    *GATEWAY,
)
BY_NAME: Final[dict[str, type[Message]]] = {name_of(kind): kind for kind in ALL}
