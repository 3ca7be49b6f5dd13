"""An agent with the A2A SDK: `agents_a2a_server.py PORT`. It speaks A2A 1.0 and 0.3 over JSON-RPC, and counts its messages."""

import logging
import sys

import uvicorn
from a2a.helpers.proto_helpers import (
    get_message_text,
    new_task_from_user_message,
    new_text_artifact_update_event,
    new_text_message,
    new_text_status_update_event,
)
from a2a.server.agent_execution import AgentExecutor
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, TaskState
from starlette.applications import Starlette

logging.disable(logging.WARNING)
port = int(sys.argv[1])
# The number of received messages, by their first word.
messages = {}


class Agent(AgentExecutor):
    """Return a message with the same text, or a task with an artifact for each word. For `count WORD`, return the count of WORD."""

    async def execute(self, context, event_queue):
        first, _, rest = (text := get_message_text(context.message)).partition(" ")
        if first == "count":
            await event_queue.enqueue_event(new_text_message(str(messages.get(rest, 0))))
            return
        messages[first] = messages.get(first, 0) + 1
        if first != "task":
            await event_queue.enqueue_event(new_text_message(text))
            return
        task = new_task_from_user_message(context.message)
        await event_queue.enqueue_event(task)
        for number, word in enumerate(rest.split()):
            await event_queue.enqueue_event(new_text_artifact_update_event(task.id, task.context_id, f"a{number}", word))
        state = TaskState.TASK_STATE_COMPLETED
        await event_queue.enqueue_event(new_text_status_update_event(task.id, task.context_id, state, "done"))

    async def cancel(self, context, event_queue):
        raise NotImplementedError


url = f"http://127.0.0.1:{port}/a2a"
card = AgentCard(
    name="agent",
    description="Returns what it gets.",
    version="1.0.0",
    supported_interfaces=[AgentInterface(url=url, protocol_binding="JSONRPC", protocol_version=version) for version in ["1.0", "0.3"]],
    capabilities=AgentCapabilities(streaming=True),
    default_input_modes=["text/plain"],
    default_output_modes=["text/plain"],
    skills=[AgentSkill(id="echo", name="echo", description="Returns the text.", tags=["echo"])],
)
handler = DefaultRequestHandler(Agent(), InMemoryTaskStore(), card)
routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/a2a", enable_v0_3_compat=True)]
uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="error")
