"""grpcio as client and server: calls of each kind, trailers, errors and deadlines. A denial is RESOURCE_EXHAUSTED."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from urllib.parse import urlsplit

import grpc

from gateway import CERTIFICATE, expect


def serve():
    """Start a server whose messages are bytes, without Protocol Buffers. Return its address."""

    def unary(message, context):
        if message == b"missing":
            context.abort(grpc.StatusCode.NOT_FOUND, "no such thing: 100 %")
        if message == b"slow":
            gone = threading.Event()
            context.add_callback(gone.set)
            # Wait until the deadline of the caller.
            gone.wait(20)
            return b""
        context.set_trailing_metadata([("x-trailer", "last"), ("x-bytes-bin", b"\x00\xff")])
        return dict(context.invocation_metadata()).get("x-more", "").encode() + message

    def stream(message, _context):
        for number in range(100):
            yield message + b" %d" % number

    def collect(messages, _context):
        return b"%d" % sum(len(message) for message in messages)

    def converse(messages, _context):
        for message in messages:
            yield message

    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Collect": grpc.stream_unary_rpc_method_handler(collect),
        "Converse": grpc.stream_stream_rpc_method_handler(converse),
    }
    server = grpc.server(ThreadPoolExecutor(8))
    for service in ["test.Echo", "test.Limited"]:
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    # Keep a reference, because a server stops when it is garbage-collected.
    RUNNING.append(server)
    return f"127.0.0.1:{port}"


RUNNING = []


def failure(call, *arguments, **options):
    """Return the error of a failed call."""
    try:
        call(*arguments, **options)
    except grpc.RpcError as error:
        return error
    raise AssertionError("the call succeeds")


def calls(channel):
    unary, missing = channel.unary_unary("/test.Echo/Unary"), channel.unary_unary("/test.Echo/Nothing")
    answer, call = unary.with_call(b"hello", metadata=[("x-more", "more-")], timeout=10)
    trailers = dict(call.trailing_metadata())
    expect(answer == b"more-hello", answer)
    expect((trailers["x-trailer"], trailers["x-bytes-bin"]) == ("last", b"\x00\xff"), trailers)
    large = bytes(3 << 20)
    expect(unary(large, timeout=10) == large, "3 MiB both ways")

    error = failure(unary, b"missing", timeout=10)
    expect((error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "no such thing: 100 %"), error)
    expect(failure(missing, b"", timeout=10).code() == grpc.StatusCode.UNIMPLEMENTED, "a method that is not there")
    expect(failure(unary, b"slow", timeout=0.5).code() == grpc.StatusCode.DEADLINE_EXCEEDED, "a deadline")

    streamed = list(channel.unary_stream("/test.Echo/Stream")(b"event", timeout=10))
    expect(streamed == [b"event %d" % number for number in range(100)], streamed)
    pieces = iter([bytes(1 << 16)] * 100)
    expect(channel.stream_unary("/test.Echo/Collect")(pieces, timeout=10) == b"%d" % (100 << 16), "100 pieces")

    # Each response arrives before the next request is sent, so the gateway does not hold messages back.
    questions = SimpleQueue()
    answers = channel.stream_stream("/test.Echo/Converse")(iter(questions.get, None), timeout=10)
    for number in range(10):
        questions.put(b"%d" % number)
        expect(next(answers) == b"%d" % number, f"answer {number}")
    questions.put(None)
    expect(list(answers) == [], "the end")


def limited(channel):
    statuses = []
    for _ in range(5):
        try:
            channel.unary_unary("/test.Limited/Unary")(b"", timeout=10)
            statuses.append(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            statuses.append(error.code())
            expect("try again in" in error.details(), error.details())
            expect("retry-after" in dict(error.initial_metadata()) | dict(error.trailing_metadata()), error)
    expect(statuses == [grpc.StatusCode.OK] * 3 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2, statuses)


def check(clear, tls):
    secure = grpc.ssl_channel_credentials(CERTIFICATE.read_bytes())
    options = [("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(urlsplit(clear).netloc, options=options) as channel:
        calls(channel)
        limited(channel)
    with grpc.secure_channel(urlsplit(tls).netloc, secure, options=options) as channel:
        calls(channel)
    return f"grpcio {grpc.__version__}: the four kinds of calls, trailers, errors, deadlines; 429 is RESOURCE_EXHAUSTED"
