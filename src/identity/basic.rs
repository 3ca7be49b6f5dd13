//! HTTP Basic authentication (RFC 7617): verifies user name and password against a file in the format of Apache's
//! `htpasswd`.
//!
//! By design, computing a bcrypt hash takes milliseconds of CPU time. For credentials that were verified within the
//! last minute, the gateway computes only one HMAC. For all other credentials, a blocking thread computes the hash. The
//! number of running and queued computations is bounded, and client networks take turns.

use std::collections::HashMap;
use std::hint::black_box;
use std::net::IpAddr;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{SHA256, digest};
use aws_lc_rs::hmac;
use aws_lc_rs::hmac::{HMAC_SHA256, Key};
use aws_lc_rs::rand;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use md5::{Digest, Md5};
use quick_cache::sync::Cache;
use tokio::task::spawn_blocking;

use crate::clock::monotonic;
use crate::identity::hash_queue::{HashQueue, VerificationBusy};
use crate::identity::verification::{AuthError, BasicError, Proof, Verification};

/// Time for which verified credentials are cached, so that they are not hashed again.
const VERIFIED_TTL: Duration = Duration::from_secs(60);

/// Time for which rejected credentials are cached. A client that retries with a wrong password then uses little CPU
/// time.
const REJECTED_TTL: Duration = Duration::from_secs(10);

/// Maximum number of cached credentials. It applies to verified and to rejected credentials separately. An entry uses
/// about 100 bytes.
const MAX_REMEMBERED: usize = 10_000;

/// Maximum total length of user name, colon and password in bytes. Longer credentials are rejected, because the cost of
/// an apr1 hash grows with the length of the password.
const MAX_CREDENTIALS: usize = 1024;

/// Maximum bcrypt cost. 2^16 rounds take about 4 s.
const MAX_BCRYPT_COST: u32 = 16;

/// A provider of kind `basic`.
#[derive(Debug)]
pub struct BasicProvider {
    /// The users. A reload keeps this verifier if the content of the users file is the same.
    pub verifier: Arc<BasicVerifier>,
    /// Protected area (realm) in `WWW-Authenticate`.
    pub realm: Box<str>,
}

impl BasicProvider {
    /// Verify the Basic credentials of a request from the cache, without computing a hash.
    pub(super) fn verify_request(&self, headers: &HeaderMap) -> Verification {
        match self.lookup_request(headers) {
            Ok(BasicLookup::Verified(user)) => Verification::Valid(Proof::Basic(user)),
            Ok(BasicLookup::Unverified(_)) => Verification::Pending,
            Err(verification) => verification,
        }
    }

    /// Verify the Basic credentials of a request of a client network. Compute the hash if the result is not cached. If
    /// the future is dropped, the request leaves the queue.
    pub async fn verify_with_hash(&self, headers: &HeaderMap, network: IpAddr) -> Verification {
        let user = match self.lookup_request(headers) {
            Ok(BasicLookup::Verified(user)) => Ok(Ok(user)),
            Ok(BasicLookup::Unverified(unverified)) => self.verifier.verify(unverified, network).await,
            Err(verification) => return verification,
        };
        match user {
            Ok(Ok(user)) => Verification::Valid(Proof::Basic(user)),
            Ok(Err(error)) => Verification::Invalid(error.into()),
            Err(VerificationBusy) => {
                Verification::Unavailable(AuthError::Unavailable("too many passwords are being verified at the moment"))
            }
        }
    }

    fn lookup_request(&self, headers: &HeaderMap) -> Result<BasicLookup, Verification> {
        match basic_credentials(headers) {
            Ok(Some(credentials)) => {
                self.verifier.lookup(credentials).map_err(|error| Verification::Invalid(error.into()))
            }
            Ok(None) => Err(Verification::Absent),
            Err(error) => Err(Verification::Invalid(error)),
        }
    }
}

