"""Pulls a model from the Hub after checking that it is supported and fits this machine.

Import it late, as it imports huggingface_hub.
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
from localllm.hub.http import Notify
from localllm.hub.listing import RemoteFile
from localllm.hub.names import RepoName
from localllm.hub.pull import PullPlan, PullProgress, plan_pull, pull
from localllm.hub.resolve import downloaded_path, edition_in_cache, is_downloaded
from localllm.llm.edition_choice import EditionChoice, choose_edition, what_fits
from localllm.plan.fit import Fit, FreeMemory, LoadOptions, check_fit

LOG = logging.getLogger("localllm")
MeasureMemory = Callable[[], FreeMemory]  # called late, as it may import torch


def fetch(
    repo: RepoName,
    progress: PullProgress,
    measure_memory: MeasureMemory,
    options: LoadOptions,
    *,
    force: bool,
    on_header: Callable[[PullPlan, Header], object] = lambda plan, header: None,
    on_choice: Callable[[str], object] = LOG.info,
) -> Path:
    """Pull missing or updated files, and return the model's folder or GGUF file.

    repo: a catalogue name without a format stands for its edition on this machine, otherwise for the one that
    `choose_edition` chooses. options: with which the model must fit. force: pull models that are not supported or
    do not fit, too. on_header: called before the check. on_choice: receives a line that names the chosen edition.
    Raises DoesNotFit and UnsupportedModel before the weights are downloaded, and the errors of `hub.pull`.
    """
    repo = edition_in_cache(repo)
    if constants.is_offline_mode() and is_downloaded(repo):
        progress.say(f"{repo} is here; HF_HUB_OFFLINE is set, so it is not checked for updates")
        return downloaded_path(repo, str(repo))
    choice = choose_edition(repo.entry, measure_memory(), options, progress.say) if repo.entry else None
    plan = choice.plan if choice else plan_pull(repo, progress.say)
    if plan.missing_bytes:
        try:
            header = remote_header(plan, progress.say)
            on_header(plan, header)
            fit = check_supported(header, measure_memory, options, str(plan.listing.repo), choice, progress.say)
            if choice:
                on_choice(choice.describe(fit))
        except (DoesNotFit, UnsupportedModel) as error:
            if not force:
                anyway = "--force downloads it anyway"
                raise type(error)(
                    error.message, f"{error.remedy}; {anyway}" if error.remedy else anyway
                ) from error
            progress.say(f"warning: {error.message}")
    return pull(plan, progress)


def check_supported(
    header: Header,
    measure_memory: MeasureMemory,
    options: LoadOptions,
    name: str,
    choice: EditionChoice | None,
    notify: Notify,
) -> Fit:
    """Return the fit of a model. choice: of which it is the edition, if a catalogue name left the format open.

    Raises UnsupportedModel for an unsupported family or format, DoesNotFit if the memory is too small.
    """
    check_quantization(header.config)
    memory = measure_memory()
    try:
        return check_fit(header, memory, options, name=name)
    except DoesNotFit as error:
        remedy = what_fits(choice, header, memory, options, notify) if choice else None
        raise DoesNotFit(error.message, remedy or error.remedy) from error


class LogProgress:
    """Writes the progress of a pull to Python's log."""

    def begin(self, plan: PullPlan) -> None:
        LOG.info("pulling %s: %s", plan.listing.repo, format_bytes(plan.missing_bytes))

    def advance(self, file: RemoteFile, count: int) -> None:
        pass

    def finish(self, file: RemoteFile) -> None:
        LOG.info("%s: %s, verified", file.path, format_bytes(file.size))

    def say(self, text: str) -> None:
        LOG.warning("%s", text)
