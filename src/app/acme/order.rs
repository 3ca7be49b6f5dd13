//! An ACME order, from the account to the certificate (RFC 8555 §7.1.6). Interrupted orders are resumed.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{HeaderValue, RETRY_AFTER, USER_AGENT};
use http::{Request, Response};
use http_body_util::BodyExt;
use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, BodyWrapper, BytesResponse, CertificateIdentifier,
    ChallengeStatus, ChallengeType, Error, ExternalAccountKey, HttpClient, Identifier, NewAccount, NewOrder, Order,
    OrderStatus, RenewalInfo,
};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use rustls::pki_types::ServerName;
use serde::{Deserialize, Serialize};
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::app::acme::storage::{
    ACCOUNT, PendingOrder, Storage, StorageError, StoredChallenge, certificate_record, challenge_record, order_record,
};
use crate::clock::monotonic;
use crate::http::url::HttpUrl;
use crate::snapshot::listeners::AcmeSettings;
use crate::tls::{Certificate, Challenge, ChallengeKind, ManagedCertificates, TlsError, TrustRoots};
use crate::upstream::connector::{EndpointTls, Protocol, UpstreamTlsConfig};
use crate::upstream::fetch;

/// Maximum number of times that a request is repeated because the CA rejects its nonce (RFC 8555 §6.5). Each time,
/// instant-acme itself sends the request up to three times.
const MAX_NONCE_RETRIES: u32 = 10;

/// Maximum time in which the CA must validate a name and issue the certificate.
const ORDER_TIMEOUT: Duration = Duration::from_secs(300);

/// Initial and maximum interval between two polls of an order. The interval doubles after each poll.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(5));