/// The users of one file. They can be replaced while requests are being verified.
#[derive(Debug)]
pub struct BasicVerifier {
    users: ArcSwap<UserTable>,
    queue: Arc<HashQueue>,
}

/// The users of a file, and cached results of verifications against this file.
#[derive(Debug)]
struct UserTable {
    htpasswd: Htpasswd,
    /// Random key of the fingerprints. Without the key, the fingerprints in memory cannot be used to guess passwords.
    key: Key,
    verified: Cache<Fingerprint, Instant>,
    rejected: Cache<Fingerprint, Instant>,
}

/// Fingerprint: keyed hash of a user name and a password.
type Fingerprint = [u8; 32];

/// The result of a cache lookup.
#[derive(Debug)]
pub enum BasicLookup {
    /// The credentials are cached as those of this user.
    Verified(Box<str>),
    /// The result is not cached, so the password must be hashed.
    Unverified(UnverifiedUser),
}

/// Credentials whose password has not been hashed yet.
#[derive(Debug)]
pub struct UnverifiedUser {
    table: Arc<UserTable>,
    user: Box<str>,
    password: Box<[u8]>,
    fingerprint: Fingerprint,
}

impl BasicVerifier {
    /// Create a verifier for these users. It computes hashes on at most half of the processors at the same time.
    pub fn new(htpasswd: Htpasswd) -> Self {
        let processors = available_parallelism().map_or(1, usize::from);
        BasicVerifier {
            users: ArcSwap::from_pointee(UserTable::new(htpasswd)),
            queue: HashQueue::new((processors / 2).max(1)),
        }
    }

    /// Replace the users, and clear the caches of verified and rejected credentials.
    pub fn replace_users(&self, htpasswd: Htpasswd) {
        self.users.store(Arc::new(UserTable::new(htpasswd)));
    }

    /// Return whether `other` was created from the same file content.
    pub fn has_same_users(&self, other: &BasicVerifier) -> bool {
        self.users.load().htpasswd.source == other.users.load().htpasswd.source
    }

    /// Return the number of users.
    pub fn user_count(&self) -> usize {
        self.users.load().htpasswd.hashes.len()
    }

    /// Look up credentials in the caches, without computing a hash. `credentials` is the part of the header after the
    /// scheme.
    ///
    /// # Errors
    /// The credentials are malformed, the user name is not UTF-8, or the credentials were rejected within the last 10
    /// s.
    pub fn lookup(&self, credentials: &[u8]) -> Result<BasicLookup, BasicError> {
        let (pair, colon) = decode(credentials).ok_or(BasicError::Malformed)?;
        let user = &pair[..colon];
        let password = &pair[colon + 1..];
        // User names in the file are UTF-8, so a name that is not UTF-8 is unknown. The password may have any encoding.
        let user = str::from_utf8(user).map_err(|_| BasicError::Rejected)?;
        let table = self.users.load();
        // The fingerprint covers `USER:PASSWORD`. The pair is unambiguous, because a user name contains no colon.
        let fingerprint = table.fingerprint(&pair);
        if is_remembered(&table.verified, &fingerprint) {
            return Ok(BasicLookup::Verified(user.into()));
        }
        if is_remembered(&table.rejected, &fingerprint) || table.htpasswd.hashes.is_empty() {
            return Err(BasicError::Rejected);
        }
        Ok(BasicLookup::Unverified(UnverifiedUser {
            user: user.into(),
            password: password.into(),
            fingerprint,
            table: table.clone(),
        }))
    }

