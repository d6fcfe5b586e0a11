"""Who may ask: keys, the names that this machine is asked under, the pages of other origins, TLS. Decisions about
headers alone; `guard.py` holds every request against them.

A page of the web can make its visitor's browser send requests here. Under its own name that it points here (DNS
rebinding), Host names a stranger; across origins, Origin or Sec-Fetch-Site does. All are refused, unless the name
or the origin was listed. Pages of this machine and of its programs may ask, as with Ollama: no stranger can give a
page such an origin. So may containers, under names of the private domain `internal`.
"""

import hashlib
import hmac
import ipaddress
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.errors import MissingKey, OriginRefused

HOST_HEADER = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
ANY_ORIGIN = "*"
LOCAL_ORIGIN = re.compile(
    r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:\d{1,5})?|"
    r"(app|tauri|vscode-webview|vscode-file)://[A-Za-z0-9.@_-]*(:\d{1,5})?"
)
PRIVATE_DOMAIN = ".internal"  # which no public name server knows
PREFLIGHT_MAX_AGE_S = 600  # for which a browser keeps the answer

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class AccessPolicy:
    """Without arguments: of this machine alone, without a key."""

    keys: frozenset[bytes] = frozenset()
    """SHA-256 of each; with any, every request needs one but those that `guard.OPEN` names."""

    host_names: frozenset[str] = frozenset()
    """Hosts besides this machine's own."""

    origins: frozenset[str] = frozenset()
    """Of pages that may ask and read; `*` is any."""

    is_exposed: bool = False
    """Others can reach the address: its numbers, too, are this machine's own."""

    tls: ssl.SSLContext | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def check_host(self, headers: Headers, client: str = "") -> str:
        """The Host header, with its port or without. client: the client's address. Raises OriginRefused where the
        host is not this machine's own: a name that browsers resolve without asking a foreign name server."""
        hosts = header_values(headers, b"host")
        if len(hosts) == 1 and (self.is_own_host(hosts[0]) or is_private_name(hosts[0], client)):
            return hosts[0]
        remedy = "ask as localhost or 127.0.0.1, or serve with --host-name"
        raise OriginRefused(f"the Host header is {', '.join(hosts) or 'missing'}", remedy)

    def is_own_host(self, host: str) -> bool:
        found = HOST_HEADER.fullmatch(host)
        name = found["name"].strip("[]").lower() if found else ""
        if name == "localhost" or name in self.host_names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or (self.is_exposed and not address.is_unspecified)

    def check_origin(self, headers: Headers, host: str, *, is_page: bool) -> str | None:
        """The foreign origin whose page may read the answer; None where no page or our own asks. Raises Refused.

        is_page: what is asked for is a page, to which any other may lead.
        """
        origins = header_values(headers, b"origin")
        foreign = [origin for origin in origins if origin.lower() != f"{self.scheme}://{host}".lower()]
        if foreign:
            origin = foreign[0]
            if (
                len(origins) == 1
                and origin != "null"
                and (
                    LOCAL_ORIGIN.fullmatch(origin.lower())
                    or not self.origins.isdisjoint((origin.lower(), ANY_ORIGIN))
                )
            ):
                return origin
            what = f"a page of {', '.join(origins)} may not ask here"
            raise OriginRefused(what, "ask from a program, not a web page, or serve with --origin")
        # Browsers leave Origin out where a page only shows a picture or follows a link, and tell so elsewhere.
        site, mode, goal = (header_values(headers, b"sec-fetch-" + name) for name in (b"site", b"mode", b"dest"))
        follows_link = is_page and mode == ["navigate"] and goal == ["document"]
        if not (origins or follows_link or all(one in ("same-origin", "none") for one in site)):
            raise OriginRefused("a page of another site may not ask here", "ask from a program, not a web page")
        return None

    def check_key(self, headers: Headers) -> None:
        """Raises NoKey. In the same time whichever key it is, and however much of it is right."""
        if not self.keys:
            return
        sent = [*header_values(headers, b"x-api-key"), *map(_bearer, header_values(headers, b"authorization"))]
        # Of each all are compared, and digests: how long one takes says nothing of a key.
        matches = [hmac.compare_digest(key_digest(one), key) for one in sent for key in sorted(self.keys)]
        if not any(matches):
            raise MissingKey("the key is not one of this server's" if any(sent) else "this server asks for a key")


def is_private_name(host: str, client: str) -> bool:
    """Is it a name of the private domain, such as host.docker.internal, and asked by a machine nearby?"""
    found = HOST_HEADER.fullmatch(host)
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    return bool(found) and found["name"].lower().endswith(PRIVATE_DOMAIN) and address.is_private


def header_values(headers: Headers, name: bytes) -> list[str]:
    """The values of a header, whose name is in small letters as ASGI has it."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
