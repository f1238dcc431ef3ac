"""The JSON that crosses the wire: OpenAI's completion and chat requests and answers, typed and strict.

A field is either honoured, listed as harmless (it never changes an answer), or refused by name. Fields of
OpenAI's API that Kestrel does not implement are listed with the values that mean "not used", so that clients
which always send them keep working and nothing that would change an answer is dropped silently.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_LOGPROBS = 20  # alternatives listed for each token, OpenAI's bound
MAX_FIELDS = 100  # of an object with fixed fields; one with more is refused whole, not field by field


def is_none(value: object) -> bool:
    """Whether a field is left out of the JSON."""
    return value is None


def invalid(message: str) -> PydanticCustomError:
    """A validation error with exactly this message (braces in it are kept as they are)."""
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def find_unpaired(text: str) -> int | None:
    """Where a text first has half of a surrogate pair, which JSON can spell but no UTF-8 text holds; else None."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def check_text(text: str) -> str:
    """Return the text; a validation error if it has no UTF-8 form, because tokenizers cannot read it."""
    place = find_unpaired(text)
    if place is not None:
        raise invalid(f"character {place} is half of a surrogate pair; send text that is valid Unicode")
    return text


Text = Annotated[str, AfterValidator(check_text)]

Ignored = Annotated[Any, Field(description="Accepted from OpenAI clients; never changes an answer.")]


class Unsupported:
    """Marks a field Kestrel does not implement: null and `neutral` values mean "not used"; others fail."""

    def __init__(self, *neutral: object) -> None:
        self.neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "enum": [None, *self.neutral],
            "description": "Not supported; these values mean it is not used.",
        }

    def _check(self, value: object, info: core_schema.ValidationInfo) -> object:
        if value is None or value in self.neutral:
            return value
        allowed = "".join(f" or send {json.dumps(item)}" for item in self.neutral)
        message = f"{info.field_name} is not supported; leave it out{allowed}"
        raise PydanticCustomError("unsupported", "{message}", {"message": message})


def _stop_strings(value: object) -> object:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(item, str) for item in stops):
        raise invalid("stop must be a string or a list of strings")
    if "" in stops:
        raise invalid("stop holds an empty string, which would end every answer before it begins")
    for item in stops:
        check_text(item)
    return stops


class Strict(BaseModel):
    """What clients send: no field is converted, none that is unknown is taken."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise invalid(f"an object with {len(value)} fields is none that Kestrel knows")
        return value


class StreamOptions(Strict):
    """What a streamed answer carries besides text."""

    include_usage: bool = False
    include_obfuscation: Ignored = None


def _template_variables(value: dict[str, Any]) -> dict[str, Any]:
    """Variables a request may set in a chat template: not those that are the request itself."""
    reserved = {"self", "messages", "tools", "documents", "add_generation_prompt"} & value.keys()
    if reserved:
        raise invalid(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}")
    return value


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]


class KestrelOptions(Strict):
    """What becomes of the KV this request computes."""

    persist: bool = Field(default=True, description="false: it is never written to disk by this request.")
    ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="What it writes leaves the disk when it is unused for so many seconds.",
    )
    pin: bool = Field(
        default=False, description="true: it is never evicted, until unpinned (admin keys only)."
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.pin and not self.persist:
            raise invalid("pin needs persist: what is not saved cannot be kept")
        if self.ttl_s is not None and not self.persist:
            raise invalid("ttl_s needs persist: what is not saved cannot expire")
        return self


class GenerationRequest(Strict):
    """What both kinds of request share: how to sample, when to stop, whether to stream."""

    model: Text | None = Field(
        default=None, description="The served model's name; left out, it is the only one there is."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1, description="Left out: `server.default_max_tokens`.")
    temperature: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="Left out: 0 (greedy), not OpenAI's 1, so that the same request gets the same answer.",
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0, description="0 keeps every token.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Annotated[
        list[str], BeforeValidator(_stop_strings, json_schema_input_type=str | list[str] | None)
    ] = Field(
        default_factory=list,
        description="The answer ends before the first of these strings (at most `server.max_stops`).",
    )
    ignore_eos: bool | None = Field(
        default=None, description="Generate on past the model's end-of-text token."
    )

    n: int | None = Field(
        default=None,
        ge=1,
        description="How many answers (at most `server.max_choices`). With a seed, answer i has seed + i.",
    )
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    kestrel: KestrelOptions = Field(default_factory=KestrelOptions)

    logit_bias: Annotated[Any, Unsupported({})] = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options needs stream: true")
        return self


def _prompt(value: object) -> object:
    """One prompt, as text or token ids; OpenAI's lists of prompts are taken when they hold exactly one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) != 1:
            raise invalid(
                f"prompt holds {len(value)} prompts, exactly one is supported; send one request for each"
            )
        value = value[0]
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise invalid("prompt must be a string, a list with one string, or a list of token ids")
    return value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        str | list[int],
        BeforeValidator(_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Left out: `server.default_max_tokens`. 0: nothing is generated, the prompt is computed.",
    )
    echo: bool | None = Field(
        default=None,
        description="The answer begins with the prompt; so do its log probabilities if there are any. The prompt is "
        "computed from its first token then, whatever is stored.",
    )
    logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Alternatives listed for each token."
    )

    best_of: Annotated[Any, Unsupported(1)] = None
    suffix: Annotated[Any, Unsupported("")] = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log probabilities of the prompt's tokens are wanted."""
        return bool(self.echo) and self.logprobs is not None

    @model_validator(mode="after")
    def _check_echo(self) -> Self:
        if self.scores_prompt and (self.n or 1) > 1:
            raise invalid(
                f"n is {self.n}: echo with logprobs is supported for one answer only; send one request for each"
            )
        return self


