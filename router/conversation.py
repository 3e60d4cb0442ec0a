"""A conversation as the chat template wants it, made from the protocol's messages, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from diptych.contract.errors import InvalidRequest
from diptych.router.tokenizer import must_be_text
from diptych.v1 import inference_pb2 as pb

ROLES: Mapping[int, str] = {
    pb.ROLE_SYSTEM: "system",
    pb.ROLE_USER: "user",
    pb.ROLE_ASSISTANT: "assistant",
    pb.ROLE_TOOL: "tool",
}


class Conversation(msgspec.Struct, frozen=True):
    """messages, tools: plain values, in transformers' form. open_turn: end with the opening of an assistant's turn.
    continued: leave the last message, an assistant's, open."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    open_turn: bool = True
    continued: bool = False


def conversation(chat: pb.Chat) -> Conversation:
    """Raises `InvalidRequest` naming the field."""
    if not chat.messages:
        raise InvalidRequest("chat.messages is empty; at least one message is needed.")
    continued = chat.continue_final_message
    open_turn = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continued
    if continued and open_turn:
        raise InvalidRequest("chat.continue_final_message and chat.add_generation_prompt exclude each other.")
    if continued and chat.messages[-1].role != pb.ROLE_ASSISTANT:
        raise InvalidRequest("chat.continue_final_message needs an assistant's message as the last one.")
    if continued and chat.messages[-1].tool_calls:
        raise InvalidRequest("chat.continue_final_message cannot continue a message with tool_calls.")
    messages = tuple(_message(f"chat.messages[{index}]", message) for index, message in enumerate(chat.messages))
    return Conversation(messages, _tools(chat), open_turn, continued)


def _message(where: str, message: pb.Message) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(ROLES.values())}.")
    entry: dict[str, Any] = {"role": ROLES[message.role], "content": _content(where, message)}
    if message.HasField("name"):
        entry["name"] = message.name
    if message.tool_calls:
        if message.role != pb.ROLE_ASSISTANT:
            raise InvalidRequest(f"{where}.tool_calls are allowed in an assistant's message only.")
        entry["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(message.tool_calls)]
    if message.HasField("tool_call_id"):
        if message.role != pb.ROLE_TOOL:
            raise InvalidRequest(f"{where}.tool_call_id is allowed in a tool's message only.")
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _content(where: str, message: pb.Message) -> str:
    kind = message.WhichOneof("content")
    if kind == "text":
        return message.text
    if kind == "parts":
        return "\n".join(_parts(where, message.parts))
    if message.tool_calls:
        return ""
    raise InvalidRequest(f"{where}.content is missing.")


def _parts(where: str, content: pb.ContentParts) -> list[str]:
    if not content.parts:
        raise InvalidRequest(f"{where}.parts is empty.")
    for index, part in enumerate(content.parts):
        if part.WhichOneof("part") != "text":
            raise InvalidRequest(f"{where}.parts[{index}] is no text; only text parts are supported.")
    return [part.text for part in content.parts]


def _call(where: str, call: pb.ToolCall) -> dict[str, Any]:
    if not call.name:
        raise InvalidRequest(f"{where}.name is missing.")
    arguments = _json(f"{where}.arguments_json", call.arguments_json or "{}")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.arguments_json must be a JSON object.")
    return {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": arguments}}


def _tools(chat: pb.Chat) -> tuple[dict[str, Any], ...]:
    if not chat.HasField("tools_json"):
        return ()
    tools = _json("chat.tools_json", chat.tools_json)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest("chat.tools_json must be a JSON array of objects.")
    return tuple(tools)


def _json(field: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is not valid JSON: {error}.") from None
    must_be_text(field, json.dumps(value, ensure_ascii=False))
    return value
