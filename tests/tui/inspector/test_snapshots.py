"""Snapshots of the metrics strip and the inspector at a fixed time."""

import pytest

from tests.tui.inspector_app import Inspected
from tests.tui.scripted_events import story


@pytest.mark.quick_every(7)
@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["small", "large"])
@pytest.mark.parametrize(
    "keys", [(), ("2", "home", "right", "right", "right", "right"), ("3",)], ids=["timeline", "tokens", "blocks"]
)
def test_a_running_answer(snap_compare, size, keys) -> None:
    steps = 60 if size[0] == 80 else 200
    app = Inspected(list(story(steps))[:-1], ended=False)

    async def drawn(pilot) -> None:
        await pilot.press(*keys)
        await pilot.pause(0.3)

    assert snap_compare(app, terminal_size=size, run_before=drawn)


@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["small", "large"])
def test_a_prompt_that_is_being_read(snap_compare, size) -> None:
    app = Inspected(list(story(5, prompt=3000))[:7], ended=False)

    async def drawn(pilot) -> None:
        await pilot.pause(0.3)

    assert snap_compare(app, terminal_size=size, run_before=drawn)
