//! Authentication: verifies the credentials of a request with the providers of its route. This module does no I/O.

use std::borrow::Cow;
use std::slice::from_ref;
use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::identity::api_key::{ApiKeyProvider, KeyPlace, OnUnknownKey};
use crate::identity::basic::{self, BasicProvider};
use crate::identity::consumer::{Caller, MISSING_CALLER};
use crate::identity::forward::ForwardProvider;
use crate::identity::jwt::{self, JwtVerifier};
use crate::identity::verification::{Admission, AuthError, AuthRequest, Claims, Proof, Verification};
use crate::limiter::spec::{LimitSpec, LimitVariant};

/// An authentication provider (`[auth.NAME]`). It verifies one kind of credential.
#[derive(Debug)]
pub struct AuthProvider {
    /// Name of the provider.
    pub name: Box<str>,
    /// The kind of credential that the provider verifies.
    pub kind: ProviderKind,
    /// Whether a verified credential is forwarded to the upstream. All other credentials are removed.
    pub forward_credential: bool,
}

/// The kind of a provider, with its settings.
#[derive(Debug)]
pub enum ProviderKind {
    /// `api-key`: verifies API keys.
    ApiKey(ApiKeyProvider),
    /// `jwt`: verifies bearer tokens (JWT).
    Jwt(JwtVerifier),
    /// `client-cert`: requires a verified client certificate.
    ClientCert,
    /// `basic`: verifies user names and passwords.
    Basic(BasicProvider),
    /// `forward`: sends a request to an authentication server for each client request.
    Forward(ForwardProvider),
}

/// Source of a request's tier (`from` in `[tiers]`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TierSource {
    /// The consumer of the API key.
    #[default]
    ApiKey,
    /// A claim of the bearer token.
    Jwt(Box<str>),
    /// A header from the authentication server.
    Forward(HeaderName),
}

/// The providers of a route. Each index refers to the list of all providers in the configuration.
#[derive(Debug)]
pub struct RouteAuth {
    /// `require`: alternatives. Each alternative is a list of providers that must all verify the request. Empty if no
    /// credential is required.
    pub required: Vec<Vec<usize>>,
    /// `identify`: providers that verify a credential only if the request has one.
    pub identify: Vec<usize>,
    /// All providers in `require` and `identify`, without duplicates.
    pub providers: Vec<usize>,
    /// Challenges of a 401 response, without duplicates. Each kind of provider has at least one challenge (RFC 9110
    /// §11.6.1), except authentication servers, which send their own.
    pub challenges: Vec<Challenge>,
    /// Problem detail of a 401 response if the request has no credential that `require` accepts.
    pub missing: Arc<str>,
}

/// A challenge in `WWW-Authenticate`: an authentication scheme and its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    value: HeaderValue,
    is_bearer: bool,
}

/// The results of verifying a request's credentials, by provider. Empty for a route without providers.
#[derive(Debug, Clone, Default)]
pub struct Credentials<'a> {
    providers: &'a [AuthProvider],
    route: Option<&'a RouteAuth>,
    /// Index of each provider that was called, and its result, in the order of the calls.
    checked: Vec<(usize, Verification)>,
}

/// The state of the authentication of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verified {
    /// The request is authenticated.
    Yes,
    /// The provider with this index must wait for its result, for example for an authentication server. The caller
    /// waits for it and then calls [`Credentials::resume`].
    Waits(usize),
    /// The request is rejected.
    No(AuthError),
}

/// The reason why the evaluation of a route's providers stopped.
enum Stop {
    /// See [`Verified::Waits`].
    Waits(usize),
    Failed(AuthError),
}

impl From<AuthError> for Stop {
    fn from(error: AuthError) -> Self {
        Stop::Failed(error)
    }
}

impl ProviderKind {
    /// Return the `kind` as written in the configuration.
    pub fn label(&self) -> &'static str {
        match self {
            ProviderKind::ApiKey(_) => "api-key",
            ProviderKind::Jwt(_) => "jwt",
            ProviderKind::ClientCert => "client-cert",
            ProviderKind::Basic(_) => "basic",
            ProviderKind::Forward(_) => "forward",
        }
    }
}

