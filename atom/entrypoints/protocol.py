"""Bodies of requests in OpenAI's form: what is read, what is left aside, and what is refused.

A field that this server knows but cannot honour is refused rather than left out, unless its value
asks for nothing.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from atom.entrypoints.api_error import ApiError

_StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
_TokenId = Annotated[int, Field(ge=0)]
_StopTokenId = Annotated[int, Field(ge=0, lt=2**31)]
#: a list is read up to its first fault: a million of them would stop the server for minutes
_TokenIds = Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
#: the engine could not serve more, and to read them takes time
_MOST_MESSAGES = 16_384

#: fields that change nothing about the tokens
_IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "verbosity",
    }
)
#: fields that are not honoured, each with the values that ask for nothing
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "skip_special_tokens": (True,),
}
_ADVICE = {
    "n": "send the request n times; the engine batches them",
    "best_of": "send the request several times and choose",
    "top_logprobs": "only the sampled token's logprob is known: send logprobs=true alone",
    "tool_choice": "tools reach the prompt, but a call of one cannot be forced",
    "min_tokens": "it is known only together with ignore_eos and without stop",
    "response_format": "output is not constrained to a grammar",
}
#: what a field may be, where it may be several things
_EXPECTED = {
    "prompt": "expected a text, or a list of token ids with at least one",
    "messages": f"expected a list of 1 to {_MOST_MESSAGES} messages",
    "stop": "expected a text of 1 to 256 characters, or a list of at most 16 such",
    "stop_token_ids": "expected a list of at most 64 token ids",
}
#: pydantic's words for these are about Python
_KINDS = {"model_type": "expected an object", "dict_type": "expected an object"}
#: only such an escape can bring a surrogate into a text
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, values: Any) -> Any:
        """Only the first is told, so only it is kept."""
        if not isinstance(values, dict):
            return values
        known = cls.model_fields
        unknown = iter([name for name in values if name not in known])
        next(unknown, None)
        for name in unknown:
            del values[name]
        return values


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(_Body):
    """Fields that both kinds of completion have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _StopString | Annotated[list[_StopString], Field(max_length=16)] | None = None
    stop_token_ids: list[_StopTokenId] | None = Field(None, max_length=64)
    ignore_eos: bool | None = None

    default_max_tokens: ClassVar[int | None] = None
    prompt_field: ClassVar[str] = "prompt"

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, as a list in any case."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token's log probability is part of the answer."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Tokens to generate at most; ``None`` means what the model's length leaves."""
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``: one prompt, as text or as tokens."""

    prompt: (
        str
        | _TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[_TokenIds], Field(min_length=1, fail_fast=True)]
    )
    logprobs: int | None = Field(None, ge=0)

    default_max_tokens: ClassVar[int | None] = 16

    @property
    def wants_logprobs(self) -> bool:
        """``logprobs`` of 0 is the sampled token's alone."""
        return self.logprobs is not None

    def one_prompt(self) -> str | list[int]:
        """The prompt.

        Raises:
            ApiError: if there are several.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], int):
            return [token for token in prompt if isinstance(token, int)]
        if len(prompt) > 1:
            raise ApiError(
                400,
                f"prompt holds {len(prompt)} prompts; send one a request (the engine batches "
                "requests)",
                param="prompt",
            )
        only = prompt[0]
        return only if isinstance(only, str) else list(only)


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(strict=True)

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A turn of a conversation; fields that a template may know are kept."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: _Objects | None = None

    def plain(self) -> dict[str, Any]:
        """The message with its content as one text, as chat templates want it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        values = {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        values |= {"role": "system" if self.role == "developer" else self.role}
        values |= {"content": content or ""}
        if self.tool_calls:
            values["tool_calls"] = self.tool_calls
        return values


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    tools: _Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    prompt_field: ClassVar[str] = "messages"

    @property
    def wants_logprobs(self) -> bool:
        """Whether ``logprobs`` is set."""
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int | None:
        """``max_completion_tokens``, or ``max_tokens`` of older clients."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    def template_options(self) -> dict[str, Any]:
        """Arguments of the chat template beside the messages."""
        options = dict(self.chat_template_kwargs or {})
        taken = {"tokenize", "add_generation_prompt", "chat_template", "conversation", "messages"}
        if wrong := sorted(taken & options.keys()):
            raise ApiError(
                400, f"chat_template_kwargs may not set {wrong[0]}", param="chat_template_kwargs"
            )
        return {**options, "tools": self.tools} if self.tools else options


_Request = TypeVar("_Request", bound=GenerationRequest)


def parse_body(kind: type[_Request], body: bytes) -> _Request:
    """Read a request's body.

    Raises:
        ApiError: 400, naming the first field at fault, what was given and what is allowed.
    """
    try:
        # JSON between machines is UTF-8; json would take surrogates among it
        text = body.decode("utf-8-sig")
        values = json.loads(text)
    except UnicodeDecodeError as error:
        said = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        raise ApiError(400, said, code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None
    if not isinstance(values, dict):
        shown = json.dumps(values)[:80]
        raise ApiError(400, f"the body is {shown}; expected an object", code="invalid_json")
    if _SURROGATE_ESCAPE.search(text):
        _refuse_surrogates(values)
    _take_out_unsupported(kind, values)
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explain(kind, error) from None


def _refuse_surrogates(values: dict[str, Any]) -> None:
    """Refuse half a surrogate pair, which is no text: no tokenizer and no answer can hold it."""
    left: list[tuple[str, Any]] = [("", values)]
    while left:
        place, value = left.pop()
        inner: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            inner = value.items()
        elif isinstance(value, list):
            inner = enumerate(value)
        words = [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
        for word in words:
            if half := _SURROGATE.search(word):
                name = "a field's name" if isinstance(value, dict) else "the text"
                said = f"{name} holds {ascii(half[0])[1:-1]}, half of a surrogate pair"
                raise ApiError(400, f"{place or 'body'}: {said}", param=place or None)
        for key, one in inner:
            if isinstance(one, (str, dict, list)):
                name = ascii(str(key)[:100])[1:-1]
                left.append((f"{place[:200]}.{name}" if place else name, one))


def _take_out_unsupported(kind: type[GenerationRequest], values: dict[str, Any]) -> None:
    ends_early = values.get("stop") or values.get("stop_token_ids") or not values.get("ignore_eos")
    least = values.get("min_tokens")
    if not ends_early and type(least) is int and least >= 0:
        # nothing could end the answer before its last token, so it has its least
        del values["min_tokens"]
    known = kind.model_fields
    for name in [name for name in values if name not in known]:
        if name in _IGNORED:
            del values[name]
        elif name in _UNSUPPORTED:
            value = values.pop(name)
            if value is not None and not _is_among(value, _UNSUPPORTED[name]):
                advice = _ADVICE.get(name, "leave it out")
                raise ApiError(
                    400,
                    f"{name}={json.dumps(value)[:80]} is not supported: {advice}",
                    param=name,
                    code="unsupported_parameter",
                )


def _is_among(value: Any, known: Sequence[Any]) -> bool:
    # true is no 1 here
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known)


def _explain(kind: type[GenerationRequest], error: ValidationError) -> ApiError:
    # a union reports every arm's fault; the deepest one is nearest to what was meant
    faults = error.errors(include_url=False)
    fault = max(faults, key=lambda one: len(one["loc"]))
    if any(len(one["loc"]) == 1 for one in faults):
        fault = next(one for one in faults if len(one["loc"]) == 1)
    *above, last = fault["loc"] or ("body",)
    place = [str(part) for part in above if _names_a_place(part)]
    if fault["type"] == "extra_forbidden":
        given = str(last)
        known = _fields_at(kind, place)
        near = difflib.get_close_matches(given[:100], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        # a client's own word: it may be long, and need not be Unicode
        name = ".".join([*place, ascii(given[:100])[1:-1]])
        return ApiError(400, f"{name}: no such field; {hint}", param=name)
    if _names_a_place(last):
        place.append(str(last))
    name = ".".join(place)
    said = _EXPECTED.get(name) or _KINDS.get(fault["type"])
    if fault["type"] == "missing":
        return ApiError(
            400, f"{name}: the field is missing" + (f"; {said}" if said else ""), param=name
        )
    said = said or fault["msg"][:1].lower() + fault["msg"][1:]
    given = f", got {json.dumps(fault['input'])[:80]}"
    return ApiError(400, f"{name}: {said}{given}", param=name)


def _fields_at(kind: type[BaseModel], place: Sequence[str]) -> list[str]:
    """Fields of the object at a place within a body."""
    for name in place:
        field = kind.model_fields.get(name)
        arms = (None,) if field is None else (field.annotation, *get_args(field.annotation))
        kind = next((a for a in arms if isinstance(a, type) and issubclass(a, BaseModel)), kind)
    return list(kind.model_fields)


def _names_a_place(part: int | str) -> bool:
    """Whether it is a field or an index; a union's arms stand in a fault's place, too."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))
