"""Access control: API keys, Host and Origin checks, TLS. `guard.py` applies it to every request.

A web page can make a visitor's browser send requests to this server. If its domain points here (DNS rebinding),
the Host header names that domain; across origins, Origin or Sec-Fetch-Site gives it away. Such requests are
refused unless the host or the origin is listed. As with Ollama, pages of this machine and of desktop apps are
accepted, since no remote page can have their origins; so are containers, under names of the private domain
`internal`.
"""

import hashlib
import hmac
import ipaddress
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from localllm.errors import MissingKey, OriginRefused, UsageError
from localllm.files import expand_path

HOST_HEADER = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
ANY_ORIGIN = "*"
LOCAL_ORIGIN = re.compile(
    r"https?://(localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(:\d{1,5})?|"
    r"(app|tauri|vscode-webview|vscode-file)://[A-Za-z0-9.@_-]*(:\d{1,5})?"
)
PRIVATE_DOMAIN = ".internal"  # reserved, so no public name server resolves it
PREFLIGHT_MAX_AGE_S = 600  # how long browsers cache the preflight response
MIN_KEY_LEN = 16  # characters; `openssl rand -hex 32` makes 64
KEY = re.compile(r"[\x21-\x7e]+")
NAMED_KEY = re.compile(r"(?P<name>[A-Za-z0-9._@-]{1,64}):[ \t]+(?P<key>\S+)")  # no key contains a space
MAX_KEY_LABELS = 100  # in metrics; the keys of all others share one
NO_KEY_LABEL, OTHER_KEYS_LABEL = "none", "other"
HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9._-]{0,251}[a-z0-9])?")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class AccessPolicy:
    """Rules for accepting requests. The default accepts only this machine, without a key."""

    keys: frozenset[bytes] = frozenset()
    """SHA-256 digests of the keys. If there are any, every path but `guard.PUBLIC_PATHS` needs one."""

    host_names: frozenset[str] = frozenset()
    """Accepted values of Host besides this machine's own names."""

    origins: frozenset[str] = frozenset()
    """Accepted origins of web pages; `*` accepts any."""

    is_exposed: bool = False
    """Whether other machines can reach the address; Host may then be any IP address."""

    tls: ssl.SSLContext | None = None

    shares_cache: bool = False
    """Whether requests with different keys share cached prefixes: the speed of an answer then reveals prompts."""

    key_names: Mapping[bytes, str] = field(default_factory=dict, hash=False)
    """Names of keys by their digests, for metrics; a key without one is shown as a digest of its digest."""

    is_behind_front: bool = False
    """Whether requests come from a front that has checked them, in a process of the same user, and not from a
    connection: their scope names the client's key."""

    def behind_front(self) -> "AccessPolicy":
        """The policy of a replica: the front checks requests, and ends TLS, which no other process could."""
        return replace(self, tls=None, is_behind_front=True)

    @property
    def scheme(self) -> str:
        return "https" if self.tls else "http"

    def check_host(self, headers: Headers, client: str = "") -> str:
        """The value of the Host header, with or without a port.

        client: the client's IP address. Raises OriginRefused unless the host is this machine's own: a listed name,
        or one that browsers resolve without a remote name server.
        """
        hosts = header_values(headers, b"host")
        if len(hosts) == 1 and (self.is_own_host(hosts[0]) or is_private_name(hosts[0], client)):
            return hosts[0]
        remedy = "connect to localhost or 127.0.0.1, or serve with --host-name"
        raise OriginRefused(f"the Host header is {', '.join(hosts) or 'missing'}", remedy)

    def is_own_host(self, host: str) -> bool:
        match = HOST_HEADER.fullmatch(host)
        name = match["name"].strip("[]").lower() if match else ""
        if name == "localhost" or name in self.host_names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or (self.is_exposed and not address.is_unspecified)

    def check_origin(self, headers: Headers, host: str, *, is_page: bool) -> str | None:
        """The foreign origin whose page may read the answer; None for a request from no page or from our own.
        Raises Refused.

        is_page: the path is a page, which other sites may link to.
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
            message = f"web pages of {', '.join(origins)} have no access"
            raise OriginRefused(message, "use a program instead of a web page, or serve with --origin")
        # Browsers send no Origin for images and links, but Sec-Fetch-Site.
        site, mode, destination = (
            header_values(headers, b"sec-fetch-" + name) for name in (b"site", b"mode", b"dest")
        )
        follows_link = is_page and mode == ["navigate"] and destination == ["document"]
        if not (origins or follows_link or set(site) <= {"same-origin", "none"}):
            raise OriginRefused("web pages of other sites have no access", "use a program instead of a web page")
        return None

    @cached_property
    def key_labels(self) -> dict[bytes, str]:
        """Labels of the keys in metrics: at most MAX_KEY_LABELS different ones, those of named keys first."""
        names = {
            key: self.key_names.get(key) or f"key-{scoped_digest(b'metrics label', key)[:8]}" for key in self.keys
        }
        kept = sorted(set(names.values()), key=lambda name: (name not in self.key_names.values(), name))
        shown = set(kept[:MAX_KEY_LABELS])
        return {key: name if name in shown else OTHER_KEYS_LABEL for key, name in names.items()}

    def key_label(self, key: bytes | None) -> str:
        """Return the label of a key in metrics. key: its digest, None without one."""
        return NO_KEY_LABEL if key is None else self.key_labels[key]

    def cache_scope(self, key: bytes | None) -> str:
        """Return the scope of a key's cached prefixes, "" for the one that all share. key: as in `key_scope`"""
        return "" if self.shares_cache else key_scope(key)

    def check_key(self, headers: Headers) -> bytes | None:
        """Return the digest of the request's key, None if no key is needed. Raises MissingKey unless a key is
        valid. Takes the same time however much of a key is right."""
        if not self.keys:
            return None
        sent = [*header_values(headers, b"x-api-key"), *map(_bearer, header_values(headers, b"authorization"))]
        # Every pair is compared, and by digest, so that timing reveals nothing about the keys.
        keys = sorted(self.keys)
        matches = [hmac.compare_digest(key_digest(each), key) for each in sent for key in keys]
        if not any(matches):
            raise MissingKey("the API key is wrong" if any(sent) else "this server requires an API key")
        return keys[matches.index(True) % len(keys)]

    @property
    def accepts_states(self) -> bool:
        """Whether a client's KV cache contents can affect no answers but its own."""
        return len(self.keys) == 1 or not self.shares_cache


