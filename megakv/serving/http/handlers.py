"""What the application says where there is no endpoint, or where one failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from megakv.serving.http.errors import ApiError, broken


async def say(request: Request, error: Exception) -> Response:
    """An error as its object."""
    assert isinstance(error, ApiError)
    return Response(error.json(), error.status, media_type="application/json", headers=dict(error.headers))


async def _unknown_path(request: Request, error: Exception) -> Response:
    return await say(request, ApiError(404, f"there is nothing at {request.url.path}", code="unknown_url"))


async def _wrong_method(request: Request, error: Exception) -> Response:
    message = f"{request.method} is not allowed at {request.url.path}"
    headers = {"allow": getattr(error, "headers", {}).get("Allow", "")}
    return await say(request, ApiError(405, message, code="method_not_allowed", headers=headers))


async def _broken(request: Request, error: Exception) -> Response:
    return await say(request, broken())


HANDLERS: dict[int | type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    ApiError: say,
    404: _unknown_path,
    405: _wrong_method,
    Exception: _broken,
}
"""By status or exception."""
