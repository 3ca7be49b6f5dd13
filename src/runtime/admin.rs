//! `[admin]`: where the operator asks, and what he must know.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use crate::config::Spanned;

use super::Listener;
use super::listeners::addresses_conflict;
use super::reader::Validator;
use crate::config;
use crate::config::error::Issue;

/// `[admin]`
#[derive(Debug, Clone)]
pub struct AdminSettings {
    /// Where.
    pub address: SocketAddr,
    /// What the operator must know; none if he need not.
    pub token: Option<AdminToken>,
}

/// A secret.
#[derive(Clone)]
pub struct AdminToken(Arc<str>);

impl AdminToken {
    /// As it is written.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token")
    }
}

pub(super) fn admin(
    admin: &Spanned<config::Admin>,
    listeners: &[Listener],
    reader: &mut Validator<'_>,
) -> Option<AdminSettings> {
    let span = admin.span();
    let admin = admin.get_ref();
    let text = reader.required(admin.address.as_ref(), &span, "address", "\"127.0.0.1:9180\"")?;
    let address = reader.address(text)?;
    if let Some(listener) = listeners.iter().find(|listener| addresses_conflict(listener.address, address)) {
        let message = format!("{address} is taken by the [[listener]] on {}", listener.address);
        reader.push_issue(
            Issue::new(text.span(), message).with_hint("another port: the admin listener has one of its own"),
        );
    }
    let token = admin.token.as_ref().map(|token| token.get_ref().as_str()).filter(|token| !token.is_empty());
    if token.is_none() && !address.ip().is_loopback() {
        let issue = Issue::new(text.span(), format!("{address} can be reached from elsewhere: it needs a token"));
        reader.push_issue(
            issue.with_hint("token = \"${SLUICEGATE_ADMIN_TOKEN}\", or an address of 127.0.0.0/8 or [::1]"),
        );
    }
    Some(AdminSettings { address, token: token.map(|token| AdminToken(token.into())) })
}
