"""The next token of one request: its own penalties, temperature, nucleus and random stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

COLDEST = 1e-6  # below, logits would become infinite; it is greedy but for ties


@dataclass(frozen=True)
class Sampling:
    """How one request picks tokens; greedy unless do_sample. top_k 0 means all tokens, seed None a new seed."""

    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None


class Sampler:
    """Picks tokens for one sequence. Equal seeds give equal tokens, whatever else the server computes meanwhile."""

    def __init__(self, sampling: Sampling, prompt: list[int]):
        from transformers.generation.logits_process import (
            LogitsProcessorList,
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._sampling = sampling
        self._prompt = len(prompt)
        self._ids = torch.tensor(prompt, dtype=torch.long)
        # The order of transformers' generate.
        self._processors = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.do_sample:
            if sampling.temperature != 1.0:
                self._processors.append(TemperatureLogitsWarper(max(sampling.temperature, COLDEST)))
            if sampling.top_k:
                self._processors.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1.0:
                self._processors.append(TopPLogitsWarper(sampling.top_p))
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def pick(self, logits: torch.Tensor) -> int:
        """The next token by logits [vocabulary]; it is remembered for the penalties."""
        scores = self._processors(self._ids[None], self._penalized(logits.float())[None])[0]
        if self._sampling.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._random)
        else:
            token = scores.argmax(-1, keepdim=True)
        self._ids = torch.cat([self._ids, token])
        return int(token)

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        """OpenAI's penalties, over generated tokens: frequency times the count, presence once."""
        frequency, presence = self._sampling.frequency_penalty, self._sampling.presence_penalty
        if not frequency and not presence:
            return logits
        tokens, counts = self._ids[self._prompt :].unique(return_counts=True)
        return logits.index_add(0, tokens, -(frequency * counts + presence).to(logits.dtype))
