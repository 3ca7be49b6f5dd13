//! Admission: decides whether a request is forwarded. This file defines the order of the steps, once for all callers.
//!
//! A request is described by its [`RequestHead`] and its [`Origin`]. [`AdmissionIo`] contains what differs between the
//! callers: the gateway reads bodies, waits for authentication servers and charges limits, and `explain` only reads
//! counters.

use std::future::ready;
use std::sync::Arc;

use http::uri::PathAndQuery;
use http::{HeaderMap, Method};
use serde_json::Value;
use tokio::time::Instant;
use tracing::debug;

use crate::boxed::boxed;
use crate::http::cors::CorsDecision;
use crate::http::headers::is_grpc_call;
use crate::identity::access::AccessRules;
use crate::identity::auth::{Credentials, Verified};
use crate::identity::client_cert::CertificateFault;
use crate::identity::consumer::Caller;
use crate::identity::spec::RequestAttributes;
use crate::identity::verification::{AuthError, Verification};
use crate::limiter::decision::{Decision, LimitCheck};
use crate::limiter::fallback::StoreUnavailable;
use crate::limiter::overrides::OverrideTable;
use crate::payload::json::body::{JsonBody, shortened};
use crate::payload::json::rpc::Message;
use crate::payload::llm::provider::{Billing, Operation, Provider};
use crate::payload::mcp_tools::ToolRules;
use crate::proxy::body::{BodyContent, BodyRead, LimitInspection};
use crate::proxy::llm;
use crate::proxy::llm::{LlmRequest, UpstreamPaths};
use crate::proxy::rate_limit::{Credential, build_checks, build_open_checks, make_refundable};
use crate::proxy::rejection::{AuthRejection, InspectError, LlmError, Rejection};
use crate::proxy::request::{Origin, RequestHead, RequestTarget, TargetedRequest, check_certificate};
use crate::routing::NoMatch;
use crate::routing::condition::RouteBody;
use crate::snapshot::CompiledConfig;
use crate::snapshot::listeners::{Listener, ListenerProtocol};
use crate::snapshot::routes::{Route, RouteLimits};

/// Path of HTTP-01 challenges, without the token at its end (RFC 8555 §8.3).
const HTTP_CHALLENGE_PATH: &str = "/.well-known/acme-challenge/";

/// The result of the sequence.
#[derive(Debug)]
pub enum Admission<'a, U> {
    /// The request is admitted.
    Admitted(Admitted<'a>),
    /// The gateway itself answers the request.
    Answered(Answer),
    /// The request is rejected.
    Rejected(Rejection<'a>),
    /// The result is unknown, because the caller does not wait for an authentication provider.
    Undecided(U),
}

/// A request that all its limits have admitted.
#[derive(Debug)]
pub struct Admitted<'a> {
    /// The route of the request.
    pub route: &'a Route,
    /// The decision on the limits of the request, with permits and deferred charges.
    pub decision: Decision<'a>,
    /// The maximum token usage of a request to an LLM API, if limits count its tokens.
    pub llm: Option<Box<LlmRequest>>,
    /// Path to forward, if this path differs from the received path.
    pub forwarded_path: Option<String>,
    /// Path and query after the route's rewrite, if the route has one. If set, it replaces `forwarded_path`.
    pub rewritten_target: Option<PathAndQuery>,
}

/// A response that is neither an error nor the response of a route.
#[derive(Debug)]
pub enum Answer {
    /// The key authorization that answers an HTTP-01 challenge.
    Challenge(String),
    /// The headers that answer a CORS preflight.
    Preflight(Box<HeaderMap>),
}

/// What the sequence finds out about a request. The facts are valid even if the request is rejected.
#[derive(Debug)]
pub struct RequestFacts<'a> {
    /// The configuration that applies to the whole request.
    pub config: &'a CompiledConfig,
    /// The last step that began.
    pub step: Step,
    /// `None` until a route is found. If the caller sets the route before the sequence, no other route is searched.
    pub route: Option<&'a Route>,
    /// The decision of the route's CORS policy on the request.
    pub cors: Option<Box<CorsDecision<'a>>>,
    /// Time at which the route timeout expires.
    pub deadline: Option<Instant>,
    /// The results of the authentication providers.
    pub credentials: Credentials<'a>,
    /// Whether the credentials meet the requirements of the route.
    pub is_authenticated: bool,
    /// The id of the JSON-RPC message in the request, or null if the message has no id. If the id is `Some`, error
    /// responses are JSON-RPC errors.
    pub rpc_id: Option<Value>,
    /// The LLM API of a request to a route that counts tokens. It determines the format of error responses.
    pub api: Option<Provider>,
}