/// The reason why a certificate was not obtained.
#[derive(Debug, thiserror::Error)]
pub(super) enum OrderError {
    /// The CA rejected a request, or could not be reached.
    #[error("{step}: {error}")]
    Ca {
        /// The request to the CA that failed.
        step: &'static str,
        /// The error from the CA or the connection.
        error: Error,
    },
    /// The CA could not validate that the gateway controls the name.
    #[error("the CA could not validate the name: {0}")]
    Invalid(String),
    /// The CA offers none of the configured challenge types.
    #[error("the CA offers none of `acme.challenges`: it offers {0}")]
    NoChallenge(String),
    /// The CA did not complete the order within [`ORDER_TIMEOUT`].
    #[error("the CA did not complete the order within {ORDER_TIMEOUT:?}; the gateway resumes the order later")]
    Timeout,
    /// The suggested renewal window is invalid (RFC 9773 §4.2).
    #[error("the CA suggests a renewal window that ends before it starts")]
    Window,
    /// A record of the order cannot be stored.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The issued certificate cannot be used, or the gateway cannot respond to the challenge.
    #[error("{0}")]
    Certificate(#[from] TlsError),
    /// A private key or a certificate request cannot be generated.
    #[error("cannot generate a certificate request: {0}")]
    Request(#[from] rcgen::Error),
}

impl OrderError {
    /// Return whether the CA rejected a request or the order. Only such failures count towards the rate limits of the
    /// CA.
    pub(super) fn is_rejection(&self) -> bool {
        match self {
            OrderError::Ca { error: Error::Api(_), .. } => !self.is_problem("serverInternal"),
            error => matches!(error, OrderError::Invalid(_)),
        }
    }

    /// Return whether the order cannot be resumed, because the CA rejected it. A CA that fails or limits the rate of
    /// requests keeps the order.
    fn ends_order(&self) -> bool {
        self.is_rejection() && !self.is_problem("rateLimited")
    }

    fn is_problem(&self, kind: &str) -> bool {
        matches!(self, OrderError::Ca { error, .. } if has_problem_type(error, kind))
    }
}

/// Adds the name of the failed request to an error of the CA.
trait AtStep<T> {
    fn at(self, step: &'static str) -> Result<T, OrderError>;
}

impl<T> AtStep<T> for Result<T, Error> {
    fn at(self, step: &'static str) -> Result<T, OrderError> {
        self.map_err(|error| OrderError::Ca { step, error })
    }
}

/// Repeat a request while the CA rejects its nonce. A request with a rejected nonce has no effect.
async fn with_nonces<T>(mut request: impl AsyncFnMut() -> Result<T, Error>) -> Result<T, Error> {
    for _ in 0..MAX_NONCE_RETRIES {
        match request().await {
            Err(error) if has_problem_type(&error, "badNonce") => {}
            result => return result,
        }
    }
    request().await
}

/// Return whether the error has this problem type (RFC 8555 §6.7).
fn has_problem_type(error: &Error, kind: &str) -> bool {
    let Error::Api(problem) = error else { return false };
    problem.r#type.as_deref().and_then(|text| text.strip_prefix("urn:ietf:params:acme:error:")) == Some(kind)
}

/// The stored form of the account at the CA.
#[derive(Serialize, Deserialize)]
struct AccountRecord {
    credentials: AccountCredentials,
    email: Option<Box<str>>,
}

/// Load the account. If there is none, create it.
///
/// # Errors
/// The CA rejects the account or cannot be reached, or the account cannot be stored.
pub(super) async fn account(
    settings: &AcmeSettings,
    client: &CaClient,
    storage: &mut Storage,
) -> Result<Account, OrderError> {
    let contact = settings.email.as_ref().map(|email| format!("mailto:{email}"));
    let contact: Vec<&str> = contact.iter().map(String::as_str).collect();
    let builder = || Account::builder_with_http(Box::new(client.clone()));
    if let Some(AccountRecord { credentials, email }) = storage.get_json(ACCOUNT) {
        let account = builder().from_credentials(credentials).await.at("cannot read the ACME directory")?;
        if email != settings.email {
            let updated = with_nonces(async || account.update_contacts(&contact).await).await;
            forget_unknown_account(&updated, storage).await?;
            updated.at("cannot change the email address of the ACME account")?;
            // Load the credentials again, because their type does not implement `Clone`.
            if let Some(AccountRecord { credentials, .. }) = storage.get_json(ACCOUNT) {
                storage.put_json(ACCOUNT, &AccountRecord { credentials, email: settings.email.clone() }).await?;
            }
        }
        return Ok(account);
    }
    let external = settings.external_account.as_ref();
    let external = external.map(|account| ExternalAccountKey::new(account.key_id.clone(), &account.mac_key));
    let new = NewAccount { contact: &contact, terms_of_service_agreed: true, only_return_existing: false };
    let directory = settings.directory.to_string();
    let created = with_nonces(async || builder().create(&new, directory.clone(), external.as_ref()).await).await;
    let (account, credentials) = created.at("cannot create an ACME account")?;
    storage.put_json(ACCOUNT, &AccountRecord { credentials, email: settings.email.clone() }).await?;
    info!(ca = %settings.directory, account = account.id(), "ACME account created");
    Ok(account)
}

/// Remove the account from the storage if the CA does not know it.
async fn forget_unknown_account<T>(result: &Result<T, Error>, storage: &mut Storage) -> Result<(), StorageError> {
    match result {
        Err(error) if has_problem_type(error, "accountDoesNotExist") => storage.remove(ACCOUNT).await,
        _ => Ok(()),
    }
}

/// Renewal information of a certificate, as the CA suggests it (RFC 9773).
pub(super) struct SuggestedRenewal {
    /// Start and end of the renewal window, in seconds since the Unix epoch.
    pub(super) window: (u64, u64),
    /// URL of a page that explains the window.
    pub(super) explanation_url: Option<String>,
    /// Time until the renewal information must be read again.
    pub(super) retry_after: Duration,
}

/// Read the renewal information of a certificate.
///
/// # Errors
/// The CA provides no renewal information, cannot be reached, or sends an invalid window.
pub(super) async fn suggested_renewal(
    account: &Account,
    certificate: &Certificate,
) -> Result<SuggestedRenewal, OrderError> {
    let step = "cannot read the renewal information";
    let id = certificate.certified_key.cert.first().and_then(|leaf| CertificateIdentifier::try_from(leaf).ok());
    let id = id
        .ok_or(Error::Unsupported("renewal information (ARI) for a certificate that has no authority key identifier"))
        .at(step)?;
    let (RenewalInfo { suggested_window, explanation_url }, retry_after) = account.renewal_info(&id).await.at(step)?;
    if suggested_window.end <= suggested_window.start {
        return Err(OrderError::Window);
    }
    let [start, end] = [suggested_window.start, suggested_window.end].map(|time| time.unix_timestamp().max(0) as u64);
    Ok(SuggestedRenewal { window: (start, end), explanation_url, retry_after })
}

/// The state that an order needs.
pub(super) struct OrderContext<'a> {
    pub(super) account: &'a Account,
    pub(super) storage: &'a mut Storage,
    pub(super) certificates: &'a ManagedCertificates,
    /// Challenge types in order of preference.
    pub(super) challenges: &'a [ChallengeKind],
}

impl OrderContext<'_> {
    /// Obtain and store a certificate for `name`. The new certificate replaces `previous`.
    ///
    /// # Errors
    /// See [`OrderError`].
    pub(super) async fn obtain(mut self, name: &str, previous: Option<&Certificate>) -> Result<(), OrderError> {
        let result = self.run(name, previous).await;
        let mut outdated = vec![challenge_record(name)];
        // An order that the CA has completed or rejected cannot be resumed, so remove its record.
        if result.is_ok() || result.as_ref().is_err_and(OrderError::ends_order) {
            outdated.push(order_record(name));
        }
        if result.as_ref().is_err_and(|error| error.is_problem("accountDoesNotExist")) {
            outdated.push(ACCOUNT.to_owned());
        }
        for record in outdated {
            if let Err(error) = self.storage.remove(&record).await {
                debug!(name, record, %error, "cannot remove a stored record of an ACME order");
            }
        }
        publish_challenges(self.storage, self.certificates);
        result
    }

    async fn run(&mut self, name: &str, previous: Option<&Certificate>) -> Result<(), OrderError> {
        let (mut order, key) = match self.resume(name).await? {
            Some(resumed) => resumed,
            None => self.place(name, previous).await?,
        };
        let deadline = monotonic() + ORDER_TIMEOUT;
        let mut interval = POLL_INTERVALS.0;
        let mut is_authorizing = false;
        let mut is_finalized = false;
        let chain = loop {
            match order.state().status {
                OrderStatus::Pending if !is_authorizing => {
                    self.authorize(name, &mut order).await?;
                    is_authorizing = true;
                }
                OrderStatus::Ready if !is_finalized => {
                    let mut params = CertificateParams::new([name.to_owned()])?;
                    params.distinguished_name = DistinguishedName::new();
                    let request = params.serialize_request(&key)?;
                    let finalized = with_nonces(async || order.finalize_csr(request.der()).await).await;
                    finalized.at("cannot finalize the ACME order")?;
                    is_finalized = true;
                    continue;
                }
                OrderStatus::Pending | OrderStatus::Ready | OrderStatus::Processing => {}
                OrderStatus::Valid => {
                    let chain = with_nonces(async || order.certificate().await).await;
                    if let Some(chain) = chain.at("cannot download the certificate")? {
                        break chain;
                    }
                }
                OrderStatus::Invalid => return Err(OrderError::Invalid(invalid_reason(&mut order).await)),
            }
            if monotonic() >= deadline {
                return Err(OrderError::Timeout);
            }
            sleep(interval).await;
            interval = (interval * 2).min(POLL_INTERVALS.1);
            with_nonces(async || order.refresh().await.map(drop)).await.at("cannot read the ACME order")?;
        };
        // Check the certificate first: a certificate that cannot be served must not be stored.
        let key = key.serialize_pem();
        Certificate::from_pem(chain.as_bytes(), key.as_bytes())?;
        match self.storage.put(&certificate_record(name), format!("{key}{chain}").into_bytes()).await {
            // If Redis is unavailable, the order is still successful: the storage writes the certificate to Redis
            // later.
            Err(StorageError::Store(error)) => {
                warn!(name, %error, "cannot store the new certificate in Redis yet: until it is stored, only this \
                                     gateway serves it");
                Ok(())
            }
            result => Ok(result?),
        }
    }

    /// Return the interrupted order for a name. Return `None` if there is none, or if the CA does not know it.
    async fn resume(&mut self, name: &str) -> Result<Option<(Order, KeyPair)>, OrderError> {
        let Some(PendingOrder { url, key }) = self.storage.get_json(&order_record(name)) else { return Ok(None) };
        let Ok(key) = KeyPair::from_pem(&key) else { return Ok(None) };
        match with_nonces(async || self.account.order(url.clone()).await).await {
            Ok(mut order) => match order.state().status {
                OrderStatus::Invalid => Ok(None),
                _ => {
                    info!(name, "resuming an interrupted ACME order");
                    Ok(Some((order, key)))
                }
            },
            // The CA does not know the order: it has expired, or it belongs to another account.
            Err(Error::Api(_)) => Ok(None),
            Err(error) => Err(OrderError::Ca { step: "cannot read the ACME order", error }),
        }
    }

    async fn place(&mut self, name: &str, previous: Option<&Certificate>) -> Result<(Order, KeyPair), OrderError> {
        let identifiers = [Identifier::Dns(name.to_owned())];
        let replaced = previous.and_then(|previous| previous.certified_key.cert.first());
        let replaced = replaced.and_then(|leaf| CertificateIdentifier::try_from(leaf).ok());
        let key = KeyPair::generate()?;
        let place = async |replaced: Option<&CertificateIdentifier<'_>>| {
            with_nonces(async || {
                let mut new = NewOrder::new(&identifiers);
                if let Some(replaced) = replaced {
                    new = new.replaces(replaced.clone());
                }
                self.account.new_order(&new).await
            })
            .await
        };
        let order = match place(replaced.as_ref()).await {
            // The CA provides no renewal information (RFC 9773), or the certificate was already replaced.
            Err(Error::Unsupported(_)) if replaced.is_some() => place(None).await,
            Err(error) if replaced.is_some() && has_problem_type(&error, "alreadyReplaced") => place(None).await,
            result => result,
        };
        let order = order.at("cannot create an ACME order")?;
        let pending = PendingOrder { url: order.url().to_owned(), key: key.serialize_pem() };
        self.storage.put_json(&order_record(name), &pending).await?;
        Ok((order, key))
    }

