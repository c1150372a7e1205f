"""The parameters that routes share, and JSON responses."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import Response

from dapo_rl.board.watcher import dumps

Name = Annotated[str, Query(alias="run", max_length=1000)]
Names = Annotated[list[str], Query(alias="run", max_length=64)]
ReportName = Annotated[str, Query(alias="name", max_length=1000)]
Step = Annotated[int, Query(ge=0, le=10**12)]
Share = Annotated[float, Query(ge=0, le=1)]


class Plain(Response):
    """JSON in ASCII, with null for numbers that are not finite."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content).encode()
