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
from localllm.conversation.sessions import Sessions
from localllm.tui.help_screen import HelpScreen
from localllm.tui.machine import Machine
from localllm.tui.models_screen import ModelsScreen
from localllm.tui.palette import Actions, Commands, Conversations, Models, Themes
from localllm.tui.sessions_screen import SessionsScreen
from localllm.tui.settings_panel import SettingsPanel
from localllm.tui.wishes import ModelChosen, SessionChosen


class PanelScreen(Screen[None]):
    """Who inherits lays out `side`, in which panels stand, has an inspector, and handles the messages of
    `wishes.py`."""

    COMMANDS: ClassVar = {Actions, Commands, Models, Conversations, Themes}
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
    focused_before: Widget | None = None  # when settings were opened

    @property
    def sessions(self) -> Sessions:
        return self.session.sessions

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    async def action_settings(self) -> None:
        """Open them beside the conversation, or close them."""
        if not await self.close_settings():
            self.focused_before = self.focused
            panel = SettingsPanel(self.session.chat)
            await self.side.mount(panel)
            self.set_focus(panel.first)

    async def close_settings(self) -> bool:
        """Whether they were open."""
        panels = self.query(SettingsPanel)
        is_open = bool(panels)
        await panels.remove()
        if is_open and self.focused_before and self.focused_before.is_attached:
            self.set_focus(self.focused_before)
        return is_open

    def action_models(self) -> None:
        self.app.push_screen(ModelsScreen(self.machine), self._tell(ModelChosen))

    def action_sessions(self) -> None:
        self.app.push_screen(SessionsScreen(self.sessions), self._tell(SessionChosen))

    def _tell(self, wish: Callable[[str], Message]) -> Callable[[str | None], None]:
        def chosen(name: str | None) -> None:
            if name is not None:
                self.post_message(wish(name))

        return chosen