impl AuthProvider {
    /// Return the request headers from which the provider reads credentials.
    pub fn headers(&self) -> impl Iterator<Item = &HeaderName> {
        let (places, names): (&[KeyPlace], &[HeaderName]) = match &self.kind {
            ProviderKind::ApiKey(keys) => (&keys.places, &[]),
            ProviderKind::Jwt(_) | ProviderKind::Basic(_) => (&[], from_ref(&AUTHORIZATION)),
            ProviderKind::ClientCert => (&[], &[]),
            ProviderKind::Forward(forward) => (&[], &forward.settings.request_headers),
        };
        places.iter().map(|place| &place.header).chain(names)
    }

    /// Return the headers with which an authentication server identifies the client to upstreams. On routes without
    /// this provider, only trusted proxies may send these headers.
    pub fn identity_headers(&self) -> impl Iterator<Item = &HeaderName> {
        let names = match &self.kind {
            ProviderKind::Forward(forward) => &forward.settings.response_headers[..],
            ProviderKind::ApiKey(_) | ProviderKind::Jwt(_) | ProviderKind::ClientCert | ProviderKind::Basic(_) => &[],
        };
        names.iter()
    }

    fn verify(&self, request: &AuthRequest<'_>) -> Verification {
        match &self.kind {
            ProviderKind::ApiKey(keys) => keys.verify(request),
            ProviderKind::Jwt(verifier) => verifier.verify_request(request),
            ProviderKind::ClientCert if request.has_client_cert => Verification::Valid(Proof::ClientCert),
            ProviderKind::ClientCert => Verification::Absent,
            ProviderKind::Basic(basic) => basic.verify_request(request.headers),
            ProviderKind::Forward(forward) => match forward.repeated_header(request.headers) {
                Some(name) => Verification::Invalid(AuthError::Ambiguous(name.clone())),
                None => Verification::Pending,
            },
        }
    }
}

impl Challenge {
    /// Create a challenge, such as `ApiKey` or `Basic realm="api"`. Return `None` if it is not a valid header value.
    pub fn new(text: &str) -> Option<Self> {
        let value = HeaderValue::from_str(text).ok()?;
        Some(Challenge { value, is_bearer: text.eq_ignore_ascii_case("bearer") })
    }

    /// Return the value of `WWW-Authenticate` for an error. A `Bearer` challenge contains the attribute `error` (RFC
    /// 6750 §3.1) if the bearer token was invalid.
    pub fn value(&self, error: &AuthError) -> HeaderValue {
        match self.is_bearer && error.is_invalid_bearer_token() {
            true => HeaderValue::from_static("Bearer error=\"invalid_token\""),
            false => self.value.clone(),
        }
    }
}

impl RouteAuth {
    /// Verify the credentials of a request. The returned credentials contain the results of all verifications so far,
    /// even if the request is rejected.
    pub fn authenticate<'a>(
        &'a self,
        providers: &'a [AuthProvider],
        request: &AuthRequest<'_>,
    ) -> (Credentials<'a>, Verified) {
        let mut credentials =
            Credentials { providers, route: Some(self), checked: Vec::with_capacity(self.providers.len()) };
        let verified = credentials.evaluate(self, request);
        (credentials, verified)
    }
}

impl<'a> Credentials<'a> {
    /// Continue after [`Verified::Waits`] with the result of that provider. The results of other providers are kept.
    pub fn resume(&mut self, index: usize, result: Verification, request: &AuthRequest<'_>) -> Verified {
        self.checked.retain(|(checked, _)| *checked != index);
        self.checked.push((index, result));
        match self.route {
            Some(route) => self.evaluate(route, request),
            None => Verified::Yes,
        }
    }

    fn evaluate(&mut self, route: &RouteAuth, request: &AuthRequest<'_>) -> Verified {
        let syntax = self.check_syntax(route, request).map_err(Stop::Failed);
        match syntax.and_then(|()| self.require(route, request)).and_then(|()| self.identify(route, request)) {
            Ok(()) => Verified::Yes,
            Err(Stop::Waits(index)) => Verified::Waits(index),
            Err(Stop::Failed(error)) => Verified::No(error),
        }
    }

