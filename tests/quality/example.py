"""A quality report with every field."""

from localllm.quality.report import Answers, Distance, Divergence, Error, Estimate, Quality, Scored, Side

QUALITY = Quality(
    reference=Side("an-owner/a-model-of-some-name", 2_500_000_000, "bfloat16", None, 123.4, 21.5),
    other=Side("an-owner/a-model-of-some-name-int4", 800_000_000, "bfloat16", "int8", 130.1, 40.25),
    text=Scored("the project's evaluation text", 2608, 2602, 512),
    distance=Distance(
        reference_perplexity=Estimate(12.3456, 0.51),
        other_perplexity=Estimate(12.5, 0.52),
        log_ratio=Estimate(0.0125, 0.0021),
        divergence=Divergence(Estimate(0.0123, 0.0004), 0.0045, 0.123, 1.75),
        same_top=Estimate(0.951, 0.0042),
        right_token=Estimate(-0.0031, 0.00004),
        right_token_rms=0.031,
    ),
    answers=(
        Answers("Once upon a time", 64, 64, " there was a bear.\n" * 8, "", ""),
        Answers("The", 64, 2, " sky is", " blue", " very far away"),
    ),
    layers=tuple(Error(f"layer {i}", 0.001 * (i + 1)) for i in range(16)),
    matrices=(Error("layers.3.mlp.down_proj", 0.21), Error("layers.0.self_attn.o_proj", 0.08)),
    recipe={"method": "gptq", "bits": 4, "group": 128, "symmetric": True, "activations": False, "head_bits": 8},
)
