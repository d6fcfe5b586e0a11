"""A fake engine that answers by rules, so that tests of the command line need no weights.

`install()` replaces the real engine with it.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, ModuleType

from localllm.arch.cost import WeightBytes
from localllm.checkpoint.digest import FileDigest
from localllm.errors import ContextOverflow, DamagedModel, UsageError
from localllm.metrics import StepReads, Stopwatch
from localllm.plan.memory import MemoryPlan
from localllm.receipts.receipt import Model, Setup
from localllm.request import (
    EventType,
    FinishReason,
    GenerationEvent,
    Request,
    SamplingParams,
    TokenLogprob,
    ToolCall,
)

MODEL = Model(
    "tiny", "/models/tiny", None, {"F16": 24}, "ab", "sha256", (FileDigest("config.json", 9, "cd", None),)
)
SETUP = Setup(
    "cpu",
    "a processor",
    ("AVX2",),
    1,
    "float32",
    "float32",
    24,
    4096,
    512,
    16,
    "off",
    None,
    True,
    {"torch": "2.11"},
)


class FakeTokenizer:
    """Tokenizer with one token per character."""

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, ids, *, skip_special=True):
        return "".join(chr(token) for token in ids)


class ClosableEvents:
    """An answer that another thread may close, like those of the engine."""

    has_more = False

    def __init__(self, events):
        self.events = events
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.closed:
            self.events.close()
        return next(self.events)

    def close(self):
        self.closed = True
        with suppress(ValueError):  # it is being read, which notices
            self.events.close()


class FakeLLM:
    """Repeats the prompt. Some prompts cause other behaviour: see `stream`."""

    path = Path("fake")
    device = "cpu"
    dtype = "float32"
    kv_dtype = "float32"
    activation_bits = 24
    weight_bytes = 12_000_000
    memory = MemoryPlan(WeightBytes(10_000_000, 0, 0, 2_000_000), 4096, 256, 16_000, 0, 0, 3_000_000, 256, 4096)
    load_phases = MappingProxyType({"header": 0.25, "weights": 1.25})
    read_bytes_per_s = None
    without_graphs = ""
    layout_file, layout_note = None, ""
    blocks, block_tokens = 256, 16
    reads = StepReads(weights=12_000_000, per_token=2_048, kept_per_token=2_048, bandwidth=None)
    deterministic = True
    tokenizer = FakeTokenizer()
    default_params = SamplingParams(temperature=0.7, top_k=40)

    def __init__(self, name="demo", context=4096, has_chat_template=True):
        self.name = name
        self.context = self.max_context = context
        self.has_chat_template = has_chat_template
        self.asked = []  # (prompt, params) of every stream
        self.prepared = {}  # arguments of `prepare` by the request's id
        self.given = []  # (tools, template_arguments) of every stream
        self.cancelled = False
        self.closed = False

    def template_arguments(self, given, *, think=None, with_tools=False):
        unknown = given.keys() - {"enable_thinking", "depth"}
        if unknown or (not self.has_chat_template and (given or think is not None)):
            raise UsageError(f"the chat template does not read {', '.join(unknown)}")
        return given | ({} if think is None else {"enable_thinking": think})

    def prepare(self, chat):
        ids = tuple(map(ord, str(chat.prompt)))
        params, tools = chat.params or self.default_params, tuple(chat.tools or ())
        request = Request(ids, params, time.perf_counter(), tools=tools)
        self.prepared[request.id] = chat
        return request

    def submit(self, request):
        return self.answer(self.prepared[request.id])

    def provenance(self):
        return MODEL, SETUP

    def kernels(self):
        return {"linear": ("fake",)}

    def answer(self, chat):
        return ClosableEvents(self.events(chat.prompt, chat.params, chat.tools, chat.template_arguments))

    def events(self, prompt, params, tools, template_arguments):
        params = params or self.default_params
        self.asked.append((prompt, params))
        self.given.append((tools, template_arguments))
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        size = len(text) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
        if size >= self.context:
            raise ContextOverflow(size, self.context, "raise --context")
        if "fault" in text:
            raise DamagedModel("model.safetensors holds NaN", "download it again")
        if "bug" in text:
            raise ZeroDivisionError("division by zero")
        watch = Stopwatch(time.perf_counter(), load_s=1.5)
        watch.mark_scheduled()
        if begun := os.environ.get("FAKE_ENGINE_BEGUN"):  # a file, for who cannot see the answer
            Path(begun).touch()
        answer = self._answer(prompt, text)
        answer = answer[: params.max_tokens] if params.max_tokens is not None else answer
        delay = 0.02 if "slowly" in text else 0
        parts = []
        if "thinking" in text:
            parts += [GenerationEvent(1, word, kind=EventType.REASONING) for word in ("let me ", "see\x07")]
        if "calling" in text:
            call = ToolCall("weather", '{"city": "Köln"}', "id1")
            parts += [GenerationEvent(1, kind=EventType.TOOL_CALL, tool_call=call)]
        try:
            for part in parts:
                time.sleep(delay)
                yield part
            for position, character in enumerate(answer):
                time.sleep(delay)
                watch.record_token()
                last = position == len(answer) - 1
                cut = params.max_tokens is not None and position + 1 == params.max_tokens
                finish = (FinishReason.LENGTH if cut else FinishReason.STOP) if last else None
                yield GenerationEvent(
                    1,
                    text=character,
                    token_ids=(ord(character),),
                    logprobs=self._logprobs(character) if params.logprobs is not None else (),
                    prompt_logprobs=self._logprobs("p")
                    if params.prompt_logprobs is not None and not position
                    else (),
                    finish_reason=finish,
                    metrics=watch.finish(len(text), 0, 300_000_000) if last else None,
                    seed=params.seed if params.seed is not None else 7,
                )
        except GeneratorExit:
            self.cancelled = True
            raise

    def _answer(self, prompt, text):
        if "escape" in text:
            return "\x1b[31mred\x07 \x9b1m"
        if "lines" in text:
            return "a line\n" * 5000
        if "forever" in text:
            return "word " * 100_000
        if isinstance(prompt, str):
            return f"raw:{text}"
        system = "".join(f"[{m['content']}]" for m in prompt if m["role"] == "system")
        return f"{len(prompt)}{system}:{text}"

    def _logprobs(self, character):
        return (TokenLogprob(ord(character), -0.5, ((ord(character), -0.5), (0, float("-inf")))),)

    def measure_rates(self):
        pass

    def record(self, metrics, home, note):
        pass

    def close(self):
        self.closed = True


def install():
    """Replace `localllm.llm.loader`; models with names ending in `base` have no chat template."""
    module = ModuleType("localllm.llm.loader")
    module.loaded = []

    def load(
        model,
        *,
        device=None,
        dtype=None,
        kv_dtype=None,
        quant=None,
        context=None,
        settings=None,
        force=False,
        grammar=None,
        draft="auto",
        draft_model=None,
        deterministic=False,
        tensor_parallel=1,
        pipeline_parallel=None,
        expert_parallel=False,
        workers=(),
        token_file=None,
        prefill=0,
        on_phase=None,
        on_part=None,
    ):
        llm = FakeLLM(model.name, context or 4096, has_chat_template=not model.name.endswith("base"))
        module.loaded.append((llm, {"device": device, "dtype": dtype, "kv_dtype": kv_dtype, "context": context}))
        return llm

    module.load = load
    sys.modules["localllm.llm.loader"] = module
    return module
