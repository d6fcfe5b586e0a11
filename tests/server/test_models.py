"""Loading and unloading of models, with real models and loads that tests can block."""

import asyncio
import gc
import math
import shutil
import threading
import weakref
from pathlib import Path

import pytest

import localllm
from localllm.errors import Busy, DamagedModel, DoesNotFit, ModelNotFound, UsageError
from localllm.hub.local_names import set_alias
from localllm.llm import garbage
from localllm.plan import step_times
from localllm.server import models as models_module
from localllm.server.models import ModelPool
from tests.shared import shared

STORIES = str(shared("stories260K"))


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path))


class ControlledLoads:
    """Loads real models, counts them, and delays selected ones."""

    def __init__(self):
        self.begun, self.gates, self.faults = [], {}, []

    def hold_up(self, source):
        self.gates[source] = threading.Event()
        return self.gates[source]

    def __call__(self, ref, context):
        self.begun.append(ref.name)
        if gate := self.gates.get(ref.name):
            assert gate.wait(20)
        if self.faults:
            raise self.faults.pop(0)
        return localllm.load(ref, context=context or 256)


def models_of(loads, **options):
    return ModelPool(loads, {"stories": STORIES}, **options)


def in_loop(scenario, loads=None, **options):
    """Run the scenario with a server's model pool, and release all delayed loads at the end."""
    loads = loads or ControlledLoads()

    async def run():
        models = models_of(loads, **options)
        try:
            await asyncio.wait_for(scenario(models, loads), 60)
        finally:
            await models.close()

    asyncio.run(run())


def whats(models):
    return [(event.what, event.model, event.why) for event in models.events]


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def test_all_names_of_a_model_share_one_engine():
    async def scenario(models, loads):
        set_alias("mine", "demo")
        with await models.lease("demo") as one, await models.lease("mine") as other:
            assert one.llm is other.llm
            assert (one.name, other.name, one.loaded.users) == ("demo", "mine", 2)
        assert loads.begun == ["demo"]

    in_loop(scenario)


def test_concurrent_requests_share_one_load():
    async def scenario(models, loads):
        gate = loads.hold_up("demo")
        tasks = [asyncio.create_task(models.lease("demo")) for _ in range(5)]
        await until(lambda: loads.begun)
        gate.set()
        leases = await asyncio.gather(*tasks)
        assert loads.begun == ["demo"]
        assert leases[0].loaded.users == 5
        for lease in leases:
            lease.release()
            lease.release()
        assert leases[0].loaded.users == 0

    in_loop(scenario, keep_alive=0.0)


def test_a_loaded_model_answers_while_another_loads():
    async def scenario(models, loads):
        with await models.lease("stories"):
            pass
        gate = loads.hold_up("demo")
        slow = asyncio.create_task(models.lease("demo"))
        await until(lambda: "demo" in loads.begun)
        with await models.lease("stories") as lease:
            assert lease.llm.generate("Once", localllm.SamplingParams(max_tokens=2)).text
        assert not slow.done()
        gate.set()
        (await slow).release()

    in_loop(scenario)


def test_full_collections_skip_loaded_models_and_free_unloaded_ones(monkeypatch):
    monkeypatch.setattr(garbage, "gc", gc)  # as it is outside tests
    gc.unfreeze()

    async def scenario(models, loads):
        unfrozen = gc.get_freeze_count()
        with await models.lease("stories"):
            pass
        assert gc.get_freeze_count() > unfrozen + 100_000  # all modules, too
        with await models.lease("demo") as lease:
            decoder = weakref.ref(lease.llm.worker.engine.runner.model)
        del lease
        await models.unload(models.find("demo"), "a test")
        assert gc.get_freeze_count() > 100_000
        await asyncio.sleep(0)
        assert decoder() is None  # without a full collection

    in_loop(scenario)
    gc.collect()
    gc.freeze()  # as for other tests


