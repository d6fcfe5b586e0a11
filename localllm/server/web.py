"""The page at `/ui`: files of `localllm/server/web`, read once, and the headers that keep the page to itself.

What a browser may do with the page is little: nothing from elsewhere, no script or style inside the document, no
text as HTML (Trusted Types), no frame around it. Knows nothing of models; the page asks `/v1` for them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Self

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}
"""Content types by the ends of names. What ends otherwise is not served."""

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
    "Cache-Control": "no-cache",  # ask each time whether it is still the same
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in CONTENT_SECURITY_POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class StaticFile:
    """A file as it is sent."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def from_content(cls, content: bytes, content_type: str) -> Self:
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        return cls(content, {**HEADERS, "Content-Type": content_type, "ETag": tag})

    def response(self, request: Request) -> Response:
        """The file, or 304 to whoever has it already."""
        tags = request.headers.get("if-none-match", "").replace("W/", "").split(",")
        if self.headers["ETag"] in map(str.strip, tags):
            return Response(status_code=304, headers=self.headers)
        return Response(self.content, headers=self.headers)


def router() -> APIRouter:
    routes = APIRouter()
    pages = dict(read_files(files("localllm.server") / "web"))

    @routes.get("/ui", include_in_schema=False)
    async def index(request: Request) -> Response:
        return pages["index.html"].response(request)

    @routes.get("/ui/{name:path}", include_in_schema=False)
    async def page(request: Request, name: str) -> Response:
        if found := pages.get(name or "index.html"):
            return found.response(request)
        raise HTTPException(404)

    return routes


def read_files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, StaticFile]]:
    """The files below a folder, each by its path from there. A path that a browser sends is only looked up among
    these."""
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from read_files(entry, f"{prefix}{entry.name}/")
        elif kind := next((kind for end, kind in CONTENT_TYPES.items() if entry.name.endswith(end)), None):
            yield f"{prefix}{entry.name}", StaticFile.from_content(entry.read_bytes(), kind)
