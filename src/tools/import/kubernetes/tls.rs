//! `tls` of Ingress resources: a listener with their certificates, and the redirects of ingress-nginx.

use std::collections::BTreeSet;

use crate::config::yaml::Node;
use crate::tools::import::document::Document;
use crate::tools::import::kubernetes::annotations::Settings;
use crate::tools::import::kubernetes::{Importer, namespace_of};
use crate::tools::import::model::{Table, quoted, valid_name};

/// Names of the listeners, if there are two.
const PLAIN: &str = "plain";
const SECURE: &str = "secure";

/// Return the elements of `spec.tls`.
fn tls_of(document: &Document) -> &[Node] {
    document.root.at(&["spec", "tls"]).map(Node::items).unwrap_or_default()
}

impl Importer {
    /// Add the listener for plaintext, and one for TLS if an Ingress has a certificate.
    pub(super) fn listeners(&mut self, resources: &[Document]) {
        let mut certificates = Vec::new();
        let mut seen = BTreeSet::new();
        for document in resources.iter().filter(|document| document.root.text_of("kind") == "Ingress") {
            for tls in tls_of(document) {
                let secret = tls.text_of("secretName");
                if secret.is_empty() {
                    let text = "`tls` without `secretName`: the default certificate of the controller has no equal";
                    self.model.no_equal(&document.at(tls), text);
                    continue;
                }
                let namespace = namespace_of(&document.root);
                let file = format!("tls/{}", valid_name(&format!("{namespace}-{secret}")));
                let text = format!(
                    "`tls`: write the Secret to the files {file}.crt and {file}.key, such as with `kubectl get secret -n \
                     {} {} -o yaml`",
                    quoted(namespace),
                    quoted(secret)
                );
                self.model.differs(&document.at(tls), text);
                if seen.insert(file.clone()) {
                    let mut certificate = toml::Table::new();
                    certificate.insert("cert".to_owned(), format!("{file}.crt").into());
                    certificate.insert("key".to_owned(), format!("{file}.key").into());
                    certificates.push(toml::Value::Table(certificate));
                }
            }
        }
        let mut listener = Table::default();
        listener.comments.push("Behind the Service of the gateway".to_owned());
        if !certificates.is_empty() {
            listener.set("name", PLAIN);
        }
        listener.set("address", "0.0.0.0:8080");
        self.model.listeners.push(listener);
        if !certificates.is_empty() {
            let mut listener = Table::default();
            listener.comments.push("Certificates of `tls`".to_owned());
            listener.set("name", SECURE);
            listener.set("address", "0.0.0.0:8443");
            listener.set_entry("tls", "certificates", certificates);
            self.model.listeners.push(listener);
        }
    }

    /// Restrict a route to the listener with TLS, and redirect the other requests for its host: ingress-nginx does so if
    /// the host has a certificate.
    pub(super) fn restrict_to_tls(&mut self, document: &Document, host: &str, settings: &Settings, route: &mut Table) {
        let has_host = |tls: &Node| tls.texts_of("hosts").iter().any(|name| name.eq_ignore_ascii_case(host));
        let has_certificate = tls_of(document).iter().any(|tls| !tls.text_of("secretName").is_empty() && has_host(tls));
        if !self.annotated || !settings.redirects_to_tls || !has_certificate {
            return;
        }
        route.set_list("listeners", [SECURE.to_owned()]);
        if self.redirected.insert(host.to_ascii_lowercase()) {
            let mut redirect = Table::from_origin(&document.at(&document.root), &format!("ssl-redirect of {host}"));
            redirect.set_list("hosts", [host.to_ascii_lowercase()]);
            redirect.set_list("listeners", [PLAIN.to_owned()]);
            redirect.set("path", "/{*rest}");
            redirect.set_entry("redirect", "scheme", "https");
            redirect.set_entry("redirect", "status", 308);
            self.model.add_route(&format!("{host} tls"), redirect);
        }
    }
}
