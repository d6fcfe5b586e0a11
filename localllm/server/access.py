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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localllm.errors import MissingKey, OriginRefused, UsageError
from localllm.files import expand_path

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


# Who may ask, as flags and files say it; what would let strangers in unawares is refused.

MIN_KEY_LEN = 16  # characters; `openssl rand -hex 32` makes 64
KEY = re.compile(r"[\x21-\x7e]+")
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9._-]{0,251}[a-z0-9])?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")


def make_access_policy(
    host: str,
    keys: Sequence[str] = (),
    host_names: Iterable[str] = (),
    origins: Iterable[str] = (),
    *,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
) -> AccessPolicy:
    """host: where it listens; insecure: others may ask there without a key.

    Raises UsageError for what would let strangers in, or is no key, name or origin.
    """
    is_wide = not parse_ip_address(host).is_loopback
    for key in keys:
        _check_key(key)
    host_names, origins = [name.lower() for name in host_names], [origin.lower() for origin in origins]
    for name in host_names:
        if not HOST_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name of a host", "give one without port or scheme: box.example.org")
    for origin in origins:
        if origin != ANY_ORIGIN and not ORIGIN.fullmatch(origin):
            raise UsageError(f"{origin!r} is no origin", "give it as browsers do: https://chat.example.org")
    if ANY_ORIGIN in origins and not keys:
        raise UsageError("with --origin * any page of the web may ask", "give --api-key-file FILE, too")
    if is_wide and not (keys or insecure):
        what = f"{host} can be reached from other machines, and there is no key to keep strangers out"
        raise UsageError(what, "give --api-key-file FILE, or --insecure to let anybody ask")
    return AccessPolicy(frozenset(map(key_digest, keys)), frozenset(host_names), frozenset(origins), is_wide, tls)


def access_warnings(access: AccessPolicy) -> list[str]:
    """What whoever starts the server may not have thought of."""
    if access.is_exposed and not access.keys:
        return ["warning: whoever reaches this address may ask, without a key"]
    if access.is_exposed and not access.tls:
        return ["warning: keys and texts cross the network for all to read; --tls-cert FILE keeps them secret"]
    return []


def parse_ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Raises UsageError where it is none: names are not looked up."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise UsageError(f"{host!r} is no address", "give 127.0.0.1, ::1 or another of this machine") from None


def read_keys(file: str | None) -> list[str]:
    """One a line; none of no file. Raises UsageError where the file has none, or cannot be read."""
    if file is None:
        return []
    try:
        lines = expand_path(file).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"the keys in {file} cannot be read ({_why(error)})", "give a file of text") from None
    if not (keys := [line.strip() for line in lines if line.strip()]):
        raise UsageError(f"{file} holds no key", "write one a line")
    return keys


def load_tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """By certificates and their key, in PEM. key: None where it stands in the same file; certificate: None for no
    TLS. Raises UsageError for files that are not such."""
    if certificate is None:
        if key is not None:
            raise UsageError("--tls-key is given without --tls-cert", "give both")
        return None

    def refuse() -> str:
        raise UsageError(f"the key in {key or certificate} is encrypted", "give one without a password")

    files = [expand_path(file) for file in (certificate, key) if file is not None]
    for file in files:
        try:
            file.read_bytes()
        except OSError as error:
            raise UsageError(f"{file} cannot be read ({_why(error)})", "give a file in PEM") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files[0], files[-1], refuse)
    except ssl.SSLError as error:
        why = "the key is another's" if error.reason == "KEY_VALUES_MISMATCH" else "they are not both there in PEM"
        what = f"{' and '.join(map(str, files))} are no certificate and its key: {why}"
        raise UsageError(what, "give --tls-cert and --tls-key in PEM") from None
    return context


def _check_key(key: str) -> None:
    if len(key) < MIN_KEY_LEN or not KEY.fullmatch(key):
        what = f"has {len(key)} characters" if len(key) < MIN_KEY_LEN else "has blanks or letters beyond ASCII"
        raise UsageError(
            f"a key {what}", f"give at least {MIN_KEY_LEN} letters and digits: `openssl rand -hex 32`"
        )


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or "it is no text"
