//! What a server says about itself, and whether it is what the URL of the store promises.

use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, ErrorKind, RedisError, RedisResult, Value};

/// How a server works together with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerMode {
    /// By itself, or as a master with replicas.
    Standalone,
    /// A node of a cluster.
    Cluster,
    /// It watches others and keeps no data.
    Sentinel,
}

/// What a server does with writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerRole {
    /// It takes them.
    Master,
    /// It follows a master.
    Replica,
}

/// The reply to `HELLO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloReply {
    /// `redis`, `valkey`, …
    pub server: String,
    /// Such as `7.0.15`.
    pub version: String,
    /// How it works together with others.
    pub mode: ServerMode,
    /// What it does with writes; a Sentinel does not say.
    pub role: Option<ServerRole>,
}

impl HelloReply {
    /// Reads the flat array of RESP2 or the map of RESP3; none if it does not say what is needed.
    pub fn read(reply: &Value) -> Option<HelloReply> {
        let field = |name: &str| match reply {
            Value::Array(fields) => {
                let found = fields.chunks_exact(2).find(|pair| text(&pair[0]) == Some(name));
                found.and_then(|pair| text(&pair[1]))
            }
            Value::Map(fields) => {
                fields.iter().find(|(key, _)| text(key) == Some(name)).and_then(|(_, value)| text(value))
            }
            _ => None,
        };
        let mode = match field("mode")? {
            "standalone" => ServerMode::Standalone,
            "cluster" => ServerMode::Cluster,
            "sentinel" => ServerMode::Sentinel,
            _ => return None,
        };
        let role = match field("role") {
            Some("master") => Some(ServerRole::Master),
            Some("replica" | "slave") => Some(ServerRole::Replica),
            _ => None,
        };
        Some(HelloReply { server: field("server")?.to_owned(), version: field("version")?.to_owned(), mode, role })
    }

    /// Why a server of this kind cannot be used where a `wanted` one is expected, and what to do; none if it can.
    pub fn mismatch(&self, expected: ServerMode, address: &ConnectionAddr) -> Option<String> {
        Some(match (self.mode, expected) {
            (ServerMode::Standalone, ServerMode::Standalone) if self.role == Some(ServerRole::Replica) => format!(
                "{address} is a replica; give the address of its master, or redis+sentinel://HOST:PORT/MASTER to follow it"
            ),
            (ServerMode::Standalone, ServerMode::Standalone)
            | (ServerMode::Cluster, ServerMode::Cluster)
            | (ServerMode::Sentinel, ServerMode::Sentinel) => return None,
            (ServerMode::Sentinel, _) => {
                format!("{address} is a Sentinel; use redis+sentinel://{address}/MASTER, with the name of the master")
            }
            (ServerMode::Cluster, _) => format!("{address} is a node of a cluster; use redis+cluster://{address}"),
            (ServerMode::Standalone, ServerMode::Cluster) => {
                format!("{address} is no node of a cluster; use redis://{address}")
            }
            (ServerMode::Standalone, ServerMode::Sentinel) => {
                format!("{address} is no Sentinel; use redis://{address}")
            }
        })
    }
}

/// Sees that a server is a `wanted` one, as far as it tells.
///
/// # Errors
/// It is another one, or the connection broke. A server that refuses to tell is taken as it is.
pub async fn verify_server(
    pipe: &mut MultiplexedConnection,
    expected: ServerMode,
    address: &ConnectionAddr,
) -> RedisResult<()> {
    let reply = pipe.send_packed_command(&redis::cmd("HELLO")).await?;
    match HelloReply::read(&reply).and_then(|hello| hello.mismatch(expected, address)) {
        Some(mismatch) => Err(RedisError::from((ErrorKind::InvalidClientConfig, "another kind of server", mismatch))),
        None => Ok(()),
    }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(bytes) => std::str::from_utf8(bytes).ok(),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn hello(mode: &str, role: Option<&str>) -> HelloReply {
        let mut pairs = vec![("server", "redis"), ("version", "7.0.15"), ("mode", mode)];
        pairs.extend(role.map(|role| ("role", role)));
        let flat = pairs.iter().flat_map(|(key, value)| [bulk(key), bulk(value)]).collect();
        let map = pairs.iter().map(|(key, value)| (Value::SimpleString((*key).to_owned()), bulk(value))).collect();
        let read = HelloReply::read(&Value::Array(flat)).unwrap();
        assert_eq!(Some(&read), HelloReply::read(&Value::Map(map)).as_ref(), "RESP2 and RESP3");
        read
    }

    #[test]
    fn wrong_server_kind_names_the_right_url() {
        let address = ConnectionAddr::Tcp("h".to_owned(), 1);
        let (single, replica) = (hello("standalone", Some("master")), hello("standalone", Some("replica")));
        let (node, sentinel) = (hello("cluster", Some("replica")), hello("sentinel", None));
        for (hello, wanted, expected) in [
            (&single, ServerMode::Standalone, None),
            (&single, ServerMode::Cluster, Some("h:1 is no node of a cluster; use redis://h:1")),
            (&single, ServerMode::Sentinel, Some("h:1 is no Sentinel; use redis://h:1")),
            (&replica, ServerMode::Standalone, Some("h:1 is a replica; give the address of its master")),
            (&node, ServerMode::Cluster, None),
            (&node, ServerMode::Standalone, Some("h:1 is a node of a cluster; use redis+cluster://h:1")),
            (&sentinel, ServerMode::Sentinel, None),
            (&sentinel, ServerMode::Cluster, Some("h:1 is a Sentinel; use redis+sentinel://h:1/MASTER")),
        ] {
            let mismatch = hello.mismatch(wanted, &address);
            match expected {
                None => assert_eq!(mismatch, None, "{hello:?}"),
                Some(expected) => {
                    assert!(mismatch.as_ref().is_some_and(|said| said.starts_with(expected)), "{mismatch:?}")
                }
            }
        }
    }

    #[test]
    fn incomplete_hello_is_accepted() {
        for reply in [Value::Okay, Value::Nil, Value::Array(Vec::new()), Value::Array(vec![bulk("mode"), bulk("new")])]
        {
            assert_eq!(HelloReply::read(&reply), None, "{reply:?}");
        }
    }
}
