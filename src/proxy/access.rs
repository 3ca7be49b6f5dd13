//! The checks between routing and limits: unknown hosts, and the access rules of the listener and the route.

use http::Request;

use crate::identity::access::AccessRules;
use crate::proxy::context::RequestContext;
use crate::proxy::local_reply::Rejection;
use crate::proxy::target::RequestTarget;
use crate::snapshot::CompiledConfig;
use crate::snapshot::routes::Route;

/// Check the host and the client address of a request. The rules of the listener also apply if no route matches, so
/// that a denied client cannot find out which routes exist.
///
/// # Errors
/// No route names the host, or an access rule denies the client.
pub(super) fn check<B>(
    context: &mut RequestContext<'_>,
    target: &RequestTarget<'_>,
    route: Option<&Route>,
    request: &Request<B>,
) -> Result<(), Rejection<'static>> {
    let config = &*context.snapshot.config;
    check_host(config, target)?;
    let rules = access_rules(config, context.peer.listener, route);
    if rules.iter().all(Option::is_none) {
        return Ok(());
    }
    let client = context.peer.client_address(request.headers());
    if rules.into_iter().flatten().all(|rules| rules.decide(client).is_allowed()) {
        return Ok(());
    }
    context.record_client(client, route);
    Err(Rejection::Forbidden)
}

/// Check that a route names the host, if `server.block_unknown_hosts` is set.
///
/// # Errors
/// No route names the host of the request.
pub fn check_host(config: &CompiledConfig, target: &RequestTarget<'_>) -> Result<(), Rejection<'static>> {
    match config.server.block_unknown_hosts && !config.table.names_host(&target.host) {
        true => Err(Rejection::UnknownHost),
        false => Ok(()),
    }
}

/// Return the access rules of a listener, given by its index, and of a route.
pub fn access_rules<'r>(
    config: &'r CompiledConfig,
    listener: usize,
    route: Option<&'r Route>,
) -> [Option<&'r AccessRules>; 2] {
    let listener = config.listeners.get(listener);
    [listener.and_then(|listener| listener.access.as_ref()), route.and_then(|route| route.access.as_deref())]
}
