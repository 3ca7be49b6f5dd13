//! Verification of JSON Web Tokens (RFC 7519), which clients send as bearer tokens (RFC 6750). The public keys come
//! from a file or a URL.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ED25519, ParsedPublicKey, RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents,
};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use jsonwebtoken::dangerous::insecure_decode_claims;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, KeyOperations, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind, crypto, decode_header};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use serde_json::{Map, Value};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::clock::{elapsed_since, monotonic};
use crate::identity::verification::{AuthError, AuthRequest, Claims, Proof, TokenError, Verification};

/// Leeway in seconds for differences between the clocks of issuer and gateway. RFC 7519 §4.1.4 allows "usually no more
/// than a few minutes". Clocks that are synchronized by NTP differ by less than a second. After a pause of a virtual
/// machine, its clock may differ by more.
const LEEWAY_S: f64 = 30.0;

/// A provider of kind `jwt`: the public keys and the required claims.
#[derive(Debug, Default)]
pub struct JwtVerifier {
    /// Public keys of the issuer. They are replaced when the JWK Set changes. `None` until the JWK Set has been
    /// fetched.
    pub keys: Arc<ArcSwapOption<KeySet>>,
    /// State of the JWK Set's refreshes. `None` if the JWK Set is a file.
    pub remote: Option<Arc<RemoteKeys>>,
    /// Required value of `iss`. `None` accepts any issuer.
    pub issuer: Option<Box<str>>,
    /// Value that `aud` must contain. `None` rejects tokens with an `aud` claim.
    pub audience: Option<Box<str>>,
    /// Claims that a token must have in addition.
    pub claims: Vec<RequiredClaim>,
}

/// A claim that tokens must have.
#[derive(Debug)]
pub struct RequiredClaim {
    /// Name of the claim.
    pub name: Arc<str>,
    /// Alternatives, at least one of which the claim must meet. To meet an alternative, the claim must have or contain
    /// all of its values.
    pub alternatives: Vec<Vec<String>>,
}

impl RequiredClaim {
    /// Return whether the claim has all values of at least one alternative.
    fn is_met_by(&self, claims: &Claims) -> bool {
        self.alternatives.iter().any(|values| values.iter().all(|value| claims.contains(&self.name, value)))
    }
}

/// Return the token in `Authorization: Bearer`. Return `None` if the header is missing or has another scheme.
fn bearer_token(headers: &HeaderMap) -> Result<Option<&[u8]>, AuthError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (Some(credentials), second) = (values.next(), values.next()) else { return Ok(None) };
    if second.is_some() {
        return Err(AuthError::Ambiguous(AUTHORIZATION));
    }
    Ok(token_of(credentials.as_bytes()))
}

fn token_of(credentials: &[u8]) -> Option<&[u8]> {
    let end = credentials.iter().position(u8::is_ascii_whitespace).unwrap_or(credentials.len());
    let (scheme, token) = credentials.split_at(end);
    scheme.eq_ignore_ascii_case(b"bearer").then(|| token.trim_ascii())
}

/// Return whether a request has a bearer token, in any occurrence of the `Authorization` header.
pub(super) fn has_bearer_token(headers: &HeaderMap) -> bool {
    headers.get_all(AUTHORIZATION).iter().any(|value| token_of(value.as_bytes()).is_some())
}

/// Return whether a credential looks like a JWT: three base64url parts, the first of which is a JSON object with `alg`
/// (RFC 7515 §3.1).
pub(super) fn is_jwt_shaped(credential: &[u8]) -> bool {
    // Split off a fourth part, if there is one: such a credential is not a JWT.
    let parts: Vec<_> = credential.splitn(4, |byte| *byte == b'.').collect();
    let is_base64url = |part: &&[u8]| part.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(byte));
    let [header, payload, _] = &parts[..] else { return false };
    if header.is_empty() || payload.is_empty() || !parts.iter().all(is_base64url) {
        return false;
    }
    let header = URL_SAFE_NO_PAD.decode(header).ok();
    let header = header.and_then(|json| serde_json::from_slice::<Map<String, Value>>(&json).ok());
    header.is_some_and(|header| header.contains_key("alg"))
}

/// jsonwebtoken returns an error for tokens that it cannot parse or decode.
impl From<jsonwebtoken::errors::Error> for TokenError {
    fn from(_: jsonwebtoken::errors::Error) -> Self {
        TokenError::Malformed
    }
}

