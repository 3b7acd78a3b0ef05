"""The web server of `busrl monitor --web`: a page, its files, and a stream of server-sent events with the picture.

Talks to browsers (aiohttp) and keeps a `Watcher` up to date, and in a run of several models one for each that a page
looks at, in one thread. Knows nothing of what a picture holds.

- No request changes anything: there is only GET, the files are named here, and no body is read.
- On loopback the user of the monitor, and root, may look; elsewhere whoever has the token that is printed.
- A request with another name in `Host` is refused, so that no page of another site can read this one by its own name.
- A client's share is bounded: connections, streams, the time for a request and for reading an answer. A slow stream
  misses pictures, and delays no other.
- A model beside the first is watched from its first page to its last, so there are never more views than models.
- One that cannot be read ends its own pages, and no other's.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import secrets
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from os import getuid
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from busrl.bus.addresses import tcp_table
from busrl.errors import NoSuchRun, UserError
from busrl.observe.monitor.sources import (
    NICE,
    RENDER_S,
    RENDER_SHARE,
    WAKE_S,
    Watcher,
    catch_up,
    give_way,
    models_of,
    tag_of,
)
from busrl.observe.monitor.web.picture import History, picture, steps_after
from busrl.paths import RunPaths
from busrl.status.view import to_json
from busrl.system.listener import Listener, room

try:
    from aiohttp import web
except ImportError as missing:
    raise UserError("the monitor's page needs aiohttp, not installed: pip install 'busrl[agents]'") from missing

log = logging.getLogger("busrl")
MOST_CONNECTIONS, MOST_STREAMS = 64, 16
WRITE_S = 10.0
TOLD_LETTERS = 32  # of a name in a request that is no model's
SCRIPT, STYLE = "text/javascript", "text/css"
FILES: Final = {
    "/": ("page.html", "text/html"), "/page.js": ("page.js", SCRIPT), "/draw.js": ("draw.js", SCRIPT),
    "/page.css": ("page.css", STYLE), "/uplot.js": ("uplot.js", SCRIPT), "/uplot.css": ("uplot.css", STYLE),
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOT_YOURS: Final = "open the address that `busrl monitor --web` printed: it holds the token"
QUIET: Final = logging.Logger("busrl.web", logging.CRITICAL)  # mistakes of clients are not logged
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Address(NamedTuple):
    """An address to listen at; port 0 is a free one."""

    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of(cls, text: str) -> Address:
        """`""`, `PORT` or `HOST:PORT`; an IPv6 address in brackets."""
        host, _, port = text.rpartition(":")
        if not text:
            return cls()
        if not (port.isascii() and port.isdigit() and int(port) < 1 << 16) or (":" in host and host[:1] != "["):
            raise UserError(
                f"--web {text}: expected PORT, HOST:PORT or nothing (a free port of 127.0.0.1); a run is named before "
                "it: `busrl monitor RUN_DIR --web`"
            )
        return cls(host.strip("[]") or "127.0.0.1", int(port))


@dataclass
class Seen:
    """The place of a stream: the newest step, the number of rounds, the last sample and picture that it has."""

    step: int = 0
    rounds: int = 0
    sample: Any = None
    picture: bytes = b""


class View:
    """A model as pages see it: what is watched of it, its last minutes, and the newest picture. `pages`: how many look.
    """

    def __init__(self, watcher: Watcher, target: RunPaths | str) -> None:
        self.watcher, self.target, self.history = watcher, target, History()
        self.picture, self.rendered_at, self.pages = b"", 0.0, 0
        self.news, self.over = asyncio.Event(), False  # set by the next picture, and by the end

    def end(self) -> None:
        """End its pages."""
        self.over = True
        self.news.set()

    def look(self, now: float) -> None:
        self.watcher.refresh(now)
        self.history.add(self.watcher.run, now)

    def render(self, now: float) -> None:
        data = picture(self.watcher, self.target, self.history, now, time.time())
        self.picture, self.rendered_at = to_json(data).encode(), now
        self.news.set()
        self.news = asyncio.Event()

    def events_after(self, seen: Seen) -> Iterator[bytes]:
        """Events that a stream does not have yet: the picture first, then new steps and samples."""
        if seen.picture is not self.picture:
            seen.picture = self.picture
            yield b"event: picture\ndata: " + self.picture + b"\n\n"
        run, samples = self.watcher.run, list(self.watcher.samples)
        newest = run.steps.newest.step if run.steps.newest is not None else 0
        if (newest, len(run.validations)) != (seen.step, seen.rounds):
            yield _event("steps", steps_after(run, seen.step))
            seen.step, seen.rounds = newest, len(run.validations)
        at = next((at + 1 for at, sample in enumerate(samples) if sample is seen.sample), 0)
        if samples[at:]:
            seen.sample = samples[-1]
            yield _event("samples", samples[at:])


class Views:
    """The views of a run by what they show: the first, and one of each other model while a page looks at it."""

    def __init__(self, first: View) -> None:
        self._first, self._open = first, {first.target: first}

    @property
    def every(self) -> list[View]:
        return list(self._open.values())

    @property
    def pages(self) -> int:
        return sum(view.pages for view in self.every)

    def find(self, model: str) -> RunPaths | str:
        """The directory of the model with this tag; of "" what the first view shows. HTTPNotFound if there is none."""
        first = self._first.target
        if not model:
            return first
        places = {tag_of(paths): paths for paths in (models_of(first) if isinstance(first, RunPaths) else ())}
        if model not in places:
            there = f"its models are {', '.join(places)}" if len(places) > 1 else "it has one, at /"
            raise web.HTTPNotFound(text=f"no model {model[:TOLD_LETTERS]!r} in this run; {there}")
        return places[model]

    @contextmanager
    def page(self, model: str) -> Iterator[View]:
        """The view of a model, while a page looks at it."""
        target = self.find(model)
        view = self._open.get(target) or self._opened(target)
        view.pages += 1
        try:
            yield view
        finally:
            view.pages -= 1
            if not view.pages:
                self._close(view)

    def each(self, do: Callable[[View], object]) -> None:
        """Do something to each view. One that fails is ended and closed; the first is what the server is for, so its
        failure is the server's."""
        for view in self.every:
            try:
                do(view)
            except Exception as problem:
                if view is self._first:
                    raise
                log.warning("%s cannot be shown: %s", view.target, problem)
                view.end()
                self._close(view)

    def close(self) -> None:
        for view in self.every:
            self._close(view)

    def _opened(self, target: RunPaths | str) -> View:
        """A view of another model; HTTPNotFound if it was removed just now, HTTPServiceUnavailable if it cannot be
        read."""
        with ExitStack() as opened:
            try:
                watcher = Watcher(target)
                opened.callback(watcher.close)
                view = View(watcher, target)
                view.look(time.monotonic())
            except NoSuchRun as gone:
                raise web.HTTPNotFound(text=str(gone)) from None
            except Exception as problem:
                raise web.HTTPServiceUnavailable(text=f"it cannot be read now: {problem}") from problem
            opened.pop_all()
        self._open[target] = view
        return view

    def _close(self, view: View) -> None:
        """Close a view, unless it is closed; never the first, whose watcher is the caller's."""
        if view is not self._first and self._open.get(view.target) is view:
            del self._open[view.target]
            view.watcher.close()