/// A step of the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Parse the target.
    Target,
    /// Find the route, and check the access rules.
    Route,
    /// Verify the credentials.
    Authentication,
    /// Check the limits.
    Limits,
}

impl<'a> RequestFacts<'a> {
    /// Return the facts of a request that has just arrived.
    pub fn new(config: &'a CompiledConfig) -> Self {
        RequestFacts {
            config,
            step: Step::Target,
            route: None,
            cors: None,
            deadline: None,
            credentials: Credentials::default(),
            is_authenticated: false,
            rpc_id: None,
            api: None,
        }
    }
}

/// The input and output of the sequence.
pub trait AdmissionIo: Send {
    /// The reason why a caller does not wait for a provider. [`std::convert::Infallible`] if the caller always waits.
    type Undecided: Send;

    /// Return the length of the body in bytes, or a lower bound.
    fn body_length(&self, head: RequestHead<'_>) -> u64;

    /// Read the body.
    ///
    /// # Errors
    /// The client did not send the body completely, or the body is too long for the route.
    fn read_body(
        &mut self,
        head: RequestHead<'_>,
        read: BodyRead,
    ) -> impl Future<Output = Result<BodyContent, Rejection<'static>>> + Send;

    /// Take notice of the route, or of the fact that there is none. Called before the access rules have an effect.
    fn located(&mut self, _facts: &RequestFacts<'_>, _origin: &Origin<'_>) {}

    /// Take notice of a request to an LLM API whose tokens are counted.
    ///
    /// # Errors
    /// The names of models in the body cannot be replaced.
    fn counts_tokens(
        &mut self,
        _llm: &mut LlmRequest,
        _route: &Route,
    ) -> impl Future<Output = Result<(), LlmError>> + Send {
        ready(Ok(()))
    }

    /// Return the result of a provider if it is known without waiting, for example because it is cached.
    fn verify_at_once(&mut self, _request: &TargetedRequest<'_>, _provider: usize) -> Option<Verification> {
        None
    }

    /// Wait for the result of a provider, at most until the route timeout expires.
    ///
    /// # Errors
    /// The caller does not wait for this provider.
    fn verify(
        &mut self,
        request: &TargetedRequest<'_>,
        route: &Route,
        deadline: Option<Instant>,
        provider: usize,
    ) -> impl Future<Output = Result<Verification, Self::Undecided>> + Send;

    /// Return the credentials of a request if the provider admits it like the last request of the same client to this
    /// route, which a limit has denied within the last second.
    fn admitted_before<'a>(
        &self,
        _request: &TargetedRequest<'_>,
        _route: &Route,
        _credentials: &Credentials<'a>,
        _provider: usize,
    ) -> Option<Credentials<'a>> {
        None
    }

    /// Forget what [`admitted_before`](Self::admitted_before) returned, because the limits admit the request now.
    fn forget_denied(&self, _request: &TargetedRequest<'_>, _route: &Route, _provider: usize) {}

    /// Store the admissions of a request that a limit has denied.
    fn remember_denied(&self, _request: &TargetedRequest<'_>, _route: &Route, _credentials: &Credentials<'_>) {}

    /// Return the active overrides of quotas.
    fn overrides(&self) -> Option<Arc<OverrideTable>>;

    /// Check limits.
    ///
    /// # Errors
    /// The store failed.
    fn check<'a>(
        &mut self,
        checks: &[LimitCheck<'a, '_>],
    ) -> impl Future<Output = Result<Decision<'a>, StoreUnavailable>> + Send;

    /// Undo the charges of a request that is rejected after its authentication.
    fn refund(&mut self, decision: &mut Decision<'_>) -> impl Future<Output = ()> + Send;

    /// Take notice of the decision on all checks of the request. Called at most once.
    fn decided(
        &mut self,
        route: &Route,
        checks: &[LimitCheck<'_, '_>],
        decision: &Result<Decision<'_>, StoreUnavailable>,
        attributes: &RequestAttributes<'_>,
    );
}

/// Decide whether a request is forwarded. The body is read only if the route or a limit depends on it. A client that
/// waits for `100 Continue` therefore does not send the body of a rejected request.
pub async fn admit<'a, I: AdmissionIo>(
    io: &mut I,
    facts: &mut RequestFacts<'a>,
    head: RequestHead<'_>,
    origin: Origin<'_>,
) -> Admission<'a, I::Undecided> {
    run(io, facts, head, origin).await.unwrap_or_else(|rejection| {
        facts.api = facts.api.or_else(|| error_format(facts, head.uri.path()));
        Admission::Rejected(rejection)
    })
}