impl JwtVerifier {
    /// Verify the bearer token of a request.
    pub(super) fn verify_request(&self, request: &AuthRequest<'_>) -> Verification {
        match (self.verify_with_current_keys(request), &self.remote) {
            (Verification::Foreign(AuthError::Token(TokenError::UnknownKey)), Some(remote)) => {
                match remote.may_refresh() {
                    true => Verification::Pending,
                    // A refresh may have ended after the keys were read, so verify the token again.
                    false => self.verify_with_current_keys(request),
                }
            }
            (verification, _) => verification,
        }
    }

    /// Wait for a refresh of the keys for at most 5 s. Then verify the bearer token of the request.
    pub async fn verify_with_new_keys(&self, request: &AuthRequest<'_>) -> Verification {
        if let Some(remote) = &self.remote {
            let refreshes = async {
                remote.refresh().await;
                // The first refresh may have started before the issuer published the key of this token. If the key is
                // still unknown, refresh again.
                if let Verification::Pending = self.verify_request(request) {
                    remote.refresh().await;
                }
            };
            let _ = timeout(REFRESH_TIMEOUT, refreshes).await;
        }
        self.verify_with_current_keys(request)
    }

    /// Verify the bearer token of a request without waiting for new keys.
    pub fn verify_with_current_keys(&self, request: &AuthRequest<'_>) -> Verification {
        let token = match bearer_token(request.headers) {
            Ok(Some(token)) => token,
            Ok(None) => return Verification::Absent,
            Err(error) => return Verification::Invalid(error),
        };
        match self.verify(token, request.now_us as f64 / 1e6) {
            Ok(claims) => match self.claims.iter().find(|required| !required.is_met_by(&claims)) {
                Some(missing) => Verification::Forbidden(AuthError::Claim(missing.name.clone())),
                None => Verification::Valid(Proof::Jwt(claims)),
            },
            Err(TokenError::NoKeys) if is_jwt_shaped(token) => {
                Verification::Unavailable(AuthError::Unavailable("the keys of the token issuer are not available yet"))
            }
            Err(TokenError::NoKeys) => Verification::Foreign(TokenError::Malformed.into()),
            Err(error) if !is_jwt_shaped(token) => Verification::Foreign(error.into()),
            // Another provider of the route may still verify the token.
            Err(error @ (TokenError::UnknownKey | TokenError::Issuer | TokenError::Audience)) => {
                Verification::Foreign(error.into())
            }
            Err(error) => Verification::Invalid(error.into()),
        }
    }

