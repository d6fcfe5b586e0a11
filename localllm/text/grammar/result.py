"""Checks whether a finished text follows its grammar, without masks and tokens, as its reader would see it."""

import json
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation, localcontext
from typing import Any

import llguidance

from localllm.errors import OutputInvalid
from localllm.request import Completion, FinishReason, Grammar, GrammarKind, Request, ToolCall
from localllm.text.grammar.functions import ToolConstraint, request_tool_constraint
from localllm.text.grammar.source import PARSER_LIMITS, compile_source, run_on_deep_stack

DECIMAL_DIGITS = 5000  # of a number checked for being a multiple of another


def check_answer(request: Request, completion: Completion, *, untrusted: bool = False) -> None:
    """Apply `check_completion`, and `check_tool_calls` to its calls."""
    if not completion.tool_calls or completion.text:  # before the result of a function, no text is required
        check_completion(request.params.grammar, completion, untrusted=untrusted)
    calling = request_tool_constraint(request)
    if calling and completion.finish_reason is not FinishReason.LENGTH:
        check_tool_calls(calling, completion.tool_calls, check_patterns=not untrusted)


def check_completion(grammar: Grammar | None, completion: Completion, *, untrusted: bool = False) -> None:
    """Raises OutputInvalid like `check_content`. Answers cut off by a limit are not checked; see their
    finish_reason.

    untrusted: check only by the grammar, in time that grows only with the text. Python may match a pattern
    indefinitely, blocking all other threads.
    """
    if grammar and completion.finish_reason is not FinishReason.LENGTH:
        (_check_text if untrusted else check_content)(grammar, completion.text)


def check_tool_calls(
    constraint: ToolConstraint, calls: Sequence[ToolCall], *, check_patterns: bool = True
) -> None:
    """Raises OutputInvalid if the calls violate the constraint. check_patterns: also check functions whose schema
    has patterns, which otherwise rely on the mask.
    """
    if constraint.tool_use.must_call and not calls:
        raise OutputInvalid("the answer calls no function")
    if len(calls) > 1 and not constraint.tool_use.parallel:
        raise OutputInvalid(f"the answer has {len(calls)} calls instead of one")
    functions = {function.name: function for function in constraint.functions}
    for call in calls:
        function = functions.get(call.name)
        if function is None:
            raise OutputInvalid(f"the answer calls {call.name}, which is not a function that it may call")
        if constraint.is_strict(function) and (check_patterns or '"pattern' not in function.schema):
            try:
                _check_json(call.arguments, json.loads(function.schema))
            except OutputInvalid as error:
                raise OutputInvalid(f"in the call of {call.name} {error.message}") from None


def check_content(grammar: Grammar, content: str) -> None:
    """Raises OutputInvalid, with the place, if the content does not follow the grammar."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            _check_json(content, grammar.schema)
        case GrammarKind.JSON:
            _check_json(content, {"type": "object"})
        case GrammarKind.CHOICE:
            if content not in grammar.choices:
                raise OutputInvalid(f"the answer is none of {len(grammar.choices)} choices: {content[:80]!r}")
        case GrammarKind.REGEX | GrammarKind.LARK | GrammarKind.GBNF:
            _check_text(grammar, content)


def _check_json(content: str, schema: dict[str, Any] | bool) -> None:
    # Imported late: takes 0.1 s that other answers do not need.
    from jsonschema import Draft202012Validator, exceptions, validators
    from referencing import Registry

    try:
        value = json.loads(content, parse_float=parse_exact_number, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise OutputInvalid(f"the answer is not JSON ({error})") from None
    schema = json.loads(json.dumps(schema), parse_float=parse_exact_number)
    kind = validators.validator_for(schema, default=Draft202012Validator)
    # An empty registry: no reference is fetched.
    validator = kind(schema, registry=Registry(), format_checker=kind.FORMAT_CHECKER)
    try:
        with localcontext(prec=DECIMAL_DIGITS):
            error = exceptions.best_match(validator.iter_errors(value))
    except RecursionError:
        raise OutputInvalid("the answer is nested too deeply to be checked") from None
    except ArithmeticError as fault:
        raise OutputInvalid(f"the answer has a number that cannot be checked ({fault})") from None
    if error is not None:
        raise OutputInvalid(f"the answer breaks the schema at {error.json_path}: {error.message[:200]}")


def parse_exact_number(number: str) -> Decimal | float:
    """Parse as a decimal: whether 0.3 is a multiple of 0.1 must not depend on binary fractions.
    1e-99999999999999999999 is not a valid decimal and becomes 0.
    """
    try:
        return Decimal(number)
    except InvalidOperation:
        return float(number)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _check_text(grammar: Grammar, content: str) -> None:
    """Check with the same grammar over bytes instead of tokens. A grammar that names tokens is not checked."""
    tokenizer = llguidance.LLTokenizer("byte")
    source = f'{{"grammars": [{compile_source(grammar)}]}}'
    matcher = run_on_deep_stack(lambda: llguidance.LLMatcher(tokenizer, source, log_level=0, limits=PARSER_LIMITS))
    if matcher.is_error():
        return
    data = content.encode()
    consumed = matcher.try_consume_tokens(list(data))
    if consumed < len(data):
        rest = data[consumed : consumed + 40].decode(errors="replace")
        raise OutputInvalid(f"the answer leaves its {grammar.kind} at byte {consumed}: {rest!r}")
    if not matcher.is_accepting():
        raise OutputInvalid(f"the answer ends before its {grammar.kind} does")