    /// Reject an `Authorization` header that servers may interpret differently, if a provider of the route reads it.
    fn check_syntax(&self, route: &RouteAuth, request: &AuthRequest<'_>) -> Result<(), AuthError> {
        let Some(value) = request.headers.get(AUTHORIZATION) else { return Ok(()) };
        let reads_it = |index: &usize| match &self.providers[*index].kind {
            ProviderKind::Forward(_) | ProviderKind::ClientCert => false,
            ProviderKind::ApiKey(_) | ProviderKind::Jwt(_) | ProviderKind::Basic(_) => {
                self.providers[*index].headers().any(|header| header == AUTHORIZATION)
            }
        };
        match is_authorization(value.as_bytes()) || !route.providers.iter().any(reads_it) {
            true => Ok(()),
            false => Err(AuthError::Malformed(AUTHORIZATION)),
        }
    }

    /// Return each provider that was called, with its result, in the order of the calls.
    pub fn checked(&self) -> impl Iterator<Item = (&'a AuthProvider, &Verification)> {
        self.checked.iter().map(|(index, verification)| (&self.providers[*index], verification))
    }

    /// Return the caller of the first verified API key. With `identify`, this may be the anonymous caller.
    pub fn caller(&self) -> &Caller {
        let callers = || {
            self.checked.iter().filter_map(|(_, verification)| match verification {
                Verification::Valid(Proof::ApiKey(caller, _)) => Some(caller),
                _ => None,
            })
        };
        let known = callers().find(|caller| !matches!(caller, Caller::Anonymous));
        known.or_else(|| callers().next()).unwrap_or(&MISSING_CALLER)
    }

