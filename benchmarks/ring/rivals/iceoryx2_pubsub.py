"""iceoryx2, Python: publish/subscribe ping-pong between two processes that busy-poll; one payload each way."""

from __future__ import annotations

import ctypes
import os
import time

import iceoryx2 as iox2

from benchmarks.ring.rivals.measure import arguments, child, pin, say, timed


def service(node, name: str):
    return (
        node.service_builder(iox2.ServiceName.new(name))
        .publish_subscribe(iox2.Slice[ctypes.c_uint8])
        .subscriber_max_buffer_size(8)
        .enable_safe_overflow(False)
        .open_or_create()
    )


def send(publisher, size: int, source) -> None:
    sample = publisher.loan_slice_uninit(size)
    if source is not None:
        ctypes.memmove(sample.payload_ptr, source, size)
    sample.assume_init().send()


def receive(subscriber):
    while True:
        sample = subscriber.receive()
        if sample is not None:
            return sample


def ends(tag: str, size: int, first: str, second: str):
    iox2.set_log_level(iox2.LogLevel.Fatal)
    node = iox2.NodeBuilder.new().create(iox2.ServiceType.Ipc)
    publisher = service(node, f"{first}{tag}").publisher_builder().initial_max_slice_len(size).create()
    return node, publisher, service(node, f"{second}{tag}").subscriber_builder().create()


def echo(up, tag: str, size: int, count: int, fill: bool) -> None:
    pin(1)
    _node, publisher, subscriber = ends(tag, size, "b", "a")
    source = ctypes.create_string_buffer(size) if fill else None
    up.set()
    for _ in range(count):
        receive(subscriber).delete()
        send(publisher, size, source)
    time.sleep(0.2)  # the last answer must be read before its publisher goes


def main() -> None:
    options = arguments()
    tag = f"{os.getpid()}_{time.time_ns()}"
    _node, publisher, subscriber = ends(tag, options.size, "a", "b")
    source = ctypes.create_string_buffer(options.size) if options.fill else None
    with child(echo, tag, options.size, options.count, options.fill):
        time.sleep(0.5)  # discovery
        pin(0)

        def once() -> None:
            send(publisher, options.size, source)
            receive(subscriber).delete()

        say("iceoryx2", iox2, timed(once, options.count))


if __name__ == "__main__":
    main()
