//! Which keys exist: for the hints of unknown ones, and to tell "not supported yet" from "unknown".

use serde::Deserialize;
use serde::de::value::Error;
use serde::de::{self, Deserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::forms::ServerTable;
use super::{
    Admin, ApiKey, Certificate, ClientIp, Config, Consumer, Consumers, CostTable, DirectResponse, Eject, HeaderRules,
    Health, Jwt, Limit, LimitVariant, Listener, ListenerTls, Log, Redirect, Route, Server, Store, StoreTls, Upstream,
    UpstreamTls,
};

/// Keys of the contract that do nothing yet, by the table they stand in.
const UNSUPPORTED_KEYS: &[(&str, &[&str])] =
    &[("listener", &["http3"]), ("api_key", &["query", "bearer"]), ("jwt", &["jwks_url"])];

/// The table that a key stands in, and the keys that work there.
fn known_keys(path: &[String]) -> (&'static str, &'static [&'static str]) {
    let names: Vec<_> = path.iter().map(String::as_str).filter(|name| name.parse::<usize>().is_err()).collect();
    match names[..] {
        [] => ("", field_names::<Config>()),
        ["server"] => ("server", field_names::<Server>()),
        ["listener"] => ("listener", field_names::<Listener>()),
        ["listener", "tls"] => ("listener tls", field_names::<ListenerTls>()),
        ["listener", "tls", "certificates"] => ("certificate", field_names::<Certificate>()),
        ["admin"] => ("admin", field_names::<Admin>()),
        ["log"] => ("log", field_names::<Log>()),
        ["store"] => ("store", field_names::<Store>()),
        ["store", "tls"] => ("store tls", field_names::<StoreTls>()),
        ["client_ip"] => ("client_ip", field_names::<ClientIp>()),
        ["api_key"] => ("api_key", field_names::<ApiKey>()),
        ["jwt"] => ("jwt", field_names::<Jwt>()),
        ["limit", _] => ("limit", field_names::<Limit>()),
        ["limit", _, "cost"] => ("cost", field_names::<CostTable>()),
        ["limit", _, "tiers", _] | ["consumer", "limit", _] => ("size", field_names::<LimitVariant>()),
        ["upstream", _] => ("upstream", field_names::<Upstream>()),
        ["upstream", _, "tls"] => ("upstream tls", field_names::<UpstreamTls>()),
        ["upstream", _, "health_check"] => ("health_check", field_names::<Health>()),
        ["upstream", _, "outlier_detection"] => ("outlier_detection", field_names::<Eject>()),
        ["upstream", _, "servers"] => ("servers", field_names::<ServerTable>()),
        ["route"] => ("route", field_names::<Route>()),
        ["route", "request_headers" | "response_headers"] => ("header rules", field_names::<HeaderRules>()),
        ["route", "respond"] => ("respond", field_names::<DirectResponse>()),
        ["route", "redirect"] => ("redirect", field_names::<Redirect>()),
        ["consumer"] => ("consumer", field_names::<Consumer>()),
        _ => ("", &[]),
    }
}

/// What to say of a key that nothing reads: message and hint.
pub(super) fn unknown_key(path: &[String], consumers: bool) -> (String, Option<String>) {
    let Some((key, parents)) = path.split_last() else { return ("unknown key".to_owned(), None) };
    let (name, known) = match (consumers, parents) {
        (true, []) => ("", field_names::<Consumers>()),
        _ => known_keys(parents),
    };
    if UNSUPPORTED_KEYS.iter().any(|(table, keys)| *table == name && keys.contains(&key.as_str())) {
        return (format!("`{key}` is not supported yet"), Some("remove it: this version would ignore it".to_owned()));
    }
    let hint = match closest_name(key, known.iter().copied()) {
        Some(near) => Some(format!("did you mean `{near}`?")),
        None if known.is_empty() => None,
        None => Some(format!("known here: {}", known.join(", "))),
    };
    (format!("unknown key `{key}`"), hint)
}

/// The name that was probably meant.
pub fn closest_name<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= (candidate.len() / 3).max(1))
        .min()
        .map(|(_, candidate)| candidate)
}

/// The field names of a struct, asked of its own `Deserialize`.
fn field_names<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    struct FieldNames<'a>(&'a mut &'static [&'static str]);
    impl<'de> Deserializer<'de> for FieldNames<'_> {
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
    let _ = T::deserialize(FieldNames(&mut names));
    names
}
