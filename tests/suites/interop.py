#!/usr/bin/env python3
"""gRPC's interoperability test cases with grpcio, without the gateway, through it, and through its TLS listener: `make test-suites`.

    interop.py BINARY

The names of the cases are those in gRPC's interop-test-descriptions.md. Messages are JSON with padding instead of Protocol Buffers. If a
case fails without the gateway, the case is wrong.
"""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import grpc
import servers
from gateway import CERTIFICATE, KEY, expect
from report import Report

# Explained findings: case, finding, reason.
EXPLANATIONS = []
TIMEOUT = 20
SERVICE = "/grpc.testing.TestService"
INITIAL, TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"
OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]


def message(padding=0, **order):
    """Return a request message: the order for the server as JSON, and `padding` zeros."""
    return json.dumps(order).encode() + b"\n" + bytes(padding)


class Service:
    """The server. `cancelled` gets an item for each call that a client has cancelled."""

    def __init__(self):
        self.cancelled = SimpleQueue()

    def begin(self, context):
        metadata = dict(context.invocation_metadata())
        if INITIAL in metadata:
            context.send_initial_metadata([(INITIAL, metadata[INITIAL])])
        if TRAILING in metadata:
            context.set_trailing_metadata([(TRAILING, metadata[TRAILING])])

    def obey(self, data, context):
        """Follow the order in a request message. Return the sizes of the responses."""
        order = json.loads(data.partition(b"\n")[0])
        if order.get("compressed"):
            context.set_compression(grpc.Compression.Gzip)
        if order.get("sleep"):
            gone = threading.Event()
            context.add_callback(gone.set)
            gone.wait(TIMEOUT)
            self.cancelled.put(True)
        if "code" in order:
            context.abort(next(code for code in grpc.StatusCode if code.value[0] == order["code"]), order["text"])
        if "remaining" in order:
            return [int(context.time_remaining())]
        return order.get("sizes", [0])

    def unary(self, data, context):
        self.begin(context)
        return bytes(self.obey(data, context)[0])

    def output(self, data, context):
        self.begin(context)
        for size in self.obey(data, context):
            yield bytes(size)

    def input(self, messages, context):
        self.begin(context)
        try:
            return b"%d" % sum(len(each.partition(b"\n")[2]) for each in messages)
        except Exception:
            self.cancelled.put(True)
            raise

    def duplex(self, messages, context):
        self.begin(context)
        context.add_callback(lambda: self.cancelled.put(True))
        for each in messages:
            for size in self.obey(each, context):
                yield bytes(size)

    def serve(self):
        handlers = {
            "UnaryCall": grpc.unary_unary_rpc_method_handler(self.unary),
            "StreamingOutputCall": grpc.unary_stream_rpc_method_handler(self.output),
            "StreamingInputCall": grpc.stream_unary_rpc_method_handler(self.input),
            "FullDuplexCall": grpc.stream_stream_rpc_method_handler(self.duplex),
        }
        server = grpc.server(ThreadPoolExecutor(64))
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE[1:], handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return server, port