    /// Verify a token. If the cache of the current keys contains the token, its signature is not verified again, but
    /// its claims are checked.
    ///
    /// # Errors
    /// The token is invalid.
    pub fn verify(&self, token: &[u8], now_s: f64) -> Result<Arc<Claims>, TokenError> {
        let keys = self.keys.load();
        let keys = keys.as_ref().ok_or(TokenError::NoKeys)?;
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, token).as_ref());
        if let Some(known) = keys.verified.get(&hash) {
            let checked = self.check_claims(&known.claims.0, now_s);
            if checked.is_err() {
                keys.verified.remove(&hash);
            }
            return checked.map(|()| known.claims);
        }
        let claims = Arc::new(Claims(self.verify_signature(keys, token)?));
        self.check_claims(&claims.0, now_s)?;
        keys.verified.insert(hash, VerifiedToken { claims: claims.clone(), length: token.len() as u64 });
        Ok(claims)
    }

    fn verify_signature(&self, keys: &KeySet, token: &[u8]) -> Result<Map<String, Value>, TokenError> {
        let token = str::from_utf8(token).map_err(|_| TokenError::Malformed)?;
        let (message, signature) = token.rsplit_once('.').ok_or(TokenError::Malformed)?;
        let header = decode_header(token)?;
        // A recipient must understand all critical extensions (RFC 7515 §4.1.11). The gateway supports none.
        if header.crit.is_some() {
            return Err(TokenError::Malformed);
        }
        let verify = || {
            let key = keys.find(header.kid.as_deref(), header.alg).ok_or(TokenError::UnknownKey)?;
            if header.alg != key.algorithm {
                return Err(TokenError::Algorithm);
            }
            match crypto::verify(signature, message.as_bytes(), &key.decoding_key, key.algorithm)? {
                true => Ok(()),
                false => Err(TokenError::Signature),
            }
        };
        let verified = verify();
        // Different issuers may use the same `kid`. If the token names another issuer, that issuer's provider must
        // verify it.
        if verified.is_err() && self.is_for_other_issuer(token) {
            return Err(TokenError::Issuer);
        }
        verified?;
        // The signature is valid, so it is safe to decode the claims without verification. Do not use the claim
        // validation of jsonwebtoken, because it would accept an `aud` that is a number.
        Ok(insecure_decode_claims(token)?)
    }

    /// Return whether an unverified token names another issuer.
    fn is_for_other_issuer(&self, token: &str) -> bool {
        let Some(own) = &self.issuer else { return false };
        let claims = insecure_decode_claims::<Map<String, Value>>(token);
        claims.is_ok_and(|claims| matches!(claims.get("iss"), Some(Value::String(issuer)) if **issuer != **own))
    }

    fn check_claims(&self, claims: &Map<String, Value>, now_s: f64) -> Result<(), TokenError> {
        let time = |name| claims.get(name).map(|value| value.as_f64().ok_or(TokenError::Malformed)).transpose();
        let expires = time("exp")?.ok_or(TokenError::NoExpiration)?;
        if now_s >= expires + LEEWAY_S {
            return Err(TokenError::Expired);
        }
        if time("nbf")?.is_some_and(|begins| now_s < begins - LEEWAY_S) {
            return Err(TokenError::NotYetValid);
        }
        if self.issuer.as_ref().is_some_and(|own| claims.get("iss").is_none_or(|issuer| *issuer != **own)) {
            return Err(TokenError::Issuer);
        }
        // `aud` is a string or a list. Tokens for other audiences must be rejected (RFC 7519 §4.1.3).
        let for_us = match (claims.get("aud"), &self.audience) {
            (None, None) => true,
            (Some(Value::Array(list)), Some(own)) => list.iter().any(|audience| *audience == **own),
            (Some(audience), Some(own)) => *audience == **own,
            _ => false,
        };
        if for_us { Ok(()) } else { Err(TokenError::Audience) }
    }
}

// The issuer's public keys (JWK Set, RFC 7517). Each key is bound to one algorithm.

/// Allowed size of an RSA modulus in bits. RFC 7518 §3.3 requires at least 2048. With more than 8192 bits, verifying a
/// signature takes too much CPU time.
const RSA_BITS: std::ops::RangeInclusive<usize> = 2048..=8192;

/// Maximum total size in bytes of the cached tokens of a key set.
const MAX_VERIFIED_BYTES: u64 = 4 << 20;

/// Expected number of cached tokens of a key set. It determines the initial size of the cache.
const EXPECTED_VERIFIED: usize = 1024;

/// The public keys of an issuer, and a cache of verified tokens.
#[derive(Debug)]
pub struct KeySet {
    keys: Vec<Key>,
    /// Cache of tokens that these keys have verified, by SHA-256 hash of the token. A new key set starts with an empty
    /// cache.
    verified: Cache<[u8; 32], VerifiedToken, TokenLength>,
}

/// A token with a valid signature. Its claims are checked again for each request.
#[derive(Debug, Clone)]
struct VerifiedToken {
    claims: Arc<Claims>,
    /// Length of the token in bytes.
    length: u64,
}

/// Weight of a cached token: its length in bytes.
#[derive(Debug, Clone)]
struct TokenLength;

impl Weighter<[u8; 32], VerifiedToken> for TokenLength {
    fn weight(&self, _: &[u8; 32], token: &VerifiedToken) -> u64 {
        token.length
    }
}

impl Default for KeySet {
    fn default() -> Self {
        KeySet { keys: Vec::new(), verified: Cache::with_weighter(0, 0, TokenLength) }
    }
}

/// A public key and its algorithm.
#[derive(Debug)]
pub(super) struct Key {
    id: Option<Box<str>>,
    /// Algorithm for the type of the key. The `alg` header of a token does not select the algorithm. Otherwise, an
    /// attacker could sign a token with the public key as an HMAC secret.
    pub(super) algorithm: Algorithm,
    pub(super) decoding_key: DecodingKey,
}

