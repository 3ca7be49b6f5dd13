//! What a server says about itself, and whether it is what the URL of the store promises.

use redis::aio::MultiplexedConnection;
use redis::{ConnectionAddr, ErrorKind, RedisError, RedisResult, Value};

/// How a server works together with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By itself, or as a master with replicas.
    Standalone,
    /// A node of a cluster.
    Cluster,
    /// It watches others and keeps no data.
    Sentinel,
}

/// What a server does with writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It takes them.
    Master,
    /// It follows a master.
    Replica,
}

/// The reply to `HELLO`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// `redis`, `valkey`, …
    pub server: String,
    /// Such as `7.0.15`.
    pub version: String,
    /// How it works together with others.
    pub mode: Mode,
    /// What it does with writes; a Sentinel does not say.
    pub role: Option<Role>,
}

impl Hello {
    /// Reads the flat array of RESP2 or the map of RESP3; none if it does not say what is needed.
    pub fn read(reply: &Value) -> Option<Hello> {
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
            "standalone" => Mode::Standalone,
            "cluster" => Mode::Cluster,
            "sentinel" => Mode::Sentinel,
            _ => return None,
        };
        let role = match field("role") {
            Some("master") => Some(Role::Master),
            Some("replica" | "slave") => Some(Role::Replica),
            _ => None,
        };
        Some(Hello { server: field("server")?.to_owned(), version: field("version")?.to_owned(), mode, role })
    }

    /// Why a server of this kind cannot be used where a `wanted` one is expected, and what to do; none if it can.
    pub fn misfit(&self, wanted: Mode, address: &ConnectionAddr) -> Option<String> {
        Some(match (self.mode, wanted) {
            (Mode::Standalone, Mode::Standalone) if self.role == Some(Role::Replica) => format!(
                "{address} is a replica; give the address of its master, or redis+sentinel://HOST:PORT/MASTER to follow it"
            ),
            (Mode::Standalone, Mode::Standalone)
            | (Mode::Cluster, Mode::Cluster)
            | (Mode::Sentinel, Mode::Sentinel) => return None,
            (Mode::Sentinel, _) => {
                format!("{address} is a Sentinel; use redis+sentinel://{address}/MASTER, with the name of the master")
            }
            (Mode::Cluster, _) => format!("{address} is a node of a cluster; use redis+cluster://{address}"),
            (Mode::Standalone, Mode::Cluster) => format!("{address} is no node of a cluster; use redis://{address}"),
            (Mode::Standalone, Mode::Sentinel) => format!("{address} is no Sentinel; use redis://{address}"),
        })
    }
}

/// Sees that a server is a `wanted` one, as far as it tells.
///
/// # Errors
/// It is another one, or the connection broke. A server that refuses to tell is taken as it is.
pub async fn expect(pipe: &mut MultiplexedConnection, wanted: Mode, address: &ConnectionAddr) -> RedisResult<()> {
    let reply = pipe.send_packed_command(&redis::cmd("HELLO")).await?;
    match Hello::read(&reply).and_then(|hello| hello.misfit(wanted, address)) {
        Some(why) => Err(RedisError::from((ErrorKind::InvalidClientConfig, "another kind of server", why))),
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

    fn hello(mode: &str, role: Option<&str>) -> Hello {
        let mut pairs = vec![("server", "redis"), ("version", "7.0.15"), ("mode", mode)];
        pairs.extend(role.map(|role| ("role", role)));
        let flat = pairs.iter().flat_map(|(key, value)| [bulk(key), bulk(value)]).collect();
        let map = pairs.iter().map(|(key, value)| (Value::SimpleString((*key).to_owned()), bulk(value))).collect();
        let read = Hello::read(&Value::Array(flat)).unwrap();
        assert_eq!(Some(&read), Hello::read(&Value::Map(map)).as_ref(), "RESP2 and RESP3");
        read
    }

    #[test]
    fn what_is_not_what_was_asked_for_is_told_with_what_to_use() {
        let address = ConnectionAddr::Tcp("h".to_owned(), 1);
        let (single, replica) = (hello("standalone", Some("master")), hello("standalone", Some("replica")));
        let (node, sentinel) = (hello("cluster", Some("replica")), hello("sentinel", None));
        for (hello, wanted, expected) in [
            (&single, Mode::Standalone, None),
            (&single, Mode::Cluster, Some("h:1 is no node of a cluster; use redis://h:1")),
            (&single, Mode::Sentinel, Some("h:1 is no Sentinel; use redis://h:1")),
            (&replica, Mode::Standalone, Some("h:1 is a replica; give the address of its master")),
            (&node, Mode::Cluster, None),
            (&node, Mode::Standalone, Some("h:1 is a node of a cluster; use redis+cluster://h:1")),
            (&sentinel, Mode::Sentinel, None),
            (&sentinel, Mode::Cluster, Some("h:1 is a Sentinel; use redis+sentinel://h:1/MASTER")),
        ] {
            let said = hello.misfit(wanted, &address);
            match expected {
                None => assert_eq!(said, None, "{hello:?}"),
                Some(expected) => assert!(said.as_ref().is_some_and(|said| said.starts_with(expected)), "{said:?}"),
            }
        }
    }

    #[test]
    fn a_reply_that_does_not_say_is_no_reason() {
        for reply in [Value::Okay, Value::Nil, Value::Array(Vec::new()), Value::Array(vec![bulk("mode"), bulk("new")])]
        {
            assert_eq!(Hello::read(&reply), None, "{reply:?}");
        }
    }
}