    /// Compute the hash of a password for a client network. Return the user name if the password is correct. If the
    /// future is dropped, the request leaves the queue.
    ///
    /// # Errors
    /// The outer error means that the queue is full, or that the request has waited in it for 5 s. The inner error
    /// means that the user is unknown or the password is wrong.
    pub async fn verify(
        &self,
        unverified: UnverifiedUser,
        network: IpAddr,
    ) -> Result<Result<Box<str>, BasicError>, VerificationBusy> {
        let UnverifiedUser { table, user, password, fingerprint } = unverified;
        let permit = self.queue.permit(network).await?;
        // Check the caches again: an earlier request in the queue may have had the same credentials.
        if is_remembered(&table.verified, &fingerprint) {
            return Ok(Ok(user));
        }
        if is_remembered(&table.rejected, &fingerprint) {
            return Ok(Err(BasicError::Rejected));
        }
        let hashing = spawn_blocking(move || {
            // The thread owns the permit. If the request is cancelled, the permit is therefore held until the hash is
            // computed.
            let _permit = permit;
            let is_valid = table.htpasswd.verify(&user, &password);
            let remembered = if is_valid { (&table.verified, VERIFIED_TTL) } else { (&table.rejected, REJECTED_TTL) };
            remembered.0.insert(fingerprint, monotonic() + remembered.1);
            if is_valid { Ok(user) } else { Err(BasicError::Rejected) }
        });
        // The task fails only if the runtime shuts down.
        hashing.await.map_err(|_| VerificationBusy)
    }
}

impl UserTable {
    fn new(htpasswd: Htpasswd) -> Self {
        let mut key = [0; 32];
        // Ignore the error: without random bytes, TLS cannot start either. If the key were zero, an attacker who reads
        // the memory could guess passwords from the fingerprints.
        let _ = rand::fill(&mut key);
        UserTable {
            htpasswd,
            key: Key::new(HMAC_SHA256, &key),
            verified: Cache::new(MAX_REMEMBERED),
            rejected: Cache::new(MAX_REMEMBERED),
        }
    }

    fn fingerprint(&self, pair: &[u8]) -> Fingerprint {
        let mut fingerprint = Fingerprint::default();
        // A SHA-256 hash has 32 bytes.
        fingerprint.copy_from_slice(hmac::sign(&self.key, pair).as_ref());
        fingerprint
    }
}

fn is_remembered(cache: &Cache<Fingerprint, Instant>, fingerprint: &Fingerprint) -> bool {
    cache.get(fingerprint).is_some_and(|expires_at| monotonic() < expires_at)
}

// === The header ===

/// Return the credentials in `Authorization: Basic`. Return `None` if the header is missing or has another scheme.
fn basic_credentials(headers: &HeaderMap) -> Result<Option<&[u8]>, AuthError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), second) = (values.next(), values.next()) else { return Ok(None) };
    if second.is_some() {
        return Err(AuthError::Ambiguous(AUTHORIZATION));
    }
    Ok(credentials_of(value.as_bytes()))
}

fn credentials_of(value: &[u8]) -> Option<&[u8]> {
    let end = value.iter().position(u8::is_ascii_whitespace).unwrap_or(value.len());
    let (scheme, credentials) = value.split_at(end);
    scheme.eq_ignore_ascii_case(b"basic").then(|| credentials.trim_ascii())
}

/// Return whether a request has Basic credentials, in any occurrence of the `Authorization` header.
pub(super) fn has_basic_credentials(headers: &HeaderMap) -> bool {
    headers.get_all(AUTHORIZATION).iter().any(|value| credentials_of(value.as_bytes()).is_some())
}

/// Return the user name in the Basic credentials of a request, without verifying the password. Return `None` if the
/// request has none.
///
/// # Errors
/// The request has several headers `Authorization`, or its credentials are malformed.
pub(super) fn claimed_user(headers: &HeaderMap) -> Result<Option<Vec<u8>>, AuthError> {
    let Some(credentials) = basic_credentials(headers)? else { return Ok(None) };
    let (mut pair, colon) = decode(credentials).ok_or(BasicError::Malformed)?;
    pair.truncate(colon);
    Ok(Some(pair))
}