/// An error in a JWK Set.
#[derive(Debug, thiserror::Error)]
pub enum KeySetError {
    /// The content is not a JWK Set.
    #[error("not a JSON Web Key Set: {0}")]
    Json(#[from] serde_json::Error),
    /// A key is symmetric.
    #[error("keys[{0}] is symmetric (`oct`): a key that verifies tokens could also sign them")]
    Symmetric(usize),
    /// An RSA key has an unsupported size.
    #[error("keys[{0}] has {1} bits, but an RSA key must have 2048 to 8192 bits")]
    KeySize(usize, usize),
    /// A key is malformed.
    #[error("keys[{0}] is malformed")]
    Malformed(usize),
    /// Two keys have the same `kid`.
    #[error("two keys have the `kid` \"{0}\"")]
    DuplicateKid(Box<str>),
    /// The JWK Set has no usable key.
    #[error("no key for RS256 (RSA), ES256 (EC, P-256) or EdDSA (OKP, Ed25519)")]
    Empty,
}

impl KeySet {
    /// Parse a JWK Set from a file. Ignore keys for other uses and algorithms (RFC 7517 §5).
    ///
    /// # Errors
    /// The content is not a JWK Set, a key in it is invalid, or it contains no usable key.
    pub fn parse(json: &[u8]) -> Result<Self, KeySetError> {
        let set: JwkSet = serde_json::from_slice(json)?;
        let mut keys: Vec<Key> = Vec::new();
        for (index, jwk) in set.keys.iter().enumerate() {
            let Some(key) = Key::from_jwk(index, jwk)? else { continue };
            if let Some(id) = key.id.clone().filter(|id| keys.iter().any(|other| other.id.as_ref() == Some(id))) {
                return Err(KeySetError::DuplicateKid(id));
            }
            keys.push(key);
        }
        if keys.is_empty() { Err(KeySetError::Empty) } else { Ok(KeySet::new(keys)) }
    }

    fn new(keys: Vec<Key>) -> Self {
        KeySet { keys, verified: Cache::with_weighter(EXPECTED_VERIFIED, MAX_VERIFIED_BYTES, TokenLength) }
    }

    /// Parse a JWK Set from a server. Skip unusable keys (RFC 7517 §5), because one faulty key must not prevent the
    /// rotation of the other keys. Return the usable keys, and the reasons why other keys were skipped.
    ///
    /// # Errors
    /// The content is not a JWK Set, or it contains no usable key.
    pub fn parse_fetched(json: &[u8]) -> Result<(Self, Vec<KeySetError>), KeySetError> {
        #[derive(serde::Deserialize)]
        struct Fetched {
            keys: Vec<Value>,
        }
        let set: Fetched = serde_json::from_slice(json.strip_prefix("\u{feff}".as_bytes()).unwrap_or(json))?;
        let mut keys: Vec<Key> = Vec::new();
        let mut skipped = Vec::new();
        for (index, jwk) in set.keys.into_iter().enumerate() {
            // Skip key types that jsonwebtoken does not support.
            let Ok(jwk) = serde_json::from_value::<Jwk>(jwk) else { continue };
            match Key::from_jwk(index, &jwk) {
                Ok(Some(key)) => {
                    match key.id.clone().filter(|id| keys.iter().any(|other| other.id.as_ref() == Some(id))) {
                        Some(id) => skipped.push(KeySetError::DuplicateKid(id)),
                        None => keys.push(key),
                    }
                }
                Ok(None) => {}
                Err(error) => skipped.push(error),
            }
        }
        if keys.is_empty() { Err(KeySetError::Empty) } else { Ok((KeySet::new(keys), skipped)) }
    }

