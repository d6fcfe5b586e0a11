"""How long a key takes to be seen in the chat app while an answer streams: from the write of the key into the
terminal until the program has written the changed prompt to it.

The real app runs in a pseudo-terminal (what a terminal takes to draw is not in it), and an answer without an end
comes meanwhile: paragraphs, lists, code and a table from a model that plays 200 tokens a second, with all that an
engine reports of its steps; or the model in the box tells one story after the other, as fast as its engine does in
the app's process. How many tokens came a second is told beside the times. Each key is another letter, which stands
nowhere else on the screen, so the first time that it is written is its echo. A long conversation is one of 2,000
messages and 1 MB.

`python bench/tui.py [--scene NAME] [--keys N] [--save]` prints one JSON line; all scenes take eight minutes.
"""

import argparse
import os
import pty
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
APP = str(Path(__file__).with_name("tui_app.py"))
LETTERS = [
    chr(code) for code in (*range(0x391, 0x3CA), *range(0x410, 0x450), *range(0x531, 0x557)) if code != 0x3A2
]
ESCAPE, CTRL_C, ENTER, TAB, BACK_TAB, INSPECTOR = "\x1b", "\x03", "\r", "\t", "\x1b[Z", "\x1bOR"
PAGE_UP, PAGE_DOWN = "\x1b[5~", "\x1b[6~"
QUESTION = "Tell me a story"
TAKE_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"
GAPS_S = (0.041, 0.071, 0.113)  # between keys: no multiple of a frame
SMALL, LARGE = (24, 80), (50, 160)


@dataclass(frozen=True)
class Scene:
    model: str = "played"
    turns: int = 0  # that the conversation has already
    size: tuple[int, int] = SMALL
    view: str = ""  # of the inspector, by its key; "" while it is closed


SCENES = {
    "played": Scene(),
    "demo": Scene("demo"),
    "long": Scene(turns=1000),
    "large": Scene("demo", size=LARGE),
    "inspected": Scene(view="1"),
    "inspected demo": Scene("demo", size=LARGE, view="2"),
}


class Terminal:
    def __init__(self, words: list[str], size: tuple[int, int]):
        self.fd, inner = pty.openpty()
        termios.tcsetwinsize(self.fd, size)
        command = [sys.executable, "-c", TAKE_TERMINAL, sys.executable, APP, *words]
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment)
        os.close(inner)

    def until(self, expected: str, seconds: float = 10.0) -> float:
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

    def settles(self, quiet: float = 0.25) -> tuple[float, float]:
        """Seconds from now until the program writes anything, and until it has written all: nothing more comes
        for `quiet` seconds."""
        start = time.perf_counter()
        first, last = None, start
        while select.select([self.fd], [], [], quiet if first else 10)[0]:
            os.read(self.fd, 1 << 16)
            last = time.perf_counter()
            first = first or last
        return (first or last) - start, last - start

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def press(self, *keys: str) -> None:
        for key in keys:
            self.type(key)
            self.drain(0.2)

    def resize(self, size: tuple[int, int]) -> None:
        termios.tcsetwinsize(self.fd, size)
        self.process.send_signal(signal.SIGWINCH)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


def in_ms(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {f"p{part}": ordered[min(len(ordered) - 1, round(len(ordered) * part / 100))] for part in (95, 99)}
    return {
        name: round(1e3 * value, 1)
        for name, value in ({"median": statistics.median(ordered)} | at | {"max": ordered[-1]}).items()
    }


def type_letters(
    terminal: Terminal, keys: int, before: Callable[[], None], after: Callable[[], None]
) -> dict[str, float]:
    """before and after: what is done around each time that all letters are typed."""
    taken = list[float]()
    while len(taken) < keys:
        before()
        for letter in LETTERS[: keys - len(taken)]:
            terminal.type(letter)
            taken.append(terminal.until(letter))
            terminal.drain(GAPS_S[len(taken) % len(GAPS_S)])
        after()
    return in_ms(taken)


def look_around(terminal: Terminal) -> dict[str, object]:
    """Times until something is drawn, and until all is, of a conversation at rest."""
    found = dict[str, object]()
    for name, keys, times in (("page_up", PAGE_UP, 40), ("page_down", PAGE_DOWN, 40)):
        taken = [pressed(terminal, keys) for _ in range(times)]
        found[f"{name}_ms"] = in_ms([first for first, _ in taken])
        found[f"{name}_whole_ms"] = in_ms([whole for _, whole in taken])
    resized = list[tuple[float, float]]()
    for size in (LARGE, SMALL) * 5:
        terminal.resize(size)
        resized.append(terminal.settles())
    return found | {
        "resize_ms": in_ms([first for first, _ in resized]),
        "resize_whole_ms": in_ms([whole for _, whole in resized]),
    }


def pressed(terminal: Terminal, keys: str) -> tuple[float, float]:
    terminal.type(keys)
    return terminal.settles()


def measure(scene: Scene, keys: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as home:
        start = time.perf_counter()
        terminal = Terminal([scene.model, str(scene.turns), home], scene.size)
        try:
            terminal.until("Say something", 60)
            found: dict[str, object] = {"opened_s": round(time.perf_counter() - start, 2)}
            terminal.settles()
            if scene.turns:
                found |= look_around(terminal)
            if not scene.view:
                found["idle_ms"] = type_letters(
                    terminal, len(LETTERS), lambda: None, lambda: terminal.press(CTRL_C)
                )
            else:
                for key in (INSPECTOR, BACK_TAB, scene.view, TAB):
                    terminal.press(key)

            def ask() -> None:
                terminal.press(QUESTION, ENTER)
                terminal.drain(1.0)

            found["streaming_ms"] = type_letters(terminal, keys, ask, lambda: terminal.press(ESCAPE, CTRL_C))
        finally:
            terminal.close()
        tokens, seconds = 0, 0.0
        for line in (Path(home) / "came").read_text().splitlines():
            tokens, seconds = tokens + int(line.split()[0]), seconds + float(line.split()[1])
    return found | {"tokens_per_s": round(tokens / seconds, 1)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--scene", choices=SCENES, action="append", help="instead of all")
    options.add_argument("--keys", type=int, default=300, help="of each scene")
    options.add_argument("--save", action="store_true", help="append the result to bench/results/tui.jsonl")
    chosen = options.parse_args()
    result: dict[str, object] = {"keys": chosen.keys, "load_average_before": os.getloadavg()[0]}
    for name in chosen.scene or SCENES:
        result[name] = measure(SCENES[name], chosen.keys)
        print(name, result[name], file=sys.stderr)
    result["load_average_after"] = os.getloadavg()[0]
    from bench.report import finish

    finish("tui", result, chosen.save)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