/// Decode `USER:PASSWORD`. Return the bytes and the index of the first colon: a password may contain colons, but a user
/// name may not (RFC 7617 §2). Return `None` if the base64 is invalid, the colon is missing, or the text contains
/// control characters.
fn decode(credentials: &[u8]) -> Option<(Vec<u8>, usize)> {
    if credentials.len() > MAX_CREDENTIALS.div_ceil(3) * 4 {
        return None;
    }
    let pair = STANDARD.decode(credentials).ok()?;
    let colon = pair.iter().position(|byte| *byte == b':')?;
    let is_valid = pair.len() <= MAX_CREDENTIALS && !pair.iter().any(u8::is_ascii_control);
    is_valid.then_some((pair, colon))
}

// === The file ===

/// The users of an htpasswd file, and their password hashes.
#[derive(Debug)]
pub struct Htpasswd {
    /// SHA-256 hash of the file content.
    source: [u8; 32],
    /// Index into `hashes`, by user name.
    users: HashMap<Box<str>, usize>,
    hashes: Vec<PasswordHash>,
}

/// The hash of a password.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PasswordHash {
    /// `$2y$COST$SALT-AND-HASH`. The prefixes `$2a$` and `$2b$` are also accepted.
    Bcrypt(Box<str>),
    /// `$apr1$SALT$HASH`: MD5 with 1,000 rounds.
    Apr1 { salt: Box<[u8]>, digest: Box<[u8]> },
}

/// An error in an htpasswd file. It contains the line number and the user name, but never the hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {fault}")]
pub struct HtpasswdError {
    /// Line number, starting with 1.
    pub line: usize,
    fault: Fault,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("not UTF-8")]
    Encoding,
    #[error("the line has no `:` between a user and a hash")]
    NoColon,
    #[error("the user name is empty")]
    NoUser,
    #[error("the user `{0}` is already in an earlier line")]
    Duplicate(Box<str>),
    #[error("the password of `{0}` is hashed with {1}")]
    Unsupported(Box<str>, &'static str),
    #[error("the bcrypt hash of `{0}` has a cost above {MAX_BCRYPT_COST}")]
    Cost(Box<str>),
    #[error("the hash of `{0}` is incomplete")]
    Incomplete(Box<str>),
}

impl HtpasswdError {
    /// Return a hint on how the operator can correct the error. `file` is the path of the file.
    pub fn hint(&self, file: &str) -> String {
        match &self.fault {
            Fault::Encoding => "the file must be UTF-8 text".to_owned(),
            Fault::NoColon | Fault::NoUser => format!("write lines of the form USER:HASH: htpasswd -B {file} USER"),
            Fault::Duplicate(user) => format!("remove one of the lines: htpasswd -D {file} {user}"),
            Fault::Cost(user) => format!("hash the password again with a lower cost: htpasswd -B -C 10 {file} {user}"),
            Fault::Unsupported(user, _) | Fault::Incomplete(user) => {
                format!("hash the password again with bcrypt: htpasswd -B {file} {user}")
            }
        }
    }
}

impl Htpasswd {
    /// Return whether the file lists no users.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    /// Parse an htpasswd file: lines of `USER:HASH`, empty lines, and comments that start with `#`.
    ///
    /// # Errors
    /// A line is invalid, or its hash is neither bcrypt nor apr1. Parsing ends at the first error.
    pub fn parse(content: &[u8]) -> Result<Self, HtpasswdError> {
        let mut source = [0; 32];
        // A SHA-256 hash has 32 bytes.
        source.copy_from_slice(digest(&SHA256, content).as_ref());
        let mut htpasswd = Htpasswd { source, users: HashMap::new(), hashes: Vec::new() };
        for (index, line) in content.split(|byte| *byte == b'\n').enumerate() {
            let at = |fault| HtpasswdError { line: index + 1, fault };
            let line = str::from_utf8(line).map_err(|_| at(Fault::Encoding))?.trim_end();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (user, rest) = line.split_once(':').ok_or_else(|| at(Fault::NoColon))?;
            if user.is_empty() {
                return Err(at(Fault::NoUser));
            }
            // Ignore text after a second colon, as Apache does.
            let hash = rest.split(':').next().unwrap_or_default();
            let hash = PasswordHash::parse(user, hash).map_err(at)?;
            if htpasswd.users.insert(user.into(), htpasswd.hashes.len()).is_some() {
                return Err(at(Fault::Duplicate(user.into())));
            }
            htpasswd.hashes.push(hash);
        }
        Ok(htpasswd)
    }

