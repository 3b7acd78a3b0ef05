"""Starts one process of a run: `python -m busrl.roles RUN_DIR NAME`, NAME as in `rollout/0`.

Imports the one role that is asked for, so that no process loads what only another one needs. Of a role that may work
for several models the topology says before which class that is; the bus starts without a topology.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from busrl import capabilities
from busrl.capabilities import MODEL_ROLES, ROLES
from busrl.errors import LONGEST_VERDICT, NO_SPACE, RETRY, SOCKET, VERDICT, BusrlError, cause, process_code
from busrl.paths import RunPaths
from busrl.system.imports import uncollected


def asked_for() -> tuple[str, str]:
    """The run directory and the name of the process, of the command line; ends with the rule that it breaks."""
    parser = argparse.ArgumentParser(prog="python -m busrl.roles", description=__doc__.split("\n")[0])
    parser.add_argument("run_dir")
    parser.add_argument("name", help="process name, such as scheduler or rollout/0")
    options = parser.parse_args()
    if (role := options.name.partition("/")[0]) not in ROLES:
        parser.error(f"no role {role!r} in busrl; a name begins with one of: {', '.join(ROLES)}")
    if not (paths := RunPaths.of(options.run_dir)).topology.is_file():
        parser.error(f"{paths.root}: no topology.json there; name the directory that `busrl launch` printed")
    return options.run_dir, options.name


def main() -> tuple[int, str]:
    """Run the process; its exit code, and why it ended where that is an error."""
    run_dir, name = asked_for()
    try:
        with uncollected():
            made_by = maker(name.partition("/")[0], RunPaths.of(run_dir), name)
        gc.freeze()  # modules stay: no look for cycles among them while a model is loaded, either
        code: int = made_by(run_dir, name).main()
    except BusrlError as problem:
        print(f"{name}: {problem}", file=sys.stderr, flush=True)
        return process_code(problem), cause(problem)
    except ImportError as problem:
        traceback.print_exc()
        return process_code(problem), cause(problem)
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return NO_SPACE, cause(problem)
    finally:
        # Python puts the default handlers back while it ends, which takes a while with torch: a SIGTERM that comes
        # then would turn an orderly end into a death by signal. What is ignored stays ignored.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return code, ""


def maker(role: str, paths: RunPaths, name: str) -> Callable[[str, str], Any]:
    """The class of a process, which is another one where it works for several models."""
    made_by: Callable[..., Any] = capabilities.role(role)
    if role not in MODEL_ROLES:
        return made_by
    from busrl.roles.actor import InForce  # only here: it imports the topology's tables, which the bus does without

    in_force = InForce.read(paths)
    if len(in_force.whole.models_of(name)) > 1:
        made_by = capabilities.plug("several", role)
    return partial(made_by, in_force=in_force)


def reported(code: int, why: str, verdict: int | None, pid: int) -> int:
    """Write the exit code and the cause to launch's descriptor, and return the code: libraries may write more into the
    log while the process ends. A copy of the process (another pid) reports nothing."""
    if verdict is not None and os.getpid() == pid:
        with contextlib.suppress(OSError):  # user code may have closed it
            os.write(verdict, f"{code} {why}".encode()[:LONGEST_VERDICT])
    return code


def verdict() -> int | None:
    """The descriptor for this process's exit code, which no child inherits; None where launch gave none."""
    text = os.environ.pop(VERDICT, "")
    if not text.isdigit():
        return None
    os.set_inheritable(int(text), False)
    return int(text)


def whole(listener: int | None) -> int:
    """The process from its arguments to its exit code, which launch gets through `listener` too."""
    own_pid = os.getpid()
    try:
        end = main()
    except Exception as problem:
        reported(RETRY, cause(problem), listener, own_pid)
        raise
    return reported(*end, listener, own_pid)


# -- in a template (`system/template.py`) -----


def warm(run_dir: str, names: Sequence[str]) -> None:
    """Import what these processes of the run import, at once or while they are set up."""
    from busrl.topology.recorded import recorded  # only here: the bus starts without it, and all wait for the bus

    topology = recorded(RunPaths.of(run_dir).topology)
    with uncollected():
        for name in names:
            capabilities.role(name.partition("/")[0]).warm(topology.of(topology.tag_of(name)), name)


def forked(descriptors: Sequence[int], run_dir: str, name: str) -> int:
    """Be that process; its exit code. `descriptors`: for the verdict, then the run's lock, which children inherit, and
    the socket at which it listens, if any."""
    sys.modules["__main__"] = sys.modules[__name__]
    listener, lock, *sockets = descriptors
    os.set_inheritable(listener, False)
    os.set_inheritable(lock, True)
    if sockets:
        os.environ[SOCKET] = str(sockets[0])
    sys.argv[1:] = [run_dir, name]
    return whole(listener)


if __name__ == "__main__":
    sys.exit(whole(verdict()))
