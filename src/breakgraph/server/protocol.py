"""What clients send: the bodies of OpenAI's API with the sampling parameters that vLLM adds.

Types are strict: a number in quotes is no number. A parameter may be null, which means the default. Unknown ones are
refused, as are known ones that would change the answer and that this server does not have.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from breakgraph.engine.guided_params import MAX_FORM_CHARS, GuidedDecodingParams
from breakgraph.engine.sampling import MAX_LOGPROBS, SamplingParams

_INT64 = 2**63
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop_token_ids", "ignore_eos"),
)
"""Parameters that SamplingParams has by the same name."""


def _is_text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "Input should be text, half a surrogate pair is none") from None
    return value


Text = Annotated[str, AfterValidator(_is_text)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
StopString = Annotated[Text, Field(min_length=1, max_length=1024)]

# Values that ask for nothing, and what to say of the others.
_UNSUPPORTED: dict[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((None, 1), "best_of is not supported: ask for n answers and choose yourself"),
    "suffix": ((None, ""), "suffix is not supported: text is only generated at the end"),
    "logit_bias": ((None, {}), "logit_bias is not supported"),
    "tools": ((None, []), "tools are not supported"),
    "tool_choice": ((None, "none", "auto"), "tools are not supported"),
    "functions": ((None, []), "functions are not supported"),
    "function_call": ((None, "none", "auto"), "functions are not supported"),
    "parallel_tool_calls": ((None, True, False), "tools are not supported"),
    "store": ((None, False), "store is not supported: nothing is kept"),
    "metadata": ((None, {}), "metadata is not supported: nothing is kept"),
    "service_tier": ((None, "auto", "default"), "service_tier is not supported: all requests are served alike"),
    "audio": ((None,), "audio is not supported"),
    "modalities": ((None, ["text"]), "only text is supported"),
}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False


class TextFormat(_Body):
    type: Literal["text"]


class JsonObjectFormat(_Body):
    type: Literal["json_object"]


class JsonSchema(_Body):
    """`strict` may be said and changes nothing: the schema is always kept."""

    name: Annotated[Text, Field(min_length=1, max_length=64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: Text | None = None
    strict: bool | None = None


class JsonSchemaFormat(_Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationRequest(_Body):
    """Parameters of both kinds of completion."""

    model: str
    n: int | None = Field(None, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1, lt=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: StopString | Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_regex: Annotated[Text, Field(max_length=MAX_FORM_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, (neutral, message) in _UNSUPPORTED.items():
            if name in body and not any(body[name] == value for value in neutral):
                raise PydanticCustomError("unsupported", "{message}", {"message": message, "param": name})
        return {name: value for name, value in body.items() if name not in _UNSUPPORTED}

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "unsupported", "stream_options may only be given with stream=true", {"param": "stream_options"}
            )
        return self

    @model_validator(mode="after")
    def _check_form(self) -> GenerationRequest:
        asked = {"response_format": self.has_json_form, "guided_regex": self.guided_regex is not None}
        if all(asked.values()):
            message = "response_format and guided_regex cannot both be kept; leave out one of them"
            raise PydanticCustomError("unsupported", "{message}", {"message": message, "param": "guided_regex"})
        if any(asked.values()) and self.ignore_eos:
            message = "ignore_eos goes on where an answer of a given form is complete; leave it out"
            raise PydanticCustomError("unsupported", "{message}", {"message": message, "param": "ignore_eos"})
        return self

    @property
    def has_json_form(self) -> bool:
        return isinstance(self.response_format, JsonObjectFormat | JsonSchemaFormat)

    @property
    def form_param(self) -> str:
        """The parameter that asks for a form of the answer."""
        return "response_format" if self.has_json_form else "guided_regex"

    def guided_decoding(self) -> GuidedDecodingParams | None:
        """The form of the answers. Raises ConfigError for a schema that cannot be kept."""
        if isinstance(self.response_format, JsonSchemaFormat):
            return GuidedDecodingParams(json=self.response_format.json_schema.schema_)
        if isinstance(self.response_format, JsonObjectFormat):
            return GuidedDecodingParams(json_object=True)
        return None if self.guided_regex is None else GuidedDecodingParams(regex=self.guided_regex)

    @property
    def num_answers(self) -> int:
        """To each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """At the end of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def prompt_logprobs(self) -> int | None:
        return None

    def sampling_params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Without stop strings and n, which are the business of whoever makes the text."""
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            guided_decoding=self.guided_decoding(),
            **given,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[TokenIds, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def prompt_logprobs(self) -> int | None:
        """Log probabilities are of all tokens that are shown."""
        return self.logprobs if self.echo else None


class TextPart(_Body):
    type: Literal["text"]
    text: Text


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Text | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "unsupported", "top_logprobs may only be given with logprobs=true", {"param": "top_logprobs"}
            )
        return self
