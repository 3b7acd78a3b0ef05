"""One numeric thread: several test processes share few cores, where threads of OpenBLAS wait for each other by spinning
(measured: 36 s instead of 1 s). Read when NumPy is first imported, so it stands before all other modules of tests.

Property tests try the same examples every time, so that a change is judged by what it changed; those of `make test-all`
are new in each run (HYPOTHESIS_PROFILE=explore), and what they find becomes an example in the test.

Signals mean what they mean on a terminal, also where the suite runs in the background of a script: a shell starts such
programs with SIGINT ignored, `nohup` with SIGHUP, and all that a test starts would inherit it.

What busrl keeps in a user's cache it keeps here in one of the tests, `busrl-tests` in that cache: models that were made
stay from session to session, answers about tokenizers do not, so that each session asks for them.
"""

import contextlib
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# In the processes that a test starts; those of pytest's own are in pyproject.toml. A rank whose output of a wrapped
# module is a view would fail.
os.environ.setdefault("PYTHONWARNINGS", "error::UserWarning:torch.distributed.fsdp._fully_shard._fsdp_state")
with contextlib.suppress(ImportError):  # the environment of vLLM has no hypothesis, and its tests need none
    from hypothesis import HealthCheck, settings

    # How fast the machine is is not the subject: neither a deadline nor slow generation is a failure. A fixture of a
    # test may serve all of its examples.
    unhurried = settings(
        deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
    settings.register_profile("same", unhurried, derandomize=True)
    settings.register_profile("explore", unhurried)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

from collections.abc import Callable, Generator

import pytest

from busrl.system.imports import uncollected

OWN_CACHE = "busrl-tests"


def use_own_cache() -> None:
    """Give all processes of this session the cache of the tests. Models that the user has made, and caches of other
    programs, are linked there, as making them takes minutes."""
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if users.name == OWN_CACHE:  # a worker of a session, which has it
        return
    own = users / OWN_CACHE
    (own / "busrl").mkdir(parents=True, exist_ok=True)
    shutil.rmtree(own / "busrl" / "tokenizers", ignore_errors=True)
    others = [path for path in users.iterdir() if path.is_dir() and path.name not in ("busrl", OWN_CACHE)]
    for path in (*others, *(path for path in (users / "busrl").glob("[!.]*-*") if path.is_dir())):
        link = own / path.relative_to(users)
        if link.is_symlink() and not link.exists():  # the user has removed it
            link.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(path)
    os.environ["XDG_CACHE_HOME"] = str(own)


use_own_cache()
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).parent))  # helpers that several folders of tests share


LONG_TEST_S = 600


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with uncollected():
        found = yield
    gc.freeze()
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of whole runs may start several, each of which ends or is stopped with its logs shown at a limit of its
    own (`harness.LIMIT_S`): the limit on the test stands above the sum, also on a loaded machine."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if marks & {"long", "slow"} and "timeout" not in marks:
            item.add_marker(pytest.mark.timeout(LONG_TEST_S))


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`chat_folder("chatml")` is a real model folder with that chat template; see chat_folders.py for the others."""
    from chat_folders import make

    made: dict[str, Path] = {}

    def of(template: str = "chatml") -> Path:
        if template not in made:
            made[template] = make(tmp_path_factory.mktemp(template or "plain") / "model", template)
        return made[template]

    return of


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real model folder of which transformers makes another tokenizer than its tokenizer.json says."""
    from chat_folders import make_bpe

    return make_bpe(tmp_path_factory.mktemp("bpe") / "model")
