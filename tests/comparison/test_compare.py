"""Two real models over one text, loaded together and one after the other; pairs that cannot be compared."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import localllm
from localllm import SamplingParams
from localllm.checkpoint.gguf.header import read_gguf
from localllm.comparison import compare
from localllm.comparison import subject as subjects
from localllm.comparison.compare import compare_models
from localllm.comparison.subject import Subject, find_subject, shared_vocab_size
from localllm.errors import DiskFull, DoesNotFit, UsageError
from localllm.hub.catalog import bundled_folder, catalog
from localllm.plan.fit import FreeMemory, LoadOptions, check_fit
from localllm.quality import measure
from localllm.quality.report import Quality
from localllm.quality.text import EVALUATION_NAME, EVALUATION_TEXT, split_into_windows
from localllm.settings import Settings
from localllm.text.tokenizer import Tokenizer
from tests.shared import shared
from tests.tiny import make_checkpoint

DEMO = bundled_folder(catalog()["demo"])
assert DEMO
VOCAB = 3072  # of the demo
Find = Callable[..., Subject]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "home", "cpu", "float32", threads=1)


@pytest.fixture
def find(settings: Settings) -> Find:
    return lambda folder, **choices: find_subject(str(folder), settings, options=LoadOptions(**choices))


def write_tiny(folder: Path, seed: int = 0, **changes: Any) -> Any:
    """A random model with the demo's tokenizer."""
    model = make_checkpoint(folder, "Llama", seed, vocab_size=VOCAB, **changes)
    shutil.copy(DEMO / "tokenizer.json", folder)
    return model


def without_speed(quality: Quality) -> Quality:
    sides = (
        dataclasses.replace(side, text_tokens_per_s=None, decode_tokens_per_s=None)
        for side in (quality.reference, quality.other)
    )
    return Quality(*sides, *list(vars(quality).values())[2:])


def test_a_model_against_itself(find: Find, settings: Settings) -> None:
    found = compare_models(find("demo"), find("demo"), settings, tokens=300)
    assert found.distance.divergence.max == 0
    assert found.distance.same_top.value == 1
    assert [error.relative for error in found.layers] == [0] * 6
    assert [(one.same, one.tokens, one.reference, one.other) for one in found.answers] == [(64, 64, "", "")]
    assert found.reference == dataclasses.replace(
        found.other,
        text_tokens_per_s=found.reference.text_tokens_per_s,
        decode_tokens_per_s=found.reference.decode_tokens_per_s,
    )
    assert (found.text.name, found.text.tokens, found.text.scored) == (EVALUATION_NAME, 300, 299)
    for rate in (found.reference.text_tokens_per_s, found.reference.decode_tokens_per_s):
        assert rate
        assert rate > 0


def test_perplexity_answers_and_layers_are_those_of_transformers(
    tmp_path: Path, find: Find, settings: Settings
) -> None:
    models = [write_tiny(tmp_path / name, seed) for seed, name in enumerate("ab")]
    a, b = find(tmp_path / "a"), find(tmp_path / "b")
    found = compare_models(a, b, settings, window=100, tokens=250)
    windows = split_into_windows(EVALUATION_TEXT.read_text(), a.tokenizer, window=100, max_tokens=250)
    assert [len(ids) for ids in windows.ids] == [100, 100, 50]
    losses = []
    for model in models:
        found_losses = [model(torch.tensor([ids]), labels=torch.tensor([ids])).loss for ids in windows.ids]
        losses.append(sum(loss * (len(ids) - 1) for loss, ids in zip(found_losses, windows.ids, strict=True)))
    nats = torch.tensor(losses) / windows.scored
    assert found.distance.reference_perplexity.value == pytest.approx(nats[0].exp().item(), rel=1e-4)
    assert found.distance.other_perplexity.value == pytest.approx(nats[1].exp().item(), rel=1e-4)
    assert found.distance.log_ratio.value == pytest.approx((nats[1] - nats[0]).item(), rel=1e-3)
    ids = torch.tensor([windows.ids[0]])
    ours, theirs = (model(ids, output_hidden_states=True).hidden_states for model in models)
    assert [error.name for error in found.layers] == ["layer 0", "layer 1", "layer 2"]
    for error, x, y in zip(found.layers[:-1], ours[1:-1], theirs[1:-1], strict=True):
        expected = ((y - x).norm(dim=-1) / x.norm(dim=-1)).mean().item()
        assert error.relative == pytest.approx(expected, rel=1e-3)
    for answers, prompt in zip(found.answers, (windows.ids[0][:32], windows.ids[1][:32]), strict=True):
        said = [greedy(model, prompt, answers.tokens) for model in models]
        same = next(i for i, (x, y) in enumerate(zip(*said, strict=True)) if x != y)
        assert (answers.tokens, answers.same) == (64, same)
        whole = a.tokenizer.decode(prompt) + answers.common
        assert whole + answers.reference == a.tokenizer.decode([*prompt, *said[0]])
        assert whole + answers.other == a.tokenizer.decode([*prompt, *said[1]])


