//! What a process has for its life: a configuration that says otherwise needs a restart.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use aws_lc_rs::hmac::{HMAC_SHA256, Key, sign};
use serde::Serialize;

use crate::config::Config;
use crate::snapshot::Listener;
use crate::snapshot::settings::ServerSettings;

/// The values that cannot change, by the names of their keys.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct RestartOnlyKeys(BTreeMap<String, String>);

/// Some are secret.
impl fmt::Debug for RestartOnlyKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl RestartOnlyKeys {
    pub(crate) fn from_config(config: &Config, server: &ServerSettings, listeners: &[Listener]) -> Self {
        let addresses: Vec<_> = listeners.iter().map(|listener| listener.address.to_string()).collect();
        let admin = config.admin.as_ref().and_then(|admin| admin.get_ref().address.as_ref());
        let mut fixed = BTreeMap::from([
            ("server.workers".to_owned(), server.workers.to_string()),
            ("server.threading".to_owned(), format!("{:?}", server.worker_model)),
            ("listener.address".to_owned(), addresses.join(" ")),
            ("admin.address".to_owned(), admin.map_or(String::new(), |address| address.get_ref().clone())),
        ]);
        add_table("store", &config.store, &mut fixed);
        add_table("log", &config.log, &mut fixed);
        RestartOnlyKeys(fixed)
    }

    /// HMAC-SHA-256 of each value under this salt, in hex.
    pub(crate) fn digests(&self, salt: &str) -> BTreeMap<String, String> {
        let key = Key::new(HMAC_SHA256, salt.as_bytes());
        let digest =
            |value: &String| sign(&key, value.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.iter().map(|(name, value)| (name.clone(), digest(value))).collect()
    }

    /// The names of those that are not the same.
    pub(crate) fn changed_keys(&self, other: &RestartOnlyKeys) -> Vec<String> {
        let names: BTreeSet<_> = self.0.keys().chain(other.0.keys()).collect();
        names.into_iter().filter(|name| self.0.get(*name) != other.0.get(*name)).cloned().collect()
    }
}

/// All keys of a table, as they are written.
fn add_table(name: &str, values: &impl Serialize, fixed: &mut BTreeMap<String, String>) {
    // Strings, numbers and tables of them always serialise.
    if let Ok(serde_json::Value::Object(keys)) = serde_json::to_value(values) {
        // What is left out is as in a version that does not know the key.
        let keys = keys.into_iter().filter(|(_, value)| !value.is_null());
        fixed.extend(keys.map(|(key, value)| (format!("{name}.{key}"), value.to_string())));
    }
}
