"""What others do to the files of a living run: removed, emptied, replaced while it trains; a disk whose syncs fail.
It goes on and loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from checks import check_end
from harness import Run, running

pytestmark = pytest.mark.slow
LINES = ("metrics.jsonl", "samples.jsonl", "groups.jsonl", "train.jsonl")


def test_a_run_losing_its_files_one_by_one_reaches_a_clean_audit(
    tmp_path: Path, quickstart: None
) -> None:
    run = Run(tmp_path / "run", steps=40)
    with running(run):
        run.until_step(5)
        for name in LINES:
            os.truncate(run.directory / name, 0)
        run.until("the next lines", lambda: all((run.directory / name).stat().st_size for name in LINES))
        run.kill("learner")
        run.until_step(8)
        shutil.rmtree(run.paths.wal)  # under a living learner: it alone can make this good
        run.until("the learner to notice", lambda: run.paths.wal.is_dir())
        run.until_step(12)
        shutil.rmtree(run.paths.checkpoints)
        run.until("a checkpoint", lambda: list(run.paths.checkpoints.glob("global_step_*/meta.json")))
        for path in run.directory.glob("*.lock"):
            path.unlink()
        for path in run.paths.runtime_dir.glob("*.sock"):
            path.unlink()
        run.until_step(20)
        run.kill("learner")
        shutil.rmtree(run.paths.logs)
        run.kill("scheduler")
        code = run.wait()
    check_end(run, code)
    for name in LINES:
        assert b"\0" not in (run.directory / name).read_bytes()


BADIO = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int n;
static int fails(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t k = readlink(link, path, sizeof path - 1);
    if (k <= 0) return 0;
    path[k] = 0;
    return strstr(path, getenv("BADIO_FILE")) && ++n % atoi(getenv("BADIO_EVERY")) == 0;
}
int fdatasync(int fd) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fdatasync");
    if (fails(fd)) { errno = EIO; return -1; }
    return real(fd);
}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler for a library that lets syncs fail")
@pytest.mark.parametrize(("file", "every"), [("/wal/", "9"), ("train.jsonl", "3")])
def test_a_disk_with_occasional_failing_syncs_costs_only_time(
    file: str, every: str, tmp_path: Path, quickstart: None
) -> None:
    (tmp_path / "badio.c").write_text(BADIO)
    library = tmp_path / "badio.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "badio.c", "-ldl"], check=True)
    env = {"LD_PRELOAD": str(library), "BADIO_FILE": file, "BADIO_EVERY": every}
    run = Run(tmp_path / "run", "limits.restart_attempts=30", steps=30, env=env)
    with running(run):
        code = run.wait()
    check_end(run, code)
    assert "Input/output error" in run.text()