def greedy(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    settings = transformers.GenerationConfig(max_new_tokens=count, do_sample=False)
    return model.generate(torch.tensor([prompt]), settings)[0, len(prompt) :].tolist()


@pytest.mark.slow
def test_sequential_comparison_gives_the_same_result(
    tmp_path: Path, find: Find, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = find("demo"), find("demo", dtype="bfloat16")
    together = compare_models(a, b, settings, tokens=200)
    each = [
        check_fit(one.header, FreeMemory("cpu", 2**40), LoadOptions(200, dtype=one.dtype), name="")
        for one in (a, b)
    ]
    most = max(fit.weights.total for fit in each)
    enough = most + max(fit.workspace for fit in each) + 3_000_000  # for one
    monkeypatch.setattr(subjects, "free_bytes", lambda place: enough)
    notes: list[str] = []
    apart = compare_models(a, b, settings, tokens=200, note=notes.append)
    assert without_speed(apart) == without_speed(together)
    assert apart.distance.divergence.max > 0
    assert len(notes) == 1
    assert f"one after the other, with 2.46 MB of logits in a temporary file in {settings.home}" in notes[0]
    assert list(settings.home.iterdir()) == []
    monkeypatch.setattr(subjects, "free_bytes", lambda place: most // 2)
    with pytest.raises(DoesNotFit, match="the weights of demo need"):
        compare_models(a, b, settings, tokens=200)
    monkeypatch.setattr(subjects, "free_bytes", lambda place: enough)
    monkeypatch.setattr(measure, "logits_bytes", lambda windows, vocab: 10**18)
    with pytest.raises(DiskFull, match="give fewer --tokens"):
        compare_models(a, b, settings, tokens=200)


def test_padding_of_a_table_is_no_token(
    tmp_path: Path, find: Find, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "LOGITS_PER_CHUNK", 40 * VOCAB)  # several pieces, which must be the same for both
    model = write_tiny(tmp_path / "a")
    write_tiny(tmp_path / "b")
    model.resize_token_embeddings(VOCAB + 56, mean_resizing=False)
    model.get_output_embeddings().weight[VOCAB:] = 9.0  # likelier than any other, if it counted
    model.save_pretrained(tmp_path / "padded")
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "padded")
    plain, padded = find(tmp_path / "a"), find(tmp_path / "padded")
    for pair in ((plain, padded), (padded, plain)):
        assert compare_models(*pair, settings, tokens=100).distance.divergence.max < 1e-9


def test_models_of_other_layers_have_no_layers_in_the_report(
    tmp_path: Path, find: Find, settings: Settings
) -> None:
    write_tiny(tmp_path / "a")
    write_tiny(tmp_path / "b", num_hidden_layers=2)
    found = compare_models(find(tmp_path / "a"), find(tmp_path / "b"), settings, tokens=100)
    assert found.layers == ()
    assert found.distance.divergence.mean.value > 0


def changed_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The demo with another tokenizer.json."""
    shutil.copytree(DEMO, folder)
    content = json.loads((DEMO / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return folder


def test_the_first_token_that_differs_is_named(tmp_path: Path, find: Find, settings: Settings) -> None:
    def swap(content: dict[str, Any]) -> None:
        vocab = content["model"]["vocab"]
        x, y = (next(token for token, index in vocab.items() if index == at) for at in (40, 41))
        vocab[x], vocab[y] = 41, 40

    other = find(changed_tokenizer(tmp_path / "swapped", swap))
    demo = find("demo")
    expected = f"token 40 is {demo.tokenizer.token(40)!r} in demo and {demo.tokenizer.token(41)!r} in swapped"
    with pytest.raises(UsageError) as refused:
        compare_models(demo, other, settings)
    assert refused.value.message == expected


def test_different_tokenizations_are_located(tmp_path: Path, find: Find, settings: Settings) -> None:
    def forget(content: dict[str, Any]) -> None:
        content["model"]["merges"] = content["model"]["merges"][:50]

    other = find(changed_tokenizer(tmp_path / "forgetful", forget))
    with pytest.raises(UsageError, match=r"from token \d on, demo reads the text as '.*' and forgetful as '"):
        compare_models(find("demo"), other, settings)


def test_a_token_that_one_model_lacks_is_named(tmp_path: Path, find: Find, settings: Settings) -> None:
    write_tiny(tmp_path / "whole")
    make_checkpoint(tmp_path / "small", "Llama", vocab_size=3000)
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "small")
    with pytest.raises(UsageError, match="small has 3000 tokens, but the other also has '"):
        compare_models(find(tmp_path / "whole"), find(tmp_path / "small"), settings)


def test_a_window_that_a_model_does_not_know_is_refused(tmp_path: Path, find: Find, settings: Settings) -> None:
    write_tiny(tmp_path / "short", max_position_embeddings=60)
    pair = find(tmp_path / "short"), find(tmp_path / "short")
    with pytest.raises(UsageError, match="a window of 61 tokens is too large; both models support at most 60"):
        compare_models(*pair, settings, window=61)
    found = compare_models(*pair, settings, tokens=200)
    assert found.text.window == 60
    assert [one.tokens for one in found.answers] == [60 - 30, 60 - 30]


def test_safetensors_and_gguf_of_one_model_agree(find: Find, settings: Settings) -> None:
    text = shared("text/tiny.txt").read_text()
    pair = find(shared("stories260K")), find(shared("stories260K-f32.gguf"))
    found = compare_models(*pair, settings, text, text_name="tiny.txt")
    assert found.distance.divergence.max < 1e-9
    assert found.distance.same_top.value == 1
    assert found.distance.reference_perplexity.value == pytest.approx(8.3718, abs=1e-3)
    assert all(error.relative < 1e-6 for error in found.layers)
    assert all(one.same == one.tokens for one in found.answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3.2-bpe", "stories260K"])
def test_editions_of_one_tokenizer_are_equal(name: str, find: Find) -> None:
    """Compare a tokenizer.json with the same tokenizer in a GGUF file."""
    file = shared("llama3.2-bpe/vocab.gguf" if name == "llama3.2-bpe" else "stories260K-f32.gguf")
    folder = Tokenizer.from_folder(shared(name))
    demo = find("demo")

    def with_tokenizer(tokenizer: Tokenizer) -> Subject:
        config = dataclasses.replace(demo.config, vocab_size=folder.vocab_size)
        return dataclasses.replace(demo, tokenizer=tokenizer, config=config)

    pair = with_tokenizer(folder), with_tokenizer(Tokenizer.from_gguf(read_gguf(file).metadata, file))
    assert shared_vocab_size(*pair) == folder.vocab_size
    assert shared_vocab_size(*reversed(pair)) == folder.vocab_size


def test_a_prompt_is_answered_as_generate_does(find: Find, settings: Settings) -> None:
    found = compare_models(find("demo"), find("demo"), settings, tokens=300).answers[0]
    with localllm.load("demo", settings=settings) as llm:
        ids = llm.tokenizer.encode(EVALUATION_TEXT.read_text())[:32]
        done = llm.generate(ids, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    assert (found.prompt, found.common) == (llm.tokenizer.decode(ids), done.text)