/// Return the LLM API in whose format a request is rejected before its tokens are counted. A request without a route has
/// this format if its path is an operation of an LLM API and the gateway counts tokens.
fn error_format(facts: &RequestFacts<'_>, path: &str) -> Option<Provider> {
    match facts.route {
        Some(route) => route.rate_limits.llm.map(|_| Provider::of(path)),
        None if facts.config.body_inspection.reads_tokens => Some(Operation::of(path)?.provider),
        None => None,
    }
}

/// The order of the steps.
async fn run<'a, I: AdmissionIo>(
    io: &mut I,
    facts: &mut RequestFacts<'a>,
    head: RequestHead<'_>,
    origin: Origin<'_>,
) -> Result<Admission<'a, I::Undecided>, Rejection<'a>> {
    // Challenges of a CA take precedence over routes, redirects and access rules.
    if let Some(key_authorization) = http_challenge(facts.config, head) {
        return Ok(Admission::Answered(Answer::Challenge(key_authorization)));
    }
    // Target: host and path in canonical form.
    let target = RequestTarget::from_head(head, &facts.config.server)?;
    check_server_name(facts.config, &target.host, &origin)?;
    let request = TargetedRequest { head, target: &target, origin };
    // Route and access rules. If the route depends on the body, the access rules of the listener come first.
    let mut body = None;
    let route = loop {
        let located = locate(facts, &request, body.as_deref());
        io.located(facts, &origin);
        match located? {
            Located::Route(route) => break route,
            Located::Preflight(headers) => return Ok(Admission::Answered(Answer::Preflight(headers))),
            // Box the future, because only the few requests whose body is read need space for it.
            Located::NeedsBody => body = Some(Box::pin(read_for_route(io, facts.config, head)).await?),
        }
    };
    facts.deadline = route.timeout.map(|timeout| Instant::now() + timeout);
    if route.max_body.is_some_and(|max| io.body_length(head) > max) {
        return Err(Rejection::BodyTooLarge);
    }
    check_client(facts.config, &origin, route)?;
    let rewritten_target = target.rewrite(route, head.uri.query())?;
    // Authentication, as far as it is possible without waiting.
    let verified = verify_at_once(io, facts, &request, route);
    // Limits. They also limit requests that are not authenticated, and those whose provider has to wait.
    let limited = match verified {
        Verified::Yes if route.rate_limits.limits.is_empty() && route.rate_limits.tools.is_none() => {
            facts.is_authenticated = true;
            Limited::Decided(Decision::unlimited(), None)
        }
        // Box the future, because requests without limits need no space for it.
        verified => boxed(|| check_limits(io, facts, &request, route, verified, body)).await?,
    };
    // Decision.
    match limited {
        Limited::Decided(decision, llm) if decision.admitted => {
            let mut forwarded_path =
                (target.forwarded_path() != head.uri.path()).then(|| target.forwarded_path().to_owned());
            let mut rewritten_target = rewritten_target;
            if let Some(llm) = &llm
                && let Some(renamed) = llm.rename(target.forwarded_path(), rewritten_target.as_ref())?
            {
                forwarded_path = renamed.forwarded_path.or(forwarded_path);
                rewritten_target = renamed.rewritten;
            }
            Ok(Admission::Admitted(Admitted { route, decision, llm, forwarded_path, rewritten_target }))
        }
        Limited::Decided(decision, _) => Err(Rejection::RateLimited {
            decision,
            rate_limits: &route.rate_limits,
            is_grpc: is_grpc_call(head.method, head.version, head.headers),
            max_retry_wait: route.rate_limits.llm.map(|inspection| inspection.max_retry_wait),
        }),
        Limited::Undecided(undecided) => Ok(Admission::Undecided(undecided)),
    }
}

/// Return the answer to an HTTP-01 challenge, by which a CA validates a DNS name (RFC 8555 §8.3). A request with an
/// unknown token is routed like any other request, because the CA may be validating the order of another ACME client.
fn http_challenge(config: &CompiledConfig, head: RequestHead<'_>) -> Option<String> {
    let acme = config.acme.as_ref()?;
    let token = head.uri.path().strip_prefix(HTTP_CHALLENGE_PATH)?;
    if !matches!(*head.method, Method::GET | Method::HEAD) {
        return None;
    }
    acme.certificates.http_response(token).map(String::from)
}

// === Route and access rules ===

