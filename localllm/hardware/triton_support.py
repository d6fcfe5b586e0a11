"""Finds out whether Triton can compile kernels on this machine: besides itself it needs a C compiler and Python's
headers, with which it builds the code that launches a kernel.
"""

import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig

COMPILERS = ("gcc", "clang")  # in the order in which Triton looks for them, unless CC names one
HEADERS = "#include <Python.h>\n#include <dlfcn.h>\n"
TIMEOUT_S = 30


@functools.cache
def triton_fault() -> tuple[str, str] | None:
    """Return why Triton ("it") cannot compile and launch kernels here, and a remedy; None if it can.

    Takes some 30 ms, for the C preprocessor.
    """
    if importlib.util.find_spec("triton") is None:
        return "it is not installed", "run `pip install triton`"
    compiler = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        missing = "there is no C compiler, with which it builds the code that launches kernels"
        return missing, "install gcc or clang, or name one in CC"
    include = sysconfig.get_path("include")
    command = [compiler, "-E", "-x", "c", "-I", include, "-o", os.devnull, "-"]
    try:
        done = subprocess.run(
            command, input=HEADERS, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C compiler {compiler} does not run ({error})", "install gcc or clang, or name one in CC"
    if done.returncode == 0:
        return None
    if not os.path.exists(os.path.join(include, "Python.h")):
        missing = f"Python.h is missing in {include}, with which it builds the code that launches kernels"
        return missing, "install Python's headers (python3-dev on Debian and Ubuntu, python3-devel on Fedora)"
    reason = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
    headers = "install the headers of the C library (libc6-dev on Debian and Ubuntu, glibc-devel on Fedora)"
    return f"the C compiler {compiler} cannot read Python.h ({reason.strip()})", headers
