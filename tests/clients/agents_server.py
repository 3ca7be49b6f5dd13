"""An MCP server with the Python SDK or with FastMCP: `agents_server.py mcp|fastmcp PORT`. It counts the calls of its tools."""

import logging
import sys

import uvicorn

logging.disable(logging.INFO)
kind, port = sys.argv[1], int(sys.argv[2])
if kind == "mcp":
    from mcp.server import MCPServer

    server = MCPServer("python")
    app = server.streamable_http_app
else:
    from fastmcp import FastMCP

    server = FastMCP("fastmcp")
    app = server.http_app
calls = {"search": 0, "count": 0}


@server.tool()
def search(text: str) -> str:
    """Count the call and return the text."""
    calls["search"] += 1
    return text


@server.tool()
def count() -> int:
    """Return the number of calls of `search`."""
    return calls["search"]


uvicorn.run(app(), host="127.0.0.1", port=port, log_level="error")