/// The result of [`locate`].
#[derive(Debug)]
pub enum Located<'a> {
    /// The request matches this route.
    Route(&'a Route),
    /// The request is a CORS preflight, which the gateway answers with these headers.
    Preflight(Box<HeaderMap>),
    /// The route depends on the body, which was not read yet.
    NeedsBody,
}

/// Find the route of a request, and check the access rules. The rules of the listener also apply if no route matches, so
/// that a denied client cannot find out which routes exist.
///
/// # Errors
/// No route matches, no route names the host, or an access rule denies the client.
pub fn locate<'a>(
    facts: &mut RequestFacts<'a>,
    request: &TargetedRequest<'_>,
    body: Option<&BodyContent>,
) -> Result<Located<'a>, Rejection<'static>> {
    let config = facts.config;
    facts.step = Step::Route;
    let known = facts.route;
    if config.server.block_unknown_hosts && known.is_none() && !config.table.names_host(&request.target.host) {
        return Err(Rejection::UnknownHost);
    }
    let preflight = if known.is_none() { request.find_preflight_route(config) } else { None };
    let no_values;
    let body = match body.map(BodyContent::json) {
        None => RouteBody::Unread,
        Some(Some(values)) => RouteBody::Read(values),
        Some(None) => {
            no_values = JsonBody::default();
            RouteBody::Read(&no_values)
        }
    };
    let found = known.or(preflight).map_or_else(|| request.find_route(config, body), Ok);
    if let Ok(route) = found {
        facts.route = Some(route);
        let policy = route.cors.as_ref();
        facts.cors = policy.map(|policy| Box::new(policy.decide(request.head.headers, preflight.is_some())));
    }
    if config.checks_access {
        // A caller that knows the route does not know the listener.
        let listener = if known.is_none() { config.listeners.get(request.origin.listener) } else { None };
        check_rules(access_rules(listener, facts.route), request)?;
    }
    match found {
        Ok(_) if preflight.is_some() => {
            let headers = facts.cors.as_ref().map(|cors| cors.preflight_headers(request.head.headers));
            Ok(Located::Preflight(Box::new(headers.unwrap_or_default())))
        }
        Ok(route) => Ok(Located::Route(route)),
        Err(NoMatch::NeedsBody) => Ok(Located::NeedsBody),
        Err(NoMatch::NotFound) => Err(Rejection::NoRoute),
        Err(NoMatch::MethodNotAllowed(allowed)) => Err(Rejection::MethodNotAllowed(allowed)),
        Err(NoMatch::Ambiguous(pointer)) => Err(Rejection::Inspect(InspectError::Ambiguous(pointer))),
    }
}

fn check_rules(rules: [Option<&AccessRules>; 2], request: &TargetedRequest<'_>) -> Result<(), Rejection<'static>> {
    match rules.into_iter().flatten().all(|rules| rules.decide(request.origin.client).is_allowed()) {
        true => Ok(()),
        false => Err(Rejection::Forbidden),
    }
}

/// Return the access rules of the listener that accepted a request, and of its route. The rules of a listener for
/// decisions concern the proxy, which is not the client of the request.
pub fn access_rules<'r>(listener: Option<&'r Listener>, route: Option<&'r Route>) -> [Option<&'r AccessRules>; 2] {
    let listener = listener.filter(|listener| listener.protocol != ListenerProtocol::Decisions);
    [listener.and_then(|listener| listener.access.as_ref()), route.and_then(|route| route.access.as_deref())]
}

// === The body: read at most once, and only if the route or a limit depends on it ===

/// Read the body of a request whose route depends on it.
async fn read_for_route<'a, I: AdmissionIo>(
    io: &mut I,
    config: &CompiledConfig,
    head: RequestHead<'_>,
) -> Result<Box<BodyContent>, Rejection<'a>> {
    let max_read = config.server.inspect_body;
    let reads_tokens = config.body_inspection.reads_tokens;
    let content = io.read_body(head, BodyRead { max_body: None, max_read, reads_tokens, deadline: None }).await?;
    content.require_json(max_read).map_err(Rejection::Inspect)?;
    Ok(Box::new(content))
}

