"""A shell in a tmux window, driven by keys and read as text.

tmux runs in its own server, without user settings.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60
LOOK_S = 0.02
SHORT = "/tmp"  # a folder whose sockets have names of less than 108 bytes, which is all that Linux takes
STILL_S = 0.4  # without any change, thirty times what is drawn in a second
SHELL = "$"
COMMAND = f"""#!/bin/sh
exec {sys.executable} -m localllm "$@"
"""


class Window:
    """environment: additional variables of the shell; `localllm` is this tree's."""

    def __init__(self, folder: Path, environment: Mapping[str, str], columns: int, lines: int):
        self.place = Path(tempfile.mkdtemp(prefix="localllm-", dir=SHORT))
        self.tmux = [shutil.which("tmux") or "tmux", "-u", "-S", str(self.place / "tmux"), "-f", os.devnull]
        self.columns = columns
        command = folder / "bin" / "localllm"
        command.parent.mkdir()
        command.write_text(COMMAND)
        command.chmod(0o755)
        profile = folder / "profile"  # which root's shell minds, where it does not mind PS1 of the environment
        profile.write_text(f"PS1='{SHELL} '\n")
        here = folder / "here"
        here.mkdir()
        known = {
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "COLORTERM": "truecolor",
            "ENV": str(profile),
        }
        settings = ["set", "-g", "status", "off", ";", "set", "-g", "escape-time", "0", ";"]
        settings += ["set", "-g", "default-terminal", "tmux-256color", ";"]
        begin = ["new-session", "-d", "-x", str(columns), "-y", str(lines), "/bin/sh"]
        subprocess.run(
            [*self.tmux, "start-server", ";", *settings, *begin], env=known | environment, cwd=here, check=True
        )
        self.folder = here

    def do(self, *command: str) -> str:
        return subprocess.run([*self.tmux, *command], capture_output=True, text=True, check=True).stdout

    def type(self, text: str) -> None:
        self.do("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names: Enter, Escape, BTab, C-d, F3."""
        self.do("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self.do("resize-window", "-x", str(columns), "-y", str(lines))

    @property
    def screen(self) -> str:
        return self.do("capture-pane", "-p")

    @property
    def coloured(self) -> str:
        """Screen with ANSI colours."""
        return self.do("capture-pane", "-e", "-p")

    def is_set(self, flag: str) -> bool:
        """Value of one of tmux's flags, such as `alternate_on`."""
        return self.do("display-message", "-p", f"#{{{flag}}}").strip() == "1"

    def see(self, *texts: str) -> str:
        """Wait until all texts are on the screen; return it."""
        return self.until(lambda screen: all(text in screen for text in texts), " and ".join(map(repr, texts)))

    def see_shell(self) -> str:
        """Wait for the shell's prompt."""
        return self.until(lambda screen: f"\n{screen}".rstrip().endswith(f"\n{SHELL}"), "the shell's prompt")

    def until(self, condition: Callable[[str], object], wanted: str) -> str:
        end = time.monotonic() + PATIENCE_S
        while not condition(screen := self.screen):
            assert time.monotonic() < end, f"{wanted} did not come to stand here:\n{screen}"
            time.sleep(LOOK_S)
        return screen

    def still(self, *texts: str, when: Callable[[str], object] = bool) -> str:
        """Wait until all texts are on the screen and the screen stops changing; return it."""
        last, since = "", time.monotonic()

        def unmoved(screen: str) -> bool:
            nonlocal last, since
            if screen != last:
                last, since = screen, time.monotonic()
            seen = all(text in screen for text in texts) and when(screen)
            return seen and time.monotonic() - since > STILL_S

        return self.until(unmoved, f"{texts} and no movement")

    def close(self) -> None:
        self.do("kill-server")
        shutil.rmtree(self.place)  # with the socket, which tmux leaves behind
