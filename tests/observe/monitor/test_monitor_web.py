"""The page's server over real sockets: what it gives, to whom, and that nothing a client sends changes anything."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from monitor_scene import PATIENCE_S, UUID, Scene, finished, metrics_line, until
from test_monitor_replay import make, stream

from busrl.cli import main
from busrl.observe.monitor.sources import Watcher
from busrl.observe.monitor.web.picture import MOST_LINES, MOST_SPANS, History, blocked
from busrl.observe.monitor.web.server import FILES, MOST_CONNECTIONS, MOST_STREAMS, Address, View, Views
from busrl.protocol import messages as m
from busrl.ring import Ring
from busrl.status.reader import RunReader
from busrl.status.state import ProcessRecord, ProcessRow, RingRecord, RunState

Start = Callable[..., "subprocess.Popen[str]"]


class Site:
    """A `busrl monitor --web` that runs."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        said = child.stdout.readline()
        assert "http://" in said, child.communicate(timeout=PATIENCE_S)
        self.child, self.url = child, next(word for word in said.split() if word.startswith("http://"))
        self.port = urlsplit(self.url).port
        assert self.port

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as asked:
            asked.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            answer = asked.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def raw(self, data: bytes) -> bytes:
        """All that is answered to some bytes, until the connection ends."""
        with closing(self.connection()) as asked:
            asked.sendall(data)
            got = b""
            while part := asked.recv(1 << 16):
                got += part
            return got

    def connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    @contextmanager
    def stream(self, path: str = "/events", **headers: str) -> Iterator[Iterator[tuple[str, Any]]]:
        """Events with their names, as they come."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as asked:
            asked.request("GET", path, headers=headers)
            answer = asked.getresponse()
            assert answer.status == 200 and answer.headers["Content-Type"] == "text/event-stream", answer.status
            with closing(answer):
                yield _events(answer)

    def works(self) -> bool:
        with self.stream() as events:
            return next(events)[0] == "picture"


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in answer:
        kind, _, rest = line.decode().strip().partition(": ")
        if kind == "event":
            name = rest
        elif kind == "data":
            yield name, json.loads(rest)


def found(events: Iterator[tuple[str, Any]], name: str, when: Callable[[Any], bool] = bool) -> Any:
    return next(told for kind, told in events if kind == name and when(told))


@pytest.fixture
def site(scene: Scene, started: Start) -> Site:
    return Site(started("monitor", str(scene.paths.root), "--web"))


# -- what it gives -----------------------------------------------------------------------------------------------------

def test_the_stream_begins_with_the_whole_picture_then_all_steps_and_samples(scene: Scene, started: Start) -> None:
    sample = {"step": 40, "prompt": "1+1=", "completion": "<b>2</b>", "reward": 1.0, "version_runs": [[39, 3], [40, 2]]}
    scene.paths.samples.write_text(json.dumps(sample) + "\n")
    site = Site(started("monitor", str(scene.paths.root), "--web"))
    with site.stream() as events:
        first, steps, samples = next(events), next(events), next(events)
    assert [first[0], steps[0], samples[0]] == ["picture", "steps", "samples"]
    assert (first[1]["state"], first[1]["step"], first[1]["slots"]) == ("running", 40, {"free": 16})
    [row] = first[1]["web"]["rows"]
    assert (row["name"], row["doing"], row["late"]) == ("rollout/0", "compiling", False)
    assert first[1]["errors"]["newest"][0]["text"] == "sample 7 is poison"
    column = dict(zip(steps[1]["columns"], zip(*steps[1]["rows"])))
    assert column["step"] == tuple(range(1, 41)) and column["reward"][-1] == 0.4 and column["entropy"][0] == 0.7
    assert samples[1] == [sample]


def test_what_happens_later_comes_to_a_page_that_is_open(scene: Scene, site: Site) -> None:
    publisher = scene.endpoint("rollout-0")
    with site.stream() as events:
        found(events, "steps")
        with open(scene.paths.metrics, "ab") as file:
            file.write(metrics_line(41))
        assert found(events, "steps")["rows"][-1][0] == 41
        with open(scene.paths.samples, "ab") as file:
            file.write(b'{"step": 41, "prompt": "Q", "completion": "A"}\n')
        assert found(events, "samples") == [{"step": 41, "prompt": "Q", "completion": "A"}]
        publisher.send(m.DataGenerated(slot_id=1, seq=2, uid=3))
        told = found(events, "picture", lambda data: data["messages"]["by_name"].get("DATA_GENERATED"))
        per_s, bytes_per_s, count, size = told["web"]["senders"]["rollout-0"]
        assert count >= 1 and per_s >= 0 <= bytes_per_s
        assert size >= told["messages"]["by_name"]["DATA_GENERATED"]["bytes"]
        lines = found(events, "picture", lambda data: len(data["web"]["timeline"]))["web"]["timeline"]
        assert lines[0]["process"] == "rollout/0" and lines[0]["spans"][-1][2] == "compiling"


def test_the_ring_is_told_by_state_age_and_version(scene: Scene, site: Site) -> None:
    with site.stream() as events:
        web = found(events, "picture")["web"]
    assert web["ring"]["slots"] == 16
    [(name, count, *ages)] = web["ring"]["states"]
    assert (name, count) == ("free", 16) and len(ages) == 3 and 0 <= ages[0] <= ages[1] <= ages[2]


def test_every_page_file_exists_and_asks_nothing_of_other_hosts(site: Site) -> None:
    pages = ""
    for path, (name, kind) in FILES.items():
        status, headers, body = site.get(path)
        pages += body.decode() if name.endswith(".html") else ""
        assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8"), name
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert b"innerHTML" not in body and b"eval(" not in body
    assert all(f'"{path[1:]}"' in pages for path in FILES if path != "/"), "a file that no page names"
    assert "http" not in pages.replace("http://www.w3.org", "")


def test_a_run_that_is_over_is_shown(short_dir: Path, started: Start) -> None:
    root = short_dir / "old"
    root.mkdir()
    (root / "run.json").write_text('{"run_id": "old-1"}')
    (root / "summary.json").write_text('{"outcome": "finished", "why": "the goal", "steps": 3, "seconds": 5.0}')
    (root / "metrics.jsonl").write_bytes(metrics_line(3))
    with Site(started("monitor", str(root), "--web")).stream() as events:
        told, steps = found(events, "picture"), found(events, "steps")
    assert told["state"] == "finished" and told["web"]["over"] and told["web"]["ended"] == "finished: the goal"
    assert [row[0] for row in steps["rows"]] == [3] and told["web"]["blocked"] == {}


def test_it_writes_nothing_and_leaves_nothing(scene: Scene, started: Start) -> None:
    before = scene.state()
    site = Site(started("monitor", str(scene.paths.root), "--web"))
    assert site.works() and site.get("/")[0] == 200
    maps = Path(f"/proc/{site.child.pid}/maps").read_text().splitlines()
    mapped = [line.split()[1] for line in maps if scene.paths.key in line or str(scene.paths.root) in line]
    assert mapped and set(mapped) == {"r--s"}
    site.child.terminate()
    assert site.child.wait(PATIENCE_S) == 0 and scene.state() == before


def test_a_replay_is_shown_as_it_goes(short_dir: Path, started: Start) -> None:
    path, bind = make(short_dir / "a.rec", stream(200)), f"ipc://{short_dir}/replay.sock"
    player = started("replay", str(path), "--speed", "max", "--bind", bind)
    with Site(started("monitor", bind, "--web")).stream() as events:
        told = found(events, "picture", lambda data: "over" in data["web"]["headline"])
    finished(player)
    assert (told["name"], told["state"], told["messages"]["count"]) == ("recorded", "replay", 200)
    assert told["web"]["senders"]["learner"][2] > 0 and told["web"]["rows"][0]["name"] == "rollout/0"


# -- several models ----------------------------------------------------------------------------------------------------

def test_each_model_has_a_page_of_its_own(scene: Scene, site: Site) -> None:
    judge = scene.beside("judge")
    judge.samples.write_text('{"step": 3, "prompt": "Q", "completion": "right."}\n')
    seen = {}
    for path in ("/events", "/events?model=solver", "/events?model=judge"):
        with site.stream(path) as events:
            told, steps = found(events, "picture"), found(events, "steps")
            seen[path] = told["step"], [row[0] for row in steps["rows"]][-1], told["web"]["model"]
            assert {tag: one["step"] for tag, one in told["web"]["models"].items()} == {"solver": 40, "judge": 3}
            assert told["web"]["lead"] == "solver"
            if "judge" in path:
                assert " · judge" in told["web"]["headline"]
                assert [one["completion"] for one in found(events, "samples")] == ["right."]
    assert list(seen.values()) == [(40, 40, "solver")] * 2 + [(3, 3, "judge")]
    assert site.get("/?model=judge")[0] == site.get("/")[0] == 200


def test_a_page_of_one_model_names_no_models(site: Site) -> None:
    with site.stream() as events:
        told = found(events, "picture")
    assert "models" not in told and not {"models", "model"} & told["web"].keys() and told["web"]["lead"] is None


def test_a_model_that_is_not_there_is_404_and_others_are_named(scene: Scene, site: Site) -> None:
    for path in ("/?model=judge", "/events?model=judge"):
        status, _, body = site.get(path)
        assert (status, body) == (404, b"no model 'judge' in this run; it has one, at /")
    scene.beside("judge")
    for name in ("third", "..", "judge/..", "%2e%2e%2fjudge", "%00", "JUDGE", "a" * 5000):
        status, _, body = site.get(f"/events?model={name}")
        assert status == 404 and b"in this run; its models are solver, judge" in body and len(body) < 200, name
    assert site.works()


def test_a_model_is_watched_while_a_page_looks_at_it(scene: Scene, site: Site) -> None:
    judge, maps = scene.beside("judge"), Path(f"/proc/{site.child.pid}/maps")
    ring = Ring.create(judge.ring_name, slots=2, slot_bytes=256, processes=8, uuid=UUID)
    try:
        assert site.works() and judge.ring_name not in maps.read_text()
        with site.stream("/events?model=judge") as first, site.stream("/events?model=judge") as second:
            for events in (first, second):
                assert found(events, "picture")["web"]["ring"]["slots"] == 2
            assert maps.read_text().count(f"/{judge.ring_name}\n") == 1, "two pages share one view"
        until("its ring is closed", lambda: judge.ring_name not in maps.read_text())
        with site.stream("/events?model=judge") as again:
            assert next(again)[0] == "picture"
            site.child.terminate()
            assert site.child.wait(PATIENCE_S) == 0
    finally:
        ring.close()
        Ring.unlink(judge.ring_name)


def test_a_model_that_cannot_be_read_ends_only_its_own_pages(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, refresh = scene.beside("judge"), RunReader.refresh
    broken = [str(judge.root)]

    def refreshed(reader: RunReader, now: float) -> None:
        if reader.run.facts.run_dir in broken:
            raise OSError("the disk is gone")
        refresh(reader, now)

    monkeypatch.setattr(RunReader, "refresh", refreshed)
    with closing(Watcher(scene.paths)) as watcher:
        views = Views(View(watcher, scene.paths))
        for _ in range(2):
            with pytest.raises(web.HTTPServiceUnavailable) as refused, views.page("judge"):
                pass
            assert "the disk is gone" in str(refused.value.text) and len(views.every) == 1
        broken.clear()
        with views.page("judge") as page, views.page("") as lead:
            assert len(views.every) == 2 and not page.over
            broken.append(str(judge.root))
            views.each(lambda view: view.look(time.monotonic() + 60.0))
            assert page.over and page.news.is_set() and views.every == [lead] and not lead.over
            broken.clear()
            with views.page("judge") as again:
                assert not again.over and views.pages == 2
        views.close()


def test_pages_of_all_models_together_are_bounded(scene: Scene, site: Site) -> None:
    scene.beside("judge")
    with ExitStack() as pages:
        for at in range(MOST_STREAMS):
            events = pages.enter_context(site.stream(f"/events?model={('solver', 'judge')[at % 2]}"))
            assert next(events)[0] == "picture"
        assert site.get("/events?model=judge")[0] == site.get("/events")[0] == 503


# -- to whom -----------------------------------------------------------------------------------------------------------

def test_an_address_beyond_loopback_needs_the_token_of_the_printed_address(scene: Scene, started: Start) -> None:
    site = Site(started("monitor", str(scene.paths.root), "--web", "0.0.0.0:0"))
    token = urlsplit(site.url).query
    assert token.startswith("token=") and len(token) > 40
    for path in ("/", "/events", "/page.js", "/?token=", "/?token=wrong", f"/?{token}x", "/?token=%ff%00", "/nothing"):
        status, headers, _ = site.get(path)
        assert status == 401 and "set-cookie" not in headers, path
    status, headers, _ = site.get(f"/?{token}")
    assert (status, headers["location"]) == (303, "/")
    for asked, kept in (("judge", "judge"), ("a%0d%0aX:%20b%26c", "a%0D%0AX%3A+b%26c")):
        assert site.get(f"/?model={asked}&{token}")[1]["location"] == f"/?model={kept}"
    cookie, *rules = headers["set-cookie"].split("; ")
    assert "HttpOnly" in rules and "SameSite=Lax" in rules
    assert site.get("/", Cookie=cookie)[0] == 200 and site.get("/", Cookie=cookie[:-1])[0] == 401
    with site.stream(Cookie=cookie) as events:
        assert next(events)[0] == "picture"


def test_on_loopback_no_token_is_needed(site: Site) -> None:
    assert urlsplit(site.url).hostname == "127.0.0.1" and "token" not in site.url and site.works()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can ask as another user")
def test_another_user_of_the_host_sees_nothing(site: Site) -> None:
    code = "import sys, urllib.request as u, urllib.error as e\n" \
           "try: print(u.urlopen(sys.argv[1]).status)\nexcept e.HTTPError as refused: print(refused.code)"
    call, path = ["/usr/bin/env", "python3", "-c", code, site.url], {"PATH": os.environ["PATH"]}
    told = [subprocess.check_output(call, user=user, env=path, cwd="/") for user in (0, 65534)]
    assert told == [b"200\n", b"403\n"]


def test_a_name_of_somebody_else_is_refused(site: Site) -> None:
    for host in ("localhost", "LOCALHOST:99", "127.0.0.1", "[::1]:80", socket.gethostname()):
        assert site.get("/", Host=host)[0] == 200, host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", ""):
        assert site.get("/", Host=host)[0] == 421, host


def test_a_page_of_another_site_may_lead_here_and_read_nothing(site: Site) -> None:
    assert site.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert site.get("/events", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403


def test_what_is_no_address_is_refused_with_the_rule(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    for named in ("runs/demo", "1.2.3.4:99999", "::1:80", "localhost:", "a:b:1", "-1", "²"):
        assert main(["monitor", str(scene.paths.root), f"--web={named}"]) == 2
        assert f"--web {named}: expected PORT, HOST:PORT" in capsys.readouterr().err


def test_an_address_in_use_is_refused(scene: Scene, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(scene.paths.root), "--web", str(site.port)]) == 2
    assert "cannot listen there" in capsys.readouterr().err


def test_addresses_as_they_are_written() -> None:
    assert Address.of("") == ("127.0.0.1", 0) and Address.of("8080") == ("127.0.0.1", 8080)
    assert Address.of(":80") == ("127.0.0.1", 80) and Address.of("[::1]:80") == ("::1", 80)


# -- hostile clients ---------------------------------------------------------------------------------------------------

HEAD = b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n"


PATHS = (
    b"/../../../../etc/passwd", b"/%2e%2e/%2e%2e/etc/passwd", b"//etc/passwd", b"/page.js/../server.py", b"/server.py",
    b"/page.html", b"/%00", b"/page.js%00", b"/events/", b"/" + b"a" * 7000, b"/..%5c..%5cetc", b"/uplot.LICENSE",
)
GARBAGE = (
    b"\x00\xff" * 600 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n: \r\n\r\n",
    HEAD % (b"/" + b"a" * 100_000, b""), HEAD % (b"/", b"X: " + b"a" * 100_000 + b"\r\n"),
    HEAD % (b"/", b"X: 1\r\n" * 5000), HEAD % (b"/", b"Content-Length: -5\r\n"), b"BREW / HTTP/1.1\r\n\r\n",
)


def test_a_path_that_is_not_of_the_page_is_404(site: Site) -> None:
    for path in PATHS:
        assert site.raw(HEAD % (path, b"")).startswith(b"HTTP/1.1 404"), path
    assert site.works()


def test_bytes_that_are_no_request_are_refused_or_end_the_connection(site: Site) -> None:
    for data in GARBAGE:
        try:
            answer = site.raw(data)
        except ConnectionError:  # it was closed before all was sent
            answer = b""
        assert answer == b"" or answer.split()[1] in (b"400", b"404", b"405", b"421"), data[:99]
    assert site.works()


def test_nothing_but_reading_is_allowed_and_no_body_is_waited_for(scene: Scene, site: Site) -> None:
    before = scene.state()
    for method in (b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS"):
        huge = b"%b /events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n" % method
        assert site.raw(huge + b"x" * 1000).split()[1] == b"405", method
    assert site.works() and scene.state() == before


def test_a_body_of_a_read_is_not_read(site: Site) -> None:
    begun = HEAD % (b"/page.css", b"Transfer-Encoding: chunked\r\n") + b"5\r\nhello"
    assert site.raw(begun).startswith(b"HTTP/1.1 200")
    assert site.works()


def test_silent_and_slow_connections_are_bounded_and_closed(site: Site) -> None:
    """Those beyond the limit at once, the others when their time is over; a request is answered all the while."""
    with ExitStack() as open_ones:
        idle = [open_ones.enter_context(closing(site.connection())) for _ in range(MOST_CONNECTIONS + 20)]
        until("an answer", lambda: _answers(site))
        for connection in idle[::2]:
            with suppress(ConnectionError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert until("an answer", lambda: _answers(site))
        for connection in idle:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_hostile_connections_keep_nobody_out_and_free_their_descriptors(site: Site) -> None:
    """Silent ones, half requests, garbage, bodies, resets, pages that read nothing: a page that is open goes on, and
    others are answered in between."""
    begun = HEAD % (b"/events", b"")
    said = (b"", begun[:20], b"\0" * 3000, *GARBAGE[:3], b"POST / HTTP/1.1\r\nContent-Length: 99999\r\n\r\n", begun)
    descriptors = Path(f"/proc/{site.child.pid}/fd")
    most, pictures = 0, [0.0]

    def looks() -> None:
        with site.stream() as events:
            pictures.extend(told["time"] for name, told in events if name == "picture")

    page = threading.Thread(target=_until_it_ends, args=(looks,), daemon=True)
    page.start()
    held: deque[socket.socket] = deque()
    for n in range(10_000):
        held.append(site.connection())
        with suppress(ConnectionError):
            held[-1].sendall(said[n % len(said)])
        if n % 7 == 0:
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if len(held) > 300:
            held.popleft().close()
        if n % 500 == 0:
            most, known = max(most, len(list(descriptors.iterdir()))), pictures[-1]
            until("an answer", lambda: _answers(site))
            until("a picture on the open page", lambda known=known: pictures[-1] > known)
    for connection in held:
        connection.close()
    assert page.is_alive() and most < 4 * MOST_CONNECTIONS + 64
    until("all of them gone", lambda: len(list(descriptors.iterdir())) < MOST_CONNECTIONS)
    assert site.works()


def _until_it_ends(looks: Callable[[], None]) -> None:
    with suppress(OSError, http.client.HTTPException):
        looks()


def _answers(site: Site) -> bool:
    """Whether a request that is sent at once is answered; it may have to be sent again in a flood."""
    with suppress(OSError, http.client.HTTPException):
        return site.get("/")[0] == 200
    return False


def test_streams_are_bounded_and_one_that_goes_makes_room(site: Site) -> None:
    with ExitStack() as others:
        for _ in range(MOST_STREAMS - 1):
            assert next(others.enter_context(site.stream()))[0] == "picture"
        with site.stream() as last:
            assert next(last)[0] == "picture" and site.get("/events")[0] == 503 and site.get("/")[0] == 200
        until("room for a stream", lambda: _opens(site))


def _opens(site: Site) -> bool:
    with closing(site.connection()) as asked:
        asked.sendall(HEAD % (b"/events", b""))
        return asked.recv(12) == b"HTTP/1.1 200"


def test_a_page_that_reads_nothing_does_not_stop_the_others(site: Site) -> None:
    with closing(site.connection()) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        stuck.sendall(HEAD % (b"/events", b""))
        with site.stream() as events:
            times = [found(events, "picture")["time"] for _ in range(3)]
    assert times == sorted(set(times))


# -- the data of the page ----------------------------------------------------------------------------------------------

def row(name: str, role: str, **more: Any) -> ProcessRow:
    return ProcessRow(name, role, 1, **{"state": "ready", **more})


def test_only_what_stands_still_is_red() -> None:
    healthy = [row("rollout/0", "rollout"), row("reward/0", "reward"), row("learner", "learner")]
    full = {"queued": 5, "generated": 3, "rewarded": 9, "free": 1}
    assert blocked(healthy, full, ()) == {}
    assert blocked(healthy[1:], full, ()) == {"rollout": "5 slots are queued, and no rollout lives"}
    assert blocked([row("serve/0", "serve"), *healthy[1:]], full, ()) == {}
    late = row("reward/0", "reward", late=True, progress_age_s=41.0)
    assert blocked([healthy[0], late, healthy[2]], full, ()) == {"reward/0": "no progress for 41.0 s"}
    dead = row("learner", "learner", state="dead")
    assert blocked([dead], {}, ()) == {"learner": "dead"}
    assert blocked([*healthy[:2], dead], full, ()) == {"learner": "9 slots are rewarded, and no learner lives"}
    chain = [{"process": "learner", "for": "reward", "since_s": 70.0, "because": "waits for 3 groups"}]
    assert blocked(healthy, full, chain) == {"learner": "waits for reward, 70.0 s: waits for 3 groups"}


DOING = st.lists(st.sampled_from(["", "prefill", "update"]), max_size=4)
LOOKS = st.lists(st.tuples(st.floats(0.1, 20.0), DOING), max_size=60)


@given(LOOKS)
def test_spans_of_a_process_follow_each_other_and_never_overlap(looks: list[tuple[float, list[str]]]) -> None:
    run, history, now = RunState(), History(), 0.0
    for passed, doing in looks:
        now += passed
        processes = tuple(ProcessRecord(f"rollout/{k}", "rollout", 1, "ready", text) for k, text in enumerate(doing))
        run.look(RingRecord(1, {}, {}, 0, 0, -1, -1, processes), now)
        history.add(run, now)
        assert [row.name for row in run.rows(now)] == [f"rollout/{k}" for k in range(len(doing))]
    for line in history.timeline(now):
        ends = [0.0, *(ago for begin, end, *_ in reversed(line["spans"]) for ago in (end, begin))]
        assert ends == sorted(ends)


def test_the_history_is_bounded() -> None:
    run, history = RunState(), History()
    for second in range(1200):
        names = (f"rollout/{(second * 7 + k) % 500}" for k in range(80))
        processes = tuple(ProcessRecord(name, "rollout", 1, "ready", str(second)) for name in names)
        run.look(RingRecord(1, {}, {}, 0, 0, -1, -1, processes), float(second))
        history.add(run, float(second))
    assert len(history.lines) <= MOST_LINES and all(len(spans) <= MOST_SPANS for spans in history.lines.values())
