"""The cache of made models: atomic, one maker at a time, nothing half made; with real processes and SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from busrl.errors import PeerTimeout
from busrl.quickstart import cache
from busrl.quickstart.task import Recipe, find

ROOT = Path(cache.__file__).parents[2]
NAME = "tiny:sort"

MAKER = """
import sys
from pathlib import Path
from busrl.quickstart.cache import make_once
from busrl.quickstart.task import find

def fill(folder):
    with open(sys.argv[1], "a") as log:
        log.write("filled\\n")
    (folder / "model").mkdir()
    print("filling", flush=True)
    sys.stdin.readline()
    (folder / "made.json").write_text("{}")

print(make_once(find("tiny:sort"), fill).model, flush=True)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "busrl"


def start_maker(log: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(MAKER), str(log)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def said(maker: subprocess.Popen[str]) -> str:
    assert maker.stdout is not None
    return maker.stdout.readline().strip()


def complete(folder: Path) -> None:
    (folder / "made.json").write_text("{}")


def left_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(".lock"))


def test_paths_is_none_until_a_folder_is_complete(own_cache: Path) -> None:
    assert cache.paths(NAME) is None
    paths = cache.make_once(find(NAME), complete)
    assert cache.paths(NAME) == paths
    assert paths.model == own_cache / Recipe().folder / "model"


def test_a_complete_folder_is_not_made_again_unless_forced() -> None:
    folders: list[Path] = []

    def fill(folder: Path) -> None:
        folders.append(folder)
        complete(folder)

    cache.make_once(find(NAME), fill)
    cache.make_once(find(NAME), fill)
    assert len(folders) == 1
    cache.make_once(find(NAME), fill, force=True)
    assert len(folders) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_making_leaves_no_folder(own_cache: Path, error: type[BaseException]) -> None:
    def fill(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise error

    with pytest.raises(error):
        cache.make_once(find(NAME), fill)
    assert left_in(own_cache) == [] and cache.paths(NAME) is None


def test_a_forced_making_that_fails_keeps_the_old_folder() -> None:
    paths = cache.make_once(find(NAME), complete)

    def fill(folder: Path) -> None:
        raise OSError("no space")

    with pytest.raises(OSError):
        cache.make_once(find(NAME), fill, force=True)
    assert cache.paths(NAME) == paths


def test_leftovers_of_a_killed_maker_stay_invisible_until_the_next_clears_them(own_cache: Path, tmp_path: Path) -> None:
    maker = start_maker(tmp_path / "log")
    assert said(maker) == "filling"
    maker.send_signal(signal.SIGKILL)
    maker.wait(30)
    assert cache.paths(NAME) is None
    cache.make_once(find(NAME), complete)
    assert left_in(own_cache) == [Recipe().folder]


def test_one_of_two_concurrent_makers_makes_and_the_other_waits(tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = start_maker(log)
    assert said(first) == "filling"
    second = start_maker(log)
    assert second.stderr is not None
    assert f"waiting for process {first.pid}" in second.stderr.readline()
    told = first.communicate("go\n", 30)[0], second.communicate("go\n", 30)[0]
    assert told[0] == told[1] != ""
    assert log.read_text() == "filled\n"


def test_a_maker_takes_over_when_the_one_it_waits_for_is_killed(tmp_path: Path) -> None:
    first = start_maker(tmp_path / "log")
    assert said(first) == "filling"
    second = start_maker(tmp_path / "log")
    assert second.stderr is not None
    assert "waiting" in second.stderr.readline()
    first.kill()
    first.wait(30)
    assert said(second) == "filling"
    second.communicate("go\n", 30)
    assert second.returncode == 0 and cache.paths(NAME) is not None


def test_waiting_for_a_maker_ends_with_an_error_that_names_it(tmp_path: Path) -> None:
    maker = start_maker(tmp_path / "log")
    assert said(maker) == "filling"
    with pytest.raises(PeerTimeout, match=f"process {maker.pid}"):
        cache.make_once(find(NAME), complete, wait_s=0.0)
    maker.communicate("go\n", 30)


def test_importing_and_asking_imports_no_torch() -> None:
    code = "import sys, busrl.quickstart as q; q.paths('tiny:sort'); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)