class TextPart(BaseModel):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


def _content(value: object) -> object:
    """A message's text; a list of text parts is joined without separators, other parts are refused."""
    if isinstance(value, str):
        return check_text(value)
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise invalid("content must be a string or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise invalid(f"content[{index}] is of type {kind!r}; only 'text' is supported")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise invalid(f"content[{index}] must hold exactly `type` and `text` (a string)")
        texts.append(part["text"])
    return check_text("".join(texts))


class CalledFunction(Strict):
    """A function's name and its arguments, a JSON object as text."""

    name: Text
    arguments: Text
    # OpenAI's client puts what it made of `arguments` here, and sends it back with the message.
    parsed_arguments: Ignored = Field(default=None, exclude=True)


class ToolCall(Strict):
    """One call of a function, asked for by the model."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored = Field(default=None, exclude=True)  # sent back by who has put it together from a stream

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it: arguments are an object, where they are one."""
        arguments: Any = self.function.arguments
        try:
            parsed = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ChatMessage(Strict):
    """One message of a conversation. `developer` is OpenAI's newer word for `system` and means the same."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    tool_calls: list[ToolCall] | None = Field(
        default=None, fail_fast=True, description="What an assistant asked for."
    )
    tool_call_id: Text | None = Field(default=None, description="Which call a tool's message answers.")
    name: Text | None = Field(default=None, description="Handed to the chat template.")

    # An assistant message sent back as it was received carries these: the first says nothing new, the others are empty.
    parsed: Ignored = None
    refusal: Annotated[Any, Unsupported()] = None
    audio: Annotated[Any, Unsupported()] = None
    function_call: Annotated[Any, Unsupported()] = None
    annotations: Annotated[Any, Unsupported([])] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise invalid("only an assistant's message has tool_calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise invalid("only a tool's message has a tool_call_id")
        if self.content is None and not self.tool_calls:
            raise invalid("content is missing; it must be a string or a list of text parts")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
        }
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class Function(Strict):
    """A function the model may ask for; `parameters` is a JSON schema."""

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[Any, Unsupported(False)] = None


class Tool(Strict):
    """A tool the model may ask for."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True)}


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    # Of many that are wrong only the first is described: a million numbers would be a million errors.
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="OpenAI's newer name of max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: TemplateVariables = Field(
        default_factory=dict, description="Variables for the chat template, such as enable_thinking."
    )

    tools: list[Tool] | None = Field(
        default=None,
        fail_fast=True,
        description="Handed to the chat template; calls in the answer become `tool_calls`.",
    )
    tool_choice: Annotated[Any, Unsupported("auto", "none")] = None
    parallel_tool_calls: Annotated[Any, Unsupported(True)] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none")] = None
    response_format: Annotated[Any, Unsupported({"type": "text"})] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true")
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise invalid("max_tokens and max_completion_tokens are two names of one bound, and they differ")
        return self


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens whose KV was not computed by this request but read from RAM or disk."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts, as OpenAI defines them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(BaseModel):
    """Where the time to the first token went: parts, in milliseconds, that add up to `ttft_ms`."""

    queue_ms: float = Field(
        description="Until the engine took the request, pulling published pages included."
    )
    find_ms: float = Field(description="Looking up what memory and store have of the prompt.")
    open_ms: float = Field(
        description="Opening the artifacts found, and checking their headers and token ids."
    )
    wait_ms: float = Field(
        description="Waiting for the disk. Reading (`restore_ms`) overlaps with computing."
    )
    matmul_ms: float = Field(description="The layers' matrix products.")
    attention_ms: float
    head_ms: float = Field(description="From the last hidden state to the scores of every token.")
    rest_ms: float = Field(
        description="All else: embedding, bookkeeping, choosing the token, other requests."
    )


