"""HTTP requests to the Hub: one client, retries after transient errors, and error messages.

Files are downloaded here rather than by `huggingface_hub`, which neither resumes nor verifies downloads over HTTP;
its metadata calls, login and classification of the Hub's errors are used.
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

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
CREDENTIALS = re.compile(r"(^|//)[^/]*@")  # user name and password in a URL
MAX_ATTEMPTS = 5  # without receiving any bytes
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 8.0
MAX_RETRY_AFTER_S = 120  # a longer Retry-After is an error
RETRIABLE_STATUSES = (408, 429, 500, 502, 503, 504)
EXPIRED_URL_STATUSES = (400, 401, 403)  # of the storage services of Google, Amazon and others
CONNECT_TIMEOUT_S = 10.0

logging.set_verbosity_error()  # its warnings about retries would interrupt the progress display

Notify = Callable[[str], None]  # called with a message for the user

_client_lock = Lock()  # functools.cache alone may create one client per thread


def client() -> httpx2.Client:
    """Return the process's client. It uses the environment's proxies, and does not send the token to hosts that it
    is redirected to."""
    with _client_lock:
        return _client()


@functools.cache
def _client() -> httpx2.Client:
    return httpx2.Client(follow_redirects=True, timeout=_timeout())


def _timeout() -> httpx2.Timeout:
    return httpx2.Timeout(constants.HF_HUB_DOWNLOAD_TIMEOUT, connect=CONNECT_TIMEOUT_S)


def _library_client() -> httpx2.Client:
    """Make the client for huggingface_hub, whose default has no timeout."""

    def check(request: httpx2.Request) -> None:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled(f"Cannot reach {request.url}: HF_HUB_OFFLINE is set.")
        if not any(request.extensions["timeout"].values()):
            request.extensions["timeout"] = _timeout().as_dict()

    return httpx2.Client(event_hooks={"request": [check]}, follow_redirects=True, timeout=_timeout())


set_client_factory(_library_client)


def close() -> None:
    """Close all connections; the next request opens a new one."""
    client().close()
    _client.cache_clear()


@contextmanager
def get_range(url: str, begin: int, end: int) -> Iterator[httpx2.Response]:
    """Request bytes `begin` to `end` (exclusive) of a file, and yield the response to be streamed.

    Raises HfHubHTTPError for an error status, httpx2.HTTPError if the request fails.
    """
    headers = build_hf_headers(library_name="localllm", library_version=__version__)
    headers |= {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with client().stream("GET", url, headers=headers) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        yield response


def retrying(subject: str, notify: Notify, stop: Event) -> Retrying:
    """Return a caller that repeats a function after transient errors, with exponential backoff or as Retry-After
    demands, until `stop` is set. subject: what is requested, for the messages."""

    def announce(state: RetryCallState) -> None:
        error, pause = _error(state), state.upcoming_sleep
        notify(f"{subject}: {describe_error(error)}; retrying in {pause:.0f} s")

    return Retrying(
        retry=retry_if_exception(is_retriable),
        stop=stop_after_attempt(MAX_ATTEMPTS) | stop_when_event_set(stop),
        wait=_wait,
        sleep=sleep_using_event(stop),
        before_sleep=announce,
        reraise=True,
    )


def is_retriable(error: BaseException) -> bool:
    """Whether an error may be transient, such as a broken connection. A storage host also rejects expired URLs,
    for which the next request to the Hub returns a new one."""
    if isinstance(error, HfHubHTTPError):
        if error.response.status_code in EXPIRED_URL_STATUSES and not _is_from_hub(error):
            return True
        return error.response.status_code in RETRIABLE_STATUSES and retry_after_s(error) <= MAX_RETRY_AFTER_S
    if isinstance(error, httpx2.ConnectError) and (proxy_of_hub() or is_unknown_host(error)):
        return False  # no network, or a wrong proxy
    return isinstance(error, httpx2.TransportError) and not isinstance(
        error, httpx2.UnsupportedProtocol | httpx2.ProxyError
    )


def is_unknown_host(error: BaseException | None) -> bool:
    """Whether a host name could not be resolved; httpx chains the system's error to its own."""
    while error and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def proxy_of_hub() -> str | None:
    """Return the environment's proxy for requests to the Hub, if any, with its credentials redacted."""
    parts = urlsplit(constants.ENDPOINT)
    bypassed = urllib.request.proxy_bypass(parts.hostname or "")
    proxies = {} if bypassed else urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return redact_credentials(proxy) if proxy else None