def test_a_failed_load_is_reported_to_all_and_retried():
    async def scenario(models, loads):
        gate = loads.hold_up("demo")
        loads.faults.append(DamagedModel("it is damaged"))
        tasks = [asyncio.create_task(models.lease("demo")) for _ in range(3)]
        await until(lambda: loads.begun)
        gate.set()
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in told] == [DamagedModel] * 3
        assert whats(models) == [("failed", "demo", "it is damaged")]
        (await models.lease("demo")).release()

    in_loop(scenario)


def test_leaving_during_a_load_releases_the_lease_and_keeps_the_model():
    async def scenario(models, loads):
        gate = loads.hold_up("demo")
        task = asyncio.create_task(models.lease("demo"))
        await until(lambda: loads.begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await until(lambda: models.loaded)
        [loaded] = models.loaded.values()
        assert loaded.users == 0
        await until(lambda: not models.loaded)

    in_loop(scenario, keep_alive=0.2)


def test_leaving_at_the_end_of_a_load_releases_the_lease():
    async def scenario(models, loads):
        gate = loads.hold_up("demo")
        task = asyncio.create_task(models.lease("demo"))
        await until(lambda: loads.begun)
        loading = next(iter(models.pending_loads.values()))
        loading.task.add_done_callback(lambda _: task.cancel())  # before the waiter is told
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        [loaded] = models.loaded.values()
        assert loaded.users == 0

    in_loop(scenario)


def test_a_model_is_unloaded_after_its_keep_alive():
    async def scenario(models, loads):
        with await models.lease("demo", keep_alive=0.15):
            await asyncio.sleep(0.3)
            assert models.loaded, "it went while it was used"
        assert models.loaded
        await until(lambda: not models.loaded)
        with await models.lease("demo", keep_alive=math.inf):
            pass
        await asyncio.sleep(0.2)
        assert models.loaded
        with await models.lease("demo", keep_alive=0) as lease:
            with lease.renew():
                pass
            assert models.loaded
        await until(lambda: not models.loaded)
        assert [why for what, _, why in whats(models) if what == "unloaded"] == ["not used for 0 s", "requested"]

    in_loop(scenario)


def test_the_least_recently_used_idle_model_is_unloaded():
    async def scenario(models, loads):
        set_alias("third", str(shared("TinyStories-656K-hf").resolve()))
        (await models.lease("demo")).release()
        (await models.lease("stories")).release()
        (await models.lease("demo")).release()
        with await models.lease("third"):
            assert {loaded.name for loaded in models.loaded.values()} == {"demo", "third"}
            with await models.lease("demo"), pytest.raises(Busy) as error:
                await models.lease("stories")
            assert error.value.retry_after > 0
        assert ("unloaded", "stories", "room for third") in whats(models)

    in_loop(scenario, max_models=2)


def test_a_model_that_does_not_fit_evicts_idle_ones():
    async def scenario(models, loads):
        (await models.lease("stories")).release()
        loads.faults += [DoesNotFit("3 GB are missing")]
        with await models.lease("demo"):
            assert [loaded.name for loaded in models.loaded.values()] == ["demo"]
            loads.faults += [DoesNotFit("3 GB are missing")]
            with pytest.raises(Busy, match="3 GB are missing while other models are in use"):
                await models.lease("stories")
        loads.faults += [DoesNotFit("3 GB are missing")] * 2
        with pytest.raises(DoesNotFit):
            await models.lease("stories")
        assert not models.loaded

    in_loop(scenario)


def test_a_longer_context_evicts_idle_models():
    async def scenario(models, loads):
        (await models.lease("stories")).release()
        loaded = await models.lease("demo", context=128)
        resize, faults = loaded.llm.resize, [DoesNotFit("3 GB are missing")]

        def resize_once_there_is_room(context):
            if faults:
                raise faults.pop()
            resize(context)

        loaded.llm.resize = resize_once_there_is_room
        with loaded, await models.lease("demo", context=512) as wider:
            assert wider.llm.context == 512
            assert [one.name for one in models.loaded.values()] == ["demo"]
            faults.append(DoesNotFit("3 GB are missing"))
            with pytest.raises(DoesNotFit):  # there is no other model that would end
                await models.lease("demo", context=1024)
            assert wider.loaded.users == 2

    in_loop(scenario)


def test_models_kept_forever_are_evicted_last():
    async def scenario(models, loads):
        models.add_preloaded(localllm.load("demo", context=256), "demo")
        (await models.lease("stories")).release()
        loads.faults += [DoesNotFit("too large")]
        set_alias("third", str(shared("TinyStories-656K-hf").resolve()))
        (await models.lease("third")).release()
        assert {loaded.name for loaded in models.loaded.values()} == {"demo", "third"}
        with pytest.raises(UsageError, match="demo is the same model as demo; name it once"):
            models.add_preloaded(next(iter(models.loaded.values())).llm, "demo")

    in_loop(scenario)


def test_folders_with_one_name_are_served_together_under_names_that_a_person_gave(tmp_path):
    folder = tmp_path / "stories260K"
    folder.mkdir()
    for file in Path(STORIES).iterdir():
        shutil.copy(file, folder)
    set_alias("mine", str(folder))

    async def scenario(models, loads):
        models.add_preloaded(localllm.load(STORIES, context=256), STORIES)
        with pytest.raises(UsageError, match="two models are called stories260K; rename one"):
            models.add_preloaded(other := localllm.load(folder, context=256), str(folder))
        other.close()
        models.add_preloaded(localllm.load("mine", context=256), "mine")
        assert {loaded.name for loaded in models.loaded.values()} == {"stories260K", "mine"}
        for name in ("stories260K", "mine"):
            with await models.lease(name) as lease:
                assert lease.llm.name == name
        assert not loads.begun

    in_loop(scenario)


def test_a_stopped_model_is_unloaded_after_its_answers():
    async def scenario(models, loads):
        with pytest.raises(ModelNotFound, match="not loaded"):
            models.stop("demo")
        with await models.lease("demo"):
            assert models.stop("demo") == 1
            assert models.loaded
        await until(lambda: not models.loaded)
        (await models.lease("demo")).release()
        assert models.stop("demo") == 0
        assert not models.loaded

    in_loop(scenario)


def test_waiting_requests_are_told_when_the_server_ends():
    async def scenario(models, loads):
        gate = loads.hold_up("demo")
        task = asyncio.create_task(models.lease("demo"))
        await until(lambda: loads.begun)
        await models.close()
        with pytest.raises(Busy, match="shutting down"):
            await task
        with pytest.raises(Busy, match="shutting down"):
            await models.lease("stories")
        assert models.has_unfinished_load
        gate.set()
        await until(lambda: models.loaded)

    in_loop(scenario)


def test_unknown_paths_and_names_are_not_loaded():
    async def scenario(models, loads):
        for name in (STORIES, "../models", "/etc", "no-such", "a/b/c/d", "", "\x00", "x" * 5000):
            with pytest.raises(ModelNotFound):
                await models.lease(name)
        with pytest.raises(ModelNotFound, match="is a path; use one of the names"):
            await models.lease("../models")
        with pytest.raises(ModelNotFound, match=r"demoo; did you mean demo\? GET /v1/models lists the names"):
            await models.lease("demoo")
        assert not loads.begun

    in_loop(scenario)


def test_durations_of_steps_are_recorded_when_idle_and_at_the_end(tmp_path, monkeypatch):
    """After many new steps, once no request uses the model; the rest when it is unloaded."""
    monkeypatch.setattr(models_module, "STEPS_TO_RECORD", 20)
    params = localllm.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def recorded():
        return sum(len(steps) for steps in step_times.read(tmp_path / "steps.jsonl", pytest.fail).values())

    async def scenario(models, loads):
        with await models.lease("demo") as lease:
            await asyncio.to_thread(lease.llm.generate, "Once", params)
            assert recorded() == 0
        await until(lambda: recorded() >= 29)
        with await models.lease("demo") as lease:
            await asyncio.to_thread(
                lease.llm.generate, "Twice", localllm.SamplingParams(max_tokens=3, ignore_eos=True)
            )

    in_loop(scenario, record_steps=lambda llm: llm.record_steps(tmp_path, pytest.fail))
    assert recorded() >= 29 + 2
