"""An exported GGUF file is rounded as by ggml, and llama.cpp runs it with our results."""

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import localllm
from localllm.arch.config import Llama3Scaling, ModelConfig, PerFrequencyScaling
from localllm.arch.describe import parse_config
from localllm.checkpoint.header import read_header
from localllm.errors import DamagedModel, UnsupportedModel, UsageError
from localllm.quantize.gguf_file import locked_draft, tokenizer_keys, write_gguf
from localllm.request import SamplingParams
from localllm.text.backends import SPACE
from localllm.text.pretokenizers import GPT2, PRE_TOKENIZERS
from localllm.text.tokenizer import Tokenizer
from localllm.text.vocabulary import TokenizerDescription
from tests.models.families import FAMILIES
from tests.shared import shared
from tests.text.vocabularies import random_texts
from tests.tiny import make_checkpoint, make_engine

PROMPT = "Once upon a time, there was a little girl named"
WINDOW = 400  # tokens of each stretch whose perplexity is taken
IDS = list(range(3, 40))
EXPORTED = [name for name in FAMILIES if name.startswith(("Llama", "Qwen3", "Qwen2", "Mistral"))]
REFUSED = ("some windows", "Mistral, window", "Qwen3-MoE", "Qwen3-Next", "Qwen3.5")


def with_tokenizer(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared("stories260K") / name, folder)
    return folder


