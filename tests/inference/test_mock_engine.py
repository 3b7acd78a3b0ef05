"""The scripted engine keeps the promises of the interface, without torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from busrl.inference import EOS, LENGTH, Engine, Request
from busrl.inference.mock import EOS_ID, MockEngine, logprobs_of


def request(key: int, text: str, limit: int = 99) -> Request:
    ids = np.asarray([ord(letter) for letter in text], np.int32)
    return Request(key, key, 0, ids, np.empty(0, np.int32), limit, 1.0, 1.0, 0)


def test_one_token_a_step_with_the_version_of_that_step() -> None:
    engine: Engine = MockEngine(capacity=2, script=lambda _: [7, 8, 9, EOS_ID])
    engine.add([request(5, "ab")])
    assert engine.step() == [] and engine.step() == []
    engine.set_weights(4, 2)
    assert engine.step() == []
    (finished,) = engine.step()
    assert finished.token_ids.tolist() == [7, 8, 9, EOS_ID]
    assert finished.versions.tolist() == [0, 0, 4, 4]
    assert finished.finish == EOS and finished.key == 5
    np.testing.assert_array_equal(finished.logprobs, logprobs_of(finished.token_ids))
    assert engine.active == 0


def test_a_limit_cuts_and_a_cancelled_request_is_gone() -> None:
    engine = MockEngine(capacity=2)
    engine.add([request(0, "hello", limit=3), request(1, "other")])
    assert engine.cancel(1) and not engine.cancel(1)
    results = [finished for _ in range(3) for finished in engine.step()]
    assert [(f.key, f.finish, engine.decode(f.token_ids)) for f in results] == [(0, LENGTH, "hel")]


def test_the_default_script_depends_on_the_request_alone() -> None:
    first, second = MockEngine(), MockEngine()
    for engine in (first, second):
        engine.add([request(3, "abc")])
    wanted = [f.token_ids.tolist() for _ in range(20) for f in first.step()]
    assert wanted == [f.token_ids.tolist() for _ in range(20) for f in second.step()]
    assert first.decode(wanted[0]).startswith("abc")


def test_importing_the_interface_and_the_mock_imports_no_torch() -> None:
    code = "import sys, busrl.inference, busrl.inference.mock, busrl.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
