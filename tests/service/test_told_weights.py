"""The weights of a model are those of which its clients were told, whatever a request comes to when it is run again."""

from __future__ import annotations

import json
import shutil

import pytest
from test_driver import Asked, Service, service  # noqa: F401  (a fixture: models are numbers)

from busrl.errors import DiskFull
from busrl.service import operations
from busrl.service.requests import Request
from busrl.service.sums import UserFault


def load(service: Service, seq: int, path: str, model: str = "m") -> None:  # noqa: F811
    service.ask(seq, "load_weights", model, path=path, optimizer=True)


def saved_by_another(service: Service, value: float, seq: int = 1) -> str:  # noqa: F811
    """The path of weights that a model `n` saved behind a step."""
    service.train(seq, value, "n")
    service.ask(seq + 2, "save_weights", "n", path="one", overwrite=True)
    return "tinker://n/weights/one"


def last_error(service: Service, model: str = "m") -> str:  # noqa: F811
    return str(json.loads(service.answers(model)[-1].payload)["error"])


def test_a_load_that_failed_fails_again_though_its_path_is_there(service: Service) -> None:  # noqa: F811
    service.model("n")
    service.forward(1, 5.0)
    load(service, 2, "tinker://n/weights/one")
    service.run()
    saved_by_another(service, 100.0)
    service.step(3)
    service.run()
    assert service.models.values["m"] == 5.0
    service.restart()
    service.train(4, 1.0)
    service.run()
    assert service.models.values["m"] == 6.0 and not service.warned
    assert service.said() == [(1, "done"), (2, "user"), (3, "done"), (4, "done"), (5, "done")]


def test_a_load_is_answered_when_its_state_is_written(
    service: Service, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    service.model("n")
    path = saved_by_another(service, 5.0)
    service.run()
    load(service, 1, path)
    write_state = operations.Operations.write_state

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(operations.Operations, "write_state", killed)
    with pytest.raises(KeyboardInterrupt):
        service.run()
    assert not service.answers()
    monkeypatch.setattr(operations.Operations, "write_state", write_state)
    shutil.rmtree(service.where.saved_as("n", "weights", "one"))
    service.restart()
    service.train(2, 1.0)
    service.run()
    assert service.said()[0] == (1, "user") and service.models.values["m"] == 1.0


def test_what_was_loaded_stays_when_its_path_is_anothers(service: Service) -> None:  # noqa: F811
    service.model("n")
    path = saved_by_another(service, 5.0)
    service.run()
    load(service, 1, path)
    service.run()
    saved_by_another(service, 100.0, 4)
    service.run()
    service.restart()
    service.train(2, 1.0)
    service.run()
    assert service.models.values["m"] == 6.0 and not service.warned


def test_a_load_without_room_for_its_state_fails_and_changes_nothing(
    service: Service, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    service.model("n")
    path = saved_by_another(service, 5.0)
    service.train(1, 1.0)
    service.run()
    write_state = operations.Operations.write_state

    def full(*_: object) -> None:
        raise DiskFull("no space left on the device")

    monkeypatch.setattr(operations.Operations, "write_state", full)
    load(service, 3, path)
    service.run()
    assert service.said()[-1] == (3, "server") and "no space left" in last_error(service)
    monkeypatch.setattr(operations.Operations, "write_state", write_state)
    service.train(4, 2.0)
    service.run()
    assert service.models.values["m"] == 3.0 and service.said()[-1] == (5, "done")


def test_a_done_request_that_kills_when_run_again_costs_its_model(service: Service) -> None:  # noqa: F811
    def killed(seconds: float) -> None:
        raise KeyboardInterrupt

    service.train(1, 5.0)
    service.train(3, 7.0)
    service.run()
    told = service.answers()
    service.train(5, 1.0)
    for _ in range(2):
        service.restart()
        service.models.worked = killed
        with pytest.raises(KeyboardInterrupt):
            service.run()
    service.restart()
    service.run()
    assert service.answers()[:4] == told and service.said()[4:] == [(5, "server"), (6, "server")]
    assert "m cannot go on: request 1 (forward_backward), run again, is server" in last_error(service)
    assert "load saved weights into a new model" in service.warned[-1]


def test_a_forward_alone_that_fails_breaks_no_step(
    service: Service, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    class Evaluated(Asked):
        def __init__(self, body: bytes) -> None:
            super().__init__(body)
            self.forward_only = self.data[0] == -2.0

    monkeypatch.setattr(operations, "read_forward_backward", Evaluated)
    about = {"why": "a wrong input", "forward_only": True}
    service.log.write(Request("refused", "m", 1, "forward_backward", about=about))
    service.forward(2, -2.0)
    service.train(3, 5.0)
    service.run()
    assert service.said() == [(1, "user"), (2, "user"), (3, "done"), (4, "done")]
    service.restart()
    service.train(5, 1.0)
    service.run()
    assert service.models.values["m"] == 6.0 and not service.warned


def test_a_load_that_fails_leaves_a_broken_step_broken(
    service: Service, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:
    def unfit(*_: object) -> None:
        raise UserFault("saved with rank = 8, this model has 4")

    service.ask(1, "save_weights", path="one")
    service.run()
    monkeypatch.setattr(service.models, "load_state", unfit)
    service.forward(2, -1.0)
    load(service, 3, "tinker://m/weights/one")
    service.train(4, 4.0)
    service.run()
    assert service.said()[1:] == [(2, "user"), (3, "user"), (4, "done"), (5, "user")]
    assert "request 2 of this step failed" in last_error(service)
