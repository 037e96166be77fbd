"""What environments say, as messages."""

from typing import Any

from harts_hf.rollouts.contract import check_text
from harts_hf.rollouts.environment import Message
from harts_hf.rollouts.environments.failures import ContractError, EpisodeFailure
from harts_hf.rollouts.fields import shortened


def as_messages(said: Any, what: str) -> list[Message]:
    """What an environment says, as messages: a text is the content of a user's.

    Args:
        said: a text, or a list of at least one message.
        what: for the error, such as ``"Riddle.reset to return"``.

    Raises:
        EpisodeFailure: something else; contents that are no text (images), or no UTF-8.
    """
    try:
        if not isinstance(said, list):
            check_text(said, f"{what} a text or a list of messages")
            return [{"role": "user", "content": said}]
        if not said or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in said):
            raise ContractError(f"expected {what} messages, objects with a role, got {shortened(said)}")
        for message in said:
            _check_content(message, what)
    except ContractError as error:
        raise EpisodeFailure("contract", str(error)) from error
    return said


def _check_content(message: Message, what: str) -> None:
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if not isinstance(block, dict) or block.get("type") != "text":
            kind = block.get("type") if isinstance(block, dict) else block
            raise ContractError(f"expected {what} messages of text, got content of the type {shortened(kind)}")
        check_text(block.get("text"), f"{what} messages whose content is text")
