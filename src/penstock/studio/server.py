"""The studio's server: the page and the requests it sends, from the socket to the response."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.errors import BusyError, MissingExtraError, PenstockError, TooLongError, UnknownNameError, UsageError
from penstock.ir.formats.reading import parse_json
from penstock.studio.handlers import schedules
from penstock.studio.limits import MOST_BYTES
from penstock.studio.page import page
from penstock.studio.plan_jobs import PlanJob, PlanJobs, unpack_candidate
from penstock.studio.security import Hosts, OriginGuard
from penstock.studio.worker import Question, Worker

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_FOLLOWERS = 8
"""Pages that may follow a plan at the same time: each keeps a thread waiting."""
ALIVE = 5.0
"""Seconds between two signs of life to a page that follows a plan."""
PATIENCE = 0.5
"""Seconds that the worker may go on with an abandoned question: starting it again takes about as long."""
LARGEST_PORT = (1 << 16) - 1

_STATUS: dict[type[Exception], int] = {TooLongError: 422, BusyError: 409, UnknownNameError: 404}


class Studio:
    """The endpoints, and the processes that work for them."""

    def __init__(self, documents: Sequence[Any] = (), worker: Worker | None = None) -> None:
        self.documents = documents
        self.worker = Worker() if worker is None else worker
        self.jobs = PlanJobs()

    def close(self) -> None:
        self.jobs.close()
        self.worker.close()

    async def page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        return HTMLResponse(self._page)

    @cached_property
    def _page(self) -> str:
        return page(self.documents, server=True)

    async def schedules(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(schedules())

    async def view(self, request: Request) -> Response:
        return await self._respond(request, "view", await body_of(request))

    async def open(self, request: Request) -> Response:
        return await self._respond(request, "open", await body_of(request))

    async def verify(self, request: Request) -> Response:
        return await self._respond(request, "verify", await body_of(request))

    async def cluster(self, request: Request) -> Response:
        return await self._respond(request, "cluster", await body_of(request))

    async def start_plan(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = await body_of(request)
        checked = json.loads(await self._answer(request, "check-plan", body))
        return JSONResponse({"job": await _run_in_thread(self.jobs.start, body, checked["seconds"]), "limits": checked["limits"]})

    async def plan(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["job"])
        if job.plan is None:
            raise UnknownNameError("there is no plan yet: it is still being made, or none was found")
        return _respond_json(job.plan)

    async def cancel_plan(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"cancelled": self.jobs.cancel(request.path_params["job"])})

    async def candidate(self, request: Request) -> Response:
        job, index = self.jobs.get(request.path_params["job"]), request.path_params["index"]
        candidate = job.candidates[index] if index < len(job.candidates) else None
        if candidate is None:
            raise UnknownNameError(f"there is no candidate {index} to open: it was not timed, or does not exist")
        return await self._respond(request, "candidate", unpack_candidate(candidate))

    async def events(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        job = self.jobs.get(request.path_params["job"])
        if job.followers >= MOST_FOLLOWERS:
            raise BusyError(f"{job.followers} pages already follow the plan: close one")
        return StreamingResponse(self._stream_events(job), media_type="text/event-stream")

    async def _stream_events(self, job: PlanJob) -> AsyncIterator[str]:
        """Send every event from the first on, and a sign of life if there is none for a while. A page that leaves is not waited for."""
        from anyio.to_thread import run_sync

        with job.follow():
            place, ended = 0, False
            while not ended:
                events, ended = await run_sync(job.wait_for_events, place, ALIVE, abandon_on_cancel=True)
                place += len(events)
                yield "".join(f"event: {event.name}\ndata: {json.dumps(event.data)}\n\n" for event in events) or ": alive\n\n"

    async def _respond(self, request: Request, name: str, body: Any) -> Response:
        return _respond_json(await self._answer(request, name, body))

    async def _answer(self, request: Request, name: str, body: Any) -> bytes:
        """Ask the worker, for as long as the client waits."""
        question = Question(name, body)
        watching = asyncio.create_task(self._watch(request, question))
        try:
            answer: bytes = await _run_in_thread(self.worker.answer, question)
        finally:
            watching.cancel()
        return answer

    async def _watch(self, request: Request, question: Question) -> None:
        """Drop a question that the browser has abandoned, unless it ends sooner than a new process would start."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.leave(question)
        await asyncio.sleep(PATIENCE)
        self.worker.drop(question)


async def _run_in_thread(function: Callable[..., Any], *args: Any) -> Any:
    from starlette.concurrency import run_in_threadpool

    return await run_in_threadpool(partial(function, *args))


