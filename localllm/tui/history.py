"""What was written before, in the file of the plain line editor, whose format is that of prompt_toolkit: a comment
with the time, then each line of a message after a plus sign. That library would take 0.1 s to import.
"""

import os
from datetime import datetime
from pathlib import Path

MAX_READ_BYTES = 2**20  # from the end of the file: thousands of messages


class PromptHistory:
    """`entries` are the messages, oldest first: those of the file when they are first wanted, and those since."""

    def __init__(self, file: Path):
        self.file = file
        self.cached_entries: list[str] | None = None

    @property
    def entries(self) -> list[str]:
        if self.cached_entries is None:
            self.cached_entries = read_history(self.file)
        return self.cached_entries

    def add(self, text: str) -> None:
        """Unless it is the same as the last one. Raises OSError where the file cannot be written."""
        if self.entries[-1:] == [text]:
            return
        self.entries.append(text)
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = "".join(f"+{line}\n" for line in text.split("\n"))
        entry = f"\n# {datetime.now()}\n{lines}".encode(errors="replace")
        # In one piece: others may append to it at the same time.
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, entry)
        finally:
            os.close(descriptor)

    def search(self, words: str) -> list[str]:
        """Messages that have every word, newest first, each once."""
        wanted = words.lower().split()
        return [text for text in dict.fromkeys(reversed(self.entries)) if all(w in text.lower() for w in wanted)]


def read_history(file: Path) -> list[str]:
    """Oldest first; nothing where there is no file that can be read."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, os.fstat(opened.fileno()).st_size - MAX_READ_BYTES))
            content = opened.read(MAX_READ_BYTES)
    except OSError:
        return []
    if len(content) == MAX_READ_BYTES:  # the first is cut
        content = content[content.find(b"\n#") + 1 :]
    entries: list[str] = []
    lines: list[str] = []
    for line in [*content.decode(errors="replace").split("\n"), ""]:
        if line.startswith("+"):
            lines.append(line[1:])
        elif lines:
            entries.append("\n".join(lines))
            lines = []
    return entries
