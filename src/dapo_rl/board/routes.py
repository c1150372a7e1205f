"""The routes of the board: the API over run directories, and the page."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
from fastapi import Depends, FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from dapo_rl.base.quote import printable
from dapo_rl.board.ablation import BoardAblation
from dapo_rl.board.access import Guard, is_loopback, token_matches
from dapo_rl.board.catalogue import Catalogue, NoSuchRunError
from dapo_rl.board.curves import curve, with_start
from dapo_rl.board.downloads import COLUMNS, attached, csv_text, curve_points, file_name, rows_csv, rows_jsonl
from dapo_rl.board.files import UnreadableError, read_notes
from dapo_rl.board.groups import group_of, groups_of, search
from dapo_rl.board.launcher import DEMO, Launcher, Start
from dapo_rl.board.ledger import ledger
from dapo_rl.board.run import PROCESSES, BoardRun
from dapo_rl.board.samples import SampleFilter, rows_of, samples_of
from dapo_rl.board.watcher import Watcher, dumps
from dapo_rl.errors import UserError
from dapo_rl.outcomes import OUTCOMES

STATIC = Path(__file__).parent / "static"
LIVE_SECONDS = 0.2
HEARTBEAT_SECONDS = 15.0

Name = Annotated[str, Query(alias="run", max_length=1000)]
Names = Annotated[list[str], Query(alias="run", max_length=64)]
ReportName = Annotated[str, Query(alias="name", max_length=1000)]
Step = Annotated[int, Query(ge=0, le=10**12)]
Share = Annotated[float, Query(ge=0, le=1)]
Wanted = Annotated[SampleFilter, Depends()]


class Plain(Response):
    """JSON in ASCII, with null for numbers that are not finite."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()


class RefusedError(Exception):
    """An action was requested without the token, or from a board that has no Lab."""


