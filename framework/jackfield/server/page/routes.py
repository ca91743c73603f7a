"""``GET /``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from jackfield.server.page.document import document

router = APIRouter(include_in_schema=False)


@router.api_route("/", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """Show the page for people."""
    found = document()
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if found.etag in known:
        return Response(status_code=304, headers=found.headers)
    return Response(found.body, headers=found.headers, media_type="text/html; charset=utf-8")