/// Read the body for the limits of the route, unless the choice of the route has already read it. Return the maximum
/// token usage of a request to an LLM API, if a limit counts its tokens.
async fn inspect<'a, I: AdmissionIo>(
    io: &mut I,
    facts: &mut RequestFacts<'a>,
    request: &TargetedRequest<'_>,
    route: &Route,
    body: &mut Option<Box<BodyContent>>,
) -> Result<Option<Box<LlmRequest>>, Rejection<'a>> {
    let TargetedRequest { head, target, .. } = *request;
    let max_values = facts.config.server.inspect_body;
    let Some(inspection) = LimitInspection::new(&route.rate_limits, head.method, max_values) else { return Ok(None) };
    let LimitInspection { body_use, llm, max_read } = inspection;
    let content = match body {
        Some(content) => content,
        None => {
            let max_body = route.max_body;
            let reads_tokens = llm.is_some();
            let deadline = facts.deadline;
            let content = io.read_body(head, BodyRead { max_body, max_read, reads_tokens, deadline }).await?;
            body.insert(Box::new(content))
        }
    };
    facts.rpc_id = content.rpc_id(body_use);
    content.check(body_use, head.headers, max_values).map_err(Rejection::Inspect)?;
    let Some(inspection) = llm else { return Ok(None) };
    let path = target.upstream_path(route)?;
    let operation = Operation::of(&path);
    facts.api = Some(operation.map_or(Provider::OpenAi, |operation| operation.provider));
    if let Some(operation) = operation.filter(|operation| operation.billing == Billing::Generation)
        && let Some(name) = operation.provider.hides_usage(head.uri.query(), head.headers)
    {
        return Err(Rejection::Llm(LlmError::HiddenUsage(name)));
    }
    let fallbacks = route.fallback.iter().map(|fallback| target.fallback_path(route, fallback)).collect();
    let paths = UpstreamPaths { first: &path, fallbacks };
    let mut llm = llm::request(content, inspection, route, &paths, operation)?;
    io.counts_tokens(&mut llm, route).await.map_err(Rejection::Llm)?;
    Ok(Some(Box::new(llm)))
}

// === Authentication ===

/// Check that the connection was opened for a host whose clients are verified in the same way as those of the requested
/// host. Otherwise, a client could get the certificate of one host verified and send its requests to another host.
/// HTTP/2 clients reuse connections for all names of the server certificate (RFC 9113 §9.1.1).
fn check_server_name<'a>(config: &CompiledConfig, host: &str, origin: &Origin<'_>) -> Result<(), Rejection<'a>> {
    let Some(client) = origin.tls else { return Ok(()) };
    let tls = config.listeners.get(origin.listener).and_then(|listener| listener.tls.as_ref());
    match tls.map(|tls| &tls.tls).filter(|tls| tls.has_host_policies()) {
        Some(tls) if tls.policy_index(host) != tls.policy_index(&client.server_name) => Err(Rejection::Misdirected),
        Some(_) | None => Ok(()),
    }
}

/// Check that the client still has the certificate that the configuration demands. The listener closes the connection of
/// a client that has not.
fn check_client<'a>(config: &CompiledConfig, origin: &Origin<'_>, route: &'a Route) -> Result<(), Rejection<'a>> {
    let Some(client) = origin.tls else { return Ok(()) };
    check_certificate(client, config, origin.listener).map_err(|fault| match fault {
        CertificateFault::Missing => Rejection::Misdirected,
        CertificateFault::Untrusted => not_authenticated(route, AuthError::UntrustedCertificate),
    })
}

/// Verify the credentials of a request, as far as it is possible without waiting. If the route has no providers, this
/// function does nothing.
fn verify_at_once<'a, I: AdmissionIo>(
    io: &mut I,
    facts: &mut RequestFacts<'a>,
    request: &TargetedRequest<'_>,
    route: &'a Route,
) -> Verified {
    facts.step = Step::Authentication;
    let Some(auth) = &route.auth else { return Verified::Yes };
    let auth_request = request.auth_request(route);
    let (credentials, mut verified) = auth.authenticate(&facts.config.auth.providers, &auth_request);
    facts.credentials = credentials;
    while let Verified::Waits(provider) = verified {
        let Some(verification) = io.verify_at_once(request, provider) else { break };
        verified = facts.credentials.resume(provider, verification, &auth_request);
    }
    verified
}

/// Wait for `provider`, and for all providers that have to wait after it. Return whether the request is authenticated.
async fn wait<'a, I: AdmissionIo>(
    io: &mut I,
    facts: &mut RequestFacts<'a>,
    request: &TargetedRequest<'_>,
    route: &'a Route,
    mut provider: usize,
) -> Result<Result<(), AuthError>, I::Undecided> {
    loop {
        let verification = io.verify(request, route, facts.deadline, provider).await?;
        match facts.credentials.resume(provider, verification, &request.auth_request(route)) {
            Verified::Yes => return Ok(Ok(())),
            Verified::No(error) => return Ok(Err(error)),
            Verified::Waits(next) => provider = next,
        }
    }
}