def create_app(catalogue: Catalogue, lab: Launcher | None, token: str, bound: str = "127.0.0.1") -> FastAPI:
    """The board of a catalogue; without a Lab it is read-only. Beyond this machine, reading needs the token too."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, default_response_class=Plain)
    app.add_middleware(Guard, bound=bound, token=None if is_loopback(bound) else token)
    app.state.watcher = watcher = Watcher(catalogue, lab.queue.listed if lab else lambda: None)
    _answer_errors(app)
    _serve_page(app)
    _serve_live(app, watcher)
    _serve_runs(app, catalogue)
    _serve_reports(app, catalogue)
    _serve_groups(app, catalogue)
    _serve_downloads(app, catalogue)
    _serve_lab(app, lab, token)
    return app


def _answer_errors(app: FastAPI) -> None:
    def answer(status: int, say: str = "{}") -> Any:
        return lambda _request, error: Plain({"error": say.format(printable(str(error)))}, status)

    app.add_exception_handler(NoSuchRunError, answer(404, "there is no run {} here"))
    app.add_exception_handler(UnreadableError, answer(422))
    app.add_exception_handler(UserError, answer(409))
    app.add_exception_handler(RefusedError, answer(403))
    app.add_exception_handler(RequestValidationError, _explain)


def _explain(_request: Request, error: Any) -> Plain:
    """Explains an invalid request without repeating its values, which are untrusted."""
    first = error.errors()[0]
    return Plain({"error": f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"}, 422)


def _serve_page(app: FastAPI) -> None:
    app.mount("/static", StaticFiles(directory=STATIC), name="static")

    @app.get("/api/vocabulary")
    def vocabulary() -> Plain:
        """The labels and colours that the page shares with Python."""
        outcomes = [
            {"key": key, "label": each.label_of_tokens, "tint": each.tint, "role": each.role, "why": each.why}
            for key, each in OUTCOMES.items()
        ]
        return Plain({"outcomes": outcomes})

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")


def _serve_live(app: FastAPI, watcher: Watcher) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        return Response(watcher.rows(), media_type="application/json")

    @app.get("/api/live")
    async def live() -> StreamingResponse:
        return StreamingResponse(events(watcher), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})


async def events(watcher: Watcher) -> AsyncIterator[bytes]:
    """Sends everything first, then changes. When a page closes, this is cancelled during a sleep."""
    version, quiet = 0, 0.0
    while not watcher.is_closed:
        version, messages = watcher.since(version)
        for message in messages:
            yield message
        quiet = 0.0 if messages else quiet + LIVE_SECONDS
        if quiet >= HEARTBEAT_SECONDS:
            yield b": still here\n\n"
            quiet = 0.0
        await anyio.sleep(LIVE_SECONDS)


def _serve_runs(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/settings")
    def settings(names: Names) -> Plain:
        found = {name: catalogue.find(name).settings() for name in names}
        return Plain({"keys": list(dict.fromkeys(key for each in found.values() for key in each)), "runs": found})

    @app.get("/api/metrics")
    def metrics(names: Names) -> Plain:
        return Plain({"names": sorted({name for run in catalogue.with_logs(names) for name in run.log.names})})

    @app.get("/api/curves")
    def curves(
        names: Names,
        metric: Annotated[list[str], Query(max_length=64)],
        points: Annotated[int, Query(ge=10, le=5000)] = 600,
        share: Share = 0.1,
        first: float = -math.inf,
        last: float = math.inf,
    ) -> Plain:
        def one(run: BoardRun, name: str) -> dict[str, Any]:
            drawn = curve(run.log, name, points=points, share=share, first=first, last=last)
            return with_start(drawn, run.evaluations()) if name == "eval/accuracy" and first <= 0 else drawn

        return Plain({run.name: {name: one(run, name) for name in metric} for run in catalogue.with_logs(names)})

    @app.get("/api/evaluations")
    def evaluations(names: Names) -> Plain:
        result = {}
        for run in catalogue.with_logs(names):
            measures = [name for name in run.log.names if name.startswith("eval/")]
            columns = {name: dict(zip(*run.log.column(name), strict=True)) for name in measures}
            columns["eval/accuracy"] = dict(run.evaluations())
            steps = sorted({int(step) for column in columns.values() for step in column})
            rows = [{"step": step, **{n: column.get(step) for n, column in columns.items()}} for step in steps]
            result[run.name] = rows[-200:]
        return Plain(result)

    @app.get("/api/engines")
    def engines(names: Names) -> Plain:
        return Plain(
            {run.name: {kind: run.processes(kind) for kind in PROCESSES} for run in catalogue.with_logs(names)}
        )

    @app.get("/api/record")
    def record(names: Names) -> Plain:
        runs = [catalogue.find(name) for name in names]
        return Plain({r.name: {"error": r.error(), "notes": read_notes(r.file("notes.jsonl"))} for r in runs})

    @app.get("/api/ledger")
    def tokens(name: Name) -> Plain:
        return Plain(ledger(catalogue.with_logs([name])[0]))


def _serve_reports(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/report")
    def report(name: ReportName) -> Plain:
        return Plain(catalogue.report(name).page(catalogue.by_path()))

    @app.get("/api/arms")
    def arms(
        name: ReportName,
        points: Annotated[int, Query(ge=10, le=2000)] = 300,
        share: Share = 0.1,
    ) -> Plain:
        found = catalogue.report(name)
        if not isinstance(found, BoardAblation):
            raise NoSuchRunError(name)
        return Plain(found.curves(catalogue.by_path(), share, points))

    @app.get("/api/picture")
    def picture(name: ReportName) -> Response:
        content = catalogue.report(name).picture()
        if content is None:
            return _not_found("there is no picture yet")
        return Response(content, media_type="image/png")


def _serve_groups(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/steps")
    def steps(name: Name, step: Annotated[int | None, Query(ge=0, le=10**12)] = None) -> Plain:
        """The steps with groups, and whether those of one step have been written again."""
        run = catalogue.find(name)
        written = {} if step is None else {"written": run.written(step)}
        return Plain({"ranges": ranges(run.rollout_steps()), **written})

    @app.get("/api/groups")
    def groups(name: Name, step: Step) -> Plain:
        run = catalogue.find(name)
        path = run.rollout(step)
        if path is None:
            return Plain({"groups": [], "why": run.why_no_rollout(step)})
        return Plain({"written": run.written(step), "groups": groups_of(path)})

    @app.get("/api/group")
    def group(name: Name, step: Step, draw: Annotated[int, Query(ge=-(10**15), le=10**15)]) -> Plain:
        run = catalogue.find(name)
        path, written = run.rollout(step), run.written(step)
        if path is None:
            return _not_found(run.why_no_rollout(step))
        found = group_of(run, path, draw)
        return Plain({"written": written, **found}) if found else _not_found("there is no such group at this step")

    @app.get("/api/search")
    def find(
        name: Name,
        q: Annotated[str, Query(min_length=1, max_length=200)],
        step: Annotated[int | None, Query(ge=0, le=10**12)] = None,
        until: Annotated[int, Query(ge=0, le=10**12)] = 10**12,
    ) -> Plain:
        """Searches one step, or all steps up to `until`, where the previous search stopped."""
        run = catalogue.find(name)
        wanted = [step] if step is not None else [s for s in run.rollout_steps() if s <= until]
        return Plain(search(run, q, wanted))


def ranges(steps: Sequence[int]) -> list[list[int]]:
    """Ranges of consecutive steps: [1, 2, 3, 7] becomes [[1, 3], [7, 7]]."""
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(steps)) if b != a + 1]
    bounds = [0, *breaks, len(steps)] if steps else [0]
    return [[steps[start], steps[end - 1]] for start, end in pairwise(bounds)]


def _serve_downloads(app: FastAPI, catalogue: Catalogue) -> None:
    @app.get("/api/samples")
    def samples(
        name: Name,
        step: Step,
        wanted: Wanted,
        first: Annotated[int, Query(ge=0, le=10**9)] = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Response:
        run = catalogue.find(name)
        path = run.rollout(step)
        if path is None:
            return Plain({"rows": [], "why": run.why_no_rollout(step)})
        return Plain({"written": run.written(step), **samples_of(path, wanted, first, limit)})

    @app.get("/api/rows.{kind}")
    def rows(kind: str, name: Name, step: Step, wanted: Wanted) -> Response:
        run = catalogue.find(name)
        path = run.rollout(step)
        if path is None or kind not in ("csv", "jsonl"):
            return _not_found(run.why_no_rollout(step) if path is None else "rows are csv or jsonl")
        # Read before the response begins, so that an error has its own status.
        table = rows_of(path, wanted, tuple(name for name in COLUMNS if name != "length"))
        content = rows_csv(table) if kind == "csv" else rows_jsonl(table)
        return attached(content, f"{run.name}-step-{step}-samples.{kind}")

    @app.get("/api/curves.csv")
    def curves(
        names: Names,
        metric: Annotated[str, Query(max_length=1000)],
        share: Share = 0.1,
        first: float = -math.inf,
        last: float = math.inf,
    ) -> Response:
        runs = catalogue.with_logs(names)
        lines = (line for run in runs for line in curve_points(run, metric, share, first, last))
        content = csv_text(("run", "metric", "step", "value", "smoothed"), lines)
        return attached(content, f"{metric}.csv")

    @app.get("/api/reports")
    def reports(names: Names) -> Response:
        found = [name for name in names if catalogue.find(name).file("report.png")]
        return Plain({"runs": found})

    @app.get("/api/report.png")
    def report(name: Name) -> Response:
        path = catalogue.find(name).file("report.png")
        if path is None:
            return _not_found("this run has no report.png yet; it is drawn when the run ends")
        return FileResponse(path, media_type="image/png", filename=file_name(f"{name}-report.png"))


def _not_found(why: str) -> Plain:
    return Plain({"error": why}, 404)


def _serve_lab(app: FastAPI, lab: Launcher | None, token: str) -> None:
    if lab is None:
        _refuse_runs(app)
        return

    def check_token(given: Annotated[str | None, Header(alias="X-Dapo-Token")] = None) -> None:
        if not token_matches(given, token):
            raise RefusedError("starting and stopping runs needs the token that `dapo board` printed")

    allowed = [Depends(check_token)]

    @app.get("/api/lab")
    def describe(recipe: Annotated[str, Query(max_length=1000)] = DEMO) -> Plain:
        return Plain(lab.describe(recipe))

    @app.post("/api/lab/start", dependencies=allowed)
    def start(wanted: Start) -> Plain:
        return Plain({"name": lab.start(wanted)})

    @app.post("/api/lab/check", dependencies=allowed)
    def check_choice(wanted: Start) -> Plain:
        """Returns the problem with a choice of settings, if any; a problem is not an error of the request."""
        try:
            lab.check(wanted)
        except UserError as error:
            return Plain({"problem": printable(str(error))})
        return Plain({"problem": None})

    @app.post("/api/lab/token", dependencies=allowed)
    def check() -> Plain:
        return Plain({})

    @app.post("/api/lab/{action}", dependencies=allowed)
    def act(action: Literal["stop", "remove", "sooner"], name: Name) -> Plain:
        getattr(lab.queue, action)(name)
        return Plain({})


def _refuse_runs(app: FastAPI) -> None:
    @app.api_route("/api/lab", methods=["GET", "POST"])
    @app.api_route("/api/lab/{action}", methods=["GET", "POST"])
    def refuse() -> None:
        raise RefusedError("this board is read-only; `dapo board --allow-runs` lets others start and stop runs")
