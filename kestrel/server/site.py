"""What the routes of one server have in common."""

from dataclasses import dataclass

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from kestrel.cache.scope import Scope
from kestrel.config import Config
from kestrel.errors import PromptTooLong, RequestError
from kestrel.runtime import Runtime
from kestrel.server import wire
from kestrel.server.keys import Caller
from kestrel.server.timelimit import run_limited
from kestrel.server.warming import NamedPrefix
from kestrel.server.worker import EngineWorker

TEMPLATE_SECONDS = 5.0  # how long a chat template may take; it runs for milliseconds


@dataclass(frozen=True)
class Site:
    """One server: the model, the engine thread, the log and the configured prefixes."""

    runtime: Runtime
    config: Config
    worker: EngineWorker
    prefixes: list[NamedPrefix]
    started_at: float  # seconds since the epoch

    def scope_of(self, http: HttpRequest) -> Scope | None:
        """Whose pages a request finds and adds; None for everybody's."""
        tenant = caller_of(http).tenant
        return None if tenant is None else self.runtime.tenant_scope(tenant)

    async def tokens_of_prompt(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt; ids are taken as they are. PromptTooLong."""
        if isinstance(prompt, str):
            prompt = await run_in_threadpool(self.runtime.tokenizer.encode, prompt)
        return self.within_limits(prompt)

    async def tokens_of_chat(
        self, chat: wire.ChatRequest | wire.TokenizeRequest | wire.FindRequest
    ) -> list[int]:
        """Token ids of a conversation through the chat template. RequestError, TemplateError, PromptTooLong."""
        return self.within_limits(await run_in_threadpool(self._encode_chat, chat))

    def _encode_chat(self, chat: wire.ChatRequest | wire.TokenizeRequest | wire.FindRequest) -> list[int]:
        template = self.runtime.chat
        if template is None:
            raise RequestError(
                "the model has no chat template; use /v1/completions, or serve with model.chat_template=FILE"
            )
        tools = None
        if chat.tools and getattr(chat, "tool_choice", None) != "none":
            if not template.takes_tools:
                raise RequestError("tools are not supported: the model's chat template has no place for them")
            tools = [tool.for_template() for tool in chat.tools]
        messages = [message.for_template() for message in chat.messages or ()]
        text = run_limited(
            lambda: template.render(messages, tools, add_generation_prompt=True, **chat.chat_template_kwargs),
            TEMPLATE_SECONDS,
        )
        if wire.find_unpaired(text) is not None:  # messages are checked, so it came from here
            raise RequestError(
                "tools or chat_template_kwargs hold half of a surrogate pair; send text that is valid Unicode"
            )
        return self.runtime.tokenizer.encode(text)

    def within_limits(self, tokens: list[int]) -> list[int]:
        """The tokens of a prompt, unless there are too many of them."""
        context, limit = self.runtime.context_tokens, self.config.server.max_prompt_tokens
        if len(tokens) >= context:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, and the context of {context} must hold "
                "at least one more, for the answer; shorten the prompt"
            )
        if limit is not None and len(tokens) > limit:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, at most {limit} are taken (server.max_prompt_tokens)"
            )
        return tokens


def caller_of(http: HttpRequest) -> Caller:
    """Who sent a request."""
    caller: Caller = http.scope["caller"]
    return caller
