"""What `pull` does, and `run` where a model is missing. Imports the Hub's library, so import it late."""

from pathlib import Path

from huggingface_hub import constants

from localllm.cli.progress import shown
from localllm.hub.names import RepoName
from localllm.hub.pull import Show, order, pull
from localllm.hub.resolve import downloaded, is_downloaded


def fetch(repo: RepoName, show: Show) -> Path:
    """Pull what is missing or new. Raises what `hub.pull` raises."""
    if constants.is_offline_mode() and is_downloaded(repo):
        show.say(f"{repo} is here; HF_HUB_OFFLINE is set, so nobody is asked for a newer one")
        return downloaded(repo, str(repo))
    try:
        return pull(order(repo, show.say), show)
    except KeyboardInterrupt:
        show.say("broken off; the same command goes on where it stopped")
        raise


def fetch_shown(repo: RepoName) -> None:
    """With progress on stderr."""
    with shown() as show:
        fetch(repo, show)