class Server:
    """A server of one run, at `url`; `run` serves. `token` is "" on loopback."""

    def __init__(self, watcher: Watcher, target: RunPaths | str, address: Address) -> None:
        self._views = Views(View(watcher, target))
        here = Path(__file__).parent
        self._files = {path: ((here / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._socket = _listening(address)
        host, self._port = self._socket.getsockname()[:2]
        self._loopback = ipaddress.ip_address(host).is_loopback
        self.token = "" if self._loopback else secrets.token_urlsafe(32)
        shown = socket.gethostname() if ipaddress.ip_address(host).is_unspecified else address.host
        self._names = {"localhost", address.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        host_in_url = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{host_in_url}:{self._port}/" + (f"?token={self.token}" if self.token else "")
        self._cookie = f"busrl_{self._port}"
        self._gave_way = False
        self._listener = Listener(self._socket, min(MOST_CONNECTIONS, room()), lambda line: None)

    async def run(self, ready: Callable[[str], object] = print) -> None:
        """Serve until SIGINT, SIGTERM or SIGHUP."""
        self._stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        app = web.Application(middlewares=[self._guard])
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, lingering_time=0.0, logger=QUIET,
        )
        await runner.setup()
        await self._listener.open(runner.server)
        try:
            self._views.each(partial(View.look, now=time.monotonic()))
            ready(self.url)
            await self._follow()
        finally:
            self._listener.close()
            await runner.cleanup()
            self._views.close()

    # -- the run -----

    async def _follow(self) -> None:
        """Keep the state of each view up to date, and render those that pages look at."""
        looked = due = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            self._views.each(lambda view: catch_up(view.watcher))
            if now >= looked + RENDER_S:
                looked = now
                self._views.each(partial(View.look, now=now))
            if now >= due and self._views.pages:
                begun = time.process_time()
                self._views.each(partial(_render, now=now))
                due = now + max(RENDER_S, (time.process_time() - begun) / RENDER_SHARE)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), WAKE_S)
        self._views.each(View.end)

    # -- requests that are refused -----

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse a request, or answer it. A connection serves one request, so that none waits for a second one's head.
        """
        self._listener.heard(request.protocol)
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as refused:
            response = web.Response(status=refused.status, text=refused.text)
        response.force_close()
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.method != "GET":
            return web.Response(status=405, text="there is nothing to change here", headers={"Allow": "GET"})
        if not self._is_ours(request.headers.get("Host", "")):
            return web.Response(status=421, text="this is not the host that you asked for")
        fetch = request.headers.get
        if fetch("Sec-Fetch-Site") == "cross-site" and fetch("Sec-Fetch-Mode") != "navigate":
            return web.Response(status=403, text="not for pages of other sites")
        if not self.token:
            if _is_foreign(request.transport, self._port):
                return web.Response(status=403, text="not for other users of this host")
            return None
        if self._is_token(request.query.get("token", "")):
            # Redirected, so that no history or screen has the token.
            model = {"model": request.query["model"]} if "model" in request.query else {}
            redirect = web.Response(status=303, headers={"Location": "/" + ("?" + urlencode(model) if model else "")})
            redirect.set_cookie(self._cookie, self.token, httponly=True, samesite="Lax", path="/")
            return redirect
        allowed = self._is_token(request.cookies.get(self._cookie, ""))
        return None if allowed else web.Response(status=401, text=NOT_YOURS)

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(errors="replace"), self.token.encode())

    def _is_ours(self, host: str) -> bool:
        """Check whether a `Host` is this server's: one of its names, or any address, as no name service changes that.
        """
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        with suppress(ValueError):
            return bool(ipaddress.ip_address(name.strip("[]")))
        return name.lower().rstrip(".") in self._names

    # -- answers -----

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        model = request.query.get("model", "")
        if request.path == "/events":
            return await self._events(request, model)
        if request.path not in self._files:
            raise web.HTTPNotFound(text="no such page")
        if request.path == "/":
            self._views.find(model)
        body, kind = self._files[request.path]
        return web.Response(body=body, content_type=kind, charset="utf-8")

    async def _events(self, request: web.Request, model: str) -> web.StreamResponse:
        if self._views.pages >= MOST_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_STREAMS} pages look at this run already: close one")
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        response.force_close()
        with self._views.page(model) as view:
            try:
                await response.prepare(request)
                await self._stream(response, view)
            except (asyncio.TimeoutError, ConnectionError):
                if request.transport is not None:
                    request.transport.abort()
        return response

    async def _stream(self, response: web.StreamResponse, view: View) -> None:
        """Write what is new in a view, up to its end or the server's."""
        if time.monotonic() > view.rendered_at + RENDER_S:
            view.render(time.monotonic())
        seen = Seen()
        while not view.over:
            news = view.news
            for event in view.events_after(seen):
                await asyncio.wait_for(response.write(event), WRITE_S)
            if not self._gave_way:  # after the first picture: the run goes first
                self._gave_way = True
                give_way(NICE)
            await news.wait()


def _render(view: View, now: float) -> None:
    if view.pages:
        view.render(now)


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {to_json(data)}\n\n".encode()


def _listening(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(address, family=family, backlog=MOST_CONNECTIONS)
    except OSError as problem:
        raise UserError(f"--web {address.host}:{address.port}: cannot listen there: {problem.strerror or problem}; "
                        "take another, or port 0 for a free one") from None


def _is_foreign(transport: asyncio.BaseTransport | None, port: int) -> bool:
    """Check whether another user of this host, but root, is at the other end of a connection over loopback.

    If the kernel shows no table of connections, every connection passes.
    """
    peer = transport.get_extra_info("peername") if transport is not None else None
    if peer is None:
        return True
    rows = tcp_table()
    host = "01000000" if ":" in peer[0] else socket.inet_aton(peer[0])[::-1].hex().upper()
    here, there = f"{host}:{peer[1]:04X}", f":{port:04X}"
    users = {int(row[7]) for row in rows if row[1].endswith(here) and row[2].endswith(there)}
    return bool(rows) and not users & {0, getuid()}
