"""How the Hub would be reached: which settings are in effect. Touches no network, and shows no secret."""

import os
import re
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

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