    /// Return the number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Return whether the set has no keys.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Return the key with this `kid`, or the only key of the set if it has no `kid`. Without a `kid` in the token,
    /// return the key for the algorithm if there is exactly one.
    pub(super) fn find(&self, id: Option<&str>, algorithm: Algorithm) -> Option<&Key> {
        if id.is_some() {
            let only = || self.keys.first().filter(|key| self.keys.len() == 1 && key.id.is_none());
            return self.keys.iter().find(|key| key.id.as_deref() == id).or_else(only);
        }
        let mut fitting = self.keys.iter().filter(|key| key.algorithm == algorithm);
        fitting.next().filter(|_| fitting.next().is_none())
    }
}

impl Key {
    /// Convert a JWK. Return `None` if its use or algorithm is not supported.
    fn from_jwk(index: usize, jwk: &Jwk) -> Result<Option<Self>, KeySetError> {
        let algorithm = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => Algorithm::RS256,
            AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => Algorithm::ES256,
            AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => Algorithm::EdDSA,
            AlgorithmParameters::OctetKey(_) => return Err(KeySetError::Symmetric(index)),
            _ => return Ok(None),
        };
        let common = &jwk.common;
        let signs = common.public_key_use.as_ref().is_none_or(|usage| *usage == PublicKeyUse::Signature)
            && common.key_operations.as_ref().is_none_or(|operations| operations.contains(&KeyOperations::Verify))
            && common.key_algorithm.is_none_or(|named| named == KeyAlgorithm::from(algorithm));
        if !signs {
            return Ok(None);
        }
        let decoding = DecodingKey::from_jwk(jwk).map_err(|_| KeySetError::Malformed(index))?;
        let malformed = |_| KeySetError::Malformed(index);
        // jsonwebtoken would not validate a key before its first use. Validate it here, so that errors appear when the
        // configuration is loaded.
        match decoding.kind() {
            DecodingKeyKind::RsaModulusExponent { n, e } => {
                let bits = n.len() * 8 - n.first().map_or(0, |first| first.leading_zeros() as usize);
                if !RSA_BITS.contains(&bits) {
                    return Err(KeySetError::KeySize(index, bits));
                }
                RsaPublicKeyComponents { n, e }.to_parsed_public_key(&RSA_PKCS1_2048_8192_SHA256).map_err(malformed)?
            }
            DecodingKeyKind::SecretOrDer(point) if algorithm == Algorithm::ES256 => {
                ParsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, point).map_err(malformed)?
            }
            DecodingKeyKind::SecretOrDer(point) => ParsedPublicKey::new(&ED25519, point).map_err(malformed)?,
        };
        Ok(Some(Key { id: common.key_id.as_deref().map(Box::from), algorithm, decoding_key: decoding }))
    }
}

// === Remote keys: the state of a JWK Set at a URL, and when a request may trigger a refresh. The task that fetches the
// keys is in `app/maintenance.rs` ===

/// Minimum time between two refreshes that are triggered by tokens with an unknown `kid`.
const UNKNOWN_KEY_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum time that a request waits for a refresh. A single fetch has the same maximum.
pub const REFRESH_TIMEOUT: Duration = Duration::from_secs(5);

/// The keys at one URL, and the state of their refreshes. A reload keeps this state if the URL does not change.
#[derive(Debug)]
pub struct RemoteKeys {
    keys: Arc<ArcSwapOption<KeySet>>,
    state: Mutex<RefreshState>,
    /// Number of finished fetch attempts.
    finished: watch::Sender<u64>,
    /// Wakes the task that fetches the keys.
    wanted: Notify,
    /// Number of successful fetch attempts, and number of failed ones.
    counts: [AtomicU64; 2],
    /// Time of the last successful attempt in µs since the Unix epoch. 0 if there was none.
    last_success_us: AtomicU64,
}

#[derive(Debug, Default)]
struct RefreshState {
    /// Whether a fetch attempt is running or will start soon.
    is_pending: bool,
    /// Time at which a token with an unknown `kid` last triggered a refresh.
    asked_at: Option<Instant>,
}

/// A guard for a fetch attempt, or for the task that makes the attempts. When the guard is dropped, requests stop
/// waiting.
#[derive(Debug)]
pub struct RefreshAttempt<'a>(&'a RemoteKeys);

impl Default for RemoteKeys {
    fn default() -> Self {
        let (state, wanted, counts, last_success_us) = Default::default();
        RemoteKeys { keys: Arc::default(), state, finished: watch::Sender::new(0), wanted, counts, last_success_us }
    }
}

impl RemoteKeys {
    /// Return the keys, to share them with verifiers. They are `None` until the first attempt succeeds.
    pub fn keys(&self) -> &Arc<ArcSwapOption<KeySet>> {
        &self.keys
    }

    /// Return whether a request may wait for a refresh because its token has an unknown `kid`.
    pub fn may_refresh(&self) -> bool {
        self.lock().may_ask()
    }

