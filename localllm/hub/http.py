"""Requests to the Hub: one client, patience with passing faults, and errors as sentences.

Bytes are fetched here and not by `huggingface_hub`, which neither resumes nor checks what it fetches over HTTP;
its metadata calls, its login and its reading of the Hub's errors are used.
"""

import functools
import os
import re
import socket
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, logging, set_client_factory
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    stop_after_attempt,
    stop_when_event_set,
    wait_exponential,
    wait_random,
)
from tenacity.nap import sleep_using_event

from localllm import __version__
from localllm.errors import AccessDenied, LocalLLMError, ModelNotFound, NetworkError
from localllm.formatting import one_line
from localllm.hub.catalog import ungated_name
from localllm.hub.names import DEFAULT_REVISION, RepoName

# How the Hub would be reached: which settings are in effect. Touches no network, and shows no secret.

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
CREDENTIALS = re.compile(r"(^|//)[^/]*@")  # name and password in an address


@dataclass(frozen=True)
class HubAccess:
    endpoint: str
    offline: bool
    token: str | None  # where one is: a variable's name, or a file; never the token
    proxies: dict[str, str]  # by scheme, as programs find them; names and passwords left out


def hub_access(environment: Mapping[str, str] = os.environ) -> HubAccess:
    """`huggingface_hub.get_token` is not asked: it may renew a token, which takes the network."""
    return HubAccess(
        endpoint=redact_credentials(constants.ENDPOINT),
        offline=constants.HF_HUB_OFFLINE,
        token=next((name for name in TOKEN_VARIABLES if environment.get(name, "").strip()), None) or _token_file(),
        proxies={scheme: redact_credentials(proxy) for scheme, proxy in urllib.request.getproxies().items()},
    )


def _token_file() -> str | None:
    with suppress(OSError):
        if Path(constants.HF_TOKEN_PATH).read_bytes().strip():
            return constants.HF_TOKEN_PATH
    return None


def redact_credentials(address: str) -> str:
    return CREDENTIALS.sub(r"\1***@", address)


MAX_ATTEMPTS = 5  # without a new byte in between
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 8.0
MAX_RETRY_AFTER_S = 120  # by Retry-After; whoever asks for more is told to come back later
RETRIABLE_STATUSES = (408, 429, 500, 502, 503, 504)
EXPIRED_ADDRESS_STATUSES = (400, 401, 403)  # of Google's, and of Amazon's and others' hosts
CONNECT_TIMEOUT_S = 10.0

logging.set_verbosity_error()  # its warnings of retries would stand between the lines of our progress

Say = Callable[[str], None]  # takes a remark for the person

_client_lock = Lock()  # functools.cache alone may make one for each of several threads


def client() -> httpx2.Client:
    """That of the process. Heeds the proxies of the environment; a login does not follow to another host."""
    with _client_lock:
        return _client()


@functools.cache
def _client() -> httpx2.Client:
    return httpx2.Client(follow_redirects=True, timeout=_timeout())


def _timeout() -> httpx2.Timeout:
    return httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=CONNECT_TIMEOUT_S)


def _library_client() -> httpx2.Client:
    """The client of huggingface_hub, whose own has no timeout and would wait for a silent hub for ever."""

    def check(request: httpx2.Request) -> None:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled(f"Cannot reach {request.url}: HF_HUB_OFFLINE is set.")
        if not any(request.extensions["timeout"].values()):
            request.extensions["timeout"] = _timeout().as_dict()

    return httpx2.Client(event_hooks={"request": [check]}, follow_redirects=True, timeout=_timeout())


set_client_factory(_library_client)


def close() -> None:
    """Close all connections; the next request opens new ones."""
    client().close()
    _client.cache_clear()


