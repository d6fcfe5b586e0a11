import pytest
import torch

from localllm.comparison.compare import capture_layer_outputs, stream_logits
from localllm.runtime.kv_cache.sequence_state import OutOfBlocks
from tests.tiny import make_checkpoint, make_engine

HYBRID = {"layer_types": ["full_attention", "conv", "full_attention"]}
IDS = torch.randint(320, (37,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize(("kind", "changes"), [("Llama", {}), ("Lfm2", HYBRID)], ids=str)
def test_logits_in_chunks_are_those_of_one_pass(tmp_path, kind, changes):
    make_checkpoint(tmp_path, kind, **changes)
    engine = make_engine(tmp_path)
    whole = engine.logits(IDS)
    pieces = list(stream_logits(engine, IDS, 10))
    assert [len(piece) for piece in pieces] == [10, 10, 10, 7]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=1e-4, atol=1e-4)
    assert engine.pool.free_count == len(engine.pool.ref_counts)


def test_no_blocks_leak_when_the_reader_stops_or_the_cache_is_full(tmp_path):
    make_checkpoint(tmp_path, "Llama")
    engine = make_engine(tmp_path, blocks=2)
    pieces = stream_logits(engine, IDS, 10)
    assert next(pieces).shape == (10, 320)
    pieces.close()
    with pytest.raises(OutOfBlocks):
        list(stream_logits(engine, IDS, 10))
    assert engine.pool.free_count == len(engine.pool.ref_counts)


def test_outputs_of_layers_are_those_of_transformers_and_leave_the_model_as_it_was(tmp_path):
    model = make_checkpoint(tmp_path, "Llama")
    engine = make_engine(tmp_path)
    before, layers = engine.logits(IDS), engine.runner.model.layers
    outputs = capture_layer_outputs(engine, IDS)
    expected = model(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert len(outputs) == len(expected) - 1 == 3
    for ours, theirs in zip(outputs[:-1], expected[1:-1], strict=True):  # the last one of theirs is normed
        torch.testing.assert_close(ours, theirs[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.model.norm(outputs[-1]), expected[-1][0], rtol=1e-4, atol=1e-4)
    assert engine.runner.model.layers is layers
    torch.testing.assert_close(engine.logits(IDS), before, rtol=0, atol=0)