    /// Request a refresh because of a token with an unknown `kid`. Wait until it ends, for at most 5 s. If no refresh
    /// is running and a token triggered one within the last 10 s, return immediately.
    pub async fn refresh(&self) {
        let mut finished = self.finished.subscribe();
        {
            let mut state = self.lock();
            if !state.may_ask() {
                return;
            }
            if !state.is_pending {
                *state = RefreshState { is_pending: true, asked_at: Some(monotonic()) };
                self.wanted.notify_one();
            }
        }
        // Waiting fails only if the sender is dropped, but `self` owns the sender.
        let _ = timeout(REFRESH_TIMEOUT, finished.changed()).await;
    }

    /// Wait until a request triggers a refresh.
    pub async fn wanted(&self) {
        self.wanted.notified().await;
    }

    /// Start a fetch attempt. Return its guard.
    pub fn begin(&self) -> RefreshAttempt<'_> {
        self.lock().is_pending = true;
        RefreshAttempt(self)
    }

    /// Return a guard for the task that makes the attempts. If the task ends, requests stop waiting.
    pub fn guard(&self) -> RefreshAttempt<'_> {
        RefreshAttempt(self)
    }

    /// Record a successful attempt that returned the keys that are already in use.
    pub fn record_unchanged(&self, now_us: u64) {
        self.last_success_us.store(now_us, Ordering::Relaxed);
        self.counts[0].fetch_add(1, Ordering::Relaxed);
    }

    /// Carry over the attempt counts from the same provider of the previous configuration. If both fetch their keys from
    /// the same source, also carry over the keys.
    pub fn carry_over(&self, previous: &RemoteKeys, is_same_source: bool) {
        if is_same_source {
            self.keys.store(previous.keys.load_full());
            self.last_success_us.store(previous.last_success_us(), Ordering::Relaxed);
        }
        for (count, known) in self.counts.iter().zip(previous.counts()) {
            count.store(known, Ordering::Relaxed);
        }
    }

    /// Replace the keys, and record a successful attempt.
    pub fn store(&self, keys: KeySet, now_us: u64) {
        self.keys.store(Some(Arc::new(keys)));
        self.record_unchanged(now_us);
    }

    /// Record a failed attempt. The previous keys stay in use.
    pub fn record_failure(&self) {
        self.counts[1].fetch_add(1, Ordering::Relaxed);
    }

    /// Return the number of successful attempts and the number of failed attempts.
    pub fn counts(&self) -> [u64; 2] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Return the time of the last successful attempt in µs since the Unix epoch. Return 0 if there was none.
    pub fn last_success_us(&self) -> u64 {
        self.last_success_us.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, RefreshState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RefreshState {
    fn may_ask(&self) -> bool {
        self.is_pending || self.asked_at.is_none_or(|asked_at| elapsed_since(asked_at) >= UNKNOWN_KEY_INTERVAL)
    }
}

impl Drop for RefreshAttempt<'_> {
    fn drop(&mut self) {
        self.0.lock().is_pending = false;
        self.0.finished.send_modify(|finished| *finished += 1);
    }
}

#[cfg(test)]
mod tests {
    use aws_lc_rs::signature::{Ed25519KeyPair, KeyPair};
    use serde_json::json;

    use super::*;

    /// Return a new key pair, and a key set with its public key.
    fn issuer() -> (Ed25519KeyPair, KeySet) {
        let pair = Ed25519KeyPair::generate().unwrap();
        let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": URL_SAFE_NO_PAD.encode(pair.public_key()) });
        let keys = KeySet::parse(json!({ "keys": [jwk] }).to_string().as_bytes()).unwrap();
        (pair, keys)
    }

    fn token(pair: &Ed25519KeyPair, claims: &Value) -> String {
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let message = format!("{}.{}", encode(&json!({ "alg": "EdDSA" })), encode(claims));
        let signature = URL_SAFE_NO_PAD.encode(pair.sign(message.as_bytes()));
        format!("{message}.{signature}")
    }

