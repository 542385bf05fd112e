"""The studio's server: the page, and what it asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from penstock.errors import BusyError, MissingExtraError, PenstockError, TooLongError, UnknownNameError, UsageError
from penstock.studio.answers import read_json, schedules
from penstock.studio.guard import Guard, Hosts
from penstock.studio.jobs import Job, Jobs
from penstock.studio.limits import MOST_BYTES
from penstock.studio.page import page
from penstock.studio.planning import unpacked
from penstock.studio.worker import Question, Worker

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MOST_FOLLOWERS = 8
"""Pages that follow a plan at the same time: each keeps a thread waiting."""
ALIVE = 5.0
"""Seconds between two signs of life to a page that follows a plan."""

PATIENCE = 0.5
"""Seconds that the worker may go on with a question that nobody waits for: starting it again takes about as long."""

Endpoint = Callable[["Request"], Awaitable["Response"]]


_STATUS: dict[type[Exception], int] = {TooLongError: 422, BusyError: 409, UnknownNameError: 404}


class Studio:
    """What the server answers with."""

    def __init__(self, documents: Sequence[Any] = (), worker: Worker | None = None) -> None:
        self.documents = documents
        self.worker = Worker() if worker is None else worker
        self.jobs = Jobs()

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
        return await self._asked(request, "view", await body_of(request))

    async def open(self, request: Request) -> Response:
        return await self._asked(request, "open", await body_of(request))

    async def start_plan(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = await body_of(request)
        checked = json.loads(await self._answer(request, "check-plan", body))
        return JSONResponse({"job": await _in_thread(self.jobs.start, body, checked["seconds"])})

    async def plan(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["job"])
        if job.plan is None:
            raise UnknownNameError("there is no plan yet: it is still being made, or nothing was found")
        return _json(job.plan)

    async def cancel_plan(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse({"cancelled": self.jobs.cancel(request.path_params["job"])})

    async def candidate(self, request: Request) -> Response:
        job, index = self.jobs.get(request.path_params["job"]), request.path_params["index"]
        kept = job.candidates[index] if index < len(job.candidates) else None
        if kept is None:
            raise UnknownNameError(f"there is no candidate {index} to open: it was not timed, or does not exist")
        return await self._asked(request, "candidate", unpacked(kept))

    async def events(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        job = self.jobs.get(request.path_params["job"])
        if job.followers >= MOST_FOLLOWERS:
            raise BusyError(f"{job.followers} pages follow the plan already: close one")
        return StreamingResponse(self._told(job), media_type="text/event-stream")

    async def _told(self, job: Job) -> AsyncIterator[str]:
        """Every event from the first on, and a sign of life where there is none. A page that leaves is not waited for."""
        from anyio.to_thread import run_sync

        with job.followed():
            place, ended = 0, False
            while not ended:
                events, ended = await run_sync(job.after, place, ALIVE, abandon_on_cancel=True)
                place += len(events)
                yield "".join(f"event: {each.name}\ndata: {json.dumps(each.data)}\n\n" for each in events) or ": alive\n\n"

    async def _asked(self, request: Request, name: str, body: Any) -> Response:
        return _json(await self._answer(request, name, body))

    async def _answer(self, request: Request, name: str, body: Any) -> bytes:
        """The worker's answer, for as long as whoever asks is there."""
        question = Question(name, body)
        watching = asyncio.create_task(self._watch(request, question))
        try:
            found: bytes = await _in_thread(self.worker.answer, question)
        finally:
            watching.cancel()
        return found

    async def _watch(self, request: Request, question: Question) -> None:
        """Give up a question that nobody waits for. What takes no longer than a new process would is finished."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.worker.leave(question)
        await asyncio.sleep(PATIENCE)
        self.worker.drop(question)


async def _in_thread(function: Callable[..., Any], *args: Any) -> Any:
    from starlette.concurrency import run_in_threadpool

    return await run_in_threadpool(partial(function, *args))


def _json(data: bytes) -> Response:
    from starlette.responses import Response

    return Response(data, media_type="application/json")


async def body_of(request: Request) -> Any:
    """The JSON body of a request, read no further than it may be long."""
    from starlette.exceptions import HTTPException

    # Pages of other origins can send anything else unasked.
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
    return await _in_thread(read_json, text, "the request")


def application(documents: Sequence[Any] = (), *, host: str = "127.0.0.1", worker: Worker | None = None) -> Starlette:
    """The server as an ASGI application; `host` is where it listens."""
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
        await _in_thread(studio.worker.start)
        yield
        await _in_thread(studio.close)

    routes = [
        Route("/", studio.page),
        Route("/api/schedules", studio.schedules),
        Route("/api/view", studio.view, methods=["POST"]),
        Route("/api/open", studio.open, methods=["POST"]),
        Route("/api/plan", studio.start_plan, methods=["POST"]),
        Route("/api/plan/{job}", studio.plan),
        Route("/api/plan/{job}", studio.cancel_plan, methods=["DELETE"]),
        Route("/api/plan/{job}/events", studio.events),
        Route("/api/plan/{job}/candidates/{index:int}", studio.candidate),
    ]
    handlers: Any = {PenstockError: _refused, HTTPException: _not_there}
    guard = Middleware(Guard, hosts=Hosts(host))
    app = Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan)
    app.state.studio = studio
    return app


async def _refused(request: Request, error: Exception) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": str(error)}, status_code=_STATUS.get(type(error), 400))


async def _not_there(request: Request, error: Exception) -> Response:
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse

    assert isinstance(error, HTTPException)
    what = {404: "there is nothing at this address", 405: "this address does not take such a request"}
    said = what.get(error.status_code, error.detail)
    return JSONResponse({"error": said}, status_code=error.status_code, headers=error.headers)
