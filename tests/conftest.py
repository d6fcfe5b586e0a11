import atexit
import gc
import os
import signal
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.llm import garbage
from tests import WORKERS
from tests.interpreted import LAGGING_GPU, ON_GPU, SOFTWARE_GPU, TRITON, launch
from tests.on_gpu import OnDevice
from tests.software_gpu import software_gpu
from tests.torch_alone import no_instructions  # after `interpreted`, which decides how kernels are loaded

NEED_TRITON = [
    *("gpu", "lagging", "runtime/kernels/gpu", "runtime/test_model_loader.py", "runtime/test_gpu_sampler.py"),
    "runtime/test_compiled_on_gpu.py",
    *("runtime/test_cuda_graphs.py", "models/test_gpu_kernels.py", "plan/test_packed_weights.py"),
    *(
        "tools/test_kernel_docs.py",
        "tools/test_software_gpu.py",
        "tools/test_step_estimate.py",
        "tools/test_tune.py",
    ),
    "tools/ptx",
]
collect_ignore = [] if TRITON else NEED_TRITON
if TRITON:
    # The lagging device replaces torch.cuda.
    collect_ignore.append("lagging" if ON_GPU or LAGGING_GPU else "gpu")

TESTS = Path(__file__).parent
# Files whose tests take long, each in a process of its own, and have no fixtures in common.
SHARED_FILES = {"tests/tools/test_kernel_docs.py", "tests/tools/test_software_gpu.py"}
QUICK = pytest.StashKey[set[Path]]()  # files with a test that is not slow

# Otherwise each of a hundred child processes would compile all of localllm, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
torch.set_num_threads(1)  # the models are so small that a second thread costs more than it brings


def pytest_configure(config: pytest.Config) -> None:
    """Set how many examples Hypothesis draws: fewer where only quick tests run."""
    if hasattr(config, "workerinput"):
        WORKERS.add(os.getpid())
    if find_spec("hypothesis"):  # a machine that tests its GPU alone may not have it
        from hypothesis import HealthCheck, settings

        count = 15 if config.getoption("markexpr") == "not slow" else 100
        slow = [HealthCheck.too_slow]
        settings.register_profile("of a lane", max_examples=count, deadline=None, suppress_health_check=slow)
        settings.load_profile("of a lane")


@pytest.fixture(scope="session", autouse=True)
def signals_as_of_a_terminal() -> Iterator[None]:
    """Handle SIGINT and SIGHUP even if they are ignored at the start of the tests, as with nohup or in the
    background of a script, since child processes inherit ignored signals. A handler becomes the default in child
    processes, and a hangup still does not end the tests.
    """
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda number, frame: None}
    ignored = [number for number in wanted if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, wanted[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def imports_stay_frozen() -> Iterator[None]:
    """Keep localllm from unfreezing what `pytest_collection_finish` froze, and from full collections, which take
    up to half a second, each time that a model is loaded or unloaded.
    """
    with pytest.MonkeyPatch.context() as patch:
        young = SimpleNamespace(collect=lambda: gc.collect(1), freeze=lambda: None, unfreeze=lambda: None)
        patch.setattr(garbage, "gc", SimpleNamespace(**vars(gc) | vars(young)))
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Share the TLS contexts of HTTP clients, each of which would read all certificates of the system in 20 ms."""

    def shared(make: Callable[..., ssl.SSLContext]) -> Callable[..., ssl.SSLContext]:
        contexts: dict[object, ssl.SSLContext] = {}

        def context(*arguments: Any, **named: Any) -> ssl.SSLContext:
            environment = [os.environ.get(name) for name in ("SSL_CERT_FILE", "SSL_CERT_DIR")]
            key = (arguments, *named.items(), *environment)
            if key not in contexts:
                contexts[key] = make(*arguments, **named)
            return contexts[key]

        return context

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", shared(ssl.create_default_context))
        if find_spec("httpcore2"):  # a machine that tests its GPU alone may not have it
            import httpcore2

            patch.setattr(httpcore2, "default_ssl_context", shared(httpcore2.default_ssl_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def lagging_gpu() -> Iterator[None]:
    """Stand in for a GPU in all tests, if asked for."""
    if not LAGGING_GPU:
        yield
        return
    from tests.lagging.device import LaggingDevice

    with LaggingDevice():
        yield


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Run GPU kernels: on a GPU if there is one, otherwise under Triton's interpreter or on a software GPU."""
    if SOFTWARE_GPU:
        with software_gpu(SOFTWARE_GPU, request.node.nodeid):
            yield
    elif ON_GPU or LAGGING_GPU:
        with OnDevice(torch.device("cuda", 0)):
            yield
        torch.cuda.synchronize()  # so that a fault of its kernels is that of this test
    else:
        monkeypatch.setattr(launch, "takes_cpu", True)
        yield


@pytest.fixture
def torch_alone() -> Iterator[None]:
    with no_instructions():
        yield


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # hardly anything that is imported or collected becomes garbage
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before any are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases as slow by `quick_every`, and run files with slow tests first, so that no single worker runs one
    at the end while the others are idle.
    """
    seen = Counter[str]()
    for item in items:
        if one_of := item.get_closest_marker("quick_every"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % one_of.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    config.stash[QUICK] = {item.path for item in items if not item.get_closest_marker("slow")}
    if config.getoption("markexpr") != "not slow":  # then slow tests are run as well
        left_out = [item for item in items if item.get_closest_marker("part_of_slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)  # the plugin may be missing where GPUs are tested alone
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Share the tests of SHARED_FILES among the workers, and keep all others of a file together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if file in SHARED_FILES else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Exclude the millions of objects of imports and collection from garbage collection: they are never freed, and
    tests of memory collect garbage often.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)  # so that libraries find what they gave out when the interpreter ends


def pytest_report_header() -> str | None:
    if SOFTWARE_GPU:
        return f"kernels for GPUs run on a GPU made of software: SOFTWARE_GPU={SOFTWARE_GPU}"
    return None if TRITON else f"triton is not installed, left out: {', '.join(NEED_TRITON)}"


def pytest_addoption(parser: pytest.Parser) -> None:
    if not find_spec("pytest_timeout"):  # a machine that tests its GPU alone may not have it
        parser.addini("timeout", "of a test, where the plugin is installed")
    parser.addoption("--models-table", action="store_true", help="write the measurements to docs/models.md")
    parser.addoption("--screens", action="store_true", help="write the screens of tmux to docs/images")


# The fixtures below import what they need: the tests of GPUs run where neither the client of the Hub nor HTTP is.


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hugging Face cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(monkeypatch):
    """A local Hub, used without a login, with short timeouts."""
    from huggingface_hub import constants

    from localllm.hub import http
    from tests.hub.loopback import LoopbackHub

    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with LoopbackHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
        monkeypatch.setattr(http, "FIRST_WAIT_S", 0.01)
        monkeypatch.setattr(http, "MAX_WAIT_S", 0.05)
        http.close()
        yield hub
        http.close()