class KestrelStats(BaseModel):
    """What happened to the prompt. Times in milliseconds; ttft and wall count from the request's arrival."""

    matched_tokens: int
    restored_tokens: int = Field(description="Read from disk.")
    ram_tokens: int = Field(description="Already in the page pool.")
    computed_tokens: int
    prefill_ms: float
    restore_ms: float
    bytes_read: int
    bytes_written: int = Field(description="Saved for this request until its answer ended; more may follow.")
    queue_ms: float
    ttft_ms: float
    wall_ms: float
    timings: Timings
    skipped_tokens: int = Field(default=0, description="On disk, but not read: computing them is quicker.")
    load: str | None = Field(
        default=None, description="What was decided about reading the pages found on disk, and why."
    )
    miss_reason: str | None
    diverged_at: int | None = Field(description="Where the nearest stored prefix departs from the prompt.")
    pulled_tokens: int = Field(default=0, description="Published elsewhere and fetched for this prompt.")
    pulled_bytes: int = 0
    pull_ms: float = Field(default=0.0, description="Waited for them in the queue; part of queue_ms.")
    pull_problem: str | None = Field(default=None, description="Why not all published pages came.")
    foreign: str | None = Field(
        default=None,
        description="Whose numerics the restored rows have, if not this CPU's (cache.accept=portable).",
    )
    key: str | None = Field(
        description="The page that prompt and answer end with: what /v1/kv/purge takes; null for n > 1."
    )


class CompletionLogprobs(BaseModel):
    """Log probabilities of a completion; all lists have one entry for each token.

    An echoed prompt's first token has none: nothing comes before it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """The answer to a prompt, or a piece of it."""

    index: int = 0
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class Completion(BaseModel):
    """Answer of /v1/completions; streamed, every chunk is one of these, and the last carries the numbers."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = Field(default=None, exclude_if=is_none)
    kestrel: KestrelStats | None = Field(default=None, exclude_if=is_none)


class TopLogprob(BaseModel):
    """A token that could have come here."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The token that did come, with its most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a chat answer, one entry for each token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(BaseModel):
    """The model's answer. `content` is null when it consists of tool calls only."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | None = Field(default=None, exclude_if=is_none)


class ChatChoice(BaseModel):
    """The answer to a conversation."""

    index: int = 0
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    kestrel: KestrelStats


class ToolCallDelta(ToolCall):
    """A tool call in a stream; it always comes whole."""

    index: int


class ChatDelta(BaseModel):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=is_none)
    content: str | None = Field(default=None, exclude_if=is_none)
    tool_calls: list[ToolCallDelta] | None = Field(default=None, exclude_if=is_none)


class ChatChunkChoice(BaseModel):
    """A piece of a streamed chat answer."""

    index: int = 0
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None


