"""One cold start: imports, load, the first token, and a second request beside it; seconds of each as JSON."""

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("device")
    chosen = options.parse_args()
    marks = [time.perf_counter()]
    import localllm

    load = localllm.load  # imports torch and the rest
    marks.append(time.perf_counter())
    llm = load(chosen.folder, device=chosen.device, context=256)
    marks.append(time.perf_counter())
    for prompt in ([5, 6, 7], [8, 9, 10]):
        params = localllm.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        done = llm.generate(prompt, params)
        assert done.metrics.output_tokens == 2
        marks.append(time.perf_counter())
    llm.close()
    names = ("import", "load", "first two tokens", "two more of another prompt")
    print(json.dumps({name: end - start for name, (start, end) in zip(names, pairwise(marks), strict=True)}))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