    /// Return whether this is the user's password. The check takes the same time for unknown users: it hashes the
    /// password with the salt and cost of a known user. The same unknown name always selects the same known user.
    fn verify(&self, user: &str, password: &[u8]) -> bool {
        if let Some(index) = self.users.get(user) {
            return self.hashes[*index].verify(password);
        }
        let index = user.bytes().fold(0_usize, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
        if let Some(stand_in) = self.hashes.get(index % self.hashes.len().max(1)) {
            black_box(stand_in.verify(password));
        }
        false
    }
}

impl PasswordHash {
    fn parse(user: &str, text: &str) -> Result<Self, Fault> {
        let unsupported = |name| Err(Fault::Unsupported(user.into(), name));
        let incomplete = || Fault::Incomplete(user.into());
        if let Some(rest) = text.strip_prefix("$apr1$") {
            let (salt, digest) = rest.split_once('$').ok_or_else(incomplete)?;
            let is_whole = (1..=8).contains(&salt.len())
                && digest.len() == APR1_LENGTH
                && digest.bytes().all(|byte| CRYPT_ALPHABET.contains(&byte));
            let hash = PasswordHash::Apr1 { salt: salt.as_bytes().into(), digest: digest.as_bytes().into() };
            return is_whole.then_some(hash).ok_or_else(incomplete);
        }
        if ["$2y$", "$2b$", "$2a$"].iter().any(|prefix| text.starts_with(prefix)) {
            let parts: bcrypt::HashParts = text.parse().map_err(|_| incomplete())?;
            return match parts.get_cost() {
                4..=MAX_BCRYPT_COST => Ok(PasswordHash::Bcrypt(text.into())),
                ..4 => Err(incomplete()),
                _ => Err(Fault::Cost(user.into())),
            };
        }
        match text {
            "" => Err(incomplete()),
            _ if text.starts_with("{SHA}") => unsupported("SHA-1 (`{SHA}`), which is fast to guess"),
            _ if text.starts_with("$5$") => unsupported("SHA-256 crypt"),
            _ if text.starts_with("$6$") => unsupported("SHA-512 crypt"),
            _ if text.starts_with("$2x$") => unsupported("a faulty implementation of bcrypt (`$2x$`)"),
            // Also reject text of 13 characters: a crypt hash cannot be distinguished from a plain-text password.
            _ => unsupported("crypt, or not hashed at all"),
        }
    }

