"""The conversation that `localllm run` holds: a new one, or a kept one that it goes on with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from localllm.protocol.model import Model
from localllm.settings import Settings


def open_session(
    llm: Model, flags: Mapping[str, Any], given: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Session:
    """given: fields of SamplingParams; arguments: of the template. What was given as a flag also holds for a kept
    conversation, whose own the rest is. Raises UsageError where there is none such."""
    chat = Chat(llm, dataclasses.replace(llm.default_params, **given), flags["system"], arguments)
    session = Session(llm, chat, Settings.from_environment().home / "chats", flags["verbose"])
    if flags["resume"]:
        session.load(flags["resume"])
        chat.params = dataclasses.replace(chat.params, **given)
        chat.template_arguments |= arguments
        chat.system = flags["system"] or chat.system
    return session
