"""What clients may send: OpenAI's fields, checked one by one. What cannot be honoured is refused, not dropped."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from int4moe_ipex.config import Generation
from int4moe_ipex.serve.sampling import Sampling

MAX_STOPS, MAX_STOP_LENGTH = 16, 256


class BadRequest(Exception):
    """A request that is answered with status 400 (or another 4xx) and OpenAI's error object."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Common(BaseModel):
    """The fields of both endpoints. Beyond OpenAI's: top_k, repetition_penalty, ignore_eos."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # One answer, without probabilities or biases: other values have no implementation here.
    n: Literal[1] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    # These change nothing in an answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    store: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens

    @model_validator(mode="after")
    def _possible(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        if len(self.stops) > MAX_STOPS or any(not s or len(s) > MAX_STOP_LENGTH for s in self.stops):
            raise ValueError(f"stop takes up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        return self

    def sampling(self, defaults: Generation) -> Sampling:
        """How tokens are picked: the request's values over the configuration's.

        A temperature above 0, or a top_p below 1, asks for sampling; temperature 0 is greedy.
        """

        def value(name: str) -> Any:
            own = getattr(self, name)
            return getattr(defaults, name) if own is None else own

        if self.temperature is not None:
            do_sample = self.temperature > 0
        else:
            do_sample = defaults.do_sample or (self.top_p is not None and self.top_p < 1)
        # torch's generators take seeds of 64 bits without sign.
        seed = value("seed")
        return Sampling(
            do_sample=do_sample,
            temperature=value("temperature") or 1.0,
            top_p=value("top_p"),
            top_k=max(value("top_k"), 0),
            repetition_penalty=value("repetition_penalty"),
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            seed=None if seed is None else seed % 2**64,
        )


class Completion(Common):
    """POST /v1/completions. A prompt is text or token ids; a list holds one prompt."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt by itself.

        Raises:
            BadRequest: none, or more than one.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise BadRequest("send one prompt per request; requests are computed together", "prompt")
            prompt = prompt[0]
        if len(prompt) == 0:
            raise BadRequest("the prompt is empty", "prompt")
        return prompt


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class Chat(Common):
    """POST /v1/chat/completions. Beyond OpenAI's: chat_template_kwargs, such as {"enable_thinking": false}."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    logprobs: Literal[False] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


def parse(kind: type[Common], body: Any) -> Any:
    """A body as a request.

    Raises:
        BadRequest: names the first field that is at fault, and all that are unknown.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    unknown = sorted(set(body) - set(kind.model_fields))
    if unknown:
        raise BadRequest(f"unknown or unsupported: {', '.join(unknown)}", unknown[0])
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _sentence(error) from None


def _sentence(error: ValidationError) -> BadRequest:
    first = error.errors()[0]
    # The parts after a union's name are pydantic's own.
    names = {"str", "int", "float", "bool"}
    path = [str(part) for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part not in names)]
    field = path[0] if path else None
    if first["type"] == "value_error":
        return BadRequest(str(first["ctx"]["error"]), field)
    if first["type"] == "missing":
        return BadRequest(f"{'.'.join(path)} is missing", field)
    message = first["msg"][0].lower() + first["msg"][1:]
    return BadRequest(f"{'.'.join(path)}: {message}", field)