def stored(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read the tensors, dequantized by the `gguf` package."""
    tensors = gguf.GGUFReader(file).tensors
    return {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors}


@pytest.mark.parametrize("name", [n for n in EXPORTED if not any(word in n for word in REFUSED)])
def test_the_file_describes_the_same_model(name: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[name]
    make_checkpoint(tmp_path / "model", kind, **{"vocab_size": 512, **changes})
    header = read_header(with_tokenizer(tmp_path / "model"))
    file = write_gguf(header, "q8_0", tmp_path / "model.gguf")
    ours, theirs = described(header.config), described(read_header(file).config)
    assert theirs == ours
    exact = make_engine(tmp_path / "model").logits(IDS)
    assert (make_engine(file).logits(IDS) - exact).abs().mean() < exact.abs().mean() / 10


def described(config: Any) -> ModelConfig:
    """Parse the configuration as GGUF stores it: with float32 numbers, and without fields that it lacks."""
    found = parse_config(config)
    return dataclasses.replace(
        found,
        eos_ids=(),
        norm_eps=float(np.float32(found.norm_eps)),
        layers=tuple(
            # type: ignore.
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, rope=rounded(layer.mixer.rope)))
            for layer in found.layers
        ),
    )


def rounded(rope: Any) -> Any:
    if isinstance(rope.scaling, Llama3Scaling | PerFrequencyScaling):
        return dataclasses.replace(rope, scaling=None)  # their logits are compared
    return rope


@pytest.mark.parametrize("name", [n for n in EXPORTED if any(word in n for word in REFUSED)])
def test_a_model_without_gguf_keys_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[name]
    make_checkpoint(tmp_path / "model", kind, **changes)
    with pytest.raises(UnsupportedModel, match="cannot be written as GGUF"):
        write_gguf(read_header(tmp_path / "model"), "q8_0", tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("type", ["q4_0", "q8_0"])
def test_matrices_are_rounded_as_the_package_rounds_them(type: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "Qwen3", hidden_size=64, intermediate_size=96, vocab_size=512)
    header = read_header(with_tokenizer(tmp_path / "model"))
    found = stored(write_gguf(header, type, tmp_path / "model.gguf"))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    kind = gguf.GGMLQuantizationType[type.upper()]
    for theirs, ours, packed in (
        ("blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", kind),
        ("token_embd.weight", "model.embed_tokens.weight", kind),
        ("output.weight", "lm_head.weight", gguf.GGMLQuantizationType.Q8_0),
    ):
        weight = tensors[ours].numpy()
        np.testing.assert_array_equal(found[theirs], gguf.dequantize(gguf.quantize(weight, packed), packed))
    norm = tensors["model.layers.2.self_attn.q_norm.weight"].numpy()
    np.testing.assert_array_equal(found["blk.2.attn_q_norm.weight"], norm)


def test_rows_that_are_no_whole_blocks_keep_every_bit(tmp_path: Path) -> None:
    file = write_gguf(read_header(shared("stories260K")), "q4_0", tmp_path / "model.gguf")
    down = load_file(shared("stories260K") / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert down.shape[1] % 32
    np.testing.assert_array_equal(stored(file)["blk.0.ffn_down.weight"], down.numpy())


def test_chat_templates_ends_and_the_licence_come_along(tmp_path: Path) -> None:
    shutil.copytree(shared("TinyStories-656K-hf"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    file = write_gguf(read_header(tmp_path / "model"), "q8_0", tmp_path / "model.gguf")
    with localllm.load(tmp_path / "model") as source, localllm.load(file) as exported:
        assert exported.tokenizer.chat_templates == source.tokenizer.chat_templates
        assert exported.tokenizer.encode(PROMPT) == source.tokenizer.encode(PROMPT)
        assert exported.eos_ids >= set(source.tokenizer.eos_ids)
    metadata = read_header(file).gguf
    assert metadata and metadata["general.license"] == "apache-2.0"


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
PREPENDED = {"type": "Prepend", "prepend": SPACE}
REPLACED = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": False}
DIGITS = {"type": "Digits", "individual_digits": True}
DISTINCT = {(found.patterns, found.ignore_merges): name for name, found in PRE_TOKENIZERS.items()}


def split(pattern: str, **changes: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | changes


@cache
def byte_level_json() -> str:
    """BPE over bytes, as a `tokenizer.json`."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = backend.pre_tokenizer.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=["<s>"], initial_alphabet=letters)
    backend.train_from_iterator(random_texts(0, 300) * 2, trainer)
    return backend.to_str()


def tokenizer_of(content: str, **changes: Any) -> Tokenizer:
    """The tokenizer of such a file with other parts."""
    parts = {
        name: {"type": "Sequence", f"{name}s".replace("_", ""): part} if isinstance(part, tuple) else part
        for name, part in changes.items()
    }
    backend = tokenizers.Tokenizer.from_str(json.dumps(json.loads(content) | parts))
    special = {"bos_token": "<s>", "unk_token": "<unk>"}
    return Tokenizer(TokenizerDescription(Path("model"), backend, special, {}, ()))


def read_back(tokenizer: Tokenizer) -> tuple[dict[str, Any], Tokenizer]:
    """The keys of a file with one more row than tokens, and its tokenizer."""
    keys = tokenizer_keys(tokenizer, tokenizer.vocab_size + 1, "model")
    metadata = {f"tokenizer.{key}": value for key, value in keys.items()}
    return keys, Tokenizer.from_gguf(metadata, Path("model.gguf"))


@pytest.mark.parametrize("name", DISTINCT.values())
def test_byte_level_tokens_read_back_alike_whatever_the_pre_tokenizer(name: str) -> None:
    found = PRE_TOKENIZERS[name]
    steps = [DIGITS if pattern == r"\p{N}" else split(pattern) for pattern in found.patterns]
    steps[-1:] = [BYTE_LEVEL | {"use_regex": True}] if found.patterns[-1] == GPT2 else [steps[-1], BYTE_LEVEL]
    model = json.loads(byte_level_json())["model"] | {"ignore_merges": found.ignore_merges}
    source = tokenizer_of(byte_level_json(), model=model, pre_tokenizer=tuple(steps))
    keys, exported = read_back(source)
    named = PRE_TOKENIZERS[keys["ggml.pre"]]
    assert (named.patterns, named.ignore_merges) == (found.patterns, found.ignore_merges)
    assert keys["ggml.model"] == "gpt2" and keys["ggml.tokens"][-1] == f"[PAD{source.vocab_size}]"
    for text in random_texts(3, 40):
        assert exported.encode(text) == source.encode(text)


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer", "prefix"),
    [
        ((PREPENDED, REPLACED), None, True),
        (REPLACED, None, False),
        (None, METASPACE, True),
        (None, METASPACE | {"prepend_scheme": "never"}, False),
    ],
)
def test_tokens_of_characters_read_back_alike_with_or_without_a_first_space(
    normalizer: Any, pre_tokenizer: Any, prefix: bool
) -> None:
    content = (shared("stories260K") / "tokenizer.json").read_text()
    source = tokenizer_of(content, normalizer=normalizer, pre_tokenizer=pre_tokenizer)
    keys, exported = read_back(source)
    assert (keys["ggml.model"], keys["ggml.add_space_prefix"]) == ("llama", prefix)
    at_begin = [] if pre_tokenizer and prefix else [" a", "▁"]  # Metaspace adds no second space there, GGUF does
    for text in (PROMPT, "two  spaces ", "é\n▁", *at_begin):
        assert exported.encode(text) == source.encode(text)