def is_private_name(host: str, client: str) -> bool:
    """Whether the host is in the private domain, such as host.docker.internal, and the client's address
    private."""
    match = HOST_HEADER.fullmatch(host)
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return False
    return bool(match) and match["name"].lower().endswith(PRIVATE_DOMAIN) and address.is_private


def header_values(headers: Headers, name: bytes) -> list[str]:
    """All values of a header. name: in lower case, as in ASGI."""
    return [value.decode("latin-1") for key, value in headers if key == name]


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def key_scope(key: bytes | None) -> str:
    """Return the scope of a key's cached prefixes and slots, from which the key cannot be guessed.

    key: its digest, None without one
    """
    return "" if key is None else scoped_digest(b"cache scope", key)[:32]


def scoped_digest(purpose: bytes, digest: bytes) -> str:
    """Return a digest for one purpose, from which neither the key nor its digest follows. digest: of the key"""
    return hashlib.sha256(purpose + digest).hexdigest()


def make_access_policy(
    host: str,
    keys: Sequence[str] = (),
    host_names: Iterable[str] = (),
    origins: Iterable[str] = (),
    *,
    tls: ssl.SSLContext | None = None,
    insecure: bool = False,
    shares_cache: bool = False,
) -> AccessPolicy:
    """Make a policy from the flags of `serve`.

    host: address to listen on; insecure: accept other machines without a key; shares_cache: see AccessPolicy.
    Raises UsageError if the flags would admit other machines or any web page without a key, and for a malformed
    key, host name or origin.
    """
    is_exposed = not parse_ip_address(host).is_loopback
    named = [match_named_key(key) for key in keys]
    for _, key in named:
        _check_key(key)
    host_names, origins = [name.lower() for name in host_names], [origin.lower() for origin in origins]
    for name in host_names:
        if not HOST_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is not a host name", "give it without port and scheme: box.example.org")
    for origin in origins:
        if origin != ANY_ORIGIN and not ORIGIN.fullmatch(origin):
            raise UsageError(f"{origin!r} is not an origin", "write it as browsers do: https://chat.example.org")
    if ANY_ORIGIN in origins and not keys:
        raise UsageError("--origin * accepts any web page", "add --api-key-file FILE")
    if is_exposed and not (keys or insecure):
        message = f"{host} can be reached from other machines, and no API key is required"
        raise UsageError(message, "add --api-key-file FILE, or --insecure to accept all clients")
    return AccessPolicy(
        frozenset(key_digest(key) for _, key in named),
        frozenset(host_names),
        frozenset(origins),
        is_exposed,
        tls,
        shares_cache,
        {key_digest(key): name for name, key in named if name},
    )


