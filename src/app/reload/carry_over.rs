//! Carry-over of state from the active configuration to a new one: changes that require a restart are rejected, and
//! equal parts are kept.

use std::sync::Arc;
use std::time::Duration;

use crate::identity::auth::ProviderKind;
use crate::snapshot::remote_auth::internal_name;
use crate::snapshot::{CompiledConfig, Listener, notify};
use crate::tls::Certificate;
use crate::upstream::UpstreamSettings;

/// The reason why a valid configuration cannot replace the active one.
#[derive(Debug, thiserror::Error)]
pub enum CarryOverError {
    /// These keys changed, but a change of these keys requires a restart.
    #[error("{} cannot change while the gateway runs: restart it, or keep {} unchanged", .0.join(", "), pronoun(.0))]
    RestartRequired(Vec<String>),
    /// New certificates have expired or are not valid yet. The text names the file and the reason.
    #[error("{}", .0.join("\n"))]
    InvalidCertificates(Vec<String>),
}

fn pronoun(keys: &[String]) -> &'static str {
    if keys.len() == 1 { "it" } else { "them" }
}

impl CompiledConfig {
    /// Carry over the parts that are equal in the previous configuration, so that upstream connections and TLS sessions
    /// continue.
    ///
    /// # Errors
    /// A changed key requires a restart, or a new certificate has expired or is not valid yet.
    pub fn carry_over(&mut self, previous: &CompiledConfig, now: Duration) -> Result<(), CarryOverError> {
        let changes = previous.restart_only_keys.changed_keys(&self.restart_only_keys);
        if !changes.is_empty() {
            return Err(CarryOverError::RestartRequired(changes));
        }
        let expired = self.expired_certificates(previous, now);
        if !expired.is_empty() {
            return Err(CarryOverError::InvalidCertificates(expired));
        }
        if self.client_ip == previous.client_ip {
            self.client_ip = previous.client_ip.clone();
        }
        if let (Some(acme), Some(before)) = (&mut self.acme, &previous.acme) {
            acme.certificates = before.certificates.clone();
            self.listeners
                .iter()
                .filter_map(|listener| listener.tls.as_ref())
                .for_each(|tls| tls.tls.use_managed(&acme.certificates));
        }
        for (listener, previous) in self.listeners.iter().zip(&previous.listeners) {
            if let (Some(tls), Some(before)) = (&listener.tls, &previous.tls)
                && tls.same_trust(before)
            {
                tls.tls.use_ticketer_of(&before.tls);
            }
        }
        self.reuse_upstreams(previous);
        self.reuse_verified(previous);
        Ok(())
    }

    /// Return errors for certificates that have expired or are not valid yet, except certificates that are already in
    /// use.
    fn expired_certificates(&self, previous: &CompiledConfig, now: Duration) -> Vec<String> {
        let shown: Vec<_> = previous.certificates().collect();
        let own = self.listeners.iter().filter_map(|listener| listener.tls.as_ref());
        let own = own.flat_map(|tls| tls.tls.certificates().zip(&tls.certificates));
        let own = own.filter(|(certificate, _)| {
            !shown.iter().any(|shown| shown.certified_key.cert == certificate.certified_key.cert)
        });
        own.filter_map(|(certificate, [file, _])| {
            let error = certificate.check_validity(now.as_secs() as i64).err()?;
            Some(format!("{}: {error}", file.path.display()))
        })
        .collect()
    }

    fn certificates(&self) -> impl Iterator<Item = Arc<Certificate>> {
        let tls = self.listeners.iter().filter_map(|Listener { tls, .. }| tls.as_ref());
        tls.flat_map(|tls| tls.tls.certificates())
    }

    /// Keep the state of providers with the same name and source: key sets of the same URL, verified users of the same
    /// file, and cached admissions of a server with the same settings.
    fn reuse_verified(&mut self, previous: &CompiledConfig) {
        for source in &self.auth.key_urls {
            if let Some(known) = previous.auth.key_urls.iter().find(|known| known.name == source.name) {
                source.keys.carry_over(&known.keys, known.url == source.url);
            }
        }
        for provider in &mut self.auth.providers {
            let Some(known) = previous.auth.providers.iter().find(|known| known.name == provider.name) else {
                continue;
            };
            match (&mut provider.kind, &known.kind) {
                (ProviderKind::Basic(basic), ProviderKind::Basic(known))
                    if basic.verifier.has_same_users(&known.verifier) =>
                {
                    basic.verifier = known.verifier.clone();
                }
                (ProviderKind::Forward(forward), ProviderKind::Forward(known))
                    if forward.settings == known.settings =>
                {
                    forward.cache.clone_from(&known.cache);
                }
                _ => {}
            }
        }
    }

    fn reuse_upstreams(&mut self, previous: &CompiledConfig) {
        for tls in &mut self.upstream_tls {
            let Some(known) = previous.upstream_tls.iter().find(|known| tls.is_same_as(known)) else { continue };
            *tls = known.clone();
            let settings = self.upstreams.iter_mut().find(|settings| settings.name == tls.name);
            // `get_mut` cannot fail, because the new settings are not shared yet.
            if let Some(settings) = settings.and_then(Arc::get_mut) {
                tls.attach_tls(settings);
            }
            for source in &mut self.auth.key_urls {
                if *tls.name == *internal_name(&source.name)
                    && let Some(endpoint) = &mut source.tls
                {
                    tls.attach_to(endpoint);
                }
            }
            for (name, destination) in &mut self.event_destinations {
                if *tls.name == *notify::internal_name(name)
                    && let Some(endpoint) = destination.tls_mut()
                {
                    tls.attach_to(endpoint);
                }
            }
        }
        for settings in &mut self.upstreams {
            let same = |known: &&Arc<UpstreamSettings>| known == &settings;
            if let Some(known) = previous.upstreams.iter().find(same) {
                *settings = known.clone();
            }
        }
    }
}