    #[test]
    fn verified_token_is_remembered_until_it_expires_or_the_keys_change() {
        let (pair, keys) = issuer();
        let verifier = JwtVerifier { keys: Arc::new(ArcSwapOption::from_pointee(keys)), ..JwtVerifier::default() };
        let token = token(&pair, &json!({ "sub": "alice", "exp": 1000 }));
        let verify = |now_s| verifier.verify(token.as_bytes(), now_s).map(|claims| claims.text("sub").unwrap().into());
        let remembered = || verifier.keys.load_full().unwrap().verified.len();
        assert_eq!((verify(900.0), remembered()), (Ok("alice".to_owned()), 1));
        let first = verifier.verify(token.as_bytes(), 900.0).unwrap();
        assert!(
            Arc::ptr_eq(&first, &verifier.verify(token.as_bytes(), 901.0).unwrap()),
            "the signature is verified only once"
        );
        assert_eq!((verify(1030.0), remembered()), (Err(TokenError::Expired), 0));
        assert_eq!(verify(1029.0), Ok("alice".to_owned()), "the token is valid again after the clock was set back");
        verifier.keys.store(Some(Arc::new(issuer().1)));
        assert_eq!(verify(900.0), Err(TokenError::Signature), "the new keys verify the token again");
        verifier.keys.store(Some(Arc::default()));
        assert_eq!(verify(900.0), Err(TokenError::UnknownKey));
    }

    #[tokio::test(start_paused = true)]
    async fn key_that_is_published_during_a_refresh_is_fetched_by_another_one() {
        let (pair, keys) = issuer();
        let remote = Arc::new(RemoteKeys::default());
        remote.store(KeySet::default(), 1);
        let (current, claims) = (remote.keys().clone(), json!({ "sub": "alice", "exp": 1000 }));
        let verifier = JwtVerifier { keys: current, remote: Some(remote.clone()), ..JwtVerifier::default() };
        let value = format!("Bearer {}", token(&pair, &claims)).parse().unwrap();
        let headers = HeaderMap::from_iter([(AUTHORIZATION, value)]);
        let request = AuthRequest { headers: &headers, has_client_cert: false, route: "r", now_us: 900_000_000 };
        let earlier = remote.begin();
        let fetches = async {
            tokio::task::yield_now().await;
            drop(earlier);
            remote.wanted().await;
            let attempt = remote.begin();
            remote.store(keys, 2);
            drop(attempt);
        };
        let both = async { tokio::join!(verifier.verify_with_new_keys(&request), fetches) };
        let (verification, ()) =
            timeout(2 * REFRESH_TIMEOUT, both).await.expect("a second refresh fetches the new key");
        assert!(matches!(verification, Verification::Valid(_)), "{verification:?}");
    }

    #[test]
    fn remembered_tokens_are_bounded_by_their_size() {
        let (pair, keys) = issuer();
        let verifier = JwtVerifier { keys: Arc::new(ArcSwapOption::from_pointee(keys)), ..JwtVerifier::default() };
        let padding = "x".repeat(8 << 10);
        for number in 0..1000 {
            let token = token(&pair, &json!({ "exp": 1000, "number": number, "padding": padding }));
            verifier.verify(token.as_bytes(), 0.0).unwrap();
        }
        let keys = verifier.keys.load_full().unwrap();
        assert!(keys.verified.weight() <= MAX_VERIFIED_BYTES && keys.verified.len() > 100, "{}", keys.verified.len());
    }

    #[test]
    fn only_key_without_kid_verifies_tokens_with_any_kid() {
        let (pair, _) = issuer();
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let message =
            format!("{}.{}", encode(&json!({ "alg": "EdDSA", "kid": "k1" })), encode(&json!({ "exp": 1000 })));
        let token = format!("{message}.{}", URL_SAFE_NO_PAD.encode(pair.sign(message.as_bytes())));
        let jwk = |id: Option<&str>| {
            let x = URL_SAFE_NO_PAD.encode(pair.public_key());
            json!({ "kty": "OKP", "crv": "Ed25519", "x": x, "kid": id })
        };
        let (_, other) = issuer();
        for (keys, expected) in [
            (json!([jwk(None)]), Ok(())),
            (json!([jwk(Some("k1")), jwk(None)]), Ok(())),
            (json!([jwk(Some("k2"))]), Err(TokenError::UnknownKey)),
            (json!([jwk(Some("k2")), jwk(None)]), Err(TokenError::UnknownKey)),
        ] {
            // A byte order mark precedes the key set of some servers.
            let text = format!("\u{feff}{}", json!({ "keys": keys }));
            let (keys, _) = KeySet::parse_fetched(text.as_bytes()).unwrap();
            let verifier = JwtVerifier { keys: Arc::new(ArcSwapOption::from_pointee(keys)), ..JwtVerifier::default() };
            assert_eq!(verifier.verify(token.as_bytes(), 900.0).map(drop), expected, "{text}");
        }
        let verifier = JwtVerifier { keys: Arc::new(ArcSwapOption::from_pointee(other)), ..JwtVerifier::default() };
        assert_eq!(verifier.verify(token.as_bytes(), 900.0).map(drop), Err(TokenError::Signature));
    }

