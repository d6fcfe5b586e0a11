"""Who may ask, as flags and files say it; what would let strangers in unawares is refused."""

import ipaddress
import re
import ssl
from collections.abc import Iterable, Sequence

from localllm.errors import UsageError
from localllm.files import expand_path
from localllm.server.access import ANY_ORIGIN, AccessPolicy, key_digest

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
