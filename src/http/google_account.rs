//! Service accounts of Google Cloud: the key file, the signed assertion (RFC 7523 §2.1), and the current access token.
//!
//! Shapes: <https://developers.google.com/identity/protocols/oauth2/service-account>.

use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::error::Unspecified;
use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::rsa::KeyPair;
use aws_lc_rs::signature::RSA_PKCS1_SHA256;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, HeaderValue};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use serde_json::json;

use crate::http::url::HttpUrl;

/// Scope of the tokens for all APIs of Google Cloud. The roles of the account restrict what the tokens permit.
pub const CLOUD_PLATFORM: &str = "https://www.googleapis.com/auth/cloud-platform";

/// Headers by which a client would send another key, or choose the project that pays.
const CLIENT_HEADERS: [HeaderName; 2] =
    [HeaderName::from_static("x-goog-api-key"), HeaderName::from_static("x-goog-user-project")];

/// Time for which an assertion is valid. Google permits at most one hour.
const ASSERTION_LIFETIME_S: i64 = 3600;

/// Maximum lifetime of a token that the gateway assumes. Google's tokens last for at most 12 hours.
const MAX_LIFETIME: Duration = Duration::from_secs(12 * 3600);

/// A service account, with its current access token.
#[derive(Debug)]
pub struct ServiceAccount {
    email: Box<str>,
    key_id: Option<Box<str>>,
    key: KeyPair,
    /// URL of the token endpoint.
    pub token_url: HttpUrl,
    scope: Box<str>,
    /// SHA-256 hash of the key file.
    digest: [u8; 32],
    token: ArcSwapOption<AccessToken>,
}

/// Two accounts are equal if they get the same tokens.
impl PartialEq for ServiceAccount {
    fn eq(&self, other: &Self) -> bool {
        (self.digest, &self.scope) == (other.digest, &other.scope)
    }
}

#[derive(Debug)]
struct AccessToken {
    /// The value of `Authorization`.
    value: HeaderValue,
    expires_at: Instant,
}

/// The reason why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// The file is not a JSON object with texts.
    #[error("the file is not JSON in the format of a service account key (line {0})")]
    Json(usize),
    /// The file has credentials of another type.
    #[error("`type` is not `service_account`")]
    Type,
    /// A value is missing.
    #[error("`{0}` is missing")]
    Missing(&'static str),
    /// The private key cannot be used.
    #[error("`private_key` is not an RSA key in PEM (BEGIN PRIVATE KEY)")]
    Key,
    /// Tokens would be requested without TLS.
    #[error("`token_uri` is not an https URL")]
    TokenUri,
}

/// The reason why a response of the token endpoint contains no token.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The endpoint reports an error.
    #[error("the token endpoint responded with {status}: {error}")]
    Rejected {
        /// Status of the response.
        status: u16,
        /// The error code and its description.
        error: String,
    },
    /// The response has no token.
    #[error("the response of the token endpoint has no `access_token` of the type Bearer")]
    NoToken,
}

/// Maximum length of an error of the token endpoint in a message, in characters.
const MAX_ERROR: usize = 300;

impl ServiceAccount {
    /// Parse a key file, which Google calls a JSON key.
    ///
    /// # Errors
    /// See [`KeyFileError`].
    pub fn parse(file: &[u8], scope: &str) -> Result<Self, KeyFileError> {
        #[derive(Deserialize)]
        struct KeyFile {
            #[serde(rename = "type")]
            kind: Option<String>,
            client_email: Option<String>,
            private_key: Option<String>,
            private_key_id: Option<String>,
            token_uri: Option<String>,
        }
        // Do not print the error of serde_json, because it may contain a part of the key.
        let file_of: KeyFile = serde_json::from_slice(file).map_err(|error| KeyFileError::Json(error.line()))?;
        if file_of.kind.as_deref() != Some("service_account") {
            return Err(KeyFileError::Type);
        }
        let email = file_of.client_email.ok_or(KeyFileError::Missing("client_email"))?;
        let private_key = file_of.private_key.ok_or(KeyFileError::Missing("private_key"))?;
        let token_uri = file_of.token_uri.ok_or(KeyFileError::Missing("token_uri"))?;
        let der = PrivatePkcs8KeyDer::from_pem_slice(private_key.as_bytes()).map_err(|_| KeyFileError::Key)?;
        let key = KeyPair::from_pkcs8(der.secret_pkcs8_der()).map_err(|_| KeyFileError::Key)?;
        let token_url: HttpUrl = token_uri.parse().map_err(|_| KeyFileError::TokenUri)?;
        if !token_url.is_https() && !token_url.is_loopback() {
            return Err(KeyFileError::TokenUri);
        }
        let mut hash = [0; 32];
        // A SHA-256 hash has 32 bytes.
        hash.copy_from_slice(digest(&SHA256, file).as_ref());
        Ok(ServiceAccount {
            email: email.into(),
            key_id: file_of.private_key_id.map(Box::from),
            key,
            token_url,
            scope: scope.into(),
            digest: hash,
            token: ArcSwapOption::empty(),
        })
    }

