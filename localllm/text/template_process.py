"""The process that renders chat templates: a separate program without imports from localllm.

A template comes with the model, so it is untrusted code. Jinja's sandbox isolates it from the machine but does not
limit its time and memory; the limits of a process do. The program reads requests from stdin and writes responses
to stdout, one JSON object per line, and ends when stdin does, hence with its parent.
"""

import functools
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, meta, nodes, parser, sandbox, utils

CPU_LIMIT_S = 0.9  # per rendering; a typical one takes a few milliseconds
MEMORY_LIMIT_BYTES = 512 * 2**20  # the process starts with 30 MB
MAX_OUTPUT_CHARACTERS = 16 * 2**20  # more than any context holds
MAX_ERROR_CHARACTERS = 500  # of an error message


class TemplateRefusal(Exception):
    """The template called raise_exception: it does not accept this conversation."""


class OutputTooLong(Exception):
    """The rendered text exceeded the limit."""


class Generation(ext.Extension):
    """`{% generation %}` marks what the model said, for training; rendering only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - as in the parent class

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return caller()


class Environment(sandbox.ImmutableSandboxedEnvironment):
    """Jinja's strictest environment, in which a forbidden attribute is an error rather than undefined."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise jinja2.exceptions.SecurityError(f"{attribute!r} of a {type(obj).__name__} is forbidden")


class SandboxedDict:
    """`dict` without its other methods, some of which would modify what the sandbox protects."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class Namespace(utils.Namespace):
    """Jinja's Namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # so that a template may use namespace(self=1)
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


def _raise_exception(message: Any) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # templates include the user's local date


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> Environment:
    """Return the environment that `transformers` uses for templates."""
    extensions = (Generation, ext.loopcontrols)
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": Namespace,
        "dict": SandboxedDict(),
    }
    return environment


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _arguments(source: str) -> str:
    """Return the names that a template reads from outside, separated by spaces.

    A name that the template assigns only counts if it tests whether the name is defined, or reads it first.
    """
    tree = _environment().parse(source)
    first_use: dict[str, str] = {}
    for name in _names(tree):
        first_use.setdefault(name.name, name.ctx)
    read_names = {name for name, context in first_use.items() if context == "load"}
    for node in tree.find_all((nodes.Test, nodes.Filter)):
        if node.name in ("defined", "undefined", "default", "d") and isinstance(node.node, nodes.Name):
            read_names.add(node.node.name)
    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    outside = meta.find_undeclared_variables(tree) - _environment().globals.keys()
    return " ".join(sorted(outside - (assigned - read_names)))


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Yield names in evaluation order: an assigned expression comes before its target."""
    if isinstance(node, nodes.Name):
        yield node
    children = (node.node, node.target) if isinstance(node, nodes.Assign) else node.iter_child_nodes()
    for child in children:
        yield from _names(child)


def _render(source: str, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    length = 0
    for piece in _compile(source).generate(variables):
        length += len(piece)
        if length > MAX_OUTPUT_CHARACTERS:
            raise OutputTooLong(f"it produces more than {MAX_OUTPUT_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def handle_request(request: dict[str, Any]) -> dict[str, str]:
    """Return `text`; or `refused` with the template's message; or `failed` for this conversation; or `damaged`.

    Without variables, nothing is rendered, and the text is that of `_arguments`.
    """
    try:
        source, variables = request["source"], request.get("variables")
        return {"text": _arguments(source) if variables is None else _render(source, variables)}
    except TemplateRefusal as error:
        return {"refused": str(error)[:MAX_ERROR_CHARACTERS]}
    except jinja2.TemplateSyntaxError as error:
        return {"damaged": f"line {error.lineno}: {error}"[:MAX_ERROR_CHARACTERS]}
    except (
        jinja2.exceptions.SecurityError,
        OutputTooLong,
        OverflowError,
        RecursionError,
        SyntaxError,
    ) as error:
        return {"damaged": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}
    except MemoryError:
        sys.exit(1)  # a new process is safer than continuing with little memory
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]}


def _limit_memory() -> None:
    with suppress(ImportError):  # Windows has no resource limits
        import resource

        limits = {
            resource.RLIMIT_AS: MEMORY_LIMIT_BYTES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: 0,  # it only writes to a pipe
        }
        for limit, limit_bytes in limits.items():
            with suppress(ValueError, OSError):  # the process may already have a lower limit
                resource.setrlimit(limit, (limit_bytes, limit_bytes))


def _limit_time(seconds: float) -> None:
    """End the process by SIGPROF, which is not handled here, after this much CPU time; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _limit_memory()
    _compile("{{ 1 }}").render()  # the first use loads parts of Jinja
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    for line in sys.stdin.buffer:
        _limit_time(CPU_LIMIT_S)
        reply = json.dumps(handle_request(json.loads(line)))
        _limit_time(0)
        sys.stdout.buffer.write(reply.encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