    /// Publish the challenges of the pending authorizations, and request their validation.
    async fn authorize(&mut self, name: &str, order: &mut Order) -> Result<(), OrderError> {
        fetch_authorizations(order).await.at("cannot read the authorizations of the ACME order")?;
        let mut chosen = None;
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization = authorization.at("cannot read the authorizations of the ACME order")?;
            if authorization.status != AuthorizationStatus::Pending {
                continue;
            }
            let offered: Vec<_> = authorization.challenges.iter().map(|challenge| challenge.r#type.clone()).collect();
            let kind = self.challenges.iter().find(|kind| offered.contains(&challenge_type(**kind)));
            let Some(kind) = kind else { return Err(OrderError::NoChallenge(format!("{offered:?}"))) };
            let Some(challenge) = authorization.challenge(challenge_type(*kind)) else { continue };
            let key_authorization = challenge.key_authorization().as_str().to_owned();
            // Do not request the validation of a challenge to which this gateway cannot respond.
            Challenge::new(*kind, name, &challenge.token, &key_authorization)?;
            let stored =
                StoredChallenge { kind: kind.name().to_owned(), token: challenge.token.clone(), key_authorization };
            self.storage.put_json(&challenge_record(name), &stored).await?;
            chosen = Some(*kind);
        }
        let Some(kind) = chosen else { return Ok(()) };
        publish_challenges(self.storage, self.certificates);
        self.storage.settle().await;
        let ready = with_nonces(async || {
            let mut authorizations = order.authorizations();
            while let Some(authorization) = authorizations.next().await {
                let mut authorization = authorization?;
                if authorization.status == AuthorizationStatus::Pending
                    && let Some(mut challenge) = authorization.challenge(challenge_type(kind))
                    && challenge.status == ChallengeStatus::Pending
                {
                    challenge.set_ready().await?;
                }
            }
            Ok(())
        });
        ready.await.at("cannot request the validation of the challenges")
    }
}

