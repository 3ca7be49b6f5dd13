//! JSON Schemas of single values, for the attribute `schema_with` of keys.

use schemars::{Schema, SchemaGenerator, json_schema};

/// Pattern of a duration.
pub(super) const DURATION: &str = "^[0-9]+(ms|s|m|h|d)$";

/// Pattern of a size.
pub(super) const SIZE: &str = "^[0-9]+(B|KiB|MiB|GiB)$";

/// Pattern of a quota. A quota without a time unit is valid only for concurrency limits.
pub(super) const QUOTA: &str = "^ *[0-9_]+([eE][0-9]+)? *(/ *(s|min|hour|day|week|month|year|[0-9]+(ms|s|m|h|d)) *)?$";

/// Return the schema of a string that is a secret as a whole.
pub(super) fn secret(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "secret": "always" })
}

/// Return the schema of a URL, whose credentials and query are secret.
pub(super) fn url(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "secret": "url" })
}

pub(super) fn duration(_: &mut SchemaGenerator) -> Schema {
    pattern_schema(DURATION)
}

pub(super) fn size(_: &mut SchemaGenerator) -> Schema {
    pattern_schema(SIZE)
}

pub(super) fn quota(_: &mut SchemaGenerator) -> Schema {
    pattern_schema(QUOTA)
}

pub(super) fn balance(_: &mut SchemaGenerator) -> Schema {
    pattern_schema("^(least-requests|round-robin|random|hash:.+|sticky)$")
}

pub(super) fn statuses(_: &mut SchemaGenerator) -> Schema {
    array_schema(&pattern_schema("^[1-5]([0-9][0-9]|xx)$"))
}

pub(super) fn retry_on(_: &mut SchemaGenerator) -> Schema {
    let status = json_schema!({ "type": "integer", "minimum": 400, "maximum": 599 });
    let word = pattern_schema("^([45]([0-9][0-9]|xx)|timeout)$");
    array_schema(&json_schema!({ "anyOf": [status, word] }))
}

pub(super) fn percentages(_: &mut SchemaGenerator) -> Schema {
    array_schema(&json_schema!({ "type": "integer", "minimum": 1, "maximum": 100 }))
}

/// Return the schema of `cost.tools`, a table of costs by tool name.
pub(super) fn tool_costs(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": { "type": "integer", "minimum": 0 },
    })
}

/// Return the schema of a table with any keys and values.
pub(super) fn free_table(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object" })
}

pub(super) fn key_hash(_: &mut SchemaGenerator) -> Schema {
    pattern_schema("^sha256:[0-9a-f]{64}$")
}

/// Return the schema of a TOML date or time. Editors treat it as a string.
pub(super) fn timestamp(_: &mut SchemaGenerator) -> Schema {
    pattern_schema("^[0-9]{4}-[0-9]{2}-[0-9]{2}([Tt ][0-9:.]+([Zz]|[+-][0-9]{2}:[0-9]{2}))?$")
}

pub(super) fn one_or_many(_: &mut SchemaGenerator) -> Schema {
    let one = json_schema!({ "type": "string" });
    json_schema!({ "anyOf": [one, array_schema(&one)] })
}

/// Return the schema of a required claim: a value, or a list whose items are a value or a list of values.
pub(super) fn claim_values(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "anyOf": [{ "type": "string" }, array_schema(&one_or_many(generator))], "secret": "never" })
}

pub(super) fn dialects(_: &mut SchemaGenerator) -> Schema {
    array_schema(
        &json_schema!({ "type": "string", "enum": ["ietf", "draft-11", "draft-07", "draft-03", "github", "openai", "anthropic"] }),
    )
}

pub(super) fn codings(_: &mut SchemaGenerator) -> Schema {
    array_schema(&json_schema!({ "type": "string", "enum": ["zstd", "br", "gzip"] }))
}

pub(super) fn unit(_: &mut SchemaGenerator) -> Schema {
    pattern_schema("^[a-z][a-z0-9-]{0,31}$")
}

pub(super) fn challenges(_: &mut SchemaGenerator) -> Schema {
    array_schema(&json_schema!({ "type": "string", "enum": ["http-01", "tls-alpn-01"] }))
}

pub(super) fn open_paths(_: &mut SchemaGenerator) -> Schema {
    array_schema(&json_schema!({ "type": "string", "enum": ["/healthz", "/readyz", "/metrics"] }))
}

/// The sources of an identity in the `by` of a limit. The part after `:` is written as it is, or stands for any name if
/// it is in upper case.
pub const IDENTITY_SOURCES: [&str; 23] = [
    "api-key",
    "group:LEVEL",
    "ip",
    "user:HEADER",
    "header:NAME",
    "cookie:NAME",
    "query:NAME",
    "path:PARAM",
    "jwt:CLAIM",
    "client-cert",
    "basic",
    "basic:user",
    "auth:HEADER",
    "host",
    "route",
    "method",
    "json:POINTER",
    "form:NAME",
    "mcp:tool",
    "mcp:method",
    "jsonrpc:method",
    "entry:KEY",
    "global",
];

pub(super) fn identities(_: &mut SchemaGenerator) -> Schema {
    let alternatives = IDENTITY_SOURCES.map(|source| match source.split_once(':') {
        Some((kind, name)) if name.bytes().all(|byte| byte.is_ascii_uppercase()) => format!("{kind}:.+"),
        _ => source.to_owned(),
    });
    let one = pattern_schema(&format!("^({})$", alternatives.join("|")));
    json_schema!({ "anyOf": [one, array_schema(&one)] })
}

pub(super) fn route_keys(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": true })
}

pub(super) fn route_groups(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": route_keys(generator) })
}

pub(super) fn tier_source(_: &mut SchemaGenerator) -> Schema {
    pattern_schema("^(api-key|(jwt|auth):.+)$")
}

pub(super) fn weights(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": { "type": "integer", "minimum": 0, "maximum": 1_000_000 } })
}

fn pattern_schema(pattern: &str) -> Schema {
    json_schema!({ "type": "string", "pattern": pattern })
}

fn array_schema(item: &Schema) -> Schema {
    json_schema!({ "type": "array", "items": item })
}
