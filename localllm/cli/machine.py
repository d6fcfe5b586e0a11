"""The models of this machine by the flags of the command line: one way to open one, for the app and for a single
answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localllm.cli.exits import invalid_hf_setting
from localllm.cli.io import note
from localllm.cli.served import LOADING_FLAGS, connect_to_server
from localllm.protocol.model import Model
from localllm.request import Grammar

if TYPE_CHECKING:
    from localllm.tui.machine import (
        LoadObserver,
        ModelOffer,
    )  # what the app needs, a server's answer need not wait for


class LocalMachine:
    """`Machine` of the app. flags: those of `run`, which count for each model that is opened."""

    def __init__(self, flags: Mapping[str, Any]):
        self.flags = flags

    def offers(self) -> "Sequence[ModelOffer]":
        """As `Machine`. Raises NoSuchDevice and UsageError for flags that name what is not here."""
        from localllm.cli.offers import list_offers
        from localllm.plan.fit import LoadOptions
        from localllm.settings import Settings

        settings, flags = Settings.from_environment(), self.flags
        dtype, kv_dtype = flags["dtype"] or settings.dtype, flags["kv_dtype"] or settings.kv_dtype
        wish = LoadOptions(flags["context"], quant=flags["quant"], dtype=dtype, kv_dtype=kv_dtype)
        return list_offers(wish, flags["device"] or settings.device, settings)

    def open(self, name: str, watch: "LoadObserver") -> Model:
        return connect_or_load({**self.flags, "model": name}, watch=watch)


def connect_or_load(
    flags: Mapping[str, Any], grammar: Grammar | None = None, watch: "LoadObserver | None" = None
) -> Model:
    """A running server that has the model, or the model in this process: pulled, quantized and loaded as
    `load_model` does. flags: those of `run`; grammar: one that answers will be asked for; watch: follows it, None:
    on stderr."""
    if served := connect_to_server(flags, watch.note if watch else note):
        return served
    try:
        from localllm.cli.loading import load_model  # what only loading needs, a server's answer need not wait for
    except ValueError as error:
        raise invalid_hf_setting(error) from error

    where = {name: flags[name] for name in LOADING_FLAGS}
    draft = where.pop("draft")
    where["draft"] = None if draft is None else "lookup" if draft else "off"
    return load_model(flags["model"], **where, verbose=flags["verbose"], grammar=grammar, watch=watch)