/// Fetch the authorizations of an order. They are stored in `order`.
async fn fetch_authorizations(order: &mut Order) -> Result<(), Error> {
    with_nonces(async || {
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            authorization?;
        }
        Ok(())
    })
    .await
}

/// Return the reason why the CA rejected an order.
async fn invalid_reason(order: &mut Order) -> String {
    let mut reasons: Vec<_> = order.state().error.iter().map(ToString::to_string).collect();
    if fetch_authorizations(order).await.is_ok() {
        let mut authorizations = order.authorizations();
        while let Some(Ok(authorization)) = authorizations.next().await {
            let failed = authorization.challenges.iter().filter_map(|challenge| challenge.error.as_ref());
            reasons.extend(failed.map(ToString::to_string));
        }
    }
    reasons.dedup();
    if reasons.is_empty() { "it gives no reason".to_owned() } else { reasons.join("; ") }
}

fn challenge_type(kind: ChallengeKind) -> ChallengeType {
    match kind {
        ChallengeKind::Http01 => ChallengeType::Http01,
        ChallengeKind::TlsAlpn01 => ChallengeType::TlsAlpn01,
    }
}

/// Respond to the stored challenges.
pub(super) fn publish_challenges(storage: &Storage, certificates: &ManagedCertificates) {
    let challenges = storage.challenges().filter_map(|(name, stored)| {
        let kind =
            [ChallengeKind::Http01, ChallengeKind::TlsAlpn01].into_iter().find(|kind| kind.name() == stored.kind);
        let challenge = Challenge::new(kind?, name, &stored.token, &stored.key_authorization);
        challenge.inspect_err(|error| warn!(name, %error, "cannot respond to an ACME challenge")).ok()
    });
    certificates.set_challenges(challenges.collect());
}

