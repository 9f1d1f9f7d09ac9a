"""The connection to Slack in socket mode: events come over a WebSocket that this process opens; no port listens here.

    bot = SlackBot(api, SlackOptions(app_token=…, bot_token=…))
    await bot.run()                     # until canceled

``slack_sdk`` (an extra) connects, answers pings and reconnects, in its own threads; questions are answered in the
event loop.  An event is acknowledged at once, because Slack repeats those that are not; a repeated one is dropped.
Messages of bots are ignored.  Neither a token nor the address of the WebSocket, which contains a secret, is logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slack_sdk import WebClient
from slack_sdk.errors import SlackApiError, SlackClientError
from slack_sdk.socket_mode.builtin import SocketModeClient
from slack_sdk.socket_mode.client import BaseSocketModeClient
from slack_sdk.socket_mode.request import SocketModeRequest
from slack_sdk.socket_mode.response import SocketModeResponse

from stepscope.assistant.hub_api import HubApi
from stepscope.assistant.slack_questions import answer_question, parse_question, slack_message
from stepscope.errors import HubError
from stepscope.records.text import say

__all__ = ["SlackBot", "SlackOptions"]

MOST_WAITING = 32
"""Questions that may wait for an answer; further ones are dropped."""
REMEMBERED = 1000
TIMEOUT_S = 15
API_URL = "https://slack.com/api/"


@dataclass(frozen=True, kw_only=True)
class SlackOptions:
    app_token: str = field(repr=False)
    bot_token: str = field(repr=False)
    api_url: str = API_URL
    changes: bool = False
    """Whether anybody may silence and acknowledge."""
    users: frozenset[str] = frozenset()
    """If there are any, only these may."""


class SlackBot:
    def __init__(self, api: HubApi, options: SlackOptions) -> None:
        self._api = api
        self._options = options
        # What slack_sdk logs may contain the address of the WebSocket.
        self._quiet = logging.getLogger("stepscope.slack")
        self._quiet.setLevel(logging.CRITICAL + 1)
        self._web = WebClient(options.bot_token, options.api_url, timeout=TIMEOUT_S, logger=self._quiet)
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._answering: set[asyncio.Task[None]] = set()
        self._few = asyncio.Semaphore(2)
        self.connected = asyncio.Event()

    async def run(self) -> None:
        """Answer questions until canceled.  HubError if Slack refuses the tokens or cannot be reached at first."""
        loop = asyncio.get_running_loop()

        def listen(source: BaseSocketModeClient, request: SocketModeRequest) -> None:
            source.send_socket_mode_response(SocketModeResponse(envelope_id=request.envelope_id))
            loop.call_soon_threadsafe(self._take, request.type, request.payload)

        client: SocketModeClient | None = None
        try:
            try:
                await asyncio.to_thread(self._web.auth_test)
                client = SocketModeClient(
                    self._options.app_token, logger=self._quiet, web_client=self._web, concurrency=2, ping_interval=10
                )
                client.socket_mode_request_listeners.append(listen)
                client.on_error_listeners.append(lambda error: say(f"Slack: {type(error).__name__}; reconnecting"))
                await asyncio.to_thread(client.connect)
            except SlackApiError as error:
                why = error.response.get("error", "unknown error")
                raise HubError(f"Slack refused the connection: {why}") from None
            except (SlackClientError, OSError) as error:
                raise HubError(f"cannot reach Slack at {self._options.api_url}: {type(error).__name__}") from None
            self.connected.set()
            await asyncio.Event().wait()
        finally:
            if client is not None:
                await asyncio.to_thread(client.close)
            for task in self._answering:
                task.cancel()
            await asyncio.gather(*self._answering, return_exceptions=True)

    def _take(self, kind: str, payload: Mapping[str, Any]) -> None:
        event = payload.get("event")
        if kind != "events_api" or not isinstance(event, Mapping) or not _is_question(event):
            return
        known = str(payload.get("event_id") or event.get("ts"))
        if known in self._seen or len(self._answering) >= MOST_WAITING:
            return
        self._seen[known] = None
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        task = asyncio.create_task(self._answer(event))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, event: Mapping[str, Any]) -> None:
        user = str(event.get("user", ""))
        may_change = self._options.changes and (not self._options.users or user in self._options.users)
        async with self._few:
            question = parse_question(str(event.get("text", "")))
            text = await answer_question(self._api, question, may_change=may_change, by=f"Slack user {user}")
            thread = event.get("thread_ts") or event.get("ts")
            try:
                await asyncio.to_thread(
                    self._web.chat_postMessage,
                    channel=str(event["channel"]),
                    thread_ts=thread,
                    unfurl_links=False,
                    **slack_message(text),
                )
            except SlackApiError as error:
                say(f"Slack did not take an answer: {error.response.get('error', 'unknown error')}")
            except (SlackClientError, OSError) as error:
                say(f"an answer could not be sent to Slack: {type(error).__name__}")


def _is_question(event: Mapping[str, Any]) -> bool:
    """Whether a person mentioned the bot, or wrote to it directly."""
    if event.get("bot_id") or event.get("subtype") or not event.get("user") or not event.get("channel"):
        return False
    return event.get("type") == "app_mention" or (event.get("type") == "message" and event.get("channel_type") == "im")