class Cases:
    """Each public method is a case with the same name, and uses the current channel. `service` is the server, `open` opens another channel."""

    def __init__(self, channel, open_channel, service):
        self.service, self.open = service, open_channel
        self.use(channel)

    def use(self, channel):
        self.channel = channel
        self.call = channel.unary_unary(f"{SERVICE}/UnaryCall")
        self.output = channel.unary_stream(f"{SERVICE}/StreamingOutputCall")
        self.input = channel.stream_unary(f"{SERVICE}/StreamingInputCall")
        self.duplex = channel.stream_stream(f"{SERVICE}/FullDuplexCall")

    def empty_unary(self):
        expect(self.call(message(), timeout=TIMEOUT) == b"", "an empty response")

    def large_unary(self):
        expect(len(self.call(message(271828, sizes=[314159]), timeout=TIMEOUT)) == 314159, "a response of 314,159 bytes")

    def client_compressed_unary(self):
        response = self.call(message(271828, sizes=[314159]), timeout=TIMEOUT, compression=grpc.Compression.Gzip)
        expect(len(response) == 314159, "a compressed request")

    def server_compressed_unary(self):
        expect(len(self.call(message(sizes=[314159], compressed=True), timeout=TIMEOUT)) == 314159, "a compressed response")

    def client_streaming(self):
        sizes = [27182, 8, 1828, 45904]
        expect(self.input(iter([message(size) for size in sizes]), timeout=TIMEOUT) == b"74922", "the sum of the sizes")

    def client_compressed_streaming(self):
        requests = iter([message(size) for size in [27182, 45904]])
        expect(self.input(requests, timeout=TIMEOUT, compression=grpc.Compression.Gzip) == b"73086", "the sum of the sizes")

    def server_streaming(self):
        sizes = [31415, 9, 2653, 58979]
        expect([len(each) for each in self.output(message(sizes=sizes), timeout=TIMEOUT)] == sizes, "the sizes")

    def server_compressed_streaming(self):
        sizes = [31415, 92653]
        expect([len(each) for each in self.output(message(sizes=sizes, compressed=True), timeout=TIMEOUT)] == sizes, "the sizes")

    def ping_pong(self):
        requests = SimpleQueue()
        responses = self.duplex(iter(requests.get, None), timeout=TIMEOUT)
        for asked, size in [(27182, 31415), (8, 9), (1828, 2653), (45904, 58979)]:
            requests.put(message(asked, sizes=[size]))
            expect(len(next(responses)) == size, f"a response of {size} bytes before the next request")
        requests.put(None)
        expect(list(responses) == [], "the end")
        expect(responses.code() is grpc.StatusCode.OK, responses.code())

    def empty_stream(self):
        responses = self.duplex(iter([]), timeout=TIMEOUT)
        expect(list(responses) == [] and responses.code() is grpc.StatusCode.OK, responses.code())

    def custom_metadata(self):
        sent = [(INITIAL, "test_initial_metadata_value"), (TRAILING, b"\xab\xab\xab\x00\xff")]
        _, call = self.call.with_call(message(271828, sizes=[314159]), metadata=sent, timeout=TIMEOUT)
        responses = self.duplex(iter([message(271828, sizes=[314159])]), metadata=sent, timeout=TIMEOUT)
        list(responses)
        for each in [call, responses]:
            expect(dict(each.initial_metadata()).get(INITIAL) == sent[0][1], each.initial_metadata())
            expect(dict(each.trailing_metadata()).get(TRAILING) == sent[1][1], each.trailing_metadata())

    def failure(self, call, code, text=None):
        try:
            response = call()
            if isinstance(response, grpc.Call):
                list(response)
        except grpc.RpcError as error:
            expect(error.code() is code, f"{error.code()} ({error.details()}) instead of {code}")
            expect(text is None or error.details() == text, error.details())
            return error
        raise AssertionError(f"the call succeeds: {response}")

    def status_code_and_message(self):
        order = message(code=2, text="test status message")
        self.failure(lambda: self.call(order, timeout=TIMEOUT), grpc.StatusCode.UNKNOWN, "test status message")
        self.failure(lambda: self.duplex(iter([order]), timeout=TIMEOUT), grpc.StatusCode.UNKNOWN, "test status message")

    def special_status_message(self):
        self.failure(lambda: self.call(message(code=2, text=SPECIAL), timeout=TIMEOUT), grpc.StatusCode.UNKNOWN, SPECIAL)

    def every_status_code(self):
        for code in grpc.StatusCode:
            if code is not grpc.StatusCode.OK:
                self.failure(lambda code=code: self.call(message(code=code.value[0], text=code.name), timeout=TIMEOUT), code, code.name)

    def status_after_responses(self):
        responses = self.duplex(iter([message(sizes=[9, 9]), message(code=5, text="late")]), timeout=TIMEOUT)
        expect([len(next(responses)), len(next(responses))] == [9, 9], "two responses")
        self.failure(lambda: responses, grpc.StatusCode.NOT_FOUND, "late")

    def unimplemented_method(self):
        self.failure(lambda: self.channel.unary_unary(f"{SERVICE}/UnimplementedCall")(b"", timeout=TIMEOUT), grpc.StatusCode.UNIMPLEMENTED)

    def unimplemented_service(self):
        method = "/grpc.testing.UnimplementedService/UnimplementedCall"
        self.failure(lambda: self.channel.unary_unary(method)(b"", timeout=TIMEOUT), grpc.StatusCode.UNIMPLEMENTED)

    def cancel_after_begin(self):
        requests = SimpleQueue()
        call = self.input.future(iter(requests.get, None), timeout=TIMEOUT)
        requests.put(message(8))
        call.cancel()
        requests.put(None)
        expect(call.code() is grpc.StatusCode.CANCELLED, call.code())

    def cancel_after_first_response(self):
        while not self.service.cancelled.empty():
            self.service.cancelled.get()
        requests = SimpleQueue()
        responses = self.duplex(iter(requests.get, None), timeout=TIMEOUT)
        requests.put(message(27182, sizes=[31415]))
        expect(len(next(responses)) == 31415, "the first response")
        responses.cancel()
        self.failure(lambda: responses, grpc.StatusCode.CANCELLED)
        requests.put(None)
        expect(self.service.cancelled.get(timeout=TIMEOUT), "the server sees that the call is cancelled")

    def timeout_on_sleeping_server(self):
        while not self.service.cancelled.empty():
            self.service.cancelled.get()
        self.failure(lambda: self.call(message(sleep=True), timeout=0.3), grpc.StatusCode.DEADLINE_EXCEEDED)
        expect(self.service.cancelled.get(timeout=TIMEOUT), "the server sees that the call is over")

    def deadline_reaches_the_server(self):
        left = len(self.call(message(remaining=True), timeout=3000))
        # grpcio rounds the deadline.
        expect(2900 < left < 3100, f"{left} s left of 3,000")

    def concurrent_large_unary(self):
        with ThreadPoolExecutor(50) as pool:
            calls = [pool.submit(self.call, message(271828, sizes=[314159]), timeout=TIMEOUT) for _ in range(200)]
            expect({len(each.result()) for each in calls} == {314159}, "200 responses, 50 at a time")

    def rpc_soak(self):
        for _ in range(500):
            self.call(message(271, sizes=[314]), timeout=TIMEOUT)

    def channel_soak(self):
        for _ in range(20):
            with self.open() as channel:
                self.use(channel)
                self.large_unary()


