//! Access tokens of service accounts of Google Cloud: fetched at the start, and again before they expire. If a fetch
//! fails, the previous token stays in use until it expires.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, DATE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, Request};
use jiff::fmt::rfc2822::DateTimeParser;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::app::maintenance::with_jitter;
use crate::clock::{monotonic, unix_us};
use crate::http::google_account::TokenError;
use crate::upstream::cluster::UpstreamCluster;
use crate::upstream::fetch;
use crate::upstream::fetch::FetchError;
use crate::upstream::settings::GoogleAccess;

/// Maximum time of a token request.
const FETCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum length of a response in bytes.
const MAX_RESPONSE: usize = 64 << 10;

/// Time before its expiry at which a token is replaced, at most half of its lifetime.
const REFRESH_BEFORE: Duration = Duration::from_secs(300);

/// Delay after the first failure. It doubles with each further failure.
const FIRST_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(30);

/// Smallest difference to the clock of the token endpoint that is corrected, in s.
const MIN_SKEW_S: i64 = 10;

/// The reason why no token was fetched.
#[derive(Debug, thiserror::Error)]
pub enum AccessTokenError {
    /// The token endpoint sent no response.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The request and its response took longer than the timeout.
    #[error("no complete response within {} s", FETCH_TIMEOUT.as_secs())]
    Timeout,
    /// The key of the account cannot sign the assertion.
    #[error("the key cannot sign")]
    Sign,
    /// The response contains no token.
    #[error(transparent)]
    Token(#[from] TokenError),
}

impl AccessTokenError {
    /// Return a hint on how the operator can correct the error.
    pub fn hint(&self) -> &'static str {
        match self {
            AccessTokenError::Fetch(FetchError::Tls(_)) => {
                "check the certificate of the token endpoint, and the CA certificates of the system"
            }
            AccessTokenError::Fetch(_) | AccessTokenError::Timeout => {
                "check `token_uri` in the key file, and whether a firewall lets the gateway connect to it"
            }
            AccessTokenError::Token(TokenError::Rejected { status: 400..500, .. }) | AccessTokenError::Sign => {
                "check that the service account is enabled and still has this key, and the `scope`, or create another \
                 JSON key"
            }
            AccessTokenError::Token(TokenError::Rejected { .. }) => "the token endpoint has a fault: try again later",
            AccessTokenError::Token(TokenError::NoToken) => "check `token_uri` in the key file",
        }
    }
}

/// An access token that was fetched.
#[derive(Debug)]
pub struct FetchedToken {
    /// Time for which the token is valid.
    pub lifetime: Duration,
    /// How many seconds the clock of the token endpoint is ahead, if the endpoint has rejected the time of the gateway.
    pub skew_s: i64,
}

/// Keep the access token of an upstream valid, until the future is dropped. `first` is dropped when the first attempt
/// ends, or immediately if there is a token.
pub(super) async fn refresh(cluster: Arc<UpstreamCluster>, first: Sender<Infallible>) {
    let Some(access) = &cluster.settings.google else { return };
    let upstream = &*cluster.settings.name;
    let account = access.account.email();
    let mut first = access.account.authorization(monotonic()).is_none().then_some(first);
    let mut failures = 0;
    loop {
        let delay = match fetch_token(access).await {
            Ok(FetchedToken { lifetime, .. }) => {
                failures = 0;
                info!(upstream, account, lifetime_s = lifetime.as_secs(), "access token fetched");
                lifetime.saturating_sub(REFRESH_BEFORE.min(lifetime / 2))
            }
            Err(error) => {
                let delay = (FIRST_RETRY_DELAY * 2_u32.pow(failures)).min(MAX_RETRY_DELAY);
                failures = (failures + 1).min(10);
                match access.account.authorization(monotonic()) {
                    Some(_) => {
                        warn!(upstream, account, %error, "cannot fetch an access token: the last one stays in use")
                    }
                    None => warn!(upstream, account, %error, "cannot fetch an access token: requests get 503"),
                }
                with_jitter(delay)
            }
        };
        drop(first.take());
        sleep(delay.max(FIRST_RETRY_DELAY)).await;
    }
}

/// Fetch a token, and store it in the account. If the endpoint rejects the assertion and its clock differs from the clock
/// of the gateway, repeat the request with the time of the endpoint.
///
/// # Errors
/// See [`AccessTokenError`].
pub async fn fetch_token(access: &GoogleAccess) -> Result<FetchedToken, AccessTokenError> {
    let mut skew_s = 0;
    loop {
        let now_s = (unix_us() / 1_000_000) as i64;
        let body = access.account.token_request(now_s + skew_s).map_err(|_| AccessTokenError::Sign)?;
        let mut request = Request::new(Bytes::from(body));
        *request.method_mut() = Method::POST;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded"));
        headers.insert(USER_AGENT, HeaderValue::from_static("sluicegate"));
        let requested_at = monotonic();
        let exchange = fetch::send(&access.account.token_url, request, access.tls.as_ref(), MAX_RESPONSE);
        let response = timeout(FETCH_TIMEOUT, exchange).await.map_err(|_| AccessTokenError::Timeout)??;
        let accepted = access.account.accept_token(response.status().as_u16(), response.body(), requested_at);
        match (accepted, skew_of(response.headers(), now_s)) {
            (Err(TokenError::Rejected { status: 400, .. }), Some(skew)) if skew_s == 0 && skew.abs() >= MIN_SKEW_S => {
                warn!(skew_s = skew, "the clock of the gateway differs from that of the token endpoint");
                skew_s = skew;
            }
            (result, _) => return Ok(FetchedToken { lifetime: result?, skew_s }),
        }
    }
}

/// Return how many seconds the clock of a server is ahead, by the `Date` of its response.
fn skew_of(headers: &HeaderMap, now_s: i64) -> Option<i64> {
    let date = DateTimeParser::new().parse_timestamp(headers.get(DATE)?.to_str().ok()?).ok()?;
    Some(date.as_second() - now_s)
}
