//! Which keys exist: for the hints of unknown ones, and to tell "not supported yet" from "unknown".

use serde::Deserialize;
use serde::de::value::Error;
use serde::de::{self, Deserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::forms::ServerTable;
use super::{
    Admin, ApiKey, Certificate, ClientIp, Config, Consumer, Consumers, CostTable, Eject, HeaderRules, Health, Jwt,
    Limit, Listener, ListenerTls, Log, Redirect, Respond, Route, Server, Size, Store, StoreTls, Upstream, UpstreamTls,
};

/// Keys of the contract that do nothing yet, by the table they stand in.
const LATER: &[(&str, &[&str])] =
    &[("listener", &["http3"]), ("api_key", &["query", "bearer"]), ("jwt", &["jwks_url"])];

/// The table that a key stands in, and the keys that work there.
fn table(path: &[String]) -> (&'static str, &'static [&'static str]) {
    let names: Vec<_> = path.iter().map(String::as_str).filter(|name| name.parse::<usize>().is_err()).collect();
    match names[..] {
        [] => ("", fields::<Config>()),
        ["server"] => ("server", fields::<Server>()),
        ["listener"] => ("listener", fields::<Listener>()),
        ["listener", "tls"] => ("listener tls", fields::<ListenerTls>()),
        ["listener", "tls", "certificates"] => ("certificate", fields::<Certificate>()),
        ["admin"] => ("admin", fields::<Admin>()),
        ["log"] => ("log", fields::<Log>()),
        ["store"] => ("store", fields::<Store>()),
        ["store", "tls"] => ("store tls", fields::<StoreTls>()),
        ["client_ip"] => ("client_ip", fields::<ClientIp>()),
        ["api_key"] => ("api_key", fields::<ApiKey>()),
        ["jwt"] => ("jwt", fields::<Jwt>()),
        ["limit", _] => ("limit", fields::<Limit>()),
        ["limit", _, "cost"] => ("cost", fields::<CostTable>()),
        ["limit", _, "tiers", _] | ["consumer", "limit", _] => ("size", fields::<Size>()),
        ["upstream", _] => ("upstream", fields::<Upstream>()),
        ["upstream", _, "tls"] => ("upstream tls", fields::<UpstreamTls>()),
        ["upstream", _, "health_check"] => ("health_check", fields::<Health>()),
        ["upstream", _, "outlier_detection"] => ("outlier_detection", fields::<Eject>()),
        ["upstream", _, "servers"] => ("servers", fields::<ServerTable>()),
        ["route"] => ("route", fields::<Route>()),
        ["route", "request_headers" | "response_headers"] => ("header rules", fields::<HeaderRules>()),
        ["route", "respond"] => ("respond", fields::<Respond>()),
        ["route", "redirect"] => ("redirect", fields::<Redirect>()),
        ["consumer"] => ("consumer", fields::<Consumer>()),
        _ => ("", &[]),
    }
}

/// What to say of a key that nothing reads: message and hint.
pub(super) fn unknown(path: &[String], consumers: bool) -> (String, Option<String>) {
    let Some((key, parents)) = path.split_last() else { return ("unknown key".to_owned(), None) };
    let (name, known) = match (consumers, parents) {
        (true, []) => ("", fields::<Consumers>()),
        _ => table(parents),
    };
    if LATER.iter().any(|(table, keys)| *table == name && keys.contains(&key.as_str())) {
        return (format!("`{key}` is not supported yet"), Some("remove it: this version would ignore it".to_owned()));
    }
    let hint = match nearest(key, known.iter().copied()) {
        Some(near) => Some(format!("did you mean `{near}`?")),
        None if known.is_empty() => None,
        None => Some(format!("known here: {}", known.join(", "))),
    };
    (format!("unknown key `{key}`"), hint)
}

/// The name that was probably meant.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1))
        .min()
        .map(|(_, candidate)| candidate)
}

/// The field names of a struct, asked of its own `Deserialize`.
fn fields<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    struct Ask<'a>(&'a mut &'static [&'static str]);
    impl<'de> Deserializer<'de> for Ask<'_> {
        type Error = Error;
        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(de::Error::custom("only asked for names"))
        }
        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Error> {
            *self.0 = fields;
            Err(de::Error::custom("only asked for names"))
        }
        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
            unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut names: &'static [&'static str] = &[];
    // The error is how the question ends.
    let _ = T::deserialize(Ask(&mut names));
    names
}
