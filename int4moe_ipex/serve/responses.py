"""The JSON of OpenAI's answers, whole and in pieces."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def sse(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """How the answers to one request look: ids, names, and where text goes."""

    model: str
    chat: bool
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def _frame(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def whole(self, text: str, reason: str, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """The answer to a request without `stream`."""
        content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": reason}
        return {**self._frame([choice], False), "usage": usage(prompt_tokens, tokens)}

    def first(self) -> dict[str, Any] | None:
        """What opens a stream."""
        return self.piece("", None, role="assistant") if self.chat else None

    def piece(self, text: str, reason: str | None, role: str | None = None) -> dict[str, Any]:
        """More text of a stream, or its end."""
        if self.chat:
            delta = {"role": role} if role else {}
            content: dict[str, Any] = {"delta": delta if reason else {**delta, "content": text}}
        else:
            content = {"text": text}
        return self._frame([{"index": 0, **content, "logprobs": None, "finish_reason": reason}], True)

    def usage_piece(self, prompt_tokens: int, tokens: int) -> dict[str, Any]:
        """The last event of a stream that asked for usage."""
        return {**self._frame([], True), "usage": usage(prompt_tokens, tokens)}
