#!/usr/bin/env bash
# Everything that is measured on one GPU, in under twelve minutes, and what compiling its kernels takes the first time.
#
#   bench/gpu.sh                         all parts, in this order:
#   bench/gpu.sh ceilings roofline       only these
#   bench/gpu.sh --results DIR           keep the results there and not in bench/results/
#   bench/gpu.sh --device cuda:1         another GPU
#   bench/gpu.sh --tiny --device cpu     does the harness work? Tiny shapes, nothing is kept
#
#   compile    the kernels of the models of the parts below, on all cores, so that nobody's time includes it; where
#              they were compiled before it takes seconds. It comes before roofline, prefill, kernels and rivals, too
#   ceilings   what copies, reads and bf16 products of this GPU reach: what all fractions are of
#   correct    kernels beside their references, the loop, every family of models, races (pytest)
#   roofline   decode of 1B, 8B, 32B and 70B models in bf16, INT8 and INT4 through the engine; of the 8B also with
#              kernels that start after the one before them has ended (PDL off)
#   prefill    a prompt of 4,096 tokens; the attention kernel beside torch's
#   rivals     transformers with a static cache and torch.compile, torch's INT4 product, cuBLAS
#   cold       from nothing to the first token of an 8B INT4 model, in phases
#   kernels    the time of each kernel of a step, and attention over long contexts
#
# Each part is a process of its own with a time limit; one that fails or is stopped is reported, and the others go
# on. Rows are written as they come, so that a run that is killed leaves what it had found. A part that runs again on
# the same day replaces what it had found before.
#
# Needs: one NVIDIA GPU of sm_80 or newer with 24 GB or more (models that do not fit are left out and named), and about
# 8 GB of disk for `cold`. A part whose wheels are not there is left out and names them:
#
#   every part  torch triton numpy safetensors psutil llvmlite
#   correct     pytest; pytest-xdist makes it faster; transformers and gguf for the families of models
#   rivals      transformers
#   cold        tokenizers jinja2 llguidance
#
# PYTHON names the interpreter (.venv/bin/python, else python3); COMMIT the version, where the
# checkout has no history. Clocks and limits of the GPU are read, never set. bench/NOTES.md says what was expected.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
exec "$PYTHON" -m bench.gpu "$@"