class ChatCompletionChunk(BaseModel):
    """One event of a streamed chat answer; the last carries the numbers."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = Field(default=None, exclude_if=is_none)
    kestrel: KestrelStats | None = Field(default=None, exclude_if=is_none)


class ErrorDetail(BaseModel):
    """What went wrong; `param` names the field of the request, `code` is for programs."""

    message: str
    type: str
    code: str | None
    param: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Model(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kestrel"] = "kestrel"
    context_tokens: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class PromptOrMessages(Strict):
    """A prompt, or a conversation as /v1/chat/completions would see it."""

    prompt: Any = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, fail_fast=True)
    tools: list[Tool] | None = Field(default=None, fail_fast=True)
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("exactly one of prompt and messages is needed")
        if self.tools is not None and self.messages is None:
            raise invalid("tools need messages")
        return self


class TokenizeRequest(PromptOrMessages):
    """POST /v1/tokenize: a text, or a conversation."""

    prompt: Text | None = None
    add_special_tokens: bool = Field(
        default=True, description="Of a prompt: begin with what the model expects."
    )


class Tokenized(BaseModel):
    """Answer of /v1/tokenize."""

    tokens: list[int]
    count: int
    context_tokens: int


class FindRequest(PromptOrMessages):
    """POST /v1/kv/find: a prompt (text or token ids), or a conversation."""

    prompt: Annotated[
        str | list[int] | None,
        BeforeValidator(
            lambda value: None if value is None else _prompt(value),
            json_schema_input_type=str | list[int] | None,
        ),
    ] = None


class FoundPage(BaseModel):
    """A stored page of a match; `num_used` of its tokens match."""

    key: str
    first: int
    num_tokens: int
    num_used: int
    bytes: int


class Found(BaseModel):
    """What a prompt would find: in memory, on disk, and if little, why. Nothing is computed or read."""

    prompt_tokens: int
    stored_tokens: int = Field(description="Prefix on disk.")
    ram_tokens: int = Field(description="Prefix in the page pool.")
    computed_tokens: int = Field(description="What a request would compute.")
    miss_reason: str | None
    diverged_at: int | None
    pages: list[FoundPage]


class StoredPage(BaseModel):
    """A page in the store. Times are seconds since the epoch."""

    key: str
    parent: str
    namespace: str
    first: int
    num_tokens: int
    bytes: int
    created: float
    last_used: float
    hits: int
    num_children: int
    pinned: bool


class PageList(BaseModel):
    """GET /v1/kv: most recently used first. `next` is the `after` of the following page of the list."""

    object: Literal["list"] = "list"
    data: list[StoredPage]
    total: int
    next: int | None


class Changed(BaseModel):
    """How many pages a change concerned. `kept`: pages that are in use, pinned, or continued by others."""

    changed: int
    kept: int = 0


class PageRequest(Strict):
    """Names a page. For /v1/kv/purge: `kestrel.key` of the session's latest answer."""

    key: str = Field(pattern=r"^[0-9a-f]{32}$")


class StoreCounts(BaseModel):
    """What the store holds, all bytes below its root counted."""

    root: str
    bytes: int
    files: int
    tokens: int
    strangers: int = Field(description="Files below the root that are not artifacts.")
    quarantined: int


class QueueCounts(BaseModel):
    """Answers in the server: at most `places` are generated side by side, and `capacity` more may wait."""

    running: int
    places: int
    waiting: int
    capacity: int


class Ready(BaseModel):
    """GET /ready: whether requests are taken. The only thing told to those without a key."""

    ready: bool


class Health(BaseModel):
    """GET /health."""

    status: Literal["ok", "shutting down"]
    model: str
    namespace: str
    uptime_seconds: float
    queue: QueueCounts
    store: StoreCounts | None = Field(description="null when the cache is off or cannot be read.")
    store_problem: str | None = Field(
        description="Why it cannot be read; requests are answered all the same."
    )


class PrefixState(BaseModel):
    """A prefix declared in the configuration; `stored_tokens` of its `num_tokens` are on disk now."""

    name: str
    state: Literal["ready", "absent"]
    num_tokens: int
    stored_tokens: int


class PrefixList(BaseModel):
    """GET /v1/kv/prefixes."""

    object: Literal["list"] = "list"
    data: list[PrefixState]