def retry_after_s(error: BaseException) -> float:
    """Return the seconds of the Retry-After header; 0 if it is absent or a date."""
    response = error.response if isinstance(error, HfHubHTTPError) else None
    seconds = response.headers.get("Retry-After", "") if response is not None else ""
    return float(seconds) if seconds.isdecimal() and len(seconds) < 9 else 0.0


def _wait(state: RetryCallState) -> float:
    backoff = wait_exponential(FIRST_WAIT_S, MAX_WAIT_S)(state) + wait_random(0, FIRST_WAIT_S)(state)
    return max(backoff, retry_after_s(_error(state)))


def _error(state: RetryCallState) -> BaseException:
    assert state.outcome is not None
    error = state.outcome.exception()
    assert error is not None
    return error


def describe_error(error: BaseException) -> str:
    """Describe an error without its URL, which may contain a signature."""
    if isinstance(error, HfHubHTTPError):
        return f"status {error.response.status_code}"
    if isinstance(error, httpx2.ConnectTimeout | httpx2.PoolTimeout):
        return f"no connection within {CONNECT_TIMEOUT_S:.0f} s"
    if isinstance(error, httpx2.TimeoutException):
        return f"no data within {constants.HF_HUB_DOWNLOAD_TIMEOUT} s"
    if isinstance(error, httpx2.TooManyRedirects):
        return "it redirects in circles"
    return one_line(re.sub(r"^\[Errno -?\d+\] ", "", str(error))) or type(error).__name__


@contextmanager
def translate_errors(repo: RepoName) -> Iterator[None]:
    """Translate the errors of requests for a repository into LocalLLMError."""
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
            ungated = ungated_name(repo.repo)
            alternative = f", or use {ungated}, which needs no login" if ungated else ""
            return AccessDenied(
                f"{repo.repo} is gated: its authors require you to accept their terms",
                f"{first}visit {page} and accept them{alternative}",
            )
        case RepositoryNotFoundError():
            remedy = "check the name" if with_token else f"check the name; if it is private, {login}"
            return ModelNotFound(f"{hub} has no repository {repo.repo}, or it is private", remedy)
        case RevisionNotFoundError():
            remedy = "leave it out" if repo.revision != DEFAULT_REVISION else f"see {page}"
            return ModelNotFound(f"{repo.repo} has no revision {repo.revision}", remedy)
        case RemoteEntryNotFoundError():
            return ModelNotFound(f"{hub} lists a file of {repo.repo} but does not have it", "try again later")
        case HfHubHTTPError() if error.response.status_code == 401 and _is_from_hub(error):
            reason = "does not accept your token" if with_token else "requires a login"
            return AccessDenied(f"{hub} {reason} for {repo.repo}", f"{login} with a valid token")
        case HfHubHTTPError() if error.response.status_code == 403 and _is_from_hub(error):
            return AccessDenied(f"{hub} denies you access to {repo.repo}", f"see {page}; {login}")
        case HfHubHTTPError() if error.response.status_code == 429:
            when = f"in {retry_after_s(error):.0f} s" if retry_after_s(error) else "later"
            return NetworkError(f"{hub} returned status 429: too many requests", f"try again {when}")
        case httpx2.ConnectError() | httpx2.ProxyError() if proxy := proxy_of_hub():
            return NetworkError(
                f"{hub} cannot be reached through the proxy {proxy}: {describe_error(error)}",
                "check HTTPS_PROXY, or unset it, then run the same command again",
            )
        case httpx2.ConnectError() if is_unknown_host(error):
            return NetworkError(
                f"{hub} cannot be resolved: {describe_error(error)}",
                "check the connection and HF_ENDPOINT, then run the same command again",
            )
        case _:
            return NetworkError(
                f"{hub} does not provide {repo.repo}: {describe_error(error)}",
                "check the connection and HF_ENDPOINT, then run the same command again",
            )


def _is_from_hub(error: HfHubHTTPError) -> bool:
    """Whether the response is the Hub's own, not a storage host's, to which a login is irrelevant."""
    return error.response.url.netloc.decode() == urlsplit(constants.ENDPOINT).netloc


@dataclass(frozen=True)
class HubAccess:
    """The settings that requests to the Hub use, without secrets."""

    endpoint: str
    offline: bool
    token: str | None  # its source: the name of a variable, or a file
    proxies: dict[str, str]  # by scheme, with credentials redacted


def hub_access(environment: Mapping[str, str] = os.environ) -> HubAccess:
    """Return the current settings without network access, which `huggingface_hub.get_token` may need to renew a
    token."""
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


def redact_credentials(url: str) -> str:
    return CREDENTIALS.sub(r"\1***@", url)
