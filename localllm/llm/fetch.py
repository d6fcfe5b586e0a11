"""A model from the Hub where it is missing, after a look whether it runs and fits here.

Imports the Hub's library, so import it late.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import constants

from localllm.checkpoint.header import Header
from localllm.checkpoint.layouts import check_quantization
from localllm.checkpoint.remote import remote_header
from localllm.errors import DoesNotFit, UnsupportedModel
from localllm.formatting import format_bytes
from localllm.hub.listing import RemoteFile
from localllm.hub.names import RepoName
from localllm.hub.pull import PullPlan, PullProgress, plan_pull, pull
from localllm.hub.resolve import downloaded_path, is_downloaded
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit

LOG = logging.getLogger("localllm")
MeasureSpace = Callable[[], FreeMemory]  # asked late: it may have to import torch


def fetch(
    repo: RepoName,
    show: PullProgress,
    measure_space: MeasureSpace,
    wish: LoadOptions,
    *,
    force: bool,
    on_header: Callable[[PullPlan, Header], object] = lambda job, header: None,
) -> Path:
    """Pull what is missing or new; nothing that does not run here, unless forced. on_header: told what is to come
    and what it is, before it is checked whether that runs.

    Raises DoesNotFit and UnsupportedModel before the weights come, and what `hub.pull` raises.
    """
    if constants.is_offline_mode() and is_downloaded(repo):
        show.say(f"{repo} is here; HF_HUB_OFFLINE is set, so nobody is asked for a newer one")
        return downloaded_path(repo, str(repo))
    job = plan_pull(repo, show.say)
    if job.missing_bytes:
        try:
            header = remote_header(job, show.say)
            on_header(job, header)
            check_supported(header, measure_space, wish, str(repo))
        except (DoesNotFit, UnsupportedModel) as error:
            if not force:
                anyway = "--force downloads it all the same"
                raise type(error)(
                    error.message, f"{error.remedy}; {anyway}" if error.remedy else anyway
                ) from error
            show.say(f"warning: {error.message}")
    return pull(job, show)


def check_supported(header: Header, measure_space: MeasureSpace, wish: LoadOptions, name: str) -> None:
    """Raises UnsupportedModel for a family or a format that does not run, DoesNotFit where memory is too small."""
    check_quantization(header.config)
    check_fit(header, measure_space(), wish, name=name)


class LogProgress:
    """Follows a pull in Python's log."""

    def begin(self, order: PullPlan) -> None:
        LOG.info("pulling %s: %s", order.listing.repo, format_bytes(order.missing_bytes))

    def advance(self, file: RemoteFile, count: int) -> None:
        pass

    def finish(self, file: RemoteFile) -> None:
        LOG.info("%s: %s, verified", file.path, format_bytes(file.size))

    def say(self, text: str) -> None:
        LOG.warning("%s", text)