def match_named_key(text: str) -> tuple[str, str]:
    """Return name and key of `NAME: KEY`; an empty name for a key alone."""
    match = NAMED_KEY.fullmatch(text)
    return (match["name"], match["key"]) if match else ("", text)


def access_warnings(access: AccessPolicy) -> list[str]:
    """Warnings for the operator about an exposed address."""
    if access.is_exposed and not access.keys:
        return ["warning: any client that can reach this address has access, without a key"]
    if access.is_exposed and not access.tls:
        return ["warning: keys and texts cross the network unencrypted; --tls-cert FILE enables TLS"]
    return []


def parse_ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an IP address, or `localhost`. Raises UsageError for other names: they are not resolved."""
    try:
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host.strip("[]"))
    except ValueError:
        raise UsageError(
            f"{host!r} is not an IP address", "use 127.0.0.1, ::1 or another one of this machine"
        ) from None


def read_keys(file: str | None) -> list[str]:
    """API keys of a file, one per line as `KEY` or `NAME: KEY`; none if `file` is None.

    Raises UsageError for a file without keys, or that cannot be read.
    """
    if file is None:
        return []
    try:
        lines = expand_path(file).read_text().splitlines()
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the keys in {file} ({_reason(error)})", "give a text file") from None
    if not (keys := [line.strip() for line in lines if line.strip()]):
        raise UsageError(f"{file} contains no key", "write one per line")
    return keys


def load_tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """TLS context of a certificate chain and its private key, both in PEM format; None without a certificate.

    key: None if the key is in the certificate's file. Raises UsageError for unreadable or mismatched files.
    """
    if certificate is None:
        if key is not None:
            raise UsageError("--tls-key needs --tls-cert", "give both")
        return None

    def refuse() -> str:
        raise UsageError(f"the key in {key or certificate} is encrypted", "use one without a password")

    files = [expand_path(file) for file in (certificate, key) if file is not None]
    for file in files:
        try:
            file.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {file} ({_reason(error)})", "give a file in PEM format") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files[0], files[-1], refuse)
    except ssl.SSLError as error:
        mismatch = error.reason == "KEY_VALUES_MISMATCH"
        reason = "the key does not match the certificate" if mismatch else "one of them is not there in PEM format"
        message = f"cannot load certificate and key from {' and '.join(map(str, files))}: {reason}"
        raise UsageError(message, "give --tls-cert and --tls-key in PEM format") from None
    return context


def _check_key(key: str) -> None:
    if len(key) < MIN_KEY_LEN or not KEY.fullmatch(key):
        fault = f"has {len(key)} characters" if len(key) < MIN_KEY_LEN else "has spaces or non-ASCII characters"
        remedy = f"use at least {MIN_KEY_LEN} letters and digits: `openssl rand -hex 32`"
        raise UsageError(f"an API key {fault}", remedy)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or "it is not text"
