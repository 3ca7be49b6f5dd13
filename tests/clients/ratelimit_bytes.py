"""Records messages of Envoy's rate limit service, as the published schema (PyPI: xds-protos) encodes them, in
tests/fixtures/ratelimit_messages.txt. tests/it/ratelimit_service.rs compares them with the messages of the gateway.
Run it with target/clients/bin/python after a change of the schema."""

import pathlib

from envoy.config.core.v3.base_pb2 import HeaderValue
from envoy.extensions.common.ratelimit.v3.ratelimit_pb2 import RateLimitDescriptor
from envoy.service.ratelimit.v3.rls_pb2 import RateLimitRequest, RateLimitResponse
from envoy.type.v3.ratelimit_unit_pb2 import RateLimitUnit
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import UInt64Value


def request():
    entry = RateLimitDescriptor.Entry
    override = RateLimitDescriptor.RateLimitOverride(requests_per_unit=300, unit=RateLimitUnit.HOUR)
    return RateLimitRequest(domain="edge", hits_addend=7, descriptors=[
        RateLimitDescriptor(entries=[entry(key="generic_key", value="login"), entry(key="path", value="/é")]),
        RateLimitDescriptor(entries=[entry(key="empty", value="")], limit=override, hits_addend=UInt64Value(value=0)),
        RateLimitDescriptor(entries=[entry(key="k", value="v")], hits_addend=UInt64Value(value=2**40)),
    ])


def response():
    status = RateLimitResponse.DescriptorStatus
    metadata = Struct()
    metadata.update({"domain": "edge", "denied_by": ["login", 1.5, True, None]})
    return RateLimitResponse(
        overall_code=RateLimitResponse.OVER_LIMIT,
        statuses=[
            status(code=RateLimitResponse.OK),
            status(
                code=RateLimitResponse.OVER_LIMIT,
                current_limit=RateLimitResponse.RateLimit(name="login", requests_per_unit=5, unit=RateLimitResponse.RateLimit.MINUTE),
                limit_remaining=4294967295,
                duration_until_reset=Duration(seconds=59, nanos=999999000),
            ),
        ],
        response_headers_to_add=[HeaderValue(key="retry-after", value="59")],
        dynamic_metadata=metadata,
    )


def main():
    path = pathlib.Path(__file__).parent.parent / "fixtures" / "ratelimit_messages.txt"
    messages = {"request": request(), "response": response()}
    lines = [f"{name} {message.SerializeToString(deterministic=True).hex()}\n" for name, message in messages.items()]
    path.write_text("".join(lines))


if __name__ == "__main__":
    main()