fn not_authenticated<'a>(route: &'a Route, error: AuthError) -> Rejection<'a> {
    debug!(route = &*route.name, %error, "request is not authenticated");
    let challenges = route.auth.as_ref().map_or(&[][..], |auth| &auth.challenges);
    Rejection::Auth(AuthRejection { error, challenges })
}

// === Limits ===

/// The result of [`check_limits`].
enum Limited<'a, U> {
    Decided(Decision<'a>, Option<Box<LlmRequest>>),
    Undecided(U),
}

/// Check the limits of the route. A request that is not authenticated is charged only to the limits that need no
/// credential.
///
/// There is one call to the store, unless a provider has to wait. Then the first call checks the limits that need no
/// credential, so that attempts to guess a credential are limited. The second call checks all other limits. If it denies
/// the request, the charges of the first call are refunded. If the request is not authenticated, these charges are kept.
async fn check_limits<'a, I: AdmissionIo>(
    io: &mut I,
    facts: &mut RequestFacts<'a>,
    request: &TargetedRequest<'_>,
    route: &'a Route,
    verified: Verified,
    mut body: Option<Box<BodyContent>>,
) -> Result<Limited<'a, I::Undecided>, Rejection<'a>> {
    let config = facts.config;
    let overrides = io.overrides();
    let limits = RouteChecks { config, route, overrides: overrides.as_deref() };
    let (mut known, mut early_body) = (None, None);
    let (mut first, mut llm) = (None, None);
    let mut is_inspected = !route.rate_limits.reads_body();
    // The reason why the limits cannot use the body, if it was read before the authentication of a client that was
    // admitted a moment ago. The client learns it after the authentication.
    let mut rejected_body = None;
    let authenticated = match verified {
        Verified::Yes => Ok(()),
        Verified::No(error) => Err(error),
        Verified::Waits(provider) => {
            if !is_inspected && (body.is_some() || route.rate_limits.reads_body_unauthenticated()) {
                llm = boxed(|| inspect(io, facts, request, route, &mut body)).await?;
                is_inspected = true;
            }
            if let Some(credentials) = io.admitted_before(request, route, &facts.credentials, provider) {
                if !is_inspected {
                    match boxed(|| inspect(io, facts, request, route, &mut body)).await {
                        Ok(counted) => llm = counted,
                        Err(reason) => rejected_body = Some(reason),
                    }
                    is_inspected = true;
                }
                facts.step = Step::Limits;
                // Box the future, because only requests of clients over their limits need space for it.
                let again = DeniedBefore { credentials, provider, body: json(&body), llm: llm.as_deref_mut() };
                if rejected_body.is_none()
                    && let Some(decision) = Box::pin(deny_again(io, facts, request, &limits, again)).await
                {
                    return Ok(Limited::Decided(decision, llm));
                }
            }
            facts.step = Step::Limits;
            early_body = body.take();
            let known = &*known.insert(facts.credentials.clone());
            let attributes = request.attributes(config, route, known, json(&early_body));
            let checks = limits.open(&attributes, Credential::Awaited, llm.as_deref())?;
            let checked = CheckedLimits::check(io, checks).await;
            if checked.is_denied() {
                let decision = limits.finish(io, checked, &attributes, llm.as_deref_mut())?;
                return Ok(Limited::Decided(decision, llm));
            }
            match Box::pin(wait(io, facts, request, route, provider)).await {
                Ok(authenticated) => {
                    first = Some(checked);
                    authenticated
                }
                Err(undecided) => {
                    limits.finish(io, checked, &attributes, llm.as_deref_mut())?;
                    return Ok(Limited::Undecided(undecided));
                }
            }
        }
    };
    facts.is_authenticated = authenticated.is_ok();
    let inspected = match authenticated {
        Err(error) => Err(not_authenticated(route, error)),
        Ok(()) if is_inspected => rejected_body.map_or(Ok(()), Err),
        // Box the future, because only the few requests whose body is read need space for it.
        Ok(()) => boxed(|| inspect(io, facts, request, route, &mut body)).await.map(|counted| llm = counted),
    };
    facts.step = Step::Limits;
    let read = json(&early_body).or(json(&body));
    let inspected = inspected.and_then(|()| check_tools(route, &facts.credentials, read));
    let attributes = request.attributes(config, route, &facts.credentials, read);
    let checks = inspected.and_then(|()| limits.all_but(first.as_ref(), &attributes, llm.as_deref()));
    let is_second = first.is_some();
    let decision = limits.decide(io, first, checks, &attributes, llm.as_deref_mut()).await?;
    if is_second && !decision.admitted {
        io.remember_denied(request, route, &facts.credentials);
    }
    Ok(Limited::Decided(decision, llm))
}

