"""An OpenAI-compatible server over a loaded model: requests, batching, HTTP, metrics.

transformers has a server of its own (`transformers serve`). It is not used, because beside a pinned model it offers
routes that unload it and load others, shares one sampling setting and one random stream between batched requests,
maps or drops request fields that it cannot honour, and bounds neither queue nor context. What computes here is still
transformers: its model, cache, logits processors and chat templates.
"""