    /// Return whether this is the hash of the password. The hashes are compared in constant time.
    fn verify(&self, password: &[u8]) -> bool {
        match self {
            // bcrypt uses only the first 72 bytes of a password, as `htpasswd` does.
            PasswordHash::Bcrypt(hash) => bcrypt::verify(password, hash).unwrap_or(false),
            PasswordHash::Apr1 { salt, digest } => {
                verify_slices_are_equal(&apr1_digest(password, salt), digest).is_ok()
            }
        }
    }
}

// === apr1: the MD5-based hash of Apache's htpasswd, a variant of FreeBSD's crypt ===

/// Length of an encoded apr1 digest.
const APR1_LENGTH: usize = 22;

/// The digits of the encoding, in ascending order of their values.
const CRYPT_ALPHABET: &[u8; 64] = b"./0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Return the encoded apr1 digest of a password, as `apr_md5_encode` of the Apache Portable Runtime does.
fn apr1_digest(password: &[u8], salt: &[u8]) -> [u8; APR1_LENGTH] {
    let inner = Md5::new().chain_update(password).chain_update(salt).chain_update(password).finalize();
    let mut outer = Md5::new().chain_update(password).chain_update("$apr1$").chain_update(salt);
    for chunk in password.chunks(inner.len()) {
        outer.update(&inner[..chunk.len()]);
    }
    let mut bits = password.len();
    while bits > 0 {
        outer.update(if bits & 1 == 1 { &[0] } else { &password[..1] });
        bits >>= 1;
    }
    let mut digest = outer.finalize();
    for round in 0..1000 {
        let mut next = Md5::new();
        next.update(if round % 2 == 1 { password } else { digest.as_slice() });
        if round % 3 != 0 {
            next.update(salt);
        }
        if round % 7 != 0 {
            next.update(password);
        }
        next.update(if round % 2 == 1 { digest.as_slice() } else { password });
        digest = next.finalize();
    }
    let mut encoded = [0; APR1_LENGTH];
    let groups = [[0, 6, 12], [1, 7, 13], [2, 8, 14], [3, 9, 15], [4, 10, 5]];
    let values = groups.map(|group| group.iter().fold(0_u32, |value, index| value << 8 | u32::from(digest[*index])));
    let values = values.into_iter().chain([u32::from(digest[11])]);
    for (digits, mut value) in encoded.chunks_mut(4).zip(values) {
        for digit in digits {
            *digit = CRYPT_ALPHABET[(value % 64) as usize];
            value /= 64;
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// A file with a comment, an empty line, and a line that ends with CR LF.
    const FILE: &str = "# users\n\nalice:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/\r\n";

    fn encode(pair: &[u8]) -> Vec<u8> {
        STANDARD.encode(pair).into_bytes()
    }

    #[test]
    fn apr1_digests_are_those_of_apache() {
        // The first hash is an example in Apache's documentation of `htpasswd`. The others are output of `openssl
        // passwd -apr1`.
        for (password, salt, expected) in [
            ("myPassword", "r31.....", "HqJZimcKQFAMYayBlzkrA/"),
            ("", "abcdefgh", "L.PT565ESX4Tp2bqNs7Ie."),
            ("a longer password, more than sixteen bytes", "xY", "bhPKdkySsKN.2rCkCjxBb0"),
            ("p\u{e4}ssw\u{f6}rd:x", "12345678", "aVmKOLjP8wnxyB.zT/YNT0"),
        ] {
            let digest = apr1_digest(password.as_bytes(), salt.as_bytes());
            assert_eq!(str::from_utf8(&digest).unwrap(), expected, "{password}");
        }
    }

    #[test]
    fn faulty_lines_are_reported_without_the_hash() {
        for (line, expected) in [
            ("bob", "line 1: the line has no `:` between a user and a hash"),
            (":x", "line 1: the user name is empty"),
            ("bob:", "line 1: the hash of `bob` is incomplete"),
            ("bob:{SHA}W6ph5Mm5Pz8GgiULbPgzG37mj9g=", "line 1: the password of `bob` is hashed with SHA-1 (`{SHA}`)"),
            ("bob:secret", "line 1: the password of `bob` is hashed with crypt, or not hashed at all"),
            ("bob:rqXexS6ZhobKA", "line 1: the password of `bob` is hashed with crypt, or not hashed at all"),
            ("bob:$6$salt$hash", "line 1: the password of `bob` is hashed with SHA-512 crypt"),
            ("bob:$apr1$salt", "line 1: the hash of `bob` is incomplete"),
            ("bob:$apr1$salt$short", "line 1: the hash of `bob` is incomplete"),
            ("bob:$2y$05$short", "line 1: the hash of `bob` is incomplete"),
            (
                "bob:$2y$17$1YAV4cQ8jU2TeMYvqqe7SulqsE0lAVKqV9gG57pHwjZblwUax6Mh.",
                "line 1: the bcrypt hash of `bob` has a cost above 16",
            ),
            (
                "a:$apr1$s$0123456789012345678901\na:$apr1$s$0123456789012345678901",
                "line 2: the user `a` is already in an earlier line",
            ),
        ] {
            let error = Htpasswd::parse(line.as_bytes()).unwrap_err();
            assert!(error.to_string().starts_with(expected), "{line}: {error}");
            let said = format!("{error} {} {error:?}", error.hint("users"));
            for secret in line.split(':').skip(1).filter(|hash| hash.len() > 4) {
                assert!(!said.contains(secret), "{said}");
            }
        }
        assert_eq!(Htpasswd::parse(b"\nb\xff:x").unwrap_err().to_string(), "line 2: not UTF-8");
    }

    #[test]
    fn credentials_are_decoded_as_rfc_7617_says() {
        for (pair, user, password) in [
            (&b"alice:secret"[..], &b"alice"[..], &b"secret"[..]),
            (b"alice:a:b:", b"alice", b"a:b:"),
            (b"alice:", b"alice", b""),
            (b":secret", b"", b"secret"),
            ("jos\u{e9}:p\u{e4}ss".as_bytes(), "jos\u{e9}".as_bytes(), "p\u{e4}ss".as_bytes()),
            (b"alice:\xe9", b"alice", b"\xe9"),
        ] {
            let (decoded, colon) = decode(&encode(pair)).unwrap();
            assert_eq!((&decoded[..colon], &decoded[colon + 1..]), (user, password));
        }
        let long = encode(&[b'a'; MAX_CREDENTIALS + 1]);
        for malformed in
            [&b""[..], b"YWxpY2U=", b"YWxpY2U6cA", b"%%%%", b"YWxp Y2U6cA==", b"YTpiAA==", b"YTpiCg==", &long]
        {
            assert_eq!(decode(malformed), None, "{}", String::from_utf8_lossy(malformed));
        }
    }

    const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[tokio::test]
    async fn password_is_hashed_once_and_again_after_the_file_changes() {
        let verifier = BasicVerifier::new(Htpasswd::parse(FILE.as_bytes()).unwrap());
        let right = encode(b"alice:myPassword");
        let unverified = |verifier: &BasicVerifier, pair: &[u8]| match verifier.lookup(&encode(pair)).unwrap() {
            BasicLookup::Unverified(user) => user,
            BasicLookup::Verified(user) => panic!("{user} is verified"),
        };
        let first = unverified(&verifier, b"alice:myPassword");
        assert_eq!(verifier.verify(first, CLIENT).await, Ok(Ok("alice".into())));
        assert!(matches!(verifier.lookup(&right), Ok(BasicLookup::Verified(user)) if &*user == "alice"));
        for wrong in [&b"alice:mypassword"[..], b"alice:", b"Alice:myPassword", b"mallory:myPassword", b":myPassword"] {
            let user = unverified(&verifier, wrong);
            assert_eq!(
                verifier.verify(user, CLIENT).await,
                Ok(Err(BasicError::Rejected)),
                "{}",
                String::from_utf8_lossy(wrong)
            );
            assert_eq!(verifier.lookup(&encode(wrong)).unwrap_err(), BasicError::Rejected, "the rejection is cached");
        }
        verifier.replace_users(Htpasswd::parse(b"bob:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/").unwrap());
        let removed = unverified(&verifier, b"alice:myPassword");
        assert_eq!(verifier.verify(removed, CLIENT).await, Ok(Err(BasicError::Rejected)), "the new file has no alice");
        verifier.replace_users(Htpasswd::parse(b"").unwrap());
        assert_eq!(verifier.lookup(&right).unwrap_err(), BasicError::Rejected, "an empty file has no users");
    }
}