    /// Return the header that contains the API key of [`caller`](Self::caller).
    pub fn api_key_header(&self) -> Option<&'a HeaderName> {
        self.checked.iter().find_map(|(index, verification)| match verification {
            Verification::Valid(Proof::ApiKey(..)) => self.providers[*index].verified_headers(verification).next(),
            _ => None,
        })
    }

    /// Return the claims of the first verified token.
    pub fn claims(&self) -> Option<&Claims> {
        self.checked.iter().find_map(|(_, verification)| match verification {
            Verification::Valid(Proof::Jwt(claims)) => Some(&**claims),
            _ => None,
        })
    }

    /// Return the user name of the first verified Basic credential.
    pub fn user(&self) -> Option<&str> {
        self.checked.iter().find_map(|(_, verification)| match verification {
            Verification::Valid(Proof::Basic(user)) => Some(&**user),
            _ => None,
        })
    }

    /// Return the name of the verified client for the access log: the consumer, the user of Basic authentication, the
    /// subject of the token, or the first header of `response_headers` that the authentication server sent.
    pub fn client_name(&self) -> Option<Cow<'_, str>> {
        if let Caller::Consumer(consumer) = self.caller() {
            return Some(Cow::Borrowed(&consumer.name));
        }
        let subject = || self.claims().and_then(|claims| claims.text("sub"));
        let told = || {
            let headers = self.providers.iter().flat_map(AuthProvider::identity_headers);
            headers.filter_map(|name| self.forward_header(name)).next().map(String::from_utf8_lossy)
        };
        self.user().map(Cow::Borrowed).or_else(subject).or_else(told)
    }

    /// Return the value of a header from the first authentication server that sent exactly one value for it.
    pub fn forward_header(&self, name: &HeaderName) -> Option<&[u8]> {
        self.admissions().find_map(|admission| admission.identity(name))
    }

    /// Return the admission of the authentication server with this index.
    pub fn admission(&self, index: usize) -> Option<&Arc<Admission>> {
        self.checked.iter().find_map(|(checked, verification)| match verification {
            Verification::Valid(Proof::Forward(admission)) if *checked == index => Some(admission),
            _ => None,
        })
    }

    fn admissions(&self) -> impl Iterator<Item = &Admission> {
        self.checked.iter().filter_map(|(_, verification)| match verification {
            Verification::Valid(Proof::Forward(admission)) => Some(&**admission),
            _ => None,
        })
    }

    /// Return the variant of a limit that applies to the request. The consumer's own variant comes first, then that of
    /// the tier, then the default variant.
    pub fn variant<'v>(&'v self, limit: &'v LimitSpec, source: &TierSource) -> &'v Arc<LimitVariant> {
        let caller = self.caller();
        let tier = match source {
            TierSource::ApiKey => return caller.variant(limit),
            _ if limit.tiers.is_empty() => None,
            TierSource::Jwt(claim) => {
                self.claims().and_then(|claims| claims.text(claim)).and_then(|tier| limit.tiers.get(&*tier))
            }
            TierSource::Forward(name) => {
                let tier = self.forward_header(name).and_then(|value| str::from_utf8(value).ok());
                tier.and_then(|tier| limit.tiers.get(tier))
            }
        };
        caller.own_variant(limit).or(tier).unwrap_or(&limit.default_variant)
    }

    /// Return the API key providers of the route.
    pub(super) fn api_key_providers(&self) -> impl Iterator<Item = &'a ApiKeyProvider> {
        let indices = self.route.map_or(&[][..], |route| &route.providers);
        indices.iter().filter_map(|index| self.providers[*index].api_keys())
    }

    /// Remove the credentials that must not be forwarded: all headers from which providers of the route read
    /// credentials. Keep only verified credentials of providers with `forward_credential`.
    pub fn remove_from(&self, headers: &mut HeaderMap) {
        let Some(route) = self.route else { return };
        for index in &route.providers {
            for (place, header) in self.providers[*index].headers().enumerate() {
                if self.removes(*index, place, header, headers) && !self.is_forwarded(header) {
                    headers.remove(header);
                }
            }
        }
    }

    /// Return whether the provider with this index causes the removal of a header, unless another provider forwards the
    /// credential in it. `place` is the index of the header in [`AuthProvider::headers`].
    fn removes(&self, index: usize, place: usize, header: &HeaderName, headers: &HeaderMap) -> bool {
        let provider = &self.providers[index];
        match &provider.kind {
            ProviderKind::ClientCert => false,
            // Remove a header that an authentication server reads, too, only if its credential has the scheme that this
            // provider verifies. Otherwise, the authentication server has verified the credential.
            ProviderKind::ApiKey(_) | ProviderKind::Jwt(_) | ProviderKind::Basic(_) => {
                !self.is_admitted_by_server(header) || provider.has_credential(place, headers)
            }
            ProviderKind::Forward(_) if provider.forward_credential => {
                // With `identify`, the server may deny a request whose cookies the upstream needs.
                let is_required =
                    || self.route.is_some_and(|route| route.required.iter().flatten().any(|at| *at == index));
                let is_admitted =
                    self.checked.iter().any(|(at, verification)| *at == index && verification.is_admission());
                !is_admitted && (*header == AUTHORIZATION || is_required())
            }
            ProviderKind::Forward(_) => true,
        }
    }

    /// Return whether an authentication server that reads this header has admitted the request, and forwards the header.
    fn is_admitted_by_server(&self, header: &HeaderName) -> bool {
        self.checked.iter().any(|(index, verification)| {
            let provider = &self.providers[*index];
            verification.is_admission() && provider.forward_credential && provider.headers().any(|name| name == header)
        })
    }

    /// Set the headers from the authentication servers that admitted the request. Headers with these names that the
    /// client sent are always removed.
    pub fn set_forward_headers(&self, headers: &mut HeaderMap) {
        let Some(route) = self.route else { return };
        for index in &route.providers {
            if let ProviderKind::Forward(forward) = &self.providers[*index].kind {
                forward.settings.response_headers.iter().for_each(|name| drop(headers.remove(name)));
            }
        }
        for admission in self.admissions() {
            for name in
                admission.headers.keys().filter(|name| !headers.contains_key(*name)).cloned().collect::<Vec<_>>()
            {
                for value in admission.headers.get_all(&name) {
                    headers.append(&name, value.clone());
                }
            }
        }
    }

    /// Return whether a provider verified the credential in this header and forwards it.
    fn is_forwarded(&self, header: &HeaderName) -> bool {
        self.checked.iter().any(|(index, verification)| {
            let provider = &self.providers[*index];
            provider.forward_credential && provider.verified_headers(verification).any(|name| name == header)
        })
    }

    fn require(&mut self, route: &RouteAuth, request: &AuthRequest<'_>) -> Result<(), Stop> {
        if route.required.is_empty() {
            return Ok(());
        }
        let is_denied = |error: &AuthError| matches!(error, AuthError::Denied(_));
        let (mut foreign, mut forbidden, mut unavailable): (Option<(usize, AuthError)>, _, _) = (None, None, None);
        'alternatives: for alternative in &route.required {
            for index in alternative {
                match self.verify(*index, request) {
                    Verification::Valid(_) => {}
                    Verification::Absent => continue 'alternatives,
                    Verification::Foreign(error) => {
                        // Prefer the denial of an authentication server to the error about a credential in another
                        // format, because the denial is more informative.
                        if foreign.as_ref().is_none_or(|(_, known)| is_denied(error) && !is_denied(known)) {
                            foreign = Some((*index, error.clone()));
                        }
                        continue 'alternatives;
                    }
                    Verification::Forbidden(error) => {
                        forbidden.get_or_insert_with(|| error.clone());
                        continue 'alternatives;
                    }
                    Verification::Unavailable(error) => {
                        unavailable.get_or_insert_with(|| error.clone());
                        continue 'alternatives;
                    }
                    Verification::Invalid(error) => return Err(error.clone().into()),
                    Verification::Pending => return Err(Stop::Waits(*index)),
                }
            }
            return Ok(());
        }
        let invalid = foreign.filter(|(index, error)| is_denied(error) || !self.may_be_for_another(*index, route));
        let invalid = invalid.map(|(_, error)| error);
        let error = unavailable.or(forbidden).or(invalid);
        Err(error.unwrap_or_else(|| AuthError::Missing(route.missing.clone())).into())
    }

    /// Return whether the credential may be valid for another provider of the route that reads the same header. This is
    /// the case if the other provider has verified the credential or has not been called. `index` is the provider that
    /// returned [`Verification::Foreign`].
    fn may_be_for_another(&self, index: usize, route: &RouteAuth) -> bool {
        let shares_header = |other: usize| {
            self.providers[other].headers().any(|header| self.providers[index].headers().any(|own| own == header))
        };
        let may_be_valid = |other: usize| {
            let checked = self.checked.iter().find(|(checked, _)| *checked == other);
            checked.is_none_or(|(_, verification)| matches!(verification, Verification::Valid(_)))
        };
        route.providers.iter().any(|other| *other != index && shares_header(*other) && may_be_valid(*other))
    }

    fn identify(&mut self, route: &RouteAuth, request: &AuthRequest<'_>) -> Result<(), Stop> {
        for index in &route.identify {
            match self.verify(*index, request) {
                Verification::Valid(_) | Verification::Foreign(_) => {}
                Verification::Absent => {
                    let keys = self.providers[*index].api_keys();
                    if keys.is_some_and(|keys| keys.anonymous_if_missing) {
                        self.replace(*index, Caller::Anonymous, 0);
                    }
                }
                Verification::Invalid(AuthError::UnknownApiKey(_)) => self.unknown_key(*index, request)?,
                Verification::Invalid(error) | Verification::Forbidden(error) | Verification::Unavailable(error) => {
                    return Err(error.clone().into());
                }
                Verification::Pending => return Err(Stop::Waits(*index)),
            }
        }
        Ok(self.check_foreign(route, request)?)
    }

    /// Reject credentials that have another format than a provider in `identify` expects, unless another provider has
    /// verified them. Check tokens before API keys, because an unverified token is rejected regardless of `on_unknown`.
    fn check_foreign(&mut self, route: &RouteAuth, request: &AuthRequest<'_>) -> Result<(), AuthError> {
        let mut unknown_keys = Vec::new();
        for index in &route.identify {
            let Verification::Foreign(error) = self.verify(*index, request) else { continue };
            let error = error.clone();
            match error {
                // The authentication server denied the request. With `identify`, such a request counts as a request
                // without a credential.
                AuthError::Denied(_) => {}
                _ if self.is_verified_elsewhere(*index) => {}
                AuthError::UnknownApiKey(_) => unknown_keys.push(*index),
                error => return Err(error),
            }
        }
        unknown_keys.into_iter().try_for_each(|index| self.unknown_key(index, request))
    }

    /// Return whether another provider has verified the credential in a header that this provider reads.
    fn is_verified_elsewhere(&self, index: usize) -> bool {
        self.checked.iter().any(|(other, verification)| {
            let mut verified = self.providers[*other].verified_headers(verification);
            verified.any(|name| self.providers[index].headers().any(|own| own == name))
        })
    }

    /// Apply the provider's `on_unknown` to the unknown key of a request.
    fn unknown_key(&mut self, index: usize, request: &AuthRequest<'_>) -> Result<(), AuthError> {
        let Some(keys) = self.providers[index].api_keys() else { return Ok(()) };
        let Some(key) = keys.read(request.headers)? else { return Ok(()) };
        match keys.on_unknown {
            OnUnknownKey::Reject => return Err(AuthError::UnknownApiKey(key.source)),
            OnUnknownKey::Anonymous => self.replace(index, Caller::Anonymous, 0),
            OnUnknownKey::Accept => self.replace(index, Caller::Accepted(key.key.into()), key.places),
        }
        Ok(())
    }

    fn replace(&mut self, index: usize, caller: Caller, places: u32) {
        if let Some((_, verification)) = self.checked.iter_mut().find(|(checked, _)| *checked == index) {
            *verification = Verification::Valid(Proof::ApiKey(caller, places));
        }
    }

    /// Return the result of a provider. Call the provider only once per request.
    fn verify(&mut self, index: usize, request: &AuthRequest<'_>) -> &Verification {
        let position = self.checked.iter().position(|(checked, _)| *checked == index).unwrap_or_else(|| {
            self.checked.push((index, self.providers[index].verify(request)));
            self.checked.len() - 1
        });
        &self.checked[position].1
    }
}

