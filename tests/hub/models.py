"""Small repositories that look like models, with sharded weights."""

import hashlib
import json

import numpy
from safetensors.numpy import save

from tests.hub.folders import CONFIG


def weights(size=40_000, seed=0):
    """Content of a safetensors file of approximately this size, which does not compress."""
    values = numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)
    return save({"a": values})


def model_files(**more):
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b'{"top_k": 20}',
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b'{"chat_template": "{{ messages }}"}',
        "README.md": b"---\nlicense: mit\n---\n",
        "model.safetensors": weights(),
        "pytorch_model.bin": b"the same, pickled",
        "onnx/model.onnx": b"the same, for others",
        ".gitattributes": b"*.safetensors filter=lfs",
    } | more


def sha256(content):
    return hashlib.sha256(content).hexdigest()


class Watcher:
    """Records the progress of a pull."""

    def __init__(self):
        self.came = 0
        self.finished = []
        self.said = []
        self.order = None

    def begin(self, order):
        self.order = order

    def advance(self, file, count):
        self.came += count

    def finish(self, file):
        self.finished.append(file.path)

    def say(self, text):
        self.said.append(text)
