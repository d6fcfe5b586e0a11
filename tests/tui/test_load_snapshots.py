"""Snapshots of the load screen and of the first choice of a model."""

from dataclasses import replace

import pytest

from localllm.errors import DoesNotFit
from localllm.hub.listing import Listing, RemoteFile
from localllm.hub.names import RepoName
from localllm.hub.pull import PullPlan
from localllm.tui.load_screen import LoadScreen
from localllm.tui.models_screen import FirstRunScreen
from tests.tui.host import OFFER, Clock, FakeMachine, Host, offer

MIB = 2**20
FILES = tuple(
    RemoteFile(path, size, f"{number:040}")
    for number, (path, size) in enumerate(
        {
            "config.json": 1_200,
            "tokenizer.json": 9_100_000,
            "model-00001-of-00003.safetensors": 1_000_000_000,
            "model-00002-of-00003.safetensors": 1_000_000_000,
            "a/\x1b[31mname [bold]of a stranger[/] that is longer than a line has room for.bin": 480_000_000,
        }.items()
    )
)
ORDER = PullPlan(Listing(RepoName("org/large"), "0" * 40, FILES), FILES, {file.digest: 0 for file in FILES})


def passes(clock, s):
    def wait(watch):
        clock.now += s

    return wait


def downloading(watch, clock):
    watch.about(OFFER)
    watch.phase("download")
    watch.begin(ORDER)
    for file in FILES:
        watch.advance(file, 1 if file.size > 10_000_000 else file.size)
    clock.now += 4
    for file, came in zip(FILES, (0, 0, 400_000_000, 96_000_000, 480_000_000 - 1), strict=True):
        if file.size < 10_000_000:
            watch.finish(file)
        else:
            watch.advance(file, came - 1 if came < 480_000_000 - 1 else came)


def loading(watch, clock):
    watch.about(OFFER)
    for name, s in {"download": 61, "import": 1.2, "header": 0.004, "tokenizer": 0.31, "device": 0.02}.items():
        watch.phase(name)
        if name == "download":
            watch.begin(ORDER)
            for file in FILES:
                watch.finish(file)
        clock.now += s
    watch.phase("weights")
    watch.part(1_600_000_000, 2_500_000_000)
    clock.now += 2


def refused(watch, clock):
    watch.about(
        replace(OFFER, fits=False, needs_bytes=17_100_000_000, free_bytes=9_700_000_000, tokens_per_s=None)
    )
    watch.phase("download")
    clock.now += 0.8
    raise DoesNotFit(
        "the weights of org/large need 16.1 GB in bfloat16, 9.70 GB are free",
        "--quant int4 takes 5.21 GB and fits",
    )


SIZES = pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["80x24", "160x50"])
OFFERS = [
    offer("demo", about="comes with the program: tells stories", parameters="5.14M", bytes=6_000_000, is_here=True,
          needs_bytes=13_700_000, tokens_per_s=None),
    offer("gemma3:1b", license="gemma", parameters="1B", bytes=2_000_000_000, tokens_per_s=7.3),
    offer("qwen3:4b-q4_k_m", recommended=True),
    offer("gemma4:e2b-q4_k_m", parameters="4.63B, 2.28B active", bytes=3_100_000_000, about="small"),
    offer("llama3.3:70b", license="llama3.3", parameters="70.6B", bytes=140_000_000_000, fits=False,
          needs_bytes=142_000_000_000, tokens_per_s=None, about="Llama 3.1 70B, trained on"),
    offer("mine\x1b]0;\x07[red]", license=None, parameters="-", bytes=None, fits=None, needs_bytes=None,
          free_bytes=None, tokens_per_s=None, about="a name that was given to it"),
]  # fmt: skip


def on_its_way(act):
    clock = Clock()

    def then(watch):
        act(watch, clock)

    machine = FakeMachine(then)
    return Host(lambda: LoadScreen(machine, "org/large", clock)), machine


@pytest.mark.quick_every(5)
@SIZES
@pytest.mark.parametrize("act", [downloading, loading, refused], ids=["download", "load", "refused"])
def test_a_model_on_its_way(snap_compare, act, size):
    app, machine = on_its_way(act)

    async def settled(pilot):
        for _ in range(500):
            await pilot.pause(0.01)
            if (machine.done.is_set() or pilot.app.screen.load_task.finished) and not pilot.app.screen.has_class(
                "unseen"
            ):
                break
        await pilot.pause(0.2)

    assert snap_compare(app, terminal_size=size, run_before=settled)


@SIZES
def test_the_choice_of_a_first_model(snap_compare, size):
    async def settled(pilot):
        for _ in range(500):
            await pilot.pause(0.01)
            if pilot.app.screen.shown_items:
                break
        await pilot.pause(0.2)

    assert snap_compare(
        Host(lambda: FirstRunScreen(FakeMachine(offers=OFFERS))), terminal_size=size, run_before=settled
    )
