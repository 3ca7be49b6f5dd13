//! Keys that cannot change while the process runs, because a change requires a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use aws_lc_rs::hmac::{HMAC_SHA256, Key, sign};
use serde::Serialize;

use crate::config::Config;
use crate::snapshot::Listener;
use crate::snapshot::settings::ServerSettings;

/// The values of the restart-only keys, by key.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct RestartOnlyKeys(BTreeMap<String, String>);

/// Omits the values, because some of them are secret.
impl fmt::Debug for RestartOnlyKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl RestartOnlyKeys {
    /// Collect the values from a configuration.
    pub(crate) fn from_config(config: &Config, server: &ServerSettings, listeners: &[Listener]) -> Self {
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.address.to_string()).collect();
        let admin = config.admin.as_ref().and_then(|admin| admin.get_ref().address.as_ref());
        let mut fixed = BTreeMap::from([
            ("server.workers".to_owned(), server.workers.to_string()),
            ("server.threading".to_owned(), format!("{:?}", server.worker_model)),
            ("listener.address".to_owned(), addresses.join(" ")),
            ("admin.address".to_owned(), admin.map_or(String::new(), |address| address.get_ref().clone())),
        ]);
        let socket = config.admin.as_ref().and_then(|admin| admin.get_ref().socket.as_ref());
        // Omit an absent key, as `add_table` does.
        fixed.extend(socket.map(|socket| ("admin.socket".to_owned(), socket.get_ref().clone())));
        add_table("acme", &config.acme.as_ref().map(|acme| acme.get_ref()), &mut fixed);
        add_table("store", &config.store, &mut fixed);
        add_table("log", &config.log, &mut fixed);
        RestartOnlyKeys(fixed)
    }

    /// Return the HMAC-SHA-256 of each value with the salt as the key, in hex.
    pub(crate) fn digests(&self, salt: &str) -> BTreeMap<String, String> {
        let key = Key::new(HMAC_SHA256, salt.as_bytes());
        let digest =
            |value: &String| sign(&key, value.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.iter().map(|(name, value)| (name.clone(), digest(value))).collect()
    }

    /// Return the keys whose values differ.
    pub(crate) fn changed_keys(&self, other: &RestartOnlyKeys) -> Vec<String> {
        let names: BTreeSet<_> = self.0.keys().chain(other.0.keys()).collect();
        names.into_iter().filter(|name| self.0.get(*name) != other.0.get(*name)).cloned().collect()
    }
}

/// Add all keys of a table, as they are written.
fn add_table(name: &str, values: &impl Serialize, fixed: &mut BTreeMap<String, String>) {
    // Serialization cannot fail, because the structs have only strings and numbers.
    if let Ok(serde_json::Value::Object(keys)) = serde_json::to_value(values) {
        // Omit absent keys, so that a version of the gateway that does not have these keys computes the same digests.
        let keys = keys.into_iter().filter(|(_, value)| !value.is_null());
        fixed.extend(keys.map(|(key, value)| (format!("{name}.{key}"), value.to_string())));
    }
}
