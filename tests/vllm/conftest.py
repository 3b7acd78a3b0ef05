"""vLLM for real: tiny random models made on the spot, one engine per module, and plain forward passes beside it.

What needs vLLM is marked `vllm` and run by the Python of an environment that has it: `make vllm-test`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "run"), str(HERE.parent / "roles")]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from busrl.engines.vllm_versions import vllm_installed

    if vllm_installed()[0]:
        return
    skip = pytest.mark.skip(reason="this Python has no vLLM; make vllm makes one that has")
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def quickstart() -> None:
    from busrl.quickstart import ensure

    ensure("tiny:sort")


@pytest.fixture(scope="module", params=["tied", "untied"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """One engine with a tiny model, its weights at hand. Tied with narrow heads, untied with heads that vLLM knows."""
    from vllm_scene import Scene

    scene = Scene(tmp_path_factory.mktemp(request.param), tied=request.param == "tied")
    yield scene
    scene.close()


@pytest.fixture(autouse=True)
def cleared(request: pytest.FixtureRequest) -> Iterator[None]:
    """A shared engine has nothing to do when a test begins, however the one before ended."""
    yield
    for name in ("scene", "pair", "adapters"):
        if name in request.fixturenames:
            request.getfixturevalue(name).clear()
