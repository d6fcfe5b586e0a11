"""The screen of a conversation, as far as it opens others: settings beside it; help, models and kept
conversations above it. What a person chooses there is told by messages, to whoever knows what to do about it.
"""

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget

from localllm.conversation.session import Session
from localllm.conversation.sessions import SessionStore
from localllm.tui.help_screen import HelpScreen
from localllm.tui.machine import Machine
from localllm.tui.models_screen import ModelsScreen
from localllm.tui.palette import ActionProvider, CommandProvider, ModelProvider, SessionProvider, ThemeProvider
from localllm.tui.sessions_screen import SessionsScreen
from localllm.tui.settings_panel import SettingsPanel
from localllm.tui.wishes import ModelChosen, SessionChosen


class PanelScreen(Screen[None]):
    """Who inherits lays out `side`, in which panels stand, has an inspector, and handles the messages of
    `wishes.py`."""

    COMMANDS: ClassVar = {ActionProvider, CommandProvider, ModelProvider, SessionProvider, ThemeProvider}
    BINDING_GROUP_TITLE = "Conversation"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f1", "help", "Help"),
        Binding("f2", "settings", "Settings"),
        Binding("f3", "inspector", "Inspector"),
        Binding("f4", "models", "Models"),
        Binding("f5", "sessions", "Conversations"),
    ]

    machine: Machine
    session: Session
    side: Widget
    previous_focus: Widget | None = None  # when settings were opened

    @property
    def session_store(self) -> SessionStore:
        return self.session.store

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    async def action_settings(self) -> None:
        """Open them beside the conversation, or close them."""
        if not await self.close_settings():
            self.previous_focus = self.focused
            panel = SettingsPanel(self.session.chat)
            await self.side.mount(panel)
            self.set_focus(panel.first_field)

    async def close_settings(self) -> bool:
        """Whether they were open."""
        panels = self.query(SettingsPanel)
        is_open = bool(panels)
        await panels.remove()
        if is_open and self.previous_focus and self.previous_focus.is_attached:
            self.set_focus(self.previous_focus)
        return is_open

    def action_models(self) -> None:
        self.app.push_screen(ModelsScreen(self.machine), self._post_choice(ModelChosen))

    def action_sessions(self) -> None:
        self.app.push_screen(SessionsScreen(self.session_store), self._post_choice(SessionChosen))

    def _post_choice(self, wish: Callable[[str], Message]) -> Callable[[str | None], None]:
        def chosen(name: str | None) -> None:
            if name is not None:
                self.post_message(wish(name))

        return chosen