    /// Return the email address, which is the name of the account.
    pub fn email(&self) -> &str {
        &self.email
    }

    /// Return the body of a token request at this time, s since the Unix epoch by the clock of the token endpoint.
    ///
    /// # Errors
    /// The key cannot sign.
    pub fn token_request(&self, now_s: i64) -> Result<String, Unspecified> {
        let mut header = json!({ "alg": "RS256", "typ": "JWT" });
        if let Some(id) = &self.key_id {
            header["kid"] = (**id).into();
        }
        let claims = json!({
            "iss": self.email,
            "scope": self.scope,
            "aud": self.token_url.to_string(),
            "iat": now_s,
            "exp": now_s + ASSERTION_LIFETIME_S,
        });
        let encode = |part: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(part);
        let signed = format!("{}.{}", encode(header.to_string().as_bytes()), encode(claims.to_string().as_bytes()));
        let mut signature = vec![0; self.key.public_modulus_len()];
        self.key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature)?;
        let signature = encode(&signature);
        Ok(format!("grant_type=urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer&assertion={signed}.{signature}"))
    }

    /// Store the token in a response of the token endpoint. `requested_at` is the time of the request. Return the
    /// lifetime of the token.
    ///
    /// # Errors
    /// The response contains no token.
    pub fn accept_token(&self, status: u16, body: &[u8], requested_at: Instant) -> Result<Duration, TokenError> {
        #[derive(Default, Deserialize)]
        #[serde(default)]
        struct TokenResponse {
            access_token: Option<String>,
            expires_in: Option<u64>,
            token_type: Option<String>,
            error: Option<String>,
            error_description: Option<String>,
        }
        let response: TokenResponse = serde_json::from_slice(body).unwrap_or_default();
        if status != 200 {
            let parts = [response.error, response.error_description].into_iter().flatten();
            let text = parts.collect::<Vec<_>>().join(": ");
            let error = text.chars().filter(|c| !c.is_control()).take(MAX_ERROR).collect();
            return Err(TokenError::Rejected { status, error });
        }
        let is_bearer = response.token_type.is_none_or(|kind| kind.eq_ignore_ascii_case("bearer"));
        let token = response.access_token.filter(|token| is_bearer && !token.is_empty()).ok_or(TokenError::NoToken)?;
        let mut value = HeaderValue::from_str(&format!("Bearer {token}")).map_err(|_| TokenError::NoToken)?;
        value.set_sensitive(true);
        let lifetime = response.expires_in.map_or(Duration::from_secs(3600), Duration::from_secs).min(MAX_LIFETIME);
        self.token.store(Some(AccessToken { value, expires_at: requested_at + lifetime }.into()));
        Ok(lifetime)
    }

    /// Use the token of an equal account until the next one is fetched.
    pub fn carry_over(&self, known: &ServiceAccount) {
        self.token.store(known.token.load_full());
    }

    /// Return the value of `Authorization`. Return `None` if there is no token that is valid at this time.
    pub fn authorization(&self, now: Instant) -> Option<HeaderValue> {
        let token = self.token.load();
        token.as_ref().filter(|token| now < token.expires_at).map(|token| token.value.clone())
    }
}

/// Set the token of the gateway in a request, in place of the credentials of the client.
pub fn authorize(headers: &mut HeaderMap, authorization: HeaderValue) {
    for name in &CLIENT_HEADERS {
        headers.remove(name);
    }
    headers.insert(AUTHORIZATION, authorization);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_key_file_names_what_is_wrong_and_no_secret() {
        for (file, expected) in [
            ("", "not JSON in the format of a service account key (line 1)"),
            (r#"{"type":"service_account","private_key":1}"#, "not JSON in the format"),
            (r#"{"type":"authorized_user","refresh_token":"s3cret"}"#, "`type` is not `service_account`"),
            (r#"{"type":"service_account"}"#, "`client_email` is missing"),
            (r#"{"type":"service_account","client_email":"a@b"}"#, "`private_key` is missing"),
            (r#"{"type":"service_account","client_email":"a@b","private_key":"s3cret"}"#, "`token_uri` is missing"),
            (
                r#"{"type":"service_account","client_email":"a@b","private_key":"s3cret","token_uri":"https://a/t"}"#,
                "`private_key` is not an RSA key",
            ),
        ] {
            let error = ServiceAccount::parse(file.as_bytes(), CLOUD_PLATFORM).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("s3cret"), "{file}: {error}");
        }
    }
}