/// Return whether a header value is a scheme and credentials separated by a space (RFC 9110 §11.4), or a key without a
/// scheme. Reject everything else: some servers accept other separators, or a bearer token without a scheme.
fn is_authorization(value: &[u8]) -> bool {
    let is_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    let end = value.iter().position(|byte| !is_token(byte)).unwrap_or(value.len());
    let (scheme, rest) = value.split_at(end);
    let is_known = [&b"bearer"[..], b"basic"].iter().any(|known| known.eq_ignore_ascii_case(scheme));
    let is_separated = match rest.first() {
        None => !jwt::is_jwt_shaped(value),
        Some(b' ') => !scheme.is_empty(),
        Some(_) => !is_known && !value.contains(&b' '),
    };
    is_separated && value.iter().all(|byte| matches!(byte, b' '..=b'~'))
}

impl AuthProvider {
    /// Return the settings of a provider that verifies API keys.
    pub fn api_keys(&self) -> Option<&ApiKeyProvider> {
        match &self.kind {
            ProviderKind::ApiKey(keys) => Some(keys),
            ProviderKind::Jwt(_) | ProviderKind::ClientCert | ProviderKind::Basic(_) | ProviderKind::Forward(_) => None,
        }
    }

    /// Return whether this header contains a credential with the scheme that the provider verifies. `place` is the index
    /// of the header in [`headers`](Self::headers).
    fn has_credential(&self, place: usize, headers: &HeaderMap) -> bool {
        match &self.kind {
            ProviderKind::ApiKey(keys) => keys.places[place].is_present(headers),
            ProviderKind::Jwt(_) => jwt::has_bearer_token(headers),
            ProviderKind::Basic(_) => basic::has_basic_credentials(headers),
            ProviderKind::ClientCert | ProviderKind::Forward(_) => false,
        }
    }

    /// Return the headers that contain the credential which the provider verified.
    fn verified_headers(&self, verification: &Verification) -> impl Iterator<Item = &HeaderName> + use<'_> {
        let places = match verification {
            Verification::Valid(Proof::ApiKey(_, places)) => *places,
            Verification::Valid(Proof::Jwt(_) | Proof::Basic(_)) => 1,
            _ => 0,
        };
        self.headers().enumerate().filter(move |(index, _)| places >> index & 1 == 1).map(|(_, header)| header)
    }
}