@contextmanager
def get_range(url: str, begin: int, end: int) -> Iterator[httpx2.Response]:
    """The bytes of a file from `begin` up to, not with, `end`; to be streamed.

    Raises HfHubHTTPError, which says what the Hub says, and httpx2.HTTPError.
    """
    headers = build_hf_headers(library_name="localllm", library_version=__version__)
    headers |= {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with client().stream("GET", url, headers=headers) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        yield response


def retrying(what: str, say: Say, end: Event) -> Retrying:
    """Calls a function again after faults that may pass, a little later each time, or when the Hub asks for it;
    not once `end` is set."""

    def announce(state: RetryCallState) -> None:
        error, pause = _error(state), state.upcoming_sleep
        say(f"{what}: {describe_error(error)}; trying again in {pause:.0f} s")

    return Retrying(
        retry=retry_if_exception(is_retriable),
        stop=stop_after_attempt(MAX_ATTEMPTS) | stop_when_event_set(end),
        wait=_wait,
        sleep=sleep_using_event(end),
        before_sleep=announce,
        reraise=True,
    )


def is_retriable(error: BaseException) -> bool:
    """May it be gone in a moment? A broken connection may, a wrong name will not. The host of the files refuses an
    address that has run out, and the Hub gives a new one to whoever asks again."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code in EXPIRED_ADDRESS_STATUSES and not _is_from_hub(error):
            return True
        return error.response.status_code in RETRIABLE_STATUSES and retry_after_s(error) <= MAX_RETRY_AFTER_S
    if isinstance(error, httpx2.ConnectError) and (proxy_of_hub() or is_unknown_host(error)):
        return False  # a machine without a network, or a proxy that is not there
    return isinstance(error, httpx2.TransportError) and not isinstance(
        error, httpx2.UnsupportedProtocol | httpx2.ProxyError
    )


def is_unknown_host(error: BaseException | None) -> bool:
    """Does a name not resolve? The library keeps the system's error behind its own ones."""
    while error and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def proxy_of_hub() -> str | None:
    """The proxy that stands between this machine and the Hub, as the environment names it; without a password."""
    parts = urlsplit(constants.ENDPOINT)
    bypassed = urllib.request.proxy_bypass(parts.hostname or "")
    proxies = {} if bypassed else urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return redact_credentials(proxy) if proxy else None


def retry_after_s(error: BaseException) -> float:
    """What Retry-After says, in seconds; 0 where it is not there or is a date."""
    response = error.response if isinstance(error, HfHubHTTPError) else None
    asked = response.headers.get("Retry-After", "") if response is not None else ""
    return float(asked) if asked.isdecimal() and len(asked) < 9 else 0.0


def _wait(state: RetryCallState) -> float:
    usual = wait_exponential(FIRST_WAIT_S, MAX_WAIT_S)(state) + wait_random(0, FIRST_WAIT_S)(state)
    return max(usual, retry_after_s(_error(state)))


def _error(state: RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error


def describe_error(error: BaseException) -> str:
    """What went wrong, in words, without a URL: that of a file may carry a signature."""
    if isinstance(error, HfHubHTTPError):
        return f"it answers {error.response.status_code}"
    if isinstance(error, httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return f"no connection within {CONNECT_TIMEOUT_S:.0f} s"
    if isinstance(error, httpx2.TimeoutException):
        return f"nothing came for {constants.HF_HUB_DOWNLOAD_TIMEOUT} s"
    if isinstance(error, httpx2.TooManyRedirects):
        return "it redirects in circles"
    return one_line(re.sub(r"^\[Errno -?\d+\] ", "", str(error))) or type(error).__name__


@contextmanager
def translate_errors(repo: RepoName) -> Iterator[None]:
    """Turns the errors of requests about a repository into ours."""
    try:
        yield
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _translate_error(error, repo) from error


def _translate_error(error: Exception, repo: RepoName) -> LocalLLMError:
    endpoint = redact_credentials(constants.ENDPOINT)
    hub, page = urlsplit(endpoint).netloc or endpoint, f"{endpoint}/{repo.repo}"
    login = "log in with `hf auth login`, or set HF_TOKEN"
    with_token = "authorization" in build_hf_headers()
    match error:
        case OfflineModeIsEnabled():
            return ModelNotFound(
                f"{repo} is not on this machine, and HF_HUB_OFFLINE is set", "unset it to download"
            )
        case GatedRepoError():
            first = "" if with_token else f"{login}, then "
            open_edition = ungated_name(repo.repo)
            instead = f", or use {open_edition}, which needs no login" if open_edition else ""
            return AccessDenied(
                f"{repo.repo} is gated: its authors want you to agree to their terms",
                f"{first}visit {page} and accept them{instead}",
            )
        case RepositoryNotFoundError():
            remedy = "check the name" if with_token else f"check the name; if it is private, {login}"
            return ModelNotFound(f"{hub} has no repository {repo.repo}, or it is private", remedy)
        case RevisionNotFoundError():
            known = "leave it out" if repo.revision != DEFAULT_REVISION else f"see {page}"
            return ModelNotFound(f"{repo.repo} has no revision {repo.revision}", known)
        case RemoteEntryNotFoundError():
            return ModelNotFound(f"{hub} lists a file of {repo.repo} and does not have it", "try again later")
        case HfHubHTTPError() if error.response.status_code == 401 and _is_from_hub(error):
            asks = (
                f"does not accept your login for {repo.repo}" if with_token else f"wants a login for {repo.repo}"
            )
            return AccessDenied(f"{hub} {asks}", f"{login} with a valid token")
        case HfHubHTTPError() if error.response.status_code == 403 and _is_from_hub(error):
            return AccessDenied(f"{hub} does not let you read {repo.repo}", f"see {page}; {login}")
        case HfHubHTTPError() if error.response.status_code == 429:
            later = f"in {retry_after_s(error):.0f} s" if retry_after_s(error) else "later"
            return NetworkError(f"{hub} answers 429: too many requests", f"try again {later}")
        case httpx2.ConnectError() | httpx2.ProxyError() if proxy := proxy_of_hub():
            return NetworkError(
                f"the proxy {proxy} does not let {hub} be reached: {describe_error(error)}",
                "check HTTPS_PROXY, or unset it, then run the same command again",
            )
        case httpx2.ConnectError() if is_unknown_host(error):
            return NetworkError(
                f"{hub} cannot be found: {describe_error(error)}",
                "check the connection and HF_ENDPOINT, then run the same command again",
            )
        case _:
            broken = f"{hub} does not give {repo.repo}: {describe_error(error)}"
            return NetworkError(broken, "check the connection and HF_ENDPOINT, then run the same command again")


def _is_from_hub(error: HfHubHTTPError) -> bool:
    """Not by the host that it sent us to: a login means nothing there."""
    return error.response.url.netloc.decode() == urlsplit(constants.ENDPOINT).netloc