def test_a_token_without_a_row_is_left_out() -> None:
    source = tokenizer_of((shared("stories260K") / "tokenizer.json").read_text())
    keys = tokenizer_keys(source, source.vocab_size - 1, "model")
    assert keys["ggml.tokens"] == [source.token(i) for i in range(source.vocab_size - 1)]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<s>", 0.0], ["a", -1.0]]}}, "a Unigram model"),
        ({"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}}, "the pre-tokenizer ByteLevel"),
        ({"pre_tokenizer": (DIGITS | {"individual_digits": False}, BYTE_LEVEL)}, "the pre-tokenizer Digits"),
        ({"pre_tokenizer": (split(GPT2, behavior="Removed"), BYTE_LEVEL)}, "the pre-tokenizer Split"),
        ({"pre_tokenizer": (split("a+"), BYTE_LEVEL)}, "patterns that llama.cpp has no name for"),
        ({"normalizer": {"type": "Lowercase"}}, "the normalizer Lowercase"),
        ({"normalizer": {"type": "Lowercase"}, "pre_tokenizer": METASPACE}, "the step Lowercase"),
        ({"normalizer": PREPENDED, "pre_tokenizer": None}, f"spaces that are not represented as {SPACE}"),
    ],
)
def test_a_tokenizer_that_gguf_cannot_represent_is_refused(changes: dict[str, Any], fault: str) -> None:
    source = tokenizer_of(byte_level_json(), **changes)
    with pytest.raises(UnsupportedModel, match=f"tiny has {fault}, which GGUF cannot represent; leave out --to"):
        tokenizer_keys(source, source.vocab_size, "tiny")


def test_invalid_options_are_rejected_and_leave_nothing(tmp_path: Path) -> None:
    header, file = read_header(shared("stories260K")), tmp_path / "model.gguf"
    with pytest.raises(UsageError, match="'q5_k' is not a supported GGUF type"):
        write_gguf(header, "q5_k", file)
    with pytest.raises(UsageError, match=r"does not end in \.gguf"):
        write_gguf(header, "q8_0", tmp_path / "model")
    with pytest.raises(UsageError, match="is a GGUF file"):
        write_gguf(read_header(shared("stories260K-f32.gguf")), "q8_0", file)
    assert not list(tmp_path.iterdir())
    file.write_bytes(b"mine")
    with pytest.raises(UsageError, match="already exists"):
        write_gguf(header, "q8_0", file)
    assert file.read_bytes() == b"mine"
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(UsageError, match="exists and is not a file"):
        write_gguf(header, "q8_0", tmp_path / "folder.gguf", force=True)


def test_a_weight_that_is_not_a_number_is_detected(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "Llama", vocab_size=512)
    model.model.layers[1].mlp.up_proj.weight.data[3, 3] = math.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(DamagedModel, match="up_proj"):
        write_gguf(read_header(with_tokenizer(tmp_path / "model")), "q8_0", tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(read_header(shared("stories260K")), "q8_0", tmp_path / "model.gguf", interrupt)
    assert not list(tmp_path.iterdir())


def test_two_runs_cannot_write_the_same_file(tmp_path: Path) -> None:
    header, file = read_header(shared("stories260K")), tmp_path / "model.gguf"
    with locked_draft(file) as draft:
        with pytest.raises(UsageError, match="another process is writing"):
            write_gguf(header, "q8_0", file)
        draft.write_bytes(b"mine")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert file.read_bytes() == b"mine"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "stories.gguf"
    return write_gguf(read_header(shared("stories260K")), "q8_0", file)


@pytest.fixture(scope="module")
def theirs(exported: Path) -> Iterator[Any]:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    llama = llama_cpp.Llama(str(exported), n_ctx=512, logits_all=True, verbose=False, n_threads=1)
    yield llama
    llama.close()


def test_llama_cpp_continues_with_the_same_tokens(exported: Path, theirs: Any) -> None:
    with localllm.load(exported) as llm:
        ours = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=100))
    assert theirs.tokenize(PROMPT.encode()) == list(ours.prompt_ids)
    tokens = theirs.generate(ours.prompt_ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    assert [next(tokens) for _ in ours.token_ids] == list(ours.token_ids)


def test_the_perplexity_of_llama_cpp_is_within_a_percent_of_ours(exported: Path, theirs: Any) -> None:
    text = shared("text/tiny.txt").read_text(encoding="utf-8")[:5000]
    with localllm.load(exported) as llm:
        ids = llm.tokenizer.encode(text)
        stretches = [[ids[0], *ids[at : at + WINDOW]] for at in range(1, len(ids) - WINDOW, WINDOW)]
        found = [(llm.logits(stretch), evaluated(theirs, stretch), stretch) for stretch in stretches]
    assert len(stretches) >= 4
    ours, others = (math.exp(sum(loss(each[i], each[2]) for each in found) / len(found)) for i in (0, 1))
    assert abs(others / ours - 1) < 0.01


def evaluated(llama: Any, ids: list[int]) -> torch.Tensor:
    llama.reset()
    llama.eval(ids)
    return torch.tensor(np.array(llama.scores[: len(ids)]), dtype=torch.float32)


def loss(logits: torch.Tensor, ids: list[int]) -> float:
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