// === The HTTP client for the CA ===

/// An error of the connection, of HTTP or of a URL.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Maximum time for a request, including the time to connect.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum size of a response in bytes. The largest responses are certificate chains.
const MAX_RESPONSE_BYTES: usize = 1 << 20;

/// Value of the `User-Agent` header, which RFC 8555 §6.1 requires.
const USER_AGENT_VALUE: &str = concat!("sluicegate/", env!("CARGO_PKG_VERSION"), " instant-acme");

/// HTTPS client for the CA. Clones share TLS sessions.
#[derive(Debug, Clone)]
pub(super) struct CaClient {
    tls: Arc<UpstreamTlsConfig>,
    /// Value of `Retry-After` in the last error response that contained this header.
    retry_after: Arc<Mutex<Option<Duration>>>,
}

impl CaClient {
    /// Create a client that trusts these root certificates.
    ///
    /// # Errors
    /// rustls rejects the TLS settings.
    pub(super) fn new(trust_roots: TrustRoots) -> Result<Self, TlsError> {
        let tls = Arc::new(UpstreamTlsConfig::new(trust_roots, None, Protocol::Http1)?);
        Ok(CaClient { tls, retry_after: Arc::default() })
    }

    /// Return the delay that the CA requested in its last error response, and forget it.
    pub(super) fn take_retry_after(&self) -> Option<Duration> {
        self.retry_after.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    async fn send(self, request: Request<BodyWrapper<Bytes>>) -> Result<Response<Bytes>, BoxError> {
        let (mut parts, body) = request.into_parts();
        // The URLs come from responses of the CA, so check each URL.
        let url: HttpUrl = parts.uri.to_string().parse()?;
        if !url.is_https() {
            return Err(format!("the CA sent the URL {url}, which does not begin with https").into());
        }
        let server_name = ServerName::try_from(url.host().to_owned())?;
        parts.headers.insert(USER_AGENT, HeaderValue::from_static(USER_AGENT_VALUE));
        let body = body.collect().await?.to_bytes();
        let tls = EndpointTls { tls: self.tls.clone(), server_name };
        let response = fetch::send(&url, Request::from_parts(parts, body), Some(&tls), MAX_RESPONSE_BYTES).await?;
        if response.status().is_client_error() || response.status().is_server_error() {
            let seconds = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            *self.retry_after.lock().unwrap_or_else(PoisonError::into_inner) = seconds.map(Duration::from_secs);
        }
        Ok(response)
    }
}

impl HttpClient for CaClient {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let host = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        let sending = timeout(REQUEST_TIMEOUT, self.clone().send(request));
        Box::pin(async move {
            let result =
                sending.await.unwrap_or_else(|_| Err(format!("no response within {REQUEST_TIMEOUT:?}").into()));
            match result {
                Ok(response) => Ok(BytesResponse::from(response.map(http_body_util::Full::new))),
                Err(error) => Err(Error::Other(format!("request to the CA at {host}: {error}").into())),
            }
        })
    }
}
