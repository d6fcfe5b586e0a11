"""Snapshots of the chat at the smallest and at a large size."""

import asyncio

import pytest

from localllm.tui.metrics_strip import MetricsStrip
from tests.tui.scripted import ScriptedModel, app_with, saying

ANSWER = """## Two ways

Both are *stable*, see [the guide](https://docs.python.org/3/howto/sorting.html):

1. `list.sort()` sorts in place, and gives nothing back, so that nobody takes the one for the other
2. `sorted(words)` gives a new list

```python
def by_length(words: list[str]) -> list[str]:
    return sorted(words, key=len)
```

| way | new list |
|---|---|
| `sort` | no |
| `sorted` | **yes** |
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=str)
def test_an_answer(snap_compare, tmp_path, monkeypatch, size):
    monkeypatch.setattr(MetricsStrip, "follow", lambda strip, came: None)  # whose numbers are of this machine
    monkeypatch.setattr(MetricsStrip, "begin", lambda strip, began: None)
    app = app_with(ScriptedModel(saying(ANSWER, thoughts="They want to sort.")), tmp_path)

    async def talk(pilot):
        while not (hasattr(app.screen, "prompt") and app.focused):
            await pilot.pause(0.01)
        for question in ("How do I sort?", "/regenerate"):
            app.screen.prompt.text = question
            await pilot.press("enter")
            await pilot.pause()
            async with asyncio.timeout(20):
                while app.screen.answer_thread:
                    await pilot.pause(0.01)
        await pilot.press("tab", "y")
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=size, run_before=talk)
