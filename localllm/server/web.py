"""The chat page at `/ui` and the page of simulations at `/simulate`: files of `localllm/server/web`, read at
start-up, with strict security headers.

They forbid content from other hosts, inline scripts and styles, HTML from strings (Trusted Types) and framing. The
chat page talks to `/v1`, the other one to the routes of `simulation.py`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Self

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from localllm.server.routing import Router

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}
"""Content types by the end of the file name. Other files are not served."""

CONTENT_SECURITY_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Cache-Control": "no-cache",  # revalidate on each use
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in CONTENT_SECURITY_POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class StaticFile:
    """A file with its response headers."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def from_content(cls, content: bytes, content_type: str) -> Self:
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, {**HEADERS, "Content-Type": content_type, "ETag": tag})

    def response(self, request: Request) -> Response:
        """The file, or 304 if the client has it already."""
        tags = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if self.headers["ETag"] in map(str.strip, tags):
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def router(*, has_chat: bool = True) -> Router:
    """has_chat: whether the chat page is served, besides the page of simulations and the files of both."""
    routes = Router(in_schema=False)
    pages = dict(read_files(files("localllm.server") / "web"))

    if has_chat:

        @routes.get("/ui")
        async def index(request: Request) -> Response:
            return pages["index.html"].response(request)

    @routes.get("/simulate")
    async def simulation(request: Request) -> Response:
        return pages["simulate.html"].response(request)

    @routes.get("/ui/{name:path}")
    async def page(request: Request) -> Response:
        if file := pages.get(request.path_params["name"] or "index.html"):
            return file.response(request)
        raise HTTPException(404)

    return routes


def read_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, StaticFile]]:
    """Files below a folder with their relative paths. Request paths are looked up in these, never on disk."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from read_files(entry, f"{prefix}{entry.name}/")
        elif content_type := next(
            (value for end, value in CONTENT_TYPES.items() if entry.name.endswith(end)), None
        ):
            yield f"{prefix}{entry.name}", StaticFile.from_content(entry.read_bytes(), content_type)
