"""The wire: messages, their bytes, their topics and the protocol's number.

Imports msgspec and nothing else of busrl, so that any tool can read a recorded message.
"""

from busrl.protocol.codec import Fault, Rejected, decode, encode
from busrl.protocol.messages import (
    MAX_ACTIVITY,
    DataGenerated,
    Error,
    Goodbye,
    Heartbeat,
    Hello,
    LearnerStateUpdate,
    Message,
    NewTask,
    Ping,
    Pong,
    RewardComputed,
    SchedulerState,
    Stop,
    TaskRequest,
    ValidationDone,
    ValidationStarted,
    WeightsGroup,
    WeightsPublished,
    name_of,
)
from busrl.protocol.registry import ALL, BY_NAME
from busrl.protocol.topics import address, is_address, kind_of, topic
from busrl.protocol.version import VERSION

__all__ = [
    "ALL",
    "BY_NAME",
    "MAX_ACTIVITY",
    "VERSION",
    "DataGenerated",
    "Error",
    "Fault",
    "Goodbye",
    "Heartbeat",
    "Hello",
    "LearnerStateUpdate",
    "Message",
    "NewTask",
    "Ping",
    "Pong",
    "Rejected",
    "RewardComputed",
    "SchedulerState",
    "Stop",
    "TaskRequest",
    "ValidationDone",
    "ValidationStarted",
    "WeightsGroup",
    "WeightsPublished",
    "address",
    "decode",
    "encode",
    "is_address",
    "kind_of",
    "name_of",
    "topic",
]