/// Check that the client may call all tools that the messages of the request call.
fn check_tools<'a>(route: &Route, credentials: &Credentials<'_>, body: Option<&JsonBody>) -> Result<(), Rejection<'a>> {
    if route.rate_limits.tools.is_none() {
        return Ok(());
    }
    let rules = tool_rules(route, credentials);
    let messages = body.and_then(|body| body.messages.as_ref()?.as_ref().ok());
    let mut tools = messages.into_iter().flat_map(|messages| &messages.list).filter_map(Message::tool);
    match tools.find(|tool| !rules.iter().all(|rules| rules.permits(tool))) {
        Some(tool) => Err(Rejection::Inspect(InspectError::Tool(shortened(tool)))),
        None => Ok(()),
    }
}

/// Return the rules that must permit each tool: those of the route and those of the consumer. The list is empty if the
/// route does not check tools.
pub(super) fn tool_rules(route: &Route, credentials: &Credentials<'_>) -> Vec<Arc<ToolRules>> {
    let Some(of_route) = &route.rate_limits.tools else { return Vec::new() };
    let of_consumer = match credentials.caller() {
        Caller::Consumer(consumer) => consumer.mcp_tools.clone(),
        Caller::Accepted(_) | Caller::Anonymous | Caller::Missing => None,
    };
    [Some(of_route.clone()), of_consumer].into_iter().flatten().collect()
}

/// A request whose last equal request the server has admitted, and a limit has denied.
struct DeniedBefore<'a, 'b> {
    /// The credentials with the earlier admission.
    credentials: Credentials<'a>,
    provider: usize,
    body: Option<&'b JsonBody>,
    llm: Option<&'b mut LlmRequest>,
}

/// Check the limits of a request that has to wait for an authentication server, but whose last equal request a limit has
/// denied. Return the decision if the limits deny the request again, so that the server need not be called. If they admit
/// the request, refund the charges and return `None`, because the server must verify the credential.
async fn deny_again<'a, I: AdmissionIo>(
    io: &mut I,
    facts: &mut RequestFacts<'a>,
    request: &TargetedRequest<'_>,
    limits: &RouteChecks<'a, '_>,
    denied_before: DeniedBefore<'a, '_>,
) -> Option<Decision<'a>> {
    let RouteChecks { config, route, overrides } = *limits;
    let DeniedBefore { credentials, provider, body, llm } = denied_before;
    let attributes = request.attributes(config, route, &credentials, body);
    let limits = RouteChecks { config, route, overrides };
    let mut checks = limits.all_but(None, &attributes, llm.as_deref()).ok()?;
    make_refundable(&mut checks);
    let mut checked = CheckedLimits::check(io, checks).await;
    match &checked.decision {
        Ok(decision) if decision.admitted => {
            checked.refund(io).await;
            io.forget_denied(request, route, provider);
            return None;
        }
        Ok(_) => {}
        Err(_) => return None,
    }
    let decision = limits.finish(io, checked, &attributes, llm).ok()?;
    facts.credentials = credentials;
    Some(decision)
}

fn json(body: &Option<Box<BodyContent>>) -> Option<&JsonBody> {
    body.as_ref().and_then(|body| body.json())
}

/// The limits of a route, with the active overrides.
struct RouteChecks<'a, 'p> {
    config: &'a CompiledConfig,
    route: &'a Route,
    overrides: Option<&'p OverrideTable>,
}

