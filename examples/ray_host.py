"""One host of a run on a node of a Ray cluster: an entry of `hosts.start` (docs/hosts.md).

    python ray_host.py NAME COMMAND...      COMMAND is what starts a host there, as a rule `busrl host -`

NAME is a resource of that node (`ray start --resources '{"gpu-0": 1}'`). An actor that needs it runs the command and
writes to it the line that launch writes to this program's standard input, with the host's key. Ray carries that line
(in the clear, without RAY_USE_TLS) and the exit code, and no data of the run.

- If the actor or its node dies, this program ends, and launch starts it again: Ray then waits for a node with the
  resource.
- If this program dies, Ray ends the actor, and with it the kernel ends the command.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import ray
from ray.exceptions import RayError

PR_SET_PDEATHSIG = 1


def end_with_actor() -> None:
    """Have the kernel send SIGTERM to this process when the actor ends, in any way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@ray.remote(num_cpus=0, max_restarts=0)
class Host:
    def run(self, command: list[str], line: bytes) -> int:
        """Run the command with this line as input; its exit code, 128 + n after signal n."""
        child = subprocess.Popen(command, stdin=subprocess.PIPE, preexec_fn=end_with_actor)
        assert child.stdin is not None
        with child.stdin as pipe:
            pipe.write(line)
        code = child.wait()
        return code if code >= 0 else 128 - code


def main(name: str, command: list[str]) -> int:
    line = sys.stdin.buffer.readline()
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), namespace="busrl", logging_level="warning")
    host = Host.options(resources={name: 1}).remote()
    try:
        return int(ray.get(host.run.remote(command, line)))
    except RayError as problem:
        print(f"{name}: {type(problem).__name__}: {str(problem).splitlines()[0]}", file=sys.stderr)
        return 1


def stop(number: int, _: object) -> None:
    """SIGTERM from launch: leaving Ray ends the actor."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
