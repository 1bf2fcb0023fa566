"""The part of GitHub's expression language that action.yml and the example use.

inputs.repo != '' && always()        values are strings, as inputs and outputs are
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Value = str | bool
_TOKEN = re.compile(r"\s*('(?:[^']|'')*'|&&|\|\||==|!=|!|[()]|true\b|false\b|[A-Za-z_][\w.-]*)")
_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.S)


class Expressions:
    """Evaluates expressions; an unknown context or function is an error, not an empty string.

    Args:
        contexts: inputs, steps, github, runner, secrets …, nested mappings.
        functions: always, success, failure, by name.
    """

    def __init__(
        self, contexts: Mapping[str, Any], functions: Mapping[str, Callable[[], bool]]
    ) -> None:
        self._contexts, self._functions = contexts, functions

    def text(self, template: str) -> str:
        """A string with `${{ … }}` in it, filled in."""
        return _EXPRESSION.sub(lambda m: _string(self.value(m[1])), template)

    def condition(self, text: str) -> tuple[bool, bool]:
        """(truth of an `if:`, whether it asks for the job's status itself)."""
        match = _EXPRESSION.fullmatch(text.strip())
        inner = match[1] if match else text
        asks = bool(re.search(r"\b(always|success|failure|cancelled)\(\)", inner))
        return _true(self.value(inner)), asks

    def value(self, text: str) -> Value:
        tokens, at = [], 0
        text = text.strip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise SyntaxError(f"cannot read {text[at:]!r}")
            tokens.append(match[1])
            at = match.end()
        self._tokens = tokens
        result = self._or()
        if self._tokens:
            raise SyntaxError(f"more than an expression: {text!r}")
        return result

    def _take(self, *wanted: str) -> bool:
        if self._tokens and self._tokens[0] in wanted:
            self._tokens.pop(0)
            return True
        return False

    def _or(self) -> Value:
        left = self._and()
        while self._take("||"):
            right = self._and()
            left = left if _true(left) else right
        return left

    def _and(self) -> Value:
        left = self._equal()
        while self._take("&&"):
            right = self._equal()
            left = right if _true(left) else left
        return left

    def _equal(self) -> Value:
        left = self._not()
        if self._take("=="):
            return left == self._not()
        if self._take("!="):
            return left != self._not()
        return left

    def _not(self) -> Value:
        if self._take("!"):
            return not _true(self._not())
        if self._take("("):
            inner = self._or()
            if not self._take(")"):
                raise SyntaxError("a bracket is open")
            return inner
        return self._leaf(self._tokens.pop(0))

    def _leaf(self, token: str) -> Value:
        if token.startswith("'"):
            return token[1:-1].replace("''", "'")
        if token in ("true", "false"):
            return token == "true"
        if self._take("("):
            if not self._take(")"):
                raise SyntaxError(f"{token} takes no arguments here")
            return self._functions[token]()
        return self._lookup(token)

    def _lookup(self, path: str) -> Value:
        """Contexts and ids must exist; a step's output that was never set is ''."""
        head, *keys = path.split(".")
        found: Any = self._contexts[head]
        for key in keys:
            if not isinstance(found, Mapping):
                raise KeyError(path)
            found = found.get(key, "") if found.get("_open") else found[key]
        if isinstance(found, Mapping):
            raise KeyError(f"{path} is no value")
        return found


def _true(value: Value) -> bool:
    return bool(value)


def _string(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else value