CASES = [name for name, each in vars(Cases).items() if not name.startswith("_") and name not in ("use", "failure")]
# Responses of the gateway itself: method, HTTP status, and the gRPC status to which grpcio maps it.
OWN = [
    ("Unauthenticated", 401, grpc.StatusCode.UNAUTHENTICATED),
    ("Forbidden", 403, grpc.StatusCode.PERMISSION_DENIED),
    ("Missing", 404, grpc.StatusCode.UNIMPLEMENTED),
    ("Refused", 502, grpc.StatusCode.UNAVAILABLE),
    ("Late", 504, grpc.StatusCode.UNAVAILABLE),
]


def configuration(port, closed):
    own = "respond = { status = 200 }"
    routes = {
        "Unauthenticated": f'require = ["keys"]\n{own}',
        "Forbidden": f'deny = ["127.0.0.0/8"]\n{own}',
        "Refused": f'upstream = "refused"\nrewrite = "{SERVICE}/UnaryCall"',
        "Late": f'upstream = "impatient"\nrewrite = "{SERVICE}/UnaryCall"',
    }
    return f"""
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[[listener]]
address = "127.0.0.1:0"
[[listener]]
address = "127.0.0.1:0"
tls.certificates = [{{ cert = "{CERTIFICATE}", key = "{KEY}" }}]
[auth.keys]
kind = "api-key"
consumers = "consumers.toml"
[upstream.service]
servers = ["http://127.0.0.1:{port}"]
protocol = "http2"
[upstream.impatient]
servers = ["http://127.0.0.1:{port}"]
protocol = "http2"
response_timeout = "200ms"
[upstream.refused]
servers = ["http://127.0.0.1:{closed}"]
protocol = "http2"
[limit.three]
by = "route"
quota = "3/24h"
algorithm = "sliding-log"
[[route]]
name = "service"
path = "{SERVICE}/{{*rest}}"
upstream = "service"
[[route]]
name = "other"
path = "/grpc.testing.UnimplementedService/{{*rest}}"
upstream = "service"
[[route]]
name = "limited"
path = "/limited.Service/UnaryCall"
rewrite = "{SERVICE}/UnaryCall"
limits = ["three"]
upstream = "service"
""" + "".join(f'[[route]]\nname = "{name}"\npath = "/own.Service/{name}"\n{more}\n' for name, more in routes.items())


def denied(channel):
    """Check that three calls are admitted, and that further calls get RESOURCE_EXHAUSTED with the retry delay."""
    call = channel.unary_unary("/limited.Service/UnaryCall")
    for _ in range(3):
        call(message(), timeout=TIMEOUT)
    for _ in range(2):
        try:
            call(message(), timeout=TIMEOUT)
        except grpc.RpcError as error:
            expect(error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error)
            expect("try again in" in error.details(), error.details())
            metadata = dict(error.initial_metadata() or ()) | dict(error.trailing_metadata() or ())
            expect({"retry-after", "ratelimit", "ratelimit-policy"} <= metadata.keys(), metadata)
        else:
            raise AssertionError("the call above the limit succeeds")


def run(report, name, case, *arguments):
    try:
        case(*arguments)
        report.case(name)
    except Exception as error:
        report.case(name, f"{type(error).__name__}: {error}")


def main():
    report = Report(f"grpcio {grpc.__version__}", EXPLANATIONS)
    service = Service()
    server, port = service.serve()
    try:
        gateway = servers.sluicegate(sys.argv[1], configuration(port, servers.free_ports(1)[0]), {"consumers.toml": ""})
        clear, tls = (url.partition("://")[2] for url in gateway.urls)
        secure = grpc.ssl_channel_credentials(CERTIFICATE.read_bytes())
        paths = {
            "direct": lambda: grpc.insecure_channel(f"127.0.0.1:{port}", OPTIONS),
            "gateway": lambda: grpc.insecure_channel(clear, OPTIONS),
            "gateway with TLS": lambda: grpc.secure_channel(tls, secure, OPTIONS),
        }
        for path, open_channel in paths.items():
            with open_channel() as channel:
                for name in CASES:
                    run(report, f"{path}: {name}", getattr(Cases(channel, open_channel, service), name))
        with paths["gateway"]() as channel:
            run(report, "gateway: denied", denied, channel)
            for method, status, code in OWN:
                call = channel.unary_unary(f"/own.Service/{method}")
                order = message(sleep=True)
                run(report, f"gateway: {status}", Cases(channel, None, service).failure, lambda call=call, order=order: call(order, timeout=TIMEOUT), code)
    finally:
        server.stop(0).wait()
        servers.stop()
    report.end()


if __name__ == "__main__":
    main()
