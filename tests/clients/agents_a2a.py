"""The A2A SDK through two gateways on one Redis: a limit counts each method of A2A 1.0 and 0.3 separately, and is exact."""

import asyncio
import contextlib
import itertools
import json
from importlib.metadata import version

import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.client.errors import A2AClientError
from a2a.helpers.proto_helpers import get_message_text, get_text_parts, new_text_message
from a2a.types import GetTaskRequest, Role, SendMessageRequest, TaskState

from gateway import Gateway, expect

# The number of calls per method, and how many of them the limit admits.
CALLS, ADMITTED = 60, 25
WORDS = ["one", "zwölf", "drei"]
# Protocol version, whether the response is a stream, and the method. One client calls all methods.
METHODS = [
    ("1.0", False, "SendMessage"),
    ("1.0", True, "SendStreamingMessage"),
    ("0.3", False, "message/send"),
    ("0.3", True, "message/stream"),
]
# Numbers for the names of clients that ask the agent for a count.
COUNTS = itertools.count()


def configuration(redis, port):
    return f"""
[store]
url = "redis://127.0.0.1:{redis}"
# With this timeout, no check fails on a busy machine.
timeout = "5s"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[admin]
address = "127.0.0.1:0"
[limit.calls]
by = ["header:x-agent", "jsonrpc:method"]
algorithm = "sliding-log"
quota = "{ADMITTED}/24h"
[upstream.agent]
servers = ["http://127.0.0.1:{port}"]
[[route]]
name = "card"
path = "/.well-known/agent-card.json"
upstream = "agent"
[[route]]
name = "a2a"
path = "/a2a"
upstream = "agent"
limits = ["calls"]
"""


class Agent:
    """The SDK as a client of one gateway. `call` takes the protocol version, and whether the response is streamed."""

    def __init__(self, http, url, card):
        self.http, self.url, self.card = http, url, card

    def client(self, protocol, is_stream):
        card = type(self.card)()
        card.CopyFrom(self.card)
        del card.supported_interfaces[:]
        chosen = [interface for interface in self.card.supported_interfaces if interface.protocol_version == protocol]
        expect(len(chosen) == 1, f"the interfaces of {protocol}: {self.card}")
        # The agent card contains the agent's own address. An operator would set the gateway's address instead.
        card.supported_interfaces.append(chosen[0])
        card.supported_interfaces[0].url = f"{self.url}/a2a"
        return ClientFactory(ClientConfig(httpx_client=self.http, streaming=is_stream)).create(card)

    async def call(self, protocol, is_stream, text):
        """Send a message. Return the events of the response."""
        request = SendMessageRequest(message=new_text_message(text, role=Role.ROLE_USER))
        return [event async for event in self.client(protocol, is_stream).send_message(request)]


@contextlib.asynccontextmanager
async def agents(urls, name, protocol="1.0"):
    """Get the agent card through each gateway. Limits count the calls under `name`."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for url in urls:
            headers = {"x-agent": name} | ({} if protocol == "0.3" else {"A2A-Version": protocol})
            http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=60, trust_env=False))
            found.append(Agent(http, url, await A2ACardResolver(http, url).get_agent_card()))
        yield found


def expect_denial(error, denials):
    """Check that the SDK received the gateway's denial."""
    response = getattr(error.__cause__, "response", None)
    expect(response is not None and response.status_code == 429, f"another error: {error!r} {error.__cause__!r}")
    asked, said = json.loads(response.request.content), response.json()
    expect((said["jsonrpc"], said["id"], said["error"]["code"]) == ("2.0", asked["id"], 429), said)
    expect(said["error"]["data"]["violated-policies"] == ["calls"] and int(response.headers["retry-after"]) > 0, said)
    denials.append(asked["method"])


async def check_method(urls, protocol, is_stream, method):
    """Call a method concurrently through both gateways. Check that exactly the quota is admitted, and that responses are complete."""
    first = "task" if is_stream else "echo"
    denials = []
    async with agents(urls, "agent", protocol) as found:
        before = await count(urls, first)

        async def call(index):
            text = " ".join([first, *WORDS, str(index)])
            try:
                events = await found[index % len(found)].call(protocol, is_stream, text)
            except A2AClientError as error:
                expect_denial(error, denials)
                return None
            if not is_stream:
                expect([get_message_text(event.message) for event in events] == [text], events)
                return None
            artifacts = [get_text_parts(event.artifact_update.artifact.parts) for event in events if event.HasField("artifact_update")]
            expect(artifacts == [[word] for word in [*WORDS, str(index)]], events)
            expect(events[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED, events)
            return events[0].task.id

        tasks = [task for task in await asyncio.gather(*(call(index) for index in range(CALLS))) if task]
        expect(denials == [method] * (CALLS - ADMITTED), f"{method}: {len(denials)} of {CALLS} denied: {set(denials)}")
        admitted = await count(urls, first) - before
        expect(admitted == ADMITTED, f"{method}: the agent got {admitted} messages")
        # Through both gateways, other methods still have quota.
        for index, task in enumerate(tasks[:2]):
            got = await found[index].client(protocol, False).get_task(GetTaskRequest(id=task))
            expect(got.id == task and len(got.artifacts) == len(WORDS) + 1, got)


async def count(urls, word):
    """Return how many messages with this first word the agent received."""
    # Use another client, which has its own quota.
    async with agents(urls[:1], f"count-{next(COUNTS)}") as (agent,):
        (event,) = await agent.call("1.0", False, f"count {word}")
        return int(get_message_text(event.message))


def check(binary, redis, port):
    text = configuration(redis, port)
    with Gateway(binary, text) as first, Gateway(binary, text) as second:
        for protocol, is_stream, method in METHODS:
            asyncio.run(check_method([first.urls[0], second.urls[0]], protocol, is_stream, method))
    methods = ", ".join(method for _, _, method in METHODS)
    return f"a2a-sdk {version('a2a-sdk')}: {ADMITTED} of {CALLS} calls admitted for each of {methods}"