impl<'a: 'p, 'p> RouteChecks<'a, 'p> {
    /// Build the checks of the limits that need no credential.
    fn open(
        &self,
        attributes: &RequestAttributes<'p>,
        credential: Credential,
        llm: Option<&LlmRequest>,
    ) -> Result<Vec<LimitCheck<'a, 'p>>, Rejection<'a>> {
        let RouteLimits { identities, limits, .. } = &self.route.rate_limits;
        let checks = build_open_checks(self.config, identities, limits, attributes, credential);
        self.prepare(checks, llm)
    }

    /// Build the checks of all limits, except those that the first call has checked.
    fn all_but(
        &self,
        first: Option<&CheckedLimits<'a, 'p>>,
        attributes: &RequestAttributes<'p>,
        llm: Option<&LlmRequest>,
    ) -> Result<Vec<LimitCheck<'a, 'p>>, Rejection<'a>> {
        let RouteLimits { identities, limits, .. } = &self.route.rate_limits;
        let mut checks = build_checks(self.config, identities, limits, attributes)?;
        if let Some(first) = first {
            checks.retain(|check| first.checks.iter().all(|other| other.limit_index != check.limit_index));
        }
        self.prepare(checks, llm)
    }

    /// Apply the overrides of quotas, and set the costs of limits that count LLM tokens.
    fn prepare(
        &self,
        mut checks: Vec<LimitCheck<'a, 'p>>,
        llm: Option<&LlmRequest>,
    ) -> Result<Vec<LimitCheck<'a, 'p>>, Rejection<'a>> {
        if let Some(table) = self.overrides {
            table.apply(&mut checks);
        }
        if let Some(llm) = llm {
            llm.reserve(&self.route.rate_limits.limits, &mut checks)?;
        }
        Ok(checks)
    }

    /// Decide after the authentication. `checks` are the checks that the first call did not make, or the reason for a
    /// rejection.
    async fn decide<I: AdmissionIo>(
        &self,
        io: &mut I,
        mut first: Option<CheckedLimits<'a, 'p>>,
        checks: Result<Vec<LimitCheck<'a, 'p>>, Rejection<'a>>,
        attributes: &RequestAttributes<'p>,
        llm: Option<&mut LlmRequest>,
    ) -> Result<Decision<'a>, Rejection<'a>> {
        let mut rejection = None;
        let checks = match (checks, &mut first) {
            (Ok(checks), _) => checks,
            (Err(reason), Some(first)) => {
                // Keep the charges if the credential is the reason, because the client may be guessing it.
                if !matches!(reason, Rejection::Auth(_)) && !reason.is_charged() {
                    first.refund(io).await;
                }
                rejection = Some(reason);
                Vec::new()
            }
            (Err(reason), None) if reason.is_charged() => {
                rejection = Some(reason);
                self.open(attributes, Credential::Rejected, None)?
            }
            (Err(reason), None) => return Err(reason),
        };
        let mut checked = CheckedLimits::check(io, checks).await;
        if let Some(mut first) = first {
            if checked.is_denied() {
                first.refund(io).await;
            }
            checked = first.merge(checked);
        }
        let decision = self.finish(io, checked, attributes, llm)?;
        // If a limit denies the request, return this denial instead of `rejection`, so that a client over its limit
        // does not learn whether its credential is valid.
        match rejection.filter(|_| decision.admitted) {
            Some(rejection) => Err(rejection),
            None => Ok(decision),
        }
    }

    /// Pass the checks and the decision to the caller of the sequence, and return the decision.
    fn finish<I: AdmissionIo>(
        &self,
        io: &mut I,
        checked: CheckedLimits<'a, 'p>,
        attributes: &RequestAttributes<'_>,
        llm: Option<&mut LlmRequest>,
    ) -> Result<Decision<'a>, Rejection<'a>> {
        let CheckedLimits { checks, decision } = &checked;
        if !checks.is_empty() {
            io.decided(self.route, checks, decision, attributes);
            if let Some(llm) = llm {
                let limits = &self.route.rate_limits;
                llm.record_clients(&limits.limits, checks, |check| {
                    limits.spec(check.limit_index).display(attributes, &self.config.client_ip)
                });
            }
        }
        checked.decision.map_err(Rejection::StoreUnavailable)
    }
}

/// Checks of a request, and the decision on them.
struct CheckedLimits<'a, 'p> {
    checks: Vec<LimitCheck<'a, 'p>>,
    decision: Result<Decision<'a>, StoreUnavailable>,
}

impl<'a> CheckedLimits<'a, '_> {
    async fn check<'p, I: AdmissionIo>(io: &mut I, checks: Vec<LimitCheck<'a, 'p>>) -> CheckedLimits<'a, 'p> {
        let decision = if checks.is_empty() { Ok(Decision::unlimited()) } else { io.check(&checks).await };
        CheckedLimits { checks, decision }
    }

    fn is_denied(&self) -> bool {
        self.decision.as_ref().map_or(true, |decision| !decision.admitted)
    }

    async fn refund<I: AdmissionIo>(&mut self, io: &mut I) {
        if let Ok(decision) = &mut self.decision {
            io.refund(decision).await;
        }
    }

    /// Add the checks of the second call, and combine the decisions.
    fn merge(mut self, mut second: Self) -> Self {
        self.checks.append(&mut second.checks);
        self.checks.sort_by_key(|check| check.limit_index);
        let decision = self.decision.and_then(|first| second.decision.map(|second| first.merge(second)));
        CheckedLimits { checks: self.checks, decision }
    }
}
