"""A client of the chat completions of an API compatible with OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rljob.api.rewards import NotScored
from rljob.rewards.model_api import ModelApi


class ChatApi(ModelApi):
    """Sends one message at a time to a judge.

    Args:
        urls: base addresses, with the version of the API, of servers with the same model; used in turn.
        model: name of the model.
        max_tokens: limit of a reply.
        temperature: of the model.
        token: see :class:`ModelApi`.
        returns: see :class:`ModelApi`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: str,
        max_tokens: int,
        temperature: float,
        token: str = "",
        returns: bool = False,
    ) -> None:
        super().__init__([f"{url.rstrip('/')}/chat/completions" for url in urls], "judge", token, returns)
        self._settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "stream": False}

    async def ask(self, message: str) -> str:
        """Return the complete text of a reply to a message.

        Raises:
            NotScored: see :meth:`ModelApi.post`; or the reply is no complete text.
            Unavailable: see :meth:`ModelApi.post`.
        """
        return _text_of(await self.post(self._settings | {"messages": [{"role": "user", "content": message}]}))


def _text_of(reply: bytes) -> str:
    """Return the text of a reply.

    Raises:
        NotScored: it is no chat completion, or the model did not end it.
    """
    try:
        choice = json.loads(reply)["choices"][0]
        finish, text = choice.get("finish_reason"), choice["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise NotScored(f"the judge answered something else than a chat completion ({error!r})") from None
    if finish != "stop":
        raise NotScored(f"the judge's reply is not complete (finish_reason {finish!r}); raise maxTokens")
    if not isinstance(text, str):
        raise NotScored("the judge's reply has no text")
    return text