    #[test]
    fn only_jwt_shaped_credentials_are_tokens() {
        let encode = |text: &str| URL_SAFE_NO_PAD.encode(text);
        let header = encode(r#"{"alg":"none"}"#);
        for (credential, expected) in [
            (format!("{header}.e30.c2ln"), true),
            (format!("{header}.e30."), true),
            (format!("{header}.e30"), false),
            (format!("{header}.e30.c2ln.x"), false),
            (format!("{header}..c2ln"), false),
            (format!("{header}.e30.c2ln="), false),
            (format!("{}.e30.c2ln", encode(r#"{"typ":"JWT"}"#)), false),
            (format!("{}.e30.c2ln", encode("[1]")), false),
            ("a.b.c".to_owned(), false),
            ("sg_live_0123456789".to_owned(), false),
            (".".repeat(1000), false),
            (String::new(), false),
        ] {
            assert_eq!(is_jwt_shaped(credential.as_bytes()), expected, "{credential}");
        }
    }

    #[test]
    fn claim_contains_a_value_as_item_or_word() {
        for (claim, value, expected) in [
            (json!("write"), "write", true),
            (json!("read write"), "write", true),
            (json!("read write"), "read write", true),
            (json!("read writes"), "write", false),
            (json!(["read", "write"]), "write", true),
            (json!(["read write"]), "write", false),
            (json!(["7"]), "7", true),
            (json!([7]), "7", false),
            (json!(7), "7", true),
            (json!(true), "true", true),
            (json!(null), "null", false),
            (json!({ "write": true }), "write", false),
        ] {
            let claims = Claims(Map::from_iter([("scope".to_owned(), claim.clone())]));
            assert_eq!(claims.contains("scope", value), expected, "{claim} contains {value}");
            assert!(!claims.contains("other", value));
        }
    }

    #[test]
    fn expiration_and_not_before_allow_the_leeway() {
        let verifier = JwtVerifier::default();
        for (claims, now_s, expected) in [
            (json!({ "exp": 1000 }), 1029.9, Ok(())),
            (json!({ "exp": 1000 }), 1030.0, Err(TokenError::Expired)),
            (json!({ "exp": 1000.5 }), 1030.0, Ok(())),
            (json!({ "exp": 1000, "nbf": 900 }), 870.0, Ok(())),
            (json!({ "exp": 1000, "nbf": 900 }), 869.9, Err(TokenError::NotYetValid)),
            (json!({ "exp": 1000, "nbf": null }), 900.0, Err(TokenError::Malformed)),
            (json!({ "exp": null }), 900.0, Err(TokenError::Malformed)),
            (json!({}), 900.0, Err(TokenError::NoExpiration)),
        ] {
            assert_eq!(verifier.check_claims(claims.as_object().unwrap(), now_s), expected, "{claims} at {now_s}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn unknown_keys_cause_one_refresh_in_ten_seconds() {
        let remote = RemoteKeys::default();
        let started_at = monotonic();
        let fetch = async {
            remote.wanted().await;
            let attempt = remote.begin();
            tokio::time::sleep(Duration::from_secs(2)).await;
            drop(attempt);
        };
        tokio::join!(fetch, remote.refresh(), remote.refresh());
        assert_eq!(elapsed_since(started_at), Duration::from_secs(2), "both waited for the same attempt");
        assert!(!remote.may_refresh());
        remote.refresh().await;
        assert_eq!(elapsed_since(started_at), Duration::from_secs(2), "the third request does not wait");
        tokio::time::advance(Duration::from_secs(8)).await;
        assert!(remote.may_refresh(), "a token may trigger a refresh 10 s after the previous one");
        remote.refresh().await;
        assert_eq!(elapsed_since(started_at), Duration::from_secs(15), "without a fetch task, the wait ends after 5 s");
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_attempt_ends_the_wait() {
        let remote = RemoteKeys::default();
        let started_at = monotonic();
        let attempt = remote.begin();
        let end = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            drop(attempt);
        };
        tokio::join!(end, remote.refresh());
        assert_eq!(elapsed_since(started_at), Duration::from_secs(1));
        assert!(remote.may_refresh(), "no token has triggered a refresh");
    }
}
