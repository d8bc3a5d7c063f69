"""Token ids to text while they come, and stop strings that may be spread over several tokens."""

from __future__ import annotations

from typing import Any

# What decoders put where bytes do not make a character yet.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of a growing sequence. The deltas joined are `tokenizer.decode(all ids, skip_special_tokens=True)`.

    A token is decoded together with a few before it: tokenizers add or drop a space by what stands in front, and a
    character may take several tokens, which then yield nothing until the last.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # first id that is decoded again
        self._shown = 0  # ids whose text is out

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def put(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._ids.append(token)
        before = self._decode(self._ids[self._window : self._shown])
        now = self._decode(self._ids[self._window :])
        if now.endswith(INCOMPLETE) or len(now) <= len(before):
            return ""
        self._window, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, an incomplete character as the replacement character."""
        before = self._decode(self._ids[self._window : self._shown])
        now = self._decode(self._ids[self._window :])
        self._window = self._shown = len(self._ids)
        return now[len(before) :]


class StopStrings:
    """Lets text through up to the stop string that is complete first; it and all behind it are dropped."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = stops
        self._held = ""
        self.found = False

    def put(self, text: str) -> str:
        """The part of all text so far that cannot belong to a stop string any more, without what was returned."""
        if self.found or not self._stops:
            return "" if self.found else text
        self._held += text
        # The one that is complete first, so that the result does not depend on how text is cut into pieces.
        places = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            out, self._held = self._held[: min(places)[1]], ""
            return out
        keep = max(self._overlap(stop) for stop in self._stops)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        out, self._held = self._held, ""
        return out
