"""Every block of docs/shell.md runs as written, in one shell from top to bottom, with the documented output."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "shell.md"
BLOCK = re.compile(r"```sh\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", re.DOTALL)
BLOCKS = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
TOOLS = ("curl", "git", "jq", "nohup", "timeout", "xargs")
pytestmark = pytest.mark.slow

# A block has its own stdout and stderr, and no stdin; variables and jobs live on.
ONE = "{{ . ./block-{n}.sh; }} > out-{n} 2> err-{n} < /dev/null; echo $? > code-{n}\n"


@pytest.fixture(scope="module", params=["bash", "zsh"])
def page(request, tmp_path_factory):
    """Run the page in a shell; return its folder."""
    if not shutil.which(request.param):
        pytest.skip(f"{request.param} is not installed here")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "bin").mkdir()
    program = folder / "bin" / "localllm"
    program.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {shlex.quote(sys.executable)} -m localllm "$@"\n'
    )
    program.chmod(0o755)
    for n, (block, _) in enumerate(BLOCKS):
        (folder / f"block-{n}.sh").write_text(block)
    script = "".join(ONE.format(n=n) for n in range(len(BLOCKS)))
    (folder / "page.sh").write_text(script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALLLM_", "HF_", "GIT_"))}
    # A server of whoever runs the tests is not asked.
    own = {"HOME": str(folder), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOCALLLM_HOST": "127.0.0.1:9"}
    flags = ["-f"] if request.param == "zsh" else []
    shell = subprocess.Popen(
        [request.param, *flags, "page.sh"], cwd=folder, env=kept | own, stdin=subprocess.DEVNULL, process_group=0
    )
    try:
        shell.wait(timeout=240)
    finally:
        with suppress(ProcessLookupError):  # the page's server; zsh's `jobs -p` is not for `kill`
            os.killpg(shell.pid, signal.SIGKILL)
    return folder


@pytest.mark.parametrize("n", range(len(BLOCKS)))
def test_a_block_does_what_the_page_says(page, n):
    block, expected = BLOCKS[n]
    missing = [tool for tool in TOOLS if re.search(rf"\b{tool}\b", block) and not shutil.which(tool)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed here")
    out, err, code = ((page / f"{kind}-{n}").read_text() for kind in ("out", "err", "code"))
    assert code == "0\n", err
    pattern = re.escape(expected).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, out), f"{out!r} is not {expected!r}; stderr: {err}"


def test_every_block_of_the_page_is_a_shells_or_the_output_of_one():
    fences = re.findall(r"^```(\w*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    kinds = [kind for kind in fences if kind]
    assert len(BLOCKS) == kinds.count("sh") > 12
    assert {*kinds} == {"sh", "text"}