def _respond_json(data: bytes) -> Response:
    from starlette.responses import Response

    return Response(data, media_type="application/json")


async def body_of(request: Request) -> Any:
    """Read the JSON body of a request, and no more bytes than it may have."""
    from starlette.exceptions import HTTPException

    # Browsers let pages of other origins send any other content type without a preflight.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "the body must be JSON, with content-type application/json")
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BYTES:
            raise HTTPException(413, f"the request is larger than {MOST_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"the request is not UTF-8: {error}") from None
    return await _run_in_thread(lambda: parse_json(text, "the request", strict=True))


def application(documents: Sequence[Any] = (), *, host: str = "127.0.0.1", worker: Worker | None = None) -> Starlette:
    """Build the server as an ASGI application; `host` is the address it listens on."""
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.routing import Route
    except ImportError:
        raise MissingExtraError("the studio", "starlette", "studio") from None
    studio = Studio(documents, worker)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await _run_in_thread(studio.worker.start)
        yield
        await _run_in_thread(studio.close)

    routes = [
        Route("/", studio.page),
        Route("/api/schedules", studio.schedules),
        Route("/api/view", studio.view, methods=["POST"]),
        Route("/api/open", studio.open, methods=["POST"]),
        Route("/api/verify", studio.verify, methods=["POST"]),
        Route("/api/cluster", studio.cluster, methods=["POST"]),
        Route("/api/plan", studio.start_plan, methods=["POST"]),
        Route("/api/plan/{job}", studio.plan),
        Route("/api/plan/{job}", studio.cancel_plan, methods=["DELETE"]),
        Route("/api/plan/{job}/events", studio.events),
        Route("/api/plan/{job}/candidates/{index:int}", studio.candidate),
    ]
    handlers: Any = {PenstockError: _respond_penstock_error, HTTPException: _respond_http_error}
    guard = Middleware(OriginGuard, hosts=Hosts(host))
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan)
    app.state.studio = studio
    return app


async def _respond_penstock_error(request: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": str(error)}, status_code=_STATUS.get(type(error), 400))


async def _respond_http_error(request: Request, error: Exception) -> Response:
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    assert isinstance(error, HTTPException)
    messages = {404: "there is nothing at this address", 405: "this address does not take such a request"}
    message = messages.get(error.status_code, error.detail)
    return JSONResponse({"error": message}, status_code=error.status_code, headers=error.headers)


@dataclass(frozen=True)
class Address:
    """The host and port that the server listens on."""

    host: str
    port: int

    def check(self) -> None:
        """Refuse a missing package or an invalid port before any work is done."""
        for package in ("starlette", "uvicorn"):
            if find_spec(package) is None:
                raise MissingExtraError("the studio", package, "studio")
        if not 0 <= self.port <= LARGEST_PORT:
            raise UsageError(f"--port {self.port}: a port is from 0 (any free port) to {LARGEST_PORT}")

    def listen(self) -> socket.socket:
        """Open a socket that listens there."""
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise UsageError(f"--host {self.host}: {error.strerror or error}") from None
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen()
        except OSError as error:
            listening.close()
            raise UsageError(self._explain(error)) from None
        return listening

    def _explain(self, error: OSError) -> str:
        if error.errno == errno.EADDRINUSE:
            return f"port {self.port} is in use, maybe by another studio: choose another with --port, or --port 0 for any free one"
        if error.errno == errno.EACCES:
            return f"port {self.port} is not allowed: choose one of at least 1024 with --port"
        return f"cannot listen on {self.host} port {self.port}: {error.strerror or error}"


def serve(documents: Sequence[Any], address: Address, *, open_browser: bool, tell: Callable[[str], None]) -> None:
    """Serve the page with these documents until Ctrl-C; `tell` gets the address of the page."""
    app = application(documents, host=address.host)
    with address.listen() as listening:
        port = listening.getsockname()[1]
        hosts = Hosts(address.host)
        url = f"http://{'localhost' if hosts.is_local else socket.gethostname()}:{port}/"
        tell(f"the studio is at {url} (Ctrl-C ends it)")
        if not hosts.is_local:
            tell(f"it listens on {address.host}: anyone who can reach this machine can use it")
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        _build_server(app).run(sockets=[listening])


def _build_server(app: Starlette) -> uvicorn.Server:
    """A server that ends plans and requests before it waits for the pages that follow them."""
    import uvicorn

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            await asyncio.to_thread(app.state.studio.close)
            await super().shutdown(sockets)

    return Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=30))
