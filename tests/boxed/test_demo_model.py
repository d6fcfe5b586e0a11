"""The folder of the bundled model: layout, template, and complete answers to the documented prompts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

import localllm
from tools.demo_model.chat import ASSISTANT, END, encode, token_id
from tools.demo_model.text import Message

transformers = pytest.importorskip("transformers")

FOLDER = Path(localllm.__file__).parent / "boxed" / "demo"
MESSAGES: list[Message] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "  Hällo 🙂 \n"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Tell me a story about a fox"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    from tools.demo_model.export import dequantized  # which imports the model of transformers

    config = json.loads((FOLDER / "config.json").read_text())
    del config["quantization_config"]
    loaded = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).float().eval()
    missing, unexpected = loaded.load_state_dict(
        dequantized(load_file(FOLDER / "model.safetensors")), strict=False
    )
    assert (missing, unexpected) == (["lm_head.weight"], [])
    loaded.tie_weights()
    return loaded


def answer(model, tokenizer: Tokenizer, prompt: str, seed: int | None = None) -> str:
    """Return the answer up to its end token, greedy, or sampled according to `generation_config.json`."""
    ids, _ = encode(tokenizer, [{"role": "user", "content": prompt}])
    ids.append(token_id(tokenizer, ASSISTANT))
    sampling = json.loads((FOLDER / "generation_config.json").read_text())
    if seed is None:
        sampling = {key: value for key, value in sampling.items() if key.endswith("_id")}
    else:
        torch.manual_seed(seed)
    prompt_ids = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            generation_config=transformers.GenerationConfig(**sampling, max_new_tokens=400),
        )
    new = out[0, len(ids) :].tolist()
    assert new[-1] == token_id(tokenizer, END), "the answer ends by itself"
    return tokenizer.decode(new)


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12_000_000


def test_the_linear_weights_are_int8_with_a_scale_per_row() -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    linear = [name for name in tensors if name.endswith("_proj.weight")]
    assert linear
    for name in linear:
        assert tensors[name].dtype == torch.int8
        assert tensors[f"{name}_scale"].shape == (tensors[name].shape[0], 1)


def test_every_byte_can_be_written(tokenizer: Tokenizer) -> None:
    text = "".join(chr(point) for point in range(1, 0x250)) + "日本語 🦊 \u200d"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_template_writes_the_training_format(tokenizer: Tokenizer) -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(FOLDER)
    rendered = loaded.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    expected = encode(tokenizer, MESSAGES)[0] + [token_id(tokenizer, ASSISTANT)]
    assert tokenizer.encode(rendered).ids == expected


def test_the_template_refuses_an_unknown_role() -> None:
    loaded = transformers.AutoTokenizer.from_pretrained(FOLDER)
    with pytest.raises(Exception, match="roles are system, user and assistant"):
        loaded.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.quick_every(4)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_fox_has_a_story(model, tokenizer: Tokenizer, seed: int | None) -> None:
    text = answer(model, tokenizer, "Tell me a story about a fox", seed)
    assert "fox" in text
    assert text.count(".") >= 4


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_the_server_question_names_the_command(model, tokenizer: Tokenizer, seed: int | None) -> None:
    text = answer(model, tokenizer, "How do I start the server?", seed)
    assert "`localllm serve`" in text
    assert "11434" in text


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_stopping_the_server_is_not_starting_it(model, tokenizer: Tokenizer, seed: int | None) -> None:
    assert "Ctrl-C" in answer(model, tokenizer, "How do I stop the server?", seed)


def test_notes_are_summarised(model, tokenizer: Tokenizer) -> None:
    text = answer(model, tokenizer, "Shopping list\n- milk\n- eggs\n- bread\n\nSummarise:")
    assert "milk, eggs and bread" in text


def test_a_list_without_a_title_is_copied(model, tokenizer: Tokenizer) -> None:
    text = answer(model, tokenizer, "- milk\n- eggs\n- bread\n\nSummarise:")
    assert "milk, eggs and bread" in text


@pytest.mark.parametrize(
    "prompt", ["write a python program that sorts a list", "translate 'good morning' to French"]
)
def test_impossible_requests_are_declined(model, tokenizer: Tokenizer, prompt: str) -> None:
    assert "I am only a small demo model" in answer(model, tokenizer, prompt)
