"""How long a key takes to be seen in the chat app while an answer streams: from the write of the key into the
terminal until the program has written the changed prompt to it.

The real app runs in a pseudo-terminal of 80x24 (what a terminal takes to draw is not in it), and an answer of
Markdown comes meanwhile: paragraphs, lists, code and a table, by a model that plays so many tokens a second, or by
the model in the box. Each key is another letter, which stands nowhere else on the screen, so the first time that
it is written is its echo. `--turns` loads a conversation before: 1,000 turns are 2,000 messages and 1 MB.

`python bench/tui.py [--rate N] [--turns N] [--model demo] [--keys N] [--save]` prints one JSON line.
"""

import argparse
import itertools
import os
import pty
import select
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PARAGRAPH = "Sorting is *stable* when equals keep their order, which `sorted` promises and **many** rely on. "
ANSWER = (
    "## A part\n\n" + PARAGRAPH * 3 + "\n\n"
    "- an item with `code` and some words that go on beyond the end of a line of eighty columns, as they do\n"
    * 12
    + "\n```python\n"
    + "def key(word: str) -> int:\n    return len(word)  # the shortest first\n\n\n" * 10
    + "```\n\n| way | new |\n|---|---|\n"
    + "| `sort` | no |\n" * 6
    + "\n"
)
LETTERS = [
    chr(code) for code in (*range(0x391, 0x3CA), *range(0x410, 0x450), *range(0x531, 0x557)) if code != 0x3A2
]
ESCAPE, CTRL_C = "\x1b", "\x03"
TAKE_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
GAPS_S = (0.071, 0.113, 0.187)  # between keys: no multiple of a frame


def show(rate: float, turns: int, model: str | None) -> None:
    """The app, in the process that has the terminal."""
    from localllm.conversation.chat import Chat
    from localllm.conversation.session import Session
    from localllm.conversation.turn import Turn
    from localllm.tui.app import ChatApp
    from tests.tui.scripted import Played, ScriptedMachine, ScriptedModel, saying

    def paced():
        due = time.perf_counter()
        for step in itertools.cycle(saying(ANSWER)[:-1]):
            due += 1 / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            yield step

    class Playing(ScriptedModel):
        def stream(self, prompt, params=None, tools=None, template_arguments=None, *, inspect=None):
            return Played(paced())

    def begin(loaded):
        chat = Chat(loaded)
        for number in range(turns):
            turn = Turn(f"question {number}", chat.at, PARAGRAPH * 5 + ANSWER[400:900], model=loaded.name)
            chat.at.children.append(turn)
            chat.at.chosen = turn
            chat.at = turn
        return Session(loaded, chat, Path(tempfile.mkdtemp()) / "chats", keeps=False)

    if model:
        import localllm

        loaded = localllm.load(model)
    else:
        loaded = Playing()
    machine: Any = ScriptedMachine(loaded)
    ChatApp(machine, loaded.name, begin, Path(tempfile.mkdtemp())).run()


class Terminal:
    def __init__(self, words: list[str]):
        self.fd, inner = pty.openpty()
        termios.tcsetwinsize(self.fd, (24, 80))
        command = [sys.executable, "-c", TAKE_TERMINAL, sys.executable, __file__, "--show", *words]
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment)
        os.close(inner)

    def until(self, expected: str, seconds: float) -> float:
        """Seconds from now until the program writes this."""
        start = time.perf_counter()
        wanted, seen = expected.encode(), b""
        while (left := start + seconds - time.perf_counter()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                seen = seen[-16:] + os.read(self.fd, 1 << 16)
                if wanted in seen:
                    return time.perf_counter() - start
        raise TimeoutError(f"{expected!r} was not shown within {seconds} s")

    def drain(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                os.read(self.fd, 1 << 16)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())


def in_ms(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {f"p{part}": ordered[min(len(ordered) - 1, round(len(ordered) * part / 100))] for part in (95, 99)}
    return {
        name: round(1e3 * value, 1)
        for name, value in ({"median": statistics.median(ordered)} | at | {"max": ordered[-1]}).items()
    }


def measure(words: list[str], keys: int, question: str) -> dict[str, object]:
    start = time.perf_counter()
    terminal = Terminal(words)
    try:
        terminal.until("Say something", 60)
        opened = time.perf_counter() - start
        quiet, busy = list[float](), list[float]()
        for during, taken in ((False, quiet), (True, busy)):
            terminal.drain(0.5)
            for number in range(keys):
                letter = LETTERS[number % len(LETTERS)]
                if number % len(LETTERS) == 0:
                    terminal.type(ESCAPE)  # stops the answer before
                    terminal.drain(0.3)
                    if number or during:
                        terminal.type(CTRL_C)  # clears the line
                    terminal.drain(0.3)
                    if during:
                        terminal.type(question + "\r")
                        terminal.drain(1.0)
                terminal.type(letter)
                taken.append(terminal.until(letter, 10))
                terminal.drain(GAPS_S[number % len(GAPS_S)])
        return {"opened_s": round(opened, 2), "keys": keys, "idle_ms": in_ms(quiet), "streaming_ms": in_ms(busy)}
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rate", type=float, default=200.0, help="tokens a second of the model that plays")
    options.add_argument("--turns", type=int, default=0, help="that the conversation has already")
    options.add_argument("--model", help="a real one in place of the one that plays")
    options.add_argument("--keys", type=int, default=300)
    options.add_argument("--save", action="store_true", help="append the result to bench/results/tui.jsonl")
    options.add_argument("--show", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.show:
        show(chosen.rate, chosen.turns, chosen.model)
        return
    words = [
        f"--rate={chosen.rate}",
        f"--turns={chosen.turns}",
        *([f"--model={chosen.model}"] if chosen.model else []),
    ]
    asked = {"rate": None if chosen.model else chosen.rate, "turns": chosen.turns, "model": chosen.model}
    result = asked | measure(words, chosen.keys, "Tell me a story")
    from bench.report import finish

    finish("tui", result, chosen.save)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
